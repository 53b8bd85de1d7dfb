"""The recipe's loop on a model and data that need nothing but torch, for tests that run it, kill it and run it again.

`python -m tests.toy [key=value ...]`, alone or under torchrun. Prints `resumed_from=<step or none>`. Keys are the recipe's,
with `toy.kill_after=N`: this process kills itself when step N is trained (and saved, if it is a step to save; and, with
`toy.kill_when_mirrored`, when the mirror has it), `toy.term_after=N`: rank 0 gets a SIGTERM then, `toy.preempt_after=N`: who
started rank 0 gets a SIGUSR1, and `toy.raise_on=R`: rank R fails at the first step.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.utils.data import Dataset

from recipe_ckpt import preemption
from recipe_ckpt.command_line import run_main
from recipe_ckpt.config import DataConfig
from recipe_ckpt.handler import CheckpointHandler
from recipe_ckpt.hydra_side import build_recipe, clean_exit, register_schemas
from recipe_ckpt.job import job, relayed_signals
from recipe_ckpt.launch import run_ranks
from recipe_ckpt.policies import SavePolicy
from recipe_ckpt.sft.data import TrainingData
from recipe_ckpt.sft.loop import Run, open_run, train
from recipe_ckpt.sft.recipe import Recipe
from recipe_ckpt.sft.sampler import SampleKey, derive_seed
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.sweeps import own_turn

CONF = str(Path(__file__).parents[1] / "conf")
VOCAB = 24


@dataclass
class ToyModelConfig:
    _target_: str = "tests.toy.build_model"
    _partial_: bool = True
    hidden_size: int = 16
    dropout: float = 0.2


@dataclass
class ToyDataConfig(DataConfig):
    _target_: str = "tests.toy.build_data"
    _partial_: bool = True
    train_batch_size: int = 4
    samples: int = 64
    val_samples: int = 6
    content: int = 0


class ToyModel(nn.Module):
    def __init__(self, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden_size)
        self.blocks = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(2)])
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, VOCAB)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        hidden = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        for block in self.blocks:
            hidden = hidden + self.drop(torch.tanh(block(hidden)))
        return SimpleNamespace(logits=self.head(hidden))


class ToyData(Dataset):
    """Counting sequences of 4 to 9 tokens; one token of each is another one in every epoch."""

    def __init__(self, samples: int, content: int) -> None:
        self._samples = samples
        self._content = content

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, key: SampleKey) -> dict[str, list[int]]:
        chance = random.Random(derive_seed(self._content, key.epoch, key.id))
        ids = [(key.id + n) % VOCAB for n in range(4 + key.id % 6)]
        ids[chance.randrange(len(ids))] = chance.randrange(VOCAB)
        return {"input_ids": ids, "labels": ids}


def build_model(*, hidden_size: int, dropout: float) -> tuple[nn.Module, None]:
    return ToyModel(hidden_size, dropout), None


def build_data(tokenizer: None, *, samples: int, val_samples: int, content: int) -> TrainingData:
    val = ToyData(val_samples, content) if val_samples else None
    return TrainingData(train=ToyData(samples, content), val=val, fingerprint=f"toy-{content}")


def register_toy() -> None:
    register_schemas()
    store = ConfigStore.instance()
    store.store(group="model", name="toy", node=ToyModelConfig)
    store.store(group="data", name="toy", node=ToyDataConfig)
    changes = {
        "toy": dict.fromkeys(["kill_after", "kill_when_mirrored", "term_after", "preempt_after", "raise_on"]),
        "trainer": {"total_training_steps": None, "save_freq": None, "test_freq": None, "device": "cpu", "logger": []},
        "optim": {"lr_warmup_steps": 3},
        "launch": {"num_threads": 1},
    }
    defaults = ["config", {"override model": "toy"}, {"override data": "toy"}, "_self_"]
    store.store(name="toy", node={"defaults": defaults, **changes})


def compose_toy(*overrides: str) -> Recipe:
    register_toy()
    with hydra.initialize_config_dir(CONF, version_base="1.3"):
        return build_recipe(hydra.compose("toy", list(overrides)))


@contextmanager
def open_toy(*overrides: str) -> Iterator[Run]:
    with open_run(compose_toy(*overrides)) as run:
        yield run


def train_toy(*overrides: str, until: int | None = None) -> Run:
    """Train in this process, to the end or up to a step where it stops as if it were killed there."""
    with open_toy(*overrides) as run:
        for step in train(run):
            if step == until:
                break
    return run


class InterruptingStorage(LocalStorage):
    """A disk that sends this process a signal while a file of step 4 is being written, and goes on when it is told to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write_file(self, path, chunks, *, name, rank):
        if "global_step_4." in path and name == "optimizer-0.safetensors":
            os.kill(os.getpid(), self.number)
            self.reached.set()
            assert self.go_on.wait(30)
        return super().write_file(path, chunks, name=name, rank=rank)


class InterruptedHandler(CheckpointHandler):
    """Lets the save of step 4 be in flight, with its signal sent, until the next save begins."""

    def __init__(self, number: int, engine, loader, *, default_local_dir, extra_state, documents, **_) -> None:
        self._disk = InterruptingStorage(number)
        parts = {"extra_state": extra_state, "documents": documents, "storage": self._disk}
        policy = SavePolicy(is_async=True)
        super().__init__(engine, loader, default_local_dir=default_local_dir, save_policy=policy, **parts)

    def save_checkpoint(self, step, *, metrics=None):
        if step > 4:
            self._disk.go_on.set()
        super().save_checkpoint(step, metrics=metrics)
        if step == 4:
            assert self._disk.reached.wait(30)


build_terminated = partial(InterruptedHandler, signal.SIGTERM)
build_killed = partial(InterruptedHandler, signal.SIGKILL)


def train_ranks(recipe: Recipe, faults: dict[str, int | None]) -> float | None:
    with preemption.watch() as stop, open_run(recipe) as run:
        point = run.handler.resume_point
        print(f"resumed_from={point.step if point else 'none'}", flush=True)  # noqa: T201 (for the test that started it)
        for step in train(run, stop):
            if step == faults["kill_after"]:
                if faults["kill_when_mirrored"]:
                    run.handler.finish_uploads()
                os.kill(os.getpid(), signal.SIGKILL)
            if step == faults["term_after"] and run.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == faults["preempt_after"] and run.rank == 0:
                os.kill(os.getppid(), signal.SIGUSR1)
                while not stop.is_set:  # until it has come back from there
                    os.sched_yield()
            if run.rank == faults["raise_on"]:
                raise ValueError(f"rank {run.rank} was told to fail")
        return run.metric


@hydra.main(version_base="1.3", config_path=CONF, config_name="toy")
def main(cfg):
    with clean_exit(), job():
        recipe = build_recipe(cfg)
        with own_turn(cfg, recipe.root):
            return run_ranks(train_ranks, recipe, dict(cfg.toy))


if __name__ == "__main__":
    from tests import toy  # ranks and launchers import by name what is sent to them: nothing of it may be __main__'s

    toy.register_toy()
    with relayed_signals():
        run_main(toy.main)
