"""Nodes with disks of their own: pure decisions, which rank 0 takes from what all nodes report.

A node is the ranks that share one root directory; its lowest rank leads it: holds that root's lease, and writes there what
is not a rank's own. One shared root is the case of a single node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from recipe_ckpt.errors import LineageError, RootNotSharedError
from recipe_ckpt.manifest import BranchEntry
from recipe_ckpt.sealing import Origin
from recipe_ckpt.survey import Survey


@dataclass(frozen=True, slots=True)
class Node:
    """Ranks, in ascending order, that share a root; `host` and `root` are its leader's."""

    ranks: tuple[int, ...]
    host: str
    root: str

    @property
    def leader(self) -> int:
        return self.ranks[0]

    def describe(self) -> str:
        return f"{self.root} on {self.host} ({name_ranks(self.ranks)})"


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes of a run, by their leaders."""

    all: tuple[Node, ...]

    @property
    def is_one(self) -> bool:
        return len(self.all) == 1

    @property
    def disks(self) -> tuple[int, ...]:
        """By rank: the leader of the node that it is on."""
        return tuple(leader for _, leader in sorted((rank, node.leader) for node in self.all for rank in node.ranks))

    def of(self, rank: int) -> Node:
        return next(node for node in self.all if rank in node.ranks)

    def leads(self, rank: int) -> bool:
        return self.of(rank).leader == rank

    def describe(self) -> str:
        return ", ".join(node.describe() for node in self.all)

    def to_json(self) -> Any:
        return [asdict(node) for node in self.all]

    @classmethod
    def from_json(cls, raw: Iterable[Mapping[str, Any]]) -> Self:
        return cls(tuple(Node(tuple(item["ranks"]), item["host"], item["root"]) for item in raw))


def name_ranks(ranks: Collection[int]) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def group_by_root(identities: Sequence[str], seen: Mapping[int, Collection[int]]) -> list[tuple[int, ...]]:
    """Return the ranks of each node.

    Ranks of equal identity see the same directory. Of each identity the lowest rank left a file in its root and looked for
    the others': `seen` has whose it found. One that only one side sees is a slow file system, and not two.
    """
    group = {rank: identities.index(identity) for rank, identity in enumerate(identities)}
    for rank, others in seen.items():
        for other in others:
            kept, joined = sorted((group[rank], group[other]))
            group = {each: kept if its == joined else its for each, its in group.items()}
    return [tuple(rank for rank in group if group[rank] == leader) for leader in sorted(set(group.values()))]


# --- recovery


@dataclass(frozen=True, slots=True)
class RootState:
    """What a killed process left in one root, by the names of staging directories with the digests of their manifests.

    `prepared` ones are whole and not renamed yet, `published` ones are renamed and may lack what comes after. `committed`
    are the digests of all checkpoints there. `archives` names what lies in `archive/`, `archiving` what is being moved there.
    """

    prepared: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)
    committed: Collection[str] = ()
    lineage: str | None = None
    archives: Collection[str] = ()
    archiving: str | None = None

    def to_json(self) -> Any:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return cls(**raw)

    def has(self, digest: str) -> bool:
        return digest in self.committed or digest in (*self.prepared.values(), *self.published.values())


@dataclass(frozen=True, slots=True)
class Recovery:
    """What each root has to do: `finish` these staging directories and take all others back; archive these lineages."""

    finish: tuple[str, ...]
    archive: tuple[str, ...]

    def to_json(self) -> Any:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return cls(tuple(raw["finish"]), tuple(raw["archive"]))


def decide_recovery(states: Sequence[RootState]) -> Recovery:
    """Finish a save that every root has whole, and no other; end a move into the archive that some root began."""
    unfinished = {name: digest for state in states for name, digest in {**state.prepared, **state.published}.items()}
    finish = sorted(name for name, digest in unfinished.items() if all(state.has(digest) for state in states))
    begun = {state.archiving for state in states if state.archiving}
    for state in states:
        if state.lineage is None and not state.committed:
            begun |= set(state.archives)
    archive = sorted({state.lineage for state in states if state.lineage and state.lineage in begun})
    return Recovery(tuple(finish), tuple(archive))


# --- what to start from


@dataclass(frozen=True, slots=True)
class Report:
    """What lies in one node's root after recovery.

    `newest` is the newest readable manifest of its branch, as text, `committed` are the digests of all checkpoints there.
    """

    where: str
    lineage: str | None
    last_sequence: int
    branch: tuple[BranchEntry, ...]
    refused: Mapping[int, str]
    newest: str | None
    committed: Collection[str] = ()

    def to_json(self) -> Any:
        return {**asdict(self), "refused": [[step, reason] for step, reason in self.refused.items()]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        branch = tuple(BranchEntry(**entry) for entry in raw["branch"])
        return cls(**{**raw, "branch": branch, "refused": {step: reason for step, reason in raw["refused"]}})


def require_one_lineage(reports: Sequence[Report]) -> None:
    """Refuse roots of several runs.

    Raises:
        LineageError: naming two of them.
    """
    known = [report for report in reports if report.lineage is not None]
    for report in known[1:]:
        if report.lineage != known[0].lineage:
            raise LineageError(
                f"checkpoint.default_local_dir: {known[0].where} holds the run {known[0].lineage}, {report.where} the run"
                f" {report.lineage}; allowed are roots of the same run. Choose another checkpoint.default_local_dir or"
                " trainer.experiment_name, empty the root that is not this run's, or start over with checkpoint=fresh, which"
                " moves all of them into archive/",
            )


def join_reports(here: Survey, reports: Sequence[Report]) -> tuple[Survey, Report | None]:
    """Take all roots as one: the branch of whichever has the newest checkpoint.

    `reports` are of all nodes, `here`'s first. Whether a checkpoint is whole on every node is found out when it is tried.
    The second result is the report that the branch is from, None if that is `here`'s own.
    """
    newest = max(reports, key=lambda report: report.branch[0].sequence if report.branch else -1)
    joined = replace(here, last_sequence=max(report.last_sequence for report in reports))
    joined.refused = {**_join_refused(reports), **here.refused}
    if not newest.branch or newest.branch == here.branch:
        return joined, None
    on_branch = {entry.digest for entry in newest.branch}
    joined.lineage, joined.branch = newest.lineage, newest.branch
    joined.others = {step: commit for step, commit in here.others.items() if commit.digest not in on_branch}
    if here.tracker in (None, here.branch[0].step if here.branch else None):  # otherwise the user set it
        joined.tracker, joined.tracked = newest.branch[0].step, None
    return joined, newest


def _join_refused(reports: Sequence[Report]) -> dict[int, str]:
    return {step: f"in {report.where}: {reason}" for report in reports[1:] for step, reason in report.refused.items()}


def find_missing_ranks(
    held: Collection[int] | None, saved_world_size: int, ranks: Collection[int], world_size: int
) -> str | None:
    """Say which ranks' files would be needed on a node that holds those of `held` (None: of all); None if none are.

    `ranks` are the run's on that node.
    """
    missing = set() if held is None else set(range(saved_world_size)) - set(held)
    if missing and saved_world_size != world_size:
        absent = f"the files of {name_ranks(missing)} are not here"
        return f"{saved_world_size} ranks saved it, this run has {world_size}, and {absent}"
    if missing & set(ranks):
        return f"the files of {name_ranks(missing & set(ranks))}, who run here now, are not here"
    return None


@dataclass(frozen=True, slots=True)
class Inspection:
    """One node's look at a candidate, before all ranks read it; without any reason, nothing is in its way there.

    `damage` is in what lies there, `missing` says whose files never did: a download would mend both. `lack` is of what was
    never saved.
    """

    where: str
    leader: int
    damage: str | None = None
    missing: str | None = None
    lack: str | None = None

    def to_json(self) -> Any:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a candidate can't be used, and which ranks found that in what lies on their disks."""

    reason: str
    ranks: tuple[int, ...] = ()

    def to_json(self) -> Any:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return cls(raw["reason"], tuple(raw["ranks"]))


