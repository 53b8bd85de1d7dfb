"""What a run starts from: every row of the table of modes, and a reason for everything that is passed over."""

import json
import logging
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe_ckpt.errors import (
    CheckpointError,
    NothingToResumeError,
)
from recipe_ckpt.policies import LoadPolicy, SavePolicy
from tests.tiny import Run, TinyEngine, cut_in_half, flip_a_bit, list_steps, make_checkpoints, resume, run_world

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def root(tmp_path):
    """A root with steps 10 and 20 of one run."""
    make_checkpoints(tmp_path / "run", 10, 20)
    return tmp_path / "run"


def say(root, text):
    (root / TRACKER).write_text(text)


def make_foreign(path, world_size=1, **without):
    """A verl FSDP directory, less what `without` names."""
    path.mkdir(parents=True)
    names = [f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)] + ["data_0.pt"]
    for name in names:
        (path / name).write_bytes(b"verl")
    return path


class ForeignEngine(TinyEngine):
    """Reads verl's own files."""

    def load_checkpoint(self, local_path):
        self.value = local_path


def resume_foreign(root, **options):
    engine = ForeignEngine()
    contents = LoadPolicy(("model", "optimizer"))
    with Run(root, engine=engine, load_policy=contents, **options) as run:
        return run.start, engine.value


# --- auto


@pytest.mark.case("C305")
@pytest.mark.parametrize("make", [lambda root: None, lambda root: root.mkdir()])
def test_auto_starts_fresh_in_an_absent_or_empty_root(tmp_path, make):
    make(tmp_path / "run")
    assert resume(tmp_path / "run") == 0


@pytest.mark.case("C804")
def test_auto_tells_step_0_from_a_fresh_start(tmp_path):
    make_checkpoints(tmp_path, 0)
    with Run(tmp_path) as run:
        assert run.start == 0
        assert run.handler.resume_point.path == str(tmp_path / "global_step_0")


@pytest.mark.case("C201")
@pytest.mark.parametrize("text", ["20", "20\n", " 20 ", "20\r\n"])
def test_auto_reads_the_tracker_with_blanks(root, text, caplog):
    say(root, text)
    assert resume(root) == 20
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.case("C202")
@pytest.mark.parametrize("text", ["", "abc", "10.0", "-1", "\0\0", "\ufeff10", "release", "1_0", "１０", "9" * 5000])
def test_auto_quotes_an_unreadable_tracker_and_takes_the_newest(root, text, caplog):
    say(root, text)
    assert resume(root) == 20
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert repr(text[:40]) in warnings[0]


@pytest.mark.case("C203", "C205")
@pytest.mark.parametrize(("text", "note"), [("30", "names step 30"), (None, "is missing")])
def test_auto_says_that_the_tracker_is_of_no_use(root, text, note, caplog):
    (root / TRACKER).unlink()
    if text:
        say(root, text)
    assert resume(root) == 20
    assert note in caplog.text


@pytest.mark.case("C204")
def test_auto_follows_an_edited_tracker_and_says_that_newer_ones_are_left_behind(root, caplog):
    say(root, "10")
    assert resume(root) == resume(root) == 10
    assert "was set to step 10, so newer checkpoints here are left behind" in caplog.text


def test_auto_follows_a_tracker_that_goes_back_to_an_abandoned_branch(root):
    say(root, "10")
    make_checkpoints(root, 15)
    assert resume(root) == 15
    say(root, "20")
    make_checkpoints(root, 25)
    record = json.loads((root / "run.json").read_text())
    assert [entry["step"] for entry in record["branch"]] == [25, 20, 10]


@pytest.mark.case("C305")
def test_auto_stops_when_only_damaged_ones_are_left_and_names_each(root):
    (root / "global_step_10" / "model-0.json").unlink()
    os.truncate(root / "global_step_20" / "rng_0.pt", 5)
    with pytest.raises(
        NothingToResumeError, match=r"(?s)global_step_20: rng_0.pt: has 5 bytes.*global_step_10: model-0.json"
    ):
        resume(root)


