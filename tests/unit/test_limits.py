"""The inverted design: what the model says by hand, and what the recorded measurements say of it."""

from __future__ import annotations

import json
from itertools import combinations
from statistics import median

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flashladder import bottleneck, flops, limits, limits_report, rundir
from flashladder.cli import main
from flashladder.errors import Exit
from flashladder.ladder import gpu_called, load_gpus, load_ladder, load_shapes, load_tuning
from flashladder.limits import Design, Fit
from flashladder.model import Blocking, BuildRecord, Cell, DtypeName, Shape
from tests.unit.recorded import profiled

H200 = gpu_called("h200")


def _cell(shape: str, *, causal: bool = False, dtype: DtypeName = "bf16") -> Cell:
    found = Shape.of_id(shape)
    assert found is not None
    return Cell(shape=found, dtype=dtype, causal=causal)


def _wgmma(tile_m: int, tile_n: int, stages: int = 4) -> Design:
    return Design(instruction="wgmma", tile_m=tile_m, tile_n=tile_n, stages=stages)


def _fit(design: Design, head_dim: int) -> Fit:
    fitted = limits.fit(design, head_dim, H200)
    assert isinstance(fitted, Fit)
    return fitted


# --- shapes and limits ----------------------------------------------------------------------------------------------


def test_every_declared_shape_is_read_from_its_id() -> None:
    shapes = {shape for declared in load_shapes().values() for shape, _ in declared.entries}
    assert {Shape.of_id(shape.id) for shape in shapes} == shapes
    assert Shape.of_id("b8h32") is None
    assert Shape.of_id("xb8h32s64d64") is None


def test_every_gpus_rates_are_consistent_and_have_a_source() -> None:
    for gpu in load_gpus():
        assert 1e9 < gpu.boost_hz < 2.5e9
        assert "datasheet" in gpu.source
        assert "CUDA C++ Programming Guide" in gpu.source
        assert gpu.mma_sync_flops_per_clk_sm is None or gpu.mma_sync_flops_per_clk_sm < gpu.tensor_flops_per_clk_sm


@given(st.builds(Shape, **{name: st.integers(1, 70000) for name in Shape.__struct_fields__}))
def test_any_shape_is_read_from_its_id(shape: Shape) -> None:
    assert Shape.of_id(shape.id) == shape


def test_measured_limits_are_those_of_the_recorded_counters_and_times() -> None:
    """L2: bytes a clock over the busy share, the most that a recorded kernel shows. Launch: no kernel takes less."""
    run, bytes_per_clock = profiled(), []
    for profile in run.profiles():
        for kernel in profile.kernels:
            m = {name: metric.value for name, metric in kernel.metrics.items()}
            if m.get(bottleneck.L2, 0.0) > 5 and bottleneck.L2_BYTES in m:
                bytes_per_clock.append(m[bottleneck.L2_BYTES] / m[bottleneck.ELAPSED] / (m[bottleneck.L2] / 100))
    assert max(bytes_per_clock) == pytest.approx(H200.l2_bytes_per_clk, rel=0.05)
    least_ns = min(ns for t in run.timings() for arm in t.arms for pair in arm.ns for ns in pair)
    assert H200.launch_s is not None
    assert 1e9 * H200.launch_s < least_ns


# --- the model by hand ----------------------------------------------------------------------------------------------


def test_the_exponential_costs_as_much_as_both_products_at_head_dim_64_on_hopper() -> None:
    by_name = {f.resource: f for f in limits.floors(_cell("b8h32s2048d64"), H200, H200.boost_hz)}
    assert by_name["MUFU"].us == pytest.approx(by_name["tensor cores"].us)
    assert by_name["MUFU"].work == 8 * 32 * 2048 * 2048
    wide = {f.resource: f for f in limits.floors(_cell("b8h16s2048d128"), H200, H200.boost_hz)}
    assert wide["MUFU"].us == pytest.approx(0.5 * (wide["tensor cores"].us or 0.0))


def test_floors_agree_with_the_roofline_and_an_unknown_rate_gives_none() -> None:
    cell, gpu = _cell("b2h8s512d64"), gpu_called("l4")
    by_name = {f.resource: f.us for f in limits.floors(cell, gpu, gpu.boost_hz)}
    roofline = max(by_name["tensor cores"] or 0.0, by_name["DRAM"] or 0.0)
    assert roofline == pytest.approx(1e6 * flops.floor_s(cell, gpu))
    assert by_name["L2"] is None
    assert by_name["launch"] is None


