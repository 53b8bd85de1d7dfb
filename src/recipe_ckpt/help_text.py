"""What `--help` shows: the groups to choose from, and the configuration with its YAML files' comments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf

_SCHEMAS = "recipe_ckpt"
"""The store's group of dataclasses: nobody chooses from it by hand."""


def register_resolvers() -> None:
    """Make `${recipe_help.groups:}` and `${recipe_help.config:}` known to OmegaConf: conf/hydra/help/recipe.yaml has them."""
    OmegaConf.register_new_resolver("recipe_help.groups", lambda: _escape(list_groups()), replace=True)
    OmegaConf.register_new_resolver("recipe_help.config", lambda *, _root_: _escape(describe(_root_)), replace=True)


def list_groups() -> str:
    """Return a line for each group: its name and options, without Hydra's and the schemas."""
    loader = GlobalHydra.instance().config_loader()
    names = sorted(set(loader.list_groups("")) - {"hydra", _SCHEMAS})
    options = {name: sorted(loader.get_group_options(name)) for name in names}
    return "".join(f"{name}: {', '.join(found)}\n" for name, found in options.items() if found)


def describe(cfg: DictConfig) -> str:
    """Return the composed config in YAML, the comment of its file above each key. Targets and the like are left out."""
    choices: Mapping[str, str] = cfg.hydra.runtime.choices
    own = collect_comments(_read_chain("", str(cfg.hydra.job.config_name)))
    return "".join(_describe_group(cfg, str(name), choices.get(str(name)), own) for name in cfg if name != "hydra")


def collect_comments(texts: Iterator[str]) -> dict[str, str]:
    """Return the comment above each top-level key; of several texts the first that has one counts."""
    found: dict[str, str] = {}
    for text in texts:
        for comment, key in re.findall(r"((?:^#[^\n]*\n)+)^(\w+):", text, re.MULTILINE):
            found.setdefault(key, comment)
    return found


def _describe_group(cfg: DictConfig, name: str, choice: str | None, own: Mapping[str, str]) -> str:
    if not isinstance(cfg._get_node(name), DictConfig):
        return _describe_key(cfg, name, own)
    comments = collect_comments(_read_chain(name, choice)) if choice else {}
    lines = "".join(_describe_key(cfg[name], str(key), comments) for key in cfg[name] if not str(key).startswith("_"))
    return f"{name}:\n" + "".join(f"  {line}\n" for line in lines.splitlines())


def _describe_key(node: DictConfig, key: str, comments: Mapping[str, str]) -> str:
    value = OmegaConf.to_container(OmegaConf.masked_copy(node, [key]), enum_to_str=True)
    return comments.get(key, "") + OmegaConf.to_yaml(OmegaConf.create(value))


def _read_chain(group: str, option: str | None) -> Iterator[str]:
    """Yield the text of an option's file, then those of the options of its group that it is made from."""
    text = next(filter(None, (_read(source, f"{group}/{option}.yaml") for source in _sources())), None)
    if text is None:
        return
    yield text
    defaults: Any = OmegaConf.to_container(OmegaConf.create(text)).get("defaults", [])  # type: ignore[union-attr]
    for entry in defaults:
        if group and isinstance(entry, str) and entry != "_self_" and not entry.startswith("/"):
            yield from _read_chain(group, entry)


def _sources() -> list[ConfigSource]:
    return GlobalHydra.instance().config_loader().get_sources()


def _read(source: ConfigSource, name: str) -> str | None:
    """Return a config file as it is written, or None where a source has no such file."""
    path = name.lstrip("/")
    if source.scheme() == "file":
        place = os.path.join(source.path, path)
        if not os.path.isfile(place):
            return None
        with open(place, encoding="utf-8") as file:
            return file.read()
    if source.scheme() != "pkg" or not source.is_config(path):
        return None
    return resources.files(source.path).joinpath(path).read_text(encoding="utf-8")


def _escape(text: str) -> str:
    """Hydra fills the help's template in by `string.Template`."""
    return text.replace("$", "$$")
