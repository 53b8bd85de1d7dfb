"""The records of a checkpoint, and the digests that they hold.

A checkpoint exists if and only if its manifest does; it is whole if every file of its file table matches. Digests are
xxh3-128 of each block of 4 MiB, and of the block digests for the whole file, so that a reader can check only what it reads.
"""

from __future__ import annotations

import enum
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import xxhash

from recipe_ckpt.errors import DamagedCheckpointError

FORMAT = 1
BLOCK_BYTES = 4 * 1024 * 1024
_DIGEST_CHARS = 32
_SEAL = "digest"

JSON = Any
Record = TypeVar("Record")

_ONE_LINE = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class BlockDigester:
    """Digests a file's bytes as they pass by, in pieces of any size."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._blocks: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._open_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.size_bytes += len(view)
        while len(view):
            room = BLOCK_BYTES - self._open_bytes
            piece, view = view[:room], view[room:]
            self._open.update(piece)
            self._open_bytes += len(piece)
            if self._open_bytes == BLOCK_BYTES:
                self._close_block()

    def finish(self) -> tuple[str, str]:
        """Return the file's digest and the digests of its blocks, one after the other, in hex."""
        if self._open_bytes:
            self._close_block()
        return digest_blocks(self._blocks), b"".join(self._blocks).hex()

    def _close_block(self) -> None:
        self._blocks.append(self._open.digest())
        self._open = xxhash.xxh3_128()
        self._open_bytes = 0


def describe_bytes(data: bytes, *, name: str, rank: int) -> FileEntry:
    """Return the entry of a file that holds these bytes."""
    digester = BlockDigester()
    digester.update(data)
    digest, blocks = digester.finish()
    return FileEntry(name, len(data), digest, blocks, rank)


