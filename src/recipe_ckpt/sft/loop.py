"""The recipe, top to bottom: build the parts, resume, train, evaluate, save.

The loop knows models by `model(input_ids=..., attention_mask=...).logits`, data by `TrainingData`, and checkpoints by what
`build_handler` gives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe_ckpt import preemption
from recipe_ckpt.config import METRICS, TrainerConfig
from recipe_ckpt.drift import refuse_finished
from recipe_ckpt.engines.spmd import SpmdEngine, join_ranks
from recipe_ckpt.errors import ConfigError
from recipe_ckpt.preemption import StopRequest
from recipe_ckpt.sft.data import IGNORED, MicroBatch, TrainingData
from recipe_ckpt.sft.recipe import (
    Recipe,
    build_engine,
    build_loader,
    build_sampler,
    build_val_loader,
    choose_device,
    seed_everything,
    settled_torch,
)
from recipe_ckpt.sft.reporting import Reporter, StepFacts
from recipe_ckpt.sft.sampler import GlobalBatchSampler, derive_seed
from recipe_ckpt.sft.schedule import LrSchedule
from recipe_ckpt.sft.wishes import Wishes

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Facts that a checkpoint keeps beside its state."""

    answer_tokens_seen: int = 0
    best_val_loss: float | None = None

    def count_evaluation(self, loss: float) -> None:
        best = self.best_val_loss
        self.best_val_loss = loss if best is None else min(loss, best)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.answer_tokens_seen = state["answer_tokens_seen"]
        self.best_val_loss = state["best_val_loss"]


@dataclass
class Run:
    """A run that is built and resumed: `step` optimizer steps of `total_steps` are done."""

    recipe: Recipe
    data: TrainingData
    tokenizer: Any
    engine: SpmdEngine
    sampler: GlobalBatchSampler
    loader: StatefulDataLoader[Any]
    val_loader: DataLoader[Any] | None
    handler: Any
    progress: Progress
    device: str
    step: int
    total_steps: int
    metrics: dict[str, float]

    @property
    def rank(self) -> int:
        return self.engine.get_data_parallel_rank()

    @property
    def metric(self) -> float | None:
        """What `optimized_metric` names, or the first that there is."""
        return next((self.metrics[name] for name in self.wanted_metrics if name in self.metrics), None)

    @property
    def wanted_metrics(self) -> tuple[str, ...]:
        wanted = self.recipe.optimized_metric
        return METRICS if wanted is None else (wanted,)


def run(recipe: Recipe) -> float | None:
    """Train from where the checkpoint root is to the last step, and return the final loss: validation's, if there is any.

    A finished run returns the loss that it was saved with.

    Raises:
        ConfigError: the run is finished, and this configuration would have trained another one.
    """
    with preemption.watch() as stop, open_run(recipe) as current:
        if current.step >= current.total_steps:
            if current.rank == 0:
                log.info("This run is finished: step %d of %d. Nothing is trained.", current.step, current.total_steps)
            refuse_finished(current.handler.resume_point.changes, current.step)
            measure_finished(current, stop)
        else:
            for _ in train(current, stop):
                pass
            show_answers(current)
        current.handler.finish_uploads(lambda: stop.is_set)
        if stop.is_set:
            stop.leave()
        return current.metric


