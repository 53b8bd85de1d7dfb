"""Every rule about the values of configuration keys.

`validate` runs before a process group, a directory or a model exists. What it refuses is a `ConfigError` with the key as
typed on the command line.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any

from recipe_ckpt.config import (
    CONTENTS,
    DATA_EXTENSIONS,
    LOGGERS,
    METRICS,
    RUN_SUBDIR,
    ArithmeticDataConfig,
    BestMode,
    CheckpointConfig,
    DataConfig,
    DriftPolicy,
    FailurePolicy,
    HfModelConfig,
    JsonlDataConfig,
    MismatchPolicy,
    OptimConfig,
    ResumeMode,
    TinyModelConfig,
    TrainerConfig,
    UploadFailurePolicy,
)
from recipe_ckpt.errors import ConfigError
from recipe_ckpt.remote_url import HADOOP, has_credentials, parse_remote_url

_REMOTE_MODULES = {
    **dict.fromkeys(HADOOP, "hdfs_native"),
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
}
"""What serves a URL, beside `file` and plain paths."""

NULL_LIKE = ("none", "None")
"""Texts that are meant as null and are none in YAML."""


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
    _check_int("launch.nproc_per_node", sections["launch"].nproc_per_node, nullable=True)
    _check_int("launch.num_threads", sections["launch"].num_threads, nullable=True)
    _check_batches(sections["data"], world_size)
    settled["model"] = _settle_model(sections["model"], launch_dir)
    settled["data"] = _settle_data(sections["data"], launch_dir)
    return settled


def validate_checkpoint(values: Mapping[str, Any], *, launch_dir: str | None = None) -> dict[str, Any]:
    """Check the keys of `CheckpointConfig` (without `_target_` and the like) and return all of them, settled.

    Paths are absolute (against `launch_dir`, by default the working directory) with `~` expanded, modes are enum members, an
    empty text is None, and `load_contents` is a list.

    Raises:
        ConfigError: a value can't work.
    """
    defaults = {key: value for key, value in asdict(CheckpointConfig()).items() if not key.startswith("_")}
    _check_known("checkpoint", values, defaults)
    found = {**defaults, **values}
    launch_dir = launch_dir or os.getcwd()
    root = _settle_root(found["default_local_dir"], launch_dir)
    return {
        **found,
        "default_local_dir": root,
        "run_subdir": _settle_subdir(found["run_subdir"]),
        "default_hdfs_dir": _settle_mirror(found["default_hdfs_dir"], root, launch_dir),
        "max_ckpt_to_keep": _check_int("checkpoint.max_ckpt_to_keep", found["max_ckpt_to_keep"], nullable=True),
        "keep_every": _check_int("checkpoint.keep_every", found["keep_every"], nullable=True),
        "keep_best": _check_int("checkpoint.keep_best", found["keep_best"], nullable=True),
        "best_mode": _choose(BestMode, "checkpoint.best_mode", found["best_mode"]),
        **_settle_staging(found["async_save"], found["overlap_staging"]),
        "on_save_failure": _choose(FailurePolicy, "checkpoint.on_save_failure", found["on_save_failure"]),
        "on_upload_failure": _choose(UploadFailurePolicy, "checkpoint.on_upload_failure", found["on_upload_failure"]),
        "max_remote_ckpt_to_keep": _check_int(
            "checkpoint.max_remote_ckpt_to_keep", found["max_remote_ckpt_to_keep"], nullable=True
        ),
        "max_pending_uploads": _check_int("checkpoint.max_pending_uploads", found["max_pending_uploads"]),
        "exit_upload_wait_secs": _check_float("checkpoint.exit_upload_wait_secs", found["exit_upload_wait_secs"], at_least=0),
        "on_data_mismatch": _choose(MismatchPolicy, "checkpoint.on_data_mismatch", found["on_data_mismatch"]),
        "on_config_drift": _choose(DriftPolicy, "checkpoint.on_config_drift", found["on_config_drift"]),
        "rank_timeout_secs": _check_int("checkpoint.rank_timeout_secs", found["rank_timeout_secs"]),
        **_settle_resume(found["resume_mode"], found["resume_from_path"], launch_dir),
        **_settle_contents(found["save_contents"], found["load_contents"]),
    }


def _check_metric(value: object) -> None:
    if value is not None and value not in METRICS:
        raise ConfigError(
            "optimized_metric", value, f"one of {list(METRICS)}, or null", "null takes the first that there is."
        )


def _settle_root(value: object, launch_dir: str) -> str:
    path = _settle_path("checkpoint.default_local_dir", value, launch_dir)
    if path is None:
        raise ConfigError(
            "checkpoint.default_local_dir", value, "a directory", "To train without checkpoints, write checkpoint=none."
        )
    if "://" in path:
        raise ConfigError(
            "checkpoint.default_local_dir", value, "a local directory", "A URL goes into checkpoint.default_hdfs_dir."
        )
    return path


def _settle_subdir(value: object) -> str:
    if value == RUN_SUBDIR:  # nobody has resolved it: outside of Hydra there is no sweep
        return ""
    if not isinstance(value, str) or os.path.isabs(value) or ".." in value.split("/"):
        raise ConfigError("checkpoint.run_subdir", value, "a relative path below the root, or empty", "Leave it empty.")
    return value.strip("/")


def _settle_resume(mode: object, path: object, launch_dir: str) -> dict[str, Any]:
    chosen = _choose(ResumeMode, "checkpoint.resume_mode", mode)
    settled = _settle_path("checkpoint.resume_from_path", path, launch_dir)
    if settled is not None and "://" in settled:
        settled = check_remote_url("checkpoint.resume_from_path", settled)
    if chosen is ResumeMode.resume_path and settled is None:
        raise ConfigError(
            "checkpoint.resume_from_path",
            path,
            "a global_step_<N> directory, or a run's root, with resume_mode=resume_path",
            "Give the path, or write checkpoint.resume_mode=auto.",
        )
    return {"resume_mode": chosen, "resume_from_path": settled}


def _settle_staging(is_async: object, overlap: object) -> dict[str, bool]:
    settled = _check_bool("checkpoint.async_save", is_async), _check_bool("checkpoint.overlap_staging", overlap)
    if settled == (False, True):
        raise ConfigError(
            "checkpoint.overlap_staging", overlap, "false with async_save=false", "A blocking save copies nothing; drop one."
        )
    return {"async_save": settled[0], "overlap_staging": settled[1]}


def _settle_contents(save: object, load: object) -> dict[str, list[str]]:
    saved = _check_subset("checkpoint.save_contents", save, CONTENTS)
    loaded = saved if load is None else _check_subset("checkpoint.load_contents", load, CONTENTS)
    if not saved:
        raise ConfigError("checkpoint.save_contents", saved, f"some of {list(CONTENTS)}", "To save nothing: checkpoint=none.")
    if missing := [item for item in loaded if item not in saved]:
        raise ConfigError(
            "checkpoint.load_contents",
            loaded,
            f"some of what is saved: {saved}",
            f"Add {missing} to checkpoint.save_contents.",
        )
    return {"save_contents": saved, "load_contents": loaded}


def _settle_mirror(value: object, root: str, launch_dir: str) -> str | None:
    key = "checkpoint.default_hdfs_dir"
    given = _settle_path(key, value, launch_dir)
    if given is None:
        return None
    url = check_remote_url(key, given)
    here, there = os.path.realpath(root), os.path.realpath(url)
    if "://" not in url and os.path.commonpath([here, there]) in (here, there):
        raise ConfigError(
            key,
            url,
            f"a directory outside of checkpoint.default_local_dir ({root}), and not around it",
            "Choose another one.",
        )
    return url


def check_remote_url(key: str, url: str) -> str:
    """Return a mirror's URL in its one spelling: a plain absolute path for a mounted disk. Nothing is asked over a network.

    Raises:
        ConfigError: it can't work as it stands, or what serves it is not installed. Passwords are not repeated.
    """
    found = parse_remote_url(url)
    if has_credentials(url):
        remedy = "HDFS takes HADOOP_USER_NAME or a Kerberos ticket, object stores their own variables or files."
        raise ConfigError(key, f"{found.scheme}://***@...", "a URL without user name and password", remedy)
    port = found.authority.rpartition(":")[2]
    if ":" in found.authority and not port.isdigit() and not port.endswith("]"):
        raise ConfigError(key, f"{found.scheme}://...", "a host, and a number as its port", "Write scheme://host:port/path.")
    if found.is_disk:
        if found.authority not in ("", "localhost"):
            raise ConfigError(key, url, "file:///<absolute path>, or a plain path", "Write three slashes.")
        return str(found)
    if found.scheme not in _REMOTE_MODULES:
        raise ConfigError(key, url, f"a path, or a URL of {['file', *_REMOTE_MODULES]}", "Mount it, or choose one of these.")
    if not found.authority and found.scheme not in HADOOP:
        raise ConfigError(key, url, "the name of a bucket after the slashes", f"Write {found.scheme}://bucket/path.")
    if not found.authority and not {"HADOOP_CONF_DIR", "HADOOP_HOME"} & set(os.environ):
        remedy = "Or set HADOOP_CONF_DIR to the directory with core-site.xml."
        raise ConfigError(key, url, f"{found.scheme}://<NameNode or name service>/<path>", remedy)
    module = _REMOTE_MODULES[found.scheme]
    package = '"recipe-ckpt[hdfs]"' if found.scheme in HADOOP else module
    _require_module(module, key, url, f"Run: pip install {package}.")
    return str(found)


def _check_bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "true or false", f"Write {key}=true.")
    return value


def _settle_trainer(trainer: TrainerConfig, launch_dir: str) -> TrainerConfig:
    for key, nullable in (("total_epochs", False), ("total_training_steps", True), ("log_freq", False)):
        _check_int(f"trainer.{key}", getattr(trainer, key), nullable=nullable)
    if trainer.save_interval_mins is not None:
        _check_float("trainer.save_interval_mins", trainer.save_interval_mins, above=0)
    _check_subset("trainer.logger", trainer.logger, LOGGERS)
    if "tensorboard" in trainer.logger:
        _require_extra("tensorboard", "trainer.logger", trainer.logger, or_else=" Or write trainer.logger=[console].")
    return replace(
        trainer,
        save_freq=_settle_frequency("trainer.save_freq", trainer.save_freq),
        test_freq=_settle_frequency("trainer.test_freq", trainer.test_freq),
        audit_file=_settle_path("trainer.audit_file", trainer.audit_file, launch_dir),
    )


def _check_optim(optim: OptimConfig) -> None:
    _check_float("optim.lr", optim.lr, above=0)
    _check_float("optim.eps", optim.eps, above=0)
    _check_float("optim.weight_decay", optim.weight_decay, at_least=0)
    _check_int("optim.lr_warmup_steps", optim.lr_warmup_steps, at_least=0)
    _check_int("optim.lr_decay_steps", optim.lr_decay_steps, nullable=True)
    if optim.clip_grad is not None:
        _check_float("optim.clip_grad", optim.clip_grad, above=0)
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError("optim.betas", optim.betas, "two numbers in [0, 1)", "Write optim.betas=[0.9,0.95].")


def _check_batches(data: DataConfig, world_size: int) -> None:
    _check_int("data.train_batch_size", data.train_batch_size)
    _check_int("data.micro_batch_size_per_gpu", data.micro_batch_size_per_gpu, nullable=True)
    _check_int("data.num_workers", data.num_workers, at_least=0)
    _check_int("data.prefetch_factor", data.prefetch_factor, nullable=True)
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
        _require_extra("transformers", "model", type(model).__name__)
    if isinstance(model, TinyModelConfig):
        _check_int("model.num_layers", model.num_layers)
        _check_int("model.num_heads", model.num_heads)
        _check_float("model.attention_dropout", model.attention_dropout, at_least=0, below=1)
        if _check_int("model.hidden_size", model.hidden_size) % (2 * model.num_heads):
            raise ConfigError(
                "model.hidden_size",
                model.hidden_size,
                "a multiple of twice model.num_heads",
                "Rotary heads need even widths.",
            )
    if not isinstance(model, HfModelConfig):
        return model
    path = _settle_path("model.path", model.path, launch_dir)
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
    _check_int("data.max_length", data.max_length, at_least=2)
    if isinstance(data, ArithmeticDataConfig):
        for key in ("train_samples", "max_number"):
            _check_int(f"data.{key}", getattr(data, key))
        pairs = (data.max_number + 1) ** 2
        if not 0 <= data.val_samples < pairs:
            raise ConfigError("data.val_samples", data.val_samples, f"0 to {pairs - 1}", "Raise data.max_number.")
        return data
    _require_extra("datasets", "data", type(data).__name__)
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
    paths = [path for item in listed if (path := _settle_path(key, item, launch_dir)) is not None]
    for path in paths:
        if os.path.splitext(path)[1] not in DATA_EXTENSIONS:
            raise ConfigError(key, path, f"files ending in {', '.join(DATA_EXTENSIONS)}", "Convert it.")
        if not os.path.isfile(path):
            raise ConfigError(key, path, "a file that exists", "Relative paths start at the launch directory.")
    return paths


def _settle_text(key: str, value: object) -> str | None:
    """Return a text, or None for null and for an empty one; refuse what looks like a null that YAML didn't see."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or value in NULL_LIKE:
        raise ConfigError(key, value, "a text or null", f"For no value write null: {key}=null.")
    return value


