"""Signals as wishes, one context within another."""

import signal
import time

import pytest

from angular_lab.training.signals import Sigterm


def test_an_inner_context_knows_what_came_before_it() -> None:
    with Sigterm() as outer:
        signal.raise_signal(signal.SIGTERM)
        with Sigterm() as inner:
            assert inner.received
        assert outer.received


def test_an_outer_context_is_told_what_came_within() -> None:
    with Sigterm() as outer:
        with Sigterm() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert inner.received
        assert outer.received
        with Sigterm():
            pass
    with Sigterm() as fresh:
        assert not fresh.received


def test_the_first_interrupt_is_a_wish_and_the_second_an_order() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Sigterm(signal.SIGINT), Sigterm() as inner:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)  # the one signal raises the other
        assert inner.received
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_who_ignores_interrupts_goes_on_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Sigterm(signal.SIGINT) as context:
            signal.raise_signal(signal.SIGINT)
            assert not context.received
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
