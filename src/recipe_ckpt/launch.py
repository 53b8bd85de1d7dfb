"""Hydra outside, ranks inside: one call of a job becomes one process per rank, by torch's own elastic launch.

A job that sweeps or is launched by joblib or submitit stays one process for Hydra; its ranks start and end within it. Where
torchrun or srun has started the ranks already, and where there is one only, the work runs in this process.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from recipe_ckpt import preemption
from recipe_ckpt.errors import CheckpointError, ConfigError, RankError, RankTimeoutError, can_be_mended, rebuild_error
from recipe_ckpt.job import ends_process, environment, is_sweep, send_signal
from recipe_ckpt.preemption import StopRequest
from recipe_ckpt.rank_env import SHOWN_AT_EXIT, count_ranks, find_rank

if TYPE_CHECKING:
    from recipe_ckpt.sft.recipe import Recipe

log = logging.getLogger(__name__)


def run_ranks(work: Callable[..., Any], recipe: Recipe, *arguments: Any) -> Any:
    """Run `work(recipe, *arguments)` on every rank and return rank 0's value.

    With `launch.nproc_per_node` that is in new processes, to which all of these travel: `work` must be importable, and the
    arguments plain. A signal to this process goes to all of them; what one of them raises is in the log, with its rank.

    Raises:
        ConfigError: there are ranks already, or too few CUDA devices.
        CheckpointError: of the kind that the rank raised, if it says what to mend; the others end for it.
        RankError: a rank raised anything else, or died; the message has its traceback.
        SystemExit: a signal stopped the ranks; the code is theirs (143, 130).
    """
    if (recipe.launch.nproc_per_node or 1) > 1:
        return _start_ranks(count_ranks(recipe.launch.nproc_per_node), work, recipe, *arguments)
    try:
        return work(recipe, *arguments)
    except Exception as error:
        _log_failure(error, in_sweep=is_sweep())
        raise


def _start_ranks(count: int, work: Callable[..., Any], recipe: Recipe, *arguments: Any) -> Any:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    if work.__module__ == "__main__":
        raise TypeError(f"{work.__qualname__} is defined in the started script; ranks import their work: give it a module")
    _require_devices(count, recipe)
    with tempfile.TemporaryDirectory(prefix="recipe_ckpt_launch_") as folder, _former_process_state(recipe):
        desk = _Desk(folder)
        with preemption.watch(_Forwarder(desk)) as stop:
            start = elastic_launch(_configure(count, folder), _work)
            failures = {}
            try:
                ends = start(desk, _describe_logging(), is_sweep(), work, recipe, *arguments)
            except SignalException as end:  # SIGHUP and SIGQUIT: torch has ended the ranks
                sys.exit(128 + end.sigval)
            except ChildFailedError as error:
                failures = error.failures
            if failures:
                _raise_failure(desk.list_failures(), count, *min(failures.items()), stop)
            codes = [end.code for _, end in sorted(ends.items()) if end.has_exited]
            if codes and stop.is_set:
                stop.leave()
            if codes:
                sys.exit(codes[0])
            return ends[0].value


@dataclass(frozen=True)
class _End:
    """How a rank ended without an error: with a value, or with an exit code."""

    value: Any = None
    has_exited: bool = False
    code: Any = None


@dataclass(frozen=True)
class _Failure:
    """What a rank raised. `kind` is the name of a class."""

    rank: int
    kind: str
    message: str
    trace: str
    is_mendable: bool
    is_echo: bool
    at: float


class _Desk:
    """A directory in which ranks leave word for the process that started them: that they listen, and why they failed."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def note_listening(self) -> None:
        (self._folder / f"listening-{os.getpid()}").touch()

    def is_listening(self, pid: int) -> bool:
        return (self._folder / f"listening-{pid}").exists()

    def note_failure(self, failure: _Failure) -> None:
        part = self._folder / f"failure-{failure.rank}.part"
        part.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        part.rename(part.with_suffix(".json"))

    def list_failures(self) -> list[_Failure]:
        """Return them in order of time, with those last that are only the echo of another rank's."""
        found = [_Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in self._folder.glob("failure-*.json")]
        return sorted(found, key=lambda failure: (failure.is_echo, failure.at))


class _Forwarder(StopRequest):
    """Hands every signal on to the ranks. One that does not listen yet has nothing to save and is killed.

    A third SIGINT kills them all, should they not have stopped for the second.
    """

    def __init__(self, desk: _Desk) -> None:
        super().__init__()
        self._desk = desk
        self._interrupts = 0
        self._others = set(multiprocessing.active_children())

    def note(self, number: int, frame: FrameType | None = None) -> None:
        self.remember(number)
        self._interrupts += number == signal.SIGINT
        for rank in set(multiprocessing.active_children()) - self._others:
            if rank.pid is not None:
                is_heard = self._interrupts < 3 and self._desk.is_listening(rank.pid)
                send_signal(rank.pid, number if is_heard else signal.SIGKILL)