def _settle_path(key: str, value: object, launch_dir: str) -> str | None:
    text = _settle_text(key, value)
    if text is None or "://" in text:
        return text
    return os.path.normpath(os.path.join(launch_dir, os.path.expanduser(text)))


def _settle_frequency(key: str, value: object) -> int | None:
    if value is None or (value == -1 and not isinstance(value, float)):
        return None
    if type(value) is not int or value < 1:
        raise ConfigError(key, value, "an integer >= 1, or null for the end only", f"Write {key}=null.")
    return value


def _choose(kind: type[StrEnum], key: str, value: object) -> Any:
    names = [member.value for member in kind]
    if not isinstance(value, str) or value not in names:
        raise ConfigError(key, value, f"one of {names}", "In YAML, on, off, yes and no are booleans: write one of the names.")
    return kind(value)


def _check_subset(key: str, value: object, allowed: Collection[str]) -> list[str]:
    listed = list(value) if isinstance(value, Collection) and not isinstance(value, str) else None
    if listed is None or any(item not in allowed for item in listed):
        raise ConfigError(key, value, f"a list with some of {list(allowed)}", f"Write {key}=[{','.join(allowed)}].")
    return listed


def _check_int(key: str, value: Any, *, at_least: int = 1, nullable: bool = False) -> Any:
    """Return the value. A boolean is not a number here."""
    if value is None and nullable:
        return value
    if type(value) is not int or value < at_least:
        allowed = f"an integer >= {at_least}" + (", or null" if nullable else "")
        raise ConfigError(key, value, allowed, f"Write {key}={'null' if nullable else max(at_least, 1)}.")
    return value


