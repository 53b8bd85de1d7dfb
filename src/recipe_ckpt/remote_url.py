"""How the address of a mirror is spelt: one address for one directory tree.

Only `://` and the slashes after it mean something. Blanks, `%`, `?` and `#` stand for themselves, as in Hadoop's own paths.
"""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass

HADOOP = ("hdfs", "viewfs")
_ACCOUNT_BEHIND_AT = ("abfs", "abfss", "az")
"""Here `container@account` is the address, not a user name."""


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A scheme, the server (or bucket) without user name and password, and an absolute path without a slash at its end."""

    scheme: str
    authority: str
    path: str

    @property
    def is_disk(self) -> bool:
        return self.scheme == "file"

    @property
    def can_rename(self) -> bool:
        return self.is_disk or self.scheme in HADOOP

    def __str__(self) -> str:
        """Return a disk's path, or the URL."""
        return self.path if self.is_disk else f"{self.scheme}://{self.authority}{self.path}"


def parse_remote_url(text: str) -> RemoteUrl:
    """Read a URL or a plain path; a relative path starts at the working directory."""
    scheme, parted, rest = text.partition("://")
    if not parted:
        return RemoteUrl("file", "", os.path.abspath(os.path.expanduser(text)))
    authority, _, path = rest.partition("/")
    return RemoteUrl(scheme.lower(), _drop_user(scheme.lower(), authority), posixpath.normpath("/" + path.lstrip("/")))


def has_credentials(text: str) -> bool:
    """Say whether a URL carries a user name or a password."""
    scheme, parted, rest = text.partition("://")
    authority = rest.partition("/")[0]
    return bool(parted) and _drop_user(scheme.lower(), authority) != authority


def _drop_user(scheme: str, authority: str) -> str:
    user, at, server = authority.rpartition("@")
    if scheme in _ACCOUNT_BEHIND_AT:
        return user.partition(":")[0] + at + server
    return server
