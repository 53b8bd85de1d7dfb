"""What can go wrong around a mirror beside an outage: odd places, strangers in it, damage, interruptions."""

import _thread
import errno
import json
import logging
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest

from recipe_ckpt.checkpoint_rules import validate_checkpoint
from recipe_ckpt.errors import (
    ConfigError,
    NothingToResumeError,
    RankError,
    RemoteRefusedError,
    RemoteUnreachableError,
)
from recipe_ckpt.manifest import Manifest, digest_bytes
from recipe_ckpt.policies import LoadPolicy, SavePolicy
from recipe_ckpt.sft.loop import run
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import survey
from tests.remotes import WatchedRemote, assert_whole
from tests.test_crash import check_litter, check_whole, sweep
from tests.test_mirror import read_tree, to, wait_until
from tests.test_resume import make_foreign, resume_foreign
from tests.tiny import Run, TinyEngine, cut_in_half, list_steps, make_checkpoints, resume, run_world
from tests.toy import compose_toy, train_toy

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def name_branch(mirror):
    return [entry.step for entry in survey(LocalStorage(), str(mirror)).branch]


class TestPlace:
    @pytest.mark.parametrize(
        ("root", "mirror"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "file://{here}/a/"), ("link/x", "a/x")]
    )
    def test_root_and_mirror_that_overlap_are_refused(self, tmp_path, root, mirror):
        (tmp_path / "link").symlink_to(tmp_path / "a")
        mirror = mirror.format(here=tmp_path)
        with pytest.raises(ConfigError, match="default_hdfs_dir: found .*outside of checkpoint.default_local_dir"):
            validate_checkpoint({"default_local_dir": root, "default_hdfs_dir": mirror}, launch_dir=str(tmp_path))

    def test_neighbours_are_fine(self, tmp_path):
        validate_checkpoint({"default_local_dir": "run", "default_hdfs_dir": "run2"}, launch_dir=str(tmp_path))


class TestStrangers:
    """A mirror that holds what this component did not write."""

    @pytest.mark.parametrize("is_tracked", [True, False])
    def test_a_mirror_of_a_verl_run_is_never_started_over(self, root, mirror, is_tracked):
        make_foreign(mirror / "global_step_5")
        if is_tracked:
            (mirror / "latest_checkpointed_iteration.txt").write_text("5")
        before = read_tree(mirror)
        with pytest.raises(NothingToResumeError, match=r"(?s)mirror/global_step_5: .*resume_from_path=.*checkpoint=fresh"):
            resume(root, **to(mirror))
        assert read_tree(mirror) == before

    def test_a_step_of_the_same_name_is_moved_aside(self, root, mirror):
        make_checkpoints(root, 4)
        make_foreign(mirror / "global_step_4")
        before = read_tree(mirror / "global_step_4")
        assert resume(root, **to(mirror)) == 4
        assert read_tree(mirror / "archive" / "left-behind" / "global_step_4") == before
        assert name_branch(mirror) == [4]

    def test_a_step_of_the_same_name_in_an_object_store_is_not_touched(self, root, mirror, caplog):
        make_checkpoints(root, 4)
        make_foreign(mirror / "global_step_4")
        before = read_tree(mirror / "global_step_4")
        remote = WatchedRemote(str(mirror))
        remote.can_rename = False
        assert resume(root, **to(mirror, remote)) == 4
        assert read_tree(mirror / "global_step_4") == before
        assert "global_step_4: is not of this component" in caplog.text

    def test_the_url_of_a_verl_run_resumes_from_what_its_tracker_names(self, root, mirror):
        make_foreign(mirror / "global_step_5")
        (mirror / "latest_checkpointed_iteration.txt").write_text("5")
        for url in ("hdfs://nn/verl", "hdfs://nn/verl/global_step_5"):
            options = {"open_remote": lambda url: WatchedRemote(str(mirror), url=url), "resume_mode": "resume_path"}
            assert resume_foreign(root, resume_from_path=url, **options)[0] == 5

    def test_a_renamed_step_is_named_when_an_older_one_is_taken(self, root, mirror, caplog):
        make_checkpoints(root, 2, 4, **to(mirror))
        shutil.rmtree(root)
        (mirror / "global_step_4").rename(mirror / "global_step_5")
        assert resume(root, **to(mirror)) == 2
        assert "rename it back to global_step_4" in caplog.text

    def test_a_file_name_that_leads_elsewhere_is_damage(self, root, mirror, tmp_path):
        make_checkpoints(root, 2, **to(mirror))
        shutil.rmtree(root)
        step = mirror / "global_step_2"
        table = json.loads((step / "files.json").read_bytes())
        table["files"][0]["path"] = "../../../stolen"
        (step / "files.json").write_text(json.dumps(table))
        manifest = Manifest.decode((step / "manifest.json").read_bytes(), "")
        digest = digest_bytes((step / "files.json").read_bytes()).hex()
        (step / "manifest.json").write_bytes(replace(manifest, files_digest=digest).encode())
        shutil.copy(step / "model-0.json", tmp_path / "stolen")
        (mirror / "run.json").unlink()
        before = (tmp_path / "stolen").stat().st_mtime_ns
        with pytest.raises(NothingToResumeError, match="leads out of"):
            resume(root, **to(mirror))
        assert (tmp_path / "stolen").stat().st_mtime_ns == before


