"""Where the data stands, and the random number generators: what one rank saves beside tensors.

A sampler that knows its global position is restored from plain numbers, with any number of ranks, workers, or batch size.
Any other loader is restored through its own `state_dict`, only into the geometry that it was saved with.
"""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from recipe_ckpt.errors import DamagedCheckpointError, DataMismatchError, SaveFailedError

logger = logging.getLogger(__name__)

_GEOMETRY = ("dp_size", "batch_size", "num_workers", "dataset_len", "batches_per_epoch")


@runtime_checkable
class PositionedSampler(Protocol):
    """A sampler whose position is a global fact: which samples of which epoch were trained."""

    is_iterating: bool

    def position(self) -> dict[str, Any]:
        """Return `{seed, epoch, samples_consumed, dataset_len, fingerprint}`, equal on every rank."""

    def restore_position(self, position: Mapping[str, Any], *, on_mismatch: str) -> None:
        """Continue from a position.

        Raises:
            DataMismatchError: it is of another data set or seed, and `on_mismatch` is not `restart`.
        """


def find_sampler(loader: Any) -> PositionedSampler | None:
    for name in ("batch_sampler", "sampler"):
        if isinstance(sampler := getattr(loader, name, None), PositionedSampler):
            return sampler
    return None


def describe_geometry(loader: Any, dp_size: int) -> dict[str, Any]:
    """Return what a loader's own state depends on, for the manifest: sizes are in samples, `batch_size` is the loader's."""
    sampler = find_sampler(loader)
    return {
        "sampler": type(sampler or getattr(loader, "sampler", None)).__name__,
        "is_positioned": sampler is not None,
        "dp_size": dp_size,
        "batch_size": getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None),
        "num_workers": getattr(loader, "num_workers", None),
        "dataset_len": _len_or_none(getattr(loader, "dataset", None)),
        "batches_per_epoch": _len_or_none(loader) if sampler is None else None,
    }


def encode_loader(loader: Any) -> bytes:
    """Return `StatefulDataLoader.state_dict()` as a file that loads with `weights_only=True`.

    Before the first `iter()` it is the state that was loaded, or an empty one, which means the beginning: asking the loader
    itself would start its workers.
    """
    # torchdata keeps what was loaded, until the next iter(), in this attribute and has no public question for it either.
    loaded = getattr(loader, "next_iter_state", None) or {}
    state = loader.state_dict() if hasattr(loader, "state_dict") and has_begun(loader) else loaded
    return encode_tensors(state, "the dataloader's state")


def has_begun(loader: Any) -> bool:
    # torchdata keeps its iterator in this attribute and has no public question for it.
    return getattr(loader, "_iterator", None) is not None


def restore_sampler(sampler: PositionedSampler, position: Mapping[str, Any] | None, *, on_mismatch: str) -> None:
    """Put a positioned sampler where the checkpoint stood.

    Raises:
        DataMismatchError: other data, no position in the checkpoint, or `iter()` was taken before.
    """
    if sampler.is_iterating:
        raise DataMismatchError(
            "train_dataloader: iter() was taken before load_checkpoint(), so its workers already prefetch from the old"
            " position; call load_checkpoint() first"
        )
    if position is not None:
        sampler.restore_position(position, on_mismatch=on_mismatch)
    elif on_mismatch != "restart":
        raise DataMismatchError(
            "train_dataloader: the checkpoint holds no global data position (it was saved with another sampler);"
            " checkpoint.on_data_mismatch=restart starts the epoch over"
        )
    else:
        logger.warning("the checkpoint holds no global data position: the data starts over at epoch 0")


def restore_loader(
    loader: Any, state: Any, step: int, saved: Mapping[str, Any] | None, now: Mapping[str, Any], *, on_mismatch: str
) -> None:
    """Restore a loader through its own state, which counts a rank's batches and is worth nothing in another geometry.

    Raises:
        DataMismatchError: the geometry differs, or `iter()` was taken before.
    """
    if has_begun(loader):
        raise DataMismatchError(
            "train_dataloader: iter() was taken before load_checkpoint(), and a loader's state only applies to its next"
            " iterator; call load_checkpoint() first"
        )
    differing = _list_differences(saved, now) if saved is not None else []
    if differing and on_mismatch != "restart":
        raise DataMismatchError(
            f"train_dataloader: {'; '.join(differing)}. The state of a {now['sampler']} can't be converted: use the saved"
            " values, a sampler with a global position (recipe_ckpt.sft.sampler.GlobalBatchSampler), or"
            " checkpoint.on_data_mismatch=restart"
        )
    batches = now["batches_per_epoch"]
    if differing:
        logger.warning("the data of this epoch starts over: %s", "; ".join(differing))
    elif batches and step % batches == 0:
        # An exhausted iterator's state would end the next epoch before its first batch (verl#7401).
        logger.info("step %d ends an epoch of %d batches: the next one starts from its beginning", step, batches)
    else:
        loader.load_state_dict(state)


def encode_rng() -> bytes:
    """Return this process's generators (Python, NumPy, torch, CUDA) as a file that loads with `weights_only=True`."""
    version, internal, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": numpy["bit_generator"],
            "keys": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "cached": float(numpy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": [state.cpu() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }
    return encode_tensors(state, "the random state")


def restore_rng(state: Mapping[str, Any]) -> None:
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def derive_rng(seed: int) -> None:
    """Give a rank that the checkpoint did not have its own stream."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def encode_tensors(value: Any, what: str) -> bytes:
    """Serialise tensors and plain types, and prove that reading them back runs no code.

    Raises:
        SaveFailedError: something else is in `value`.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getvalue()
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # torch raises pickle's errors and its own
        raise SaveFailedError(
            f"{what} holds more than tensors and plain types, and could not be read back: {error}"
        ) from error
    return data


def decode_tensors(data: bytes, path: str) -> Any:
    """Read what `encode_tensors` wrote, onto the CPU, without running code.

    Raises:
        DamagedCheckpointError: it is something else.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle's errors and its own
        raise DamagedCheckpointError(
            f"{path}: refused, it is not a file of tensors and plain types: {error}", path=path
        ) from error


def _list_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if saved.get("is_positioned"):
        return [f"it was saved with a {saved.get('sampler')}, this run has a {now['sampler']}"]
    return [
        f"{key} is {now[key]!r} here, {saved.get(key)!r} in the checkpoint" for key in _GEOMETRY if saved.get(key) != now[key]
    ]


def _len_or_none(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
