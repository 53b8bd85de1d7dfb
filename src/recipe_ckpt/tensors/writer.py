"""One rank's files: standard safetensors, written front to back and checked against the plan."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from recipe_ckpt.engines.base import WrittenPart
from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.layout import TENSOR_INDEX, build_tensor_file_name
from recipe_ckpt.manifest import JSON, FileEntry
from recipe_ckpt.storage import Buffer, Storage
from recipe_ckpt.tensors.header import build_header, order_chunks
from recipe_ckpt.tensors.merge import build_fragment, merge_fragments
from recipe_ckpt.tensors.plan import PartState, PlannedChunk, WritePlan, plan_write, view_bytes


class TensorSnapshot:
    """The tensors of one instant, planned for the disk.

    It keeps references, not copies: `write` reads the live tensors, so training must not go on before it has returned.
    """

    def __init__(self, parts: Mapping[str, PartState], *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._plans = [plan_write(name, state, rank, world_size) for name, state in parts.items()]

    def wait_staged(self) -> None:
        """Return at once: there is no copy to wait for."""

    def write(self, directory: str, storage: Storage) -> WrittenPart:
        """Write and fsync this rank's file of each part, none where it owns nothing of the part. Not collective."""
        entries = [write_part(directory, storage, plan) for plan in self._plans if plan.chunks]
        return WrittenPart(entries, describe_written(self._plans))

    def finish(self, directory: str, storage: Storage, fragments: Sequence[Any]) -> Sequence[FileEntry]:
        """On rank 0: check that the ranks' fragments are the whole state, and write the index. Raises: as `write_index`."""
        return [write_index(directory, storage, self._plans, fragments)]

    def release(self) -> None:
        """Do nothing: no memory is held."""


def write_part(directory: str, storage: Storage, plan: WritePlan, image: Buffer | None = None) -> FileEntry:
    """Write one rank's file of one part, from its image if it has one, and return its entry.

    Raises:
        SaveFailedError: the file that was written is not the planned one.
    """
    name = build_tensor_file_name(plan.part, plan.rank)
    planned_bytes, content = _read_live(plan) if image is None else (len(image), [image])
    entry = storage.write_file(os.path.join(directory, name), content, name=name, rank=plan.rank)
    if (entry.path, entry.size_bytes) != (name, planned_bytes):
        raise SaveFailedError(
            f"{name}: planned were {planned_bytes} bytes, written {entry.size_bytes} as {entry.path!r}", path=directory
        )
    return entry


def describe_written(plans: Iterable[WritePlan]) -> JSON:
    """Return this rank's share of the index, by part."""
    return {
        plan.part: build_fragment(plan.declaration, [(c.position, c.number, c.box) for c in plan.chunks]) for plan in plans
    }


def write_index(directory: str, storage: Storage, plans: Iterable[WritePlan], fragments: Sequence[Any]) -> FileEntry:
    """Join the ranks' fragments and write the index.

    Raises:
        SaveFailedError: a tensor is not covered exactly once, or ranks hold different tensors; the message names it.
    """
    plans = list(plans)
    index = merge_fragments({plan.part: plan.declaration for plan in plans}, fragments)
    path = os.path.join(directory, TENSOR_INDEX)
    return storage.write_file(path, [index.encode()], name=TENSOR_INDEX, rank=0)


def _read_live(plan: WritePlan) -> tuple[int, Iterable[Buffer]]:
    """Return a file's size and its bytes, read from the tensors as they are asked for."""
    chunks = [chunk for chunk in order_chunks(plan.chunks) if chunk.size_bytes]
    header = build_header(order_chunks(plan.chunks))
    size_bytes = len(header) + sum(chunk.size_bytes for chunk in chunks)
    return size_bytes, itertools.chain([header], map(_read_bytes, chunks))


def _read_bytes(chunk: PlannedChunk) -> memoryview:
    """Return a tensor's elements in row-major order; a contiguous CPU tensor is not copied."""
    values: torch.Tensor = chunk.values.resolve_conj().resolve_neg().cpu()
    return view_bytes(values.contiguous())
