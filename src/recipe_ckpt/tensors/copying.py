"""The copies of one snapshot: some before it returns, the rest beside training."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.tensors.copies import Copy, DeviceCopies
from recipe_ckpt.tensors.image import ImageCopies


class Copying:
    """What is early is copied by `start`; what is late too, or with `overlap` beside training."""

    def __init__(self, copies: Sequence[ImageCopies]) -> None:
        self._early: list[Copy] = [copy for item in copies for copy in item.early]
        self._late: list[Copy] = [copy for item in copies for copy in item.late]
        self._device_early: list[DeviceCopies] = [copy for item in copies for copy in item.device_early]
        self._device_late: list[DeviceCopies] = [copy for item in copies for copy in item.device_late]
        self._watch = ChangeWatch([watched for item in copies for watched in item.watched])
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, *, overlap: bool) -> None:
        for device in self._device_early:
            device.run()
            device.fence()
        if overlap:
            self._watch.start()
        for device in self._device_late:
            device.run()
        if overlap and self._late:
            # Not a daemon: at exit the interpreter must not unmap what is being copied to.
            self._thread = threading.Thread(target=self._run_late, name="recipe_ckpt stage")
            self._thread.start()
        for copy in self._early:
            copy.run()
        if self._thread is None:
            for copy in self._late:
                copy.run()
        if not overlap:
            self.settle()

    def settle(self) -> None:
        """Return when the tensors may change: wait for copies on the host, put later device work behind the others."""
        if self._thread is not None:
            self._thread.join()
        for device in self._device_late:
            device.fence()
        self._watch.stop()

    def wait(self) -> None:
        """Return when all is copied.

        Raises:
            SaveFailedError: a copy failed, or a tensor was changed meanwhile.
        """
        self.end()
        if self._error is not None:
            raise SaveFailedError(f"staging the tensors failed: {type(self._error).__name__}: {self._error}") from self._error
        if changed := self._watch.changed:
            raise SaveFailedError(
                f"{changed[0]!r} and in all {len(changed)} tensors were changed while they were copied beside training; until"
                " the next optimizer.step() nothing may change parameters and optimizer state. Change them after"
                " handler.wait(), or save without checkpoint.overlap_staging"
            )

    def end(self) -> None:
        """Return when nothing is being copied (any more)."""
        if self._thread is not None:
            self._thread.join()
        for device in (*self._device_early, *self._device_late):
            device.wait()
        self._watch.stop()

    def _run_late(self) -> None:
        try:
            for copy in self._late:
                copy.run()
        except BaseException as error:  # noqa: BLE001 (it surfaces in `wait`)
            self._error = error


class ChangeWatch:
    """Notices changes in place, by torch's version counters. What is written through `.data` it can't see.

    Whoever waits for the copies first, the optimizer step or the writing thread, stops the watch.
    """

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._tensors = [(name, tensor) for name, tensor in tensors if not tensor.is_inference()]  # those have no counter
        self._versions: list[int] | None = None
        self._lock = threading.Lock()
        self.changed: list[str] = []

    def start(self) -> None:
        self._versions = [tensor._version for _, tensor in self._tensors]

    def stop(self) -> None:
        with self._lock:
            if self._versions is not None:
                pairs = zip(self._tensors, self._versions, strict=True)
                self.changed = [name for (name, tensor), version in pairs if tensor._version != version]
            self._versions = None
