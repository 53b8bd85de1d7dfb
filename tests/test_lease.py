"""One writer per root: who may take a lease over, and what happens to the one who lost it."""

import json
import multiprocessing
import os
import signal
import threading
from dataclasses import asdict, replace

import pytest

from recipe_ckpt.errors import LeaseHeldError
from recipe_ckpt.lease import WATCH_SECS, Lease, Owner, Standing, find_launch_id, judge, read_pid_start
from recipe_ckpt.manifest import encode_json
from recipe_ckpt.sealing import Staging
from recipe_ckpt.storage import LocalStorage
from tests.tiny import Run, list_steps, make_checkpoints, resume, run_in_child, run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
ME = Owner("t1", "host", "boot", "ns", 7, "100", 12, "launch-1", 0)
OTHER = replace(ME, token="t2", pid=8, pid_started="200", launch_id="launch-2")


@pytest.mark.case("C1105")
@pytest.mark.parametrize(
    ("found", "pid_start", "standing"),
    [
        (OTHER, "200", Standing.HELD),
        (OTHER, None, Standing.FREE),
        (replace(OTHER, root_id=13), "200", Standing.UNKNOWN),
        (replace(OTHER, root_id=13), "201", Standing.FREE),
        (OTHER, "201", Standing.FREE),
        (replace(OTHER, launch_id="launch-1"), "200", Standing.HELD),
        (replace(OTHER, launch_id="launch-1"), None, Standing.FREE),
        (replace(OTHER, launch_id="launch-1", host="elsewhere"), None, Standing.FREE),
        (replace(OTHER, host="elsewhere"), None, Standing.UNKNOWN),
        (replace(OTHER, host="elsewhere", boot_id="other"), None, Standing.UNKNOWN),
        (replace(OTHER, boot_id="other"), "200", Standing.FREE),
        (replace(OTHER, pid_namespace="other"), None, Standing.UNKNOWN),
        (replace(OTHER, pid_started=""), None, Standing.UNKNOWN),
    ],
)
def test_lease_is_judged_by_who_holds_it(found, pid_start, standing):
    assert judge(found, ME, pid_start=pid_start) is standing


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({"SLURM_JOB_ID": "7"}, "slurm-7-0"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "TORCHELASTIC_RUN_ID": "x"}, "slurm-7-3"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchelastic-x"),
    ],
)
def test_launch_is_the_schedulers_job_or_the_elastic_run(environment, launch):
    assert find_launch_id(environment) == launch


def test_launch_without_a_scheduler_is_this_process():
    launches = {find_launch_id({}), find_launch_id({"TORCHELASTIC_RUN_ID": "none"})}
    assert len(launches) == 2
    assert all(launch.startswith("process-") for launch in launches)


def test_zombie_counts_as_dead():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert os.path.exists(f"/proc/{pid}")
    assert read_pid_start(pid) is None
    os.waitpid(pid, 0)
    assert read_pid_start(pid) is None
    assert read_pid_start(os.getpid()) == Owner.of_this_process("x").pid_started


# --- real processes


def hold(root, pipe):
    with Run(root) as run:
        run.save(20)
        pipe.send("holding")
        pipe.recv()


@pytest.fixture
def holder(tmp_path):
    """A process that holds the root's lease, having saved step 20."""
    mine, its = FORK.Pipe()
    process = FORK.Process(target=hold, args=(tmp_path, its))
    process.start()
    its.close()
    assert mine.recv() == "holding"
    yield process
    process.kill()
    process.join()


@pytest.mark.case("C1105")
def test_second_writer_is_refused_naming_the_first(tmp_path, holder):
    with pytest.raises(LeaseHeldError, match=rf"pid {holder.pid} on .* writes into this root; allowed is one writer"):
        resume(tmp_path)
    outcomes = run_world(2, lambda coordinator: resume(tmp_path, coordinator=coordinator))
    assert all(f"pid {holder.pid} on" in str(error) for error in outcomes)


