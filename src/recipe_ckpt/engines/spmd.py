"""Any torch model and optimizer, on one process or under DDP or FSDP2, as an engine.

Names are those of the bare model: DDP's `module.`, torch.compile's `_orig_mod.` and activation checkpointing's wrapper are
not part of them, so a checkpoint fits whichever of these is switched on or off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipe_ckpt.coordination import Coordinator, SoloCoordinator, SpmdCoordinator
from recipe_ckpt.engines.base import Snapshot, StagedSnapshot
from recipe_ckpt.engines.spmd_names import name_parameters, name_tensors
from recipe_ckpt.engines.spmd_optimizer import build_state, require_same_optimizer
from recipe_ckpt.engines.spmd_ranks import distribute, join_ranks
from recipe_ckpt.engines.spmd_state import StateTracker
from recipe_ckpt.errors import CheckpointNotFoundError, ConfigError, StateMismatchError
from recipe_ckpt.layout import FILE_TABLE
from recipe_ckpt.manifest import FileEntry, FileTable
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.tensors.index import PartIndex, TensorIndex
from recipe_ckpt.tensors.plan import PartState
from recipe_ckpt.tensors.reader import paused_gc, read_index, read_part, require_fit
from recipe_ckpt.tensors.stager import Stager
from recipe_ckpt.tensors.writer import TensorSnapshot

__all__ = ["SpmdEngine", "StepReport", "distribute", "join_ranks"]

_PARTS = ("model", "optimizer")
_RANK_TIMEOUT_SECS = 1800.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step: the first group's learning rate, and the gradients' norm before clipping if they were clipped."""

    lr: float
    grad_norm: float | None


