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
from recipe_ckpt.node_session import NodeSession, localize
from recipe_ckpt.nodes import (
    Damage,
    Inspection,
    Nodes,
    Recovery,
    Report,
    RootState,
    StartOrder,
    decide_recovery,
    join_inspections,
)
from recipe_ckpt.policies import LoadPolicy, ResumePoint
from recipe_ckpt.resume import ABSENT, Candidate
from recipe_ckpt.session import RootSession
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import Commit, read_commit, read_held
from recipe_ckpt.transfer import PullProgress

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
        answer = self._coordinator.lead(lambda: self._order_start(candidate))
        order = StartOrder.from_json(answer["order"])
        archived = self._coordinator.together(lambda: self._start(order), lambda found: found[0])
        if candidate is None:
            return None, archived
        return ResumePoint(candidate.step, candidate.path, candidate.reason, answer["metrics"], changes), archived

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
        return {"metrics": metrics, "order": self._leader().order_start(candidate).to_json()}

    def _start(self, order: StartOrder) -> str | None:
        leader = self._session or self._node
        return leader.start(order) if leader else None

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
            candidate = Candidate(**found["candidate"])
            if (damage := self._bring(candidate, found["verdict"])) is None:
                return localize(candidate, self._root)
            self._refuse(candidate, damage)

    def _bring(self, candidate: Candidate, verdict: Any) -> Damage | None:
        """Have a candidate whole on every node, or return what is wrong with it; without a verdict yet all nodes look."""
        if verdict is None:
            verdict = self._coordinator.together(
                lambda: self._inspect(candidate), lambda found: self._judge(candidate, found)
            )
        if verdict["damage"]:
            return Damage.from_json(verdict["damage"])
        return self._pull(candidate, verdict["pullers"]) if verdict["pullers"] else None

    def _find_candidate(self) -> Any:
        """Return the next one; on a single root, which needs no exchange for that, the next one that can be tried."""
        while (candidate := self._leader().next_candidate()) is not None:
            if not self._nodes.is_one:
                return {"candidate": asdict(candidate), "verdict": None}
            verdict = self._judge(candidate, [self._inspect(candidate)])
            if not verdict["damage"]:
                return {"candidate": asdict(candidate), "verdict": verdict}
            self._leader().refuse(candidate, Damage.from_json(verdict["damage"]))
        return None

    def _inspect(self, candidate: Candidate) -> Any:
        if self._node is None:
            return None
        return self._node.inspect(candidate, self._policy.contents, self._coordinator.world_size).to_json()

    def _judge(self, candidate: Candidate, found: Sequence[Any]) -> dict[str, Any]:
        """On rank 0: say from what all nodes found why a candidate can't be used, or which leaders have to download it."""
        looks = [Inspection(**look) for look in found if look is not None]
        verdict = join_inspections(looks, can_be_pulled=candidate.url is not None)
        if verdict and not isinstance(verdict, Damage) and (lack := self._leader().find_lack(candidate)):
            verdict = Damage(lack)
        if isinstance(verdict, Damage):
            return {"damage": verdict.to_json(), "pullers": []}
        for look in looks:
            if look.leader in verdict:
                log = logger.info if look.damage == ABSENT else logger.warning
                log("%s: %s. It is downloaded from %s", look.where, look.damage or look.missing, candidate.url)
                self._leader().note_pulled(candidate, self._nodes.of(look.leader).ranks)
        return {"damage": None, "pullers": verdict}

    def _pull(self, candidate: Candidate, pullers: Sequence[int]) -> Damage | None:
        """Have these leaders download a candidate; return what is damaged there. All hear from rank 0 all the while."""
        own = self._node.mirror if self._node and self._coordinator.rank in pullers else None
        if own is not None:
            own.begin_pull(localize(candidate, self._root))
        progress = PullProgress(str(candidate.url))
        outcome = {"is_done": False}
        while not outcome["is_done"]:
            outcome = self._coordinator.together(
                lambda: own.poll_pull(_POLL_SECS) if own else None, lambda found: _join_pulls(found, progress)
            )
        return Damage(str(outcome["damage"])) if outcome["damage"] else None

    def _refuse(self, candidate: Candidate, damage: Damage) -> None:
        self._coordinator.lead(lambda: self._leader().refuse(candidate, damage))

    def _compare_config(self, candidate: Candidate) -> tuple[list[Change], Damage | None]:
        """Tell how this run's configuration differs from the candidate's; return that, or what is damaged.

        Raises:
            ConfigError: it may not be resumed with this configuration; on all ranks.
        """
        found = self._coordinator.lead(lambda: self._read_changes(candidate))
        changes = [Change(**change) for change in found["changes"]]
        require_resumable(changes, self._policy.on_config_drift, candidate.step, candidate.path)
        damage = Damage(found["damage"], (0,)) if found["damage"] else None
        return [] if self._policy.on_config_drift == "ignore" else changes, damage

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

    def _restore(self, candidate: Candidate) -> Damage | None:
        """Restore on every rank; return what is damaged, the same on all, or None. Other failures raise."""
        together = self._coordinator.together
        damage = together(lambda: self._try(candidate, check_only=True), _join_damage)
        if damage is None:
            damage = together(lambda: self._try(candidate, check_only=False), _join_damage)
        return None if damage is None else Damage.from_json(damage)

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


def _join_pulls(found: Sequence[Any], progress: PullProgress) -> dict[str, Any]:
    pulls = [pull for pull in found if pull is not None]
    damage = next((pull["damage"] for pull in pulls if pull["damage"]), None)
    is_done = all(pull["is_done"] for pull in pulls)
    if not (is_done and damage):
        progress.tell(sum(pull["size_bytes"] for pull in pulls), is_done=is_done)
    return {"is_done": is_done, "damage": damage}


def _join_damage(found: Sequence[str | None]) -> Any:
    ranks = [rank for rank, damage in enumerate(found) if damage is not None]
    return Damage(str(found[ranks[0]]), tuple(ranks)).to_json() if ranks else None
