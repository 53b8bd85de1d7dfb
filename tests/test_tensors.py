import itertools
import json
import math
import os
import shutil

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe_ckpt.errors import DamagedCheckpointError, SaveFailedError, StateMismatchError
from recipe_ckpt.layout import TENSOR_INDEX, build_tensor_file_name
from recipe_ckpt.manifest import FileEntry, encode_json
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.tensors.index import Box, Chunk, Grid, PartIndex, StoredTensor, TensorIndex
from recipe_ckpt.tensors.merge import Declaration, build_fragment, find_coverage_problem, merge_fragments
from recipe_ckpt.tensors.plan import TORCH_DTYPES, LocalBox, PartState, PlannedChunk, WritePlan, plan_write
from recipe_ckpt.tensors.reader import read_boxes, read_index, read_part, require_fit
from recipe_ckpt.tensors.trees import flatten, unflatten
from recipe_ckpt.tensors.writer import TensorSnapshot, write_part


def take_snapshot(state, rank=0, world_size=1):
    return TensorSnapshot([plan_write(name, part, rank, world_size) for name, part in state.items()])


def write_all(directory, tensors, *, world_size=1, leaves=None):
    """Write a replicated state as each of `world_size` ranks would, and return the entries by name."""
    state = {"model": PartState(tensors, leaves or {})}
    snapshots = [take_snapshot(state, rank, world_size) for rank in range(world_size)]
    written = [snapshot.write(str(directory), LocalStorage()) for snapshot in snapshots]
    joined = snapshots[0].finish(str(directory), LocalStorage(), [part.fragment for part in written])
    return {entry.path: entry for entry in [*(entry for part in written for entry in part.entries), *joined]}


def read_all(directory, entries, wanted):
    part = read_index(str(directory), entries).parts["model"]
    require_fit("model", part, wanted)
    read_part(str(directory), entries, "model", part, wanted)


def random_tensor(shape, dtype):
    flat = torch.empty(math.prod(shape), dtype=dtype)
    raw = flat.view(torch.uint8)
    raw.copy_(torch.randint(0, 2 if dtype == torch.bool else 256, raw.shape, dtype=torch.uint8))
    return flat.reshape(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_every_shape_of_a_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    tensors = {
        "matrix": random_tensor((5, 3), dtype),
        "scalar": random_tensor((), dtype),
        "empty": random_tensor((0, 4), dtype),
        "transposed": random_tensor((4, 6), dtype).T,
        "strided": random_tensor((8, 4), dtype)[::2, 1:3],
        "expanded": random_tensor((1, 4), dtype).expand(3, 4),
    }
    entries = write_all(tmp_path, tensors)
    wanted = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in tensors.items()}
    wanted["matrix"] = torch.zeros((3, 5), dtype=dtype).T
    read_all(tmp_path, entries, wanted)
    assert {name: bits(tensor) for name, tensor in wanted.items()} == {name: bits(t) for name, t in tensors.items()}
    library = safetensors.torch.load_file(tmp_path / "model-0.safetensors")
    assert {name: bits(tensor) for name, tensor in library.items()} == {name: bits(t) for name, t in tensors.items()}


def test_conjugated_and_negated_views_are_stored_as_they_read(tmp_path):
    source = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    write_all(tmp_path, {"conj": source.conj(), "neg": source.conj().imag})
    found = safetensors.torch.load_file(tmp_path / "model-0.safetensors")
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert found["neg"].tolist() == [-2, 4]


def test_file_of_one_rank_is_a_normal_weights_file(tmp_path):
    tensors = {"b.odd": torch.rand(3), "a": torch.rand(4, 4), "é": torch.rand(7, 1).half(), "count": torch.tensor(True)}
    write_all(tmp_path, tensors)
    path = tmp_path / "model-0.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == {"format": "pt"}
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    offsets = {name: item["data_offsets"] for name, item in json.loads(data[8 : 8 + header_bytes]).items() if name[0] != "_"}
    assert (8 + header_bytes) % 4096 == 0
    assert offsets["a"] == [0, 64]
    assert 8 + header_bytes + max(stop for _, stop in offsets.values()) == len(data)
    assert all(start % tensors[name].dtype.itemsize == 0 for name, (start, _) in offsets.items())


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(2, dtype=torch.complex128), "has the dtype torch.complex128; stored are"),
        (torch.eye(2).to_sparse(), "has the layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "is on the meta device"),
    ],
)
def test_tensor_that_cannot_be_stored_is_refused_by_name(tensor, problem):
    with pytest.raises(SaveFailedError, match=f"model: tensor 'some.weight' {problem}"):
        plan_write("model", PartState({"some.weight": tensor}), 0, 1)


