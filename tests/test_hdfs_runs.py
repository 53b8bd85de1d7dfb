"""Runs with a mirror on a real HDFS, of which nodes are killed and stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from recipe_ckpt.errors import RemoteError, RemoteRefusedError
from recipe_ckpt.policies import MirrorPolicy
from recipe_ckpt.remote_client import Deadlines, RemoteClient
from recipe_ckpt.remote_fsspec import FsspecRemote
from tests.remotes import WatchedRemote
from tests.test_mirror import wait_until
from tests.tiny import Run, list_steps, make_checkpoints, resume
from tests.toy import train_toy

REPO = Path(__file__).parents[1]
TOY = ["trainer.total_training_steps=12", "trainer.save_freq=4", "data.train_batch_size=4"]


def connect(url):
    return RemoteClient(url, deadlines=Deadlines(answer_secs=3.0))


def to(url, **policy):
    return {
        "default_hdfs_dir": url,
        "open_remote": policy.pop("open_remote", connect),
        "mirror_policy": MirrorPolicy(**{"exit_wait_secs": 60.0, **policy}),
    }


def list_remote(url):
    return sorted(int(e.name[12:]) for e in FsspecRemote(url).list_dir("") if e.name.startswith("global_step_"))


def assert_remote_whole(url, tmp_path, *steps):
    """Every step there resumes on an empty disk: each byte is compared with its digest on the way."""
    assert list_remote(url) == list(steps)
    for step in steps:
        named = {"resume_mode": "resume_path", "resume_from_path": f"{url}/global_step_{step}"}
        assert resume(tmp_path / f"check_{step}", open_remote=FsspecRemote, **named) == step


def run_toy(*overrides, cwd):
    return subprocess.run(
        [sys.executable, "-m", "tests.toy", *TOY, *overrides],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{REPO / 'src'}:{REPO}"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_empty_disk_resumes_from_hdfs_to_the_twins_end(hdfs_url, tmp_path):
    """By the command line: killed, its disk lost, resumed on another root."""
    mirrored = ["checkpoint=hdfs", f"checkpoint.default_hdfs_dir={hdfs_url}"]
    killed = run_toy(
        *mirrored,
        "checkpoint.default_local_dir=lost",
        "trainer.audit_file=audit.jsonl",
        "toy.kill_after=9",
        "toy.kill_when_mirrored=true",
        cwd=tmp_path,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_toy(*mirrored, "checkpoint.default_local_dir=other", "trainer.audit_file=audit.jsonl", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed_from=8" in resumed.stdout
    train_toy(*TOY, "checkpoint=none", f"trainer.audit_file={tmp_path}/twin.jsonl")
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    twin = (tmp_path / "twin.jsonl").read_text().splitlines()
    assert lines[:9] == twin[:9]
    assert lines[9:] == twin[8:]
    assert list_remote(hdfs_url) == [4, 8, 12]


def test_two_ranks_with_an_empty_disk_resume_what_one_rank_mirrored(hdfs_url, tmp_path):
    mirrored = [f"checkpoint.default_hdfs_dir={hdfs_url}"]
    train_toy(*TOY, *mirrored, f"checkpoint.default_local_dir={tmp_path}/lost", until=8)
    options = ["checkpoint.default_local_dir=other", "launch.nproc_per_node=2", "trainer.audit_file=audit.jsonl"]
    resumed = run_toy(*mirrored, *options, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    train_toy(*TOY, "checkpoint=none", f"trainer.audit_file={tmp_path}/twin.jsonl")
    assert read_samples(tmp_path / "audit.jsonl") == {
        step: n for step, n in read_samples(tmp_path / "twin.jsonl").items() if step > 8
    }
    assert list_remote(hdfs_url) == [4, 8, 12]


def read_samples(audit):
    """The samples of each step, over all ranks."""
    found = {}
    for line in map(json.loads, audit.read_text().splitlines()):
        found.setdefault(line["step"], []).extend(line["sample_ids"])
    return {step: sorted(ids) for step, ids in found.items()}


@pytest.mark.case("C1202", "C1203")
@pytest.mark.parametrize("name", ["it's $HOME", "100% größe", ";touch x"])
def test_odd_names_and_slashes_mean_one_directory(hdfs_url, tmp_path, name):
    for written in (f"{hdfs_url}/{name}", f"{hdfs_url}//{name}/"):
        with Run(tmp_path / "root", **to(written)) as run:
            run.save(run.start + 2)
    assert_remote_whole(f"{hdfs_url}/{name}", tmp_path, 2, 4)
    assert not list(tmp_path.rglob("x"))


@pytest.mark.case("C1211")
def test_a_directory_of_somebody_else_is_an_error_at_the_start(hdfs_url, tmp_path, monkeypatch):
    make_checkpoints(tmp_path / "first", 2, **to(hdfs_url))
    monkeypatch.setenv("HADOOP_USER_NAME", "bob")
    with pytest.raises(RemoteRefusedError, match="default_hdfs_dir: .* can't be used: .*AccessControlException.*write there"):
        resume(tmp_path / "root", **to(hdfs_url))
    assert list_steps(tmp_path / "root") == []


@pytest.mark.case("C1201")
def test_a_wrong_port_is_an_error_within_seconds(tmp_path):
    begin = time.monotonic()
    with pytest.raises(RemoteError, match="default_hdfs_dir: hdfs://127.0.0.1:9/x can't be used: "):
        resume(tmp_path / "root", **to("hdfs://127.0.0.1:9/x"))
    assert time.monotonic() - begin < 20


def test_a_datanode_that_is_killed_in_mid_upload_costs_nothing(hdfs, hdfs_url, tmp_path):
    def kill_once(number, name):
        if name == "put_file" and not killed.is_set():
            killed.set()
            hdfs.kill("dn0")

    killed = threading.Event()
    remote = WatchedRemote(connect(hdfs_url), kill_once)
    with closing(remote.inner), Run(tmp_path / "root", **to(hdfs_url, open_remote=lambda url: remote)) as run:
        run.save(2, 4)
        assert killed.wait(30)
    hdfs.restart()
    assert_remote_whole(hdfs_url, tmp_path, 2, 4)


def test_a_namenode_that_falls_silent_delays_no_step_and_loses_nothing(hdfs, hdfs_url, tmp_path):
    with Run(tmp_path / "root", **to(hdfs_url, max_pending=100)) as run:
        run.save(2)
        run.handler.finish_uploads()
        hdfs.pause("nn")
        try:
            begin = time.monotonic()
            run.save(*range(4, 20, 2))
            assert time.monotonic() - begin < 5
        finally:
            hdfs.resume("nn")
    assert list_remote(hdfs_url) == list(range(2, 20, 2))


def test_a_namenode_that_is_dead_for_a_minute_delays_no_step_and_gets_everything(hdfs, hdfs_url, tmp_path, caplog):
    """The run ends meanwhile, and is started again."""
    remote = WatchedRemote(connect(hdfs_url))
    root, saving_secs = tmp_path / "root", 0.0
    with Run(root, **to(hdfs_url, exit_wait_secs=2.0)) as run:
        run.save(2)
        run.handler.finish_uploads()
        hdfs.kill("nn")
        killed = time.monotonic()
        run.save(4)
    assert "the steps [4] are NOT there" in caplog.text
    with closing(remote.inner), Run(root, **to(hdfs_url, open_remote=lambda url: remote, max_pending=100)) as run:
        assert run.start == 4
        steps = [2, 4]
        while time.monotonic() < killed + 60:
            steps.append(steps[-1] + 2)
            begin, tries = time.monotonic(), len(remote.operations)
            run.save(steps[-1])
            saving_secs += time.monotonic() - begin
            wait_until(lambda more=tries + 4: len(remote.operations) > more or time.monotonic() > killed + 60, within_secs=60)
        assert list_steps(root) == steps
        assert caplog.text.count("It is tried again until it works") == 1
        hdfs.restart()
    assert len(steps) > 5
    assert saving_secs < 5
    assert_remote_whole(hdfs_url, tmp_path, *steps)


def find_workers():
    """The processes that talk to HDFS, started by this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if b"recipe_ckpt.remote_worker" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid():
                    found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def test_an_uploader_that_is_killed_30_times_sends_every_file_once(hdfs_url, tmp_path):
    """At every seventh operation, so that it gets something done between two deaths, and a bit later."""
    chance = random.Random(0)
    is_at_work, is_done = threading.Event(), threading.Event()
    remote = WatchedRemote(connect(hdfs_url), lambda number, name: number % 7 or is_at_work.set())
    kills = []

    def kill_at_work():
        while len(kills) < 30 and not is_done.is_set():
            if is_at_work.wait(0.1):
                is_done.wait(chance.uniform(0.0, 0.2))
                for pid in find_workers():
                    os.kill(pid, signal.SIGKILL)
                    kills.append(pid)
                is_at_work.clear()

    killer = threading.Thread(target=kill_at_work)
    steps = [2]
    with (
        closing(remote.inner),
        Run(tmp_path / "root", **to(hdfs_url, open_remote=lambda url: remote, max_pending=100)) as run,
    ):
        killer.start()
        try:
            run.save(*steps)
            until = time.monotonic() + 120
            while killer.is_alive() and time.monotonic() < until:
                if not run.handler.pending_uploads:
                    steps.append(steps[-1] + 2)
                    run.save(steps[-1])
                killer.join(0.05)
        finally:
            is_done.set()
            killer.join()
    assert len(kills) >= 30
    assert len(remote.sent) == len(set(remote.sent))
    assert_remote_whole(hdfs_url, tmp_path, *steps)


def test_a_quota_that_is_used_up_is_told_and_ends_no_run(hdfs, hdfs_url, tmp_path, caplog):
    with Run(tmp_path / "root", **to(hdfs_url)) as run:
        run.save(2)
        run.handler.finish_uploads()
        hdfs.set_quota(urlsplit(hdfs_url).path, files=10)
        run.save(4)
    assert "QuotaExceededException" in caplog.text
    assert "the steps [4] are NOT there" in caplog.text
    hdfs.set_quota(urlsplit(hdfs_url).path, files=1000)
    with Run(tmp_path / "root", **to(hdfs_url)):
        pass
    assert_remote_whole(hdfs_url, tmp_path, 2, 4)
