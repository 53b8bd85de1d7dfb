"""Tensors back from disk: only the ranges that are wanted, each block checked before its bytes count."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from recipe_ckpt.errors import DamagedCheckpointError, StateMismatchError
from recipe_ckpt.layout import TENSOR_INDEX, build_tensor_file_name
from recipe_ckpt.manifest import BLOCK_BYTES, FileEntry, decode_json
from recipe_ckpt.tensors.blocks import CheckedFile, Readers, Span, open_checked
from recipe_ckpt.tensors.index import ITEM_BYTES, Box, Chunk, Grid, PartIndex, TensorIndex, build_chunk_name
from recipe_ckpt.tensors.plan import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    LocalBox,
    find_aliases,
    find_local_boxes,
    find_storage_problem,
    is_plain_memory,
)

_BAND_BYTES = 8 * BLOCK_BYTES
_SHOWN = 5


@contextmanager
def paused_gc() -> Iterator[None]:
    """Make thousands of objects without a collection in between: one takes 0.1 s in a process that has torch loaded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_index(directory: str, entries: Mapping[str, FileEntry]) -> TensorIndex:
    """Read and check `index.json`."""
    with open_checked(directory, TENSOR_INDEX, entries) as file:
        return TensorIndex.decode(bytes(file.read(0, entries[TENSOR_INDEX].size_bytes)), file.path)


