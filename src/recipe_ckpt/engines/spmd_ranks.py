"""Ranks that torchrun (or a launcher like it) has started, and a model laid out over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@contextmanager
def join_ranks(device: str) -> Iterator[None]:
    """Hold the default process group that RANK and WORLD_SIZE in the environment describe; without them do nothing.

    `device` is `cpu` or `cuda`; with `cuda` the current device becomes the one of LOCAL_RANK.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group(_BACKENDS[device])
    try:
        yield
    finally:
        distributed.destroy_process_group()


def distribute(model: nn.Module, *, strategy: Literal["ddp", "fsdp2"], device: str) -> nn.Module:
    """Move a model to the device and lay it out over the ranks; a single rank keeps it plain. Collective.

    `fsdp2` shards each child of the largest `nn.ModuleList`, then the rest. Make the optimizer afterwards.
    """
    model = model.to(device)
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if device == "cuda" else None)
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    for block in _find_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    lists: list[nn.ModuleList] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=_count_elements, default=None)
    return [] if largest is None else list(largest)


def _count_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
