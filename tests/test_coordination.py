"""Every rank learns one outcome: in threads over an in-memory store, and in real processes over TCP."""

import multiprocessing
import os
import signal
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from recipe_ckpt.coordination import SoloCoordinator, SpmdCoordinator
from recipe_ckpt.errors import LeaseHeldError, RankError, RankTimeoutError
from tests.tiny import run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def fail_on(rank, coordinator, error=None):
    if coordinator.rank == rank:
        raise error or ValueError("boom")
    return coordinator.rank


@pytest.mark.parametrize("size", [1, 2, 4])
def test_leaders_value_reaches_all(size):
    assert run_world(size, lambda c: c.lead(lambda: {"by": c.rank, "n": [1, None]})) == [{"by": 0, "n": [1, None]}] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_of_all_are_joined_in_the_order_of_ranks(size):
    assert run_world(size, lambda c: c.together(lambda: c.rank * 10, list)) == [[10 * rank for rank in range(size)]] * size


def test_solo_runs_all_of_it():
    solo = SoloCoordinator()
    assert solo.lead(lambda: 1) == 1
    assert solo.together(lambda: 2, sum) == 2


@pytest.mark.case("C1001")
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_error_on_one_rank_reaches_all_with_its_rank_and_cause(rank):
    outcomes = run_world(3, lambda c: c.together(lambda: fail_on(rank, c), list))
    assert isinstance(outcomes.pop(rank), ValueError)
    assert [type(error) for error in outcomes] == [RankError] * 2
    assert {str(error) for error in outcomes} == {f"rank {rank} failed: ValueError: boom"}


@pytest.mark.parametrize("size", [2, 3])
def test_error_of_the_leader_reaches_all(size):
    outcomes = run_world(size, lambda c: c.lead(lambda: fail_on(0, c)))
    assert isinstance(outcomes[0], ValueError)
    assert {str(error) for error in outcomes[1:]} == {"rank 0 failed: ValueError: boom"}


