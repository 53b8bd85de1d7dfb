"""Two torchrun agents, as on two hosts, each with a disk of its own: killed and started again, they equal their twin."""

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from recipe_ckpt.remote_fsspec import FsspecRemote
from recipe_ckpt.storage import LocalStorage
from recipe_ckpt.survey import verify
from tests.ranks import run_ranks
from tests.test_twin import by_rank_and_step, read_audit, train_on_rank

REPO = Path(__file__).parents[1]
STEPS = "trainer.total_training_steps=9"


def start_agents(tmp_path, *overrides):
    """Run an agent a node to its end; return the exit codes and the outputs."""
    rendezvous = f"--rdzv-endpoint=127.0.0.1:{find_free_port()}"
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=nodes"]
    toy = ["--local-addr=127.0.0.1", rendezvous, "-m", "tests.toy", STEPS, f"trainer.audit_file={tmp_path}/audit.jsonl"]
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    agents = [
        subprocess.Popen(
            [sys.executable, *agent, *toy, *overrides, *places(tmp_path / f"node{node}")],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    return [agent.returncode for agent in agents], outputs


def places(node):
    return f"checkpoint.default_local_dir={node}/ck", f"hydra.run.dir={node}/logs"


def find_resumed(outputs):
    """Return what the ranks printed that they resumed from, which is the same."""
    found = {word for output in outputs for word in re.findall("resumed_from=(.*)", output)}
    assert len(found) == 1, outputs
    return found.pop()


def find_free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def check_against_twin(tmp_path, *overrides):
    twin = tmp_path / "twin.jsonl"
    run_ranks(2, train_on_rank, ["checkpoint=none", *overrides, STEPS, f"trainer.audit_file={twin}"], None)
    assert by_rank_and_step(read_audit(tmp_path / "audit.jsonl")) == by_rank_and_step(read_audit(twin))


def step_of(tmp_path, node, step):
    return tmp_path / f"node{node}" / "ck" / f"global_step_{step}"


def test_nodes_killed_and_started_again_equal_the_twin(tmp_path):
    engine = ("engine.strategy=ddp", "checkpoint.async_save=true", "trainer.save_freq=2")
    codes, outputs = start_agents(tmp_path, *engine, "toy.kill_after=5")
    assert 0 not in codes
    assert find_resumed(outputs) == "none"
    codes, outputs = start_agents(tmp_path, *engine)
    assert codes == [0, 0], outputs
    assert find_resumed(outputs) in ("2", "4")  # a background save of step 4 may have been cut off
    assert any("2 separate roots" in output for output in outputs), outputs
    for node in (0, 1):
        step = step_of(tmp_path, node, 9)
        assert len(list(step.glob("node_*.json"))) == 1
        assert len(list(step.glob("rng_*.pt"))) == 1
        assert verify(LocalStorage(), str(step), read_all=True) is None
    check_against_twin(tmp_path, engine[0])


def test_a_node_that_lost_its_disk_has_it_back_from_hdfs_and_all_equal_the_twin(tmp_path, hdfs_url):
    engine = ("engine.strategy=fsdp2", "trainer.save_freq=2", f"checkpoint.default_hdfs_dir={hdfs_url}/run")
    codes, outputs = start_agents(tmp_path, *engine, "toy.kill_after=5", "toy.kill_when_mirrored=true")
    assert 0 not in codes
    shutil.rmtree(tmp_path / "node1")
    codes, outputs = start_agents(tmp_path, *engine)
    assert codes == [0, 0], outputs
    assert find_resumed(outputs) == "4"
    with closing(FsspecRemote(f"{hdfs_url}/run")) as remote:
        assert remote.read("latest_checkpointed_iteration.txt") == b"9"
        parts = [{path.name for path in step_of(tmp_path, node, 9).iterdir()} for node in (0, 1)]
        assert set(remote.list_files("global_step_9")) == parts[0] | parts[1]
        assert parts[0] != parts[1]
    check_against_twin(tmp_path, engine[0])
