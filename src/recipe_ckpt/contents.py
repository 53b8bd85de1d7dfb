"""What one rank puts into a checkpoint and takes out of it: engines, data position, random state, facts."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from recipe_ckpt import data_state, layout
from recipe_ckpt.captured import Captured, join_folder
from recipe_ckpt.drift import Change, list_changes
from recipe_ckpt.engines.base import DiskAwareEngine, Engine, SnapshotEngine, StagingEngine
from recipe_ckpt.errors import ConfigError, DamagedCheckpointError
from recipe_ckpt.manifest import BlockDigester, FileEntry, FileTable, decode_json, encode_json, to_plain
from recipe_ckpt.storage import describe_file

logger = logging.getLogger(__name__)

ENGINE_CONTENTS = frozenset({"model", "optimizer"})


class Stateful(Protocol):
    """Further state: a schedule, an average of the weights, metrics. Tensors and plain types, equal on every rank."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class RunContents:
    """This rank's view of what is saved and restored.

    `engines` by folder: a single engine stands under `""`, in the step directory itself, as in verl's SFT layout; several
    ones in folders of their names, as in its PPO layout.
    """

    engines: Mapping[str, Engine]
    loader: Any
    extra_state: Mapping[str, Stateful]
    lora_train_meta: Mapping[str, Any] | None
    documents: Mapping[str, str]
    rank: int
    world_size: int
    on_data_mismatch: str

    @property
    def _first(self) -> Engine:
        return next(iter(self.engines.values()))

    @property
    def restores_itself(self) -> bool:
        """Whether an engine reads its own format, and with it whatever of its optimizer that holds."""
        return not all(isinstance(engine, SnapshotEngine) for engine in self.engines.values())

    @property
    def dp_size(self) -> int:
        return self._first.get_data_parallel_size()

    def describe_data(self) -> dict[str, Any]:
        return data_state.describe_geometry(self.loader, self.dp_size)

    def capture(self, step: int, contents: Collection[str], *, stage: bool, overlap: bool = False) -> Captured:
        """Take this rank's state of this instant, at an optimizer step's edge. Not collective.

        With `stage` the engines' tensors are copied, so that training may go on while they are written; with `overlap` what
        only an optimizer step changes may still be being copied on return.
        """
        captured = Captured(step, self.rank)
        try:
            self._capture_engines(captured, ENGINE_CONTENTS & set(contents), stage, overlap)
            self._capture_files(captured, contents)
        except BaseException:
            captured.release()
            raise
        return captured

    def _capture_engines(self, captured: Captured, contents: Collection[str], stage: bool, overlap: bool) -> None:
        for name, engine in self.engines.items():
            if stage and isinstance(engine, StagingEngine):
                snapshot = engine.snapshot(contents, stage=True, overlap=overlap)
                captured.staged.append(snapshot)
                captured.snapshots[name] = snapshot
            elif isinstance(engine, SnapshotEngine):
                captured.snapshots[name] = engine.snapshot(contents)
            else:
                captured.foreign[name] = engine

    def _capture_files(self, captured: Captured, contents: Collection[str]) -> None:
        if "extra" in contents:
            captured.files[layout.build_rng_name(self.rank)] = data_state.encode_rng()
            if self._first.is_mp_src_rank_with_outputs():
                name = layout.build_data_name(self._first.get_data_parallel_rank())
                captured.files[name] = data_state.encode_loader(self.loader)
        if self.rank == 0:
            captured.shared_files = self._build_facts(captured.step, contents)

    def find_staging_problem(self, contents: Collection[str]) -> str | None:
        """Say why a save can't be made in the background on this rank now; None if it can."""
        for engine in self.engines.values():
            if not isinstance(engine, StagingEngine):
                return f"{type(engine).__name__} takes no staged snapshots"
            if problem := engine.can_stage(ENGINE_CONTENTS & set(contents)):
                return problem
        return None

    def _build_facts(self, step: int, contents: Collection[str]) -> dict[str, bytes]:
        files = {name: text.encode() for name, text in self.documents.items()}
        state: dict[str, Any] = {"step": step}
        if "extra" in contents:
            sampler = data_state.find_sampler(self.loader)
            state["data"] = sampler.position() if sampler else None
            state["extra"] = {}
            for name, stateful in self.extra_state.items():
                value = stateful.state_dict()
                if _is_plain(value):
                    state["extra"][name] = value
                else:
                    files[layout.build_extra_name(name)] = data_state.encode_tensors(value, f"extra_state[{name!r}]")
        files[layout.TRAINER_STATE] = encode_json(state)
        if self.lora_train_meta is not None:
            files[layout.LORA_META] = encode_json(to_plain(self.lora_train_meta, "lora_train_meta"))
        return files

    # --- restoring

    def compare_config(self, directory: str, table: FileTable | None) -> list[Change] | None:
        """List what differs between a checkpoint's configuration and this run's; None if the checkpoint does not have its.

        Raises:
            DamagedCheckpointError: the file is not what was written.
        """
        current = self.documents.get(layout.RESOLVED_CONFIG)
        if current is None:
            return []
        entry = table.find(layout.RESOLVED_CONFIG) if table else None
        if entry is None:
            return None
        saved = decode_json(read_checked(directory, entry), os.path.join(directory, entry.path))
        return list_changes(saved, decode_json(current.encode(), layout.RESOLVED_CONFIG))

    def use_disks(self, disks: Sequence[int]) -> None:
        """Tell the engines by rank which disk each one writes to."""
        for engine in self.engines.values():
            if isinstance(engine, DiskAwareEngine):
                engine.use_disks(disks)

    def check_foreign(self, directory: str, table: FileTable | None, sharers: Sequence[int]) -> None:
        """Check this rank's share of the files that engines with their own format will read.

        `sharers` are the ranks that read the same directory.

        Raises:
            DamagedCheckpointError: a file differs from its entry.
        """
        if table is None:
            return
        for name, engine in self.engines.items():
            if isinstance(engine, SnapshotEngine):
                continue
            for entry in table.under(name)[sharers.index(self.rank) :: len(sharers)]:
                read_checked(join_folder(directory, name), entry, keep=False)

    def restore(
        self,
        directory: str,
        table: FileTable | None,
        step: int,
        contents: Collection[str],
        geometry: Mapping[str, Any] | None,
    ) -> None:
        """Restore everything, the random state last. `table` is None for a foreign checkpoint.

        Raises:
            DamagedCheckpointError: a file differs from its entry.
            StateMismatchError: the tensors don't fit.
            DataMismatchError: the data position doesn't fit.
        """
        for name, engine in self.engines.items():
            folder = join_folder(directory, name)
            if table is not None and isinstance(engine, SnapshotEngine):
                entries = {entry.path: entry for entry in table.under(name)}
                engine.restore(folder, entries, ENGINE_CONTENTS & set(contents))
            else:
                engine.load_checkpoint(folder)
        if "extra" in contents:
            self._restore_extra(directory, table, step, geometry)

    def _restore_extra(self, directory: str, table: FileTable | None, step: int, geometry: Mapping[str, Any] | None) -> None:
        facts = self._read_facts(directory, table)
        self._restore_data(directory, table, step, geometry, facts)
        for name, stateful in self.extra_state.items():
            if name in facts.get("extra", {}):
                stateful.load_state_dict(facts["extra"][name])
            elif table is not None and (entry := table.find(layout.build_extra_name(name))):
                data = read_checked(directory, entry)
                stateful.load_state_dict(data_state.decode_tensors(data, os.path.join(directory, entry.path)))
            else:
                logger.warning("%s: holds no state of %r, which so starts as it is", directory, name)
        self._restore_rng(directory, table)

    def _read_facts(self, directory: str, table: FileTable | None) -> dict[str, Any]:
        if table is None:
            return {}
        data = read_checked(directory, _require(table, layout.TRAINER_STATE, directory))
        return dict(decode_json(data, os.path.join(directory, layout.TRAINER_STATE)))

    def _restore_data(
        self,
        directory: str,
        table: FileTable | None,
        step: int,
        geometry: Mapping[str, Any] | None,
        facts: Mapping[str, Any],
    ) -> None:
        sampler = data_state.find_sampler(self.loader)
        if sampler is not None:
            data_state.restore_sampler(sampler, facts.get("data"), on_mismatch=self.on_data_mismatch)
        elif hasattr(self.loader, "load_state_dict"):
            state = self._read_loader_state(directory, table, geometry)
            data_state.restore_loader(
                self.loader, state, step, geometry, self.describe_data(), on_mismatch=self.on_data_mismatch
            )
        else:
            logger.warning("train_dataloader has neither a positioned sampler nor a state: its data starts over")

    def _read_loader_state(self, directory: str, table: FileTable | None, geometry: Mapping[str, Any] | None) -> Any:
        name = layout.build_data_name(self._first.get_data_parallel_rank())
        if table is None:
            entry = describe_file(os.path.join(directory, name), name=name, rank=self.rank)
        elif geometry is not None and geometry.get("dp_size") != self.dp_size:
            return {}  # restore_loader refuses it, with both sizes
        else:
            entry = _require(table, name, directory)
        return data_state.decode_tensors(read_checked(directory, entry), os.path.join(directory, name))

    def _restore_rng(self, directory: str, table: FileTable | None) -> None:
        if table is None:
            return
        entry = table.find(layout.build_rng_name(self.rank))
        if entry is None:
            first = _require(table, layout.build_rng_name(0), directory)
            data_state.derive_rng(int(first.digest[:12], 16) + self.rank)
            return
        data = read_checked(directory, entry)
        data_state.restore_rng(data_state.decode_tensors(data, os.path.join(directory, entry.path)))


