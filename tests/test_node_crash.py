"""Kill nodes, or fail their disks, at each operation of a save: afterwards all have it whole, or none has it."""

import errno
import os
import shutil
import time

import pytest

from recipe_ckpt.policies import SavePolicy
from recipe_ckpt.storage import LocalStorage
from tests.rank_processes import run_processes
from tests.test_crash import KILLED, DyingStorage, check_litter, check_whole
from tests.tiny import Run, TinyEngine, list_steps, run_in_child, run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NEVER = 10**9
TOLERANT = SavePolicy(on_failure="warn")


def run_rank(coordinator, place, act, storage=None, **options):
    rank = coordinator.rank
    engine = TinyEngine(rank=rank, dp_size=coordinator.world_size)
    options["storage"] = storage or LocalStorage()
    with Run(place / f"disk{rank}", coordinator=coordinator, engine=engine, **options) as run:
        return act(run)


def launch(place, act, storages=(None, None), **options):
    return run_world(2, lambda c: run_rank(c, place, act, storages[c.rank], **options))


def save(step, value):
    def act(run):
        run.loader.batch_sampler.consumed = step
        run.engine.value = value
        run.handler.save_checkpoint(step)

    return act


def prepare(place):
    assert launch(place, lambda run: run.save(5, 10) and None) == [None, None]


def check_after(place, allowed):
    """Resume on good disks: one step and its state on all nodes, nothing left over, and the next save works."""
    states = launch(place, lambda run: (run.start, run.engine.value))
    assert states[0] == states[1]
    assert states[0] in allowed
    for disk in (0, 1):
        check_whole(place / f"disk{disk}")
    steps = [list_steps(place / f"disk{disk}") for disk in (0, 1)]
    assert steps[0] == steps[1]
    assert steps[0][-1] == states[0][0], "a published step is resumed from"
    assert launch(place, save(99, 99.5)) == [None, None]
    assert launch(place, lambda run: (run.start, run.engine.value)) == [(99, 99.5)] * 2
    for disk in (0, 1):
        check_litter(place / f"disk{disk}")
    return states[0]


def storages_with(disk, storage):
    return [storage if number == disk else None for number in (0, 1)]


def copies(place, points=range(2000)):
    """Yield numbers with a fresh copy of a prepared place each."""
    prepare(place / "before")
    for point in points:
        yield point, shutil.copytree(place / "before", place / f"run{point}")
        shutil.rmtree(place / f"run{point}")


@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize(("step", "former"), [(20, (10, 10.0)), (10, (10, 10.0))])
def test_all_nodes_die_at_each_point_of_one_nodes_save(place, disk, step, former):
    seen = set()
    for point, copy in copies(place, range(0, 2000, 1 if step == 10 else 2)):
        storages = storages_with(disk, DyingStorage(point))
        code = run_in_child(lambda copy=copy, storages=storages: launch(copy, save(step, step + 0.5), storages))
        assert code in (0, KILLED)
        seen.add(check_after(copy, {former, (step, step + 0.5)}))
        if code == 0:
            break
    assert seen == {former, (step, step + 0.5)}


@pytest.mark.parametrize("disk", [0, 1])
def test_all_nodes_die_at_each_point_of_one_nodes_fresh_start(place, disk):
    for point, copy in copies(place):
        storages = storages_with(disk, DyingStorage(point))
        code = run_in_child(lambda c=copy, s=storages: launch(c, save(3, 3.5), s, resume_mode="disable"))
        assert code in (0, KILLED)
        outcomes = launch(copy, lambda run: (run.start, run.engine.value))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0] in {(10, 10.0), (0, 0.0), (3, 3.5)}
        kept = [sorted(path.name for path in copy.glob(f"disk{d}/**/global_step_[15]*")) for d in (0, 1)]
        assert kept == [["global_step_10", "global_step_5"]] * 2, "nothing is lost"
        if code == 0:
            break


