"""A resume on all ranks: the same candidate, restored by every one of them, or the next one for all."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from recipe_ckpt import layout
from recipe_ckpt.contents import RunContents
from recipe_ckpt.coordination import Coordinator
from recipe_ckpt.drift import Change, describe_changes, require_resumable
from recipe_ckpt.errors import DamagedCheckpointError, RootNotSharedError, StateMismatchError
from recipe_ckpt.manifest import FileTable, decode_json
from recipe_ckpt.policies import LoadPolicy, ResumePoint
from recipe_ckpt.resume import Candidate
from recipe_ckpt.session import BUSY, RootSession
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import Commit, read_commit, read_files

logger = logging.getLogger(__name__)

_POLL_SECS = 0.5  # less than ranks wait for each other


class Resumer:
    """Restores this rank from the checkpoint on which all ranks agree. `session` is rank 0's, None elsewhere."""

    def __init__(
        self,
        coordinator: Coordinator,
        storage: Storage,
        root: str,
        contents: RunContents,
        policy: LoadPolicy,
        session: RootSession | None,
        *,
        visible_within_secs: float = 60.0,  # longer than a network file system's attribute cache
    ) -> None:
        self._coordinator = coordinator
        self._storage = storage
        self._root = root
        self._contents = contents
        self._policy = policy
        self._session = session
        self._visible_within_secs = visible_within_secs

    def open(self) -> str:
        """Take the root's lease on rank 0, see on all ranks that it is one root, and return the lease's token. Collective."""
        token = str(self._coordinator.lead(self._open_root))
        self._coordinator.together(lambda: self._check_root_is_shared(token), lambda _: None)
        return token

    def resume(self) -> tuple[ResumePoint | None, str | None]:
        """Restore the run, or nothing for a fresh start; also return where what lay in the root was moved, if it was.

        Collective. Raises: what `CheckpointHandler.load_checkpoint` does.
        """
        while (candidate := self._next_candidate()) is not None:
            changes, damage = self._compare_config(candidate)
            if damage is None:
                damage = self._restore(candidate)
            if damage is None:
                break
            self._refuse(candidate, damage)
        # Before the start, which removes what was downloaded for it.
        metrics = self._coordinator.lead(lambda: self._read_metrics(candidate)) if candidate else {}
        archived = self._coordinator.lead(lambda: self._leader().start_from(candidate))
        if candidate is None:
            return None, archived
        return ResumePoint(candidate.step, candidate.path, candidate.reason, metrics, changes), archived

    def _open_root(self) -> str:
        self._leader().open()
        return self._leader().lease_token

    def _check_root_is_shared(self, token: str) -> None:
        """Look for rank 0's lease, which a directory of the same name on another node's disk would never show."""
        path = os.path.join(self._root, layout.LEASE)
        deadline = time.monotonic() + self._visible_within_secs
        while time.monotonic() < deadline:
            try:
                if decode_json(self._storage.read(path), path)["token"] == token:
                    return
            except (OSError, DamagedCheckpointError):
                pass
            time.sleep(0.05)
        raise RootNotSharedError(
            f"checkpoint.default_local_dir: rank {self._coordinator.rank} on {platform.node()} does not see in {self._root}"
            " what rank 0 wrote there; allowed is a directory that all nodes share (node-local disks are not supported yet)",
            path=self._root,
        )

    def _next_candidate(self) -> Candidate | None:
        """Return the next candidate, which lies in the file system of all ranks: downloaded, if it did not."""
        while True:
            found = self._coordinator.lead(lambda: _to_json(self._leader().next_candidate()))
            if found is None:
                return None
            candidate = Candidate(**found)
            damage = self._pull(candidate) if candidate.url else None
            if damage is None:
                return candidate
            self._refuse(candidate, damage)

    def _pull(self, candidate: Candidate) -> str | None:
        """Have rank 0 download a candidate; return what is damaged there. The others hear from it all the while."""
        outcome: str | None = BUSY
        while outcome == BUSY:
            outcome = self._coordinator.lead(lambda: self._leader().poll_pull(candidate, _POLL_SECS))
        return outcome

    def _refuse(self, candidate: Candidate, damage: str) -> None:
        self._coordinator.lead(lambda: self._leader().refuse(candidate, damage))

    def _compare_config(self, candidate: Candidate) -> tuple[list[Change], str | None]:
        """Tell how this run's configuration differs from the candidate's; return that, or what is damaged.

        Raises:
            ConfigError: it may not be resumed with this configuration; on all ranks.
        """
        found = self._coordinator.lead(lambda: self._read_changes(candidate))
        changes = [Change(**change) for change in found["changes"]]
        require_resumable(changes, self._policy.on_config_drift, candidate.step, candidate.path)
        return [] if self._policy.on_config_drift == "ignore" else changes, found["damage"]

    def _read_changes(self, candidate: Candidate) -> dict[str, Any]:
        step, path = candidate.step, candidate.path
        try:
            table = read_files(self._storage, read_commit(self._storage, path)) if candidate.digest else None
            changes = self._contents.compare_config(path, table)
        except (DamagedCheckpointError, OSError) as error:
            return {"changes": [], "damage": str(error)}
        if changes is None:
            logger.info("%s: holds no %s, so what differs from its configuration can't be told", path, layout.RESOLVED_CONFIG)
        elif changes and self._policy.on_config_drift == "warn":
            text = describe_changes(changes, step, path, may_be_restored=self._contents.restores_itself)
            logger.warning("%s", text)
        return {"changes": [asdict(change) for change in changes or ()], "damage": None}

    def _restore(self, candidate: Candidate) -> str | None:
        """Restore on every rank; return what is damaged, the same on all, or None. Other failures raise."""
        together = self._coordinator.together
        damage: str | None = together(lambda: self._try(candidate, check_only=True), _join_damage)
        if damage is None:
            damage = together(lambda: self._try(candidate, check_only=False), _join_damage)
        return damage

    def _try(self, candidate: Candidate, *, check_only: bool) -> str | None:
        commit = table = None
        try:
            if candidate.digest:
                commit, table = self._read_when_visible(candidate.path)
            if check_only:
                self._contents.check_foreign(candidate.path, table)
            else:
                geometry = commit.manifest.data if commit else None
                self._contents.restore(candidate.path, table, candidate.step, self._policy.contents, geometry)
        except (DamagedCheckpointError, OSError) as error:
            if isinstance(error, FileNotFoundError) and commit is not None:
                self._refuse_other_world(commit, error)
            return f"rank {self._coordinator.rank}: {error}"
        return None

    def _read_when_visible(self, path: str) -> tuple[Commit, FileTable]:
        """Read what rank 0 has read already; on a network file system it may be seen here some time later."""
        deadline = time.monotonic() + self._visible_within_secs
        while True:
            try:
                commit = read_commit(self._storage, path)
                return commit, read_files(self._storage, commit)
            except (FileNotFoundError, DamagedCheckpointError) as error:
                is_missing = isinstance(error.__cause__ or error, FileNotFoundError)
                if not is_missing or self._coordinator.rank == 0 or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def _refuse_other_world(self, commit: Commit, error: OSError) -> None:
        """Tell a whole checkpoint that an engine can't split anew from a damaged one: an older one would be no better."""
        saved, here = commit.manifest.world_size, self._coordinator.world_size
        if saved != here:
            raise StateMismatchError(
                f"{commit.path}: {saved} ranks saved it, this run has {here}, and its engine looks for a file that so is not"
                f" there: {error}. Start {saved} ranks, or use an engine that reshards",
                step=commit.manifest.step,
                path=commit.path,
            ) from error

    def _read_metrics(self, candidate: Candidate) -> dict[str, float]:
        metrics = read_commit(self._storage, candidate.path).manifest.metrics if candidate.digest else {}
        return {name: float(value) for name, value in metrics.items()}

    def _leader(self) -> RootSession:
        assert self._session is not None, "only rank 0 has a session"
        return self._session


def _to_json(candidate: Candidate | None) -> dict[str, Any] | None:
    return None if candidate is None else asdict(candidate)


def _join_damage(found: Sequence[str | None]) -> str | None:
    return next((damage for damage in found if damage is not None), None)
