"""What is deleted, and above all what is not: the policy as a function, and end to end in a root."""

import itertools
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe_ckpt.errors import ConfigError
from recipe_ckpt.retention import Kept, Retention, choose_best, choose_deletions
from tests.tiny import Run, TinyEngine, list_steps, make_checkpoints, resume, run_world

COMMITS = st.lists(
    st.builds(
        Kept,
        step=st.integers(0, 40),
        sequence=st.integers(1, 100),
        on_branch=st.booleans(),
        metric=st.none() | st.floats(-3, 3) | st.just(float("nan")),
    ),
    max_size=12,
    unique_by=(lambda commit: commit.step, lambda commit: commit.sequence),
)
POLICIES = st.builds(
    Retention,
    max_to_keep=st.integers(1, 5),
    every=st.none() | st.integers(1, 7),
    best=st.none() | st.integers(1, 3),
    best_metric=st.just("loss"),
    best_mode=st.sampled_from(["min", "max"]),
)
PINS = st.sets(st.integers(0, 45), max_size=4)
PLAIN = st.builds(Retention, max_to_keep=st.integers(1, 5))


@given(COMMITS, POLICIES, PINS)
def test_deletions_are_known_unpinned_and_named_once(commits, policy, pins):
    deleted = choose_deletions(commits, policy, pinned=pins)
    assert len(set(deleted)) == len(deleted)
    assert set(deleted) <= {commit.step for commit in commits} - pins


@given(COMMITS, POLICIES, PINS)
def test_newest_of_the_branch_is_never_deleted(commits, policy, pins):
    on_branch = [commit for commit in commits if commit.on_branch]
    newest = max(on_branch or commits, key=lambda commit: commit.sequence, default=None)
    assert newest is None or newest.step not in choose_deletions(commits, policy, pinned=pins)


@given(COMMITS, POLICIES, PINS)
def test_deletions_leave_nothing_more_to_delete(commits, policy, pins):
    deleted = choose_deletions(commits, policy, pinned=pins)
    left = [commit for commit in commits if commit.step not in deleted]
    assert choose_deletions(left, policy, pinned=pins) == []


@given(COMMITS, PLAIN, PINS)
def test_as_many_stay_as_were_asked_for(commits, policy, pins):
    newest = max(commits, key=lambda commit: (commit.on_branch, commit.sequence), default=None)
    counted = [commit for commit in commits if commit.step not in pins or commit is newest]
    deleted = choose_deletions(commits, policy, pinned=pins)
    assert len(counted) - len(deleted) == min(len(counted), policy.max_to_keep)


@given(COMMITS, POLICIES)
def test_what_a_rewind_left_behind_goes_first_and_older_before_newer(commits, policy):
    by_step = {commit.step: commit for commit in commits}
    deleted = [by_step[step] for step in choose_deletions(commits, policy, pinned=())]
    assert deleted == sorted(deleted, key=lambda commit: (commit.on_branch, commit.sequence))
    assert not any(commit.on_branch for commit in deleted) or all(c.on_branch or c in deleted for c in commits)


@given(COMMITS, POLICIES)
def test_every_nth_and_the_best_of_the_branch_stay(commits, policy):
    deleted = choose_deletions(commits, policy, pinned=())
    branch = [commit for commit in commits if commit.on_branch]
    assert not {commit.step for commit in choose_best(branch, policy)} & set(deleted)
    assert not any(c.step in deleted for c in branch if policy.every and c.step and c.step % policy.every == 0)


@given(COMMITS, PINS)
def test_null_deletes_nothing(commits, pins):
    assert choose_deletions(commits, Retention(), pinned=pins) == []


# --- end to end


@pytest.mark.case("C604")
@pytest.mark.parametrize("keep", [0, -1, 1.5, "many", True, [1]])
def test_nonsense_limit_is_rejected_at_start(tmp_path, keep):
    with pytest.raises(ConfigError, match=r"checkpoint.max_ckpt_to_keep: found .*; allowed: .*>= 1"):
        Run(tmp_path / "run", max_ckpt_to_keep=keep)
    assert not (tmp_path / "run").exists()


