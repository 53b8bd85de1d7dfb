"""One save on nodes with disks of their own: prepared on all, then renamed on all, or on none.

A node that has prepared and can't learn what the others decided leaves everything as it is: the next start decides, for all
nodes alike.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from recipe_ckpt import layout
from recipe_ckpt.captured import Captured
from recipe_ckpt.coordination import Coordinator
from recipe_ckpt.errors import RankError, RankTimeoutError, SaveFailedError
from recipe_ckpt.manifest import FileEntry, NodeNote, describe_bytes
from recipe_ckpt.node_session import NodeSession
from recipe_ckpt.nodes import Nodes
from recipe_ckpt.sealing import Sealed, Staging
from recipe_ckpt.session import RootSession
from recipe_ckpt.storage import Storage

logger = logging.getLogger(__name__)


class NodeCommit:
    """One rank's part of one save. `node` is its node's session on a leader, `session` rank 0's; elsewhere they are None.

    The exchanges are: write; describe what foreign engines wrote, and seal; prepare; publish; settle and prune.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        nodes: Nodes,
        node: NodeSession | None,
        session: RootSession | None,
        storage: Storage,
        staging: Staging,
        captured: Captured | Exception,
    ) -> None:
        self._coordinator = coordinator
        self._nodes = nodes
        self._node = node
        self._session = session
        self._storage = storage
        self._staging = staging
        self._captured = captured
        self._parts: list[Any] = []
        self._entries: list[FileEntry] = []

    def run(self, write: Callable[[], Any]) -> int:
        """Save on all nodes, and return the checkpoint's bytes; `write` writes this rank's files. Collective."""
        try:
            written = self._together("write", write, self._keep_parts)
            order = self._together("seal", lambda: self._describe_foreign(written), self._seal)
        except BaseException:
            self._undo()
            raise
        try:
            self._together("prepare", lambda: self._prepare(order), _nothing)
            self._together("publish", self._publish, _nothing)
        except BaseException as error:
            if not self._is_in_doubt(error):
                self._undo()
            elif isinstance(error, RankError):
                outlook = f"whether step {self._staging.step} was saved, the next start finds out"
                raise RankError(f"{error}; {outlook}", is_final=True) from error
            raise
        doomed = self._together("settle", lambda: self._settle(order), self._choose_deletions)
        self._delete(doomed)
        return int(order["size_bytes"])

    def _together(self, phase: str, work: Callable[[], Any], finish: Callable[[list[Any]], Any]) -> Any:
        return self._coordinator.together(work, finish, of=f"{os.path.basename(self._staging.path)}/{phase}")

    # --- the steps, each with what rank 0 makes of its results

    def _keep_parts(self, parts: list[Any]) -> list[str]:
        self._parts = parts
        return [entry["path"] for part in parts for entry in part["entries"]]

    def _describe_foreign(self, written: list[str]) -> list[Any] | None:
        captured = self._get_captured()
        if self._node is None or not captured.foreign:
            return None
        return [asdict(entry) for entry in captured.describe_foreign(self._staging.path, set(written))]

    def _seal(self, described: list[list[Any] | None]) -> Any:
        """Write what one rank writes for all, and the records; return all of it for the other nodes."""
        captured, session = self._get_captured(), self._session
        assert session is not None
        own = {rank: [FileEntry(**entry) for entry in part["entries"]] for rank, part in enumerate(self._parts)}
        for rank, found in enumerate(described):
            own[rank] += [FileEntry(**entry) for entry in found or ()]
        shared = captured.join(self._staging.path, self._storage, self._parts)
        notes = {node.leader: self._write_note(node.ranks, own, shared) for node in self._nodes.all}
        note_entries = {
            leader: describe_bytes(data, name=layout.build_node_note_name(leader), rank=leader)
            for leader, data in notes.items()
        }
        entries = _merge_equal([*(entry for found in own.values() for entry in found), *shared, *note_entries.values()])
        sealed = session.seal(self._staging.step, entries, captured.facts)
        files = {entry.path: self._storage.read(os.path.join(self._staging.path, entry.path)) for entry in shared}
        files |= {note_entries[leader].path: data for leader, data in notes.items()}
        return {
            "sealed": sealed.to_json(),
            "files": {path: base64.b64encode(data).decode() for path, data in files.items()},
            "shared": [asdict(entry) for entry in shared],
            "notes": {str(leader): asdict(entry) for leader, entry in note_entries.items()},
            "size_bytes": sum(entry.size_bytes for entry in entries),
        }

    def _write_note(self, ranks: Sequence[int], own: dict[int, list[FileEntry]], shared: Sequence[FileEntry]) -> bytes:
        here = [*(entry.path for rank in ranks for entry in own[rank]), *(entry.path for entry in shared)]
        here.append(layout.build_node_note_name(ranks[0]))
        return NodeNote(tuple(ranks), tuple(sorted(here)), self._staging.uid).encode()

    def _prepare(self, order: Any) -> None:
        if self._node is None:
            return
        mine = [FileEntry(**order["notes"][str(self._node.node.leader)])]
        if self._session is None:
            mine += [FileEntry(**entry) for entry in order["shared"]]
        self._node.prepare(self._staging, Sealed.from_json(order["sealed"]), order["files"], mine)

    def _publish(self) -> None:
        if self._node is not None:
            self._node.publish(self._staging)

    def _settle(self, order: Any) -> Any:
        return self._node.settle(self._staging, Sealed.from_json(order["sealed"])) if self._node else None

    def _choose_deletions(self, found: list[Any]) -> list[int]:
        assert self._session is not None
        present = {step for report in found if report for step in report["present"]}
        pinned = {step for report in found if report for step in report["pinned"]}
        return self._session.choose_deletions(present=present, pinned=pinned)

    def _delete(self, doomed: list[int]) -> None:
        if self._node is not None and (pruned := self._node.delete(doomed)):
            logger.info("%s: pruned the steps %s", self._node.node.root, pruned)

    # --- failures

    def _undo(self) -> None:
        if self._node is not None:
            self._node.undo(self._staging)

    def _is_in_doubt(self, error: BaseException) -> bool:
        """Say whether rank 0's verdict may be another one than this failure: it was not read."""
        if self._coordinator.rank == 0:
            return False
        is_unread = isinstance(error, RankTimeoutError) or (isinstance(error, RankError) and error.is_final)
        return is_unread or not isinstance(error, Exception)

    def _get_captured(self) -> Captured:
        assert isinstance(self._captured, Captured), "a failed capture ends the first exchange"
        return self._captured


def _merge_equal(entries: Sequence[FileEntry]) -> list[FileEntry]:
    """Keep one entry of a file that foreign engines wrote alike on several nodes.

    Raises:
        SaveFailedError: they wrote it differently, so that it could not be copied together.
    """
    known: dict[str, FileEntry] = {}
    for entry in entries:
        first = known.setdefault(entry.path, entry)
        if (first.size_bytes, first.digest) != (entry.size_bytes, entry.digest):
            raise SaveFailedError(
                f"{entry.path}: the nodes of rank {first.rank} and of rank {entry.rank} wrote different files of this name;"
                " allowed are equal ones, or names with the rank in them",
                path=entry.path,
            )
    return list(known.values())


def _nothing(_: list[Any]) -> None:
    """All have done it: that is the whole outcome."""
