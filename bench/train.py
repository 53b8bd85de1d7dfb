"""What saving costs a training run: `python -m bench.train`.

The same steps without a save and with one after the first of them, in turns: 10 steps of about 90 ms on one core.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.common import (
    Line,
    Measured,
    Options,
    Rounds,
    Samples,
    build_lines,
    build_tree,
    count_tensors,
    median_ms,
    remove_together,
    run_bench,
    shared_folder,
    subtract,
)
from bench.handler import EmptyLoader
from recipe_ckpt.engines.spmd import SpmdEngine
from recipe_ckpt.handler import CheckpointHandler
from recipe_ckpt.policies import SavePolicy

WITHOUT = "steps without a save"
BLOCKING = "by a blocking save"
ASYNC = "by a save in the background"
OVERLAP = "by one that is copied beside the next step, too"
DCP = "by dcp.async_save, cached stager"
STEPS = 10

POLICIES = {
    BLOCKING: SavePolicy(),
    ASYNC: SavePolicy(is_async=True),
    OVERLAP: SavePolicy(is_async=True, overlap=True),
}


class Training:
    """A multilayer perceptron whose step takes some tens of milliseconds on one core."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(0)
        layers = max(1, options.tensors // 3)
        self._width = max(64, int((options.mb * options.ranks * 1e6 / 12 / layers) ** 0.5))
        linears = [nn.Linear(self._width, self._width, bias=False) for _ in range(layers)]
        model = nn.Sequential(*[module for linear in linears for module in (linear, nn.Tanh())])
        if options.ranks > 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (options.ranks,)))
        self.engine = SpmdEngine(model, torch.optim.AdamW(model.parameters(), foreach=True))
        self.step = 0

    def run(self, steps: int, save: Callable[[int], Any] | None = None) -> None:
        for number in range(steps):
            self.engine.model(torch.ones(64, self._width)).square().mean().backward()
            self.step += 1
            self.engine.step_optimizer(self.step)
            if save is not None and number == 0:
                save(self.step)


def open_handler(training: Training, root: str, policy: SavePolicy) -> CheckpointHandler:
    handler = CheckpointHandler(
        training.engine, EmptyLoader(), default_local_dir=root, max_ckpt_to_keep=1, save_policy=policy
    )
    handler.load_checkpoint()
    return handler


def measure(options: Options) -> Measured:
    logging.disable()
    rounds = Rounds(options.rounds)
    training = Training(options)
    tree = build_tree(training.engine)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    with shared_folder(options) as folder, ExitStack() as stack:
        path = os.path.join(folder, "dcp")
        handlers = {
            name: stack.enter_context(open_handler(training, os.path.join(folder, f"{number}"), policy))
            for number, (name, policy) in enumerate(POLICIES.items())
        }
        for _ in rounds:
            rounds.time(WITHOUT, lambda: training.run(STEPS))
            for name, handler in handlers.items():
                rounds.time(name, partial(training.run, STEPS, handler.save_checkpoint))
                handler.wait()
                distributed.barrier()
            pending: list[Any] = []
            save = partial(_save_by_dcp, pending, tree, path, stager)
            rounds.time(DCP, partial(training.run, STEPS, save))
            pending[0].result()
            remove_together(path)
    stager.close()
    return count_tensors(training.engine), rounds.samples


def _save_by_dcp(pending: list[Any], tree: dict[str, Any], path: str, stager: DefaultStager, step: int) -> None:
    pending.append(async_save(tree, checkpoint_id=path, async_stager=stager))


def report(samples: Samples, tensors: int) -> tuple[list[Line], dict[str, float]]:
    lines = build_lines(samples, WITHOUT, tensors)
    for name in (*POLICIES, DCP):
        added = subtract(samples, name, WITHOUT)
        spread = (min(added) * 1e3, max(added) * 1e3)
        lines.append(Line(f"added {name}", median_ms(added), None, None, spread))
    return lines, {"train_with_over_without": median_ms(samples[ASYNC]) / median_ms(samples[WITHOUT])}


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench(__doc__ or "", measure, report, arguments, mb=100, has_many=False)


if __name__ == "__main__":
    main()
