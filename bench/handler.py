"""What the handler adds to a save by itself: `python -m bench.handler`.

Its engine has no tensors (with `--mb` it has), so all that is left are its own files, fsyncs, renames and the agreement of
the ranks. The limit is each rank's changes to the disk, in order, by nothing but system calls: every file with its fsync,
every rename, every fsync of a directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import distributed

from bench.common import (
    Line,
    Measured,
    Options,
    Rounds,
    Samples,
    build_engine,
    build_lines,
    median_ms,
    run_bench,
    shared_folder,
)
from recipe_ckpt import layout
from recipe_ckpt.engines.base import WrittenPart
from recipe_ckpt.handler import CheckpointHandler
from recipe_ckpt.manifest import FileEntry
from recipe_ckpt.storage import Buffer, LocalStorage, Storage

LIMIT = "the same writes, renames and fsyncs"
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


class Recorder(LocalStorage):
    """A disk that notes every change made to it, in order: (what, path, size or target)."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str, Any]] = []

    def write_file(self, path: str, chunks: Iterable[Buffer], *, name: str, rank: int) -> FileEntry:
        entry = super().write_file(path, chunks, name=name, rank=rank)
        self.changes.append(("write", path, entry.size_bytes))
        return entry

    def replace_file(self, path: str, data: bytes) -> None:
        before = len(self.changes)
        super().replace_file(path, data)
        self.changes[before:] = [("replace", path, len(data))]

    def make_dirs(self, path: str) -> None:
        before = len(self.changes)
        super().make_dirs(path)
        if len(self.changes) > before:
            self.changes[before:] = [("make", path, None)]

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.changes.append(("rename", source, target))

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        self.changes.append(("sync", path, None))


def replay(changes: Sequence[tuple[str, str, Any]], root: str, copy: str) -> None:
    """Do the same to a copy of the root's directories, with nothing but system calls."""
    for what, path, detail in changes:
        place = path.replace(root, copy, 1)
        if what == "write":
            write_raw(place, detail)
        elif what == "replace":
            write_raw(f"{place}.tmp", detail)
            os.replace(f"{place}.tmp", place)
            sync_raw(os.path.dirname(place))
        elif what == "make":
            os.makedirs(place, exist_ok=True)
            sync_raw(os.path.dirname(place))
        elif what == "rename":
            os.rename(place, detail.replace(root, copy, 1))
        else:
            sync_raw(place)


def write_raw(path: str, size_bytes: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, bytes(size_bytes))
    os.fsync(descriptor)
    os.close(descriptor)


def sync_raw(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def measure(options: Options) -> Measured:
    logging.disable()
    rounds = Rounds(options.rounds)
    disk = Recorder()
    engine: Any = build_engine(options) if options.mb else EmptyEngine()
    with shared_folder(options) as folder:
        root, copy = os.path.join(folder, "run"), os.path.join(folder, f"raw-{distributed.get_rank()}")
        os.makedirs(os.path.join(copy, layout.STAGING_DIR))
        with CheckpointHandler(engine, EmptyLoader(), default_local_dir=root, storage=disk) as handler:
            handler.load_checkpoint()
            for number in rounds:
                disk.changes.clear()
                rounds.time(SAVE, partial(handler.save_checkpoint, number + 1))
                for what, path, _ in disk.changes:
                    if what == "write":  # a rank that did not make the directory of this save itself
                        os.makedirs(os.path.dirname(path).replace(root, copy, 1), exist_ok=True)
                rounds.time(LIMIT, lambda: replay(disk.changes, root, copy))
                distributed.barrier()
    return 1, rounds.samples


def report(samples: Samples, tensors: int) -> tuple[list[Line], dict[str, float]]:
    ms = median_ms(samples[SAVE])
    ratios = {"handler_ms": ms, "handler_ms_beyond_raw": ms - median_ms(samples[LIMIT])}
    return build_lines(samples, LIMIT, tensors), ratios


def main(arguments: Sequence[str] | None = None) -> None:
    run_bench(__doc__ or "", measure, report, arguments, mb=0, rounds=30, has_many=False)


if __name__ == "__main__":
    main()
