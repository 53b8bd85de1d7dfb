"""Remotes for tests: a directory that can be watched, cut off, or stopped at its n-th operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe_ckpt import layout
from recipe_ckpt.errors import RemoteUnreachableError
from recipe_ckpt.remote import Remote
from recipe_ckpt.remote_fsspec import FsspecRemote
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import survey, verify

CHANGES = ("write", "put_file", "rename", "remove_tree")


class WatchedRemote:
    """A directory, or another remote, of which each operation is noted, and `before(number, name)` asked first: it may raise.

    `url` is the address that it seems to have. `sent` are the files that were uploaded, in the order in which that was done.
    """

    def __init__(
        self,
        inner: str | Remote,
        before: Callable[[int, str], None] = lambda number, name: None,
        *,
        url: str | None = None,
    ) -> None:
        self.inner = FsspecRemote(inner) if isinstance(inner, str) else inner
        self.url = url or self.inner.url
        self.can_rename = self.inner.can_rename
        self.before = before
        self.operations: list[tuple[str, str]] = []
        self.sent: list[str] = []
        self.is_down = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def call(*arguments: Any) -> Any:
            if self.is_down:
                raise RemoteUnreachableError(f"{self.url}: nobody answers")
            self.operations.append((name, str(arguments[0] if arguments else "")))
            self.before(len(self.operations), name)
            result = method(*arguments)
            if name == "put_file":
                self.sent.append(str(arguments[1]))
            return result

        return call

    def close(self) -> None:
        """Stays usable: a test's handlers share it."""


def assert_whole(mirror: Path) -> None:
    """Whatever a reader could be led to is whole: what the tracker, `run.json` and a manifest name."""
    found = survey(LocalStorage(), str(mirror))
    named = {entry.step for entry in found.branch} | set(found.others)
    tracker = mirror / layout.TRACKER
    if tracker.exists():
        named.add(int(tracker.read_text()))
    for step in named:
        damage = verify(LocalStorage(), str(mirror / layout.build_step_name(step)), read_all=True)
        assert damage is None, f"step {step}: {damage}"
