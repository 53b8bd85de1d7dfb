"""How long a save keeps training from going on: `python -m bench.stall`.

The limit is one warm `copy_` of the rank's bytes. Overlapped copies are measured as the time that a stretch of computing
takes longer for them: snapshot, compute, wait as the optimizer step would; less the same computing alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

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
    median_ms,
    remove_together,
    run_bench,
    shared_folder,
    subtract,
)

LIMIT = "one warm torch copy_"
STAGED = "snapshot(stage=True)"
RETURNED = "snapshot(stage=True, overlap=True), until it returns"
COMPUTE = "computing alone"
OVERLAPPED = "computing with an overlapped snapshot"


def measure(options: Options) -> Measured:
    engine = build_engine(options)
    tree = build_tree(engine)
    source = torch.ones(count_bytes(engine) // 4)
    target = torch.ones_like(source)
    compute = Computing(seconds=0.12)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    rounds = Rounds(options.rounds)
    with shared_folder(options) as folder:
        for _ in rounds:
            rounds.time(LIMIT, lambda: target.copy_(source))
            rounds.time(STAGED, lambda: engine.snapshot(CONTENTS, stage=True)).release()
            rounds.time(RETURNED, lambda: engine.snapshot(CONTENTS, stage=True, overlap=True)).release()
            rounds.time(COMPUTE, compute.run)
            rounds.time(OVERLAPPED, lambda: _compute_beside(engine, compute)).release()
            _time_dcp(rounds, "dcp.async_save, cached stager", tree, folder, stager)
            _time_dcp(rounds, "dcp.async_save, default", tree, folder, None)
    stager.close()
    return count_tensors(engine), rounds.samples


class Computing:
    """Matrix products for about so long on one core: forward and backward of a step."""

    def __init__(self, seconds: float) -> None:
        self._left, self._right = torch.rand(512, 512), torch.rand(512, 512)
        calibration = Rounds(5)
        for _ in calibration:
            calibration.time("one", lambda: self._left @ self._right)
        self._count = max(1, int(seconds / (median_ms(calibration.samples["one"]) / 1e3)))

    def run(self) -> None:
        for _ in range(self._count):
            self._left @ self._right


def _compute_beside(engine: Any, compute: Computing) -> Any:
    snapshot = engine.snapshot(CONTENTS, stage=True, overlap=True)
    compute.run()
    snapshot.wait_staged()
    return snapshot


def _time_dcp(rounds: Rounds, name: str, tree: dict[str, Any], folder: str, stager: Any) -> None:
    path = os.path.join(folder, "dcp")
    rounds.time(name, lambda: async_save(tree, checkpoint_id=path, async_stager=stager)).result()
    remove_together(path)


def report(samples: Samples, tensors: int) -> tuple[list[Line], dict[str, float]]:
    added = subtract(samples, OVERLAPPED, COMPUTE)
    lines = build_lines({k: v for k, v in samples.items() if k not in (COMPUTE, OVERLAPPED)}, LIMIT, tensors)
    base, ms = median_ms(samples[LIMIT]), median_ms(added)
    lines.insert(3, Line("... added to computing by it", ms, ms / base, None, (min(added) * 1e3, max(added) * 1e3)))
    return lines, {
        "stall_over_memcpy": median_ms(samples[STAGED]) / base,
        "stall_us_per_tensor_beyond": (median_ms(samples[STAGED]) - base) * 1e3 / tensors,
        "stall_overlapped_over_memcpy": ms / base,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench(__doc__ or "", measure, report, arguments)


if __name__ == "__main__":
    main()
