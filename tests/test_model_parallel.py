"""Ranks that share a data-parallel rank: tensor-parallel ones read the same samples, so one file holds their position."""

import pytest

from recipe_ckpt.manifest import FileTable
from tests.tiny import Run, TinyEngine, run_world


class ParallelEngine(TinyEngine):
    """Of each `size` neighbouring ranks the first speaks for all of them."""

    def __init__(self, rank, world_size, size):
        super().__init__(rank=rank, dp_size=world_size // size)
        self.size = size

    def is_mp_src_rank_with_outputs(self):
        return self.rank % self.size == 0

    def get_data_parallel_rank(self):
        return self.rank // self.size


class PlainLoader:
    """A loader whose sampler has no global position: it is restored through its own state."""

    batch_size, num_workers, dataset = 4, 0, range(64)

    def __init__(self, rank):
        self.rank, self.loaded = rank, None
        self._iterator = None

    def __len__(self):
        return 16

    def state_dict(self):
        return {"rank": self.rank, "yielded": 3}

    def load_state_dict(self, state):
        self.loaded = state


def save_or_load(coordinator, root, size, *steps):
    rank = coordinator.rank
    loader = PlainLoader(rank)
    with Run(root, coordinator=coordinator, engine=ParallelEngine(rank, coordinator.world_size, size), loader=loader) as run:
        loader._iterator = "has begun"
        for step in steps:
            run.engine.value = rank + 0.5
            run.handler.save_checkpoint(step)
        return run.start, run.engine.value, loader.loaded and loader.loaded["rank"]


@pytest.mark.case("C714")
@pytest.mark.parametrize(("world_size", "size"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_of_one_data_parallel_rank_write_one_file_and_all_read_it(place, world_size, size):
    run_world(world_size, lambda c: save_or_load(c, place, size, 3))
    path = place / "global_step_3"
    dp_size = world_size // size
    assert sorted(file.name for file in path.glob("data_*.pt")) == [f"data_{dp_rank}.pt" for dp_rank in range(dp_size)]
    table = FileTable.decode((path / "files.json").read_bytes(), "files.json")
    writers = {entry.path: entry.rank for entry in table.entries if entry.path.startswith("data_")}
    assert writers == {f"data_{dp_rank}.pt": dp_rank * size for dp_rank in range(dp_size)}
    expected = [(3, rank + 0.5, rank // size * size) for rank in range(world_size)]
    assert run_world(world_size, lambda c: save_or_load(c, place, size)) == expected


@pytest.mark.case("C714")
def test_another_model_parallel_size_keeps_the_position_of_each_data_parallel_rank(place):
    run_world(4, lambda c: save_or_load(c, place, 2, 3))
    assert run_world(2, lambda c: save_or_load(c, place, 1)) == [(3, 0.5, 0), (3, 1.5, 2)]