def test_names_that_would_collide_in_a_file_are_refused():
    with pytest.raises(SaveFailedError, match="the name '__metadata__' is needed twice"):
        plan_write("model", PartState({"__metadata__": torch.zeros(1)}), 0, 1)


def test_replicated_tensors_are_shared_out_by_bytes(tmp_path):
    tensors = {f"w{number}": torch.rand(size) for number, size in enumerate([4000, 3000, 1000, 1000, 1000, 2000])}
    entries = write_all(tmp_path, tensors, world_size=3)
    sizes = [entries[build_tensor_file_name("model", rank)].size_bytes for rank in range(3)]
    assert sizes == [4096 + 16000] * 3
    wanted = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_all(tmp_path, entries, wanted)
    assert all(torch.equal(wanted[name], tensors[name]) for name in tensors)


def test_rank_that_owns_nothing_writes_no_file(tmp_path):
    entries = write_all(tmp_path, {"only": torch.rand(3)}, world_size=3)
    assert sorted(entries) == sorted(os.listdir(tmp_path)) == ["index.json", "model-0.safetensors"]


@pytest.mark.case("C906")
def test_tied_tensor_is_written_once_and_found_under_both_names(tmp_path):
    weight = torch.rand(3, 2)
    entries = write_all(tmp_path, {"embed": weight, "head": weight})
    assert read_index(str(tmp_path), entries).parts["model"].aliases == {"head": "embed"}
    assert list(safetensors.torch.load_file(tmp_path / "model-0.safetensors")) == ["embed"]
    target = torch.zeros(3, 2)
    read_all(tmp_path, entries, {"embed": target, "head": target})
    assert torch.equal(target, weight)


def test_views_of_one_storage_that_are_not_the_same_tensor_are_not_tied(tmp_path):
    base = torch.arange(6.0)
    entries = write_all(tmp_path, {"front": base[:3], "back": base[3:], "whole": base})
    assert read_index(str(tmp_path), entries).parts["model"].aliases == {}


@pytest.mark.case("C909")
def test_tensors_saved_from_another_device_load_on_the_cpu(tmp_path):
    entries = write_all(tmp_path, {"w": torch.rand(3)})
    header = (tmp_path / "model-0.safetensors").read_bytes()[:4096] + (tmp_path / TENSOR_INDEX).read_bytes()
    assert b"cuda" not in header  # the format has no field for a device, so "cuda:0" can't be asked for at load
    assert b"cpu" not in header
    read_all(tmp_path, entries, {"w": torch.zeros(3)})


class LyingStorage(LocalStorage):
    """Reports one byte less than it wrote."""

    def write_file(self, path, chunks, *, name, rank):
        entry = super().write_file(path, chunks, name=name, rank=rank)
        return FileEntry(entry.path, entry.size_bytes - 1, entry.digest, entry.blocks, entry.rank)


def test_file_of_another_size_than_planned_fails_the_save(tmp_path):
    snapshot = take_snapshot({"model": PartState({"w": torch.rand(3)})})
    with pytest.raises(SaveFailedError, match=r"model-0.safetensors: planned were 4108 bytes, written 4107"):
        snapshot.write(str(tmp_path), LyingStorage())


def plan_fragments(world_size=3):
    state = {"model": PartState({f"w{number}": torch.zeros(4, 2) for number in range(4)})}
    snapshots = [take_snapshot(state, rank, world_size) for rank in range(world_size)]
    plans = [plan_write("model", state["model"], rank, world_size) for rank in range(world_size)]
    chunks = [[(c.position, c.number, c.box) for c in plan.chunks] for plan in plans]
    return snapshots[0], [{"model": build_fragment(p.declaration, c)} for p, c in zip(plans, chunks, strict=True)]


def test_dropped_fragment_fails_the_save_by_tensor(tmp_path):
    snapshot, fragments = plan_fragments()
    with pytest.raises(SaveFailedError, match=r"model: tensor 'w2' of shape \[4, 2\].*only 0 of 8 elements"):
        snapshot.finish(str(tmp_path), LocalStorage(), fragments[:2])
    assert os.listdir(tmp_path) == []


