"""The global position: every sample of an epoch once, in one order, whatever was changed on the way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe_ckpt.errors import ConfigError, DataMismatchError
from recipe_ckpt.sft.sampler import GlobalBatchSampler, SampleKey, derive_seed


def make(dataset_len=10, *, batch_size=4, dp_rank=0, dp_size=1, seed=1, **options):
    return GlobalBatchSampler(dataset_len, batch_size=batch_size, dp_rank=dp_rank, dp_size=dp_size, seed=seed, **options)


def take_steps(position, steps, *, dataset_len, batch_size, dp_size, **options):
    """Train on all ranks for up to `steps` steps; return (epoch, id) in global order, and the position then."""
    ranks = [make(dataset_len, batch_size=batch_size, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]
    if position is not None:
        for rank in ranks:
            rank.restore_position(position)
    trained = []
    batches = [iter(rank) for rank in ranks]
    for _ in range(min(steps, ranks[0].steps_left_in_epoch)):
        shares = [next(batch) for batch in batches]
        merged = [key for keys in zip(*shares, strict=True) for key in keys]
        trained += [(key.epoch, key.id) for key in merged if not key.is_filler]
        for rank in ranks:
            rank.advance()
    assert len({str(rank.position()) for rank in ranks}) == 1
    return trained, ranks[0].position()


@st.composite
def histories(draw):
    parts = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 7))
    return draw(st.integers(1, 40)), [(dp, dp * each, steps) for dp, each, steps in draw(st.lists(parts, max_size=12))]


@pytest.mark.case("C706", "C710")
@given(histories())
def test_any_history_of_ranks_batch_sizes_and_interruptions_trains_the_uninterrupted_order(history):
    dataset_len, parts = history
    trained, position = [], None
    for dp_size, batch_size, steps in parts:
        more, position = take_steps(position, steps, dataset_len=dataset_len, batch_size=batch_size, dp_size=dp_size)
        trained += more
    twin, twin_position = [], None
    while len(twin) < len(trained):
        more, twin_position = take_steps(twin_position, 1, dataset_len=dataset_len, batch_size=1, dp_size=1)
        twin += more
    assert trained == twin


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_ranks_share_an_epoch_out_and_drop_last_drops_only_the_rest(length, dp_size, each, drop_last, seed):
    batch_size = dp_size * each
    if drop_last and length < batch_size:
        return
    options = {"dataset_len": length, "batch_size": batch_size, "dp_size": dp_size, "seed": seed, "drop_last": drop_last}
    trained, position = take_steps(None, 1000, **options)
    ids = [sample for _, sample in trained]
    assert len(ids) == len(set(ids)) == (length - length % batch_size if drop_last else length)
    assert (position["epoch"], position["samples_consumed"]) == (1, 0)


def test_the_last_batch_is_filled_up_evenly_and_says_so():
    shares = [list(make(10, batch_size=8, dp_rank=rank, dp_size=4)) for rank in range(4)]
    assert [[sum(key.is_filler for key in batch) for batch in share] for share in shares] == [[0, 1], [0, 1], [0, 2], [0, 2]]


def test_a_data_set_smaller_than_a_batch_is_filled_up_too():
    (batch,) = list(make(3, batch_size=8))
    assert sorted(key.id for key in batch if not key.is_filler) == [0, 1, 2]
    assert len(batch) == 8


def test_what_is_fetched_ahead_does_not_move_the_position():
    sampler = make()
    assert len(list(sampler)) == 3
    assert sampler.position()["samples_consumed"] == 0


def test_an_iterator_starts_at_the_position_of_its_making():
    sampler = make()
    batches = iter(sampler)
    sampler.advance()
    assert next(batches) == next(iter(make()))


def test_the_order_depends_on_the_epoch_and_on_the_seed():
    orders = []
    for seed, epoch in [(1, 0), (1, 1), (2, 0)]:
        sampler = make(50, seed=seed)
        sampler.restore_position({**sampler.position(), "epoch": epoch})
        orders.append([key.id for batch in sampler for key in batch])
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_without_shuffling_the_order_is_the_data_sets():
    assert [key.id for batch in make(8, shuffle=False) for key in batch] == list(range(8))


def test_an_epoch_ends_at_once_with_its_last_batch():
    sampler = make(10)
    seen = []
    for _ in range(4):
        sampler.advance()
        seen.append((sampler.epoch, sampler.samples_consumed, sampler.steps_left_in_epoch))
    assert seen == [(0, 4, 2), (0, 8, 1), (1, 0, 3), (1, 4, 2)]


@pytest.mark.case("C710")
def test_a_position_with_no_whole_batch_left_moves_to_the_next_epoch_under_drop_last():
    sampler = make(10, batch_size=8, drop_last=True)
    sampler.restore_position({**sampler.position(), "samples_consumed": 4})
    assert (sampler.epoch, sampler.samples_consumed) == (1, 0)


@pytest.mark.case("C713")
def test_iterating_is_visible_until_the_epoch_is_trained():
    sampler = make(8)
    assert not sampler.is_iterating
    list(sampler)
    assert sampler.is_iterating
    sampler.advance()
    sampler.advance()
    assert not sampler.is_iterating


@pytest.mark.case("C709")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataset_len": 20}, "dataset_len: 20 in the checkpoint, 10 here"),
        ({"fingerprint": "old"}, "fingerprint: 'old' in the checkpoint, '' here"),
        ({"seed": 7}, "seed: 7 in the checkpoint, 1 here"),
    ],
)
def test_other_data_is_refused_naming_both_values_or_starts_the_epoch_over(changed, message):
    sampler = make(10)
    position = {**sampler.position(), "epoch": 3, "samples_consumed": 8, **changed}
    with pytest.raises(DataMismatchError, match=message):
        sampler.restore_position(position)
    assert sampler.epoch == 0
    sampler.restore_position(position, on_mismatch="restart")
    assert (sampler.epoch, sampler.samples_consumed) == (3, 0)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (10, {"batch_size": 6, "dp_size": 4}, "data.train_batch_size: found 6; allowed: a multiple of the 4"),
        (3, {"batch_size": 4, "drop_last": True}, "at most the 3 samples"),
        (0, {"batch_size": 4}, "a data set that is not empty"),
    ],
)
def test_a_batch_that_can_not_be_is_refused(length, options, message):
    with pytest.raises(ConfigError, match=message):
        make(length, **options)


class Echo:
    def __getitem__(self, key):
        return key


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_loaders_ask_the_data_set_for_keys(loader, workers):
    batches = list(loader(Echo(), batch_sampler=make(8), num_workers=workers, collate_fn=list))
    assert batches == list(make(8))
    assert isinstance(batches[0][0], SampleKey)


def test_derived_seeds_depend_on_every_part_and_its_place():
    seeds = {derive_seed(a, b) for a in range(20) for b in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
