"""What only rank 0 does with a root: hold its lease, recover it, resolve where to start, commit, prune."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from recipe_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    LineageError,
    NothingToResumeError,
)
from recipe_ckpt.lease import Lease
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.mirror_session import MirrorSession, OpenRemote
from recipe_ckpt.policies import MirrorPolicy
from recipe_ckpt.resume import Candidate, Plan, Request, build_origin, decide, find_problem, inspect_path
from recipe_ckpt.retention import Retention
from recipe_ckpt.storage import Storage
from recipe_ckpt.store import Staging, Store
from recipe_ckpt.survey import Commit, Survey, read_commit, read_files, survey
from recipe_ckpt.uploader import UploadReport

logger = logging.getLogger(__name__)

BUSY = "busy"


class RootSession:
    """The writer's side of one root, from `open` to `close`. Lives on rank 0 only."""

    def __init__(
        self,
        root: str,
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
        self._store = Store(root, storage)
        self._mirror = MirrorSession(mirror_url, self._store, storage, request, mirror_policy, retention, open_remote)
        self._lease = Lease(root, storage, request.launch_id)
        self._found = Survey()
        self._plan = Plan(())
        self._refused: dict[str, str] = {}
        self._next: Iterator[Candidate] = iter(())

    @property
    def last_upload(self) -> UploadReport | None:
        return self._mirror.last_upload

    @property
    def pending_uploads(self) -> list[int]:
        return self._mirror.pending

    @property
    def lease_token(self) -> str:
        return self._lease.token

    def open(self) -> None:
        """Take the lease, finish what a killed process left, and decide what to start from.

        Raises:
            ConfigError: the root can't be a directory, or not written into.
            LeaseHeldError: another process writes here.
            DamagedCheckpointError: a file can't be read, so nothing may be decided from what lies here.
            CheckpointError: an explicit path can't be used.
            RemoteError: the mirror can't be used, and is needed.
        """
        self._make_root_and_take_lease()
        atexit.register(self._lease.release)
        with _errors_of_the_disk(self._store.root):
            for line in self._store.recover():
                logger.warning("%s: %s", self._store.root, line)
            self._mirror.clear_pulled()
            self._found = survey(self._storage, self._store.root)
            self._found = self._mirror.join(self._found, next(self._readable_branch(), None))
            self._plan = self._decide()
        self._refused = dict(self._plan.refused or {})
        self._next = iter(self._plan.candidates)
        for note in self._plan.notes:
            logger.warning("%s: %s", self._store.root, note)
        self._warn_if_tight()

    def next_candidate(self) -> Candidate | None:
        """Return the next checkpoint worth trying; None means a fresh start. One with a URL is to be pulled first.

        Raises:
            NothingToResumeError: checkpoints are here, and none of them can be used.
            CheckpointError: the one that the user named can't be used.
        """
        while (found := next(self._next, None)) is not None:
            candidate = self._mirror.locate(found)
            if candidate.url is not None:
                return candidate
            problem = find_problem(self._storage, candidate, self._request.contents)
            if problem is None:
                return candidate
            self.refuse(candidate, problem)
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

    def start_from(self, candidate: Candidate | None) -> str | None:
        """Make what comes next descend from `candidate`, or from nothing; return the folder of what had to make room."""
        commit = self._read(candidate)
        origin = build_origin(candidate, self._request, self._found, commit)
        archived = None
        if candidate is None or not candidate.is_inside:
            with _errors_of_the_disk(self._store.root):
                archived_there = self._mirror.archive()
                archived = self._store.archive(self._found.lineage) or archived_there
            self._found = Survey()
        self._store.adopt(self._found, origin)
        self._mirror.clear_pulled()
        self._mirror.begin_uploads()
        return archived

    def begin(self, staging: Staging) -> None:
        self._lease.check()  # before staging is cleared: another process may be writing there by now
        self._store.begin(staging)

    def commit(self, staging: Staging, entries: Sequence[FileEntry], facts: Mapping[str, Any]) -> Commit:
        commit = self._store.commit(
            staging, entries, {**facts, "launch_id": self._request.launch_id}, check_lease=self._lease.check
        )
        self._mirror.add(commit.entry())
        self._mirror.raise_failure()  # when this step is safe here
        return commit

    def abandon(self, staging: Staging) -> None:
        self._store.abandon(staging)

    def prune(self) -> list[int]:
        try:
            return self._store.prune(self._retention, self._mirror.let_go)
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
        self._lease.release()
        atexit.unregister(self._lease.release)

    def _make_root_and_take_lease(self) -> None:
        root = self._store.root
        try:
            self._storage.make_dirs(root)
            self._storage.list_dir(root)
            self._lease.acquire()
        except OSError as error:
            raise ConfigError(
                "checkpoint.default_local_dir",
                f"{root} ({error.strerror or error})",
                "a directory that this user may write into",
                "Choose another one, or mend it.",
            ) from error

    def _warn_if_tight(self) -> None:
        """Compare the free space of the root's own disk with the newest checkpoint: the next one needs as much again."""
        newest = next(self._readable_branch(), None)
        if newest is None:
            return
        try:
            needed = sum(entry.size_bytes for entry in read_files(self._storage, newest).entries)
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


@contextmanager
def _errors_of_the_disk(root: str) -> Iterator[None]:
    """Name the file for which the system refused something, and stop there: a start that can't see all decides nothing."""
    try:
        yield
    except CheckpointError:
        raise  # some derive from OSError, too
    except OSError as error:
        path = error.filename or root
        raise DamagedCheckpointError(
            f"{path}: {error.strerror or error}. Nothing was started: without this, what lies here can't be told. Mend it,"
            " then start again",
            path=path,
        ) from error
