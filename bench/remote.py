"""A mirror's upload and download beside the limit, and beside files that are copied one after the other.

`python -m bench.remote [--mb 1000] [--rounds 3] [--url hdfs://...]`. Without a URL a NameNode and two DataNodes are started
on this machine, so both sides share its cores. The limit is eight threads that read or write the same files with the same
client, in this process, without temporary names, digests or records. The ways take turns in being the first, a download
is removed before the next one, and the disk gets rest before each: none waits for what another left to be written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import hdfs_native
import torch

from bench.common import Rounds, build_lines, median_ms, print_table, write_json
from recipe_ckpt import CheckpointHandler, layout
from recipe_ckpt.branches import Claim
from recipe_ckpt.engines.base import WrittenPart
from recipe_ckpt.manifest import BranchEntry, FileEntry
from recipe_ckpt.mirror import Mirror
from recipe_ckpt.remote_client import RemoteClient
from recipe_ckpt.sealing import Origin
from recipe_ckpt.step_sender import StepSender
from recipe_ckpt.storage import LocalStorage, Storage
from recipe_ckpt.survey import survey
from recipe_ckpt.transfer import PARALLEL_FILES, fetch
from tests.hdfs_cluster import HdfsCluster, fetch_jars

CHUNK_BYTES = 8 << 20
STEP = 1
LIMIT = f"raw, {PARALLEL_FILES} threads"
WAYS = (LIMIT, "ours", "one by one")


class FilesEngine:
    """An engine whose state is so many files of so many bytes."""

    def __init__(self, files: int, mb: float) -> None:
        self._files = files
        self._data = os.urandom(round(mb * 1e6 / files))

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise AssertionError("it is saved by snapshots")

    load_checkpoint = save_checkpoint

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def snapshot(self, contents: Collection[str]) -> FilesEngine:
        return self

    def restore(self, directory: str, entries: Mapping[str, FileEntry], contents: Collection[str]) -> None:
        raise AssertionError("nothing is restored here")

    def write(self, directory: str, storage: Storage) -> WrittenPart:
        names = [f"part-{number}.bin" for number in range(self._files)]
        entries = [storage.write_file(os.path.join(directory, n), [self._data], name=n, rank=0) for n in names]
        return WrittenPart(entries, None)

    def finish(self, directory: str, storage: Storage, fragments: Sequence[Any]) -> Sequence[FileEntry]:
        return []


def commit_step(root: str, files: int, mb: float) -> BranchEntry:
    """Make a root with one checkpoint."""
    with CheckpointHandler(FilesEngine(files, mb), [], default_local_dir=root) as handler:
        handler.load_checkpoint()
        handler.save_checkpoint(STEP)
    return survey(LocalStorage(), root).branch[0]


def copy_up(client: Any, source: str, target: str) -> None:
    with open(source, "rb") as file, client.create(target) as writer:
        while chunk := file.read(CHUNK_BYTES):
            writer.write(chunk)


def copy_down(client: Any, source: str, target: str) -> None:
    reader = client.read(source)
    with open(target, "wb") as file:
        for chunk in reader.read_range_stream(0, len(reader)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def copy_all(
    copy: Callable[[Any, str, str], None], client: Any, source: str, target: str, names: Sequence[str], threads: int
) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda name: copy(client, f"{source}/{name}", f"{target}/{name}"), names))


def measure(url: str, files: int, mb: float, rounds: int, folder: str) -> dict[str, list[float]]:
    root = os.path.join(folder, f"root_{files}")
    entry = commit_step(root, files, mb)
    step_dir = os.path.join(root, layout.build_step_name(STEP))
    server, _, path = url.partition("://")[2].partition("/")
    client = hdfs_native.Client(f"hdfs://{server}")
    claim = Claim(
        Origin(survey(LocalStorage(), root).lineage or "", branch=(entry,)), entry.sequence, frozenset({entry.digest})
    )
    remote = RemoteClient(f"{url}/ours")
    sender = StepSender(Mirror(remote), root, LocalStorage())
    send = partial(sender.send, entry, claim)
    remote.probe()  # its process has started
    timed = Rounds(rounds)
    for number in timed:
        measure_round(timed, number, client, remote, send, step_dir, f"/{path}/{number}", os.path.join(folder, "down"))
    remote.close()
    shutil.rmtree(root)
    return timed.samples


def measure_round(
    timed: Rounds,
    number: int,
    client: Any,
    remote: RemoteClient,
    send: Callable[[], int],
    step_dir: str,
    there: str,
    here: str,
) -> None:
    """Upload and download once in each way, and remove all of it; `there` and `here` are directories of this round."""
    names = sorted(os.listdir(step_dir))
    threads = {LIMIT: PARALLEL_FILES, "one by one": 1}
    first = number % len(WAYS)
    turns = (*WAYS[first:], *WAYS[:first])

    def upload(way: str) -> None:
        if way == "ours":
            send()
        else:
            copy_all(copy_up, client, step_dir, f"{there}/{way}", names, threads[way])

    def download(way: str) -> None:
        if way == "ours":
            fetch(remote, layout.build_step_name(STEP), here, LocalStorage(), threading.Event())
        else:
            copy_all(copy_down, client, f"{there}/{way}", here, names, threads[way])

    for way in turns:
        client.mkdirs(f"{there}/{way}", create_parent=True)
        os.sync()
        timed.time(f"upload: {way}", partial(upload, way))
    for way in turns:
        os.makedirs(here)
        os.sync()
        timed.time(f"download: {way}", partial(download, way))
        shutil.rmtree(here)
    remote.remove_tree("")
    client.delete(there, recursive=True)


def measure_steps(url: str, mb: float, count: int, folder: str) -> dict[str, list[float]]:
    """Return the seconds of `count` steps of matrix products alone, and of those while one upload runs; on one thread."""
    torch.set_num_threads(1)
    root = os.path.join(folder, "root_steps")
    size = torch.rand(512, 512)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(4):
            size @ size
        return time.perf_counter() - began

    alone = [step() for _ in range(count)]
    with CheckpointHandler(FilesEngine(8, mb), [], default_local_dir=root, default_hdfs_dir=f"{url}/steps") as handler:
        handler.load_checkpoint()
        handler.save_checkpoint(STEP)
        beside = [step()]  # a small upload may have ended by then
        while handler.pending_uploads:
            beside.append(step())
    shutil.rmtree(root)
    return {"a step, alone": alone, "a step, beside an upload": beside}


@contextmanager
def started(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    fetch_jars()
    with tempfile.TemporaryDirectory(prefix="recipe_ckpt_bench_") as folder:
        cluster = HdfsCluster(folder)
        try:
            cluster.start()
            yield f"{cluster.uri}/bench"
        finally:
            cluster.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=1000, help="bytes of a checkpoint, in MB")
    parser.add_argument("--files", type=int, nargs="*", default=[8, 500], help="in so many files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="training steps that are measured alone")
    parser.add_argument("--url", help="a directory on an HDFS that runs already")
    parser.add_argument("--folder", default=os.getcwd(), help="a directory on the disk that checkpoints lie on")
    parser.add_argument("--json", help="write the ratios into this file")
    found = parser.parse_args(arguments)
    ratios = {}
    with started(found.url) as url, tempfile.TemporaryDirectory(prefix=".bench_", dir=found.folder) as folder:
        for files in found.files:
            samples = measure(url, files, found.mb, found.rounds, folder)
            for way in ("upload", "download"):
                limit = f"{way}: {LIMIT}"
                lines = build_lines({f"{way}: {how}": samples[f"{way}: {how}"] for how in WAYS}, limit, files)
                print_table(f"{found.mb:.0f} MB in {files} files, {found.rounds} rounds", lines)
                ratios[f"{way}_{files}_raw_over_ours"] = median_ms(samples[limit]) / median_ms(samples[f"{way}: ours"])
                seed = median_ms(samples[f"{way}: one by one"])
                ratios[f"{way}_{files}_one_by_one_over_ours"] = seed / median_ms(samples[f"{way}: ours"])
        steps = measure_steps(url, found.mb, found.steps, folder)
        print_table("a training step", build_lines(steps, "a step, alone", 1))
        ratios["step_beside_upload_over_alone"] = median_ms(steps["a step, beside an upload"]) / median_ms(
            steps["a step, alone"]
        )
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    write_json(found.json, ratios)


if __name__ == "__main__":
    main()
