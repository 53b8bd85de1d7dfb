"""What rank 0 does with remotes, from a run's start to its end: the mirror, and URLs that the user names."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from recipe_ckpt import layout
from recipe_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedCheckpointError,
    LineageError,
    NothingToResumeError,
    RemoteError,
    to_clause,
)
from recipe_ckpt.manifest import BranchEntry
from recipe_ckpt.mirror import Claim, Mirror, join_surveys
from recipe_ckpt.policies import MirrorPolicy
from recipe_ckpt.remote import Remote
from recipe_ckpt.resume import Candidate, Request
from recipe_ckpt.retention import Retention
from recipe_ckpt.storage import Storage
from recipe_ckpt.store import Staging, Store
from recipe_ckpt.survey import Commit, Survey, list_pins, read_commit, survey
from recipe_ckpt.transfer import Pull, fetch
from recipe_ckpt.uploader import Uploader, UploadReport

logger = logging.getLogger(__name__)

OpenRemote = Callable[[str], Remote]


class MirrorSession:
    """The remotes of one root. `url` is its mirror's, or None; `open_remote` connects to a URL."""

    def __init__(
        self,
        url: str | None,
        store: Store,
        storage: Storage,
        request: Request,
        policy: MirrorPolicy,
        retention: Retention,
        open_remote: OpenRemote,
    ) -> None:
        self._store = store
        self._storage = storage
        self._request = request
        self._policy = policy
        self._retention = replace(retention, max_to_keep=policy.max_to_keep)
        self._open_remote = open_remote
        self._mirror = None if url is None else Mirror(open_remote(url), store.root, storage)
        self._others: dict[str, Remote] = {}
        self._found: Survey | None = None
        self._known: set[str] = set()
        self._damaged_here: set[str] = set()
        self._pull: Pull | None = None
        self._ended = threading.Event()
        self._uploader: Uploader | None = None

    @property
    def last_upload(self) -> UploadReport | None:
        return self._uploader.last_upload if self._uploader else None

    @property
    def pending(self) -> list[int]:
        return self._uploader.pending if self._uploader else []

    # --- the start

    def join(self, here: Survey, newest_here: Commit | None) -> Survey:
        """Return what lies in the root and on the mirror, taken as one set.

        Raises:
            RemoteError: the mirror can't be used, and no whole local checkpoint makes up for that.
            LineageError: root and mirror are of different runs.
            NothingToResumeError: the mirror holds something else, and nothing is here.
        """
        if self._mirror is None:
            return here
        self._known = {entry.digest for entry in _list_entries(here)}
        try:
            self._mirror.remote.probe()
            self._found = self._mirror.survey()
        except RemoteError as error:
            self._tolerate(error, newest_here)
            return here
        self._known |= {entry.digest for entry in _list_entries(self._found)}
        if newest_here is None and self._request.mode == "auto" and self._request.path is None:
            self._refuse_strangers(self._mirror, self._found)
        for note in self._found.notes:
            logger.warning("%s: %s", self._mirror.url, note)
        newest_there = next((commit for e in self._found.branch if (commit := self.read(e))), None)
        try:
            joined = join_surveys(here, self._found, self._mirror.url, newest_here, newest_there)
        except LineageError:
            if self._request.mode != "disable":
                raise
            return here  # both are moved aside
        for step in self._found.refused.keys() - {entry.step for entry in joined.branch}:
            name = layout.build_step_name(step)
            logger.warning("%s/%s: passed over: %s", self._mirror.url, name, self._found.refused[step])
        return joined

    def _refuse_strangers(self, mirror: Mirror, found: Survey) -> None:
        if found.branch or not (strangers := mirror.find_strangers(found)):
            return
        urls = {f"{mirror.url}/{layout.build_step_name(step)}": reason for step, reason in sorted(strangers.items())}
        listed = "".join(f"\n  {url}: {reason}" for url, reason in urls.items())
        raise NothingToResumeError(
            f"checkpoint.default_hdfs_dir: {mirror.url} holds nothing that this run could continue:{listed}\nName one with"
            f" checkpoint.resume_mode=resume_path checkpoint.resume_from_path={list(urls)[-1]}, choose another"
            " checkpoint.default_hdfs_dir, or start over with checkpoint=fresh, which moves these into archive/",
            path=mirror.url,
        )

    def _tolerate(self, error: RemoteError, newest_here: Commit | None) -> None:
        assert self._mirror is not None
        is_needed = newest_here is None or self._request.mode != "auto" or self._policy.on_failure == "raise"
        if is_needed:
            raise type(error)(
                f"checkpoint.default_hdfs_dir: {self._mirror.url} can't be used: {to_clause(error)}. Allowed is a mirror that"
                " this user can reach and write into. Mend it, write checkpoint.default_hdfs_dir=null to go on without it,"
                " or, where a whole checkpoint lies here, checkpoint.on_upload_failure=warn",
                path=self._mirror.url,
            ) from error
        if self._policy.on_failure == "warn":
            logger.warning(
                "%s can't be used: %s. Resuming from what lies in %s; uploads are tried again later",
                self._mirror.url,
                to_clause(error),
                self._store.root,
            )

    def read(self, entry: BranchEntry) -> Commit | None:
        """Return a commit as the mirror has it, with its path in the root; None if it is not there, or damaged."""
        if self._mirror is None or not self.has(entry.digest):
            return None
        try:
            commit = read_commit(self._mirror.remote, layout.build_step_name(entry.step))
        except RemoteError:
            raise
        except (CheckpointError, OSError):
            return None
        return replace(commit, path=self._store.path_of(entry.step))

    def has(self, digest: str | None) -> bool:
        return self._found is not None and any(entry.digest == digest for entry in _list_entries(self._found))

    def locate(self, candidate: Candidate) -> Candidate:
        """Say where a candidate of the root is to be read: here, if it is here, else on the mirror."""
        if not candidate.is_inside or candidate.digest is None:
            return candidate
        if candidate.digest not in self._damaged_here and self._is_here(candidate.path, candidate.digest):
            return replace(candidate, url=None)
        if self._mirror is None or not self.has(candidate.digest):
            return candidate
        return replace(candidate, url=f"{self._mirror.url}/{layout.build_step_name(candidate.step)}")

    def is_worth_a_download(self, candidate: Candidate) -> bool:
        """Say whether the mirror has what was found damaged here; from now on it is read from there."""
        if candidate.url is not None or candidate.digest is None or not candidate.is_inside or not self.has(candidate.digest):
            return False
        self._damaged_here.add(candidate.digest)
        return True

    def covers(self, path: str) -> bool:
        """Say whether a local path names the mirror, a mounted disk, or a step there."""
        return self._mirror is not None and self._mirror.url in (path, os.path.dirname(path))

    def inspect_url(self, url: str) -> Candidate:
        """Find the checkpoint that an explicit URL names: a step directory, or a run's root (then its newest).

        Raises:
            CheckpointNotFoundError: nothing is there, or it is neither.
            DamagedCheckpointError: it is a step directory without all of its files.
            RemoteError: it can't be reached.
        """
        base, _, name = url.rstrip("/").rpartition("/")
        if layout.parse_step_name(name) is None:
            remote = self._connect(url.rstrip("/"))
            found = survey(remote, "")
            if isinstance(found.tracker, int) and found.tracker in found.foreign:
                name = layout.build_step_name(found.tracker)
            elif found.branch:
                name = layout.build_step_name(found.branch[0].step)
            else:
                raise _not_found(url)
        else:
            remote = self._connect(base)
        step = layout.parse_step_name(name)
        assert step is not None
        reason, digest = "checkpoint.resume_from_path names it", None
        try:
            digest = read_commit(remote, name).digest
        except FileNotFoundError as error:
            names = [entry.name for entry in remote.list_dir(name)]
            if not names:
                raise _not_found(url) from error
            if problem := layout.find_foreign_problem(names):
                raise DamagedCheckpointError(f"{url}: can't be resumed from: {problem}", step=step, path=url) from error
            reason += f"; unverified: no {layout.MANIFEST}"
        is_inside = self._mirror is not None and remote.url == self._mirror.url and digest is not None
        path = self._store.path_of(step) if is_inside else os.path.join(self._store.root, layout.PULLED_DIR, name)
        return Candidate(step, path, digest, reason, is_inside, is_named=True, url=f"{remote.url}/{name}")

    def _connect(self, url: str) -> Remote:
        if self._mirror is not None and url == self._mirror.url:
            return self._mirror.remote
        if url not in self._others:
            remote = self._open_remote(url)
            if self._mirror is not None and remote.url == self._mirror.url:
                remote.close()
                remote = self._mirror.remote
            self._others[url] = remote
        return self._others[url]

    def poll_pull(self, candidate: Candidate, within_secs: float) -> bool:
        """Download a candidate, begun by the first call; say whether that has ended. Raises: as `Pull.poll`."""
        assert candidate.url is not None
        if self._pull is None:
            self._pull = Pull(candidate.url, lambda on_bytes: self._download(candidate, on_bytes))
            self._pull.start()
        try:
            has_ended = self._pull.poll(within_secs)
        except Exception:
            self._pull = None
            raise
        if has_ended:
            self._pull = None
        return has_ended

    def _download(self, candidate: Candidate, on_bytes: Callable[[int], None]) -> None:
        try:
            if candidate.is_inside:
                self._download_into_root(candidate, on_bytes)
            else:
                self.clear_pulled()
                self._fetch(candidate, candidate.path, on_bytes)
        except CheckpointError:
            raise  # some derive from OSError, too
        except OSError as error:
            raise ConfigError(
                "checkpoint.default_local_dir",
                f"{self._store.root} ({error.strerror or error})",
                f"a disk with room for {candidate.url}",
                "Make room there, or choose another one.",
            ) from error

    def _download_into_root(self, candidate: Candidate, on_bytes: Callable[[int], None]) -> None:
        staging = Staging.of(self._store.root, candidate.step, uuid.uuid4().hex[:12])
        try:
            self._fetch(candidate, staging.path, on_bytes)
            if read_commit(self._storage, staging.path).digest != candidate.digest:
                raise DamagedCheckpointError(f"{candidate.url}: is not the checkpoint that was chosen", path=candidate.url)
            self._store.admit(staging)
        except BaseException:
            self._store.abandon(staging)
            raise

    def _fetch(self, candidate: Candidate, directory: str, on_bytes: Callable[[int], None]) -> None:
        assert candidate.url is not None
        base, _, name = candidate.url.rpartition("/")
        fetch(self._connect(base), name, directory, self._storage, self._ended, on_bytes)

    def clear_pulled(self) -> None:
        """Remove what was downloaded from elsewhere: the run has read it, or a killed process left it."""
        pulled = os.path.join(self._store.root, layout.PULLED_DIR)
        if self._storage.exists(pulled):
            self._storage.remove_tree(pulled)

    def archive(self) -> str | None:
        """Make room on the mirror for a new run."""
        if self._mirror is None or self._found is None:
            return None
        archived = self._mirror.archive(self._found)
        self._found = Survey()
        return archived

    # --- training

    def begin_uploads(self) -> None:
        """Start to send what the mirror lacks of the branch."""
        if self._mirror is None:
            return
        branch = self._store.origin.branch
        self._known |= {entry.digest for entry in branch}
        self._uploader = Uploader(
            self._mirror,
            self._store.root,
            self._storage,
            self._policy,
            self._retention,
            claim=lambda: Claim(self._store.origin, self._store.last_sequence, frozenset(self._known)),
            list_pins=lambda: list_pins(self._storage, self._store.root),
        )
        there = _list_published(self._found) if self._found else set()
        self._uploader.start(
            entry
            for entry in branch
            if entry.digest not in there and self._is_here(self._store.path_of(entry.step), entry.digest)
        )

    def add(self, entry: BranchEntry) -> None:
        """Hand a commit to the mirror."""
        self._known.add(entry.digest)
        if self._uploader is not None:
            self._uploader.add(entry)

    def let_go(self, doomed: list[int]) -> list[int]:
        return self._uploader.let_go(doomed) if self._uploader else doomed

    def raise_failure(self) -> None:
        if self._uploader is not None:
            self._uploader.raise_failure()

    def drain(self, should_stop: Callable[[], bool]) -> None:
        """Wait for the uploads, at most `exit_wait_secs`."""
        if self._uploader is not None:
            self._uploader.drain(self._policy.exit_wait_secs, should_stop)

    def close(self) -> None:
        self._ended.set()
        if self._uploader is not None:
            self._uploader.close()
        elif self._mirror is not None:
            self._mirror.remote.close()
        for remote in self._others.values():
            remote.close()
        if self._pull is not None:
            self._pull.join()

    def _is_here(self, path: str, digest: str) -> bool:
        try:
            return read_commit(self._storage, path).digest == digest
        except (CheckpointError, OSError):
            return False


def _list_entries(found: Survey) -> Iterable[BranchEntry]:
    return [*found.branch, *(commit.entry() for commit in found.others.values())]


def _list_published(found: Survey) -> set[str]:
    """Return the digests of what a mirror's pointers name. Where the tracker lags behind, the newest is published again."""
    is_behind = bool(found.branch) and found.tracker != found.branch[0].step
    return {entry.digest for entry in found.branch[1 if is_behind else 0 :]}


def _not_found(url: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"checkpoint.resume_from_path: found {url!r}, where no checkpoint lies; allowed is <run>/global_step_<N>, or a run's"
        " directory for its newest checkpoint",
        path=url,
    )
