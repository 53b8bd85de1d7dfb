"""What a handler is told to do, and what it tells about where it began."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipe_ckpt.config import CONTENTS
from recipe_ckpt.drift import Change


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
    """What a resume restores, and what follows if the data set or the configuration is another one.

    `on_data_mismatch` is `raise` or `restart` (the epoch). `on_config_drift` is `raise`, `warn` or `ignore`; compared is the
    document `config_resolved.json`, where checkpoint and run have one.
    """

    contents: Sequence[str] = CONTENTS
    on_data_mismatch: str = "raise"
    on_config_drift: str = "warn"


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
    """Where this run started from; `metrics` are those of its save, `changes` what differs from its configuration."""

    step: int
    path: str
    reason: str
    metrics: Mapping[str, float]
    changes: Sequence[Change] = ()
