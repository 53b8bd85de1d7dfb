"""What surrounds Hydra's main function and each of its jobs: signals, and the variables that ranks are found by."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from recipe_ckpt import preemption
from recipe_ckpt.errors import CheckpointError, ConfigError, can_be_mended
from recipe_ckpt.preemption import StopRequest
from recipe_ckpt.rank_env import describe_slurm_ranks


@contextmanager
def relayed_signals() -> Iterator[None]:
    """Surround Hydra's main function: jobs in processes of this one (joblib's) get its signals, and it waits for them."""
    with preemption.watch(_Relay()):
        yield


@contextmanager
def job() -> Iterator[None]:
    """Surround one job: what it finds in the environment, and how a signal to it ends the sweep that it is part of.

    Within, the environment has the variables by which torch finds the ranks of an srun step, if this is one of them. A
    signal ends the sweep with its exit code, also when it came too late for the job that ran.
    """
    with environment(describe_slurm_ranks()):
        if not is_sweep():
            yield
            return
        with _own_process_group(), preemption.watch() as stop:
            try:
                yield
            finally:
                if stop.is_set:
                    stop.leave()


def ends_process(error: BaseException, *, in_sweep: bool) -> bool:
    """Say whether what a job raised ends the process with one line on stderr; everything else is left to Hydra.

    In a sweep a failure is one job's alone, but what is wrong with the configuration is so for all of them.
    """
    return isinstance(error, CheckpointError) and can_be_mended(error) and (isinstance(error, ConfigError) or not in_sweep)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within, these variables are set; after it, the environment has what it had for them before."""
    former = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in former.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class _Relay(StopRequest):
    """Hands signals on to the children that run a job. Without any it ends them all, and leaves the signal to others."""

    def note(self, number: int, frame: FrameType | None = None) -> None:
        children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        jobs = [pid for pid in children if _leads_process_group(pid)]
        for pid in jobs:
            send_signal(pid, number)
        if not jobs:
            for pid in children:
                send_signal(pid, signal.SIGKILL)
            former = self._former[number]
            signal.signal(number, signal.SIG_DFL if former is None else former)
            os.kill(os.getpid(), number)


@contextmanager
def _own_process_group() -> Iterator[None]:
    """Within, a process that `multiprocessing` has started gets Ctrl-C from its parent only, and can be known by that."""
    if multiprocessing.parent_process() is None:
        yield
        return
    former = os.getpgrp()
    os.setpgid(0, 0)
    try:
        yield
    finally:
        with suppress(OSError):  # the former group may have ended
            os.setpgid(0, former)


def _leads_process_group(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


def is_sweep() -> bool:
    """Say whether this process runs a job of a sweep. Without Hydra it does not."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