def test_tensor_written_twice_fails_the_save_by_tensor(tmp_path):
    snapshot, fragments = plan_fragments()
    fragments[1]["model"]["chunks"] = fragments[0]["model"]["chunks"]
    with pytest.raises(SaveFailedError, match=r"tensor 'w0'.*ranks \[0, 1\]: the chunks '0:4,0:2' and '0:4,0:2' overlap"):
        snapshot.finish(str(tmp_path), LocalStorage(), fragments)


@pytest.mark.parametrize(
    "other",
    [{"w": torch.zeros(3)}, {"w": torch.zeros(2).half()}, {"v": torch.zeros(2)}, {"w": torch.zeros(2), "v": torch.ones(2)}],
)
def test_ranks_with_different_tensors_fail_the_save(tmp_path, other):
    states = [{"w": torch.zeros(2)}, other]
    snapshots = [take_snapshot({"model": PartState(s)}, r, 2) for r, s in enumerate(states)]
    fragments = [snapshot.write(str(tmp_path), LocalStorage()).fragment for snapshot in snapshots]
    with pytest.raises(SaveFailedError, match=r"model: rank 1 holds other tensors, shapes.* than rank 0 \(1\)"):
        snapshots[0].finish(str(tmp_path), LocalStorage(), fragments)


def test_rank_that_did_not_save_the_part_fails_the_save(tmp_path):
    snapshot, fragments = plan_fragments()
    with pytest.raises(SaveFailedError, match="model: rank 1 reports nothing"):
        snapshot.finish(str(tmp_path), LocalStorage(), [fragments[0], {}, fragments[2]])


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((4,), ["0:4"], None),
        ((4,), ["2:4", "0:2"], None),
        ((), [""], None),
        ((0, 3), [], None),
        ((2, 2), ["0:1,0:2", "1:2,0:1", "1:2,1:2"], None),
        ((4,), ["0:2", "3:4"], "only 3 of 4"),
        ((4,), ["0:3", "2:4"], "overlap"),
        ((4,), ["0:2", "0:2"], "overlap"),
        ((), ["", ""], "overlap"),
        ((4,), ["0:5"], "not inside"),
        ((4,), ["0:2,0:2"], "not inside"),
        ((2, 2), ["0:1,0:2", "0:2,1:2"], "overlap"),
    ],
)
def test_coverage_is_exact(shape, boxes, problem):
    found = find_coverage_problem(shape, [Box.parse(text) for text in boxes])
    assert found is None if problem is None else problem in found


cuts = st.lists(st.integers(0, 9), max_size=4)


def grid_of(shape, cuts_by_dim):
    """Cut a shape at the given places; places outside of it and repeated ones count for nothing."""
    boxes = [Box((), ())]
    for size, places in zip(shape, cuts_by_dim, strict=True):
        edges = sorted({0, size, *(place for place in places if place < size)})
        spans = list(itertools.pairwise(edges))
        boxes = [Box((*b.offsets, lo), (*b.shape, hi - lo)) for b in boxes for lo, hi in spans]
    return boxes


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    written=st.tuples(cuts, cuts, cuts),
    read=st.tuples(cuts, cuts, cuts),
    world_size=st.integers(1, 3),
    data=st.data(),
)
def test_what_one_grid_wrote_any_other_grid_reads(tmp_path_factory, shape, written, read, world_size, data):
    directory = str(tmp_path_factory.mktemp("grid"))
    original = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    declaration = Declaration({"t": ("I32", shape)}, {}, {})
    entries, fragments = {}, []
    boxes = [(data.draw(st.integers(0, world_size - 1)), box) for box in grid_of(shape, written[: len(shape)])]
    for rank in range(world_size):
        mine = [box for owner, box in boxes if owner == rank]
        cut = [original[box.slices_in(Box.whole(shape))] for box in mine]
        chunks = [
            PlannedChunk(0, n, f"t:{n}" if n else "t", "I32", box, values)
            for n, (box, values) in enumerate(zip(mine, cut, strict=True))
        ]
        entry = write_part(directory, LocalStorage(), WritePlan("model", rank, declaration, chunks))
        entries[entry.path] = entry
        fragments.append({"model": build_fragment(declaration, [(c.position, c.number, c.box) for c in chunks])})
    index = merge_fragments({"model": declaration}, fragments)
    part = TensorIndex.decode(index.encode(), "index.json").parts["model"]
    result = torch.full(shape, -1, dtype=torch.int32)
    wanted = [LocalBox(box, result[box.slices_in(Box.whole(shape))]) for box in grid_of(shape, read[: len(shape)])]
    read_boxes(directory, entries, "model", part, {"t": wanted})
    assert torch.equal(result, original)


