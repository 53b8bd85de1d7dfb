"""Ranges of a file, of which every block that is touched is compared with its recorded digest before it counts.

`pread`, never mmap: a file that was cut short must be an error, not a SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from recipe_ckpt.errors import DamagedCheckpointError
from recipe_ckpt.manifest import BLOCK_BYTES, FileEntry, digest_bytes
from recipe_ckpt.tensors.copies import memmove

_AHEAD = 3
"""How many blocks may be read and not yet checked."""


class Span(NamedTuple):
    """A file's bytes from `start` on, and the memory that they go to."""

    start: int
    size_bytes: int
    address: int


class Checker:
    """Checks blocks in a thread while further ones are read, and holds the memory of those that have no place yet."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[Future[None], memoryview]] = deque()
        self._free: list[memoryview] = []

    def take_scratch(self) -> memoryview:
        """Return memory for a block; it is free again when the check that it is given to is done."""
        while self._pending and self._pending[0][0].done():
            self._await_first()
        return self._free.pop() if self._free else memoryview(bytearray(BLOCK_BYTES))

    def run(self, check: Callable[[memoryview], None], memory: memoryview) -> None:
        """Run a check later, in order; what an earlier one raised may surface here."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "recipe_ckpt check")
        while len(self._pending) >= _AHEAD:
            self._await_first()
        self._pending.append((self._thread.submit(check, memory), memory))

    def settle(self) -> None:
        """Return when every check has passed, or raise what one raised."""
        while self._pending:
            self._await_first()

    def _await_first(self) -> None:
        future, memory = self._pending.popleft()
        future.result()
        if isinstance(memory.obj, bytearray):
            self._free.append(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


class CheckedFile:
    """One open file and its entry. `read` keeps its last block, so reads in ascending order check each block once."""

    def __init__(self, path: str, descriptor: int, entry: FileEntry) -> None:
        self.path = path
        self._descriptor = descriptor
        self._entry = entry
        self._block = bytearray()
        self._held = -1

    def fill(self, spans: Iterable[Span], checker: Checker) -> None:
        """Fill memory with ranges of the file, each block read and checked once; whole blocks go straight into place."""
        blocks = self._cut(spans)
        for number in sorted(blocks):
            size, pieces = self._block_bytes(number), blocks[number]
            if number == self._held:
                _scatter(memoryview(self._block), pieces)
            elif len(pieces) == 1 and pieces[0].size_bytes == size:
                self._fill_block(number, _view_memory(pieces[0].address, size), (), checker)
            else:
                self._fill_block(number, checker.take_scratch(), pieces, checker)
        checker.settle()

    def _fill_block(self, number: int, memory: memoryview, pieces: Sequence[Span], checker: Checker) -> None:
        size = self._block_bytes(number)

        def check(memory: memoryview) -> None:
            self._check(number, memory[:size])
            _scatter(memory, pieces)

        self._read_block(number, memory[:size])
        checker.run(check, memory)

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
            memory = memoryview(self._block)[: self._block_bytes(number)]
            self._read_block(number, memory)
            self._check(number, memory)
            self._held = number

    def _read_block(self, number: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], number * BLOCK_BYTES + done)
            if not count:
                self._fail(f"it ends in block {number}, while it was being read")
            done += count

    def _check(self, number: int, memory: memoryview) -> None:
        found = digest_bytes(memory).hex()
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


def _scatter(block: memoryview, pieces: Sequence[Span]) -> None:
    if pieces:
        source = ctypes.addressof(ctypes.c_char.from_buffer(block))
        for start, size_bytes, address in pieces:
            memmove(address, source + start, size_bytes)


def _view_memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")
