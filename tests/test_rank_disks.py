"""Ranks that do not see the same disk, or are not as many as those that saved: one decision for all, and a reason."""

import errno
import multiprocessing

import pytest

from recipe_ckpt.errors import RankError, RootNotSharedError, StateMismatchError
from recipe_ckpt.loading import Resumer
from recipe_ckpt.node_mirror import NodeMirror
from recipe_ckpt.node_session import NodeSession
from recipe_ckpt.nodes import Node, Nodes
from recipe_ckpt.policies import LoadPolicy, MirrorPolicy
from recipe_ckpt.remote_fsspec import FsspecRemote
from recipe_ckpt.retention import Retention
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.store import Store
from tests.test_save import VerlEngine
from tests.tiny import Run, TinyEngine, list_steps, run_in_child, run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FORK = multiprocessing.get_context("fork")


def save_and_name_start(coordinator, root, *steps, engine=TinyEngine, **options):
    mine = engine(rank=coordinator.rank, dp_size=coordinator.world_size)
    with Run(root, coordinator=coordinator, engine=mine, **options) as run:
        run.save(*steps)
        return run.start


@pytest.mark.case("C1003")
def test_many_processes_make_one_directory(place):
    together = FORK.Barrier(16)

    def work():
        for number in range(50):
            together.wait(30)
            LocalStorage().make_dirs(str(place / str(number) / "deep" / "er"))

    workers = [FORK.Process(target=work) for _ in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 16
    assert len(list(place.glob("*/deep/er"))) == 50


class LaggingStorage(LocalStorage):
    """Sees each file only at the n-th look, as a network file system's client may."""

    def __init__(self, looks):
        self.looks, self.seen = looks, {}

    def _look(self, path):
        self.seen[path] = self.seen.get(path, 0) + 1
        return self.seen[path] >= self.looks

    def read(self, path):
        if not self._look(path):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return super().read(path)

    def exists(self, path):
        return self._look(path) and super().exists(path)


@pytest.mark.case("C1004")
@pytest.mark.parametrize("looks", [2, 8])
def test_rank_whose_disk_lags_resumes_the_same_step(place, looks):
    assert run_world(2, lambda c: save_and_name_start(c, place, 10, 20)) == [0, 0]

    def work(coordinator):
        storage = LaggingStorage(looks) if coordinator.rank else LocalStorage()
        return save_and_name_start(coordinator, place, 30, storage=storage)

    assert run_world(2, work) == [20, 20]
    assert list_steps(place) == [10, 20, 30]


def open_node(node):
    store = Store(node.root, LocalStorage())
    mirror = NodeMirror(None, node, 2, store, MirrorPolicy(), Retention(), FsspecRemote)
    return NodeSession(node, store, mirror, LocalStorage(), "launch-1")


@pytest.mark.parametrize("stale", [False, True])
def test_root_that_only_seems_to_be_shared_is_refused_naming_a_rank(place, stale):
    """Two hosts of one name and boot, such as copies of a running machine: the lease of the one is not seen by the other."""

    def work(coordinator):
        root = str(place / f"node{coordinator.rank}")
        nodes = Nodes((Node((0, 1), "host", root),))
        node = open_node(nodes.all[0]) if coordinator.rank == 0 else None
        LocalStorage().make_dirs(root)
        try:
            resumer = Resumer(
                coordinator, LocalStorage(), nodes, root, None, LoadPolicy(), node, None, visible_within_secs=0.3
            )
            resumer.open()
        finally:
            if node:
                node.close()

    if stale:
        assert run_in_child(lambda: Run(place / "node1").__enter__()) == 0
    outcomes = run_world(2, work)
    assert [type(error) for error in outcomes] == [RankError, RootNotSharedError]
    assert all("rank 1 on " in str(error) and "does not see in" in str(error) for error in outcomes)


# --- another number of ranks


class RigidEngine(TinyEngine):
    """Reads the state of the same number of ranks only, and says so."""

    def restore(self, directory, entries, contents):
        saved = sum(name.startswith("model-") for name in entries)
        if saved != self.dp_size:
            raise StateMismatchError(f"{saved} ranks saved it, {self.dp_size} would load it")
        super().restore(directory, entries, contents)


@pytest.mark.case("C1007")
@pytest.mark.parametrize("engine", [RigidEngine, VerlEngine])
@pytest.mark.parametrize(("saved", "here"), [(2, 4), (4, 2)])
def test_engine_that_can_not_reshard_stops_all_ranks_naming_both_sizes(place, engine, saved, here):
    assert run_world(saved, lambda c: save_and_name_start(c, place, 10, engine=engine)) == [0] * saved
    outcomes = run_world(here, lambda c: save_and_name_start(c, place, 20, engine=engine))
    assert {type(error) for error in outcomes} <= {StateMismatchError, RankError}
    assert all(f"{saved} ranks saved it, " in str(error) and str(here) in str(error) for error in outcomes)
    assert list_steps(place) == [10]


@pytest.mark.case("C1007")
@pytest.mark.parametrize("engine", [RigidEngine, VerlEngine])
def test_engine_that_can_not_reshard_does_not_fall_back_to_an_older_one_of_its_size(place, engine):
    """An older one is no answer to a wrong number of ranks: it would undo training that is whole."""

    class Resharding(engine):
        def restore(self, directory, entries, contents):
            self.value = 10.0

        def load_checkpoint(self, local_path):
            self.value = 10.0

    assert run_world(4, lambda c: save_and_name_start(c, place, 10, engine=engine)) == [0] * 4
    assert run_world(2, lambda c: save_and_name_start(c, place, 20, engine=Resharding)) == [10] * 2
    outcomes = run_world(4, lambda c: save_and_name_start(c, place, 30, engine=engine))
    assert all("global_step_20" in str(error) or "2 ranks saved it, 4" in str(error) for error in outcomes)
    assert list_steps(place) == [10, 20]
