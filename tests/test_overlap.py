"""Saves that are copied beside the next forward and backward hold the instant of `save_checkpoint`, like blocking ones."""

from pathlib import Path

import pytest
import torch

from recipe_ckpt.handler import CheckpointHandler
from recipe_ckpt.policies import SavePolicy
from tests.test_staging import build_wide, step_wide
from tests.tiny import TinyLoader, list_steps

OVERLAP = SavePolicy(is_async=True, overlap=True)
FILES = ("model-0.safetensors", "optimizer-0.safetensors", "index.json", "rng_0.pt", "data_0.pt", "trainer_state.json")


def open_handler(root, engine, policy, loader=None):
    handler = CheckpointHandler(engine, loader or TinyLoader(), default_local_dir=str(root), save_policy=policy)
    handler.load_checkpoint()
    return handler


def save_and_go_on(root, policy, go_on):
    """Save once so that plans exist and copies start at once, then save step 2 and go on; return the bytes of step 2."""
    engine, loader = build_wide(), TinyLoader()
    with open_handler(root, engine, policy, loader) as handler:
        handler.save_checkpoint(1)
        handler.wait()
        engine.model(0.1).backward()
        handler.save_checkpoint(2)
        go_on(engine, loader, handler)
    return {name: Path(root, "global_step_2", name).read_bytes() for name in FILES}


def step_by_engine(engine, loader, handler):
    engine.step_optimizer(2)


def step_by_itself(engine, loader, handler):
    engine.optimizer.step()


def accumulate_and_step(engine, loader, handler):
    for _ in range(2):
        engine.model(0.1).backward()
    engine.step_optimizer(2)


def evaluate(engine, loader, handler):
    with torch.no_grad():
        engine.model(0.1)


def load_into_the_optimizer(engine, loader, handler):
    state = engine.optimizer.state_dict()
    other = {key: {name: torch.zeros_like(value) for name, value in item.items()} for key, item in state["state"].items()}
    engine.optimizer.load_state_dict({**state, "state": other})


def go_back(engine, loader, handler):
    handler_root = Path(handler.root, "global_step_1")
    engine.load_checkpoint(str(handler_root))


def replace_weights(engine, loader, handler):
    engine.model.weight.data = torch.zeros(3)


def advance_everything_else(engine, loader, handler):
    loader.batch_sampler.consumed = 7
    torch.rand(3)


def save_again(engine, loader, handler):
    handler.save_checkpoint(3)


def do_nothing(engine, loader, handler):
    pass


@pytest.mark.parametrize(
    "go_on",
    [
        step_by_engine,
        step_by_itself,
        accumulate_and_step,
        evaluate,
        load_into_the_optimizer,
        go_back,
        replace_weights,
        advance_everything_else,
        save_again,
        do_nothing,
    ],
    ids=lambda go_on: go_on.__name__,
)
def test_what_comes_after_the_call_is_not_in_the_checkpoint(tmp_path, go_on):
    expected = save_and_go_on(tmp_path / "blocking", SavePolicy(), do_nothing)
    assert save_and_go_on(tmp_path / "overlapped", OVERLAP, go_on) == expected


def test_an_exception_after_the_call_leaves_a_whole_checkpoint(tmp_path):
    def fail(engine, loader, handler):
        raise ZeroDivisionError

    expected = save_and_go_on(tmp_path / "blocking", SavePolicy(), do_nothing)
    with pytest.raises(ZeroDivisionError):
        save_and_go_on(tmp_path / "overlapped", OVERLAP, fail)
    assert {name: Path(tmp_path, "overlapped/global_step_2", name).read_bytes() for name in FILES} == expected


def test_a_run_with_overlapped_saves_continues_as_its_twin(tmp_path):
    engine = build_wide()
    with open_handler(tmp_path, engine, OVERLAP) as handler:
        for step in range(2, 6):
            step_wide(engine, step)
            handler.save_checkpoint(step)
    assert list_steps(tmp_path) == [2, 3, 4, 5]
    resumed = build_wide()
    with open_handler(tmp_path, resumed, OVERLAP) as handler:
        assert handler.resume_point.step == 5
    for name, value in engine.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
