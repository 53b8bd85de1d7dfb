"""Where a step lies in its root, and each move to another place: published, displaced, archived, cleared away.

Keeps nothing in memory but the root's path: what it decides it reads from the disk.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable

from recipe_ckpt import layout
from recipe_ckpt.errors import CheckpointError
from recipe_ckpt.manifest import RunRecord, is_in_ranges
from recipe_ckpt.sealing import Staging
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import list_steps, read_commit

logger = logging.getLogger(__name__)


class Directories:
    """A root's directories, for its one writer."""

    def __init__(self, root: str, storage: Storage) -> None:
        self.root = root
        self.storage = storage

    def inside(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def path_of(self, step: int) -> str:
        return self.inside(layout.build_step_name(step))

    def list_staging(self) -> list[str]:
        return [entry.name for entry in self.storage.list_dir(self.inside(layout.STAGING_DIR))]

    def is_committed(self, step: int) -> bool:
        return self.storage.exists(os.path.join(self.path_of(step), layout.MANIFEST))

    # --- from staging to the final name

    def mark_commit(self, staging: Staging) -> None:
        """Leave a mark beside the staging: with it an old tracker is an interrupted commit, without it a user's edit."""
        marker = staging.path + layout.COMMITTING_SUFFIX
        if not self.storage.exists(marker):
            digest = read_commit(self.storage, staging.path).digest.encode()
            self.storage.write_file(marker, [digest], name=layout.COMMITTING_SUFFIX, rank=0)
        self.storage.sync_dir(os.path.dirname(marker))

    def publish(self, staging: Staging) -> None:
        """Rename a save to its step. What it descends from makes room, anything else of that name is archived.

        Durable after `sync_publication`.
        """
        self._rename_into_place(staging, self._descends_from)

    def publish_copy(self, staging: Staging) -> None:
        """Rename a downloaded step to its name. The same checkpoint, or none at all, makes room; another one is archived.

        Durable after `sync_publication`.
        """
        self._rename_into_place(staging, self._is_broken_copy)

    def _rename_into_place(self, staging: Staging, is_replaced: Callable[[Staging, str], bool]) -> None:
        target = self.path_of(staging.step)
        if self.storage.exists(target):
            if is_replaced(staging, target):
                self._displace(target, staging)
            else:
                self.archive_step(staging.step)
        self.storage.rename(staging.path, target)

    def sync_publication(self) -> None:
        self.storage.sync_dir(self.inside(layout.STAGING_DIR))
        self.storage.sync_dir(self.root)

    def is_published(self, name: str) -> bool:
        """Say whether the staging directory of that name was renamed to its step, and is there."""
        parsed = layout.parse_staging_name(name)
        marker = self.inside(layout.STAGING_DIR, name + layout.COMMITTING_SUFFIX)
        try:
            return parsed is not None and (
                read_commit(self.storage, self.path_of(parsed[0])).digest == self.storage.read(marker).decode()
            )
        except (CheckpointError, OSError):
            return False

    def write_record(self, record: RunRecord) -> None:
        """Replace the pointers, `run.json` and the tracker. Durable on return."""
        self.storage.replace_file(self.inside(layout.RUN_RECORD), record.encode())
        self.storage.replace_file(self.inside(layout.TRACKER), str(record.branch[0].step).encode())

    def _displace(self, target: str, staging: Staging) -> None:
        trash = self.inside(layout.TRASH_DIR)
        self.storage.make_dirs(trash)
        self.storage.rename(target, os.path.join(trash, layout.build_displaced_name(staging.step, staging.uid)))

    def _is_broken_copy(self, staging: Staging, target: str) -> bool:
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

    # --- out of the way

    def delete_step(self, step: int) -> None:
        trash = self.inside(layout.TRASH_DIR)
        aside = os.path.join(trash, layout.build_staging_name(step, uuid.uuid4().hex[:12]))
        self.storage.make_dirs(trash)
        self.storage.rename(self.path_of(step), aside)
        self.storage.sync_dir(self.root)
        self.storage.remove_tree(aside)

    def clear_staging(self, saving: Staging | None = None) -> None:
        """Remove what saves left; of `saving`, and of saves after it, nothing: other ranks may have begun to write there.

        A rank whose save failed doesn't wait for the others, and is at the next one while they are still told.
        """
        self._clear(layout.STAGING_DIR, lambda name: saving is not None and saving.is_at_or_before(name))

    def clear_trash(self) -> None:
        self._clear(layout.TRASH_DIR, lambda name: False)

    def _clear(self, folder: str, is_kept: Callable[[str], bool]) -> None:
        """Remove what lies in a folder. A failure is a warning, tried again next time."""
        path = self.inside(folder)
        for entry in self.storage.list_dir(path):
            if is_kept(entry.name):
                continue
            inside = os.path.join(path, entry.name)
            try:
                (self.storage.remove_tree if entry.is_dir else self.storage.remove_file)(inside)
            except OSError as error:
                logger.warning("%s: could not be removed, will be tried again: %s", inside, error)

    # --- into the archive

    def archive_step(self, step: int) -> None:
        """Keep a step that the current branch does not descend from: one that a rewind left behind, or somebody else's."""
        folder = self.inside(layout.ARCHIVE_DIR, layout.LEFT_BEHIND)
        self.storage.make_dirs(folder)
        moved = self._move_aside(layout.build_step_name(step), folder)
        self.storage.sync_dir(folder)
        logger.warning("%s: this run does not descend from it; it lies in %s now", self.path_of(step), moved)

    def archive_run(self, lineage: str | None) -> str | None:
        """Rename all that the run left here into `archive/<lineage>/`; return that folder, None if there was nothing.

        An intent file makes it all or nothing: recovery ends what was begun.
        """
        if not self._list_run_names():
            return None
        target = self.inside(layout.ARCHIVE_DIR, lineage or f"unknown-{uuid.uuid4().hex[:8]}")
        self.storage.replace_file(self.inside(layout.ARCHIVING), os.path.basename(target).encode())
        self.finish_archiving()
        return target

    def finish_archiving(self) -> str | None:
        """Carry out the archiving that an intent file names; return its folder, None without one."""
        name = self.read_archiving()
        if name is None:
            return None
        target = self.inside(layout.ARCHIVE_DIR, name)
        self.storage.make_dirs(target)
        for name in self._list_run_names():
            self._move_aside(name, target)
        self.storage.sync_dir(target)
        self.storage.sync_dir(self.root)
        self.storage.remove_file(self.inside(layout.ARCHIVING))
        return target

    def read_archiving(self) -> str | None:
        """Return the folder's name of an archiving that was begun."""
        try:
            return self.storage.read(self.inside(layout.ARCHIVING)).decode()
        except FileNotFoundError:
            return None

    def list_archives(self) -> list[str]:
        return [entry.name for entry in self.storage.list_dir(self.inside(layout.ARCHIVE_DIR)) if entry.is_dir]

    def _move_aside(self, name: str, folder: str) -> str:
        target = os.path.join(folder, name)
        if self.storage.exists(target):
            target = f"{target}.{uuid.uuid4().hex[:8]}"
        self.storage.rename(self.inside(name), target)
        return target

    def _list_run_names(self) -> list[str]:
        """Names of the current run here, in the order in which archiving moves them: the pointers last."""
        pointers = (layout.PINS_DIR, layout.RUN_RECORD, layout.TRACKER)
        present = {entry.name for entry in self.storage.list_dir(self.root)}
        steps = [layout.build_step_name(step) for step in sorted(list_steps(self.storage, self.root))]
        return steps + [name for name in pointers if name in present]
