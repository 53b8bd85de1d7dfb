"""Nodes with disks of their own: each keeps its ranks' files, and a checkpoint is one only if all nodes have it."""

import os
import shutil

import pytest

from recipe_ckpt.errors import ConfigError, LineageError, NothingToResumeError, RankError, RootNotSharedError
from recipe_ckpt.manifest import BranchEntry
from recipe_ckpt.node_probe import find_nodes
from recipe_ckpt.nodes import (
    Node,
    Nodes,
    Recovery,
    Report,
    RootState,
    decide_recovery,
    find_missing_ranks,
    group_by_root,
    join_reports,
)
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import Survey, read_commit, read_held, verify
from tests.test_save import VerlEngine
from tests.tiny import Run, TinyEngine, cut_in_half, flip_a_bit, list_steps, run_world


def launch(place, *steps, disks=(0, 1), engine=TinyEngine, storages=(), **options):
    """Run ranks whose roots lie on these disks; return what each one started from, or the error that ended it."""

    def work(coordinator):
        rank = coordinator.rank
        mine = engine(rank=rank, dp_size=len(disks))
        storage = storages[disks[rank]] if storages else LocalStorage()
        with Run(root_of(place, disks[rank]), coordinator=coordinator, engine=mine, storage=storage, **options) as run:
            if run.handler.resume_point is not None:
                assert run.engine.value == run.start == run.loader.batch_sampler.consumed
            run.save(*steps)
            return run.start

    return run_world(len(disks), work)


def root_of(place, disk):
    return place / f"disk{disk}"


def step_of(place, disk, step):
    return root_of(place, disk) / f"global_step_{step}"


def steps_by_disk(place, disks=2):
    return [list_steps(root_of(place, disk)) for disk in range(disks)]


def check_whole(path):
    assert verify(LocalStorage(), str(path), read_all=True) is None


# --- which ranks share a root


@pytest.mark.parametrize(
    ("identities", "seen", "groups"),
    [
        ("aaaa", {}, [(0, 1, 2, 3)]),
        ("aabb", {0: [], 2: []}, [(0, 1), (2, 3)]),
        ("aabb", {0: [2], 2: [0]}, [(0, 1, 2, 3)]),
        ("aabb", {0: [], 2: [0]}, [(0, 1, 2, 3)]),
        ("abab", {0: [], 1: []}, [(0, 2), (1, 3)]),
        ("abc", {0: [1], 1: [0], 2: []}, [(0, 1), (2,)]),
        ("abc", {0: [], 1: [2], 2: []}, [(0,), (1, 2)]),
        ("abcd", {0: [3], 1: [2], 2: [3], 3: []}, [(0, 1, 2, 3)]),
    ],
)
def test_ranks_are_grouped_by_what_they_see(identities, seen, groups):
    assert group_by_root(list(identities), seen) == groups


class StrangeStorage(LocalStorage):
    """Gives each rank's view of one directory an identity of its own, as two hosts would; sees new files at the n-th look."""

    def __init__(self, name, looks):
        self.name, self.looks, self.seen = name, looks, {}

    def directory_key(self, path):
        return f"{self.name}/0/0"

    def exists(self, path):
        self.seen[path] = self.seen.get(path, 0) + 1
        return self.seen[path] >= self.looks and super().exists(path)


@pytest.mark.parametrize("looks", [1, 3])
def test_one_root_on_several_hosts_is_recognised_and_no_probe_stays(place, looks):
    nodes = run_world(3, lambda c: find_nodes(c, StrangeStorage(f"boot{c.rank}", looks), str(place)))
    assert [found.is_one for found in nodes] == [True] * 3
    assert nodes[0] == nodes[2]
    assert os.listdir(place) == []


def test_roots_that_only_differ_are_told_apart_without_a_wait(place, caplog):
    def find(coordinator):
        return find_nodes(coordinator, LocalStorage(), str(root_of(place, coordinator.rank % 2)), visible_within_secs=1e6)

    found = run_world(4, find)
    assert [node.ranks for node in found[3].all] == [(0, 2), (1, 3)]
    assert found[1].disks == (0, 1, 0, 1)
    assert [os.listdir(root_of(place, disk)) for disk in (0, 1)] == [[], []]
    assert "2 separate roots, each node keeps its own files" in caplog.text
    assert f"{place}/disk1 on " in caplog.text
    assert "ranks 1, 3" in caplog.text


