"""Small real parts for tests of the component: an engine of one number, a loader with a position, a world of ranks."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.distributed import HashStore

from recipe_ckpt.contents import read_checked
from recipe_ckpt.coordination import Coordinator, SoloCoordinator, SpmdCoordinator
from recipe_ckpt.engines.base import WrittenPart
from recipe_ckpt.errors import DataMismatchError
from recipe_ckpt.handler import CheckpointHandler
from recipe_ckpt.manifest import FileEntry, encode_json
from recipe_ckpt.policies import LoadPolicy, SavePolicy
from recipe_ckpt.storage import Storage


class TinySnapshot:
    def __init__(self, value: float, rank: int) -> None:
        self.value, self.rank = value, rank

    def write(self, directory: str, storage: Storage) -> WrittenPart:
        name = f"model-{self.rank}.json"
        entry = storage.write_file(os.path.join(directory, name), [encode_json(self.value)], name=name, rank=self.rank)
        return WrittenPart([entry], self.rank)

    def finish(self, directory: str, storage: Storage, fragments: Sequence[Any]) -> Sequence[FileEntry]:
        assert list(fragments) == list(range(len(fragments)))
        return []


class TinyEngine:
    """Its state is one number a rank. `on_save` is called before anything is written, and may raise."""

    def __init__(self, value: float = 0.0, *, rank: int = 0, dp_size: int = 1, on_save: Callable[[], None] | None = None):
        self.value, self.rank, self.dp_size, self.on_save = value, rank, dp_size, on_save

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        raise AssertionError("a snapshot engine is saved by its snapshots")

    def load_checkpoint(self, local_path) -> None:
        raise AssertionError("a snapshot engine is restored by restore()")

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def get_data_parallel_size(self) -> int:
        return self.dp_size

    def snapshot(self, contents: Collection[str]) -> TinySnapshot:
        if self.on_save is not None:
            self.on_save()
        return TinySnapshot(self.value, self.rank)

    def restore(self, directory: str, entries: Mapping[str, FileEntry], contents: Collection[str]) -> None:
        self.value = json.loads(read_checked(directory, entries[f"model-{self.rank}.json"]))


class TinySampler:
    """A positioned sampler of `dataset_len` samples, one each step."""

    def __init__(self, dataset_len: int = 64) -> None:
        self.dataset_len = dataset_len
        self.consumed = 0
        self.is_iterating = False

    def position(self) -> dict[str, Any]:
        return {"samples_consumed": self.consumed, "dataset_len": self.dataset_len}

    def restore_position(self, position: Mapping[str, Any], *, on_mismatch: str) -> None:
        if position["dataset_len"] != self.dataset_len and on_mismatch == "raise":
            raise DataMismatchError(f"dataset_len is {self.dataset_len} here, {position['dataset_len']} in the checkpoint")
        self.consumed = position["samples_consumed"]


class TinyLoader:
    num_workers = 0

    def __init__(self, dataset_len: int = 64) -> None:
        self.batch_sampler = TinySampler(dataset_len)
        self.dataset = range(dataset_len)
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.batch_sampler.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a positioned sampler is restored by its position")


class Run:
    """A run of the tiny recipe in one root: each `with` block is one launch."""

    def __init__(
        self, root: Any, *, coordinator: Coordinator | None = None, engine: TinyEngine | None = None, **options: Any
    ):
        self.engine = engine or TinyEngine()
        self.loader = options.pop("loader", None) or TinyLoader()
        options.setdefault("save_policy", SavePolicy())
        options.setdefault("load_policy", LoadPolicy())
        self.handler = CheckpointHandler(
            self.engine,
            self.loader,
            default_local_dir=str(root),
            coordinator=coordinator or SoloCoordinator(),
            **options,
        )
        self.start = -1

    def __enter__(self) -> Run:
        try:
            self.start = self.handler.load_checkpoint()
        except BaseException:
            self.handler.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.handler.__exit__(*error)

    def save(self, *steps: int) -> Run:
        """Save each step with the step as the engine's state and the data position."""
        for step in steps:
            self.engine.value = float(step)
            self.loader.batch_sampler.consumed = step
            self.handler.save_checkpoint(step, metrics={"loss": 1.0 / (step + 1)})
        return self


def make_checkpoints(root: Any, *steps: int, **options: Any) -> None:
    """Fill a root with committed checkpoints of a run of its own."""
    with Run(root, **options) as run:
        run.save(*steps)


def resume(root: Any, **options: Any) -> int:
    """Launch a run, and return the step at which it stands; its restored state must be that step's."""
    with Run(root, **options) as run:
        if run.handler.resume_point is not None:
            assert run.engine.value == run.start == run.loader.batch_sampler.consumed
        return run.start


def list_steps(root: Any) -> list[int]:
    names = [name for name in os.listdir(root) if name.startswith("global_step_") and name[12:].isdigit()]
    return sorted(int(name[12:]) for name in names)


def cut_in_half(path: Any) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Any) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def run_in_child(work: Callable[[], Any]) -> int:
    """Run `work` in a forked process that ends without cleaning up, and return its exit code (-9: killed)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 (the child must never return into pytest)
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_world(
    size: int,
    work: Callable[[Coordinator], Any],
    *,
    timeout_secs: float = 20.0,
    clocks: Mapping[int, Callable[[], float]] | None = None,
) -> list[Any]:
    """Run `work` on `size` ranks, each a thread with a coordinator over one in-memory store.

    `clocks` are those of the ranks that have their own. Returns each rank's result, or the exception that ended it.
    """
    store = HashStore()
    outcomes: list[Any] = [None] * size

    def run_rank(rank: int) -> None:
        clock = (clocks or {}).get(rank, time.monotonic)
        coordinator = SpmdCoordinator(store, rank, size, rank_timeout_secs=timeout_secs, clock=clock)
        try:
            outcomes[rank] = work(coordinator)
        except BaseException as error:  # noqa: BLE001 (a rank's end is this function's result)
            outcomes[rank] = error
        finally:
            coordinator.close()

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=4 * timeout_secs)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes
