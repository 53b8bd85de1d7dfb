"""Checkpoint and resume for PyTorch fine-tuning recipes.

Names are loaded when they are first used, so that reading a configuration never waits for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe_ckpt.build import NoCheckpoints, build_handler
    from recipe_ckpt.handler import CheckpointHandler
    from recipe_ckpt.policies import LoadPolicy, MirrorPolicy, OrchestrationMode, ResumePoint, SavePolicy
    from recipe_ckpt.retention import Retention

_HOMES = {
    "CheckpointHandler": "recipe_ckpt.handler",
    "LoadPolicy": "recipe_ckpt.policies",
    "MirrorPolicy": "recipe_ckpt.policies",
    "NoCheckpoints": "recipe_ckpt.build",
    "OrchestrationMode": "recipe_ckpt.policies",
    "ResumePoint": "recipe_ckpt.policies",
    "Retention": "recipe_ckpt.retention",
    "SavePolicy": "recipe_ckpt.policies",
    "build_handler": "recipe_ckpt.build",
}

__all__ = [
    "CheckpointHandler",
    "LoadPolicy",
    "MirrorPolicy",
    "NoCheckpoints",
    "OrchestrationMode",
    "ResumePoint",
    "Retention",
    "SavePolicy",
    "build_handler",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
