"""CheckpointHandler: when to save what where, and where to start from. The story; each part is told elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from recipe_ckpt.checkpoint_rules import validate_checkpoint
from recipe_ckpt.contents import RunContents, Stateful, check_names, name_engines
from recipe_ckpt.coordination import Coordinator, SoloCoordinator, SpmdCoordinator
from recipe_ckpt.engines.base import Engine
from recipe_ckpt.errors import CheckpointError, ConfigError
from recipe_ckpt.lease import find_launch_id
from recipe_ckpt.loading import Resumer
from recipe_ckpt.node_mirror import NodeMirror, OpenRemote
from recipe_ckpt.node_probe import find_nodes
from recipe_ckpt.node_session import NodeSession
from recipe_ckpt.nodes import Node, Nodes
from recipe_ckpt.policies import LoadPolicy, MirrorPolicy, OrchestrationMode, ResumePoint, SavePolicy
from recipe_ckpt.remote_client import RemoteClient
from recipe_ckpt.resume import Request
from recipe_ckpt.retention import Retention
from recipe_ckpt.saving import Saver, SaveReport
from recipe_ckpt.session import RootSession
from recipe_ckpt.storage import LocalStorage, Storage
from recipe_ckpt.store import Store
from recipe_ckpt.uploader import UploadReport

logger = logging.getLogger(__name__)


class CheckpointHandler:
    """Saves and resumes a training run.

    Made on every rank; `load_checkpoint`, `save_checkpoint` and `close` are collective. Making it checks its arguments and
    touches no disk; `load_checkpoint` takes the root's lease, `close` (or leaving the `with` block) gives it back.

    Args:
        engine: an object with verl's engine methods, or a mapping of names to such (each gets a folder of its name).
        train_dataloader: its sampler's global position is saved, or else its `state_dict()`.
        default_local_dir: the run's root; relative to the working directory.
        max_ckpt_to_keep: how many checkpoints stay; None keeps all.
        default_hdfs_dir: the mirror: a URL of any fsspec file system, or a directory (a mounted disk).
        resume_mode: `auto`, `disable` or `resume_path`.
        resume_from_path: a `global_step_<N>` directory or a run's root, here or by its URL.
        mirror_policy: how the mirror keeps up, and what follows if it does not.
        retention: what stays beside the newest ones: every so many steps, the best ones.
        lora_train_meta: `{"r", "lora_alpha", "task_type"}`, written as `lora_train_meta.json`.
        extra_state: further state by name.
        documents: texts by file name that go into each checkpoint, such as `config.yaml`.
        coordinator: who the ranks are; by default found from `torch.distributed`.
        open_remote: connects to a URL; by default in a process of its own.

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
        mirror_policy: MirrorPolicy | None = None,
        retention: Retention | None = None,
        rank_timeout_secs: float = 600.0,
        extra_state: Mapping[str, Stateful] | None = None,
        documents: Mapping[str, str] | None = None,
        coordinator: Coordinator | None = None,
        storage: Storage | None = None,
        open_remote: OpenRemote = RemoteClient,
    ) -> None:
        self._save_policy = save_policy or SavePolicy()
        self._mirror_policy = mirror_policy or MirrorPolicy()
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
                "on_config_drift": self._load_policy.on_config_drift,
                "on_upload_failure": self._mirror_policy.on_failure,
                "max_remote_ckpt_to_keep": self._mirror_policy.max_to_keep,
                "max_pending_uploads": self._mirror_policy.max_pending,
                "exit_upload_wait_secs": self._mirror_policy.exit_wait_secs,
            }
        )
        _refuse_ray(mode)
        check_names(documents or (), extra_state or ())
        self.root: str = settled["default_local_dir"]
        self.resume_point: ResumePoint | None = None
        self._mirror_url: str | None = settled["default_hdfs_dir"]
        self._open_remote = open_remote
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
        self._node: NodeSession | None = None
        self._session: RootSession | None = None
        self._saver: Saver | None = None

    @property
    def last_save(self) -> SaveReport | None:
        """What the last finished save took on this rank."""
        return self._saver.last_save if self._saver else None

    @property
    def last_upload(self) -> UploadReport | None:
        """What the last upload took: rank 0's, or of a root of a node's own its part. None on other ranks."""
        return self._node.mirror.last_upload if self._node else None

    @property
    def pending_uploads(self) -> list[int]:
        """Steps that the mirror lacks, or lacks this node's part of, the newest first. Empty on ranks that send nothing."""
        return self._node.mirror.pending if self._node else []

    def load_checkpoint(self) -> int:
        """Restore the run and return its step; 0 is a fresh start, with `resume_point` None. Collective, once.

        Raises:
            CheckpointError: what was asked for can't be had, or checkpoints exist and none of them is whole.
            RankError: another rank failed.
        """
        if self._node is not None or self._saver is not None:
            raise RuntimeError("load_checkpoint() was called before: a handler resumes once")
        nodes = self._find_nodes()
        resumer = Resumer(
            self._coordinator,
            self._storage,
            nodes,
            self.root,
            self._contents,
            self._load_policy,
            self._node,
            self._session,
        )
        token = resumer.open()
        self.resume_point, archived = resumer.resume()
        self._saver = Saver(
            self._coordinator,
            self._storage,
            nodes,
            self.root,
            self._contents,
            self._save_policy,
            self._retention,
            self._node,
            self._session,
            token,
        )
        self._tell_start(archived)
        return self.resume_point.step if self.resume_point else 0

    def save_checkpoint(self, step: int, *, metrics: Mapping[str, float] | None = None) -> None:
        """Save the run after `step` optimizer steps. Collective, at a step's edge.

        A blocking save is durable on return. An asynchronous one has copied the run's state on return, and its outcome
        surfaces at the next save, `wait` or `close`. `metrics` are numbers of this step (a validation loss), kept in the
        manifest.

        Raises:
            SaveFailedError: a save failed on some rank, and `on_save_failure` is `raise`; the checkpoint before is intact.
            LeaseHeldError: another process has taken the root over.
        """
        if self._saver is None:
            raise RuntimeError("save_checkpoint() before load_checkpoint(): the load decides where the run begins")
        self._saver.save(step, metrics or {})

    def wait(self) -> None:
        """Return when the save in flight is committed, if there is one. Raises: as `save_checkpoint`."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait for the save in flight and for uploads, give the root's lease back, and drop the connection between the ranks.

        Uploads are waited for at most `exit_wait_secs`, on the ranks that send something. Leaving a `with` block by an
        exception does not wait for them: the next start sends what is missing. May be called twice.

        Raises:
            SaveFailedError: the last save failed, also if `on_save_failure` is `warn`: no later one makes up for it.
            UploadFailedError: the mirror refused, and `on_upload_failure` is `raise`.
        """
        self._close(wait_for_uploads=True)

    def finish_uploads(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the mirror has every save, at most `exit_wait_secs`; `should_stop` ends the wait.

        Only ranks wait that send something: rank 0, and of each other root the lowest one.
        """
        self.wait()
        if self._node is not None:
            self._node.mirror.drain(should_stop)

    def _close(self, *, wait_for_uploads: bool) -> None:
        node, saver = self._node, self._saver
        self._node = self._session = self._saver = None
        try:
            if saver is not None:
                saver.finish()
            self._coordinator.close()  # the other ranks need not wait for the uploads
            if node is not None and wait_for_uploads:
                node.mirror.drain(lambda: False)
                node.mirror.raise_failure()
        finally:
            if node is not None:
                node.close()
            self._coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._close(wait_for_uploads=error is None)
        except CheckpointError as own:
            if error is None:
                raise
            logger.error("%s", own)  # what ended the block comes first

    def _find_nodes(self) -> Nodes:
        """Find out which ranks share a root, and make the sessions of those that lead. Collective."""
        rank = self._coordinator.rank
        nodes = find_nodes(self._coordinator, self._storage, self.root)
        self._contents.use_disks(nodes.disks)
        if nodes.leads(rank):
            self._node = self._open_node(replace(nodes.of(rank), root=self.root))
        if self._node is not None and rank == 0:
            self._session = RootSession(self._node, self._storage, self._request, self._retention)
        return nodes

    def _open_node(self, node: Node) -> NodeSession:
        store = Store(self.root, self._storage)
        policy = self._mirror_policy
        on_mirror = replace(self._retention, max_to_keep=policy.max_to_keep)
        mirror = NodeMirror(self._mirror_url, node, self._coordinator.world_size, store, policy, on_mirror, self._open_remote)
        return NodeSession(node, store, mirror, self._storage, self._request.launch_id)

    def _tell_start(self, archived: str | None) -> None:
        if self._coordinator.rank != 0:
            return
        moved = f"; what was here lies in {archived} now" if archived else ""
        if self.resume_point is None:
            logger.info("starting at step 0 in %s%s", self.root, moved)
        else:
            point = self.resume_point
            logger.info("resumed step %d from %s: %s%s", point.step, point.path, point.reason, moved)


def _find_coordinator(rank_timeout_secs: float) -> Coordinator:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return SpmdCoordinator.from_process_group(rank_timeout_secs=rank_timeout_secs)
    return SoloCoordinator()


def _refuse_ray(mode: OrchestrationMode) -> None:
    if mode is not OrchestrationMode.SPMD:
        raise ConfigError("mode", mode, "OrchestrationMode.SPMD", "Ray worker groups are not supported in this version.")
