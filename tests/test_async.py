"""Asynchronous saves: training goes on, and what is saved is of one instant, whole, and in order."""

import os
import signal
import threading
from pathlib import Path

import pytest

from recipe_ckpt.errors import SaveFailedError
from recipe_ckpt.policies import SavePolicy
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import verify
from tests.test_crash import reopen, sweep
from tests.tiny import Run, TinyEngine, TinySnapshot, list_steps, make_checkpoints, resume, run_world
from tests.toy import train_toy

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

ASYNC = SavePolicy(is_async=True)
WARN = SavePolicy(is_async=True, on_failure="warn")


class StagedTinySnapshot(TinySnapshot):
    def wait_staged(self):
        pass

    def release(self):
        pass


class StagingTinyEngine(TinyEngine):
    """A tiny engine whose snapshots are copies (of one number)."""

    problem = None

    def can_stage(self, contents):
        return self.problem

    def snapshot(self, contents, *, stage=False, overlap=False):
        if self.on_save is not None:
            self.on_save()
        return StagedTinySnapshot(self.value, self.rank)


class SlowStorage(LocalStorage):
    """A disk on which files whose names end like this are written when the test says so, or fail."""

    def __init__(self, name="model-0.json", error=None):
        self.name, self.error = name, error
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write_file(self, path, chunks, *, name, rank):
        if name.endswith(self.name):
            self.reached.set()
            assert self.go_on.wait(30)
            if self.error is not None:
                raise self.error
        return super().write_file(path, chunks, name=name, rank=rank)


def launch(root, storage=None, policy=ASYNC, **options):
    engine = options.pop("engine", None) or StagingTinyEngine()
    return Run(root, engine=engine, save_policy=policy, storage=storage or LocalStorage(), **options)


def read_tracker(root):
    path = Path(root, "latest_checkpointed_iteration.txt")
    return int(path.read_text()) if path.exists() else None


def test_training_goes_on_while_a_save_is_written(tmp_path):
    storage = SlowStorage()
    with launch(tmp_path, storage) as run:
        run.save(4)
        assert storage.reached.wait(30)
        assert list_steps(tmp_path) == []
        storage.go_on.set()
        run.handler.wait()
        assert list_steps(tmp_path) == [4]


def test_what_changes_after_the_call_is_not_saved(tmp_path):
    storage = SlowStorage()
    with launch(tmp_path, storage) as run:
        run.save(4)
        run.engine.value = 99.0
        run.loader.batch_sampler.consumed = 99
        storage.go_on.set()
    assert resume(tmp_path) == 4


@pytest.mark.case("C210")
def test_the_tracker_names_the_step_that_was_saved_not_the_one_in_training(tmp_path):
    storage = SlowStorage()
    with launch(tmp_path, storage) as run:
        run.save(20)
        run.engine.value = 28.0
        assert read_tracker(tmp_path) is None
        storage.go_on.set()
        run.handler.wait()
        assert read_tracker(tmp_path) == 20


@pytest.mark.case("C211", "C1304")
def test_leaving_waits_for_the_save_in_flight(tmp_path):
    storage = SlowStorage()
    with launch(tmp_path, storage) as run:
        run.save(16)
        threading.Timer(0.05, storage.go_on.set).start()
    assert (list_steps(tmp_path), read_tracker(tmp_path)) == ([16], 16)


def test_a_run_that_raises_still_ends_its_save(tmp_path):
    def train_and_fail():
        with launch(tmp_path) as run:
            run.save(16)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    assert list_steps(tmp_path) == [16]


@pytest.mark.case("C606")
def test_the_only_good_one_stays_until_its_successor_is_committed(tmp_path):
    make_checkpoints(tmp_path, 1000)
    storage = SlowStorage()
    with launch(tmp_path, storage, max_ckpt_to_keep=1) as run:
        run.save(1500)
        assert storage.reached.wait(30)
        assert (list_steps(tmp_path), read_tracker(tmp_path)) == ([1000], 1000)
        storage.go_on.set()
    assert (list_steps(tmp_path), read_tracker(tmp_path)) == ([1500], 1500)


@pytest.mark.case("C1305")
def test_a_save_waits_for_the_one_before_it(tmp_path):
    storage = SlowStorage()
    with launch(tmp_path, storage) as run:
        run.save(4)
        assert storage.reached.wait(30)
        threading.Timer(0.05, storage.go_on.set).start()
        run.save(8)
        assert 4 in list_steps(tmp_path)
        assert run.handler.last_save.step == 4
    assert list_steps(tmp_path) == [4, 8]
    assert all(verify(LocalStorage(), f"{tmp_path}/global_step_{step}", read_all=True) is None for step in (4, 8))


@pytest.mark.case("C1008")
def test_a_failed_save_surfaces_once_at_the_next_one_with_its_step(tmp_path):
    storage = SlowStorage(error=OSError(28, "No space left on device"))
    storage.go_on.set()
    with launch(tmp_path, storage) as run:
        run.save(4)
        with pytest.raises(SaveFailedError, match="step 4: not saved .*No space left on device"):
            run.save(8)
        storage.error = None
        run.save(12)
    assert list_steps(tmp_path) == [12]


