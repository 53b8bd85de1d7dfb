"""`index.json`: which tensor lies where.

A part (`model`, `optimizer`) has one safetensors file for each rank that holds any of it. Each tensor refers to a grid: the
boxes that its global shape is cut into, with the rank whose file has each. Where nodes have disks of their own, a box may
lie on each of them once. Tensors of one shape share their grid, so that the index of a thousand ranks stays small. A grid's
box is written as `<rank> <start>:<stop>,...`, a pair for each dimension.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recipe_ckpt.errors import DamagedCheckpointError
from recipe_ckpt.manifest import JSON, decode_json

INDEX_FORMAT = 1

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
}
"""Bytes of an element, by safetensors' names of the dtypes."""

_SPAN = re.compile(r"([0-9]+):([0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Box:
    """A region of a tensor, in elements. A 0-dim tensor's only box has no dimensions and volume 1."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def parse(cls, text: str) -> Box:
        spans = [_parse_span(span) for span in text.split(",")] if text else []
        return cls(tuple([start for start, _ in spans]), tuple([size for _, size in spans]))

    def __str__(self) -> str:
        return ",".join(f"{start}:{stop}" for start, stop in zip(self.offsets, self.stops, strict=True))

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offsets, self.shape, strict=True))

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def is_inside(self, shape: Sequence[int]) -> bool:
        edges = zip(self.offsets, self.shape, shape, strict=False)
        return len(self.shape) == len(shape) and all(start >= 0 and start + size <= limit for start, size, limit in edges)

    def intersect(self, other: Box) -> Box | None:
        """Return what both boxes cover, or None if that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        shape = tuple(stop - start for start, stop in zip(offsets, map(min, self.stops, other.stops), strict=True))
        return Box(offsets, shape) if all(size > 0 for size in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that holds `outer`."""
        starts = [mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box that lies in the file of `rank`; `number` counts the chunks of one tensor in one file."""

    rank: int
    number: int
    box: Box


@dataclass(frozen=True, slots=True)
class Grid:
    """How tensors of one global shape are cut. An empty tensor's grid has no chunks."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    grid: Grid


@dataclass(frozen=True, slots=True)
class PartIndex:
    """One part: tensors by name, further names of tied tensors, and what is not a tensor, as JSON."""

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    leaves: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The whole of `index.json`."""

    parts: Mapping[str, PartIndex]

    def encode(self) -> bytes:
        grids: dict[int, Grid] = {}
        for part in self.parts.values():
            grids.update((id(stored.grid), stored.grid) for stored in part.tensors.values())
        numbers = {key: number for number, key in enumerate(grids)}
        return encode_compactly(
            {
                "format": INDEX_FORMAT,
                "grids": [_encode_grid(grid) for grid in grids.values()],
                "parts": {name: _encode_part(part, numbers) for name, part in self.parts.items()},
            }
        )

    @classmethod
    def decode(cls, data: bytes, path: str) -> TensorIndex:
        """Read an index back.

        Raises:
            DamagedCheckpointError: it is not an index, or one of another format.
        """
        raw = decode_json(data, path)
        found = raw.get("format") if isinstance(raw, dict) else None
        if found != INDEX_FORMAT:
            raise DamagedCheckpointError(
                f"{path}: format {found!r}; this version reads format {INDEX_FORMAT}. Use the version that wrote it",
                path=path,
            )
        try:
            grids = [_decode_grid(item) for item in raw["grids"]]
            return cls({name: _decode_part(item, grids) for name, item in raw["parts"].items()})
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"{path}: not a tensor index ({type(error).__name__}: {error}). Resume from another checkpoint", path=path
            ) from error


@functools.lru_cache(maxsize=1 << 16)  # a thousand ranks' boxes have most of their spans in common
def _parse_span(text: str) -> tuple[int, int]:
    """Return (start, size)."""
    found = _SPAN.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"a box is written <start>:<stop>,..., found {text!r}")
    return int(found[1]), int(found[2]) - int(found[1])


def encode_compactly(value: JSON) -> bytes:
    """Encode JSON on one line: with indents Python's own encoder, 20 times slower, would hold up training."""
    return (json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()


def build_chunk_name(tensor: str, number: int) -> str:
    """Return a chunk's name in its file: the tensor's own, and `<tensor>:1`, ... for a rank's further chunks of it."""
    return f"{tensor}:{number}" if number else tensor


def _encode_grid(grid: Grid) -> JSON:
    return {"shape": list(grid.shape), "chunks": [f"{chunk.rank} {chunk.box}" for chunk in grid.chunks]}


def _decode_grid(raw: JSON) -> Grid:
    shape = tuple(int(size) for size in raw["shape"])
    seen: dict[int, int] = {}
    chunks = []
    for text in raw["chunks"]:
        rank_text, _, box_text = text.partition(" ")
        rank, box = int(rank_text), Box.parse(box_text)
        if len(box.shape) != len(shape):
            raise ValueError(f"box {text!r} does not lie in shape {shape}")
        chunks.append(Chunk(rank, seen.get(rank, 0), box))
        seen[rank] = seen.get(rank, 0) + 1
    return Grid(shape, tuple(chunks))


def _encode_part(part: PartIndex, numbers: Mapping[int, int]) -> JSON:
    return {
        "tensors": {name: {"dtype": stored.dtype, "grid": numbers[id(stored.grid)]} for name, stored in part.tensors.items()},
        "aliases": dict(part.aliases),
        "leaves": dict(part.leaves),
    }


def _decode_part(raw: JSON, grids: Sequence[Grid]) -> PartIndex:
    tensors = {name: StoredTensor(item["dtype"], grids[item["grid"]]) for name, item in raw["tensors"].items()}
    unknown = sorted({stored.dtype for stored in tensors.values()} - set(ITEM_BYTES))
    dangling = sorted(set(raw["aliases"].values()) - set(tensors))
    if unknown or dangling:
        raise ValueError(f"unknown dtypes {unknown}, aliases of unknown tensors {dangling}")
    return PartIndex(tensors, dict(raw["aliases"]), dict(raw["leaves"]))