def join_inspections(found: Sequence[Inspection], *, can_be_pulled: bool) -> Damage | list[int]:
    """Return what is wrong with a candidate on any node, or which leaders have to download it first.

    Raises:
        RootNotSharedError: it is whole, but ranks run where their files are not; an older one would be no better.
    """
    lacks = [_tell(it, it.lack, len(found)) for it in found if it.lack]
    if lacks:
        return Damage(lacks[0])
    if can_be_pulled:
        return [it.leader for it in found if it.damage or it.missing]
    damages = [_tell(it, it.damage, len(found)) for it in found if it.damage]
    if damages:
        return Damage("; ".join(damages))
    missing = [f"{it.where}: {it.missing}" for it in found if it.missing]
    if missing:
        raise RootNotSharedError(
            f"checkpoint.default_local_dir: nodes keep their own files, and {'; '.join(missing)}. Start as many ranks,"
            " each on the node where it was; or copy the step's directories of all nodes together, on each node or a shared"
            " disk"
        )
    return []


def _tell(inspection: Inspection, reason: str | None, nodes: int) -> str:
    return f"{inspection.where}: {reason}" if nodes > 1 else str(reason)


@dataclass(frozen=True, slots=True)
class StartOrder:
    """What rank 0 tells all nodes when it is known where the run starts.

    What comes next descends from `origin`. With `makes_room` what lies in the roots is moved aside for it. `uploads` are
    the commits that the mirror lacks.
    """

    origin: Origin
    last_sequence: int
    makes_room: bool
    uploads: tuple[BranchEntry, ...] = ()

    def to_json(self) -> Any:
        return {**asdict(self), "origin": self.origin.to_json()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        uploads = tuple(BranchEntry(**entry) for entry in raw["uploads"])
        return cls(Origin.from_json(raw["origin"]), raw["last_sequence"], raw["makes_room"], uploads)
