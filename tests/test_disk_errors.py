"""A disk that fails in the midst of a save: it costs that save, and nothing that was there."""

import contextlib
import errno
import logging
import os
import resource
import shutil

import pytest
import torch

from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.policies import SavePolicy
from recipe_ckpt.storage import LocalStorage
from tests.test_crash import check_litter, check_whole
from tests.tiny import Run, TinyLoader, list_steps, make_checkpoints, resume, run_in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TRACKER = "latest_checkpointed_iteration.txt"


class Killed(BaseException):
    """The end of a process, in a test that goes on."""


class FaultyStorage(LocalStorage):
    """After `fail_in(n)` the n-th change of the disk fails; after `kill_in(n)` no change is made from the n-th on."""

    def __init__(self):
        self.heal()

    def fail_in(self, operations, number=errno.ENOSPC):
        self._left, self._error, self.is_over = operations, OSError(number, os.strerror(number)), False

    def kill_in(self, operations):
        self._left, self._error, self.is_over = operations, Killed(), False

    def heal(self):
        self._left, self._error, self.is_over = 0, None, True

    def _count(self):
        self._left -= 1
        if self._left == 0 or (self._left < 0 and isinstance(self._error, Killed)):
            self.is_over = True
            raise self._error

    def make_dirs(self, path):
        self._count()
        super().make_dirs(path)

    def write_file(self, path, chunks, *, name, rank):
        self._count()
        entry = super().write_file(path, self._half_by_half(chunks), name=name, rank=rank)
        self._count()
        return entry

    def _half_by_half(self, chunks):
        for chunk in chunks:
            yield chunk[: len(chunk) // 2]
            self._count()
            yield chunk[len(chunk) // 2 :]

    def rename(self, source, target):
        self._count()
        super().rename(source, target)

    def remove_file(self, path):
        self._count()
        super().remove_file(path)

    def remove_tree(self, path):
        self._count()
        super().remove_tree(path)

    def sync_dir(self, path):
        self._count()
        super().sync_dir(path)


def bury(run, root):
    """Let go of a run whose storage is dead, and of its lease, as the kernel does for a process."""
    with contextlib.suppress(Killed):
        run.handler.close()
    (root / ".lease.json").unlink(missing_ok=True)


def fail_each_operation(place, step, on_failure="raise"):
    """Save `step` after 10 and 20, with the disk failing at change 1, 2, ...; yield the open run, and what it said."""
    make_checkpoints(place / "before", 10, 20)
    for operations in range(1, 200):
        storage = FaultyStorage()
        root = shutil.copytree(place / "before", place / f"run{operations}")
        with Run(root, storage=storage, save_policy=SavePolicy(on_failure=on_failure), max_ckpt_to_keep=2) as run:
            number, said = (errno.ENOSPC, errno.EIO, errno.EDQUOT)[operations % 3], None
            storage.fail_in(operations, number)
            try:
                run.save(step)
            except SaveFailedError as error:
                said = str(error)
            was_hit = storage.is_over
            storage.heal()
            yield root, run, said, os.strerror(number)
        shutil.rmtree(root)
        if not was_hit:
            return
    raise AssertionError("the save never had enough")


def resume_a_copy(root):
    """Where a run would stand that was killed now and started again."""
    copy = shutil.copytree(root, f"{root}-killed", ignore=shutil.ignore_patterns(".lease.json*"))
    try:
        return resume(copy)
    finally:
        shutil.rmtree(copy)


@pytest.mark.case("C401")
@pytest.mark.parametrize("step", [20, 30])
def test_disk_that_fails_at_any_change_costs_that_save_only(place, step):
    failures = 0
    for root, run, said, cause in fail_each_operation(place, step):
        if said is not None:
            failures += 1
            assert said.startswith(f"step {step}: not saved to {root}: OSError: ")
            assert cause in said
        check_whole(root)
        assert resume_a_copy(root) in {20, step}
        run.save(40)
        check_whole(root)
        assert list_steps(root) in ([[step, 40]] if said is None else [[step, 40], [20, 40]])
        run.handler.close()
        check_litter(root)
        assert resume(root) == 40
    assert failures > 30


@pytest.mark.case("C401")
@pytest.mark.parametrize("step", [20, 30])
@pytest.mark.parametrize("operations", [1, 2, 4, 9])
def test_kill_in_the_save_after_a_failed_one_loses_nothing_more(place, step, operations):
    for root, run, _, _ in fail_each_operation(place, step):
        run.handler._storage.kill_in(operations)
        with pytest.raises(Killed):
            run.save(40)
        bury(run, root)
        assert resume(root) in {20, step}
        check_whole(root)


@pytest.mark.case("C401")
def test_disk_that_fails_at_any_change_is_tolerated_if_that_was_asked_for(place, caplog):
    for root, run, said, cause in fail_each_operation(place, 30, "warn"):
        assert said is None
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        assert run.handler.last_save is not None or any("step 30: not saved" in line and cause in line for line in told)
        assert resume_a_copy(root) in {20, 30}
        run.save(40)
        assert run.handler.last_save.step == 40


@pytest.mark.case("C204")
@pytest.mark.parametrize("fault", ["fail_in", "kill_in"])
def test_edited_tracker_holds_when_the_save_after_it_does_not_end(place, fault):
    make_checkpoints(place / "before", 10, 20)
    (place / "before" / TRACKER).write_text("10")
    for operations in range(1, 40):
        storage = FaultyStorage()
        root = shutil.copytree(place / "before", place / f"run{operations}")
        run = Run(root, storage=storage).__enter__()
        run.engine.value, run.loader.batch_sampler.consumed = 20.5, 20
        getattr(storage, fault)(operations)
        with contextlib.suppress(SaveFailedError, Killed):
            run.handler.save_checkpoint(20)
        bury(run, root)
        with Run(root) as again:
            assert (again.start, again.engine.value) in ((10, 10.0), (20, 20.5))


class GrowingLoader(TinyLoader):
    """Its state takes 100 kB from step 8 on."""

    def __init__(self):
        super().__init__()
        self._iterator = "has begun"  # a loader that has not begun is not asked for its state

    def state_dict(self):
        return {"buffer": torch.zeros(100_000 if self.batch_sampler.consumed >= 8 else 1, dtype=torch.uint8)}


@pytest.mark.case("C401")
def test_limit_of_the_shell_on_file_sizes_costs_that_save_only(tmp_path):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with Run(tmp_path, loader=GrowingLoader(), max_ckpt_to_keep=2) as run:
            run.save(4)
            with pytest.raises(SaveFailedError, match=r"step 8: not saved to .*File too large"):
                run.save(8)

    assert run_in_child(work) == 0
    assert (tmp_path / TRACKER).read_text() == "4"
    assert list_steps(tmp_path) == [4]
    check_litter(tmp_path)
    assert resume(tmp_path) == 4
