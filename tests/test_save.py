"""What a save writes, and what is left when one fails."""

import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from recipe_ckpt import CheckpointHandler, LoadPolicy, NoCheckpoints, OrchestrationMode, SavePolicy
from recipe_ckpt.errors import ConfigError, NothingToResumeError, RankError
from recipe_ckpt.manifest import FileTable, digest_bytes
from recipe_ckpt.storage import LocalStorage, describe_file
from recipe_ckpt.survey import read_commit, verify
from tests.tiny import Run, TinyEngine, make_checkpoints, resume, run_world


def list_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class VerlEngine:
    """Writes and reads its own files, as verl's engines do."""

    def __init__(self, *, rank=0, dp_size=1, on_save=None):
        self.value, self.rank, self.dp_size = 0.0, rank, dp_size

    is_mp_src_rank_with_outputs = TinyEngine.is_mp_src_rank_with_outputs
    get_data_parallel_rank = TinyEngine.get_data_parallel_rank
    get_data_parallel_size = TinyEngine.get_data_parallel_size

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        assert max_ckpt_to_keep is None
        os.makedirs(os.path.join(local_path, "huggingface", "deep", "er"), exist_ok=True)
        with open(os.path.join(local_path, "huggingface", "deep", "er", f"config_{self.rank}.json"), "w") as file:
            file.write("{}")
        with open(os.path.join(local_path, f"model_world_size_{self.dp_size}_rank_{self.rank}.pt"), "w") as file:
            file.write(str(self.value))

    def load_checkpoint(self, local_path):
        with open(os.path.join(local_path, f"model_world_size_{self.dp_size}_rank_{self.rank}.pt")) as file:
            self.value = float(file.read())


class State:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


# --- what is written


ALWAYS = {"manifest.json", "files.json", "trainer_state.json", "data_0.pt", "rng_0.pt", "model-0.json"}


@pytest.mark.case("C1401", "C1402")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, set()),
        ({"documents": {"config.yaml": "a: 1\n", "overrides.yaml": "[]"}}, {"config.yaml", "overrides.yaml"}),
        ({"lora_train_meta": {"r": 8, "lora_alpha": 16}}, {"lora_train_meta.json"}),
        ({"extra_state": {"ema": State({"w": torch.ones(2)}), "plain": State({"n": 1})}}, {"extra_ema.pt"}),
    ],
)
def test_checkpoint_holds_exactly_the_files_of_its_table(tmp_path, options, names):
    make_checkpoints(tmp_path, 10, **options)
    path = tmp_path / "global_step_10"
    table = FileTable.decode((path / "files.json").read_bytes(), "files.json")
    assert set(list_files(path)) == ALWAYS | names
    assert {entry.path for entry in table.entries} == (ALWAYS | names) - {"manifest.json", "files.json"}
    assert verify(LocalStorage(), str(path), read_all=True) is None


@pytest.mark.case("C1401", "C1405")
def test_lora_meta_is_plain_json_with_numbers(tmp_path):
    meta = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "ö"], "task_type": "CAUSAL_LM"}
    make_checkpoints(tmp_path, 1, lora_train_meta=meta)
    text = (tmp_path / "global_step_1" / "lora_train_meta.json").read_text(encoding="utf-8")
    assert json.loads(text) == meta
    assert "ö" in text


def test_documents_are_written_as_given(tmp_path):
    make_checkpoints(tmp_path, 1, documents={"config.yaml": "lr: ${x}  # ö\n"})
    assert (tmp_path / "global_step_1" / "config.yaml").read_text() == "lr: ${x}  # ö\n"


STATES = [
    {"last_epoch": 3, "base_lrs": [0.1]},
    {"milestones": {30: 1, 60: 2}},
    {"best": math.inf, "mode_worse": -math.inf},
    {"pair": (1, 2)},
    {"1": "a", "nested": [{"x": None}]},
    {"w": torch.arange(3), 5: (torch.ones(1), {"deep": 2.5})},
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: next(iter(state)))
def test_extra_state_comes_back_as_it_was(tmp_path, state):
    make_checkpoints(tmp_path, 1, extra_state={"mine": State(state)})
    found = State(None)
    assert resume(tmp_path, extra_state={"mine": found}) == 1
    assert repr(found.value) == repr(state)


