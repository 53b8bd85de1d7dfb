"""Signs of life: each process counts up a key of a c10d store, and rank 0 sees whose count stands still."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pace:
    """How soon silence is noticed. After `dead_after_secs` without a beat a process counts as dead or stopped.

    Rank 0, with which the store ends, waits at its end up to `farewell_secs` for the others to read its last word.
    """

    beat_secs: float = 5.0
    dead_after_secs: float = 45.0
    farewell_secs: float = 5.0


DEFAULT_PACE = Pace()


class Pulse:
    """A thread that shows that its process runs: it counts up a key of the store."""

    def __init__(self, store: Any, rank: int, pace: Pace) -> None:
        self._store = store.clone()
        self._pace = pace
        self._key = _pulse_key(rank)
        self._ended = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._beat_until_stopped, name="recipe-ckpt-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(self._pace.farewell_secs)  # it may hang in a call to a rank 0 that is stopped

    def _beat_until_stopped(self) -> None:
        count = 0
        while not self._ended.wait(self._pace.beat_secs):
            count += 1
            try:
                self._beat(count)
            except RuntimeError:
                return  # rank 0 is gone; whoever waits for it finds out by itself

    def _beat(self, count: int) -> None:
        self._store.set(self._key, str(count))


class PulseWatch:
    """Rank 0's view of the other pulses, on its own clock."""

    def __init__(self, store: Any, clock: Callable[[], float], pace: Pace) -> None:
        self._store = store
        self._pace = pace
        self._clock = clock
        self._last_look = 0.0
        self._changed_at: dict[int, tuple[bytes | None, float]] = {}

    def find_dead(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` whose pulse has not changed for too long, looking once a beat."""
        now = self._clock()
        if now - self._last_look < self._pace.beat_secs:
            return []
        if now - self._last_look > self._pace.dead_after_secs:
            self._changed_at.clear()  # nobody looked for a while: what was seen then says nothing
        self._last_look = now
        return [rank for rank in ranks if self._measure_silence(rank, now) > self._pace.dead_after_secs]

    def _measure_silence(self, rank: int, now: float) -> float:
        key = _pulse_key(rank)
        value = self._store.get(key) if self._store.check([key]) else None
        before = self._changed_at.get(rank)
        if before is None or before[0] != value:
            self._changed_at[rank] = (value, now)
            return 0.0
        return now - before[1]


def _pulse_key(rank: int) -> str:
    return f"pulse/{rank}"
