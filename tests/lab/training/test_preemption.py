"""Contexts that turn signals into a flag, one within another."""

import signal
import time

import pytest

from angular_lab.training.signals import Sigterm


def test_an_inner_context_starts_with_what_the_outer_one_received() -> None:
    with Sigterm() as outer:
        signal.raise_signal(signal.SIGTERM)
        with Sigterm() as inner:
            assert inner.received
        assert outer.received


def test_an_outer_context_receives_what_the_inner_one_received() -> None:
    with Sigterm() as outer:
        with Sigterm() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert inner.received
        assert outer.received
        with Sigterm():
            pass
    with Sigterm() as fresh:
        assert not fresh.received


def test_the_first_interrupt_sets_a_flag_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Sigterm(signal.SIGINT), Sigterm() as inner:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)  # one signal raises the other
        assert inner.received
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_ignores_interrupts_still_ignores_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Sigterm(signal.SIGINT) as context:
            signal.raise_signal(signal.SIGINT)
            assert not context.received
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