@pytest.mark.case("C1105")
def test_killed_writer_is_replaced_at_once(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie is dead, too
    assert resume(tmp_path) == 20


def test_paused_writer_whose_lease_was_taken_publishes_nothing(tmp_path):
    with Run(tmp_path) as paused:
        paused.save(10)
        (tmp_path / ".lease.json").unlink()
        with Run(tmp_path) as other:
            other.save(20)
            staging = Staging.of(str(tmp_path), 30, "abc")
            other.handler._session.begin(staging)
            for _ in range(2):
                with pytest.raises(LeaseHeldError, match="taken over by pid"):
                    paused.save(11)
            assert os.path.isdir(staging.path), "the new writer's staging is not the old one's to clear"
    assert list_steps(tmp_path) == [10, 20]


def steal(root):
    """Do what a process elsewhere does that took this root over."""
    (root / ".lease.json").write_bytes(encode_json(asdict(replace(OTHER, host="elsewhere"))))


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_writer_that_lost_its_lease_in_mid_save_stops_on_every_rank(tmp_path, policy):
    from recipe_ckpt.policies import SavePolicy
    from tests.tiny import TinyEngine

    def work(coordinator):
        engine = TinyEngine(rank=coordinator.rank, dp_size=2, on_save=lambda: coordinator.rank or steal(tmp_path))
        with Run(tmp_path, coordinator=coordinator, engine=engine, save_policy=SavePolicy(on_failure=policy)) as run:
            run.save(10)

    outcomes = run_world(2, work)
    assert all("LeaseHeldError" in repr(error) and "pid 8 on elsewhere" in str(error) for error in outcomes)
    assert list_steps(tmp_path) == []
    assert json.loads((tmp_path / ".lease.json").read_text())["token"] == "t2"


def test_removed_lease_stops_the_writer(tmp_path):
    with Run(tmp_path) as run:
        (tmp_path / ".lease.json").unlink()
        with pytest.raises(LeaseHeldError, match="somebody who removed the lease file"):
            run.save(10)


@pytest.mark.parametrize("content", [b"", b"{}", b"\0\0\0"])
def test_unreadable_lease_is_left_over(tmp_path, content):
    make_checkpoints(tmp_path, 10)
    (tmp_path / ".lease.json").write_bytes(content)
    assert resume(tmp_path) == 10


def test_lease_is_given_back_at_every_end(tmp_path):
    make_checkpoints(tmp_path, 10)
    assert not (tmp_path / ".lease.json").exists()
    with pytest.raises(ZeroDivisionError, match="division"), Run(tmp_path):
        1 / 0  # noqa: B018 (the error is the point)
    assert not (tmp_path / ".lease.json").exists()


def test_forked_child_does_not_give_its_parents_lease_back(tmp_path):
    with Run(tmp_path) as run:
        assert run_in_child(run.handler.close) == 0
        run.save(10)


# --- an owner elsewhere, on an injected clock


class Elsewhere:
    """A clock that another machine's owner lives by: `beats_at` are the seconds at which it beats or lets go."""

    def __init__(self, root, *, beats_at=(), leaves_at=None):
        self.now, self.path = 1000.0, root / ".lease.json"
        self.owner = replace(OTHER, host="elsewhere")
        self.events = [(1000.0 + at, "beat") for at in beats_at] + ([(1000.0 + leaves_at, "leave")] if leaves_at else [])
        self.path.write_bytes(encode_json(asdict(self.owner)))

    def sleep(self, seconds):
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            if self.events.pop(0)[1] == "leave":
                self.path.unlink()
            else:
                self.owner = replace(self.owner, beat=self.owner.beat + 1)
                self.path.write_bytes(encode_json(asdict(self.owner)))

    def lease(self):
        return Lease(str(self.path.parent), LocalStorage(), "launch-1", clock=lambda: self.now, sleep=self.sleep)


@pytest.mark.parametrize(("events", "waited"), [({}, WATCH_SECS), ({"leaves_at": 3}, 3)])
def test_owner_elsewhere_that_is_silent_or_leaves_is_replaced(tmp_path, events, waited):
    elsewhere = Elsewhere(tmp_path, **events)
    lease = elsewhere.lease()
    lease.acquire()
    lease.check()
    lease.release()
    assert waited <= elsewhere.now - 1000 <= waited + 1


@pytest.mark.parametrize("beat", [2, 59])
def test_owner_elsewhere_that_beats_is_refused_by_name(tmp_path, beat):
    elsewhere = Elsewhere(tmp_path, beats_at=[beat])
    with pytest.raises(LeaseHeldError, match="pid 8 on elsewhere"):
        elsewhere.lease().acquire()
    assert json.loads(elsewhere.path.read_text())["token"] == "t2"


# --- races


@pytest.mark.parametrize("round_", range(10))
def test_starters_that_race_for_a_dead_lease_take_it_once(tmp_path, round_):
    run_in_child(lambda: Run(tmp_path).__enter__())
    assert (tmp_path / ".lease.json").exists()
    start, outcomes = threading.Barrier(4), []

    def race():
        lease = Lease(str(tmp_path), LocalStorage(), find_launch_id({}))
        start.wait()
        try:
            lease.acquire()
            outcomes.append(lease)
        except LeaseHeldError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    assert len(outcomes) == 4
    assert len(winners) == 1
    winners[0].check()
    winners[0].release()
    assert os.listdir(tmp_path) == []
