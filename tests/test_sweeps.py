"""Which run a job of a sweep is, and that two experiments never share one."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict

from recipe_ckpt.errors import ConfigError
from recipe_ckpt.sweeps import SweepGuard, build_job_id, own_turn, require_own_roots
from tests.toy import CONF, register_toy, train_toy

REPO = Path(__file__).parents[1]


def compose_job(*overrides, mode=RunMode.MULTIRUN, name="config"):
    """Compose what a job of a sweep sees, with Hydra's own part in it."""
    register_toy()
    with initialize_config_dir(CONF, version_base="1.3"):
        cfg = compose(name, list(overrides), return_hydra_config=True)
    cfg.hydra.mode = mode
    with open_dict(cfg.hydra.job):
        cfg.hydra.job.num = 0
    return cfg


def name_job(*overrides):
    return compose_job(*overrides).checkpoint.run_subdir


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (["optim.lr=1e-3", "trainer.seed=2"], ["trainer.seed=2", "optim.lr=1e-3"]),
        (["optim.lr=1"], ["optim.lr=1.0"]),
        (["optim.lr=1"], ["optim.lr=1e0"]),
        (["+new.rate=1"], ["++new.rate=1.0"]),
        (["optim.lr=0.1", "optim.lr=0.2"], ["optim.lr=0.2"]),
        (["optim.lr=0.2"], ["optim.lr=0.2", "trainer.total_training_steps=900", "trainer.total_epochs=3"]),
        (["optim.lr=0.2"], ["optim.lr=0.2", "checkpoint=fresh", "checkpoint.max_ckpt_to_keep=2", "launch.num_threads=1"]),
        (
            ["optim.lr=0.2"],
            ["optim.lr=0.2", "trainer.save_freq=3", "trainer.logger=[]", "data.num_workers=2", "sweep=lr_seed"],
        ),
        (["optim.lr=0.2"], ["optim.lr=0.2", "hydra.job.chdir=true", "trainer.audit_file=/a", "optimized_metric=train/loss"]),
        (["optim.lr=0.2"], ["optim.lr=0.2", "+checkpoint@eval_checkpoint=fresh", "eval_checkpoint.keep_every=2"]),
        (["optim.lr=0.2"], ["optim.lr=0.2", "+compat=verl", "trainer.max_ckpt_to_keep=2", "trainer.resume_mode=disable"]),
        (["~data"], ["~data=arithmetic"]),
        (["optim.betas=[0.9,1]"], ["optim.betas=[0.9,1.0]"]),
        (["model=tiny"], ["model=toy", "model=tiny"]),
        (["+new={a:1,b:2}"], ["+new={b:2,a:1.0}"]),
    ],
)
def test_one_experiment_has_one_name(left, right):
    assert name_job(*left) == name_job(*right) != ""


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (["optim.lr=0.1"], ["optim.lr=0.2"]),
        (["optim.lr=0.1"], ["optim.lr=0.1", "trainer.seed=2"]),
        (["model=tiny"], ["model=toy"]),
        (["+new=1"], ["+new='1'"]),
        (["+new=1"], ["+new=true"]),
        (["+new=null"], ["+new=''"]),
        (["+new=null"], ["+new='null'"]),
        (["+new='a/b'"], ["+new=a_b"]),
        (["+new=[1,2]"], ["+new=[2,1]"]),
        (["+new=[1,2]"], ["+new='[1,2]'"]),
        (["~data"], ["data=jsonl"]),
        (["+new=" + 300 * "x"], ["+new=" + 301 * "x"]),
        (["+optim@other=adamw"], ["optim=adamw"]),
    ],
)
def test_two_experiments_have_two_names(left, right):
    assert name_job(*left) != name_job(*right)


def test_a_name_says_what_is_special():
    assert re.fullmatch(r"sweep/optim\.lr_0\.001-trainer\.seed_2-[0-9a-f]{10}", name_job("trainer.seed=2", "optim.lr=1e-3"))


@pytest.mark.parametrize("overrides", [["optim.lr=1"], []])
def test_a_single_run_has_no_name(overrides):
    assert compose_job(*overrides, mode=RunMode.RUN).checkpoint.run_subdir == ""


def test_a_job_whose_overrides_make_no_experiment_has_no_name():
    cfg = compose_job("trainer.experiment_name=b")
    assert (cfg.checkpoint.run_subdir, cfg.hydra.sweep.subdir) == ("", "0/")


