"""One root, changed by its one writer: stage, commit, admit a download, delete."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from recipe_ckpt import layout, recovery
from recipe_ckpt.directories import Directories
from recipe_ckpt.errors import CheckpointError, SaveFailedError
from recipe_ckpt.manifest import BranchEntry, FileEntry, RunRecord, digest_manifest
from recipe_ckpt.retention import Retention, choose_deletions, rate
from recipe_ckpt.sealing import Origin, Sealed, Staging, build_lineage, seal
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import Commit, Survey, list_pins, list_steps, read_commit, verify

logger = logging.getLogger(__name__)


class Store:
    """A root's checkpoints, for its one writer: what the next commit descends from, and each change of the root."""

    def __init__(self, root: str, storage: Storage) -> None:
        self.root = root
        self.storage = storage
        self.origin = Origin(lineage=build_lineage())
        self._dirs = Directories(root, storage)
        self._last_sequence = 0
        self._left_behind: dict[int, BranchEntry] = {}
        self._are_pointers_behind = False

    def path_of(self, step: int) -> str:
        return self._dirs.path_of(step)

    @property
    def last_sequence(self) -> int:
        """The highest sequence ever given out."""
        return self._last_sequence

    # --- before the first save

    def list_unfinished(self) -> tuple[dict[str, str], dict[str, str]]:
        """See `recovery.list_unfinished`."""
        return recovery.list_unfinished(self._dirs)

    def read_archiving(self) -> str | None:
        """Return the folder's name of an archiving that was begun."""
        return self._dirs.read_archiving()

    def list_archives(self) -> list[str]:
        return self._dirs.list_archives()

    def recover(self, finish: Collection[str]) -> list[str]:
        """See `recovery.recover`."""
        return recovery.recover(self._dirs, finish)

    def archive(self, lineage: str | None) -> str | None:
        """Start over: see `Directories.archive_run`."""
        return self._dirs.archive_run(lineage)

    def admit(self, staging: Staging) -> None:
        """Put a step that was downloaded into staging in its place, as a commit does. Durable on return.

        It becomes the root's newest if its sequence is the highest; what has its name makes room.
        """
        self._dirs.mark_commit(staging)
        self._dirs.publish_copy(staging)
        self._left_behind.pop(staging.step, None)
        self._dirs.sync_publication()
        recovery.roll_forward(self._dirs, staging.step)
        self._clear(staging)

    def adopt(self, found: Survey, origin: Origin, last_sequence: int) -> None:
        """Continue as `origin`: the next commit gets its lineage and parent, and the next sequence."""
        self.origin = origin
        self._last_sequence = last_sequence
        on_branch = {entry.sequence for entry in origin.branch}
        known = [*found.branch, *(commit.entry() for commit in found.others.values())]
        self._left_behind = {entry.step: entry for entry in known if entry.sequence not in on_branch}

    # --- saving

    def begin(self, staging: Staging) -> None:
        """Make room for a new staging directory: what an earlier, failed save left is put in order first, then removed."""
        recovery.put_back_displaced(self._dirs)
        if self._are_pointers_behind:  # of a commit whose last steps failed; its mark in staging goes now
            self._dirs.sync_publication()
            self._write_pointers()
        self._dirs.clear_staging(staging)
        self.storage.make_dirs(staging.path)

    def commit(
        self,
        staging: Staging,
        entries: Iterable[FileEntry],
        facts: Mapping[str, Any],
        *,
        check_lease: Callable[[], None],
    ) -> Commit:
        """Publish a staging directory whose files are all on disk. Durable on return.

        `facts` are the manifest's fields that a store can't know. An existing step of the same number is displaced, never
        overwritten.
        """
        sealed = self.seal(staging.step, entries, facts)
        self.prepare(staging, sealed)
        check_lease()
        self._publish(staging)
        commit = self._move_on(sealed)  # it exists from here on, even if what follows fails
        self._dirs.sync_publication()
        self._write_pointers()
        self._clear(staging)
        return commit

    # The same on several nodes, each with a store of its own: `seal` on one of them, then on all `prepare`, `publish` when
    # all have, `settle` when all have. Until then `undo` takes it back.

    def seal(self, step: int, entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> Sealed:
        """Make the file table and the manifest of the next commit. Writes nothing."""
        # Used up from here on, whatever happens: a save that fails may leave its manifest behind.
        self._last_sequence += 1
        return seal(step, entries, facts, origin=self.origin, sequence=self._last_sequence, parent=self._find_parent(step))

    def prepare(self, staging: Staging, sealed: Sealed) -> None:
        """Write the file table and the manifest into staging, last and in this order. Durable on return.

        Raises:
            SaveFailedError: what lies there is not what the ranks wrote.
        """
        folders = [os.path.join(staging.path, folder) for folder in sealed.folders]
        for folder in filter(self.storage.exists, folders):  # on another node's disk lie others
            self.storage.sync_dir(folder)
        records = ((layout.FILE_TABLE, sealed.table_data), (layout.MANIFEST, sealed.manifest_data))
        for name, content in records:
            self.storage.write_file(os.path.join(staging.path, name), [content], name=name, rank=0)
        self.storage.sync_dir(staging.path)
        if damage := verify(self.storage, staging.path, read_all=False):
            raise SaveFailedError(f"{staging.path}: changed while it was saved: {damage}", step=staging.step, path=self.root)

    def publish(self, staging: Staging) -> None:
        """Rename what is prepared to its final name. Durable on return."""
        self._publish(staging)
        self._dirs.sync_publication()

    def settle(self, staging: Staging, sealed: Sealed) -> None:
        """Name what is published in `run.json` and the tracker, and forget what it displaced. Durable on return."""
        self._move_on(sealed)
        self._write_pointers()
        self._clear(staging)

    def undo(self, name: str) -> None:
        """See `recovery.undo`."""
        recovery.undo(self._dirs, name)

    def abandon(self, staging: Staging) -> None:
        """See `recovery.abandon`."""
        recovery.abandon(self._dirs, staging)

    def _publish(self, staging: Staging) -> None:
        self._dirs.mark_commit(staging)
        self._dirs.publish(staging)
        self._left_behind.pop(staging.step, None)

    def _find_parent(self, step: int) -> str | None:
        """A step saved again takes the parent of the one that it displaces: that one's manifest will be gone."""
        if self.origin.branch and self.origin.branch[0].step == step:
            try:
                return read_commit(self.storage, self.path_of(step)).manifest.parent
            except (CheckpointError, OSError):
                return None
        return self.origin.parent

    def _move_on(self, sealed: Sealed) -> Commit:
        """Make a published step the one that the next commit descends from."""
        self._are_pointers_behind = True
        manifest = sealed.manifest
        commit = Commit(self.path_of(manifest.step), digest_manifest(sealed.manifest_data), manifest)
        self._last_sequence = max(self._last_sequence, manifest.sequence)
        self.origin = self.origin.after(commit.entry())
        return commit

    def _write_pointers(self) -> None:
        present = list_steps(self.storage, self.root)
        branch = tuple(entry for entry in self.origin.branch if entry.step in present)
        self._dirs.write_record(RunRecord(self.origin.lineage, self._last_sequence, branch))
        self._are_pointers_behind = False

    def _clear(self, saved: Staging) -> None:
        self._dirs.clear_staging(saved)
        self._dirs.clear_trash()

    # --- deleting

    def list_committed(self) -> set[int]:
        return {step for step in list_steps(self.storage, self.root) if self._dirs.is_committed(step)}

    def list_pins(self) -> set[int]:
        return list_pins(self.storage, self.root)

    def choose_deletions(self, retention: Retention, *, present: Collection[int], pinned: Collection[int]) -> list[int]:
        """Return the steps that retention no longer keeps."""
        known = [(entry, True) for entry in self.origin.branch]
        known += [(entry, False) for entry in self._left_behind.values()]
        kept = [rate(entry, retention, on_branch) for entry, on_branch in known if entry.step in present]
        return choose_deletions(kept, retention, pinned=pinned)

    def delete(self, steps: Iterable[int]) -> list[int]:
        """Delete steps, and return those that are gone. A failure is a warning, tried again next time.

        What a rewind left behind is moved into the archive instead: it is newer than what it would make room for.
        """
        deleted = []
        for step in steps:
            try:
                self._delete(step)
                deleted.append(step)
            except OSError as error:
                logger.warning("%s: could not be deleted, will be tried again: %s", self.path_of(step), error)
        return deleted

    def _delete(self, step: int) -> None:
        if step in self._left_behind:
            self._dirs.archive_step(step)
            self._left_behind.pop(step)
            self.storage.sync_dir(self.root)
        else:
            self._dirs.delete_step(step)
