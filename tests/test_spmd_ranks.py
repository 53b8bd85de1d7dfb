"""Real gloo ranks: each test starts its processes once and checks several things in them."""

import os

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from recipe_ckpt.engines.spmd import SpmdEngine, distribute, join_ranks
from recipe_ckpt.engines.spmd_names import name_tensors
from recipe_ckpt.errors import DamagedCheckpointError, RankError, SaveFailedError, StateMismatchError
from recipe_ckpt.manifest import FileTable
from recipe_ckpt.tensors.plan import PartState, find_local_boxes, plan_write
from recipe_ckpt.tensors.reader import read_index
from tests.ranks import run_ranks
from tests.test_spmd_engine import HighPrecisionAdam
from tests.toy_models import build_toy, find_differences, read_state, train


def build_engine(seed, strategy="fsdp2", *, wrap=lambda model: model, optimizer=torch.optim.AdamW):
    model = wrap(build_toy(seed))
    if strategy == "ddp":  # by hand, for the toy has an unused parameter
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        model = distribute(model, strategy=strategy, device="cpu")
    return SpmdEngine(model, optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05))


def save_trained(directory, strategy):
    engine = build_engine(0, strategy)
    train(engine, 1, 3)
    engine.save_checkpoint(directory)
    return read_state(engine)


def pass_on(source, target, strategy):
    """Resume in another model than the saved one, return its state, and save it again."""
    engine = build_engine(1, strategy)
    engine.load_checkpoint(source)
    engine.save_checkpoint(target)
    return read_state(engine)


def test_reshards_between_topologies_and_strategies_keep_every_bit(tmp_path):
    (original,) = run_ranks(1, save_trained, str(tmp_path / "0"), "fsdp2")
    worlds = [(2, "fsdp2"), (4, "fsdp2"), (2, "fsdp2"), (2, "ddp"), (3, "fsdp2"), (1, "ddp"), (2, "ddp"), (1, "fsdp2")]
    for number, (world_size, strategy) in enumerate(worlds):
        states = run_ranks(world_size, pass_on, str(tmp_path / f"{number}"), str(tmp_path / f"{number + 1}"), strategy)
        assert [find_differences(state, original) for state in states] == [[]] * world_size
    assert (tmp_path / "8" / "model-0.safetensors").read_bytes() == (tmp_path / "0" / "model-0.safetensors").read_bytes()


def resume_twice(directory, strategy):
    """Compare an uninterrupted run with one that is resumed after steps 3 and 5, once from an evaluation."""
    twin = build_engine(0, strategy)
    expected = train(twin, 1, 7)
    losses = []
    for number, (first, last) in enumerate([(1, 3), (4, 5), (6, 7)]):
        engine = build_engine(number, strategy)
        if number:
            engine.load_checkpoint(f"{directory}/{number - 1}")
            engine.model.eval()
            with torch.no_grad():
                engine.model(torch.zeros(1, 2, dtype=torch.long))  # leaves FSDP2's root whole
            engine.load_checkpoint(f"{directory}/{number - 1}")
            tensors = name_tensors(engine.model)
            assert tensors["head.weight"] is tensors["embed.weight"]
        losses += train(engine, first, last)
        if strategy == "fsdp2":
            with torch.no_grad():
                engine.model(torch.zeros(1, 2, dtype=torch.long))
            engine.model.seen -= 1
        engine.save_checkpoint(f"{directory}/{number}")
    assert losses == expected
    assert find_differences(read_state(engine), read_state(twin)) == []


@pytest.mark.case("C906")
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_two_resumes_on_two_ranks_equal_the_uninterrupted_run(tmp_path, strategy):
    run_ranks(2, resume_twice, str(tmp_path), strategy)


def check_shards(directory):
    engine = build_engine(0, wrap=lambda model: model.bfloat16(), optimizer=HighPrecisionAdam)
    train(engine, 1, 2)
    scale, up = engine.model.blocks[0].scale, engine.model.blocks[0].up.weight
    engine.save_checkpoint(directory)
    before = read_state(engine)
    other = build_engine(1, wrap=lambda model: model.bfloat16(), optimizer=HighPrecisionAdam)
    other.load_checkpoint(directory)
    assert find_differences(read_state(other), before) == []
    state = other.optimizer.state[other.model.blocks[0].up.weight]
    assert (type(state["master"]), state["master"].dtype, state["master"].placements) == (DTensor, torch.float32, (Shard(0),))
    return [len(tensor.to_local()) for tensor in (scale, up)]


