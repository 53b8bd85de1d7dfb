"""Records and digests: what is written reads back, and nothing else is taken for it."""

import dataclasses
import enum
import itertools
import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipe_ckpt.errors import DamagedCheckpointError
from recipe_ckpt.manifest import (
    BLOCK_BYTES,
    BlockDigester,
    BranchEntry,
    Continues,
    FileEntry,
    FileTable,
    Manifest,
    RunRecord,
    decode_json,
    digest_blocks,
    digest_bytes,
    encode_json,
    extend_ranges,
    is_in_ranges,
    to_plain,
)

COUNTS = st.integers(min_value=0, max_value=2**60)
HEX = st.text("0123456789abcdef", min_size=32, max_size=32)
ENTRIES = st.builds(FileEntry, st.text(min_size=1), COUNTS, HEX, HEX, COUNTS)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | COUNTS | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MANIFESTS = st.builds(
    Manifest,
    step=COUNTS,
    sequence=COUNTS,
    lineage=st.text(),
    parent=st.none() | HEX,
    ancestors=st.lists(st.tuples(COUNTS, COUNTS)).map(tuple),
    continues=st.none() | st.builds(Continues, st.text(), COUNTS, st.none() | HEX),
    launch_id=st.text(),
    created_at=st.text(),
    world_size=COUNTS,
    dp_size=COUNTS,
    contents=st.lists(st.text()).map(tuple),
    data=st.dictionaries(st.text(), JSON_VALUES, max_size=3),
    metrics=st.dictionaries(st.text(), NUMBERS, max_size=3),
    versions=st.dictionaries(st.text(), st.text(), max_size=3),
    files_digest=HEX,
)
BRANCH_ENTRIES = st.builds(BranchEntry, COUNTS, COUNTS, HEX, st.dictionaries(st.text(), NUMBERS, max_size=2))
RECORDS = st.builds(RunRecord, st.text(), COUNTS, st.lists(BRANCH_ENTRIES, max_size=4).map(tuple))


def seal(raw):
    """What a record's writer does with its fields."""
    body = {key: value for key, value in raw.items() if key != "digest"}
    return encode_json({**body, "digest": digest_bytes(encode_json(body)).hex()})


ONE_OF_EACH = [
    Manifest(1, 2, "l", None, ((1, 1),), Continues("/a", 3, None), "x", "t", 1, 1, ("model",), {}, {}, {}, "d"),
    RunRecord("l", 2, (BranchEntry(1, 2, "d", {}),)),
    FileTable.of([FileEntry("a", 1, "d", "b", 0)]),
]


@given(MANIFESTS | RECORDS | st.lists(ENTRIES, max_size=4, unique_by=lambda entry: entry.path).map(FileTable.of))
def test_record_reads_back_as_written(record):
    assert type(record).decode(record.encode(), "x") == record


@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"indent": 4}, {"separators": (",", ":")}])
@pytest.mark.parametrize("record", ONE_OF_EACH, ids=lambda record: type(record).__name__)
def test_record_laid_out_otherwise_reads_back(record, layout):
    assert type(record).decode(json.dumps(json.loads(record.encode()), **layout).encode(), "x") == record


@pytest.mark.parametrize("record", ONE_OF_EACH, ids=lambda record: type(record).__name__)
def test_record_is_refused_with_a_missing_or_an_unknown_field(record):
    raw = json.loads(record.encode())
    target = raw["files"][0] if isinstance(record, FileTable) else raw
    for name in target:
        changed = {key: value for key, value in target.items() if key != name} | {f"{name}_of_tomorrow": 1}
        data = encode_json({"format": 1, "files": [changed]}) if isinstance(record, FileTable) else seal(changed)
        with pytest.raises(DamagedCheckpointError, match="expected exactly the fields|format|has no list|changed since"):
            type(record).decode(data, "x")


@pytest.mark.parametrize("kind", [Manifest, RunRecord, FileTable])
@given(
    value=JSON_VALUES | st.dictionaries(st.sampled_from(["format", "ancestors", "contents", "branch", "files"]), JSON_VALUES)
)
def test_record_is_refused_for_any_other_json(kind, value):
    if kind is FileTable and isinstance(value, dict) and value.get("files") == []:
        return
    with pytest.raises(DamagedCheckpointError, match="x: "):
        kind.decode(encode_json(value), "x")


