"""Which ranks share a root: asked of the file systems themselves, at each start."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from recipe_ckpt import layout
from recipe_ckpt.coordination import Coordinator
from recipe_ckpt.errors import ConfigError
from recipe_ckpt.nodes import Node, Nodes, group_by_root
from recipe_ckpt.storage import Storage

logger = logging.getLogger(__name__)

_ONE_HOST_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "ramfs"})
_POLL_SECS = 0.2


def find_nodes(coordinator: Coordinator, storage: Storage, root: str, *, visible_within_secs: float = 60.0) -> Nodes:
    """Make the root on every rank, and find out which ranks see the same one. Collective.

    Ranks of one host compare the directories' identities. Between hosts, one rank each leaves a file of a name that nobody
    has looked for before, and looks for the others': once on disks that only one host has, else for as long as a network
    file system's caches may hide it.

    Raises:
        ConfigError: the root can't be a directory (RankError on ranks but 0).
    """
    reports = coordinator.together(lambda: _identify(storage, root), _agree_on_identities)
    identities, uid = reports["identities"], reports["uid"]
    sightings: dict[str, list[int]] = {}
    if len(set(identities)) > 1:
        probe = _Probe(storage, root, uid, sorted(map(identities.index, set(identities))), coordinator.rank)
        try:
            coordinator.together(probe.leave, lambda _: None)
            sightings = coordinator.together(lambda: probe.look(visible_within_secs), _join_sightings)
        finally:
            probe.remove()
    groups = group_by_root(identities, {int(rank): others for rank, others in sightings.items()})
    places = reports["places"]
    nodes = Nodes(tuple(Node(ranks, *places[ranks[0]]) for ranks in groups))
    if not nodes.is_one and coordinator.rank == 0:
        logger.warning("%d separate roots, each node keeps its own files: %s", len(groups), nodes.describe())
    return nodes


def _identify(storage: Storage, root: str) -> Any:
    host = socket.gethostname()
    try:
        storage.make_dirs(root)
        storage.list_dir(root)
        return {"identity": f"{host}:{storage.directory_key(root)}", "place": [host, root]}
    except OSError as error:
        return {"problem": f"{root} ({error.strerror or error})", "place": [host, root]}


def _agree_on_identities(reports: Sequence[Any]) -> Any:
    for rank, report in enumerate(reports):
        if "problem" in report:
            where = f" on {report['place'][0]} (rank {rank})" if rank else ""
            raise refuse_root(report["problem"] + where)
    return {
        "identities": [report["identity"] for report in reports],
        "places": [report["place"] for report in reports],
        "uid": uuid.uuid4().hex,
    }


def refuse_root(found: str) -> ConfigError:
    allowed = "a directory that this user may write into"
    return ConfigError("checkpoint.default_local_dir", found, allowed, "Choose another one, or mend it.")


def _join_sightings(found: Sequence[list[int] | None]) -> Mapping[str, list[int]]:
    return {str(rank): others for rank, others in enumerate(found) if others is not None}


class _Probe:
    """One rank's part; only `lookers` leave a file and look."""

    def __init__(self, storage: Storage, root: str, uid: str, lookers: Sequence[int], rank: int) -> None:
        self._storage = storage
        self._root = root
        self._paths = {looker: os.path.join(root, layout.build_probe_name(uid, looker)) for looker in lookers}
        self._rank = rank
        self._is_looking = rank in lookers

    def leave(self) -> None:
        if not self._is_looking:
            return
        try:
            path = self._paths[self._rank]
            self._storage.write_file(path, [], name=os.path.basename(path), rank=self._rank)
        except OSError as error:
            raise refuse_root(f"{self._root} ({error.strerror or error})") from error

    def look(self, within_secs: float) -> list[int] | None:
        """Return the other ranks whose files are here."""
        if not self._is_looking:
            return None
        if read_disk_type(self._storage.directory_key(self._root)) in _ONE_HOST_DISKS:
            within_secs = 0.0
        deadline = time.monotonic() + within_secs
        others = {rank: path for rank, path in self._paths.items() if rank != self._rank}
        while True:
            seen = [rank for rank, path in others.items() if self._storage.exists(path)]
            if len(seen) == len(others) or time.monotonic() >= deadline:
                return seen
            time.sleep(_POLL_SECS)

    def remove(self) -> None:
        if self._is_looking:
            with suppress(OSError):
                self._storage.remove_file(self._paths[self._rank])


def read_disk_type(directory_key: str) -> str | None:
    """Return the kernel's name for the type of file system that a directory lies on, None where it is not told."""
    _, device, _ = directory_key.split("/")
    number = f"{os.major(int(device))}:{os.minor(int(device))}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                mount, _, disk = line.partition(" - ")
                if mount.split()[2] == number:
                    return disk.split()[0]
    except (OSError, IndexError):
        pass
    return None
