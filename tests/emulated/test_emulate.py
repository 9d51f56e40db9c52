"""`flashladder emulate`: a program that is not ours runs, and what is wrong with it is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashladder import paths
from flashladder.errors import Exit

EXAMPLE = paths.ROOT / "examples" / "block_sum.cu"


def _emulate(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashladder", "emulate", *arguments[:-1], str(file), *arguments[-1:]]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("schedule", ["fifo", "priority"])
def test_the_example_runs(schedule: str) -> None:
    done = _emulate(EXAMPLE, "--schedule", schedule, "5000")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum 14995, expected 14995\n"
    assert "emulated: 4 blocks" in done.stderr


def test_a_race_is_reported_with_both_lines_and_an_exit_code(tmp_path: Path) -> None:
    racy = tmp_path / "racy.cu"
    racy.write_text(EXAMPLE.read_text().replace("#define RACY 0", "#define RACY 1"))
    done = _emulate(racy, "500")
    assert done.returncode == Exit.INCORRECT
    assert "race" in done.stderr
    assert "racy.cu:" in done.stderr


def test_an_out_of_bounds_access_names_kernel_line_and_thread(tmp_path: Path) -> None:
    bad = tmp_path / "bad.cu"
    bad.write_text(EXAMPLE.read_text().replace("sum += x[i];", "sum += x[i + 1];"))
    done = _emulate(bad, "512")
    assert done.returncode != 0
    for part in ("block_sum", "bad.cu:", "thread (", "ld.global"):
        assert part in done.stderr


def test_a_program_that_does_not_compile_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "broken.cu"
    bad.write_text("int main() { return x; }\n")
    done = _emulate(bad, "1")
    assert done.returncode == Exit.BUILD
    assert "broken cannot be emulated" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_instruction_that_is_not_modelled_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "unmodelled.cu"
    bad.write_text(
        '__global__ void k(unsigned* p) { asm volatile("mov.u32 %0, %%smid;" : "=r"(*p)); }\n'
        "int main() { k<<<1, 1>>>(nullptr); return 0; }\n"
    )
    done = _emulate(bad, "1")
    assert done.returncode == Exit.BUILD
    assert "smid" in done.stderr
    assert "Traceback" not in done.stderr


def test_attention_on_wgmma_takes_three_tenths_of_a_second_at_most() -> None:
    """B1 H2 S512 D64, causal, races looked for: later rungs are written on the CPU first, so it must be quick."""
    for _ in range(3):  # what else this machine does may take one run's time
        done = _emulate(paths.ROOT / "tests" / "emulated" / "wgmma_attention.cu", "--arch", "90", "--races", "on", "")
        assert done.returncode == 0, done.stderr
        _, error, _, seconds = done.stdout.split()
        assert float(error) < 1e-3
        assert ", 0 bank conflicts" in done.stderr
        if float(seconds) <= 0.3:
            return
    pytest.fail(f"{seconds} s")
