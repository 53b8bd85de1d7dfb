"""How long it takes until a save is on the disk: `python -m bench.save`.

The limit is a raw buffered write and fsync of the same bytes, one file a rank. Ours is from the staged image, with the copy
into it outside of the time (bench.stall has it), and the index within; the blocking save has no image.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
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
    count_bytes,
    count_tensors,
    describe,
    gather,
    localize,
    median_ms,
    merge_slowest,
    parse_options,
    print_table,
    run_ranks,
    shared_folder,
    write_json,
)
from recipe_ckpt.storage import LocalStorage

LIMIT = "raw buffered write + fsync"
STAGED = "staged snapshot: write + finish"
BLOCKING = "blocking snapshot: write + finish"


def measure(options: Options) -> tuple[int, Samples]:
    engine = build_engine(options)
    tree = build_tree(engine)
    raw = memoryview(torch.randint(0, 255, (count_bytes(engine),), dtype=torch.uint8).numpy())
    rounds = Rounds(options.rounds)
    with shared_folder(options) as parent:
        folder = os.path.join(parent, "save")

        def time_in_folder(name: str, work: Callable[[], Any]) -> None:
            if distributed.get_rank() == 0:
                os.makedirs(folder)
            distributed.barrier()
            rounds.time(name, work)
            distributed.barrier()
            if distributed.get_rank() == 0:
                shutil.rmtree(folder)

        for _ in rounds:
            time_in_folder(LIMIT, lambda: write_raw(folder, raw))
            staged = engine.snapshot(CONTENTS, stage=True)
            time_in_folder(STAGED, lambda snapshot=staged: write_ours(folder, snapshot))
            time_in_folder(BLOCKING, lambda: write_ours(folder, engine.snapshot(CONTENTS)))
            time_in_folder("torch.save + fsync, this rank's tensors", lambda: write_torch(folder, tree))
            time_in_folder("dcp.save", lambda: dcp.save(tree, checkpoint_id=folder))
    return count_tensors(engine), rounds.samples


def write_raw(folder: str, raw: memoryview) -> None:
    with open(os.path.join(folder, f"raw-{distributed.get_rank()}"), "xb", buffering=0) as file:
        while len(raw):
            raw = raw[file.write(raw) :]
        os.fsync(file.fileno())


def write_ours(folder: str, snapshot: Any) -> None:
    """Write all ranks' files and then, as the handler would, the index on rank 0."""
    written = snapshot.write(folder, LocalStorage())
    fragments = gather(written.fragment)
    if distributed.get_rank() == 0:
        snapshot.finish(folder, LocalStorage(), fragments)


def write_torch(folder: str, tree: dict[str, Any]) -> None:
    with open(os.path.join(folder, f"torch-{distributed.get_rank()}.pt"), "xb") as file:
        torch.save({name: localize(value) for name, value in tree.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    ratios = {}
    for number, options in enumerate(states := parse_options(__doc__)):
        results = run_ranks(options, measure)
        tensors, samples = results[0][0], merge_slowest([found for _, found in results])
        print_table(f"save: {describe(options, tensors)}", build_lines(samples, LIMIT, tensors))
        suffix = "_many" if number or (len(states) == 1 and options.tensors >= 1000) else ""
        ratios[f"save_over_raw{suffix}"] = median_ms(samples[STAGED]) / median_ms(samples[LIMIT])
        ratios[f"save_blocking_over_raw{suffix}"] = median_ms(samples[BLOCKING]) / median_ms(samples[LIMIT])
    write_json(states[0].json, ratios)


if __name__ == "__main__":
    main()