def test_root_that_one_rank_can_not_make_is_refused_naming_the_rank(place):
    place.joinpath("disk1").write_text("a file")
    outcomes = launch(place)
    assert [type(error) for error in outcomes] == [ConfigError, RankError]
    assert all("(rank 1)" in str(error) and "disk1" in str(error) for error in outcomes)


# --- decisions


def state(prepared=(), published=(), committed=(), **rest):
    return RootState({f"s{d}": d for d in prepared}, {f"s{d}": d for d in published}, list(committed), **rest)


@pytest.mark.parametrize(
    ("states", "finish"),
    [
        ([state("a")], ["sa"]),
        ([state("a"), state("a")], ["sa"]),
        ([state("a"), state(published="a")], ["sa"]),
        ([state("a"), state(committed="a")], ["sa"]),
        ([state(published="a"), state(committed="a")], ["sa"]),
        ([state("a"), state()], []),
        ([state(published="a"), state()], []),
        ([state("a"), state("b")], []),
        ([state("a", committed="b"), state("b", committed="a"), state(committed="ab")], ["sa", "sb"]),
    ],
)
def test_a_save_is_finished_only_if_every_root_has_it(states, finish):
    assert decide_recovery(states) == Recovery(tuple(finish), ())


@pytest.mark.parametrize(
    ("states", "archive"),
    [
        ([state(lineage="x"), state(archiving="x")], ["x"]),
        ([state(lineage="x"), state(archives=["x"])], ["x"]),
        ([state(lineage="x"), state(archives=["w"])], []),
        ([state(lineage="x", committed="a"), state(lineage="x", archives=["x"])], []),
        ([state(lineage="x"), state(archives=["x"], committed="b")], []),
        ([state(archiving="x"), state()], []),
    ],
)
def test_an_archiving_that_one_root_began_is_ended_on_all(states, archive):
    assert decide_recovery(states).archive == tuple(archive)


def report(*sequences, lineage="x", last=None):
    branch = tuple(BranchEntry(10 * s, s, f"d{s}", {}) for s in sequences)
    return Report(f"/ck on host{sequences}", lineage, max([0, *sequences]) if last is None else last, branch, {}, None)


def test_roots_are_taken_as_one_with_the_newest_branch_and_the_highest_sequence():
    stale = Survey(lineage="x", last_sequence=1, branch=report(1).branch, tracker=10)
    found, elsewhere = join_reports(stale, [report(1), report(3, 2, 1), report(2, 1, last=7)])
    assert ([entry.step for entry in found.branch], found.tracker, found.last_sequence) == ([30, 20, 10], 30, 7)
    assert elsewhere.where == "/ck on host(3, 2, 1)"
    assert join_reports(stale, [report(1), report(1)]) == (stale, None)


def test_tracker_that_the_user_set_survives_the_join():
    edited = Survey(lineage="x", last_sequence=2, branch=report(2, 1).branch, tracker=10)
    assert join_reports(edited, [report(2, 1), report(3, 2, 1)])[0].tracker == 10


@pytest.mark.parametrize(
    ("held", "saved", "ranks", "world", "words"),
    [
        (None, 2, [0, 1], 4, None),
        ({0, 1}, 2, [0], 4, None),
        ({0}, 2, [0], 2, None),
        ({0}, 2, [1], 2, "files of rank 1, who run here now"),
        ({0}, 2, [0], 4, "2 ranks saved it, this run has 4, and the files of rank 1 are not here"),
        ({0}, 4, [0], 1, "files of ranks 1, 2, 3 are not here"),
    ],
)
def test_ranks_whose_files_are_elsewhere_are_named(held, saved, ranks, world, words):
    found = find_missing_ranks(held, saved, ranks, world)
    assert found is None if words is None else words in found


