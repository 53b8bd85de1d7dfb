import os
import threading

import pytest
import torch

from recipe_ckpt.errors import DamagedCheckpointError
from recipe_ckpt.manifest import BLOCK_BYTES, FileEntry
from recipe_ckpt.tensors.blocks import Readers
from recipe_ckpt.tensors.index import Box
from recipe_ckpt.tensors.plan import LocalBox
from recipe_ckpt.tensors.reader import read_boxes, read_index
from tests.test_tensors import read_all, write_all

ROWS = 3 * BLOCK_BYTES // 4096  # of 1024 floats: a file of three blocks and a rest


@pytest.fixture
def saved(tmp_path):
    """Four blocks on rank 0, one on rank 1."""
    tensors = {"large": torch.rand(ROWS, 1024), "small": torch.rand(5, 3)}
    return tmp_path, write_all(tmp_path, tensors, world_size=2)


def read_both(saved):
    read_all(*saved, {"large": torch.zeros(ROWS, 1024), "small": torch.zeros(5, 3)})


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["index.json", "model-0.safetensors", "model-1.safetensors"])
@pytest.mark.parametrize("position", [0, 8, 150, -1])
def test_flipped_bit_is_found_in_every_file(saved, name, position):
    flip(saved[0] / name, position)
    with pytest.raises(DamagedCheckpointError, match=rf"{name}: block \d \(of \d+ bytes\) has digest \w+, recorded is"):
        read_both(saved)


@pytest.mark.parametrize("block", range(4))
def test_flipped_bit_is_found_in_every_block(saved, block):
    flip(saved[0] / "model-0.safetensors", block * BLOCK_BYTES + 17)
    with pytest.raises(DamagedCheckpointError, match=f"model-0.safetensors: block {block} "):
        read_both(saved)


def test_damage_is_named_by_the_first_block_however_the_threads_take_turns():
    second_has_failed = threading.Event()

    def work(_scratch, block):
        if block == 1:
            second_has_failed.set()
        else:
            assert second_has_failed.wait(20)
        raise DamagedCheckpointError(f"block {block}", path="")

    with Readers() as readers, pytest.raises(DamagedCheckpointError, match="block 0"):
        readers.share(work, range(5))


def test_only_the_blocks_that_are_needed_are_checked(saved):
    flip(saved[0] / "model-0.safetensors", 2 * BLOCK_BYTES)
    part = read_index(str(saved[0]), saved[1]).parts["model"]

    def read_rows(start, count):
        box = LocalBox(Box((start, 0), (count, 1024)), torch.zeros(count, 1024))
        read_boxes(str(saved[0]), saved[1], "model", part, {"large": [box]})

    read_rows(0, 1000)
    with pytest.raises(DamagedCheckpointError, match="block 2 "):
        read_rows(2040, 10)


@pytest.mark.parametrize("name", ["index.json", "model-0.safetensors", "model-1.safetensors"])
@pytest.mark.parametrize("size", [0, 5, 4100])
def test_file_cut_short_is_found_before_it_is_read(saved, name, size):
    recorded = saved[1][name].size_bytes
    size = min(size, recorded - 1)
    os.truncate(saved[0] / name, size)
    with pytest.raises(DamagedCheckpointError, match=f"{name}: found {size} bytes, recorded are {recorded}") as caught:
        read_both(saved)
    assert caught.value.path == str(saved[0] / name)


def test_file_that_grew_is_damage(saved):
    with open(saved[0] / "model-1.safetensors", "ab") as file:
        file.write(b"\0")
    with pytest.raises(DamagedCheckpointError, match=r"model-1.safetensors: found 4157 bytes, recorded are 4156"):
        read_both(saved)


@pytest.mark.parametrize("name", ["index.json", "model-0.safetensors", "model-1.safetensors"])
def test_missing_file_is_damage(saved, name):
    os.unlink(saved[0] / name)
    with pytest.raises(DamagedCheckpointError, match=f"{name}: No such file or directory"):
        read_both(saved)


@pytest.mark.parametrize("name", ["index.json", "model-0.safetensors"])
def test_file_that_is_not_recorded_is_damage(saved, name):
    entries = {key: entry for key, entry in saved[1].items() if key != name}
    with pytest.raises(DamagedCheckpointError, match=f"{name}: it is needed but not among the recorded files"):
        read_both((saved[0], entries))


def test_entry_with_too_few_digests_is_damage(saved):
    entry = saved[1]["model-0.safetensors"]
    short = FileEntry(entry.path, entry.size_bytes, entry.digest, entry.blocks[:32], entry.rank)
    with pytest.raises(DamagedCheckpointError, match=r"model-0.safetensors: block 1 "):
        read_both((saved[0], saved[1] | {entry.path: short}))


def test_file_of_another_checkpoint_in_its_place_is_damage(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write_all(other, {"large": torch.rand(ROWS, 1024), "small": torch.rand(5, 3)}, world_size=2)
    os.replace(other / "model-1.safetensors", saved[0] / "model-1.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"model-1.safetensors: block 0 "):
        read_both(saved)


def test_file_that_disagrees_with_the_index_is_damage(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    entries = write_all(other, {"large": torch.rand(ROWS, 1024), "small": torch.rand(3, 5)}, world_size=2)
    mixed = entries | {"index.json": saved[1]["index.json"]}
    os.replace(saved[0] / "index.json", other / "index.json")
    with pytest.raises(DamagedCheckpointError, match=r"model-1.safetensors: 'small' is .*index.json says"):
        read_both((other, mixed))
