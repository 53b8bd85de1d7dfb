"""An interrupted and resumed run does, step for step, what its uninterrupted twin does: same samples, losses, rates."""

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe_ckpt import build_handler
from recipe_ckpt.config import OptimConfig
from recipe_ckpt.engines.spmd import SpmdEngine
from recipe_ckpt.errors import DataMismatchError
from recipe_ckpt.sft.loop import train
from recipe_ckpt.sft.sampler import GlobalBatchSampler
from recipe_ckpt.sft.schedule import compute_lr
from tests.ranks import run_ranks
from tests.toy import ToyModel, open_toy, train_toy

REPO = Path(__file__).parents[1]


def read_audit(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def by_rank_and_step(lines):
    """Return the lines by (rank, step); what was trained twice must have come out the same."""
    table = {}
    for line in lines:
        key = (line["rank"], line["step"])
        assert table.setdefault(key, line) == line
    return table


def train_legs(tmp_path, overrides, stops, leg=train_toy):
    """Train up to each stop (save_freq, last step), each time from a new start, then to the end; return the audit."""
    for save_freq, until in [*stops, (None, None)]:
        leg(*overrides, *places(tmp_path), f"trainer.save_freq={save_freq or 'null'}", until=until)
    return read_audit(tmp_path / "audit.jsonl")


def places(tmp_path):
    return f"checkpoint.default_local_dir={tmp_path}/ck", f"trainer.audit_file={tmp_path}/audit.jsonl"


def saved_steps(tmp_path):
    return sorted(int(path.name.removeprefix("global_step_")) for path in (tmp_path / "ck").glob("global_step_*"))


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Give the uninterrupted run's audit by rank and step; runs with the same overrides share it."""

    @cache
    def train_twin(*overrides, ranks=1):
        audit = tmp_path_factory.mktemp("twin") / "audit.jsonl"
        arguments = ["checkpoint=none", *overrides, f"trainer.audit_file={audit}"]
        if ranks == 1:
            train_toy(*arguments)
        else:
            run_ranks(ranks, train_on_rank, arguments, None)
        return by_rank_and_step(read_audit(audit))

    return train_twin


def train_on_rank(overrides, until):
    train_toy(*overrides, until=until)


def on_ranks(ranks):
    def leg(*overrides, until=None):
        run_ranks(ranks, train_on_rank, list(overrides), until)

    return leg


TWO_EPOCHS = ("trainer.total_epochs=2",)
WORKERS = ("data.num_workers=2",)


def scenario(name, overrides, *stops, cases=()):
    return pytest.param(overrides, stops, id=name, marks=pytest.mark.case(*cases) if cases else ())


@pytest.mark.parametrize(
    ("overrides", "stops"),
    [
        scenario("resume inside an epoch", TWO_EPOCHS, (5, 7), cases=["C701", "C803"]),
        scenario("resume twice", TWO_EPOCHS, (5, 6), (7, 8), cases=["C702"]),
        scenario("resume twice with workers", TWO_EPOCHS + WORKERS, (5, 6), (7, 8), cases=["C702"]),
        scenario("resume inside the second epoch", TWO_EPOCHS, (20, 21), cases=["C704"]),
        scenario("prefetched", (*TWO_EPOCHS, *WORKERS, "data.prefetch_factor=4"), (3, 4), cases=["C712"]),
        scenario("accumulated", (*TWO_EPOCHS, "data.micro_batch_size_per_gpu=3"), (5, 7)),
        scenario("warm-up ends later", TWO_EPOCHS, (2, 2), cases=["C802"]),
        scenario("warm-up ends here", TWO_EPOCHS, (3, 3), cases=["C802"]),
        scenario("after the warm-up", TWO_EPOCHS, (8, 8), cases=["C802"]),
        *[
            scenario(
                f"edge, {save}, {drop}",
                (*TWO_EPOCHS, "data.samples=62", f"data.drop_last={drop}"),
                (save, save),
                cases=["C705"],
            )
            for drop in ("true", "false")
            for save in (15, 16, 17)
        ],
        scenario("odd lengths", ("trainer.total_epochs=3", "data.samples=37", "data.train_batch_size=5"), (9, 10), (4, 19)),
    ],
)
def test_a_resumed_run_equals_its_twin(tmp_path, twin, overrides, stops):
    assert by_rank_and_step(train_legs(tmp_path, overrides, stops)) == twin(*overrides)


def test_evaluating_and_saving_at_every_step_change_nothing(tmp_path, twin):
    train_toy(*TWO_EPOCHS, *places(tmp_path), "trainer.save_freq=1", "trainer.test_freq=1", "checkpoint.max_ckpt_to_keep=1")
    assert by_rank_and_step(read_audit(tmp_path / "audit.jsonl")) == twin(*TWO_EPOCHS)
    assert saved_steps(tmp_path) == [32]


@pytest.mark.case("C708")
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_another_number_of_workers_changes_nothing(tmp_path, twin):
    for workers, until in [(2, 5), (0, 9), (4, None)]:
        train_toy(*TWO_EPOCHS, *places(tmp_path), "trainer.save_freq=1", f"data.num_workers={workers}", until=until)
    assert by_rank_and_step(read_audit(tmp_path / "audit.jsonl")) == twin(*TWO_EPOCHS)


@pytest.mark.case("C703")
def test_saving_again_right_after_a_resume_changes_nothing(tmp_path, twin):
    train_toy(*TWO_EPOCHS, *places(tmp_path), "trainer.save_freq=5", until=5)
    with open_toy(*TWO_EPOCHS, *places(tmp_path)) as run:
        run.handler.save_checkpoint(run.step)
    train_toy(*TWO_EPOCHS, *places(tmp_path))
    assert by_rank_and_step(read_audit(tmp_path / "audit.jsonl")) == twin(*TWO_EPOCHS)


@pytest.mark.case("C716", "C804")
def test_a_save_before_the_first_batch_is_resumed_as_step_0(tmp_path, twin):
    with open_toy(*TWO_EPOCHS, *places(tmp_path)) as run:
        assert run.handler.resume_point is None
        run.handler.save_checkpoint(0)
    with open_toy(*TWO_EPOCHS, *places(tmp_path)) as run:
        assert run.handler.resume_point.step == 0
        assert list(train(run)) == list(range(1, 33))
    assert by_rank_and_step(read_audit(tmp_path / "audit.jsonl")) == twin(*TWO_EPOCHS)


@pytest.mark.case("C801", "C808", "C806")
def test_after_a_resume_nothing_of_the_restored_step_is_done_again(tmp_path, caplog):
    caplog.set_level("INFO")
    overrides = [*places(tmp_path), "trainer.save_freq=4", "trainer.test_freq=4", "trainer.logger=[console]"]
    overrides.append("trainer.total_training_steps=18")
    train_toy(*overrides, until=8)
    assert "step 8/18  val loss" in caplog.text
    caplog.clear()
    train_toy(*overrides)
    messages = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in messages if text.startswith("saved")] == [f"saved step {n}" for n in (12, 16, 18)]
    assert [text.split("/")[0] for text in messages if "val loss" in text] == ["step 12", "step 16", "step 18"]
    assert [line["step"] for line in read_audit(tmp_path / "audit.jsonl")] == list(range(1, 19))


