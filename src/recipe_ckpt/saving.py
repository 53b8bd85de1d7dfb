"""Saves from their capture to their commit, in the caller's thread or in one of their own."""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipe_ckpt.captured import Captured
from recipe_ckpt.contents import RunContents
from recipe_ckpt.coordination import Coordinator
from recipe_ckpt.errors import CheckpointError, SaveFailedError
from recipe_ckpt.manifest import to_plain
from recipe_ckpt.node_commit import NodeCommit
from recipe_ckpt.node_session import NodeSession
from recipe_ckpt.nodes import Nodes
from recipe_ckpt.policies import SavePolicy
from recipe_ckpt.retention import Retention
from recipe_ckpt.sealing import Staging
from recipe_ckpt.session import RootSession
from recipe_ckpt.storage import Storage

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save took on this rank. `stall_secs` is what the training loop waited for it in all.

    `wait` is for the save before, `stage` for the capture, `write` for this rank's files with their fsync, `commit` for the
    other ranks and for rank 0's commit.
    """

    step: int
    size_bytes: int
    wait_secs: float
    stage_secs: float
    write_secs: float
    commit_secs: float
    is_async: bool

    @property
    def stall_secs(self) -> float:
        blocked = self.wait_secs + self.stage_secs
        return blocked if self.is_async else blocked + self.write_secs + self.commit_secs

    def describe(self) -> str:
        how = ", in the background" if self.is_async else ""
        return (
            f"saved step {self.step}: {self.size_bytes / 1e6:.1f} MB; waited {self.wait_secs:.3f} s, staged"
            f" {self.stage_secs:.3f} s, wrote {self.write_secs:.3f} s, committed {self.commit_secs:.3f} s{how}"
        )


class SaveInFlight:
    """A save that was started; its outcome is asked for once."""

    def __init__(self, step: int, work: Callable[[], SaveReport]) -> None:
        self.step = step
        self._work = work
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, *, in_background: bool) -> None:
        if not in_background:
            self._run()
            return
        # Not a daemon: a process that ends without close() still ends its save.
        self._thread = threading.Thread(target=self._run, name="recipe-ckpt-save")
        self._thread.start()

    def wait(self) -> SaveReport:
        """Return the report when the save is committed on all ranks, or raise what it failed of."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def _run(self) -> None:
        try:
            self._report = self._work()
        except BaseException as error:  # noqa: BLE001 (it surfaces in `wait`)
            self._error = error


class Stopwatch:
    """Seconds since it was made, or last read."""

    def __init__(self) -> None:
        self._mark = time.monotonic()

    def read(self) -> float:
        now = time.monotonic()
        took, self._mark = now - self._mark, now
        return took


