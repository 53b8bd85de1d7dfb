"""The kinds of remote file systems, each with absolute paths and the errors of its library.

HDFS through hdfs-native's own client (its fsspec class breaks at copies and lists), mounted disks through the operating
system, object stores through their fsspec backends. HDFS and disks write under a temporary name and rename; object stores
show an object only when all of it has arrived.
"""

from __future__ import annotations

import errno
import math
import os
import posixpath
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

from recipe_ckpt.errors import RemoteError, RemoteRefusedError, RemoteUnreachableError
from recipe_ckpt.remote import OnBytes
from recipe_ckpt.remote_url import HADOOP, RemoteUrl
from recipe_ckpt.storage import DirEntry, LocalStorage

_CHUNK_BYTES = 8 << 20
_SYNC_BYTES = 32 << 20
"""A disk is synced in steps: the writing goes on beside the reading, and the last step is not taken for silence."""
_WRITE_BYTES = 1 << 20
"""What is handed to the disk at once; hdfs-native yields 64 KB."""
TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp\Z")
_NAMENODE_PORT = ":8020"
"""Where Hadoop's own clients look when a URL names none."""
_HDFS_OPTIONS = {  # a server that refuses connections is given up in a second, not in three minutes
    "dfs.client.failover.max.attempts": "3",
    "dfs.client.failover.sleep.base.millis": "100",
    "dfs.client.failover.sleep.max.millis": "500",
}


_S3 = ("s3", "s3a")
_S3_MAX_PARTS = 10_000
_S3_PARTS_AT_ONCE = 4


class LocalError(Exception):
    """A local file could not be read during an upload: no fault of the server."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause)
        self.cause = cause


class Tree(Protocol):
    """One kind of file system, with absolute paths and the errors of its library."""

    failures: tuple[type[Exception], ...]
    """What its library raises when a server refuses or fails."""
    lost: type[RemoteError]
    """What it means that an upload finds its place gone."""

    def list_dir(self, path: str) -> list[DirEntry]: ...
    def walk(self, path: str) -> Iterator[tuple[str, int]]: ...
    def size_bytes(self, path: str) -> int: ...
    def read_chunks(self, path: str) -> Iterator[bytes]: ...
    def write(self, path: str, data: bytes) -> None: ...
    def put(self, local_path: str, path: str, on_bytes: OnBytes) -> None: ...
    def rename(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...


def choose_tree(url: RemoteUrl) -> Tree:
    if url.scheme in HADOOP:
        return _HdfsTree(url)
    return _DiskTree() if url.is_disk else _ObjectTree(url)


class _RenamingTree:
    """Files that appear by a rename, in file systems where one step does that."""

    lost: type[RemoteError] = RemoteUnreachableError

    def __init__(self) -> None:
        self._in_flight: set[str] = set()

    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a new file, with the directories above it; on an error what is there may be anything."""
        raise NotImplementedError

    def replace(self, source: str, target: str) -> None:
        """Give a file its name, over the file that has it."""
        raise NotImplementedError

    def list_dir(self, path: str) -> list[DirEntry]:
        raise NotImplementedError

    def size_bytes(self, path: str) -> int:
        raise NotImplementedError

    def remove(self, path: str) -> None:
        raise NotImplementedError

    def write(self, path: str, data: bytes) -> None:
        self._place(path, [data], len(data))

    def put(self, local_path: str, path: str, on_bytes: OnBytes) -> None:
        self._place(path, _read_local(local_path, on_bytes), _local_bytes(local_path))

    def _place(self, path: str, chunks: Iterable[bytes], size_bytes: int) -> None:
        self._remove_left_over(path)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        self._in_flight.add(temporary)
        try:
            self.create(temporary, chunks)
            compare_sizes(self.size_bytes(temporary), size_bytes)
            self.replace(temporary, path)
        except Exception:
            with suppress(OSError, RuntimeError):  # the first error is the one to tell
                self.remove(temporary)
            raise
        finally:
            self._in_flight.discard(temporary)

    def _remove_left_over(self, path: str) -> None:
        """Remove what uploads of this file left behind that were killed."""
        folder, name = posixpath.split(path)
        for entry in self.list_dir(folder):
            unfinished = posixpath.join(folder, entry.name)
            if TEMPORARY.sub("", entry.name) == name != entry.name and unfinished not in self._in_flight:
                with suppress(FileNotFoundError):
                    self.remove(unfinished)


