"""The run's root on a remote: the same tree, written file by file, each step's manifest last.

A step is sent in this order: its `files.json` (which tells a later start what the files beside it are of), its files, its
`manifest.json`, then the mirror's `run.json` and tracker. So whatever a tracker names is whole, and what an upload that was
cut short has finished is not sent again.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Collection
from dataclasses import dataclass, replace

from recipe_ckpt import layout
from recipe_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    LineageError,
    RemoteError,
    RemoteRefusedError,
)
from recipe_ckpt.manifest import (
    BranchEntry,
    FileEntry,
    FileTable,
    Manifest,
    RunRecord,
    digest_bytes,
    digest_manifest,
    is_in_ranges,
)
from recipe_ckpt.remote import OnBytes, Remote
from recipe_ckpt.retention import Retention, choose_deletions
from recipe_ckpt.storage import Storage
from recipe_ckpt.store import LEFT_BEHIND, Origin, rate
from recipe_ckpt.survey import Commit, Survey, find_damage, list_steps, read_commit, select_ancestors, survey
from recipe_ckpt.transfer import run_parallel

logger = logging.getLogger(__name__)


class StepGoneError(Exception):
    """A step that was to be sent is not on the disk any more: pruned, or saved anew."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What this run may publish: its branch, and the digests of all commits that it knows of."""

    origin: Origin
    last_sequence: int
    known: frozenset[str]

    def owns(self, entry: BranchEntry) -> bool:
        return entry.digest in self.known or is_in_ranges(self.origin.ancestors, entry.sequence)


class Mirror:
    """One root's mirror, for the root's one writer. Every method raises RemoteError."""

    def __init__(self, remote: Remote, root: str, storage: Storage) -> None:
        self.remote = remote
        self._root = root
        self._storage = storage

    @property
    def url(self) -> str:
        return self.remote.url

    def survey(self) -> Survey:
        return survey(self.remote, "")

    # --- sending

    def send(self, entry: BranchEntry, claim: Claim, on_bytes: OnBytes | None = None) -> int:
        """Upload a committed step and publish it; return how many bytes had to be sent.

        Raises:
            StepGoneError: the step on the disk is not this one any more.
            DamagedCheckpointError: the step on the disk is not what was saved.
            LineageError: another run's work, or newer work of this one, lies there.
        """
        name = layout.build_step_name(entry.step)
        directory = os.path.join(self._root, name)
        try:
            manifest, table = self._read_step(directory, entry)
            if damage := find_damage(self._storage, directory, FileTable.decode(table, directory).entries, read_all=False):
                self._read_step(directory, entry)
                raise DamagedCheckpointError(f"{directory}/{damage}", step=entry.step, path=directory)
            require_own(self._read_record(), claim, self.url)
            sent_bytes = self._send_files(directory, manifest, table, claim, on_bytes)
            self._read_step(directory, entry)  # saved again meanwhile, what was sent may be of both
            self.remote.write(f"{name}/{layout.MANIFEST}", manifest)
        except FileNotFoundError as error:
            raise StepGoneError(directory) from error
        self._publish(entry, claim)
        return sent_bytes

    def _read_step(self, directory: str, entry: BranchEntry) -> tuple[bytes, bytes]:
        manifest = self._storage.read(os.path.join(directory, layout.MANIFEST))
        if digest_manifest(manifest) != entry.digest:
            raise StepGoneError(directory)
        table = self._storage.read(path := os.path.join(directory, layout.FILE_TABLE))
        if digest_bytes(table).hex() != Manifest.decode(manifest, directory).files_digest:
            raise DamagedCheckpointError(f"{path}: changed since the commit", step=entry.step, path=path)
        return manifest, table

    def _send_files(self, directory: str, manifest: bytes, table: bytes, claim: Claim, on_bytes: OnBytes | None) -> int:
        name = os.path.basename(directory)
        was_begun = self._read_or_none(f"{name}/{layout.FILE_TABLE}") == table
        if not was_begun or self._read_or_none(f"{name}/{layout.MANIFEST}") not in (None, manifest):
            self._make_room(name, claim)
            self.remote.write(f"{name}/{layout.FILE_TABLE}", table)
        present = self.remote.list_files(name)
        entries = FileTable.decode(table, directory).entries
        missing = [entry for entry in entries if present.get(entry.path) != entry.size_bytes]

        def put(entry: FileEntry) -> None:
            self.remote.put_file(os.path.join(directory, entry.path), f"{name}/{entry.path}", on_bytes)

        run_parallel(put, sorted(missing, key=lambda entry: -entry.size_bytes))
        return sum(entry.size_bytes for entry in missing)

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

    def prune(self, retention: Retention, *, pinned: Collection[int]) -> list[int]:
        """Delete published steps that retention no longer keeps, each one's manifest first; return them."""
        record = self._read_record()
        if record is None:
            return []
        kept = [rate(entry, retention, True) for entry in record.branch]
        doomed = choose_deletions(kept, retention, pinned=pinned)
        if doomed:
            self._withdraw(doomed)
        for step in doomed:
            self._remove_step(layout.build_step_name(step))
        return doomed

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


