"""Files of one machine's disks, written so that they survive a power cut.

Every change to a disk goes through a method of this class: that is the seam by which tests stop a process at its n-th
operation.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from recipe_ckpt.manifest import BlockDigester, FileEntry

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a directory; a symlink to a directory is `is_dir` and `is_link`."""

    name: str
    is_dir: bool
    is_link: bool


class Storage(Protocol):
    """What the store needs of a file system. Paths are absolute strings."""

    def list_dir(self, path: str) -> list[DirEntry]: ...
    def exists(self, path: str) -> bool: ...
    def size_bytes(self, path: str) -> int: ...
    def read(self, path: str) -> bytes: ...
    def make_dirs(self, path: str) -> None: ...
    def write_file(self, path: str, chunks: Iterable[Buffer], *, name: str, rank: int) -> FileEntry: ...
    def replace_file(self, path: str, data: bytes) -> None: ...
    def create_exclusive(self, path: str, data: bytes) -> bool: ...
    def rename(self, source: str, target: str) -> None: ...
    def remove_file(self, path: str) -> None: ...
    def remove_tree(self, path: str) -> None: ...
    def sync_dir(self, path: str) -> None: ...


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
        """Write a new file, fsync it, and return its entry under `name`; digests are taken on the way to the disk."""
        digester = BlockDigester()
        with open(path, "xb", buffering=0) as file:
            for chunk in chunks:
                digester.update(chunk)
                _write_all(file.fileno(), chunk)
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
        self.write_file(temporary, [data], name=path, rank=0)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
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

    def sync_dir(self, path: str) -> None:
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def describe_file(path: str, *, name: str, rank: int) -> FileEntry:
    """Read a file that another program wrote, fsync it, and return its entry."""
    digester = BlockDigester()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digester.update(chunk)
        os.fsync(file.fileno())
    digest, blocks = digester.finish()
    return FileEntry(name, digester.size_bytes, digest, blocks, rank)


def _write_all(descriptor: int, chunk: Buffer) -> None:
    view = memoryview(chunk).cast("B")
    while len(view):
        view = view[os.write(descriptor, view[: 16 << 20]) :]
