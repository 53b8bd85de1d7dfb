"""Nested Python state as JSON, with its tensors under names beside it.

Numbers, strings and None stand for themselves; everything else is an object with one tag: `tensor` (its name), `float`
(one that JSON has no sign for), `list`, `tuple`, or `items` (a mapping's pairs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.manifest import JSON

Tensors = dict[str, torch.Tensor]


def flatten(value: object, name: str, tensors: Tensors) -> JSON:
    """Return a value's tree and put its tensors into `tensors`, under `name` and the way to them.

    Raises:
        SaveFailedError: it holds something else than tensors, numbers, strings, None, lists, tuples and mappings.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) in (list, tuple):
        items: Any = value
        return {type(value).__name__: [flatten(item, f"{name}/{number}", tensors) for number, item in enumerate(items)]}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {"items": [[key, flatten(item, f"{name}/{escape(str(key))}", tensors)] for key, item in value.items()]}
    raise SaveFailedError(
        f"{name}: found {type(value).__name__}; stored are tensors, numbers, strings, None, lists, tuples and mappings"
    )


def unflatten(tree: JSON, read: Callable[[str], torch.Tensor]) -> Any:
    """Build the value that `flatten` took apart; `read` gives the tensor of a name."""
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    if tag == "tensor":
        return read(content)
    if tag == "float":
        return float(content)
    if tag == "items":
        return {key: unflatten(item, read) for key, item in content}
    items = [unflatten(item, read) for item in content]
    return tuple(items) if tag == "tuple" else items


def escape(key: str) -> str:
    """Write a key so that `.` and `/` in a name only ever separate keys."""
    return key.replace("%", "%25").replace(".", "%2E").replace("/", "%2F")