def test_box_larger_than_a_band_is_read_by_columns(tmp_path):
    original = torch.arange(5 << 21, dtype=torch.int64).reshape(5 << 10, 2048)  # 80 MiB in rows of 16 KiB
    entries = write_all(tmp_path, {"w": original, "odd": torch.rand(3)})
    part = read_index(str(tmp_path), entries).parts["model"]
    target = torch.zeros(5 << 10, 100, dtype=torch.int64)
    read_boxes(str(tmp_path), entries, "model", part, {"w": [LocalBox(Box((0, 300), (5 << 10, 100)), target)]})
    assert torch.equal(target, original[:, 300:400])


def write_to_disks(place, tensors, disks):
    """Write a replicated state from ranks with these disks; return the entries by name of each directory."""
    state = {"model": PartState(tensors)}
    plans = [[plan_write("model", state["model"], rank, len(disks), disks)] for rank in range(len(disks))]
    written = []
    for rank, disk in enumerate(disks):
        (place / str(disk)).mkdir(exist_ok=True)
        written.append(TensorSnapshot(plans[rank]).write(str(place / str(disk)), LocalStorage()))
    joined = TensorSnapshot(plans[0]).finish(str(place / "0"), LocalStorage(), [part.fragment for part in written])
    held = {disk: [*joined] for disk in disks}
    for rank, part in enumerate(written):
        held[disks[rank]] += part.entries
    for disk in set(disks) - {0}:
        shutil.copy(place / "0" / "index.json", place / str(disk))
    return {disk: {entry.path: entry for entry in entries} for disk, entries in held.items()}


@pytest.mark.parametrize("disks", [(0, 2), (0, 0, 2, 2), (0, 2, 0, 2), (0, 0, 0, 3)])
def test_each_disk_alone_and_all_together_give_replicated_tensors_back(tmp_path, disks):
    tensors = {f"w{n}": torch.rand(n, 3) for n in range(1, 7)}
    held = write_to_disks(tmp_path, tensors, disks)
    for disk in held:
        shutil.copytree(tmp_path / str(disk), tmp_path / "all", dirs_exist_ok=True)
    everything = {name: entry for entries in held.values() for name, entry in entries.items()}
    for directory, entries in [*((str(disk), held[disk]) for disk in held), ("all", everything)]:
        wanted = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        read_all(tmp_path / directory, entries, wanted)
        assert all(torch.equal(wanted[name], tensor) for name, tensor in tensors.items())


def test_two_ranks_that_write_the_same_to_one_disk_are_refused():
    declaration = Declaration({"w": ("F32", (4, 2))}, {}, {})
    fragments = [{"model": build_fragment(declaration, [(0, 0, Box.whole((4, 2)))])} for _ in range(2)]
    assert merge_fragments({"model": declaration}, fragments, (0, 1)).parts["model"].tensors
    with pytest.raises(SaveFailedError, match="overlap"):
        merge_fragments({"model": declaration}, fragments, (0, 0))


def test_index_comes_back_equal():
    grid = Grid(
        (4, 2), (Chunk(0, 0, Box((0, 0), (2, 2))), Chunk(0, 1, Box((2, 0), (1, 2))), Chunk(3, 0, Box((3, 0), (1, 2))))
    )
    scalar, empty = Grid((), (Chunk(1, 0, Box((), ())),)), Grid((0,), ())
    tensors = {"a": StoredTensor("BF16", grid), "b": StoredTensor("F32", grid), "c": StoredTensor("I64", scalar)}
    part = PartIndex({**tensors, "d": StoredTensor("F32", empty)}, {"tied": "a"}, {"lr": 0.1, "betas": [0.9, 0.999]})
    index = TensorIndex({"model": part, "optimizer": PartIndex({})})
    assert TensorIndex.decode(index.encode(), "index.json") == index


