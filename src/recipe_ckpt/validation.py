"""Every rule about the values of configuration keys; those of the group `checkpoint` are in `checkpoint_rules`.

`validate` runs before a process group, a directory or a model exists. What it refuses is a `ConfigError` with the key as
typed on the command line.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from recipe_ckpt.checkpoint_rules import validate_checkpoint
from recipe_ckpt.checks import (
    check_float,
    check_int,
    check_known,
    check_subset,
    require_extra,
    settle_frequency,
    settle_path,
    settle_text,
)
from recipe_ckpt.config import (
    DATA_EXTENSIONS,
    LOGGERS,
    METRICS,
    ArithmeticDataConfig,
    DataConfig,
    HfModelConfig,
    JsonlDataConfig,
    OptimConfig,
    TinyModelConfig,
    TrainerConfig,
)
from recipe_ckpt.errors import ConfigError


def validate(sections: Mapping[str, Any], *, world_size: int = 1, launch_dir: str | None = None) -> dict[str, Any]:
    """Check the whole configuration; return its sections with absolute paths, null for -1, and `checkpoint` as plain values.

    `sections` are the dataclasses by group. Groups that are not ours (another model, other data) pass as they are.

    Raises:
        ConfigError: the first value that can't work.
    """
    launch_dir = launch_dir or os.getcwd()
    settled = dict(sections)
    values = {key: value for key, value in vars(sections["checkpoint"]).items() if not key.startswith("_")}
    settled["checkpoint"] = validate_checkpoint(values, launch_dir=launch_dir)
    for group, section in sections.items():
        _check_nulls(group, section)
    settled["trainer"] = _settle_trainer(sections["trainer"], launch_dir)
    _check_metric(sections.get("optimized_metric"))
    _check_optim(sections["optim"])
    check_int("launch.nproc_per_node", sections["launch"].nproc_per_node, nullable=True)
    check_int("launch.num_threads", sections["launch"].num_threads, nullable=True)
    _check_batches(sections["data"], world_size)
    settled["model"] = _settle_model(sections["model"], launch_dir)
    settled["data"] = _settle_data(sections["data"], launch_dir)
    return settled


def _check_metric(value: object) -> None:
    if value is not None and value not in METRICS:
        raise ConfigError(
            "optimized_metric", value, f"one of {list(METRICS)}, or null", "null takes the first that there is."
        )


def _settle_trainer(trainer: TrainerConfig, launch_dir: str) -> TrainerConfig:
    for key, nullable in (("total_epochs", False), ("total_training_steps", True), ("log_freq", False)):
        check_int(f"trainer.{key}", getattr(trainer, key), nullable=nullable)
    if trainer.save_interval_mins is not None:
        check_float("trainer.save_interval_mins", trainer.save_interval_mins, above=0)
    check_subset("trainer.logger", trainer.logger, LOGGERS)
    if "tensorboard" in trainer.logger:
        require_extra("tensorboard", "trainer.logger", trainer.logger, or_else=" Or write trainer.logger=[console].")
    return replace(
        trainer,
        save_freq=settle_frequency("trainer.save_freq", trainer.save_freq),
        test_freq=settle_frequency("trainer.test_freq", trainer.test_freq),
        audit_file=settle_path("trainer.audit_file", trainer.audit_file, launch_dir),
    )


def _check_optim(optim: OptimConfig) -> None:
    check_float("optim.lr", optim.lr, above=0)
    check_float("optim.eps", optim.eps, above=0)
    check_float("optim.weight_decay", optim.weight_decay, at_least=0)
    check_int("optim.lr_warmup_steps", optim.lr_warmup_steps, at_least=0)
    check_int("optim.lr_decay_steps", optim.lr_decay_steps, nullable=True)
    if optim.clip_grad is not None:
        check_float("optim.clip_grad", optim.clip_grad, above=0)
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError("optim.betas", optim.betas, "two numbers in [0, 1)", "Write optim.betas=[0.9,0.95].")


def _check_batches(data: DataConfig, world_size: int) -> None:
    check_int("data.train_batch_size", data.train_batch_size)
    check_int("data.micro_batch_size_per_gpu", data.micro_batch_size_per_gpu, nullable=True)
    check_int("data.num_workers", data.num_workers, at_least=0)
    check_int("data.prefetch_factor", data.prefetch_factor, nullable=True)
    if data.prefetch_factor and not data.num_workers:
        raise ConfigError(
            "data.prefetch_factor", data.prefetch_factor, "null without loader processes", "Set data.num_workers."
        )
    if data.train_batch_size % world_size:
        raise ConfigError(
            "data.train_batch_size", data.train_batch_size, f"a multiple of the {world_size} ranks", "It is the global batch."
        )


def _settle_model(model: Any, launch_dir: str) -> Any:
    if isinstance(model, TinyModelConfig | HfModelConfig):
        require_extra("transformers", "model", type(model).__name__)
    if isinstance(model, TinyModelConfig):
        check_int("model.num_layers", model.num_layers)
        check_int("model.num_heads", model.num_heads)
        check_float("model.attention_dropout", model.attention_dropout, at_least=0, below=1)
        if check_int("model.hidden_size", model.hidden_size) % (2 * model.num_heads):
            raise ConfigError(
                "model.hidden_size",
                model.hidden_size,
                "a multiple of twice model.num_heads",
                "Rotary heads need even widths.",
            )
    if not isinstance(model, HfModelConfig):
        return model
    path = settle_path("model.path", model.path, launch_dir)
    if path is None or not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(
            "model.path",
            model.path,
            "a local folder with config.json, *.safetensors and tokenizer files",
            "Nothing is downloaded.",
        )
    return replace(model, path=path)


def _settle_data(data: Any, launch_dir: str) -> Any:
    if not isinstance(data, ArithmeticDataConfig | JsonlDataConfig):
        return data
    check_int("data.max_length", data.max_length, at_least=2)
    if isinstance(data, ArithmeticDataConfig):
        for key in ("train_samples", "max_number"):
            check_int(f"data.{key}", getattr(data, key))
        pairs = (data.max_number + 1) ** 2
        if not 0 <= data.val_samples < pairs:
            raise ConfigError("data.val_samples", data.val_samples, f"0 to {pairs - 1}", "Raise data.max_number.")
        return data
    require_extra("datasets", "data", type(data).__name__)
    if (data.prompt_key is None) != (data.response_key is None):
        raise ConfigError("data.prompt_key", data.prompt_key, "set together with data.response_key", "Set both or none.")
    train_files = _settle_files("data.train_files", data.train_files, launch_dir)
    if not train_files:
        raise ConfigError(
            "data.train_files",
            data.train_files,
            f"files ending in {', '.join(DATA_EXTENSIONS)}",
            "Write data.train_files=my.jsonl.",
        )
    return replace(data, train_files=train_files, val_files=_settle_files("data.val_files", data.val_files, launch_dir))


def _settle_files(key: str, value: object, launch_dir: str) -> list[str]:
    listed = [value] if value is None or isinstance(value, str) else value
    if not isinstance(listed, list):
        raise ConfigError(key, value, "a file or a list of files", f"Write {key}=[a.jsonl,b.jsonl].")
    paths = [path for item in listed if (path := settle_path(key, item, launch_dir)) is not None]
    for path in paths:
        if os.path.splitext(path)[1] not in DATA_EXTENSIONS:
            raise ConfigError(key, path, f"files ending in {', '.join(DATA_EXTENSIONS)}", "Convert it.")
        if not os.path.isfile(path):
            raise ConfigError(key, path, "a file that exists", "Relative paths start at the launch directory.")
    return paths


def _check_nulls(group: str, section: Any) -> None:
    """Refuse a text that was meant as null, in every key that may be null."""
    for item in fields(section) if is_dataclass(section) else ():
        if item.default is None:
            value = getattr(section, item.name)
            settle_text(f"{group}.{item.name}", value if isinstance(value, str) else None)


def check_section(group: str, keys: Collection[str], section: object) -> None:
    """Refuse keys that a `+` on the command line has put into a group beside its own.

    Raises:
        ConfigError: naming the key.
    """
    check_known(group, keys, [item.name for item in fields(section)])  # type: ignore[arg-type]
