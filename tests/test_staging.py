import os
import threading

import pytest
import torch
from torch import nn

from recipe_ckpt.engines.base import StagingEngine
from recipe_ckpt.engines.spmd import SpmdEngine, distribute
from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.tensors.copying import Copying
from recipe_ckpt.tensors.image import ImageCopies
from recipe_ckpt.tensors.memory import find_available_bytes, find_memory_problem
from tests.ranks import run_ranks
from tests.toy_models import build_toy, train

CONTENTS = ("model", "optimizer")
LARGE = 3 << 20  # elements: above what is copied in the background


class Wide(nn.Module):
    """Tensors that are large enough for the background, the last in the file a buffer that the forward changes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(LARGE))
        self.other = nn.Parameter(torch.rand(3 * LARGE))
        self.small = nn.Parameter(torch.rand(3))
        self.register_buffer("zone", torch.zeros(LARGE))

    def forward(self, scale):
        self.zone.add_(1)
        return (self.weight.square().sum() + self.other.sum() + self.small.sum()) * scale


def build_engine(model, optimizer=torch.optim.AdamW, **options):
    return SpmdEngine(model, optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05, **options))


def build_wide(**options):
    torch.manual_seed(0)
    engine = build_engine(Wide(), **options)
    step_wide(engine, 1)
    return engine


def step_wide(engine, step):
    engine.model(0.1).backward()
    engine.step_optimizer(step)


def build_trained_toy():
    engine = build_engine(build_toy(0))
    train(engine, 1, 2)
    return engine


def write(snapshot, directory):
    """Write a snapshot and return every file's bytes by name."""
    os.makedirs(directory)
    written = snapshot.write(str(directory), LocalStorage())
    snapshot.finish(str(directory), LocalStorage(), [written.fragment])
    return read_files(directory)


def read_files(directory):
    files = {}
    for name in os.listdir(directory):
        with open(os.path.join(directory, name), "rb") as file:
            files[name] = file.read()
    return files


def save(engine, directory, **options):
    return write(engine.snapshot(CONTENTS, **options), directory)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("build", [build_trained_toy, build_wide])
def test_staged_files_equal_blocking_ones(tmp_path, build, overlap):
    engine = build()
    expected = save(engine, tmp_path / "blocking")
    assert sorted(expected) == ["index.json", "model-0.safetensors", "optimizer-0.safetensors"]
    for number in range(2):
        assert save(engine, tmp_path / f"{number}", stage=True, overlap=overlap) == expected


def test_engine_is_what_the_port_asks_for():
    assert isinstance(build_trained_toy(), StagingEngine)


def test_state_may_change_as_soon_as_a_staged_snapshot_is_taken(tmp_path):
    engine = build_wide()
    expected = save(engine, tmp_path / "blocking")
    snapshot = engine.snapshot(CONTENTS, stage=True)
    with torch.no_grad():
        for tensor in [
            *engine.model.parameters(),
            *engine.model.buffers(),
            engine.optimizer.state[engine.model.weight]["step"],
        ]:
            tensor.fill_(7)
    assert write(snapshot, tmp_path / "staged") == expected


@pytest.mark.parametrize("how", ["engine", "optimizer", "restore"])
def test_what_changes_the_state_waits_for_an_overlapped_copy(tmp_path, how):
    engine = build_wide()
    other = restorable(save_to(engine, tmp_path / "other"))
    step_wide(engine, 2)
    expected = save(engine, tmp_path / "blocking")
    engine.snapshot(CONTENTS, stage=True).release()  # makes the plan: from now on the copies start at once
    engine.model(0.1).backward()
    engine.model.zone.sub_(1)
    snapshot = engine.snapshot(CONTENTS, stage=True, overlap=True)
    if how == "restore":
        engine.restore(*other, CONTENTS)
    else:
        engine.step_optimizer(3) if how == "engine" else engine.optimizer.step()
    assert write(snapshot, tmp_path / "staged") == expected


def save_to(engine, directory):
    save(engine, directory)
    return directory


class Slow:
    is_done = False

    def run(self):
        threading.Event().wait(0.05)
        self.is_done = True


def test_settling_and_releasing_wait_for_copies_in_the_background():
    for end in (Copying.settle, Copying.wait, Copying.end):
        slow = Slow()
        copying = Copying([ImageCopies(late=[slow])])
        copying.start(overlap=True)
        end(copying)
        assert slow.is_done


def restorable(directory):
    from recipe_ckpt.storage import describe_file

    entries = {name: describe_file(os.path.join(directory, name), name=name, rank=0) for name in os.listdir(directory)}
    return str(directory), entries


def test_buffers_that_the_forward_changes_are_copied_before_an_overlapped_snapshot_returns(tmp_path):
    engine = build_wide()
    expected = save(engine, tmp_path / "blocking")
    snapshot = engine.snapshot(CONTENTS, stage=True, overlap=True)
    engine.model(0.1)
    assert write(snapshot, tmp_path / "staged") == expected


def replace_parameter(model):
    model.frozen = nn.Parameter(torch.rand(4), requires_grad=False)


