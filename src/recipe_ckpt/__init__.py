"""Checkpoint and resume for PyTorch fine-tuning recipes.

Names are loaded when they are first used, so that reading a configuration never waits for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe_ckpt.handler import CheckpointHandler, NoCheckpoints, OrchestrationMode, ResumePoint, build_handler

_HOMES = {
    "CheckpointHandler": "recipe_ckpt.handler",
    "NoCheckpoints": "recipe_ckpt.handler",
    "OrchestrationMode": "recipe_ckpt.handler",
    "ResumePoint": "recipe_ckpt.handler",
    "build_handler": "recipe_ckpt.handler",
}

__all__ = ["CheckpointHandler", "NoCheckpoints", "OrchestrationMode", "ResumePoint", "build_handler"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
