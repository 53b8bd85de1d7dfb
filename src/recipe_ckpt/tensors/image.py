"""A file's bytes in memory, header and tensors as they will lie on disk.

A snapshot is then a pass of copies into the image, and a write is long sequential writes from it.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipe_ckpt.tensors.copies import BlockCopy, Bytes, Copy, DeviceCopies, RunCopy, TensorCopy
from recipe_ckpt.tensors.header import build_header, measure_file, order_chunks
from recipe_ckpt.tensors.plan import TORCH_DTYPES, PlannedChunk, WritePlan, is_plain_memory

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 20
"""Chunks below this are copied many in one call, and never in a background thread: handing over the GIL costs more."""


class HostBuffer:
    """Page-aligned memory, mapped and touched once and reused; pinned if CUDA copies into it.

    Memory that appears page by page during a copy makes the copy three times slower, and after a fork (a dataloader's
    worker) each page that is written to again costs a fault: ten times. So it is populated at once and not inherited.
    """

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)
        self._unpin: Callable[[], object] | None = None

    @property
    def capacity_bytes(self) -> int:
        return len(self._bytes)

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Make room; what was in it is lost if it grows."""
        if size_bytes <= self.capacity_bytes and (self._unpin is not None or not pinned):
            return
        self.free()
        self._bytes = _map_memory(size_bytes)
        if pinned:
            self._unpin = weakref.finalize(self, _unpin, _pin(self._bytes))

    def free(self) -> None:
        """Give the memory back: before more is taken, for both may not fit."""
        if self._unpin is not None:
            self._unpin()
        self._bytes, self._unpin = np.empty(0, np.uint8), None

    def view(self, start: int, stop: int) -> Bytes:
        return self._bytes[start:stop]


@dataclass(frozen=True, slots=True)
class ImageCopies:
    """What fills an image: early ones before training goes on, late ones before the optimizer steps.

    `watched` are the late ones' tensors, by name: they must not change before.
    """

    early: Sequence[Copy] = ()
    late: Sequence[Copy] = ()
    device_early: Sequence[DeviceCopies] = ()
    device_late: Sequence[DeviceCopies] = ()
    watched: Sequence[tuple[str, torch.Tensor]] = ()


class FileImage:
    """The file of one part, as one rank will write it."""

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._size_bytes = 0

    def count_missing_bytes(self, plan: WritePlan) -> int:
        """Return how much more memory the image of a plan's file takes."""
        needed = measure_file(plan) if plan.chunks else 0
        return 0 if needed <= self._buffer.capacity_bytes else needed - self._buffer.capacity_bytes

    @property
    def contents(self) -> memoryview:
        """The whole file, page-aligned."""
        return self._buffer.view(0, self._size_bytes).data

    def lay_out(self, plan: WritePlan) -> ImageCopies:
        """Make room for a plan's file, put the header in place, and return the copies that fill the rest."""
        if not plan.chunks:
            return ImageCopies()
        chunks = order_chunks(plan.chunks)
        header = build_header(chunks)
        self._size_bytes = len(header) + sum(chunk.size_bytes for chunk in chunks)
        self._buffer.reserve(self._size_bytes, pinned=any(chunk.values.is_cuda for chunk in chunks))
        self._buffer.view(0, len(header))[:] = np.frombuffer(header, np.uint8)
        starts, start = [], len(header)
        for chunk in chunks:
            starts.append(start)
            start += chunk.size_bytes
        return _plan_copies(self._buffer, [pair for pair in zip(starts, chunks, strict=True) if pair[1].size_bytes])


def _plan_copies(buffer: HostBuffer, placed: Sequence[tuple[int, PlannedChunk]]) -> ImageCopies:
    early: list[Copy] = []
    late: list[Copy] = []
    devices: dict[tuple[torch.device, bool], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    run: list[Bytes] = []
    run_start = run_stop = 0

    def end_run() -> None:
        nonlocal run
        if run:
            early.append(RunCopy(buffer.view(run_start, run_stop), run))
        run = []

    for start, chunk in placed:
        stop = start + chunk.size_bytes
        target = buffer.view(start, stop)
        if chunk.values.is_cuda:
            pairs = devices.setdefault((chunk.values.device, chunk.is_volatile), [])
            pairs.append((_as_tensor(target, chunk), chunk.values))
        elif not is_plain_memory(chunk.values):
            early.append(TensorCopy(_as_tensor(target, chunk), chunk.values))
        elif chunk.size_bytes >= _SMALL_BYTES:
            (late if _is_late(chunk) else early).append(BlockCopy(target, _view_bytes(chunk.values)))
        else:
            if start != run_stop:
                end_run()
                run_start = start
            run.append(_view_bytes(chunk.values))
            run_stop = stop
    end_run()
    device_early, device_late = (
        [DeviceCopies(device, pairs) for (device, is_volatile), pairs in devices.items() if is_volatile is wanted]
        for wanted in (True, False)
    )
    return ImageCopies(early, late, device_early, device_late, [(c.name, c.values) for _, c in placed if _is_late(c)])


def _is_late(chunk: PlannedChunk) -> bool:
    on_host = is_plain_memory(chunk.values) and chunk.size_bytes >= _SMALL_BYTES
    return not chunk.is_volatile and (chunk.values.is_cuda or on_host)


def _view_bytes(values: torch.Tensor) -> Bytes:
    array: Bytes = values.reshape(-1).view(torch.uint8).numpy()
    return array


def _as_tensor(target: Bytes, chunk: PlannedChunk) -> torch.Tensor:
    # File order keeps tensors aligned to their elements, and a page-aligned buffer does the rest.
    return torch.from_numpy(target).view(TORCH_DTYPES[chunk.dtype]).view(chunk.box.shape)


def _map_memory(size_bytes: int) -> Bytes:
    populate = getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)


def _pin(memory: Bytes) -> Bytes:
    """Lock memory for asynchronous copies. Torch's own pinned allocator would round up to a power of two."""
    error = int(_cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if error:
        logger.warning("staging: %d bytes could not be pinned (CUDA error %d): copies are slower", memory.nbytes, error)
    return memory


def _unpin(memory: Bytes) -> None:
    torch.cuda.synchronize()  # no copy may still be on its way into it
    _cudart().cudaHostUnregister(memory.ctypes.data)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
