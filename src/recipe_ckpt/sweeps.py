"""Which run a job of a sweep is: a directory of its own, named by what makes it another experiment.

The name comes from the typed values of the job's overrides, so that another order, more values or a larger budget meet the
same runs again; `recipe_ckpt.drift` knows which keys make an experiment.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf

from recipe_ckpt.config import RUN_SUBDIR
from recipe_ckpt.drift import is_of_experiment
from recipe_ckpt.errors import ConfigError
from recipe_ckpt.rank_env import find_rank

log = logging.getLogger(__name__)

FOLDER = "sweep"
_SLUG_CHARS = 96
_VALUE_CHARS = 32
_ROOT_KEYS = ("checkpoint.default_local_dir", "checkpoint.run_subdir")
_NO_CHECKPOINTS = "recipe_ckpt.NoCheckpoints"


def register_resolvers() -> None:
    """Register `recipe.run_subdir` (empty, or `sweep/<id>` in a job of a sweep) and `recipe.job_id` (empty, or the id)."""
    OmegaConf.register_new_resolver("recipe.run_subdir", _name_run_subdir, replace=True)
    OmegaConf.register_new_resolver("recipe.job_id", _name_job, replace=True)


def _name_run_subdir(*, _root_: DictConfig) -> str:
    job_id = _name_job(_root_=_root_)
    return f"{FOLDER}/{job_id}" if job_id else ""


def _name_job(*, _root_: DictConfig) -> str:
    identity = read_identity(_root_)
    return build_job_id(identity) if identity else ""


def read_identity(cfg: DictConfig) -> dict[str, Any]:
    """Return by key what a sweep's job overrides that makes it an experiment; nothing outside of a sweep.

    Values are those of the composed config, so that `1` and `1.0` are one rate; a group's is the name of its option.
    """
    hydra = _find_hydra(cfg)
    if hydra is None or hydra.mode is not RunMode.MULTIRUN:
        return {}
    choices = hydra.runtime.choices
    second = {place.partition("@")[2] for place in choices if "@" in place and not is_of_experiment(place.partition("@")[0])}
    identity = {}
    for override in _parse(hydra.overrides.task):
        key = _get_key(override)
        if not _is_of_experiment(key) or key.partition(".")[0] in second:
            continue
        if override.is_delete():
            identity[f"~{key}"] = True
        else:
            identity[key] = choices[key] if key in choices else _to_plain(OmegaConf.select(cfg, key))
    return identity


def build_job_id(identity: Mapping[str, Any]) -> str:
    """Return `<slug>-<hash>`: a safe file name that can be pasted, unquoted, into a value on Hydra's command line."""
    parts = [f"{key}_{_show(value)}" for key, value in sorted(identity.items())]
    slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(parts))[:_SLUG_CHARS].strip("_.+-")
    return f"{slug or 'job'}-{hashlib.sha256(_encode(identity).encode()).hexdigest()[:10]}"


