"""Optimizer state by parameter name: taken apart for the disk, and built again for the run's topology.

torch's own helpers are not used: `get_optimizer_state_dict` runs a step on a fresh optimizer and invents state for unused
parameters, `set_optimizer_state_dict` casts the fp32 state of a bf16 parameter. State that does not exist stays absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from recipe_ckpt.errors import DamagedCheckpointError, SaveFailedError
from recipe_ckpt.layout import TENSOR_INDEX
from recipe_ckpt.manifest import JSON, to_plain
from recipe_ckpt.tensors.index import PartIndex
from recipe_ckpt.tensors.plan import TORCH_DTYPES, PartState
from recipe_ckpt.tensors.reader import require_no_difference
from recipe_ckpt.tensors.trees import Tensors, escape, flatten, unflatten

NamedParameters = Mapping[str, torch.nn.Parameter]


def capture_state(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> PartState:
    """Return the state of every parameter that has one, and of which optimizer and groups it is.

    Raises:
        SaveFailedError: a value can't be stored, or could not be built again on other ranks.
    """
    _require_known_owners(optimizer, parameters)
    tensors: Tensors = {}
    described = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        trees = {key: flatten(value, f"{name}.{escape(key)}", tensors) for key, value in state.items()}
        for key, value in state.items():
            _require_rebuildable(f"{name}.{key}", value, parameter)
        described[name] = {"shape": list(parameter.shape), "state": trees}
    leaves = {
        "optimizer": type(optimizer).__name__,
        "param_groups": describe_groups(optimizer, parameters),
        "parameters": described,
    }
    return PartState(tensors, leaves)


def describe_groups(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> JSON:
    """Write the groups and their hyperparameters down for people: they are never loaded."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [_describe_group(group, names) for group in optimizer.param_groups]


def require_same_optimizer(optimizer: torch.optim.Optimizer, parameters: NamedParameters, part: PartIndex) -> None:
    """Compare the optimizer's class and its parameters' names and shapes with what was saved, before anything is read.

    Raises:
        StateMismatchError: they differ. Hyperparameters may: they come from the config.
    """
    saved = _find_leaf(part, "parameters")
    kinds = part.leaves.get("optimizer"), type(optimizer).__name__
    both = [name for name in parameters if name in saved]
    shapes = [(name, saved[name]["shape"], list(parameters[name].shape)) for name in both]
    require_no_difference(
        "optimizer",
        {
            "other optimizer": [f"checkpoint {kinds[0]!r}, run {kinds[1]!r}"] if kinds[0] != kinds[1] else [],
            "parameters missing in the checkpoint": [repr(name) for name in parameters if name not in saved],
            "parameters not in this run": [repr(name) for name in saved if name not in parameters],
            "of another shape": [f"{name!r} (checkpoint {old}, run {new})" for name, old, new in shapes if old != new],
        },
    )


def build_state(
    optimizer: torch.optim.Optimizer, parameters: NamedParameters, part: PartIndex
) -> tuple[dict[str, dict[str, Any]], Tensors]:
    """Return new state by parameter name, and its tensors by name in the checkpoint: to be filled, then installed.

    The optimizer's own state is taken out of it; where it fits its memory is used again, for new memory is slow to fill.
    """
    saved = _find_leaf(part, "parameters")
    names = {id(parameter): name for name, parameter in parameters.items()}
    tensors: Tensors = {}
    state = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            old = optimizer.state.pop(parameter, {})
            name = names[id(parameter)]
            state[name] = {
                key: unflatten(tree, _Maker(part, parameter, _find_device(key, parameter, group), tensors, old.get(key)).make)
                for key, tree in saved[name]["state"].items()
            }
    optimizer.state.clear()
    return state, tensors


class _Maker:
    """Makes the tensors of one value of one parameter's state; `old` is the value that stood there."""

    def __init__(
        self, part: PartIndex, parameter: torch.nn.Parameter, device: torch.device, tensors: Tensors, old: object
    ) -> None:
        self._part = part
        self._parameter = parameter
        self._device = device
        self._tensors = tensors
        self._old = old

    def make(self, name: str) -> torch.Tensor:
        canonical = self._part.aliases.get(name, name)
        if canonical not in self._tensors:
            self._tensors[canonical] = self._allocate(canonical)
        self._tensors[name] = self._tensors[canonical]
        return self._tensors[name]

    def _allocate(self, canonical: str) -> torch.Tensor:
        stored = self._part.tensors[canonical]
        dtype, shape = TORCH_DTYPES[stored.dtype], stored.grid.shape
        is_alike = shape == self._parameter.shape and self._device == self._parameter.device
        old, self._old = self._old, None
        if isinstance(old, torch.Tensor) and (old.dtype, old.shape, old.device) == (dtype, shape, self._device):
            is_reusable = _owns_memory(old) and (not is_alike or _is_sharded_alike(old, self._parameter))
            if is_reusable:
                return old
        if is_alike:
            return torch.empty_like(self._parameter.detach(), dtype=dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)


def _owns_memory(tensor: torch.Tensor) -> bool:
    """Say whether nothing else lies in a tensor's memory, as it would in a view of a flat buffer."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.layout == torch.strided and local.untyped_storage().nbytes() == local.nbytes


def _is_sharded_alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        return left.device_mesh == right.device_mesh and left.placements == right.placements
    return type(left) is torch.Tensor and not isinstance(right, DTensor)


def _find_device(key: str, parameter: torch.nn.Parameter, group: Mapping[str, Any]) -> torch.device:
    """State lies beside its parameter, but `step` on the CPU, as torch's own `load_state_dict` has it."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")


def _find_leaf(part: PartIndex, key: str) -> dict[str, Any]:
    found = part.leaves.get(key)
    if not isinstance(found, dict):
        raise DamagedCheckpointError(f"{TENSOR_INDEX}: the optimizer's {key!r} are {found!r}; expected a mapping")
    return found


def _require_known_owners(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> None:
    known = {id(parameter) for parameter in parameters.values()}
    strangers = [owner for owner in optimizer.state if id(owner) not in known]
    if strangers:
        raise SaveFailedError(
            f"optimizer: it holds state of {len(strangers)} keys that are none of its parameters, the first a"
            f" {type(strangers[0]).__name__}; stored is state by parameter"
        )


def _require_rebuildable(name: str, value: object, parameter: torch.Tensor) -> None:
    """Refuse what would come back as something else: of a sharded parameter, DTensors and local tensors of other shapes."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.shape == parameter.shape:
        return
    if isinstance(value, DTensor) or (value.ndim and value.shape == parameter.to_local().shape):
        raise SaveFailedError(
            f"optimizer: {name!r} has shape {list(value.shape)} and its sharded parameter {list(parameter.shape)}; stored are"
            " states sharded like the parameter, and plain tensors that are equal on all ranks"
        )


def _describe_group(group: Mapping[str, Any], names: Mapping[int, str]) -> JSON:
    described: dict[str, JSON] = {"params": [names[id(parameter)] for parameter in group["params"]]}
    for key, value in group.items():
        if key != "params":
            described[key] = _describe_option(value)
    return described


def _describe_option(value: object) -> JSON:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    try:
        return to_plain(value)
    except TypeError:
        return repr(value)
