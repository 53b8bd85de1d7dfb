"""What rank 0 decides for all nodes: where to start, what is committed, what is pruned."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from recipe_ckpt.errors import CheckpointError, NothingToResumeError
from recipe_ckpt.manifest import FileEntry, Manifest
from recipe_ckpt.mirror_session import MirrorSession
from recipe_ckpt.node_session import NodeSession, errors_of_the_disk
from recipe_ckpt.nodes import Damage, Report, StartOrder, join_reports, require_one_lineage
from recipe_ckpt.resume import Candidate, Plan, Request, build_origin, decide, inspect_path
from recipe_ckpt.retention import Retention
from recipe_ckpt.sealing import Sealed, Staging
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import Commit, Survey, read_commit, read_held

logger = logging.getLogger(__name__)


class RootSession:
    """The decisions of one run, from `open` to `close`. Lives on rank 0 only; `node` is the one that rank 0 is on."""

    def __init__(
        self,
        node: NodeSession,
        storage: Storage,
        request: Request,
        retention: Retention,
    ) -> None:
        self._storage = storage
        self._request = request
        self._retention = retention
        self._node = node
        self._store = node.store
        self._mirror = MirrorSession(node.mirror, self._store, request)
        self._found = Survey()
        self._held_everywhere: frozenset[str] = frozenset()
        self._newest_elsewhere: Commit | None = None
        self._plan = Plan(())
        self._refused: dict[str, str] = {}
        self._next: Iterator[Candidate] = iter(())

    def open(self, reports: Sequence[Report]) -> None:
        """Decide what to start from, when every node has recovered its root; `reports` are theirs, this node's first.

        Raises:
            LineageError: the nodes' roots, or root and mirror, are of different runs.
            DamagedCheckpointError: a file can't be read, so nothing may be decided from what lies here.
            CheckpointError: an explicit path can't be used.
            RemoteError: the mirror can't be used, and is needed.
        """
        with errors_of_the_disk(self._store.root):
            self._found = self._join(reports)
            self._found = self._mirror.join(self._found, next(self._readable_branch(), None))
            if len(reports) == 1:
                self._node.found = self._found
            self._plan = self._decide()
        self._held_everywhere = frozenset.intersection(*(frozenset(report.committed) for report in reports))
        self._refused = dict(self._plan.refused or {})
        self._next = iter(self._plan.candidates)
        for note in self._plan.notes:
            logger.warning("%s: %s", self._store.root, note)
        self._warn_if_tight()

    def _join(self, reports: Sequence[Report]) -> Survey:
        if len(reports) == 1:
            return self._node.found
        if self._request.mode != "disable":  # which moves all of them aside
            require_one_lineage(reports)
        found, elsewhere = join_reports(self._node.found, reports)
        if elsewhere is not None and elsewhere.newest is not None:
            manifest = Manifest.decode(elsewhere.newest.encode(), elsewhere.where)
            digest = next(entry.digest for entry in elsewhere.branch if entry.sequence == manifest.sequence)
            self._newest_elsewhere = Commit(self._store.path_of(manifest.step), digest, manifest)
        return found

    def next_candidate(self) -> Candidate | None:
        """Return the next checkpoint to be tried; None means a fresh start. One with a URL is to be pulled first.

        Raises:
            NothingToResumeError: checkpoints are here, and none of them can be used.
            CheckpointError: the one that the user named can't be used.
        """
        if (found := next(self._next, None)) is not None:
            return self._mirror.locate(found)
        if self._refused:
            raise self._nothing_usable()
        return None

    def find_lack(self, candidate: Candidate) -> str | None:
        """Say what a candidate that is to be downloaded was saved without."""
        return self._mirror.find_lack(candidate)

    def note_pulled(self, candidate: Candidate, ranks: Sequence[int]) -> None:
        """These ranks' nodes have downloaded a candidate: damage that they find from now on is the mirror's, too."""
        self._mirror.note_pulled(candidate, ranks)

    def refuse(self, candidate: Candidate, damage: Damage) -> None:
        """Note why a candidate is passed over. The mirror's copy of a damaged one comes next, if there is one.

        Raises:
            NothingToResumeError: the user named it, so nothing may take its place.
        """
        if (retried := self._mirror.retry(candidate, damage.ranks)) is not None:
            logger.warning("%s: %s. The mirror has it, too", candidate.path, damage.reason)
            self._next = chain([retried], self._next)
            return
        self._refused[candidate.path] = damage.reason
        if self._plan.is_explicit:
            raise NothingToResumeError(
                f"{candidate.path}: {damage.reason}. checkpoint.resume_mode=resume_path takes exactly this checkpoint; name"
                " another one, or write checkpoint.resume_mode=auto for the newest whole one",
                step=candidate.step,
                path=candidate.path,
            )
        logger.warning("%s: passed over: %s", candidate.path, damage.reason)

    def order_start(self, candidate: Candidate | None) -> StartOrder:
        """Say to all nodes what comes next descends from, what has to make room for it, and what the mirror lacks of it."""
        origin = build_origin(candidate, self._request, self._found, self._read(candidate))
        makes_room = candidate is None or not candidate.is_inside
        uploads = self._mirror.choose_uploads(origin.branch, self._held_everywhere)
        return StartOrder(origin, 0 if makes_room else self._found.last_sequence, makes_room, tuple(uploads))

    def start(self, order: StartOrder) -> str | None:
        """Do what was ordered on rank 0's node; return the folder of what had to make room."""
        archived_there = None
        if order.makes_room:
            with errors_of_the_disk(self._store.root):
                archived_there = self._mirror.archive()
        archived = self._node.start(order, self._mirror.claim)
        return archived or archived_there

    def begin(self, staging: Staging) -> None:
        self._node.begin(staging)

    def commit(self, staging: Staging, entries: Sequence[FileEntry], facts: Mapping[str, Any]) -> None:
        self._node.commit(staging, entries, self._complete(facts))

    def seal(self, step: int, entries: Sequence[FileEntry], facts: Mapping[str, Any]) -> Sealed:
        return self._store.seal(step, entries, self._complete(facts))

    def _complete(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {**facts, "launch_id": self._request.launch_id}

    def choose_deletions(self, *, present: Collection[int], pinned: Collection[int]) -> list[int]:
        """Return what retention no longer keeps, and the mirror does not need any more."""
        return self._node.mirror.let_go(self._store.choose_deletions(self._retention, present=present, pinned=pinned))

    def prune(self) -> list[int]:
        try:
            doomed = self.choose_deletions(present=self._store.list_committed(), pinned=self._store.list_pins())
            return self._store.delete(doomed)
        except OSError as error:
            logger.warning("%s: nothing was pruned, will be tried again: %s", self._store.root, error)
            return []

    def _warn_if_tight(self) -> None:
        """Compare the free space of the root's own disk with the newest checkpoint: the next one needs as much again."""
        newest = next(self._readable_branch(), None)
        if newest is None:
            return
        try:
            needed = sum(entry.size_bytes for entry in read_held(self._storage, newest).table.entries)
        except CheckpointError:
            return
        free = self._storage.free_bytes(self._store.root)
        if free < needed:
            logger.warning(
                "%s: %.1f MB are free on its disk, the last checkpoint takes %.1f MB: the next save may fail. Make room, or"
                " choose another checkpoint.default_local_dir",
                self._store.root,
                free / 1e6,
                needed / 1e6,
            )

    def _decide(self) -> Plan:
        named: Candidate | CheckpointError | None = None
        if self._request.path is not None and self._request.mode != "disable":
            try:
                named = self._inspect(self._request.path)
            except CheckpointError as error:
                named = error
        newest = next(self._readable_branch(), None)
        return decide(self._request, self._store.root, self._found, newest=newest, named=named)

    def _inspect(self, path: str) -> Candidate:
        if "://" in path or self._mirror.covers(path):
            return self._mirror.inspect_url(path)
        return inspect_path(self._storage, path, self._store.root)

    def _readable_branch(self) -> Iterator[Commit]:
        if self._newest_elsewhere is not None:
            yield self._newest_elsewhere
        for entry in self._found.branch:
            try:
                yield read_commit(self._storage, self._store.path_of(entry.step))
            except (CheckpointError, OSError):
                if (commit := self._mirror.read(entry)) is not None:
                    yield commit

    def _read(self, candidate: Candidate | None) -> Commit | None:
        if candidate is None or candidate.digest is None:
            return None
        return read_commit(self._storage, candidate.path)

    def _nothing_usable(self) -> NothingToResumeError:
        reasons = "".join(f"\n  {path}: {reason}" for path, reason in self._refused.items())
        return NothingToResumeError(
            f"{self._store.root}: none of the checkpoints here can be used:{reasons}\nMend one of them, name another one with"
            " checkpoint.resume_mode=resume_path checkpoint.resume_from_path=<path>, or start over with checkpoint=fresh"
            " (checkpoint.resume_mode=disable), which moves these into archive/",
            path=self._store.root,
        )
