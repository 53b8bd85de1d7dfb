"""What the mirror needs of a remote file system.

Two classes keep this promise: `FsspecRemote`, which talks to the server in this process, and `RemoteClient`, which has that
done by a process of its own that can be killed when the server falls silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from recipe_ckpt.storage import DirEntry

OnBytes = Callable[[int], None]
"""Called with the number of bytes that were moved since the last call."""


class Remote(Protocol):
    """A directory tree below one URL. Paths are relative to it, parted by `/`; `""` is the URL's own directory.

    Methods may be called from several threads. "Absent" is concluded only from a server's answer, never from a connection
    that failed. Beside FileNotFoundError, every method raises

        RemoteUnreachableError: no answer, or one that may be another in a while (no DataNode, safe mode); try again.
        RemoteRefusedError: an answer that stays the same (no permission, quota used up, not a directory).
    """

    url: str
    """Without user name and password."""
    can_rename: bool
    """Directories are moved by one operation: HDFS and disks can, object stores copy."""

    def probe(self) -> None:
        """Make the root, write a file into it and remove that: raises what every later operation would."""

    def list_dir(self, path: str) -> list[DirEntry]:
        """Return the names in a directory in name order; an absent directory has none."""
        ...

    def list_files(self, path: str) -> dict[str, int]:
        """Return every file below a directory: its path relative to that, and its bytes; of an absent directory none.

        Uploads that did not end (names in `.<32 hex digits>.tmp`) are left out.
        """
        ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Put a small file in place as a whole: a reader sees the old one or the new one. Makes its directory."""

    def put_file(self, local_path: str, path: str, on_bytes: OnBytes | None = None) -> None:
        """Upload a file: under a temporary name, its size compared, then renamed over what has its name.

        What killed uploads of this file left there is removed first. An error of the local file is raised as it is.
        """

    def get_file(self, path: str, local_path: str, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        """Download to a local file and fsync it; return its bytes and its digest, as in a FileEntry.

        After an error a part of it may be there.
        """
        ...

    def rename(self, source: str, target: str) -> None:
        """Move a file or a directory to a name that is free; its parent directory is made."""

    def remove_tree(self, path: str) -> None:
        """Remove a file, or a directory with what is in it; nothing there is fine."""

    def close(self) -> None: ...
