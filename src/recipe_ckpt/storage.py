"""Files of one machine's disks, written so that they survive a power cut.

Every change to a disk goes through a method of this class: that is the seam by which tests stop a process at its n-th
operation.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from recipe_ckpt.manifest import BlockDigester, FileEntry

Buffer = bytes | bytearray | memoryview

_PAGE_BYTES = 4096
_WRITE_BYTES = 16 << 20
_LARGE_BYTES = 1 << 20
"""From here on a write past the page cache, with the digest beside it, is faster."""


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a directory; a symlink to a directory is `is_dir` and `is_link`."""

    name: str
    is_dir: bool
    is_link: bool


class Readable(Protocol):
    """What reading a root takes: here, or on a remote."""

    def list_dir(self, path: str) -> list[DirEntry]: ...
    def read(self, path: str) -> bytes: ...


class Storage(Readable, Protocol):
    """What the store needs of a file system. Paths are absolute strings."""

    def exists(self, path: str) -> bool: ...
    def size_bytes(self, path: str) -> int: ...
    def free_bytes(self, path: str) -> int: ...
    def directory_id(self, path: str) -> int: ...
    def directory_key(self, path: str) -> str: ...
    def make_dirs(self, path: str) -> None: ...
    def write_file(self, path: str, chunks: Iterable[Buffer], *, name: str, rank: int) -> FileEntry: ...
    def replace_file(self, path: str, data: bytes) -> None: ...
    def create_exclusive(self, path: str, data: bytes) -> bool: ...
    def rename(self, source: str, target: str) -> None: ...
    def remove_file(self, path: str) -> None: ...
    def remove_tree(self, path: str) -> None: ...
    def sync_dir(self, path: str) -> None: ...
    def lock_dir(self, path: str) -> AbstractContextManager[None]: ...


class LocalStorage:
    """Local and mounted disks."""

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the names in a directory in name order; an absent directory has none."""
        try:
            with os.scandir(path) as found:
                return sorted((DirEntry(e.name, e.is_dir(), e.is_symlink()) for e in found), key=lambda e: e.name)
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def size_bytes(self, path: str) -> int:
        return os.stat(path).st_size

    def directory_id(self, path: str) -> int:
        """Return a number that a directory keeps when it is moved, and that a copy of it does not have."""
        return os.stat(path).st_ino

    def directory_key(self, path: str) -> str:
        """Return `<boot>/<device>/<inode>`: equal for two processes of one host only if they see the same directory."""
        found = os.stat(path)
        return f"{read_boot_id()}/{found.st_dev}/{found.st_ino}"

    def free_bytes(self, path: str) -> int:
        """Return what this user may still write on the disk that holds a directory. A quota may allow less."""
        disk = os.statvfs(path)
        return disk.f_bavail * disk.f_frsize

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def make_dirs(self, path: str) -> None:
        """Make a directory and its parents; that others make the same at the same time is fine."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            parent = os.path.dirname(path)
            if parent == path:
                break
            path = parent
        for path in reversed(missing):
            os.makedirs(path, exist_ok=True)
            self.sync_dir(os.path.dirname(path))

    def write_file(self, path: str, chunks: Iterable[Buffer], *, name: str, rank: int) -> FileEntry:
        """Write a new file, fsync it, and return its entry under `name`; digests are taken on the way to the disk.

        Large chunks are digested by a second thread while they are written, and past the page cache where the file system
        takes that and they begin on a page: whoever has a file in one page-aligned piece of memory should pass that.
        """
        with open(path, "xb", buffering=0) as file, _BesideDigester() as digester:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                if len(view) < _LARGE_BYTES:
                    digester.update(view)
                    _write_all(file.fileno(), view)
                else:
                    _write_large(file.fileno(), view, digester)
            os.fsync(file.fileno())
            digest, blocks = digester.finish()
        return FileEntry(name, digester.size_bytes, digest, blocks, rank)

    def replace_file(self, path: str, data: bytes) -> None:
        """Put a small file in place as a whole: a reader sees the old one or the new one, also after a power cut."""
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            self.write_file(temporary, [data], name=path, rank=0)
            os.replace(temporary, path)
        except OSError:
            if os.path.lexists(temporary):
                os.unlink(temporary)
            raise
        self.sync_dir(os.path.dirname(path))

    def create_exclusive(self, path: str, data: bytes) -> bool:
        """Make a small file as a whole, unless its name is taken; say which (by a hard link, which NFS does right)."""
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            self.write_file(temporary, [data], name=path, rank=0)
            os.link(temporary, path)
        except (FileExistsError, FileNotFoundError):  # whoever has the name may clear temporary files away
            return False
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        return True

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove_file(self, path: str) -> None:
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a directory with what is in it; of a symlink only the link."""
        if os.path.islink(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)

    @contextmanager
    def lock_dir(self, path: str) -> Iterator[None]:
        """Keep other processes that ask for it out for a moment, where the file system has locks; held by no dead process."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # NFS locks no directories, and some mounts nothing
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def sync_dir(self, path: str) -> None:
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_boot_id() -> str:
    """Return what tells one boot of a host from another, and from another host's."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def describe_file(path: str, *, name: str, rank: int) -> FileEntry:
    """Read a file that another program wrote, fsync it, and return its entry."""
    digester = BlockDigester()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digester.update(chunk)
        os.fsync(file.fileno())
    digest, blocks = digester.finish()
    return FileEntry(name, digester.size_bytes, digest, blocks, rank)


class _BesideDigester:
    """A digester that takes large pieces in a thread of its own, which the first of them starts. `settle` before `update`."""

    def __init__(self) -> None:
        self._digester = BlockDigester()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    @property
    def size_bytes(self) -> int:
        return self._digester.size_bytes

    def update(self, data: Buffer) -> None:
        self._digester.update(data)

    def update_beside(self, data: Buffer) -> None:
        """Digest memory that stays as it is until `settle`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "recipe_ckpt digest")
        self._pending.append(self._thread.submit(self._digester.update, data))

    def settle(self) -> None:
        while self._pending:
            self._pending.pop(0).result()

    def finish(self) -> tuple[str, str]:
        return self._digester.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


def _write_large(descriptor: int, view: memoryview, digester: _BesideDigester) -> None:
    for start in range(0, len(view), _WRITE_BYTES):
        digester.update_beside(view[start : start + _WRITE_BYTES])
    written = _write_direct(descriptor, view[: len(view) - len(view) % _PAGE_BYTES]) if _is_on_page(descriptor, view) else 0
    _write_all(descriptor, view[written:])
    digester.settle()


def _is_on_page(descriptor: int, view: memoryview) -> bool:
    """Say whether memory and file position are what O_DIRECT asks for."""
    if view.readonly:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address % _PAGE_BYTES == 0 and os.lseek(descriptor, 0, os.SEEK_CUR) % _PAGE_BYTES == 0


def _write_direct(descriptor: int, view: memoryview) -> int:
    """Write whole pages past the page cache, and return how many bytes; fewer or none where a file system refuses."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    start = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while start < len(view) and start % _PAGE_BYTES == 0:
            start += os.write(descriptor, view[start : start + _WRITE_BYTES])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return start


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
