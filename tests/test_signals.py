"""A signal ends a run after a save of the step in hand, on all ranks alike, and the next launch goes on from there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipe_ckpt import preemption
from recipe_ckpt.sft.loop import train
from recipe_ckpt.sft.wishes import Wishes
from tests.ranks import run_ranks
from tests.toy import open_toy, train_toy

REPO = Path(__file__).parents[1]
STEPS = ("trainer.total_training_steps=8", "trainer.save_freq=100")


def at(folder):
    return (*STEPS, f"checkpoint.default_local_dir={folder}/ck", f"trainer.audit_file={folder}/audit.jsonl")


def saved_steps(folder):
    return sorted(int(path.name.removeprefix("global_step_")) for path in Path(folder, "ck").glob("global_step_*"))


def read_audit(folder):
    lines = [json.loads(line) for line in Path(folder, "audit.jsonl").read_text().splitlines()]
    return {(line["rank"], line["step"]): line for line in lines}


def send(number):
    os.kill(os.getpid(), number)


class Interrupting:
    """Something that the loop iterates over or calls; a signal arrives at its first use."""

    def __init__(self, inner, number):
        self.inner, self.number, self.is_sent = inner, number, False

    def _interrupt(self):
        if not self.is_sent:
            self.is_sent = True
            send(self.number)

    def __iter__(self):
        for item in self.inner:
            self._interrupt()
            yield item

    last_save = last_upload = None

    def save_checkpoint(self, step, *, metrics=None):
        self._interrupt()
        self.inner.save_checkpoint(step, metrics=metrics)

    def wait(self):
        self.inner.wait()


def train_until_signalled(folder, number, *overrides, step=None, loader=None, handler=None):
    """Train with a signal after a step, or in an evaluation, or in a save; return the exit code, None for a normal end."""
    with preemption.watch() as stop, open_toy(*at(folder), *overrides) as run:
        if loader:
            run.val_loader = Interrupting(run.val_loader, number)
        if handler:
            run.handler = Interrupting(run.handler, number)
        try:
            for done in train(run, stop):
                if done == step:
                    send(number)
        except SystemExit as end:
            return end.code
    return None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_next_step_and_ends_with_its_code(tmp_path, number, code):
    assert train_until_signalled(tmp_path, number, step=3) == code
    assert saved_steps(tmp_path) == [4]


def test_a_run_that_was_asked_to_stop_continues_as_if_it_was_not(tmp_path):
    for name in ("twin", "run"):
        (tmp_path / name).mkdir()
    train_toy(*at(tmp_path / "twin"))
    train_until_signalled(tmp_path / "run", signal.SIGTERM, step=3)
    train_toy(*at(tmp_path / "run"))
    assert read_audit(tmp_path / "run") == read_audit(tmp_path / "twin")


def test_a_signal_in_an_evaluation_cuts_it_short_and_saves_its_step(tmp_path):
    code = train_until_signalled(tmp_path, signal.SIGTERM, "trainer.test_freq=2", loader=True)
    assert (code, saved_steps(tmp_path)) == (143, [2])
    with open_toy(*at(tmp_path)) as run:
        assert "val/loss" not in run.metrics


def test_a_signal_during_a_save_lets_it_end_and_stops_at_the_next_step(tmp_path):
    code = train_until_signalled(tmp_path, signal.SIGTERM, "trainer.save_freq=2", handler=True)
    assert (code, saved_steps(tmp_path)) == (143, [2, 3])


@pytest.mark.case("C1306")
def test_a_signal_during_the_final_save_saves_once_and_the_run_is_done(tmp_path):
    assert train_until_signalled(tmp_path, signal.SIGTERM, handler=True) is None
    assert saved_steps(tmp_path) == [8]


def test_two_different_signals_are_one_stop(tmp_path):
    with preemption.watch() as stop, open_toy(*at(tmp_path)) as run:
        stop.note(signal.SIGINT)
        stop.note(signal.SIGTERM)
        with pytest.raises(SystemExit, match="130"):
            list(train(run, stop))
    assert saved_steps(tmp_path) == [1]


def signal_one_rank(folder):
    from torch import distributed

    with preemption.watch() as stop, open_toy(*at(folder)) as run:
        try:
            for step in train(run, stop):
                if step == 3 and distributed.get_rank() == 1:
                    send(signal.SIGTERM)
        except SystemExit as end:
            Path(folder, f"rank-{run.rank}").write_text(f"{end.code} {run.step}")


@pytest.mark.case("C1303")
def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path):
    run_ranks(2, signal_one_rank, str(tmp_path))
    assert [Path(tmp_path, f"rank-{rank}").read_text() for rank in (0, 1)] == ["143 4", "143 4"]
    assert saved_steps(tmp_path) == [4]


TOY = ("tests.toy",)
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "tests.toy")


def launch(folder, module, *overrides, timeout=120):
    arguments = [sys.executable, "-m", *module, *at(folder), *overrides, f"hydra.run.dir={folder}/hydra"]
    return subprocess.run(arguments, cwd=REPO, timeout=timeout, capture_output=True, text=True, check=False)


def test_a_process_that_got_sigterm_exits_with_143(tmp_path):
    ended = launch(tmp_path, TOY, "toy.term_after=3")
    assert (ended.returncode, saved_steps(tmp_path)) == (143, [4]), ended.stderr
    assert "SIGTERM: stopped at step 4, which is saved" in ended.stdout + ended.stderr
    assert "resumed_from=4" in launch(tmp_path, TOY).stdout


IN_FLIGHT = ("trainer.total_training_steps=9", "trainer.save_freq=4")


def test_sigterm_with_a_save_in_flight_ends_it_and_saves_the_step_in_hand(tmp_path):
    ended = launch(tmp_path, TOY, *IN_FLIGHT, "checkpoint._target_=tests.toy.build_terminated")
    assert (ended.returncode, saved_steps(tmp_path)) == (143, [4, 5]), ended.stderr
    assert "resumed_from=5" in launch(tmp_path, TOY, *IN_FLIGHT).stdout
    (tmp_path / "twin").mkdir()
    train_toy(*at(tmp_path / "twin"), *IN_FLIGHT)
    assert read_audit(tmp_path) == read_audit(tmp_path / "twin")


def test_sigkill_with_a_save_in_flight_loses_that_save_only(tmp_path):
    killed = launch(tmp_path, TOY, *IN_FLIGHT, "trainer.save_freq=2", "checkpoint._target_=tests.toy.build_killed")
    assert (killed.returncode, saved_steps(tmp_path)) == (-signal.SIGKILL, [2]), killed.stderr
    assert "resumed_from=2" in launch(tmp_path, TOY, *IN_FLIGHT).stdout
    assert saved_steps(tmp_path) == [2, 4, 8, 9]


def test_under_torchrun_a_signalled_rank_stops_the_run_at_a_saved_step(tmp_path):
    ended = launch(tmp_path, TORCHRUN, "toy.term_after=3")
    assert ended.returncode != 0
    assert saved_steps(tmp_path) == [4], ended.stderr


def test_a_save_is_due_when_the_interval_has_passed_since_the_last():
    now = [0.0]
    wishes = Wishes(preemption.StopRequest(), 2.0, "cpu", clock=lambda: now[0])
    seen = []
    for now[0] in (119.0, 121.0, 130.0, 251.0):
        wishes.agree()
        seen.append(wishes.has_any)
        if wishes.has_any:
            wishes.note_save()
    assert seen == [False, True, False, True]


def test_the_interval_saves_beside_save_freq(tmp_path):
    train_toy(*at(tmp_path), "trainer.save_interval_mins=0.000001")
    assert saved_steps(tmp_path) == list(range(1, 9))
