"""One rank's files: standard safetensors, written front to back and checked against the plan."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from recipe_ckpt.engines.base import WrittenPart
from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.layout import TENSOR_INDEX, build_tensor_file_name
from recipe_ckpt.manifest import JSON, FileEntry
from recipe_ckpt.storage import Buffer, Storage
from recipe_ckpt.tensors.header import build_header, order_chunks
from recipe_ckpt.tensors.image import HostBuffer
from recipe_ckpt.tensors.merge import build_fragment, merge_fragments
from recipe_ckpt.tensors.plan import PlannedChunk, WritePlan, is_plain_memory, view_bytes

_GATHER_BYTES = 8 << 20
"""One write past the page cache. More memory takes longer to appear than it saves."""


class TensorSnapshot:
    """The tensors of one instant, planned for the disk.

    It keeps references, not copies: `write` reads the live tensors, so training must not go on before it has returned.
    """

    def __init__(self, plans: Sequence[WritePlan]) -> None:
        self._plans = plans

    def wait_staged(self) -> None:
        """Return at once: there is no copy to wait for."""

    def write(self, directory: str, storage: Storage) -> WrittenPart:
        """Write and fsync this rank's file of each part, none where it owns nothing of the part. Not collective."""
        entries = [write_part(directory, storage, plan) for plan in self._plans if plan.chunks]
        return WrittenPart(entries, describe_written(self._plans))

    def finish(self, directory: str, storage: Storage, fragments: Sequence[Any]) -> Sequence[FileEntry]:
        """On rank 0: check that the ranks' fragments are the whole state, and write the index. Raises: as `write_index`."""
        return [write_index(directory, storage, self._plans, fragments)]

    def release(self) -> None:
        """Do nothing: no memory is held."""


def write_part(directory: str, storage: Storage, plan: WritePlan, image: Buffer | None = None) -> FileEntry:
    """Write one rank's file of one part, from its image if it has one, and return its entry.

    Raises:
        SaveFailedError: the file that was written is not the planned one.
    """
    name = build_tensor_file_name(plan.part, plan.rank)
    planned_bytes, content = _read_live(plan) if image is None else (len(image), [image])
    entry = storage.write_file(os.path.join(directory, name), content, name=name, rank=plan.rank)
    if (entry.path, entry.size_bytes) != (name, planned_bytes):
        raise SaveFailedError(
            f"{name}: planned were {planned_bytes} bytes, written {entry.size_bytes} as {entry.path!r}", path=directory
        )
    return entry


def describe_written(plans: Iterable[WritePlan]) -> JSON:
    """Return this rank's share of the index, by part."""
    return {
        plan.part: build_fragment(plan.declaration, [(c.position, c.number, c.box) for c in plan.chunks]) for plan in plans
    }


def write_index(
    directory: str,
    storage: Storage,
    plans: Iterable[WritePlan],
    fragments: Sequence[Any],
) -> FileEntry:
    """Join the ranks' fragments and write the index.

    Raises:
        SaveFailedError: a tensor is not covered exactly once, or ranks hold different tensors; the message names it.
    """
    plans = list(plans)
    index = merge_fragments({plan.part: plan.declaration for plan in plans}, fragments, plans[0].disks if plans else None)
    path = os.path.join(directory, TENSOR_INDEX)
    return storage.write_file(path, [index.encode()], name=TENSOR_INDEX, rank=0)


def _read_live(plan: WritePlan) -> tuple[int, Iterable[Buffer]]:
    """Return a file's size and its bytes, read from the tensors as they are asked for, in large page-aligned pieces."""
    ordered = order_chunks(plan.chunks)
    header = build_header(ordered)
    chunks = [chunk for chunk in ordered if chunk.size_bytes]
    size_bytes = len(header) + sum(chunk.size_bytes for chunk in chunks)
    pieces = itertools.chain([memoryview(header)], map(_read_bytes, chunks))
    return size_bytes, _gather(pieces, min(size_bytes, _GATHER_BYTES))


def _gather(pieces: Iterable[memoryview], room_bytes: int) -> Iterator[memoryview]:
    """Copy pieces into one page-aligned buffer, and give it whenever it is full; it is used again after that.

    The copy costs less than it saves: thousands of small writes, and the detour of large ones through the page cache.
    """
    buffer = HostBuffer()
    buffer.reserve(room_bytes, pinned=False)
    room = buffer.view(0, room_bytes).data
    filled = 0
    for piece in pieces:
        while len(piece):
            size = min(len(piece), room_bytes - filled)
            room[filled : filled + size] = piece[:size]
            piece, filled = piece[size:], filled + size
            if filled == room_bytes:
                yield room
                filled = 0
    if filled:
        yield room[:filled]


def _read_bytes(chunk: PlannedChunk) -> memoryview:
    """Return a tensor's elements in row-major order; a contiguous CPU tensor is not copied."""
    values: torch.Tensor = chunk.values
    if not is_plain_memory(values):
        values = values.resolve_conj().resolve_neg().cpu().contiguous()
    return view_bytes(values)
