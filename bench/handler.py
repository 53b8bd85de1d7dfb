"""What the handler adds to a save by itself: `python -m bench.handler`.

Its engine has no tensors, so all that is left are its own files, fsyncs, renames and the agreement of the ranks. The limit is
as many files of the same sizes, each written and fsynced by rank 0, and one fsync of each directory.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import distributed

from bench.common import (
    Options,
    Rounds,
    Samples,
    build_lines,
    median_ms,
    merge_slowest,
    parse_options,
    print_table,
    run_ranks,
    shared_folder,
    write_json,
)
from recipe_ckpt.engines.base import WrittenPart
from recipe_ckpt.handler import CheckpointHandler
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.storage import LocalStorage, Storage

LIMIT = "raw writes and fsyncs of the same files"
SAVE = "save_checkpoint"


class EmptyEngine:
    """An engine without state."""

    def save_checkpoint(self, *_: object, **__: object) -> None: ...
    def load_checkpoint(self, *_: object, **__: object) -> None: ...
    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return distributed.get_rank()

    def get_data_parallel_size(self) -> int:
        return distributed.get_world_size()

    def snapshot(self, contents: Collection[str], **_: object) -> EmptyEngine:
        return self

    def restore(self, directory: str, entries: Mapping[str, FileEntry], contents: Collection[str]) -> None: ...
    def write(self, directory: str, storage: Storage) -> WrittenPart:
        return WrittenPart([], None)

    def finish(self, directory: str, storage: Storage, fragments: Sequence[Any]) -> Sequence[FileEntry]:
        return []


class EmptyLoader:
    """A loader without data."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def measure(options: Options) -> Samples:
    logging.disable()
    rounds = Rounds(options.rounds)
    with shared_folder(options) as folder:
        handler = CheckpointHandler(EmptyEngine(), EmptyLoader(), default_local_dir=os.path.join(folder, "run"))
        with handler:
            handler.load_checkpoint()
            for number in rounds:
                rounds.time(SAVE, lambda step=number + 1: save(handler, step))
                distributed.barrier()
                files = list_files(os.path.join(folder, "run", f"global_step_{number + 1}"))
                if distributed.get_rank() == 0:
                    rounds.time_alone(LIMIT, lambda sizes=files: write_raw(os.path.join(folder, "raw"), sizes))
                    shutil.rmtree(os.path.join(folder, "raw"))
                else:
                    rounds.add(LIMIT, 0.0)
                distributed.barrier()
    return rounds.samples


def save(handler: CheckpointHandler, step: int) -> None:
    """Save, and wait for it where the handler saves in the background."""
    handler.save_checkpoint(step)
    wait = getattr(handler, "wait", None)
    if wait is not None:
        wait()


def list_files(folder: str) -> dict[str, int]:
    return {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)}


def write_raw(folder: str, sizes: Mapping[str, int]) -> None:
    os.makedirs(folder)
    for name, size in sizes.items():
        with open(os.path.join(folder, name), "xb", buffering=0) as file:
            file.write(bytes(size))
            os.fsync(file.fileno())
    LocalStorage().sync_dir(folder)
    LocalStorage().sync_dir(os.path.dirname(folder))


def main() -> None:
    options = parse_options(__doc__, rounds=30)[0]
    samples = merge_slowest(run_ranks(options, measure))
    print_table(f"handler without an engine: {options.ranks} ranks, {options.rounds} rounds", build_lines(samples, LIMIT, 1))
    handler_ms = median_ms(samples[SAVE])
    ratios = {"handler_ms": handler_ms, "handler_ms_beyond_raw": handler_ms - median_ms(samples[LIMIT])}
    write_json(options.json, ratios)


if __name__ == "__main__":
    main()
