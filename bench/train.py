"""What saving costs a training run: `python -m bench.train`.

The same steps without a save and with one after the first of them, blocking and in the background, in turns.
"""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.common import (
    Options,
    Rounds,
    Samples,
    build_lines,
    count_bytes,
    count_tensors,
    describe,
    median_ms,
    merge_slowest,
    print_table,
    run_ranks,
    shared_folder,
    write_json,
)
from bench.handler import EmptyLoader
from recipe_ckpt.engines.spmd import SpmdEngine
from recipe_ckpt.handler import CheckpointHandler
from recipe_ckpt.policies import SavePolicy

WITHOUT = "steps without a save"
BLOCKING = "with a blocking save after the first"
ASYNC = "with a save in the background after the first"
OVERLAP = "... copied beside the next step"
STEPS = 20

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

    def run(self, steps: int, handler: Any | None) -> None:
        for number in range(steps):
            self.engine.model(torch.ones(64, self._width)).square().mean().backward()
            self.step += 1
            self.engine.step_optimizer(self.step)
            if handler is not None and number == 0:
                handler.save_checkpoint(self.step)


def open_handler(training: Training, root: str, policy: SavePolicy) -> CheckpointHandler:
    options = {"default_local_dir": root, "max_ckpt_to_keep": 1, "save_policy": policy}
    handler = CheckpointHandler(training.engine, EmptyLoader(), **options)
    handler.load_checkpoint()
    return handler


def measure(options: Options) -> tuple[int, float, Samples]:
    logging.disable()
    rounds = Rounds(options.rounds)
    training = Training(options)
    with (
        shared_folder(options) as folder,
        ExitStack() as stack,
    ):
        handlers = {
            name: stack.enter_context(open_handler(training, os.path.join(folder, f"{number}"), policy))
            for number, (name, policy) in enumerate(POLICIES.items())
        }
        for _ in rounds:
            rounds.time(WITHOUT, lambda: training.run(STEPS, None))
            for name, handler in handlers.items():
                rounds.time(name, lambda handler=handler: training.run(STEPS, handler))
                handler.wait()
                distributed.barrier()
    return count_tensors(training.engine), count_bytes(training.engine) / 1e6, rounds.samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--tensors", type=int, default=18)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=os.getcwd())
    parser.add_argument("--json")
    options = Options(**vars(parser.parse_args()))
    results = run_ranks(options, measure)
    tensors, samples = results[0][0], merge_slowest([found for _, _, found in results])
    print_table(f"train: {STEPS} steps, {describe(options, tensors)}", build_lines(samples, WITHOUT, tensors))
    for name in POLICIES:
        added = median_ms([mine - base for mine, base in zip(samples[name], samples[WITHOUT], strict=True)])
        print(f"a save adds {added:.1f} ms {name} (median of the differences)")
    write_json(options.json, {"train_with_over_without": median_ms(samples[ASYNC]) / median_ms(samples[WITHOUT])})


if __name__ == "__main__":
    main()
