"""From configuration keys to a handler: what Hydra instantiates."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from recipe_ckpt.checkpoint_rules import validate_checkpoint
from recipe_ckpt.contents import Stateful
from recipe_ckpt.engines.base import Engine
from recipe_ckpt.handler import CheckpointHandler
from recipe_ckpt.policies import LoadPolicy, MirrorPolicy, ResumePoint, SavePolicy
from recipe_ckpt.retention import Retention
from recipe_ckpt.saving import SaveReport
from recipe_ckpt.uploader import UploadReport


def build_handler(
    engine: Engine | Mapping[str, Engine],
    train_dataloader: Any,
    *,
    lora_train_meta: Mapping[str, Any] | None = None,
    extra_state: Mapping[str, Stateful] | None = None,
    documents: Mapping[str, str] | None = None,
    **keys: Any,
) -> CheckpointHandler:
    """Make a handler from the flat keys of `CheckpointConfig`: the target of `conf/checkpoint`.

    Raises:
        ConfigError: a key is unknown, or its value can't work.
    """
    settled = validate_checkpoint(keys)
    return CheckpointHandler(
        engine,
        train_dataloader,
        default_local_dir=os.path.join(settled["default_local_dir"], settled["run_subdir"]),
        max_ckpt_to_keep=settled["max_ckpt_to_keep"],
        default_hdfs_dir=settled["default_hdfs_dir"] and join_url(settled["default_hdfs_dir"], settled["run_subdir"]),
        resume_mode=settled["resume_mode"],
        resume_from_path=settled["resume_from_path"],
        lora_train_meta=lora_train_meta,
        save_policy=SavePolicy(
            settled["save_contents"], settled["on_save_failure"], settled["async_save"], settled["overlap_staging"]
        ),
        load_policy=LoadPolicy(settled["load_contents"], settled["on_data_mismatch"], settled["on_config_drift"]),
        mirror_policy=MirrorPolicy(
            settled["on_upload_failure"],
            settled["max_remote_ckpt_to_keep"],
            settled["max_pending_uploads"],
            settled["exit_upload_wait_secs"],
        ),
        retention=Retention(
            every=settled["keep_every"],
            best=settled["keep_best"],
            best_metric=settled["best_metric"],
            best_mode=settled["best_mode"],
        ),
        rank_timeout_secs=settled["rank_timeout_secs"],
        extra_state=extra_state,
        documents=documents,
    )


def join_url(url: str, subdir: str) -> str:
    return f"{url.rstrip('/')}/{subdir}" if subdir else url


class NoCheckpoints:
    """A handler that saves and loads nothing: `checkpoint=none`."""

    resume_point: ResumePoint | None = None
    last_save: SaveReport | None = None
    last_upload: UploadReport | None = None

    def __init__(self, engine: Any, train_dataloader: Any, **_: Any) -> None:
        """Take what a handler takes, and keep nothing of it."""

    def load_checkpoint(self) -> int:
        return 0

    def save_checkpoint(self, step: int, *, metrics: Mapping[str, float] | None = None) -> None:
        """Save nothing."""

    def wait(self) -> None:
        """Nothing is in flight."""

    def finish_uploads(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing is held."""
