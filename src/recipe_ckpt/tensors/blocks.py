"""Ranges of a file, of which every block that is touched is compared with its recorded digest before it counts.

`pread`, never mmap: a file that was cut short must be an error, not a SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

import xxhash

from recipe_ckpt.errors import DamagedCheckpointError
from recipe_ckpt.manifest import BLOCK_BYTES, FileEntry
from recipe_ckpt.tensors.copies import memmove

_PIECE_BYTES = 512 << 10
"""What is read and then digested while it is still in a core's own cache; with whole blocks both take a third longer."""

_MAX_IN_PLACE = 16
"""Up to so many ranges of one block are read straight into place; more are copied there, which then costs less."""


class Span(NamedTuple):
    """A file's bytes from `start` on, and the memory that they go to."""

    start: int
    size_bytes: int
    address: int


class Readers:
    """This thread and one beside it, each with memory for a block that has no place of its own.

    Two that each read and digest pay off better than one that reads for one that digests: that needs a core that is idle.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._scratch: list[memoryview] = []

    def share(self, work: Callable[[memoryview, int], None], blocks: Iterable[int]) -> None:
        """Call `work(scratch, block)` for each block, some in another thread; raise the failure of the first that fails."""
        numbers = list(blocks)
        queue = iter(numbers)
        failures: dict[int, Exception] = {}

        def take(scratch: memoryview) -> None:
            try:
                for number in queue:
                    work(scratch, number)
            except Exception as error:  # noqa: BLE001 (raised below)
                failures[number] = error
            finally:
                deque(queue, maxlen=0)  # after a failure the other one stops too

        first, second = self._prepare()
        beside = self._submit(take, second) if len(numbers) > 1 else None
        try:
            take(first)
        finally:
            if beside is not None:
                wait([beside])
        if beside is not None:
            beside.result()
        if failures:
            raise failures.pop(min(failures))

    def _prepare(self) -> list[memoryview]:
        if not self._scratch:
            self._scratch = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
        return self._scratch

    def _submit(self, work: Callable[[memoryview], None], scratch: memoryview) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "recipe_ckpt read")
        return self._thread.submit(work, scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.shutdown()


class CheckedFile:
    """One open file and its entry. `read` keeps its last block, so reads in ascending order check each block once."""

    def __init__(self, path: str, descriptor: int, entry: FileEntry) -> None:
        self.path = path
        self._descriptor = descriptor
        self._entry = entry
        self._block = bytearray()
        self._held = -1

    def fill(self, spans: Iterable[Span], readers: Readers) -> None:
        """Fill memory with ranges of the file, each block read and checked once; large ranges go straight into place."""
        blocks = self._cut(spans)

        def fill_block(scratch: memoryview, number: int) -> None:
            size, pieces = self._block_bytes(number), sorted(blocks[number])
            if number == self._held:
                _scatter(memoryview(self._block), pieces)
            elif len(pieces) <= _MAX_IN_PLACE and not _has_overlap(pieces):
                self._read_block(number, _place(pieces, scratch[:size]))
            else:
                self._read_block(number, [scratch[:size]])
                _scatter(scratch, pieces)

        readers.share(fill_block, sorted(blocks))

    def read(self, start: int, size_bytes: int) -> bytearray:
        """Return a range of the file."""
        self._require_inside(start, size_bytes)
        data = bytearray(size_bytes)
        target = memoryview(data)
        while len(target):
            number, within = divmod(start, BLOCK_BYTES)
            size = min(self._block_bytes(number) - within, len(target))
            self._hold(number)
            target[:size] = memoryview(self._block)[within : within + size]
            start, target = start + size, target[size:]
        return data

    def _cut(self, spans: Iterable[Span]) -> dict[int, list[Span]]:
        """Cut spans at the edges of blocks; `start` of a piece counts from the start of its block."""
        blocks: dict[int, list[Span]] = {}
        for start, size_bytes, address in spans:
            self._require_inside(start, size_bytes)
            while size_bytes:
                number, within = divmod(start, BLOCK_BYTES)
                size = min(BLOCK_BYTES - within, size_bytes)
                blocks.setdefault(number, []).append(Span(within, size, address))
                start, size_bytes, address = start + size, size_bytes - size, address + size
        return blocks

    def _block_bytes(self, number: int) -> int:
        return min(BLOCK_BYTES, self._entry.size_bytes - number * BLOCK_BYTES)

    def _hold(self, number: int) -> None:
        if self._held != number:
            self._held = -1
            self._block = bytearray(self._block_bytes(number)) if len(self._block) != BLOCK_BYTES else self._block
            self._read_block(number, [memoryview(self._block)[: self._block_bytes(number)]])
            self._held = number

    def _read_block(self, number: int, places: Iterable[memoryview]) -> None:
        """Fill pieces of memory with a whole block, one after the other, and compare it with its digest."""
        digest = xxhash.xxh3_128()
        position = number * BLOCK_BYTES
        for place in places:
            while len(place):
                count = os.preadv(self._descriptor, [place[:_PIECE_BYTES]], position)
                if not count:
                    self._fail(f"it ends in block {number}, while it was being read")
                digest.update(place[:count])
                position, place = position + count, place[count:]
        found = digest.hexdigest()
        if found != self._entry.block(number):
            self._fail(f"block {number} (of {BLOCK_BYTES} bytes) has digest {found}, recorded is {self._entry.block(number)}")

    def _require_inside(self, start: int, size_bytes: int) -> None:
        if start + size_bytes > self._entry.size_bytes:
            self._fail(f"bytes {start} to {start + size_bytes} are wanted, it has {self._entry.size_bytes}")

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


def _has_overlap(pieces: Sequence[Span]) -> bool:
    return any(left.start + left.size_bytes > right.start for left, right in itertools.pairwise(pieces))


def _place(pieces: Iterable[Span], block: memoryview) -> Iterator[memoryview]:
    """Yield memory for a whole block in its order: the pieces' own, and the block's where none wants the bytes."""
    position = 0
    for start, size_bytes, address in pieces:
        yield block[position:start]
        yield _view_memory(address, size_bytes)
        position = start + size_bytes
    yield block[position:]


def _scatter(block: memoryview, pieces: Sequence[Span]) -> None:
    if pieces:
        source = ctypes.addressof(ctypes.c_char.from_buffer(block))
        for start, size_bytes, address in pieces:
            memmove(address, source + start, size_bytes)


def _view_memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")
