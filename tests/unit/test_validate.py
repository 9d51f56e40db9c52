"""Validation: a good run passes, and each kind of tampering is named with its file and line."""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from flashladder import eager, rundir
from flashladder.cli import main
from flashladder.diagnose import diagnose
from flashladder.errors import Exit
from flashladder.ladder import CHOICE, load_ladder, value_cells
from flashladder.model import Agreement, CellTiming, KernelProfile, Metric, NcuRecord, PlanChoice, Roof
from flashladder.rundir import RunDir
from flashladder.validate import Validation, validate
from tests.unit import synthetic as made

replace = msgspec.structs.replace
Json = dict[str, Any]
HOST_CALLS = 40


def _timing(number: int, record: CellTiming) -> CellTiming:
    """With what the engine records and the made-up run leaves out."""
    arms = [replace(a, host_us=(20.0 + number,) * HOST_CALLS) if a.status == "timed" else a for a in record.arms]
    seed = zlib.crc32(f"1/{record.cell.id}".encode())
    return replace(record, arms=tuple(arms), seed=seed, gpu_digest=made.MACHINE.gpu_digest)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A small sealed run with a file of every stage."""
    run = made.write_run(
        tmp_path_factory.mktemp("good") / "run",
        [_timing(n, made.timing(cell, n)) for n, cell in enumerate(made.FEW_CELLS)],
        check_records=[replace(c, case=f"suite/{c.cell.id}/{c.case}") for c in made.checks()],
    )
    for arm in ("r02_grid", "r03_warp_reduce"):
        kernel = KernelProfile(name=arm, metrics={"smsp__x.sum": Metric(value=1, unit="inst")})
        run.append(
            "ncu",
            NcuRecord(
                arm=arm,
                kind="rung",
                sha256=made.sha_of(arm),
                cell=made.REFERENCE,
                set="light",
                ncu="1",
                kernels=(kernel,),
            ),
        )
    run.append("roof", Roof(dtype="fp16", size=8192, gpu_digest=None, ns=(1.5e6,) * 8, sm_clock_mhz=(1700,) * 8))
    agreement = Agreement(
        arm="r02_grid",
        sha256="sha-r02_grid",
        case=f"suite/{made.REFERENCE.id}",
        cell=made.REFERENCE,
        seed=0,
        exact=True,
        status="same bits",
        elements=8,
        equal=8,
    )
    run.append("agreement", agreement)
    for kind in ("huge", "cliff"):
        run.append("values", made.value_timing("r05_swizzle", value_cells()[0], kind, 1.1))
    run.append("eager", made.eager_timing(eager.CELLS[0]))
    run.append("plan", PlanChoice(cell=made.FEW_CELLS[0], arm=f"r02_grid{CHOICE}small/4"))
    run.replace("diagnosis", diagnose(run, made.LADDER))
    run.seal()
    return run


@pytest.fixture
def copy(good: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(good.path, tmp_path / "run"))


def _edit(run: RunDir, stage: str, change: Callable[[Json], object], line: int = 0) -> int:
    """Change one record of a stage's file as another tool would; returns its number."""
    file = run.path / f"{stage}.jsonl"
    lines = file.read_bytes().splitlines()
    record = msgspec.json.decode(lines[line])
    change(record)
    lines[line] = msgspec.json.encode(record)
    file.write_bytes(b"".join(one + b"\n" for one in lines))
    return line % len(lines) + 1


def _lines(run: RunDir, stage: str, change: Callable[[list[bytes]], object]) -> None:
    file = run.path / f"{stage}.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    change(lines)
    file.write_bytes(b"".join(lines))


def _faults(run: RunDir, **options: bool) -> list[tuple[str, int | None, str]]:
    return [(f.file.name, f.line, f.what) for f in validate(run, made.LADDER, **options).faults]


def test_a_good_run_has_no_fault_and_says_what_was_checked(good: RunDir) -> None:
    validation = validate(good, made.LADDER, derived=True)
    assert validation.faults == []
    cells = len(made.FEW_CELLS)
    assert re.fullmatch(
        rf"6 builds, \d+ checks, 1 comparisons with the emulator, {cells} cells, \d+ samples, 2 times by input "
        r"values, 1 cells of eager calls, 1 choices, 2 profiles, \d+ derived records",
        validation.checked,
    )


def _arm(record: Json, name: str) -> Json:
    arm: Json = next(arm for arm in record["arms"] if arm["arm"] == name)
    return arm