def test_nodes_are_known_by_their_leaders():
    nodes = Nodes((Node((0, 2), "a", "/ck"), Node((1,), "b", "/ck")))
    assert Nodes.from_json(nodes.to_json()) == nodes
    assert (nodes.disks, nodes.leads(2), nodes.leads(1)) == ((0, 1, 0), False, True)


# --- saving and resuming


@pytest.mark.parametrize("disks", [(0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("engine", [TinyEngine, VerlEngine])
def test_each_disk_holds_its_ranks_files_and_what_all_need(place, disks, engine):
    world = len(disks)
    assert launch(place, 5, 10, disks=disks, engine=engine) == [0] * world
    for disk in set(disks):
        check_whole(step_of(place, disk, 10))
        names = set(os.listdir(step_of(place, disk, 10)))
        assert {int(name[4:-3]) for name in names if name.startswith("rng_")} == {r for r in range(world) if disks[r] == disk}
        assert {"trainer_state.json", "manifest.json", "files.json"} <= names
    for name in ("manifest.json", "files.json"):
        assert len({(step_of(place, disk, 10) / name).read_bytes() for disk in disks}) == 1
    assert launch(place, 15, disks=disks, engine=engine) == [10] * world
    assert steps_by_disk(place, max(disks) + 1) == [[5, 10, 15]] * (max(disks) + 1)


@pytest.mark.case("C609")
@pytest.mark.parametrize("disks", [(0, 1), (0, 0, 1, 1)])
def test_each_disk_keeps_as_many_as_retention_says(place, disks):
    launch(place, 10, 20, 30, 40, 50, disks=disks, max_ckpt_to_keep=2)
    assert steps_by_disk(place) == [[40, 50], [40, 50]]


def test_a_pin_on_one_node_counts_on_all(place):
    launch(place, 10)
    root_of(place, 1).joinpath(".pins").mkdir()
    root_of(place, 1).joinpath(".pins", "10").touch()
    launch(place, 20, 30, max_ckpt_to_keep=1)
    assert steps_by_disk(place) == [[10, 30], [10, 30]]


@pytest.mark.case("C1005")
@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize("hurt", [cut_in_half, flip_a_bit, os.unlink])
def test_damage_on_one_node_makes_all_resume_the_older_step(place, disk, hurt):
    launch(place, 5, 10)
    hurt(step_of(place, disk, 10) / f"model-{disk}.json")
    assert launch(place) == [5, 5]


@pytest.mark.parametrize("name", ["trainer_state.json", "node_1.json", "files.json", "manifest.json"])
def test_damage_in_what_a_node_was_given_is_found(place, name):
    launch(place, 5, 10)
    cut_in_half(step_of(place, 1, 10) / name)
    assert launch(place) == [5, 5]


@pytest.mark.parametrize("disk", [0, 1])
def test_node_with_an_older_disk_makes_all_resume_the_newest_common_step(place, disk, caplog):
    launch(place, 5, 10)
    shutil.copytree(root_of(place, disk), place / "old")
    launch(place, 15, 20)
    shutil.rmtree(root_of(place, disk))
    (place / "old").rename(root_of(place, disk))
    assert launch(place, 30) == [10, 10]
    assert f"disk{disk}/global_step_20 on " in caplog.text
    assert launch(place) == [30, 30]
    sequences = [read_commit(LocalStorage(), str(step_of(place, d, 30))).manifest.sequence for d in (0, 1)]
    assert sequences == [5, 5], "no sequence is used twice"


@pytest.mark.parametrize("disk", [0, 1])
def test_empty_disk_beside_checkpoints_is_an_error_naming_nodes_and_steps(place, disk):
    launch(place, 5, 10)
    shutil.rmtree(root_of(place, disk))
    outcomes = launch(place)
    assert [type(error) for error in outcomes] == [NothingToResumeError, RankError]
    for step in (5, 10):
        assert all(f"disk{disk}/global_step_{step} on " in str(error) for error in outcomes)
    assert steps_by_disk(place)[1 - disk] == [5, 10]
    assert launch(place, 1, resume_mode="disable") == [0, 0], "unless it was asked for"
    assert launch(place) == [1, 1]


@pytest.mark.parametrize("disks", [(1, 0), (1, 1), (0, 1, 1)])
def test_ranks_that_moved_to_other_nodes_are_named_with_what_they_lack(place, disks):
    launch(place, 10)
    outcomes = launch(place, disks=disks)
    assert {type(error) for error in outcomes} <= {RootNotSharedError, RankError}
    assert all("the files of rank" in str(error) and "global_step_10 on" in str(error) for error in outcomes)
    assert launch(place) == [10, 10]


@pytest.mark.parametrize("engine", [TinyEngine, VerlEngine])
def test_directories_of_all_nodes_copied_together_are_a_whole_checkpoint(place, engine):
    launch(place, 10, disks=(0, 0, 1, 1), engine=engine)
    for disk in (0, 1):
        shutil.copytree(root_of(place, disk), root_of(place, 7), dirs_exist_ok=True)
    held = read_held(LocalStorage(), read_commit(LocalStorage(), str(step_of(place, 7, 10))))
    assert held.ranks == {0, 1, 2, 3}
    check_whole(step_of(place, 7, 10))
    (step_of(place, 7, 10) / "rng_3.pt").rename(place / "rng_3.pt")
    assert "rng_3.pt" in verify(LocalStorage(), str(step_of(place, 7, 10)), read_all=False)
    (place / "rng_3.pt").rename(step_of(place, 7, 10) / "rng_3.pt")
    assert launch(place, 20, disks=(7, 7, 7, 7), engine=engine) == [10] * 4


def test_fresh_start_moves_the_former_run_aside_on_each_node(place):
    launch(place, 5, 10)
    assert launch(place, 3, resume_mode="disable") == [0, 0]
    assert steps_by_disk(place) == [[3], [3]]
    archives = [sorted(p.name for p in root_of(place, d).glob("archive/*/global_step_*")) for d in (0, 1)]
    assert archives == [["global_step_10", "global_step_5"]] * 2
    lineages = {read_commit(LocalStorage(), str(step_of(place, d, 3))).manifest.lineage for d in (0, 1)}
    assert len(lineages) == 1


def test_fresh_start_that_moved_only_one_node_is_ended_at_the_next(place):
    launch(place, 5)
    lineage = read_commit(LocalStorage(), str(step_of(place, 0, 5))).manifest.lineage
    root_of(place, 0).joinpath(".archiving").write_text(lineage)
    assert launch(place, 7) == [0, 0]
    assert steps_by_disk(place) == [[7], [7]]


def test_going_back_leaves_the_newer_steps_behind_on_each_node(place):
    launch(place, 5, 10, 15)
    root_of(place, 0).joinpath("latest_checkpointed_iteration.txt").write_text("5")
    assert launch(place, 10) == [5, 5]
    left = [sorted(p.name for p in root_of(place, d).glob("archive/left-behind/*")) for d in (0, 1)]
    assert left[0] == left[1] == ["global_step_10"]
    assert launch(place, 12, max_ckpt_to_keep=2) == [10, 10]
    assert steps_by_disk(place) == [[10, 12], [10, 12]]


def test_roots_of_two_runs_are_refused_naming_both(place):
    for disk in (0, 1):
        with Run(root_of(place, disk)) as run:
            run.save(5)
    outcomes = launch(place)
    assert [type(error) for error in outcomes] == [LineageError, RankError]
    assert all("disk0 on" in str(error) and "disk1 on" in str(error) for error in outcomes)
    assert launch(place, 6, resume_mode="disable") == [0, 0]


def test_step_saved_twice_is_replaced_on_each_node(place):
    launch(place, 5, 10)
    assert launch(place, 10) == [10, 10]
    assert launch(place) == [10, 10]
    assert [os.listdir(root_of(place, disk) / ".trash") for disk in (0, 1)] == [[], []]


def test_explicit_path_is_taken_on_each_node(place):
    launch(place, 5, 10)
    named = str(step_of(place, 0, 5))
    assert launch(place, 20, resume_mode="resume_path", resume_from_path=named) == [5, 5]
    assert steps_by_disk(place) == [[5, 10, 20], [5, 10, 20]]