class DyingAt(LocalStorage):
    """Ends the process where it would make a file or directory of this name, when the other node has published."""

    def __init__(self, name, other=None):
        self.name, self.other = name, other

    def _die_at(self, name):
        if name != self.name:
            return
        deadline = time.monotonic() + 20
        while self.other and not (list(self.other.glob(".trash/*.by-*")) and list(self.other.glob("global_step_10"))):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os._exit(KILLED)

    def write_file(self, path, chunks, *, name, rank):
        self._die_at(name)
        return super().write_file(path, chunks, name=name, rank=rank)

    def rename(self, source, target):
        self._die_at(os.path.basename(target))
        super().rename(source, target)


@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize(
    ("died_at", "is_lost", "value"),
    [
        ("manifest.json", False, 10.0),  # one node may have prepared, the other has not
        (".committing", False, 10.5),  # both have prepared
        ("global_step_10", False, 10.5),  # one has prepared, the other has published
        ("global_step_10", True, 10.0),  # the same, and what was prepared is lost
    ],
)
def test_all_nodes_die_at_each_point_of_a_recovery(place, disk, died_at, is_lost, value):
    prepare(place / "before")
    roots = [place / "before" / f"disk{number}" for number in (0, 1)]
    storage = DyingAt(died_at, roots[1 - disk] if died_at == "global_step_10" else None)
    assert run_in_child(lambda: launch(place / "before", save(10, 10.5), storages_with(disk, storage))) == KILLED
    if is_lost:
        shutil.rmtree(roots[disk] / ".staging")
    for dying in (disk, 1 - disk):
        for point in range(dying, 2000, 3):
            copy = shutil.copytree(place / "before", place / "run")
            storages = storages_with(dying, DyingStorage(point))
            code = run_in_child(lambda c=copy, s=storages: launch(c, lambda run: None, s))
            check_after(copy, {(10, value)})
            shutil.rmtree(copy)
            if code == 0:
                break


@pytest.mark.parametrize("disk", [0, 1])
def test_one_node_dies_and_the_other_hears_of_it(place, disk):
    for point, copy in copies(place, points=range(6, 48, 6)):

        def work(coordinator, copy=copy, point=point):
            storage = DyingStorage(point) if coordinator.rank == disk else None
            return run_rank(coordinator, copy, save(20, 20.5), storage)

        outcomes = run_processes(2, work)
        assert outcomes[disk] in ("died", "None")
        assert outcomes[disk] == "None" or "dead" in outcomes[1 - disk] or "can't be reached" in outcomes[1 - disk]
        check_after(copy, {(10, 10.0), (20, 20.5)})


class FailingStorage(LocalStorage):
    """Refuses the change of the disk before which `left` others were to be done, once; `has_failed` says that it did."""

    def __init__(self):
        self.left, self.has_failed = NEVER, False

    def _count(self):
        self.left -= 1
        if self.left == -1:
            self.has_failed = True
            raise OSError(errno.EIO, "Input/output error")

    def write_file(self, path, chunks, *, name, rank):
        self._count()
        return super().write_file(path, chunks, name=name, rank=rank)

    def rename(self, source, target):
        self._count()
        super().rename(source, target)

    def sync_dir(self, path):
        self._count()
        super().sync_dir(path)


@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize("step", [20, 10])
def test_failed_save_of_one_node_is_taken_back_on_all_and_the_next_one_works(place, disk, step):
    failed = 0
    for point, copy in copies(place):
        storages = [FailingStorage(), FailingStorage()]

        def act(run, point=point, storages=storages):
            if run.engine.rank == disk:
                storages[disk].left = point
            save(step, step + 0.5)(run)
            storages[disk].left = NEVER
            save(30, 30.5)(run)

        outcomes = launch(copy, act, storages, save_policy=TOLERANT)
        assert outcomes == [None, None], outcomes
        steps = [list_steps(copy / f"disk{number}") for number in (0, 1)]
        assert steps[0] == steps[1]
        assert check_after(copy, {(30, 30.5)}) == (30, 30.5)
        if not storages[disk].has_failed:
            break
        failed += 1
    assert failed > 10
