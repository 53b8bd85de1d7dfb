"""A model's and an optimizer's state by name, found once and recognised as long as it consists of the same tensors.

Walking the names and flattening the optimizer costs some 20 us a tensor; seeing that nothing was replaced about 0.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recipe_ckpt.engines.spmd_names import name_parameters, name_tensors, require_no_extra_state
from recipe_ckpt.engines.spmd_optimizer import capture_state, describe_groups
from recipe_ckpt.tensors.plan import PartState


class StateTracker:
    """Captures parts of a state. An unchanged part comes back with the same mapping of tensors (identical, not equal)."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of everything that was captured."""
        self._modules: list[nn.Module] = []
        self._module_ids: list[object] = []
        self._model: PartState | None = None
        self._is_checked = False
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizer_ids: list[object] = []
        self._optimizer: PartState | None = None

    def capture(self, model: nn.Module, optimizer: torch.optim.Optimizer, contents: Collection[str]) -> dict[str, PartState]:
        """Return `model` and `optimizer`, as far as `contents` has them.

        Raises:
            SaveFailedError: a part of the state can't be stored.
        """
        names = self._capture_model(model)
        parts = {}
        if "model" in contents:
            if not self._is_checked:
                require_no_extra_state(model)
                self._is_checked = True
            parts["model"] = names
        if "optimizer" in contents:
            parts["optimizer"] = self._capture_optimizer(optimizer, names)
        return parts

    def _capture_model(self, model: nn.Module) -> PartState:
        if not self._modules or self._modules[0] is not model or _identify_modules(self._modules) != self._module_ids:
            self.forget()
            self._modules = list(model.modules())
            self._module_ids = _identify_modules(self._modules)
        if self._model is None:
            tensors = name_tensors(model)
            buffers = {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
            self._model = PartState(tensors, volatile=buffers)
        return self._model

    def _capture_optimizer(self, optimizer: torch.optim.Optimizer, names: PartState) -> PartState:
        ids = _identify_optimizer(optimizer)
        held = self._optimizer
        if held is not None and ids is not None and ids == self._optimizer_ids:
            groups = describe_groups(optimizer, self._parameters)
            return replace(held, leaves={**held.leaves, "param_groups": groups})
        self._parameters = name_parameters(optimizer, names.tensors)
        found = capture_state(optimizer, self._parameters)
        if held is not None and _are_identical(held.tensors, found.tensors):
            found = replace(held, leaves=found.leaves)  # only numbers changed, which some optimizers keep outside of tensors
        self._optimizer, self._optimizer_ids = found, ids or []
        return found


def _identify_modules(modules: Iterable[nn.Module]) -> list[object]:
    """Return names and identities of everything below these modules that is saved. All of it is kept alive by `capture`."""
    found: list[object] = []
    for module in modules:
        for table in (module._parameters, module._modules):
            found.append(len(table))
            found += table
            found += map(id, table.values())
        hidden = module._non_persistent_buffers_set
        buffers = {name: id(buffer) for name, buffer in module._buffers.items() if name not in hidden}
        found.append(len(buffers))
        found += buffers
        found += buffers.values()
    return found


def _identify_optimizer(optimizer: torch.optim.Optimizer) -> list[object] | None:
    """Return the same for an optimizer, or None if it holds anything but tensors: that may change in place."""
    found: list[object] = [type(optimizer)]
    for group in optimizer.param_groups:
        found.append(len(group["params"]))
        found += map(id, group["params"])
    for owner, state in optimizer.state.items():
        if not _holds_only_tensors(state):
            return None
        found.append(id(owner))
        found += state
        found += map(id, state.values())
    return found


def _holds_only_tensors(state: Mapping[str, Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in state.values())


def _are_identical(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(map(_is_same, left.values(), right.values()))


def _is_same(left: object, right: object) -> bool:
    return left is right