@pytest.mark.case("C907")
def test_uneven_and_empty_shards_of_bf16_parameters_with_fp32_state_come_back(tmp_path):
    assert run_ranks(4, check_shards, str(tmp_path)) == [[1, 2], [1, 2], [1, 1], [0, 0]]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def build_mesh_engine(seed, layout):
    torch.manual_seed(seed)
    model = Mlp()
    if layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    if layout == "fsdp over tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    engine = SpmdEngine(model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False))
    return engine


def change_layout(directory):
    """Train under each layout, save, and resume under every other one."""
    for source in ("plain", "hsdp", "fsdp over tp"):
        engine = build_mesh_engine(0, source)
        for step in range(1, 3):
            engine.model(torch.ones(4, 6)).square().sum().backward()
            engine.step_optimizer(step)
        engine.save_checkpoint(f"{directory}/{source}")
        expected = read_state(engine)
        for target in ("plain", "hsdp", "fsdp over tp"):
            other = build_mesh_engine(1, target)
            other.load_checkpoint(f"{directory}/{source}")
            assert find_differences(read_state(other), expected) == [], (source, target)
            other.model(torch.ones(4, 6)).square().sum().backward()
            other.step_optimizer(3)
    return [str(local.box) for local in find_local_boxes(other.model.up.weight)]


def test_two_dimensional_meshes_reshard_into_each_other(tmp_path):
    boxes = run_ranks(4, change_layout, str(tmp_path))
    assert boxes[0] == ["0:3,0:6"]
    for layout in ("plain", "hsdp", "fsdp over tp"):
        table = FileTable.decode((tmp_path / layout / "files.json").read_bytes(), "files.json")
        sizes = [entry.size_bytes for entry in table.entries if entry.path.endswith(".safetensors")]
        assert sum(sizes) < len(sizes) * 4096 + 4 * 3 * 136 + 4 * 4 + 1


def check_placements():
    """Strided shards are several boxes; of replicas one writes; partial sums and foreign local state are refused."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(40.0).reshape(10, 4)
    replicated = distribute_tensor(whole, mesh, [Replicate(), Replicate()])
    mixed = distribute_tensor(whole, mesh, [Replicate(), Shard(1)])
    plans = plan_write("model", PartState({"replicated": replicated, "mixed": mixed}), distributed.get_rank(), 4)
    partial = DTensor.from_local(whole, mesh, [Replicate(), Partial()], run_check=False)
    with pytest.raises(SaveFailedError, match=r"tensor 'sum' has the placements .*Partial.*a partial sum"):
        plan_write("model", PartState({"sum": partial}), 0, 4)
    return [(chunk.name, str(chunk.box)) for chunk in plans.chunks]


def refuse_local_state():
    engine = build_engine(0)
    parameter = engine.model.embed.weight
    engine.optimizer.state[parameter] = {"mine": torch.zeros_like(parameter.to_local())}
    with pytest.raises(SaveFailedError, match=r"'embed.weight.mine' has shape \[\d, 4\] and its sharded parameter \[11, 4\]"):
        engine.snapshot(["optimizer"])
    engine.optimizer.state[parameter] = {"mine": distribute_tensor(torch.zeros(4), parameter.device_mesh, [Shard(0)])}
    with pytest.raises(SaveFailedError, match=r"'embed.weight.mine' has shape \[4\]"):
        engine.snapshot(["optimizer"])


def fail_on_one_rank(directory):
    """A rank that can't save ends the save of all with its name; the next save works."""
    engine = build_engine(0, "ddp")
    buffer = torch.zeros(1, dtype=torch.complex128 if distributed.get_rank() == 1 else torch.complex64)
    engine.model.module.register_buffer("spectrum", buffer)
    error, text = (
        (SaveFailedError, "'spectrum' has the dtype") if distributed.get_rank() == 1 else (RankError, "rank 1 failed")
    )
    with pytest.raises(error, match=text):
        engine.save_checkpoint(f"{directory}/bad")
    engine.model.module.spectrum = torch.zeros(1)
    engine.save_checkpoint(f"{directory}/good")


