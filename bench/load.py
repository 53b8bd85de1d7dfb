"""How long it takes to restore from the page cache, every byte checked: `python -m bench.load`.

The limit is `read()` of the rank's own files into a warm buffer. `restore` fills tensors that exist; "fresh" is a resume's
first load, for which the optimizer's state has to be made, page by page. Torch's ways check nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

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
    count_tensors,
    gather,
    median_ms,
    run_bench,
    shared_folder,
)
from bench.save import write_torch
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.storage import LocalStorage

LIMIT = "read() into a warm buffer"
RESTORE = "restore, digests checked"
FRESH = "restore, digests checked, fresh optimizer state"


def measure(options: Options) -> Measured:
    engine = build_engine(options)
    tree = build_tree(engine)
    rounds = Rounds(options.rounds)
    with shared_folder(options) as folder:
        own, entries = save(engine, folder)
        state_dict_saver.save(tree, checkpoint_id=os.path.join(folder, "dcp"))
        write_torch(folder, tree)
        torch_path = os.path.join(folder, f"torch-{distributed.get_rank()}.pt")
        buffer = bytearray(max(entry.size_bytes for entry in own))
        for _ in rounds:
            rounds.time(LIMIT, lambda: read_raw(folder, own, buffer))
            rounds.time(RESTORE, lambda: engine.restore(folder, entries, CONTENTS))
            engine.optimizer.state.clear()
            rounds.time(FRESH, lambda: engine.restore(folder, entries, CONTENTS))
            rounds.time("torch.load, this rank's tensors", lambda: torch.load(torch_path, weights_only=True))
            rounds.time("dcp.load", lambda: state_dict_loader.load(tree, checkpoint_id=os.path.join(folder, "dcp")))
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


def report(samples: Samples, tensors: int) -> tuple[list[Line], dict[str, float]]:
    base = median_ms(samples[LIMIT])
    return build_lines(samples, LIMIT, tensors), {
        "load_over_copy": median_ms(samples[RESTORE]) / base,
        "load_fresh_over_copy": median_ms(samples[FRESH]) / base,
        "load_us_per_tensor_beyond": (median_ms(samples[RESTORE]) - 1.1 * base) * 1e3 / tensors,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench(__doc__ or "", measure, report, arguments)


if __name__ == "__main__":
    main()
