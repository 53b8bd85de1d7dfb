"""Which checkpoints may go: a pure function of what lies on the disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kept:
    """One committed checkpoint of this root's lineage; `on_branch` unless a rewind left it behind."""

    step: int
    sequence: int
    on_branch: bool


def choose_deletions(commits: Iterable[Kept], *, max_to_keep: int | None, pinned: Collection[int]) -> list[int]:
    """Return the steps to delete, the first to go first.

    The newest by sequence stay, since step numbers start again after a rewind and mtimes lie. What a rewind left behind
    goes before anything of the current branch. Pinned steps are kept and not counted. `max_to_keep=None` keeps all.
    """
    if max_to_keep is None:
        return []
    counted = [commit for commit in commits if commit.step not in pinned]
    counted.sort(key=lambda commit: (commit.on_branch, commit.sequence))
    return [commit.step for commit in counted[: max(len(counted) - max_to_keep, 0)]]
