"""Real gloo ranks for tests: processes that are forked from a server which has torch loaded already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "recipe_ckpt.engines.spmd"])


def run_ranks(world_size, function, *args, timeout_secs=90):
    """Run `function(*args)` on every rank of a new process group and return the results by rank.

    Raises:
        AssertionError: a rank raised, died or was not done in time; the message has every rank's traceback.
    """
    rendezvous = os.path.join(tempfile.gettempdir(), f"recipe_ckpt_ranks_{os.getpid()}_{time.monotonic_ns()}")
    workers = [_start(rank, world_size, rendezvous, function, args) for rank in range(world_size)]
    deadline = time.monotonic() + timeout_secs
    try:
        outcomes = [_receive(pipe, deadline) for _, pipe in workers]
    finally:
        for process, _ in workers:
            process.kill()
            process.join()
            process.close()
        if os.path.exists(rendezvous):
            os.unlink(rendezvous)
    failures = [f"rank {rank}: {outcome[1]}" for rank, outcome in enumerate(outcomes) if outcome[0] != "done"]
    assert not failures, "\n".join(failures)
    return [outcome[1] for outcome in outcomes]


def _start(rank, world_size, rendezvous, function, args):
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_work, args=(rank, world_size, rendezvous, function, args, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def _receive(pipe, deadline):
    with pipe:
        if not pipe.poll(max(deadline - time.monotonic(), 0)):
            return "late", "not done in time"
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            return "dead", "died without a word"


def _work(rank, world_size, rendezvous, function, args, sender):
    import torch
    from torch import distributed

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        result = function(*args)
        if distributed.is_initialized():
            distributed.barrier()
            distributed.destroy_process_group()
        sender.send_bytes(pickle.dumps(("done", result)))  # send() would share tensors of a process that ends now
    except BaseException:  # noqa: BLE001 - whatever ends a rank is told to the parent
        sender.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