def require_fit(name: str, part: PartIndex, wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare the names, shapes, dtypes and ties of a whole part with the run's tensors, before anything is read.

    Raises:
        StateMismatchError: they differ; the message counts the differences and shows the first five of each kind.
    """
    stored = {**{alias: part.tensors[target] for alias, target in part.aliases.items()}, **part.tensors}
    both = [key for key in wanted if key in stored]
    shapes = [(key, list(stored[key].grid.shape), list(wanted[key].shape)) for key in both]
    dtypes = [(key, stored[key].dtype, DTYPE_NAMES.get(wanted[key].dtype)) for key in both]
    problems = {key: find_storage_problem(wanted[key]) for key in wanted}
    ties, stored_ties = _group_ties(find_aliases(wanted)), _group_ties(part.aliases)
    require_no_difference(
        name,
        {
            "missing in the checkpoint": [repr(key) for key in wanted if key not in stored],
            "not in this run": [repr(key) for key in stored if key not in wanted],
            "of another shape": [f"{k!r} (checkpoint {old}, run {new})" for k, old, new in shapes if old != new],
            "of another dtype": [f"{k!r} (checkpoint {old}, run {new})" for k, old, new in dtypes if old != new],
            "that can't be filled": [f"{key!r} {problem}" for key, problem in problems.items() if problem],
            "tied differently": [repr(key) for key in both if ties.get(key) != stored_ties.get(key)],
        },
    )


def require_no_difference(name: str, differences: Mapping[str, Sequence[str]]) -> None:
    found = [
        f"{len(items)} {kind}: {', '.join(items[:_SHOWN])}{' and more' if len(items) > _SHOWN else ''}"
        for kind, items in differences.items()
        if items
    ]
    if found:
        raise StateMismatchError(
            f"{name}: the checkpoint does not fit this run; {'; '.join(found)}."
            f" Use the configuration that it was written with, or leave {name!r} out of load_contents"
        )


def _group_ties(aliases: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Map each tied tensor's names to all of them: which one counts as the first does not matter."""
    groups: dict[str, set[str]] = {}
    for alias, canonical in aliases.items():
        groups.setdefault(canonical, {canonical}).add(alias)
    return {name: frozenset(group) for group in groups.values() for name in group}


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a wanted box takes from a chunk; shared by all tensors that are cut alike.

    `slices` cut it out of the wanted box, None if it is all of that; `first` counts the chunk's elements in rows before it.
    """

    chunk: Chunk
    box: Box
    slices: tuple[slice, ...] | None
    first: int
    is_rows: bool

    @classmethod
    def of(cls, chunk: Chunk, box: Box, wanted: Box) -> _Piece:
        row = math.prod(chunk.box.shape[1:])
        first = (box.offsets[0] - chunk.box.offsets[0]) * row if box.shape else 0
        slices = None if box == wanted else box.slices_in(wanted)
        return cls(chunk, box, slices, first, box.shape[1:] == chunk.box.shape[1:])


class _Read(NamedTuple):
    """A piece that goes from a chunk of a file into a view of this rank's memory."""

    name: str
    dtype: str
    piece: _Piece
    target: torch.Tensor


def read_part(
    directory: str, entries: Mapping[str, FileEntry], name: str, part: PartIndex, wanted: Mapping[str, torch.Tensor]
) -> None:
    """Fill this rank's share of the wanted tensors, which fit (`require_fit`). Not collective.

    Raises:
        DamagedCheckpointError: a file is missing, cut short or changed; the tensors may hold anything then.
    """
    ties = find_aliases(wanted)
    boxes = {part.aliases.get(key, key): find_local_boxes(wanted[key]) for key in wanted if key not in ties}
    read_boxes(directory, entries, name, part, boxes)


def read_boxes(
    directory: str, entries: Mapping[str, FileEntry], name: str, part: PartIndex, wanted: Mapping[str, Sequence[LocalBox]]
) -> None:
    """Fill boxes of stored tensors from whichever ranks' files hold them; otherwise as `read_part`.

    Needs memory for a few blocks, and for a band of rows where a box is not a run of whole rows.
    """
    reads: dict[int, list[_Read]] = {}
    for read in _plan_reads(directory, entries, name, part, wanted):
        reads.setdefault(read.piece.chunk.rank, []).append(read)
    with Readers() as readers:
        for rank, of_file in sorted(reads.items()):
            with open_checked(directory, build_tensor_file_name(name, rank), entries) as file:
                _read_file(file, of_file, readers)


def _plan_reads(
    directory: str,
    entries: Mapping[str, FileEntry],
    part_name: str,
    part: PartIndex,
    wanted: Mapping[str, Sequence[LocalBox]],
) -> Iterator[_Read]:
    def is_here(chunk: Chunk) -> bool:
        return build_tensor_file_name(part_name, chunk.rank) in entries

    found: dict[tuple[int, Box], list[_Piece]] = {}
    for name, boxes in wanted.items():
        stored = part.tensors[name]
        for local in boxes:
            key = (id(stored.grid), local.box)
            if key not in found:
                found[key] = _intersect(directory, name, stored.grid, local.box, is_here)
            for piece in found[key]:
                target = local.values if piece.slices is None else local.values[piece.slices]
                yield _Read(build_chunk_name(name, piece.chunk.number), stored.dtype, piece, target)


def _intersect(directory: str, name: str, grid: Grid, box: Box, is_here: Callable[[Chunk], bool]) -> list[_Piece]:
    by_box: dict[Box, tuple[Chunk, Box]] = {}
    for chunk in grid.chunks:
        if (shared := chunk.box.intersect(box)) and not (chunk.box in by_box and is_here(by_box[chunk.box][0])):
            by_box[chunk.box] = chunk, shared
    pieces = [_Piece.of(chunk, shared, box) for chunk, shared in by_box.values()]
    covered = sum(piece.box.volume for piece in pieces)
    if covered != box.volume:
        path = os.path.join(directory, TENSOR_INDEX)
        raise DamagedCheckpointError(f"{path}: of {name!r} it has {covered} of {box.volume} elements at {box}", path=path)
    return pieces


def _read_file(file: CheckedFile, reads: Sequence[_Read], readers: Readers) -> None:
    """Read runs of whole rows straight into contiguous CPU memory, everything else by bands of rows."""
    data_start, header = _read_header(file)
    spans = []
    bands = []
    for read in reads:
        item_bytes = ITEM_BYTES[read.dtype]
        start = data_start + _find_in_header(file, header, read) + read.piece.first * item_bytes
        if read.piece.is_rows and is_plain_memory(read.target):
            spans.append(Span(start, read.target.numel() * item_bytes, read.target.data_ptr()))
        else:
            bands.append((start, read))
    file.fill(spans, readers)
    for start, read in sorted(bands, key=lambda item: item[0]):
        _fill_by_bands(file, start, read)


def _read_header(file: CheckedFile) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(file.read(0, 8), "little")
    header = decode_json(bytes(file.read(8, length)), file.path)
    return 8 + length, header


def _find_in_header(file: CheckedFile, header: Mapping[str, Any], read: _Read) -> int:
    """Return where a chunk's bytes start, after the header; the file must agree with the index."""
    found = header.get(read.name, {})
    shape = read.piece.chunk.box.shape
    if found.get("dtype") != read.dtype or found.get("shape") != list(shape):
        expected = {"dtype": read.dtype, "shape": list(shape)}
        raise DamagedCheckpointError(
            f"{file.path}: {read.name!r} is {found!r}, {TENSOR_INDEX} says {expected!r}", path=file.path
        )
    return int(found["data_offsets"][0])


def _fill_by_bands(file: CheckedFile, start: int, read: _Read) -> None:
    chunk = read.piece.chunk.box
    row_bytes = math.prod(chunk.shape[1:]) * ITEM_BYTES[read.dtype]
    inner = read.piece.box.slices_in(chunk)[1:]
    target = read.target if chunk.shape else read.target.reshape(1)
    band = max(1, _BAND_BYTES // row_bytes)
    for row in range(0, len(target), band):
        rows = target[row : row + band]
        data = file.read(start + row * row_bytes, len(rows) * row_bytes)
        values = torch.frombuffer(data, dtype=TORCH_DTYPES[read.dtype]).reshape(len(rows), *chunk.shape[1:])
        rows.copy_(values[(slice(None), *inner)])
