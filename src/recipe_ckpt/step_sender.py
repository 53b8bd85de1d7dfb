"""A committed step on its way to the mirror, file by file, its manifest last.

It is sent in this order: its `files.json` (which tells a later start what the files beside it are of), its files, its
`manifest.json`, then the mirror's `run.json` and tracker. So whatever a tracker names is whole, and what an upload that was
cut short has finished is not sent again. Nodes with roots of their own send their files between the first and the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from recipe_ckpt import layout
from recipe_ckpt.branches import Claim
from recipe_ckpt.errors import CheckpointError, DamagedCheckpointError
from recipe_ckpt.manifest import BranchEntry, FileEntry, FileTable, Manifest, describe_bytes, digest_manifest
from recipe_ckpt.mirror import Mirror
from recipe_ckpt.nodes import name_ranks
from recipe_ckpt.remote import OnBytes
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import Commit, Held, find_damage, read_held
from recipe_ckpt.transfer import run_parallel


class StepGoneError(Exception):
    """A step that was to be sent is not on the disk any more: pruned, or saved anew."""


class StepWaitsError(Exception):
    """A step can't be finished before another node has sent its part; `sent_bytes` went from here."""

    def __init__(self, message: str, sent_bytes: int = 0) -> None:
        super().__init__(message)
        self.sent_bytes = sent_bytes


@dataclass(frozen=True, slots=True)
class _Step:
    """A committed step as it lies here: its records, and which of its files this node holds."""

    directory: str
    manifest: bytes
    table: bytes
    held: Held

    @property
    def name(self) -> str:
        return os.path.basename(self.directory)

    @property
    def entries(self) -> Sequence[FileEntry]:
        """All files of the checkpoint."""
        return FileTable.decode(self.table, self.directory).entries

    @property
    def own(self) -> list[FileEntry]:
        """The files that are sent from here: each one from the node of the rank that wrote it."""
        entries, ranks = self.held.table.entries, self.held.ranks
        return [entry for entry in entries if ranks is None or entry.rank in ranks]

    @property
    def notes(self) -> list[FileEntry]:
        return [entry for entry in self.own if layout.is_node_note_name(entry.path)]


