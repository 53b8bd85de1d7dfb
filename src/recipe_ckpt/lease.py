"""One writer per root.

The lease is a file that says who writes: host, boot, pid and its start time, launch, and a counter that the owner beats
every 10 s. A dead owner on this host is replaced at once, and so is an owner elsewhere of the same launch, which was
restarted here. Another owner elsewhere can't be looked at, so its counter is watched on our own clock; no two machines'
clocks are compared.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum

from recipe_ckpt import layout
from recipe_ckpt.errors import DamagedCheckpointError, LeaseHeldError
from recipe_ckpt.manifest import build_record, decode_json, encode_json
from recipe_ckpt.storage import Storage, read_boot_id

BEAT_SECS = 10.0
WATCH_SECS = 60.0
_POLL_SECS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lease.

    `pid_namespace` tells containers on one host apart, `pid_started` a pid that was used again, `root_id` (the directory's
    inode) a copied root from the one that its owner writes into.
    """

    token: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: str
    root_id: int
    launch_id: str
    beat: int

    @classmethod
    def of_this_process(cls, launch_id: str) -> Owner:
        pid = os.getpid()
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            boot_id=read_boot_id(),
            pid_namespace=_read_pid_namespace(),
            pid=pid,
            pid_started=read_pid_start(pid) or "",
            root_id=0,
            launch_id=launch_id,
            beat=0,
        )

    def name(self) -> str:
        return f"pid {self.pid} on {self.host} (launch {self.launch_id})"


class Standing(Enum):
    """What a starter may do about the lease that it found."""

    FREE = "free"
    HELD = "held"
    UNKNOWN = "unknown"


def judge(found: Owner, me: Owner, *, pid_start: str | None) -> Standing:
    """Decide about a lease; `pid_start` is when the process of that pid here was started, None if there is none."""
    is_here = (found.host, found.boot_id, found.pid_namespace) == (me.host, me.boot_id, me.pid_namespace)
    if is_here and found.pid_started:
        if pid_start != found.pid_started:
            return Standing.FREE
        return Standing.HELD if found.root_id == me.root_id else Standing.UNKNOWN
    has_rebooted = found.host == me.host and found.boot_id != me.boot_id
    return Standing.FREE if has_rebooted or found.launch_id == me.launch_id else Standing.UNKNOWN


class Lease:
    """The lease of one root, held from `acquire` to `release`."""

    def __init__(
        self,
        root: str,
        storage: Storage,
        launch_id: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = os.path.join(root, layout.LEASE)
        self._storage = storage
        self._me = Owner.of_this_process(launch_id)
        self._clock = clock
        self._sleep = sleep
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def token(self) -> str:
        return self._me.token

    def acquire(self) -> None:
        """Become the writer of the root, which exists.

        Raises:
            LeaseHeldError: another process lives and writes here; the message names it.
        """
        self._me = replace(self._me, root_id=self._storage.directory_id(os.path.dirname(self._path)))
        while not self._storage.create_exclusive(self._path, self._encode()):
            found = self._read_bytes()
            if found is not None and self._may_replace(self._decode(found)):
                self._remove(found)
        self._thread = threading.Thread(target=self._beat_until_released, name="recipe-ckpt-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseHeldError unless this process still holds the lease."""
        found = self._read()
        if found is None or found.token != self._me.token:
            by = found.name() if found else "somebody who removed the lease file"
            raise LeaseHeldError(
                f"{self._path}: taken over by {by} while this process was paused or cut off", path=self._path
            )

    def release(self) -> None:
        """Give the lease back; does nothing if it is not held."""
        if self._thread is None or self._me.pid != os.getpid():  # a forked child holds nothing
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        found = self._read()
        if found is not None and found.token == self._me.token:
            self._storage.remove_file(self._path)

    def _may_replace(self, found: Owner | None) -> bool:
        if found is None:
            return True
        standing = judge(found, self._me, pid_start=read_pid_start(found.pid))
        if standing is Standing.UNKNOWN:
            standing = self._watch(found)
        if standing is Standing.HELD:
            raise LeaseHeldError(
                f"{self._path}: {found.name()} writes into this root; allowed is one writer. Wait for its end, or choose"
                " another checkpoint.default_local_dir or trainer.experiment_name",
                path=self._path,
            )
        logger.info("taking over the lease of %s", found.name())
        return True

    def _watch(self, found: Owner) -> Standing:
        start = self._clock()
        while (waited := self._clock() - start) < WATCH_SECS:
            logger.info("%s may still write here; watching for %.0f s more", found.name(), WATCH_SECS - waited)
            self._sleep(_POLL_SECS)
            now = self._read()
            if now is None:
                return Standing.FREE
            if (now.token, now.beat) != (found.token, found.beat):
                return Standing.HELD
        return Standing.FREE

    def _remove(self, judged: bytes) -> None:
        """Remove exactly the lease that was judged: of several starters that judged the same one, one removes it."""
        with self._storage.lock_dir(os.path.dirname(self._path)):
            if self._read_bytes() == judged:
                self._storage.remove_file(self._path)

    def _beat_until_released(self) -> None:
        while not self._ended.wait(BEAT_SECS):
            try:
                self.check()
                self._me = replace(self._me, beat=self._me.beat + 1)
                self._storage.replace_file(self._path, self._encode())
            except LeaseHeldError as error:
                logger.error("%s; nothing more will be published", error)
                return
            except OSError as error:
                logger.warning("%s: the lease could not be renewed: %s", self._path, error)

    def _read(self) -> Owner | None:
        data = self._read_bytes()
        return None if data is None else self._decode(data)

    def _read_bytes(self) -> bytes | None:
        try:
            return self._storage.read(self._path)
        except FileNotFoundError:
            return None

    def _decode(self, data: bytes) -> Owner | None:
        try:
            return build_record(Owner, decode_json(data, self._path), self._path)
        except DamagedCheckpointError:
            logger.warning("%s: unreadable, taken as left over", self._path)
            return None

    def _encode(self) -> bytes:
        return encode_json(asdict(self._me))


def find_launch_id(environment: dict[str, str] | os._Environ[str] = os.environ) -> str:
    """Return what one launch and its restarts have in common: the scheduler's job, torchelastic's run, or this process.

    torchelastic's static rendezvous may export the word `none`.
    """
    if job := environment.get("SLURM_JOB_ID"):
        return f"slurm-{job}-{environment.get('SLURM_STEP_ID', '0')}"
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    return f"torchelastic-{run}" if run != "none" else f"process-{uuid.uuid4().hex[:12]}"


def read_pid_start(pid: int) -> str | None:
    """Return when a process was started, in the kernel's ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field, the command's name, may hold blanks and parentheses; the state after it tells a zombie.
            state, *rest = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]


def _read_pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