def load_damaged(directory):
    engine = build_engine(1)
    with pytest.raises(DamagedCheckpointError, match=r"optimizer-1.safetensors: found 100 bytes"):
        engine.load_checkpoint(directory)


def load_misfit(directory):
    engine = build_engine(1, wrap=lambda model: model.half())
    before = read_state(engine)
    with pytest.raises(StateMismatchError, match=r"of another dtype: 'frozen' .checkpoint F32, run F16"):
        engine.load_checkpoint(directory)
    assert find_differences(read_state(engine), before) == []


def run_failures(directory):
    refuse_local_state()
    fail_on_one_rank(directory)
    save_trained(f"{directory}/cut", "fsdp2")
    load_misfit(f"{directory}/cut")
    distributed.barrier()
    if distributed.get_rank() == 0:
        os.truncate(f"{directory}/cut/optimizer-1.safetensors", 100)
    distributed.barrier()
    load_damaged(f"{directory}/cut")


def test_failures_on_two_ranks_reach_both(tmp_path):
    run_ranks(2, run_failures, str(tmp_path))
    assert not (tmp_path / "bad" / "files.json").exists()
    assert "spectrum" in read_index(str(tmp_path / "good"), read_entries(tmp_path / "good")).parts["model"].tensors


def read_entries(directory):
    table = FileTable.decode((directory / "files.json").read_bytes(), "files.json")
    return {entry.path: entry for entry in table.entries}


def test_each_box_of_a_mesh_is_written_by_one_replica():
    written = run_ranks(4, check_placements)
    assert written == [[("replicated", "0:10,0:4"), ("mixed", "0:10,0:2")], [("mixed", "0:10,2:4")], [], []]


def describe_rank():
    return distributed.get_rank(), distributed.get_world_size(), distributed.get_backend()


def join_by_environment(first_port, second_port):
    """Join twice as torchrun's workers do, through the agent's store; the second time the body fails."""
    rank = distributed.get_rank()
    distributed.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["MASTER_PORT"] = str(first_port)
    with join_ranks("cpu"):
        model = distribute(nn.Sequential(nn.Linear(2, 2)), strategy="ddp", device="cpu")
        found = describe_rank(), type(model).__name__
    assert not distributed.is_initialized()
    os.environ["MASTER_PORT"] = str(second_port)
    with pytest.raises(RuntimeError, match="on purpose"):
        join_and_fail()
    assert not distributed.is_initialized()
    return found


def join_and_fail():
    with join_ranks("cpu"):
        raise RuntimeError("on purpose")


def test_ranks_of_the_environment_are_joined_and_left_also_on_errors():
    stores = [distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    found = run_ranks(2, join_by_environment, *(store.port for store in stores))
    assert found == [((rank, 2, "gloo"), "DistributedDataParallel") for rank in range(2)]


def test_a_rank_that_fails_or_dies_is_reported_by_the_helper():
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*ZeroDivisionError"):
        run_ranks(2, fail_or_die, "fail")
    with pytest.raises(AssertionError, match=r"rank 1: died without a word"):
        run_ranks(2, fail_or_die, "die")


def fail_or_die(how):
    if distributed.get_rank() == 1:
        _ = os._exit(1) if how == "die" else 1 / 0


def count_foreign_bytes(directory):
    """Load with one GPU a rank and return what this process allocated on the other's device."""
    rank = distributed.get_rank()
    torch.cuda.set_device(rank)
    model = build_toy(rank).cuda()
    SpmdEngine(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])).load_checkpoint(directory)
    return torch.cuda.memory_allocated(1 - rank)


@pytest.mark.case("C908")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: a load must not touch the other rank's")
def test_load_holds_no_memory_on_the_other_ranks_device(tmp_path):
    run_ranks(1, save_trained, str(tmp_path), "ddp")
    assert run_ranks(2, count_foreign_bytes, str(tmp_path)) == [0, 0]
