"""Fixtures of the GPU tests: every rung built for the GPU present. Skipped as a whole without torch and a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from flashladder import build, machine
from flashladder.arms import ArmSpec, LoadedArm, open_arm
from flashladder.ladder import load_ladder

RUNG_IDS = [r.id for r in load_ladder().rungs]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = {item for item in items if "tests/gpu/" in str(item.path)}
    for item in ours:
        item.add_marker(pytest.mark.gpu)
    # To a child that times, a context of this process is another process on the GPU, which makes a block invalid.
    items.sort(key=lambda item: item.get_closest_marker("children_time") is None)


@pytest.fixture(scope="session")
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no GPU")
    return module


@pytest.fixture(scope="session")
def arms(torch: Any) -> dict[str, LoadedArm]:
    arch = machine.gpu_arch()
    assert arch is not None
    result = {}
    for target, record in build.build(load_ladder().rungs, [arch]):
        assert record.status == "built", record.reason
        spec = ArmSpec(name=record.rung, kind="rung", library=str(target.library), sha256=record.sha256)
        result[record.rung] = open_arm(spec)
    return result


@pytest.fixture(params=RUNG_IDS)
def arm(request: pytest.FixtureRequest, arms: dict[str, LoadedArm]) -> LoadedArm:
    return arms[request.param]
