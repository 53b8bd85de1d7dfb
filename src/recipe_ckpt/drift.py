"""How a run's configuration differs from the one that its checkpoint was saved with, and what follows.

Configurations are plain nested mappings, resolved. What is compared is what makes an experiment: not where things lie, how
often something is saved or told, or how the work is shared out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from recipe_ckpt.errors import ConfigError

_BUDGET = ("trainer.total_training_steps", "trainer.total_epochs")
_NOT_OF_AN_EXPERIMENT = (
    *_BUDGET,
    *("hydra", "hydra[./]*", "checkpoint", "checkpoint.*", "launch", "launch.*", "engine.strategy"),
    *("sweep", "hparams_search", "compat", "local", "optimized_metric"),
    *("trainer.project_name", "trainer.experiment_name", "trainer.device", "trainer.logger", "trainer.audit_file"),
    *("trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.max_ckpt_to_keep", "trainer.resume_*"),  # compat=verl
    *("trainer.save_freq", "trainer.save_interval_mins", "trainer.test_freq", "trainer.log_freq"),
    *("data.num_workers", "data.prefetch_factor", "data.micro_batch_size_per_gpu"),
    *("*._partial_", "*._convert_"),
)
_ALWAYS_FATAL = ("model.lora_rank",)
_RESTORED = ("trainer.seed", "model.path", "model._target_")


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs; None also stands for a key that one side does not have."""

    key: str
    old: Any
    new: Any

    @property
    def is_budget(self) -> bool:
        return self.key in _BUDGET

    def describe(self) -> str:
        note = ""
        if self.is_budget:
            note = " (optim.lr_decay_steps is null: the schedule ends with the run)"
        elif self.key in _RESTORED:
            note = " (weights and random states are the checkpoint's)"
        return f"{self.key}: {json.dumps(self.old)} -> {json.dumps(self.new)}{note}"


def is_of_experiment(key: str) -> bool:
    """Say whether another value of this key makes another experiment. For a group the key is its name."""
    return not any(fnmatchcase(key, pattern) for pattern in _NOT_OF_AN_EXPERIMENT)


def list_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """List what differs and can change what is trained, by key.

    A key that only one side knows counts if its value there is something: a newer version has more keys, switched off.
    """
    old, new = dict(_flatten(saved)), dict(_flatten(current))
    keys = [key for key in sorted({*old, *new}) if is_of_experiment(key)]
    if _follows_budget(old) or _follows_budget(new):
        keys += _BUDGET if new.get(_BUDGET[0]) is None else _BUDGET[:1]
    found = (Change(key, old.get(key), new.get(key)) for key in keys)
    return [change for change in found if change.old != change.new and (_counts(change) or change.key in {*old} & {*new})]


def require_resumable(changes: Sequence[Change], policy: str, step: int, path: str) -> None:
    """Refuse to resume a checkpoint with this configuration, before anything is restored.

    Raises:
        ConfigError: something changed that never may, or anything did and the policy is `raise`.
    """
    fatal = [change for change in changes if change.key in _ALWAYS_FATAL]
    if fatal or (changes and policy == "raise"):
        first = (fatal or changes)[0]
        others = "".join(f"\n  {change.describe()}" for change in changes if change is not first)
        remedy = "Give it back" + ("" if fatal else ", write checkpoint.on_config_drift=warn")
        raise ConfigError(
            first.key,
            first.new,
            f"{first.old!r}, with which step {step} in {path} was saved",
            f"{remedy}, or begin another run with another trainer.experiment_name.{others and ' Changed, too:' + others}",
        )


def refuse_finished(changes: Sequence[Change], step: int) -> None:
    """Refuse to take a finished run for what its changed configuration asks for.

    Raises:
        ConfigError: something changed beside the run's length.
    """
    changed = [change for change in changes if not change.is_budget]
    if changed:
        lines = "".join(f"\n  {change.describe()}" for change in changed)
        raise ConfigError(
            changed[0].key,
            changed[0].new,
            f"{changed[0].old!r}, with which this run was finished at step {step}",
            "Nothing is left to train with another value. Choose another trainer.experiment_name for another run, more"
            f" trainer.total_training_steps to go on with this one, or checkpoint=fresh to start it over. Changed:{lines}",
        )


def describe_changes(changes: Sequence[Change], step: int, path: str, *, may_be_restored: bool) -> str:
    """Tell what changed, and from which step it takes effect.

    An engine that reads its own format may restore its optimizer's part of that (`may_be_restored`).
    """
    lines = "".join(f"\n  {change.describe()}" for change in changes)
    caution = "\nThis engine restores its optimizer itself: what it restores wins over optim.*" if may_be_restored else ""
    return f"step {step} in {path} was saved with another configuration. Takes effect from step {step + 1}:{lines}{caution}"


def _follows_budget(flat: Mapping[str, Any]) -> bool:
    """Say whether the run's length shapes its learning rate."""
    kind = flat.get("optim.lr_scheduler_type")
    return kind is not None and kind != "constant" and flat.get("optim.lr_decay_steps") is None


def _counts(change: Change) -> bool:
    return bool(change.old or change.new)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
