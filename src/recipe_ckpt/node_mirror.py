"""One node's way to its mirror, and to URLs that the user names: downloads what its ranks read, sends what they wrote."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from recipe_ckpt import layout
from recipe_ckpt.branches import Claim
from recipe_ckpt.errors import CheckpointError, ConfigError, DamagedCheckpointError, LineageError, RemoteError, to_clause
from recipe_ckpt.manifest import BranchEntry
from recipe_ckpt.mirror import Mirror
from recipe_ckpt.nodes import Node
from recipe_ckpt.policies import MirrorPolicy
from recipe_ckpt.remote import OnBytes, Remote
from recipe_ckpt.resume import Candidate
from recipe_ckpt.retention import Retention
from recipe_ckpt.sealing import Staging
from recipe_ckpt.step_sender import StepSender
from recipe_ckpt.store import Store
from recipe_ckpt.survey import list_pins, read_commit
from recipe_ckpt.transfer import Pull, fetch
from recipe_ckpt.uploader import Uploader, UploadReport

logger = logging.getLogger(__name__)

OpenRemote = Callable[[str], Remote]


class NodeMirror:
    """The remotes of one root. Lives on the node's leader only.

    Args:
        url: the mirror's; None: there is none.
        node: whose root it is, in a run of `world_size` ranks.
        retention: what stays on the mirror.
        open_remote: connects to a URL.
    """

    def __init__(
        self,
        url: str | None,
        node: Node,
        world_size: int,
        store: Store,
        policy: MirrorPolicy,
        retention: Retention,
        open_remote: OpenRemote,
    ) -> None:
        self.policy = policy
        self._node = node
        self._world_size = world_size
        self._store = store
        self._storage = store.storage
        self._retention = retention
        self._open_remote = open_remote
        self.mirror = None if url is None else Mirror(open_remote(url))
        self._others: dict[str, Remote] = {}
        self._pull: Pull | None = None
        self._ended = threading.Event()
        self._uploader: Uploader | None = None

    @property
    def last_upload(self) -> UploadReport | None:
        return self._uploader.last_upload if self._uploader else None

    @property
    def pending(self) -> list[int]:
        return self._uploader.pending if self._uploader else []

    def connect(self, url: str) -> Remote:
        """Return the remote at a URL; that it can be reached is not known yet."""
        if self.mirror is not None and url == self.mirror.url:
            return self.mirror.remote
        if url not in self._others:
            remote = self._open_remote(url)
            if self.mirror is not None and remote.url == self.mirror.url:
                remote.close()
                remote = self.mirror.remote
            self._others[url] = remote
        return self._others[url]

    def probe(self, *, is_needed: bool) -> None:
        """See that this node can use the mirror.

        Raises:
            RemoteError: it can't, and it `is_needed`, or `on_upload_failure` is `raise`.
        """
        if self.mirror is None:
            return
        try:
            self.mirror.remote.probe()
        except RemoteError as error:
            self.tolerate(error, is_needed=is_needed)

    def tolerate(self, error: RemoteError, *, is_needed: bool) -> None:
        """Go on without the mirror for now, or raise."""
        assert self.mirror is not None
        if is_needed or self.policy.on_failure == "raise":
            raise type(error)(
                f"checkpoint.default_hdfs_dir: {self.mirror.url} can't be used: {to_clause(error)}. Allowed is a mirror that"
                " this user can reach and write into. Mend it, write checkpoint.default_hdfs_dir=null to go on without it,"
                " or, where a whole checkpoint lies here, checkpoint.on_upload_failure=warn",
                path=self.mirror.url,
            ) from error
        if self.policy.on_failure == "warn":
            logger.warning(
                "%s can't be used: %s. Resuming from what lies in %s; uploads are tried again later",
                self.mirror.url,
                to_clause(error),
                self._store.root,
            )

    # --- the start

    def begin_pull(self, candidate: Candidate) -> None:
        """Start to download a candidate to its path, in a thread; `poll_pull` tells how it goes."""
        self._pull = Pull(lambda on_bytes: self._download(candidate, on_bytes))
        self._pull.start()

    def poll_pull(self, within_secs: float) -> dict[str, Any]:
        """Return what has come so far, whether the download `is_done`, and then what is damaged there, if anything is.

        Raises:
            RemoteError: it could not be downloaded.
            ConfigError: the disk here did not take it.
        """
        assert self._pull is not None
        is_done, damage = True, None
        try:
            is_done = self._pull.poll(within_secs)
        except (DamagedCheckpointError, LineageError) as error:
            damage = str(error)
        return {"is_done": is_done, "damage": damage, "size_bytes": self._pull.size_bytes}

    def _download(self, candidate: Candidate, on_bytes: OnBytes) -> None:
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

    def _download_into_root(self, candidate: Candidate, on_bytes: OnBytes) -> None:
        staging = Staging.of(self._store.root, candidate.step, uuid.uuid4().hex[:12])
        try:
            self._fetch(candidate, staging.path, on_bytes)
            if read_commit(self._storage, staging.path).digest != candidate.digest:
                raise DamagedCheckpointError(f"{candidate.url}: is not the checkpoint that was chosen", path=candidate.url)
            self._store.admit(staging)
        except BaseException:
            self._store.abandon(staging)
            raise

    def _fetch(self, candidate: Candidate, directory: str, on_bytes: OnBytes) -> None:
        assert candidate.url is not None
        base, _, name = candidate.url.rpartition("/")
        remote = self.connect(base)
        fetch(remote, name, directory, self._storage, self._ended, on_bytes, ranks=self._node.ranks, of=self._world_size)

    def clear_pulled(self) -> None:
        """Remove what was downloaded from elsewhere: the run has read it, or a killed process left it."""
        pulled = os.path.join(self._store.root, layout.PULLED_DIR)
        if self._storage.exists(pulled):
            self._storage.remove_tree(pulled)

    # --- training

    def begin_uploads(self, entries: Iterable[BranchEntry], claim: Callable[[], Claim] | None) -> None:
        """Send these committed steps, newest first, and from now on what is added. `claim` is None on nodes but rank 0's."""
        if self.mirror is None:
            return
        is_alone = len(self._node.ranks) == self._world_size
        self._uploader = Uploader(
            self.mirror,
            StepSender(self.mirror, self._store.root, self._storage, is_alone=is_alone),
            self.policy,
            self._retention,
            claim=claim,
            list_pins=lambda: list_pins(self._storage, self._store.root),
        )
        self._uploader.start(entry for entry in entries if self._is_here(entry))

    def add(self, entry: BranchEntry) -> None:
        """Hand a commit to the mirror."""
        if self._uploader is not None:
            self._uploader.add(entry)

    def let_go(self, doomed: Sequence[int]) -> list[int]:
        """Of the steps that retention would delete, return those that the mirror does not need any more."""
        return self._uploader.let_go(doomed) if self._uploader else list(doomed)

    def raise_failure(self) -> None:
        """Raise what uploads failed of, if `on_upload_failure` is `raise`."""
        if self._uploader is not None:
            self._uploader.raise_failure()

    def drain(self, should_stop: Callable[[], bool]) -> None:
        """Wait for the uploads, at most `exit_wait_secs`."""
        if self._uploader is not None:
            self._uploader.drain(self.policy.exit_wait_secs, should_stop)

    def close(self) -> None:
        self._ended.set()
        if self._uploader is not None:
            self._uploader.close()
        elif self.mirror is not None:
            self.mirror.remote.close()
        for remote in self._others.values():
            remote.close()
        if self._pull is not None:
            self._pull.join()

    def _is_here(self, entry: BranchEntry) -> bool:
        try:
            return read_commit(self._storage, self._store.path_of(entry.step)).digest == entry.digest
        except (CheckpointError, OSError):
            return False
