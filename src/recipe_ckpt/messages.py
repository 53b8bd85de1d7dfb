"""Hydra's refusals in our words: key, found, allowed, what to do. Text only; nothing is read, printed or ended here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import EnumMeta
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from recipe_ckpt.checks import NULL_LIKE, find_nearest
from recipe_ckpt.errors import ConfigError

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_PASSWORD = re.compile(r"//[^/@\s]*:[^/@\s]*@")


def explain(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Return one line for an error of Hydra, OmegaConf or this package that the user can mend.

    `overrides` are the command line's, as typed.
    """
    origin = error.__cause__ or error.__context__  # Hydra's own text names neither the key's type nor its value
    cause = origin if isinstance(error, HydraException) and isinstance(origin, OmegaConfBaseException) else error
    known = (
        error
        if isinstance(error, ConfigError)
        else _explain_syntax(error, overrides)
        or _explain_option(error, overrides)
        or _explain_key(error, cause)
        or _explain_value(error, cause)
        or _explain_default(str(error), overrides)
    )
    # What is not known here keeps Hydra's words, on one line and without its footnotes.
    text = str(known) if known else _join(_strip_facts(str(error)), _strip_facts(str(cause)) if cause is not error else "")
    return f"ConfigError: {_PASSWORD.sub('//***@', text)}"


def quote(override: str, *, is_sweep: bool = False) -> str:
    """Return an override as it has to be typed for a shell and Hydra's grammar to leave its value, or values, alone."""
    key, _, value = override.partition("=")
    outer, inner = ("'", '"') if "'" in value or "$" in value else ('"', "'")
    values = value.split(",") if is_sweep else [value]
    return f"{outer}{key}={','.join(f'{inner}{one}{inner}' for one in values)}{outer}"


@contextmanager
def keys_as_typed(cfg: DictConfig) -> Iterator[None]:
    """Let a ConfigError about a key that only points to another one name that other: `${trainer.resume_mode}`."""
    try:
        yield
    except ConfigError as error:
        raise error.renamed(_find_pointers(cfg, error.key.rpartition(".")[0])) from None


def _find_pointers(cfg: DictConfig, group: str) -> dict[str, str]:
    """Return for each key of a group that is nothing but another key's value the name of that one."""
    node = cfg._get_node(group) if group in cfg else None
    values: Any = OmegaConf.to_container(node) if isinstance(node, DictConfig) else {}
    found = {f"{group}.{name}": re.fullmatch(r"\$\{([\w.]+)\}", str(value)) for name, value in values.items()}
    return {name: pointer[1] for name, pointer in found.items() if pointer}


def _explain_syntax(error: Exception, overrides: Sequence[str]) -> ConfigError | None:
    """Explain what the override grammar can't read, or reads as a sweep."""
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'$", str(error).partition("\n")[0])
    override = error.override if isinstance(error, OverrideParseException) else ambiguous and ambiguous[1]
    if not override:
        return None
    key, equals, value = override.partition("=")
    if ambiguous:
        remedy = f"To sweep over them, add -m; for one text, write {quote(override)}; for a list, {key}=[{value}]."
        return ConfigError(key, value, "one value", remedy)
    if not equals:
        return ConfigError(override, override, "key=value, or group=option", "--help shows both.")
    quoted = quote(override, is_sweep=not {"-m", "--multirun"}.isdisjoint(overrides))
    allowed = "a value without = , ~ # & ; ( ) [ ] { } outside of quotes"
    if value.startswith("~"):
        remedy = f"Write {key}=$HOME{value[1:]}, or {quoted}: the shell does not expand ~ after a =."
    else:
        remedy = f"Write {quoted}, so that the inner quotes reach Hydra."
    return ConfigError(key, value, allowed, remedy)


def _explain_option(error: Exception, overrides: Sequence[str]) -> ConfigError | None:
    """Explain an option that its group doesn't have."""
    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file:
        return None
    group, _, option = error.missing_cfg_file.rpartition("/")
    if not group:
        return ConfigError("--config-name", option, "a file of the config directory", "Leave it out, or correct it.")
    options = list(error.options or ())
    nearest = find_nearest(option, options)
    typed = f"+{group}" if f"+{group}={option}" in overrides else group
    remedy = f"Did you mean {typed}={nearest}?" if nearest else f"Write {typed}=OPTION with one of them."
    return ConfigError(group, option, f"one of {options}", remedy)


