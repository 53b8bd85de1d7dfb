"""Kill the writer at each of its operations on the disk: what was committed before, or what was being committed, survives."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import verify
from tests.tiny import Run, list_steps, make_checkpoints, run_in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

KILLED = 9


class DyingStorage(LocalStorage):
    """Ends its process at the n-th point: before each operation, and in the midst of those that take several steps."""

    def __init__(self, points):
        self.points_left = points

    def _point(self):
        if self.points_left == 0:
            os._exit(KILLED)
        self.points_left -= 1

    def make_dirs(self, path):
        self._point()
        super().make_dirs(path)

    def write_file(self, path, chunks, *, name, rank):
        self._point()
        entry = super().write_file(path, self._half_by_half(chunks), name=name, rank=rank)
        self._point()
        return entry

    def _half_by_half(self, chunks):
        for chunk in chunks:
            yield chunk[: len(chunk) // 2]
            self._point()
            yield chunk[len(chunk) // 2 :]

    def rename(self, source, target):
        self._point()
        super().rename(source, target)

    def remove_file(self, path):
        self._point()
        super().remove_file(path)

    def remove_tree(self, path):
        self._point()
        for name in sorted(os.listdir(path)):
            LocalStorage.remove_tree(self, entry) if os.path.isdir(entry := os.path.join(path, name)) else os.unlink(entry)
            self._point()
        super().remove_tree(path)

    def sync_dir(self, path):
        self._point()
        super().sync_dir(path)


def sweep(place, prepare, act):
    """Run `act(root, storage)` in a child that dies at point 0, 1, 2, ... of a fresh copy of what `prepare` made.

    Yields the root after each death, and at last after the child that was left alone.
    """
    prepare(place / "before")
    for points in range(2000):
        root = shutil.copytree(place / "before", place / f"run{points}", symlinks=True)
        code = run_in_child(lambda root=root, points=points: act(root, DyingStorage(points)))
        assert code in (0, KILLED)
        yield root
        shutil.rmtree(root)
        if code == 0:
            sys.stdout.write(f"swept {points} points\n")
            return
    raise AssertionError("the child never finished")


def check_litter(root):
    for folder in (".staging", ".trash"):
        assert not (root / folder).exists() or os.listdir(root / folder) == []
    assert not [name for name in os.listdir(root) if name.endswith(".tmp") or name in (".archiving", ".lease.json")]


def check_whole(root):
    for step in list_steps(root):
        assert verify(LocalStorage(), str(root / f"global_step_{step}"), read_all=True) is None


def reopen(root, allowed, **options):
    """Resume with a good disk; the state must be one of the `allowed`, {step: engine value}. Then the next save works."""
    with Run(root, **options) as run:
        check_whole(root)
        check_pointers(root, run.start)
        assert run.start == max(list_steps(root), default=0), "a published step is resumed from"
        assert allowed[run.start] == run.engine.value
        run.save(99)
    check_litter(root)
    check_whole(root)
    with Run(root) as run:
        assert (run.start, run.engine.value) == (99, 99.0)


def check_pointers(root, start):
    tracker = root / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        assert tracker.read_text() == str(start)


def act_save(root, storage, *, value=None, step=20, **options):
    with Run(root, storage=storage, **options) as run:
        run.engine.value = float(step if value is None else value)
        run.handler.save_checkpoint(step)


def test_first_save_survives_death_at_each_point(place):
    for root in sweep(place, Path.mkdir, act_save):
        reopen(root, {0: 0.0, 20: 20.0})


@pytest.mark.case("C307", "C601", "C610")
def test_save_that_prunes_survives_death_at_each_point(place):
    for root in sweep(
        place,
        lambda root: make_checkpoints(root, 5, 10),
        lambda root, storage: act_save(root, storage, max_ckpt_to_keep=1),
    ):
        reopen(root, {10: 10.0, 20: 20.0}, max_ckpt_to_keep=1)
        assert list_steps(root) == [99]


def test_save_of_an_existing_step_survives_death_at_each_point(place):
    for root in sweep(
        place, lambda root: make_checkpoints(root, 10, 20), lambda root, storage: act_save(root, storage, value=20.5)
    ):
        with Run(root) as run:
            assert (run.start, run.engine.value in (20.0, 20.5)) == (20, True)
        reopen(root, {20: run.engine.value})
        assert list_steps(root) == [10, 20, 99]


def test_fresh_start_survives_death_at_each_point(place):
    for root in sweep(
        place,
        lambda root: make_checkpoints(root, 10, 20),
        lambda root, storage: act_save(root, storage, step=5, resume_mode="disable"),
    ):
        there = len(list_steps(root)), len(list((root / "archive").glob("*/global_step_*")))
        assert there in ((2, 0), (1, 1), (0, 2), (1, 2))
        reopen(root, {0: 0.0, 5: 5.0, 20: 20.0})
        kept = [*(root / "archive").glob("*/global_step_*"), *root.glob("global_step_*")]
        assert sorted(path.name for path in kept)[:2] == ["global_step_10", "global_step_20"]


@pytest.mark.parametrize("step", [20, 30])
def test_recovery_survives_death_at_each_point(place, step):
    """Die in the save of an existing or a new step, just before or in its commit; then in the recovery, at each point."""
    for points in (25, 27, 30, 33):
        spot = place / str(points)
        spot.mkdir()

        def prepare(root, points=points):
            make_checkpoints(root, 10, 20)
            run_in_child(lambda: act_save(root, DyingStorage(points), value=step + 0.5, step=step))

        def recover(root, storage):
            with Run(root, storage=storage):
                pass

        for root in sweep(spot, prepare, recover):
            with Run(root) as run:
                assert run.engine.value in (20.0, step + 0.5)
            reopen(root, {run.start: run.engine.value})
            assert list_steps(root) == sorted({10, 20, run.start, 99})


def test_resume_into_a_new_root_survives_death_at_each_point(place):
    """The new root holds another run, which makes room; the source is never touched."""
    source = place / "source"
    make_checkpoints(source, 10)
    before = {path.name: path.read_bytes() for path in (source / "global_step_10").iterdir()}
    options = {"resume_from_path": str(source / "global_step_10")}
    for root in sweep(
        place, lambda root: make_checkpoints(root, 5), lambda root, storage: act_save(root, storage, **options)
    ):
        with Run(root, **options) as run:
            assert (run.start, run.engine.value) in {(10, 10.0), (20, 20.0)}
            run.save(99)
        check_litter(root)
        check_whole(root)
        assert list_steps(root)[-1] == 99
        assert len(list((root / "archive").glob("*/global_step_5"))) == 1
    assert before == {path.name: path.read_bytes() for path in (source / "global_step_10").iterdir()}
