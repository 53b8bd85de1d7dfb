"""A model with everything in it that checkpoints go wrong over."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_ckpt.engines.spmd_names import name_tensors


class Block(nn.Module):
    """Odd sizes: over 4 ranks the 5 rows are uneven, and the scale's 3 leave one shard empty."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 5)
        self.down = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * self.scale.sum()


class Toy(nn.Module):
    """Tied embedding, a transposed, a frozen and an unused parameter, integer and 0-dim and non-persistent buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(6, 2))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("table", torch.rand(4, 3).T)
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, ids):
        self.seen += 1
        x = self.embed(ids) * self.frozen + self.table.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_toy(seed):
    torch.manual_seed(seed)
    return Toy()


def train(engine, first_step, last_step, *, seed=0):
    """Do the optimizer steps of a range on batches that only depend on the step, and return the losses."""
    losses = []
    for step in range(first_step, last_step + 1):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        ids = torch.randint(0, 11, (2, 7), generator=generator)
        loss = nn.functional.cross_entropy(engine.model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        engine.step_optimizer(step, clip_grad=1.0)
        losses.append(loss.item())
    return losses


def read_state(engine):
    """Return every leaf of model and optimizer, whole and by name. Collective if anything is sharded."""
    tensors = name_tensors(engine.model)
    names = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    leaves = {name: _whole(tensor) for name, tensor in tensors.items()}
    for parameter, state in engine.optimizer.state.items():
        leaves.update({f"{names[id(parameter)]}/{key}": _whole(value) for key, value in state.items()})
    return leaves


def find_differences(left, right):
    """Return the names of leaves that are not equal bit for bit, with their dtypes."""
    return sorted(
        name
        for name in left.keys() | right.keys()
        if name not in left or name not in right or not _is_same(left[name], right[name])
    )


def _whole(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_same(left, right):
    if not isinstance(left, torch.Tensor):
        return type(left) is type(right) and left == right
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
