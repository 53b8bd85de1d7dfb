"""Which samples come next: a global position that no rank, worker or batch size is part of.

The order of an epoch is a permutation of (seed, epoch). A global batch is the next `batch_size` samples of it, and rank `r`
takes every `dp_size`-th of them. The position counts what was trained, so what workers have fetched ahead never matters.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from recipe_ckpt.errors import ConfigError, DataMismatchError

log = logging.getLogger(__name__)


class SampleKey(NamedTuple):
    """What a data set is asked for: `(id, epoch)` keys its randomness; a filler completes a batch and counts for nothing."""

    id: int
    epoch: int
    is_filler: bool = False


def derive_seed(*parts: int) -> int:
    """Return 63 bits that depend on all parts, so that (1, 2) and (2, 1) or neighbouring seeds have nothing in common."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class GlobalBatchSampler(Sampler[list[SampleKey]]):
    """A batch sampler that yields this rank's share of each global batch, from the position on to the end of the epoch.

    It has no `state_dict`: torchdata would take it over, and its position would be the fetched one. Not thread-safe.

    Raises:
        ConfigError: the batch can't be shared out evenly, or an epoch has no batch.
    """

    def __init__(
        self,
        dataset_len: int,
        *,
        batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        fingerprint: str = "",
    ) -> None:
        if batch_size % dp_size:
            raise ConfigError(
                "data.train_batch_size",
                batch_size,
                f"a multiple of the {dp_size} data-parallel ranks",
                "It is the global batch.",
            )
        if dataset_len < (batch_size if drop_last else 1):
            allowed = f"at most the {dataset_len} samples of the data set" if dataset_len else "a data set that is not empty"
            raise ConfigError(
                "data.train_batch_size", batch_size, allowed, "With data.drop_last an epoch would have no batch."
            )
        self.dataset_len = dataset_len
        self.batch_size = batch_size
        self.seed = seed
        self.fingerprint = fingerprint
        self.epoch = 0
        self.samples_consumed = 0
        self.is_iterating = False
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._shuffle = shuffle
        self._drop_last = drop_last

    @property
    def steps_per_epoch(self) -> int:
        return self._count_steps(self.dataset_len)

    @property
    def steps_left_in_epoch(self) -> int:
        return self._count_steps(self.dataset_len - self.samples_consumed)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield the rest of the epoch, from the position at this call: a later `advance` does not move the iterator."""
        self.is_iterating = True
        return self._iterate(self.epoch, self.samples_consumed, self.steps_left_in_epoch)

    def advance(self) -> None:
        """Count one global batch as trained. After the last one of an epoch the position is the start of the next."""
        self.samples_consumed += self.batch_size
        self._roll_over()

    def position(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "samples_consumed": self.samples_consumed,
            "dataset_len": self.dataset_len,
            "fingerprint": self.fingerprint,
        }

    def restore_position(self, position: Mapping[str, Any], *, on_mismatch: str = "raise") -> None:
        """Go on from a stored position.

        Raises:
            DataMismatchError: the data set, its order or its length is not the stored one; `restart` starts the stored epoch
                over instead.
        """
        here = self.position()
        changed = [key for key in ("dataset_len", "fingerprint", "seed") if position[key] != here[key]]
        if changed and on_mismatch != "restart":
            found = "; ".join(f"{key}: {position[key]!r} in the checkpoint, {here[key]!r} here" for key in changed)
            raise DataMismatchError(
                f"the data position does not fit this data set: {found}. Give the same data (files, data.max_length,"
                " template, tokenizer, trainer.seed), or start the epoch over with checkpoint.on_data_mismatch=restart"
            )
        self.epoch = position["epoch"]
        self.samples_consumed = 0 if changed else position["samples_consumed"]
        if changed:
            log.warning("The data changed (%s): epoch %d starts over.", ", ".join(changed), self.epoch)
        self._roll_over()

    def _count_steps(self, samples: int) -> int:
        full, rest = divmod(samples, self.batch_size)
        return full + (1 if rest and not self._drop_last else 0)

    def _roll_over(self) -> None:
        if self.samples_consumed < self.dataset_len and self.steps_left_in_epoch:
            return
        self.epoch += 1
        self.samples_consumed = 0
        self.is_iterating = False

    def _iterate(self, epoch: int, start: int, steps: int) -> Iterator[list[SampleKey]]:
        order = self._order(epoch)
        for first in range(start, start + steps * self.batch_size, self.batch_size):
            mine = range(first + self._dp_rank, first + self.batch_size, self._dp_size)
            yield [SampleKey(order[n % self.dataset_len], epoch, n >= self.dataset_len) for n in mine]

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.dataset_len))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order: list[int] = torch.randperm(self.dataset_len, generator=generator).tolist()
        return order
