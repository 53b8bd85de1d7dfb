"""Fits a line, with an engine, a loop and a config of its own. Started again with more steps, it goes on where it was."""

from __future__ import annotations

import logging
import os

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

log = logging.getLogger("line")


class LineEngine:
    """A model and its optimizer behind verl's engine methods: all that a checkpoint needs to know of them."""

    def __init__(self, lr: float) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save_checkpoint(self, local_path: str, **_: object) -> None:
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], os.path.join(local_path, "line.pt"))

    def load_checkpoint(self, local_path: str) -> None:
        model, optimizer = torch.load(os.path.join(local_path, "line.pt"), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = StatefulDataLoader(TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True)
    engine = LineEngine(cfg.lr)
    with instantiate(cfg.checkpoint)(engine=engine, train_dataloader=loader) as handler:
        step = first = handler.load_checkpoint()
        loss = float("nan")
        while step < cfg.steps:
            for batch in loader:
                loss = engine.step(*batch)
                step += 1
                if step % cfg.save_every == 0:
                    handler.save_checkpoint(step)
                if step == cfg.steps:
                    break
    log.info("trained from step %d to step %d, loss %.6f", first, step, loss)


if __name__ == "__main__":
    main()
