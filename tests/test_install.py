"""The package in another project's environment, as a wheel and in editable form."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
EXAMPLE = REPO / "examples" / "foreign_project"
APP = """
import hydra

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    pass

main()
"""


def run(python, *arguments, cwd):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def build_wheel(folder, source=REPO):
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    built = run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, tmp_path_factory):
    """The interpreter of an environment with this package, and with the libraries of the one that the tests run in."""
    folder = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    interpreter = folder / "env" / "bin" / "python"
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    what = [build_wheel(folder)] if request.param == "wheel" else ["-e", REPO]
    pip = ["-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-build-isolation", "--no-index"]
    installed = run(sys.executable, *pip, *what, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return interpreter


@pytest.fixture
def app(tmp_path):
    """A project with a config and a checkpoint option of its own."""
    (tmp_path / "conf" / "checkpoint").mkdir(parents=True)
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [checkpoint: default, _self_]\nsteps: 5\n")
    (tmp_path / "conf" / "checkpoint" / "mine.yaml").write_text("defaults: [default, _self_]\nmax_ckpt_to_keep: 7\n")
    return tmp_path / "app.py"


def build_sdist(folder):
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=REPO)
    assert built.returncode == 0, built.stderr
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


@pytest.mark.parametrize("way", ["from the sources", "by an sdist"])
def test_the_wheel_has_the_library_groups_and_no_others(way, tmp_path):
    source = build_sdist(tmp_path) if way == "by an sdist" else REPO
    with zipfile.ZipFile(build_wheel(tmp_path, source)) as wheel:
        names = {name for name in wheel.namelist() if ".yaml" in name or name.startswith("hydra_plugins")}
    library = {f"recipe_ckpt/conf/checkpoint/{path.name}" for path in (REPO / "conf" / "checkpoint").iterdir()}
    assert names == library | {f"hydra_plugins/recipe_ckpt_plugin/{name}.py" for name in ("__init__", "searchpath")}


def test_another_projects_help_shows_the_checkpoint_group_only(python, app):
    text = run(python, app, "--help", cwd=app.parent).stdout
    groups = dict(re.findall(r"^([\w/]+): (.+)$", text.split("== Config ==")[0], re.MULTILINE))
    options = sorted(path.stem for path in (REPO / "conf" / "checkpoint").iterdir())
    assert groups == {"checkpoint": ", ".join(sorted([*options, "mine"])), "recipe_ckpt/checkpoint": "schema"}


def test_another_projects_option_is_made_from_this_ones_and_typed(python, app):
    shown = run(python, app, "checkpoint=mine", "--cfg", "job", "--resolve", "-p", "checkpoint", cwd=app.parent).stdout
    assert "max_ckpt_to_keep: 7" in shown
    assert "default_local_dir: checkpoints/sft/test" in shown
    refused = run(python, app, "checkpoint.resume_mode=foo", cwd=app.parent)
    assert refused.returncode == 1
    assert "expected one of [auto, disable, resume_path]" in refused.stderr


def test_the_example_project_saves_and_resumes(python, tmp_path):
    project = shutil.copytree(EXAMPLE, tmp_path / "project")
    first = run(python, "train.py", "steps=20", cwd=project)
    assert "trained from step 0 to step 20" in first.stdout, first.stderr
    second = run(python, "train.py", "steps=25", cwd=project)
    assert "trained from step 20 to step 25" in second.stdout, second.stderr
    assert sorted(path.name for path in (project / "runs" / "line").glob("global_step_*")) == [
        "global_step_10",
        "global_step_20",
    ]
