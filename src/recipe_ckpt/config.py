"""The configuration's keys, as dataclasses. Knows neither Hydra nor torch; rules about values are in `validation`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ResumeMode(StrEnum):
    auto = "auto"
    disable = "disable"
    resume_path = "resume_path"


# OmegaConf accepts an enum's names only, and `raise` can't be written as a name.
FailurePolicy = StrEnum("FailurePolicy", ["raise", "warn"])
UploadFailurePolicy = StrEnum("UploadFailurePolicy", ["raise", "warn", "ignore"])
MismatchPolicy = StrEnum("MismatchPolicy", ["raise", "restart"])
DriftPolicy = StrEnum("DriftPolicy", ["raise", "warn", "ignore"])


class BestMode(StrEnum):
    min = "min"
    max = "max"


class LrScheduler(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Strategy(StrEnum):
    ddp = "ddp"
    fsdp2 = "fsdp2"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


CONTENTS = ("model", "optimizer", "extra")
LOGGERS = ("console", "tensorboard")
METRICS = ("val/loss", "train/loss")
RUN_SUBDIR = "${recipe.run_subdir:}"
"""Empty, but in a job of a sweep its own name; `recipe_ckpt.sweeps` has the resolver."""
DATA_EXTENSIONS = (".jsonl", ".json", ".parquet")


@dataclass
class CheckpointConfig:
    """`checkpoint.`: where, what and when; the first five keys are verl's, with verl's meaning."""

    _target_: str = "recipe_ckpt.build_handler"
    _partial_: bool = True
    _convert_: str = "object"
    default_local_dir: str = "checkpoints/${oc.select:trainer.project_name,sft}/${oc.select:trainer.experiment_name,test}"
    """The run's root. A relative one starts at the directory that the script was started in."""
    default_hdfs_dir: str | None = None
    """A mirror of the root, kept in the background: hdfs://, any fsspec URL, or a directory; null keeps none."""
    max_ckpt_to_keep: int | None = None
    """How many of the newest checkpoints stay on disk; null keeps all."""
    keep_every: int | None = None
    """Beside the newest, keep each step that this divides."""
    keep_best: int | None = None
    """Beside the newest, keep so many of the best by `best_metric`."""
    best_metric: str = "val/loss"
    """A metric that the recipe gives with a save; a missing or NaN one is never best."""
    best_mode: BestMode = BestMode.min
    """min: smaller is better; max: larger is."""
    resume_mode: ResumeMode = ResumeMode.auto
    """auto: the newest good checkpoint, or a fresh start; disable: a fresh start; resume_path: exactly `resume_from_path`."""
    resume_from_path: str | None = None
    """A `global_step_<N>` directory, or a run's root; here, or by its URL."""
    run_subdir: str = RUN_SUBDIR
    """Appended to the root and to the mirror. By default `sweep/<what makes this job>` in a sweep, and nothing else."""
    save_contents: list[str] = field(default_factory=lambda: list(CONTENTS))
    """Of model, optimizer, extra (progress, RNG, data position)."""
    load_contents: list[str] | None = None
    """What is restored; null is `save_contents`."""
    async_save: bool = True
    """Copy the state and write it in the background, while training goes on; false waits until it is durable.

    Measured: in the background it costs training about half of a blocking save, or less (docs/performance.md). It needs host
    memory for a copy; where there is none, and for engines that take no staged snapshots, a save is a blocking one.
    """
    overlap_staging: bool = False
    """With `async_save`: copy parameters and optimizer state beside the next forward and backward; `optimizer.step()` waits.

    A promise that nothing else changes them before that step (a swap with averaged weights for an evaluation would), and on
    CPUs without an idle core no measurable gain: off.
    """
    on_save_failure: FailurePolicy = FailurePolicy["raise"]
    """raise: a failed save stops the run; warn: it is an error in the log, and training goes on. The last must succeed."""
    on_upload_failure: UploadFailurePolicy = UploadFailurePolicy["warn"]
    """raise: a mirror that can't keep up stops the run at its next save; warn: an error in the log; ignore: nothing."""
    max_remote_ckpt_to_keep: int | None = None
    """How many of the newest checkpoints stay on the mirror; null keeps all."""
    max_pending_uploads: int = 2
    """Old checkpoints stay on disk until they are uploaded, but not while more than so many wait."""
    exit_upload_wait_secs: float = 600.0
    """How long the end of a run waits for uploads; the next start sends what is missing."""
    on_data_mismatch: MismatchPolicy = MismatchPolicy["raise"]
    """When the data set is not the one of the checkpoint. raise: stop; restart: start the epoch over."""
    on_config_drift: DriftPolicy = DriftPolicy["warn"]
    """When the configuration is not the one of the checkpoint. raise: stop; warn: list it, and from which step it holds."""
    rank_timeout_secs: int = 600
    """How long the ranks wait for a silent one at a save or load before they stop and name it."""


@dataclass
class TrainerConfig:
    """`trainer.`: verl's names for the length of a run, its checkpoints and its reports."""

    project_name: str = "sft"
    """First part of the default root."""
    experiment_name: str = "test"
    """Second part of the default root: another name is another run."""
    total_epochs: int = 1
    """How often the data is seen, when `total_training_steps` is null."""
    total_training_steps: int | None = None
    """How many optimizer steps the run has; null is `total_epochs`."""
    save_freq: int | None = None
    """Save every so many steps, and at the end; null (or verl's -1) only at the end."""
    save_interval_mins: float | None = None
    """Save also when so many minutes have passed since the last save; null never does."""
    test_freq: int | None = None
    """Evaluate every so many steps, and at the end; null (or verl's -1) only at the end."""
    log_freq: int = 10
    """A line in the log every so many steps."""
    seed: int = 1
    """Seeds the weights, the order of the data, and with the rank added the dropout."""
    device: Device = Device.auto
    """auto: CUDA where there is one, else the CPU."""
    logger: list[str] = field(default_factory=lambda: ["console", "tensorboard"])
    """Of console (progress bar and log lines), tensorboard (curves in `<root>/tensorboard`)."""
    audit_file: str | None = None
    """A JSON line per rank and step is appended here: sample ids, loss, learning rate."""


