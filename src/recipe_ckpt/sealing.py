"""A commit in the making: what it descends from, where it is written, and the two records that seal it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Self

from recipe_ckpt import layout
from recipe_ckpt.manifest import (
    BranchEntry,
    Continues,
    FileEntry,
    FileTable,
    Manifest,
    digest_bytes,
    extend_ranges,
)

_RUN_DIGITS = 8
"""So many digits of a staging directory's `uid` are the run's, and the rest counts its saves."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A directory in which one save is being written. `uid` is hex, and no other save of this root has it."""

    path: str
    step: int
    uid: str

    @classmethod
    def of(cls, root: str, step: int, uid: str) -> Staging:
        return cls(os.path.join(root, layout.STAGING_DIR, layout.build_staging_name(step, uid)), step, uid)

    @classmethod
    def of_save(cls, root: str, step: int, token: str, count: int) -> Staging:
        """Name the directory of a run's save; `token` is hex, and `count` that of all its saves so far."""
        return cls.of(root, step, f"{token[:_RUN_DIGITS]}{count:04x}")

    def is_at_or_before(self, name: str) -> bool:
        """Say whether a name in staging is this one's, or that of a later save of the same run."""
        _, uid = layout.parse_staging_name(name) or (0, "")
        is_same_run = uid[:_RUN_DIGITS] == self.uid[:_RUN_DIGITS]
        return is_same_run and (len(uid), uid) >= (len(self.uid), self.uid)


@dataclass(frozen=True, slots=True)
class Origin:
    """What the next commit descends from: its lineage, its parent, and all sequences of its branch."""

    lineage: str
    parent: str | None = None
    ancestors: tuple[tuple[int, int], ...] = ()
    branch: tuple[BranchEntry, ...] = ()
    continues: Continues | None = None

    def after(self, entry: BranchEntry) -> Origin:
        """Return what descends from that commit, the newest now. A step saved again takes the place of the former one."""
        return replace(
            self,
            parent=entry.digest,
            ancestors=extend_ranges(self.ancestors, entry.sequence),
            branch=(entry, *(old for old in self.branch if old.step != entry.step)),
        )

    def to_json(self) -> Any:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return cls(
            raw["lineage"],
            raw["parent"],
            tuple((first, last) for first, last in raw["ancestors"]),
            tuple(BranchEntry(**entry) for entry in raw["branch"]),
            Continues(**raw["continues"]) if raw["continues"] else None,
        )


@dataclass(frozen=True, slots=True)
class Sealed:
    """The two records of a commit, and the folders of its files (`.` is the step directory)."""

    table_data: bytes
    manifest_data: bytes
    folders: tuple[str, ...]

    @property
    def manifest(self) -> Manifest:
        return Manifest.decode(self.manifest_data, layout.MANIFEST)

    def to_json(self) -> Any:
        return {"table": self.table_data.decode(), "manifest": self.manifest_data.decode(), "folders": self.folders}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return cls(raw["table"].encode(), raw["manifest"].encode(), tuple(raw["folders"]))


def seal(
    step: int, entries: Iterable[FileEntry], facts: Mapping[str, Any], *, origin: Origin, sequence: int, parent: str | None
) -> Sealed:
    """Make the file table and the manifest of a commit. `facts` are the manifest's fields that are not named here."""
    table = FileTable.of(entries)
    files_data = table.encode()
    manifest = Manifest(
        step=step,
        sequence=sequence,
        lineage=origin.lineage,
        parent=parent,
        ancestors=origin.ancestors,
        continues=origin.continues,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        files_digest=digest_bytes(files_data).hex(),
        **facts,
    )
    folders = {str(folder) for entry in table.entries for folder in PurePosixPath(entry.path).parents}
    return Sealed(files_data, manifest.encode(), tuple(sorted(folders)))


def build_lineage() -> str:
    """A new run's name: when it began, and four hex digits so that two in one second differ."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + uuid.uuid4().hex[:4]