@pytest.mark.case("C807")
@pytest.mark.parametrize("freq", ["null", "-1"])
def test_without_a_frequency_only_the_end_is_saved(tmp_path, freq):
    train_toy(*places(tmp_path), f"trainer.save_freq={freq}", "trainer.total_training_steps=5")
    assert saved_steps(tmp_path) == [5]


@pytest.mark.case("C806")
def test_the_last_step_is_saved_once_when_it_is_a_step_to_save_anyway(tmp_path, caplog):
    caplog.set_level("INFO")
    train_toy(*places(tmp_path), "trainer.save_freq=4", "trainer.total_training_steps=8")
    assert caplog.text.count("saved step 8") == 1
    assert saved_steps(tmp_path) == [4, 8]


@pytest.mark.case("C805")
def test_a_finished_run_with_more_steps_goes_on_at_the_new_length(tmp_path):
    train_toy(*places(tmp_path), "trainer.total_training_steps=16")
    train_toy(*places(tmp_path), "trainer.total_training_steps=24")
    lines = read_audit(tmp_path / "audit.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 25))
    optim = OptimConfig(lr_warmup_steps=3)
    assert [line["lr"] for line in lines[16:]] == [compute_lr(step, optim, 24) for step in range(17, 25)]


@pytest.mark.case("C805")
def test_a_finished_run_with_a_set_decay_goes_on_as_if_it_had_always_been_longer(tmp_path, twin):
    decay = "optim.lr_decay_steps=24"
    train_toy(*places(tmp_path), "trainer.total_training_steps=16", decay)
    train_toy(*places(tmp_path), "trainer.total_training_steps=24", decay)
    assert by_rank_and_step(read_audit(tmp_path / "audit.jsonl")) == twin("trainer.total_training_steps=24", decay)


def test_a_finished_run_trains_nothing_and_has_its_metric(tmp_path):
    first = train_toy(*places(tmp_path), "trainer.total_training_steps=3")
    again = train_toy(*places(tmp_path), "trainer.total_training_steps=3")
    assert again.metric == first.metric == first.metrics["val/loss"]
    assert len(read_audit(tmp_path / "audit.jsonl")) == 3
    assert again.progress == first.progress


def test_a_diverged_run_stops_before_it_saves(tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) and must be finite"):
        train_toy(*places(tmp_path), "optim.lr=1e30", "optim.clip_grad=null")
    assert saved_steps(tmp_path) == []


@pytest.mark.case("C809")
def test_the_rate_follows_the_step_though_no_schedule_was_saved(tmp_path, twin):
    steps = "trainer.total_training_steps=16"
    bare = ["checkpoint.save_contents=[model]", "trainer.save_freq=5", steps]
    train_toy(*places(tmp_path), *bare, until=5)
    train_toy(*places(tmp_path), *bare)
    expected = [line["lr"] for line in twin(steps).values()]
    assert [line["lr"] for line in read_audit(tmp_path / "audit.jsonl")] == expected


@pytest.mark.case("C710")
def test_another_batch_size_goes_on_with_the_next_sample(tmp_path, twin):
    length = ("trainer.total_epochs=2", "data.samples=61")
    train_toy(*length, *places(tmp_path), "trainer.save_freq=5", until=5)
    run = train_toy(*length, *places(tmp_path), "data.train_batch_size=8")
    trained = [n for line in read_audit(tmp_path / "audit.jsonl") for n in line["sample_ids"]]
    assert trained == [n for line in twin(*length).values() for n in line["sample_ids"]]
    assert run.step == 5 + 6 + 8


@pytest.mark.case("C709")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.content=1", "fingerprint: 'toy-0' in the checkpoint, 'toy-1' here"),
        ("data.samples=10", "dataset_len: 64 in the checkpoint, 10 here"),
        ("trainer.seed=2", "seed: 1 in the checkpoint, 2 here"),
    ],
)
def test_other_data_is_refused_or_starts_the_epoch_over(tmp_path, change, message):
    steps = "trainer.total_training_steps=22"
    train_toy(*places(tmp_path), steps, "trainer.save_freq=20", until=20)
    with pytest.raises(DataMismatchError, match=message):
        train_toy(*places(tmp_path), steps, change)
    run = train_toy(*places(tmp_path), steps, change, "checkpoint.on_data_mismatch=restart")
    assert (run.sampler.epoch, run.sampler.samples_consumed) == (1, 8)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
