"""Ranks that may die: forked processes with a coordinator over TCP, which notices silence soon."""

import multiprocessing
import time
from datetime import timedelta
from multiprocessing import connection

from torch.distributed import TCPStore

from recipe_ckpt.coordination import SpmdCoordinator
from recipe_ckpt.pulse import Pace

_CONTEXT = multiprocessing.get_context("fork")
QUICK = Pace(beat_secs=0.15, dead_after_secs=2.0, farewell_secs=0.5)


def run_processes(size, work, *, rank_timeout_secs=20.0, timeout_secs=90.0):
    """Run `work(coordinator)` in a process a rank; return by rank the text of its result or error, or how it ended.

    Raises:
        AssertionError: a rank that is neither done nor dead nor stopped is not done in time.
    """
    connected = _CONTEXT.Barrier(size)
    ports, results = ([_CONTEXT.Pipe(duplex=False) for _ in range(size)] for _ in range(2))
    workers = [
        _CONTEXT.Process(target=_work, args=(rank, size, work, rank_timeout_secs, connected, ports, results), daemon=True)
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    for _, sender in results:
        sender.close()
    outcomes = {}
    deadline = time.monotonic() + timeout_secs
    try:
        while len(outcomes) < size:
            assert time.monotonic() < deadline, f"a rank hangs; the others: {outcomes}"
            pending = {receiver: rank for rank, (receiver, _) in enumerate(results) if rank not in outcomes}
            ready = connection.wait(pending, timeout=1)
            outcomes |= {pending[receiver]: _receive(receiver) for receiver in ready}
            if not ready and all(_is_stopped(workers[rank].pid) for rank in pending.values()):
                outcomes |= dict.fromkeys(pending.values(), "stopped")
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return [outcomes[rank] for rank in range(size)]


def _receive(receiver):
    try:
        return receiver.recv()
    except EOFError:
        return "died"


def _is_stopped(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def _work(rank, size, work, rank_timeout_secs, connected, ports, results):
    for other, (_, sender) in enumerate(results):
        if other != rank:
            sender.close()  # so that the parent sees a death as the end of its pipe
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _, port in ports[1:]:
            port.send(store.port)
    else:
        store = TCPStore("127.0.0.1", ports[rank][0].recv(), is_master=False, timeout=timedelta(seconds=60))
    coordinator = SpmdCoordinator(store, rank, size, rank_timeout_secs=rank_timeout_secs, pace=QUICK)
    connected.wait(60)  # nobody counts the others' silence, or stops, before all are here
    try:
        outcome = str(work(coordinator))
    except BaseException as error:  # noqa: BLE001 (a rank's end is told to the parent)
        outcome = f"{type(error).__name__}: {error}"
    coordinator.close()
    results[rank][1].send(outcome)
