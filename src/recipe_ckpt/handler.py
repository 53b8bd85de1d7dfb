"""CheckpointHandler: when to save what where, and where to start from. The story; each part is told elsewhere."""

from __future__ import annotations

import enum
import importlib.metadata
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

from recipe_ckpt import layout
from recipe_ckpt.config import CONTENTS
from recipe_ckpt.contents import RunContents, Stateful, name_engines
from recipe_ckpt.coordination import Coordinator, SoloCoordinator, SpmdCoordinator
from recipe_ckpt.engines.base import Engine
from recipe_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    RootNotSharedError,
    SaveFailedError,
)
from recipe_ckpt.lease import find_launch_id
from recipe_ckpt.manifest import decode_json, to_plain
from recipe_ckpt.resume import Candidate, Request
from recipe_ckpt.retention import Retention
from recipe_ckpt.session import RootSession
from recipe_ckpt.storage import LocalStorage, Storage
from recipe_ckpt.store import Staging
from recipe_ckpt.survey import read_commit, read_files
from recipe_ckpt.validation import validate_checkpoint

logger = logging.getLogger(__name__)


class OrchestrationMode(enum.Enum):
    """verl's two ways to run: every rank calls the handler (SPMD), or one driver does (RAY)."""

    SPMD = 0
    RAY = 1


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """What a save holds (of `model`, `optimizer`, `extra`), and what follows if it fails: `raise` or `warn`."""

    contents: Sequence[str] = CONTENTS
    on_failure: str = "raise"


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """What a resume restores, and what follows if the data set is another one: `raise` or `restart` the epoch."""

    contents: Sequence[str] = CONTENTS
    on_data_mismatch: str = "raise"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where this run started from."""

    step: int
    path: str
    reason: str
    metrics: Mapping[str, float]


class CheckpointHandler:
    """Saves and resumes a training run.

    Made on every rank; `load_checkpoint`, `save_checkpoint` and `close` are collective. Making it checks its arguments and
    touches no disk; `load_checkpoint` takes the root's lease, `close` (or leaving the `with` block) gives it back.

    Args:
        engine: an object with verl's engine methods, or a mapping of names to such (each gets a folder of its name).
        train_dataloader: its sampler's global position is saved, or else its `state_dict()`.
        default_local_dir: the run's root; relative to the working directory.
        max_ckpt_to_keep: how many checkpoints stay; None keeps all.
        resume_mode: `auto`, `disable` or `resume_path`.
        resume_from_path: a `global_step_<N>` directory or a run's root.
        retention: what stays beside the newest ones: every so many steps, the best ones.
        lora_train_meta: `{"r", "lora_alpha", "task_type"}`, written as `lora_train_meta.json`.
        extra_state: further state by name.
        documents: texts by file name that go into each checkpoint, such as `config.yaml`.
        coordinator: who the ranks are; by default found from `torch.distributed`.

    Raises:
        ConfigError: an argument can't work.
    """

    def __init__(
        self,
        engine: Engine | Mapping[str, Engine],
        train_dataloader: Any,
        *,
        default_local_dir: str,
        max_ckpt_to_keep: int | None = None,
        default_hdfs_dir: str | None = None,
        resume_mode: str = "auto",
        resume_from_path: str | None = None,
        mode: OrchestrationMode = OrchestrationMode.SPMD,
        lora_train_meta: Mapping[str, Any] | None = None,
        save_policy: SavePolicy | None = None,
        load_policy: LoadPolicy | None = None,
        retention: Retention | None = None,
        rank_timeout_secs: float = 600.0,
        extra_state: Mapping[str, Stateful] | None = None,
        documents: Mapping[str, str] | None = None,
        coordinator: Coordinator | None = None,
        storage: Storage | None = None,
    ) -> None:
        self._save_policy = save_policy or SavePolicy()
        self._load_policy = load_policy or LoadPolicy(self._save_policy.contents)
        settled = validate_checkpoint(
            {
                "default_local_dir": default_local_dir,
                "max_ckpt_to_keep": max_ckpt_to_keep,
                "default_hdfs_dir": default_hdfs_dir,
                "resume_mode": resume_mode,
                "resume_from_path": resume_from_path,
                "save_contents": list(self._save_policy.contents),
                "load_contents": list(self._load_policy.contents),
                "on_save_failure": self._save_policy.on_failure,
                "on_data_mismatch": self._load_policy.on_data_mismatch,
            }
        )
        _refuse_ray(mode)
        self.root: str = settled["default_local_dir"]
        self.resume_point: ResumePoint | None = None
        self._retention = replace(retention or Retention(), max_to_keep=settled["max_ckpt_to_keep"])
        self._storage = storage or LocalStorage()
        self._coordinator = coordinator or _find_coordinator(rank_timeout_secs)
        self._contents = RunContents(
            engines=name_engines(engine),
            loader=train_dataloader,
            extra_state=extra_state or {},
            lora_train_meta=lora_train_meta,
            documents=documents or {},
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
            on_data_mismatch=self._load_policy.on_data_mismatch,
        )
        self._request = Request(
            settled["resume_mode"], settled["resume_from_path"], find_launch_id(), tuple(self._load_policy.contents)
        )
        self._session: RootSession | None = None
        self._is_started = False

    # --- resume

    def load_checkpoint(self) -> int:
        """Restore the run and return its step; 0 is a fresh start, with `resume_point` None. Collective, once.

        Raises:
            CheckpointError: what was asked for can't be had, or checkpoints exist and none of them is whole.
            RankError: another rank failed.
        """
        self._open()
        while (candidate := self._share_next_candidate()) is not None:
            damage = self._restore(candidate)
            if damage is None:
                return self._start_from(candidate)
            self._coordinator.lead(lambda: self._leader().refuse(candidate, damage))  # noqa: B023 (called at once)
        return self._start_from(None)

    def _open(self) -> None:
        if self._session is not None or self._is_started:
            raise RuntimeError("load_checkpoint() was called before: a handler resumes once")
        if self._coordinator.rank == 0:
            self._session = RootSession(self.root, self._storage, self._request)
        token = self._coordinator.lead(self._open_root)
        self._coordinator.together(lambda: self._check_root_is_shared(token), lambda _: None)

    def _open_root(self) -> str:
        self._leader().open()
        return self._leader().lease_token

    def _check_root_is_shared(self, token: str) -> None:
        """Every rank looks for rank 0's lease; one that lies on another node's disk would never see it."""
        path = os.path.join(self.root, layout.LEASE)
        deadline = time.monotonic() + _VISIBLE_WITHIN_SECS
        while time.monotonic() < deadline:
            try:
                if decode_json(self._storage.read(path), path)["token"] == token:
                    return
            except (OSError, DamagedCheckpointError):
                pass
            time.sleep(0.05)
        raise RootNotSharedError(
            f"checkpoint.default_local_dir: rank {self._coordinator.rank} on {platform.node()} does not see in {self.root}"
            " what rank 0 wrote there; allowed is a directory that all nodes share (node-local disks are not supported yet)",
            path=self.root,
        )

    def _share_next_candidate(self) -> Candidate | None:
        found = self._coordinator.lead(lambda: _to_json(self._leader().next_candidate()))
        return None if found is None else Candidate(**found)

    def _restore(self, candidate: Candidate) -> str | None:
        """Restore on every rank; return what is damaged, the same on all, or None. Other failures raise."""
        together = self._coordinator.together
        damage: str | None = together(lambda: self._try(candidate, check_only=True), _join_damage)
        if damage is None:
            damage = together(lambda: self._try(candidate, check_only=False), _join_damage)
        return damage

    def _try(self, candidate: Candidate, *, check_only: bool) -> str | None:
        try:
            commit = read_commit(self._storage, candidate.path) if candidate.digest else None
            table = read_files(self._storage, commit) if commit else None
            if check_only:
                self._contents.check_foreign(candidate.path, table)
            else:
                geometry = commit.manifest.data if commit else None
                self._contents.restore(candidate.path, table, candidate.step, self._load_policy.contents, geometry)
        except (DamagedCheckpointError, OSError) as error:
            return f"rank {self._coordinator.rank}: {error}"
        return None

    def _start_from(self, candidate: Candidate | None) -> int:
        archived = self._coordinator.lead(lambda: self._leader().start_from(candidate))
        self._is_started = True
        if candidate is None:
            moved = f"; what was here lies in {archived} now" if archived else ""
            self._log(logging.INFO, f"starting at step 0 in {self.root}{moved}")
            return 0
        metrics = self._coordinator.lead(lambda: self._read_metrics(candidate))
        self.resume_point = ResumePoint(candidate.step, candidate.path, candidate.reason, metrics)
        self._log(logging.INFO, f"resumed step {candidate.step} from {candidate.path}: {candidate.reason}")
        return candidate.step

    def _read_metrics(self, candidate: Candidate) -> dict[str, float]:
        metrics = read_commit(self._storage, candidate.path).manifest.metrics if candidate.digest else {}
        return {name: float(value) for name, value in metrics.items()}

    # --- save

    def save_checkpoint(self, step: int, *, metrics: Mapping[str, float] | None = None) -> None:
        """Save the run after `step` optimizer steps. Collective, at a step's edge; durable on return.

        `metrics` are numbers of this step (a validation loss), kept in the manifest.

        Raises:
            SaveFailedError: the save failed on some rank, and `on_save_failure` is `raise`; the checkpoint before is intact.
            LeaseHeldError: another process has taken the root over.
        """
        self._require_started()
        began = time.monotonic()
        try:
            staging = Staging(**self._coordinator.lead(lambda: asdict(self._leader().begin(step))))
            size_bytes = self._write_and_commit(staging, metrics or {})
        except Exception as error:
            if isinstance(error, CheckpointError) and error.is_final:
                raise
            self._fail(step, error)  # whatever an engine raises is a failed save
            return
        took = time.monotonic() - began
        self._log(logging.INFO, f"saved step {step}: {size_bytes / 1e6:.1f} MB in {took:.2f} s, {self.root}")
        if self._session is not None:
            self._session.prune(self._retention)

    def _write_and_commit(self, staging: Staging, metrics: Mapping[str, float]) -> int:
        contents = self._save_policy.contents

        def write() -> dict[str, Any]:
            return self._contents.write(staging.path, self._storage, staging.step, contents)

        def commit(parts: list[Any]) -> int:
            entries = self._contents.finish(staging.path, self._storage, staging.step, contents, parts)
            self._leader().commit(staging, entries, self._describe(metrics))
            return sum(entry.size_bytes for entry in entries)

        try:
            return int(self._coordinator.together(write, commit))
        except BaseException:
            if self._session is not None:
                self._session.abandon(staging)
            raise

    def _describe(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            "world_size": self._coordinator.world_size,
            "dp_size": self._contents.dp_size,
            "contents": tuple(self._save_policy.contents),
            "data": self._contents.describe_data(),
            "metrics": to_plain({name: float(value) for name, value in metrics.items()}),  # a loss may be NaN
            "versions": _list_versions(),
        }

    def _fail(self, step: int, error: Exception) -> None:
        message = f"step {step}: not saved to {self.root}: {type(error).__name__}: {error}"
        if self._save_policy.on_failure == "raise":
            raise SaveFailedError(message, step=step, path=self.root) from error
        self._log(logging.ERROR, f"{message}; training goes on (checkpoint.on_save_failure=warn)")

    def _require_started(self) -> None:
        if not self._is_started:
            raise RuntimeError(
                "save_checkpoint() before load_checkpoint(): the load decides whether the run continues or starts"
            )

    # --- end

    def close(self) -> None:
        """Give the root's lease back and drop the connection between the ranks. May be called twice."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._is_started = False
        self._coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _leader(self) -> RootSession:
        assert self._session is not None, "only rank 0 has a session"
        return self._session

    def _log(self, level: int, message: str) -> None:
        if self._coordinator.rank == 0:
            logger.log(level, message)


