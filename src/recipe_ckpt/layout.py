"""Names on disk: built and parsed here and nowhere else.

The step directory, tracker, `data_<dp_rank>.pt` and `lora_train_meta.json` are verl's names; the tracker's bare decimal is
Megatron-LM's convention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

TRACKER = "latest_checkpointed_iteration.txt"
RUN_RECORD = "run.json"
LEASE = ".lease.json"
STAGING_DIR = ".staging"
TRASH_DIR = ".trash"
PINS_DIR = ".pins"
ARCHIVE_DIR = "archive"
LEFT_BEHIND = "left-behind"
ARCHIVING = ".archiving"
PROBE_PREFIX = ".probe-"
PULLED_DIR = ".pulled"
COMMITTING_SUFFIX = ".committing"

MANIFEST = "manifest.json"
FILE_TABLE = "files.json"
CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
RESOLVED_CONFIG = "config_resolved.json"
TRAINER_STATE = "trainer_state.json"
LORA_META = "lora_train_meta.json"
TENSOR_INDEX = "index.json"

# No longer than fits into a file name; int() raises for more than 4300 digits.
_STEP = "(0|[1-9][0-9]{0,199})"
_STEP_DIR = re.compile(rf"global_step_{_STEP}", re.ASCII)
_TRACKER = re.compile(rf"[ \t\r\n]*{_STEP}[ \t\r\n]*", re.ASCII)
_STAGING = re.compile(rf"global_step_{_STEP}\.([0-9a-f]+)", re.ASCII)
_DISPLACED = re.compile(rf"global_step_{_STEP}\.by-([0-9a-f]+)", re.ASCII)
_TEMPORARY = re.compile(
    rf"({'|'.join(map(re.escape, (TRACKER, RUN_RECORD, LEASE, ARCHIVING)))})\.[0-9a-f]{{32}}\.tmp", re.ASCII
)
_PROBE = re.compile(rf"{re.escape(PROBE_PREFIX)}[0-9a-f]{{32}}-[0-9]+", re.ASCII)
_NODE_NOTE = re.compile(r"node_(0|[1-9][0-9]*)\.json", re.ASCII)
_OWN_FILE = re.compile(r"((data|rng)_[0-9]+)\.pt|node_[0-9]+\.json|.*\.safetensors", re.ASCII)
_VERL_MODEL_SHARD = re.compile(r"model_world_size_([1-9][0-9]*)_rank_(0|[1-9][0-9]*)\.pt", re.ASCII)


def build_step_name(step: int) -> str:
    if step < 0:
        raise ValueError(f"a step is an integer >= 0, found {step!r}")
    return f"global_step_{step}"


def parse_step_name(name: str) -> int | None:
    """Return the step of a directory's base name, or None for every other name (`global_step_7.bak`, `global_step_007`)."""
    match = _STEP_DIR.fullmatch(name)
    return int(match[1]) if match else None


def parse_tracker(text: str) -> int | None:
    """Return the tracker's step; blanks and line ends around it are fine, anything else is None."""
    match = _TRACKER.fullmatch(text)
    return int(match[1]) if match else None


def build_staging_name(step: int, uid: str) -> str:
    return f"{build_step_name(step)}.{uid}"


def parse_staging_name(name: str) -> tuple[int, str] | None:
    match = _STAGING.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def build_displaced_name(step: int, uid: str) -> str:
    """Name in the trash of a step that the save `uid` replaces: recovery puts it back if its successor is not whole."""
    return f"{build_step_name(step)}.by-{uid}"


def parse_displaced_name(name: str) -> tuple[int, str] | None:
    match = _DISPLACED.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def is_temporary_name(name: str) -> bool:
    """Say whether a file in a root is what an interrupted start or replacement of a small file left behind."""
    return (_TEMPORARY.fullmatch(name) or _PROBE.fullmatch(name)) is not None


def build_probe_name(uid: str, rank: int) -> str:
    """Name in a root of the file by which ranks on several hosts see whether they share it; `uid` is 32 hex digits."""
    return f"{PROBE_PREFIX}{uid}-{rank}"


def is_free_name(name: str) -> bool:
    """Say whether a recipe may put a file of this name into a step directory."""
    ours = {MANIFEST, FILE_TABLE, TRAINER_STATE, LORA_META, TENSOR_INDEX, "", ".", ".."}
    return name not in ours and "/" not in name and _OWN_FILE.fullmatch(name) is None


def build_data_name(dp_rank: int) -> str:
    return f"data_{dp_rank}.pt"


def build_rng_name(rank: int) -> str:
    return f"rng_{rank}.pt"


def build_node_note_name(leader: int) -> str:
    """Name of the list of those files of a checkpoint that lie on one node's disk; `leader` is the node's lowest rank."""
    return f"node_{leader}.json"


def is_node_note_name(name: str) -> bool:
    return _NODE_NOTE.fullmatch(name) is not None


def build_extra_name(name: str) -> str:
    return f"extra_{name}.pt"


def build_tensor_file_name(part: str, rank: int) -> str:
    return f"{part}-{rank}.safetensors"


def find_foreign_problem(names: Iterable[str]) -> str | None:
    """Say what keeps a directory's file names from being a complete verl checkpoint, or None if it is one.

    verl's FSDP engine writes one `model_world_size_<W>_rank_<r>.pt` a rank, and `fsdp_config.json` by rank 0.
    """
    present = set(names)
    if own := sorted(present & {FILE_TABLE, TENSOR_INDEX}):
        return f"it has {own[0]} but no {MANIFEST}: a save that was cut short, or its upload"
    shards = [match for name in present if (match := _VERL_MODEL_SHARD.fullmatch(name))]
    if not shards:
        return f"it has no {MANIFEST}, and no model_world_size_*_rank_*.pt of verl either"
    worlds = {int(match[1]) for match in shards}
    if len(worlds) > 1:
        return f"shards of several world sizes lie in it: {sorted(worlds)}"
    world = worlds.pop()
    missing = sorted(set(range(world)) - {int(match[2]) for match in shards})
    if missing:
        return f"of {world} model shards the ones of ranks {missing} are missing"
    if not any(name == "data.pt" or name.startswith("data_") for name in present):
        return "it has no data_<dp_rank>.pt"
    return None
