"""Ranks that a job starts itself, ranks that torchrun or srun started, and what launchers and signals do with either."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import distributed

from recipe_ckpt import preemption
from recipe_ckpt.errors import ConfigError, LeaseHeldError, RankError
from recipe_ckpt.job import ends_process
from recipe_ckpt.launch import run_ranks
from recipe_ckpt.rank_env import RankFilter, RankFormatter, count_ranks, describe_slurm_ranks, name_launch
from tests.toy import compose_toy, open_toy

REPO = Path(__file__).parents[1]
STEPS = ("trainer.total_training_steps=4", "checkpoint.default_local_dir=ckpts")
TWO = "launch.nproc_per_node=2"
LONG = "trainer.total_training_steps=1000000"
SWEEP = ("-m", "tests.toy", "-m")
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]-ib,other",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a/b"}


# --- what the environment says


def test_ranks_are_those_that_exist_or_those_to_start():
    assert [count_ranks(None, {}), count_ranks(3, {}), count_ranks(1, TORCHRUN), count_ranks(None, SLURM)] == [1, 3, 2, 4]


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM])
def test_a_rank_does_not_start_ranks(environment):
    with pytest.raises(
        ConfigError, match=r"launch.nproc_per_node: found 2; allowed: null: this process is one of [24] ranks"
    ):
        count_ranks(2, environment)


def test_a_task_of_an_srun_step_knows_where_rank_0_is():
    found = describe_slurm_ranks(SLURM)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["MASTER_ADDR"]) == ("3", "4", "1", "gpu03-ib")
    assert 20000 <= int(found["MASTER_PORT"]) < 30000
    assert describe_slurm_ranks({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1"})["MASTER_ADDR"] == "head"


@pytest.mark.parametrize(("nodes", "first"), [("a", "a"), ("a1,a2", "a1"), ("a[1,3]", "a1"), ("r2-n[010-020]", "r2-n010")])
def test_the_first_host_of_a_node_list_is_rank_0s(nodes, first):
    assert describe_slurm_ranks({**SLURM, "SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
def test_a_batch_script_is_no_task(missing):
    script = {key: value for key, value in SLURM.items() if key != missing}
    assert describe_slurm_ranks({**script, "SLURM_NTASKS": "4"}) == {}


def test_a_launch_has_one_name_for_its_ranks_and_none_without_ranks():
    assert name_launch("now", TORCHRUN) == "torchrun-a_b"
    assert name_launch("now", SLURM) == "slurm-7-2"
    assert [name_launch("now", environment) for environment in ({}, {"SLURM_JOB_ID": "7"})] == ["now", "now"]
    assert name_launch("now", {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}) == "now"


def write_record(level, **config):
    record = logging.LogRecord("a.b", level, __file__, 1, "one\ntwo", (), None)
    return RankFormatter("%(levelname)s %(message)s").format(record) if RankFilter(**config).filter(record) else None


def test_other_ranks_write_warnings_with_their_rank_in_every_line(monkeypatch):
    assert write_record(logging.INFO) == "INFO one\ntwo"
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    assert write_record(logging.INFO) is None
    assert write_record(logging.WARNING) == "[rank 1] WARNING one\n[rank 1] two"


def test_a_rank_of_another_node_does_not_write_into_the_file(monkeypatch):
    for key, value in {**TORCHRUN, "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(key, value)
    assert write_record(logging.ERROR, own_node=True) is None
    assert write_record(logging.ERROR) is not None


@pytest.mark.parametrize(
    ("error", "alone", "in_sweep"),
    [
        (ConfigError("trainer.device", "cuda", "cpu", "Write cpu."), True, True),
        (LeaseHeldError("root: held by pid 7; end it"), True, False),
        (RankError("rank 0 failed: ValueError: wrong"), False, False),
        (ValueError("a fault of the code"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_ends_the_process_if_it_says_what_to_mend_and_concerns_every_job(error, alone, in_sweep):
    assert (ends_process(error, in_sweep=False), ends_process(error, in_sweep=True)) == (alone, in_sweep)


# --- processes of our own


def describe_process(recipe, word):
    distributed.init_process_group("gloo")
    ranks = [None, None]
    distributed.all_gather_object(ranks, (distributed.get_rank(), torch.get_num_threads(), os.getppid(), word))
    distributed.destroy_process_group()
    return ranks


def fail_on_one_rank(recipe, how):
    if os.environ["RANK"] == "0":
        with preemption.watch() as stop:
            while not stop.is_set:  # until it is ended with rank 1
                os.sched_yield()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise LeaseHeldError("root: held by pid 7; end it")


@contextmanager
def process_unchanged():
    """A launch leaves nothing behind in a process that goes on to its next job."""

    def describe():
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("TORCHINDUCTOR")
        }  # torch's cache
        return environment, handlers, torch.get_num_threads(), logging.getLogger().handlers[:]

    before = describe()
    yield
    assert describe() == before


def test_the_value_of_rank_0_comes_back_and_the_process_is_as_before(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with process_unchanged():
        ranks = run_ranks(describe_process, compose_toy(TWO, "launch.num_threads=null"), "word")
    assert os.listdir(tmp_path) == []
    assert ranks == [(0, 1, os.getpid(), "word"), (1, 1, os.getpid(), "word")]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("held", LeaseHeldError, "^root: held by pid 7; end it$"),
        ("killed", RankError, "^rank 1 was killed by SIGKILL, and the others were ended with it"),
    ],
)
def test_what_ends_one_rank_is_raised_where_they_were_started(how, kind, message):
    with pytest.raises(kind, match=message):
        run_ranks(fail_on_one_rank, compose_toy(TWO), how)


def test_work_that_ranks_can_not_import_is_refused(monkeypatch):
    monkeypatch.setattr(describe_process, "__module__", "__main__")
    with pytest.raises(TypeError, match="describe_process is defined in the started script; .*give it a module"):
        run_ranks(describe_process, compose_toy(TWO))


def test_threads_and_algorithms_are_a_jobs_own(tmp_path):
    job = (f"checkpoint.default_local_dir={tmp_path}", "launch.num_threads=3", "launch.deterministic=true")
    with process_unchanged(), open_toy(*job):
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (3, True)
    assert not torch.are_deterministic_algorithms_enabled()


# --- the script


def start(folder, *arguments, python=("-m", "tests.toy"), **environment):
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, *python, *STEPS, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextmanager
def started(*arguments, **settings):
    """A process that is ended with all that it started, whatever the test finds."""
    process = start(*arguments, **settings)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_to_end(*arguments, timeout=120, **settings):
    with started(*arguments, **settings) as process:
        output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def read_until(process, text):
    lines = []
    while line := process.stdout.readline():  # pytest's own limit ends a process that writes nothing
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def list_steps(folder):
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def read_logs(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.log"))}


@pytest.mark.parametrize("ranks", [(), (TWO,)], ids=["one process", "ranks from inside"])
def test_an_error_that_says_what_to_mend_is_on_the_terminal_once_and_in_the_log(tmp_path, ranks):
    wrong = ("checkpoint.resume_mode=resume_path", "checkpoint.resume_from_path=nothing")
    code, output = run_to_end(tmp_path, *ranks, *wrong)
    assert code == 1
    assert output.count("/nothing', which does not exist") == 1, output
    assert output.splitlines()[-1].startswith("CheckpointNotFoundError: checkpoint.resume_from_path: ")
    assert "Traceback" not in output
    (log,) = read_logs(tmp_path / "outputs").values()
    assert "[recipe_ckpt.launch][ERROR] - CheckpointNotFoundError: checkpoint.resume_from_path: " in log


@pytest.mark.case("C1101", "C1102", "C1103")
def test_every_way_to_start_resumes_one_root_and_writes_one_log(tmp_path):
    code, output = run_to_end(tmp_path, TWO, "hydra.job.chdir=true", "trainer.save_freq=2")
    assert code == 0, output
    assert list_steps(tmp_path / "ckpts") == [2, 4]
    (log,) = read_logs(tmp_path / "outputs").values()
    assert "starting at step 0" in log
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    )
    path = "checkpoint.resume_from_path=ckpts/global_step_2"
    more = ("checkpoint.resume_mode=resume_path", path, "hydra.job.chdir=true", "toy.raise_on=1", "hydra.job.name=again")
    code, output = run_to_end(tmp_path, *more, python=(*torchrun, "--rdzv-id", "x", "-m", "tests.toy"))
    assert code == 1
    assert "[rank 1] ValueError: rank 1 was told to fail" in output
    (name,) = (tmp_path / "outputs").glob("torchrun-x*")
    logs = read_logs(name)
    assert list(logs) == ["again.log"]
    assert f"resumed step 2 from {tmp_path}/ckpts/global_step_2" in logs["again.log"]
    assert "[rank 1] ValueError: rank 1 was told to fail" in logs["again.log"]
    assert len(list(tmp_path.rglob(".hydra"))) == 2


def test_a_failing_job_of_a_sweep_fails_alone(tmp_path):
    code, output = run_to_end(tmp_path, TWO, "checkpoint.run_subdir=of_${toy.raise_on}", "toy.raise_on=1,null", python=SWEEP)
    assert code == 1, output
    assert "RankError: rank 1: ValueError: rank 1 was told to fail" in output
    assert list_steps(tmp_path / "ckpts" / "of_None") == [4]
    first, second = read_logs(tmp_path / "multirun").values()
    assert "[rank 1] ValueError: rank 1 was told to fail" in first
    assert "saved step 4" in second


def test_a_job_of_submitit_is_requeued_after_its_ranks_have_saved(tmp_path):
    job = (
        TWO,
        "hydra/launcher=submitit_local",
        "checkpoint.run_subdir=lr_${optim.lr}",
        "optim.lr=0.1",
        "toy.preempt_after=1",
    )
    code, output = run_to_end(tmp_path, *job, python=SWEEP, SUBMITIT_PREEMPT_SIGNAL="USR1")
    assert code == 0, output
    ((_, log),) = [item for item in read_logs(tmp_path / "multirun").items() if item[0].endswith("toy.log")]
    words = ("starting at step 0", "SIGUSR1: stopped at step 2", "Requeued job", "resumed step 2", "saved step 4")
    assert [log.count(word) for word in words] == [1] * len(words)
    assert [log.index(word) for word in words] == sorted(log.index(word) for word in words)


@pytest.mark.parametrize(
    ("launcher", "kill", "number", "code"),
    [
        ((), os.killpg, signal.SIGINT, 130),  # as a terminal does: to the ranks too, which count it once
        (("hydra/launcher=joblib", "hydra.launcher.n_jobs=1"), os.kill, signal.SIGTERM, 143),
    ],
    ids=["basic", "joblib"],
)
def test_a_signal_saves_in_the_ranks_and_ends_the_sweep(tmp_path, launcher, kill, number, code):
    job = (*launcher, TWO, LONG, "checkpoint.run_subdir=lr_${optim.lr}", "optim.lr=0.1,0.2")
    with started(tmp_path, *job, python=SWEEP) as process:
        read_until(process, "resumed_from")
        kill(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert os.listdir(tmp_path / "ckpts") == ["lr_0.1"]
    (step,) = list_steps(tmp_path / "ckpts" / "lr_0.1")
    assert output.count(f"{number.name}: stopped at step {step}, which is saved") == 1


def test_a_signal_before_the_ranks_listen_ends_them(tmp_path):
    with started(tmp_path, TWO, LONG) as process:
        wait_for_children(process.pid, 2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "saved" not in output


def wait_for_children(pid, count):
    deadline = time.monotonic() + 60
    while sum("spawn_main" in line for line in list_commands(pid)) < count:
        assert time.monotonic() < deadline


def list_commands(parent):
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                yield (path.parent / "cmdline").read_text()


def test_tasks_of_an_srun_step_join_and_share_one_directory(tmp_path):
    step = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "MASTER_PORT": str(find_free_port())}
    tasks = [start(tmp_path, **{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"]
    outputs = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert list(read_logs(tmp_path)) == ["outputs/slurm-7-2/toy.log"]
    assert list_steps(tmp_path / "ckpts") == [4]


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- signals, one watch within another


def test_an_inner_watch_hears_of_a_signal_that_came_before_it():
    with preemption.watch():
        os.kill(os.getpid(), signal.SIGTERM)
        with preemption.watch() as inner:
            assert inner.signal == signal.SIGTERM


def test_an_outer_watch_hears_of_a_signal_to_the_inner_one():
    with preemption.watch() as outer:
        with preemption.watch():
            os.kill(os.getpid(), signal.SIGINT)
        assert outer.signal == signal.SIGINT


def test_a_launchers_handler_hears_of_a_signal_once_when_the_outermost_watch_leaves():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with preemption.watch() as outer:
            with preemption.watch() as inner:
                os.kill(os.getpid(), signal.SIGUSR1)
                with pytest.raises(SystemExit, match="143"):
                    inner.leave()
            assert heard == []
            with pytest.raises(SystemExit, match="143"):
                outer.leave()
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