def _slower(record: Json) -> None:
    _arm(record, "r05_swizzle")["ns"][0][0] *= 1.5


def _faster_than_light(record: Json) -> None:
    _arm(record, "r05_swizzle")["ns"][0][0] = 100.0


def _without_a_quad(record: Json) -> None:
    arm = _arm(record, "r05_swizzle")
    arm["ns"].pop(3)
    arm["blocks"].pop(3)


def _with_few_blocks(record: Json) -> None:
    arm = _arm(record, "r05_swizzle")
    arm["ns"], arm["blocks"] = arm["ns"][:4], arm["blocks"][:4]


def _other_binary(record: Json) -> None:
    _arm(record, "r05_swizzle")["sha256"] = "sha-of-another"


def _first_timed_arm(record: Json) -> Json:
    arm: Json = _arm(record, "r05_swizzle")
    return arm


TAMPERED: dict[str, tuple[str, Callable[[Json], object], str]] = {
    "a sample": ("timing", _slower, ""),
    "a sample below the roofline": ("timing", _faster_than_light, "not above the least that the hardware could take"),
    "a sample of no time": (
        "timing",
        lambda r: _arm(r, "r05_swizzle")["ns"][0].__setitem__(0, 0.0),
        "a sample of 0 us",
    ),
    "a quad removed": ("timing", _without_a_quad, "11 quads in 11 blocks of 12"),
    "few quads": ("timing", _with_few_blocks, "4 blocks; the preset declares 10 to 50"),
    "another binary timed": ("timing", _other_binary, "no build has its sha256 sha-of-anoth"),
    "an arm that was not checked": ("timing", lambda r: _arm(r, "sdpa_flash").update(arm="fa2"), "not checked"),
    "an unknown arm": ("timing", lambda r: _arm(r, "sdpa_flash").update(arm="magic"), "neither a peer nor built"),
    "an arm twice": ("timing", lambda r: r["arms"].append(r["arms"][-1]), "has an arm twice"),
    "an unknown cell": ("timing", lambda r: r["cell"]["shape"].update(seq_k=513), "unknown cell b2h8s512x513d64"),
    "another cell": ("timing", lambda r: r["cell"].update(causal=True), "its seed"),
    "another card": ("timing", lambda r: r.update(gpu_digest="ffffffffffff"), "which run.json does not name"),
    "an impossible clock": ("timing", lambda r: r["telemetry"][0].__setitem__(0, 2500), "at most 1980 are possible"),
    "too many graphs": ("timing", lambda r: _first_timed_arm(r).update(graphs=99), "99 graphs; expected 1 to"),
    "graphs of what is not captured": (
        "timing",
        lambda r: _first_timed_arm(r).update(graphs=8, captured=False),
        "8 graphs; expected 1 to 1",
    ),
    "host calls removed": ("timing", lambda r: _first_timed_arm(r)["host_us"].pop(), "39 host calls"),
    "samples of a skipped arm": (
        "timing",
        lambda r: _arm(r, "sdpa_math").update(blocks=[0], ns=[[1.0, 1.0]]),
        "has samp",
    ),
    "an unknown field": ("timing", lambda r: r.update(note="trust me"), "not a valid record"),
    "a checked binary": ("check", lambda r: r.update(sha256="sha-of-another"), "no build has its sha256"),
    "an error above its limit": (
        "check",
        lambda r: r["errors"].update(o_max=0.5),
        "passes with o_max 0.5, limit 0.001",
    ),
    "a case of another cell": ("check", lambda r: r["cell"]["shape"].update(seq_q=7), "is not of the cell"),
    "a fault without a reason": ("check", lambda r: r.update(status="fail", reason=None), "fail without a reason"),
    "a built binary": ("build", lambda r: r.update(sha256=None), "is built, its sha256 is None"),
    "code for another architecture": ("build", lambda r: r["kernels"][0].update(arch="sm_75"), "has code for sm_75"),
    "a profiled binary": ("ncu", lambda r: r.update(sha256="sha-of-another"), "no build has its sha256"),
    "a negative counter": (
        "ncu",
        lambda r: r["kernels"][0]["metrics"].update({"smsp__x.sum": [-1, "inst"]}),
        "smsp__x.sum is -1",
    ),
    "a roof above the peak": ("roof", lambda r: r["ns"].__setitem__(0, 1e5), "above the tensor cores' peak"),
    "a ratio of values": ("values", lambda r: r["ns"][0].__setitem__(0, 2e6), ""),
    "a sample of values below the roofline": (
        "values",
        lambda r: r["ns"][0].__setitem__(0, 1.0),
        "not above the least",
    ),
    "a normal sample removed": ("values", lambda r: r["normal_ns"].pop(), "12 pairs of samples beside 11 of normal"),
    "few quads of values": (
        "values",
        lambda r: r.update(ns=r["ns"][:4], normal_ns=r["normal_ns"][:4]),
        "4 pairs of samples beside 4 of normal values; expected 12 of each",
    ),
    "one launch on values": ("values", lambda r: r.update(launches_per_sample=1), "1 launches a sample"),
    "another binary on values": ("values", lambda r: r.update(sha256="sha-of-another"), "no build has its sha256"),
    "values of an arm that failed": (
        "values",
        lambda r: r.update(arm="r04_vector_io", sha256="sha-r04_vector_io"),
        "timed, though its checks say failed",
    ),
    "an unknown kind of values": ("values", lambda r: r.update(values="normal"), "unknown kind of values"),
    "another kind of values": ("values", lambda r: r.update(values="sharp"), "its seed"),
    "values in an unknown cell": ("values", lambda r: r["cell"].update(dtype="bf16"), "unknown cell"),
    "values on another card": ("values", lambda r: r.update(gpu_digest="ffffffffffff"), "run.json does not name"),
    "samples with a reason against": ("values", lambda r: r.update(reason="failed"), "has samples, and a reason"),
    "an eager call above its limit": (
        "eager",
        lambda r: r["errors"]["attention"].update(o_max=0.5),
        "attention was timed with o_max 0.5, limit 0.002",
    ),
    "an eager call that was not checked": ("eager", lambda r: r["errors"].pop("sdpa"), "errors of kernel, attention; "),
    "an eager call removed": ("eager", lambda r: r["us"].pop("nothing"), "expected nothing, in_place"),
    "a round removed": ("eager", lambda r: r["us"]["sdpa"].pop(), "59 rounds of 50 calls of sdpa; expected 60 of 50"),
    "other calls a sample": ("eager", lambda r: r.update(calls=1), "60 rounds of 1 calls of nothing"),
    "an eager call of no time": ("eager", lambda r: r["us"]["in_place"][3].__setitem__(1, 0.0), "takes no time"),
    "an eager call below the roofline": (
        "eager",
        lambda r: r["us"]["kernel"][0].__setitem__(0, 1e-6),
        "kernel: a sample of 1e-06 us is not above the least",
    ),
    "another binary called": ("eager", lambda r: r.update(sha256="sha-of-another"), "no build has its sha256"),
    "an unknown eager call": ("eager", lambda r: r["us"].update(magic=[[1.0, 1.0]]), "not a valid record"),
    "an eager call in an unknown cell": ("eager", lambda r: r["cell"].update(causal=True), "unknown cell; expected"),
    "an eager call on another card": ("eager", lambda r: r.update(gpu_digest="ffffffffffff"), "does not name"),
    "the choice of a rung that was not built": ("plan", lambda r: r.update(arm="r99@small/4"), "neither a peer nor"),
    "a choice without a plan": ("plan", lambda r: r.update(arm="r02_grid"), "names no tile and number of splits"),
    "a choice in a cell without a time": ("plan", lambda r: r["cell"]["shape"].update(batch=77), "nothing was timed"),
    "too many equal elements": ("agreement", lambda r: r.update(equal=9), "9 of 8 elements are equal"),
    "a median": (
        "diagnosis",
        lambda r: r["device_us"].update(median=r["device_us"]["median"] * 1.001),
        "the median of",
    ),
    "an interval": ("diagnosis", lambda r: r["device_us"].update(ci=[0.0, 1e9]), "not inside the samples' range"),
    "a rate": ("diagnosis", lambda r: r.update(tflops=9000.0), "9000.0 TFLOP/s are not those of its median"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_changed_record_is_named_and_its_sum_too(copy: RunDir, kind: str) -> None:
    stage, change, message = TAMPERED[kind]
    timed = re.compile(rb'"arm":"r05_swizzle".*"status":"timed"')
    lines = (copy.path / f"{stage}.jsonl").read_bytes().splitlines()
    line = next((n for n, text in enumerate(lines) if timed.search(text)), 0) if stage == "diagnosis" else 0
    number = _edit(copy, stage, change, line)
    found = _faults(copy)
    name = f"{stage}.jsonl"
    assert (name, None, "its sum is not that of sums.json: it was changed after the run was sealed") in found
    if message:
        assert [what for file, at, what in found if (file, at) == (name, number) and message in what], found


def test_a_sample_that_was_changed_contradicts_its_median_even_under_new_sums(copy: RunDir) -> None:
    _edit(copy, "timing", _slower)
    copy.seal()
    found = _faults(copy)
    assert {file for file, _, _ in found} == {"diagnosis.jsonl"}
    assert any(re.search(r"r05_swizzle .*the ratio of the samples is", what) for _, _, what in found)


def test_a_ratio_of_values_that_is_not_that_of_its_samples_is_named(copy: RunDir) -> None:
    _edit(copy, "values", lambda r: r["ns"][0].__setitem__(0, 2e6))
    copy.seal()
    ((file, _, what),) = _faults(copy)
    assert (file, what) == (
        "diagnosis.jsonl",
        f"r05_swizzle on huge values in {value_cells()[0].id}: its ratio is not that of its samples",
    )


def test_a_run_from_before_the_times_by_values_is_valid(copy: RunDir) -> None:
    (copy.path / "values.jsonl").unlink()
    copy.replace("diagnosis", diagnose(copy, made.LADDER))
    copy.seal()
    assert _faults(copy, derived=True) == []


def _ratio_of(record: Json) -> None:
    record["ratio"] *= 1.0001


def test_a_ratio_that_is_not_that_of_its_samples_is_named(copy: RunDir) -> None:
    lines = (copy.path / "diagnosis.jsonl").read_bytes().splitlines()
    at = next(n for n, line in enumerate(lines) if b'"type":"comparison"' in line and b'"ratio":null' not in line)
    number = _edit(copy, "diagnosis", _ratio_of, at)
    assert [what for file, line, what in _faults(copy) if (file, line) == ("diagnosis.jsonl", number)]


def test_a_verdict_is_compared_with_what_the_samples_give_when_asked(copy: RunDir) -> None:
    lines = (copy.path / "diagnosis.jsonl").read_bytes().splitlines()
    at = next(n for n, line in enumerate(lines) if b'"verdict":"slower"' in line)
    number = _edit(copy, "diagnosis", lambda r: r.update(verdict="faster"), at)
    copy.seal()
    assert _faults(copy) == []
    ((file, line, what),) = _faults(copy, derived=True)
    assert (file, line) == ("diagnosis.jsonl", number)
    assert "not what the samples give, Comparison of" in what


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_what_is_no_number_is_no_record(copy: RunDir, number: str) -> None:
    _lines(
        copy,
        "timing",
        lambda ls: ls.__setitem__(0, re.sub(rb'"warmup_s":[\d.]+', b'"warmup_s":' + number.encode(), ls[0])),
    )
    assert ("timing.jsonl", 1) in {(file, line) for file, line, what in _faults(copy) if "not a valid record" in what}


@pytest.mark.parametrize("stage", rundir.STAGES)
@pytest.mark.parametrize("kind", ["cut off", "removed", "repeated", "deleted"])
def test_a_file_that_lost_or_gained_records_is_named(copy: RunDir, stage: str, kind: str) -> None:
    file = copy.path / f"{stage}.jsonl"
    if kind == "cut off":
        file.write_bytes(file.read_bytes()[:-2])
    elif kind == "removed":
        _lines(copy, stage, lambda lines: lines.pop())
    elif kind == "repeated":
        _lines(copy, stage, lambda lines: lines.append(lines[0]))
    else:
        file.unlink()
    named = [what for name, _, what in _faults(copy) if name == file.name]
    expected = {"cut off": "truncated", "removed": "its sum", "repeated": "duplicate of line 1", "deleted": "missing"}
    assert any(what.startswith(expected[kind]) for what in named), named


def test_an_l2_state_that_no_set_declares_is_named(copy: RunDir) -> None:
    number = _edit(copy, "timing", lambda r: r.update(l2="warm"), 1)
    assert ("timing.jsonl", number) in {(f, n) for f, n, what in _faults(copy) if "a warm L2, which no set" in what}


def test_a_cell_that_lost_its_samples_is_one_fault(copy: RunDir) -> None:
    _lines(copy, "timing", lambda lines: lines.pop())
    copy.seal()
    ((file, line, what),) = _faults(copy)
    assert (file, line is not None) == ("diagnosis.jsonl", True)
    assert re.fullmatch(rf"\d+ records of {made.FEW_CELLS[-1].id}, which has no samples", what)


def test_a_pass_that_is_recorded_twice_is_named(copy: RunDir) -> None:
    _lines(copy, "check", lambda lines: lines.append(lines[0].replace(b'"seed":1', b'"seed":2')))
    assert any("duplicate of line 1" in what for file, _, what in _faults(copy) if file == "check.jsonl")


def test_a_rung_that_was_rebuilt_to_and_fro_is_no_duplicate(copy: RunDir) -> None:
    first = copy.builds()[0]
    other = replace(first, sha256="sha-other")
    for record in (other, first):
        copy.append("build", record)
    for sha256 in ("sha-other", first.sha256):
        copy.append("check", replace(copy.checks()[0], sha256=sha256))
    copy.seal()
    assert _faults(copy) == []


def test_a_stray_file_and_a_missing_or_broken_seal_are_named(copy: RunDir) -> None:
    (copy.path / "extra.jsonl").write_text("{}\n")
    (copy.path / "sums.json").write_text('{"files": 3}')
    assert [file for file, _, _ in _faults(copy)] == ["extra.jsonl", "sums.json"]
    (copy.path / "sums.json").unlink()
    assert any(what.startswith("missing") for file, _, what in _faults(copy) if file == "sums.json")


def test_a_file_that_the_seal_does_not_know_is_named(copy: RunDir) -> None:
    sums = copy.sums
    assert sums is not None
    files = {name: value for name, value in sums.files.items() if name != "ncu.jsonl"}
    (copy.path / "sums.json").write_bytes(msgspec.json.encode(replace(sums, files=files)))
    assert [file for file, _, _ in _faults(copy)] == ["ncu.jsonl"]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not a valid record"), (None, "No such file"), ("preset", "no preset 'huge'")]
)
def test_a_broken_run_info_is_named(copy: RunDir, text: str | None, message: str) -> None:
    info = copy.path / "run.json"
    if text is None:
        info.unlink()
    else:
        info.write_text(text if text == "{" else info.read_text().replace('"default"', '"huge"', 1))
    assert any(message in what for file, _, what in _faults(copy) if file == "run.json")


def test_a_run_that_changes_by_the_tool_loses_its_seal(copy: RunDir) -> None:
    info, records = copy.info, copy.checks()
    copy.write_info(info)
    copy.replace("check", records)
    assert copy.sums is not None
    copy.append("build", made.build(made.RUNGS[0], failed="no compiler"))
    assert copy.sums is None


def test_the_command_names_the_fault_and_seals_only_what_is_valid(copy: RunDir) -> None:
    runner = CliRunner()
    good = runner.invoke(main, ["validate", str(copy.path)])
    assert (good.exit_code, good.output.count("valid: ")) == (0, 1)
    (copy.path / "sums.json").unlink()
    assert runner.invoke(main, ["validate", str(copy.path)]).exit_code == Exit.TAMPERED
    sealed = runner.invoke(main, ["validate", "--seal", str(copy.path)])
    assert (sealed.exit_code, copy.sums is not None) == (0, True)
    _edit(copy, "check", lambda r: r.update(sha256="sha-of-another"))
    bad = runner.invoke(main, ["validate", "--seal", str(copy.path)])
    assert bad.exit_code == Exit.TAMPERED
    assert f"{copy.path}/check.jsonl:1: r00_naive: no build has its sha256" in bad.output


def test_every_recorded_run_of_the_repository_is_valid() -> None:
    found: list[Validation] = [validate(run, load_ladder()) for run in rundir.recorded()]
    assert [str(fault) for validation in found for fault in validation.faults] == []


@pytest.mark.parametrize(("name", "line"), [("build.jsonl", 1), ("run.json", None), ("sums.json", None)])
def test_a_byte_that_is_no_text_is_a_fault_like_any_other(copy: RunDir, name: str, line: int | None) -> None:
    file = copy.path / name
    data = file.read_bytes()
    at = data.index(b'"', data.index(b'":')) + 3
    file.write_bytes(data[:at] + b"\xff" + data[at:])
    found = _faults(copy)
    assert [what for where, at_line, what in found if (where, at_line) == (name, line)], found
