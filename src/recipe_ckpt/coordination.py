"""All ranks or none: the two exchanges by which every rank learns one outcome.

`lead` runs a function on rank 0 and gives its result, or its error, to all. `together` runs a function on every rank,
then one on rank 0 over all results, and gives that outcome to all. Both are collective. Neither uses a process group:
training's collectives never wait for a disk, and a time-out breaks nothing for the next exchange.

An exchange is of something, say of a step's save. Ranks that meet in exchanges of different things are out of step for good,
since one of them left a call out: both learn it, and nothing of the one passes for the other's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from recipe_ckpt.errors import CheckpointError, RankError, RankTimeoutError
from recipe_ckpt.pulse import DEFAULT_PACE, Pace, Pulse, PulseWatch

T = TypeVar("T")


class Coordinator(Protocol):
    """Who am I, and what do all ranks agree on. Results are JSON values: every rank gets an equal copy."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def lead(self, decide: Callable[[], Any]) -> Any: ...
    def together(self, work: Callable[[], Any], finish: Callable[[list[Any]], Any], *, of: str = "") -> Any: ...
    def close(self) -> None: ...


class SoloCoordinator:
    """One process."""

    rank = 0
    world_size = 1

    def lead(self, decide: Callable[[], Any]) -> Any:
        return decide()

    def together(self, work: Callable[[], Any], finish: Callable[[list[Any]], Any], *, of: str = "") -> Any:
        return finish([work()])

    def close(self) -> None:
        """Nothing is held."""


