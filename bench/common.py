"""What all benches share: ranks, states, interleaved rounds, tables, JSON.

A figure is a median of rounds in which every way is measured once, one after the other; of several ranks the slowest counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from recipe_ckpt.engines.spmd import SpmdEngine

CONTENTS = ("model", "optimizer")
SMALL_TENSOR_BYTES = 4096

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `mb` and `tensors` are those of each rank: parameters and both moments of AdamW."""

    mb: float
    tensors: int
    ranks: int
    rounds: int
    folder: str
    json: str | None

    @property
    def suffix(self) -> str:
        """What keeps the ratios of many small tensors apart from those of few large ones."""
        return "_many" if self.tensors >= 1000 else ""


def build_parser(what: str, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each way is measured, after one to warm up")
    parser.add_argument("--folder", default=os.getcwd(), help="a directory on the disk to be measured")
    parser.add_argument("--json", help="write the ratios into this file")
    return parser


def parse_options(what: str, arguments: Sequence[str] | None, *, mb: float, rounds: int, has_many: bool) -> list[Options]:
    """Return one entry for each state to be measured: of few large tensors, and with `has_many` of 2,000 of 4 KB too."""
    parser = build_parser(what, rounds)
    parser.add_argument("--mb", type=float, default=mb, help="bytes of each rank's state, in MB")
    parser.add_argument("--tensors", type=int, help="measure one state, of --mb in about so many tensors")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4), help="processes; the state is sharded by FSDP2")
    found = parser.parse_args(arguments)
    shared = {"ranks": found.ranks, "rounds": found.rounds, "folder": found.folder, "json": found.json}
    states = [Options(found.mb, found.tensors or 18, **shared)]
    if has_many and not found.tensors:
        states.append(Options(2000 * SMALL_TENSOR_BYTES / 1e6, 2000, **shared))
    return states


Measured = tuple[int, Samples]
"""How many tensors a rank's state has, and what was measured on the rank."""


def run_bench(
    what: str,
    measure: Callable[[Options], Measured],
    report: Callable[[Samples, int], tuple[list[Line], dict[str, float]]],
    arguments: Sequence[str] | None = None,
    *,
    mb: float = 200,
    rounds: int = 5,
    has_many: bool = True,
) -> None:
    """Measure each state on all ranks, print a table of what `report` makes of the slowest ranks, and write its ratios.

    `arguments` are by default those of the process.
    """
    ratios: dict[str, float] = {}
    states = parse_options(what, arguments, mb=mb, rounds=rounds, has_many=has_many)
    for options in states:
        results = run_ranks(options, measure)
        tensors, samples = results[0][0], merge_slowest([found for _, found in results])
        lines, found = report(samples, tensors)
        print_table(f"{what.splitlines()[0]}\n{describe(options, tensors)}", lines)
        ratios |= {f"{name}{options.suffix}": value for name, value in found.items()}
    write_json(states[0].json, ratios)


# --- states


class Layers(nn.Module):
    """As many equal parameters as a third of the tensors: AdamW adds two for each."""

    def __init__(self, mb: float, tensors: int) -> None:
        super().__init__()
        count = max(1, tensors // 3)
        rows = max(1, round(mb * 1e6 / 3 / count / 4 / 64))
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(rows, 64)) for _ in range(count))


