"""A rank that raises, stalls or dies: all others end soon, with its number, and what was saved stays."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from recipe_ckpt.errors import CheckpointError, SaveFailedError
from recipe_ckpt.policies import SavePolicy
from recipe_ckpt.storage import LocalStorage
from tests.rank_processes import run_processes
from tests.tiny import Run, TinyEngine, list_steps, run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
SAVE_PHASES = ("capture", "write", "commit")
LOAD_PHASES = ("check", "restore")
RANKS = ((2, 0), (2, 1), (4, 2))


class Trouble:
    """Calls `act` when this rank first comes to a phase; `phase` is None on a rank without trouble."""

    def __init__(self, phase, act):
        self.phase, self.act = phase, act

    def reach(self, phase):
        if phase == self.phase:
            self.phase = None
            self.act()


class TroubledStorage(LocalStorage):
    def __init__(self, trouble):
        self.trouble = trouble

    def write_file(self, path, chunks, *, name, rank):
        if name.startswith("model-"):
            self.trouble.reach("write")
        return super().write_file(path, chunks, name=name, rank=rank)

    def rename(self, source, target):
        self.trouble.reach("commit")
        super().rename(source, target)

    def read(self, path):
        if path.endswith("manifest.json"):
            self.trouble.reach("check")
        return super().read(path)


class TroubledEngine(TinyEngine):
    def __init__(self, trouble, **options):
        super().__init__(on_save=lambda: trouble.reach("capture"), **options)
        self.trouble = trouble

    def restore(self, directory, entries, contents):
        self.trouble.reach("restore")
        super().restore(directory, entries, contents)


def save_or_load(coordinator, root, phase, rank, act, *steps, **options):
    """Resume and save steps, with trouble on one rank; return where the run began."""
    trouble = Trouble(phase if coordinator.rank == rank else None, act)
    engine = TroubledEngine(trouble, rank=coordinator.rank, dp_size=coordinator.world_size)
    with Run(root, coordinator=coordinator, engine=engine, storage=TroubledStorage(trouble), **options) as run:
        run.save(*steps)
    return run.start


def prepare(root, size, *steps):
    assert run_world(size, lambda c: save_or_load(c, root, None, 0, None, *steps)) == [0] * size


def fail():
    raise RuntimeError("boom")


def phases_and_ranks(phases):
    return [(phase, size, rank) for phase in phases for size, rank in RANKS if phase != "commit" or rank == 0]


# --- raising


@pytest.mark.case("C1001")
@pytest.mark.parametrize(("phase", "size", "rank"), phases_and_ranks(SAVE_PHASES + LOAD_PHASES))
def test_rank_that_raises_ends_all_at_once_with_its_number(place, phase, size, rank):
    prepare(place, size, 10)
    begun = time.monotonic()
    outcomes = run_world(size, lambda c: save_or_load(c, place, phase, rank, fail, 20))
    assert time.monotonic() - begun < 15
    assert "boom" in str(outcomes.pop(rank))
    assert all(isinstance(error, CheckpointError) for error in outcomes)
    assert all(f"rank {rank} failed: RuntimeError: boom" in str(error) for error in outcomes)
    assert list_steps(place) == [10]
    assert run_world(size, lambda c: save_or_load(c, place, None, 0, None, 30)) == [10] * size


@pytest.mark.case("C1001")
@pytest.mark.parametrize(("phase", "size", "rank"), phases_and_ranks(SAVE_PHASES))
def test_save_that_raises_on_a_rank_is_tolerated_alike_if_that_was_asked_for(place, phase, size, rank):
    policy = SavePolicy(on_failure="warn")
    outcomes = run_world(size, lambda c: save_or_load(c, place, phase, rank, fail, 20, 30, save_policy=policy))
    assert outcomes == [0] * size
    assert list_steps(place) == [30]


@pytest.mark.parametrize("rank", [0, 1])
def test_metric_that_is_no_number_on_one_rank_fails_the_save_of_all(place, rank):
    def work(coordinator):
        engine = TinyEngine(rank=coordinator.rank, dp_size=2)
        with Run(place, coordinator=coordinator, engine=engine) as run:
            with pytest.raises(SaveFailedError, match="step 20: not saved to .*TypeError"):
                run.handler.save_checkpoint(20, metrics={"loss": None if coordinator.rank == rank else 0.5})
            run.save(30)

    assert run_world(2, work) == [None, None]
    assert list_steps(place) == [30]


# --- silent


@pytest.mark.case("C1009")
@pytest.mark.parametrize(
    ("phase", "size", "rank"), [("capture", 2, 1), ("write", 4, 2), ("write", 2, 0), ("check", 2, 0), ("restore", 2, 1)]
)
def test_rank_that_stalls_is_named_by_all_others_at_the_deadline(place, phase, size, rank):
    prepare(place, size, 10)
    others_left = FORK.Semaphore(0)

    def stall():
        for _ in range(size - 1):
            assert others_left.acquire(timeout=30)

    def work(coordinator):
        try:
            save_or_load(coordinator, place, phase, rank, stall, 20)
        finally:
            others_left.release()

    begun = time.monotonic()
    outcomes = run_processes(size, work, rank_timeout_secs=1.0)
    told = "rank 0 did not answer within" if rank == 0 else f"ranks [{rank}] of {size} did not answer within 1 s"
    assert all(told in text for text in outcomes[:rank] + outcomes[rank + 1 :]), outcomes
    assert time.monotonic() - begun < 30
    # A rank 0 that wakes up finds that all have written, and publishes: too late for the others, but whole.
    assert list_steps(place) in ([[10]] if rank else [[10], [10, 20]])
    assert run_world(size, lambda c: save_or_load(c, place, None, 0, None)) == [max(list_steps(place))] * size


@pytest.mark.case("C1009")
def test_save_on_one_rank_only_is_an_error_naming_the_others(place):
    told = threading.Event()

    def work(coordinator):
        engine = TinyEngine(rank=coordinator.rank, dp_size=3)
        with Run(place, coordinator=coordinator, engine=engine) as run:
            if coordinator.rank:
                return told.wait(30)
            with pytest.raises(
                SaveFailedError, match=r"ranks \[1, 2\] of 3 did not answer within 0.3 s.*every rank calls them"
            ):
                run.save(20)
            return told.set()

    assert run_world(3, work, timeout_secs=0.3) == [None, True, True]
    assert list_steps(place) == []


# --- dead


def die():
    os._exit(9)


@pytest.mark.case("C1001", "C208")
@pytest.mark.parametrize(
    ("phase", "size", "rank"),
    [
        ("capture", 4, 2),
        ("write", 2, 1),
        ("write", 4, 0),
        ("commit", 2, 0),
        ("check", 2, 1),
        ("restore", 4, 3),
        ("restore", 2, 0),
    ],
)
def test_rank_that_dies_is_named_by_all_others(place, phase, size, rank):
    prepare(place, size, 10)
    outcomes = run_processes(size, lambda c: save_or_load(c, place, phase, rank, die, 20))
    assert outcomes.pop(rank) == "died"
    told = "rank 0 can't be reached any more" if rank == 0 else f"ranks [{rank}] of {size} are dead or stopped: no pulse for"
    assert all(told in text for text in outcomes), outcomes
    assert list_steps(place) == [10]
    # What was sealed before the death is whole, and becomes a checkpoint.
    start = 20 if phase == "commit" else 10
    assert run_world(size, lambda c: save_or_load(c, place, None, 0, None, 30)) == [start] * size


@pytest.mark.parametrize(("phase", "size", "rank"), [("write", 3, 1), ("write", 3, 0), ("check", 2, 0)])
def test_rank_that_is_stopped_is_named_by_all_others(place, phase, size, rank):
    """A process that stands still, or a node that is cut off: no connection is closed, and nothing answers."""
    prepare(place, size, 10)
    outcomes = run_processes(
        size, lambda c: save_or_load(c, place, phase, rank, lambda: os.kill(os.getpid(), signal.SIGSTOP), 20)
    )
    assert outcomes.pop(rank) == "stopped"
    told = (
        "rank 0 is dead, stopped or cut off: no answer for" if rank == 0 else f"ranks [{rank}] of {size} are dead or stopped"
    )
    assert all(told in text for text in outcomes), outcomes
    assert list_steps(place) == [10]


def test_rank_that_died_in_mid_save_leaves_a_survivor_that_can_not_save_any_more(place):
    """Though failed saves are tolerated: with rank 0, or its store, gone, none can work again."""
    policy = SavePolicy(on_failure="warn")
    outcomes = run_processes(2, lambda c: save_or_load(c, place, "write", 0, die, 20, 30, save_policy=policy))
    assert outcomes[0] == "died"
    assert "RankError: rank 0 can't be reached any more" in outcomes[1]