def test_logs_and_checkpoints_of_a_job_have_one_last_name():
    cfg = compose_job("optim.lr=1e-3")
    assert os.path.basename(cfg.hydra.sweep.subdir) == os.path.basename(cfg.checkpoint.run_subdir)
    assert cfg.hydra.sweep.subdir.startswith("0/")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
IDENTITIES = st.dictionaries(st.text(max_size=60), VALUES, max_size=4)


@given(IDENTITIES)
@settings(deadline=None)
def test_a_name_is_a_safe_file_and_is_pasted_unquoted(identity):
    job_id = build_job_id(identity)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,106}", job_id)
    path = f"checkpoints/sft/test/sweep/{job_id}/global_step_40"
    for text in (job_id, path):
        assert OverridesParser.create().parse_override(f"checkpoint.resume_from_path={text}").value() == text


@given(st.lists(IDENTITIES, min_size=2, max_size=5))
@settings(deadline=None)
def test_distinct_values_have_distinct_names(identities):
    distinct = {json.dumps(identity, sort_keys=True) for identity in identities}
    assert len({build_job_id(identity) for identity in identities}) == len(distinct)


# --- the guard


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.lr=1,2"],
        ["model=tiny,hf"],
        ["trainer.experiment_name=a,b"],
        ["checkpoint.default_local_dir=a,b"],
        ["trainer.save_freq=3,5", "checkpoint.run_subdir=every_${trainer.save_freq}"],
        ["trainer.save_freq=3,5", "trainer.experiment_name=every_${trainer.save_freq}"],
        ["checkpoint=default,fresh", "checkpoint.run_subdir=${hydra:runtime.choices.checkpoint}"],
        ["trainer.save_freq=3,5", "checkpoint=none"],
        ["trainer.save_freq=3"],
        ["trainer.save_freq=3,5", "trainer.save_freq=3"],
        ["sweep=lr_seed"],
        ["optim.lr=interval(0.1,0.2)"],
    ],
)
def test_a_sweep_whose_experiments_have_their_roots_passes(overrides):
    require_own_roots(compose_sweep(*overrides))


@pytest.mark.case("C611")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.save_freq=3,5"],
            r"trainer.save_freq: found '3,5'.*'checkpoint.run_subdir=save_freq_\$\{trainer.save_freq\}'",
        ),
        (
            ["checkpoint.max_ckpt_to_keep=1,2"],
            "checkpoint.max_ckpt_to_keep: found '1,2'; allowed: in a sweep, keys that make",
        ),
        (["checkpoint=default,fresh"], r"checkpoint: .*=checkpoint_\$\{hydra:runtime.choices.checkpoint\}'"),
        (["trainer.total_training_steps=range(1,4)"], r"trainer.total_training_steps: found 'range\(1,4\)'"),
        (["optim.lr=1,2", "checkpoint.run_subdir="], "optim.lr: found '1,2'; allowed: in a sweep, keys in the root's path"),
        (["optim.lr=1,2", "trainer.seed=1,2", "checkpoint.run_subdir=lr_${optim.lr}"], "trainer.seed: found '1,2'"),
        (["trainer.experiment_name=a,b", "checkpoint.default_local_dir=/data"], "trainer.experiment_name: found 'a,b'"),
        (["sweep=lr_seed", "checkpoint.run_subdir=lr_${optim.lr}"], "trainer.seed: found '1,2'"),
    ],
)
def test_a_sweep_whose_experiments_would_share_a_root_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        require_own_roots(compose_sweep(*overrides))


def compose_sweep(*overrides):
    """Compose what Hydra has before the first job: what is swept is not applied."""
    swept = [text for text in overrides if OverridesParser.create().parse_override(text).is_sweep_override()]
    cfg = compose_job(*(text for text in overrides if text not in swept))
    cfg.hydra.overrides.task = list(overrides)
    return cfg


def test_a_config_without_checkpoints_is_not_guarded():
    SweepGuard().on_multirun_start(OmegaConf.create({"hydra": {}}))


# --- turns


def test_an_experiment_in_the_root_of_another_is_refused(tmp_path):
    one, two = (at(tmp_path, f"optim.lr={lr}") for lr in (0.1, 0.2))
    with own_turn(one, "/root"):
        pass
    with own_turn(one, "/root"), own_turn(two, "/other"):
        pass
    with pytest.raises(ConfigError, match=r"checkpoint.run_subdir: found '/root'.*\"optim.lr\": 0.1.*\"optim.lr\": 0.2"):
        own_turn(two, "/root").__enter__()