def build_engine(options: Options) -> SpmdEngine:
    """Return an engine of which each rank holds `mb`; with several ranks it is sharded by FSDP2."""
    torch.manual_seed(0)
    model = Layers(options.mb * options.ranks, options.tensors)
    if options.ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (options.ranks,)))
    engine = SpmdEngine(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.step_optimizer(1)
    return engine


def build_tree(engine: SpmdEngine) -> dict[str, Any]:
    """Return the same state as a dictionary of the live tensors, which is what torch's own ways take."""
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    tree: dict[str, Any] = {f"model.{name}": p.detach() for name, p in engine.model.named_parameters()}
    for parameter, state in engine.optimizer.state.items():
        tree |= {f"optimizer.{names[id(parameter)]}.{key}": value for key, value in state.items()}
    return tree


def localize(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def count_bytes(engine: SpmdEngine) -> int:
    return sum(localize(value).nbytes for value in build_tree(engine).values())


def count_tensors(engine: SpmdEngine) -> int:
    return len(build_tree(engine))


# --- measuring


class Rounds:
    """Collects seconds by name, over interleaved rounds. The first round warms up and does not count."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.samples: Samples = {}
        self._is_warm = False

    def __iter__(self) -> Iterator[int]:
        for number in range(self._rounds + 1):
            self._is_warm = number > 0
            yield number

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work` on all ranks from a common start, with no collection of garbage falling into it."""
        gc.collect()
        gc.disable()
        if distributed.is_initialized():
            distributed.barrier()
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.add(name, time.perf_counter() - began)
            gc.enable()

    def time_alone(self, name: str, work: Callable[[], Any]) -> None:
        """Run `work` on this rank only."""
        began = time.perf_counter()
        work()
        self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        if self._is_warm:
            self.samples.setdefault(name, []).append(seconds)


def merge_slowest(by_rank: Sequence[Samples]) -> Samples:
    return {name: [max(values) for values in zip(*(s[name] for s in by_rank), strict=True)] for name in by_rank[0]}


def subtract(samples: Samples, name: str, base: str) -> list[float]:
    return [mine - theirs for mine, theirs in zip(samples[name], samples[base], strict=True)]


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


# --- ranks


def run_ranks(options: Options, function: Callable[[Options], Any]) -> list[Any]:
    """Run `function(options)` on every rank of a new gloo group, one thread each, and return the results by rank."""
    context = multiprocessing.get_context("spawn")
    rendezvous = tempfile.mktemp(prefix="recipe_ckpt_bench_")
    pipes, processes = [], []
    for rank in range(options.ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(options, function, rank, rendezvous, sender))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        outcomes = [_receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for kind, value in outcomes:
        if kind != "done":
            raise RuntimeError(value)
    return [value for _, value in outcomes]


def _receive(pipe: Any) -> tuple[str, Any]:
    try:
        found: tuple[str, Any] = pipe.recv()
        return found
    except EOFError:
        return "dead", "a rank died without a word"


def _work(options: Options, function: Callable[[Options], Any], rank: int, rendezvous: str, sender: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks)
    try:
        distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.ranks)
        result = function(options)
        distributed.barrier()
        distributed.destroy_process_group()
        sender.send(("done", result))
    except BaseException:  # noqa: BLE001 (whatever ends a rank is told to the parent)
        sender.send(("failed", traceback.format_exc()))


@contextmanager
def shared_folder(options: Options) -> Iterator[str]:
    """Give all ranks one empty directory on the disk to be measured. Collective."""
    box = [tempfile.mkdtemp(prefix=".bench_", dir=options.folder) if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(box)
    try:
        yield box[0]
    finally:
        distributed.barrier()
        if distributed.get_rank() == 0:
            shutil.rmtree(box[0])


def remove_together(path: str) -> None:
    """Remove a directory when no rank needs it any more. Collective."""
    distributed.barrier()
    if distributed.get_rank() == 0:
        shutil.rmtree(path)
    distributed.barrier()


def gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


# --- telling


@dataclass(frozen=True, slots=True)
class Line:
    """One way's median in ms, as a ratio to its limit, and as what it takes beyond the limit for each tensor."""

    name: str
    ms: float
    ratio: float | None = None
    us_per_tensor: float | None = None
    spread: tuple[float, float] | None = None


def build_lines(samples: Mapping[str, Sequence[float]], limit: str, tensors: int) -> list[Line]:
    base = median_ms(samples[limit])
    return [
        Line(name, ms, ms / base, (ms - base) * 1e3 / tensors, (min(values) * 1e3, max(values) * 1e3))
        for name, values in samples.items()
        for ms in [median_ms(values)]
    ]


def print_table(title: str, lines: Sequence[Line]) -> None:
    width = max(len(line.name) for line in lines)
    print(f"\n{title}")
    print(f"{'':{width}}   median ms   (min - max)          ratio   us a tensor beyond")
    for line in lines:
        spread = f"({line.spread[0]:.1f} - {line.spread[1]:.1f})" if line.spread else ""
        ratio = f"{line.ratio:.2f}" if line.ratio is not None else ""
        beyond = f"{line.us_per_tensor:.1f}" if line.us_per_tensor is not None else ""
        print(f"{line.name:{width}}  {line.ms:10.1f}   {spread:20} {ratio:>6}  {beyond:>8}")


def describe(options: Options, tensors: int) -> str:
    return f"{options.mb:.0f} MB in {tensors} tensors on each of {options.ranks} ranks, {options.rounds} rounds"


def write_json(path: str | None, ratios: Mapping[str, float]) -> None:
    if path is not None:
        with open(path, "w") as file:
            json.dump({"ratios": {name: round(value, 4) for name, value in ratios.items()}}, file, indent=1)
            file.write("\n")
