"""What a resume says and does when the configuration is not the checkpoint's."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from recipe_ckpt.config import OptimConfig
from recipe_ckpt.drift import Change, describe_changes, is_of_experiment, list_changes, refuse_finished, require_resumable
from recipe_ckpt.errors import ConfigError
from recipe_ckpt.sft.loop import run as run_to_end
from recipe_ckpt.sft.schedule import compute_lr
from tests.toy import compose_toy, train_toy

OPTIM = {"lr": 0.1, "lr_scheduler_type": "cosine", "lr_decay_steps": None}


@pytest.mark.parametrize(
    ("saved", "current", "changes"),
    [
        ({"optim": {"lr": 1}}, {"optim": {"lr": 1.0}}, []),
        ({"optim": {"lr": 1, "eps": 3}}, {"optim": {"lr": 2, "eps": 3}}, ["optim.lr: 1 -> 2"]),
        ({"model": {"a": {"b": [1]}}}, {"model": {"a": {"b": [2]}}}, ["model.a.b: [1] -> [2]"]),
        ({"optim": {"clip": 1}}, {"optim": {"clip": None}}, ["optim.clip: 1 -> null"]),
        ({"optim": {"clip": 0}}, {"optim": {"clip": None}}, ["optim.clip: 0 -> null"]),
        ({}, {"optim": {"new": None}, "model": {"lora_rank": 0}}, []),
        ({}, {"optim": {"new": 3}}, ["optim.new: null -> 3"]),
        ({"optim": {"old": 3}}, {}, ["optim.old: 3 -> null"]),
        (
            {"checkpoint": {"async_save": True}, "launch": {"n": 1}},
            {"checkpoint": {"async_save": False}, "launch": {"n": 2}},
            [],
        ),
        ({"trainer": {"save_freq": 1, "logger": []}}, {"trainer": {"save_freq": 2, "logger": ["a"]}}, []),
        ({"trainer": {"total_training_steps": 8}}, {"trainer": {"total_training_steps": 9}}, []),
        ({"trainer": {"seed": 1}}, {"trainer": {"seed": 2}}, ["trainer.seed: 1 -> 2 (weights and random states"]),
    ],
)
def test_what_changed_is_listed(saved, current, changes):
    found = [change.describe() for change in list_changes(saved, current)]
    assert len(found) == len(changes)
    assert all(text.startswith(start) for text, start in zip(found, changes, strict=True))


@pytest.mark.case("C805")
@pytest.mark.parametrize(
    ("optim", "trainer", "keys"),
    [
        ({}, {"total_training_steps": 60}, ["trainer.total_training_steps"]),
        ({}, {"total_training_steps": None, "total_epochs": 2}, ["trainer.total_training_steps", "trainer.total_epochs"]),
        (
            {"lr_scheduler_type": "constant"},
            {"total_training_steps": 60},
            ["optim.lr_scheduler_type", "trainer.total_training_steps"],
        ),
        ({"lr_decay_steps": 60}, {"total_training_steps": 60}, ["optim.lr_decay_steps", "trainer.total_training_steps"]),
        ({}, {"total_epochs": 7}, []),
    ],
)
def test_a_longer_run_counts_where_the_schedule_ends_with_the_run(optim, trainer, keys):
    length = {"total_training_steps": 30, "total_epochs": 1}
    saved = {"optim": OPTIM, "trainer": length}
    current = {"optim": {**OPTIM, **optim}, "trainer": {**length, **trainer}}
    assert [change.key for change in list_changes(saved, current)] == keys


@pytest.mark.parametrize("fixed", [{"lr_decay_steps": 100}, {"lr_scheduler_type": "constant"}])
def test_a_longer_run_is_no_change_where_the_schedule_has_its_own_end(fixed):
    lengths = ({"optim": {**OPTIM, **fixed}, "trainer": {"total_training_steps": steps}} for steps in (30, 60))
    assert list_changes(*lengths) == []


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
def test_a_changed_lora_rank_is_always_an_error(policy):
    changes = list_changes({"model": {"lora_rank": 8}, "optim": {"lr": 1}}, {"model": {"lora_rank": 16}, "optim": {"lr": 2}})
    with pytest.raises(ConfigError, match=r"model.lora_rank: found 16; allowed: 8, .*step 5(.|\n)*optim.lr: 1 -> 2"):
        require_resumable(changes, policy, 5, "/run/global_step_5")


def test_no_change_is_no_error():
    require_resumable([], "raise", 5, "/run")
    refuse_finished([Change("trainer.total_training_steps", 60, 30)], 60)


def test_an_engine_that_restores_itself_is_mentioned():
    text = describe_changes([Change("optim.lr", 1, 2)], 5, "/run", may_be_restored=True)
    assert "Takes effect from step 6:\n  optim.lr: 1 -> 2\nThis engine restores its optimizer itself" in text


@pytest.mark.parametrize("key", ["checkpoint@eval", "optim.lr", "data.train_files", "experiment", "model", "hydration"])
def test_what_is_not_known_to_be_harmless_makes_an_experiment(key):
    assert is_of_experiment(key)


# --- with the recipe


def toy(tmp_path, *overrides, steps=8):
    return [
        f"checkpoint.default_local_dir={tmp_path}/ck",
        f"trainer.audit_file={tmp_path}/audit.jsonl",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=4",
        "optim.lr_decay_steps=12",
        *overrides,
    ]


def read_audit(tmp_path):
    return [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]


def tell_drift(caplog):
    return [record.getMessage() for record in caplog.records if "another configuration" in record.getMessage()]


@pytest.mark.case("C1106")
def test_a_changed_rate_is_told_and_holds_from_the_next_step(tmp_path, caplog):
    train_toy(*toy(tmp_path), until=4)
    train_toy(*toy(tmp_path, "optim.lr=0.5", "optim.weight_decay=0.3", "trainer.save_freq=2"))
    (text,) = tell_drift(caplog)
    assert text.startswith(
        f"step 4 in {tmp_path}/ck/global_step_4 was saved with another configuration. Takes effect from step 5:"
    )
    assert text.splitlines()[1:] == ["  optim.lr: 0.003 -> 0.5", "  optim.weight_decay: 0.01 -> 0.3"]
    optims = [OptimConfig(lr=lr, lr_warmup_steps=3, lr_decay_steps=12) for lr in (0.003, 0.5)]
    rates = [compute_lr(step, optims[step > 4], 8) for step in range(1, 9)]
    assert [line["lr"] for line in read_audit(tmp_path)] == rates


@pytest.mark.case("C1106")
@pytest.mark.parametrize("change", ["optim.betas=[0.1,0.2]", "optim.weight_decay=0.9", "optim.eps=1.0"])
def test_a_changed_hyperparameter_changes_the_losses_from_the_step_after_the_next(tmp_path, change):
    losses = []
    for place, changed in (("a", []), ("b", [change])):
        train_toy(*toy(tmp_path / place), until=4)
        train_toy(*toy(tmp_path / place, *changed))
        losses.append([line["loss"] for line in read_audit(tmp_path / place)])
    equal = [left == right for left, right in zip(*losses, strict=True)]
    assert equal == [True] * 5 + [False] * 3


@pytest.mark.case("C1106")
def test_with_raise_nothing_is_restored(tmp_path, caplog):
    train_toy(*toy(tmp_path), until=4)
    with pytest.raises(ConfigError, match=r"optim.lr: found 0.5; allowed: 0.003, with which step 4 in .*=warn"):
        train_toy(*toy(tmp_path, "optim.lr=0.5", "checkpoint.on_config_drift=raise"))
    assert tell_drift(caplog) == []
    assert len(read_audit(tmp_path)) == 4


def test_with_ignore_nothing_is_said(tmp_path, caplog):
    train_toy(*toy(tmp_path), until=4)
    run = train_toy(*toy(tmp_path, "optim.lr=0.5", "checkpoint.on_config_drift=ignore"))
    assert (tell_drift(caplog), run.step, run.handler.resume_point.changes) == ([], 8, [])


def test_the_same_configuration_is_no_drift(tmp_path, caplog):
    train_toy(*toy(tmp_path), until=4)
    changes = train_toy(*toy(tmp_path, "checkpoint.on_config_drift=raise", "data.num_workers=1")).handler.resume_point.changes
    assert (tell_drift(caplog), changes) == ([], [])


def test_a_finished_run_with_another_rate_names_the_ways_on(tmp_path):
    train_toy(*toy(tmp_path))
    with pytest.raises(
        ConfigError, match=r"optim.lr: found 0.5.*trainer.experiment_name.*total_training_steps.*checkpoint=fresh"
    ):
        run_to_end(compose_toy(*toy(tmp_path, "optim.lr=0.5")))
    assert run_to_end(compose_toy(*toy(tmp_path, "optim.lr=0.5", steps=12))) > 0
    assert len(read_audit(tmp_path)) == 12


def test_a_finished_run_with_other_frequencies_returns_its_metric(tmp_path):
    metric = run_to_end(compose_toy(*toy(tmp_path)))
    assert run_to_end(compose_toy(*toy(tmp_path, "trainer.save_freq=3", steps=6))) == metric


def test_a_checkpoint_without_a_configuration_is_resumed(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    recipe = compose_toy(*toy(tmp_path, steps=4))
    bare = {name: text for name, text in recipe.documents.items() if name != "config_resolved.json"}
    run_to_end(dataclasses.replace(recipe, documents=bare))
    train_toy(*toy(tmp_path, "optim.lr=0.5"))
    assert "holds no config_resolved.json, so what differs from its configuration can't be told" in caplog.text


def test_a_flipped_bit_in_the_saved_configuration_is_found(tmp_path, caplog):
    train_toy(*toy(tmp_path))
    path = tmp_path / "ck" / "global_step_8" / "config_resolved.json"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert train_toy(*toy(tmp_path)).handler.resume_point.step == 4
    assert "config_resolved.json: found" in caplog.text


@pytest.mark.parametrize("name", ["val/loss", "train/loss"])
def test_the_metric_that_is_optimized_is_returned_also_by_a_finished_run(tmp_path, name):
    recipe = compose_toy(*toy(tmp_path, f"optimized_metric={name}"))
    metric = run_to_end(recipe)
    manifest = json.loads((tmp_path / "ck" / "global_step_8" / "manifest.json").read_text())
    assert metric == run_to_end(recipe) == manifest["metrics"][name]


def test_a_finished_run_whose_last_save_was_not_evaluated_is_evaluated(tmp_path):
    train_toy(*toy(tmp_path), until=4)  # no evaluation is due there
    shorter = compose_toy(*toy(tmp_path, steps=4))
    assert run_to_end(shorter) == run_to_end(shorter) > 0
    assert [path.name for path in Path(tmp_path / "ck").glob("global_step_*")] == ["global_step_4"]


def test_a_validation_loss_without_validation_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="optimized_metric: found 'val/loss'; allowed: train/loss"):
        run_to_end(compose_toy(*toy(tmp_path, "optimized_metric=val/loss", "data.val_samples=0")))
