"""The rules about values, and that YAML, dataclasses and the command line say the same."""

import dataclasses
import os
import sys
from itertools import pairwise
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from recipe_ckpt import config
from recipe_ckpt.checkpoint_rules import validate_checkpoint
from recipe_ckpt.config import ResumeMode
from recipe_ckpt.errors import ConfigError
from recipe_ckpt.hydra_side import SCHEMAS, build_recipe, register_schemas
from recipe_ckpt.validation import validate

CONF = os.path.join(os.path.dirname(__file__), "..", "conf")


def compose_config(*overrides, **options):
    register_schemas()
    with initialize_config_dir(os.path.abspath(CONF), version_base="1.3"):
        return compose("config", list(overrides), **options)


def checkpoint(**values):
    return validate_checkpoint({"default_local_dir": "ck", **values}, launch_dir="/launch")


@pytest.mark.case("C604", "C1104", "C1107", "C106")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"resume_mode": "resume_from_path"},
            r"checkpoint.resume_mode: found 'resume_from_path'.*'auto', 'disable', 'resume_path'",
        ),
        (
            {"resume_mode": False},
            r"checkpoint.resume_mode: found False; allowed: one of \['auto', 'disable', 'resume_path'\]",
        ),
        ({"resume_mode": "resume_path"}, r"checkpoint.resume_from_path: found None; .*resume_mode=auto"),
        ({"resume_mode": "resume_path", "resume_from_path": ""}, "checkpoint.resume_from_path: found ''"),
        ({"on_upload_failure": "stop"}, r"checkpoint.on_upload_failure: .*\['raise', 'warn', 'ignore'\]"),
        ({"max_remote_ckpt_to_keep": 0}, "checkpoint.max_remote_ckpt_to_keep: found 0"),
        ({"max_pending_uploads": 0}, "checkpoint.max_pending_uploads: found 0"),
        ({"exit_upload_wait_secs": -1.0}, "checkpoint.exit_upload_wait_secs: found -1.0"),
        ({"keep_every": 0}, "checkpoint.keep_every: found 0"),
        ({"keep_best": -1}, "checkpoint.keep_best: found -1"),
        ({"best_mode": "lowest"}, r"checkpoint.best_mode: .*\['min', 'max'\]"),
        ({"resume_from_path": "None"}, "checkpoint.resume_from_path: found 'None'.*write null"),
        ({"default_hdfs_dir": "none"}, "checkpoint.default_hdfs_dir: found 'none'.*write null"),
        ({"default_local_dir": ""}, "checkpoint.default_local_dir: found ''.*checkpoint=none"),
        ({"default_local_dir": None}, "checkpoint.default_local_dir: found None"),
        ({"default_local_dir": "none"}, "checkpoint.default_local_dir: found 'none'.*write null"),
        ({"default_local_dir": "hdfs://nn/a"}, "checkpoint.default_local_dir: .*a local directory"),
        ({"run_subdir": "../other"}, "checkpoint.run_subdir: found '../other'"),
        ({"run_subdir": "/other"}, "checkpoint.run_subdir: found '/other'"),
        ({"max_ckpt_to_keep": 0}, "checkpoint.max_ckpt_to_keep: found 0; allowed: an integer >= 1, or null"),
        ({"max_ckpt_to_keep": -1}, "checkpoint.max_ckpt_to_keep: found -1"),
        ({"max_ckpt_to_keep": True}, "checkpoint.max_ckpt_to_keep: found True"),
        ({"max_ckpt_to_keep": 1.5}, "checkpoint.max_ckpt_to_keep: found 1.5"),
        ({"max_ckpt_to_keep": "x"}, "checkpoint.max_ckpt_to_keep: found 'x'"),
        ({"save_contents": ["model", "hf_model"]}, "checkpoint.save_contents: .*'hf_model'"),
        ({"save_contents": "model"}, "checkpoint.save_contents: found 'model'; allowed: a list"),
        ({"save_contents": []}, "checkpoint.save_contents: found .*checkpoint=none"),
        ({"save_contents": ["model"], "load_contents": ["optimizer"]}, "checkpoint.load_contents: .*some of what is saved"),
        ({"async_save": "yes"}, "checkpoint.async_save: found 'yes'; allowed: true or false"),
        ({"overlap_staging": 1}, "checkpoint.overlap_staging: found 1; allowed: true or false"),
        ({"async_save": False, "overlap_staging": True}, "checkpoint.overlap_staging: found True; .*async_save=false"),
        ({"on_save_failure": "ignore"}, r"checkpoint.on_save_failure: .*\['raise', 'warn'\]"),
        ({"on_config_drift": "error"}, r"checkpoint.on_config_drift: .*\['raise', 'warn', 'ignore'\]"),
        ({"on_data_mismatch": "warn"}, r"checkpoint.on_data_mismatch: .*\['raise', 'restart'\]"),
        ({"rank_timeout_secs": 0}, "checkpoint.rank_timeout_secs: found 0"),
        ({"resum_mode": "auto"}, r"checkpoint.resum_mode: .*Did you mean checkpoint.resume_mode\?"),
    ],
)
def test_a_checkpoint_value_that_can_not_work_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint(**values)


