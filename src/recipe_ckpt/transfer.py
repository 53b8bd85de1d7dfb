"""Many files at once, over a connection that may fail for a while."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_when_event_set, wait_random_exponential
from tenacity.nap import sleep_using_event

from recipe_ckpt import layout
from recipe_ckpt.errors import DamagedCheckpointError, RemoteUnreachableError
from recipe_ckpt.manifest import FileEntry, Manifest
from recipe_ckpt.remote import OnBytes, Remote
from recipe_ckpt.storage import Storage
from recipe_ckpt.survey import Commit, read_commit, read_needed

logger = logging.getLogger(__name__)

PARALLEL_FILES = 8
_TELL_SECS = 5.0


@dataclass(frozen=True, slots=True)
class RetryPace:
    """When to try again: soon, then less often; after `attempts` the failure is told, and uploads rest for `rest_secs`."""

    first_secs: float = 0.2
    longest_secs: float = 20.0
    attempts: int = 8
    rest_secs: float = 20.0


def build_retrying(pace: RetryPace, ended: threading.Event) -> Retrying:
    """Return a caller that repeats, with jitter, what may pass; not what was refused, and not once `ended` is set."""
    return Retrying(
        retry=retry_if_exception_type(RemoteUnreachableError),
        wait=wait_random_exponential(multiplier=pace.first_secs, max=pace.longest_secs),
        stop=stop_after_attempt(pace.attempts) | stop_when_event_set(ended),
        sleep=sleep_using_event(ended),
        reraise=True,
    )


def fetch(
    remote: Remote,
    name: str,
    directory: str,
    storage: Storage,
    ended: threading.Event,
    on_bytes: OnBytes | None = None,
    *,
    ranks: Collection[int] = (0,),
    of: int = 1,
) -> Manifest | None:
    """Download a step into a new local directory, its manifest last; return that, None for a foreign checkpoint.

    Where nodes sent the parts of their own disks, and one of them had just these `ranks` `of` all, its part is enough.
    Durable on return; every byte of ours was compared with its digest. Not tried again once `ended` is set.

    Raises:
        DamagedCheckpointError: what arrived is not what was saved.
    """
    storage.make_dirs(directory)
    try:
        commit: Commit | None = read_commit(remote, name)
    except FileNotFoundError:
        commit = None
    if commit is None:
        entries = [FileEntry(path, size, "", "", 0) for path, size in remote.list_files(name).items()]
    else:
        entries = list(read_needed(remote, commit, ranks, of).entries)
    for entry in entries:
        if os.path.isabs(entry.path) or ".." in entry.path.split("/"):
            raise DamagedCheckpointError(f"{remote.url}/{name}: the file name {entry.path!r} leads out of it", path=name)
    for folder in sorted({os.path.dirname(entry.path) for entry in entries} - {""}):
        storage.make_dirs(os.path.join(directory, folder))

    def get_once(entry: FileEntry) -> tuple[int, str]:
        target = os.path.join(directory, entry.path)
        if storage.exists(target):  # an attempt that was cut off
            storage.remove_file(target)
        return remote.get_file(f"{name}/{entry.path}", target, on_bytes)

    def get(entry: FileEntry) -> None:
        found = build_retrying(RetryPace(), ended)(get_once, entry)
        if commit is not None and found != (entry.size_bytes, entry.digest):
            raise DamagedCheckpointError(
                f"{remote.url}/{name}/{entry.path}: {found[0]} bytes arrived that are not the {entry.size_bytes} bytes that"
                " were saved",
                path=entry.path,
            )

    try:
        run_parallel(get, sorted(entries, key=lambda entry: -entry.size_bytes))
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{remote.url}/{name}: lacks a file: {error}", path=name) from error
    for folder in sorted({os.path.dirname(entry.path) for entry in entries}):
        storage.sync_dir(os.path.join(directory, folder))
    if commit is None:
        return None
    for record in (layout.FILE_TABLE, layout.MANIFEST):
        data = remote.read(f"{name}/{record}")
        storage.write_file(os.path.join(directory, record), [data], name=record, rank=0)
    storage.sync_dir(directory)
    if read_commit(storage, directory).digest != commit.digest:
        raise DamagedCheckpointError(f"{remote.url}/{name}: was replaced while it was downloaded", path=name)
    return commit.manifest


def run_parallel(work: Callable[[FileEntry], None], entries: Iterable[FileEntry]) -> None:
    """Do the work for several files at once; the first failure ends it, when what has begun has ended."""
    with ThreadPoolExecutor(PARALLEL_FILES, "recipe_ckpt mirror") as pool:
        futures = [pool.submit(work, entry) for entry in entries]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class Pull:
    """A download in a thread of its own, so that the ranks that wait for it hear from its rank all the while."""

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        self.size_bytes = 0
        """How much has come so far."""
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_done = threading.Event()  # a join() that Ctrl-C interrupts takes the thread for ended
        self._thread = threading.Thread(target=self._run, args=(work,), name="recipe-ckpt-pull", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poll(self, within_secs: float) -> bool:
        """Say whether it has ended; what it failed of is raised.

        Raises:
            DamagedCheckpointError, LineageError: what lies there is not whole.
            RemoteError: it could not be downloaded.
            ConfigError: the disk here did not take it.
        """
        if not self._is_done.wait(within_secs):
            return False
        if self._error is not None:
            raise self._error
        return True

    def join(self) -> None:
        if self._thread.ident is not None:
            self._is_done.wait()
            self._thread.join()

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self.size_bytes += size_bytes

    def _run(self, work: Callable[[Callable[[int], None]], None]) -> None:
        try:
            work(self._count)
        except BaseException as error:  # noqa: BLE001 (it surfaces in `poll`)
            self._error = error
        finally:
            self._is_done.set()


class PullProgress:
    """Tells how a download goes, on however many nodes; on rank 0."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._told_at = time.monotonic()

    def tell(self, size_bytes: int, *, is_done: bool) -> None:
        if is_done:
            logger.info("downloaded %s: %.1f MB", self._url, size_bytes / 1e6)
        elif time.monotonic() - self._told_at >= _TELL_SECS:
            self._told_at = time.monotonic()
            logger.info("downloading %s: %.1f MB so far", self._url, size_bytes / 1e6)