class TestLoader:
    """What a loader of one's own may do with the sampler."""

    def open(self, tmp_path, **options):
        sampler = GlobalBatchSampler(64, batch_size=4, dp_rank=0, dp_size=1, seed=1)
        loader = StatefulDataLoader(Identity(), batch_sampler=sampler, collate_fn=list, **options)
        model = ToyModel(4, 0.0)
        engine = SpmdEngine(model, torch.optim.AdamW(model.parameters()), lr_at=None)
        return sampler, loader, build_handler(engine, loader, default_local_dir=str(tmp_path / "ck"))

    @pytest.mark.case("C711")
    @pytest.mark.parametrize("workers", [0, 2])
    def test_snapshots_at_other_steps_do_not_matter(self, tmp_path, workers):
        options = {"num_workers": workers, "snapshot_every_n_steps": 4}
        sampler, loader, handler = self.open(tmp_path, **options)
        with handler:
            handler.load_checkpoint()
            batches = iter(loader)
            for _ in range(5):
                next(batches)
                sampler.advance()
            handler.save_checkpoint(5)
            sixth = next(batches)
        _, loader, handler = self.open(tmp_path, **options)
        with handler:
            assert handler.load_checkpoint() == 5
            assert next(iter(loader)) == sixth

    @pytest.mark.case("C713")
    def test_a_load_after_iter_is_refused(self, tmp_path):
        _, _, handler = self.open(tmp_path)
        with handler:
            handler.load_checkpoint()
            handler.save_checkpoint(0)
        _, loader, handler = self.open(tmp_path)
        batches = iter(loader)
        with handler, pytest.raises(DataMismatchError, match=r"iter\(\) was taken before load_checkpoint"):
            handler.load_checkpoint()
        del batches


