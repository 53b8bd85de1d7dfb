"""The only place where Hydra's config becomes plain values and callables. Imports no torch until a recipe is built."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_method
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe_ckpt import config, layout, sweeps, validation
from recipe_ckpt.command_line import leave_errors_to_hydra
from recipe_ckpt.errors import CheckpointError, ConfigError
from recipe_ckpt.job import ends_process, is_sweep
from recipe_ckpt.messages import explain, keys_as_typed
from recipe_ckpt.rank_env import count_ranks, find_rank, name_launch

if TYPE_CHECKING:
    from recipe_ckpt.sft.recipe import Recipe

SCHEMAS: dict[str, type] = {
    "checkpoint/schema": config.CheckpointConfig,
    "trainer/schema": config.TrainerConfig,
    "trainer/verl": config.VerlTrainerConfig,
    "optim/schema": config.OptimConfig,
    "engine/schema": config.EngineConfig,
    "launch/schema": config.LaunchConfig,
    "model/tiny": config.TinyModelConfig,
    "model/hf": config.HfModelConfig,
    "data/arithmetic": config.ArithmeticDataConfig,
    "data/jsonl": config.JsonlDataConfig,
}


LIBRARY = ("checkpoint",)
"""The groups that other projects use, too; the rest is the recipe's."""


def register_schemas(groups: Collection[str] | None = None) -> None:
    """Put the dataclasses of all or some groups into Hydra's store, as `recipe_ckpt/<group>/<name>`; twice is fine.

    The resolvers: `recipe.launch:<name>` is one name for all ranks, `recipe.rank0:<value>` is null on the others;
    `recipe_ckpt.sweeps` has those that name a sweep's jobs.
    """
    OmegaConf.register_new_resolver("recipe.launch", name_launch, replace=True)
    OmegaConf.register_new_resolver("recipe.rank0", lambda value: None if find_rank() else value, replace=True)
    sweeps.register_resolvers()
    store = ConfigStore.instance()
    known = store.repo.get("recipe_ckpt", {})
    for place, schema in SCHEMAS.items():
        group, name = place.split("/")
        if (groups is None or group in groups) and f"{name}.yaml" not in known.get(group, {}):
            store.store(group=f"recipe_ckpt/{group}", name=name, node=_make_node(schema))


def _make_node(schema: type) -> Any:
    """Return what the store gets. A schema that comes on top of another's values leaves those as they are."""
    if schema is config.VerlTrainerConfig:
        return schema(**{item.name: MISSING for item in fields(config.TrainerConfig)})
    return schema


def build_recipe(cfg: DictConfig) -> Recipe:
    """Check the config and turn it into plain values and callables.

    Raises:
        ConfigError: a value can't work; nothing has been built.
    """
    sections: dict[str, Any] = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    for group in ("checkpoint", "trainer", "optim", "engine", "launch", "model", "data"):
        validation.check_section(group, list(cfg[group]), sections[group])
    _require_heard_choice()
    world_size = count_ranks(sections["launch"].nproc_per_node)
    with keys_as_typed(cfg):
        settled = validation.validate(sections, world_size=world_size, launch_dir=_launch_dir())

    from recipe_ckpt.sft.recipe import Recipe  # torch starts to load here, after every check

    checkpoint = settled["checkpoint"]
    return Recipe(
        trainer=settled["trainer"],
        optim=settled["optim"],
        engine=settled["engine"],
        launch=settled["launch"],
        data=settled["data"],
        root=os.path.normpath(os.path.join(checkpoint["default_local_dir"], checkpoint["run_subdir"])),
        build_model=_build_part(settled["model"]),
        build_data=_build_part(settled["data"], leave_out={item.name for item in fields(config.DataConfig)}),
        build_handler=partial(get_method(cfg.checkpoint._target_), **checkpoint),
        documents={
            layout.CONFIG: _describe(cfg),
            layout.RESOLVED_CONFIG: _resolve(cfg),
            layout.OVERRIDES: _list_overrides(),
        },
        optimized_metric=cfg.get("optimized_metric"),
    )


def _require_heard_choice() -> None:
    """Refuse an option of `checkpoint` whose values `+compat=verl` would replace.

    Raises:
        ConfigError: the option and what to write.
    """
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    option = choices.get("checkpoint")
    if choices.get("compat") == "verl" and option not in ("default", "none"):
        remedy = "Write what it says under trainer, for example trainer.resume_mode=disable for checkpoint=fresh."
        raise ConfigError("checkpoint", option, "default or none, with +compat=verl", remedy)


@contextmanager
def clean_exit() -> Iterator[None]:
    """End the process with one line on stderr for what the user can mend, instead of a traceback."""
    leave_errors_to_hydra()
    try:
        yield
    except OmegaConfBaseException as error:
        sys.exit(explain(error))
    except CheckpointError as error:
        if not ends_process(error, in_sweep=is_sweep()):
            raise
        sys.exit(f"{type(error).__name__}: {error}")


def _build_part(section: Any, leave_out: set[str] | None = None) -> Any:
    """Return the section's target with its keys filled in; what exists at run time only is passed at the call."""
    values = {key: value for key, value in vars(section).items() if not key.startswith("_") and key not in (leave_out or ())}
    return partial(get_method(section._target_), **values)


def _launch_dir() -> str:
    """Return where the user started the script, wherever `hydra.job.chdir` has moved the process."""
    return str(HydraConfig.get().runtime.cwd) if HydraConfig.initialized() else os.getcwd()


def _describe(cfg: DictConfig) -> str:
    """Return the config unresolved, with a defaults list by which Hydra reads it back typed."""
    places = {schema: place for place, schema in SCHEMAS.items()}
    kinds = {str(group): OmegaConf.get_type(cfg[group]) for group in cfg}
    known = [f"/recipe_ckpt/{places[kind]}@{group}" for group, kind in kinds.items() if kind in places]
    settled = copy.deepcopy(cfg)
    settled.checkpoint.run_subdir = cfg.checkpoint.run_subdir  # a job of a sweep is this run also outside of it
    return OmegaConf.to_yaml({"defaults": [*known, "_self_"]}) + OmegaConf.to_yaml(settled)


def _resolve(cfg: DictConfig) -> str:
    """Return the config's values as JSON, by which a later run tells what it does differently."""
    return json.dumps(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True), indent=1, default=str)


def _list_overrides() -> str:
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else OmegaConf.create([])
    return OmegaConf.to_yaml(overrides)