class SweepGuard(Callback):
    """Stops a sweep before its first job, when jobs would have one root without being one experiment."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        try:
            require_own_roots(config)
        except ConfigError as error:
            sys.exit(f"ConfigError: {error}")  # Hydra makes a warning of anything else


def require_own_roots(config: DictConfig) -> None:
    """Refuse a sweep over keys that neither make another experiment nor stand in the root's path.

    Raises:
        ConfigError: naming them.
    """
    section = config.get("checkpoint")
    if section is None or section.get("_target_") == _NO_CHECKPOINTS:
        return
    raw: Any = OmegaConf.to_container(config, resolve=False)
    in_path = _list_references(raw, [raw["checkpoint"].get(key.partition(".")[2]) for key in _ROOT_KEYS])
    is_automatic = raw["checkpoint"].get("run_subdir") == RUN_SUBDIR
    for key, values in _list_swept(config).items():
        if key in _ROOT_KEYS or (is_automatic and _is_of_experiment(key)):
            continue
        if not any(key == name or key.startswith(f"{name}.") or name.endswith(f"choices.{key}") for name in in_path):
            raise _refusal(key, values, is_automatic)


def _refusal(key: str, values: str, is_automatic: bool) -> ConfigError:
    is_group = "." not in key
    reference = f"hydra:runtime.choices.{key}" if is_group else key
    name = re.sub(r"\W", "_", key.rpartition(".")[2])
    what = "keys that make another experiment, and keys in the root's path" if is_automatic else "keys in the root's path"
    return ConfigError(
        key,
        values,
        f"in a sweep, {what}",
        f"The jobs would share one root, and continue each other's run. Sweep another key, or give each a root:"
        f" 'checkpoint.run_subdir={name}_${{{reference}}}' (with every other swept key in it, too).",
    )


@contextmanager
def own_turn(cfg: DictConfig, root: str) -> Iterator[None]:
    """Within, no other job of this sweep is in this root: a duplicate waits, and then finds the run finished. For rank 0.

    Raises:
        ConfigError: a job that is another experiment had this root before.
    """
    hydra = _find_hydra(cfg)
    if hydra is None or hydra.mode is not RunMode.MULTIRUN or find_rank():
        yield
        return
    folder = os.path.join(hydra.runtime.cwd, hydra.sweep.dir, ".roots")
    os.makedirs(folder, exist_ok=True)
    content = _encode(read_identity(cfg))
    with open(os.path.join(folder, hashlib.sha256(root.encode()).hexdigest()[:32]), "a+", encoding="utf-8") as file:
        _lock(file.fileno(), root)
        file.seek(0)
        known = file.read()
        if known not in ("", content):
            raise ConfigError(
                "checkpoint.run_subdir",
                root,
                "in a sweep, a root of its own for each experiment",
                f"Here they are {known} and {content}. Leave checkpoint.run_subdir out, or name every swept key in it.",
            )
        if not known:
            file.write(content)
            file.flush()
        yield


def _lock(handle: int, root: str) -> None:
    """Wait for the job that holds this lock, which ends with its process. Without locks there is still the root's lease."""
    with suppress(OSError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another job of this sweep is the same experiment; waiting for it to leave %s", root)
            fcntl.flock(handle, fcntl.LOCK_EX)


def _list_swept(config: DictConfig) -> dict[str, str]:
    """Return the sweep's keys with what was written for their values; as in Hydra the last one of a key holds."""
    params = config.hydra.sweeper.get("params") or {}
    overrides = [*_parse([f"{key}={value}" for key, value in params.items()]), *_parse(config.hydra.overrides.task)]
    last = {_get_key(override): override for override in overrides}
    return {key: str(override.input_line).partition("=")[2] for key, override in last.items() if override.is_sweep_override()}


def _list_references(raw: Mapping[str, Any], values: list[Any]) -> set[str]:
    """Return every name that stands in an interpolation of these values, or of what they refer to."""
    names: set[str] = set()
    while values:
        value = values.pop()
        if isinstance(value, str) and "${" in value:
            found = set(re.findall(r"[A-Za-z_][\w.@/]*", value)) - names
            names |= found
            values += [_look_up(raw, name) for name in found]
    return names


def _look_up(raw: Any, name: str) -> Any:
    for part in name.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return raw


def _parse(overrides: Any) -> list[Override]:
    written: Any = OmegaConf.to_container(overrides, resolve=False) if isinstance(overrides, Container) else overrides
    return OverridesParser.create().parse_overrides(written)


def _get_key(override: Override) -> str:
    return override.get_key_element().lstrip("+~")


def _is_of_experiment(key: str) -> bool:
    return is_of_experiment(key.partition("@")[0])


def _find_hydra(cfg: DictConfig) -> Any:
    """Return Hydra's own part of the config: in it before a job has begun, beside it then."""
    if "hydra" in cfg:
        return cfg.hydra
    return HydraConfig.get() if HydraConfig.initialized() else None


def _to_plain(value: Any) -> Any:
    """Return a value as JSON has it; a number without a fraction is an integer."""
    if isinstance(value, Container):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _encode(identity: Mapping[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def _show(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, sort_keys=True))[:_VALUE_CHARS]