@dataclass
class VerlTrainerConfig(TrainerConfig):
    """`trainer.` with `+compat=verl`: the keys that stand under `checkpoint.` here and under `trainer.` in verl."""

    default_local_dir: str = CheckpointConfig.default_local_dir
    """As `checkpoint.default_local_dir`."""
    default_hdfs_dir: str | None = None
    """As `checkpoint.default_hdfs_dir`."""
    max_ckpt_to_keep: int | None = None
    """As `checkpoint.max_ckpt_to_keep`."""
    resume_mode: ResumeMode = ResumeMode.auto
    """As `checkpoint.resume_mode`."""
    resume_from_path: str | None = None
    """As `checkpoint.resume_from_path`."""


@dataclass
class OptimConfig:
    """`optim.`: AdamW, and the learning rate as a function of the step and these keys alone."""

    lr: float = 3e-3
    """The peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """AdamW's decay."""
    lr_scheduler_type: LrScheduler = LrScheduler.cosine
    """constant, or down to zero at `lr_decay_steps`: linear, cosine."""
    lr_warmup_steps: int = 20
    """The first steps, in which the rate grows linearly to `lr`."""
    lr_decay_steps: int | None = None
    """The step at which the rate is zero; null is the run's last one."""
    clip_grad: float | None = 1.0
    """The largest norm of all gradients together; null does not clip."""


@dataclass
class EngineConfig:
    """`engine.`: how a model is spread over ranks."""

    strategy: Strategy = Strategy.ddp
    """ddp: a whole model on each rank; fsdp2: shards. Means nothing for one rank."""


@dataclass
class LaunchConfig:
    """`launch.`: the processes that ranks run in."""

    nproc_per_node: int | None = None
    """So many ranks are started on this machine; null is one, or those that torchrun or srun has started."""
    num_threads: int | None = None
    """CPU threads of torch in each rank; null leaves it to torch. Bit-equal resume needs the same number."""
    deterministic: bool = False
    """Deterministic algorithms only: what bit-equal resume needs on CUDA."""


@dataclass
class TinyModelConfig:
    """`model=tiny`: a small Llama with random weights, and a tokenizer that is bytes. Built offline."""

    _target_: str = "recipe_ckpt.sft.model.build_tiny"
    _partial_: bool = True
    hidden_size: int = 128
    """Width."""
    num_layers: int = 3
    """Depth."""
    num_heads: int = 4
    """Attention heads; they share `hidden_size` out."""
    attention_dropout: float = 0.0
    """Dropout on attention weights."""
    dtype: Dtype = Dtype.float32
    """Of the weights."""


@dataclass
class HfModelConfig:
    """`model=hf`: a causal language model and its tokenizer from a local folder."""

    _target_: str = "recipe_ckpt.sft.model.build_hf"
    _partial_: bool = True
    path: str | None = None
    """A folder in the Hugging Face format (config.json, *.safetensors, tokenizer files)."""
    dtype: Dtype = Dtype.float32
    """Of the weights."""


@dataclass
class DataConfig:
    """What `data.` has whatever the data is: how samples become batches."""

    train_batch_size: int = 64
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size_per_gpu: int | None = None
    """Samples of one forward pass on one rank; the rest of a rank's share is accumulated. null: its whole share."""
    num_workers: int = 0
    """Loader processes of each rank."""
    prefetch_factor: int | None = None
    """Batches that each loader process fetches ahead; null is torch's default."""
    shuffle: bool = True
    """Another order in each epoch."""
    drop_last: bool = False
    """Leave out the last, partial batch of an epoch; false fills it up with samples that count for nothing."""


@dataclass
class ArithmeticDataConfig(DataConfig):
    """`data=arithmetic`: sums of small numbers as questions and answers, generated."""

    _target_: str = "recipe_ckpt.sft.data.build_arithmetic"
    _partial_: bool = True
    train_samples: int = 768
    """Questions to train on; where there are fewer sums, they come again."""
    val_samples: int = 64
    """Questions to evaluate on; their sums are not in the training data."""
    max_number: int = 20
    """The largest summand."""
    seed: int = 0
    """Which sums are held out, and their order."""
    max_length: int = 128
    """Tokens; what is longer is cut off."""
    chat_template: str | None = None
    """A Jinja template; null is the tokenizer's own, or a plain one."""


@dataclass
class JsonlDataConfig(DataConfig):
    """`data=jsonl`: chats from JSONL or Parquet files."""

    _target_: str = "recipe_ckpt.sft.data.build_jsonl"
    _partial_: bool = True
    train_files: Any = None
    """A file, or a list of them."""
    val_files: Any = None
    """A file, or a list of them; null: no evaluation."""
    messages_key: str = "messages"
    """The column with a list of {role, content}."""
    prompt_key: str | None = None
    """With `response_key`: the columns of a question and its answer, in place of `messages_key`."""
    response_key: str | None = None
    """See `prompt_key`."""
    max_length: int = 1024
    """Tokens; what is longer is cut off. A sample that loses its whole answer is left out, with a warning."""
    chat_template: str | None = None
    """A Jinja template; null is the tokenizer's own, or a plain one."""
