"""One rank's files: standard safetensors, written front to back and checked against the plan."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from recipe_ckpt.engines.base import WrittenPart
from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.layout import TENSOR_INDEX, build_tensor_file_name
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.storage import Buffer, Storage
from recipe_ckpt.tensors.index import ITEM_BYTES
from recipe_ckpt.tensors.merge import build_fragment, merge_fragments
from recipe_ckpt.tensors.plan import PartState, PlannedChunk, WritePlan, plan_write, view_bytes

_PAGE_BYTES = 4096
_CACHE_LINE_BYTES = 64


class TensorSnapshot:
    """The tensors of one instant, planned for the disk.

    It keeps references, not copies: `write` reads the live tensors, so training must not go on before it has returned.
    """

    def __init__(self, parts: Mapping[str, PartState], *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._plans = [plan_write(name, state, rank, world_size) for name, state in parts.items()]

    def write(self, directory: str, storage: Storage) -> WrittenPart:
        """Write and fsync this rank's file of each part, none where it owns nothing of the part. Not collective."""
        entries = [write_part(directory, storage, plan) for plan in self._plans if plan.chunks]
        fragment = {
            plan.part: build_fragment(plan.declaration, [(c.position, c.number, c.box) for c in plan.chunks])
            for plan in self._plans
        }
        return WrittenPart(entries, fragment)

    def finish(self, directory: str, storage: Storage, fragments: Sequence[Any]) -> Sequence[FileEntry]:
        """On rank 0: check that the ranks' fragments are the whole state, and write the index.

        Raises:
            SaveFailedError: a tensor is not covered exactly once, or ranks hold different tensors; the message names it.
        """
        index = merge_fragments({plan.part: plan.declaration for plan in self._plans}, fragments)
        path = os.path.join(directory, TENSOR_INDEX)
        return [storage.write_file(path, [index.encode()], name=TENSOR_INDEX, rank=self._rank)]


def write_part(directory: str, storage: Storage, plan: WritePlan) -> FileEntry:
    """Write one rank's file of one part and return its entry.

    Raises:
        SaveFailedError: the file that was written is not the planned one.
    """
    name = build_tensor_file_name(plan.part, plan.rank)
    chunks = sorted(plan.chunks, key=_order)
    header = build_header(chunks)
    planned_bytes = len(header) + sum(chunk.size_bytes for chunk in chunks)
    entry = storage.write_file(os.path.join(directory, name), _image(header, chunks), name=name, rank=plan.rank)
    if (entry.path, entry.size_bytes) != (name, planned_bytes):
        raise SaveFailedError(
            f"{name}: planned were {planned_bytes} bytes, written {entry.size_bytes} as {entry.path!r}", path=directory
        )
    return entry


def build_header(chunks: Sequence[PlannedChunk]) -> bytes:
    """Return safetensors' length field and JSON header for chunks in file order, padded so that the data starts on a page."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for chunk in chunks:
        start, end = end, end + chunk.size_bytes
        table[chunk.name] = {"dtype": chunk.dtype, "shape": list(chunk.box.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // _PAGE_BYTES) * _PAGE_BYTES - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _order(chunk: PlannedChunk) -> tuple[bool, int, str]:
    """Chunks of whole cache lines first, then by element size: safetensors allows no holes, and so all stay aligned."""
    return chunk.size_bytes % _CACHE_LINE_BYTES != 0, -ITEM_BYTES[chunk.dtype], chunk.name


def _image(header: bytes, chunks: Sequence[PlannedChunk]) -> Iterator[Buffer]:
    yield header
    for chunk in chunks:
        if chunk.size_bytes:
            yield _read_bytes(chunk.values)


def _read_bytes(values: torch.Tensor) -> memoryview:
    """Return a tensor's elements in row-major order; a contiguous CPU tensor is not copied."""
    return view_bytes(values.resolve_conj().resolve_neg().cpu().contiguous())