class TestPointers:
    @pytest.mark.parametrize("harm", [lambda path: path.unlink(), cut_in_half])
    def test_a_lost_run_json_is_made_again_with_all_steps(self, root, mirror, harm):
        make_checkpoints(root, 2, 4, **to(mirror))
        harm(mirror / "run.json")
        with Run(root, **to(mirror)) as run:
            run.save(6)
        assert name_branch(mirror) == [6, 4, 2]
        assert_whole(mirror)

    def test_an_older_run_json_is_brought_up_to_date(self, root, mirror):
        make_checkpoints(root, 2, **to(mirror))
        older = (mirror / "run.json").read_bytes()
        with Run(root, **to(mirror)) as run:
            run.save(4)
        (mirror / "run.json").write_bytes(older)
        with Run(root, **to(mirror)) as run:
            run.save(6)
        assert name_branch(mirror) == [6, 4, 2]

    @pytest.mark.parametrize("text", ["2", "99", "x"])
    def test_a_tracker_edited_on_the_mirror_is_written_again(self, root, mirror, text):
        make_checkpoints(root, 2, 4, **to(mirror))
        (mirror / "latest_checkpointed_iteration.txt").write_text(text)
        assert resume(root, **to(mirror)) == 4
        assert (mirror / "latest_checkpointed_iteration.txt").read_text() == "4"

    def test_a_rewind_while_the_mirror_is_away_is_published_later(self, root, mirror, caplog):
        make_checkpoints(root, 2, 4, 6, **to(mirror))
        (root / "latest_checkpointed_iteration.txt").write_text("2")
        remote = WatchedRemote(str(mirror))
        remote.is_down = True
        with Run(root, **to(mirror, remote)) as run:
            assert run.start == 2
            run.save(3)
            remote.is_down = False
        assert "another process" not in caplog.text
        assert name_branch(mirror) == [3, 2]
        assert_whole(mirror)


class TestDamage:
    @pytest.mark.parametrize("name", ["model-0.json", "files.json"])
    def test_a_step_that_is_damaged_here_is_not_published_and_holds_nothing_up(self, root, mirror, caplog, name):
        make_checkpoints(root, 1, 2, 4)
        cut_in_half(root / "global_step_2" / name)
        assert resume(root, **to(mirror)) == 4
        assert name_branch(mirror) == [4, 1]
        assert "step 2 is not sent" in caplog.text
        assert_whole(mirror)

    def test_a_step_saved_again_while_it_is_sent_is_not_published_torn(self, root, mirror):
        begun, may_go_on, torn = threading.Event(), threading.Event(), []

        def watch(number, name):
            if name == "put_file":
                begun.set()
                assert may_go_on.wait(20)
            elif name == "write" and mirror.exists():
                try:
                    assert_whole(mirror)
                except AssertionError as error:
                    torn.append(error)

        with Run(root, **to(mirror, WatchedRemote(str(mirror), watch))) as run:
            run.save(2)
            assert begun.wait(20)
            run.engine.value = 3.0  # as many bytes
            run.handler.save_checkpoint(2)
            may_go_on.set()
        assert torn == []
        assert read_tree(root / "global_step_2") == read_tree(mirror / "global_step_2")

    def test_a_step_that_lacks_what_is_to_be_loaded_is_passed_over(self, root, mirror):
        make_checkpoints(root, 2, **to(mirror))
        with Run(root, save_policy=SavePolicy(("model",)), load_policy=LoadPolicy(("model",)), **to(mirror)) as run:
            run.save(4)
        shutil.rmtree(root)
        assert resume(root, **to(mirror)) == 2


