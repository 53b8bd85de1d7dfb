"""Where a run starts from: candidates in their order, and a reason for each one that is passed over.

The decision is a pure function of the request, of what lies in the root, and of what an explicit path names. Rank 0 takes
it; the candidates are then tried one by one on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from recipe_ckpt import layout
from recipe_ckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from recipe_ckpt.manifest import BranchEntry, Continues, extend_ranges, is_in_ranges
from recipe_ckpt.sealing import Origin, build_lineage
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import Commit, Survey, find_damage, read_commit, read_held, select_ancestors, survey

NEWEST = "it is the newest of this run"
OLDER = "it is the next older one of this run"
ABSENT = f"{layout.MANIFEST} is missing"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: verl's `resume_mode` and `resume_from_path` (absolute), and which launch this is."""

    mode: str
    path: str | None
    launch_id: str
    contents: Collection[str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that the run may start from. `digest` is None for a foreign one, which has no manifest.

    `is_inside` says that it lies in the run's own root, `is_named` that `resume_from_path` names it. Nodes that lack it, and
    those of the ranks in `damaged_on`, download it from `url`, if there is one.
    """

    step: int
    path: str
    digest: str | None
    reason: str
    is_inside: bool = True
    is_named: bool = False
    url: str | None = None
    damaged_on: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision: candidates in order, none for a fresh start; what was passed over, with the reasons, by path."""

    candidates: tuple[Candidate, ...]
    is_explicit: bool = False
    refused: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()


def decide(
    request: Request, root: str, found: Survey, *, newest: Commit | None, named: Candidate | CheckpointError | None
) -> Plan:
    """Choose the candidates.

    `newest` is the first of the branch, as far as its manifest can be read; `named` what `resume_from_path` names, or why it
    can't be used.

    Raises:
        CheckpointError: `named`, when it is an error and needed.
    """
    notes = list(found.notes)
    is_own_launch = newest is not None and newest.manifest.launch_id == request.launch_id
    if request.mode == "disable" and not is_own_launch:
        return Plan(())
    if request.mode == "resume_path" and not is_own_launch:
        return _plan_explicit(_require(named), root, found)
    if is_own_launch and request.mode != "auto":
        notes.append(f"resume_mode={request.mode} holds once a launch, and this launch has saved here: its newest is resumed")
    candidates, passed_over = _list_own(root, found, notes)
    if request.path is not None and not is_own_launch:
        if newest is not None and _continues(newest.manifest.continues, request.path, named):
            candidates += [] if isinstance(named, CheckpointError) else [_require(named)]
        else:
            candidates = [_require(named)]
    return Plan(tuple(candidates), False, passed_over, tuple(notes))


def _plan_explicit(named: Candidate, root: str, found: Survey) -> Plan:
    own = found.branch[0].step if found.branch else None
    if own is None or (named.is_inside and named.step == own):
        return Plan((named,), True)
    note = f"{root} holds progress up to step {own}; checkpoint.resume_mode=auto would continue from there"
    return Plan((named,), True, notes=(note,))


def _list_own(root: str, found: Survey, notes: list[str]) -> tuple[list[Candidate], dict[str, str]]:
    """List the root's own candidates: what the tracker names, if the user edited it, else the newest; then ancestors."""
    refused = {_path(root, step): reason for step, reason in found.refused.items()}
    refused |= {
        _path(root, step): f"it has no {layout.MANIFEST} and {layout.TRACKER} does not name it" for step in found.foreign
    }
    branch, tracker = found.branch, found.tracker
    if not branch:
        refused |= {_path(root, step): "a rewind left it behind; resume_from_path can name it" for step in found.others}
    first, reason = _follow_tracker(found, notes) if isinstance(tracker, int) else (None, NEWEST)
    if isinstance(tracker, str):
        notes.append(f"{layout.TRACKER} holds {tracker[:40]!r} instead of a step; it is not used")
    elif tracker is None and branch:
        notes.append(f"{layout.TRACKER} is missing; the newest is known from {layout.RUN_RECORD} or the manifests")
    if isinstance(first, int):
        foreign = Candidate(first, _path(root, first), None, f"{layout.TRACKER} names it; unverified: no {layout.MANIFEST}")
        del refused[foreign.path]
        return [foreign, *_name_all(root, branch, OLDER)], refused
    if first is not None:
        older = select_ancestors(branch, first.manifest.ancestors, replaced=first.manifest.step)
        return _name_all(root, (first.entry(),), reason) + _name_all(root, older, OLDER), refused
    return _name_all(root, branch[:1], reason) + _name_all(root, branch[1:], OLDER), refused


def _follow_tracker(found: Survey, notes: list[str]) -> tuple[Commit | int | None, str]:
    """Return the commit, or the foreign step, that the user made the tracker name; None if it names the newest anyway."""
    step, branch = found.tracker, found.branch
    assert isinstance(step, int)
    reason = f"{layout.TRACKER} names it"
    if branch and branch[0].step == step:
        return None, NEWEST
    if step in found.foreign:
        return step, reason
    commit = found.others.get(step) or found.tracked
    if commit is None:
        notes.append(f"{layout.TRACKER} names step {step}, of which no whole checkpoint lies here; it is not used")
        return None, NEWEST
    notes.append(f"{layout.TRACKER} was set to step {step}, so newer checkpoints here are left behind")
    return commit, reason


def _continues(continues: Continues | None, path: str, named: Candidate | CheckpointError | None) -> bool:
    """Say whether a branch began at the checkpoint that the path names now, or named when it began."""
    if continues is None:
        return False
    if isinstance(named, Candidate) and named.digest is not None and continues.digest is not None:
        names_a_root = named.path != path
        return named.digest == continues.digest or (names_a_root and continues.path == path)
    return continues.path == path


def _require(named: Candidate | CheckpointError | None) -> Candidate:
    assert named is not None
    if isinstance(named, CheckpointError):
        raise named
    return named


def _name_all(root: str, entries: Sequence[BranchEntry], reason: str) -> list[Candidate]:
    return [Candidate(entry.step, _path(root, entry.step), entry.digest, reason) for entry in entries]


def _path(root: str, step: int) -> str:
    return os.path.join(root, layout.build_step_name(step))


def inspect_path(storage: Storage, path: str, root: str) -> Candidate:
    """Find the checkpoint that an explicit path names: a step directory, or a run's root (then its newest).

    Raises:
        CheckpointNotFoundError: nothing is there, or it is neither.
        DamagedCheckpointError: it is a step directory without all of its files.
        LineageError: it was renamed.
    """
    if not storage.exists(path):
        raise CheckpointNotFoundError(
            f"checkpoint.resume_from_path: found {path!r}, which does not exist; {_EXPECTED}", path=path
        )
    if layout.parse_step_name(os.path.basename(path)) is not None:
        return _inspect_step(storage, path, root)
    try:
        found = survey(storage, path)
    except NotADirectoryError as error:
        raise CheckpointNotFoundError(
            f"checkpoint.resume_from_path: found {path!r}, which is a file; {_EXPECTED}", path=path
        ) from error
    if isinstance(found.tracker, int) and found.tracker in found.foreign:
        return _inspect_step(storage, _path(path, found.tracker), root)
    if not found.branch:
        raise CheckpointNotFoundError(
            f"checkpoint.resume_from_path: found {path!r}, which is no checkpoint and holds none; {_EXPECTED}", path=path
        )
    candidates, _ = _list_own(path, found, [])
    return _inspect_step(storage, candidates[0].path, root)


_EXPECTED = "allowed is <run>/global_step_<N>, or a run's directory for its newest checkpoint"


def _inspect_step(storage: Storage, path: str, root: str) -> Candidate:
    step = layout.parse_step_name(os.path.basename(path))
    assert step is not None
    is_inside = os.path.realpath(os.path.dirname(path)) == os.path.realpath(root)
    reason = "checkpoint.resume_from_path names it"
    try:
        commit = read_commit(storage, path)
    except FileNotFoundError as error:
        problem = layout.find_foreign_problem(entry.name for entry in storage.list_dir(path))
        if problem is not None:
            raise DamagedCheckpointError(f"{path}: can't be resumed from: {problem}", step=step, path=path) from error
        return Candidate(step, path, None, f"{reason}; unverified: no {layout.MANIFEST}", is_inside, is_named=True)
    return Candidate(step, path, commit.digest, reason, is_inside, is_named=True)


def find_damage_of(storage: Storage, candidate: Candidate) -> str | None:
    """Say what is wrong with a candidate where it lies: quick checks, before all ranks read it."""
    if candidate.digest is None:
        return None
    try:
        commit = read_commit(storage, candidate.path)
        if commit.digest != candidate.digest:
            return f"its {layout.MANIFEST} is not the one that was committed"
        return find_damage(storage, candidate.path, read_held(storage, commit).table.entries, read_all=False)
    except FileNotFoundError:
        return ABSENT
    except (CheckpointError, OSError) as error:
        return str(error)


def find_lack(commit: Commit, contents: Collection[str]) -> str | None:
    """Say what a checkpoint was saved without, and so has nowhere."""
    lacking = sorted(set(contents) - set(commit.manifest.contents))
    held = sorted(commit.manifest.contents)
    return f"it holds {held} and lacks {lacking} of checkpoint.load_contents" if lacking else None


def build_origin(candidate: Candidate | None, request: Request, found: Survey, commit: Commit | None) -> Origin:
    """Say what the next commit descends from, when the run starts from `candidate` (`commit` is its own), or fresh."""
    if candidate is None:
        return Origin(build_lineage())
    named = Continues(request.path or candidate.path, candidate.step, candidate.digest) if candidate.is_named else None
    if commit is None or not candidate.is_inside:
        lineage = found.lineage if candidate.is_inside else None
        return Origin(lineage or build_lineage(), parent=candidate.digest, continues=named)
    manifest = commit.manifest
    known = [*found.branch, *(other.entry() for other in found.others.values())]
    older = sorted((e for e in known if is_in_ranges(manifest.ancestors, e.sequence)), key=lambda e: -e.sequence)
    return Origin(
        manifest.lineage,
        parent=commit.digest,
        ancestors=extend_ranges(manifest.ancestors, manifest.sequence),
        branch=(commit.entry(), *(entry for entry in older if entry.step != manifest.step)),
        continues=named or manifest.continues,
    )
