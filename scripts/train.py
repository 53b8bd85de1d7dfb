"""Fine-tune a model; start it again and it goes on where it was. `--help` shows every key."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from recipe_ckpt.command_line import run_main
from recipe_ckpt.hydra_side import build_recipe, clean_exit, register_schemas
from recipe_ckpt.job import job, relayed_signals
from recipe_ckpt.launch import run_ranks
from recipe_ckpt.sweeps import own_turn


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    with clean_exit(), job():
        recipe = build_recipe(cfg)

        from recipe_ckpt.sft.loop import run  # here, so that --help and --cfg never wait for torch

        with own_turn(cfg, recipe.root):
            metric: float | None = run_ranks(run, recipe)
        return metric


if __name__ == "__main__":
    register_schemas()
    with relayed_signals():
        run_main(main)
