"""What a user reads who mistypes something: the key, what was found, what is allowed, what to do."""

import re
import subprocess

import pytest

from recipe_ckpt.errors import ConfigError
from recipe_ckpt.messages import MENDABLE, explain, quote
from tests.test_config import compose_config

PARTS = r"ConfigError: \S+: found .+; allowed: .+\. .+[.?]$"


def refuse(*overrides):
    with pytest.raises((*MENDABLE, ValueError), match=".") as refused:
        compose_config(*overrides)
    return explain(refused.value, overrides)


@pytest.mark.case("C1104", "C1107")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpoint.resume_mode=foo", r"found 'foo'; allowed: one of ['auto', 'disable', 'resume_path']."),
        ("checkpoint.on_save_failure=ignore", "allowed: one of ['raise', 'warn']."),
        ("checkpoint.max_ckpt_to_keep=none", "allowed: an integer, or null. For no value write null: checkpoint.max_ckpt_to"),
        ("checkpoint.max_ckpt_to_keep=None", "write null: checkpoint.max_ckpt_to_keep=null."),
        ("checkpoint.max_ckpt_to_keep=2.5", "found 2.5; allowed: an integer, or null."),
        ("checkpoint.load_contents=none", "allowed: a list, or null. For no value write null"),
        ("checkpoint.save_contents=model", "found 'model'; allowed: a list."),
        ("checkpoint.async_save=maybe", "found 'maybe'; allowed: true or false."),
        ("checkpoint.default_local_dir=null", "found None; allowed: a text."),
        ("optim.lr=none", "found 'none'; allowed: a number. Change it"),
        ("checkpoint.resum_mode=auto", "Did you mean checkpoint.resume_mode?"),
        ("checkpoint.max_checkpoints_to_keep=1", "Did you mean checkpoint.max_ckpt_to_keep?"),
        ("checkpoint.save_freq=3", "Did you mean trainer.save_freq?"),
        ("trainer.resume_mode=auto", "Did you mean checkpoint.resume_mode? With +compat=verl"),
        ("trainer.zzz=1", "Remove it, or correct its name."),
        ("trianer.lr=1", "trianer.lr: found 'trianer'; allowed: the groups and keys ['checkpoint',"),
        ("trianer.lr=1", "Did you mean optim.lr?"),
        ("trianer.zzz=1", "Did you mean trainer?"),
        ("modle=tiny", "Did you mean model?"),
        ("checkpoint=defualt", "found 'defualt'; allowed: one of ['default', .*Did you mean checkpoint=default?"),
        ("checkpoint=null", "checkpoint: found None; .*checkpoint=none"),
        ("+model=hf", "write model=hf."),
        ("checkpoint.default_local_dir=~/ck", "=$HOME/ck, or \"checkpoint.default_local_dir='~/ck'\""),
        ("checkpoint.resume_from_path=/a/lr=0.1,b=2", "Write \"checkpoint.resume_from_path='/a/lr=0.1,b=2'\""),
        ("checkpoint.run_subdir=(a", "Write \"checkpoint.run_subdir='(a'\""),
        ("checkpoint.run_subdir=a,b", "found 'a,b'; allowed: one value. To sweep over them, add -m; for one text, write"),
        ("checkpoint.run_subdir", "allowed: key=value, or group=option."),
    ],
)
def test_a_mistyped_override_is_explained(override, message):
    line = refuse(override)
    assert all(part in line for part in message.split(".*")), line
    assert re.match(PARTS, line), line


@pytest.mark.parametrize(
    ("override", "quoted"),
    [
        ("a.b=x=1,y", "\"a.b='x=1,y'\""),
        ("a.b=it's", "'a.b=\"it's\"'"),
        ("a.b=${c}=1", "'a.b=\"${c}=1\"'"),
    ],
)
def test_a_quoted_override_reaches_hydra_as_one_text(override, quoted):
    assert quote(override) == quoted


def test_the_values_of_a_sweep_are_quoted_one_by_one():
    with pytest.raises(MENDABLE, match="mismatched input") as refused:
        compose_config("checkpoint.run_subdir=a=1,a=2")
    assert """ "checkpoint.run_subdir='a=1','a=2'", """ in explain(refused.value, ["-m"])


@pytest.mark.parametrize(
    "value", ["x=1,y", "it", "~/ck", "(a", "a#b", "a&b;c", "[1", "{", "ö/é", "a b", "100%", "hdfs://nn:8020/x=1"]
)
def test_what_is_advised_for_a_value_works(tmp_path, value):
    in_shell = subprocess.run(
        ["sh", "-c", f"printf %s {quote(f'trainer.audit_file={value}')}"], capture_output=True, text=True
    )
    assert compose_config(in_shell.stdout).trainer.audit_file == value


@pytest.mark.case("C1107")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "resume_mode: off",
            r"checkpoint.resume_mode: found False; .*on, off, yes and no are booleans.*experiment/mine.yaml\.$",
        ),
        ("resum_mode: auto", r"Did you mean checkpoint.resume_mode\? It stands in experiment/mine.yaml\.$"),
        ("max_ckpt_to_keep: None", r"write null: checkpoint.max_ckpt_to_keep=null\. It stands in experiment/mine.yaml\.$"),
        ("a: b: c", r"^ConfigError: mapping values are not allowed here in .*experiment/mine.yaml"),
    ],
)
def test_a_mistake_in_a_file_is_explained_with_the_file(tmp_path, text, message):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\ncheckpoint:\n  {text}\n")
    assert re.search(message, refuse(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"))


def test_an_interpolation_to_nowhere_is_explained():
    with pytest.raises(MENDABLE, match="nope") as refused:
        _ = compose_config("trainer.seed=${nope}").trainer.seed
    assert explain(refused.value) == (
        "ConfigError: trainer.seed: found '${nope}'; allowed: a key that exists. Correct its name."
    )


def test_an_error_of_this_package_keeps_its_words():
    assert explain(ConfigError("a.b", 1, "2", "Write 2.")) == "ConfigError: a.b: found 1; allowed: 2. Write 2."


def test_a_password_is_not_repeated():
    line = refuse("checkpoint.default_hdfs_dir=hdfs://me:secret@nn/x=1")
    assert "secret" not in line
    assert "hdfs://***@nn/x=1" in line


def test_what_is_not_known_keeps_hydras_words_on_one_line():
    assert refuse("+checkpoint.resume_mode=auto").startswith("ConfigError: Could not append to config. An item is already at")
