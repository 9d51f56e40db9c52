"""What stands between two captured calls, on a driver of our own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashladder import capture

STREAM, GRAPH, AHEAD, NODE = 7, 11, 13, 17


def _driver(monkeypatch: pytest.MonkeyPatch, *, status: int, failing: str = "") -> list[tuple[str, tuple[Any, ...]]]:
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def info(stream: Any, state: Any, capture_id: Any, graph: Any, ahead: Any, count: Any) -> int:
        calls.append(("info", (stream.value,)))
        state._obj.value, graph._obj.value, ahead._obj.value, count._obj.value = status, GRAPH, AHEAD, 1
        return 900 if failing == "info" else 0

    def add(node: Any, graph: Any, ahead: Any, count: Any) -> int:
        calls.append(("add", (graph.value, ahead.value, count.value)))
        node._obj.value = NODE
        return 1 if failing == "add" else 0

    def update(stream: Any, node: Any, count: Any, flags: Any) -> int:
        calls.append(("update", (stream.value, node._obj.value, count.value, flags.value)))
        return 1 if failing == "update" else 0

    driver = SimpleNamespace(
        cuStreamGetCaptureInfo_v2=info, cuGraphAddEmptyNode=add, cuStreamUpdateCaptureDependencies=update
    )
    monkeypatch.setattr(capture, "_driver", lambda: driver)
    return calls


def test_an_empty_node_takes_the_place_of_all_that_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _driver(monkeypatch, status=1)
    assert capture.set_apart(STREAM)
    assert calls == [("info", (STREAM,)), ("add", (GRAPH, AHEAD, 1)), ("update", (STREAM, NODE, 1, 1))]


@pytest.mark.parametrize("status", [0, 2])
def test_a_stream_that_is_not_captured_is_left_alone(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    calls = _driver(monkeypatch, status=status)
    assert not capture.set_apart(STREAM)
    assert [name for name, _ in calls] == ["info"]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("info", r"cuStreamGetCaptureInfo_v2 returned 900 \(CUresult\), expected 0"),
        ("add", "cuGraphAddEmptyNode returned 1"),
        ("update", "cuStreamUpdateCaptureDependencies returned 1"),
    ],
)
def test_what_the_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch, failing: str, message: str) -> None:
    _driver(monkeypatch, status=1, failing=failing)
    with pytest.raises(RuntimeError, match=message):
        capture.set_apart(STREAM)
