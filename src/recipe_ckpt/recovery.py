"""What a save that failed, or whose process was killed, left in a root: finished if it was whole, else taken back."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

from recipe_ckpt import layout
from recipe_ckpt.directories import Directories
from recipe_ckpt.errors import CheckpointError
from recipe_ckpt.manifest import RunRecord
from recipe_ckpt.sealing import Staging
from recipe_ckpt.survey import read_commit, select_ancestors, survey, verify

logger = logging.getLogger(__name__)


def list_unfinished(dirs: Directories) -> tuple[dict[str, str], dict[str, str]]:
    """Name the staging directories of saves that are whole, with the digests of their manifests.

    Returns those that are still to be renamed, and those that were and may lack what comes after. Reads only.
    """
    prepared, published = {}, {}
    staged = dirs.list_staging()
    for name in staged:
        path = dirs.inside(layout.STAGING_DIR, name)
        published_name = name.removesuffix(layout.COMMITTING_SUFFIX)
        if layout.parse_staging_name(name) and verify(dirs.storage, path, read_all=False) is None:
            prepared[name] = read_commit(dirs.storage, path).digest
        elif published_name != name and published_name not in staged and dirs.is_published(published_name):
            published[published_name] = dirs.storage.read(path).decode()
    return prepared, published


def recover(dirs: Directories, finish: Collection[str]) -> list[str]:
    """Finish these of the unfinished saves, and undo all else that a killed process left; return what was done.

    Called under the lease, before anything is decided from what lies here.
    """
    done = []
    if archived := dirs.finish_archiving():
        done.append(f"finished moving the former run to {archived}")
    _remove_temporaries(dirs)
    for name in dirs.list_staging():
        parsed = layout.parse_staging_name(name)
        if parsed and name in finish and _finish_commit(dirs, name, *parsed):
            done.append(f"finished the interrupted commit of step {parsed[0]}")
    for name in dirs.list_staging():
        base = name.removesuffix(layout.COMMITTING_SUFFIX)
        parsed = layout.parse_staging_name(base)
        if parsed and base not in finish and base != name and dirs.is_published(base):
            undo(dirs, base)
            done.append(f"took step {parsed[0]} back: its save did not finish on every node")
    done += put_back_displaced(dirs)
    staged = dirs.list_staging()
    for name in staged:
        # A mark without its staging is of a commit that was renamed into place: the pointers may lag behind that one.
        published = name.removesuffix(layout.COMMITTING_SUFFIX)
        parsed = layout.parse_staging_name(published)
        if parsed and published not in staged and roll_forward(dirs, parsed[0]):
            done.append(f"made step {parsed[0]} the newest: its commit was interrupted when it was whole")
    dirs.clear_staging()
    dirs.clear_trash()
    return done


def roll_forward(dirs: Directories, step: int) -> bool:
    """Make an interrupted commit the newest of `run.json` and of the tracker; say whether there was one to be made."""
    found = survey(dirs.storage, dirs.root)
    try:
        commit = read_commit(dirs.storage, dirs.path_of(step))
    except (CheckpointError, OSError):
        return False
    branch = found.branch
    if commit.manifest.sequence >= found.last_sequence:
        branch = (commit.entry(), *select_ancestors(branch, commit.manifest.ancestors, replaced=step))
    if not branch or branch[0].step != step:
        return False
    last_sequence = max(found.last_sequence, commit.manifest.sequence)
    dirs.write_record(RunRecord(commit.manifest.lineage, last_sequence, branch))
    return True


def undo(dirs: Directories, name: str) -> None:
    """Take back what was prepared or published from the staging directory of that name, if anything was."""
    path = dirs.inside(layout.STAGING_DIR, name)
    marker = path + layout.COMMITTING_SUFFIX
    if dirs.is_published(name):
        step, uid = layout.parse_staging_name(name) or (0, "")
        torn = dirs.inside(layout.TRASH_DIR, f"{uid}.torn")
        dirs.storage.make_dirs(dirs.inside(layout.TRASH_DIR))
        dirs.storage.rename(dirs.path_of(step), torn)
        put_back_displaced(dirs)
        dirs.storage.sync_dir(dirs.root)
        dirs.storage.remove_file(marker)
        dirs.storage.remove_tree(torn)
    elif dirs.storage.exists(path):
        if dirs.storage.exists(marker):
            dirs.storage.remove_file(marker)
        dirs.storage.remove_tree(path)
        put_back_displaced(dirs)


def abandon(dirs: Directories, staging: Staging) -> None:
    """Remove what a failed save wrote, and put back what it had displaced; if that fails, the next start does it."""
    displaced = dirs.inside(layout.TRASH_DIR, layout.build_displaced_name(staging.step, staging.uid))
    target, storage = dirs.path_of(staging.step), dirs.storage
    try:
        if storage.exists(displaced) and not storage.exists(target):
            storage.rename(displaced, target)
            storage.sync_dir(dirs.root)
        if storage.exists(staging.path):
            if storage.exists(marker := staging.path + layout.COMMITTING_SUFFIX):
                storage.remove_file(marker)  # or a tracker that the user set would be taken for this commit's
            storage.remove_tree(staging.path)
    except OSError as error:
        logger.warning("%s: could not be removed: %s", staging.path, error)


def put_back_displaced(dirs: Directories) -> list[str]:
    """Rename each displaced step back whose successor is missing or not whole; return what was done."""
    done = []
    for entry in dirs.storage.list_dir(dirs.inside(layout.TRASH_DIR)):
        parsed = layout.parse_displaced_name(entry.name)
        if parsed is None:
            continue
        step, uid = parsed
        successor = dirs.path_of(step)
        if dirs.storage.exists(successor):
            if verify(dirs.storage, successor, read_all=False) is None:
                continue
            dirs.storage.rename(successor, dirs.inside(layout.TRASH_DIR, f"{uid}.torn"))
        dirs.storage.rename(dirs.inside(layout.TRASH_DIR, entry.name), successor)
        dirs.storage.sync_dir(dirs.root)
        done.append(f"put step {step} back: the save that was to replace it did not finish")
    return done


def _finish_commit(dirs: Directories, name: str, step: int, uid: str) -> bool:
    path = dirs.inside(layout.STAGING_DIR, name)
    if not dirs.storage.exists(os.path.join(path, layout.MANIFEST)):
        return False
    if verify(dirs.storage, path, read_all=False) is not None:
        return False
    staging = Staging(path, step, uid)
    dirs.mark_commit(staging)
    dirs.publish(staging)
    dirs.sync_publication()
    return True


def _remove_temporaries(dirs: Directories) -> None:
    for entry in dirs.storage.list_dir(dirs.root):
        if layout.is_temporary_name(entry.name):
            dirs.storage.remove_file(dirs.inside(entry.name))