class NoCheckpoints:
    """A handler that saves and loads nothing: `checkpoint=none`."""

    resume_point: ResumePoint | None = None

    def __init__(self, engine: Any, train_dataloader: Any, **_: Any) -> None:
        """Take what a handler takes, and keep nothing of it."""

    def load_checkpoint(self) -> int:
        return 0

    def save_checkpoint(self, step: int, *, metrics: Mapping[str, float] | None = None) -> None:
        """Save nothing."""

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing is held."""


def build_handler(
    engine: Engine | Mapping[str, Engine],
    train_dataloader: Any,
    *,
    lora_train_meta: Mapping[str, Any] | None = None,
    extra_state: Mapping[str, Stateful] | None = None,
    documents: Mapping[str, str] | None = None,
    **keys: Any,
) -> CheckpointHandler:
    """Make a handler from the flat keys of `CheckpointConfig`: the target of `conf/checkpoint`.

    Raises:
        ConfigError: a key is unknown, or its value can't work.
    """
    settled = validate_checkpoint(keys)
    return CheckpointHandler(
        engine,
        train_dataloader,
        default_local_dir=os.path.join(settled["default_local_dir"], settled["run_subdir"]),
        max_ckpt_to_keep=settled["max_ckpt_to_keep"],
        default_hdfs_dir=settled["default_hdfs_dir"],
        resume_mode=settled["resume_mode"],
        resume_from_path=settled["resume_from_path"],
        lora_train_meta=lora_train_meta,
        save_policy=SavePolicy(settled["save_contents"], settled["on_save_failure"]),
        load_policy=LoadPolicy(settled["load_contents"], settled["on_data_mismatch"]),
        retention=Retention(
            every=settled["keep_every"],
            best=settled["keep_best"],
            best_metric=settled["best_metric"],
            best_mode=settled["best_mode"],
        ),
        rank_timeout_secs=settled["rank_timeout_secs"],
        extra_state=extra_state,
        documents=documents,
    )


# Long enough for a network file system's attribute cache.
_VISIBLE_WITHIN_SECS = 60.0


def _to_json(candidate: Candidate | None) -> dict[str, Any] | None:
    return None if candidate is None else asdict(candidate)


def _join_damage(found: Sequence[str | None]) -> str | None:
    return next((damage for damage in found if damage is not None), None)


def _find_coordinator(rank_timeout_secs: float) -> Coordinator:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return SpmdCoordinator.from_process_group(rank_timeout_secs=rank_timeout_secs)
    return SoloCoordinator()


def _refuse_ray(mode: OrchestrationMode) -> None:
    if mode is not OrchestrationMode.SPMD:
        raise ConfigError("mode", mode, "OrchestrationMode.SPMD", "Ray worker groups are not supported in this version.")


def _list_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("recipe-ckpt", "torch", "torchdata"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
