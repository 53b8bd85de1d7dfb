"""A signal becomes a flag, and the process ends with the code that schedulers expect."""

import os
import signal
import threading

import pytest

from recipe_ckpt import preemption


def send(number):
    """Deliver a signal to this process; Python runs its handler before the next line."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_sets_the_flag_and_nothing_else(number):
    with preemption.watch() as stop:
        assert not stop.is_set
        send(number)
        assert stop.signal == number


def test_the_first_of_two_signals_counts():
    with preemption.watch() as stop:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert stop.signal == signal.SIGTERM


def test_a_second_interrupt_stops_at_once():
    with preemption.watch():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_leaving_gives_the_exit_code_of_the_signal(number, code):
    with preemption.watch() as stop:
        stop.note(number)
        with pytest.raises(SystemExit) as end:
            stop.leave()
    assert end.value.code == code


def test_a_rank_that_got_no_signal_leaves_for_the_agreed_one():
    with preemption.watch() as stop, pytest.raises(SystemExit) as end:
        stop.leave(signal.SIGTERM)
    assert end.value.code == 143


def test_former_handlers_are_back_after_the_block():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with preemption.watch():
        pass
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]


def test_a_launchers_own_handler_gets_its_signal_when_the_run_leaves():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with preemption.watch() as stop:
            send(signal.SIGUSR1)
            assert heard == []
            with pytest.raises(SystemExit, match="143"):
                stop.leave()
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_importing_and_watching_elsewhere_installs_nothing():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def watch_in_thread():
        with preemption.watch() as stop:
            seen.append((stop.is_set, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=watch_in_thread)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
