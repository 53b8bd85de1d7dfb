"""scripts/train.py as its users meet it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe_ckpt import config, validation
from recipe_ckpt.errors import ConfigError

REPO = Path(__file__).parents[1]
SMALL = ["model.hidden_size=32", "model.num_layers=1", "data.train_batch_size=16", "launch.num_threads=1"]


def start(tmp_path, *arguments, python=(), without_cuda=False):
    command = [sys.executable, *python, str(REPO / "scripts" / "train.py"), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if without_cuda else None
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.case("C106", "C1104", "C1107", "C807")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "checkpoint.resume_mode=resume_from_path",
            r"ConfigError: checkpoint.resume_mode: found 'resume_from_path'; .*'auto', 'disable', 'resume_path'",
        ),
        ("checkpoint.resume_mode=off", r"ConfigError: checkpoint.resume_mode: found 'off'; allowed: one of"),
        (
            "checkpoint.max_ckpt_to_keep=none",
            "ConfigError: checkpoint.max_ckpt_to_keep: found 'none'; .*max_ckpt_to_keep=null",
        ),
        ("checkpoint.resum_mode=auto", r"ConfigError: .*Did you mean checkpoint.resume_mode\?"),
        ("+checkpoint.resum_mode=auto", r"ConfigError: .*Did you mean checkpoint.resume_mode\?"),
        ("trianer.lr=1", r"ConfigError: trianer.lr: .*Did you mean optim.lr\?"),
        ("checkpoint=defualt", r"ConfigError: checkpoint: .*Did you mean checkpoint=default\?"),
        ("checkpoint.default_local_dir=/a/lr=1", "ConfigError: .*Write \"checkpoint.default_local_dir='/a/lr=1'\""),
        (
            "checkpoint.resume_mode=resume_path",
            r"ConfigError: checkpoint.resume_from_path: found None; allowed: a global_step_<N>",
        ),
        ("checkpoint.resume_from_path=none", r"ConfigError: checkpoint.resume_from_path: found 'none'; .*write null"),
        ("checkpoint.max_ckpt_to_keep=0", r"ConfigError: checkpoint.max_ckpt_to_keep: found 0; allowed: an integer >= 1"),
        ("trainer.save_freq=0", r"ConfigError: trainer.save_freq: found 0"),
    ],
)
def test_a_value_that_can_not_work_ends_with_one_clear_message(tmp_path, override, message):
    done = start(tmp_path, override, python=["-O"])  # without asserts
    assert done.returncode == 1
    assert re.fullmatch(f"{message}.*\n", done.stderr)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.case("C1107")
def test_a_boolean_from_a_file_is_refused_with_the_names(tmp_path):
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "fresh.yaml").write_text("# @package _global_\ncheckpoint:\n  resume_mode: off\n")
    done = start(tmp_path, f"--config-dir={tmp_path}/conf", "experiment=fresh")
    assert done.returncode == 1
    assert re.fullmatch(r"ConfigError: checkpoint.resume_mode: found False; .*experiment/fresh.yaml\.\n", done.stderr)


@pytest.mark.case("C1104")
@pytest.mark.parametrize(
    ("typed", "settled"),
    [
        ("checkpoint.resume_from_path=", None),
        ("checkpoint.resume_from_path=null", None),
        ("checkpoint.resume_from_path='null'", "{launch}/null"),
        ("checkpoint.resume_from_path='~/x'", "{home}/x"),
        ("checkpoint.resume_from_path=a b/global_step_8", "{launch}/a b/global_step_8"),
        ("checkpoint.resume_from_path='lr=1,x/global_step_8'", "{launch}/lr=1,x/global_step_8"),
    ],
)
def test_a_path_is_taken_as_it_is_typed(tmp_path, monkeypatch, typed, settled):
    from tests.toy import compose_toy

    monkeypatch.chdir(tmp_path)
    expected = settled and settled.format(launch=tmp_path, home=os.path.expanduser("~"))
    assert compose_toy(typed).build_handler.keywords["resume_from_path"] == expected


@pytest.mark.case("C1104")
def test_a_checkpoint_that_does_not_exist_ends_with_one_clear_message(tmp_path):
    done = start(tmp_path, *SMALL, "checkpoint.resume_mode=resume_path", "checkpoint.resume_from_path='null'")
    assert done.returncode == 1
    assert re.search(rf"CheckpointNotFoundError: .*{tmp_path}/null", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "model", "data", "key"),
    [
        ("transformers", config.TinyModelConfig(), config.ArithmeticDataConfig(), "model"),
        ("datasets", config.TinyModelConfig(), config.JsonlDataConfig(), "data"),
        ("tensorboard", config.TinyModelConfig(), config.ArithmeticDataConfig(), "trainer.logger"),
    ],
)
def test_a_missing_extra_is_told_with_the_pip_line(monkeypatch, module, model, data, key):
    monkeypatch.setitem(sys.modules, module, None)  # what Python sets where an import is forbidden
    sections = {"checkpoint": config.CheckpointConfig(), "trainer": config.TrainerConfig(), "optim": config.OptimConfig()}
    sections |= {"engine": config.EngineConfig(), "launch": config.LaunchConfig(), "model": model, "data": data}
    with pytest.raises(
        ConfigError, match=rf'{key}: .*needs {module}, which is not installed.*pip install "recipe-ckpt\[sft\]"'
    ):
        validation.validate(sections)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.device=cuda"], "ConfigError: trainer.device: found 'cuda'; allowed: auto or cpu"),
        (
            ["-m", "optim.lr=1e-3,1e-4", "trainer.save_freq=5,10"],
            r"ConfigError: trainer.save_freq: found '5,10'; .*'checkpoint.run_subdir=save_freq_\$\{trainer.save_freq\}'",
        ),
    ],
)
def test_what_this_machine_or_a_sweep_can_not_do_ends_with_one_clear_message(tmp_path, arguments, message):
    done = start(tmp_path, *arguments, without_cuda=True)
    assert done.returncode == 1
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_jobs_that_are_one_experiment_run_one_after_the_other_and_their_config_starts_the_run_again(tmp_path):
    short = [*SMALL, "trainer.total_training_steps=2", "trainer.logger=[]", "data.train_samples=32", "data.val_samples=0"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = start(tmp_path, "sweep=lr_seed", *launcher, *short, "optim.lr=1e-3,0.001", "trainer.seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("This run is finished: step 2 of 2") == 1
    (root,) = (tmp_path / "checkpoints" / "sft" / "test" / "sweep").iterdir()
    assert {path.name for path in (tmp_path / "multirun").glob("*/*/[01]/*")} == {root.name}
    saved = ["--config-path", str(root / "global_step_2"), "--config-name", "config"]
    again = start(tmp_path, *saved)
    assert f"resumed step 2 from {root}" in again.stdout
    assert "This run is finished" in again.stdout
    wrong = start(tmp_path, *saved, "checkpoint.resume_mode=zzz")
    assert "checkpoint.resume_mode: found 'zzz'; allowed: one of ['auto', 'disable', 'resume_path']" in wrong.stderr
    assert {"git", "torch"} <= set(json.loads((root / "global_step_2" / "manifest.json").read_text())["versions"])


@pytest.mark.case("C1101", "C1103")
def test_the_default_recipe_learns_resumes_and_then_is_finished(tmp_path):
    steps = [*SMALL, "optim.lr_decay_steps=80", "trainer.save_freq=20", "trainer.audit_file=audit.jsonl"]
    first = start(tmp_path, *steps, "trainer.total_training_steps=30", "hydra.job.chdir=true")
    assert first.returncode == 0, first.stderr
    second = start(tmp_path, *steps, "trainer.total_training_steps=60")
    assert "resumed step 30 from" in second.stdout
    assert "(expected '" in second.stdout
    third = start(tmp_path, *steps, "trainer.total_training_steps=60")
    assert "This run is finished: step 60 of 60" in third.stdout
    losses = [json.loads(line)["loss"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 2
    root = tmp_path / "checkpoints" / "sft" / "test"
    assert {"global_step_20", "global_step_40", "global_step_60", "tensorboard"} <= set(os.listdir(root))
    assert "- /recipe_ckpt/checkpoint/schema@checkpoint" in (root / "global_step_60" / "config.yaml").read_text()
    assert "- trainer.total_training_steps=60" in (root / "global_step_60" / "overrides.yaml").read_text()


def test_without_checkpoints_nothing_is_written_but_logs(tmp_path):
    done = start(tmp_path, *SMALL, "checkpoint=none", "trainer.total_training_steps=2", "trainer.logger=[console]")
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["outputs"]


def test_the_saved_config_composes_typed_again(tmp_path):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from tests.toy import compose_toy, register_toy

    (tmp_path / "config.yaml").write_text(compose_toy("trainer.seed=7").documents["config.yaml"])
    register_toy()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("config", ["checkpoint.resume_mode=disable"])
    assert OmegaConf.get_type(cfg.checkpoint) is config.CheckpointConfig
    assert (cfg.trainer.seed, cfg.checkpoint.resume_mode) == (7, config.ResumeMode.disable)
