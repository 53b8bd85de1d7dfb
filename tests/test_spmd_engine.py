import os
import shutil

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from recipe_ckpt.engines.base import Engine, SnapshotEngine
from recipe_ckpt.engines.spmd import SpmdEngine, distribute, join_ranks
from recipe_ckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DamagedCheckpointError,
    SaveFailedError,
    StateMismatchError,
)
from recipe_ckpt.manifest import FileTable
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.tensors.reader import read_index
from tests.toy_models import Toy, build_toy, find_differences, read_state, train


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build_engine(seed=0, *, wrap=lambda model: model, optimizer=torch.optim.AdamW, lr_at=None, **options):
    model = wrap(build_toy(seed))
    return SpmdEngine(model, optimizer(trainable(model), **({"lr": 0.05} | options)), lr_at=lr_at)


def save_trained(directory, **options):
    engine = build_engine(**options)
    train(engine, 1, 3)
    engine.save_checkpoint(str(directory))
    return engine


def read_entries(directory):
    table = FileTable.decode((directory / "files.json").read_bytes(), "files.json")
    return {entry.path: entry for entry in table.entries}


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD without state": (torch.optim.SGD, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adamax": (torch.optim.Adamax, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, name):
    kind, options = OPTIMIZERS[name]
    engine = save_trained(tmp_path, optimizer=kind, **options)
    at_save = read_state(engine)
    losses = train(engine, 4, 6)
    resumed = build_engine(1, optimizer=kind, **options)
    resumed.load_checkpoint(str(tmp_path))
    assert find_differences(read_state(resumed), at_save) == []
    assert train(resumed, 4, 6) == losses
    assert find_differences(read_state(resumed), read_state(engine)) == []


class Averager(torch.optim.Optimizer):
    """Keeps Python numbers, None, nested containers and one tensor under two keys."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["decay"] = state.get("decay", 1.0) * 0.7
            state["bound"] = float("inf")
            state["last"] = None
            state["history"] = [*state.get("history", []), parameter.grad.clone()][-2:]
            state["by.name"] = {"flag": True, 3: (1, "x", parameter.grad.double())}
            state["mean"] = state["same"] = state.get("mean", torch.zeros_like(parameter))
            state["mean"].lerp_(parameter.grad, 0.1)
            parameter.sub_(state["mean"], alpha=self.param_groups[0]["lr"])


def test_python_values_and_nested_tensors_of_a_custom_optimizer_come_back(tmp_path):
    engine = save_trained(tmp_path, optimizer=Averager)
    resumed = build_engine(1, optimizer=Averager)
    resumed.load_checkpoint(str(tmp_path))
    state, original = (e.optimizer.state[e.model.head.weight] for e in (resumed, engine))
    assert repr(state) == repr(original)
    assert state["mean"] is state["same"]
    assert train(resumed, 4, 5) == train(engine, 4, 5)


@pytest.mark.case("C905")
def test_names_are_equal_with_compile_on_then_off_then_on(tmp_path):
    def compiled(model):
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        return torch.compile(model, backend="eager")

    names, state = [], {}
    for generation, wrap in enumerate((compiled, lambda model: model, compiled)):
        engine = build_engine(generation, wrap=wrap)
        if generation:
            engine.load_checkpoint(str(tmp_path / str(generation - 1)))
            assert find_differences(read_state(engine), state) == []
        train(engine, 1, 2)
        state = read_state(engine)
        directory = tmp_path / str(generation)
        engine.save_checkpoint(str(directory))
        parts = read_index(str(directory), read_entries(directory)).parts
        names.append([(sorted(part.tensors), sorted(part.aliases)) for part in parts.values()])
    assert names[0] == names[1] == names[2]
    assert names[0][0][0][0] == "blocks.0.down.bias"
    torch.compiler.reset()


def test_activation_checkpointing_is_no_part_of_a_name(tmp_path):
    def wrap(model):
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        return model

    engine = save_trained(tmp_path, wrap=wrap)
    plain = build_engine(1)
    plain.load_checkpoint(str(tmp_path))
    assert find_differences(read_state(plain), read_state(engine)) == []


@pytest.mark.case("C906")
def test_tied_weights_stay_one_tensor_over_two_resumes(tmp_path):
    twin = save_trained(tmp_path / "0")
    for generation in range(2):
        engine = build_engine(generation + 1)
        engine.load_checkpoint(str(tmp_path / str(generation)))
        assert engine.model.head.weight is engine.model.embed.weight
        assert train(engine, 4 + generation, 4 + generation) == train(twin, 4 + generation, 4 + generation)
        engine.save_checkpoint(str(tmp_path / str(generation + 1)))
    assert find_differences(read_state(engine), read_state(twin)) == []


class HighPrecisionAdam(torch.optim.Optimizer):
    """fp32 moments of bf16 parameters, as mixed-precision recipes keep them."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state.setdefault("exp_avg", torch.zeros_like(parameter, dtype=torch.float32)).lerp_(
                    parameter.grad.float(), 0.1
                )
                state.setdefault("master", parameter.float()).sub_(state["exp_avg"], alpha=self.param_groups[0]["lr"])
                parameter.copy_(state["master"])


