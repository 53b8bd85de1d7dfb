"""What comes between two steps from outside: a signal to stop, or the time for a save. All ranks agree on it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from signal import Signals
from typing import NoReturn

import torch
from torch import distributed

from recipe_ckpt.preemption import StopRequest
from recipe_ckpt.rank_env import find_rank

log = logging.getLogger(__name__)


class Wishes:
    """What any rank wants beside training, agreed on by all: to stop for a signal, or to save because time has passed."""

    def __init__(
        self, stop: StopRequest, interval_mins: float | None, device: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.signal = 0
        self._is_save_due = False
        self._stop = stop
        self._interval_secs = math.inf if interval_mins is None else 60 * interval_mins
        self._device = device
        self._clock = clock
        self._saved_at = clock()

    @property
    def has_any(self) -> bool:
        return self.signal != 0 or self._is_save_due

    def agree(self) -> bool:
        """Ask all ranks; say whether one was asked to stop. Collective, at a step's edge or a batch's."""
        is_save_due = self._clock() - self._saved_at >= self._interval_secs
        wanted = torch.tensor([self._stop.signal, int(is_save_due)], device=self._device)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(wanted, op=distributed.ReduceOp.MAX)
        self.signal, due = (int(value) for value in wanted.tolist())
        self._is_save_due = due == 1
        return self.signal != 0

    def note_save(self) -> None:
        self._saved_at = self._clock()

    def leave(self, step: int) -> NoReturn:
        name = Signals(self.signal).name
        level = logging.INFO if find_rank() else logging.WARNING  # said once for all ranks
        log.log(level, "%s: stopped at step %d, which is saved; the same command goes on from there", name, step)
        self._stop.leave(self.signal)
