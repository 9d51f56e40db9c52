"""Eager calls: in which order they are sampled, that a wrong one is not recorded, and what their samples say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from flashladder import ablation, eager, eager_timing, fastest, native, reference
from flashladder.arms import ArmSpec
from flashladder.arrays import CudaMemory, HostMemory
from flashladder.check import Problem, pose
from flashladder.eager_timing import judged, poisoned, time_rounds, warm_up
from flashladder.errors import Exit, FlashladderError
from flashladder.inputs import Case
from flashladder.ladder import load_presets, load_shapes
from flashladder.model import Cell, EagerArm
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

ARCHS = ("sm_80", "sm_89")
CELL = eager.CELLS[0]


def test_the_cells_are_declared_ones_so_that_a_claim_can_name_them() -> None:
    assert set(eager.CELLS) <= set(load_shapes()["latency"].cells(("bf16",)))
    assert load_presets()[eager.PRESET].blocks == load_presets()[eager.PRESET].min_blocks


# --- samples --------------------------------------------------------------------------------------------------------


class Played:
    """Calls that take what `us` says of the time that this tells; the wait takes one microsecond."""

    def __init__(self, us: dict[EagerArm, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us, self.log = 0.0, list[str]()
        self.calls: dict[EagerArm, Callable[[], None]] = {arm: self._call(arm, takes) for arm, takes in us.items()}
        clock = SimpleNamespace(
            perf_counter_ns=lambda: round(1e3 * self.now_us), perf_counter=lambda: 1e-6 * self.now_us
        )
        monkeypatch.setattr(eager_timing, "time", clock)

    def _call(self, arm: EagerArm, us: float) -> Callable[[], None]:
        def call() -> None:
            self.log.append(arm)
            self.now_us += us

        return call

    def wait(self) -> None:
        self.now_us += 1.0

    @property
    def visits(self) -> list[str]:
        """The arms in the order of their samples."""
        return self.log[:: eager.CALLS]


US: dict[EagerArm, float] = {"in_place": 2.0, "attention": 3.0, "kernel": 4.0}


def test_a_sample_is_the_time_of_a_call_and_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(US, monkeypatch)
    found = time_rounds(played.calls, played.wait, 3, 0)
    assert found == {arm: ((us + 1, us + 1),) * 3 for arm, us in US.items()}
    assert len(played.log) == 3 * 2 * len(US) * eager.CALLS


def test_a_round_visits_the_arms_in_random_order_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    played, again, other = (Played(US, monkeypatch) for _ in range(3))
    for run, seed in ((played, 1), (again, 1), (other, 2)):
        time_rounds(run.calls, run.wait, 20, seed)
    rounds = [tuple(played.visits[i : i + 2 * len(US)]) for i in range(0, len(played.visits), 2 * len(US))]
    assert all(one == one[::-1] and set(one) == set(US) for one in rounds)
    assert len(set(rounds)) > 2
    assert played.visits == again.visits
    assert played.visits != other.visits


def test_the_warm_up_runs_all_arms_in_turns_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(US, monkeypatch)
    warm_up(played.calls, played.wait, least_ms=1.5)
    assert played.visits == list(US) * 3
    assert played.now_us >= 1500


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem() -> Problem:
    return pose(Case("suite", CELL), HostMemory(), 0)[0]


def _answer(problem: Problem) -> np.ndarray:
    q, k, v = (HostMemory().float64(x) for x in problem.values)
    o, _ = reference.attention(q, k, v, scale=1 / 8, causal=False, rounding=HostMemory().rounding("bf16"))
    return np.asarray(o)


def test_right_answers_are_told_by_their_errors(problem: Problem) -> None:
    errors = judged({"attention": lambda: _answer(problem)}, HostMemory(), problem, CELL)["attention"]
    assert 0 < errors.o_max < problem.limits.o_max


def test_a_wrong_answer_ends_it_with_one_line(problem: Problem) -> None:
    def wrong() -> np.ndarray:
        o = _answer(problem)
        o[0, 0, -1, -1] = np.nan
        return o

    with pytest.raises(FlashladderError, match=r"is wrong in b1h1s32d64-bf16-full: NaN .* not recorded") as error:
        judged({"kernel": lambda: _answer(problem), "attention": wrong}, HostMemory(), problem, CELL)
    assert error.value.exit_code == Exit.INCORRECT
    assert str(error.value).startswith("flashladder.attention(q, k, v)")


def test_what_an_earlier_call_left_does_not_pass_for_an_answer() -> None:
    class Buffer:
        value = 1.0

        def fill_(self, value: float) -> None:
            self.value = value

    left = Buffer()
    assert np.isnan(poisoned(lambda: left)().value)


def test_a_cell_is_measured_from_end_to_end_on_tensors_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from flashladder import functional

    def library(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float | None, causal: bool) -> None:
        o.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal))

    class TorchOnTheHost(CudaMemory):
        def __init__(self) -> None:
            self.torch, self.dtypes = torch, {"bf16": torch.bfloat16}

        def shaped(self, values: np.ndarray) -> Any:
            tensor = torch.from_numpy(np.array(values, order="C").view(np.int16))
            return tensor.view(torch.bfloat16)

    monkeypatch.setattr(eager_timing, "CudaMemory", TorchOnTheHost)
    monkeypatch.setattr(native, "load", lambda path: SimpleNamespace(attention=library))
    monkeypatch.setattr(eager_timing, "gpu_digest", lambda: None)
    monkeypatch.setattr(eager_timing, "CALLS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(functional._kernels, -1, library)  # the device number of the CPU's tensors
    spec = ArmSpec(name="r13_tuned", kind="rung", library="x.so", sha256="sha")
    record = eager_timing.time_cell(spec, CELL, 3)
    assert (record.cell, record.rung, record.sha256, record.seed) == (CELL, "r13_tuned", "sha", 3)
    assert {arm: len(samples) for arm, samples in record.us.items()} == dict.fromkeys(eager.ARMS, 60)
    assert record.errors.keys() == set(eager.COMPUTING)
    library_of_zeros = SimpleNamespace(attention=lambda q, k, v, o, *_: o.zero_())
    monkeypatch.setattr(native, "load", lambda path: library_of_zeros)
    with pytest.raises(
        FlashladderError, match="the library, with an O at hand is wrong in b1h1s32d64-bf16-full: o_max"
    ):
        eager_timing.time_cell(spec, CELL, 3)


# --- the run --------------------------------------------------------------------------------------------------------


def test_what_is_recorded_of_this_library_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made.write_run(tmp_path / "run", [])
    run.append("eager", made.eager_timing(CELL))
    measured: list[Cell] = []

    def time_cell(spec: ArmSpec, cell: Cell, seed: int) -> Any:
        measured.append(cell)
        return made.eager_timing(cell)

    def build_rungs(run: RunDir, rungs: Any, archs: Any, progress: Any) -> Any:
        assert (run.path, [r.id for r in rungs], archs) == (tmp_path / "run", [fastest.PORTABLE], ARCHS)
        return [], {rungs[0].id: ArmSpec(name=rungs[0].id, kind="rung", library="x.so", sha256="sha-r05_swizzle")}

    cuda = SimpleNamespace(get_device_capability=lambda: (8, 0))
    monkeypatch.setenv("FLASHLADDER_ARCHS", " ".join(ARCHS))  # an image's: its library is taken, none built
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(ablation, "open_run", lambda preset, path: RunDir(path))
    monkeypatch.setattr(eager_timing, "build_rungs", build_rungs)
    monkeypatch.setattr(eager_timing, "time_cell", time_cell)
    found = eager_timing.measure(run.path, 0)
    assert measured == [cell for cell in eager.CELLS if cell != CELL]
    assert {r.cell for r in found.eager()} == set(eager.CELLS)


def test_the_runs_of_the_same_gpu_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashladder.paths.RESULTS", tmp_path)
    run = made.write_run(tmp_path / "h100" / "eager", [])
    assert ablation.eager_runs(run) == []
    run.append("eager", made.eager_timing(CELL))
    another = msgspec.structs.replace(made.MACHINE, gpu="NVIDIA L4")
    other = made.write_run(tmp_path / "l4" / "eager", [], info=msgspec.structs.replace(made.INFO, machine=another))
    other.append("eager", made.eager_timing(CELL))
    assert ablation.eager_runs(run) == [(made.INFO, [made.eager_timing(CELL)])]


# --- the numbers ----------------------------------------------------------------------------------------------------


def test_a_ratio_above_1_says_that_the_arm_takes_longer() -> None:
    record = made.eager_timing(CELL)
    for other in eager.ONE_ELEMENT:
        value, (low, high) = eager.ratio(record, "attention", other)
        assert low < value < high
        assert value == pytest.approx(made.EAGER_US["attention"] / made.EAGER_US[other], rel=0.01)


def test_the_table_has_a_row_for_every_arm() -> None:
    found = eager.table(made.eager_timing(CELL))
    assert [row[0] for row in found.rows] == list(eager.ARMS)
    assert found.columns[3:] == ("over in_place", "over out_of_place")
    rows = {row[0]: row[3:] for row in found.rows}
    assert rows["in_place"][0] == rows["out_of_place"][1] == "-"
    assert rows["out_of_place"][0].startswith("1.2")
