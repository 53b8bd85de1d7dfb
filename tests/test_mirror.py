"""The mirror as a run's user meets it: what reaches it, when, and how a run starts from it."""

import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from recipe_ckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    LineageError,
    RemoteError,
    RemoteRefusedError,
    RemoteUnreachableError,
    UploadFailedError,
)
from recipe_ckpt.policies import MirrorPolicy
from recipe_ckpt.retention import Retention
from tests.remotes import CHANGES, WatchedRemote, assert_whole
from tests.tiny import Run, cut_in_half, list_steps, make_checkpoints, resume


def to(mirror, remote=None, **policy):
    """Options of a run with a mirror."""
    remote = remote or WatchedRemote(str(mirror))
    return {
        "default_hdfs_dir": str(mirror),
        "open_remote": lambda url: remote if url == str(mirror) else WatchedRemote(url),
        "mirror_policy": MirrorPolicy(**{"exit_wait_secs": 20.0, **policy}),
    }


def read_tree(directory):
    return {path.relative_to(directory): path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}


def wait_until(condition, within_secs=20.0):
    deadline = time.monotonic() + within_secs
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.case("C1202", "C1203", "C1204")
@pytest.mark.parametrize("name", ["plain", "with blank", "$HOME", ";touch x", "it's", "100%", "größe"])
def test_the_layout_is_the_same_however_the_mirror_is_written(tmp_path, name):
    mirror = tmp_path / name
    for written in (str(mirror), f"{mirror}/", f"file://{mirror}"):
        root = tmp_path / "root"
        options = {
            "default_hdfs_dir": written,
            "open_remote": WatchedRemote,
            "mirror_policy": MirrorPolicy(exit_wait_secs=20.0),
        }
        with Run(root, **options) as run:
            run.save(run.start + 4)
    assert list_steps(mirror) == [4, 8, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["root", name])
    assert read_tree(mirror / "global_step_8") == read_tree(root / "global_step_8")


