"""Which checkpoints may go: a pure function of what lies on the disk."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from recipe_ckpt.manifest import BranchEntry


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays: the `max_to_keep` newest (None: all), every step that `every` divides, and the `best` ones by a metric.

    `best_mode` is `min` or `max`. Kinds add up: a checkpoint stays if any of them wants it.
    """

    max_to_keep: int | None = None
    every: int | None = None
    best: int | None = None
    best_metric: str | None = None
    best_mode: str = "min"


@dataclass(frozen=True, slots=True)
class Kept:
    """One committed checkpoint of this root's lineage; `on_branch` unless a rewind left it behind. `metric` is the best's."""

    step: int
    sequence: int
    on_branch: bool
    metric: float | None = None


def rate(entry: BranchEntry, retention: Retention, on_branch: bool) -> Kept:
    metric = entry.metrics.get(retention.best_metric or "")
    return Kept(entry.step, entry.sequence, on_branch, None if metric is None else float(metric))


def choose_deletions(commits: Iterable[Kept], retention: Retention, *, pinned: Collection[int]) -> list[int]:
    """Return the steps to delete, the first to go first.

    The newest by sequence stay, since step numbers start again after a rewind and mtimes lie. What a rewind left behind
    goes before anything of the current branch, and is neither an every-th nor a best one. Pinned, every-th and best steps
    are kept and do not count as the newest. The newest of all always stays.
    """
    if retention.max_to_keep is None:
        return []
    known = sorted(commits, key=lambda commit: (commit.on_branch, commit.sequence))
    branch = [commit for commit in known if commit.on_branch]
    wanted = set(pinned) | {commit.step for commit in choose_best(branch, retention)}
    if retention.every is not None:
        wanted |= {commit.step for commit in branch if commit.step and commit.step % retention.every == 0}
    counted = [commit for commit in known if commit.step not in wanted or commit is known[-1]]
    return [commit.step for commit in counted[: max(len(counted) - retention.max_to_keep, 0)]]


def choose_best(commits: Sequence[Kept], retention: Retention) -> list[Kept]:
    """Return the best ones, best first; a missing or NaN metric is never best, and of equal ones the older is better."""
    if retention.best is None:
        return []
    rated = [commit for commit in commits if commit.metric is not None and not math.isnan(commit.metric)]
    sign = 1 if retention.best_mode == "min" else -1
    rated.sort(key=lambda commit: (sign * (commit.metric or 0.0), commit.sequence))
    return rated[: retention.best]