def _explain_key(error: Exception, cause: BaseException) -> ConfigError | None:
    """Explain a key that does not exist."""
    if not isinstance(cause, ConfigKeyError | ConfigAttributeError) or not isinstance(cause.parent_node, DictConfig):
        return None
    typed = re.match(r"Could not override '(.+?)'\.", str(error))
    key = typed[1] if typed else str(cause.full_key)
    siblings = [str(name) for name in cause.parent_node if str(name) != "hydra" and not str(name).startswith("_")]
    is_group = str(cause.full_key) == str(cause.key)
    nearest = find_nearest(key, _list_keys(cause.parent_node._get_root())) if "." in key else None
    nearest = nearest or (find_nearest(str(cause.key), siblings) if is_group else None)
    remedy = f"Did you mean {nearest}?" if nearest else "Remove it, or correct its name."
    if key.startswith("trainer.") and nearest == f"checkpoint.{cause.key}":
        remedy += " With +compat=verl it may be typed as in verl."
    kind = "groups and keys" if is_group else "keys"
    return ConfigError(key, str(cause.key), f"the {kind} {sorted(siblings)}", remedy + _find_place(error))


def _explain_value(error: Exception, cause: BaseException) -> ConfigError | None:
    """Explain a value that the key's type forbids, and an interpolation to nowhere."""
    if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
        return None
    key, place = str(cause.full_key), _find_place(error)
    if isinstance(cause, InterpolationKeyError):
        missing = re.search(r"'(.+?)' not found", str(cause))
        return ConfigError(key, f"${{{missing[1] if missing else ''}}}", "a key that exists", f"Correct its name.{place}")
    hint = _find_type(cause)
    if hint is None or not isinstance(cause, ValidationError):
        return None
    is_optional, kind = _split_optional(hint)
    allowed = f"one of {list(kind.__members__)}" if isinstance(kind, EnumMeta) else _WORDS.get(get_origin(kind) or kind)
    if allowed is None:
        return None
    allowed += ", or null" * is_optional
    return ConfigError(key, cause.value, allowed, _advise(key, cause.value, kind, is_optional) + place)


def _advise(key: str, value: Any, kind: Any, is_optional: bool) -> str:
    if is_optional and value in NULL_LIKE:
        return f"For no value write null: {key}=null."
    if isinstance(value, bool) and isinstance(kind, EnumMeta):
        return "In a YAML file, on, off, yes and no are booleans: write one of the names."
    return f"Change it, or leave {key} out for the default."


def _explain_default(text: str, overrides: Sequence[str]) -> ConfigError | None:
    """Explain a group that was chosen in a way that Hydra's defaults list forbids."""
    groups = {override.partition("=")[0]: override.partition("=")[2] for override in overrides}
    if twice := re.search(r"Multiple values for ([\w/@]+)\.", text):
        key = twice[1]
        value = groups.get(f"+{key}", "")
        return ConfigError(f"+{key}", value, "one option of a group", f"The group has one already: write {key}={value}.")
    if absent := re.search(r"Could not override '([\w/@]+)'\. ?\n?No match in the defaults list", text):
        key = absent[1]
        value = groups.get(key, "")
        return ConfigError(key, value, "a group of the defaults list, or + before it", f"Write +{key}={value}.")
    if "Config group override must be a string" in text:
        nulls = [key for key, value in groups.items() if value.lower() == "null"]
        key = next((key for key in nulls if "." not in key), "group")
        return ConfigError(key, None, "an option of the group", "To train without checkpoints, write checkpoint=none.")
    return None


def _find_place(error: Exception) -> str:
    where = re.match(r"In '(.+?)': \w+ raised while composing", str(error))
    return f" It stands in {where[1]}.yaml." if where else ""


def _find_type(cause: OmegaConfBaseException) -> Any:
    """Return the annotation of the key in its schema, or None."""
    if not isinstance(cause.object_type, type) or cause.object_type in (dict, list):
        return None
    return get_type_hints(cause.object_type).get(str(cause.key))


def _split_optional(hint: Any) -> tuple[bool, Any]:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return (True, kinds[0]) if NoneType in get_args(hint) else (False, hint)


def _list_keys(root: Any) -> list[str]:
    """Return the keys of a config's groups as they are typed: `group.key`."""
    nodes = {str(name): root._get_node(name) for name in root if name != "hydra"}
    groups = {name: node for name, node in nodes.items() if isinstance(node, DictConfig)}
    return [f"{group}.{name!s}" for group, node in groups.items() for name in node if not str(name).startswith("_")]


def _strip_facts(text: str) -> str:
    """Return Hydra's or OmegaConf's text without its indented facts and its links."""
    fact = re.compile(r"\s*(full_key:|object_type=|reference_type=|See https)")
    kept = [line for line in text.splitlines() if not fact.match(line)]
    return " ".join(" ".join(kept).split())


def _join(*texts: str) -> str:
    return ". ".join(text.rstrip(".") for text in texts if text) + "."


MENDABLE = (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError)
"""What `explain` explains. Before a job starts a ValueError of Hydra's own is one too."""
