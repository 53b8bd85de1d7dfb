"""The learning rate as a pure function of the step and the config: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from recipe_ckpt.config import LrScheduler, OptimConfig


def compute_lr(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Return the rate of optimizer step `step` (the first is 1). It is zero at `lr_decay_steps`, by default `total_steps`."""
    if step <= optim.lr_warmup_steps:
        return optim.lr * step / (optim.lr_warmup_steps + 1)
    if optim.lr_scheduler_type == LrScheduler.constant:
        return optim.lr
    decay_steps = (optim.lr_decay_steps or total_steps) - optim.lr_warmup_steps
    done = min(1.0, (step - optim.lr_warmup_steps - 1) / max(decay_steps, 1))
    if optim.lr_scheduler_type == LrScheduler.linear:
        return optim.lr * (1 - done)
    return optim.lr * (1 + math.cos(math.pi * done)) / 2


class LrSchedule:
    """`compute_lr` for a run whose length is known only when its data position has been restored."""

    def __init__(self, optim: OptimConfig) -> None:
        self.total_steps = 0
        self._optim = optim

    def __call__(self, step: int) -> float:
        return compute_lr(step, self._optim, self.total_steps)