class SpmdCoordinator:
    """Ranks that exchange messages through a c10d store of their own.

    Rank 0 takes the others' messages from a queue in the order of their arrival, so the first failure is seen at once, and
    at the deadline the missing ranks are known by number. A rank whose pulse stopped is dead, and not waited for. An
    exchange leaves nothing behind that could disturb the next.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        rank_timeout_secs: float,
        pace: Pace = DEFAULT_PACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout_secs = rank_timeout_secs
        self._pace = pace
        self._clock = clock
        self._pulse = Pulse(store, rank, pace)
        self._seen = PulseWatch(store, clock, pace)
        self._answers = 0
        self._is_cut_off = False
        self._exchange = 0
        self._of = ""
        self._cleaned = 0

    @classmethod
    def from_process_group(cls, *, rank_timeout_secs: float) -> SpmdCoordinator:
        """Make the store on rank 0 and tell the others its address. Collective over the default process group, once."""
        from torch import distributed

        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        store = None
        address: list[Any] = [None, None]
        if rank == 0:
            store = _start_store()
            address = [_own_host(), store.port]
        distributed.broadcast_object_list(address, src=0)
        if store is None:
            store = _join_store(address[0], address[1], rank_timeout_secs)
        return cls(store, rank, world_size, rank_timeout_secs=rank_timeout_secs)

    def lead(self, decide: Callable[[], Any]) -> Any:
        """Run `decide` on rank 0 and return its JSON result on every rank.

        Raises:
            RankError: on the other ranks, when `decide` raised (there the error itself is raised) or rank 0 is gone.
            RankTimeoutError: rank 0 gave no answer within `rank_timeout_secs`.
        """
        self._begin("")
        if self.rank:
            return self._read_verdict(self._timeout_secs)
        return self._give_verdict(decide)

    def together(self, work: Callable[[], Any], finish: Callable[[list[Any]], Any], *, of: str = "") -> Any:
        """Run `work` on every rank, `finish` on rank 0 over the results by rank; return `finish`'s JSON result on every rank.

        `of` says what the exchange is of; it must be the same on all ranks.

        Raises:
            RankError: another rank's `work`, or `finish` on rank 0, raised; the message has the rank and the cause. On the
                rank that failed its own error is raised. Final if the ranks differ in `of`.
            RankTimeoutError: ranks gave no answer within `rank_timeout_secs`; the message has their numbers.
        """
        self._begin(of)
        if self.rank:
            self._send(work)
            # Rank 0 may spend its whole time on a silent rank, and must then still be able to say which one it was.
            return self._read_verdict(2 * self._timeout_secs + 5)

        def gather_and_finish() -> Any:
            results = self._gather(work())
            return finish(results)

        return self._give_verdict(gather_and_finish)

    def close(self) -> None:
        """Drop the connection. The store ends with rank 0, which so waits a moment for the others to read its last word."""
        if self._store is None:
            return
        self._pulse.stop()
        try:
            if self.rank:
                self._ask(lambda: self._store.queue_push(_FAREWELLS, str(self.rank)))
            else:
                self._await_farewells()
        except RuntimeError:
            pass  # the others' ends are their own affair
        self._store = None

    def _await_farewells(self) -> None:
        deadline = self._clock() + self._pace.farewell_secs
        for pause_secs in _pauses():
            if self._store.queue_len(_FAREWELLS) >= self.world_size - 1 or self._clock() > deadline:
                return
            time.sleep(pause_secs)

    def _begin(self, of: str) -> None:
        self._exchange += 1
        self._of = of

    def _encode(self, **said: Any) -> str:
        return json.dumps({"rank": self.rank, "of": self._of, **said})

    def _require_same(self, said: dict[str, Any]) -> None:
        """Refuse what another rank said in an exchange of something else."""
        if said["of"] != self._of:
            raise RankError(
                f"ranks are out of step: rank {self.rank} is at {self._of!r}, rank {said['rank']} at {said['of']!r}."
                " Saving and loading are collective: every rank calls them, with the same step",
                is_final=True,
            )

    def _send(self, work: Callable[[], Any]) -> None:
        try:
            message = self._encode(value=work())
        except BaseException as error:
            is_too_late = self._ask(lambda: self._store.check([self._key("verdict")]))
            self._push(self._encode(**_describe(self.rank, error)))
            if is_too_late:  # rank 0 failed before, and this may well follow from that
                self._read_verdict(self._timeout_secs)
            raise
        self._push(message)

    def _push(self, message: str) -> None:
        self._ask(lambda: self._store.queue_push(self._key("in"), message))

    def _gather(self, mine: Any) -> list[Any]:
        results = {0: mine}
        deadline = self._clock() + self._timeout_secs
        while len(results) < self.world_size:
            message = self._pop(deadline, results)
            self._require_same(message)
            if "error" in message:
                raise RankError(message["error"], is_final=message["is_final"])
            results[message["rank"]] = message["value"]
        # All ranks have called this exchange, so they have read every verdict before it.
        for exchange in range(self._cleaned + 1, self._exchange):
            self._store.delete_key(f"{exchange}/verdict")
        self._cleaned = self._exchange - 1
        return [results[rank] for rank in range(self.world_size)]

    def _pop(self, deadline: float, results: dict[int, Any]) -> dict[str, Any]:
        for pause_secs in _pauses():
            if self._store.queue_len(self._key("in")):
                return dict(json.loads(self._store.queue_pop(self._key("in"))))
            silent = sorted(set(range(self.world_size)) - set(results))
            if dead := self._seen.find_dead(silent):
                silence = f"no pulse for {self._pace.dead_after_secs:g} s"
                raise RankError(f"ranks {dead} of {self.world_size} are dead or stopped: {silence}")
            if self._clock() > deadline:
                raise RankTimeoutError(
                    f"ranks {silent} of {self.world_size} did not answer within {self._timeout_secs:g} s: stuck, or not"
                    " calling (saving and loading are collective: every rank calls them)"
                )
            time.sleep(pause_secs)
        raise AssertionError("pauses never end")

    def _give_verdict(self, decide: Callable[[], Any]) -> Any:
        try:
            text = self._encode(value=decide())
        except BaseException as error:
            self._store.set(self._key("verdict"), self._encode(**_describe(self.rank, error)))
            raise
        self._store.set(self._key("verdict"), text)
        return json.loads(text)["value"]

    def _read_verdict(self, timeout_secs: float) -> Any:
        verdict = json.loads(self._ask(lambda: self._poll_verdict(timeout_secs)))
        self._require_same(verdict)
        if "error" in verdict:
            raise RankError(verdict["error"], is_final=verdict["is_final"])
        return verdict["value"]

    def _poll_verdict(self, timeout_secs: float) -> bytes:
        deadline = self._clock() + timeout_secs
        key = self._key("verdict")
        for pause_secs in _pauses():
            is_given = self._store.check([key])
            self._answers += 1
            if is_given:
                break
            if self._clock() > deadline:
                raise RankTimeoutError(f"rank 0 did not answer within {timeout_secs:g} s")
            time.sleep(pause_secs)
        return bytes(self._store.get(key))

    def _ask(self, call: Callable[[], T]) -> T:
        """Ask rank 0's store, in a thread: c10d waits for good for a process that is stopped, or a node that is cut off."""
        if self._is_cut_off:  # its client hangs in the call that was given up
            raise RankError("rank 0 can't be reached any more: it was given up before", is_final=True)
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 (raised where the answer is waited for)
                answer.set_exception(error)

        threading.Thread(target=run, name="recipe-ckpt-ask", daemon=True).start()
        with _rank_0_errors():
            return self._await(answer)

    def _await(self, answer: Future[T]) -> T:
        # Beats are counted, and not time: a process that was stopped itself has not waited.
        silent_beats, answers = 0, self._answers
        while not _is_done(answer, within_secs=self._pace.beat_secs):
            silent_beats = silent_beats + 1 if answers == self._answers else 0
            answers = self._answers
            if silent_beats * self._pace.beat_secs >= self._pace.dead_after_secs:
                self._is_cut_off = True
                silence = f"no answer for {self._pace.dead_after_secs:g} s"
                raise RankError(f"rank 0 is dead, stopped or cut off: {silence}", is_final=True)
        return answer.result()

    def _key(self, kind: str) -> str:
        return f"{self._exchange}/{kind}"


_FAREWELLS = "farewells"


def _is_done(answer: Future[Any], *, within_secs: float) -> bool:
    """Wait for an answer or an error, but not for good."""
    return bool(wait([answer], within_secs).done)


def _pauses() -> Iterator[float]:
    """Poll soon, then less often. (A blocking wait of c10d writes two lines to stderr each time that it times out.)"""
    pause_secs = 0.0005
    while True:
        yield pause_secs
        pause_secs = min(pause_secs * 1.5, 0.05)


@contextmanager
def _rank_0_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except RuntimeError as error:
        raise RankError(f"rank 0 can't be reached any more: {error}", is_final=True) from error


def _describe(rank: int, error: BaseException) -> dict[str, Any]:
    text = str(error) if isinstance(error, RankError) else f"rank {rank} failed: {type(error).__name__}: {error}"
    is_final = error.is_final if isinstance(error, CheckpointError) else not isinstance(error, Exception)
    return {"error": text, "is_final": is_final}


def _start_store() -> Any:
    from torch import distributed

    return distributed.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _join_store(host: str, port: int, timeout_secs: float) -> Any:
    from torch import distributed

    timeout = timedelta(seconds=timeout_secs)
    return distributed.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def _own_host() -> str:
    """Return rank 0's address as the other ranks know it: under torchrun and Ray that is MASTER_ADDR."""
    import os
    import socket

    return os.environ.get("MASTER_ADDR") or socket.gethostname()