@pytest.mark.case("C305", "C301")
def test_auto_stops_when_only_handmade_directories_are_there(tmp_path):
    (tmp_path / "global_step_20").mkdir()
    with pytest.raises(NothingToResumeError, match=r"global_step_20: it has no manifest.json"):
        resume(tmp_path)


@pytest.mark.case("C301")
@pytest.mark.parametrize("tracker", ["20", None])
def test_auto_passes_over_a_handmade_newer_directory(root, tracker):
    (root / "global_step_30").mkdir()
    if tracker is None:
        (root / TRACKER).unlink()
    assert resume(root) == 20


@pytest.mark.case("C302", "C304")
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[("data_0.pt", damage) for damage in (cut_in_half, os.unlink)],  # its bytes are not read: the position is
        *[
            (name, damage)
            for name in ("model-0.json", "rng_0.pt", "trainer_state.json", "files.json", "manifest.json")
            for damage in (cut_in_half, flip_a_bit, os.unlink)
        ],
    ],
)
def test_auto_takes_the_older_one_and_names_the_damaged_file(root, name, damage, caplog):
    damage(root / "global_step_20" / name)
    (root / TRACKER).unlink()
    assert resume(root) == 10
    assert f"{root}/global_step_20: passed over: " in caplog.text
    assert name in caplog.text


def test_auto_never_falls_back_to_an_abandoned_branch(root):
    say(root, "10")
    make_checkpoints(root, 30)
    cut_in_half(root / "global_step_30" / "model-0.json")
    assert resume(root) == 10
    shutil.rmtree(root / "global_step_10")
    with pytest.raises(NothingToResumeError, match="global_step_30: model-0.json"):
        resume(root)


def test_auto_says_that_the_newest_directory_is_gone(root, caplog):
    shutil.rmtree(root / "global_step_20")
    assert resume(root) == 10
    shutil.rmtree(root / "global_step_10")
    with pytest.raises(NothingToResumeError, match="global_step_20: its directory is gone"):
        resume(root)


@pytest.mark.parametrize("damage", [cut_in_half, os.unlink, lambda path: path.write_text("[]")])
def test_auto_rebuilds_a_lost_run_record_from_the_manifests(root, damage):
    say(root, "10")
    make_checkpoints(root, 15)
    damage(root / "run.json")
    with Run(root) as run:
        assert run.start == 15
        run.save(18)
    assert [entry["step"] for entry in json.loads((root / "run.json").read_text())["branch"]] == [18, 15, 10]


def test_auto_refuses_a_checkpoint_of_another_run(root, tmp_path):
    make_checkpoints(tmp_path / "other", 30)
    shutil.move(tmp_path / "other" / "global_step_30", root)
    assert resume(root) == 20
    (root / "run.json").unlink()
    with pytest.raises(NothingToResumeError, match="several runs lie in one root"):
        resume(root)
    assert resume(root, resume_mode="disable") == 0
    assert list_steps(root) == []


