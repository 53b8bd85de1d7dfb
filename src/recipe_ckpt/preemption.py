"""Signals as a context manager: a scheduler's wish becomes a flag that the loop looks at between steps.

A handler that saves would run between any two instructions, on one rank only, in the middle of a collective. So the handler
sets a flag and nothing else; the ranks agree on it at a step's edge, save, and leave.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

_ASKED_BY = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Whether a signal asked this process to stop, and which; 0 is none."""

    def __init__(self) -> None:
        self.signal = 0
        self._former: dict[int, Any] = {}

    @property
    def is_set(self) -> bool:
        return self.signal != 0

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Remember a signal; a second SIGINT stops at once, as a user who presses Ctrl-C twice expects."""
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.remember(number)

    def remember(self, number: int) -> None:
        """Keep the first signal, and tell a watch around this one."""
        self.signal = self.signal or number
        if outer := self._find_outer(number):
            outer.remember(number)

    def leave(self, number: int | None = None) -> NoReturn:
        """End the process for the signal `number` (by default the one noted): 130 after SIGINT, else 143.

        Where somebody else handles that signal too (a launcher that requeues), it is handed on instead. A watch around this
        one has been told already, and hands it on itself when it leaves.
        """
        number = number or self.signal
        former = self._former.get(number)
        if number != signal.SIGINT and callable(former) and self._find_outer(number) is None:
            former(number, None)
        sys.exit(130 if number == signal.SIGINT else 143)

    def _install(self) -> None:
        for number in _ASKED_BY:
            self._former[number] = signal.signal(number, self.note)
            if outer := self._find_outer(number):
                self.signal = self.signal or outer.signal

    def _find_outer(self, number: int) -> StopRequest | None:
        """Return who watched this signal before, if that was one like this."""
        watcher = getattr(self._former.get(number), "__self__", None)
        return watcher if isinstance(watcher, StopRequest) else None

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)


@contextmanager
def watch(stop: StopRequest | None = None) -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGUSR1 and SIGINT into a flag inside the block; the former handlers are back after it.

    Within another such block it takes over a signal that has come already, and tells the outer one of its own. Signals can
    only be watched from the main thread; elsewhere the flag is never set.
    """
    stop = stop or StopRequest()
    if threading.current_thread() is not threading.main_thread():
        logger.warning("signals are not watched: this is not the main thread")
        yield stop
        return
    stop._install()
    try:
        yield stop
    finally:
        stop._restore()
