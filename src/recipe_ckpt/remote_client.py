"""A remote file system whose calls end, whatever its server does.

The libraries can't be interrupted: some wait for good for a server that accepts and never answers. So a process of its own
calls them (`remote_worker`), and is killed when it has given no sign of life for a while.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import recipe_ckpt
from recipe_ckpt.errors import RemoteRefusedError, RemoteUnreachableError
from recipe_ckpt.remote import OnBytes
from recipe_ckpt.remote_url import parse_remote_url
from recipe_ckpt.storage import DirEntry

_REAP_SECS = 1.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a call may be silent: no answer, and no bytes moved."""

    answer_secs: float = 60.0


class RemoteClient:
    """A `Remote` in a process of its own, started by the first call and again by the first one after it ended.

    A call that is silent for `deadlines.answer_secs` has the process killed; it and every other call in it raise
    RemoteUnreachableError. Use it from the process that made it; several of its threads may.
    """

    def __init__(self, url: str, *, deadlines: Deadlines = Deadlines()) -> None:
        parsed = parse_remote_url(url)
        self.url = str(parsed)
        self.can_rename = parsed.can_rename
        self._deadlines = deadlines
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_closed = False

    def probe(self) -> None:
        self._call("probe")

    def list_dir(self, path: str) -> list[DirEntry]:
        return [DirEntry(*entry) for entry in self._call("list_dir", path)]

    def list_files(self, path: str) -> dict[str, int]:
        found: dict[str, int] = self._call("list_files", path)
        return found

    def read(self, path: str) -> bytes:
        return base64.b64decode(self._call("read", path))

    def write(self, path: str, data: bytes) -> None:
        self._call("write", path, base64.b64encode(data).decode())

    def put_file(self, local_path: str, path: str, on_bytes: OnBytes | None = None) -> None:
        self._call("put_file", os.path.abspath(local_path), path, on_bytes=on_bytes)

    def get_file(self, path: str, local_path: str, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        size_bytes, digest = self._call("get_file", path, os.path.abspath(local_path), on_bytes=on_bytes)
        return size_bytes, digest

    def rename(self, source: str, target: str) -> None:
        self._call("rename", source, target)

    def remove_tree(self, path: str) -> None:
        self._call("remove_tree", path)

    def close(self) -> None:
        """End the process; calls that are under way fail. What they uploaded so far is not there under its name."""
        with self._lock:
            self._is_closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.end("the client was closed")

    def _call(self, operation: str, *arguments: str, on_bytes: OnBytes | None = None) -> Any:
        return self._find_worker().call(operation, arguments, on_bytes, self._deadlines.answer_secs)

    def _find_worker(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise RemoteUnreachableError(f"{self.url}: this client was closed. Make another one.", path=self.url)
            if self._worker is None or self._worker.has_ended:
                self._worker = _Worker(self.url)
            return self._worker


class _Worker:
    """One process, from its start to its end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count()
        self._state = threading.Lock()
        self._calls: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._reason: str | None = None
        self._sending = threading.Lock()
        self._process = _start_process(url)
        self._reader = threading.Thread(target=self._read_answers, name="recipe_ckpt remote", daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        return self._reason is not None or self._process.poll() is not None

    def call(self, operation: str, arguments: Sequence[str], on_bytes: OnBytes | None, answer_secs: float) -> Any:
        number = next(self._numbers)
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._state:
            self._calls[number] = answers
        try:
            self._send({"id": number, "call": operation, "with": arguments}, answer_secs)
            answer = _follow(answers, on_bytes, answer_secs)
        except (queue.Empty, TimeoutError):
            answer = {"gone": self.end(f"{operation} was silent for {answer_secs:g} s")}
        except BrokenPipeError:
            answer = {"gone": self.end("its process ended by itself")}
        finally:
            with self._state:
                del self._calls[number]
        return self._take(operation, answer)

    def end(self, reason: str) -> str:
        """Kill the process and fail its calls; return the reason of whoever came first."""
        with self._state:
            if self._reason is not None:
                return self._reason
            self._reason = reason
            for answers in self._calls.values():
                answers.put({"gone": reason})
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # in a system call that nothing interrupts: it is reaped later
            self._process.wait(_REAP_SECS)
        with self._sending:
            _pipe(self._process.stdin).close()
        if threading.current_thread() is not self._reader:
            self._reader.join(_REAP_SECS)
        return reason

    def _take(self, operation: str, answer: dict[str, Any]) -> Any:
        if "value" in answer:
            return answer["value"]
        if reason := answer.get("gone"):
            raise RemoteUnreachableError(
                f"{self._url}: no answer to {operation}: {reason}. Check that the server is up; later tries may succeed.",
                path=self._url,
            )
        raise _rebuild(operation, answer)

    def _read_answers(self) -> None:
        answers = _pipe(self._process.stdout)
        for line in answers:
            message = json.loads(line)
            with self._state:
                if (waiting := self._calls.get(message["id"])) is not None:
                    waiting.put(message)
        answers.close()
        self.end("its process ended by itself")

    def _send(self, request: dict[str, Any], within_secs: float) -> None:
        """Write a line, unless the process has stopped to read."""
        until = time.monotonic() + within_secs
        line = memoryview(json.dumps(request).encode() + b"\n")
        if not self._sending.acquire(timeout=within_secs):
            raise TimeoutError
        try:
            if self.has_ended:
                raise BrokenPipeError
            descriptor = _pipe(self._process.stdin).fileno()
            while line:
                if not select.select([], [descriptor], [], max(0.0, until - time.monotonic()))[1]:
                    raise TimeoutError
                with suppress(BlockingIOError):
                    line = line[os.write(descriptor, line) :]
        finally:
            self._sending.release()


def _follow(answers: queue.SimpleQueue[dict[str, Any]], on_bytes: OnBytes | None, answer_secs: float) -> dict[str, Any]:
    """Tell of the bytes until the call has ended; return how."""
    while True:
        answer = answers.get(timeout=answer_secs)
        if on_bytes is not None and answer.get("moved"):
            on_bytes(answer["moved"])
        if answer.keys() - {"id", "moved"}:
            return answer


def _start_process(url: str) -> subprocess.Popen[bytes]:
    """Start it away from the terminal's signals, with the modules that this process would import."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(recipe_ckpt.__file__)))
    paths = [os.path.abspath(path) for path in sys.path if path]  # not the working directory
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "recipe_ckpt.remote_worker", url, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths if home in paths else [*paths, home])},
    )
    os.set_blocking(_pipe(process.stdin).fileno(), False)
    return process


def _pipe(pipe: Any) -> Any:
    assert pipe is not None
    return pipe


def _rebuild(operation: str, answer: dict[str, Any]) -> Exception:
    """Make the worker's exception again."""
    for kind in (RemoteUnreachableError, RemoteRefusedError):
        if answer["error"] == kind.__name__:
            return kind(answer["message"], path=answer["path"])
    if answer.get("errno") is not None:
        return OSError(answer["errno"], answer["message"], answer["path"])
    return RuntimeError(f"{operation}: {answer['error']}: {answer['message']}")
