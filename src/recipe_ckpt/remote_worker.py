"""The process that speaks to a remote file system for `RemoteClient`: `python -m recipe_ckpt.remote_worker URL PARENT_PID`.

Requests come as JSON lines on its stdin, answers go to its stdout, several calls at a time:

    {"id": 1, "call": "put_file", "with": ["/local/path", "path"]}
    {"id": 1, "moved": 8388608}                                      signs of life while bytes move
    {"id": 1, "moved": 512, "value": null}   or   {"id": 1, "error": "RemoteRefusedError", "message": ..., "path": ...}

Contents of files that are put or got don't pass through here. It ends when its stdin does, and when its parent is gone:
processes that the parent forked may hold the pipe open.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

from recipe_ckpt.errors import CheckpointError
from recipe_ckpt.remote_fsspec import FsspecRemote
from recipe_ckpt.storage import DirEntry

_REPORT_SECS = 0.2
_PARENT_SECS = 0.5
_CALLS_AT_ONCE = 256  # many more than the parent makes: a call that waits for a thread would look silent
_MOVES_BYTES = ("put_file", "get_file")


class _Channel:
    """What the parent reads. Libraries that print go to stderr instead."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]


class _Progress:
    """Adds up the bytes of one call, and tells them a few times in a second."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._untold = 0
        self._told_at = time.monotonic()

    def add(self, size_bytes: int) -> None:
        self._untold += size_bytes
        if time.monotonic() - self._told_at >= _REPORT_SECS:
            self._send(self.take())

    def take(self) -> int:
        """Return the bytes that nobody was told of yet."""
        untold, self._untold, self._told_at = self._untold, 0, time.monotonic()
        return untold


def main() -> None:
    url, parent = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel, remote = _Channel(), FsspecRemote(url)
    threading.Thread(target=_follow_parent, args=(parent,), daemon=True).start()
    threads = ThreadPoolExecutor(_CALLS_AT_ONCE)
    for line in sys.stdin.buffer:
        threads.submit(_serve, remote, channel, json.loads(line))
    os._exit(0)  # a call that hangs would keep the interpreter from ending


def _follow_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECS)
    os._exit(0)


def _serve(remote: FsspecRemote, channel: _Channel, request: dict[str, Any]) -> None:
    number, name, arguments = request["id"], request["call"], request["with"]
    progress = _Progress(lambda moved: channel.send({"id": number, "moved": moved}))
    try:
        if name == "write":
            arguments[1] = base64.b64decode(arguments[1])
        if name in _MOVES_BYTES:
            arguments.append(progress.add)
        value = getattr(remote, name)(*arguments)
        answer = {"moved": progress.take(), "value": _encode(value)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller in the parent raises it
        answer = _describe(error)
    channel.send({"id": number, **answer})


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [astuple(entry) if isinstance(entry, DirEntry) else entry for entry in value]
    return value


def _describe(error: Exception) -> dict[str, Any]:
    told = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, CheckpointError):
        return {**told, "path": error.path}
    if isinstance(error, OSError):
        return {**told, "errno": error.errno, "message": error.strerror or str(error), "path": error.filename}
    return told


if __name__ == "__main__":
    main()
