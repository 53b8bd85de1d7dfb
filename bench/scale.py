"""What grows with ranks, steps and tensors: `python -m bench.scale`.

4,096 ranks' file entries and fragments are merged and encoded, a root of 10,000 step directories is surveyed (through
`run.json`, and with that file gone), an index of 100,000 tensors is written and read. Nothing here needs more than one rank.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.common import Line, Rounds, build_parser, median_ms, print_table, write_json
from recipe_ckpt import layout
from recipe_ckpt.manifest import BranchEntry, FileEntry, FileTable, Manifest, RunRecord, digest_manifest
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import survey
from recipe_ckpt.tensors.index import Box, Chunk, Grid, PartIndex, StoredTensor, TensorIndex
from recipe_ckpt.tensors.merge import Declaration, build_fragment, merge_fragments


def build_entries(ranks: int) -> list[FileEntry]:
    """Return three files a rank, of 64 MB the two large ones."""
    names = [f"{kind}-{rank}.safetensors" for rank in range(ranks) for kind in ("model", "optimizer")]
    large = [FileEntry(name, 64 << 20, "0" * 32, "1" * 32 * 16, 0) for name in names]
    return large + [FileEntry(f"rng_{rank}.pt", 6000, "0" * 32, "1" * 32, rank) for rank in range(ranks)]


def build_fragments(ranks: int, tensors: int) -> tuple[Declaration, list[Any]]:
    """Return what ranks report of tensors that each of them has one row of."""
    shapes = {f"layers.{n}.weight": ("BF16", (ranks, 64 + n % 9)) for n in range(tensors)}
    declaration = Declaration(shapes, {}, {})
    first = build_fragment(declaration, [(p, 0, Box.whole((1, shape[1]))) for p, (_, shape) in enumerate(shapes.values())])
    fragments = []
    for rank in range(ranks):
        chunks = [[n, box.replace("0:1,", f"{rank}:{rank + 1},"), places] for n, box, places in first["chunks"]]
        fragments.append({"model": first | {"chunks": chunks}})
    return declaration, fragments


def build_root(root: str, steps: int) -> None:
    """Make step directories with manifests, and the `run.json` that names them all."""
    entries = []
    for step in range(1, steps + 1):
        manifest = build_manifest(step).encode()
        folder = os.path.join(root, layout.build_step_name(step))
        os.mkdir(folder)
        with open(os.path.join(folder, layout.MANIFEST), "wb") as file:
            file.write(manifest)
        entries.append(BranchEntry(step, step, digest_manifest(manifest), {"loss": 1.0}))
    with open(os.path.join(root, layout.RUN_RECORD), "wb") as file:
        file.write(RunRecord("lineage", steps, tuple(reversed(entries))).encode())
    with open(os.path.join(root, layout.TRACKER), "w") as file:
        file.write(str(steps))


def build_manifest(step: int) -> Manifest:
    return Manifest(
        step=step,
        sequence=step,
        lineage="lineage",
        parent="0" * 32,
        ancestors=((1, step - 1),) if step > 1 else (),
        continues=None,
        launch_id="launch",
        created_at="2026-01-01T00:00:00+00:00",
        world_size=8,
        dp_size=8,
        contents=("model", "optimizer", "extra"),
        data={"dataset_len": 1000, "dp_size": 8},
        metrics={"loss": 1.0},
        versions={"torch": "2.13.0"},
        files_digest="0" * 32,
    )


def build_index(tensors: int) -> TensorIndex:
    grids = [Grid((8 * n, 64), tuple(Chunk(r, 0, Box((n * r, 0), (n, 64))) for r in range(8))) for n in range(1, 20)]
    stored = {f"model.layers.{n}.mlp.experts.weight": StoredTensor("BF16", grids[n % 19]) for n in range(tensors)}
    return TensorIndex({"model": PartIndex(stored)})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser(__doc__ or "", rounds=5)
    parser.add_argument("--ranks", type=int, default=4096, help="simulated ones, in this process")
    parser.add_argument("--steps", type=int, default=10_000, help="step directories")
    parser.add_argument("--tensors", type=int, default=100_000, help="in the index")
    options = parser.parse_args(arguments)
    rounds = Rounds(options.rounds)
    works = build_works(options.ranks, options.tensors)
    root = tempfile.mkdtemp(prefix=".bench_", dir=options.folder)
    try:
        began = time.perf_counter()
        build_root(root, options.steps)
        print(f"made {options.steps} step directories in {time.perf_counter() - began:.1f} s")
        for _ in rounds:
            for name, work in works.items():
                rounds.time(name, work)
            time_surveys(rounds, root, options.steps)
    finally:
        shutil.rmtree(root)
    lines = [Line(name, median_ms(s), None, None, (min(s) * 1e3, max(s) * 1e3)) for name, s in rounds.samples.items()]
    print_table(f"scale, {options.rounds} rounds", lines)
    write_json(options.json, {f"{name} (ms)": median_ms(s) for name, s in rounds.samples.items()})


def build_works(ranks: int, tensors: int) -> dict[str, Callable[[], Any]]:
    entries = build_entries(ranks)
    declaration, fragments = build_fragments(ranks, 300)
    index = build_index(tensors)
    encoded = index.encode()
    table_mb = len(FileTable.of(entries).encode()) / 1e6
    print(f"file table {table_mb:.1f} MB, index of {tensors} tensors {len(encoded) / 1e6:.1f} MB")
    return {
        f"{ranks} ranks: file table": lambda: FileTable.of(entries).encode(),
        f"{ranks} ranks: index of 300 tensors": lambda: merge_fragments({"model": declaration}, fragments).encode(),
        f"index of {tensors} tensors, encoded": index.encode,
        f"index of {tensors} tensors, decoded": lambda: TensorIndex.decode(encoded, "index.json"),
    }


def time_surveys(rounds: Rounds, root: str, steps: int) -> None:
    record, hidden = os.path.join(root, layout.RUN_RECORD), os.path.join(root, "hidden.json")
    found = rounds.time(f"{steps} steps: survey through run.json", lambda: survey(LocalStorage(), root))
    assert len(found.branch) == steps
    os.rename(record, hidden)
    found = rounds.time(f"{steps} steps: survey without run.json", lambda: survey(LocalStorage(), root))
    assert len(found.branch) == steps
    os.rename(hidden, record)


if __name__ == "__main__":
    main()
