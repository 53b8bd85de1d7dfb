"""What a run tells: log lines and a bar, curves, and an audit of what was trained."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from recipe_ckpt.config import TrainerConfig
from recipe_ckpt.saving import SaveReport
from recipe_ckpt.uploader import UploadReport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFacts:
    """One finished optimizer step. The loss is of all ranks, the ids are this one's."""

    step: int
    epoch: int
    sample_ids: list[int]
    loss: float
    lr: float
    grad_norm: float | None


class Reporter:
    """Reports steps and evaluations. Bar, log lines and curves are rank 0's, the audit is every rank's. A context manager."""

    def __init__(self, trainer: TrainerConfig, *, rank: int, root: str, step: int, total_steps: int) -> None:
        self._trainer = trainer
        self._rank = rank
        self._total_steps = total_steps
        self._has_console = rank == 0 and "console" in trainer.logger
        self._stack = ExitStack()
        self._bar: Any = None
        self._curves: Any = None
        self._drawn_save = -1
        self._drawn_upload = -1
        if self._has_console:
            self._stack.enter_context(logging_redirect_tqdm())
            # disable=None: no bar where nobody looks at it, in files and pipes
            self._bar = self._stack.enter_context(tqdm(initial=step, total=total_steps, unit="step", disable=None))
        if rank == 0 and "tensorboard" in trainer.logger:
            self._curves = self._open_curves(os.path.join(root, "tensorboard"), step)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def report_step(self, facts: StepFacts) -> None:
        self._audit(facts)
        self._draw(facts.step, {"train/loss": facts.loss, "train/lr": facts.lr, "train/grad_norm": facts.grad_norm})
        if not self._has_console:
            return
        self._bar.set_postfix(loss=f"{facts.loss:.3f}", refresh=False)
        self._bar.update()
        if facts.step % self._trainer.log_freq == 0 or facts.step == self._total_steps:
            log.info("step %d/%d  loss %.4f  lr %.3g", facts.step, self._total_steps, facts.loss, facts.lr)

    def report_evaluation(self, step: int, loss: float) -> None:
        self._draw(step, {"val/loss": loss})
        if self._has_console:
            log.info("step %d/%d  val loss %.4f", step, self._total_steps, loss)

    def report_save(self, save: SaveReport | None) -> None:
        """Draw the phases of the last finished save: in the background, that is the one before."""
        if save is None or save.step == self._drawn_save:
            return
        self._drawn_save = save.step
        seconds = {"wait": save.wait_secs, "stage": save.stage_secs, "write": save.write_secs, "commit": save.commit_secs}
        self._draw(save.step, {f"save/{phase}_secs": took for phase, took in seconds.items()})
        self._draw(save.step, {"save/stall_secs": save.stall_secs, "save/size_mb": save.size_bytes / 1e6})

    def report_upload(self, upload: UploadReport | None) -> None:
        """Draw the last finished upload: beside training, that may be of an older save."""
        if upload is None or upload.step == self._drawn_upload:
            return
        self._drawn_upload = upload.step
        self._draw(upload.step, {"save/upload_secs": upload.upload_secs, "save/upload_mb": upload.sent_bytes / 1e6})

    def flush(self) -> None:
        if self._curves is not None:
            self._curves.flush()

    def _open_curves(self, directory: str, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: what an interrupted run drew beyond its last checkpoint is drawn again
        writer = SummaryWriter(directory, purge_step=step + 1)
        self._stack.callback(writer.close)
        return writer

    def _draw(self, step: int, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if self._curves is not None and value is not None:
                self._curves.add_scalar(name, value, step)

    def _audit(self, facts: StepFacts) -> None:
        if self._trainer.audit_file is None:
            return
        line = {"rank": self._rank, "step": facts.step, "epoch": facts.epoch, "sample_ids": facts.sample_ids}
        text = json.dumps({**line, "loss": facts.loss, "lr": facts.lr}) + "\n"
        # One write of one line: ranks that append to one file never mix their lines.
        file = os.open(self._trainer.audit_file, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)