def _check_float(
    key: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf, below: float = math.inf
) -> float:
    """Return the value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= above or value < at_least or value >= below:
        limit = f" > {above:g}" if above > -math.inf else f" >= {at_least:g}"
        limit += f" and < {below:g}" if below < math.inf else ""
        raise ConfigError(key, value, f"a number{limit}", "Change it.")
    return value


def _check_known(group: str, values: Collection[str], known: Collection[str]) -> None:
    for key in values:
        if key not in known:
            listed = sorted(name for name in known if not name.startswith("_"))
            nearest = find_nearest(key, listed)
            remedy = f"Did you mean {group}.{nearest}?" if nearest else "Remove it, or correct its name."
            raise ConfigError(f"{group}.{key}", key, f"the keys {listed}", remedy)


def _check_nulls(group: str, section: Any) -> None:
    """Refuse a text that was meant as null, in every key that may be null."""
    for item in fields(section) if is_dataclass(section) else ():
        if item.default is None:
            value = getattr(section, item.name)
            _settle_text(f"{group}.{item.name}", value if isinstance(value, str) else None)


def find_nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the key that was probably meant: the same name in another group, or a similar one in this or a similar group."""
    listed = {other: other.rpartition(".") for other in sorted(known)}
    group, _, name = key.rpartition(".")
    if same := [other for other, (_, _, its_name) in listed.items() if its_name == name]:
        return difflib.get_close_matches(key, same, n=1, cutoff=0)[0]
    groups = difflib.get_close_matches(group, {its_group for its_group, _, _ in listed.values()}, n=1)
    names = {its_name: other for other, (its_group, _, its_name) in listed.items() if its_group in groups}
    found = difflib.get_close_matches(name, names, n=1)
    return names[found[0]] if found else None


def check_section(group: str, keys: Collection[str], section: object) -> None:
    """Refuse keys that a `+` on the command line has put into a group beside its own.

    Raises:
        ConfigError: naming the key.
    """
    _check_known(group, keys, [item.name for item in fields(section)])  # type: ignore[arg-type]


def _require_extra(module: str, key: str, found: object, *, or_else: str = "") -> None:
    _require_module(module, key, found, f'Run: pip install "recipe-ckpt[sft]".{or_else}')


def _require_module(module: str, key: str, found: object, remedy: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(key, found, f"needs {module}, which is not installed", remedy)