def test_real_schedules_come_back_as_they_were(tmp_path):
    def build():
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"steps": steps, "plateau": plateau}

    saved, loaded = build(), build()
    make_checkpoints(tmp_path, 1, extra_state=saved)
    resume(tmp_path, extra_state=loaded)
    assert loaded["steps"].milestones == saved["steps"].milestones
    assert loaded["plateau"].best == math.inf


@pytest.mark.case("C809")
def test_extra_state_that_the_checkpoint_lacks_is_told(tmp_path, caplog):
    make_checkpoints(tmp_path, 1)
    assert resume(tmp_path, extra_state={"ema": State({})}) == 1
    assert "holds no state of 'ema'" in caplog.text


def test_metrics_come_back_also_when_one_is_not_a_number(tmp_path):
    with Run(tmp_path) as run:
        run.handler.save_checkpoint(3, metrics={"loss": math.nan, "acc": 0.5})
    with Run(tmp_path) as run:
        assert repr(run.handler.resume_point.metrics) == "{'loss': nan, 'acc': 0.5}"


@pytest.mark.case("C901", "C909")
def test_every_pt_file_loads_as_weights_only_in_a_fresh_python(tmp_path):
    make_checkpoints(tmp_path, 1, extra_state={"ema": State({3: torch.ones(1)})})
    script = """if True:
        import sys, torch
        for path in sys.argv[1:]:
            torch.load(path, weights_only=True)
        assert not {"omegaconf", "recipe_ckpt", "hydra"} & set(sys.modules)
    """
    paths = [str(path) for path in (tmp_path / "global_step_1").glob("*.pt")]
    assert len(paths) == 3
    subprocess.run([sys.executable, "-c", script, *paths], check=True, cwd=tmp_path, timeout=100)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.case("C902")
@pytest.mark.parametrize("name", ["rng_0.pt", "extra_ema.pt"])
def test_pickle_that_would_run_code_is_refused_unrun(tmp_path, name):
    """Also with a table that vouches for it: whoever writes files can write that, too."""
    make_checkpoints(tmp_path / "run", 1, extra_state={"ema": State({3: torch.ones(1)})})
    path = tmp_path / "run" / "global_step_1"
    with open(path / name, "wb") as file:
        pickle.dump(Bomb(str(tmp_path / "created")), file)
    vouch_for(path, name)
    assert verify(LocalStorage(), str(path), read_all=True) is None
    with pytest.raises(NothingToResumeError, match="refused, it is not a file of tensors and plain types"):
        resume(tmp_path / "run", extra_state={"ema": State({})})
    assert not (tmp_path / "created").exists()


def vouch_for(path, name):
    """Put a file's new digest into the table, the manifest, and (by removing it) the run's record."""
    manifest = read_commit(LocalStorage(), str(path)).manifest
    entries = FileTable.decode((path / "files.json").read_bytes(), "x").entries
    table = FileTable.of([e for e in entries if e.path != name] + [describe_file(str(path / name), name=name, rank=0)])
    (path / "files.json").write_bytes(table.encode())
    sealed = replace(manifest, files_digest=digest_bytes(table.encode()).hex())
    (path / "manifest.json").write_bytes(sealed.encode())
    (path.parent / "run.json").unlink()


# --- engines


def test_several_engines_stand_in_folders_of_their_names(tmp_path):
    engines = {"actor": TinyEngine(1.0), "critic": TinyEngine(2.0)}
    with Run(tmp_path, engine=engines) as run:
        run.handler.save_checkpoint(5)
    assert {"actor/model-0.json", "critic/model-0.json"} <= set(list_files(tmp_path / "global_step_5"))
    engines = {"actor": TinyEngine(), "critic": TinyEngine()}
    with Run(tmp_path, engine=engines):
        assert [engine.value for engine in engines.values()] == [1.0, 2.0]


@pytest.mark.parametrize("engine", [object(), {}, {"a/b": TinyEngine()}, {"..": TinyEngine()}, {"actor": 5}])
def test_what_is_no_engine_is_refused_at_start(tmp_path, engine):
    with pytest.raises(ConfigError, match="engine: found"):
        CheckpointHandler(engine, None, default_local_dir=str(tmp_path))


