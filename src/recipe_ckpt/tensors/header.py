"""The front of one rank's file: the order of its chunks, and safetensors' header."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from recipe_ckpt.tensors.index import ITEM_BYTES
from recipe_ckpt.tensors.plan import PlannedChunk, WritePlan

_PAGE_BYTES = 4096
_CACHE_LINE_BYTES = 64


def order_chunks(chunks: Iterable[PlannedChunk]) -> list[PlannedChunk]:
    """Put chunks of whole cache lines first, then by element size: safetensors allows no holes, and so all stay aligned."""
    return sorted(chunks, key=lambda c: (c.size_bytes % _CACHE_LINE_BYTES != 0, -ITEM_BYTES[c.dtype], c.name))


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


def measure_file(plan: WritePlan) -> int:
    """Return the size in bytes of a plan's file."""
    return len(build_header(order_chunks(plan.chunks))) + sum(chunk.size_bytes for chunk in plan.chunks)
