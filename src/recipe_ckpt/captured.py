"""One rank's state of one instant, on its way to the disk."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recipe_ckpt.engines.base import Engine, Snapshot, StagedSnapshot
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.storage import Storage, describe_file


@dataclass(slots=True)
class Captured:
    """What a save holds of this rank. Folders are the engines' names, `""` for a single one.

    Of the snapshots `staged` are copies. `files` are this rank's small files, `shared_files` those that rank 0 writes for
    all, `facts` fields of the manifest. `foreign` engines write their own format, and are not a copy: they are written
    before training goes on.
    """

    step: int
    rank: int
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    staged: list[StagedSnapshot] = field(default_factory=list)
    foreign: dict[str, Engine] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    shared_files: dict[str, bytes] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def release(self) -> None:
        """Give the copies up, written or not: the next save makes its own."""
        for snapshot in self.staged:
            snapshot.release()

    def write(self, directory: str, storage: Storage) -> dict[str, Any]:
        """Write and fsync this rank's files; return their entries and the engines' fragments, as JSON.

        Collective only if a foreign engine's own `save_checkpoint` is.
        """
        entries: list[FileEntry] = []
        fragments: dict[str, Any] = {}
        storage.make_dirs(directory)
        for name, engine in self.foreign.items():
            storage.make_dirs(join_folder(directory, name))
            engine.save_checkpoint(local_path=join_folder(directory, name), global_step=self.step, max_ckpt_to_keep=None)
        for name, snapshot in self.snapshots.items():
            storage.make_dirs(join_folder(directory, name))
            part = snapshot.write(join_folder(directory, name), storage)
            entries += [_move_under(name, entry) for entry in part.entries]
            fragments[name] = part.fragment
        entries += _write_files(directory, storage, self.files, self.rank)
        return {"entries": [asdict(entry) for entry in entries], "fragments": fragments}

    def finish(self, directory: str, storage: Storage, parts: Sequence[Mapping[str, Any]]) -> list[FileEntry]:
        """On rank 0: join what the ranks wrote, add the files that one rank writes for all, and return every entry."""
        entries = [FileEntry(**entry) for part in parts for entry in part["entries"]]
        entries += self.join(directory, storage, parts)
        if self.foreign:
            entries += self.describe_foreign(directory, {entry.path for entry in entries})
        return entries

    def join(self, directory: str, storage: Storage, parts: Sequence[Mapping[str, Any]]) -> list[FileEntry]:
        """On rank 0: write what one rank writes for all, and return its entries."""
        entries: list[FileEntry] = []
        for name, snapshot in self.snapshots.items():
            fragments = [part["fragments"][name] for part in parts]
            joined = snapshot.finish(join_folder(directory, name), storage, fragments)
            entries += [_move_under(name, entry) for entry in joined]
        return entries + _write_files(directory, storage, self.shared_files, 0)

    def describe_foreign(self, directory: str, known: Collection[str]) -> list[FileEntry]:
        """Return the entries of all files in a directory but the `known` ones, as written by this rank."""
        return _describe_others(directory, known, self.rank)


def join_folder(directory: str, folder: str) -> str:
    return os.path.join(directory, folder) if folder else directory


def _write_files(directory: str, storage: Storage, files: Mapping[str, bytes], rank: int) -> list[FileEntry]:
    return [storage.write_file(os.path.join(directory, name), [data], name=name, rank=rank) for name, data in files.items()]


def _move_under(folder: str, entry: FileEntry) -> FileEntry:
    path = f"{folder}/{entry.path}" if folder else entry.path
    return FileEntry(path, entry.size_bytes, entry.digest, entry.blocks, entry.rank)


def _describe_others(directory: str, known: Collection[str], rank: int) -> list[FileEntry]:
    """Digest the files that engines with their own format wrote."""
    found = []
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), directory).replace(os.sep, "/")
            if path not in known:
                found.append(describe_file(os.path.join(folder, name), name=path, rank=rank))
    return found