@contextmanager
def open_run(recipe: Recipe) -> Iterator[Run]:
    """Build the parts, resume, and take everything down at the end. Collective."""
    device = choose_device(recipe.trainer.device)
    with settled_torch(recipe.launch), join_ranks(device):
        seed_everything(recipe.trainer.seed)  # the same weights on every rank
        model, tokenizer = recipe.build_model()
        data = recipe.build_data(tokenizer)
        require_metric(recipe, data)
        schedule = LrSchedule(recipe.optim)
        engine = build_engine(recipe, model, schedule, device)
        seed_everything(derive_seed(recipe.trainer.seed, engine.get_data_parallel_rank()))  # each rank its own dropout
        sampler = build_sampler(recipe, data, engine)
        loader = build_loader(recipe, data, sampler)
        progress = Progress()
        with recipe.build_handler(engine, loader, extra_state={"progress": progress}, documents=recipe.documents) as handler:
            step = handler.load_checkpoint()
            schedule.total_steps = count_total_steps(recipe.trainer, sampler, step)
            yield Run(
                recipe=recipe,
                data=data,
                tokenizer=tokenizer,
                engine=engine,
                sampler=sampler,
                loader=loader,
                val_loader=build_val_loader(recipe, data, engine),
                handler=handler,
                progress=progress,
                device=device,
                step=step,
                total_steps=schedule.total_steps,
                metrics=dict(handler.resume_point.metrics) if handler.resume_point else {},
            )


def train(run: Run, stop: StopRequest | None = None) -> Iterator[int]:
    """Train to the last step, giving each finished one's number, after its evaluation and its save. Collective.

    Who stops asking, stops the run there. A signal on any rank ends the process after a save of the step in hand.

    Raises:
        SystemExit: a signal asked to stop; the code is the signal's.
        FloatingPointError: the loss is not finite; what the weights are now is not saved.
    """
    trainer = run.recipe.trainer
    wishes = Wishes(stop or StopRequest(), trainer.save_interval_mins, run.device)
    with Reporter(trainer, rank=run.rank, root=run.recipe.root, step=run.step, total_steps=run.total_steps) as reporter:
        for batch in read_batches(run):
            facts = train_step(run, batch)
            reporter.report_step(facts)
            require_finite(facts)
            run.metrics = {"train/loss": facts.loss}
            wishes.agree()
            if is_due(run.step, trainer.test_freq, run.total_steps) and (loss := evaluate(run, wishes)) is not None:
                run.metrics["val/loss"] = loss
                run.progress.count_evaluation(loss)
                reporter.report_evaluation(run.step, loss)
            if is_due(run.step, trainer.save_freq, run.total_steps) or wishes.has_any:
                reporter.flush()  # a resume draws on from the checkpoint: what is before it must be there
                run.handler.save_checkpoint(run.step, metrics=run.metrics)
                reporter.report_save(run.handler.last_save)
                if wishes.signal or run.step == run.total_steps:
                    run.handler.wait()  # nothing is trained beside it: what comes next may count on it
                    reporter.report_save(run.handler.last_save)
                reporter.report_upload(run.handler.last_upload)
                wishes.note_save()
            yield run.step
            if wishes.signal and run.step < run.total_steps:
                wishes.leave(run.step)


def read_batches(run: Run) -> Iterator[list[MicroBatch]]:
    """Give this rank's batches, epoch after epoch, until the last step is done."""
    while run.step < run.total_steps:
        for batch in run.loader:
            yield batch
            if run.step == run.total_steps:
                return


def train_step(run: Run, batch: list[MicroBatch]) -> StepFacts:
    """Do one optimizer step on a global batch: every answer token of all ranks and micro-batches weighs the same."""
    model = run.engine.model
    epoch = run.sampler.epoch
    counts = torch.tensor([sum(int((micro["labels"] != IGNORED).sum()) for micro in batch)], device=run.device)
    answer_tokens = int(sum_over_ranks(counts))
    loss_sum = torch.zeros(1, dtype=torch.float64, device=run.device)
    for number, micro in enumerate(batch):
        with exchange_gradients(model, is_last=number == len(batch) - 1):
            micro_loss = compute_loss_sum(model, micro, run.device)
            # Data parallelism averages over the ranks: times their number makes it the sum.
            (micro_loss * (run.engine.get_data_parallel_size() / answer_tokens)).backward()  # type: ignore[no-untyped-call]
        loss_sum += micro_loss.detach()
    report = run.engine.step_optimizer(run.step + 1, clip_grad=run.recipe.optim.clip_grad)
    run.step += 1
    run.sampler.advance()
    run.progress.answer_tokens_seen += answer_tokens
    return StepFacts(
        step=run.step,
        epoch=epoch,
        sample_ids=[n for micro in batch for n in micro["ids"]],
        loss=float(sum_over_ranks(loss_sum)) / answer_tokens,
        lr=report.lr,
        grad_norm=report.grad_norm,
    )