def digest_bytes(data: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128(data).digest()


def digest_blocks(blocks: Iterable[bytes]) -> str:
    return xxhash.xxh3_128(b"".join(blocks)).hexdigest()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    `path` is relative to the step directory with `/` between its parts, `digest` and `blocks` are hex (`blocks` is 32
    characters for each 4 MiB), `rank` wrote it.
    """

    path: str
    size_bytes: int
    digest: str
    blocks: str
    rank: int

    def describe(self) -> dict[str, JSON]:
        return {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "digest": self.digest,
            "blocks": self.blocks,
            "rank": self.rank,
        }

    def block(self, number: int) -> str:
        return self.blocks[number * _DIGEST_CHARS : (number + 1) * _DIGEST_CHARS]


@dataclass(frozen=True, slots=True)
class FileTable:
    """Every file of a checkpoint but `manifest.json` and `files.json` themselves, ordered by path."""

    entries: tuple[FileEntry, ...]

    @classmethod
    def of(cls, entries: Iterable[FileEntry]) -> FileTable:
        return cls(tuple(sorted(entries, key=lambda entry: entry.path)))

    def under(self, folder: str) -> tuple[FileEntry, ...]:
        """Return a folder's entries, with paths relative to it; `""` is the step directory itself."""
        if not folder:
            return self.entries
        prefix = folder + "/"
        return tuple(
            FileEntry(e.path[len(prefix) :], e.size_bytes, e.digest, e.blocks, e.rank)
            for e in self.entries
            if e.path.startswith(prefix)
        )

    def find(self, path: str) -> FileEntry | None:
        return next((entry for entry in self.entries if entry.path == path), None)

    def encode(self) -> bytes:
        # A line for each: with indents Python's own encoder, 20 times slower, would hold up the commit of a thousand ranks.
        lines = ",\n".join(_ONE_LINE.encode(entry.describe()) for entry in self.entries)
        return f'{{"format": {FORMAT}, "files": [\n{lines}\n]}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes, path: str) -> FileTable:
        raw = _decode_format(data, path)
        return cls(tuple(build_record(FileEntry, item, path) for item in _expect_list(raw, "files", path)))


@dataclass(frozen=True, slots=True)
class NodeNote:
    """Which files of a checkpoint lie on one node's disk, and which ranks wrote there. No other `save` has this note."""

    ranks: tuple[int, ...]
    paths: tuple[str, ...]
    save: str = ""
    format: int = FORMAT

    def encode(self) -> bytes:
        return encode_json(asdict(self))

    @classmethod
    def decode(cls, data: bytes, path: str) -> NodeNote:
        raw = _decode_format(data, path)
        lists = {key: tuple(_expect_list(raw, key, path)) for key in ("ranks", "paths")}
        return build_record(cls, {**raw, **lists}, path)


@dataclass(frozen=True, slots=True)
class Continues:
    """What the user's explicit `resume_from_path` named, and every later commit inherits."""

    path: str
    step: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit record of one checkpoint.

    `sequence` grows by one with each commit of a root and is never used twice, so it tells the newest even after a rewind.
    `parent` is the digest of the manifest of the checkpoint that this one was trained from, `ancestors` the sequences of
    all that it descends from, as ranges (first, last), so that the branch can be rebuilt though some were pruned. `data` is
    the loader's geometry.
    """

    step: int
    sequence: int
    lineage: str
    parent: str | None
    ancestors: tuple[tuple[int, int], ...]
    continues: Continues | None
    launch_id: str
    created_at: str
    world_size: int
    dp_size: int
    contents: tuple[str, ...]
    data: Mapping[str, JSON]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    files_digest: str
    format: int = FORMAT

    def encode(self) -> bytes:
        return _encode_sealed(asdict(self))

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        raw = _decode_sealed(data, path)
        ancestors = tuple(_expect_range(item, path) for item in _expect_list(raw, "ancestors", path))
        raw = {**raw, "contents": tuple(_expect_list(raw, "contents", path)), "ancestors": ancestors}
        if raw.get("continues") is not None:
            raw["continues"] = build_record(Continues, raw["continues"], path)
        return build_record(cls, raw, path)


@dataclass(frozen=True, slots=True)
class BranchEntry:
    """One commit of the current branch: enough to find, check and rate it without a look at other directories."""

    step: int
    sequence: int
    digest: str
    metrics: Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`run.json`: a root's lineage, its current branch (newest first) and the highest sequence ever given out."""

    lineage: str
    last_sequence: int = 0
    branch: tuple[BranchEntry, ...] = field(default=())
    format: int = FORMAT

    def encode(self) -> bytes:
        return _encode_sealed(asdict(self))

    @classmethod
    def decode(cls, data: bytes, path: str) -> RunRecord:
        raw = _decode_sealed(data, path)
        branch = tuple(build_record(BranchEntry, item, path) for item in _expect_list(raw, "branch", path))
        return build_record(cls, {**raw, "branch": branch}, path)


def extend_ranges(ranges: tuple[tuple[int, int], ...], sequence: int) -> tuple[tuple[int, int], ...]:
    """Add a sequence that is higher than all in `ranges`."""
    if ranges and ranges[-1][1] + 1 == sequence:
        return (*ranges[:-1], (ranges[-1][0], sequence))
    return (*ranges, (sequence, sequence))


def is_in_ranges(ranges: Iterable[tuple[int, int]], sequence: int) -> bool:
    return any(first <= sequence <= last for first, last in ranges)


def digest_manifest(data: bytes) -> str:
    return digest_bytes(data).hex()


def encode_json(value: JSON) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def decode_json(data: bytes, path: str) -> JSON:
    try:
        return json.loads(data)
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: not valid JSON ({error})", path=path) from error


@functools.cache
def _name_fields(kind: type) -> frozenset[str]:
    return frozenset(item.name for item in fields(kind))


def build_record(kind: type[Record], raw: JSON, path: str) -> Record:
    """Make a dataclass of a JSON object with exactly its fields.

    Raises:
        DamagedCheckpointError: a field is missing, or one is there that this version does not know.
    """
    known = _name_fields(kind)  # type: ignore[arg-type]
    if not isinstance(raw, dict) or raw.keys() != known:
        found = sorted(raw) if isinstance(raw, dict) else raw
        raise DamagedCheckpointError(f"{path}: found {found!r}; expected exactly the fields {sorted(known)}", path=path)
    return kind(**raw)


def to_plain(value: object, where: str = "value") -> JSON:
    """Copy a value into plain JSON types: enums become their values, mappings dicts, sequences lists.

    Config containers (OmegaConf's, dataclasses' dicts) come in, plain facts come out: nothing that a reader would need
    another library for.

    Raises:
        TypeError: something else is in it; the message says where.
    """
    if isinstance(value, enum.Enum):
        return to_plain(value.value, where)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(to_plain(key, where)): to_plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [to_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    raise TypeError(f"{where}: found {type(value).__name__}; allowed are numbers, strings, lists and mappings of them")


def _encode_sealed(value: dict[str, JSON]) -> bytes:
    """Encode a record that nothing else vouches for, with the digest of its other fields as its last one."""
    return encode_json({**value, _SEAL: digest_bytes(encode_json(value)).hex()})


def _decode_sealed(data: bytes, path: str) -> dict[str, JSON]:
    raw = _decode_format(data, path)
    seal = raw.pop(_SEAL, None)
    if seal != _digest_without(seal, data) and seal != digest_bytes(encode_json(raw)).hex():
        raise DamagedCheckpointError(f"{path}: changed since it was written: its digest is not {seal!r}", path=path)
    return raw


def _digest_without(seal: JSON, data: bytes) -> str:
    """Digest a record's text as it was before its seal: encoding a long one again takes longer than all the rest."""
    return digest_bytes(data.removesuffix(f',\n "{_SEAL}": "{seal}"\n}}\n'.encode()) + b"\n}\n").hex()


def _decode_format(data: bytes, path: str) -> dict[str, JSON]:
    raw = decode_json(data, path)
    found = raw.get("format") if isinstance(raw, dict) else raw
    if not isinstance(raw, dict) or found != FORMAT:
        raise DamagedCheckpointError(f"{path}: format {found!r}; this version reads format {FORMAT}", path=path)
    return raw


def _expect_range(item: JSON, path: str) -> tuple[int, int]:
    if isinstance(item, list) and len(item) == 2 and all(isinstance(edge, int) for edge in item):
        return item[0], item[1]
    raise DamagedCheckpointError(f"{path}: found the range {item!r}; expected [first, last]", path=path)


def _expect_list(raw: JSON, key: str, path: str) -> list[JSON]:
    if isinstance(raw, dict) and isinstance(raw.get(key), list):
        return list(raw[key])
    raise DamagedCheckpointError(f"{path}: has no list {key!r}", path=path)
