"""Snapshots that hold copies of one instant, so that training may go on while they are written.

Plan, images and addresses are kept while the state's tensors stay where and what they are; checking that costs about half a
microsecond a tensor. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from recipe_ckpt.engines.base import WrittenPart
from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.storage import Storage
from recipe_ckpt.tensors.copying import Copying
from recipe_ckpt.tensors.image import FileImage, ImageCopies
from recipe_ckpt.tensors.memory import find_memory_problem
from recipe_ckpt.tensors.plan import PartState, WritePlan, plan_write
from recipe_ckpt.tensors.writer import describe_written, write_index, write_part


class StagedSnapshot:
    """The copy of one instant; it holds the stager's images until it is written or released."""

    def __init__(self, plans: Sequence[WritePlan], images: Mapping[str, FileImage], copying: Copying) -> None:
        self._plans = plans
        self._images = images
        self._copying = copying
        self.is_released = False

    def wait_staged(self) -> None:
        """Return when all copies are made.

        Raises:
            SaveFailedError: a copy failed.
        """
        self._copying.wait()

    def write(self, directory: str, storage: Storage) -> WrittenPart:
        """Write and fsync this rank's files from the images, in any thread, and release them. Not collective.

        Raises:
            SaveFailedError: a copy failed, or a file is not the planned one.
        """
        assert not self.is_released, "a staged snapshot is written once"
        try:
            self.wait_staged()
            entries = [
                write_part(directory, storage, plan, self._images[plan.part].contents) for plan in self._plans if plan.chunks
            ]
            return WrittenPart(entries, describe_written(self._plans))
        finally:
            self.release()

    def finish(self, directory: str, storage: Storage, fragments: Sequence[Any]) -> Sequence[FileEntry]:
        """On rank 0: check that the ranks' fragments are the whole state, and write the index. Raises: as `write_index`."""
        return [write_index(directory, storage, self._plans, fragments)]

    def settle(self) -> None:
        """Return when the tensors may change: wait for copies on the host, put later device work behind the others."""
        self._copying.settle()

    def release(self) -> None:
        """Give the images up without writing (any more). May be called twice."""
        self._copying.end()
        self.is_released = True


@dataclass(slots=True)
class _StagedPart:
    """One part's plan, what its tensors must still be for it to hold, and the copies once its image is laid out."""

    tensors: Mapping[str, torch.Tensor]
    layouts: list[Layout]
    world_size: int
    plan: WritePlan
    copies: ImageCopies | None = None

    def holds_for(self, state: PartState, rank: int, world_size: int) -> bool:
        return (
            state.tensors is self.tensors
            and (rank, world_size) == (self.plan.rank, self.world_size)
            and are_laid_out_as(state.tensors.values(), self.layouts)
        )


class Stager:
    """Makes one rank's staged snapshots, one at a time."""

    def __init__(self) -> None:
        self._parts: dict[str, _StagedPart] = {}
        self._images: dict[str, FileImage] = {}
        self._current: StagedSnapshot | None = None
        self._disks: Sequence[int] | None = None

    def use_disks(self, disks: Sequence[int] | None) -> None:
        """Plan for ranks that write to these disks, by rank."""
        self.forget()
        self._disks = disks

    def plan(self, parts: Mapping[str, PartState], *, rank: int, world_size: int) -> list[WritePlan]:
        """Return the plans by which these parts are written, staged or not.

        Raises:
            SaveFailedError: a tensor can't be stored.
        """
        return [self._plan(name, state, rank, world_size).plan for name, state in parts.items()]

    def find_problem(self, parts: Mapping[str, PartState], *, rank: int, world_size: int) -> str | None:
        """Say why copies of these parts would not fit into memory, or None if they would."""
        return self._find_problem([self._plan(name, state, rank, world_size) for name, state in parts.items()])

    def stage(self, parts: Mapping[str, PartState], *, rank: int, world_size: int, overlap: bool) -> StagedSnapshot:
        """Copy the parts; with `overlap` large tensors that are not volatile are copied after the return, until `settle`.

        Raises:
            SaveFailedError: a tensor can't be stored, or the copies don't fit into memory.
        """
        assert self._current is None or self._current.is_released, "one staged snapshot at a time: write or release it"
        staged = [self._plan(name, state, rank, world_size) for name, state in parts.items()]
        problem = self._find_problem(staged)
        if problem:
            raise SaveFailedError(f"{problem}. Save without staging (async_save=false), or leave more memory free")
        copying = Copying([self._lay_out(part) for part in staged])
        self._current = StagedSnapshot([part.plan for part in staged], dict(self._images), copying)
        try:
            copying.start(overlap=overlap)
        except BaseException:
            self._current.release()
            raise
        return self._current

    def settle(self) -> None:
        """Return when the tensors of the last snapshot may change."""
        if self._current is not None and not self._current.is_released:
            self._current.settle()

    def forget(self) -> None:
        """Let go of all tensors: they are about to be replaced. The images stay."""
        self.settle()
        self._parts.clear()

    def _plan(self, name: str, state: PartState, rank: int, world_size: int) -> _StagedPart:
        """Return the part with the plan from before if it still holds, with this moment's leaves."""
        held = self._parts.get(name)
        if held is None or not held.holds_for(state, rank, world_size):
            layouts = describe_layouts(state.tensors.values())
            plan = plan_write(name, state, rank, world_size, self._disks)
            held = _StagedPart(state.tensors, layouts, world_size, plan)
            self._parts[name] = held
        elif held.plan.declaration.leaves is not state.leaves:
            held.plan = replace(held.plan, declaration=replace(held.plan.declaration, leaves=state.leaves))
        return held

    def _find_problem(self, parts: Iterable[_StagedPart]) -> str | None:
        new = [part.plan for part in parts if part.copies is None]
        return find_memory_problem(sum(self._image_of(plan).count_missing_bytes(plan) for plan in new)) if new else None

    def _lay_out(self, part: _StagedPart) -> ImageCopies:
        if part.copies is None:
            part.copies = self._image_of(part.plan).lay_out(part.plan)
        return part.copies

    def _image_of(self, plan: WritePlan) -> FileImage:
        return self._images.setdefault(plan.part, FileImage())


Layout = tuple[DTensorSpec | None, int, torch.dtype, torch.Size, tuple[int, ...]]


def describe_layouts(tensors: Iterable[torch.Tensor]) -> list[Layout]:
    """Return what must stay for planned copies to hold: else they would read freed memory, or past a tensor's end."""
    found: list[Layout] = []
    for tensor in tensors:
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        found.append((spec, local.data_ptr(), local.dtype, local.shape, local.stride()))
    return found


def are_laid_out_as(tensors: Iterable[torch.Tensor], layouts: Iterable[Layout]) -> bool:
    """Compare as many tensors as there are layouts. It keeps nothing: thousands of new tuples would set off the GC."""
    for tensor, (spec, address, dtype, shape, stride) in zip(tensors, layouts, strict=True):
        if spec is not None:
            if not isinstance(tensor, DTensor) or tensor._spec is not spec:
                return False
            tensor = tensor._local_tensor
        if tensor.data_ptr() != address or tensor.dtype is not dtype or tensor.shape != shape or tensor.stride() != stride:
            return False
    return True
