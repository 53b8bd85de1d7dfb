"""Sends committed steps to the mirror, beside training: a queue, its retries, and what happens when they are used up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from recipe_ckpt.branches import Claim
from recipe_ckpt.errors import DamagedCheckpointError, RemoteUnreachableError, UploadFailedError, to_clause
from recipe_ckpt.manifest import BranchEntry
from recipe_ckpt.mirror import Mirror
from recipe_ckpt.policies import MirrorPolicy
from recipe_ckpt.retention import Retention
from recipe_ckpt.step_sender import StepGoneError, StepSender, StepWaitsError
from recipe_ckpt.transfer import RetryPace, build_retrying

logger = logging.getLogger(__name__)

_POLL_SECS = 0.1
_FIRST_WAIT_SECS = 0.2
_LONGEST_WAIT_SECS = 5.0
_TELL_WAIT_SECS = 60.0


@dataclass(frozen=True, slots=True)
class UploadReport:
    """What an upload took; `sent_bytes` are those that were not there already."""

    step: int
    sent_bytes: int
    upload_secs: float
    url: str
    what: str = "step"

    def describe(self) -> str:
        rate = self.sent_bytes / 1e6 / max(self.upload_secs, 1e-9)
        size = f"{self.sent_bytes / 1e6:.1f} MB in {self.upload_secs:.2f} s ({rate:.0f} MB/s)"
        return f"mirrored {self.what} {self.step}: uploaded {size} to {self.url}"


@dataclass(slots=True)
class _Wait:
    """A step that other nodes have to send their parts of first; `sent_bytes` went from here."""

    begin: float
    again_at: float = 0.0
    pause_secs: float = _FIRST_WAIT_SECS
    sent_bytes: int = 0
    reason: str = ""
    is_told: bool = False


class Uploader:
    """One thread that keeps the mirror up with the root, the newest step first. Lives on the node's leader.

    Args:
        claim: gives what this run may publish at the moment; None on nodes but rank 0's, which send their parts.
        retention: what stays on the mirror; `policy.max_to_keep` is its number.
        list_pins: gives the steps that are never deleted.
    """

    def __init__(
        self,
        mirror: Mirror,
        sender: StepSender,
        policy: MirrorPolicy,
        retention: Retention,
        *,
        claim: Callable[[], Claim] | None,
        list_pins: Callable[[], Collection[int]],
        pace: RetryPace | None = None,
    ) -> None:
        self.last_upload: UploadReport | None = None
        self._mirror = mirror
        self._sender = sender
        self._policy = policy
        self._retention = retention
        self._claim = claim
        self._list_pins = list_pins
        self._pace = pace or RetryPace()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._pending: dict[int, BranchEntry] = {}
        self._waits: dict[int, _Wait] = {}
        self._current: BranchEntry | None = None
        self._failure: Exception | None = None
        self._is_told = False
        self._has_newer = False
        self._wait_ends_at: float | None = None
        self._on_bytes: Callable[[int], object] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="recipe-ckpt-mirror", daemon=True)

    @property
    def _is_quiet(self) -> bool | None:
        """Whether no progress bar is shown; None: only on a terminal. Rank 0's speaks for all nodes."""
        return None if self._claim is not None else True

    @property
    def pending(self) -> list[int]:
        """Steps that the mirror does not have yet, the newest first."""
        with self._changed:
            return [entry.step for entry in self._order()]

    def start(self, entries: Iterable[BranchEntry]) -> None:
        """Begin with the committed steps that the mirror lacks."""
        self._pending = {entry.step: entry for entry in entries}
        if self._pending:
            logger.info("%s: lacks the steps %s, which are sent now", self._mirror.url, self.pending)
        self._thread.start()

    def add(self, entry: BranchEntry) -> None:
        """Queue a step that was just committed."""
        with self._changed:
            self._pending[entry.step] = entry
            self._waits.pop(entry.step, None)
            self._has_newer = True
            self._wait_ends_at = None
            self._changed.notify_all()

    def let_go(self, doomed: Sequence[int]) -> list[int]:
        """Of the steps that retention would delete, return those that may be: sent, or given up to bound the lag."""
        with self._changed:
            waiting = [step for step in doomed if step in self._pending]
            current = self._current.step if self._current else None
            superseded = [step for step in waiting if step not in (current, self._order()[0].step)]
            dropped = superseded[: max(len(self._pending) - self._policy.max_pending, 0)]
            for step in dropped:
                del self._pending[step]
            kept = set(waiting) - set(dropped)
        if dropped:
            logger.warning(
                "%s: the steps %s never reach it: uploads are more than checkpoint.max_pending_uploads=%d behind, and newer"
                " checkpoints wait",
                self._mirror.url,
                dropped,
                self._policy.max_pending,
            )
        return [step for step in doomed if step not in kept]

    def raise_failure(self) -> None:
        """Raise what uploads failed of, if `on_upload_failure` is `raise`."""
        with self._changed:
            failure = self._failure
        if failure is not None and self._policy.on_failure == "raise":
            raise UploadFailedError(
                f"{self._mirror.url}: the steps {self.pending} could not be uploaded: {to_clause(failure)}. They are whole on"
                " the local disk; mend the mirror and start again, or write checkpoint.on_upload_failure=warn",
                path=self._mirror.url,
            ) from failure

    def drain(self, within_secs: float, should_stop: Callable[[], bool]) -> None:
        """Wait until the mirror has everything, with a progress bar; or it refuses for good, or the time is up.

        The time begins with the first call after a save: who waits twice for the same steps waits no longer.
        """
        deadline = self._wait_ends_at = self._wait_ends_at or time.monotonic() + within_secs
        steps = self.pending
        if not steps or time.monotonic() >= deadline:
            return
        total = sum(self._sender.measure(entry) for entry in self._list_waiting())
        logger.info("waiting for the steps %s (%.1f MB) to reach %s", steps, total / 1e6, self._mirror.url)
        with tqdm(total=total, unit="B", unit_scale=True, desc="uploading", disable=self._is_quiet) as bar:
            self._on_bytes = lambda count: bar.update(count)
            with self._changed:
                while self._pending and not (self._is_hopeless() or should_stop() or time.monotonic() > deadline):
                    self._changed.wait(_POLL_SECS)
            self._on_bytes = lambda _: None

    def close(self) -> None:
        """Stop, and say what is not on the mirror."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._mirror.remote.close()
        if self._thread.is_alive():
            self._thread.join()
        if steps := self.pending:
            reasons = [f"step {step}: {self._waits[step].reason}" for step in steps if step in self._waits]
            cause = to_clause(self._failure) if self._failure else "; ".join(reasons)
            cause = f" ({cause})" if cause else ""
            self._log(
                f"{self._mirror.url}: the steps {steps} are NOT there{cause}. They are whole on the local disk; the next"
                " start sends them"
            )

    def _is_hopeless(self) -> bool:
        return self._failure is not None and not isinstance(self._failure, RemoteUnreachableError)

    def _order(self) -> list[BranchEntry]:
        return sorted(self._pending.values(), key=lambda entry: -entry.sequence)

    # --- the thread

    def _run(self) -> None:
        while (entry := self._take()) is not None:
            try:
                self._send(entry)
                self._settle(entry, None)
            except StepWaitsError as error:
                self._postpone(entry, error)
            except StepGoneError:
                self._settle(entry, None)
            except DamagedCheckpointError as error:
                logger.warning("%s: step %d is not sent: it is damaged here: %s", self._mirror.url, entry.step, error)
                self._settle(entry, None)
            except Exception as error:  # noqa: BLE001 (it is told by `_settle`, and raised by `raise_failure`)
                self._settle(entry, error)

    def _take(self) -> BranchEntry | None:
        """Return the newest step that can be sent; after a failure rest first, unless a newer step comes."""
        with self._changed:
            if self._failure is not None and not self._closing.is_set():
                self._changed.wait_for(lambda: self._has_newer or self._closing.is_set(), self._pace.rest_secs)
            self._has_newer = False
            while not self._closing.is_set():
                ready_in = {entry.step: self._find_pause(entry.step) for entry in self._order()}
                self._current = next((entry for entry in self._order() if not ready_in[entry.step]), None)
                if self._current is not None:
                    return self._current
                self._changed.wait(min(ready_in.values(), default=None))
            self._current = None
            return None

    def _find_pause(self, step: int) -> float:
        wait = self._waits.get(step)
        return max(wait.again_at - time.monotonic(), 0.0) if wait else 0.0

    def _send(self, entry: BranchEntry) -> None:
        pinned = self._list_pins()
        retrying = build_retrying(self._pace, self._closing)
        waiting = self._list_waiting()
        if retrying(self._mirror.wants, entry, waiting, self._retention, pinned=pinned):
            begin = time.monotonic()
            send = self._sender.send_part if self._claim is None else partial(self._sender.send, claim=self._claim())
            self._report(entry, retrying(send, entry, on_bytes=self._count), begin)
        if self._claim is not None:
            steps = {other.step for other in waiting if other != entry}
            if deleted := self._mirror.prune(self._retention, steps, pinned=pinned):
                logger.info("%s: pruned the steps %s", self._mirror.url, deleted)

    def _count(self, size_bytes: int) -> None:
        self._on_bytes(size_bytes)

    def _report(self, entry: BranchEntry, sent_bytes: int, begin: float) -> None:
        if (wait := self._waits.get(entry.step)) is not None:
            sent_bytes, begin = sent_bytes + wait.sent_bytes, wait.begin
        what = "step" if self._claim is not None else "this node's part of step"
        self.last_upload = UploadReport(entry.step, sent_bytes, time.monotonic() - begin, self._mirror.url, what)
        logger.info("%s", self.last_upload.describe())

    def _postpone(self, entry: BranchEntry, error: StepWaitsError) -> None:
        """Look again later, less and less often; others go first."""
        now = time.monotonic()
        with self._changed:
            self._current = None
            if self._pending.get(entry.step) != entry:
                return
            wait = self._waits.setdefault(entry.step, _Wait(now))
            wait.sent_bytes += error.sent_bytes
            wait.reason = str(error)
            wait.again_at = now + wait.pause_secs
            wait.pause_secs = min(2 * wait.pause_secs, _LONGEST_WAIT_SECS)
            is_told, wait.is_told = wait.is_told, wait.is_told or now - wait.begin > _TELL_WAIT_SECS
        if wait.is_told and not is_told:
            self._log(f"{self._mirror.url}: step {entry.step} waits: {wait.reason}")

    def _list_waiting(self) -> list[BranchEntry]:
        with self._changed:
            return self._order()

    def _settle(self, entry: BranchEntry, error: Exception | None) -> None:
        with self._changed:
            self._current = None
            if error is None and self._pending.get(entry.step) == entry:
                del self._pending[entry.step]
                self._waits.pop(entry.step, None)
            if error is None or not self._closing.is_set():  # the end cuts calls off: no fault of the server
                self._failure = error
            self._changed.notify_all()
        if error is None:
            if self._is_told:
                logger.info("%s: works again; the steps %s wait", self._mirror.url, self.pending)
            self._is_told = False
        elif not self._is_told and not self._closing.is_set():
            self._is_told = True  # once an outage
            self._log(
                f"{self._mirror.url}: the steps {self.pending} wait: {to_clause(error)}. It is tried again until it works"
            )

    def _log(self, message: str) -> None:
        if self._policy.on_failure != "ignore":
            logger.error("%s", message)
