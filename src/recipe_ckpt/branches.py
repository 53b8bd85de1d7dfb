"""Whose work lies in a root and on its mirror, and which of it is the newest: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipe_ckpt.errors import LineageError
from recipe_ckpt.manifest import BranchEntry, RunRecord, is_in_ranges
from recipe_ckpt.sealing import Origin
from recipe_ckpt.survey import Commit, Survey, select_ancestors


@dataclass(frozen=True, slots=True)
class Claim:
    """What this run may publish: its branch, and the digests of all commits that it knows of."""

    origin: Origin
    last_sequence: int
    known: frozenset[str]

    def owns(self, entry: BranchEntry) -> bool:
        return entry.digest in self.known or is_in_ranges(self.origin.ancestors, entry.sequence)


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
