# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest

from benchmarks.measure import alternate, peak_bytes, quartiles, ratio, seconds, slope


def test_contenders_run_in_turn_and_ratios_are_taken_within_a_round():
    order, now = [], itertools.count()

    class Clock:
        value = 0.0

    def work(name, cost):
        def call():
            order.append(name)
            Clock.value += cost * (1 + next(now))  # the machine gets slower and slower

        return call

    timings = alternate(
        {"base": work("base", 1.0), "double": work("double", 2.0)},
        rounds=5,
        least_s=0.0,
        clock=lambda: Clock.value,
    )
    assert order[-10:] == ["base", "double"] * 5
    assert timings["base"].ratio == 1.0
    assert timings["double"].ratio == pytest.approx(2.2, abs=0.2)
    low, high = timings["double"].quartiles
    assert low <= timings["double"].ratio <= high


def test_peak_memory_sees_what_a_call_holds_at_once():
    kept = [bytes(1000) for _ in range(200_000)]
    del kept[::2], kept
    peak = peak_bytes(lambda: bytearray(b"x") * (64 << 20))
    assert peak is None or 48 << 20 <= peak <= 160 << 20


def test_the_exponent_of_growth():
    assert slope([(n, 3.0 * n) for n in (1, 2, 4, 8, 16, 32)]) == pytest.approx(1.0)
    assert slope([(n, 3.0 * n**2) for n in (1, 2, 4, 8, 16, 32)]) == pytest.approx(2.0)


def test_times_and_ratios_for_people():
    assert [seconds(value) for value in (2.0, 0.0123, 4.5e-5, 3e-8)] == ["2 s", "12.3 ms", "45 µs", "30 ns"]
    assert [ratio(value) for value in (1234.0, 12.34, 1.234, 0.002)] == ["1,234x", "12.3x", "1.23x", "1/500"]


def test_quartiles_say_how_far_ratios_vary():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert quartiles([3.0]) == (3.0, 3.0)
