"""Candidates of Hopper's division: their sources, and the choice from records alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flashladder import blocking, ladder, paths
from flashladder.errors import FlashladderError
from flashladder.ladder import load_ladder, load_tuning
from flashladder.model import ArmTiming, Blocking, BuildRecord, CellTiming, CheckRecord, Choice
from tests.unit import synthetic as made

NARROW = Blocking(head_dim=64, tile_m=256, tile_n=64, stages=4, ping_pong=False)
WIDE = Blocking(head_dim=128, tile_m=192, tile_n=64, stages=4, ping_pong=False)


def _timing(us: dict[str, float]) -> CellTiming:
    arms = tuple(
        ArmTiming(arm=name, kind="rung", status="timed", ns=((1e3 * t, 1e3 * t),) * 5) for name, t in us.items()
    )
    return msgspec.structs.replace(made.timing(made.REFERENCE), arms=arms)


def test_a_candidates_source_sets_the_fields_of_its_head_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    rung = blocking.candidate_rung(WIDE, load_ladder()["r22_retuned"])
    text = (tmp_path / rung.source).read_text()
    assert rung.id == "d128_192x64_4"
    assert "config.tile_m_128 = 192;" in text
    assert "config.ping_pong_128 = 0;" in text
    assert "config.tile_m = " not in text
    assert "FLASHLADDER_TMA_RUNG(d128_192x64_4, kConfig" in text


def test_a_configuration_says_how_each_head_dimension_is_divided() -> None:
    config = {**NARROW.fields, **WIDE.fields}
    assert Blocking.of(config, 64) == NARROW
    assert Blocking.of(config, 128) == WIDE
    unset = {**config, "tile_m_128": 0, "tile_n_128": 0, "stages_128": 0, "ping_pong_128": -1}
    assert Blocking.of(unset, 128) == msgspec.structs.replace(NARROW, head_dim=128)


def test_a_score_is_the_geometric_mean_of_times_over_the_least_and_needs_every_cell() -> None:
    found = blocking.scores(
        [_timing({"a": 1.0, "b": 2.0, "c": 3.0}), _timing({"a": 4.0, "b": 2.0, "other": 1.0})], ["a", "b", "c"]
    )
    (times,) = found.values()
    assert times == {"a": pytest.approx(2**0.5), "b": pytest.approx(2**0.5)}


def test_the_table_marks_the_choices_and_names_what_was_not_timed() -> None:
    tuning = load_tuning()
    rows = blocking.table({(64, "full"): {NARROW.name: 1.0}}, tuning).rows
    assert len(rows) == len(tuning.candidate)
    assert ("64", "256 x 64", "4", "no", "1.00 *", "not timed") in rows


def test_what_did_not_build_spills_or_is_wrong_says_so() -> None:
    rung = load_ladder()["r22_retuned"]

    def built(name: str, spilled: int = 0, failed: str | None = None) -> BuildRecord:
        record = made.build(msgspec.structs.replace(rung, id=name), failed=failed)
        kernels = tuple(msgspec.structs.replace(k, spill_store_bytes=spilled) for k in record.kernels)
        return msgspec.structs.replace(record, kernels=kernels)

    right = CheckRecord(arm="d64_a", sha256=None, case="edge", cell=made.REFERENCE, status="pass", seed=0)
    wrong = msgspec.structs.replace(right, arm="d64_d", status="fail", reason="O is wrong")
    builds = [built("d64_a"), built("d64_b", spilled=8), built("d64_c", failed="no"), built("d64_d")]
    found = blocking.untimed(builds, [right, wrong])
    assert found == {"d64_b": "spills 8 bytes a thread", "d64_c": "no", "d64_d": "edge: O is wrong"}


def test_a_choice_that_is_no_candidate_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = msgspec.structs.replace(load_tuning(), choice=(Choice(head_dim=64, mask="full", blocking="d64_1x1_1"),))
    load_tuning.cache_clear()
    monkeypatch.setattr(ladder, "load_toml", lambda *_: wrong)
    with pytest.raises(FlashladderError, match="'d64_1x1_1' is no candidate at head_dim 64; expected one of d64_128"):
        load_tuning()
    load_tuning.cache_clear()