class StepSender:
    """Sends the steps of one root; every method raises RemoteError.

    Where nodes have roots of their own, each has a sender to the same place. Rank 0's begins and publishes each step, the
    others send their parts in between. `is_alone` says that there are no others.
    """

    def __init__(self, mirror: Mirror, root: str, storage: Storage, *, is_alone: bool = True) -> None:
        self._mirror = mirror
        self._remote = mirror.remote
        self._root = root
        self._storage = storage
        self._is_alone = is_alone

    def send(self, entry: BranchEntry, claim: Claim, on_bytes: OnBytes | None = None) -> int:
        """Upload what lies here of a committed step, and publish it; return how many bytes had to be sent.

        Raises:
            StepWaitsError: other nodes' files are not there yet; or something was taken away there.
            StepGoneError: the step on the disk is not this one any more.
            DamagedCheckpointError: the step on the disk is not what was saved.
            LineageError: another run's work, or newer work of this one, lies there.
        """
        with self._missing_files(entry):
            step = self._read_step(entry)
            self._mirror.require_own(claim)
            self._begin(step, claim)
            sent_bytes = self._send_files(step, on_bytes)
            self._require_others_files(step, sent_bytes)
            self._read_manifest(entry)  # saved again meanwhile, what was sent may be of both
            self._remote.write(f"{step.name}/{layout.MANIFEST}", step.manifest)
        self._mirror.publish(entry, claim)
        return sent_bytes

    def send_part(self, entry: BranchEntry, on_bytes: OnBytes | None = None) -> int:
        """Upload this node's files of a committed step, which rank 0's node publishes; return how many bytes had to be sent.

        Raises:
            StepWaitsError: rank 0 has not begun to send it.
            StepGoneError, DamagedCheckpointError: as `send`.
        """
        with self._missing_files(entry):
            step = self._read_step(entry)
            if self._is_begun(step):
                sent_bytes = self._send_files(step, on_bytes)
                self._read_manifest(entry)
                if self._is_begun(step):
                    return sent_bytes
                self._take_away(step)  # given up meanwhile
        raise StepWaitsError("rank 0 has not begun to send it")

    @contextmanager
    def _missing_files(self, entry: BranchEntry) -> Iterator[None]:
        """Tell a step that is gone here from one whose files were taken away there while they were sent."""
        try:
            yield
        except FileNotFoundError as error:
            self._read_manifest(entry)
            raise StepWaitsError(f"{error.filename or error}: taken away there meanwhile") from error

    def measure(self, entry: BranchEntry) -> int:
        """Return the bytes that are sent from here; 0 if the step can't be read."""
        try:
            return sum(own.size_bytes for own in self._read_step(entry).own)
        except (CheckpointError, OSError, StepGoneError):
            return 0

    def _read_step(self, entry: BranchEntry) -> _Step:
        manifest, directory = self._read_manifest(entry), self._path_of(entry)
        try:
            commit = Commit(directory, entry.digest, Manifest.decode(manifest, directory))
            held = read_held(self._storage, commit)
            table = self._storage.read(os.path.join(directory, layout.FILE_TABLE))
            step = _Step(directory, manifest, table, held)
            if self._is_alone and (missing := sorted({e.rank for e in step.entries} - {e.rank for e in held.table.entries})):
                raise DamagedCheckpointError(f"{directory}: lacks the files of {name_ranks(missing)}, of another node")
            if damage := find_damage(self._storage, directory, held.table.entries, read_all=False):
                raise DamagedCheckpointError(f"{directory}/{damage}", step=entry.step, path=directory)
        except DamagedCheckpointError:
            self._read_manifest(entry)  # pruned meanwhile, it is not damaged
            raise
        return step

    def _read_manifest(self, entry: BranchEntry) -> bytes:
        """Return the manifest of a step that is here. Raises: StepGoneError."""
        directory = self._path_of(entry)
        try:
            manifest = self._storage.read(os.path.join(directory, layout.MANIFEST))
        except FileNotFoundError as error:
            raise StepGoneError(directory) from error
        if digest_manifest(manifest) != entry.digest:
            raise StepGoneError(directory)
        return manifest

    def _path_of(self, entry: BranchEntry) -> str:
        return os.path.join(self._root, layout.build_step_name(entry.step))

    def _begin(self, step: _Step, claim: Claim) -> None:
        """Write the file table, which tells what the files beside it are of, unless it is there."""
        if not self._is_begun(step) or self._mirror.read_or_none(f"{step.name}/{layout.MANIFEST}") not in (
            None,
            step.manifest,
        ):
            self._mirror.make_room(step.name, claim)
            self._remote.write(f"{step.name}/{layout.FILE_TABLE}", step.table)

    def _is_begun(self, step: _Step) -> bool:
        return self._mirror.read_or_none(f"{step.name}/{layout.FILE_TABLE}") == step.table

    def _take_away(self, step: _Step) -> None:
        for path in self._remote.list_files(step.name).keys() & {entry.path for entry in step.own}:
            self._remote.remove_tree(f"{step.name}/{path}")

    def _send_files(self, step: _Step, on_bytes: OnBytes | None) -> int:
        present = self._renew_notes(step, self._remote.list_files(step.name))
        missing = [entry for entry in step.own if present.get(entry.path) != entry.size_bytes]

        def put(entry: FileEntry) -> None:
            self._remote.put_file(os.path.join(step.directory, entry.path), f"{step.name}/{entry.path}", on_bytes)

        run_parallel(put, sorted(missing, key=lambda entry: -entry.size_bytes))
        return sum(entry.size_bytes for entry in missing)

    def _renew_notes(self, step: _Step, present: dict[str, int]) -> dict[str, int]:
        """Put a node's note there before its other files: it tells what these are of, as the file table does for all.

        Without it, or with one of a former save of this step, this node's files there may be of that save: they are taken
        away. Returns what is there then.
        """
        notes = {note.path: self._storage.read(os.path.join(step.directory, note.path)) for note in step.notes}
        if all(self._mirror.read_or_none(f"{step.name}/{path}") == data for path, data in notes.items()):
            return present
        self._take_away(step)
        for path, data in notes.items():
            self._remote.write(f"{step.name}/{path}", data)
        return self._remote.list_files(step.name)

    def _require_others_files(self, step: _Step, sent_bytes: int) -> None:
        """See that all is there that other nodes send. Raises: StepWaitsError."""
        if step.held.ranks is None:
            return
        present = self._remote.list_files(step.name)
        missing = [entry for entry in step.entries if present.get(entry.path) != entry.size_bytes]
        others = [entry for entry in step.entries if layout.is_node_note_name(entry.path) and entry not in step.own]
        missing += [entry for entry in others if entry not in missing and not self._has_note(step, entry)]
        if missing:
            ranks = {entry.rank for entry in missing}
            raise StepWaitsError(f"the files of {name_ranks(ranks)} are not there yet", sent_bytes)

    def _has_note(self, step: _Step, entry: FileEntry) -> bool:
        data = self._mirror.read_or_none(f"{step.name}/{entry.path}")
        return data is not None and describe_bytes(data, name=entry.path, rank=entry.rank) == entry