def _work(
    desk: _Desk, job_logging: Mapping[str, Any] | None, in_sweep: bool, work: Callable[..., Any], *arguments: Any
) -> _End:
    """Run a rank's work in its process. What it raises is logged, left on the desk, and raised again."""
    os.setpgid(0, 0)  # a terminal sends Ctrl-C to its whole process group: the ranks get it once, from who started them
    with preemption.watch():
        desk.note_listening()
        _configure_logging(job_logging)
        try:
            value = work(*arguments)
        except SystemExit as end:
            return _End(has_exited=True, code=end.code)
        except KeyboardInterrupt:  # torch takes a process that ends by it for one that works on
            return _End(has_exited=True, code=130)
        except Exception as error:
            _log_failure(error, in_sweep=in_sweep)
            desk.note_failure(_describe_failure(error))
            raise
    return _End(value if find_rank() == 0 else None)


def _configure(count: int, folder: str) -> Any:
    """Return torch's settings for `count` ranks on this machine. No restarts: a run that failed is started again by hand."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    # SIGTERM, SIGINT and SIGUSR1 are ours. Older versions of torch have no such choice, and give ranks 30 s to save.
    newer: dict[str, Any] = {"signals_to_handle": "SIGHUP,SIGQUIT"}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex[:12],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **{key: value for key, value in newer.items() if key in {item.name for item in fields(LaunchConfig)}},
    )


def _require_devices(count: int, recipe: Recipe) -> None:
    import torch

    from recipe_ckpt.sft.recipe import choose_device

    if choose_device(recipe.trainer.device) == "cuda" and count > torch.cuda.device_count():
        raise ConfigError(
            "launch.nproc_per_node",
            count,
            f"1 to {torch.cuda.device_count()}, the CUDA devices of this machine",
            "For more ranks than devices write trainer.device=cpu.",
        )


def _describe_failure(error: Exception) -> _Failure:
    return _Failure(
        rank=find_rank(),
        kind=type(error).__name__,
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        is_mendable=isinstance(error, CheckpointError) and can_be_mended(error),
        is_echo=isinstance(error, RankError) or isinstance(error.__cause__, RankError) or "by peer" in str(error),
        at=time.time(),
    )


def _raise_failure(failures: Sequence[_Failure], count: int, rank: int, process: Any, stop: StopRequest) -> NoReturn:
    """Raise what the ranks failed by, or leave for a signal if that killed them; `process` is the first that ended so."""
    code = process.exitcode
    if stop.is_set and (not failures or code < 0):
        stop.leave()
    if not failures or code < 0:
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RankError(f"rank {rank} {ended}, and the others were ended with it; look at its output, and at the memory")
    root = failures[0]
    if root.is_mendable:
        raise rebuild_error(root.kind, root.message)
    silent = sorted(set(range(count)) - {failure.rank for failure in failures}) if root.is_echo else []
    suspects = f" (ranks {silent} left no word: one of them was killed)" if silent else ""
    raise RankError(f"rank {root.rank}: {root.kind}: {root.message}{suspects}\n\nrank {root.rank}'s {root.trace}")


def _log_failure(error: Exception, *, in_sweep: bool) -> None:
    """Log what ends a rank: for the file only if the process is about to end with it, or if it repeats another rank's."""
    is_clear = isinstance(error, CheckpointError) and can_be_mended(error)
    is_shown_at_exit = ends_process(error, in_sweep=in_sweep) or _repeats_another(error)
    extra = {SHOWN_AT_EXIT: is_shown_at_exit}
    log.error("%s: %s", type(error).__name__, error, exc_info=None if is_clear else error, extra=extra)


def _repeats_another(error: Exception) -> bool:
    """Say whether another rank has told the cause itself; one that gave no answer has not."""
    causes = [found for found in (error, error.__cause__) if isinstance(found, RankError)]
    return any(not isinstance(found, RankTimeoutError) for found in causes)


def _describe_logging() -> dict[str, Any] | None:
    """Return how Hydra has set up this job's logging, as plain values; None where there is no Hydra."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized():
        return None
    job = {"job_logging": HydraConfig.get().job_logging, "verbose": HydraConfig.get().verbose}
    return {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in job.items()
    }


def _configure_logging(job: Mapping[str, Any] | None) -> None:
    from hydra.core.utils import configure_log
    from omegaconf import OmegaConf

    if job is not None:
        configured: Any = OmegaConf.create(dict(job))
        configure_log(configured.job_logging, configured.verbose)


@contextmanager
def _former_process_state(recipe: Recipe) -> Iterator[None]:
    """After it, what torch's launch changes in this process is as it was: signal handlers, variables, and its logger."""
    handled = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
    # As torchrun does: the OpenMP pools of several ranks would fight for the cores.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(recipe.launch.num_threads or 1)}
    if multiprocessing.get_start_method(allow_none=True) not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method("spawn", force=True)  # joblib's loky sets one that new processes do not know
    agent = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    try:
        with environment({**threads, "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}):
            agent.disabled = True  # it repeats in its own words what the ranks have logged
            yield
    finally:
        agent.disabled = False
        for number, handler in handled.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
