"""A save that fails: on all ranks alike, and with what was there untouched."""

import json
import threading

import pytest

from recipe_ckpt import SavePolicy
from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import read_commit, verify
from tests.tiny import Run, TinyEngine, list_steps, resume, run_world


def on_ranks(root, size, work, *, engine=TinyEngine, on_save=None, **options):
    def run_rank(coordinator):
        hook = None if on_save is None else (lambda: on_save(coordinator.rank))
        mine = engine(rank=coordinator.rank, dp_size=size, on_save=hook)
        with Run(root, coordinator=coordinator, engine=mine, **options) as run:
            return work(run)

    return run_world(size, run_rank)


def list_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.case("C1001", "C208")
@pytest.mark.parametrize(("size", "broken"), [(2, 0), (2, 1), (4, 2)])
def test_save_that_fails_on_one_rank_fails_on_all_and_the_next_works(tmp_path, size, broken):
    failing = [True]

    def break_once(rank):
        if rank == broken and failing:
            failing.clear()
            raise OSError("disk full")

    def work(run):
        with pytest.raises(SaveFailedError, match=r"step 4: not saved to .*disk full") as caught:
            run.save(4)
        steps = list_steps(tmp_path)
        run.save(8)
        return str(caught.value), steps

    outcomes = on_ranks(tmp_path, size, work, on_save=break_once)
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
    assert all(f"rank {broken} failed: OSError: disk full" in text for text, _ in outcomes[:broken] + outcomes[broken + 1 :])
    assert outcomes[0][1] == []
    assert list_steps(tmp_path) == [8]
    resume(tmp_path)
    assert list((tmp_path / ".staging").iterdir()) == []


class WatchedStorage(LocalStorage):
    """Says when a file of step 8 was written."""

    def __init__(self):
        self.has_written = threading.Event()

    def write_file(self, path, chunks, *, name, rank):
        entry = super().write_file(path, chunks, name=name, rank=rank)
        if "global_step_8" in path:
            self.has_written.set()
        return entry


@pytest.mark.case("C1001")
@pytest.mark.parametrize("broken", [1, 2])
def test_rank_that_failed_and_writes_the_next_save_already_is_not_swept_away_by_rank_0(tmp_path, broken):
    storage = WatchedStorage()
    saves = [0, 0, 0]

    def break_or_lag(rank):
        saves[rank] += 1
        if saves[rank] == 1 and rank == broken:
            raise OSError("disk full")
        if saves[rank] == 1 and rank == 0:
            assert storage.has_written.wait(20)

    def work(run):
        with pytest.raises(SaveFailedError, match="step 4: not saved to .*disk full"):
            run.save(4)
        run.save(8)

    litter = tmp_path / ".staging" / "global_step_8.abc"
    litter.mkdir(parents=True)
    assert on_ranks(tmp_path, 3, work, on_save=break_or_lag, storage=storage) == [None] * 3
    assert list_steps(tmp_path) == [8]
    assert list((tmp_path / ".staging").iterdir()) == []
    assert verify(storage, str(tmp_path / "global_step_8"), read_all=True) is None


@pytest.mark.parametrize("broken", [0, 1])
def test_failed_save_that_is_tolerated_goes_on_alike_on_all(tmp_path, broken, caplog):
    failing = [True]

    def break_once(rank):
        if rank == broken and failing:
            failing.clear()
            raise OSError("disk full")

    policy = SavePolicy(on_failure="warn")
    assert on_ranks(tmp_path, 2, lambda run: run.save(4, 8) and run.start, on_save=break_once, save_policy=policy) == [0, 0]
    assert list_steps(tmp_path) == [8]
    assert "step 4: not saved" in caplog.text


class BrokenStorage(LocalStorage):
    """Raises at the n-th change of the disk after `arm()`."""

    left = -1

    def _count(self):
        self.left -= 1
        if self.left == 0:
            raise OSError(28, "No space left on device")

    def write_file(self, path, chunks, *, name, rank):
        self._count()
        return super().write_file(path, chunks, name=name, rank=rank)

    def rename(self, source, target):
        self._count()
        super().rename(source, target)

    def sync_dir(self, path):
        self._count()
        super().sync_dir(path)


@pytest.mark.case("C401")
@pytest.mark.parametrize("step", [20, 30])
def test_error_of_the_disk_at_any_operation_leaves_what_was_there(tmp_path, step):
    """In one process that goes on: after each failed save the next one works, and a restart finds a whole checkpoint."""
    storage = BrokenStorage()
    failures = 0
    with Run(tmp_path, storage=storage) as run:
        run.save(10, 20)
        for storage_left in range(1, 40):
            storage.left = storage_left
            try:
                run.save(step)
                break
            except SaveFailedError:
                failures += 1
            storage.left = -1
            assert all(
                verify(storage, str(tmp_path / f"global_step_{s}"), read_all=True) is None for s in list_steps(tmp_path)
            )
            assert {10, 20} <= set(list_steps(tmp_path))
            run.save(30)
    assert failures > 15
    sequences = [read_commit(storage, str(path)).manifest.sequence for path in tmp_path.glob("global_step_*")]
    assert len(set(sequences)) == len(sequences)
    assert resume(tmp_path) == step


@pytest.mark.case("C306")
def test_save_after_a_crashed_one_of_more_ranks_holds_only_its_own_files(tmp_path):
    on_ranks(tmp_path, 4, lambda run: run.save(10, 20))
    litter = tmp_path / ".staging" / "global_step_20.abc"
    litter.mkdir(parents=True)
    (litter / "model-3.json").write_text("")
    assert [type(e) for e in on_ranks(tmp_path, 2, lambda run: run.save(20) and None)] == [type(None)] * 2
    expected = {"data_0.pt", "data_1.pt", "rng_0.pt", "rng_1.pt", "model-0.json", "model-1.json"}
    assert set(list_files(tmp_path / "global_step_20")) == expected | {"manifest.json", "files.json", "trainer_state.json"}
    assert not litter.exists()


def test_step_saved_again_replaces_the_old_one(tmp_path):
    with Run(tmp_path) as run:
        run.save(10, 20)
        run.engine.value = 20.5
        run.handler.save_checkpoint(20)
    with Run(tmp_path) as run:
        assert (run.start, run.engine.value) == (20, 20.5)
    assert [entry["step"] for entry in json.loads((tmp_path / "run.json").read_text())["branch"]] == [20, 10]
