"""The JSON object for scripts: its exact shape, strictly parsed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from flashladder import paths
from flashladder.diagnose import control_arm, load_results
from flashladder.rundir import RunDir
from flashladder.summary import aliases, champion, sets_of, summary, to_json
from tests.unit import synthetic as made

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return made.diagnosed(tmp_path_factory.mktemp("run"))


def strictly(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def parsed(run: RunDir) -> Any:
    return strictly(to_json(summary(run, made.LADDER)))


def test_keys_are_those_documented(parsed: Any) -> None:
    assert list(parsed) == ["run", "aliases", "rows", "predictions", "findings"]
    assert set(parsed["run"]) == {"id", "gpu", "arch", "date", "commit", "pinned"}
    row_keys = {"name", "kind", "set", "shape", "dtype", "causal", "status", "reason"}
    row_keys |= {"device_us", "host_us", "tflops", "roofline_pct", "ratios"}
    assert all(set(row) == row_keys for row in parsed["rows"])
    shape_keys = {"batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim"}
    assert all(set(row["shape"]) == shape_keys for row in parsed["rows"])
    timed = [row for row in parsed["rows"] if row["status"] == "timed"]
    assert all(set(row["device_us"]) == {"median", "ci", "n"} for row in timed)
    ratios = [ratio for row in timed for ratio in row["ratios"].values()]
    assert all(set(ratio) == {"ratio", "ci", "verdict"} for ratio in ratios)
    prediction_keys = {"rung", "metric", "expected", "measured", "outcome"}
    assert all(set(p) == prediction_keys for p in parsed["predictions"])


def test_every_arm_has_a_row_in_every_set_of_every_cell(parsed: Any) -> None:
    arms = {*(r.id for r in made.RUNGS), *made.TFLOPS, "sdpa_math"} - {control_arm(made.LADDER)}
    reference = [r for r in parsed["rows"] if r["shape"]["seq_q"] == 512 and r["shape"]["batch"] == 2]
    assert {r["set"] for r in reference} == {"correctness", "latency"}
    assert sorted(r["name"] for r in reference) == sorted([*arms, *arms])
    assert {r["set"] for r in parsed["rows"]} == {"correctness", "latency", "headline"}
    assert {r["kind"] for r in reference if r["name"].startswith("sdpa")} == {"peer"}


def test_rows_without_numbers_are_null_with_a_reason(parsed: Any) -> None:
    rows = [r for r in parsed["rows"] if r["status"] != "timed"]
    assert {r["status"] for r in rows} == {"failed", "skipped", "not installed"}
    for row in rows:
        assert row["reason"]
        assert row["device_us"] is row["host_us"] is row["tflops"] is row["roofline_pct"] is None
        assert row["ratios"] == {}
    assert all(r["reason"] is None for r in parsed["rows"] if r["status"] == "timed")


def test_ratios_name_the_parent_and_every_timed_peer(parsed: Any) -> None:
    row = next(r for r in parsed["rows"] if r["name"] == "r05_swizzle" and r["set"] == "latency")
    assert set(row["ratios"]) == {"r03_warp_reduce", "sdpa_default", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"}
    assert row["ratios"]["r03_warp_reduce"]["verdict"] == "faster"
    assert row["ratios"]["sdpa_default"]["ratio"] < 1


def test_insufficient_samples_are_null(tmp_path: Path) -> None:
    run = made.diagnosed(tmp_path, [made.timing(made.REFERENCE, blocks=8)])
    ratios = [r for row in summary(run, made.LADDER).rows for r in row.ratios.values()]
    assert ratios
    assert all((r.ratio, r.ci, r.verdict) == (None, None, "insufficient samples") for r in ratios)


def test_the_control_arm_is_nowhere(run: RunDir) -> None:
    assert "#" not in to_json(summary(run, made.LADDER))


def test_a_cell_of_no_set_has_one_row_without_a_set(tmp_path: Path) -> None:
    odd = made.cell(3, 5, 77, 64)
    assert sets_of(odd, "warm") == []
    rows = summary(made.diagnosed(tmp_path, [made.timing(odd)]), made.LADDER).rows
    assert {row.set for row in rows} == {None}
    assert len({row.name for row in rows}) == len(rows)


def test_a_set_names_only_cells_timed_from_its_l2_state() -> None:
    assert sets_of(made.HEADLINE[0], "cold") == ["headline"]
    assert sets_of(made.HEADLINE[0], "warm") == []


@pytest.mark.parametrize(("lock", "pinned"), [(None, False), ("other", False), ("made", True)])
def test_pinned_is_read_from_the_lock(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str | None, pinned: bool
) -> None:
    monkeypatch.setattr(paths, "PAPER", tmp_path)
    lock = lock and lock.replace("made", run.path.name)
    for content in [] if lock is None else [lock, f"{run.path.parent.name}/{lock}\n"]:
        (tmp_path / "run.lock").write_text(content)
        assert summary(run, made.LADDER).run.pinned is pinned
    if lock is not None:
        (tmp_path / "run.lock").write_text(f"another-gpu/{lock}")
        assert not summary(run, made.LADDER).run.pinned
    if lock is None:
        assert not summary(run, made.LADDER).run.pinned


def test_aliases_name_only_what_exists(run: RunDir, parsed: Any, tmp_path: Path) -> None:
    assert parsed["aliases"] == {"portable": "r05_swizzle", "champion": "r05_swizzle"}
    rungs = tuple(replace(r, min_arch=90) if r.id == "r05_swizzle" else r for r in made.RUNGS)
    named = aliases(load_results(run, dataclasses.replace(made.LADDER, rungs=rungs)))
    assert named == {"portable": "r03_warp_reduce", "hopper": "r05_swizzle", "champion": "r05_swizzle"}
    assert aliases(made.results(tmp_path, [])) == {}


def test_champion_has_coverage_before_speed(tmp_path: Path) -> None:
    """A rung that is fastest where it runs, but runs in fewer cells, is no champion."""
    timings = [made.timing(cell, i) for i, cell in enumerate(made.CELLS)]
    timings[0] = made.with_arm(timings[0], "r05_swizzle", lambda a: replace(a, status="failed", reason="x", ns=()))
    assert champion(made.results(tmp_path, timings)) == "r03_warp_reduce"


def test_the_same_run_gives_the_same_text(run: RunDir) -> None:
    assert to_json(summary(run, made.LADDER)) == to_json(summary(run, made.LADDER))
