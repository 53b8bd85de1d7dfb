"""Disks that are full, broken, read-only, or not ours: what was saved stays, and the user is told what to do."""

import errno
import logging
import os
import resource
import shutil
import subprocess
import tempfile

import pytest
import torch

from recipe_ckpt.errors import CheckpointError, ConfigError, NothingToResumeError, RankError, SaveFailedError
from recipe_ckpt.policies import SavePolicy
from recipe_ckpt.storage import LocalStorage
from tests.test_crash import KILLED, check_litter, check_whole
from tests.tiny import Run, TinyLoader, list_steps, make_checkpoints, resume, run_in_child, run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TRACKER, RECORD = "latest_checkpointed_iteration.txt", "run.json"
NOBODY = 65534


def run_as_nobody(work):
    """Run `work` in a child without root's rights, and return its exit code."""

    def drop_rights_and_work():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    return run_in_child(drop_rights_and_work)


@pytest.fixture
def open_place(place):
    """A directory that every user may use (pytest's own are the user's alone)."""
    place.chmod(0o777)
    return place


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 512 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"can't mount here: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


# --- pointers


class DyingInReplace(LocalStorage):
    """Ends its process between the temporary file of one name and its rename."""

    def __init__(self, name):
        self.name = name

    def write_file(self, path, chunks, *, name, rank):
        entry = super().write_file(path, chunks, name=name, rank=rank)
        if os.path.basename(path).startswith(self.name):
            os._exit(KILLED)
        return entry


@pytest.mark.case("C206")
@pytest.mark.parametrize("before", [[], [4]])
@pytest.mark.parametrize("name", [TRACKER, RECORD])
def test_pointer_whose_replacement_was_killed_is_the_old_one_and_its_leftovers_go(tmp_path, name, before):
    make_checkpoints(tmp_path, *before)
    old = (tmp_path / name).read_text() if before else None
    assert run_in_child(lambda: make_checkpoints(tmp_path, 8, storage=DyingInReplace(name))) == KILLED
    assert ((tmp_path / name).read_text() if before else None) == old
    assert len(list(tmp_path.glob(f"{name}.*.tmp"))) == 1
    (tmp_path / f"{name}.{'0' * 32}.tmp").write_text("of another process")
    (tmp_path / f"{name}.tmp").write_text("of the user")
    assert resume(tmp_path) == 8
    assert (tmp_path / TRACKER).read_text() == "8"
    assert [path.name for path in tmp_path.glob("*.tmp")] == [f"{name}.tmp"]
    make_checkpoints(tmp_path, 12)
    assert resume(tmp_path) == 12


@pytest.mark.case("C207")
@pytest.mark.parametrize("name", [TRACKER, RECORD])
def test_pointer_that_is_a_directory_stops_all_with_its_path(tmp_path, name):
    make_checkpoints(tmp_path, 5)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{name}: .*directory"):
        resume(tmp_path)
    outcomes = run_world(2, lambda coordinator: resume(tmp_path, coordinator=coordinator))
    assert all(isinstance(error, CheckpointError) and f"{name}: " in str(error) for error in outcomes)
    assert list_steps(tmp_path) == [5]


@pytest.mark.case("C207")
@pytest.mark.parametrize("name", [TRACKER, RECORD])
def test_pointer_that_may_not_be_read_stops_with_its_path(open_place, name):
    def work():
        make_checkpoints(open_place / "run", 5)
        (open_place / "run" / name).chmod(0)
        with pytest.raises(CheckpointError, match=rf"{name}: Permission denied"):
            resume(open_place / "run")
        (open_place / "run" / name).chmod(0o600)
        assert resume(open_place / "run") == 5

    assert run_as_nobody(work) == 0


# --- before training


@pytest.mark.case("C402")
@pytest.mark.parametrize("below", [".", "run"])
@pytest.mark.parametrize("steps", [(), (5,)])
def test_root_that_may_not_be_written_is_refused_at_start(open_place, below, steps):
    def work():
        make_checkpoints(open_place / "parent", *steps)
        (open_place / "parent").chmod(0o555)
        with pytest.raises(ConfigError, match=r"checkpoint.default_local_dir: found .*parent.*Permission denied.*may write"):
            resume(open_place / "parent" / below)
        (open_place / "parent").chmod(0o755)

    assert run_as_nobody(work) == 0


@pytest.mark.case("C402")
def test_root_on_a_disk_that_is_mounted_read_only_is_refused_on_every_rank(tiny_disk):
    make_checkpoints(tiny_disk / "run", 5)
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    outcomes = run_world(2, lambda coordinator: resume(tiny_disk / "run", coordinator=coordinator))
    assert [type(error) for error in outcomes] == [ConfigError, RankError]
    assert all("Read-only file system" in str(error) for error in outcomes)


