"""How long it takes to restore from the page cache, every byte checked: `python -m bench.load`.

The limit is `read()` of the rank's own files into a warm buffer. `restore` fills tensors that exist; "fresh" is a resume's
first load, for which the optimizer's state has to be made, page by page. Torch's ways check nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed

from bench.common import (
    CONTENTS,
    Options,
    Rounds,
    Samples,
    build_engine,
    build_lines,
    build_tree,
    count_tensors,
    describe,
    gather,
    median_ms,
    merge_slowest,
    parse_options,
    print_table,
    run_ranks,
    shared_folder,
    write_json,
)
from bench.save import write_torch
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.storage import LocalStorage

LIMIT = "read() into a warm buffer"
RESTORE = "restore, digests checked"
FRESH = "restore, digests checked, fresh optimizer state"


def measure(options: Options) -> tuple[int, Samples]:
    engine = build_engine(options)
    tree = build_tree(engine)
    rounds = Rounds(options.rounds)
    with shared_folder(options) as folder:
        own, entries = save(engine, folder)
        dcp.save(tree, checkpoint_id=os.path.join(folder, "dcp"))
        write_torch(folder, tree)
        torch_path = os.path.join(folder, f"torch-{distributed.get_rank()}.pt")
        buffer = bytearray(max(entry.size_bytes for entry in own))
        for _ in rounds:
            rounds.time(LIMIT, lambda: read_raw(folder, own, buffer))
            rounds.time(RESTORE, lambda: engine.restore(folder, entries, CONTENTS))
            engine.optimizer.state.clear()
            rounds.time(FRESH, lambda: engine.restore(folder, entries, CONTENTS))
            rounds.time("torch.load, this rank's tensors", lambda: torch.load(torch_path, weights_only=True))
            rounds.time("dcp.load", lambda: dcp.load(tree, checkpoint_id=os.path.join(folder, "dcp")))
    return count_tensors(engine), rounds.samples


def save(engine: Any, folder: str) -> tuple[list[FileEntry], Mapping[str, FileEntry]]:
    """Write a checkpoint and return this rank's data files, and all entries by name."""
    snapshot = engine.snapshot(CONTENTS)
    written = snapshot.write(folder, LocalStorage())
    parts = gather((list(written.entries), written.fragment))
    joined: list[FileEntry] = []
    if distributed.get_rank() == 0:
        joined = list(snapshot.finish(folder, LocalStorage(), [fragment for _, fragment in parts]))
    everything = [entry for entries, _ in parts for entry in entries] + gather(joined)[0]
    return list(written.entries), {entry.path: entry for entry in everything}


def read_raw(folder: str, entries: list[FileEntry], buffer: bytearray) -> None:
    for entry in entries:
        with open(os.path.join(folder, entry.path), "rb", buffering=0) as file:
            view = memoryview(buffer)[: entry.size_bytes]
            while len(view):
                view = view[file.readinto(view) :]


def main() -> None:
    ratios = {}
    for number, options in enumerate(states := parse_options(__doc__)):
        results = run_ranks(options, measure)
        tensors, samples = results[0][0], merge_slowest([found for _, found in results])
        print_table(f"load: {describe(options, tensors)}", build_lines(samples, LIMIT, tensors))
        suffix = "_many" if number or (len(states) == 1 and options.tensors >= 1000) else ""
        base = median_ms(samples[LIMIT])
        ratios[f"load_over_copy{suffix}"] = median_ms(samples[RESTORE]) / base
        ratios[f"load_fresh_over_copy{suffix}"] = median_ms(samples[FRESH]) / base
        ratios[f"load_us_per_tensor_beyond{suffix}"] = (median_ms(samples[RESTORE]) - 1.1 * base) * 1e3 / tensors
    write_json(states[0].json, ratios)


if __name__ == "__main__":
    main()
