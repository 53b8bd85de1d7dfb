"""One root, changed by its one writer: stage, commit, delete, archive, and recovery from being killed in any of these."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Self

from recipe_ckpt import layout
from recipe_ckpt.errors import CheckpointError
from recipe_ckpt.manifest import (
    BranchEntry,
    Continues,
    FileEntry,
    FileTable,
    Manifest,
    RunRecord,
    digest_bytes,
    digest_manifest,
    extend_ranges,
    is_in_ranges,
)
from recipe_ckpt.retention import Kept, Retention, choose_deletions
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import Commit, Survey, list_pins, list_steps, read_commit, select_ancestors, survey, verify

logger = logging.getLogger(__name__)

LEFT_BEHIND = "left-behind"


@dataclass(frozen=True, slots=True)
class Staging:
    """A directory in which one save is being written. `uid` is hex, and no other save of this root has it."""

    path: str
    step: int
    uid: str

    @classmethod
    def of(cls, root: str, step: int, uid: str) -> Staging:
        return cls(os.path.join(root, layout.STAGING_DIR, layout.build_staging_name(step, uid)), step, uid)


@dataclass(frozen=True, slots=True)
class Origin:
    """What the next commit descends from: its lineage, its parent, and all sequences of its branch."""

    lineage: str
    parent: str | None = None
    ancestors: tuple[tuple[int, int], ...] = ()
    branch: tuple[BranchEntry, ...] = ()
    continues: Continues | None = None

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


class Store:
    """A root's checkpoints, for its one writer."""

    def __init__(self, root: str, storage: Storage) -> None:
        self.root = root
        self.storage = storage
        self.origin = Origin(lineage=build_lineage())
        self._last_sequence = 0
        self._left_behind: dict[int, BranchEntry] = {}
        self._are_pointers_behind = False

    def path_of(self, step: int) -> str:
        return os.path.join(self.root, layout.build_step_name(step))

    @property
    def last_sequence(self) -> int:
        """The highest sequence ever given out."""
        return self._last_sequence

    # --- where the next commit comes from

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
        self._put_back_displaced()
        if self._are_pointers_behind:  # of a commit whose last steps failed; its mark in staging goes now
            self._sync_publication()
            self._write_pointers()
        self._clear(layout.STAGING_DIR, but=os.path.basename(staging.path))
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
        self._mark_commit(staging)
        self._publish(staging)
        commit = self._move_on(sealed)  # it exists from here on, even if what follows fails
        self._sync_publication()
        self._write_pointers()
        self._clear(layout.STAGING_DIR)
        self._clear(layout.TRASH_DIR)
        return commit

    # The same on several nodes, each with a store of its own: `seal` on one of them, then on all `prepare`, `publish` when
    # all have, `settle` when all have. Until then `undo` takes it back.

    def seal(self, step: int, entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> Sealed:
        """Make the file table and the manifest of the next commit. Writes nothing."""
        table = FileTable.of(entries)
        files_data = table.encode()
        # Used up from here on, whatever happens: a save that fails may leave its manifest behind.
        self._last_sequence += 1
        manifest = Manifest(
            step=step,
            sequence=self._last_sequence,
            lineage=self.origin.lineage,
            parent=self._find_parent(step),
            ancestors=self.origin.ancestors,
            continues=self.origin.continues,
            created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            files_digest=digest_bytes(files_data).hex(),
            **facts,
        )
        folders = {str(folder) for entry in table.entries for folder in PurePosixPath(entry.path).parents}
        return Sealed(files_data, manifest.encode(), tuple(sorted(folders)))

    def prepare(self, staging: Staging, sealed: Sealed) -> None:
        """Write the file table and the manifest into staging, last and in this order. Durable on return."""
        for folder in sealed.folders:
            self.storage.sync_dir(os.path.join(staging.path, folder))
        records = ((layout.FILE_TABLE, sealed.table_data), (layout.MANIFEST, sealed.manifest_data))
        for name, content in records:
            self.storage.write_file(os.path.join(staging.path, name), [content], name=name, rank=0)
        self.storage.sync_dir(staging.path)

    def publish(self, staging: Staging) -> None:
        """Rename what is prepared to its final name. Durable on return."""
        self._mark_commit(staging)
        self._publish(staging)
        self._sync_publication()

    def settle(self, sealed: Sealed) -> None:
        """Name what is published in `run.json` and the tracker, and forget what it displaced. Durable on return."""
        self._move_on(sealed)
        self._write_pointers()
        self._clear(layout.STAGING_DIR)
        self._clear(layout.TRASH_DIR)

    def undo(self, name: str) -> None:
        """Take back what was prepared or published from the staging directory of that name, if anything was."""
        path = os.path.join(self._inside(layout.STAGING_DIR), name)
        marker = path + layout.COMMITTING_SUFFIX
        if self._is_published(name):
            step, uid = layout.parse_staging_name(name) or (0, "")
            torn = os.path.join(self._inside(layout.TRASH_DIR), f"{uid}.torn")
            self.storage.make_dirs(self._inside(layout.TRASH_DIR))
            self.storage.rename(self.path_of(step), torn)
            self._put_back_displaced()
            self.storage.sync_dir(self.root)
            self.storage.remove_file(marker)
            self.storage.remove_tree(torn)
        elif self.storage.exists(path):
            if self.storage.exists(marker):
                self.storage.remove_file(marker)
            self.storage.remove_tree(path)

    def abandon(self, staging: Staging) -> None:
        """Remove what a failed save wrote, and put back what it had displaced; if that fails, the next start does it."""
        displaced = os.path.join(self._inside(layout.TRASH_DIR), layout.build_displaced_name(staging.step, staging.uid))
        try:
            if self.storage.exists(displaced) and not self.storage.exists(self.path_of(staging.step)):
                self.storage.rename(displaced, self.path_of(staging.step))
                self.storage.sync_dir(self.root)
            if self.storage.exists(staging.path):
                if self.storage.exists(marker := staging.path + layout.COMMITTING_SUFFIX):
                    self.storage.remove_file(marker)  # or a tracker that the user set would be taken for this commit's
                self.storage.remove_tree(staging.path)
        except OSError as error:
            logger.warning("%s: could not be removed: %s", staging.path, error)

    def admit(self, staging: Staging) -> None:
        """Put a step that was downloaded into staging in its place, as a commit does. Durable on return.

        It becomes the root's newest if its sequence is the highest; what has its name makes room.
        """
        self._mark_commit(staging)
        target = self.path_of(staging.step)
        if self.storage.exists(target):
            if self._is_broken_copy(target, staging):
                self._displace_into_trash(target, staging)
            else:
                self._move_into_archive(staging.step)
        self.storage.rename(staging.path, target)
        self._sync_publication()
        self._roll_forward(staging.step)
        self._clear(layout.STAGING_DIR)
        self._clear(layout.TRASH_DIR)

    def list_committed(self) -> set[int]:
        return {step for step in list_steps(self.storage, self.root) if self._is_committed(step)}

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

    # --- starting over

    def archive(self, lineage: str | None) -> str | None:
        """Rename all that the run left here into `archive/<lineage>/`; return that folder, None if there was nothing.

        An intent file makes it all or nothing: recovery ends what was begun.
        """
        if not self._list_run_names():
            return None
        target = os.path.join(self._inside(layout.ARCHIVE_DIR), lineage or f"unknown-{uuid.uuid4().hex[:8]}")
        self.storage.replace_file(self._inside(layout.ARCHIVING), os.path.basename(target).encode())
        self.finish_archive()
        return target

    def finish_archive(self) -> str | None:
        """Carry out the archiving that an intent file names; return its folder, None without one."""
        name = self.read_archiving()
        if name is None:
            return None
        target = os.path.join(self._inside(layout.ARCHIVE_DIR), name)
        self.storage.make_dirs(target)
        for name in self._list_run_names():
            self._move_aside(name, target)
        self.storage.sync_dir(target)
        self.storage.sync_dir(self.root)
        self.storage.remove_file(self._inside(layout.ARCHIVING))
        return target

    # --- recovery

    def list_unfinished(self) -> tuple[dict[str, str], dict[str, str]]:
        """Name the staging directories of saves that are whole, with the digests of their manifests.

        Returns those that are still to be renamed, and those that were and may lack what comes after. Reads only.
        """
        prepared, published = {}, {}
        staged = self._list_staging()
        for name in staged:
            path = os.path.join(self._inside(layout.STAGING_DIR), name)
            published_name = name.removesuffix(layout.COMMITTING_SUFFIX)
            if layout.parse_staging_name(name) and verify(self.storage, path, read_all=False) is None:
                prepared[name] = read_commit(self.storage, path).digest
            elif published_name != name and published_name not in staged and self._is_published(published_name):
                published[published_name] = self.storage.read(path).decode()
        return prepared, published

    def list_archives(self) -> list[str]:
        return [entry.name for entry in self.storage.list_dir(self._inside(layout.ARCHIVE_DIR)) if entry.is_dir]

    def read_archiving(self) -> str | None:
        """Return the folder's name of an archiving that was begun."""
        try:
            return self.storage.read(self._inside(layout.ARCHIVING)).decode()
        except FileNotFoundError:
            return None

    def recover(self, finish: Collection[str]) -> list[str]:
        """Finish these of the unfinished saves, and undo all else that a killed process left; return what was done.

        Called under the lease, before anything is decided from what lies here.
        """
        done = []
        if archived := self.finish_archive():
            done.append(f"finished moving the former run to {archived}")
        self._remove_temporaries()
        for name in self._list_staging():
            parsed = layout.parse_staging_name(name)
            if parsed and name in finish and self._finish_commit(name, *parsed):
                done.append(f"finished the interrupted commit of step {parsed[0]}")
        for name in self._list_staging():
            base = name.removesuffix(layout.COMMITTING_SUFFIX)
            parsed = layout.parse_staging_name(base)
            if parsed and base not in finish and base != name and self._is_published(base):
                self.undo(base)
                done.append(f"took step {parsed[0]} back: its save did not finish on every node")
        done += self._put_back_displaced()
        staged = self._list_staging()
        for name in staged:
            # A mark without its staging is of a commit that was renamed into place: the pointers may lag behind that one.
            published = name.removesuffix(layout.COMMITTING_SUFFIX)
            parsed = layout.parse_staging_name(published)
            if parsed and published not in staged and self._roll_forward(parsed[0]):
                done.append(f"made step {parsed[0]} the newest: its commit was interrupted when it was whole")
        self._clear(layout.STAGING_DIR)
        self._clear(layout.TRASH_DIR)
        return done

    def _list_staging(self) -> list[str]:
        return [entry.name for entry in self.storage.list_dir(self._inside(layout.STAGING_DIR))]

    def _finish_commit(self, name: str, step: int, uid: str) -> bool:
        path = os.path.join(self._inside(layout.STAGING_DIR), name)
        if not self.storage.exists(os.path.join(path, layout.MANIFEST)):
            return False
        if verify(self.storage, path, read_all=False) is not None:
            return False
        staging = Staging(path, step, uid)
        self._mark_commit(staging)
        self._publish(staging)
        self._sync_publication()
        return True

    def _put_back_displaced(self) -> list[str]:
        done = []
        for entry in self.storage.list_dir(self._inside(layout.TRASH_DIR)):
            parsed = layout.parse_displaced_name(entry.name)
            if parsed is None:
                continue
            step, uid = parsed
            successor = self.path_of(step)
            if self.storage.exists(successor):
                if verify(self.storage, successor, read_all=False) is None:
                    continue
                self.storage.rename(successor, os.path.join(self._inside(layout.TRASH_DIR), f"{uid}.torn"))
            self.storage.rename(os.path.join(self._inside(layout.TRASH_DIR), entry.name), successor)
            self.storage.sync_dir(self.root)
            done.append(f"put step {step} back: the save that was to replace it did not finish")
        return done

    def _roll_forward(self, step: int) -> bool:
        """Make an interrupted commit the newest of `run.json` and of the tracker; say whether there was one to be made."""
        found = survey(self.storage, self.root)
        try:
            commit = read_commit(self.storage, self.path_of(step))
        except (CheckpointError, OSError):
            return False
        branch = found.branch
        if commit.manifest.sequence >= found.last_sequence:
            branch = (commit.entry(), *select_ancestors(branch, commit.manifest.ancestors, replaced=step))
        if not branch or branch[0].step != step:
            return False
        last_sequence = max(found.last_sequence, commit.manifest.sequence)
        self._write_record(RunRecord(commit.manifest.lineage, last_sequence, branch))
        return True

    # --- steps of the above

    def _find_parent(self, step: int) -> str | None:
        """A step saved again takes the parent of the one that it displaces: that one's manifest will be gone."""
        if self.origin.branch and self.origin.branch[0].step == step:
            try:
                return read_commit(self.storage, self.path_of(step)).manifest.parent
            except (CheckpointError, OSError):
                return None
        return self.origin.parent

    def _mark_commit(self, staging: Staging) -> None:
        """Leave a mark beside the staging: with it an old tracker is an interrupted commit, without it a user's edit."""
        marker = staging.path + layout.COMMITTING_SUFFIX
        if not self.storage.exists(marker):
            digest = read_commit(self.storage, staging.path).digest.encode()
            self.storage.write_file(marker, [digest], name=layout.COMMITTING_SUFFIX, rank=0)
        self.storage.sync_dir(os.path.dirname(marker))

    def _publish(self, staging: Staging) -> None:
        target = self.path_of(staging.step)
        if self.storage.exists(target):
            self._displace(target, staging)
        self.storage.rename(staging.path, target)

    def _sync_publication(self) -> None:
        self.storage.sync_dir(self._inside(layout.STAGING_DIR))
        self.storage.sync_dir(self.root)

    def _is_published(self, name: str) -> bool:
        """Say whether the staging directory of that name was renamed to its step, and is there."""
        parsed = layout.parse_staging_name(name)
        marker = os.path.join(self._inside(layout.STAGING_DIR), name + layout.COMMITTING_SUFFIX)
        try:
            return parsed is not None and (
                read_commit(self.storage, self.path_of(parsed[0])).digest == self.storage.read(marker).decode()
            )
        except (CheckpointError, OSError):
            return False

    def _is_committed(self, step: int) -> bool:
        return self.storage.exists(os.path.join(self.path_of(step), layout.MANIFEST))

    def _displace(self, target: str, staging: Staging) -> None:
        """Make room for a save: what it descends from goes, whatever else has its name is moved into the archive."""
        if self._descends_from(staging, target):
            self._displace_into_trash(target, staging)
        else:
            self._move_into_archive(staging.step)

    def _displace_into_trash(self, target: str, staging: Staging) -> None:
        trash = self._inside(layout.TRASH_DIR)
        self.storage.make_dirs(trash)
        self.storage.rename(target, os.path.join(trash, layout.build_displaced_name(staging.step, staging.uid)))

    def _is_broken_copy(self, target: str, staging: Staging) -> bool:
        """Say whether a step is the same checkpoint as the downloaded one, or none at all."""
        try:
            return read_commit(self.storage, target).digest == read_commit(self.storage, staging.path).digest
        except (CheckpointError, OSError):
            return True

    def _descends_from(self, staging: Staging, target: str) -> bool:
        try:
            former = read_commit(self.storage, target).manifest
            saved = read_commit(self.storage, staging.path).manifest
        except (CheckpointError, OSError):
            return False
        return former.lineage == saved.lineage and is_in_ranges(saved.ancestors, former.sequence)

    def _move_into_archive(self, step: int) -> None:
        """Keep a step that the current branch does not descend from: one that a rewind left behind, or somebody else's."""
        folder = os.path.join(self._inside(layout.ARCHIVE_DIR), LEFT_BEHIND)
        self.storage.make_dirs(folder)
        moved = self._move_aside(layout.build_step_name(step), folder)
        self.storage.sync_dir(folder)
        self._left_behind.pop(step, None)
        logger.warning("%s: this run does not descend from it; it lies in %s now", self.path_of(step), moved)

    def _move_on(self, sealed: Sealed) -> Commit:
        """Make a published step the one that the next commit descends from."""
        self._are_pointers_behind = True
        manifest = sealed.manifest
        commit = Commit(self.path_of(manifest.step), digest_manifest(sealed.manifest_data), manifest)
        entry = commit.entry()
        self._last_sequence = max(self._last_sequence, entry.sequence)
        self._left_behind.pop(entry.step, None)
        branch = (entry, *(old for old in self.origin.branch if old.step != entry.step))
        self.origin = Origin(
            lineage=self.origin.lineage,
            parent=commit.digest,
            ancestors=extend_ranges(self.origin.ancestors, entry.sequence),
            branch=branch,
            continues=self.origin.continues,
        )
        return commit

    def _write_pointers(self) -> None:
        present = list_steps(self.storage, self.root)
        branch = tuple(entry for entry in self.origin.branch if entry.step in present)
        self._write_record(RunRecord(self.origin.lineage, self._last_sequence, branch))
        self._are_pointers_behind = False

    def _write_record(self, record: RunRecord) -> None:
        self.storage.replace_file(self._inside(layout.RUN_RECORD), record.encode())
        self.storage.replace_file(self._inside(layout.TRACKER), str(record.branch[0].step).encode())

    def _delete(self, step: int) -> None:
        if step in self._left_behind:
            self._move_into_archive(step)
            self.storage.sync_dir(self.root)
            return
        trash = self._inside(layout.TRASH_DIR)
        aside = os.path.join(trash, layout.build_staging_name(step, uuid.uuid4().hex[:12]))
        self.storage.make_dirs(trash)
        self.storage.rename(self.path_of(step), aside)
        self.storage.sync_dir(self.root)
        self.storage.remove_tree(aside)

    def _clear(self, folder: str, but: str | None = None) -> None:
        path = self._inside(folder)
        for entry in self.storage.list_dir(path):
            if entry.name == but:  # the other ranks may have begun to write there
                continue
            inside = os.path.join(path, entry.name)
            try:
                (self.storage.remove_tree if entry.is_dir else self.storage.remove_file)(inside)
            except OSError as error:
                logger.warning("%s: could not be removed, will be tried again: %s", inside, error)

    def _remove_temporaries(self) -> None:
        for entry in self.storage.list_dir(self.root):
            if layout.is_temporary_name(entry.name):
                self.storage.remove_file(self._inside(entry.name))

    def _move_aside(self, name: str, folder: str) -> str:
        target = os.path.join(folder, name)
        if self.storage.exists(target):
            target = f"{target}.{uuid.uuid4().hex[:8]}"
        self.storage.rename(self._inside(name), target)
        return target

    def _list_run_names(self) -> list[str]:
        """Names of the current run here, in the order in which archiving moves them: the pointers last."""
        pointers = (layout.PINS_DIR, layout.RUN_RECORD, layout.TRACKER)
        present = {entry.name for entry in self.storage.list_dir(self.root)}
        steps = [layout.build_step_name(step) for step in sorted(list_steps(self.storage, self.root))]
        return steps + [name for name in pointers if name in present]

    def _inside(self, name: str) -> str:
        return os.path.join(self.root, name)


def rate(entry: BranchEntry, retention: Retention, on_branch: bool) -> Kept:
    metric = entry.metrics.get(retention.best_metric or "")
    return Kept(entry.step, entry.sequence, on_branch, None if metric is None else float(metric))


def build_lineage() -> str:
    """A new run's name: when it began, and four hex digits so that two in one second differ."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + uuid.uuid4().hex[:4]