@pytest.mark.case("C604")
def test_null_limit_keeps_all(tmp_path):
    make_checkpoints(tmp_path, *range(1, 8), max_ckpt_to_keep=None)
    assert list_steps(tmp_path) == list(range(1, 8))


@pytest.mark.case("C501", "C504")
@pytest.mark.parametrize("steps", [(9900, 10000, 10100), (999999, 1000000, 10**24), (9, 10, 11)])
def test_order_is_of_numbers_not_of_text(tmp_path, steps):
    make_checkpoints(tmp_path, *steps[:2])
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with Run(tmp_path, max_ckpt_to_keep=2) as run:
        assert run.start == steps[1]
        run.save(steps[2])
    assert list_steps(tmp_path) == list(steps[1:])


@pytest.mark.case("C502", "C503")
@pytest.mark.parametrize("times", [(2_210_000_000, 1_000_000, 5), (7, 7, 7)])
def test_order_does_not_ask_for_mtimes(tmp_path, times):
    make_checkpoints(tmp_path, 10, 20, 30)
    for step, mtime in zip((10, 20, 30), times, strict=True):
        os.utime(tmp_path / f"global_step_{step}", (mtime, mtime))
    with Run(tmp_path, max_ckpt_to_keep=3) as run:
        assert run.start == 30
        run.save(40)
    assert list_steps(tmp_path) == [20, 30, 40]


@pytest.mark.case("C601")
def test_limit_of_one_holds_over_restarts_and_the_old_one_stands_while_the_new_is_written(tmp_path):
    make_checkpoints(tmp_path, 4, max_ckpt_to_keep=1)
    seen = []
    engine = TinyEngine(on_save=lambda: seen.append(list_steps(tmp_path)))
    make_checkpoints(tmp_path, 8, max_ckpt_to_keep=1, engine=engine)
    assert seen == [[4]]
    assert list_steps(tmp_path) == [8]


@pytest.mark.case("C602")
def test_limit_holds_after_each_save(tmp_path):
    with Run(tmp_path, max_ckpt_to_keep=3) as run:
        counts = [len(list_steps(tmp_path)) for step in range(1, 7) if run.save(step)]
    assert counts == [1, 2, 3, 3, 3, 3]
    assert list_steps(tmp_path) == [4, 5, 6]


@pytest.mark.case("C603", "C1108")
def test_fresh_start_archives_what_was_there_and_counts_alone(tmp_path, caplog):
    make_checkpoints(tmp_path, 500, 600, 700)
    with caplog.at_level("INFO"), Run(tmp_path, resume_mode="disable", max_ckpt_to_keep=3) as run:
        assert run.start == 0
        run.save(100)
    (archive,) = (tmp_path / "archive").iterdir()
    assert f"what was here lies in {archive} now" in caplog.text
    assert (list_steps(tmp_path), list_steps(archive)) == ([100], [500, 600, 700])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert resume(archive) == 700