@pytest.mark.case("C1101", "C1102", "C1104")
@pytest.mark.parametrize(
    ("key", "value", "settled"),
    [
        ("default_local_dir", "ck/a", "/launch/ck/a"),
        ("default_local_dir", "/abs/", "/abs"),
        ("default_local_dir", "~/ck", "/home/me/ck"),
        ("resume_from_path", "ck/global_step_8", "/launch/ck/global_step_8"),
        ("resume_from_path", "a b/lr=1,x/global_step_8", "/launch/a b/lr=1,x/global_step_8"),
        ("resume_from_path", "~/x", "/home/me/x"),
        ("resume_from_path", "", None),
        ("resume_from_path", "null", "/launch/null"),
        ("default_hdfs_dir", "", None),
        ("run_subdir", "sweep/a/", "sweep/a"),
        ("max_ckpt_to_keep", 2, 2),
        ("resume_mode", "disable", ResumeMode.disable),
        ("load_contents", None, ["model", "optimizer", "extra"]),
    ],
)
def test_a_checkpoint_value_is_settled(monkeypatch, key, value, settled):
    monkeypatch.setenv("HOME", "/home/me")
    assert checkpoint(**{key: value})[key] == settled


def test_settling_twice_changes_nothing():
    once = checkpoint(run_subdir="a/b", resume_from_path="x")
    assert validate_checkpoint(once, launch_dir="/elsewhere") == once


@pytest.mark.case("C807")
@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        ("trainer", {"save_interval_mins": 0.0}, "trainer.save_interval_mins: found 0.0; allowed: a number > 0"),
        ("trainer", {"save_freq": 0}, "trainer.save_freq: found 0; allowed: an integer >= 1, or null"),
        ("trainer", {"save_freq": -2}, "trainer.save_freq: found -2"),
        ("trainer", {"save_freq": True}, "trainer.save_freq: found True"),
        ("trainer", {"test_freq": 0}, "trainer.test_freq: found 0"),
        ("trainer", {"total_epochs": 0}, "trainer.total_epochs: found 0"),
        ("trainer", {"total_training_steps": 0}, "trainer.total_training_steps: found 0"),
        ("trainer", {"logger": ["wandb"]}, "trainer.logger: .*'console', 'tensorboard'"),
        ("trainer", {"audit_file": "None"}, "trainer.audit_file: .*write null"),
        ("data", {"chat_template": "none"}, "data.chat_template: found 'none'.*write null"),
        ("optim", {"lr": 0.0}, "optim.lr: found 0.0; allowed: a number > 0"),
        ("optim", {"lr": float("nan")}, "optim.lr: found nan"),
        ("optim", {"clip_grad": 0.0}, "optim.clip_grad: found 0.0"),
        ("optim", {"betas": [0.9]}, "optim.betas: found"),
        ("optim", {"lr_warmup_steps": -1}, "optim.lr_warmup_steps: found -1"),
        ("optim", {"lr_decay_steps": 0}, "optim.lr_decay_steps: found 0"),
        ("data", {"train_batch_size": 0}, "data.train_batch_size: found 0"),
        ("data", {"train_batch_size": 5}, "data.train_batch_size: found 5; allowed: a multiple of the 2 ranks"),
        ("data", {"micro_batch_size_per_gpu": 0}, "data.micro_batch_size_per_gpu: found 0"),
        ("data", {"num_workers": -1}, "data.num_workers: found -1"),
        ("data", {"prefetch_factor": 2}, "data.prefetch_factor: found 2; allowed: null without"),
        ("data", {"max_length": 1}, "data.max_length: found 1"),
        ("data", {"val_samples": 441}, "data.val_samples: found 441; allowed: 0 to 440"),
        ("model", {"hidden_size": 100, "num_heads": 3}, "model.hidden_size: found 100"),
        ("model", {"attention_dropout": 1.0}, "model.attention_dropout: found 1.0; allowed: a number >= 0 and < 1"),
        ("launch", {"num_threads": 0}, "launch.num_threads: found 0"),
        ("launch", {"nproc_per_node": 0}, "launch.nproc_per_node: found 0; allowed: an integer >= 1, or null"),
    ],
)
def test_a_value_that_can_not_work_is_refused(group, values, message):
    sections = make_sections()
    sections[group] = dataclasses.replace(sections[group], **values)
    with pytest.raises(ConfigError, match=message):
        validate(sections, world_size=2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data.train_files: found None; allowed: files ending in .jsonl"),
        ({"train_files": "missing.jsonl"}, "data.train_files: found '/launch/missing.jsonl'; allowed: a file that exists"),
        ({"train_files": ["table.csv"]}, "data.train_files: found '/launch/table.csv'; allowed: files ending in"),
        ({"train_files": 3}, "data.train_files: found 3; allowed: a file or a list"),
        ({"prompt_key": "question"}, "data.prompt_key: .*set together with data.response_key"),
    ],
)
def test_files_that_can_not_be_read_are_refused_before_anything_is_built(data, message):
    sections = {**make_sections(), "data": config.JsonlDataConfig(**data)}
    with pytest.raises(ConfigError, match=message):
        validate(sections, launch_dir="/launch")


