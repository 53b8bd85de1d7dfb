"""Copies from live tensors into a file's image, planned once and repeated while the addresses hold."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

memmove = ctypes.CDLL(None).memmove
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = None
"""(target, source, size in bytes): it lets go of the GIL."""


class Copy(Protocol):
    """One planned copy. It holds the memory that it reads, and lets go of the GIL while it copies much."""

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunCopy:
    """Adjacent small chunks in one call: 0.2 us a tensor, against 0.7 us for a memmove each."""

    target: Bytes
    sources: Sequence[Bytes]

    def run(self) -> None:
        np.concatenate(self.sources, out=self.target)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One large chunk: above some 20 MB glibc's memmove streams past the cache."""

    target: Bytes
    source: Bytes

    def run(self) -> None:
        memmove(self.target.ctypes.data, self.source.ctypes.data, self.source.nbytes)


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A tensor that is not contiguous, is a lazy conjugate, or lies on a device without streams here."""

    target: torch.Tensor
    source: torch.Tensor

    def run(self) -> None:
        self.target.copy_(self.source)


class DeviceCopies:
    """All chunks of one CUDA device, on a stream of its own beside the compute stream.

    `run` returns at once. The copies start when the compute stream has come to where it stood at `run`; what it does after
    `fence` waits for them.
    """

    def __init__(self, device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._device = device
        self._pairs = pairs
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)
            self._done.record(self._stream)

    def fence(self) -> None:
        """Keep what is put on the current stream from now on behind the copies; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Return when the bytes are in the image."""
        self._done.synchronize()
