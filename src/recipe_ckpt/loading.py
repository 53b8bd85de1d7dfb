"""A resume on all ranks: the same candidate, restored by every one of them, or the next one for all."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recipe_ckpt import layout
from recipe_ckpt.contents import RunContents
from recipe_ckpt.coordination import Coordinator
from recipe_ckpt.drift import Change, describe_changes, require_resumable
from recipe_ckpt.errors import DamagedCheckpointError, RootNotSharedError, StateMismatchError
from recipe_ckpt.manifest import FileTable, decode_json
from recipe_ckpt.node_session import NodeSession, localize
from recipe_ckpt.nodes import Nodes, Recovery, Report, RootState, decide_recovery
from recipe_ckpt.policies import LoadPolicy, ResumePoint
from recipe_ckpt.resume import Candidate
from recipe_ckpt.session import BUSY, RootSession
from recipe_ckpt.storage import Storage
from recipe_ckpt.store import Origin
from recipe_ckpt.survey import Commit, read_commit, read_held

logger = logging.getLogger(__name__)

_POLL_SECS = 0.5  # less than ranks wait for each other


class Resumer:
    """Restores this rank from the checkpoint on which all ranks agree.

    `session` is rank 0's, `node` that of each node's leader; elsewhere they are None. `root` is this rank's own name of it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        storage: Storage,
        nodes: Nodes,
        root: str,
        contents: RunContents,
        policy: LoadPolicy,
        node: NodeSession | None,
        session: RootSession | None,
        *,
        visible_within_secs: float = 60.0,  # longer than a network file system's attribute cache
    ) -> None:
        self._coordinator = coordinator
        self._storage = storage
        self._nodes = nodes
        self._node = node
        self._root = root
        self._contents = contents
        self._policy = policy
        self._session = session
        self._visible_within_secs = visible_within_secs

    def open(self) -> str:
        """Take the roots' leases, see on all ranks that each is one root, and return the first lease's token. Collective.

        What a killed process left is finished, or taken back, on all nodes alike; then rank 0 decides what to start from.
        """
        order = self._coordinator.together(self._take, self._decide_recovery)
        self._coordinator.together(lambda: self._recover(order), self._decide_start)
        return str(order["tokens"]["0"])

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
        order = self._coordinator.lead(lambda: self._order_start(candidate))
        archived = self._coordinator.together(lambda: self._start(order), lambda found: found[0])
        if candidate is None:
            return None, archived
        return ResumePoint(candidate.step, candidate.path, candidate.reason, order["metrics"], changes), archived

    def _take(self) -> Any:
        return self._node.take() if self._node else None

    def _decide_recovery(self, found: Sequence[Any]) -> Any:
        taken = {rank: report for rank, report in enumerate(found) if report is not None}
        decision = decide_recovery([RootState.from_json(report["state"]) for report in taken.values()])
        return {
            "tokens": {str(rank): report["token"] for rank, report in taken.items()},
            "recovery": decision.to_json(),
        }

    def _recover(self, order: Any) -> Any:
        self._check_root_is_shared(order["tokens"][str(self._nodes.of(self._coordinator.rank).leader)])
        return self._node.recover(Recovery.from_json(order["recovery"])) if self._node else None

    def _decide_start(self, found: Sequence[Any]) -> None:
        self._leader().open([Report.from_json(report) for report in found if report is not None])

    def _order_start(self, candidate: Candidate | None) -> Any:
        # Before the start, which removes what was downloaded for it.
        metrics = self._read_metrics(candidate) if candidate else {}
        origin, last_sequence = self._leader().build_origin(candidate)
        archive = candidate is None or not candidate.is_inside
        return {"metrics": metrics, "origin": origin.to_json(), "last_sequence": last_sequence, "archive": archive}

    def _start(self, order: Any) -> str | None:
        leader = self._session or self._node
        if leader is None:
            return None
        return leader.start(Origin.from_json(order["origin"]), order["last_sequence"], archive=order["archive"])

    def _check_root_is_shared(self, token: str) -> None:
        """Look for the lease that this node's leader holds, which another directory of the same name would never show."""
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
            f" what rank {self._nodes.of(self._coordinator.rank).leader} wrote there; allowed is a directory that all ranks"
            " see, or one of its own for each node. Look at the mount",
            path=self._root,
        )

    def _next_candidate(self) -> Candidate | None:
        """Return the next candidate, with its path here. It lies whole on every node: downloaded, if it did not."""
        while True:
            found = self._coordinator.lead(self._find_candidate)
            if found is None:
                return None
            candidate = Candidate(**found)
            damage = self._pull(candidate) if candidate.url else self._inspect_on_others(candidate)
            if damage is None:
                return localize(candidate, self._root)
            self._refuse(candidate, damage)

    def _find_candidate(self) -> dict[str, Any] | None:
        """Return the next one; on a single root, which needs no exchange for that, the next one that can be tried."""
        while True:
            candidate = self._leader().next_candidate()
            if candidate is None or candidate.url or not self._nodes.is_one:
                return None if candidate is None else asdict(candidate)
            damage = _join_inspections([self._inspect(candidate)])
            if damage is None:
                return asdict(candidate)
            self._leader().refuse(candidate, damage)

    def _inspect_on_others(self, candidate: Candidate) -> str | None:
        if self._nodes.is_one:
            return None
        damage: str | None = self._coordinator.together(lambda: self._inspect(candidate), _join_inspections)
        return damage

    def _inspect(self, candidate: Candidate) -> Any:
        if self._node is None:
            return None
        return self._node.inspect(candidate, self._policy.contents, self._coordinator.world_size)

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
            table = read_held(self._storage, read_commit(self._storage, path)).table if candidate.digest else None
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
                sharers = self._nodes.of(self._coordinator.rank).ranks
                self._contents.check_foreign(candidate.path, table, sharers)
            else:
                geometry = commit.manifest.data if commit else None
                self._contents.restore(candidate.path, table, candidate.step, self._policy.contents, geometry)
        except (DamagedCheckpointError, OSError) as error:
            if isinstance(error, FileNotFoundError) and commit is not None:
                self._refuse_other_world(commit, error)
            return f"rank {self._coordinator.rank}: {error}"
        return None

    def _read_when_visible(self, path: str) -> tuple[Commit, FileTable]:
        """Read what the node's leader has read already; on a network file system it may be seen here some time later."""
        deadline = time.monotonic() + self._visible_within_secs
        while True:
            try:
                commit = read_commit(self._storage, path)
                return commit, read_held(self._storage, commit).table
            except (FileNotFoundError, DamagedCheckpointError) as error:
                is_missing = isinstance(error.__cause__ or error, FileNotFoundError)
                if not is_missing or self._node is not None or time.monotonic() > deadline:
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


def _join_inspections(found: Sequence[Mapping[str, str | None] | None]) -> str | None:
    """Return what is wrong with a candidate on any node; None if nothing is.

    Raises:
        RootNotSharedError: it is whole, but ranks run where their files are not; an older one would be no better.
    """
    reports = [report for report in found if report is not None]
    if len(reports) == 1 and reports[0]["problem"]:
        return reports[0]["problem"]
    problems = [f"{report['where']}: {report['problem']}" for report in reports if report["problem"]]
    missing = [f"{report['where']}: {report['missing']}" for report in reports if report["missing"]]
    if problems or not missing:
        return "; ".join(problems) or None
    raise RootNotSharedError(
        f"checkpoint.default_local_dir: nodes keep their own files, and {'; '.join(missing)}. Start as many ranks,"
        " each on the node where it was; or copy the step's directories of all nodes together, on each node or a shared disk"
    )


def _join_damage(found: Sequence[str | None]) -> str | None:
    return next((damage for damage in found if damage is not None), None)