@pytest.mark.parametrize("path", [None, "", "nowhere"])
def test_a_model_folder_that_is_none_is_refused(path, tmp_path):
    sections = {**make_sections(), "model": config.HfModelConfig(path=path)}
    with pytest.raises(ConfigError, match=r"model.path: .*a local folder with config.json"):
        validate(sections, launch_dir=str(tmp_path))


@pytest.mark.parametrize("freq", [None, -1])
def test_no_frequency_means_the_end_only(freq):
    sections = make_sections()
    sections["trainer"] = config.TrainerConfig(save_freq=freq)
    assert validate(sections)["trainer"].save_freq is None


@pytest.mark.parametrize("place", [place for place in SCHEMAS if place != "trainer/verl"])
def test_yaml_says_what_the_dataclass_says(place):
    """Except for the length of the default run, which is an example's and not a default of the type."""
    group, option = place.split("/")
    option = {"schema": {"checkpoint": "default", "trainer": "default", "optim": "adamw", "engine": "spmd"}}.get(
        option, option
    )
    option = option.get(group, "local") if isinstance(option, dict) else option
    in_yaml = OmegaConf.to_container(compose_config(f"{group}={option}")[group])
    in_code = OmegaConf.to_container(OmegaConf.structured(SCHEMAS[place]))
    for key in ("total_training_steps", "save_freq", "test_freq") if group == "trainer" else ():
        assert isinstance(in_yaml.pop(key), int)
        assert in_code.pop(key) is None
    assert in_yaml == in_code


def list_options():
    """Every option of every group on the disk, as `group`, `option`."""
    for path in sorted(Path(CONF).rglob("*.yaml")):
        if path.parent != Path(CONF):
            yield path.parent.relative_to(CONF).as_posix(), path.stem


def is_global(group, option):
    return (Path(CONF) / group / f"{option}.yaml").read_text().startswith("# @package _global_")


TYPED = [(group, option) for group, option in list_options() if "/" not in group and not is_global(group, option)]


@pytest.mark.parametrize(("group", "option"), TYPED)
def test_every_option_composes_typed_and_has_a_comment_for_every_key(group, option):
    node = compose_config(f"{group}={option}")[group]
    assert OmegaConf.get_type(node) in SCHEMAS.values()
    lines = (Path(CONF) / group / f"{option}.yaml").read_text().splitlines()
    for before, line in pairwise(lines):
        assert not line[:1].isalpha() or line.startswith("defaults:") or before.startswith("#"), line


@hydra.main(version_base="1.3", config_path=os.path.abspath(CONF), config_name="config")
def show(cfg):
    raise AssertionError("--cfg starts nothing")


@pytest.mark.parametrize(("group", "option"), list(list_options()))
def test_what_cfg_prints_of_every_option_is_the_composed_config(group, option, monkeypatch, capsys):
    chosen = compose_config(return_hydra_config=True).hydra.runtime.choices
    override = f"{'' if group in chosen else '+'}{group}={option}"
    composed = compose_config(override)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # what --cfg sets ends with this test
    monkeypatch.setattr(sys, "argv", ["train.py", override, "--cfg", "job", "--resolve"])
    show()
    printed = OmegaConf.create(capsys.readouterr().out)
    assert OmegaConf.to_container(printed) == OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    assert OmegaConf.merge(composed, printed) == composed


VERL = {
    "default_local_dir": "/data/a",
    "default_hdfs_dir": "/mnt/mirror",
    "max_ckpt_to_keep": 3,
    "resume_mode": ResumeMode.resume_path,
    "resume_from_path": "/data/b/global_step_8",
}


@pytest.mark.parametrize(("key", "value"), list(VERL.items()))
def test_verls_key_means_the_same_as_ours(key, value):
    cfg = compose_config("+compat=verl", f"trainer.{key}={value}", "trainer.seed=7")
    assert cfg.checkpoint[key] == value
    assert (cfg.trainer.seed, cfg.trainer.total_training_steps) == (7, compose_config().trainer.total_training_steps)


