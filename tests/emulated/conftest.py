"""Where the kernels of a PTX module run: in the emulator and, in the GPU tests, on the GPU as well."""

from __future__ import annotations

import pytest

from flashladder import machine
from tests.emulated.gpu_machine import GpuMachine, Load
from tests.emulated.ptx_machine import Machine


@pytest.fixture(scope="session", params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    if request.param == "gpu":
        if machine.gpu_name() is None:
            pytest.skip("no GPU")
        return GpuMachine
    return lambda text: Machine(text, tmp_path_factory.mktemp("ptx"))