@pytest.mark.case("C104", "C607")
def test_names_that_are_not_ours_are_never_deleted(tmp_path):
    make_checkpoints(tmp_path, 20)
    names = ["global_step_100.backup", "foo-global_step_100", "global_step_", "global_step_-5", "global_step_1e3"]
    names += ["global_step_007", "tb", "global_step_20_merged", "global_step_999"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("")
    (tmp_path / "notes.txt").write_text("")
    with Run(tmp_path, max_ckpt_to_keep=1) as run:
        assert run.start == 20
        run.save(30, 40)
    assert all((tmp_path / name / "mine").exists() for name in names)
    assert {"notes.txt", "global_step_40"} <= set(os.listdir(tmp_path))
    assert list_steps(tmp_path) == [7, 40, 999]


@pytest.mark.case("C607")
def test_directory_made_in_the_place_of_a_pruned_step_is_not_ours(tmp_path):
    with Run(tmp_path, max_ckpt_to_keep=1) as run:
        run.save(10, 20)
        (tmp_path / "global_step_10").mkdir()
        run.save(30)
    with Run(tmp_path, max_ckpt_to_keep=1) as run:
        run.save(40)
    assert list_steps(tmp_path) == [10, 40]


@pytest.mark.case("C610")
def test_what_was_committed_and_not_pruned_is_pruned_next_time(tmp_path):
    make_checkpoints(tmp_path, 1, 2, 3, 4)
    make_checkpoints(tmp_path, 5, max_ckpt_to_keep=2)
    assert list_steps(tmp_path) == [4, 5]


@pytest.mark.case("C611")
def test_limit_is_of_each_root(tmp_path):
    for job in "abc":
        make_checkpoints(tmp_path / job, 1, 2, 3, max_ckpt_to_keep=2)
    assert [list_steps(tmp_path / job) for job in "abc"] == [[2, 3]] * 3


@pytest.mark.case("C612")
def test_source_of_a_resume_stays_until_something_newer_is_committed(tmp_path):
    make_checkpoints(tmp_path, 10, 20, 30)
    options = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_10"), "max_ckpt_to_keep": 3}
    assert resume(tmp_path, **options) == resume(tmp_path, **options) == 10
    assert list_steps(tmp_path) == [10, 20, 30]
    with Run(tmp_path, **options) as run:
        run.save(15, 16)
    assert list_steps(tmp_path) == [10, 15, 16], "what the rewind left behind goes first"


@pytest.mark.case("C605")
def test_source_outside_the_root_is_never_touched(tmp_path):
    make_checkpoints(tmp_path / "a", 10, 11)
    before = sorted(os.stat(path).st_mtime_ns for path in (tmp_path / "a").rglob("*"))
    options = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "a" / "global_step_10")}
    make_checkpoints(tmp_path / "b", 12, 13, 14, max_ckpt_to_keep=1, **options)
    assert (list_steps(tmp_path / "a"), list_steps(tmp_path / "b")) == ([10, 11], [14])
    assert sorted(os.stat(path).st_mtime_ns for path in (tmp_path / "a").rglob("*")) == before


def test_pinned_step_stays_and_is_not_counted(tmp_path):
    make_checkpoints(tmp_path, 1, 2)
    (tmp_path / ".pins").mkdir()
    (tmp_path / ".pins" / "2").write_text("")
    make_checkpoints(tmp_path, 3, 4, 5, max_ckpt_to_keep=2)
    assert list_steps(tmp_path) == [2, 4, 5]


@pytest.mark.case("C213")
def test_going_back_deletes_nothing_that_was_newer(tmp_path, caplog):
    make_checkpoints(tmp_path, 10, 20, 30, 40)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    with Run(tmp_path, max_ckpt_to_keep=1) as run:
        run.save(30)
    assert list_steps(tmp_path) == [30]
    assert list_steps(tmp_path / "archive/left-behind") == [30, 40]
    assert "it lies in" in caplog.text


def test_best_metric_that_no_save_has_is_warned_about_once(tmp_path, caplog):
    with Run(tmp_path, retention=Retention(best=1, best_metric="val/los"), max_ckpt_to_keep=1) as run:
        run.save(10, 20)
    assert caplog.text.count("checkpoint.best_metric: 'val/los' is not among this save's ['loss']") == 1


def test_symlinked_step_is_resumed_and_pruning_takes_the_link_only(tmp_path):
    make_checkpoints(tmp_path / "run", 10, 20)
    shutil.move(tmp_path / "run" / "global_step_20", tmp_path / "disk2")
    (tmp_path / "run" / "global_step_20").symlink_to(tmp_path / "disk2")
    with Run(tmp_path / "run", max_ckpt_to_keep=1) as run:
        assert run.start == 20
        run.save(30)
    assert list_steps(tmp_path / "run") == [30]
    assert (tmp_path / "disk2" / "manifest.json").exists()


@pytest.mark.case("C608")
def test_several_ranks_prune_once(tmp_path):
    def work(coordinator):
        engine = TinyEngine(rank=coordinator.rank, dp_size=2)
        with Run(tmp_path, coordinator=coordinator, engine=engine, max_ckpt_to_keep=1) as run:
            run.save(*range(1, 21))

    assert run_world(2, work) == [None, None]
    assert list_steps(tmp_path) == [20]


def test_a_step_saved_again_is_counted_once(tmp_path):
    with Run(tmp_path, max_ckpt_to_keep=2) as run:
        for step in itertools.chain([1, 2, 2, 2], [1]):
            run.save(step)
    assert list_steps(tmp_path) == [1, 2]
    assert resume(tmp_path) == 1