@pytest.mark.case("C1008")
def test_a_failed_last_save_surfaces_at_the_end(tmp_path):
    storage = SlowStorage(error=OSError(5, "Input/output error"))
    storage.go_on.set()
    with pytest.raises(SaveFailedError, match="step 4"), launch(tmp_path, storage) as run:
        run.save(4)


def test_a_tolerated_failure_is_an_error_in_the_log(tmp_path, caplog):
    storage = SlowStorage(error=OSError(5, "Input/output error"))
    storage.go_on.set()
    with launch(tmp_path, storage, WARN) as run:
        run.save(4)
        run.handler.wait()
        storage.error = None
        run.save(8)
    assert "step 4: not saved" in caplog.text
    assert list_steps(tmp_path) == [8]


def test_a_tolerated_failure_of_the_last_save_is_raised_at_the_end(tmp_path):
    storage = SlowStorage(error=OSError(28, "No space left on device"))
    storage.go_on.set()
    with pytest.raises(SaveFailedError, match="step 4: .*make room there"), launch(tmp_path, storage, WARN) as run:
        run.save(4)


def test_a_state_that_can_not_be_copied_is_saved_while_training_waits(tmp_path, caplog):
    engine = StagingTinyEngine()
    engine.problem = "8 GB are needed, 1 GB is free"
    with launch(tmp_path, engine=engine) as run:
        run.save(4)
        assert list_steps(tmp_path) == [4]
        run.save(8)
    assert caplog.text.count("saves in the blocking way: 8 GB are needed") == 1


def test_an_engine_without_snapshots_of_its_own_is_saved_while_training_waits(tmp_path):
    with launch(tmp_path, engine=TinyEngine()) as run:
        run.save(4)
        assert list_steps(tmp_path) == [4]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_the_background_fails_the_save_of_all(tmp_path, failing):
    def work(coordinator):
        engine = StagingTinyEngine(rank=coordinator.rank, dp_size=2)
        storage = SlowStorage("model-1.json" if failing else "model-0.json", OSError(5, "Input/output error"))
        storage.go_on.set()
        with launch(tmp_path, storage, coordinator=coordinator, engine=engine) as run:
            run.save(4)
            try:
                run.handler.wait()
            except SaveFailedError as error:
                message = str(error)
            storage.error = None
            run.save(8)
        return message

    messages = run_world(2, work)
    assert all("step 4: not saved" in message and "Input/output error" in message for message in messages)
    assert f"rank {failing} failed" in messages[1 - failing]
    assert list_steps(tmp_path) == [8]


def test_asynchronous_save_survives_death_at_each_point(place):
    def act(root, storage):
        with launch(root, storage, max_ckpt_to_keep=1) as run:
            run.save(20)

    for root in sweep(place, lambda root: make_checkpoints(root, 10), act):
        reopen(root, {10: 10.0, 20: 20.0}, max_ckpt_to_keep=1)
        assert list_steps(root) == [99]


TOY = ("trainer.total_training_steps=12", "trainer.save_freq=2", "checkpoint.async_save=true")


def test_an_asynchronous_run_resumes_as_its_twin(tmp_path):
    train_toy("checkpoint=none", *TOY[:1], f"trainer.audit_file={tmp_path}/twin.jsonl")
    places = (f"checkpoint.default_local_dir={tmp_path}/ck", f"trainer.audit_file={tmp_path}/run.jsonl")
    train_toy(*TOY, *places, until=7)
    train_toy(*TOY, *places)
    lines = dict.fromkeys(Path(tmp_path, "run.jsonl").read_text().splitlines())
    assert list(lines) == Path(tmp_path, "twin.jsonl").read_text().splitlines()


def test_blocking_and_asynchronous_saves_have_the_same_bytes(tmp_path):
    for name, mode in (("a", "true"), ("b", "false")):
        train_toy(
            "trainer.total_training_steps=4",
            f"checkpoint.async_save={mode}",
            f"checkpoint.default_local_dir={tmp_path}/{name}",
        )
    for name in ("model-0.safetensors", "optimizer-0.safetensors", "index.json", "rng_0.pt", "trainer_state.json"):
        one, other = (Path(tmp_path, run, "global_step_4", name).read_bytes() for run in "ab")
        assert one == other, name


def test_a_process_killed_with_a_save_in_flight_resumes_at_the_one_before(tmp_path):
    make_checkpoints(tmp_path, 4)
    child = os.fork()
    if child == 0:
        storage = SlowStorage()
        with launch(tmp_path, storage) as run:
            run.save(8)
            storage.reached.wait(30)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert resume(tmp_path) == 4


def test_two_hundred_saves_leave_no_threads_and_descriptors(tmp_path):
    with launch(tmp_path, max_ckpt_to_keep=1) as run:
        run.save(1, 2)
        run.handler.wait()
        before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        run.save(*range(3, 203))
        run.handler.wait()
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert list_steps(tmp_path) == [202]