@pytest.mark.case("C308")
@pytest.mark.parametrize("elsewhere", ["/dev/shm", "/nowhere/at/all"])
def test_directory_for_temporary_files_is_not_used(tmp_path, monkeypatch, elsewhere):
    if os.path.isdir(elsewhere):
        assert os.stat(elsewhere).st_dev != os.stat(tmp_path).st_dev
        elsewhere = tempfile.mkdtemp(dir=elsewhere)
    monkeypatch.setenv("TMPDIR", elsewhere)
    monkeypatch.setattr(tempfile, "tempdir", None)
    make_checkpoints(tmp_path / "run", 5, 10, max_ckpt_to_keep=1)
    assert resume(tmp_path / "run") == 10
    if os.path.isdir(elsewhere):
        os.rmdir(elsewhere)  # which an empty directory allows


@pytest.mark.case("C403")
def test_room_that_is_too_small_is_told_of_the_roots_own_disk(tiny_disk, caplog):
    documents = {"config.yaml": "x" * 300_000}
    make_checkpoints(tiny_disk / "run", 5, documents=documents)
    assert resume(tiny_disk / "run") == 5
    assert f"{tiny_disk}/run: 0.2 MB are free on its disk, the last checkpoint takes 0.3 MB" in caplog.text


@pytest.mark.case("C403")
def test_room_that_is_enough_is_no_topic(tmp_path, caplog):
    asked = []

    class Noting(LocalStorage):
        def free_bytes(self, path):
            asked.append(path)
            return super().free_bytes(path)

    make_checkpoints(tmp_path, 5)
    assert resume(tmp_path, storage=Noting()) == 5
    assert asked == [str(tmp_path)]
    assert "are free" not in caplog.text


# --- in a save


