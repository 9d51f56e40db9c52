"""Nsight Compute's words: what a report says, what its failures mean, in base units."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashladder import ncu, paths
from flashladder.ladder import load_ladder, load_metrics
from flashladder.model import Metric

RAW = (paths.ROOT / "tests" / "fixtures" / "ncu-raw.csv").read_text()
WANTED = ("gpu__time_duration.sum", "launch__grid_size", "smsp__inst_executed.sum", "no_such.metric")


def test_a_report_of_our_own_kernels_is_read_in_base_units() -> None:
    kernels = ncu.parse_csv(RAW, WANTED)
    assert [k.name for k in kernels] == ["r04_vector_io_fp16_d64", "r08_mma_sync_fp16_d64", "r13_tuned_medium_fp16_d64"]
    duration = kernels[0].metrics["gpu__time_duration.sum"]
    assert duration.value == pytest.approx(103.744e-6)
    assert duration.unit == "s"
    assert kernels[0].metrics["smsp__inst_executed.sum"] == Metric(value=47165440, unit="inst")
    assert kernels[1].metrics["launch__grid_size"].value == 256
    assert ncu.missing(kernels, WANTED) == ("no_such.metric",)
    assert ncu.main_kernel(kernels).name == "r04_vector_io_fp16_d64"


@pytest.mark.parametrize(
    ("printed", "unit", "value", "base"),
    [
        ("1,234.5", "us", 1234.5e-6, "s"),
        ("2.5", "Mbyte", 2.5e6, "byte"),
        ("3", "Gbyte/second", 3e9, "byte/s"),
        ("1.7", "Ghz", 1.7e9, "hz"),
        ("55.1", "%", 55.1, "%"),
        ("4", "inst", 4, "inst"),
    ],
)
def test_units_that_scale_themselves_are_undone(printed: str, unit: str, value: float, base: str) -> None:
    text = f'"ID","Kernel Name","m"\n"","","{unit}"\n"0","k(int)","{printed}"\n'
    found = ncu.parse_csv(text, ["m"])[0].metrics["m"]
    assert found.value == pytest.approx(value)
    assert found.unit == base


@pytest.mark.parametrize("printed", ["n/a", "", "nan", "inf", "(not a number)"])
def test_what_is_no_number_is_missing_never_zero(printed: str) -> None:
    text = f'"ID","Kernel Name","m"\n"","","%"\n"0","k","{printed}"\n'
    kernels = ncu.parse_csv(text, ["m"])
    assert kernels[0].metrics == {}
    assert ncu.missing(kernels, ["m"]) == ("m",)


def test_words_without_a_table_are_no_kernels() -> None:
    assert ncu.parse_csv("==WARNING== No kernels were profiled.\n", ["m"]) == ()


def test_a_line_cut_off_is_left_out() -> None:
    assert len(ncu.parse_csv('"ID","Kernel Name","m"\n"","","%"\n"0","k","1"\n"1","k"\n', ["m"])) == 1


@pytest.mark.parametrize(
    ("output", "cause", "advice"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "permission denied", "cap-add=SYS_ADMIN"),
        ("==ERROR== Failed to find metric sm__x.sum", "unknown metric", "metrics.toml"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute", "version mismatch", "release"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "version mismatch", "release"),
        ("RuntimeError: CUDA error: out of memory", "out of memory", "smaller shape"),
        ('==PROF== Profiling "fill": 0\n==WARNING== No kernels were profiled.', "no kernel", "kernels seen: fill"),
    ],
)
def test_every_failure_has_a_cause_and_what_to_do(output: str, cause: str, advice: str) -> None:
    for code in (0, 1):  # ncu's exit code tells nothing
        fault = ncu.fault(ncu.Run(code, output), 60)
        assert fault is not None
        assert fault[0] == cause
        assert advice in fault[1]


def test_other_ends_are_told_by_their_last_line_or_the_time_limit() -> None:
    assert ncu.fault(ncu.Run(0, "==PROF== done"), 60) is None
    assert ncu.fault(ncu.Run(3, "a\nboom\n\n"), 60) == ("error", "exit code 3: boom")
    assert ncu.fault(ncu.Run(1, ""), 60) == ("error", "exit code 1: it said nothing")
    cause, reason = ncu.fault(ncu.Run(None, ""), 60) or ("", "")
    assert (cause, reason.startswith("no end after 60 s")) == ("timeout", True)


def test_a_child_that_does_not_end_is_killed_with_its_children() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    child = ncu.Child((sys.executable, "-c", code))
    child.begin(b"")
    assert child.end(1.0).code is None


def test_a_child_prepares_itself_and_does_its_work_when_its_turn_comes() -> None:
    code = "import sys; print('ready', flush=True); print(sys.stdin.read())"
    children = [ncu.Child((sys.executable, "-c", code)) for _ in range(2)]
    children[1].kill()
    children[0].begin(b"job")
    assert children[0].end(60.0) == ncu.Run(0, "ready\njob\n")


def test_a_child_that_ended_before_its_turn_says_why() -> None:
    child = ncu.Child((sys.executable, "-c", "raise SystemExit('no torch')"))
    time.sleep(0.5)
    child.begin(b"job" * 100_000)
    assert child.end(60.0) == ncu.Run(1, "no torch\n")


def test_the_module_of_ncu_is_read_like_its_csv() -> None:
    metric = SimpleNamespace(value=lambda: 2000.0, unit=lambda: "nsecond")
    action = SimpleNamespace(name=lambda: "k", metric_by_name=lambda name: metric if name == "t" else None)
    actions = SimpleNamespace(num_actions=lambda: 1, action_by_idx=lambda _: action)
    report: Any = SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda _: actions)
    module: Any = SimpleNamespace(load_report=lambda _: report)
    (kernel,) = ncu.from_module(module, Path("x.ncu-rep"), ["t", "u"])
    assert list(kernel.metrics) == ["t"]
    assert kernel.metrics["t"].value == pytest.approx(2e-6)
    assert kernel.metrics["t"].unit == "s"


def test_the_command_leaves_the_clocks_alone_and_asks_for_every_predicted_counter() -> None:
    names = load_metrics().names("sm_90a")
    arguments = ncu.command(Path("ncu"), Path("r.ncu-rep"), names, False, ["python"])
    assert "--clock-control=none" in arguments
    assert "--profile-from-start=off" in arguments
    assert "--set=full" not in arguments
    predicted = {p.metric for r in load_ladder().rungs for p in r.predictions} - {"time"}
    assert predicted <= set(names)
    assert len(names) == len(set(names))
    assert any("gmma" in name for name in names)
    assert not any("gmma" in name for name in load_metrics().names("sm_89"))


def test_the_version_is_read_from_what_it_prints() -> None:
    assert ncu.version("NVIDIA (R) Nsight Compute\nVersion 2025.3.1.0 (build 1)") == "2025.3.1.0"
    assert ncu.version("") is None