def require_own(record: RunRecord | None, claim: Claim, url: str) -> None:
    """Refuse to publish over what is not this run's.

    Raises:
        LineageError: naming both.
    """
    if record is None:
        return
    if record.lineage != claim.origin.lineage:
        raise lineages_differ(url, record.lineage, claim.origin.lineage)
    strange = [entry for entry in record.branch if not claim.owns(entry)]
    if strange:
        raise LineageError(
            f"{url}: holds step {strange[0].step} (sequence {strange[0].sequence}), which this process did not know of when"
            " it started: another process of this run writes there, or did while the mirror could not be reached. Nothing is"
            " published over it. Start again to continue from it, or choose another checkpoint.default_hdfs_dir",
            step=strange[0].step,
            path=url,
        )


def lineages_differ(url: str, theirs: str | None, ours: str | None) -> LineageError:
    return LineageError(
        f"checkpoint.default_hdfs_dir: {url} holds the run {theirs}, the local root the run {ours}; allowed is a mirror of"
        " the same run. Choose another checkpoint.default_hdfs_dir or trainer.experiment_name, empty the local root to"
        " continue the mirror's run, or start over with checkpoint=fresh, which moves both into archive/",
        path=url,
    )


def join_surveys(here: Survey, there: Survey, url: str, newest_here: Commit | None, newest_there: Commit | None) -> Survey:
    """Take a root and its mirror as one set: the higher sequence is the newest, and its branch the current one.

    `newest_*` are the first readable commits of each one's branch. The result's directories may lie here, there, or both.

    Raises:
        LineageError: they are of different runs.
    """
    if not there.branch:
        return here
    if here.branch and here.lineage != there.lineage:
        raise lineages_differ(url, there.lineage, here.lineage)
    is_newest_there = not here.branch or there.branch[0].sequence > here.branch[0].sequence
    first, second, newest = (there, here, newest_there) if is_newest_there else (here, there, newest_here)
    steps = {entry.step: entry for entry in first.branch}
    if newest is not None:
        known = [*second.branch, *(commit.entry() for commit in second.others.values())]
        for entry in select_ancestors(known, newest.manifest.ancestors, replaced=newest.manifest.step):
            steps.setdefault(entry.step, entry)
    branch = tuple(sorted(steps.values(), key=lambda entry: -entry.sequence))
    joined = replace(here, lineage=first.lineage, branch=branch)
    joined.last_sequence = max(here.last_sequence, there.last_sequence)
    on_branch = {entry.digest for entry in branch}
    joined.others = {step: commit for step, commit in here.others.items() if commit.digest not in on_branch}
    for entry in here.branch:
        if entry.digest not in on_branch:
            joined.notes.append(f"step {entry.step} is of a branch that the mirror's newest does not descend from")
    has_edited_tracker = bool(here.branch) and here.tracker not in (None, here.branch[0].step)
    if is_newest_there and not has_edited_tracker:
        joined.tracker, joined.tracked = branch[0].step, None
    return joined
