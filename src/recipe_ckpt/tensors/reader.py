"""Tensors back from disk: only the ranges that are wanted, each block checked before its bytes are used.

`pread`, never mmap: a file that was cut short must be an error, not a SIGBUS.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from recipe_ckpt.errors import DamagedCheckpointError, StateMismatchError
from recipe_ckpt.layout import TENSOR_INDEX, build_tensor_file_name
from recipe_ckpt.manifest import BLOCK_BYTES, FileEntry, decode_json, digest_bytes
from recipe_ckpt.tensors.index import ITEM_BYTES, Box, Chunk, Grid, PartIndex, TensorIndex, build_chunk_name
from recipe_ckpt.tensors.plan import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    LocalBox,
    find_aliases,
    find_local_boxes,
    find_storage_problem,
    view_bytes,
)

_BAND_BYTES = 8 * BLOCK_BYTES
_SHOWN = 5


class CheckedFile:
    """Reads ranges of a file of which every block that is touched is compared with the file's entry first.

    The last block is kept, so reads in ascending order read and digest each block once.
    """

    def __init__(self, path: str, descriptor: int, entry: FileEntry) -> None:
        self.path = path
        self._descriptor = descriptor
        self._entry = entry
        self._block = bytearray(min(BLOCK_BYTES, entry.size_bytes))
        self._held = -1

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `start` on."""
        while len(target):
            number, within = divmod(start, BLOCK_BYTES)
            size = min(self._block_bytes(number) - within, len(target))
            if size == BLOCK_BYTES:
                self._read_block(number, target[:size])
            else:
                self._hold(number)
                target[:size] = memoryview(self._block)[within : within + size]
            start, target = start + size, target[size:]

    def read(self, start: int, size_bytes: int) -> bytearray:
        if start + size_bytes > self._entry.size_bytes:
            self._fail(f"bytes {start} to {start + size_bytes} are wanted, it has {self._entry.size_bytes}")
        data = bytearray(size_bytes)
        self.read_into(start, memoryview(data))
        return data

    def _block_bytes(self, number: int) -> int:
        return min(BLOCK_BYTES, self._entry.size_bytes - number * BLOCK_BYTES)

    def _hold(self, number: int) -> None:
        if self._held != number:
            self._held = -1
            self._read_block(number, memoryview(self._block)[: self._block_bytes(number)])
            self._held = number

    def _read_block(self, number: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], number * BLOCK_BYTES + done)
            if not count:
                self._fail(f"it ends in block {number}, while it was being read")
            done += count
        found = digest_bytes(target).hex()
        if found != self._entry.block(number):
            self._fail(f"block {number} (of {BLOCK_BYTES} bytes) has digest {found}, recorded is {self._entry.block(number)}")

    def _fail(self, found: str) -> NoReturn:
        raise DamagedCheckpointError(f"{self.path}: {found}. Resume from another checkpoint", path=self.path)


@contextmanager
def open_checked(directory: str, name: str, entries: Mapping[str, FileEntry]) -> Iterator[CheckedFile]:
    """Open a checkpoint's file and compare its size with its entry.

    Raises:
        DamagedCheckpointError: it is missing, not recorded, of another size, or (from the reads) changed or unreadable.
    """
    path = os.path.join(directory, name)
    entry = entries.get(name)
    if entry is None:
        raise DamagedCheckpointError(f"{path}: it is needed but not among the recorded files", path=path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if size != entry.size_bytes:
                raise DamagedCheckpointError(
                    f"{path}: found {size} bytes, recorded are {entry.size_bytes}. Resume from another checkpoint", path=path
                )
            yield CheckedFile(path, descriptor, entry)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        raise DamagedCheckpointError(f"{path}: {error.strerror}. Resume from another checkpoint", path=path) from error


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
class _Read:
    """A box that goes from a chunk of a file into a view of this rank's memory."""

    name: str
    dtype: str
    chunk: Chunk
    box: Box
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

    Needs memory for one block, and for one band of rows where a box is not a run of whole rows.
    """
    reads: dict[int, list[_Read]] = {}
    for read in _plan_reads(directory, part, wanted):
        reads.setdefault(read.chunk.rank, []).append(read)
    for rank, of_file in sorted(reads.items()):
        with open_checked(directory, build_tensor_file_name(name, rank), entries) as file:
            data_start, header = _read_header(file)
            starts = {read.name: data_start + _find_in_header(file, header, read) for read in of_file}
            for read in sorted(of_file, key=lambda read: (starts[read.name], read.box.offsets)):
                _fill(file, starts[read.name], read)


def _plan_reads(directory: str, part: PartIndex, wanted: Mapping[str, Sequence[LocalBox]]) -> Iterator[_Read]:
    found: dict[tuple[int, Box], list[tuple[Chunk, Box]]] = {}
    for name, boxes in wanted.items():
        stored = part.tensors[name]
        for local in boxes:
            key = (id(stored.grid), local.box)
            if key not in found:
                found[key] = _intersect(directory, name, stored.grid, local.box)
            for chunk, box in found[key]:
                target = local.values[box.slices_in(local.box)]
                yield _Read(build_chunk_name(name, chunk.number), stored.dtype, chunk, box, target)


def _intersect(directory: str, name: str, grid: Grid, box: Box) -> list[tuple[Chunk, Box]]:
    pieces = [(chunk, shared) for chunk in grid.chunks if (shared := chunk.box.intersect(box))]
    covered = sum(shared.volume for _, shared in pieces)
    if covered != box.volume:
        path = os.path.join(directory, TENSOR_INDEX)
        raise DamagedCheckpointError(f"{path}: of {name!r} it has {covered} of {box.volume} elements at {box}", path=path)
    return pieces


def _read_header(file: CheckedFile) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(file.read(0, 8), "little")
    header = decode_json(bytes(file.read(8, length)), file.path)
    return 8 + length, header


def _find_in_header(file: CheckedFile, header: Mapping[str, Any], read: _Read) -> int:
    """Return where a chunk's bytes start, after the header; the file must agree with the index."""
    found = header.get(read.name, {})
    expected = {"dtype": read.dtype, "shape": list(read.chunk.box.shape)}
    if {key: found.get(key) for key in expected} != expected:
        raise DamagedCheckpointError(
            f"{file.path}: {read.name!r} is {found!r}, {TENSOR_INDEX} says {expected!r}", path=file.path
        )
    return int(found["data_offsets"][0])


def _fill(file: CheckedFile, start: int, read: _Read) -> None:
    """Copy one box, straight into place if it is a run of whole rows and its memory is contiguous on the CPU."""
    chunk = read.chunk.box
    row_bytes = math.prod(chunk.shape[1:]) * ITEM_BYTES[read.dtype]
    first_row = read.box.offsets[0] - chunk.offsets[0] if chunk.shape else 0
    start += first_row * row_bytes
    if read.box.shape[1:] == chunk.shape[1:] and read.target.device.type == "cpu" and read.target.is_contiguous():
        file.read_into(start, view_bytes(read.target))
        return
    inner = read.box.slices_in(chunk)[1:]
    target = read.target if chunk.shape else read.target.reshape(1)
    band = max(1, _BAND_BYTES // row_bytes)
    for row in range(0, len(target), band):
        rows = target[row : row + band]
        data = file.read(start + row * row_bytes, len(rows) * row_bytes)
        values = torch.frombuffer(data, dtype=TORCH_DTYPES[read.dtype]).reshape(len(rows), *chunk.shape[1:])
        rows.copy_(values[(slice(None), *inner)])