def test_index_of_a_thousand_ranks_shares_grids_and_stays_small():
    shapes = {f"layers.{n}.weight": ("BF16", (1024, 64 + n % 9)) for n in range(900)}
    declaration = Declaration(shapes, {}, {})
    first = build_fragment(declaration, [(p, 0, Box.whole((1, shape[1]))) for p, (_, shape) in enumerate(shapes.values())])
    assert len(json.dumps(first)) < 8_000
    fragments = [
        {"model": first | {"chunks": [[n, box.replace("0:1,", f"{r}:{r + 1},"), p] for n, box, p in first["chunks"]]}}
        for r in range(1024)
    ]
    data = merge_fragments({"model": declaration}, fragments).encode()
    assert len(data) < 400_000
    assert len(json.loads(data)["grids"]) == 9


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ([], "format None"),
        ({"format": 2}, "format 2; this version reads format 1"),
        ({"format": 1}, "not a tensor index .KeyError"),
        ({"format": 1, "grids": 3, "parts": {}}, "not a tensor index .TypeError"),
        ({"format": 1, "grids": [{"shape": [2], "chunks": ["0 0:x"]}], "parts": {}}, "a box is written"),
        ({"format": 1, "grids": [{"shape": [2], "chunks": ["0 0:1,0:1"]}], "parts": {}}, "does not lie in shape"),
        (
            {"format": 1, "grids": [], "parts": {"model": {"tensors": {"w": {"dtype": "F32", "grid": 0}}}}},
            "not a tensor index .IndexError",
        ),
        (
            {
                "format": 1,
                "grids": [{"shape": [], "chunks": []}],
                "parts": {"model": {"tensors": {"w": {"dtype": "F9", "grid": 0}}, "aliases": {}, "leaves": {}}},
            },
            r"unknown dtypes \['F9'\]",
        ),
    ],
)
def test_bad_index_is_damage(raw, problem):
    with pytest.raises(DamagedCheckpointError, match=f"^some/index.json: {problem}|{problem}"):
        TensorIndex.decode(encode_json(raw), "some/index.json")


@pytest.mark.case("C904")
def test_all_differences_are_counted_and_the_first_five_shown_before_anything_is_read(tmp_path):
    stored = {f"old{n}": torch.ones(1) for n in range(7)} | {
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(2),
        "same": torch.ones(2),
    }
    entries = write_all(tmp_path, stored)
    wanted = {"new": torch.zeros(1), "shape": torch.zeros(3, 2), "dtype": torch.zeros(2).half(), "same": torch.zeros(2)}
    with pytest.raises(StateMismatchError) as caught:
        read_all(tmp_path, entries, wanted)
    text = str(caught.value)
    assert "1 missing in the checkpoint: 'new'" in text
    assert "7 not in this run: 'old0', 'old1', 'old2', 'old3', 'old4' and more" in text
    assert "1 of another shape: 'shape' (checkpoint [2, 3], run [3, 2])" in text
    assert "1 of another dtype: 'dtype' (checkpoint F32, run F16)" in text
    assert "leave 'model' out of load_contents" in text
    assert not wanted["same"].any()


def test_run_tensors_that_cannot_be_filled_are_an_error(tmp_path):
    entries = write_all(tmp_path, {"a": torch.rand(2), "b": torch.rand(2)})
    wanted = {"a": torch.zeros(2, device="meta"), "b": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(StateMismatchError, match=r"2 that can't be filled: 'a' is on the meta device, .*'b' has the dtype"):
        read_all(tmp_path, entries, wanted)


@pytest.mark.case("C906")
@pytest.mark.parametrize("was_tied", [True, False])
def test_tie_that_came_or_went_is_an_error(tmp_path, was_tied):
    weight = torch.rand(2)
    tied, loose = {"a": weight, "b": weight}, {"a": torch.rand(2), "b": torch.rand(2)}
    entries = write_all(tmp_path, tied if was_tied else loose)
    with pytest.raises(StateMismatchError, match="2 tied differently: 'a', 'b'"):
        read_all(tmp_path, entries, loose if was_tied else tied)


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_python_state_comes_back_equal_and_of_the_same_types(value):
    tree = json.loads(encode_json(flatten(value, "w", {})))
    assert repr(unflatten(tree, {}.__getitem__)) == repr(value)


def test_tensors_in_python_state_get_names_that_cannot_collide():
    tensors = {}
    value = {"a.b": torch.ones(1), "a": {"b": [torch.ones(2), float("nan")]}, "a/b": torch.ones(3), "a%2Fb": torch.ones(4)}
    tree = flatten(value, "w", tensors)
    assert {name: len(tensor) for name, tensor in tensors.items()} == {
        "w/a%2Eb": 1,
        "w/a/b/0": 2,
        "w/a%2Fb": 3,
        "w/a%252Fb": 4,
    }
    assert repr(unflatten(json.loads(encode_json(tree)), tensors.__getitem__)) == repr(value)


def test_python_state_of_another_type_is_refused_with_its_place():
    with pytest.raises(SaveFailedError, match="w/history/1: found object; stored are"):
        flatten({"history": [1, object()]}, "w", {})