class Saver:
    """Makes this rank's part of the saves of one run, one at a time.

    `session` is rank 0's, `node` that of each node's leader; elsewhere they are None. A save goes: capture; write and fsync;
    every rank's outcome to rank 0; commit there; rank 0's outcome to every rank. (On several nodes: see `NodeCommit`.)
    """

    def __init__(
        self,
        coordinator: Coordinator,
        storage: Storage,
        nodes: Nodes,
        root: str,
        contents: RunContents,
        policy: SavePolicy,
        retention: Retention,
        node: NodeSession | None,
        session: RootSession | None,
        token: str,
    ) -> None:
        self.last_save: SaveReport | None = None
        self._coordinator = coordinator
        self._storage = storage
        self._nodes = nodes
        self._node = node
        self._root = root
        self._contents = contents
        self._policy = policy
        self._retention = retention
        self._session = session
        self._token = token
        self._saves = 0
        self._in_flight: SaveInFlight | None = None
        self._failure: SaveFailedError | None = None
        self._has_warned_of_metric = False
        self._staging_problem: str | None = None

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `CheckpointHandler.save_checkpoint`."""
        watch = Stopwatch()
        self.wait()
        self._warn_of_unknown_metric(metrics)
        in_background = self._can_save_in_background()
        waited = watch.read()
        staging = self._name_staging(step)
        captured = self._capture(step, metrics, in_background)
        staged = watch.read()

        def work() -> SaveReport:
            watch.read()
            size_bytes, write_secs = self._write_and_commit(staging, captured)
            commit_secs = watch.read() - write_secs
            report = SaveReport(step, size_bytes, waited, staged, write_secs, commit_secs, in_background)
            self._log(logging.INFO, report.describe())
            return report

        self._in_flight = SaveInFlight(step, work)
        self._in_flight.start(in_background=in_background)
        if not in_background:
            self.wait()

    def wait(self) -> None:
        """Return when the save in flight is committed, if there is one; its failure surfaces here, once."""
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        self._failure = None
        try:
            self.last_save = save.wait()
        except Exception as error:
            if isinstance(error, CheckpointError) and error.is_final:
                raise
            self._fail(save.step, error)  # whatever an engine raises is a failed save

    def finish(self) -> None:
        """Wait for the last save; if it failed and that was tolerated, raise it: no later one makes up for it."""
        self.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _can_save_in_background(self) -> bool:
        """Say whether this rank can copy its state; one that can't saves in the blocking way, whatever the others do."""
        if not self._policy.is_async:
            return False
        try:
            problem = self._contents.find_staging_problem(self._policy.contents)
        except Exception as error:  # noqa: BLE001 (the capture raises it again, where the other ranks hear of it)
            problem = f"{type(error).__name__}: {error}"
        if problem is not None and problem != self._staging_problem:
            logger.warning("rank %d saves in the blocking way: %s", self._coordinator.rank, problem)
        self._staging_problem = problem
        return problem is None

    def _capture(self, step: int, metrics: Mapping[str, float], in_background: bool) -> Captured | Exception:
        """Take this rank's state; a failure is kept, so that the other ranks hear of it where they wait for this one."""
        try:
            facts = self._describe(metrics)
            overlap = self._policy.overlap
            captured = self._contents.capture(step, self._policy.contents, stage=in_background, overlap=overlap)
            captured.facts = facts
            return captured
        except Exception as error:  # noqa: BLE001 (raised in `write`)
            return error

    def _name_staging(self, step: int) -> Staging:
        """Name the directory of this save; all ranks count their saves alike, so they need not ask."""
        self._saves += 1
        return Staging.of_save(self._root, step, self._token, self._saves)

    def _write_and_commit(self, staging: Staging, captured: Captured | Exception) -> tuple[int, float]:
        """Write on this rank, and commit on rank 0 when all have; return the checkpoint's bytes, and the writing's time."""
        watch = Stopwatch()
        write_secs = 0.0

        def write() -> dict[str, Any]:
            nonlocal write_secs
            if isinstance(captured, Exception):
                raise captured
            self._begin(staging)
            part = captured.write(staging.path, self._storage)
            write_secs = watch.read()
            return part

        try:
            size_bytes = self._commit(staging, captured, write)
        finally:
            if isinstance(captured, Captured):
                captured.release()
        return size_bytes, write_secs

    def _begin(self, staging: Staging) -> None:
        if self._session is not None:
            self._session.begin(staging)
        elif self._node is not None:
            self._node.begin(staging)

    def _commit(self, staging: Staging, captured: Captured | Exception, write: Callable[[], Any]) -> int:
        if self._nodes.is_one:
            return self._commit_on_one(staging, captured, write)
        commit = NodeCommit(self._coordinator, self._nodes, self._node, self._session, self._storage, staging, captured)
        return commit.run(write)

    def _commit_on_one(self, staging: Staging, captured: Captured | Exception, write: Callable[[], Any]) -> int:
        def commit(parts: list[Any]) -> int:
            assert isinstance(captured, Captured)
            assert self._session is not None
            entries = captured.finish(staging.path, self._storage, parts)
            self._session.commit(staging, entries, captured.facts)
            return sum(entry.size_bytes for entry in entries)

        try:
            size_bytes = int(self._coordinator.together(write, commit, of=os.path.basename(staging.path)))
        except BaseException:
            if self._node is not None:
                self._node.store.abandon(staging)
            raise
        if self._session is not None and (pruned := self._session.prune()):
            logger.info("pruned the steps %s", pruned)
        return size_bytes

    def _describe(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            "world_size": self._coordinator.world_size,
            "dp_size": self._contents.dp_size,
            "contents": tuple(self._policy.contents),
            "data": self._contents.describe_data(),
            "metrics": to_plain({name: float(value) for name, value in metrics.items()}),  # a loss may be NaN
            "versions": _list_versions(),
        }

    def _fail(self, step: int, error: Exception) -> None:
        message = f"step {step}: not saved to {self._root}: {type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in _FULL:
            message += ". What was saved before is intact; make room there, then start again"
        failure = SaveFailedError(message, step=step, path=self._root)
        failure.__cause__ = error
        if self._policy.on_failure == "raise":
            raise failure
        self._failure = failure
        self._log(logging.ERROR, f"{message}; tolerated by checkpoint.on_save_failure=warn")

    def _warn_of_unknown_metric(self, metrics: Mapping[str, float]) -> None:
        """Say once that a save has no metric by which it could be among the best: a typing error, or not evaluated yet."""
        wanted = self._retention.best_metric
        if self._retention.best is None or wanted in metrics or self._has_warned_of_metric:
            return
        self._has_warned_of_metric = True
        known = sorted(metrics)
        self._log(logging.WARNING, f"checkpoint.best_metric: {wanted!r} is not among this save's {known}: it is never best")

    def _log(self, level: int, message: str) -> None:
        if self._coordinator.rank == 0:
            logger.log(level, message)


def _list_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("recipe-ckpt", "torch", "torchdata"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if revision := _find_git_revision():
        versions["git"] = revision
    return versions


@functools.cache
def _find_git_revision() -> str | None:
    """Return the commit of the code that runs, with `-dirty` if its files were changed; None if that is unknown.

    Asked are the started script, the working directory, and this package, as far as they are not the interpreter's own.
    """
    main = getattr(sys.modules["__main__"], "__file__", None) or sys.prefix
    folders = [os.path.dirname(os.path.abspath(main)), os.getcwd(), os.path.dirname(__file__)]
    return next(filter(None, (_describe_revision(it) for it in folders if not it.startswith(sys.prefix))), None)


def _describe_revision(folder: str) -> str | None:
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
