"""Loaders without a global position: their own state goes back into the same geometry only, and never silently."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe_ckpt import data_state
from recipe_ckpt.errors import DataMismatchError, SaveFailedError
from recipe_ckpt.handler import LoadPolicy
from tests.tiny import Run, TinyEngine, TinyLoader, make_checkpoints

DATASET = torch.arange(64)


def build_loader(*, batch_size=4, dataset=DATASET, num_workers=0):
    return StatefulDataLoader(dataset, batch_size=batch_size, num_workers=num_workers)


def train(run, steps):
    """Take batches as a loop does, over the edges of epochs, and return what each began with."""
    seen, step = [], max(run.start, 0)
    while len(seen) < steps:
        for batch in run.loader:
            seen.append(int(batch[0]))
            step += 1
            if len(seen) == steps:
                break
    run.handler.save_checkpoint(step)
    return seen


@pytest.mark.case("C701", "C702", "C703", "C716", "C801")
@pytest.mark.parametrize("parts", [(5, 2, 9), (5, 0, 3), (0, 4, 1), (15, 1, 2), (16, 3, 1), (16, 16, 1), (5, 11, 2)])
def test_stateful_loader_continues_where_it_stood(tmp_path, parts):
    seen = []
    for steps in parts:
        with Run(tmp_path, loader=build_loader()) as run:
            seen += train(run, steps)
    assert seen == [4 * (number % 16) for number in range(sum(parts))]


CHANGES = [
    ({"batch_size": 8}, {}, "batch_size is 8 here, 4 in the checkpoint"),
    ({"num_workers": 2}, {}, "num_workers is 2 here, 0 in the checkpoint"),
    ({"dataset": torch.arange(40)}, {}, "dataset_len is 40 here, 64 in the checkpoint"),
    ({}, {"dp_size": 2}, "dp_size is 2 here, 1 in the checkpoint"),
]


@pytest.mark.case("C706", "C708", "C709", "C710")
@pytest.mark.parametrize(("loader", "engine", "message"), CHANGES)
def test_stateful_loader_of_another_geometry_is_refused_with_both_values(tmp_path, loader, engine, message):
    with Run(tmp_path, loader=build_loader()) as run:
        train(run, 5)
    with (
        pytest.raises(DataMismatchError, match=message),
        Run(tmp_path, loader=build_loader(**loader), engine=TinyEngine(**engine)),
    ):
        pass


@pytest.mark.case("C706", "C709")
@pytest.mark.parametrize(("loader", "engine", "message"), CHANGES)
def test_stateful_loader_of_another_geometry_starts_over_if_asked_to(tmp_path, loader, engine, message, caplog):
    with Run(tmp_path, loader=build_loader()) as run:
        train(run, 5)
    policy = LoadPolicy(on_data_mismatch="restart")
    with Run(tmp_path, loader=build_loader(**loader), engine=TinyEngine(**engine), load_policy=policy) as run:
        assert run.start == 5
        assert int(next(iter(run.loader))[0]) == 0
    assert message in caplog.text


@pytest.mark.case("C713")
def test_loader_whose_iterator_was_taken_is_refused(tmp_path):
    with Run(tmp_path, loader=build_loader()) as run:
        train(run, 5)
    loader = build_loader()
    iter(loader)
    with (
        pytest.raises(DataMismatchError, match=r"iter\(\) was taken before load_checkpoint\(\)"),
        Run(tmp_path, loader=loader),
    ):
        pass


@pytest.mark.case("C713")
def test_sampler_whose_iterator_was_taken_is_refused(tmp_path):
    make_checkpoints(tmp_path, 5)
    loader = TinyLoader()
    loader.batch_sampler.is_iterating = True
    with (
        pytest.raises(DataMismatchError, match=r"iter\(\) was taken before load_checkpoint\(\)"),
        Run(tmp_path, loader=loader),
    ):
        pass


def test_position_of_one_kind_of_sampler_is_not_given_to_another(tmp_path):
    make_checkpoints(tmp_path / "positioned", 5)
    with Run(tmp_path / "stateful", loader=build_loader()) as run:
        train(run, 5)
    with pytest.raises(DataMismatchError, match="TinySampler.*this run has a SequentialSampler"):
        Run(tmp_path / "positioned", loader=build_loader()).__enter__()
    with pytest.raises(DataMismatchError, match="holds no global data position"):
        Run(tmp_path / "stateful").__enter__()


@pytest.mark.case("C709")
def test_positioned_sampler_of_another_data_set_is_refused(tmp_path):
    make_checkpoints(tmp_path, 5)
    with pytest.raises(DataMismatchError, match="dataset_len is 10 here, 64 in the checkpoint"):
        Run(tmp_path, loader=TinyLoader(10)).__enter__()


@pytest.mark.case("C707", "C304")
def test_missing_loader_state_is_damage_and_not_a_beginning(tmp_path):
    for steps in (3, 2):
        with Run(tmp_path, loader=build_loader()) as run:
            train(run, steps)
    (tmp_path / "global_step_5" / "data_0.pt").unlink()
    with Run(tmp_path, loader=build_loader()) as run:
        assert (run.start, train(run, 1)) == (3, [12])


@pytest.mark.parametrize("loader", [None, DataLoader(DATASET, batch_size=4)])
def test_loader_without_a_state_is_saved_as_none(tmp_path, loader):
    with Run(tmp_path) as run:
        run.handler._contents.loader = loader
        run.handler.save_checkpoint(3)
    assert torch.load(tmp_path / "global_step_3" / "data_0.pt", weights_only=True) == {}


def test_random_state_comes_back_in_all_generators():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    np.random.standard_normal()  # leaves half a pair behind
    random.gauss(0, 1)
    data = data_state.encode_rng()

    def draw():
        return random.random(), random.gauss(0, 1), np.random.standard_normal(), torch.rand(1).item()

    first = draw()
    data_state.restore_rng(data_state.decode_tensors(data, "rng_0.pt"))
    assert draw() == first


def test_new_ranks_get_streams_of_their_own(tmp_path):
    draws = set()
    for rank in range(4):
        data_state.derive_rng(1000 + rank)
        draws.add((random.random(), np.random.random(), torch.rand(1).item()))
    assert len(draws) == 4


def test_state_that_only_a_library_could_read_is_refused_when_saved():
    with pytest.raises(SaveFailedError, match="mine holds more than tensors and plain types"):
        data_state.encode_tensors({"x": random.Random()}, "mine")
