"""The rules of the group `checkpoint`: the keys by which a project of its own configures its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from recipe_ckpt.checks import (
    check_bool,
    check_float,
    check_int,
    check_known,
    check_subset,
    choose,
    require_module,
    settle_path,
)
from recipe_ckpt.config import (
    CONTENTS,
    RUN_SUBDIR,
    BestMode,
    CheckpointConfig,
    DriftPolicy,
    FailurePolicy,
    MismatchPolicy,
    ResumeMode,
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
_REMOTE_EXTRAS = {"hdfs_native": "hdfs", "s3fs": "s3"}


def validate_checkpoint(values: Mapping[str, Any], *, launch_dir: str | None = None) -> dict[str, Any]:
    """Check the keys of `CheckpointConfig` (without `_target_` and the like) and return all of them, settled.

    Paths are absolute (against `launch_dir`, by default the working directory) with `~` expanded, modes are enum members, an
    empty text is None, and `load_contents` is a list.

    Raises:
        ConfigError: a value can't work.
    """
    defaults = {key: value for key, value in asdict(CheckpointConfig()).items() if not key.startswith("_")}
    check_known("checkpoint", values, defaults)
    found = {**defaults, **values}
    launch_dir = launch_dir or os.getcwd()
    root = _settle_root(found["default_local_dir"], launch_dir)
    return {
        **found,
        "default_local_dir": root,
        "run_subdir": _settle_subdir(found["run_subdir"]),
        "default_hdfs_dir": _settle_mirror(found["default_hdfs_dir"], root, launch_dir),
        "max_ckpt_to_keep": check_int("checkpoint.max_ckpt_to_keep", found["max_ckpt_to_keep"], nullable=True),
        "keep_every": check_int("checkpoint.keep_every", found["keep_every"], nullable=True),
        "keep_best": check_int("checkpoint.keep_best", found["keep_best"], nullable=True),
        "best_mode": choose(BestMode, "checkpoint.best_mode", found["best_mode"]),
        **_settle_staging(found["async_save"], found["overlap_staging"]),
        "on_save_failure": choose(FailurePolicy, "checkpoint.on_save_failure", found["on_save_failure"]),
        "on_upload_failure": choose(UploadFailurePolicy, "checkpoint.on_upload_failure", found["on_upload_failure"]),
        "max_remote_ckpt_to_keep": check_int(
            "checkpoint.max_remote_ckpt_to_keep", found["max_remote_ckpt_to_keep"], nullable=True
        ),
        "max_pending_uploads": check_int("checkpoint.max_pending_uploads", found["max_pending_uploads"]),
        "exit_upload_wait_secs": check_float("checkpoint.exit_upload_wait_secs", found["exit_upload_wait_secs"], at_least=0),
        "on_data_mismatch": choose(MismatchPolicy, "checkpoint.on_data_mismatch", found["on_data_mismatch"]),
        "on_config_drift": choose(DriftPolicy, "checkpoint.on_config_drift", found["on_config_drift"]),
        "rank_timeout_secs": check_int("checkpoint.rank_timeout_secs", found["rank_timeout_secs"]),
        **_settle_resume(found["resume_mode"], found["resume_from_path"], launch_dir),
        **_settle_contents(found["save_contents"], found["load_contents"]),
    }


def _settle_root(value: object, launch_dir: str) -> str:
    path = settle_path("checkpoint.default_local_dir", value, launch_dir)
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


def _settle_mirror(value: object, root: str, launch_dir: str) -> str | None:
    key = "checkpoint.default_hdfs_dir"
    given = settle_path(key, value, launch_dir)
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
    extra = _REMOTE_EXTRAS.get(module)
    package = f'"recipe-ckpt[{extra}]"' if extra else module
    require_module(module, key, url, f"Run: pip install {package}.")
    return str(found)


def _settle_staging(is_async: object, overlap: object) -> dict[str, bool]:
    settled = check_bool("checkpoint.async_save", is_async), check_bool("checkpoint.overlap_staging", overlap)
    if settled == (False, True):
        raise ConfigError(
            "checkpoint.overlap_staging", overlap, "false with async_save=false", "A blocking save copies nothing; drop one."
        )
    return {"async_save": settled[0], "overlap_staging": settled[1]}


def _settle_resume(mode: object, path: object, launch_dir: str) -> dict[str, Any]:
    chosen = choose(ResumeMode, "checkpoint.resume_mode", mode)
    settled = settle_path("checkpoint.resume_from_path", path, launch_dir)
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


def _settle_contents(save: object, load: object) -> dict[str, list[str]]:
    saved = check_subset("checkpoint.save_contents", save, CONTENTS)
    loaded = saved if load is None else check_subset("checkpoint.load_contents", load, CONTENTS)
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
