"""How long it takes until a save is on the disk: `python -m bench.save`.

The limit is a raw buffered write and fsync of the same bytes, one file a rank. Ours is from the staged image, with the copy
into it outside of the time (bench.stall has it), and the index within; the blocking save has no image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_saver

from bench.common import (
    CONTENTS,
    Line,
    Measured,
    Options,
    Rounds,
    Samples,
    build_engine,
    build_lines,
    build_tree,
    count_bytes,
    count_tensors,
    gather,
    localize,
    median_ms,
    remove_together,
    run_bench,
    shared_folder,
)
from recipe_ckpt.storage import LocalStorage

LIMIT = "raw buffered write + fsync"
STAGED = "staged snapshot: write + finish"
BLOCKING = "blocking snapshot: write + finish"


def measure(options: Options) -> Measured:
    engine = build_engine(options)
    tree = build_tree(engine)
    raw = memoryview(os.urandom(count_bytes(engine)))
    rounds = Rounds(options.rounds)
    with shared_folder(options) as parent:
        folder = os.path.join(parent, "save")

        def time_in_folder(name: str, work: Callable[[], Any]) -> None:
            if distributed.get_rank() == 0:
                os.makedirs(folder)
            distributed.barrier()
            rounds.time(name, work)
            remove_together(folder)

        for _ in rounds:
            time_in_folder(LIMIT, lambda: write_raw(folder, raw))
            staged = engine.snapshot(CONTENTS, stage=True)
            time_in_folder(STAGED, partial(write_ours, folder, staged))
            time_in_folder(BLOCKING, lambda: write_ours(folder, engine.snapshot(CONTENTS)))
            time_in_folder("torch.save + fsync, this rank's tensors", lambda: write_torch(folder, tree))
            time_in_folder("dcp.save", lambda: state_dict_saver.save(tree, checkpoint_id=folder))
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


def report(samples: Samples, tensors: int) -> tuple[list[Line], dict[str, float]]:
    base = median_ms(samples[LIMIT])
    return build_lines(samples, LIMIT, tensors), {
        "save_over_raw": median_ms(samples[STAGED]) / base,
        "save_blocking_over_raw": median_ms(samples[BLOCKING]) / base,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench(__doc__ or "", measure, report, arguments)


if __name__ == "__main__":
    main()
