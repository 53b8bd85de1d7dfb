"""What rank 0 decides for all nodes: where to start, what is committed, what is pruned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from recipe_ckpt.errors import (
    CheckpointError,
    DamagedCheckpointError,
    LineageError,
    NothingToResumeError,
)
from recipe_ckpt.manifest import FileEntry, Manifest
from recipe_ckpt.mirror_session import MirrorSession, OpenRemote
from recipe_ckpt.node_session import NodeSession, errors_of_the_disk
from recipe_ckpt.nodes import Report, join_reports, require_one_lineage
from recipe_ckpt.policies import MirrorPolicy
from recipe_ckpt.resume import Candidate, Plan, Request, build_origin, decide, find_problem, inspect_path
from recipe_ckpt.retention import Retention
from recipe_ckpt.storage import Storage
from recipe_ckpt.store import Origin, Sealed, Staging
from recipe_ckpt.survey import Commit, Survey, read_commit, read_held
from recipe_ckpt.uploader import UploadReport

logger = logging.getLogger(__name__)

BUSY = "busy"


class RootSession:
    """The decisions of one run, from `open` to `close`. Lives on rank 0 only; `node` is the one that rank 0 is on."""

    def __init__(
        self,
        node: NodeSession,
        storage: Storage,
        request: Request,
        retention: Retention,
        *,
        mirror_url: str | None,
        mirror_policy: MirrorPolicy,
        open_remote: OpenRemote,
    ) -> None:
        self._storage = storage
        self._request = request
        self._retention = retention
        self._node = node
        self._store = node.store
        self._mirror = MirrorSession(mirror_url, self._store, storage, request, mirror_policy, retention, open_remote)
        self._found = Survey()
        self._newest_elsewhere: Commit | None = None
        self._plan = Plan(())
        self._refused: dict[str, str] = {}
        self._next: Iterator[Candidate] = iter(())

    @property
    def last_upload(self) -> UploadReport | None:
        return self._mirror.last_upload

    @property
    def pending_uploads(self) -> list[int]:
        return self._mirror.pending

    def open(self, reports: Sequence[Report]) -> None:
        """Decide what to start from, when every node has recovered its root; `reports` are theirs, this node's first.

        Raises:
            LineageError: the nodes' roots, or root and mirror, are of different runs.
            DamagedCheckpointError: a file can't be read, so nothing may be decided from what lies here.
            CheckpointError: an explicit path can't be used.
            RemoteError: the mirror can't be used, and is needed.
        """
        with errors_of_the_disk(self._store.root):
            self._mirror.clear_pulled()
            self._found = self._join(reports)
            self._found = self._mirror.join(self._found, next(self._readable_branch(), None))
            if len(reports) == 1:
                self._node.found = self._found
            self._plan = self._decide()
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

    def poll_pull(self, candidate: Candidate, within_secs: float) -> str | None:
        """Download a candidate, begun by the first call: "busy" until that has ended, then None, or what is damaged there.

        Raises:
            RemoteError: it could not be downloaded.
            ConfigError: the disk here did not take it.
        """
        try:
            if not self._mirror.poll_pull(candidate, within_secs):
                return BUSY
        except (DamagedCheckpointError, LineageError) as error:
            return str(error)
        return find_problem(self._storage, candidate, self._request.contents)

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Note why a candidate is passed over. The mirror's copy of a damaged one comes next, if there is one.

        Raises:
            NothingToResumeError: the user named it, so nothing may take its place.
        """
        if self._mirror.is_worth_a_download(candidate):
            logger.warning("%s: %s. The mirror has it, too", candidate.path, reason)
            self._next = chain([candidate], self._next)
            return
        self._refused[candidate.path] = reason
        if self._plan.is_explicit:
            raise NothingToResumeError(
                f"{candidate.path}: {reason}. checkpoint.resume_mode=resume_path takes exactly this checkpoint; name another"
                " one, or write checkpoint.resume_mode=auto for the newest whole one",
                step=candidate.step,
                path=candidate.path,
            )
        logger.warning("%s: passed over: %s", candidate.path, reason)

    def build_origin(self, candidate: Candidate | None) -> tuple[Origin, int]:
        """Say what comes next descends from, and the last sequence that was given out."""
        origin = build_origin(candidate, self._request, self._found, self._read(candidate))
        makes_room = candidate is None or not candidate.is_inside
        return origin, 0 if makes_room else self._found.last_sequence

    def start(self, origin: Origin, last_sequence: int, *, archive: bool) -> str | None:
        """Make what comes next descend from `origin`; return the folder of what had to make room."""
        archived_there = None
        if archive:
            with errors_of_the_disk(self._store.root):
                archived_there = self._mirror.archive()
        archived = self._node.start(origin, last_sequence, archive=archive) or archived_there
        self._mirror.clear_pulled()
        self._mirror.begin_uploads()
        return archived

    def begin(self, staging: Staging) -> None:
        self._node.begin(staging)

    def commit(self, staging: Staging, entries: Sequence[FileEntry], facts: Mapping[str, Any]) -> Commit:
        commit = self._store.commit(staging, entries, self._complete(facts), check_lease=self._node.check_lease)
        self._mirror.add(commit.entry())
        self._mirror.raise_failure()  # when this step is safe here
        return commit

    def seal(self, step: int, entries: Sequence[FileEntry], facts: Mapping[str, Any]) -> Sealed:
        return self._store.seal(step, entries, self._complete(facts))

    def _complete(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {**facts, "launch_id": self._request.launch_id}

    def choose_deletions(self, *, present: Collection[int], pinned: Collection[int]) -> list[int]:
        """Return what retention no longer keeps, and the mirror does not need any more."""
        return self._mirror.let_go(self._store.choose_deletions(self._retention, present=present, pinned=pinned))

    def prune(self) -> list[int]:
        try:
            doomed = self.choose_deletions(present=self._store.list_committed(), pinned=self._store.list_pins())
            return self._store.delete(doomed)
        except OSError as error:
            logger.warning("%s: nothing was pruned, will be tried again: %s", self._store.root, error)
            return []

    def drain(self, should_stop: Callable[[], bool]) -> None:
        """Wait for the uploads that are not done, at most `exit_upload_wait_secs`."""
        self._mirror.drain(should_stop)

    def raise_upload_failure(self) -> None:
        self._mirror.raise_failure()

    def close(self) -> None:
        self._mirror.close()

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
