"""Hydra's own flags on scripts/train.py: what they show, and that they start nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_config import compose_config, list_options

REPO = Path(__file__).parents[1]


def start(folder, *arguments, python=(), **environment):
    command = [sys.executable, *python, str(REPO / "scripts" / "train.py"), *arguments]
    inherited = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True, timeout=120)


def test_help_shows_every_group_and_every_key_with_its_comment(tmp_path):
    text = start(tmp_path, "--help", "checkpoint=fresh").stdout
    options = {}
    for group, option in list_options():
        options.setdefault(group, []).append(option)
    expected = {group: ", ".join(names) for group, names in options.items() if not group.startswith("hydra")}
    assert dict(re.findall(r"^([\w/]+): (.+)$", text.split("== Examples ==")[0], re.MULTILINE)) == expected
    assert len(re.findall(r"^python |^torchrun ", text, re.MULTILINE)) >= 5
    cfg = compose_config()
    for key in (key for group in expected if group in cfg for key in cfg[group] if not key.startswith("_")):
        assert re.search(rf"^  # .+\n  {key}:", text, re.MULTILINE), key
    assert "  # Start at step 0.\n  resume_mode: disable\n" in text
    assert os.listdir(tmp_path) == []


def test_showing_the_configuration_loads_no_torch(tmp_path):
    done = start(tmp_path, "--cfg", "job", "--resolve", "-p", "checkpoint", python=["-X", "importtime"])
    assert "default_local_dir: checkpoints/sft/test" in done.stdout
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "hydra" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "datasets", "fsspec"}
    assert os.listdir(tmp_path) == []


def test_the_repositorys_and_the_packages_groups_are_both_on_the_search_path(tmp_path):
    rows = re.findall(r"^\| (\w+) +\| (\S+)", start(tmp_path, "--info", "searchpath").stdout, re.MULTILINE)
    paths = [("main", f"file://{REPO / 'conf'}"), ("recipe_ckpt", "pkg://recipe_ckpt.conf")]
    assert [row for row in rows if row[0] in ("main", "recipe_ckpt")] == paths


@pytest.mark.parametrize("what", ["all", "config", "defaults", "defaults-tree", "plugins"])
def test_info_works(tmp_path, what):
    done = start(tmp_path, "--info", what)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("check", "checkpoint="), ("checkpoint=f", "checkpoint=fresh"), ("checkpoint.max_c", "checkpoint.max_ckpt_to_keep=")],
)
def test_bash_completes_groups_options_and_keys(typed, offered):
    script = f"""
        eval "$(python scripts/train.py -sc install=bash)"
        COMP_LINE="python scripts/train.py {typed}" COMP_CWORD=2
        COMP_POINT=${{#COMP_LINE}}
        hydra_bash_completion
        echo "${{COMPREPLY[@]}}"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPO, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert offered in done.stdout.split(), done.stderr


def test_flags_that_exclude_each_other_end_with_one_line(tmp_path):
    done = start(tmp_path, "-m", "--cfg", "job")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "Only one of --run, --multirun, --cfg" in done.stderr


def test_hydra_full_error_shows_the_traceback(tmp_path):
    done = start(tmp_path, "trianer.lr=1", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "Key 'trianer' is not in struct" in done.stderr


BROKEN = """
import os
import hydra
from recipe_ckpt.command_line import run_main
from recipe_ckpt.hydra_side import clean_exit

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    with clean_exit():
        raise ValueError(f"a fault of the code; HYDRA_FULL_ERROR={os.environ.get('HYDRA_FULL_ERROR')}")

run_main(main)
"""


@pytest.mark.parametrize("arguments", [[], ["-m"]], ids=["run", "multirun"])
def test_a_fault_of_the_code_keeps_its_traceback_and_the_environment_of_its_user(tmp_path, arguments):
    (tmp_path / "broken.py").write_text(BROKEN)
    done = subprocess.run(
        [sys.executable, "broken.py", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert 'File "' in done.stderr
    assert "ValueError: a fault of the code; HYDRA_FULL_ERROR=None" in done.stderr


def test_a_choice_that_verls_keys_would_replace_is_refused(tmp_path):
    done = start(tmp_path, "+compat=verl", "checkpoint=fresh")
    assert done.returncode == 1
    assert re.fullmatch(r"ConfigError: checkpoint: found 'fresh'; .*trainer.resume_mode=disable .*\n", done.stderr)
