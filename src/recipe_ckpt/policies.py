"""What a handler is told to do, and what it tells about where it began."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipe_ckpt.config import CONTENTS


class OrchestrationMode(enum.Enum):
    """verl's two ways to run: every rank calls the handler (SPMD), or one driver does (RAY)."""

    SPMD = 0
    RAY = 1


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """What a save holds (of `model`, `optimizer`, `extra`), what follows if it fails, and whether training waits for it.

    `on_failure` is `raise` or `warn`. With `is_async` the state is copied, and written in the background. With `overlap` as
    well, parameters and optimizer state are copied beside the next forward and backward: until the engine's optimizer steps
    nothing else may change them.
    """

    contents: Sequence[str] = CONTENTS
    on_failure: str = "raise"
    is_async: bool = False
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """What a resume restores, and what follows if the data set is another one: `raise` or `restart` the epoch."""

    contents: Sequence[str] = CONTENTS
    on_data_mismatch: str = "raise"


@dataclass(frozen=True, slots=True)
class MirrorPolicy:
    """How the mirror keeps up.

    `on_failure` is `raise`, `warn` or `ignore`. `max_to_keep` is how many of the newest stay there (None: all). Local
    retention waits for uploads, but not for more than `max_pending` of them. `exit_wait_secs` is how long `close` waits.
    """

    on_failure: str = "warn"
    max_to_keep: int | None = None
    max_pending: int = 2
    exit_wait_secs: float = 600.0


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where this run started from; `metrics` are those of its save."""

    step: int
    path: str
    reason: str
    metrics: Mapping[str, float]