class _HdfsTree(_RenamingTree):
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError, ImportError)

    def __init__(self, url: RemoteUrl) -> None:
        super().__init__()
        self._server = f"{url.scheme}://{url.authority}"

    @cached_property
    def _client(self) -> Any:
        import hdfs_native

        try:
            return hdfs_native.Client(self._server, dict(_HDFS_OPTIONS))
        except RuntimeError as error:
            if "No NameNode hosts found" not in str(error):
                raise
            return hdfs_native.Client(self._server + _NAMENODE_PORT, dict(_HDFS_OPTIONS))  # no name service: a host

    def list_dir(self, path: str) -> list[DirEntry]:
        return [DirEntry(posixpath.basename(status.path), status.isdir, False) for status in self._list(path, is_deep=False)]

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        for status in self._list(path, is_deep=True):
            if not status.isdir:
                yield posixpath.relpath(status.path, path), status.length

    def size_bytes(self, path: str) -> int:
        return int(self._client.get_file_info(path).length)

    def read_chunks(self, path: str) -> Iterator[bytes]:
        reader = self._client.read(path)
        yield from reader.read_range_stream(0, len(reader))

    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        writer = self._client.create(path)  # no `with`: it would commit a partial file
        for chunk in chunks:
            writer.write(chunk)
        writer.close()

    def replace(self, source: str, target: str) -> None:
        self._client.rename(source, target, overwrite=True)

    def rename(self, source: str, target: str) -> None:
        self._client.mkdirs(posixpath.dirname(target), create_parent=True)
        self._client.rename(source, target)

    def remove(self, path: str) -> None:
        self._client.delete(path, recursive=True)

    def _list(self, path: str, *, is_deep: bool) -> list[Any]:
        try:
            found = list(self._client.list_status(path, recursive=is_deep))
        except FileNotFoundError:
            return []
        if [status.path for status in found if not status.isdir] == [path]:  # a file lists itself
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return found


