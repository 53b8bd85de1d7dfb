"""Names of a model's tensors: those of the bare model, whatever wraps it or parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from recipe_ckpt.errors import ConfigError, SaveFailedError, StateMismatchError

_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and activation checkpointing call the module that they wrap."""


def name_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; a tied one stands under each of its names."""
    return dict(_walk_tensors(model, ""))


def name_parameters(optimizer: torch.optim.Optimizer, model: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters by their (first) name in the model.

    Raises:
        StateMismatchError: the optimizer holds a parameter that the model does not have.
    """
    names: dict[int, str] = {}
    for name, tensor in model.items():
        names.setdefault(id(tensor), name)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if strangers:
        raise StateMismatchError(
            f"optimizer: {len(strangers)} of its {len(parameters)} parameters are not the model's, the first of shape"
            f" {strangers[0]}. Build the optimizer after the model was moved, wrapped and sharded"
        )
    return {names[id(parameter)]: parameter for parameter in parameters}


def require_no_extra_state(model: nn.Module) -> None:
    """Raise SaveFailedError if a module has state beside parameters and buffers: it would be lost."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise SaveFailedError(
                f"model: module {name!r} ({type(module).__name__}) has get_extra_state(), which is not stored; keep that"
                " state in buffers, or give it to the handler as extra_state"
            )


def _walk_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    module = _unwrap(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk_tensors(child, f"{prefix}{name}.")


def _unwrap(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, FullyShardedDataParallel):
            raise ConfigError("engine", "FullyShardedDataParallel", "plain, DDP or FSDP2 models", "Use fully_shard instead")
        if isinstance(module, DistributedDataParallel):
            module = module.module
            continue
        inner = [module._modules[name] for name in _TRANSPARENT if name in module._modules]
        if not inner or inner[0] is None:
            return module
        module = inner[0]