class TestEnd:
    def test_uploads_are_waited_for_once(self, root, mirror, caplog):
        caplog.set_level(logging.INFO)
        remote = WatchedRemote(str(mirror))
        with Run(root, **to(mirror, remote, exit_wait_secs=0.3)) as run:
            remote.is_down = True
            run.save(2)
            run.handler.finish_uploads()
        assert caplog.text.count("waiting for the steps") == 1

    def test_what_is_cut_off_by_the_end_is_not_blamed_on_the_server(self, root, mirror, caplog):
        begun, is_closed = threading.Event(), threading.Event()

        def hang(number, name):
            if name == "put_file":
                begun.set()
                assert is_closed.wait(20)
                raise RemoteUnreachableError("the client was closed")

        remote = WatchedRemote(str(mirror), hang)
        remote.close = is_closed.set
        with pytest.raises(SystemExit), Run(root, **to(mirror, remote)) as run:  # noqa: PT012
            run.save(2)
            assert begun.wait(20)
            raise SystemExit(143)
        assert "the steps [2] are NOT there. They are whole" in caplog.text

    def test_a_signal_ends_the_wait_of_a_finished_run_too(self, root, caplog):
        caplog.set_level(logging.INFO)
        keys = [f"checkpoint.default_local_dir={root}", "trainer.total_training_steps=2"]
        train_toy(*keys)

        def stop():
            wait_until(lambda: "waiting for the steps" in caplog.text, within_secs=60)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

        threading.Thread(target=stop, daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(SystemExit, match="143"):
            run(compose_toy(*keys, "checkpoint.default_hdfs_dir=hdfs://127.0.0.1:1/x"))
        assert time.monotonic() - begin < 60
        assert "later tries may succeed. Resuming" in caplog.text
        assert "the steps [2] are NOT there" in caplog.text


class TestPull:
    def test_that_is_interrupted_ends_with_its_handler(self, root, mirror):
        make_checkpoints(root, 2, **to(mirror))
        shutil.rmtree(root)
        is_closed, first = threading.Event(), threading.Lock()

        def interrupt(number, name):
            if name == "get_file" and first.acquire(blocking=False):
                _thread.interrupt_main()  # as SIGINT would, but heard by a process that blocks it, too
                assert is_closed.wait(20)
            if is_closed.is_set():
                raise RemoteUnreachableError("the client was closed")

        remote = WatchedRemote(str(mirror), interrupt)
        remote.close = is_closed.set
        former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it deaf to it
        try:
            with pytest.raises(KeyboardInterrupt):
                resume(root, **to(mirror, remote))
        finally:
            signal.signal(signal.SIGINT, former)
        assert not [thread.name for thread in threading.enumerate() if "pull" in thread.name or "mirror" in thread.name]
        assert not (root / ".lease.json").exists()
        assert resume(root, **to(mirror)) == 2

    def test_onto_a_full_disk_says_so_and_leaves_nothing(self, root, mirror):
        make_checkpoints(root, 2, **to(mirror))
        shutil.rmtree(root)

        def fill(number, name):
            if name == "get_file":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.raises(ConfigError, match="default_local_dir: found .*No space left.*mirror/global_step_2"):
            resume(root, **to(mirror, WatchedRemote(str(mirror), fill)))
        assert os.listdir(root / ".staging") == []
        assert resume(root, **to(mirror)) == 2

    def test_that_takes_longer_than_ranks_wait_for_each_other(self, root, mirror):
        make_checkpoints(root, 2, **to(mirror))
        shutil.rmtree(root)
        may_go_on = threading.Event()
        remote = WatchedRemote(str(mirror), lambda number, name: name != "get_file" or may_go_on.wait(20))
        threading.Timer(4.0, may_go_on.set).start()
        assert run_world(2, lambda ranks: resume_on(ranks, root, to(mirror, remote)), timeout_secs=2.0) == [2, 2]

    def test_that_fails_ends_all_ranks_alike(self, root, mirror):
        make_checkpoints(root, 2, **to(mirror))
        shutil.rmtree(root)

        def refuse(number, name):
            if name == "get_file":
                raise RemoteRefusedError("/team: not for you")

        remote = WatchedRemote(str(mirror), refuse)
        first, second = run_world(2, lambda ranks: resume_on(ranks, root, to(mirror, remote)))
        assert (type(first), type(second)) == (RemoteRefusedError, RankError)
        assert "not for you" in str(second)

    def test_survives_death_at_each_point(self, place):
        mirror = place / "mirror"
        make_checkpoints(place / "first", 2, 4, **to(mirror))
        before = read_tree(mirror)
        for root in sweep(
            place, lambda root: make_stale(root, place), lambda root, disk: resume(root, storage=disk, **to(mirror))
        ):
            assert resume(root, **to(mirror)) == 4
            assert resume(root) == 4
            check_litter(root)
            check_whole(root)
            assert list_steps(root) == [2, 4]
        assert read_tree(mirror) == before


def make_stale(root, place):
    """A root with step 2, and a step 4 that is damaged."""
    shutil.copytree(place / "first", root)
    cut_in_half(root / "global_step_4" / "model-0.json")


def resume_on(ranks, root, options):
    with Run(root, coordinator=ranks, engine=AlikeEngine(), **options) as run:
        return run.start


class AlikeEngine(TinyEngine):
    """All ranks read what rank 0 wrote."""


def test_a_fresh_start_stopped_at_any_operation_on_the_mirror_loses_nothing(place):
    for number in range(1, 200):
        here = place / str(number)
        root, mirror = here / "root", here / "mirror"
        make_checkpoints(root, 2, 4, **to(mirror))
        kept = read_tree(mirror / "global_step_4")
        remote = WatchedRemote(str(mirror))

        def stop(count, name, remote=remote, number=number):
            if count >= number:
                remote.is_down = True
                raise RemoteUnreachableError("stopped")

        remote.before = stop
        try:
            resume(root, resume_mode="disable", **to(mirror, remote, exit_wait_secs=0.0))
        except RemoteUnreachableError:
            assert remote.is_down
        assert any(read_tree(path) == kept for path in mirror.rglob("global_step_4"))
        with Run(root, resume_mode="disable", **to(mirror)) as run:
            assert run.start == 0
            run.save(1)
        assert name_branch(mirror) == [1]
        assert [path.name for path in (mirror / "archive").iterdir()] == [path.name for path in (root / "archive").iterdir()]
        assert list_steps(next((mirror / "archive").iterdir())) == [2, 4]
        assert resume(root, **to(mirror)) == 1
        shutil.rmtree(here)
        if not remote.is_down:
            break
    assert number > 8


def test_a_long_run_with_a_mirror_leaks_nothing(root, mirror):
    before = count_resources()
    options = {"default_hdfs_dir": str(mirror), "mirror_policy": to(mirror, max_to_keep=2)["mirror_policy"]}
    with Run(root, max_ckpt_to_keep=2, **options) as run:
        run.save(*range(1, 11))
        wait_until(lambda: not run.handler.pending_uploads)
        busy = count_resources()
        run.save(*range(11, 101))
        wait_until(lambda: not run.handler.pending_uploads)
        assert all(now <= then for now, then in zip(count_resources(), busy, strict=True))
    assert len(list_steps(root)) <= 4
    assert list_steps(mirror)[-1] == 100
    assert len(list_steps(mirror)) == 2
    assert all(now <= then for now, then in zip(count_resources(), before, strict=True))


def count_resources():
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{os.getpid()}/task"))
