"""What the environment says about ranks: torchrun's variables, SLURM's, or none; and how each rank writes the one log.

Knows no torch and no Hydra: Hydra's own configuration (directories, logging) asks here before anything is loaded.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Mapping

from recipe_ckpt.errors import ConfigError

_RUN_ID = "TORCHELASTIC_RUN_ID"

SHOWN_AT_EXIT = "is_shown_at_exit"
"""The attribute of a log record whose error ends the process, or repeats the one that does."""


def find_rank(environment: Mapping[str, str] = os.environ) -> int:
    return int(_find_ranks(environment).get("RANK", "0"))


def count_ranks(nproc_per_node: int | None, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks a run will have: those that exist, or those that it is to start.

    Raises:
        ConfigError: it is to start ranks, and is one of several itself.
    """
    existing = _find_ranks(environment)
    to_start = nproc_per_node or 1
    if existing and to_start > 1:
        raise ConfigError(
            "launch.nproc_per_node",
            nproc_per_node,
            f"null: this process is one of {existing['WORLD_SIZE']} ranks that torchrun or srun has started",
            "Remove the key, or start one process only (with srun: --ntasks-per-node=1 on one node).",
        )
    return int(existing.get("WORLD_SIZE", to_start))


def describe_slurm_ranks(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables by which torch finds the ranks of an srun step of several tasks; none in any other process.

    The step counts, not the job: an sbatch script is no task, whatever SLURM_NTASKS it has.
    """
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or "SLURM_PROCID" not in environment or size == "1":
        return {}
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": _find_first_host(environment),
        "MASTER_PORT": str(_choose_port(environment)),
    }
    return {key: environment.get(key, value) for key, value in found.items()}


def name_launch(otherwise: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return one name for all ranks of a launch and its restarts, fit for a directory; `otherwise` where no ranks exist.

    `otherwise` is also the answer where ranks have nothing in common to be named by (torchrun's static rendezvous).
    """
    if not _find_ranks(environment):
        return otherwise
    run = environment.get(_RUN_ID, "none")
    if run != "none":
        return "torchrun-" + re.sub(r"[^\w.-]", "_", run)
    job = environment.get("SLURM_JOB_ID")
    return f"slurm-{job}-{environment.get('SLURM_STEP_ID', '0')}" if job else otherwise


class RankFormatter(logging.Formatter):
    """Starts every line of another rank's record with `[rank N]`, those of its traceback too; rank 0 writes as ever."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        rank = find_rank()
        return "\n".join(f"[rank {rank}] {line}" for line in text.splitlines()) if rank else text


class ShownOnceFilter(logging.Filter):
    """Keeps from the terminal the error that stderr shows when the process ends: a record that says so of itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(record, SHOWN_AT_EXIT, False)


class RankFilter(logging.Filter):
    """Lets all of rank 0 pass, and the warnings and errors of the others; with `own_node` only of those beside rank 0.

    Appending to one file is safe for the processes of one machine, and not for several on a network file system.
    """

    def __init__(self, own_node: bool = False) -> None:
        super().__init__()
        self._own_node = own_node

    def filter(self, record: logging.LogRecord) -> bool:
        if find_rank() == 0:
            return True
        node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0"))
        return record.levelno >= logging.WARNING and (node == "0" or not self._own_node)


def _find_ranks(environment: Mapping[str, str]) -> Mapping[str, str]:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return environment
    return describe_slurm_ranks(environment)


def _find_first_host(environment: Mapping[str, str]) -> str:
    """Return where rank 0 is. A node list reads like `gpu[03-05,9],other`: the first name is the first node's."""
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    assert found is not None, nodes
    return "".join(part or "" for part in found.groups())


def _choose_port(environment: Mapping[str, str]) -> int:
    """Return the same port on all ranks of a step, and probably another one for another step."""
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return 20000 + zlib.crc32(step.encode()) % 10000