@pytest.mark.parametrize(
    ("head_dim", "tile_m", "tile_n", "bytes_per_clock"),
    [(64, 192, 128, 101.3), (128, 128, 128, 112), (128, 128, 176, 107.6)],
)
def test_shared_memory_traffic_by_hand(head_dim: int, tile_m: int, tile_n: int, bytes_per_clock: float) -> None:
    """Bytes a clock that a tile asks for while the tensor cores run at their peak: Q, K and V read, K and V written."""
    clocks = limits._clocks_per_score(_wgmma(tile_m, tile_n), head_dim, H200)
    asked = clocks["shared memory"] * H200.shared_bytes_per_clk_sm / clocks["tensor cores"]
    assert asked == pytest.approx(bytes_per_clock, rel=1e-3)


def test_one_customer_waits_for_both_stations_and_many_for_the_longer_one() -> None:
    assert limits.time_per_visit(2.0, 1.0, 1) == 3.0
    assert limits.time_per_visit(1.0, 1.0, 4) == pytest.approx(5 / 4)
    assert limits.time_per_visit(2.0, 1.0, 2) == pytest.approx(7 / 3)
    assert limits.time_per_visit(2.0, 1.0, 60) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="needs a customer"):
        limits.time_per_visit(1.0, 1.0, 0)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(1, 12))
def test_a_network_lies_between_perfect_overlap_and_none_and_gains_by_customers(a: float, b: float, n: int) -> None:
    now = limits.time_per_visit(a, b, n)
    assert max(a, b) * (1 - 1e-12) <= now <= (a + b) * (1 + 1e-12)
    assert limits.time_per_visit(a, b, n + 1) <= now * (1 + 1e-12)
    assert now == pytest.approx(limits.time_per_visit(b, a, n))


def test_a_grid_counts_rows_past_the_edge_and_the_last_wave() -> None:
    cell = _cell("b1h1s130d64")
    one = limits.predict(_fit(_wgmma(128, 64), 64), cell, H200, H200.boost_hz)
    assert one.grid == 2
    assert one.useful == pytest.approx(130 * 130 / (256 * 192))
    assert one.balance == pytest.approx(2 / 132)
    assert one.waves == pytest.approx(2 / (132 * one.fit.blocks_per_sm))


@pytest.mark.parametrize("causal", [False, True])
def test_no_design_beats_the_floors_and_every_share_is_one(causal: bool) -> None:
    for shape in ("b2h8s512d64", "b8h32s2048d64", "b1h8s1x8192d128", "b8h16s2048d128"):
        cell = _cell(shape, causal=causal)
        ranking = limits.rank(cell, H200, H200.boost_hz)
        least = max(f.us for f in limits.floors(cell, H200, H200.boost_hz) if f.us is not None)
        assert ranking.predictions
        assert [p.us for p in ranking.predictions] == sorted(p.us for p in ranking.predictions)
        for p in ranking.predictions:
            assert least <= p.floor_us * (1 + 1e-9) <= p.us * (1 + 2e-9)
            assert 0 < p.useful <= 1
            assert 0 < p.balance <= 1 + 1e-9
            assert all(0 <= share <= 1 + 1e-9 for share in p.shares.values())


def test_a_row_that_sees_no_key_is_no_fault() -> None:
    cell = _cell("b1h1s256x64d64", causal=True)
    assert limits.rank(cell, H200, H200.boost_hz).predictions


def test_what_does_not_fit_says_what_it_lacks() -> None:
    assert limits.fit(_wgmma(192, 144), 64, H200) == "registers"
    assert limits.fit(_wgmma(128, 192), 128, H200) == "shared memory"
    assert isinstance(limits.fit(_wgmma(192, 128), 64, H200), Fit)
    assert not any(d.instruction == "wgmma" for d in limits.designs(_cell("b2h8s512d64"), gpu_called("a100")))


# --- the model against the records ----------------------------------------------------------------------------------


def _blockings() -> list[tuple[Blocking, BuildRecord]]:
    builds = {b.rung: b for b in rundir.find("h200/blocking").builds()}
    return [(c, builds[c.name]) for c in load_tuning().candidate]


def test_registers_and_shared_memory_are_what_the_compiler_gave_every_recorded_candidate() -> None:
    for blocking, build in _blockings():
        fitted = _fit(_wgmma(blocking.tile_m, blocking.tile_n, blocking.stages), blocking.head_dim)
        kernel = next(k for k in build.kernels if k.kernel == f"{blocking.name}_bf16_d{blocking.head_dim}")
        assert (fitted.shared_bytes, fitted.registers) == (kernel.shared_bytes, kernel.registers), blocking.name
        assert fitted.design.stages == blocking.stages


