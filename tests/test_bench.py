"""Each bench runs, in its smallest form: what it measures is for a quiet machine, not for a test."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bench import handler, load, remote, save, scale, stall, train

SMALL = ("--rounds", "1", "--mb", "1", "--tensors", "4")

RATIOS = {
    stall: ["stall_over_memcpy", "stall_us_per_tensor_beyond", "stall_overlapped_over_memcpy"],
    save: ["save_over_raw", "save_blocking_over_raw"],
    load: ["load_over_copy", "load_fresh_over_copy", "load_us_per_tensor_beyond"],
    handler: ["handler_ms", "handler_ms_beyond_raw"],
    train: ["train_with_over_without"],
}
"""What a bench with ranks writes."""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """All of these, two at a time: most of what each takes is a rank's import of torch."""
    with ThreadPoolExecutor(2) as pool:
        yield {bench: pool.submit(run, bench, tmp_path_factory.mktemp("bench"), *SMALL) for bench in RATIOS}


def run(bench, folder, *arguments):
    """Return the finite ratios that a bench writes; nothing else of it is left on the disk."""
    (folder / "disk").mkdir()
    bench.main([*arguments, "--folder", str(folder / "disk"), "--json", str(folder / "ratios.json")])
    assert list((folder / "disk").iterdir()) == []
    ratios = json.loads((folder / "ratios.json").read_text())["ratios"]
    assert all(math.isfinite(ratio) for ratio in ratios.values()), ratios
    return ratios


@pytest.mark.parametrize("bench", RATIOS, ids=lambda bench: bench.__name__)
def test_a_bench_with_ranks_writes_its_ratios(started, bench):
    assert list(started[bench].result(timeout=200)) == RATIOS[bench]


def test_the_bench_of_what_grows_writes_its_times(tmp_path):
    times = run(scale, tmp_path, "--rounds", "1", "--ranks", "4", "--steps", "3", "--tensors", "40")
    assert list(times) == [
        "4 ranks: file table (ms)",
        "4 ranks: index of 300 tensors (ms)",
        "index of 40 tensors, encoded (ms)",
        "index of 40 tensors, decoded (ms)",
        "3 steps: survey through run.json (ms)",
        "3 steps: survey without run.json (ms)",
    ]


def test_the_bench_of_the_mirror_writes_its_ratios(tmp_path, hdfs_url):
    threads = torch.get_num_threads()
    try:
        ratios = run(remote, tmp_path, "--rounds", "1", "--mb", "1", "--files", "2", "--steps", "5", "--url", hdfs_url)
    finally:
        torch.set_num_threads(threads)
    ways = [f"{way}_2_{other}_over_ours" for way in ("upload", "download") for other in ("raw", "one_by_one")]
    assert list(ratios) == [*ways, "step_beside_upload_over_alone"]
