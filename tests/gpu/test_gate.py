"""The gate on the GPU: rungs pass, saboteurs do not."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from flashladder import check, inputs
from flashladder.arms import LoadedArm
from flashladder.arrays import CudaMemory
from tests.saboteurs import SABOTEURS, PyArm, right

SEED = 11


@pytest.fixture(scope="module")
def memory(torch: object) -> CudaMemory:
    return CudaMemory()


@cache
def _cases() -> tuple[inputs.Case, ...]:
    return tuple(inputs.edge_cases("fp16", 64))


def _statuses(arm: PyArm | LoadedArm, memory: CudaMemory) -> list[str]:
    return [check.check_case(arm, c, memory, SEED, check.pose(c, memory, SEED)).status for c in _cases()]


def test_a_rung_passes_or_refuses_every_case(arm: LoadedArm, memory: CudaMemory) -> None:
    statuses = _statuses(arm, memory)
    assert set(statuses) <= {"pass", "unsupported"}
    assert statuses.count("unsupported") <= 8, "unaligned layouts and head dimensions between the kernels'"


def test_a_call_that_raises_leaves_no_pending_write(memory: CudaMemory) -> None:
    """Its buffers are freed next: a late write would land in another case's tensors."""

    def refuses() -> None:
        raise ValueError("no")

    view = memory.upload(np.zeros(1 << 20, np.float32))
    with pytest.raises(ValueError, match="no"):
        memory.run([(view, memory.shaped(np.ones(1 << 20, np.float32)))], refuses)
    assert memory.stream.query()


def test_the_right_answer_passes(memory: CudaMemory) -> None:
    assert set(_statuses(PyArm("right", memory, right), memory)) == {"pass"}


@pytest.mark.parametrize("name", SABOTEURS)
def test_a_saboteur_is_rejected(name: str, memory: CudaMemory) -> None:
    assert "fail" in _statuses(PyArm(name, memory, SABOTEURS[name]), memory)
