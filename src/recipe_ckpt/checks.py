"""Checks of single values, each by the key that has it: what is refused is a `ConfigError` with four parts."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Any

from recipe_ckpt.errors import ConfigError

NULL_LIKE = ("none", "None")
"""Texts that are meant as null and are none in YAML."""


def check_int(key: str, value: Any, *, at_least: int = 1, nullable: bool = False) -> Any:
    """Return the value. A boolean is not a number here."""
    if value is None and nullable:
        return value
    if type(value) is not int or value < at_least:
        allowed = f"an integer >= {at_least}" + (", or null" if nullable else "")
        raise ConfigError(key, value, allowed, f"Write {key}={'null' if nullable else max(at_least, 1)}.")
    return value


def check_float(
    key: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf, below: float = math.inf
) -> float:
    """Return the value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= above or value < at_least or value >= below:
        limit = f" > {above:g}" if above > -math.inf else f" >= {at_least:g}"
        limit += f" and < {below:g}" if below < math.inf else ""
        raise ConfigError(key, value, f"a number{limit}", "Change it.")
    return value


def check_bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "true or false", f"Write {key}=true.")
    return value


def choose(kind: type[StrEnum], key: str, value: object) -> Any:
    names = [member.value for member in kind]
    if not isinstance(value, str) or value not in names:
        raise ConfigError(key, value, f"one of {names}", "In YAML, on, off, yes and no are booleans: write one of the names.")
    return kind(value)


def check_subset(key: str, value: object, allowed: Collection[str]) -> list[str]:
    listed = list(value) if isinstance(value, Collection) and not isinstance(value, str) else None
    if listed is None or any(item not in allowed for item in listed):
        raise ConfigError(key, value, f"a list with some of {list(allowed)}", f"Write {key}=[{','.join(allowed)}].")
    return listed


def settle_frequency(key: str, value: object) -> int | None:
    if value is None or (value == -1 and not isinstance(value, float)):
        return None
    if type(value) is not int or value < 1:
        raise ConfigError(key, value, "an integer >= 1, or null for the end only", f"Write {key}=null.")
    return value


def settle_text(key: str, value: object) -> str | None:
    """Return a text, or None for null and for an empty one; refuse what looks like a null that YAML didn't see."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or value in NULL_LIKE:
        raise ConfigError(key, value, "a text or null", f"For no value write null: {key}=null.")
    return value


def settle_path(key: str, value: object, launch_dir: str) -> str | None:
    text = settle_text(key, value)
    if text is None or "://" in text:
        return text
    return os.path.normpath(os.path.join(launch_dir, os.path.expanduser(text)))


def require_extra(module: str, key: str, found: object, *, or_else: str = "") -> None:
    require_module(module, key, found, f'Run: pip install "recipe-ckpt[sft]".{or_else}')


def require_module(module: str, key: str, found: object, remedy: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(key, found, f"needs {module}, which is not installed", remedy)


def check_known(group: str, values: Collection[str], known: Collection[str]) -> None:
    for key in values:
        if key not in known:
            listed = sorted(name for name in known if not name.startswith("_"))
            nearest = find_nearest(key, listed)
            remedy = f"Did you mean {group}.{nearest}?" if nearest else "Remove it, or correct its name."
            raise ConfigError(f"{group}.{key}", key, f"the keys {listed}", remedy)


def find_nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the key that was probably meant: the same name in another group, or a similar one in this or a similar group."""
    listed = {other: other.rpartition(".") for other in sorted(known)}
    group, _, name = key.rpartition(".")
    if same := [other for other, (_, _, its_name) in listed.items() if its_name == name]:
        return difflib.get_close_matches(key, same, n=1, cutoff=0)[0]
    groups = difflib.get_close_matches(group, {its_group for its_group, _, _ in listed.values()}, n=1)
    names = {its_name: other for other, (its_group, _, its_name) in listed.items() if its_group in groups}
    found = difflib.get_close_matches(name, names, n=1)
    return names[found[0]] if found else None
