"""The writer's side of one root: its lease, its recovery, and each step that rank 0 orders on every node."""

from __future__ import annotations

import atexit
import base64
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from recipe_ckpt import layout
from recipe_ckpt.branches import Claim
from recipe_ckpt.errors import CheckpointError, DamagedCheckpointError
from recipe_ckpt.lease import Lease
from recipe_ckpt.manifest import BranchEntry, FileEntry
from recipe_ckpt.node_mirror import NodeMirror
from recipe_ckpt.node_probe import refuse_root
from recipe_ckpt.nodes import Inspection, Node, Recovery, Report, RootState, StartOrder, find_missing_ranks
from recipe_ckpt.resume import ABSENT, Candidate, find_damage_of, find_lack
from recipe_ckpt.sealing import Sealed, Staging
from recipe_ckpt.storage import Storage
from recipe_ckpt.store import Store
from recipe_ckpt.survey import Commit, Survey, read_commit, read_held, survey

logger = logging.getLogger(__name__)


class NodeSession:
    """One node's root, from `take` to `close`. Lives on the node's leader only; all its results are JSON."""

    def __init__(self, node: Node, store: Store, mirror: NodeMirror, storage: Storage, launch_id: str) -> None:
        self.node = node
        self.store = store
        self.mirror = mirror
        self.found = Survey()
        self._storage = storage
        self._lease = Lease(node.root, storage, launch_id)

    # --- the start

    def take(self) -> dict[str, Any]:
        """Take the lease, and say what a killed process left here.

        Raises:
            ConfigError: the root can't be written into.
            LeaseHeldError: another process writes here.
            DamagedCheckpointError: a file can't be read.
        """
        try:
            self._lease.acquire()
        except OSError as error:
            raise refuse_root(f"{self.node.root} ({error.strerror or error})") from error
        atexit.register(self._lease.release)
        with errors_of_the_disk(self.node.root):
            self.found = survey(self._storage, self.node.root)
            prepared, published = self.store.list_unfinished()
            state = RootState(
                prepared,
                published,
                [entry.digest for entry in self._list_entries()],
                self.found.lineage,
                self.store.list_archives(),
                self.store.read_archiving(),
            )
        return {"token": self._lease.token, "state": state.to_json()}

    def recover(self, decision: Recovery) -> dict[str, Any]:
        """Do what was decided for all roots, and report what lies here now."""
        with errors_of_the_disk(self.node.root):
            self.mirror.clear_pulled()
            done = self.store.recover(decision.finish)
            self.found = survey(self._storage, self.node.root)
            if self.found.lineage in decision.archive:
                done.append(f"finished moving the former run to {self.store.archive(self.found.lineage)}")
                self.found = Survey()
        for line in done:
            logger.warning("%s: %s", self.node.root, line)
        report: dict[str, Any] = self._report().to_json()
        return report

    def _report(self) -> Report:
        newest = next(self.read_branch(), None)
        foreign = dict.fromkeys(self.found.foreign, "it has no manifest")
        return Report(
            where=self.node.describe(),
            lineage=self.found.lineage,
            last_sequence=self.found.last_sequence,
            branch=self.found.branch,
            refused={**foreign, **self.found.refused},
            newest=None if newest is None else newest.manifest.encode().decode(),
            committed=[entry.digest for entry in self._list_entries()],
        )

    def _list_entries(self) -> list[BranchEntry]:
        return [*self.found.branch, *(commit.entry() for commit in self.found.others.values())]

    def read_branch(self) -> Iterator[Commit]:
        """Read the commits of the branch, the newest first; those that can't be read are left out."""
        for entry in self.found.branch:
            try:
                yield read_commit(self._storage, self.store.path_of(entry.step))
            except (CheckpointError, OSError):
                continue

    def localize(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its path on this node."""
        return localize(candidate, self.node.root)

    def inspect(self, candidate: Candidate, contents: Collection[str], world_size: int) -> Inspection:
        """Look at a candidate before all ranks read it: quick checks of what lies here."""
        own = self.localize(candidate)
        look = Inspection(f"{own.path} on {self.node.host}", self.node.leader)
        if own.url is not None and (not own.is_inside or set(own.damaged_on) & set(self.node.ranks)):
            return replace(look, damage=ABSENT)
        if own.digest is None:
            return look
        if damage := find_damage_of(self._storage, own):
            return replace(look, damage=damage)
        commit = read_commit(self._storage, own.path)
        held = read_held(self._storage, commit)
        missing = find_missing_ranks(held.ranks, commit.manifest.world_size, self.node.ranks, world_size)
        return replace(look, missing=missing, lack=find_lack(commit, contents))

    def start(self, order: StartOrder, claim: Callable[[], Claim] | None = None) -> str | None:
        """Make what comes next descend from the order's origin, and begin to send what the mirror lacks.

        Returns the folder of what had to make room. `claim` says on rank 0 what the run may publish.

        Raises:
            RemoteError: this node can't use the mirror, and it is needed.
        """
        archived = None
        if claim is None:  # rank 0's has joined it
            self.mirror.probe(is_needed=not order.origin.branch)
        if order.makes_room:
            with errors_of_the_disk(self.node.root):
                archived = self.store.archive(self.found.lineage)
            self.found = Survey()
        self.store.adopt(self.found, order.origin, order.last_sequence)
        self.mirror.clear_pulled()
        self.mirror.begin_uploads(order.uploads, claim)
        return archived

    # --- saving

    def begin(self, staging: Staging) -> None:
        self.check_lease()  # before staging is cleared: another process may be writing there by now
        self.store.begin(staging)

    def check_lease(self) -> None:
        self._lease.check()

    def commit(self, staging: Staging, entries: Sequence[FileEntry], facts: Mapping[str, Any]) -> None:
        """Commit on a single node."""
        self.store.commit(staging, entries, facts, check_lease=self.check_lease)
        self._hand_to_mirror()

    def prepare(self, staging: Staging, sealed: Sealed, files: Mapping[str, str], known: Collection[FileEntry]) -> None:
        """Write what this node has of the other's small files (base64 by path), then the records. Durable on return."""
        for entry in known:
            path = os.path.join(staging.path, entry.path)
            self._storage.make_dirs(os.path.dirname(path))
            data = base64.b64decode(files[entry.path])
            self._storage.write_file(path, [data], name=entry.path, rank=entry.rank)
        self.store.prepare(staging, sealed)

    def publish(self, staging: Staging) -> None:
        self.check_lease()
        self.store.publish(staging)

    def settle(self, staging: Staging, sealed: Sealed) -> dict[str, Sequence[int]]:
        """Finish a commit, and say what retention has to know of this node."""
        self.store.settle(staging, sealed)
        self._hand_to_mirror()
        return {"present": sorted(self.store.list_committed()), "pinned": sorted(self.store.list_pins())}

    def _hand_to_mirror(self) -> None:
        self.mirror.add(self.store.origin.branch[0])
        self.mirror.raise_failure()  # when this step is safe here

    def delete(self, steps: Sequence[int]) -> list[int]:
        """Delete those of the steps that are here. A failure is a warning, tried again next time."""
        try:
            present = self.store.list_committed()
            return self.store.delete(step for step in steps if step in present)
        except OSError as error:
            logger.warning("%s: nothing was pruned, will be tried again: %s", self.node.root, error)
            return []

    def undo(self, staging: Staging) -> None:
        try:
            self.store.undo(os.path.basename(staging.path))
        except OSError as error:
            logger.warning("%s: could not be taken back, the next start does it: %s", staging.path, error)

    def close(self) -> None:
        self.mirror.close()
        self._lease.release()
        atexit.unregister(self._lease.release)


def localize(candidate: Candidate, root: str) -> Candidate:
    """Return a candidate with its path in the root of a rank; a shared root is the same for all."""
    if not candidate.is_inside and candidate.url is None:
        return candidate
    folder = root if candidate.is_inside else os.path.join(root, layout.PULLED_DIR)
    return replace(candidate, path=os.path.join(folder, os.path.basename(candidate.path)))


@contextmanager
def errors_of_the_disk(root: str) -> Iterator[None]:
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
