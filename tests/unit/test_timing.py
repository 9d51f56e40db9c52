"""The timer's estimate, on a GPU that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashladder.timing import ESTIMATE_SPIN_CYCLES, Timer


@pytest.mark.parametrize("late", [0, 1, 2])
def test_an_estimate_that_the_hosts_time_is_in_is_taken_again(late: int) -> None:
    """The first tries take the host 30 ms, and the spin ends before; then three calls take the GPU 3 ms."""
    spins: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def query(self) -> bool:
            return len(spins) <= late

        def elapsed_time(self, end: object) -> float:
            return 30.0 if len(spins) <= late else 3.0

    torch = SimpleNamespace(cuda=SimpleNamespace(Event=Event, _sleep=spins.append))
    calls: list[int] = []
    seconds = Timer._estimate(cast(Any, SimpleNamespace(torch=torch)), lambda: calls.append(1))
    assert seconds == pytest.approx(1e-3)
    assert spins == list(ESTIMATE_SPIN_CYCLES[: late + 1])
    assert len(calls) == 3 * (late + 1)