def test_every_save_reaches_the_mirror_in_the_same_layout(root, mirror):
    make_checkpoints(root, 2, 4, **to(mirror))
    assert list_steps(mirror) == [2, 4]
    for step in (2, 4):
        assert read_tree(root / f"global_step_{step}") == read_tree(mirror / f"global_step_{step}")
    assert (mirror / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert_whole(mirror)


@pytest.mark.case("C1207")
def test_what_is_committed_and_missing_there_is_sent_at_the_next_start(root, mirror):
    make_checkpoints(root, 2, 4)
    with Run(root, **to(mirror)):
        pass
    assert list_steps(mirror) == [2, 4]
    assert_whole(mirror)


def test_the_newest_is_sent_first(root, mirror):
    make_checkpoints(root, 2, 4, 6)
    remote = WatchedRemote(str(mirror))
    with Run(root, **to(mirror, remote)):
        pass
    assert [name.split("/")[0] for name in remote.sent] == sorted((name.split("/")[0] for name in remote.sent), reverse=True)


def test_a_file_that_is_there_is_not_sent_again(root, mirror):
    make_checkpoints(root, 2, 4, **to(mirror))
    remote = WatchedRemote(str(mirror))
    with Run(root, **to(mirror, remote)):
        pass
    assert remote.sent == []


@pytest.mark.case("C1210")
def test_an_empty_disk_resumes_from_the_mirror(root, mirror):
    make_checkpoints(root, 2, 4, **to(mirror))
    before = read_tree(root / "global_step_4")
    shutil.rmtree(root)
    assert resume(root, **to(mirror)) == 4
    assert read_tree(root / "global_step_4") == before


def test_a_stale_disk_resumes_from_the_mirror(root, mirror, tmp_path):
    make_checkpoints(root, 2, 4, **to(mirror))
    shutil.copytree(root, tmp_path / "stale")
    with Run(root, **to(mirror)) as run:
        run.save(6, 8)
    assert resume(tmp_path / "stale", **to(mirror)) == 8
    with Run(tmp_path / "stale", **to(mirror)) as run:
        run.save(10)
    assert list_steps(mirror) == [2, 4, 6, 8, 10]
    assert_whole(mirror)


def test_what_lies_here_is_not_downloaded(root, mirror):
    make_checkpoints(root, 2, 4, **to(mirror))
    remote = WatchedRemote(str(mirror))
    assert resume(root, **to(mirror, remote)) == 4
    assert "get_file" not in {name for name, _ in remote.operations}


def test_a_damaged_step_is_taken_from_the_mirror(root, mirror, caplog):
    make_checkpoints(root, 2, 4, **to(mirror))
    cut_in_half(root / "global_step_4" / "model-0.json")
    assert resume(root, **to(mirror)) == 4
    assert f"model-0.json: has 2 bytes, 4 were written. It is downloaded from {mirror}/global_step_4" in caplog.text
    assert resume(root) == 4


def test_a_step_that_is_damaged_here_and_there_gives_way_to_its_ancestor(root, mirror):
    make_checkpoints(root, 2, 4, **to(mirror))
    for place in (root, mirror):
        cut_in_half(place / "global_step_4" / "model-0.json")
    assert resume(root, **to(mirror)) == 2


def test_a_lone_mirror_whose_newest_is_damaged_gives_its_ancestor(root, mirror):
    make_checkpoints(root, 2, 4, **to(mirror))
    shutil.rmtree(root)
    cut_in_half(mirror / "global_step_4" / "model-0.json")
    assert resume(root, **to(mirror)) == 2


def test_a_local_run_and_a_mirror_of_another_one_are_an_error_that_names_both(root, mirror, tmp_path):
    make_checkpoints(root, 2)
    make_checkpoints(tmp_path / "other", 3, **to(mirror))
    with pytest.raises(
        LineageError, match=r"default_hdfs_dir: .* holds the run .*, the local root the run .*checkpoint=fresh"
    ):
        resume(root, **to(mirror))
    assert list_steps(mirror) == [3]


@pytest.mark.case("C1210")
def test_a_mirror_out_of_reach_is_an_error_on_an_empty_disk(root, mirror):
    make_checkpoints(root, 2, **to(mirror))
    shutil.rmtree(root)
    remote = WatchedRemote(str(mirror))
    remote.is_down = True
    with pytest.raises(RemoteUnreachableError, match="default_hdfs_dir: .* can't be used: .*nobody answers"):
        resume(root, **to(mirror, remote))
    assert list_steps(root) == []


def test_a_mirror_out_of_reach_is_a_warning_where_a_whole_checkpoint_lies(root, mirror, caplog):
    make_checkpoints(root, 2, **to(mirror))
    remote = WatchedRemote(str(mirror))
    remote.is_down = True
    assert resume(root, **to(mirror, remote, exit_wait_secs=0.0)) == 2
    assert "can't be used" in caplog.text
    with pytest.raises(RemoteError, match="can't be used"):
        resume(root, **to(mirror, remote, on_failure="raise"))


@pytest.mark.case("C1002", "C1201")
def test_an_outage_delays_uploads_and_nothing_else(root, mirror):
    remote = WatchedRemote(str(mirror))
    with Run(root, **to(mirror, remote)) as run:
        run.save(2)
        wait_until(lambda: list_steps(mirror) == [2] if mirror.exists() else False)
        remote.is_down = True
        run.save(4, 6)
        assert list_steps(root) == [2, 4, 6]
        remote.is_down = False
    assert list_steps(mirror) == [2, 4, 6]
    assert_whole(mirror)


def refuse(number, name):
    if name == "put_file":
        raise RemoteRefusedError("/team: the quota is used up")


def test_a_refusal_stops_the_run_if_it_is_told_to(root, mirror, caplog):
    options = to(mirror, WatchedRemote(str(mirror), refuse), on_failure="raise")
    with pytest.raises(UploadFailedError, match="quota is used up.*whole on the local"), Run(root, **options) as run:  # noqa: PT012
        run.save(2)
        wait_until(lambda: "quota is used up" in caplog.text)
        run.save(4)
    assert list_steps(root) == [2, 4]


@pytest.mark.parametrize(("policy", "is_told"), [("warn", True), ("ignore", False)])
def test_a_refusal_is_told_once_or_not_at_all(root, mirror, caplog, policy, is_told):
    with Run(root, **to(mirror, WatchedRemote(str(mirror), refuse), on_failure=policy)) as run:
        run.save(2, 4)
    assert list_steps(root) == [2, 4]
    assert ("quota is used up" in caplog.text) is is_told
    assert ("the steps [4, 2] are NOT there" in caplog.text) is is_told


@pytest.mark.case("C1206")
def test_the_end_of_a_run_waits_for_uploads_and_not_for_good(root, mirror, caplog):
    caplog.set_level(logging.INFO)
    may_go_on = threading.Event()
    remote = WatchedRemote(str(mirror), lambda number, name: name != "put_file" or may_go_on.wait(20))
    with Run(root, **to(mirror, remote)) as run:
        run.save(2)
        threading.Timer(0.3, may_go_on.set).start()
    assert list_steps(mirror) == [2]
    assert "waiting for the steps [2]" in caplog.text
    may_go_on.clear()
    begin = time.monotonic()
    with Run(root, **to(mirror, remote, exit_wait_secs=0.2)) as run:
        run.save(4)
        threading.Timer(1.0, may_go_on.set).start()
    assert time.monotonic() - begin < 10
    assert (mirror / "latest_checkpointed_iteration.txt").read_text() in ("2", "4")


def test_leaving_by_an_exception_does_not_wait(root, mirror, caplog):
    remote = WatchedRemote(str(mirror))
    begin = time.monotonic()
    with pytest.raises(SystemExit), Run(root, **to(mirror, remote)) as run:  # noqa: PT012
        remote.is_down = True
        run.save(2)
        raise SystemExit(143)
    assert time.monotonic() - begin < 10
    assert "are NOT there" in caplog.text
    remote.is_down = False
    assert resume(root, **to(mirror, remote)) == 2
    assert list_steps(mirror) == [2]


class TestFreshStart:
    def test_moves_the_mirrors_run_aside_too(self, root, mirror):
        make_checkpoints(root, 2, 4, **to(mirror))
        with Run(root, resume_mode="disable", **to(mirror)) as run:
            run.save(1)
        assert list_steps(root) == list_steps(mirror) == [1]
        (archived,) = (mirror / "archive").iterdir()
        assert list_steps(archived) == [2, 4]
        assert archived.name == next((root / "archive").iterdir()).name

    def test_is_refused_over_an_object_store_that_is_not_empty(self, root, mirror):
        make_checkpoints(root, 2, **to(mirror))
        remote = WatchedRemote(str(mirror))
        remote.can_rename = False
        with pytest.raises(ConfigError, match="default_hdfs_dir: .*an empty place.*experiment_name"):
            resume(root, resume_mode="disable", **to(mirror, remote))
        assert list_steps(root) == list_steps(mirror) == [2]

    def test_takes_a_mirror_of_another_run(self, root, mirror, tmp_path):
        make_checkpoints(root, 2)
        make_checkpoints(tmp_path / "other", 3, **to(mirror))
        with Run(root, resume_mode="disable", **to(mirror)) as run:
            run.save(1)
        assert list_steps(root) == list_steps(mirror) == [1]


class TestRetention:
    def test_waits_for_the_upload(self, root, mirror):
        remote = WatchedRemote(str(mirror))
        with Run(root, max_ckpt_to_keep=1, **to(mirror, remote, max_pending=10)) as run:
            remote.is_down = True
            run.save(2, 4, 6)
            assert list_steps(root) == [2, 4, 6]
            remote.is_down = False
            wait_until(lambda: not run.handler.pending_uploads)
            run.save(8)
            wait_until(lambda: not run.handler.pending_uploads)
            run.save(10)
        assert list_steps(mirror) == [2, 4, 6, 8, 10]
        assert len(list_steps(root)) <= 2

    @pytest.mark.case("C1205")
    def test_never_takes_the_step_that_is_being_uploaded(self, root, mirror):
        begun, may_go_on = threading.Event(), threading.Event()

        def wait(number, name):
            if name == "put_file":
                begun.set()
                assert may_go_on.wait(20)

        with Run(root, max_ckpt_to_keep=1, **to(mirror, WatchedRemote(str(mirror), wait), max_pending=1)) as run:
            run.save(2)
            assert begun.wait(20)
            run.save(4, 6)
            assert list_steps(root) == [2, 6]
            may_go_on.set()
        assert list_steps(mirror) == [2, 6]
        assert_whole(mirror)

    def test_gives_old_uploads_up_beyond_the_bound(self, root, mirror, caplog):
        remote = WatchedRemote(str(mirror))
        with Run(root, max_ckpt_to_keep=1, **to(mirror, remote, max_pending=2)) as run:
            run.save(2)
            wait_until(lambda: run.handler.last_upload)
            remote.is_down = True
            run.save(4)
            run.save(6, 8, 10)
            remote.is_down = False
        assert 10 in list_steps(mirror)
        assert "never reach it" in caplog.text
        assert_whole(mirror)

    def test_keeps_so_many_on_the_mirror(self, root, mirror):
        with Run(root, **to(mirror, max_to_keep=2)) as run:
            for step in (2, 4, 6, 8):
                run.save(step)
                wait_until(lambda step=step: run.handler.last_upload and run.handler.last_upload.step == step)
        assert list_steps(mirror) == [6, 8]
        assert list_steps(root) == [2, 4, 6, 8]
        assert_whole(mirror)

    def test_keeps_pinned_best_and_every_nth_on_the_mirror(self, root, mirror):
        retention = Retention(every=4, best=1, best_metric="loss", best_mode="max")
        (root / ".pins").mkdir(parents=True)
        (root / ".pins" / "6").touch()
        with Run(root, retention=retention, **to(mirror, max_to_keep=1)) as run:
            for step in (1, 2, 4, 6, 7, 9):
                run.save(step)
                wait_until(lambda step=step: run.handler.last_upload and run.handler.last_upload.step == step)
        assert list_steps(mirror) == [1, 4, 9]  # the pin was archived with what lay here before the first start


class TestRewind:
    def test_replaces_on_the_mirror_what_it_left_behind(self, root, mirror):
        make_checkpoints(root, 2, 4, 6, **to(mirror))
        with Run(root, resume_mode="resume_path", resume_from_path=str(root / "global_step_2"), **to(mirror)) as run:
            run.save(4)
        assert (mirror / "latest_checkpointed_iteration.txt").read_text() == "4"
        assert list_steps(mirror / "archive" / "left-behind") == [4]
        assert_whole(mirror)
        shutil.rmtree(root)
        assert resume(root, **to(mirror)) == 4

    def test_can_name_a_step_of_its_own_mirror(self, root, mirror):
        make_checkpoints(root, 2, 4, **to(mirror))
        shutil.rmtree(root)
        for named in (f"{mirror}/global_step_2", f"file://{mirror}/global_step_2"):
            assert resume(root, resume_mode="resume_path", resume_from_path=named, **to(mirror)) == 2
            assert list_steps(mirror) == [2, 4]

    def test_a_step_saved_again_replaces_its_former_self(self, root, mirror):
        make_checkpoints(root, 2, 4, **to(mirror))
        with Run(root, **to(mirror)) as run:
            run.save(4)
        assert read_tree(root / "global_step_4") == read_tree(mirror / "global_step_4")
        assert_whole(mirror)


class TestUrlOfAnotherRun:
    def test_is_resumed_from(self, root, mirror):
        make_checkpoints(root.parent / "first", 2, 4, **to(mirror))
        for number, url in enumerate(("hdfs://nn/first", "hdfs://nn/first/", "hdfs://nn/first/global_step_4")):
            target = root / str(number)
            options = {"resume_from_path": url, "open_remote": lambda url: WatchedRemote(str(mirror), url=url)}
            assert resume(target, **options) == 4
            with Run(target, **options) as run:
                run.save(6)
            assert resume(target, **options) == 6
            assert not (target / ".pulled").exists()

    def test_that_holds_nothing_is_an_error(self, root, mirror):
        options = {"resume_from_path": "hdfs://nn/a", "open_remote": lambda url: WatchedRemote(str(mirror), url=url)}
        with pytest.raises(CheckpointNotFoundError, match="resume_from_path: found .*where no checkpoint lies"):
            resume(root, resume_mode="resume_path", **options)


def test_newer_work_of_another_process_is_never_published_over(root, mirror, tmp_path, caplog):
    make_checkpoints(root, 2, **to(mirror))
    shutil.copytree(root, tmp_path / "twin")
    remote = WatchedRemote(str(mirror))
    remote.is_down = True
    with Run(root, **to(mirror, remote)) as run:
        with Run(tmp_path / "twin", **to(mirror)) as other:
            other.save(4, 6)
        run.save(3)
        remote.is_down = False
    assert (mirror / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert list_steps(mirror) == [2, 4, 6]
    assert "Nothing is published over it" in caplog.text.replace("\n", " ")


class Stopped(BaseException):
    pass


@pytest.mark.case("C1208")
def test_stopped_at_any_operation_the_mirror_is_whole_and_nothing_is_sent_twice(place):
    """An upload, one that replaces a step, and pruning: stopped before each of their operations in turn."""
    number = 0
    while True:
        number += 1
        here = place / str(number)
        root, mirror = here / "root", here / "mirror"
        make_checkpoints(root, 2, 4, **to(mirror))
        with Run(root, resume_mode="resume_path", resume_from_path=str(root / "global_step_2")) as run:
            run.save(4, 6)
        remote = WatchedRemote(str(mirror))

        def stop(count, name, remote=remote, number=number, mirror=mirror):
            if mirror.exists() and name in CHANGES:
                assert_whole(mirror)
            if count >= number:
                remote.is_down = True
                raise RemoteUnreachableError("stopped")

        remote.before = stop
        try:
            with Run(root, **to(mirror, remote, exit_wait_secs=0.0, max_to_keep=1)) as run:
                wait_until(lambda run=run, remote=remote: remote.is_down or not run.handler.pending_uploads)
            was_stopped = remote.is_down
        except RemoteUnreachableError:
            was_stopped = True
        assert_whole(mirror)
        sent = remote.sent
        again = WatchedRemote(str(mirror))
        with Run(root, **to(mirror, again, max_to_keep=1)):
            pass
        assert_whole(mirror)
        assert not set(sent) & set(again.sent), "a finished file was sent twice"
        assert (mirror / "latest_checkpointed_iteration.txt").read_text() == "6"
        if not was_stopped:
            break
        shutil.rmtree(here)
    assert number > 20