def read_checked(directory: str, entry: FileEntry, *, keep: bool = True) -> bytes:
    """Read a file whole and compare it with its entry; `keep=False` only compares, in bounded memory.

    Raises:
        DamagedCheckpointError: it is missing, cut short or changed.
    """
    path = os.path.join(directory, entry.path)
    digester = BlockDigester()
    kept = bytearray()
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(1 << 20):
                digester.update(chunk)
                if keep:
                    kept += chunk
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: {error.strerror or error}", path=path) from error
    if digester.size_bytes != entry.size_bytes or digester.finish()[0] != entry.digest:
        raise DamagedCheckpointError(
            f"{path}: found {digester.size_bytes} bytes that are not the {entry.size_bytes} bytes that were written",
            path=path,
        )
    return bytes(kept)


def _is_plain(value: object) -> bool:
    """Say whether JSON gives a value back as it is; it changes integer keys, tuples, infinities and NaN."""
    try:
        return bool(to_plain(value) == value)
    except TypeError:
        return False


def check_names(documents: Collection[str], extra_state: Collection[str]) -> None:
    """Refuse names that can't stand as files in a step directory.

    Raises:
        ConfigError: naming it.
    """
    for key, name, file in [
        *(("documents", name, name) for name in documents),
        *(("extra_state", name, layout.build_extra_name(name)) for name in extra_state),
    ]:
        if not layout.is_free_name(file):
            raise ConfigError(key, name, "a file name that a checkpoint does not use itself", "Choose another name.")


def name_engines(engine: Engine | Mapping[str, Engine]) -> dict[str, Engine]:
    """Put engines by folder; check that they are some.

    Raises:
        ConfigError: an object without an engine's methods, or a name that is no folder's.
    """
    engines = dict(engine) if isinstance(engine, Mapping) else {"": engine}
    if not engines:
        raise ConfigError("engine", engine, "an engine, or a mapping of names to engines", "Pass at least one.")
    for name, item in engines.items():
        if not isinstance(item, Engine):
            allowed = (
                "an object with save_checkpoint, load_checkpoint, is_mp_src_rank_with_outputs, get_data_parallel_rank/size"
            )
            raise ConfigError("engine", type(item).__name__, allowed, "Pass an engine, or a mapping of names to engines.")
        if isinstance(engine, Mapping) and not name.isidentifier():
            raise ConfigError("engine", name, "names such as actor or critic", "It becomes a folder's name.")
    return engines


def _require(table: FileTable, name: str, directory: str) -> FileEntry:
    entry = table.find(name)
    if entry is None:
        raise DamagedCheckpointError(f"{directory}: {name} is not part of it", path=directory)
    return entry
