"""What an engine promises.

Any object with verl's methods is an engine. One that also takes snapshots gets its tensors written, digested and checked
by this package; of another's files the digests are taken after it has written them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.storage import Storage


@runtime_checkable
class Engine(Protocol):
    """verl's engine interface, as far as checkpoints use it (verl/workers/engine/base.py). All are called on every rank."""

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write this rank's files into `local_path`, which exists. `max_ckpt_to_keep=None`: delete nothing."""

    def load_checkpoint(self, local_path: str) -> None:
        """Restore from what `save_checkpoint` wrote into `local_path`."""

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Say whether this rank speaks for its model-parallel group: one rank of each data-parallel rank does."""

    def get_data_parallel_rank(self) -> int: ...

    def get_data_parallel_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one rank wrote: its files' entries (paths relative to the engine's folder), and its share of the index.

    `fragment` is a JSON value that only the engine's own `finish` reads.
    """

    entries: Sequence[FileEntry]
    fragment: Any


class Snapshot(Protocol):
    """An engine's state of one instant. Its methods may be called in another thread than the one that made it."""

    def write(self, directory: str, storage: Storage) -> WrittenPart:
        """Write and fsync this rank's files into `directory`, which exists. Not collective.

        A staged snapshot is released by this, also if it fails.
        """

    def finish(self, directory: str, storage: Storage, fragments: Sequence[Any]) -> Sequence[FileEntry]:
        """On rank 0, when all ranks have written: check the fragments (by rank) against the plan, write what joins them.

        Raises:
            SaveFailedError: what was written is not the whole state.
        """


class StagedSnapshot(Snapshot, Protocol):
    """A copy of the state, if it was asked for: training goes on while it is written."""

    def wait_staged(self) -> None:
        """Return when every copy is made. Raises: SaveFailedError if one failed (`write` does so too)."""

    def release(self) -> None:
        """Give up a snapshot that will not be written (any more). May be called twice."""


@runtime_checkable
class SnapshotEngine(Engine, Protocol):
    """An engine whose state this package writes and reads."""

    def snapshot(self, contents: Collection[str]) -> Snapshot:
        """Capture this rank's share of `contents` (`model`, `optimizer`), at an optimizer-step boundary. Not collective."""

    def restore(self, directory: str, entries: Mapping[str, FileEntry], contents: Collection[str]) -> None:
        """Fill this rank's tensors from `directory`; `entries` by file name are what each byte is checked against.

        Not collective. Names, shapes and dtypes are compared before the first tensor is touched.

        Raises:
            DamagedCheckpointError: a file is missing, cut short or changed; tensors may hold anything then.
            StateMismatchError: the checkpoint's tensors are not the run's.
        """


@runtime_checkable
class DiskAwareEngine(SnapshotEngine, Protocol):
    """An engine whose ranks read what others wrote, and which so has to know who writes to which disk."""

    def use_disks(self, disks: Sequence[int]) -> None:
        """Learn by rank which disk each one writes to, before anything else is called.

        From then on each disk gets a copy of all that its own ranks hold.
        """


@runtime_checkable
class StagingEngine(SnapshotEngine, Protocol):
    """An engine whose snapshots may be copies."""

    def can_stage(self, contents: Collection[str]) -> str | None:
        """Say why a copy would not fit into memory now, or None if it would. Not collective; ranks may differ."""

    def snapshot(self, contents: Collection[str], *, stage: bool = False, overlap: bool = False) -> StagedSnapshot:
        """Capture as a `SnapshotEngine` does; with `stage` in a copy. Not collective.

        One staged snapshot is alive at a time: until it is written or released. With `overlap` what only an optimizer step
        changes may still be being copied on return; the step waits for it.

        Raises:
            SaveFailedError: the state can't be stored, or its copy does not fit into memory.
        """