class FailingStorage(LocalStorage):
    """Raises at the n-th change of the disk from `left = n` on; 0 and less: never."""

    def __init__(self, number=errno.ENOSPC):
        self.left, self.number = 0, number

    def _count(self, path):
        self.left -= 1
        if self.left == 0:
            raise OSError(self.number, os.strerror(self.number), path)

    def make_dirs(self, path):
        self._count(path)
        super().make_dirs(path)

    def write_file(self, path, chunks, *, name, rank):
        self._count(path)
        return super().write_file(path, self._begin_and_count(path, chunks), name=name, rank=rank)

    def _begin_and_count(self, path, chunks):
        for chunk in chunks:
            yield chunk[: len(chunk) // 2]
            self._count(path)
            yield chunk[len(chunk) // 2 :]

    def rename(self, source, target):
        self._count(source)
        super().rename(source, target)

    def remove_file(self, path):
        self._count(path)
        super().remove_file(path)

    def remove_tree(self, path):
        self._count(path)
        super().remove_tree(path)

    def sync_dir(self, path):
        self._count(path)
        super().sync_dir(path)


def fail_each_operation(place, step, on_failure):
    """Save `step` after 10 and 20, with the disk failing at operation 1, 2, ...; yield what is open then, and what it said."""
    make_checkpoints(place / "before", 10, 20)
    for left in range(1, 200):
        storage = FailingStorage((errno.ENOSPC, errno.EIO, errno.EDQUOT)[left % 3])
        root = shutil.copytree(place / "before", place / f"run{left}")
        with Run(root, storage=storage, save_policy=SavePolicy(on_failure=on_failure), max_ckpt_to_keep=2) as run:
            said = None
            storage.left = left
            try:
                run.save(step)
            except SaveFailedError as error:
                said = str(error)
            is_over, storage.left = storage.left > 0, 0
            yield root, run, said, os.strerror(storage.number)
        shutil.rmtree(root)
        if is_over:
            return


def resume_a_copy(root):
    """Where a run would stand that was killed now and started again."""
    copy = shutil.copytree(root, f"{root}-killed", ignore=shutil.ignore_patterns(".lease.json*"))
    try:
        return resume(copy)
    finally:
        shutil.rmtree(copy)


@pytest.mark.case("C401")
@pytest.mark.parametrize("step", [20, 30])
def test_disk_that_fails_at_any_operation_costs_that_save_only(place, step):
    failures = 0
    for root, run, said, cause in fail_each_operation(place, step, "raise"):
        if said is not None:
            failures += 1
            assert said.startswith(f"step {step}: not saved to {root}: OSError: ")
            assert cause in said
        check_whole(root)
        assert {20, step} >= {resume_a_copy(root)}
        run.save(40)
        check_whole(root)
        assert list_steps(root) == [step, 40] or (said is not None and list_steps(root) == [20, 40])
        run.handler.close()
        check_litter(root)
        assert resume(root) == 40
    assert failures > 30


@pytest.mark.case("C401")
@pytest.mark.parametrize("step", [20, 30])
def test_kill_in_the_save_after_a_failed_one_loses_nothing_more(place, step):
    """The save after the failed one begins and is killed: before its first operation, in its files, before its commit."""
    for root, run, _, _ in fail_each_operation(place, step, "raise"):
        for left in (3, 6, 9, 14):
            copy = shutil.copytree(root, f"{root}-{left}")

            def save_and_die(copy=copy, left=left):
                run.handler._session._store.root = str(copy)
                run.handler._storage.left = left

            save_and_die()


@pytest.mark.case("C401")
@pytest.mark.parametrize("step", [20, 30])
def test_disk_that_fails_at_any_operation_is_tolerated_if_that_was_asked_for(place, step, caplog):
    for root, run, said, cause in fail_each_operation(place, step, "warn"):
        assert said is None
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        assert run.handler.last_save is not None or any(f"step {step}: not saved" in line and cause in line for line in told)
        assert {20, step} >= {resume_a_copy(root)}
        run.save(40)
        assert run.handler.last_save.step == 40


class GrowingLoader(TinyLoader):
    """Its state takes 100 kB from step 8 on."""

    _iterator = "has begun"

    def __init__(self):
        super().__init__()
        self._iterator = "has begun"

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


@pytest.mark.case("C401")
def test_full_disk_keeps_what_it_holds_and_is_of_use_again_when_there_is_room(tiny_disk):
    documents = {"config.yaml": "x" * 100_000}
    with Run(tiny_disk, documents=documents) as run:
        with pytest.raises(SaveFailedError, match=r"step 5: not saved to .*No space left on device"):
            run.save(1, 2, 3, 4, 5)
        check_whole(tiny_disk)
        assert list_steps(tiny_disk) == [1, 2, 3, 4]
        shutil.rmtree(tiny_disk / "global_step_1")
        run.save(6)
    check_litter(tiny_disk)
    assert resume(tiny_disk) == 6


def test_disk_that_is_full_at_the_start_is_told_with_the_root(tiny_disk):
    make_checkpoints(tiny_disk / "run", 5)
    with pytest.raises(OSError, match="No space left"):
        (tiny_disk / "ballast").write_bytes(bytes(1_000_000))
    with pytest.raises(ConfigError, match=r"checkpoint.default_local_dir: found .*run \(No space left on device\)"):
        resume(tiny_disk / "run")
    (tiny_disk / "ballast").unlink()
    assert resume(tiny_disk / "run") == 5


# --- retention


class StickyStorage(LocalStorage):
    """One step can't be deleted until `is_sticky` is False: its rename, or the removal of what was renamed, fails."""

    def __init__(self, operation):
        self.operation, self.is_sticky = operation, True

    def rename(self, source, target):
        self._refuse("rename", source)
        super().rename(source, target)

    def remove_tree(self, path):
        self._refuse("remove_tree", path)
        super().remove_tree(path)

    def _refuse(self, operation, path):
        if self.is_sticky and operation == self.operation and "global_step_1" == os.path.basename(path).partition(".")[0]:
            raise OSError(errno.EBUSY, "Device or resource busy", path)


@pytest.mark.case("C404")
@pytest.mark.parametrize("operation", ["rename", "remove_tree"])
def test_step_that_can_not_be_deleted_is_tried_again_until_it_can(tmp_path, operation, caplog):
    storage = StickyStorage(operation)
    with Run(tmp_path, storage=storage, max_ckpt_to_keep=2) as run:
        storage.is_sticky = False
        run.save(1, 2)
        storage.is_sticky = True
        run.save(3, 4)
        assert "global_step_1" in caplog.text
        assert "will be tried again: [Errno 16] Device or resource busy" in caplog.text
        assert list_steps(tmp_path) == ([1, 3, 4] if operation == "rename" else [3, 4])
        storage.is_sticky = False
        run.save(5)
        assert list_steps(tmp_path) == [4, 5]
    check_litter(tmp_path)


@pytest.mark.case("C404")
def test_directory_that_can_not_be_listed_after_a_commit_is_a_warning(tmp_path, caplog):
    class Unlisted(LocalStorage):
        is_broken = False

        def list_dir(self, path):
            if self.is_broken and path.endswith(".pins"):
                raise OSError(errno.ESTALE, "Stale file handle", path)
            return super().list_dir(path)

    storage = Unlisted()
    with Run(tmp_path, storage=storage, max_ckpt_to_keep=1) as run:
        storage.is_broken = True
        run.save(1, 2)
        assert "Stale file handle" in caplog.text
        storage.is_broken = False
        run.save(3)
    assert list_steps(tmp_path) == [3]


def test_only_damaged_ones_on_a_failing_disk_are_named_each(tmp_path):
    class Unreadable(LocalStorage):
        def read(self, path):
            if path.endswith("manifest.json"):
                raise OSError(errno.EIO, "Input/output error", path)
            return super().read(path)

    make_checkpoints(tmp_path, 5, 10)
    with pytest.raises(NothingToResumeError, match=r"(?s)global_step_10: .*Input/output error.*global_step_5: .*Input/output"):
        resume(tmp_path, storage=Unreadable())
    assert resume(tmp_path) == 10
