"""What lies in a root: committed checkpoints, foreign ones, damaged ones, and which of them is the newest.

Reads only. Which directory is a checkpoint is decided in this module and in `layout`; saving, resume, retention,
verification and the command line all ask here.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from recipe_ckpt import layout
from recipe_ckpt.errors import CheckpointError, DamagedCheckpointError, LineageError, RemoteError
from recipe_ckpt.manifest import (
    BranchEntry,
    FileEntry,
    FileTable,
    Manifest,
    NodeNote,
    RunRecord,
    describe_bytes,
    digest_bytes,
    digest_manifest,
    is_in_ranges,
)
from recipe_ckpt.storage import Readable, Storage, describe_file


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed checkpoint as its manifest describes it; `digest` is the manifest's own."""

    path: str
    digest: str
    manifest: Manifest

    def entry(self) -> BranchEntry:
        return BranchEntry(self.manifest.step, self.manifest.sequence, self.digest, self.manifest.metrics)


@dataclass(slots=True)
class Survey:
    """What lies in a root.

    `branch` is newest first, `others` are commits that a rewind left behind. `tracker` is None for a missing file, its text
    if that holds no step; `tracked` is the commit of the branch that it names, read only if that is not the newest.
    """

    lineage: str | None = None
    last_sequence: int = 0
    branch: tuple[BranchEntry, ...] = ()
    others: dict[int, Commit] = field(default_factory=dict)
    foreign: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    tracker: int | str | None = None
    tracked: Commit | None = None
    notes: list[str] = field(default_factory=list)


def read_commit(storage: Readable, path: str) -> Commit:
    """Read the manifest of a step directory.

    Raises:
        FileNotFoundError: there is none.
        DamagedCheckpointError: it can't be read.
        LineageError: the directory was renamed; the step inside is not the one in its name.
    """
    manifest_path = os.path.join(path, layout.MANIFEST)
    data = storage.read(manifest_path)
    manifest = Manifest.decode(data, manifest_path)
    named = layout.parse_step_name(os.path.basename(path))
    if named is not None and manifest.step != named:
        raise LineageError(
            f"{path}: the directory's name says step {named}, its manifest says step {manifest.step}; rename it back to"
            f" {layout.build_step_name(manifest.step)}",
            step=manifest.step,
            path=path,
        )
    return Commit(path, digest_manifest(data), manifest)


def read_files(storage: Readable, commit: Commit) -> FileTable:
    """Read and check the file table of a checkpoint.

    Raises:
        DamagedCheckpointError: it is missing, or not the one that was committed.
    """
    path = os.path.join(commit.path, layout.FILE_TABLE)
    data = _read_part(storage, commit, path)
    _require_unchanged(digest_bytes(data).hex() == commit.manifest.files_digest, commit, path)
    return FileTable.decode(data, path)


@dataclass(frozen=True, slots=True)
class Held:
    """Of a checkpoint's files those that should lie here. `ranks` wrote them; None: all that saved it."""

    table: FileTable
    ranks: frozenset[int] | None = None


def read_held(storage: Readable, commit: Commit) -> Held:
    """Say which files should be here: all, or on a node's own disk those that its notes list.

    Notes of several nodes lie side by side where their directories were copied together.

    Raises:
        DamagedCheckpointError: as `read_files`; or the notes are missing or changed.
    """
    table = read_files(storage, commit)
    notes = [entry for entry in table.entries if layout.is_node_note_name(entry.path)]
    if not notes:
        return Held(table)
    present = {entry.name for entry in storage.list_dir(commit.path)}
    found = [_read_note(storage, commit, entry) for entry in notes if entry.path in present]
    if not found:
        names = [entry.path for entry in notes]
        raise DamagedCheckpointError(
            f"{commit.path}: has none of {names}, which list the files of one node each",
            step=commit.manifest.step,
            path=commit.path,
        )
    paths = {path for note in found for path in note.paths}
    ranks = frozenset(rank for note in found for rank in note.ranks)
    return Held(FileTable(tuple(entry for entry in table.entries if entry.path in paths)), ranks)


def read_needed(storage: Readable, commit: Commit, ranks: Collection[int], world_size: int) -> FileTable:
    """Of a checkpoint that lies whole in one place return the files that a node of these ranks reads.

    That is the part of the node that had the same ranks of as many when it was saved; if there was none, everything.

    Raises:
        DamagedCheckpointError: as `read_files`; or that node's note is missing or changed.
    """
    table = read_files(storage, commit)
    name = layout.build_node_note_name(min(ranks))
    entry = next((entry for entry in table.entries if entry.path == name), None)
    if entry is None or commit.manifest.world_size != world_size:
        return table
    note = _read_note(storage, commit, entry)
    if set(note.ranks) != set(ranks):
        return table
    return FileTable(tuple(entry for entry in table.entries if entry.path in note.paths))


def _read_note(storage: Readable, commit: Commit, entry: FileEntry) -> NodeNote:
    path = os.path.join(commit.path, entry.path)
    data = _read_part(storage, commit, path)
    _require_unchanged(describe_bytes(data, name=entry.path, rank=entry.rank) == entry, commit, path)
    return NodeNote.decode(data, path)


def _read_part(storage: Readable, commit: Commit, path: str) -> bytes:
    """Read a file that a commit needs; that it can't be read is damage, unless only the server is away."""
    try:
        return storage.read(path)
    except RemoteError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: {error}", step=commit.manifest.step, path=path) from error


def _require_unchanged(is_unchanged: bool, commit: Commit, path: str) -> None:
    if not is_unchanged:
        raise DamagedCheckpointError(f"{path}: changed since the commit", step=commit.manifest.step, path=path)


