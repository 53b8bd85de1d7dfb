"""Long forms of tests: what is too slow, or too random, for every change.

`python -m tests.stress kill --rounds 200`: kill a run again and again, at random instants, until it is done; then compare it
with a run that nobody killed. A round is one launch that ends by SIGKILL. Runs follow each other, each in a new root, until
so many rounds are over. The exit code is 1 if any run lost more than a save interval (with saves in the background: two), or
did not end as its twin.

`python -m tests.stress outage --secs 300`: a run with a mirror on a real HDFS goes on saving while the NameNode is stopped.
The exit code is 1 if its steps waited for that, or if the mirror lacks a step in the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipe_ckpt.remote_client import RemoteClient
from recipe_ckpt.sft.loop import open_run, train
from recipe_ckpt.sft.recipe import Recipe
from tests.hdfs_cluster import HdfsCluster, fetch_jars
from tests.toy import compose_toy, train_toy

SAVE_EVERY = 2
LAUNCH_TIMEOUT_SECS = 120.0
RECIPE = ("trainer.total_training_steps=200", f"trainer.save_freq={SAVE_EVERY}", "checkpoint.max_ckpt_to_keep=2")


@dataclass
class Tally:
    """What happened; `lost` is, for each resume, how many trained steps were trained again, at most the `allowed` ones."""

    allowed: int
    kills: int = 0
    runs: int = 0
    resumes: int = 0
    lost: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def describe(self) -> str:
        most = max(self.lost, default=0)
        verdict = "every run ended as its twin" if not self.faults else "\n".join(self.faults)
        return (
            f"rounds {self.kills}, kills {self.kills}, runs completed {self.runs}, resumes {self.resumes},"
            f" steps lost {sum(self.lost)} in all and {most} at most (a save every {SAVE_EVERY} steps); {verdict}"
        )


def kill_runs(rounds: int, folder: Path, seed: int, overrides: Sequence[str] = ()) -> Tally:
    """Run, kill and relaunch until `rounds` launches were killed and the last run is done."""
    chance = random.Random(seed)
    twin_audit = folder / "twin.jsonl"
    train_toy("checkpoint=none", *RECIPE, *overrides, f"trainer.audit_file={twin_audit}")
    twin = read_steps(twin_audit)
    # In the background a save may be in flight while the steps up to the next one are trained.
    tally = Tally(allowed=SAVE_EVERY if "checkpoint.async_save=false" in overrides else 2 * SAVE_EVERY)
    while tally.kills < rounds:
        run = folder / f"run-{tally.runs}"
        run.mkdir()
        places = (f"checkpoint.default_local_dir={run}/ck", f"trainer.audit_file={run}/audit.jsonl")
        finish_one_run(run, compose_toy(*RECIPE, *overrides, *places), chance, rounds, tally)
        if read_steps(run / "audit.jsonl") != twin:
            tally.faults.append(f"{run}: the audit differs from the twin's")
        tally.runs += 1
    return tally


def finish_one_run(run: Path, recipe: Recipe, chance: random.Random, rounds: int, tally: Tally) -> None:
    while True:
        trained = last_step(run / "audit.jsonl")
        launch = multiprocessing.get_context("fork").Process(target=train_to_the_end, args=(recipe, str(run)))
        launch.start()
        # A launch that is left alone takes about a second; some are killed before they have done anything.
        launch.join(chance.expovariate(2.0) if tally.kills < rounds else LAUNCH_TIMEOUT_SECS)
        killed = launch.is_alive()
        launch.kill()
        launch.join()
        tally.kills += killed
        count_resume(run, trained, tally)
        if not killed:
            if launch.exitcode:
                tally.faults.append(f"{run}: a launch ended with exit code {launch.exitcode}")
            return


def train_to_the_end(recipe: Recipe, run: str) -> None:
    with open_run(recipe) as current:
        with open(f"{run}/starts.txt", "a", encoding="ascii") as starts:
            starts.write(f"{current.step}\n")
        for _ in train(current):
            pass


def count_resume(run: Path, trained: int, tally: Tally) -> None:
    """Compare where a launch started with what was trained before it; a launch killed before its start says nothing."""
    path = run / "starts.txt"
    starts = path.read_text(encoding="ascii").split() if path.exists() else []
    path.unlink(missing_ok=True)
    if not starts or not trained:
        return
    tally.resumes += 1
    tally.lost.append(trained - int(starts[-1]))
    if tally.lost[-1] > tally.allowed:
        tally.faults.append(f"{run}: {trained} steps were trained, and the next launch started at {starts[-1]}")


def read_steps(audit: Path) -> dict[int, dict]:
    """Return an audit's lines by step; a step that was trained twice must have come out the same."""
    lines: dict[int, dict] = {}
    for line in map(json.loads, audit.read_text(encoding="utf-8").splitlines()):
        assert lines.setdefault(line["step"], line) == line, f"step {line['step']} came out differently when trained again"
    return lines


def last_step(audit: Path) -> int:
    return max(read_steps(audit), default=0) if audit.exists() else 0


def outlive_an_outage(secs: float, folder: Path) -> tuple[str, bool]:
    """Train until an outage of so many seconds is over and some steps longer; return what was seen, and if it was right."""
    fetch_jars()
    cluster = HdfsCluster(folder / "hdfs")
    try:
        cluster.start()
        return _train_through(cluster, secs, folder)
    finally:
        cluster.stop()


def _train_through(cluster: HdfsCluster, secs: float, folder: Path) -> tuple[str, bool]:
    url, slowest, saved = f"{cluster.uri}/run", {"before": 0.0, "during": 0.0, "after": 0.0}, []
    recipe = compose_toy(
        "trainer.total_training_steps=1000000",
        "trainer.save_freq=50",
        "checkpoint.max_ckpt_to_keep=1000000",
        f"checkpoint.default_local_dir={folder}/root",
        f"checkpoint.default_hdfs_dir={url}",
    )
    with open_run(recipe) as run:
        began = ended = time.monotonic()
        for step in train(run):
            now = time.monotonic()
            phase = "before" if now < began + 5 else "during" if now < began + 5 + secs else "after"
            slowest[phase] = max(slowest[phase], now - ended)
            if phase == "during" and not cluster.is_paused:
                cluster.pause("nn")
            if phase == "after" and cluster.is_paused:
                cluster.resume("nn")
            if step % 50 == 0:
                saved.append(step)
                time.sleep(1.0)  # a save a second
            if phase == "after" and len(saved) % 5 == 0:
                break
            ended = time.monotonic()
        steps_secs = time.monotonic() - began
    remote = RemoteClient(url)
    arrived = sorted(int(entry.name[12:]) for entry in remote.list_dir("") if entry.name.startswith("global_step_"))
    remote.close()
    took = ", ".join(f"{phase} {value:.2f} s" for phase, value in slowest.items())
    text = f"{saved[-1]} steps in {steps_secs:.0f} s, {len(saved)} saves, {len(arrived)} on the mirror; slowest step: {took}"
    return text, arrived == saved and slowest["during"] < 2 + 3 * slowest["before"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["kill", "outage"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--secs", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of the configuration, such as checkpoint.async_save=false")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "outage":
            seen, is_right = outlive_an_outage(arguments.secs, Path(folder))
            sys.stdout.write(seen + "\n")
            return 0 if is_right else 1
        tally = kill_runs(arguments.rounds, Path(folder), arguments.seed, arguments.overrides)
    sys.stdout.write(tally.describe() + "\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
