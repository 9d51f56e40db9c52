"""What experiments/*.toml declares, and the errors a wrong declaration gives."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from flashladder import ladder, paths
from flashladder.errors import FlashladderError

LADDER = ladder.load_ladder()

HEAD = """
[reference]
shape = { batch = 1, heads = 1, seq = 8, head_dim = 64 }
dtype = "fp16"
mask = "full"
baseline = "sdpa_default"
"""


def _parse(tmp_path: Path, text: str) -> ladder.Ladder:
    file = tmp_path / "ladder.toml"
    file.write_text(HEAD + text)
    return ladder.parse_ladder(file)


def test_every_rung_is_declared_once_and_every_source_belongs_to_one() -> None:
    sources = sorted(str(p.relative_to(paths.ROOT)) for p in (paths.KERNEL / "rungs").glob("*.cu"))
    assert sorted(r.source for r in LADDER.rungs) == sources
    assert all(Path(r.source).stem == r.id for r in LADDER.rungs)


def test_every_rung_but_the_first_has_a_parent_a_change_and_a_prediction_of_its_time() -> None:
    for before, rung in zip(LADDER.rungs, LADDER.rungs[1:], strict=False):
        assert rung.parent == before.id
        assert rung.changes
        times = [p for p in rung.predictions if p.metric == "time"]
        assert len(times) == 1
        for p in rung.predictions:
            low, high = p.ratio
            assert low <= high
            assert p.reason
        up = times[0].ratio[1] <= 1
        assert times[0].direction == ("up" if up else "down")


def test_every_variant_changes_the_fields_that_it_declares_in_its_source() -> None:
    sources = sorted(str(p.relative_to(paths.ROOT)) for p in (paths.KERNEL / "variants").glob("*.cu"))
    assert sorted(v.source for v in LADDER.variants) == sources
    for variant in LADDER.variants:
        text = (paths.ROOT / variant.source).read_text()
        inherited = (paths.ROOT / LADDER[variant.parent or ""].source).read_text()
        fields = [re.findall(r"config\.(\w+) = ", line) for line in text.splitlines() if line not in inherited]
        changed = dict.fromkeys("tile" if name.startswith("tile_") else name for line in fields for name in line)
        assert list(changed) == [*variant.changes, *variant.forced]
        assert variant.kind == "variant"
        assert f"_RUNG({variant.id}, kConfig" in text
        assert [p.metric for p in variant.predictions] == ["time"]


def test_the_variants_are_measured_at_declared_shapes_that_hold_the_reference() -> None:
    declared = {shape.id for shapes in ladder.load_shapes().values() for shape, _ in shapes.entries}
    assert set(LADDER.variant_shapes) == {variant.parent for variant in LADDER.variants}
    assert {shape for shapes in LADDER.variant_shapes.values() for shape in shapes} <= declared
    for variant in LADDER.variants:
        assert LADDER.has_variant_at(variant, LADDER.cell_of(variant).shape)


def test_a_variant_is_read_where_it_shows() -> None:
    cell = LADDER.cell_of(LADDER["v28_sum_column"])
    assert cell.id == "b8h32s2048d64-bf16-full"  # its parent's leg has another shape, and fp16 the parent's kernel
    assert LADDER.cell_of(LADDER["r28_halves_last"]).shape != cell.shape
    cell = LADDER.cell_of(LADDER["v38_multicast_all"])
    assert cell.id == "b2h8s512d64-fp16-full"  # of a leg before its parent's
    assert LADDER.cell_of(LADDER["r38_first_look"]).shape != cell.shape


def test_variants_are_chosen_by_name_alone() -> None:
    assert [r.id for r in LADDER.select(("v13_no_swizzle", "r13"))] == ["r13_tuned", "v13_no_swizzle"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rung]]\nid = "a"\nsource = "a.cu"\nchange = "x"\n' * 2, "rung a is declared twice"),
        ('[[rung]]\nid = "a"\nsource = "a.cu"\nchange = "x"\nparent = "b"\n', "parent 'b' is not declared above it"),
        ('[[rung]]\nid = "a"\nsource = "a.cu"\nchange = "x"\ncolour = 1\n', "rung a: .*unknown field `colour`"),
        ('[[rung]]\nid = "a"\nchange = "x"\n', "rung a: .*missing required field `source`"),
        ("[[rung]\n", "Expected"),
    ],
)
def test_a_wrong_declaration_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FlashladderError, match=message) as caught:
        _parse(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert "ladder.toml" in str(caught.value)


def test_rungs_are_selected_by_unambiguous_prefix() -> None:
    assert [r.id for r in LADDER.select(("r05", "r00_naive"))] == ["r00_naive", "r05_swizzle"]
    assert LADDER.select(()) == LADDER.rungs
    for name in ("r0", "nope"):
        with pytest.raises(FlashladderError, match="expected an id or an unambiguous prefix"):
            LADDER.select((name,))


def test_the_sweeps_are_those_of_the_design() -> None:
    sets = ladder.load_shapes()
    assert len(sets["correctness"].entries) == 7
    assert [s.id for s, _ in sets["latency"].entries] == [
        *(f"b1h1s{n}d64" for n in (32, 64, 128, 256, 512)),
        "b2h8s128d64",
        "b2h8s512d64",
    ]
    headline = sets["headline"]
    assert {s.batch * s.seq_q for s, _ in headline.entries} == {16384}
    assert {s.heads_q * s.head_dim for s, _ in headline.entries} == {2048}
    assert len(headline.cells()) == 12 * 2 * 2
    assert all(LADDER.reference in s.cells() for name, s in sets.items() if name in ("correctness", "latency"))
    assert {s.seq_k for s, _ in sets["decode"].entries} == {8192}


def test_the_champions_are_the_last_portable_rung_and_the_last_that_runs() -> None:
    assert [r.id for r in LADDER.champions("sm_90a")] == ["r13_tuned", LADDER.rungs[-1].id]
    assert LADDER.champions(None) == LADDER.champions("sm_90a")
    assert [r.id for r in LADDER.champions("sm_80")] == ["r13_tuned"]
    assert ladder.Ladder(rungs=(), reference=LADDER.reference, baseline="x").champions("sm_80") == ()


def test_the_champions_are_timed_by_values_in_a_few_cells_of_the_larger_presets() -> None:
    ids = [f"b2h16s4096d{d}-fp16-{mask}" for d in (64, 128) for mask in ("full", "causal")]
    small = [f"{shape}-fp16-full" for shape in ("b1h8s1024d64", "b1h8s2048d64", "b2h8s512d128")]
    short = [f"b32h32s{length}d64-fp16-full" for length in (192, 384, 448, 512, 640)]
    short += [f"b32h16s{length}d128-fp16-full" for length in (384, 512)]
    assert [cell.id for cell in ladder.value_cells()] == [*ids, *small, *short]
    assert {name for name, preset in ladder.load_presets().items() if preset.values} == {"default", "full"}


def test_each_preset_holds_the_one_before() -> None:
    presets = ladder.load_presets()
    quick, default, full = (set(ladder.preset_cells(presets[n])) for n in ("quick", "default", "full"))
    assert quick < default < full
    assert LADDER.reference in quick


def test_cell_ids_are_unique() -> None:
    cells = ladder.preset_cells(ladder.load_presets()["full"])
    assert len({c.id for c in cells}) == len(cells)


def test_gpus_by_nvml_name() -> None:
    gpu = ladder.gpu_named("NVIDIA A100-SXM4-80GB")
    assert gpu is not None
    assert gpu.slug == "a100"
    assert ladder.gpu_named("NVIDIA L40S") is None
    assert ladder.gpu_named("Tesla T4") is None


def test_findings_quote_counters_and_state_no_measured_number_themselves() -> None:
    metrics = set(ladder.load_metrics().light)
    with_findings = [rung for rung in LADDER.rungs if rung.finding]
    assert with_findings
    for rung in with_findings:
        assert rung.finding is not None
        assert set(re.findall(r"{(\w+)}", rung.finding)) == set(rung.quotes), rung.id
        assert {quote.metric for quote in rung.quotes.values()} <= metrics, rung.id
        assert not re.search(r"\d+(\.\d+| M| ?%)", rung.finding), rung.id


def test_the_walkthrough_declares_a_rung_after_the_last_one(tmp_path: Path) -> None:
    text = (paths.ROOT / "docs" / "add-a-rung.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "ladder.toml"
    file.write_text((paths.EXPERIMENTS / "ladder.toml").read_text() + textwrap.dedent(f"\n   {block}"))
    last, rung = LADDER.rungs[-1], ladder.parse_ladder(file).rungs[-1]
    assert (rung.parent, rung.id[:4]) == (last.id, f"r{len(LADDER.rungs)}_")
    assert rung.min_arch == last.min_arch
    assert set(rung.sass) <= set(last.sass)
    assert set(rung.smaller_sass or ()) <= set(last.smaller_sass or ())
    copied = re.search(r"kernel/variants/(\w+)\.cu", text)
    assert copied
    assert LADDER[copied[1]].parent == last.id