@pytest.mark.case("C907")
def test_fp32_state_of_bf16_parameters_stays_fp32(tmp_path):
    engine = save_trained(tmp_path, wrap=lambda model: model.bfloat16(), optimizer=HighPrecisionAdam)
    resumed = build_engine(1, wrap=lambda model: model.bfloat16(), optimizer=HighPrecisionAdam)
    resumed.load_checkpoint(str(tmp_path))
    weight = resumed.model.head.weight
    assert (weight.dtype, resumed.optimizer.state[weight]["master"].dtype) == (torch.bfloat16, torch.float32)
    assert find_differences(read_state(resumed), read_state(engine)) == []


def test_weights_file_loads_into_the_bare_model_with_the_library(tmp_path):
    engine = save_trained(tmp_path)
    model = Toy()
    safetensors.torch.load_model(model, tmp_path / "model-0.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in engine.model.state_dict().items())
    assert "blocks.0.up.weight.exp_avg" in safetensors.torch.load_file(tmp_path / "optimizer-0.safetensors")


def test_non_persistent_buffers_are_not_saved(tmp_path):
    save_trained(tmp_path)
    names = read_index(str(tmp_path), read_entries(tmp_path)).parts["model"].tensors
    assert "cache" not in names
    assert {"seen", "table", "frozen", "unused"} <= set(names)


def test_state_of_frozen_and_unused_parameters_stays_absent(tmp_path):
    model = build_toy(0)
    engine = SpmdEngine(model, torch.optim.AdamW(model.parameters()))
    train(engine, 1, 2)
    engine.save_checkpoint(str(tmp_path))
    other = build_toy(1)
    resumed = SpmdEngine(other, torch.optim.AdamW(other.parameters()))
    resumed.load_checkpoint(str(tmp_path))
    assert other.frozen not in resumed.optimizer.state
    assert other.unused not in resumed.optimizer.state
    assert other.head.weight in resumed.optimizer.state


def test_saving_a_fresh_optimizer_invents_no_state_and_loading_it_clears_what_is_there(tmp_path):
    fresh = build_engine()
    fresh.save_checkpoint(str(tmp_path))
    assert len(fresh.optimizer.state) == 0
    assert not (tmp_path / "optimizer-0.safetensors").exists()
    trained = build_engine(1)
    train(trained, 1, 1)
    trained.load_checkpoint(str(tmp_path))
    assert len(trained.optimizer.state) == 0
    assert train(trained, 1, 3) == train(fresh, 1, 3)


def test_hyperparameters_come_from_the_run_and_not_from_the_checkpoint(tmp_path):
    save_trained(tmp_path, lr=0.05, weight_decay=0.3)
    resumed = build_engine(1, lr=0.01, weight_decay=0.1)
    resumed.load_checkpoint(str(tmp_path))
    assert (resumed.optimizer.param_groups[0]["lr"], resumed.optimizer.param_groups[0]["weight_decay"]) == (0.01, 0.1)
    groups = read_index(str(tmp_path), read_entries(tmp_path)).parts["optimizer"].leaves["param_groups"]
    assert (groups[0]["lr"], groups[0]["weight_decay"], groups[0]["params"][0]) == (0.05, 0.3, "unused")


def test_step_sets_the_rate_of_its_number_and_keeps_the_ratios_of_groups():
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": torch.tensor(0.3)}]
    engine = SpmdEngine(model, torch.optim.SGD(groups), lr_at=lambda step: 1.0 / step)
    for step in (1, 4):
        assert engine.step_optimizer(step).lr == 1.0 / step
    assert float(engine.optimizer.param_groups[1]["lr"]) == pytest.approx(0.75)


def test_step_clips_reports_the_norm_before_and_drops_the_gradients():
    model = nn.Linear(1, 1, bias=False)
    engine = SpmdEngine(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()
    model.weight.grad = torch.tensor([[4.0]])
    report = engine.step_optimizer(1, clip_grad=0.5)
    assert (report.lr, report.grad_norm, model.weight.grad) == (1.0, 4.0, None)
    assert model.weight.item() == pytest.approx(before - 0.5, abs=1e-6)
    assert engine.step_optimizer(2).grad_norm is None


def test_engine_is_what_the_port_asks_for():
    engine = build_engine()
    assert isinstance(engine, Engine)
    assert isinstance(engine, SnapshotEngine)
    assert (engine.is_mp_src_rank_with_outputs(), engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (
        True,
        0,
        1,
    )


def test_optimizer_of_other_parameters_is_refused_when_the_engine_is_made():
    optimizer = torch.optim.AdamW(build_toy(0).parameters())
    with pytest.raises(StateMismatchError, match=r"13 of its 13 parameters are not the model's, the first of shape \(4,\)"):
        SpmdEngine(build_toy(0), optimizer)


@pytest.mark.case("C904")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda model: model.register_parameter("extra", nn.Parameter(torch.zeros(1))),
            "model: .* 1 missing in the checkpoint: 'extra'",
        ),
        (lambda model: model.register_parameter("unused", None), "model: .* 1 not in this run: 'unused'"),
        (
            lambda model: setattr(model, "unused", nn.Parameter(torch.zeros(6, 3))),
            r"'unused' \(checkpoint \[6, 2\], run \[6, 3\]\)",
        ),
        (lambda model: model.blocks.half(), "10 of another dtype: 'blocks.0.scale' .checkpoint F32, run F16"),
        (lambda model: model.frozen.requires_grad_(True), "optimizer: .* 1 parameters missing in the checkpoint: 'frozen'"),
        (lambda model: model.unused.requires_grad_(False), "optimizer: .* 1 parameters not in this run: 'unused'"),
        (
            lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(11, 4))),
            "2 tied differently: 'embed.weight', 'head.weight'",
        ),
    ],
)
def test_changed_model_is_an_error_and_nothing_is_touched(tmp_path, change, problem):
    save_trained(tmp_path)

    def wrap(model):
        change(model)
        return model

    engine = build_engine(1, wrap=wrap)
    before = read_state(engine)
    with pytest.raises(StateMismatchError, match=problem):
        engine.load_checkpoint(str(tmp_path))
    assert find_differences(read_state(engine), before) == []


