"""A checked configuration, and the parts that are built from it."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe_ckpt.config import DataConfig, Device, EngineConfig, LaunchConfig, OptimConfig, TrainerConfig
from recipe_ckpt.engines.spmd import SpmdEngine, distribute
from recipe_ckpt.errors import ConfigError
from recipe_ckpt.sft.data import Collator, KeyedDataset, TrainingData
from recipe_ckpt.sft.sampler import GlobalBatchSampler
from recipe_ckpt.sft.schedule import LrSchedule


@dataclass(frozen=True)
class Recipe:
    """A checked configuration: plain values, and callables that build the parts.

    `build_model() -> (model, tokenizer)`, `build_data(tokenizer) -> TrainingData`, and `build_handler(engine, loader, *,
    extra_state, documents)`. `root` is the run's own directory.
    """

    trainer: TrainerConfig
    optim: OptimConfig
    engine: EngineConfig
    launch: LaunchConfig
    data: DataConfig
    root: str
    build_model: Callable[[], tuple[nn.Module, Any]]
    build_data: Callable[[Any], TrainingData]
    build_handler: Callable[..., Any]
    documents: Mapping[str, str]
    optimized_metric: str | None = None


def build_engine(recipe: Recipe, model: nn.Module, schedule: LrSchedule, device: str) -> SpmdEngine:
    spread = distribute(model, strategy=recipe.engine.strategy.value, device=device)
    spread.train()
    optim = recipe.optim
    optimizer = torch.optim.AdamW(
        spread.parameters(),
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    return SpmdEngine(spread, optimizer, lr_at=schedule)


def build_sampler(recipe: Recipe, data: TrainingData, engine: SpmdEngine) -> GlobalBatchSampler:
    return GlobalBatchSampler(
        count_samples(data.train),
        batch_size=recipe.data.train_batch_size,
        dp_rank=engine.get_data_parallel_rank(),
        dp_size=engine.get_data_parallel_size(),
        seed=recipe.trainer.seed,
        shuffle=recipe.data.shuffle,
        drop_last=recipe.data.drop_last,
        fingerprint=data.fingerprint,
    )


def build_loader(recipe: Recipe, data: TrainingData, sampler: GlobalBatchSampler) -> StatefulDataLoader[Any]:
    with warnings.catch_warnings():
        # torchdata 0.11 calls what torch 2.13 has deprecated
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            KeyedDataset(data.train),
            batch_sampler=sampler,
            num_workers=recipe.data.num_workers,
            prefetch_factor=recipe.data.prefetch_factor,
            collate_fn=Collator(data.pad_id, recipe.data.micro_batch_size_per_gpu),
            # Making an iterator draws a seed: from here, so that the global generator stays where the checkpoint left it.
            generator=torch.Generator().manual_seed(recipe.trainer.seed),
        )


def build_val_loader(recipe: Recipe, data: TrainingData, engine: SpmdEngine) -> DataLoader[Any] | None:
    """Return a loader of all validation samples; fillers give each rank the same number of forward passes."""
    if data.val is None:
        return None
    sampler = GlobalBatchSampler(
        count_samples(data.val),
        batch_size=recipe.data.train_batch_size,
        dp_rank=engine.get_data_parallel_rank(),
        dp_size=engine.get_data_parallel_size(),
        seed=recipe.trainer.seed,
        shuffle=False,
    )
    collator = Collator(data.pad_id, recipe.data.micro_batch_size_per_gpu)
    return DataLoader(KeyedDataset(data.val), batch_sampler=sampler, collate_fn=collator, generator=torch.Generator())


def count_samples(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not promise a length


def choose_device(device: Device) -> str:
    """Return the kind; which CUDA device it is, joining the ranks settles.

    Raises:
        ConfigError: CUDA was asked for, and torch finds none.
    """
    has_cuda = torch.cuda.is_available()
    if device == Device.cuda and not has_cuda:
        raise ConfigError("trainer.device", device.value, "auto or cpu", "torch finds no CUDA device on this machine.")
    return "cuda" if has_cuda and device != Device.cpu else "cpu"


@contextmanager
def settled_torch(launch: LaunchConfig) -> Iterator[None]:
    """Give torch the threads and algorithms of `launch`; after it, the next job of this process finds what was before."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if launch.num_threads is not None:
        torch.set_num_threads(launch.num_threads)
    if launch.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