def require_finite(facts: StepFacts) -> None:
    """Stop a run that has diverged, on all ranks alike, before it replaces a good checkpoint."""
    if not math.isfinite(facts.loss):
        raise FloatingPointError(
            f"step {facts.step}: the loss is {facts.loss} and must be finite; start again from the last checkpoint with a"
            " smaller optim.lr or optim.clip_grad"
        )


@torch.no_grad()
def evaluate(run: Run, wishes: Wishes) -> float | None:
    """Return the loss of an answer token over the validation data. Collective; uses no random numbers.

    None: there is no such data, or a signal asks to stop, which can't wait for a long evaluation.
    """
    if run.val_loader is None or wishes.signal:
        return None
    model = run.engine.model
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)
    for batch in run.val_loader:
        for micro in batch:
            sums[0] += compute_loss_sum(model, micro, run.device)
            sums[1] += (micro["labels"] != IGNORED).sum()
        if wishes.agree():
            break
    model.train()
    if wishes.signal:
        return None
    loss_sum, tokens = sum_over_ranks(sums).tolist()
    return float(loss_sum / tokens)


def compute_loss_sum(model: nn.Module, micro: MicroBatch, device: str) -> torch.Tensor:
    """Return the summed cross entropy of the labelled tokens, each predicted from those before it."""
    input_ids, labels = micro["input_ids"].to(device), micro["labels"].to(device)
    logits = model(input_ids=input_ids, attention_mask=micro["attention_mask"].to(device)).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def require_metric(recipe: Recipe, data: TrainingData) -> None:
    """Refuse to return a validation loss that there won't be.

    Raises:
        ConfigError: there is no validation data.
    """
    if recipe.optimized_metric == "val/loss" and data.val is None:
        raise ConfigError("optimized_metric", "val/loss", "train/loss", "There is no validation data to have a loss on.")


def measure_finished(run: Run, stop: StopRequest) -> None:
    """Evaluate a finished run whose last save has no validation loss: a signal came instead, or it is a foreign one."""
    if run.wanted_metrics[0] in run.metrics:
        return
    loss = evaluate(run, Wishes(stop, None, run.device))
    if stop.is_set:
        stop.leave()
    if loss is not None:
        run.metrics["val/loss"] = loss


def is_due(step: int, freq: int | None, total_steps: int) -> bool:
    """Say whether what happens every `freq` steps and at the end (None: at the end only) happens after this step."""
    return step == total_steps or (freq is not None and step % freq == 0)


def count_total_steps(trainer: TrainerConfig, sampler: GlobalBatchSampler, step: int) -> int:
    """Return the number of the last step. Epochs are counted from the position, as the batch size may have changed."""
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    epochs_left = trainer.total_epochs - sampler.epoch
    if epochs_left <= 0:
        return step
    return step + sampler.steps_left_in_epoch + (epochs_left - 1) * sampler.steps_per_epoch


@torch.no_grad()
def show_answers(run: Run, count: int = 4, max_new_tokens: int = 32) -> None:
    """Log the model's greedy answers to some validation questions. Collective: a sharded model runs on all ranks."""
    model = run.engine.model
    model = model.module if isinstance(model, DistributedDataParallel) else model
    generate = getattr(model, "generate", None)
    if run.tokenizer is None or generate is None:
        return
    model.eval()
    for question, expected in run.data.prompts[:count]:
        ids = torch.tensor([run.tokenizer(question, add_special_tokens=False)["input_ids"]], device=run.device)
        answer = generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
        if run.rank == 0:
            text = run.tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
            log.info("%r -> %r (expected %r)", question, text, expected)


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(value)
    return value


def exchange_gradients(model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
    """Exchange gradients with the other ranks only in the backward of the last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()
