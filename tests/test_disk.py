"""Disks that are full, read-only or another user's: what was saved stays, and the user is told what to do."""

import errno
import os
import shutil
import subprocess
import tempfile

import pytest

from recipe_ckpt.errors import CheckpointError, ConfigError, NothingToResumeError, RankError, SaveFailedError
from recipe_ckpt.storage import LocalStorage
from tests.test_crash import KILLED, check_litter, check_whole
from tests.tiny import Run, list_steps, make_checkpoints, resume, run_in_child, run_world

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


# --- full disks


@pytest.mark.case("C401")
def test_full_disk_keeps_what_it_holds_and_is_of_use_again_when_there_is_room(tiny_disk):
    documents = {"config.yaml": "x" * 100_000}
    with Run(tiny_disk, documents=documents) as run:
        with pytest.raises(SaveFailedError, match=r"step 4: not saved to .*No space left on device"):
            run.save(1, 2, 3, 4)
        check_whole(tiny_disk)
        assert list_steps(tiny_disk) == [1, 2, 3]
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
        if self.is_sticky and operation == self.operation and os.path.basename(path).partition(".")[0] == "global_step_1":
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
    with pytest.raises(
        NothingToResumeError, match=r"(?s)global_step_10: .*Input/output error.*global_step_5: .*Input/output"
    ):
        resume(tmp_path, storage=Unreadable())
    assert resume(tmp_path) == 10