class SpmdEngine:
    """A model and its optimizer on every rank.

    Hyperparameters are functions of the step and the config (`lr_at(step)` is the first group's learning rate, the others
    keep their ratio to it); only state comes from a checkpoint.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, lr_at: Callable[[int], float] | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._lr_at = lr_at
        self._lr_ratios = _find_lr_ratios(optimizer)
        self._coordinator: Coordinator | None = None
        self._tracker = StateTracker()
        self._stager = Stager()
        self._is_step_guarded = False
        self._reshard()
        name_parameters(optimizer, name_tensors(self.model))

    def use_disks(self, disks: Sequence[int]) -> None:
        """See `DiskAwareEngine`."""
        self._stager.use_disks(disks if len(set(disks)) > 1 else None)

    def step_optimizer(self, step: int, *, clip_grad: float | None = None) -> StepReport:
        """Do the optimizer step that makes `step` steps done (1-based), and drop the gradients. Collective if sharded."""
        if self._lr_at is not None:
            _set_lr(self.optimizer, self._lr_at(step), self._lr_ratios)
        grad_norm = None
        if clip_grad is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            norm = nn.utils.clip_grad_norm_(parameters, clip_grad)
            grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self._stager.settle()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(float(self.optimizer.param_groups[0]["lr"]), grad_norm)

    def snapshot(self, contents: Collection[str], *, stage: bool = False, overlap: bool = False) -> StagedSnapshot:
        """Capture `model` and `optimizer`, as far as `contents` has them, at an optimizer-step boundary. Not collective.

        Without `stage` it refers to the live tensors: `write` must have returned before they change. With it, it is a copy.
        With `overlap` as well, parameters and optimizer state are still being copied on return: the next optimizer step
        waits for that, and nothing else may change them. Only one staged snapshot is alive at a time: until it is written
        or released.

        Raises:
            SaveFailedError: a part of the state can't be stored, or its copy does not fit into memory (`can_stage`).
        """
        parts = self._capture(contents)
        if not stage:
            return TensorSnapshot(self._stager.plan(parts, rank=_rank(), world_size=_world_size()))
        if overlap:
            self._guard_step()
        return self._stager.stage(parts, rank=_rank(), world_size=_world_size(), overlap=overlap)

    def can_stage(self, contents: Collection[str]) -> str | None:
        """Say why a staged snapshot would not fit into memory now, or None if it would. Not collective."""
        return self._stager.find_problem(self._capture(contents), rank=_rank(), world_size=_world_size())

    def _capture(self, contents: Collection[str]) -> dict[str, PartState]:
        self._reshard()
        return self._tracker.capture(self.model, self.optimizer, contents)

    def _guard_step(self) -> None:
        """Make every optimizer step wait for copies, also one that is not done by `step_optimizer`."""
        if not self._is_step_guarded:
            settle = self._stager.settle
            self.optimizer.register_step_pre_hook(lambda *_: settle())
            self._is_step_guarded = True

    def restore(self, directory: str, entries: Mapping[str, FileEntry], contents: Collection[str]) -> None:
        """Fill the tensors and replace the optimizer's state; state that the checkpoint does not have is dropped.

        Raises and ranks: as `SnapshotEngine.restore` says.
        """
        self._stager.forget()
        self._tracker.forget()
        self._reshard()
        with paused_gc():
            self._restore(directory, entries, contents)

    def _restore(self, directory: str, entries: Mapping[str, FileEntry], contents: Collection[str]) -> None:
        index = read_index(directory, entries)
        parts = {name: _find_part(index, directory, name) for name in _PARTS if name in contents}
        tensors = name_tensors(self.model)
        parameters = name_parameters(self.optimizer, tensors)
        if "model" in parts:
            require_fit("model", parts["model"], tensors)
        if "optimizer" in parts:
            require_same_optimizer(self.optimizer, parameters, parts["optimizer"])
        if "model" in parts:
            read_part(directory, entries, "model", parts["model"], tensors)
        if "optimizer" in parts:
            state, targets = build_state(self.optimizer, parameters, parts["optimizer"])
            read_part(directory, entries, "optimizer", parts["optimizer"], targets)
            self.optimizer.state.update({parameters[name]: values for name, values in state.items() if values})

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write model and optimizer into a directory, with a file table that `load_checkpoint` checks them against.

        Collective. This is the engine by itself, as verl calls it: there is no commit and no retention; the handler uses
        `snapshot` instead. On return everything is durable on all ranks.

        Raises:
            ConfigError: `hdfs_path` or `max_ckpt_to_keep` is given: mirroring and retention are the handler's.
        """
        for key, value in (("hdfs_path", hdfs_path), ("max_ckpt_to_keep", max_ckpt_to_keep)):
            if value is not None:
                raise ConfigError(key, value, "None", "Mirroring and retention are CheckpointHandler's, not the engine's")
        storage = LocalStorage()
        snapshot: Snapshot | None = None

        def write() -> dict[str, Any]:
            nonlocal snapshot
            storage.make_dirs(local_path)
            snapshot = self.snapshot(_PARTS)
            written = snapshot.write(local_path, storage)
            return {"entries": [asdict(entry) for entry in written.entries], "fragment": written.fragment}

        def finish(results: list[dict[str, Any]]) -> None:
            assert snapshot is not None
            joined = snapshot.finish(local_path, storage, [result["fragment"] for result in results])
            written = [FileEntry(**entry) for result in results for entry in result["entries"]]
            table = FileTable.of([*written, *joined])
            storage.write_file(os.path.join(local_path, FILE_TABLE), [table.encode()], name=FILE_TABLE, rank=0)
            storage.sync_dir(local_path)

        self._join_coordinator().together(write, finish)
        if _world_size() > 1:
            # Rank 0 holds the coordinator's store: it must not end the process before the others have read the outcome.
            distributed.barrier()

    def load_checkpoint(self, local_path: str) -> None:
        """Restore from a directory that has a file table: one of `save_checkpoint`, or a committed step. Not collective."""
        path = os.path.join(local_path, FILE_TABLE)
        storage = LocalStorage()
        if not storage.exists(path):
            raise CheckpointNotFoundError(f"{path}: not found; give a directory that save_checkpoint wrote", path=path)
        table = FileTable.decode(storage.read(path), path)
        self.restore(local_path, {entry.path: entry for entry in table.entries}, _PARTS)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return _rank()

    def get_data_parallel_size(self) -> int:
        return _world_size()

    def _reshard(self) -> None:
        """Put FSDP2's shards back in place: after a forward without backward the root still holds whole parameters."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _join_coordinator(self) -> Coordinator:
        if self._coordinator is None:
            if _world_size() > 1:
                self._coordinator = SpmdCoordinator.from_process_group(rank_timeout_secs=_RANK_TIMEOUT_SECS)
            else:
                self._coordinator = SoloCoordinator()
        return self._coordinator


def _find_part(index: TensorIndex, directory: str, name: str) -> PartIndex:
    if name not in index.parts:
        raise StateMismatchError(
            f"{directory}: it has no {name!r}, only {sorted(index.parts)}; leave {name!r} out of load_contents",
            path=directory,
        )
    return index.parts[name]


def _find_lr_ratios(optimizer: torch.optim.Optimizer) -> list[float]:
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return [rate / rates[0] if rates[0] else 1.0 for rate in rates]


def _set_lr(optimizer: torch.optim.Optimizer, lr: float, ratios: list[float]) -> None:
    for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr * ratio)
        else:
            group["lr"] = lr * ratio


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1