def find_damage(storage: Storage, directory: str, entries: Iterable[FileEntry], *, read_all: bool) -> str | None:
    """Compare files with their entries by name and size, and by digest if `read_all`; name the first that differs."""
    for entry in entries:
        path = os.path.join(directory, entry.path)
        try:
            size = storage.size_bytes(path)
            if size != entry.size_bytes:
                return f"{entry.path}: has {size} bytes, {entry.size_bytes} were written"
            if read_all and describe_file(path, name=entry.path, rank=entry.rank).digest != entry.digest:
                return f"{entry.path}: its bytes changed since they were written"
        except OSError as error:
            return f"{entry.path}: {error.strerror or error}"
    return None


def verify(storage: Storage, path: str, *, read_all: bool) -> str | None:
    """Say what is wrong with a committed checkpoint: `quick` by names and sizes, or by every byte. None: it is whole."""
    try:
        commit = read_commit(storage, path)
        return find_damage(storage, path, read_held(storage, commit).table.entries, read_all=read_all)
    except FileNotFoundError:
        return f"{layout.MANIFEST} is missing: it was never committed"
    except (CheckpointError, OSError) as error:
        return str(error)


def survey(storage: Readable, root: str) -> Survey:
    """Read what a resume decision needs; of the checkpoints that `run.json` names no file is opened."""
    found = Survey(tracker=_read_tracker(storage, root))
    record = _read_record(storage, root, found)
    steps = list_steps(storage, root)
    for step in sorted(steps - ({entry.step for entry in record.branch} if record else set())):
        _classify(storage, os.path.join(root, layout.build_step_name(step)), step, found)
    if record is None:
        _rebuild(found)
    else:
        found.lineage = record.lineage
        found.branch = tuple(entry for entry in record.branch if entry.step in steps)
        if record.branch and record.branch[0].step not in steps:
            found.refused[record.branch[0].step] = "its directory is gone"
    for step, commit in list(found.others.items()):
        if commit.manifest.lineage != found.lineage:
            found.refused[step] = f"it is of another run (lineage {commit.manifest.lineage}, here {found.lineage})"
            del found.others[step]
    sequences = (commit.manifest.sequence for commit in found.others.values())
    found.last_sequence = max(record.last_sequence if record else 0, found.last_sequence, *sequences)
    found.tracked = _read_tracked(storage, root, found)
    return found


def list_steps(storage: Readable, root: str) -> set[int]:
    """Return the steps for which a directory of the right name exists, whatever is in it."""
    return {
        step for entry in storage.list_dir(root) if entry.is_dir and (step := layout.parse_step_name(entry.name)) is not None
    }


def list_pins(storage: Readable, root: str) -> set[int]:
    names = (entry.name for entry in storage.list_dir(os.path.join(root, layout.PINS_DIR)))
    return {int(name) for name in names if name.isascii() and name.isdigit()}


def _read_tracker(storage: Readable, root: str) -> int | str | None:
    try:
        text = storage.read(os.path.join(root, layout.TRACKER)).decode(errors="replace")
    except FileNotFoundError:
        return None
    step = layout.parse_tracker(text)
    return text if step is None else step


def _read_tracked(storage: Readable, root: str, found: Survey) -> Commit | None:
    if found.tracker not in {entry.step for entry in found.branch[1:]}:
        return None
    try:
        return read_commit(storage, os.path.join(root, layout.build_step_name(int(found.tracker))))
    except RemoteError:
        raise
    except (CheckpointError, OSError) as error:
        found.notes.append(f"{layout.TRACKER} names step {found.tracker}, which can't be read: {error}")
        return None


def _read_record(storage: Readable, root: str, found: Survey) -> RunRecord | None:
    path = os.path.join(root, layout.RUN_RECORD)
    try:
        return RunRecord.decode(storage.read(path), path)
    except FileNotFoundError:
        return None
    except DamagedCheckpointError as error:
        found.notes.append(f"{error}; it is rebuilt from the checkpoints themselves")
        return None


def _classify(storage: Readable, path: str, step: int, found: Survey) -> None:
    try:
        found.others[step] = read_commit(storage, path)
    except FileNotFoundError:
        problem = layout.find_foreign_problem(entry.name for entry in storage.list_dir(path))
        if problem is None:
            found.foreign.add(step)
        else:
            found.refused[step] = problem
    except RemoteError:
        raise  # nothing is known about it
    except (CheckpointError, OSError) as error:
        found.refused[step] = str(error)


def _rebuild(found: Survey) -> None:
    """Make the branch from the manifests: the newest by sequence, and those that it says it descends from."""
    if not found.others:
        return
    lineages = {commit.manifest.lineage for commit in found.others.values()}
    if len(lineages) > 1:
        for step, commit in found.others.items():
            found.refused[step] = (
                f"it is of lineage {commit.manifest.lineage}; several runs lie in one root, and {layout.RUN_RECORD}, which"
                " would tell the current one, is missing or unreadable: move all but one run's directories elsewhere"
            )
        found.others.clear()
        return
    found.lineage = lineages.pop()
    newest = max(found.others.values(), key=lambda commit: commit.manifest.sequence)
    found.last_sequence = newest.manifest.sequence
    known = sorted((commit.entry() for commit in found.others.values()), key=lambda entry: -entry.sequence)
    found.branch = (newest.entry(), *select_ancestors(known, newest.manifest.ancestors, replaced=newest.manifest.step))
    for entry in found.branch:
        del found.others[entry.step]


def select_ancestors(
    known: Collection[BranchEntry], ancestors: tuple[tuple[int, int], ...], *, replaced: int
) -> tuple[BranchEntry, ...]:
    return tuple(entry for entry in known if is_in_ranges(ancestors, entry.sequence) and entry.step != replaced)
