"""What rank 0 decides about remotes: what of a mirror counts, what a URL names, what is sent and may be published."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import replace

from recipe_ckpt import layout
from recipe_ckpt.branches import Claim, join_surveys
from recipe_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    LineageError,
    NothingToResumeError,
    RemoteError,
)
from recipe_ckpt.manifest import BranchEntry
from recipe_ckpt.mirror import Mirror
from recipe_ckpt.node_mirror import NodeMirror
from recipe_ckpt.resume import Candidate, Request, find_lack
from recipe_ckpt.store import Store
from recipe_ckpt.survey import Commit, Survey, read_commit, survey

logger = logging.getLogger(__name__)


class MirrorSession:
    """The decisions about one run's mirror. `node` is the way of rank 0's node to it, `store` that node's root."""

    def __init__(self, node: NodeMirror, store: Store, request: Request) -> None:
        self._node = node
        self._mirror = node.mirror
        self._store = store
        self._request = request
        self._found: Survey | None = None
        self._known: set[str] = set()
        self._retried: dict[str, set[int]] = {}

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
            self._node.tolerate(error, is_needed=newest_here is None or self._request.mode != "auto")
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
        """Say where a candidate of the root can be downloaded from, by the nodes that lack it."""
        if self._mirror is None or not candidate.is_inside or not self.has(candidate.digest):
            return candidate
        return replace(candidate, url=f"{self._mirror.url}/{layout.build_step_name(candidate.step)}")

    def find_lack(self, candidate: Candidate) -> str | None:
        """Say what a candidate that is to be downloaded was saved without; None, too, if that can't be told there."""
        base, _, name = str(candidate.url).rpartition("/")
        try:
            return find_lack(read_commit(self._node.connect(base), name), self._request.contents)
        except RemoteError:
            raise
        except (CheckpointError, OSError):
            return None

    def note_pulled(self, candidate: Candidate, ranks: Iterable[int]) -> None:
        """These ranks' nodes have downloaded a candidate: damage that they find from now on is the mirror's, too."""
        self._retried.setdefault(candidate.digest or "", set()).update(ranks)

    def retry(self, candidate: Candidate, damaged_on: Iterable[int]) -> Candidate | None:
        """Return a candidate that these ranks found damaged as one for their nodes to download; None if that is no use."""
        ranks = set(damaged_on) - self._retried.get(candidate.digest or "", set())
        if candidate.url is None or not candidate.is_inside or not ranks:
            return None
        return replace(candidate, damaged_on=tuple(sorted(ranks)))

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
            remote = self._node.connect(url.rstrip("/"))
            found = survey(remote, "")
            if isinstance(found.tracker, int) and found.tracker in found.foreign:
                name = layout.build_step_name(found.tracker)
            elif found.branch:
                name = layout.build_step_name(found.branch[0].step)
            else:
                raise _not_found(url)
        else:
            remote = self._node.connect(base)
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

    def archive(self) -> str | None:
        """Make room on the mirror for a new run."""
        if self._mirror is None or self._found is None:
            return None
        archived = self._mirror.archive(self._found)
        self._found = Survey()
        return archived

    def choose_uploads(self, branch: Iterable[BranchEntry], held_everywhere: Collection[str]) -> list[BranchEntry]:
        """Return what the mirror lacks of a branch, as far as every node has its part of it."""
        there = _list_published(self._found) if self._found else set()
        lacking = [entry for entry in branch if entry.digest not in there]
        return [entry for entry in lacking if entry.digest in held_everywhere or self.has(entry.digest)]

    def claim(self) -> Claim:
        """Say what this run may publish at the moment."""
        origin = self._store.origin
        known = self._known.union(entry.digest for entry in origin.branch)
        return Claim(origin, self._store.last_sequence, frozenset(known))


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