def on_ranks(root, size, work, *, engine=TinyEngine, on_save=None, **options):
    def run_rank(coordinator):
        hook = None if on_save is None else (lambda: on_save(coordinator.rank))
        mine = engine(rank=coordinator.rank, dp_size=size, on_save=hook)
        with Run(root, coordinator=coordinator, engine=mine, **options) as run:
            return work(run)

    return run_world(size, run_rank)


@pytest.mark.parametrize("size", [1, 2])
def test_foreign_engines_files_are_digested_and_checked(tmp_path, size, caplog):
    on_ranks(tmp_path, size, lambda run: run.save(1, 2), engine=VerlEngine)
    names = {entry.path for entry in FileTable.decode((tmp_path / "global_step_2/files.json").read_bytes(), "x").entries}
    assert {f"model_world_size_{size}_rank_0.pt", "huggingface/deep/er/config_0.json"} <= names
    (tmp_path / "global_step_2" / f"model_world_size_{size}_rank_{size - 1}.pt").write_text("9.9")
    assert on_ranks(tmp_path, size, lambda run: (run.start, run.engine.value), engine=VerlEngine) == [(1, 1.0)] * size


def test_engine_is_given_a_path_that_ends_with_the_step(tmp_path):
    seen = []

    class Noting(VerlEngine):
        def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
            seen.append((local_path, global_step))

    with Run(tmp_path, engine=Noting()) as run:
        run.save(7)
    assert os.path.basename(seen[0][0]).startswith("global_step_7.")
    assert seen[0][1] == 7


# --- calls in the wrong order, and at the ends


def test_save_before_the_load_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"save_checkpoint\(\) before load_checkpoint\(\)"):
        Run(tmp_path).handler.save_checkpoint(1)
    assert list(tmp_path.iterdir()) == []


def test_second_load_is_refused(tmp_path):
    with Run(tmp_path) as run, pytest.raises(RuntimeError, match="a handler resumes once"):
        run.handler.load_checkpoint()


def test_close_may_be_called_twice_and_ends_saving(tmp_path):
    with Run(tmp_path) as run:
        run.save(1)
    run.handler.close()
    with pytest.raises(RuntimeError, match="save_checkpoint"):
        run.handler.save_checkpoint(2)


@pytest.mark.case("C405")
@pytest.mark.parametrize("below", [".", "sub/run"])
def test_root_that_is_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="checkpoint.default_local_dir: found .*allowed: a directory"):
        resume(tmp_path / "file" / below)
    outcomes = run_world(2, lambda coordinator: resume(tmp_path / "file", coordinator=coordinator))
    assert [type(outcome) for outcome in outcomes] == [ConfigError, RankError]


def test_ray_mode_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match="mode: found .*RAY"):
        Run(tmp_path, mode=OrchestrationMode.RAY)


def test_no_checkpoints_keeps_nothing():
    with NoCheckpoints(None, None, default_local_dir="x") as handler:
        assert handler.load_checkpoint() == 0
        handler.save_checkpoint(5)
        assert handler.resume_point is None


def test_model_alone_can_be_saved_and_loaded(tmp_path):
    policies = {"save_policy": SavePolicy(("model",)), "load_policy": LoadPolicy(("model",))}
    make_checkpoints(tmp_path, 3, **policies)
    assert set(list_files(tmp_path / "global_step_3")) == ALWAYS - {"rng_0.pt", "data_0.pt"}
    with Run(tmp_path, **policies) as run:
        assert (run.start, run.engine.value, run.loader.batch_sampler.consumed) == (3, 3.0, 0)


def test_trainer_state_is_readable_facts(tmp_path):
    make_checkpoints(tmp_path, 3, extra_state={"lr": State({"n": 1})})
    facts = json.loads((tmp_path / "global_step_3" / "trainer_state.json").read_text())
    assert facts == {"step": 3, "data": {"samples_consumed": 3, "dataset_len": 64}, "extra": {"lr": {"n": 1}}}


@pytest.mark.parametrize("name", ["manifest.json", "a/b", "", "..", "data_0.pt", "rng_3.pt", "model-0.safetensors"])
def test_document_with_a_name_that_a_checkpoint_uses_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="documents: found"):
        Run(tmp_path, documents={name: ""})


def test_extra_state_with_a_name_that_is_no_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="extra_state: found 'a/b'"):
        Run(tmp_path, extra_state={"a/b": None})