def replace_memory(model):
    model.unused.data = torch.rand(6, 2)


def transpose_in_place(model):
    square = model.blocks[0].up.weight
    square.data = square.data.as_strided((5, 4), (1, 5))


def change_shape(model):
    model.frozen.data = torch.rand(1)


def change_dtype(model):
    model.frozen.data = model.frozen.data.double()


def rename(model):
    model.renamed = model.frozen
    del model.frozen


def replace_buffer(model):
    model.table = torch.rand(2, 2)


def persist(model):
    model._non_persistent_buffers_set.clear()


def add_block(model):
    model.blocks.append(nn.Linear(2, 2))


CHANGES = [
    replace_parameter,
    replace_memory,
    transpose_in_place,
    change_shape,
    change_dtype,
    rename,
    replace_buffer,
    persist,
    add_block,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_plan_is_made_anew_when_the_model_changes(tmp_path, change):
    engine = build_trained_toy()
    before = save(engine, tmp_path / "before", stage=True)
    change(engine.model)
    after = save(engine, tmp_path / "after", stage=True)
    assert after == save(engine, tmp_path / "blocking")
    assert after != before


def test_plan_is_made_anew_when_optimizer_state_appears_changes_or_goes(tmp_path):
    engine = build_engine(build_toy(0))
    assert "optimizer-0.safetensors" not in save(engine, tmp_path / "fresh", stage=True)
    train(engine, 1, 1)
    assert "optimizer-0.safetensors" in save(engine, tmp_path / "0", stage=True)
    state = engine.optimizer.state[engine.model.embed.weight]
    state["exp_avg"] = state["exp_avg"].double()
    assert save(engine, tmp_path / "1", stage=True) == save(engine, tmp_path / "1b")
    engine.optimizer.state.clear()
    assert "optimizer-0.safetensors" not in save(engine, tmp_path / "2", stage=True)


class Counting(torch.optim.SGD):
    """Keeps a number and a list of tensors, which a comparison of tensors would not see."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state.setdefault("history", []).append(torch.rand(2))


def test_hyperparameters_and_numbers_are_those_of_the_moment(tmp_path):
    engine = build_engine(build_toy(0), Counting)
    for step in range(1, 4):
        train(engine, step, step)
        engine.optimizer.param_groups[0]["lr"] = 0.1 / step
        assert save(engine, tmp_path / f"{step}", stage=True) == save(engine, tmp_path / f"{step}b")


def test_state_of_a_lone_part_can_be_staged(tmp_path):
    engine = build_trained_toy()
    files = write(engine.snapshot(["optimizer"], stage=True), tmp_path / "staged")
    assert files == write(engine.snapshot(["optimizer"]), tmp_path / "blocking")
    assert sorted(files) == ["index.json", "optimizer-0.safetensors"]


def test_second_staged_snapshot_needs_the_first_to_be_written_or_released(tmp_path):
    engine = build_trained_toy()
    snapshot = engine.snapshot(CONTENTS, stage=True)
    with pytest.raises(AssertionError, match="one staged snapshot at a time"):
        engine.snapshot(CONTENTS, stage=True)
    snapshot.release()
    with pytest.raises(AssertionError, match="is written once"):
        snapshot.write(str(tmp_path), LocalStorage())
    write(engine.snapshot(CONTENTS, stage=True), tmp_path / "next")
    engine.snapshot(CONTENTS, stage=True).release()


class FullDisk(LocalStorage):
    def write_file(self, path, chunks, *, name, rank):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("overlap", [False, True])
def test_write_that_fails_raises_and_the_next_one_works(tmp_path, overlap):
    engine = build_wide()
    snapshot = engine.snapshot(CONTENTS, stage=True, overlap=overlap)
    with pytest.raises(OSError, match="No space left"):
        snapshot.write(str(tmp_path), FullDisk())
    assert save(engine, tmp_path / "a", stage=True) == save(engine, tmp_path / "b")


class Broken:
    def run(self):
        raise RuntimeError("no such memory")


def test_copy_that_fails_in_the_background_surfaces_where_it_is_waited_for():
    copying = Copying([ImageCopies(late=[Broken()])])
    copying.start(overlap=True)
    copying.settle()  # an optimizer step goes on
    with pytest.raises(SaveFailedError, match="staging the tensors failed: RuntimeError: no such memory"):
        copying.wait()
    with pytest.raises(RuntimeError, match="no such memory"):
        Copying([ImageCopies(early=[Broken()])]).start(overlap=True)


class Held:
    """A copy that ends when the test says so."""

    def __init__(self):
        self.go_on = threading.Event()

    def run(self):
        assert self.go_on.wait(30)


def test_change_during_an_overlapped_copy_by_anything_but_the_optimizer_is_an_error():
    held, weight = Held(), torch.zeros(3)
    copying = Copying([ImageCopies(late=[held], watched=[("weight", weight), ("other", torch.zeros(3))])])
    copying.start(overlap=True)
    weight.copy_(torch.ones(3))
    held.go_on.set()
    with pytest.raises(SaveFailedError, match="'weight' and in all 1 tensors were changed while they were copied"):
        copying.wait()


def test_change_after_an_overlapped_copy_is_none_of_its_business():
    held, weight = Held(), torch.zeros(3)
    copying = Copying([ImageCopies(late=[held], watched=[("weight", weight)])])
    copying.start(overlap=True)
    held.go_on.set()
    copying.settle()
    weight.add_(1)
    copying.wait()


def test_state_that_memory_can_not_hold_twice_is_refused_with_the_sizes():
    engine = build_engine(nn.Linear(2, 2))
    assert engine.can_stage(CONTENTS) is None
    engine.model.register_buffer("huge", torch.zeros(1).expand(1 << 42))
    problem = r"needs 17592\.\d\d GB of host memory for each of 1 ranks on this node, of \d+\.\d\d GB that are available"
    assert engine.can_stage(CONTENTS) is not None
    with pytest.raises(SaveFailedError, match=problem):
        engine.snapshot(CONTENTS, stage=True)
    engine.model.huge = torch.zeros(3)
    engine.snapshot(CONTENTS, stage=True).release()


def test_memory_is_counted_for_all_ranks_of_the_node(monkeypatch):
    third = find_available_bytes() // 3
    assert find_memory_problem(third) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "for each of 4 ranks" in find_memory_problem(third)


def read_usage():
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return int(status["VmRSS"].split()[0]) / 1024, threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_two_hundred_staged_snapshots_leak_nothing(tmp_path):
    torch.manual_seed(0)
    engine = build_engine(nn.Linear(1024, 1024))

    def cycle(number):
        engine.model(torch.rand(2, 1024)).sum().backward()
        engine.step_optimizer(number + 1)
        snapshot = engine.snapshot(CONTENTS, stage=True, overlap=number % 2 == 0)
        if number % 10:
            snapshot.release()
            return
        directory = tmp_path / f"{number}"
        write(snapshot, directory)
        for name in os.listdir(directory):
            os.unlink(directory / name)

    for number in range(20):
        cycle(number)
    before = read_usage()
    for number in range(20, 220):
        cycle(number)
    after = read_usage()
    assert after[0] - before[0] < 16
    assert after[1:] == before[1:]


def test_fork_of_a_dataloader_worker_does_not_slow_or_break_the_next_snapshot(tmp_path):
    engine = build_wide()
    snapshot = engine.snapshot(CONTENTS, stage=True, overlap=True)
    assert sorted(torch.utils.data.DataLoader(range(4), batch_size=None, num_workers=1)) == [0, 1, 2, 3]
    expected = save(engine, tmp_path / "blocking")
    assert write(snapshot, tmp_path / "staged") == expected
    workers = iter(torch.utils.data.DataLoader(range(4), batch_size=None, num_workers=1))
    before = count_minor_faults()
    snapshot = engine.snapshot(CONTENTS, stage=True)
    assert count_minor_faults() - before < 1000  # of 36,000 pages
    assert write(snapshot, tmp_path / "again") == expected
    assert list(workers) == [0, 1, 2, 3]


def count_minor_faults():
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[7])


def stage_on_ranks(directory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 3))
    engine = build_engine(distribute(model, strategy="fsdp2", device="cpu"))
    for step in range(1, 4):
        engine.model(torch.rand(4, 1024)).sum().backward()
        engine.step_optimizer(step)
        staged, blocking = (f"{directory}/{kind}-{step}-{torch.distributed.get_rank()}" for kind in ("staged", "blocking"))
        os.makedirs(blocking)
        os.makedirs(staged)
        expected = engine.snapshot(CONTENTS).write(blocking, LocalStorage())
        snapshot = engine.snapshot(CONTENTS, stage=True, overlap=step > 1)
        engine.model(torch.rand(4, 1024)).sum().backward()
        assert snapshot.write(staged, LocalStorage()) == expected
        assert read_files(staged) == read_files(blocking)
        assert len(expected.entries) == 2
        engine.optimizer.zero_grad()


def test_staged_shards_of_two_ranks_equal_blocking_ones(tmp_path):
    run_ranks(2, stage_on_ranks, str(tmp_path))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 1 << 20, (16 << 20) - 1, (32 << 20) + 4097])
def test_file_of_one_aligned_piece_is_written_whole_whatever_its_size(tmp_path, size):
    import mmap

    memory = mmap.mmap(-1, max(size, 1))
    memory[:size] = os.urandom(size)
    piece = memoryview(memory)[:size]
    entry = LocalStorage().write_file(str(tmp_path / "a"), [piece], name="x", rank=3)
    assert (tmp_path / "a").read_bytes() == bytes(piece)
    assert LocalStorage().write_file(str(tmp_path / "b"), [bytes(piece)], name="x", rank=3) == entry
    parts = [piece[:100], piece[100 : 5 << 20], piece[5 << 20 :]]
    assert LocalStorage().write_file(str(tmp_path / "c"), parts, name="x", rank=3) == entry