class Identity:
    def __getitem__(self, key):
        return key

    def __len__(self):
        return 64


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_resumed_equal_their_twin(tmp_path, twin, strategy):
    overrides = (*TWO_EPOCHS, f"engine.strategy={strategy}", "data.micro_batch_size_per_gpu=1", "data.samples=62")
    trained = by_rank_and_step(train_legs(tmp_path, overrides, [(5, 7), (9, 18)], leg=on_ranks(2)))
    assert trained == twin(*overrides, ranks=2)
    assert len(trained) == 64


@pytest.mark.case("C706")
def test_other_numbers_of_ranks_go_on_with_the_same_batches(tmp_path, twin):
    overrides = ("trainer.total_training_steps=14", "data.samples=30")
    for ranks, until in [(2, 5), (1, 9), (4, None)]:
        leg = train_toy if ranks == 1 else on_ranks(ranks)
        leg(*overrides, *places(tmp_path), "trainer.save_freq=1", until=until)
    lines = read_audit(tmp_path / "audit.jsonl")
    for (_, step), line in twin(*overrides).items():
        assert sorted(n for other in lines if other["step"] == step for n in other["sample_ids"]) == sorted(
            line["sample_ids"]
        )
    assert [len([line for line in lines if line["step"] == step]) for step in (5, 6, 10)] == [2, 1, 4]


def start_toy(tmp_path, *overrides, ranks=1):
    """Run the toy as a user's process and return the finished process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "tests.toy", *places(tmp_path), *overrides]
    environment = {**os.environ, "PYTHONPATH": f"{REPO}/src:{REPO}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}/logs"], cwd=REPO, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.case("C701", "C712")
def test_a_killed_process_started_again_equals_the_twin(tmp_path, twin):
    # A blocking save is durable when its step is done; one in flight may be lost (tests/test_signals.py).
    overrides = (*TWO_EPOCHS, *WORKERS, "checkpoint.async_save=false")
    for save_freq, kill_after, resumed_from in [(5, 7, "none"), (11, 22, "5"), (3, None, "22")]:
        stop = f"toy.kill_after={kill_after or 'null'}"
        done = start_toy(tmp_path, *overrides, f"trainer.save_freq={save_freq}", stop)
        assert done.returncode == (-signal.SIGKILL if kill_after else 0), done.stderr
        assert f"resumed_from={resumed_from}\n" in done.stdout
    assert by_rank_and_step(read_audit(tmp_path / "audit.jsonl")) == twin(*TWO_EPOCHS)


def test_ranks_killed_under_torchrun_equal_the_twin(tmp_path, twin):
    overrides = ("trainer.total_training_steps=12", "data.num_workers=1", "checkpoint.async_save=false")
    killed = start_toy(tmp_path, *overrides, "trainer.save_freq=4", "toy.kill_after=6", ranks=2)
    assert killed.returncode != 0
    done = start_toy(tmp_path, *overrides, "trainer.save_freq=4", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed_from=4\n") == 2
    assert by_rank_and_step(read_audit(tmp_path / "audit.jsonl")) == twin("trainer.total_training_steps=12", ranks=2)
