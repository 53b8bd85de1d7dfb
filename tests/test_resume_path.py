"""What an explicit path does, alone and with `auto`, and how often in a launch."""

import json
import os
import shutil

import pytest

from recipe_ckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DamagedCheckpointError,
    LineageError,
    NothingToResumeError,
)
from tests.tiny import Run, cut_in_half, flip_a_bit, list_steps, make_checkpoints, resume

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def root(tmp_path):
    """A root with steps 10 and 20 of one run."""
    make_checkpoints(tmp_path / "run", 10, 20)
    return tmp_path / "run"


def say(root, text):
    (root / TRACKER).write_text(text)


# --- an explicit path


@pytest.mark.case("C101", "C103")
@pytest.mark.parametrize("form", ["{}", "{}/", "{}/.", "{}/../x/../global_step_12"])
def test_explicit_path_names_its_last_component(tmp_path, form):
    place = tmp_path / "global_step_900" / "archive"
    make_checkpoints(place, 12, 13)
    path = form.format(place / "global_step_12")
    assert resume(tmp_path / "run", resume_mode="resume_path", resume_from_path=path) == 12


@pytest.mark.case("C102", "C107")
@pytest.mark.parametrize("mode", ["resume_path", "auto"])
@pytest.mark.parametrize("name", ["global_step_37/actor", "empty", "export", "global_step_99", "file"])
def test_explicit_path_to_no_checkpoint_is_an_error_with_the_expected_form(tmp_path, name, mode):
    for folder in ("global_step_37/actor", "empty", "export"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotFoundError, match=r"allowed is <run>/global_step_<N>"):
        resume(tmp_path / "run", resume_mode=mode, resume_from_path=str(tmp_path / name))


@pytest.mark.case("C106", "C1107")
@pytest.mark.parametrize("mode", ["resume_from_path", "latest", "", None, False, True, 0])
def test_unknown_mode_lists_the_valid_ones_and_touches_nothing(tmp_path, mode):
    with pytest.raises(ConfigError, match=r"checkpoint.resume_mode: found .*auto.*disable.*resume_path"):
        Run(tmp_path / "run", resume_mode=mode)
    assert not (tmp_path / "run").exists()


@pytest.mark.case("C106", "C1104")
@pytest.mark.parametrize("path", [None, ""])
def test_explicit_mode_without_a_path_says_so(tmp_path, path):
    with pytest.raises(ConfigError, match="checkpoint.resume_from_path"):
        Run(tmp_path / "run", resume_mode="resume_path", resume_from_path=path)


@pytest.mark.case("C209")
def test_explicit_path_wins_over_tracker_and_newest(root, caplog):
    make_checkpoints(root, 30)
    assert resume(root, resume_mode="resume_path", resume_from_path=str(root / "global_step_10")) == 10
    assert "holds progress up to step 30; checkpoint.resume_mode=auto would continue from there" in caplog.text


@pytest.mark.case("C309", "C303")
@pytest.mark.parametrize("damage", [cut_in_half, flip_a_bit, os.unlink])
@pytest.mark.parametrize("name", ["model-0.json", "files.json", "manifest.json"])
def test_explicit_path_to_a_damaged_checkpoint_never_falls_back(root, name, damage):
    damage(root / "global_step_20" / name)
    with pytest.raises((NothingToResumeError, DamagedCheckpointError, LineageError), match=name):
        resume(root, resume_mode="resume_path", resume_from_path=str(root / "global_step_20"))


def test_explicit_path_may_be_another_runs_root(root, tmp_path):
    with Run(tmp_path / "new", resume_mode="resume_path", resume_from_path=str(root)) as run:
        assert run.start == 20
        run.save(21)
    assert list_steps(root) == [10, 20]
    say(root, "10")
    assert resume(tmp_path / "newer", resume_mode="resume_path", resume_from_path=str(root)) == 10


def test_explicit_path_outside_archives_what_the_root_held(root, tmp_path):
    make_checkpoints(tmp_path / "other", 7)
    lineage = json.loads((root / "run.json").read_text())["lineage"]
    with Run(root, resume_mode="resume_path", resume_from_path=str(tmp_path / "other" / "global_step_7")) as run:
        run.save(8)
    assert list_steps(root) == [8]
    assert list_steps(root / "archive" / lineage) == [10, 20]


# --- auto with a path


def test_auto_with_a_path_takes_it_first_and_then_its_own_progress(root, tmp_path):
    options = {"resume_from_path": str(root / "global_step_10")}
    with Run(tmp_path / "new", **options) as run:
        assert run.start == 10
        run.save(11)
    with Run(tmp_path / "new", **options) as run:
        assert run.start == 11
        run.save(12)
    shutil.rmtree(root)
    assert resume(tmp_path / "new", **options) == 12


def test_auto_with_a_path_in_its_own_root_keeps_progress_when_the_path_was_pruned(root):
    options = {"resume_from_path": str(root / "global_step_10"), "max_ckpt_to_keep": 1}
    with Run(root, **options) as run:
        assert run.start == 10
        run.save(15)
    assert list_steps(root) == [15]
    assert resume(root, **options) == 15


def test_auto_with_another_path_starts_from_that(root, tmp_path):
    make_checkpoints(tmp_path / "other", 7)
    assert resume(root, resume_from_path=str(tmp_path / "other" / "global_step_7")) == 7
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        resume(tmp_path / "new", resume_from_path=str(tmp_path / "nothing" / "global_step_7"))


def test_auto_with_a_path_to_a_run_that_moves_on_keeps_its_own_progress(root, tmp_path):
    options = {"resume_from_path": str(root)}
    make_checkpoints(tmp_path / "new", 21, **options)
    make_checkpoints(root, 30)
    assert resume(tmp_path / "new", **options) == 21


def test_auto_with_a_replaced_path_starts_from_what_lies_there_now(root, tmp_path):
    options = {"resume_from_path": str(root / "global_step_20")}
    make_checkpoints(tmp_path / "new", 21, **options)
    shutil.rmtree(root)
    make_checkpoints(root, 20)
    assert resume(tmp_path / "new", **options) == 20


# --- once per launch


@pytest.mark.parametrize(
    "options", [{"resume_mode": "disable"}, {"resume_mode": "resume_path", "resume_from_path": "{}/global_step_10"}]
)
def test_restart_of_the_same_launch_continues_what_this_launch_saved(root, options, monkeypatch, caplog):
    options = {key: value.format(root) for key, value in options.items()}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch-1")
    with Run(root, **options) as run:
        first = run.start
        run.save(25)
    assert resume(root, **options) == 25
    assert "holds once a launch" in caplog.text
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch-2")
    if "resume_from_path" not in options or (root / "global_step_10").exists():
        assert resume(root, **options) == first
