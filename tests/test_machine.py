"""Saves, kills, disk errors, damage, rewinds and fresh starts in any order: what auto resumes is what a small model says."""

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe_ckpt.errors import NothingToResumeError, SaveFailedError
from tests.test_disk_errors import FaultyStorage, Killed, bury
from tests.tiny import Run, list_steps

FOREIGN = ("notes.txt", "tb/events", "global_step_3_merged/weights", "global_step_3.bak/x")
FILES = ("model-0.json", "trainer_state.json", "rng_0.pt", "files.json")
STUCK = "none of the checkpoints here can be used"


@dataclass(eq=False)
class Commit:
    """A checkpoint in the model; `value` is the engine's, and grows from commit to commit."""

    step: int
    value: float
    parent: "Commit | None"
    damaged: bool = False

    def line(self):
        """Itself and its ancestors."""
        commit = self
        while commit is not None:
            yield commit
            commit = commit.parent


picks = st.integers(0, 1000)
deltas = st.sampled_from([0, 1, 1, 2])
keeps = st.sampled_from([None, None, 1, 2, 3])
faults = st.one_of(st.none(), st.tuples(st.sampled_from(["fail", "fail and go on", "kill"]), st.integers(1, 45)))


class RootMachine(RuleBasedStateMachine):
    """One root, each rule a launch. `disk` holds by step what lies in it, `newest` is the end of its current branch."""

    @initialize()
    def make_root(self):
        self.folder = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.root = Path(self.folder, "run")
        for name in FOREIGN:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text("mine")
        self.values = 0
        self.disk, self.newest, self.tracked, self.archived = {}, None, None, []

    def teardown(self):
        shutil.rmtree(self.folder)

    # --- the model

    def expect(self):
        """What auto resumes: a commit, None for a fresh start, or that it is stuck."""
        first = self.tracked or self.newest
        if first is None:
            return None
        there = [commit for commit in first.line() if self.disk.get(commit.step) is commit]
        return next((commit for commit in there if not commit.damaged), STUCK)

    def add(self, commit, keep, replaced):
        """Commit, and return what may be pruned: left-behind ones first, then older before newer."""
        former = self.disk.get(commit.step)
        if former is not None and former is not replaced:
            self.archived.append(former)
        self.disk[commit.step] = self.newest = commit
        self.tracked = None
        known = sorted(self.disk.values(), key=lambda known: (known in set(commit.line()), known.value))
        return known[: max(len(known) - keep, 0)] if keep else []

    def choose(self, pick):
        return self.disk[sorted(self.disk)[pick % len(self.disk)]]

    # --- launches

    @contextlib.contextmanager
    def launch(self, expected, **options):
        """Resume with a disk that can be told to fail; yield None if nothing can be resumed."""
        storage = FaultyStorage()
        run = Run(self.root, storage=storage, **options)
        run.storage = storage
        try:
            run.__enter__()
        except NothingToResumeError:
            if expected != STUCK:
                raise
            yield None
            return
        found = (run.start, run.engine.value) if run.handler.resume_point else None
        run.found = found
        if expected is not ANYTHING:
            assert found == (None if expected is None else (expected.step, expected.value))
        yield run
        run.handler.close()

    def save(self, run, parent, delta, keep, fault):
        kind, operations = fault or (None, 0)
        commit = self.build(parent, delta)
        {"kill": run.storage.kill_in, None: lambda _: None}.get(kind, run.storage.fail_in)(operations)
        try:
            self.write(run, commit)
        except SaveFailedError:
            run.storage.heal()
            if kind == "fail and go on":
                if self.read_value(commit.step) == commit.value:
                    self.add(commit, None, parent)
                    parent = commit
                return self.save(run, parent, 1, keep, None)
        except Killed:
            bury(run, self.root)
            run.storage.heal()
        else:
            run.storage.heal()
            return self.forget(self.add(commit, keep, parent), may_stay=kind is not None)
        run.handler.close()
        return self.look(commit, keep, parent)

    def build(self, parent, delta):
        self.values += 1
        if parent is None:
            return Commit(delta, float(self.values), None)
        return Commit(parent.step + delta, float(self.values), parent if delta else parent.parent)

    def write(self, run, commit):
        run.engine.value, run.loader.batch_sampler.consumed = commit.value, commit.step
        run.handler.save_checkpoint(commit.step)

    def look(self, commit, keep, parent):
        """After a fault: it is committed, or all is as before, but that a left-behind step of its name may have made room."""
        former = self.disk.get(commit.step)
        if former not in (None, parent) and commit.step not in list_steps(self.root):
            self.archived.append(self.disk.pop(commit.step))
        before = self.expect()
        with self.launch(ANYTHING if before != STUCK else STUCK) as run:
            if run is not None and run.found == (commit.step, commit.value):
                self.forget(self.add(commit, keep, parent), may_stay=True)
            elif run is not None:
                assert run.found == (before and (before.step, before.value))

    def forget(self, deleted, *, may_stay):
        for commit in deleted:
            if not may_stay or not (self.root / f"global_step_{commit.step}").exists():
                del self.disk[commit.step]
                self.archived += [] if commit in self.newest.line() else [commit]

    def read_value(self, step):
        try:
            return json.loads((self.root / f"global_step_{step}" / "model-0.json").read_text())
        except (FileNotFoundError, ValueError):
            return None

    # --- rules

    @rule(delta=deltas, keep=keeps, fault=faults)
    def resume_and_save(self, delta, keep, fault):
        expected = self.expect()
        with self.launch(expected, max_ckpt_to_keep=keep) as run:
            if run is not None:
                self.save(run, expected, delta, keep, fault)

    @rule()
    def resume_only(self):
        with self.launch(self.expect()):
            pass

    @precondition(lambda self: self.disk)
    @rule(pick=picks, delta=deltas, keep=keeps, fault=faults, saves=st.booleans())
    def rewind(self, pick, delta, keep, fault, saves):
        chosen = self.choose(pick)
        options = {"resume_mode": "resume_path", "resume_from_path": str(self.root / f"global_step_{chosen.step}")}
        with self.launch(STUCK if chosen.damaged else chosen, max_ckpt_to_keep=keep, **options) as run:
            if run is not None and saves:
                self.save(run, chosen, delta, keep, fault)

    @precondition(lambda self: self.disk)
    @rule(pick=picks)
    def edit_tracker(self, pick):
        chosen = self.choose(pick)
        if list(self.root.glob(".staging/*.committing")):
            self.resume_only()  # the disk refused to remove a commit's mark: until a start does, an edit is taken for its lag
        (self.root / "latest_checkpointed_iteration.txt").write_text(str(chosen.step))
        self.tracked = None if chosen is self.newest else chosen

    @precondition(lambda self: self.disk)
    @rule(pick=picks, name=st.sampled_from(FILES), way=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, pick, name, way):
        chosen = self.newest if pick % 2 and self.disk.get(self.newest.step) is self.newest else self.choose(pick)
        path = self.root / f"global_step_{chosen.step}" / name
        data = path.read_bytes() if path.exists() else b""
        if way == "delete" or len(data) < 2:
            path.unlink(missing_ok=True)
        else:
            half = len(data) // 2
            path.write_bytes(data[:half] + (bytes([(data[half] + 1) % 256]) + data[half + 1 :] if way == "flip" else b""))
        chosen.damaged = True

    @rule(keep=keeps, fault=faults, saves=st.booleans())
    def start_over(self, keep, fault, saves):
        with self.launch(None, resume_mode="disable", max_ckpt_to_keep=keep) as run:
            self.archived += self.disk.values()
            self.disk, self.newest, self.tracked = {}, None, None
            if saves:
                self.save(run, None, 1, keep, fault)

    # --- what always holds

    @invariant()
    def what_lies_there_is_what_the_model_says(self):
        assert list_steps(self.root) == sorted(self.disk)
        for commit in self.disk.values():
            assert commit.damaged or self.read_value(commit.step) == commit.value

    @invariant()
    def nothing_of_the_user_and_nothing_archived_is_gone(self):
        assert all((self.root / name).read_text() == "mine" for name in FOREIGN)
        kept = {path.read_text() for path in self.root.glob("archive/*/global_step_*/model-0.json")}
        assert {json.dumps(commit.value) for commit in self.archived if not commit.damaged} <= {text.strip() for text in kept}

    @invariant()
    def a_whole_newest_one_is_there(self):
        assert self.newest is None or self.disk.get(self.newest.step) is self.newest or self.newest in self.archived


ANYTHING = "anything"

TestRoot = RootMachine.TestCase
TestRoot.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
