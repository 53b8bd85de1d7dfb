"""The writer's side of one root: its lease, its recovery, and each step that rank 0 orders on every node."""

from __future__ import annotations

import atexit
import base64
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from recipe_ckpt.errors import CheckpointError, DamagedCheckpointError
from recipe_ckpt.lease import Lease
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.node_probe import refuse_root
from recipe_ckpt.nodes import Node, Recovery, Report, RootState, find_missing_ranks
from recipe_ckpt.resume import Candidate, find_problem
from recipe_ckpt.storage import Storage
from recipe_ckpt.store import Origin, Sealed, Staging, Store
from recipe_ckpt.survey import Commit, Survey, read_commit, read_held, survey

logger = logging.getLogger(__name__)


class NodeSession:
    """One node's root, from `take` to `close`. Lives on the node's leader only; all its results are JSON."""

    def __init__(self, node: Node, storage: Storage, launch_id: str) -> None:
        self.node = node
        self.store = Store(node.root, storage)
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
            found = survey(self._storage, self.node.root)
            prepared, published = self.store.list_unfinished()
            entries = [*found.branch, *(commit.entry() for commit in found.others.values())]
            state = RootState(
                prepared,
                published,
                [entry.digest for entry in entries],
                found.lineage,
                self.store.list_archives(),
                self.store.read_archiving(),
            )
        return {"token": self._lease.token, "state": state.to_json()}

    def recover(self, decision: Recovery) -> dict[str, Any]:
        """Do what was decided for all roots, and report what lies here now."""
        with errors_of_the_disk(self.node.root):
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
        )

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

    def inspect(self, candidate: Candidate, contents: Collection[str], world_size: int) -> dict[str, str | None]:
        """Say why a candidate can't be tried here: a `problem` of its own, or files `missing` that no node moved to.

        Quick checks, before all ranks read it.
        """
        own = self.localize(candidate)
        problem = find_problem(self._storage, own, contents)
        missing = None if problem or own.digest is None else self._find_missing(own, world_size)
        return {"where": f"{own.path} on {self.node.host}", "problem": problem, "missing": missing}

    def _find_missing(self, candidate: Candidate, world_size: int) -> str | None:
        commit = read_commit(self._storage, candidate.path)
        held = read_held(self._storage, commit)
        return find_missing_ranks(held.ranks, commit.manifest.world_size, self.node.ranks, world_size)

    def start(self, origin: Origin, last_sequence: int, *, archive: bool) -> str | None:
        """Make what comes next descend from `origin`; return the folder of what had to make room."""
        archived = None
        if archive:
            with errors_of_the_disk(self.node.root):
                archived = self.store.archive(self.found.lineage)
            self.found = Survey()
        self.store.adopt(self.found, origin, last_sequence)
        return archived

    # --- saving

    def begin(self, staging: Staging) -> None:
        self.check_lease()  # before staging is cleared: another process may be writing there by now
        self.store.begin(staging)

    def check_lease(self) -> None:
        self._lease.check()

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

    def settle(self, sealed: Sealed) -> dict[str, Sequence[int]]:
        """Finish a commit, and say what retention has to know of this node."""
        self.store.settle(sealed)
        return {"present": sorted(self.store.list_committed()), "pinned": sorted(self.store.list_pins())}

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
        self._lease.release()
        atexit.unregister(self._lease.release)


def localize(candidate: Candidate, root: str) -> Candidate:
    """Return a candidate with its path in the root of a rank; a shared root is the same for all."""
    if not candidate.is_inside:
        return candidate
    return replace(candidate, path=os.path.join(root, os.path.basename(candidate.path)))


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