def test_auto_passes_over_a_checkpoint_that_lacks_what_is_to_be_loaded(tmp_path):
    make_checkpoints(tmp_path, 10)
    make_checkpoints(tmp_path, 20, save_policy=SavePolicy(("model",)), load_policy=LoadPolicy(("model",)))
    assert resume(tmp_path) == 10
    with pytest.raises(NothingToResumeError, match=r"lacks \['extra', 'optimizer'\] of checkpoint.load_contents"):
        resume(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_20"))


@pytest.mark.case("C212", "C105")
def test_auto_resumes_in_a_moved_root_and_from_another_directory(root, tmp_path, monkeypatch):
    shutil.move(root, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert resume("moved") == resume(tmp_path / "moved") == 20
    (tmp_path / "link").symlink_to("moved")
    assert resume("link") == 20


@pytest.mark.case("C108")
@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_renamed_checkpoint_is_refused_naming_both_steps(root, mode):
    shutil.rmtree(root / "global_step_10")
    (root / "global_step_20").rename(root / "global_step_50")
    with pytest.raises(CheckpointError, match="name says step 50, its manifest says step 20"):
        resume(root, resume_mode=mode, resume_from_path=str(root / "global_step_50"))
    with pytest.raises(NothingToResumeError, match="name says step 50, its manifest says step 20"):
        resume(root)


# --- verl's directories


def test_foreign_checkpoint_is_taken_when_named_and_never_pruned(tmp_path):
    path = make_foreign(tmp_path / "run" / "global_step_5", world_size=2)
    with pytest.raises(NothingToResumeError, match=f"global_step_5: it has no manifest.json and {TRACKER} does not name it"):
        resume_foreign(tmp_path / "run")
    say(tmp_path / "run", "5")
    assert resume_foreign(tmp_path / "run") == (5, str(path))
    assert resume_foreign(tmp_path / "b", resume_mode="resume_path", resume_from_path=str(path)) == (5, str(path))
    with Run(tmp_path / "run", engine=ForeignEngine(), load_policy=LoadPolicy(("model",)), max_ckpt_to_keep=1) as run:
        run.save(6, 7)
    assert list_steps(tmp_path / "run") == [5, 7]


@pytest.mark.parametrize("tracked", [True, False])
def test_foreign_checkpoint_that_is_incomplete_is_refused_with_the_reason(tmp_path, tracked):
    path = make_foreign(tmp_path / "run" / "global_step_5", world_size=2)
    (path / "model_world_size_2_rank_1.pt").unlink()
    options = {} if tracked else {"resume_mode": "resume_path", "resume_from_path": str(path)}
    say(tmp_path / "run", "5")
    with pytest.raises(CheckpointError, match=r"of 2 model shards the ones of ranks \[1\] are missing"):
        resume_foreign(tmp_path / "run", **options)


# --- several ranks


def on_ranks(root, size, *steps, **options):
    def work(coordinator):
        engine = TinyEngine(rank=coordinator.rank, dp_size=size)
        with Run(root, coordinator=coordinator, engine=engine, **options) as run:
            run.save(*steps)
            return run.start, engine.value

    return run_world(size, work)


@pytest.mark.case("C303", "C304", "C1005")
@pytest.mark.parametrize("damage", [cut_in_half, flip_a_bit, os.unlink])
@pytest.mark.parametrize("name", ["model-1.json", "model-0.json", "rng_1.pt"])
def test_damage_that_one_rank_sees_makes_all_take_the_older_one(tmp_path, name, damage):
    on_ranks(tmp_path, 2, 10, 20)
    damage(tmp_path / "global_step_20" / name)
    assert on_ranks(tmp_path, 2) == [(10, 10.0), (10, 10.0)]


@pytest.mark.case("C303", "C309")
def test_damage_that_one_rank_sees_stops_all_in_explicit_mode(tmp_path):
    on_ranks(tmp_path, 2, 10, 20)
    flip_a_bit(tmp_path / "global_step_20" / "model-1.json")
    path = str(tmp_path / "global_step_20")
    outcomes = on_ranks(tmp_path, 2, resume_mode="resume_path", resume_from_path=path)
    assert all("rank 1: " in str(error) and "model-1.json" in str(error) for error in outcomes)


# --- any damage


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE = st.tuples(
    st.sampled_from([10, 20, 30]),
    st.sampled_from(["model-0.json", "rng_0.pt", "trainer_state.json", "files.json", "manifest.json"]),
    st.sampled_from([flip_a_bit, cut_in_half, zero, os.unlink]),
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine") / "run"
    make_checkpoints(root, 10, 20, 30)
    return root


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=st.lists(DAMAGE, max_size=4, unique_by=lambda item: item[:2]), record=st.sampled_from([None, os.unlink, zero]))
def test_any_damage_leaves_the_newest_whole_one_or_a_reason_for_each(pristine, damages, record):
    with tempfile.TemporaryDirectory() as folder:
        root = shutil.copytree(pristine, os.path.join(folder, "run"))
        for step, name, damage in damages:
            damage(pristine.__class__(root, f"global_step_{step}", name))
        if record is not None:
            record(pristine.__class__(root, "run.json"))
        whole = {10, 20, 30} - {step for step, _, _ in damages}
        if whole:
            assert resume(root) == max(whole)
            return
        with pytest.raises(NothingToResumeError, match="none of the checkpoints here can be used") as caught:
            resume(root)
        assert all(f"global_step_{step}: " in str(caught.value) for step in (10, 20, 30))
