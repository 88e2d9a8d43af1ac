"""Stopping: the first signal asks, the second insists, and the handlers of before come back."""

from __future__ import annotations

import signal
import threading

import pytest

from acceler8.demo.interrupt import RunInterruptedError, StopRequest


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(signum: signal.Signals):
    with StopRequest() as stop:
        stop.check()
        signal.raise_signal(signum)
        assert stop.is_requested
        with pytest.raises(RunInterruptedError) as caught:
            stop.check()
    assert caught.value.signum == signum


def test_the_second_signal_insists():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.is_requested


def test_handlers_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_may_run_a_demo_without_catching_signals():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.is_requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
