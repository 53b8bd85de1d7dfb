"""Who writes what, and who reads what: decided by each rank alone, without a collective.

A DTensor's placements say which boxes of the global tensor this rank holds. A plain tensor counts as replicated over all
ranks. Of replicas one writes, on each disk, by a rule that all ranks compute alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.manifest import JSON
from recipe_ckpt.tensors.index import ITEM_BYTES, Box, build_chunk_name
from recipe_ckpt.tensors.merge import Declaration

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class PartState:
    """One part of a state: tensors by name (DTensors as they are), and what is not a tensor, as JSON.

    `volatile` names tensors that may change before the next optimizer step: buffers.
    """

    tensors: Mapping[str, torch.Tensor]
    leaves: Mapping[str, JSON] = field(default_factory=dict)
    volatile: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a global tensor, and the view of this rank's memory that holds it."""

    box: Box
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk that this rank writes; `position` is the tensor's in the declaration."""

    position: int
    number: int
    name: str
    dtype: str
    box: Box
    values: torch.Tensor
    is_volatile: bool = False

    @property
    def size_bytes(self) -> int:
        return self.box.volume * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One rank's share of a part. `disks` says by rank which disk it writes to; None: all to one."""

    part: str
    rank: int
    declaration: Declaration
    chunks: Sequence[PlannedChunk]
    disks: Sequence[int] | None = None


def plan_write(part: str, state: PartState, rank: int, world_size: int, disks: Sequence[int] | None = None) -> WritePlan:
    """Decide which chunks of a part this rank writes.

    `disks` says by rank which disk it writes to (None: all to one). Each disk gets all that its ranks hold.

    Raises:
        SaveFailedError: a tensor's dtype, layout or placement can't be stored.
    """
    aliases = find_aliases(state.tensors)
    own = {name: tensor for name, tensor in state.tensors.items() if name not in aliases}
    declared = {name: (name_dtype(part, name, tensor), tuple(tensor.shape)) for name, tensor in own.items()}
    owners = _choose_owners(own, declared, _Holders(rank, world_size, disks))
    chunks = []
    for position, (name, tensor) in enumerate(own.items()):
        if owners[name] == rank:
            kept = [local for local in find_local_boxes(tensor) if local.box.volume or not math.prod(tensor.shape)]
            for number, local in enumerate(kept):
                names = build_chunk_name(name, number), declared[name][0]
                chunks.append(PlannedChunk(position, number, *names, local.box, local.values, name in state.volatile))
    _require_distinct_names(part, chunks)
    return WritePlan(part, rank, Declaration(declared, aliases, state.leaves), chunks, disks)


def find_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Map each further name of a tied tensor to its first one."""
    seen: dict[object, list[tuple[str, torch.Tensor]]] = {}
    aliases = {}
    for name, tensor in tensors.items():
        earlier = seen.setdefault(_find_address(tensor), [])
        first = next((known for known, other in earlier if _describe_memory(other) == _describe_memory(tensor)), None)
        if first is None:
            earlier.append((name, tensor))
        else:
            aliases[name] = first
    return aliases


def name_dtype(part: str, name: str, tensor: torch.Tensor) -> str:
    """Return safetensors' name of a tensor's dtype, if the tensor can be stored at all."""
    problem = find_storage_problem(tensor)
    if problem:
        raise SaveFailedError(f"{part}: tensor {name!r} {problem}")
    return DTYPE_NAMES[tensor.dtype]


def find_storage_problem(tensor: torch.Tensor) -> str | None:
    """Say why a tensor can be neither stored nor filled, or None if it can."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    if any(placement.is_partial() for placement in placements):
        return f"has the placements {placements}: a partial sum; reduce it first"
    if not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}; stored are torch.Tensor and DTensor. Convert it first"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; stored are strided ones. Convert it with to_dense()"
    if tensor.device.type == "meta":
        return "is on the meta device, without values. Materialise it with to_empty() first"
    if tensor.dtype not in DTYPE_NAMES:
        return f"has the dtype {tensor.dtype}; stored are {', '.join(sorted(TORCH_DTYPES))}. Convert it first"
    return None


def find_local_boxes(tensor: torch.Tensor) -> list[LocalBox]:
    """Return what this rank holds of a tensor: one box, or several where a dimension was sharded in strides."""
    if not isinstance(tensor, DTensor):
        return [LocalBox(Box.whole(tensor.shape), tensor.detach())]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    local = tensor.to_local().detach()
    if all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return [LocalBox(Box(tuple(offsets), tuple(shape)), local)]
    return _find_strided_boxes(tensor, local)


