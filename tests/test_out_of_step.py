"""Ranks that do not do the same, and files that change under a save: never a checkpoint that is not whole."""

import os
import threading
import time

import pytest

from recipe_ckpt.errors import RankError, RankTimeoutError, SaveFailedError
from recipe_ckpt.policies import SavePolicy
from recipe_ckpt.retention import Retention
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import verify
from tests.test_async import StagingTinyEngine
from tests.test_save import VerlEngine
from tests.tiny import Run, TinyEngine, list_steps, make_checkpoints, resume, run_world

TOLERANT = SavePolicy(on_failure="warn")


def check_whole(path):
    assert verify(LocalStorage(), str(path), read_all=True) is None


def run_on_disks(place, act, *, engine=TinyEngine, storages=None, clocks=None, **options):
    """Run two ranks with a root of their own each."""

    def work(coordinator):
        rank = coordinator.rank
        mine = engine(rank=rank, dp_size=2)
        storage = storages[rank] if storages else LocalStorage()
        with Run(place / f"disk{rank}", coordinator=coordinator, engine=mine, storage=storage, **options) as run:
            return act(run)

    return run_world(2, work, clocks=clocks)


# --- ranks that are at different saves


def test_ranks_that_are_at_different_exchanges_are_told_so():
    outcomes = run_world(3, lambda c: c.together(lambda: None, len, of=f"step {c.rank // 2}"))
    assert [type(outcome) for outcome in outcomes] == [RankError] * 3
    for rank in (0, 2):
        assert outcomes[rank].is_final
        assert "ranks are out of step: " in str(outcomes[rank])
        assert "'step 0'" in str(outcomes[rank])
        assert "'step 1'" in str(outcomes[rank])


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
@pytest.mark.parametrize("absent", [0, 1])
def test_rank_that_leaves_a_save_out_ends_the_run_and_no_mixed_checkpoint_is_made(tmp_path, absent, on_failure):
    def work(coordinator):
        engine = TinyEngine(rank=coordinator.rank, dp_size=2)
        options = {"save_policy": SavePolicy(on_failure=on_failure), "retention": Retention(max_to_keep=1)}
        with Run(tmp_path, coordinator=coordinator, engine=engine, **options) as run:
            run.save(10)
            if run.engine.rank != absent:
                run.save(20)
            run.save(30)

    outcomes = run_world(2, work)
    assert all(isinstance(outcome, RankError) for outcome in outcomes), outcomes
    assert all(outcome.is_final for outcome in outcomes)
    assert any("ranks are out of step" in str(outcome) for outcome in outcomes)
    assert list_steps(tmp_path) == [10]
    check_whole(tmp_path / "global_step_10")


class LateStorage(LocalStorage):
    """Writes this file of step 4 only when the test says so."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write_file(self, path, chunks, *, name, rank):
        if name == "model-0.json" and "global_step_4" in path:
            self.reached.set()
            assert self.go_on.wait(20)
        return super().write_file(path, chunks, name=name, rank=rank)


def test_rank_0_that_is_late_for_a_save_which_another_node_gave_up_makes_no_mixed_checkpoint(place):
    storages = [LateStorage(), LocalStorage()]
    looks = iter(range(10**9))

    def clock():
        """Rank 1's: it runs very fast while rank 0 is late."""
        is_late = storages[0].reached.is_set() and not storages[0].go_on.is_set()
        return time.monotonic() + (1e6 * next(looks) if is_late else 0)

    given_up = []

    def act(run):
        run.save(4)
        given_up.extend([run.engine.rank] * (run.handler.last_save is None))
        if run.engine.rank == 1:
            storages[0].go_on.set()
        run.save(8, 12)

    outcomes = run_on_disks(place, act, storages=storages, clocks={1: clock}, save_policy=TOLERANT)
    assert all(isinstance(outcome, RankError) for outcome in outcomes), outcomes
    assert any("ranks are out of step" in str(outcome) for outcome in outcomes)
    assert not any(isinstance(outcome, RankTimeoutError) for outcome in outcomes)
    assert given_up[0] == 1
    assert [list_steps(place / f"disk{rank}") for rank in (0, 1)] == [[], []]
    assert run_on_disks(place, lambda run: run.save(16).start) == [0, 0]
    for rank in (0, 1):
        check_whole(place / f"disk{rank}" / "global_step_16")


