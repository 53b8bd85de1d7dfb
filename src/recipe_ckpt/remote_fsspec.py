"""Remote file systems, spoken to in this process."""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from recipe_ckpt.manifest import BlockDigester
from recipe_ckpt.remote import OnBytes
from recipe_ckpt.remote_failures import translate_failure
from recipe_ckpt.remote_trees import TEMPORARY, LocalError, choose_tree, compare_sizes, ignore_bytes, write_durably
from recipe_ckpt.remote_url import parse_remote_url
from recipe_ckpt.storage import DirEntry


class FsspecRemote:
    """A `Remote` without a process of its own: a server that falls silent blocks its callers for good."""

    def __init__(self, url: str) -> None:
        parsed = parse_remote_url(url)
        self.url = str(parsed)
        self._root = parsed.path
        self._tree = choose_tree(parsed)
        self.can_rename = parsed.can_rename

    def probe(self) -> None:
        name = f".probe.{uuid.uuid4().hex}.tmp"  # of its own: other nodes probe at the same time
        self.write(name, b"probe")
        self.remove_tree(name)

    def list_dir(self, path: str) -> list[DirEntry]:
        with self._translated(path):
            return sorted(self._tree.list_dir(self._join(path)), key=lambda entry: entry.name)

    def list_files(self, path: str) -> dict[str, int]:
        with self._translated(path):
            found = dict(self._tree.walk(self._join(path)))
        return {name: found[name] for name in sorted(found) if not TEMPORARY.search(name)}

    def read(self, path: str) -> bytes:
        return b"".join(self._read_chunks(path))

    def write(self, path: str, data: bytes) -> None:
        with self._translated(path, is_upload=True):
            self._tree.write(self._join(path), data)

    def put_file(self, local_path: str, path: str, on_bytes: OnBytes | None = None) -> None:
        with self._translated(path, is_upload=True):
            self._tree.put(local_path, self._join(path), on_bytes or ignore_bytes)

    def get_file(self, path: str, local_path: str, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        digester, tell = BlockDigester(), on_bytes or ignore_bytes

        def pass_on() -> Iterator[bytes]:
            for chunk in self._read_chunks(path):
                digester.update(chunk)
                yield chunk
                tell(len(chunk))

        write_durably(local_path, "wb", pass_on())
        return digester.size_bytes, digester.finish()[0]

    def rename(self, source: str, target: str) -> None:
        with self._translated(source):
            self._tree.rename(self._join(source), self._join(target))

    def remove_tree(self, path: str) -> None:
        with self._translated(path), suppress(FileNotFoundError):
            self._tree.remove(self._join(path))

    def close(self) -> None:
        """Nothing is held open between calls."""

    def _join(self, path: str) -> str:
        return posixpath.join(self._root, path) if path else self._root

    def _read_chunks(self, path: str) -> Iterator[bytes]:
        """Read a file, and compare: a file that its writer has not closed reads as an empty one in HDFS."""
        found = 0
        with self._translated(path):
            size = self._tree.size_bytes(self._join(path))
            for chunk in self._tree.read_chunks(self._join(path)):
                found += len(chunk)
                yield chunk
            compare_sizes(found, size)

    @contextmanager
    def _translated(self, path: str, *, is_upload: bool = False) -> Iterator[None]:
        where = posixpath.join(self.url, path) if path else self.url
        try:
            yield
        except LocalError as error:
            raise error.cause from None
        except self._tree.failures as error:
            raise translate_failure(error, where, lost=self._tree.lost if is_upload else None) from error
