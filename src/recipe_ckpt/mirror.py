"""The run's root on a remote: the same tree, written file by file, each step's manifest last.

A step is sent in this order: its `files.json` (which tells a later start what the files beside it are of), its files, its
`manifest.json`, then the mirror's `run.json` and tracker. So whatever a tracker names is whole, and what an upload that was
cut short has finished is not sent again. Nodes with roots of their own send their files between the first and the manifest.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from recipe_ckpt import layout
from recipe_ckpt.branches import Claim, require_own
from recipe_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    RemoteError,
    RemoteRefusedError,
)
from recipe_ckpt.manifest import (
    BranchEntry,
    FileEntry,
    FileTable,
    Manifest,
    RunRecord,
    describe_bytes,
    digest_manifest,
    is_in_ranges,
)
from recipe_ckpt.nodes import name_ranks
from recipe_ckpt.remote import OnBytes, Remote
from recipe_ckpt.retention import Retention, choose_deletions
from recipe_ckpt.storage import Storage
from recipe_ckpt.store import LEFT_BEHIND, rate
from recipe_ckpt.survey import Commit, Held, Survey, find_damage, list_steps, read_commit, read_held, survey
from recipe_ckpt.transfer import run_parallel

logger = logging.getLogger(__name__)


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


class Mirror:
    """One root's mirror, for the root's one writer. Every method raises RemoteError.

    Where nodes have roots of their own, each has its mirror at the same place. Rank 0's begins and publishes each step, the
    others send their parts in between. `is_alone` says that there are no others.
    """

    def __init__(self, remote: Remote, root: str, storage: Storage, *, is_alone: bool = True) -> None:
        self.remote = remote
        self._root = root
        self._storage = storage
        self._is_alone = is_alone

    @property
    def url(self) -> str:
        return self.remote.url

    def survey(self) -> Survey:
        return survey(self.remote, "")

    # --- sending

    def send(self, entry: BranchEntry, claim: Claim, on_bytes: OnBytes | None = None) -> int:
        """Upload what lies here of a committed step, and publish it; return how many bytes had to be sent.

        Raises:
            StepWaitsError: other nodes' files are not there yet.
            StepGoneError: the step on the disk is not this one any more.
            DamagedCheckpointError: the step on the disk is not what was saved.
            LineageError: another run's work, or newer work of this one, lies there.
        """
        try:
            step = self._read_step(entry)
            require_own(self._read_record(), claim, self.url)
            self._begin(step, claim)
            sent_bytes = self._send_files(step, on_bytes)
            self._require_others_files(step, sent_bytes)
            self._read_manifest(entry)  # saved again meanwhile, what was sent may be of both
            self.remote.write(f"{step.name}/{layout.MANIFEST}", step.manifest)
        except FileNotFoundError as error:
            raise StepGoneError(self._path_of(entry)) from error
        self._publish(entry, claim)
        return sent_bytes

    def send_part(self, entry: BranchEntry, on_bytes: OnBytes | None = None) -> int:
        """Upload this node's files of a committed step, which rank 0's node publishes; return how many bytes had to be sent.

        Raises:
            StepWaitsError: rank 0 has not begun to send it.
            StepGoneError, DamagedCheckpointError: as `send`.
        """
        try:
            step = self._read_step(entry)
            if self._is_begun(step):
                sent_bytes = self._send_files(step, on_bytes)
                self._read_manifest(entry)
                if self._is_begun(step):
                    return sent_bytes
                self._take_away(step)  # given up meanwhile
        except FileNotFoundError as error:
            self._read_manifest(entry)
            raise StepWaitsError("rank 0 sends it anew") from error
        raise StepWaitsError("rank 0 has not begun to send it")

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
        if not self._is_begun(step) or self._read_or_none(f"{step.name}/{layout.MANIFEST}") not in (None, step.manifest):
            self._make_room(step.name, claim)
            self.remote.write(f"{step.name}/{layout.FILE_TABLE}", step.table)

    def _is_begun(self, step: _Step) -> bool:
        return self._read_or_none(f"{step.name}/{layout.FILE_TABLE}") == step.table

    def _take_away(self, step: _Step) -> None:
        for path in self.remote.list_files(step.name).keys() & {entry.path for entry in step.own}:
            self.remote.remove_tree(f"{step.name}/{path}")

    def _send_files(self, step: _Step, on_bytes: OnBytes | None) -> int:
        present = self._renew_notes(step, self.remote.list_files(step.name))
        missing = [entry for entry in step.own if present.get(entry.path) != entry.size_bytes]

        def put(entry: FileEntry) -> None:
            self.remote.put_file(os.path.join(step.directory, entry.path), f"{step.name}/{entry.path}", on_bytes)

        run_parallel(put, sorted(missing, key=lambda entry: -entry.size_bytes))
        return sum(entry.size_bytes for entry in missing)

    def _renew_notes(self, step: _Step, present: dict[str, int]) -> dict[str, int]:
        """Put a node's note there before its other files: it tells what these are of, as the file table does for all.

        Without it, or with one of a former save of this step, this node's files there may be of that save: they are taken
        away. Returns what is there then.
        """
        notes = {note.path: self._storage.read(os.path.join(step.directory, note.path)) for note in step.notes}
        if all(self._read_or_none(f"{step.name}/{path}") == data for path, data in notes.items()):
            return present
        self._take_away(step)
        for path, data in notes.items():
            self.remote.write(f"{step.name}/{path}", data)
        return self.remote.list_files(step.name)

    def _require_others_files(self, step: _Step, sent_bytes: int) -> None:
        """See that all is there that other nodes send. Raises: StepWaitsError."""
        if step.held.ranks is None:
            return
        present = self.remote.list_files(step.name)
        missing = [entry for entry in step.entries if present.get(entry.path) != entry.size_bytes]
        others = [entry for entry in step.entries if layout.is_node_note_name(entry.path) and entry not in step.own]
        missing += [entry for entry in others if entry not in missing and not self._has_note(step, entry)]
        if missing:
            ranks = {entry.rank for entry in missing}
            raise StepWaitsError(f"the files of {name_ranks(ranks)} are not there yet", sent_bytes)

    def _has_note(self, step: _Step, entry: FileEntry) -> bool:
        data = self._read_or_none(f"{step.name}/{entry.path}")
        return data is not None and describe_bytes(data, name=entry.path, rank=entry.rank) == entry

    def _make_room(self, name: str, claim: Claim) -> None:
        """Take away what has the name of a step that is to be sent, after nothing names it any more."""
        step = layout.parse_step_name(name)
        assert step is not None
        self._withdraw([step])
        present = {entry.name for entry in self.remote.list_dir(name)}
        if not present:
            return
        if self._is_former_self(name, present, claim):
            self._remove_step(name)
        elif self.remote.can_rename:
            moved = self._move_aside(name, f"{layout.ARCHIVE_DIR}/{LEFT_BEHIND}")
            logger.warning("%s/%s: this run does not descend from it; it lies in %s now", self.url, name, moved)
        elif layout.find_foreign_problem(present) is None:
            raise RemoteRefusedError(
                f"{self.url}/{name}: is not of this component, and an object store can't move it aside. Move it elsewhere, or"
                " choose another checkpoint.default_hdfs_dir",
                path=self.url,
            )
        else:
            self._remove_step(name)

    def _is_former_self(self, name: str, present: Collection[str], claim: Claim) -> bool:
        """Say whether what has a step's name is an upload that did not end, or a step that this run descends from."""
        if layout.MANIFEST not in present:
            return layout.FILE_TABLE in present
        try:
            return is_in_ranges(claim.origin.ancestors, read_commit(self.remote, name).manifest.sequence)
        except RemoteError:
            raise
        except CheckpointError:
            return False

    def _publish(self, entry: BranchEntry, claim: Claim) -> None:
        """Name a step that is whole on the remote in `run.json` and in the tracker."""
        record = self._read_record()
        require_own(record, claim, self.url)
        published = [old for old in record.branch if claim.owns(old)] if record else []
        whole = {old.digest for old in published} | {entry.digest}
        by_digest = {old.digest: old for old in (*published, *claim.origin.branch) if old.digest in whole}
        steps: dict[int, BranchEntry] = {}
        for old in sorted(by_digest.values(), key=lambda item: -item.sequence):
            if old in claim.origin.branch or is_in_ranges(claim.origin.ancestors, old.sequence):
                steps.setdefault(old.step, old)
        self._write_record(RunRecord(claim.origin.lineage, claim.last_sequence, tuple(steps.values())))

    # --- removing

    def wants(
        self, entry: BranchEntry, waiting: Collection[BranchEntry], retention: Retention, *, pinned: Collection[int]
    ) -> bool:
        """Say whether retention would keep a step that is sent now, once all that wait are there."""
        record = self._read_record()
        steps = {known.step: known for known in (*(record.branch if record else ()), *waiting, entry)}
        kept = [rate(known, retention, True) for known in steps.values()]
        return entry.step not in choose_deletions(kept, retention, pinned=pinned)

    def prune(self, retention: Retention, waiting: Collection[int], *, pinned: Collection[int]) -> list[int]:
        """Delete published steps that retention no longer keeps, each one's manifest first; return them.

        What uploads that were given up have left goes, too: not that of steps that wait.
        """
        record = self._read_record()
        if record is None:
            return []
        kept = [rate(entry, retention, True) for entry in record.branch]
        doomed = choose_deletions(kept, retention, pinned=pinned)
        if doomed:
            self._withdraw(doomed)
        published = {entry.step for entry in record.branch}
        for step in (*doomed, *self._find_remains(published.union(waiting))):
            self._remove_step(layout.build_step_name(step))
        return doomed

    def _find_remains(self, wanted: Collection[int]) -> list[int]:
        """Return the steps there that were begun and not finished, but for those that are wanted."""
        remains = []
        for step in list_steps(self.remote, "") - set(wanted):
            present = {entry.name for entry in self.remote.list_dir(layout.build_step_name(step))}
            if not present or (layout.FILE_TABLE in present and layout.MANIFEST not in present):
                remains.append(step)
        return remains

    def find_strangers(self, found: Survey) -> dict[int, str]:
        """Return the steps there that are no checkpoints of ours, with the reasons; not uploads that did not end."""
        strangers = dict.fromkeys(found.foreign, f"unverified: no {layout.MANIFEST}")
        for step, reason in found.refused.items():
            present = {entry.name for entry in self.remote.list_dir(layout.build_step_name(step))}
            if present and (layout.MANIFEST in present or layout.FILE_TABLE not in present):
                strangers[step] = reason
        return strangers

    def archive(self, found: Survey) -> str | None:
        """Move all of a run into `archive/<lineage>`; return that place, None if there is nothing.

        The tracker goes first, since it may only name what is there, and `run.json`, which knows the lineage, last. Cut
        short, it is ended by the next call.

        Raises:
            ConfigError: an object store, where that would copy every byte.
        """
        steps = [layout.build_step_name(step) for step in sorted(list_steps(self.remote, ""))]
        present = {entry.name for entry in self.remote.list_dir("")}
        names = [name for name in (layout.TRACKER, *steps, layout.RUN_RECORD) if name in present]
        if not names:
            return None
        if not self.remote.can_rename:
            raise ConfigError(
                "checkpoint.default_hdfs_dir",
                self.url,
                "an empty place for a new run, since an object store can't move the former run's checkpoints aside",
                "Choose another one, or another trainer.experiment_name.",
            )
        folder = f"{layout.ARCHIVE_DIR}/{found.lineage or 'unknown'}"
        for name in names:
            self._move_aside(name, folder)
        return f"{self.url}/{folder}"

    def _withdraw(self, steps: Collection[int]) -> None:
        """Stop naming steps: before anything of them is taken away."""
        record = self._read_record()
        if record is not None and any(entry.step in steps for entry in record.branch):
            left = tuple(entry for entry in record.branch if entry.step not in steps)
            self._write_record(replace(record, branch=left))

    def _remove_step(self, name: str) -> None:
        self.remote.remove_tree(f"{name}/{layout.MANIFEST}")
        self.remote.remove_tree(name)

    def _move_aside(self, name: str, folder: str) -> str:
        target = f"{folder}/{name}"
        if name in {entry.name for entry in self.remote.list_dir(folder)}:
            target = f"{target}.{uuid.uuid4().hex[:8]}"
        self.remote.rename(name, target)
        return target

    # --- records

    def _read_record(self) -> RunRecord | None:
        try:
            return RunRecord.decode(self.remote.read(layout.RUN_RECORD), f"{self.url}/{layout.RUN_RECORD}")
        except (FileNotFoundError, DamagedCheckpointError):
            found = self.survey()  # from the manifests
            return RunRecord(found.lineage, found.last_sequence, found.branch) if found.lineage else None

    def _write_record(self, record: RunRecord) -> None:
        self.remote.write(layout.RUN_RECORD, record.encode())
        if record.branch:
            self.remote.write(layout.TRACKER, str(record.branch[0].step).encode())
        else:
            self.remote.remove_tree(layout.TRACKER)

    def _read_or_none(self, path: str) -> bytes | None:
        try:
            return self.remote.read(path)
        except FileNotFoundError:
            return None