def is_plain_memory(values: torch.Tensor) -> bool:
    """Say whether a tensor is a row-major run of bytes on the host, just as it lies on disk."""
    return values.is_cpu and values.is_contiguous() and not values.is_conj() and not values.is_neg()


def view_bytes(values: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    array: Any = values.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _find_strided_boxes(tensor: DTensor, local: torch.Tensor) -> list[LocalBox]:
    """Follow each dimension's indices through its shardings and cut at gaps (`_StridedShard`: FSDP2 over tensor parallel)."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    indices = [torch.arange(size) for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            dim: int = placement.dim  # type: ignore[attr-defined]
            split = placement._split_tensor  # type: ignore[attr-defined]
            pieces, _ = split(indices[dim], tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=False)
            indices[dim] = pieces[coordinate[mesh_dim]]
    boxes = []
    for runs in itertools.product(*(_find_runs(index.tolist()) for index in indices)):
        box = Box(tuple(run[1] for run in runs), tuple(run[2] for run in runs))
        values = local[tuple(slice(start, start + size) for start, _, size in runs)]
        boxes.append(LocalBox(box, values))
    return boxes


def _find_runs(index: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (local start, global start, size) of each stretch of consecutive global indices."""
    starts = [here for here in range(len(index)) if here == 0 or index[here] != index[here - 1] + 1]
    stops = [*starts[1:], len(index)]
    return [(start, index[start], stop - start) for start, stop in zip(starts, stops, strict=False)]


def _find_address(tensor: torch.Tensor) -> object:
    """Return what tied tensors have in common at least: their address, or of memoryless ones the identity."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    address = local.data_ptr() if local.layout == torch.strided else 0
    return address if address and local.numel() else ("object", id(tensor))


def _describe_memory(tensor: torch.Tensor) -> object:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.layout != torch.strided:
        return id(tensor)
    return (local.device, local.dtype, tuple(tensor.shape), local.stride(), tuple(local.shape))


class _Holders:
    """Finds the ranks that hold the same of a tensor as this one and write to the same disk."""

    def __init__(self, rank: int, world_size: int, disks: Sequence[int] | None) -> None:
        self._disks = disks or [0] * world_size
        self._disk = self._disks[rank]
        self._everywhere = self._select(range(world_size))
        self._known: dict[object, tuple[int, ...]] = {}

    def find(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return them in the order of their replicas, this rank among them; none for a rank outside of the tensor's mesh."""
        if not isinstance(tensor, DTensor):
            return self._everywhere
        key = (id(tensor.device_mesh), tensor.placements)
        if key not in self._known:
            self._known[key] = self._select(_list_replicas(tensor))
        return self._known[key]

    def _select(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if self._disks[rank] == self._disk)


def _list_replicas(tensor: DTensor) -> list[int]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    where = tuple(slice(None) if isinstance(p, Replicate) else coordinate[dim] for dim, p in enumerate(tensor.placements))
    ranks: list[int] = mesh.mesh[where].flatten().tolist()
    return ranks


def _choose_owners(
    tensors: Mapping[str, torch.Tensor], declared: Mapping[str, tuple[str, tuple[int, ...]]], holders: _Holders
) -> dict[str, int | None]:
    """Choose which holder of each tensor writes: the one with the least bytes so far, largest tensors first."""
    sizes = {name: math.prod(shape) * ITEM_BYTES[dtype] for name, (dtype, shape) in declared.items()}
    loads: dict[tuple[int, ...], list[int]] = {}
    owners: dict[str, int | None] = {}
    for name in sorted(tensors, key=lambda name: (-sizes[name], name)):
        ranks = holders.find(tensors[name])
        if not ranks:
            owners[name] = None
            continue
        bytes_by_rank = loads.setdefault(ranks, [0] * len(ranks))
        chosen = bytes_by_rank.index(min(bytes_by_rank))
        bytes_by_rank[chosen] += sizes[name]
        owners[name] = ranks[chosen]
    return owners


def _require_distinct_names(part: str, chunks: Sequence[PlannedChunk]) -> None:
    seen: set[str] = set()
    for chunk in chunks:
        if chunk.name in seen or chunk.name == "__metadata__":
            raise SaveFailedError(f"{part}: the name {chunk.name!r} is needed twice in one file; rename the parameter")
        seen.add(chunk.name)