def test_the_ranking_finds_what_hand_tuning_chose_and_orders_the_recorded_candidates() -> None:
    """The first design is the chosen tile; of pairs whose times differ by 5 %, nine of ten are in the right order."""
    right = pairs = 0
    for timing in rundir.find("h200/blocking").timings():
        cell = timing.cell
        if cell.shape.seq_q < 2048:
            continue
        chosen = next(
            c.blocking for c in load_tuning().choice if (c.head_dim, c.mask) == (cell.shape.head_dim, cell.mask)
        )
        first = limits.rank(cell, H200, H200.boost_hz).predictions[0].fit.design
        assert f"d{cell.shape.head_dim}_{first.tile_m}x{first.tile_n}_{first.stages}" == chosen, cell.id
        known = {}
        for blocking, _ in _blockings():
            arm = next((a for a in timing.arms if a.arm == blocking.name and a.ns), None)
            if arm is not None:
                fitted = _fit(_wgmma(blocking.tile_m, blocking.tile_n, blocking.stages), blocking.head_dim)
                us = limits.predict(fitted, cell, H200, H200.boost_hz).us
                known[blocking.name] = (median(ns for pair in arm.ns for ns in pair), us)
        for (time, predicted), (other, other_predicted) in combinations(known.values(), 2):
            if abs(time / other - 1) > 0.05 and predicted != other_predicted:
                pairs += 1
                right += (time < other) == (predicted < other_predicted)
    assert pairs > 100
    assert right / pairs > 0.9


def test_a_recorded_rung_stands_beside_its_prediction_and_no_prediction_is_above_the_measurement() -> None:
    cell = load_ladder().turns[0][2]
    found = limits_report.limits_of(cell, H200, [rundir.find()])
    by_arm = {m.arm: m for m in found.measured}
    assert {"r13_tuned", "r20_persistent", "r22_retuned"} <= set(by_arm)
    assert by_arm["r22_retuned"].design == _wgmma(256, 64)
    assert by_arm["r13_tuned"].design.warp_rows == 32
    assert all(m.predicted_us < m.us for m in found.measured)


def test_a_rung_that_plans_is_not_taken_for_its_large_tile_on_a_small_grid() -> None:
    build = next(b for b in rundir.find().builds() if b.rung == "r13_tuned")
    small, large = _cell("b1h1s512d64"), _cell("b8h32s2048d64")
    assert limits_report.design_of(build, small, H200) is None
    assert limits_report.design_of(build, large, H200) is not None
    naive = msgspec.structs.replace(build, config={**build.config, "product": 0})
    assert limits_report.design_of(naive, large, H200) is None


# --- the command ----------------------------------------------------------------------------------------------------


def _invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["limits", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_the_command_shows_floors_designs_measurements_and_counters() -> None:
    code, output = _invoke("--gpu", "h200", "--shape", "b2h8s512d64", "--top", "3")
    assert code == Exit.OK
    for part in ("tensor cores", "Designs that fit, the first 3 of", "over prediction", "How busy", "lost to the tail"):
        assert part in output


@pytest.mark.parametrize("gpu", ["l4", "a100", "h100"])
def test_every_gpu_has_designs_and_says_whether_something_was_measured(gpu: str) -> None:
    code, output = _invoke("--gpu", gpu, "--shape", "b2h8s512d64", "--json")
    found = json.loads(output)
    assert code == Exit.OK
    assert found["designs"]
    assert bool(found["measured"]) == (gpu == "h100")
    assert all((d["fit"]["design"]["instruction"] == "mma.sync") or gpu == "h100" for d in found["designs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "b200"), "no GPU 'b200' in experiments/gpus.toml; expected one of h100"),
        (("--gpu", "l4", "--shape", "headline"), "no shape 'headline'; expected bBhHsSdD as b8h32s2048d64"),
        (("--gpu", "l4", "--shape", "b1h8kv3s64d64"), "heads a multiple of kv's"),
        (("--gpu", "l4", "--shape", "b1h8s64d96"), "a head_dim of 64 or 128"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    code, output = _invoke(*arguments)
    assert code == Exit.USAGE
    assert output.startswith("flashladder: ")
    assert message in output
    assert output.count("\n") == 1