class _DiskTree(_RenamingTree):
    """A mounted disk: what is done survives a power cut."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self) -> None:
        super().__init__()
        self._disk = LocalStorage()

    def list_dir(self, path: str) -> list[DirEntry]:
        return self._disk.list_dir(path)

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        for entry in self._disk.list_dir(path):
            inner = os.path.join(path, entry.name)
            if entry.is_dir and not entry.is_link:
                yield from ((f"{entry.name}/{name}", size) for name, size in self.walk(inner))
            elif not entry.is_dir:
                with suppress(FileNotFoundError):  # an upload of somebody else, renamed meanwhile
                    yield entry.name, os.stat(inner).st_size

    def size_bytes(self, path: str) -> int:
        return self._disk.size_bytes(path)

    def read_chunks(self, path: str) -> Iterator[bytes]:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def create(self, path: str, chunks: Iterable[bytes]) -> None:
        self._disk.make_dirs(os.path.dirname(path))
        write_durably(path, "xb", chunks)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)
        self._disk.sync_dir(os.path.dirname(target))

    def rename(self, source: str, target: str) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self._disk.make_dirs(os.path.dirname(target))
        os.rename(source, target)
        self._disk.sync_dir(os.path.dirname(target))
        self._disk.sync_dir(os.path.dirname(source))

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
        self._disk.sync_dir(os.path.dirname(path))


class _ObjectTree:
    """Buckets: names without directories, each object there as a whole or not at all."""

    failures: tuple[type[Exception], ...] = (Exception,)  # each cloud's library has a tree of its own
    lost: type[RemoteError] = RemoteRefusedError
    """The bucket does not exist."""

    def __init__(self, url: RemoteUrl) -> None:
        self._url = url

    @cached_property
    def _files(self) -> Any:
        import fsspec

        kind: Any = fsspec.get_filesystem_class(self._url.scheme)
        options = kind._get_kwargs_from_urls(f"{self._url.scheme}://{self._url.authority}")
        return kind(**options, use_listings_cache=False, skip_instance_cache=True)

    def list_dir(self, path: str) -> list[DirEntry]:
        place = self._key(path)
        try:
            found = self._files.ls(place, detail=True)
        except FileNotFoundError:
            return []
        names = ((item["name"].rstrip("/"), item["type"] == "directory") for item in found)
        return [DirEntry(posixpath.basename(name), is_dir, False) for name, is_dir in names if name != place]

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        place = self._key(path)
        try:
            found = self._files.find(place, detail=True)
        except FileNotFoundError:  # no such bucket
            return
        for name, item in found.items():
            if name != place:
                yield posixpath.relpath(name, place), item["size"]

    def size_bytes(self, path: str) -> int:
        found = self._files.info(self._key(path))
        if found["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return int(found["size"])

    def read_chunks(self, path: str) -> Iterator[bytes]:
        with self._files.open(self._key(path), "rb", cache_type="none") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def write(self, path: str, data: bytes) -> None:
        self._files.pipe_file(self._key(path), data)
        compare_sizes(self.size_bytes(path), len(data))

    def put(self, local_path: str, path: str, on_bytes: OnBytes) -> None:
        from fsspec.callbacks import Callback

        class Moved(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                on_bytes(inc)

        size_bytes = _local_bytes(local_path)
        self._files.put_file(local_path, self._key(path), callback=Moved(), **self._divide(size_bytes))
        compare_sizes(self.size_bytes(path), size_bytes)

    def rename(self, source: str, target: str) -> None:
        old, new = self._key(source), self._key(target)
        moved = self._files.find(old)
        if not moved:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if self._files.find(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        for name in moved:
            self._files.cp_file(name, new + name[len(old) :])
        self.remove(source)

    def remove(self, path: str) -> None:
        self._files.rm(self._key(path), recursive=True)

    def _divide(self, size_bytes: int) -> dict[str, int]:
        """Have s3fs send small parts: it tells of one when that has arrived, and ten of 50 MB would be taken for silence."""
        if self._url.scheme not in _S3:
            return {}
        part_bytes = max(_CHUNK_BYTES, math.ceil(size_bytes / _S3_MAX_PARTS))
        return {"chunksize": part_bytes, "max_concurrency": _S3_PARTS_AT_ONCE}

    def _key(self, path: str) -> str:
        return str(self._files._strip_protocol(f"{self._url.scheme}://{self._url.authority}{path}"))


def write_durably(path: str, mode: str, chunks: Iterable[bytes]) -> None:
    """Write a local file; it survives a power cut on return, its name does not yet."""
    unsynced = 0
    with open(path, mode, buffering=_WRITE_BYTES) as file:
        for chunk in chunks:
            file.write(chunk)
            unsynced += len(chunk)
            if unsynced >= _SYNC_BYTES:
                file.flush()
                os.fdatasync(file.fileno())
                unsynced = 0
        file.flush()
        os.fsync(file.fileno())


def compare_sizes(found: int, expected: int) -> None:
    if found != expected:
        raise OSError(errno.EIO, f"found {found} bytes of {expected}")


def _read_local(path: str, on_bytes: OnBytes) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
                on_bytes(len(chunk))
    except OSError as error:
        raise LocalError(error) from error


def _local_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise LocalError(error) from error


def ignore_bytes(size_bytes: int) -> None:
    """Nobody asked for progress."""
