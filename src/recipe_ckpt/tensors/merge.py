"""From what each rank wrote to one index, and the proof that it is the whole state.

A fragment names tensors by their position in the declaration, which is the same on every rank (its digest is compared), so
that a thousand fragments stay small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.manifest import JSON, digest_bytes
from recipe_ckpt.tensors.index import Box, Chunk, Grid, PartIndex, StoredTensor, TensorIndex, encode_compactly


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a part consists of, as every rank must see it: (dtype, global shape) by name, aliases and other leaves."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    aliases: Mapping[str, str]
    leaves: Mapping[str, JSON]

    def digest(self) -> str:
        tensors = [[name, dtype, shape] for name, (dtype, shape) in self.tensors.items()]
        return digest_bytes(encode_compactly([tensors, dict(self.aliases), dict(self.leaves)])).hex()


def build_fragment(declaration: Declaration, written: Iterable[tuple[int, int, Box]]) -> JSON:
    """Describe one rank's file: `written` has the position, chunk number and box of each chunk in it."""
    grouped: dict[tuple[int, Box], list[int]] = {}
    for position, number, box in written:
        grouped.setdefault((number, box), []).append(position)
    return {
        "declares": declaration.digest(),
        "tensor_count": len(declaration.tensors),
        "chunks": [[number, str(box), positions] for (number, box), positions in grouped.items()],
    }


def merge_fragments(
    declarations: Mapping[str, Declaration], fragments: Sequence[Mapping[str, JSON]], disks: Sequence[int] | None = None
) -> TensorIndex:
    """Join the ranks' fragments, each by part, into the index.

    `disks` says by rank which disk it wrote to (None: all to one): a chunk may lie on each of them once.

    Raises:
        SaveFailedError: ranks hold different tensors, or the chunks of a tensor do not cover it exactly once.
    """
    parts = {}
    for name, declaration in declarations.items():
        parts[name] = _merge_part(name, declaration, [fragment.get(name) for fragment in fragments], disks)
    return TensorIndex(parts)


def _merge_part(part: str, declaration: Declaration, fragments: Sequence[JSON], disks: Sequence[int] | None) -> PartIndex:
    # Tensors that are cut alike come in one group, on every rank: an append for each of them would take a second.
    groups: dict[tuple[int, ...], list[Chunk]] = {}
    digest = declaration.digest()
    for rank, fragment in enumerate(fragments):
        _require_equal(part, declaration, digest, rank, fragment)
        for number, text, positions in fragment["chunks"]:
            chunk = Chunk(rank, number, Box.parse(text))
            if chunk.box.volume:
                groups.setdefault(tuple(positions), []).append(chunk)
    holders: list[list[list[Chunk]]] = [[] for _ in declaration.tensors]
    for positions, chunks in groups.items():
        for position in positions:
            holders[position].append(chunks)
    grids: dict[tuple[object, ...], Grid] = {}
    tensors = {}
    for (name, (dtype, shape)), held in zip(declaration.tensors.items(), holders, strict=True):
        key = (shape, *map(id, held))
        if key not in grids:
            grids[key] = _build_grid(part, name, shape, list(itertools.chain.from_iterable(held)), disks)
        tensors[name] = StoredTensor(dtype, grids[key])
    return PartIndex(tensors, declaration.aliases, declaration.leaves)


def _require_equal(part: str, declaration: Declaration, digest: str, rank: int, fragment: JSON) -> None:
    if fragment is None:
        raise SaveFailedError(f"{part}: rank {rank} reports nothing; every rank saves the same parts")
    if fragment["declares"] != digest:
        raise SaveFailedError(
            f"{part}: rank {rank} holds other tensors, shapes, dtypes, ties or counters ({fragment['tensor_count']} tensors)"
            f" than rank 0 ({len(declaration.tensors)}); all ranks must hold the same state, each its shards"
        )


def _build_grid(part: str, name: str, shape: tuple[int, ...], chunks: Sequence[Chunk], disks: Sequence[int] | None) -> Grid:
    boxes = [chunk.box for chunk in chunks]
    if disks is not None and len({(disks[chunk.rank], chunk.box) for chunk in chunks}) == len(chunks):
        boxes = list(dict.fromkeys(boxes))
    problem = find_coverage_problem(shape, boxes)
    if problem:
        ranks = sorted({chunk.rank for chunk in chunks})
        raise SaveFailedError(f"{part}: tensor {name!r} of shape {list(shape)}, written by ranks {ranks}: {problem}")
    return Grid(shape, tuple(sorted(chunks, key=lambda chunk: (chunk.rank, chunk.number))))


def find_coverage_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say why the boxes don't cover the shape exactly once, or None if they do. Empty boxes must be left out."""
    whole = Box.whole(shape)
    outside = next((box for box in boxes if not box.is_inside(shape)), None)
    if outside is not None:
        return f"the chunk {str(outside)!r} is not inside it"
    written = sum(box.volume for box in boxes)
    twice = _find_overlap(boxes)
    if twice:
        return f"the chunks {str(twice[0])!r} and {str(twice[1])!r} overlap"
    if written != whole.volume:
        return f"only {written} of {whole.volume} elements were written"
    return None


def _find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Find two overlapping boxes, by a sweep along the dimension that is cut into the most pieces."""
    if len(boxes) < 2 or not boxes[0].shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    axis = max(range(len(boxes[0].shape)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        open_boxes = [other for other in open_boxes if other.stops[axis] > box.offsets[axis]]
        for other in open_boxes:
            if box.intersect(other):
                return other, box
        open_boxes.append(box)
    return None
