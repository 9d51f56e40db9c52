"""The command line as a user meets it: help, one-line errors, exit codes, and what works without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from flashladder import ablation, diagnose, machine, paths, report, rundir, summary, tables
from flashladder.claims import load_claims
from flashladder.cli import main
from flashladder.errors import EnvironmentInvalidError, Exit
from flashladder.ladder import load_ladder, load_presets
from flashladder.model import ArmStats, Comparison
from tests.unit.synthetic import diagnosed, write_run


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_name", lambda: None)
    monkeypatch.setattr(machine, "gpu_arch", lambda: None)


@pytest.mark.parametrize("command", ["", *main.commands])
def test_help(command: str) -> None:
    result = _invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ladder", "--rung", "r9"], Exit.USAGE, "'r9' names 0 rungs; expected an id or an unambiguous prefix"),
        (["build", "--arch", "hopper"], Exit.USAGE, "no architecture 'hopper'; expected sm_NN"),
        (["ablation", "--rung", "r"], Exit.USAGE, f"'r' names {len(load_ladder().rungs)} rungs"),
        (["ablation", "--shape", "b9"], Exit.USAGE, "no shape or set 'b9'; expected one of correctness"),
        (["ablation", "--shape", "latency", "--mask", "causal", "--dtype", "bf16", "--shape", "b1h1s32d64"], 0, ""),
        (["check"], Exit.ENVIRONMENT, "no GPU here, one is needed"),
        (["eager"], Exit.ENVIRONMENT, "no GPU here, one is needed"),
        (["time"], Exit.ENVIRONMENT, "no GPU here, one is needed"),
        (["check", "--on", "cpu", "--case", "x"], Exit.USAGE, "no case 'x' under these filters; expected one such as"),
        (["check", "--case", "x"], Exit.USAGE, "--case is for '--on cpu' and '--on both'"),
        (["tune", "--judge", "h200/tune-r13", "--out", "x"], Exit.USAGE, "--judge times nothing, so --out has no use"),
        (["limits", "--shape", "b1h1s99999999999999999999d64"], Exit.USAGE, "sizes up to 16777216"),
        (["check", "--on", "cpu", "--shape", "x"], Exit.USAGE, "no case of the gate passes these filters"),
        (["report", "nope"], Exit.USAGE, "no run 'nope' under"),
        (["verify", "nope"], Exit.USAGE, "no run 'nope' under"),
        (["verify", "h200/blocking"], Exit.USAGE, "run blocking records no sums of its cubins"),
        (["tune", "--judge", "h200/blocking"], Exit.USAGE, "run blocking timed no plans; expected one that"),
        (["verify", "--rung", "r9"], Exit.USAGE, "'r9' names 0 rungs"),
        (["summary", "nope"], Exit.USAGE, "no run 'nope' under"),
    ],
)
def test_a_users_mistake_is_one_line(
    arguments: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code == 0:
        monkeypatch.setattr("flashladder.cli._without_gpu", lambda _: None)
    result = _invoke(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == (1 if code else 0)


def test_an_unknown_option_value_names_the_choices() -> None:
    result = _invoke("time", "--dtype", "fp8")
    assert result.exit_code == Exit.USAGE
    assert "'fp8' is not one of 'fp16', 'bf16'" in result.stderr


def test_filters_keep_the_cells_that_were_asked_for() -> None:
    everything = ablation.select_cells(ablation.Selection(preset="full"))
    assert set(ablation.select_cells(ablation.Selection(preset="quick"))) < set(everything)
    one = ablation.select_cells(ablation.Selection(shapes=("b2h8s512d64",), dtypes=("bf16",), masks=("causal",)))
    assert [c.id for c in one] == ["b2h8s512d64-bf16-causal"]
    headline = ablation.select_cells(ablation.Selection(preset="quick", shapes=("headline",)))
    assert len(headline) == 24
    assert {c.dtype for c in headline} == {"fp16"}
    assert set(headline.values()) == {"cold"}


def test_a_rung_is_measured_with_its_parent_and_what_the_run_holds() -> None:
    ladder = load_ladder()

    def ids(chosen: tuple[str, ...], recorded: tuple[str, ...]) -> list[str]:
        return [r.id[:3] for r in ablation.measured_rungs(ladder, ladder.select(chosen), recorded)]

    assert ids(("r05",), ()) == ["r04", "r05"]
    assert ids(("r00",), ()) == ["r00"]
    assert ids(("r05",), ("r02_grid", "r00_naive")) == ["r00", "r02", "r04", "r05"]
    assert ids((), ("gone",)) == [r.id[:3] for r in ladder.rungs]


def _repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin: bool) -> rundir.RunDir:
    """A repository root with a README and a recorded run. Figures are their words: drawing has tests of its own."""

    def words(_draw: object, _results: object, forms: Sequence[str], title: str) -> dict[str, bytes]:
        return {form: f"{form}: {title}".encode() for form in forms}

    monkeypatch.setattr("flashladder.figures.render", words)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "experiments" / "results")
    monkeypatch.setattr(paths, "PAPER", tmp_path / "paper")
    (tmp_path / "README.md").write_text(f"# x\n{report.BEGIN}\n{report.END}\n")
    (tmp_path / "uv.lock").write_text("version = 1\n")
    run = diagnosed(tmp_path / "experiments" / "results" / "h100" / "2026-full")
    (tmp_path / "paper").mkdir()
    if pin:
        (tmp_path / "paper" / "run.lock").write_text(f"{run.path.name}\n")
    return run


def test_report_writes_once_checks_and_finds_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _repository(tmp_path, monkeypatch, pin=True)
    assert _invoke("report", "--check").exit_code == Exit.REGRESSION
    assert "OPTIMIZATION_REPORT.md" in _invoke("report").output
    assert _invoke("report", "--check").exit_code == 0
    assert "(0 of" in _invoke("report").output
    page = tmp_path / "OPTIMIZATION_REPORT.md"
    page.write_text(page.read_text().replace("r05_swizzle", "r05_sw1zzle"))
    result = _invoke("report", "--check")
    assert result.exit_code == Exit.REGRESSION
    assert "OPTIMIZATION_REPORT.md differ from what run" in result.stderr


def test_another_runs_report_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _repository(tmp_path, monkeypatch, pin=False)
    assert _invoke("report", str(run.path), "--out", str(tmp_path / "there")).exit_code == 0
    assert (tmp_path / "there" / "report.md").exists()
    assert not (tmp_path / "OPTIMIZATION_REPORT.md").exists()
    assert "r05_swizzle" in _invoke("summary", str(run.path)).output
    assert '"rows"' in _invoke("summary", str(run.path), "--json").output


@pytest.mark.usefixtures("no_gpu")
def test_ablation_without_a_gpu_says_so_first_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _repository(tmp_path, monkeypatch, pin=True)
    monkeypatch.setattr("flashladder.cli.build_rungs", lambda *_: ([], {}))
    monkeypatch.setattr("flashladder.build.check_lock", lambda _: "lock compared")
    monkeypatch.setattr("flashladder.cli._check_on_cpu", lambda _: None)
    result = _invoke("ablation")
    assert result.exit_code == 0
    lines = result.output.strip().splitlines()
    assert lines[0] == lines[-1]
    assert lines[0] == (
        f"No GPU here: nothing is timed. The numbers are those recorded on {run.info.machine.gpu}, run {run.info.id}."
    )
    assert (tmp_path / "OPTIMIZATION_REPORT.md").exists()


def test_ablation_with_a_gpu_ends_with_report_card_and_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = _repository(tmp_path, monkeypatch, pin=True)
    run = diagnosed(tmp_path / "mine")
    session = ablation.Session(run, load_ladder(), (), {}, load_presets()["quick"], 0, [])
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA L4")
    monkeypatch.setattr(ablation, "open_session", lambda _: session)
    monkeypatch.setattr("flashladder.cli._measure", lambda _: None)
    result = _invoke("ablation")
    assert result.exit_code == 0, result.stderr
    assert {"report.md", "card.md", "card.json", "sums.json"} <= {file.name for file in run.path.iterdir()}
    assert f"reproduction card: {run.path / 'card.md'}: {len(load_claims())} claims" in result.output
    assert f"beside the pinned {pinned.info.id}" in (run.path / "card.md").read_text()


@pytest.mark.usefixtures("no_gpu")
def test_ablation_without_a_gpu_or_a_recorded_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "PAPER", tmp_path)
    assert ablation.recorded_statement() == "No GPU here: nothing is timed, and no recorded run is pinned."


def test_the_repositorys_generated_files_match_the_pinned_run() -> None:
    if rundir.pinned_id() is None:
        pytest.skip("no run is pinned")
    result = _invoke("report", "--check")
    assert result.exit_code == 0, result.stderr


def test_the_pinned_runs_summary_has_every_rung_and_baseline() -> None:
    if rundir.pinned_id() is None:
        pytest.skip("no run is pinned")
    rows = summary.summary(rundir.find(), load_ladder()).rows
    assert {r.id for r in load_ladder().rungs} <= {row.name for row in rows}
    assert all(row.device_us is not None for row in rows if row.status == "timed")
    assert all(row.reason for row in rows if row.status != "timed")


def test_the_module_runs_as_a_program_and_survives_a_closed_home(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path / "missing")}
    done = subprocess.run(
        [sys.executable, "-m", "flashladder", "ladder"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "r05_swizzle" in done.stdout
    assert shutil.which("flashladder") is None or done.stderr == ""


def test_a_run_of_another_machine_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA L4")
    monkeypatch.setattr("flashladder.doctor.examine", lambda: iter(()))
    result = _invoke("check", "--out", str(run.path))
    assert result.exit_code == Exit.ENVIRONMENT
    assert "give another --out" in result.stderr


def test_another_card_of_the_same_kind_resumes_and_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.write_info(msgspec.structs.replace(run.info, machine=msgspec.structs.replace(run.info.machine, gpu_digest="a")))
    here = msgspec.structs.replace(run.info.machine, gpu_digest="0123456789ab")
    for _ in range(2):
        run.write_info(ablation.resumed(run, here, "quick"))
        assert run.info.cards == ("0123456789ab",)
    run.write_info(ablation.resumed(run, run.info.machine, "quick"))
    assert run.info.cards == ("0123456789ab",)
    with pytest.raises(EnvironmentInvalidError, match="driver"):
        ablation.resumed(run, msgspec.structs.replace(here, driver="1"), "quick")


def test_a_run_that_goes_on_with_a_larger_preset_is_of_that_preset(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    here = run.info.machine
    presets = []
    for preset in ("quick", "default", "full", "quick"):
        run.write_info(ablation.resumed(run, here, preset))
        presets.append(run.info.preset)
    assert presets[-3:] == ["default", "full", "full"]


def test_a_run_names_every_commit_that_it_went_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    first = run.info.commit
    for commit in (first, "b" * 40, "c" * 40, "b" * 40):
        monkeypatch.setenv("FLASHLADDER_COMMIT", commit)
        run.write_info(ablation.resumed(run, run.info.machine, "quick"))
    assert run.info.later_commits == ("b" * 40, "c" * 40)
    rows = tables.machine(run.info).rows
    assert [value for name, value in rows if name == "continued from"] == ["b" * 40, "c" * 40]


SAMPLED_CELLS = 6


def test_the_pinned_runs_diagnosis_is_what_the_code_gives(tmp_path: Path) -> None:
    """A change of the statistics must not leave yesterday's verdicts in the pages.

    Estimates are made again in a few cells, the corrections and verdicts, which need all cells, from all estimates.
    """
    if rundir.pinned_id() is None:
        pytest.skip("no run is pinned")
    run, ladder = rundir.find(), load_ladder()
    recorded = run.diagnosis()
    comparisons = [r for r in recorded if isinstance(r, Comparison)]
    assert diagnose.decide([_undecided(c) for c in comparisons], ladder) == comparisons

    few = rundir.RunDir(tmp_path)
    few.write_info(run.info)
    few.replace("build", run.builds())
    few.replace("check", run.checks())
    few.replace("timing", run.timings()[:: len(run.timings()) // SAMPLED_CELLS])
    again = diagnose.diagnose(few, ladder)
    cells = {timing.cell for timing in few.timings()}
    mine, theirs = ([r for r in records if isinstance(r, ArmStats)] for records in (again, recorded))
    assert mine == [r for r in theirs if r.cell in cells]
    estimates = [_undecided(c) for c in again if isinstance(c, Comparison)]
    assert estimates == [_undecided(c) for c in comparisons if c.cell in cells]


def _undecided(record: Comparison) -> Comparison:
    """A comparison before its correction."""
    verdict = "insufficient samples" if record.p is None else "ambiguous"
    return msgspec.structs.replace(record, p_adjusted=None, correction="none", verdict=verdict)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("summary", 300 * "a"), "File name too long"),
        (("challenge", "--template", "/proc/x.cu"), "/proc/x.cu: "),
        (("check", "--on", "cpu", "--rung", "r00", "--out", "/proc/nope"), "/proc/nope: "),
    ],
)
def test_what_the_system_refuses_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = _invoke(*arguments)
    assert result.exit_code == Exit.ENVIRONMENT
    assert message in result.output
    assert result.output.count("\n") == 1


def test_an_emulated_check_does_not_overwrite_a_run_of_a_gpu(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = run.info
    result = _invoke("check", "--on", "cpu", "--rung", "r00", "--out", str(run.path))
    assert result.exit_code == Exit.USAGE
    assert "holds more than emulated checks (build.jsonl); give another --out" in result.output
    assert run.info == before