@pytest.mark.parametrize(
    ("field", "value"),
    [*((name, value) for name in ("ancestors", "continues") for value in ([5], [[1, 2, 3]], "ab")), ("contents", "ab")]
    + [(name, value) for name in ("ancestors", "contents", "continues") for value in (5, True)],
)
def test_manifest_is_refused_with_a_field_of_another_kind(field, value):
    raw = asdict(ONE_OF_EACH[0]) | {field: value}
    with pytest.raises(DamagedCheckpointError, match="x: "):
        Manifest.decode(seal(raw), "x")


@pytest.mark.parametrize("record", ONE_OF_EACH[:2], ids=lambda record: type(record).__name__)
def test_record_is_refused_with_any_one_bit_changed(record):
    data = record.encode()
    for bit in range(8 * (len(data) - 1)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpointError, match="x: "):
            type(record).decode(bytes(changed), "x")


@given(st.binary(max_size=60))
def test_record_is_refused_for_any_other_bytes(data):
    for kind in (Manifest, RunRecord):
        with pytest.raises(DamagedCheckpointError, match="x: "):
            kind.decode(data, "x")


@pytest.mark.parametrize("record", ONE_OF_EACH[:2], ids=lambda record: type(record).__name__)
@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_record_of_another_format_is_refused(record, version):
    with pytest.raises(DamagedCheckpointError, match=f"format {version!r}; this version reads format 1"):
        type(record).decode(encode_json(asdict(record) | {"format": version}), "x")


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_digest_does_not_depend_on_the_pieces(data, cuts):
    whole, pieces = BlockDigester(), BlockDigester()
    whole.update(data)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for first, last in itertools.pairwise(edges):
        pieces.update(memoryview(data)[first:last])
    assert pieces.finish() == whole.finish()
    assert pieces.size_bytes == len(data)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_digest_is_of_the_blocks_of_4_mib(extra):
    data = bytes(2 * BLOCK_BYTES + extra)
    digester = BlockDigester()
    digester.update(data[:5])
    digester.update(data[5:])
    blocks = [digest_bytes(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    entry = FileEntry("a", len(data), *digester.finish(), 0)
    assert entry.digest == digest_blocks(blocks)
    assert [entry.block(number) for number in range(len(blocks))] == [block.hex() for block in blocks]


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_exactly_what_was_added(sequences):
    ranges = ()
    for sequence in sorted(sequences):
        ranges = extend_ranges(ranges, sequence)
    assert {number for number in range(-1, 62) if is_in_ranges(ranges, number)} == sequences
    assert all(left[1] + 1 < right[0] for left, right in itertools.pairwise(ranges))


def test_table_lists_a_folder_without_its_neighbours():
    table = FileTable.of(FileEntry(path, 1, "d", "b", 0) for path in ("actor/a", "actor2/b", "c", "actor/x/y"))
    assert [entry.path for entry in table.under("actor")] == ["a", "x/y"]
    assert [entry.path for entry in table.under("")] == ["actor/a", "actor/x/y", "actor2/b", "c"]


class Color(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


@dataclasses.dataclass
class Schema:
    color: Color = Color.RED
    names: list[str] = dataclasses.field(default_factory=lambda: ["q_proj", "Ä"])


@pytest.mark.case("C903", "C1405")
@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ({"a": Color.RED, "b": (1, (2.5, None)), Size.BIG: [True]}, {"a": "red", "b": [1, [2.5, None]], "3": [True]}),
        (OmegaConf.create({"r": 8, "twice": "${r}", "m": [1, {"x": "${r}"}]}), {"r": 8, "twice": 8, "m": [1, {"x": 8}]}),
        (OmegaConf.structured(Schema), {"color": "red", "names": ["q_proj", "Ä"]}),
        (float("inf"), "inf"),
    ],
)
def test_plain_copy_holds_json_types_only(value, plain):
    found = to_plain(value)
    assert found == plain
    assert decode_json(encode_json(found), "x") == plain


@given(JSON_VALUES)
def test_plain_copy_of_plain_values_is_the_same(value):
    assert to_plain(value) == value


@pytest.mark.case("C903")
@pytest.mark.parametrize("value", [object(), b"x", {1, 2}, lambda: 0, 1j])
def test_plain_copy_refuses_what_no_reader_knows_and_says_where(value):
    with pytest.raises(TypeError, match=r"meta\.a\[1\]: found \w+; allowed are numbers"):
        to_plain({"a": [0, value]}, "meta")