@pytest.mark.case("C1001")
def test_rank_that_can_not_tell_if_it_can_copy_its_state_stays_in_step(tmp_path):
    broken = [True]

    class Doubtful(StagingTinyEngine):
        def can_stage(self, contents):
            if self.rank == 1 and broken:
                broken.clear()
                raise RuntimeError("out of memory")
            return super().can_stage(contents)

    def work(coordinator):
        engine = Doubtful(rank=coordinator.rank, dp_size=2)
        with Run(tmp_path, coordinator=coordinator, engine=engine, save_policy=SavePolicy(is_async=True)) as run:
            run.save(4, 8)

    assert run_world(2, work) == [None, None]
    assert list_steps(tmp_path) == [4, 8]
    check_whole(tmp_path / "global_step_4")
    check_whole(tmp_path / "global_step_8")


# --- files that change under a save


class RobbedStorage(LocalStorage):
    """Something else removes the model's file of step 8 when all is written but the records."""

    def write_file(self, path, chunks, *, name, rank):
        if name == "files.json" and "global_step_8" in path:
            os.unlink(os.path.join(os.path.dirname(path), "model-0.json"))
        return super().write_file(path, chunks, name=name, rank=rank)


def test_save_whose_files_vanish_before_the_commit_fails_and_the_former_one_stays(tmp_path):
    make_checkpoints(tmp_path, 4)
    lost = r"step 8: .*changed while it was saved: model-0\.json: No such file"
    with Run(tmp_path, storage=RobbedStorage()) as run, pytest.raises(SaveFailedError, match=lost):
        run.save(8)
    assert resume(tmp_path) == 4


class RenamesNothing(LocalStorage):
    """Refuses to rename what is ready to the step's name, once it is told to."""

    is_armed = False

    def rename(self, source, target):
        if self.is_armed and os.path.basename(target) == "global_step_4" and ".staging" in source:
            raise OSError(5, "Input/output error")
        super().rename(source, target)


def test_step_that_one_node_could_not_replace_is_put_back_on_all(place):
    storages = [LocalStorage(), RenamesNothing()]

    def act(run):
        run.save(4)
        storages[1].is_armed = True
        run.save(4)
        kept = list_steps(place / f"disk{run.engine.rank}")
        run.save(8)
        return kept

    assert run_on_disks(place, act, storages=storages, save_policy=TOLERANT) == [[4], [4]]
    for rank in (0, 1):
        for step in (4, 8):
            check_whole(place / f"disk{rank}" / f"global_step_{step}")


class FolderOfOne(VerlEngine):
    """Writes a folder on rank 0 only, as verl does for the tokenizer and the configuration."""

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        with open(os.path.join(local_path, f"model_world_size_{self.dp_size}_rank_{self.rank}.pt"), "w") as file:
            file.write(str(self.value))
        if self.rank == 0:
            folder = os.path.join(local_path, "huggingface")
            os.mkdir(folder)
            with open(os.path.join(folder, "config.json"), "w") as file:
                file.write("{}")


def test_folder_that_only_one_node_wrote_is_saved_there(place):
    assert run_on_disks(place, lambda run: run.save(4).start, engine=FolderOfOne) == [0, 0]
    assert (place / "disk0" / "global_step_4" / "huggingface" / "config.json").exists()
    assert run_on_disks(place, lambda run: (run.start, run.engine.value), engine=FolderOfOne) == [(4, 4.0)] * 2
