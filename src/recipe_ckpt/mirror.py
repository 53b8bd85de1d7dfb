"""The run's root on a remote: what lies there, what counts, and what goes when. How a step gets there: `step_sender`."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection
from dataclasses import replace

from recipe_ckpt import layout
from recipe_ckpt.branches import Claim, require_own
from recipe_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    RemoteError,
    RemoteRefusedError,
)
from recipe_ckpt.layout import LEFT_BEHIND
from recipe_ckpt.manifest import (
    BranchEntry,
    RunRecord,
    is_in_ranges,
)
from recipe_ckpt.remote import Remote
from recipe_ckpt.retention import Retention, choose_deletions, rate
from recipe_ckpt.survey import Survey, list_steps, read_commit, survey

logger = logging.getLogger(__name__)


class Mirror:
    """The steps and records on one remote. Every method raises RemoteError; what it changes is rank 0's to change."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    @property
    def url(self) -> str:
        return self.remote.url

    def survey(self) -> Survey:
        return survey(self.remote, "")

    # --- publishing

    def require_own(self, claim: Claim) -> None:
        """Refuse to go on over what is not this run's. Raises: LineageError."""
        require_own(self._read_record(), claim, self.url)

    def make_room(self, name: str, claim: Claim) -> None:
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

    def publish(self, entry: BranchEntry, claim: Claim) -> None:
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

    def read_or_none(self, path: str) -> bytes | None:
        try:
            return self.remote.read(path)
        except FileNotFoundError:
            return None