def test_verls_keys_change_nothing_as_long_as_they_are_not_set():
    ours, verls = (OmegaConf.to_container(compose_config(*choice), resolve=True) for choice in ([], ["+compat=verl"]))
    assert {key: verls["trainer"].pop(key) for key in VERL} == {key: ours["checkpoint"][key] for key in VERL}
    assert verls == ours


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_ckpt_to_keep=0", "trainer.max_ckpt_to_keep: found 0; .*Write trainer.max_ckpt_to_keep=null"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path: found None; .*write trainer.resume_mode=auto"),
        ("trainer.resume_from_path=None", "trainer.resume_from_path: found 'None'"),
        ("trainer.default_local_dir=hdfs://nn/a", "trainer.default_local_dir: .*goes into trainer.default_hdfs_dir"),
        ("checkpoint.max_ckpt_to_keep=0", "checkpoint.max_ckpt_to_keep: found 0"),
        ("checkpoint.save_contents=[model,hf]", "checkpoint.save_contents: found"),
    ],
)
def test_an_error_names_verls_key_where_that_was_typed(override, message):
    with pytest.raises(ConfigError, match=message):
        build_recipe(compose_config("+compat=verl", override))


KEYS = {
    "checkpoint=default": "async_save best_metric best_mode default_hdfs_dir default_local_dir exit_upload_wait_secs"
    " keep_best keep_every load_contents max_ckpt_to_keep max_pending_uploads max_remote_ckpt_to_keep on_config_drift"
    " on_data_mismatch on_save_failure on_upload_failure overlap_staging rank_timeout_secs resume_from_path resume_mode"
    " run_subdir save_contents",
    "trainer=default": "audit_file device experiment_name log_freq logger project_name save_freq"
    " save_interval_mins seed test_freq total_epochs total_training_steps",
    "optim=adamw": "betas clip_grad eps lr lr_decay_steps lr_scheduler_type lr_warmup_steps weight_decay",
    "engine=spmd": "strategy",
    "launch=local": "deterministic nproc_per_node num_threads",
    "model=tiny": "attention_dropout dtype hidden_size num_heads num_layers",
    "model=hf": "dtype path",
    "+compat=verl": "default_hdfs_dir default_local_dir max_ckpt_to_keep resume_from_path resume_mode",
    "data=arithmetic": "chat_template drop_last max_length max_number micro_batch_size_per_gpu num_workers prefetch_factor"
    " seed shuffle train_batch_size train_samples val_samples",
    "data=jsonl": "chat_template drop_last max_length messages_key micro_batch_size_per_gpu num_workers prefetch_factor"
    " prompt_key response_key shuffle train_batch_size train_files val_files",
}


@pytest.mark.parametrize(("choice", "keys"), list(KEYS.items()))
def test_the_keys_are_these(choice, keys):
    cfg = compose_config(choice)
    node = cfg[choice.split("=")[0]] if "+" not in choice else cfg.trainer.keys() - compose_config().trainer.keys()
    assert sorted(key for key in node if not key.startswith("_")) == sorted(keys.split())


@pytest.mark.parametrize("group", ["checkpoint", "trainer", "optim", "data", "model", "engine", "launch"])
def test_a_key_that_plus_has_added_is_refused(group):
    with pytest.raises(ConfigError, match=f"{group}.foo: .*correct its name"):
        build_recipe(compose_config(f"+{group}.foo=1"))


def test_text_for_a_number_is_taken_as_the_number():
    assert compose_config("checkpoint.max_ckpt_to_keep='2'").checkpoint.max_ckpt_to_keep == 2


@pytest.mark.case("C1107")
def test_a_boolean_from_a_yaml_file_is_rejected_with_the_valid_names():
    with pytest.raises(Exception, match=r"Invalid value 'False', expected one of \[auto, disable, resume_path\]"):
        OmegaConf.merge(OmegaConf.structured(config.CheckpointConfig), OmegaConf.create("resume_mode: off"))


def test_an_experiment_without_a_trainer_group_has_a_root():
    cfg = OmegaConf.create({"checkpoint": OmegaConf.structured(config.CheckpointConfig)})
    assert cfg.checkpoint.default_local_dir == "checkpoints/sft/test"


def test_a_second_handler_config_composes_beside_the_first():
    cfg = compose_config("+checkpoint@eval_checkpoint=fresh", "eval_checkpoint.max_ckpt_to_keep=1")
    assert cfg.eval_checkpoint.resume_mode == ResumeMode.disable
    assert cfg.checkpoint.resume_mode == ResumeMode.auto


def make_sections():
    return {
        "checkpoint": config.CheckpointConfig(),
        "trainer": config.TrainerConfig(),
        "optim": config.OptimConfig(),
        "engine": config.EngineConfig(),
        "launch": config.LaunchConfig(),
        "model": config.TinyModelConfig(),
        "data": config.ArithmeticDataConfig(),
    }