def test_a_duplicate_waits_until_the_first_has_ended(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cfg = at(tmp_path, "optim.lr=0.1")
    entered = threading.Event()

    def enter():
        with own_turn(cfg, "/root"):
            entered.set()

    second = threading.Thread(target=enter, daemon=True)
    with own_turn(cfg, "/root"):
        second.start()
        deadline = time.monotonic() + 30
        while "the same experiment; waiting for it to leave /root" not in caplog.text:
            assert time.monotonic() < deadline
            os.sched_yield()
        assert not entered.is_set()
    assert entered.wait(timeout=30)
    second.join(timeout=30)


def test_a_single_run_takes_no_turn(tmp_path):
    cfg = at(tmp_path, "optim.lr=0.1", mode=RunMode.RUN)
    with own_turn(cfg, "/root"):
        assert os.listdir(tmp_path) == []


def at(tmp_path, *overrides, mode=RunMode.MULTIRUN):
    cfg = compose_job(*overrides, "hydra.sweep.dir=multi", mode=mode)
    cfg.hydra.runtime.cwd = str(tmp_path)
    return cfg


# --- whole sweeps

JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
LRS = ("0.003", "0.001")


def start_sweep(tmp_path, *overrides):
    """Start the toy's sweep in a session of its own, so that all of its processes can be found."""
    command = [sys.executable, "-m", "tests.toy", "-m", "checkpoint.default_local_dir=ck", *overrides]
    environment = {**os.environ, "PYTHONPATH": f"{REPO / 'src'}:{REPO}"}
    with (tmp_path / "output").open("ab") as output:
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def run_sweep(tmp_path, *overrides):
    process = start_sweep(tmp_path, *overrides)
    try:
        code = process.wait(timeout=120)
    finally:
        kill_session(process)
    return code, (tmp_path / "output").read_text()


def kill_session(process):
    """Kill every process of a session, also those that have left its process group."""
    members = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and find_session(entry) == process.pid]
    for pid in members:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(timeout=30)


def find_session(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (FileNotFoundError, ProcessLookupError):
        return None


def wait_until(condition, process):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        with pytest.raises(subprocess.TimeoutExpired, match="timed out"):
            process.wait(timeout=0.1)


def find_newest(root):
    return max((int(path.name.rpartition("_")[2]) for path in root.glob("global_step_*")), default=0)


def read_audit(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: (line["sample_ids"], line["loss"], line["lr"]) for line in lines}


@pytest.mark.case("C611", "C701", "C1103")
def test_a_killed_sweep_started_again_with_more_steps_in_another_order_equals_its_twins(tmp_path):
    same = ["optim.lr_decay_steps=400", "trainer.save_freq=5", "checkpoint.max_ckpt_to_keep=2", "data.samples=64"]
    same.append("trainer.audit_file=${hydra:runtime.cwd}/audit_${optim.lr}.jsonl")
    audits = [tmp_path / f"audit_{lr}.jsonl" for lr in LRS]
    # Its steps never end: it is in the middle when it is killed.
    sweep = start_sweep(tmp_path, *JOBLIB, *same, f"optim.lr={','.join(LRS)}", "trainer.total_training_steps=100000")
    try:
        wait_until(lambda: len([job for job in tmp_path.glob("ck/sweep/*") if find_newest(job) >= 15]) == 2, sweep)
    finally:
        kill_session(sweep)
    last = max(find_newest(job) for job in tmp_path.glob("ck/sweep/*")) + 10
    code, output = run_sweep(
        tmp_path, *JOBLIB, *same, f"optim.lr={','.join(LRS[::-1])}", f"trainer.total_training_steps={last}"
    )
    assert code == 0, output
    assert len(re.findall(r"resumed_from=\d+", output)) == 2
    assert len(list(tmp_path.glob("ck/sweep/*"))) == 2
    for lr, audit in zip(LRS, audits, strict=True):
        twin = tmp_path / f"twin_{lr}"
        places = [f"checkpoint.default_local_dir={twin}", f"trainer.audit_file={twin}.jsonl"]
        train_toy(*same[:-1], *places, f"optim.lr={lr}", f"trainer.total_training_steps={last}")
        assert read_audit(audit) == read_audit(Path(f"{twin}.jsonl"))