def test_error_in_the_joining_reaches_all():
    outcomes = run_world(3, lambda c: c.together(lambda: c.rank, lambda parts: 1 // 0))
    assert isinstance(outcomes[0], ZeroDivisionError)
    assert all("rank 0 failed: ZeroDivisionError" in str(error) for error in outcomes[1:])


@pytest.mark.parametrize(
    ("error", "is_final"), [(LeaseHeldError("x"), True), (KeyboardInterrupt(), True), (OSError("disk full"), False)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_error_that_ends_one_rank_is_final_on_all(rank, error, is_final):
    outcomes = run_world(3, lambda c: c.together(lambda: fail_on(rank, c, error), list))
    assert [outcomes[other].is_final for other in range(3) if other != rank] == [is_final] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_value_that_is_no_json_is_an_error_on_all_at_once(rank):
    outcomes = run_world(2, lambda c: c.together(lambda: {1} if c.rank == rank else 0, lambda parts: parts))
    assert isinstance(outcomes[rank], TypeError)
    assert f"rank {rank} failed: TypeError" in str(outcomes[1 - rank])


@pytest.mark.parametrize("rank", [0, 1])
def test_exchanges_after_a_failed_one_work(rank):
    def work(coordinator):
        with pytest.raises((ValueError, RankError), match="boom"):
            coordinator.together(lambda: fail_on(rank, coordinator), list)
        with pytest.raises((ValueError, RankError), match="boom"):
            coordinator.lead(lambda: fail_on(0, coordinator))
        return coordinator.together(lambda: coordinator.rank, sum)

    assert run_world(3, work) == [3, 3, 3]


@pytest.mark.case("C1009")
def test_silent_rank_is_named_at_the_deadline_and_may_come_back():
    late = threading.Event()

    def work(coordinator):
        if coordinator.rank == 1:
            late.wait()
        try:
            return coordinator.together(lambda: 0, list)
        except RankError as error:
            late.set()
            return type(error).__name__, str(error)
        finally:
            assert coordinator.together(lambda: 1, sum) == 3

    outcomes = run_world(3, work, timeout_secs=0.3)
    assert outcomes[0][0] == "RankTimeoutError"
    assert all("ranks [1] of 3 did not answer within 0.3 s" in text for _, text in outcomes)


def test_silent_leader_is_named_at_the_deadline():
    done = threading.Event()

    def work(coordinator):
        if coordinator.rank == 0:
            return done.wait(20)
        try:
            with pytest.raises(RankTimeoutError, match=r"rank 0 did not answer within 0.2 s"):
                coordinator.lead(lambda: 1)
        finally:
            done.set()

    assert run_world(2, work, timeout_secs=0.2) == [True, None]


def test_rank_without_a_pulse_is_dead_long_before_the_deadline():
    store, now = HashStore(), [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    leader = SpmdCoordinator(store, 0, 2, rank_timeout_secs=10_000, clock=clock)
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 are dead or stopped: no pulse for 45 s"):
        leader.together(lambda: 0, list)
    assert now[0] < 100


def test_verdicts_of_former_exchanges_do_not_pile_up():
    store = HashStore()

    def run(coordinator):
        for number in range(30):
            coordinator.lead(lambda number=number: number)
            coordinator.together(lambda: 0, sum)
        return store.num_keys()

    def on_rank(rank, results):
        coordinator = SpmdCoordinator(store, rank, 2, rank_timeout_secs=20)
        results[rank] = run(coordinator)
        coordinator.close()

    results = [0, 0]
    threads = [threading.Thread(target=on_rank, args=(rank, results)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(results) < 15


def test_closing_twice_is_fine():
    coordinator = SpmdCoordinator(HashStore(), 0, 1, rank_timeout_secs=1)
    coordinator.close()
    coordinator.close()


# --- real processes


def join(rank, port_pipe, result_pipe):
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_pipe.send(store.port)
    else:
        store = TCPStore("127.0.0.1", port_pipe.recv(), is_master=False, timeout=timedelta(seconds=20))
    coordinator = SpmdCoordinator(store, rank, 2, rank_timeout_secs=20)
    results = [coordinator.together(lambda: os.getpid(), list)]
    for call in (lambda: fail_on(1, coordinator), lambda: rank):
        try:
            results.append(coordinator.together(call, list))
        except (ValueError, RankError) as error:
            results.append(str(error))
    coordinator.close()
    result_pipe.send(results)


def test_two_processes_agree_over_tcp():
    context = multiprocessing.get_context("forkserver")
    ports, results = context.Pipe(), [context.Pipe(duplex=False) for _ in range(2)]
    workers = [context.Process(target=join, args=(rank, ports[rank], results[rank][1]), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    assert all(receiver.poll(60) for receiver, _ in results), "a rank hangs"
    first, second = (receiver.recv() for receiver, _ in results)
    for worker in workers:
        worker.join()
    assert first[0] == second[0] == [worker.pid for worker in workers]
    assert (first[1], second[1]) == ("rank 1 failed: ValueError: boom", "boom")
    assert first[2] == second[2] == [0, 1]


def wait_for_the_leader(port, pipe):
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    coordinator = SpmdCoordinator(store, 1, 2, rank_timeout_secs=60)
    pipe.send("waiting")
    try:
        coordinator.lead(lambda: None)
    except RankError as error:
        pipe.send(str(error))


def lead_and_hang(pipe):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def test_killed_leader_is_noticed_at_once():
    context = multiprocessing.get_context("forkserver")
    (ports, port), (answers, answer) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    leader = context.Process(target=lead_and_hang, args=(port,), daemon=True)
    leader.start()
    assert ports.poll(60)
    follower = context.Process(target=wait_for_the_leader, args=(ports.recv(), answer), daemon=True)
    follower.start()
    assert answers.poll(60)
    assert answers.recv() == "waiting"
    leader.kill()
    leader.join()
    assert answers.poll(30), "the follower hangs"
    assert "rank 0 can't be reached any more" in answers.recv()
    follower.join()