def test_another_optimizer_is_an_error_that_says_both(tmp_path):
    save_trained(tmp_path)
    engine = build_engine(optimizer=torch.optim.SGD)
    with pytest.raises(StateMismatchError, match=r"1 other optimizer: checkpoint 'AdamW', run 'SGD'.*leave 'optimizer' out"):
        engine.load_checkpoint(str(tmp_path))


def test_model_alone_can_be_restored(tmp_path):
    saved = save_trained(tmp_path)
    engine = build_engine(1, optimizer=torch.optim.SGD)
    engine.restore(str(tmp_path), read_entries(tmp_path), ["model"])
    assert torch.equal(engine.model.blocks[0].up.weight, saved.model.blocks[0].up.weight)


def test_part_that_was_not_saved_is_an_error(tmp_path):
    engine = build_engine()
    snapshot = engine.snapshot(["model"])
    written = snapshot.write(str(tmp_path), LocalStorage())
    entries = [*written.entries, *snapshot.finish(str(tmp_path), LocalStorage(), [written.fragment])]
    with pytest.raises(StateMismatchError, match=r"it has no 'optimizer', only \['model'\]"):
        engine.restore(str(tmp_path), {entry.path: entry for entry in entries}, ["model", "optimizer"])


def test_extra_state_of_a_module_is_refused_and_not_lost():
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1}

    model = nn.Sequential(Stateful(1, 1))
    engine = SpmdEngine(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(SaveFailedError, match=r"module '0' \(Stateful\) has get_extra_state\(\), which is not stored"):
        engine.snapshot(["model"])


def test_optimizer_state_under_other_keys_is_refused():
    engine = build_engine()
    engine.optimizer.state["global"] = {"step": 1}
    with pytest.raises(SaveFailedError, match="state of 1 keys that are none of its parameters, the first a str"):
        engine.snapshot(["optimizer"])


@pytest.mark.parametrize("option", [{"hdfs_path": "hdfs://nn/x"}, {"max_ckpt_to_keep": 2}])
def test_engine_alone_refuses_what_only_the_handler_does(tmp_path, option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))}: found .*; allowed: None"):
        build_engine().save_checkpoint(str(tmp_path), **option)
    assert os.listdir(tmp_path) == []


def test_directory_without_a_file_table_is_not_found(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"files.json: not found"):
        build_engine().load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["index.json", "model-0.safetensors", "optimizer-0.safetensors"])
def test_one_flipped_bit_in_any_file_is_found(tmp_path, name):
    save_trained(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    data = bytearray((tmp_path / "bad" / name).read_bytes())
    data[len(data) // 2] ^= 16
    (tmp_path / "bad" / name).write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=rf"bad/{name}: block 0"):
        build_engine().load_checkpoint(str(tmp_path / "bad"))


def test_without_ranks_in_the_environment_nothing_is_joined_or_wrapped():
    assert "RANK" not in os.environ
    model = nn.Linear(1, 1)
    with join_ranks("cpu"):
        assert not torch.distributed.is_initialized()
        assert distribute(model, strategy="fsdp2", device="cpu") is model
