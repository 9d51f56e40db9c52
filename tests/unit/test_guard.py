"""The regression guard: what differs from a base, what counts as slower, and which stored times are refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from flashladder import doctor, guard, machine, paths, search_commands, stats
from flashladder.arms import ArmSpec
from flashladder.build import ALL_ARCHS
from flashladder.cli import main
from flashladder.errors import EnvironmentInvalidError, Exit, FlashladderError
from flashladder.guard import BASE, BaseJob, Built
from flashladder.ladder import load_ladder
from flashladder.model import ArmTiming, CellTiming, CheckRecord
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

RUNG = load_ladder().rungs[0]
BLOCKS = 50


def _built(
    digest: str | None, sha256: str = "a", cubins: dict[str, str] | None = None, failed: str | None = None
) -> Built:
    if digest is None:
        return Built(digest=None)
    sums = {"sm_80": "x", "sm_90a": "y"} if cubins is None else cubins
    record = msgspec.structs.replace(made.build(RUNG, failed=failed), sha256=sha256, cubins=sums)
    return Built(digest=digest, library="x.so", record=record)


def _timing(
    us: dict[str, float], noise: float = 0.002, blocks: int = BLOCKS, seed: int = 0, mhz: int = 1900
) -> CellTiming:
    rng = np.random.default_rng(seed)
    telemetry = msgspec.structs.replace(made.telemetry(), sm_clock_mhz=mhz)
    arms = tuple(
        ArmTiming(
            arm=name,
            kind="rung",
            status="timed",
            sha256=name,
            blocks=tuple(range(blocks)),
            ns=tuple((float(a), float(b)) for a, b in 1e3 * t * np.exp(noise * rng.standard_normal((blocks, 2)))),
        )
        for name, t in us.items()
    )
    return msgspec.structs.replace(made.timing(made.REFERENCE), arms=arms, telemetry=(telemetry,) * blocks)


def _checks(*names: str) -> list[CheckRecord]:
    one = CheckRecord(arm="", sha256=None, case="suite", cell=made.REFERENCE, status="pass", seed=0)
    return [msgspec.structs.replace(one, arm=name, sha256=name) for name in names]


# --- what differs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "kind", "archs"),
    [
        (_built("1"), _built("1"), "same sources", ()),
        (_built("1"), _built("2"), "same library", ()),
        (_built("1", "a"), _built("2", "b"), "same machine code", ()),
        (_built("1", "a"), _built("2", "b", {"sm_80": "x", "sm_90a": "z"}), "differs", ("sm_90a",)),
        (_built("1", "a"), _built("2", "b", {"sm_80": "x"}), "differs", ("sm_90a",)),
        (_built("1", "a"), _built("2", "b", {}), "differs", ()),
        (_built("1"), _built(None), "new", ()),
        (_built("1", failed="no"), _built("2"), "does not build", ()),
    ],
)
def test_a_rung_is_what_it_was_or_says_where_it_differs(
    here: Built, there: Built, kind: str, archs: tuple[str, ...]
) -> None:
    (found,) = guard.changes({RUNG.id: here}, {RUNG.id: there})
    assert (found.kind, found.archs) == (kind, archs)
    arms = guard.specs([RUNG], [found], {RUNG.id: here}, {RUNG.id: there})
    assert [a.name for a in arms] == ([RUNG.id, BASE + RUNG.id] if kind in ("differs", "same machine code") else [])


def test_a_rung_that_only_the_base_has_is_named() -> None:
    assert [(c.rung, c.kind) for c in guard.changes({}, {}, ["r99"])] == [("r99", "gone")]


def test_the_checkout_is_the_commits_and_leaves_nothing_behind() -> None:
    commit = guard.commit_of("HEAD")
    with guard.checkout(commit) as root:
        assert guard.declared_in(root) == {rung.id for rung in load_ladder().rungs}
        kept = subprocess.run(["git", "show", f"HEAD:{RUNG.source}"], cwd=paths.ROOT, capture_output=True).stdout
        assert (root / RUNG.source).read_bytes() == kept
        assert (root / "build").resolve() == paths.BUILD.resolve()
    assert not root.exists()
    assert paths.BUILD.is_dir()
    with pytest.raises(FlashladderError, match="no commit 'nowhere'"):
        guard.commit_of("nowhere")


def test_a_base_is_built_from_its_own_tree_and_a_broken_one_says_what_the_compiler_said(tmp_path: Path) -> None:
    shutil.copytree(paths.KERNEL, tmp_path / "kernel")
    (tmp_path / "build").symlink_to(paths.BUILD)
    (tmp_path / RUNG.source).write_text("#error of the base\n")
    (tmp_path / load_ladder().rungs[1].source).unlink()
    rungs = load_ladder().rungs[:3]
    digests = guard.digests_here(rungs, ALL_ARCHS)
    base = guard.build_base(tmp_path, BaseJob(rungs=rungs, archs=ALL_ARCHS, digests=digests))
    here = {rung.id: Built(digest=digests[rung.id], record=made.build(rung)) for rung in rungs}
    first, second, third = guard.changes(here, base)
    assert (first.kind, second.kind, third.kind) == ("does not build", "new", "same sources")
    assert "in the base" in (first.reason or "")
    assert "of the base" in (first.reason or "")


# --- what is slower -------------------------------------------------------------------------------------------------


def _slowdown(timing: CellTiming, checks: list[CheckRecord] | None = None) -> guard.Slowdown:
    (found,) = guard.slowdowns([timing], _checks("r", BASE + "r") if checks is None else checks, ["r"])
    return found


@pytest.mark.parametrize(("factor", "verdict"), [(1.05, "regression"), (1.01, "no regression"), (0.9, "no regression")])
def test_a_slowdown_counts_above_two_per_cent_alone(factor: float, verdict: str) -> None:
    found = _slowdown(_timing({"r": 100 * factor, BASE + "r": 100.0}))
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(factor, rel=2e-3)
    assert found.ci is not None
    assert found.ci[0] < factor < found.ci[1]


def test_a_wide_interval_that_reaches_below_the_limit_is_no_regression() -> None:
    assert _slowdown(_timing({"r": 102.5, BASE + "r": 100.0}, noise=0.05)).verdict == "no regression"


def test_equal_kernels_never_alarm_and_a_slow_one_always_does() -> None:
    equal = [_slowdown(_timing({"r": 100.0, BASE + "r": 100.0}, noise=0.01, seed=seed)) for seed in range(100)]
    slow = [_slowdown(_timing({"r": 104.0, BASE + "r": 100.0}, noise=0.01, seed=seed)) for seed in range(100)]
    assert {s.verdict for s in equal} == {"no regression"}
    assert {s.verdict for s in slow} == {"regression"}


def test_what_was_not_compared_says_why() -> None:
    timing = _timing({"r": 100.0, BASE + "r": 100.0})
    assert _slowdown(_timing({"r": 100.0})).reason == "in the base: no record"
    assert _slowdown(timing, _checks(BASE + "r")).reason == "here: not checked"
    few = _slowdown(_timing({"r": 100.0, BASE + "r": 100.0}, blocks=9))
    assert (few.verdict, few.reason) == ("insufficient samples", "9 valid blocks, expected 10")
    invalid = msgspec.structs.replace(timing.telemetry[0], valid=False)
    hot = msgspec.structs.replace(timing, telemetry=(invalid,) * BLOCKS)
    assert _slowdown(hot).verdict == "insufficient samples"
    assert _slowdown(hot).reason == (
        "0 valid blocks, expected 10; end what else runs on the GPU, or let it cool, and measure again"
    )


# --- the tripwire ---------------------------------------------------------------------------------------------------

HERE = made.MACHINE


def _sessions(tmp_path: Path, times: list[float], mhz: int = 1900) -> list[RunDir]:
    runs = []
    for number, us in enumerate(times):
        run = RunDir(tmp_path / f"session{number}")
        run.append("timing", _timing({"r": us}, seed=number, mhz=mhz))
        runs.append(run)
    return runs


def _baseline(tmp_path: Path, times: list[float], mhz: int = 1900) -> guard.Baseline:
    return guard.baseline_of(_sessions(tmp_path, times, mhz), HERE, "abc", "2026-01-01")


def test_the_band_is_three_per_cent_or_what_sessions_differ_by(tmp_path: Path) -> None:
    steady = _baseline(tmp_path / "a", [100.0, 100.1, 99.9, 100.0, 100.0]).arms["r"][made.REFERENCE.id]
    restless = _baseline(tmp_path / "b", [100.0, 103.0, 97.0, 101.0, 99.0]).arms["r"][made.REFERENCE.id]
    assert steady.band == 0.03
    assert restless.band == pytest.approx(3 * 2**0.5 * 0.0224, rel=0.05)
    assert steady.mean_us == pytest.approx(100.0, rel=1e-3)


@pytest.mark.parametrize(("us", "verdict"), [(100.0, "within the band"), (104.0, "slower"), (95.0, "faster")])
def test_a_time_outside_the_band_trips(tmp_path: Path, us: float, verdict: str) -> None:
    (trip,) = guard.trips(_baseline(tmp_path, [100.0] * 5), HERE, [_timing({"r": us, "other": 1.0})])
    assert trip.verdict == verdict
    assert trip.ratio == pytest.approx(us / 100, rel=2e-3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpu_digest", "0" * 12), ("driver", "1.2.3"), ("max_sm_clock_mhz", 1000), ("power_limit_w", 1.0)],
)
def test_a_baseline_of_another_machine_driver_or_clock_is_refused_with_the_reason(
    tmp_path: Path, field: str, value: object
) -> None:
    there = msgspec.structs.replace(HERE, **{field: value})
    baseline = msgspec.structs.replace(_baseline(tmp_path, [100.0] * 5), machine=there)
    (trip,) = guard.trips(baseline, HERE, [_timing({"r": 200.0})])
    assert (trip.verdict, trip.ratio) == ("refused", None)
    assert trip.reason == f"made elsewhere: {field} {value}, here {getattr(HERE, field)}"


def test_another_clock_during_the_measurement_is_refused_too(tmp_path: Path) -> None:
    (trip,) = guard.trips(_baseline(tmp_path, [100.0] * 5), HERE, [_timing({"r": 130.0}, mhz=1500)])
    assert (trip.verdict, trip.reason) == ("refused", "the SM clock was 1900 MHz, here 1500")


def test_a_baseline_needs_every_arm_in_every_session(tmp_path: Path) -> None:
    runs = _sessions(tmp_path, [100.0] * 5)
    runs[0].append("timing", _timing({"r": 100.0, "extra": 50.0}))
    with pytest.raises(EnvironmentInvalidError, match=r"extra in .* was timed in 1 of 5 sessions"):
        guard.baseline_of(runs, HERE, "abc", "2026-01-01")
    with pytest.raises(EnvironmentInvalidError, match="nothing was timed"):
        guard.baseline_of([], HERE, "abc", "2026-01-01")


def test_every_update_is_logged_and_an_edit_by_hand_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BASELINES", tmp_path / "baselines")
    baseline = _baseline(tmp_path, [100.0] * 5)
    assert guard.read_baseline("h200") is None
    for why in ("the first one", "a new driver"):
        file = guard.write_baseline(baseline, "h200", why)
    assert guard.read_baseline("h200") == baseline
    assert guard.unlogged("h200") is None
    lines = (tmp_path / "baselines/log.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=guard.LogEntry).why for line in lines] == ["the first one", "a new driver"]
    file.write_bytes(file.read_bytes().replace(b"100.", b"900.", 1))
    assert "is not what log.jsonl names; only 'flashladder guard --update-baseline" in (guard.unlogged("h200") or "")
    file.write_text("{}")
    with pytest.raises(FlashladderError, match=r"h200.json: no valid baseline: .*; restore it from git"):
        guard.read_baseline("h200")


def test_every_stored_baseline_is_the_one_that_the_log_names() -> None:
    for file in guard.BASELINES.glob("*.json"):
        assert guard.read_baseline(file.stem) is not None
        assert guard.unlogged(file.stem) is None


def test_the_last_portable_and_the_last_hopper_rung_are_stored() -> None:
    ladder = load_ladder()
    assert [r.id for r in guard.guarded(ladder, "sm_90a")] == ["r13_tuned", ladder.rungs[-1].id]
    assert [r.id for r in guard.guarded(ladder, "sm_80")] == ["r13_tuned"]


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_name", lambda: None)
    monkeypatch.setattr(machine, "gpu_arch", lambda: None)


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["guard", *arguments], catch_exceptions=False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_machine_code_is_compared_and_that_is_said() -> None:
    result = _invoke("HEAD", "--rung", RUNG.id)
    assert result.exit_code == Exit.OK
    assert "No GPU here: machine code was compared, nothing was timed." in result.output


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """A machine with a GPU where one rung differs from the base: what the guard finds when it times these (us)."""
    times: dict[str, float] = {}
    here, there = _built("1", "a"), _built("2", "b", {"sm_90a": "z"})

    def measure(run: RunDir, arms: list[ArmSpec], *_: object) -> None:
        run.append("timing", _timing({arm.name: times[arm.name] for arm in arms if arm.name in times}))
        for check in _checks(*times):
            run.append("check", check)

    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(machine, "gpu_arch", lambda: "sm_90a")
    monkeypatch.setattr(machine, "fingerprint", lambda: HERE)
    monkeypatch.setattr(doctor, "examine", lambda: [])
    monkeypatch.setattr(guard, "measure", measure)
    monkeypatch.setattr(guard, "build_base", lambda *_: {RUNG.id: there})
    monkeypatch.setattr(guard, "build_here", lambda *_: {RUNG.id: here})
    monkeypatch.setattr(guard, "digests_here", lambda *_: {})
    monkeypatch.setattr(guard, "BASELINES", tmp_path / "baselines")
    return times


@pytest.mark.parametrize(
    ("present", "code", "text"),
    [
        (105.0, Exit.REGRESSION, "regression"),
        (100.5, Exit.OK, "no regression"),
        (None, Exit.ENVIRONMENT, "was not compared: here: no record"),
    ],
)
def test_with_a_gpu_the_exit_code_is_the_verdict(
    measured: dict[str, float], tmp_path: Path, present: float | None, code: Exit, text: str
) -> None:
    measured[BASE + RUNG.id] = 100.0
    if present is not None:
        measured[RUNG.id] = present
    result = _invoke("HEAD", "--rung", RUNG.id, "--out", str(tmp_path / "run"))
    assert result.exit_code == code, result.output
    assert text in result.output
    assert "differs" in result.output


@pytest.mark.parametrize(("stored", "code"), [(100.0, Exit.OK), (90.0, Exit.REGRESSION)])
def test_a_tripped_wire_fails_and_names_the_commit_to_compare_with(
    measured: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: float, code: Exit
) -> None:
    measured.update({RUNG.id: 100.0, BASE + RUNG.id: 100.0})
    monkeypatch.setattr(search_commands, "_present_arms", lambda: [])
    runs = [RunDir(tmp_path / f"session{n}") for n in range(guard.SESSIONS)]
    for run in runs:
        run.append("timing", _timing({RUNG.id: stored}))
    guard.write_baseline(guard.baseline_of(runs, HERE, "abcdef0123456789", "2026-01-01"), "h200", "first")
    result = _invoke("HEAD", "--rung", RUNG.id, "--out", str(tmp_path / "run"))
    assert result.exit_code == code, result.output
    assert ("compare with that commit, 'flashladder guard abcdef012345'" in result.output) == (code != Exit.OK)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere",), Exit.USAGE, "no commit 'nowhere' in"),
        (("--update-baseline",), Exit.USAGE, "--update-baseline and --why TEXT go together"),
        (("--why", "x"), Exit.USAGE, "--update-baseline and --why TEXT go together"),
        (
            ("--update-baseline", "--why", "x"),
            Exit.ENVIRONMENT,
            "no GPU here: a baseline is measured; nothing was stored",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], code: Exit, message: str) -> None:
    result = _invoke(*arguments)
    assert result.exit_code == code
    assert result.output.startswith(f"flashladder: {message}")
    assert result.output.count("\n") == 1


def test_blocks_that_are_not_valid_count_for_nothing(tmp_path: Path) -> None:
    baseline, timing = _baseline(tmp_path, [100.0] * 5), _timing({"r": 100.0})
    (arm,) = timing.arms
    bad = msgspec.structs.replace(timing.telemetry[0], valid=False, sm_clock_mhz=900)

    def spoiled(count: int) -> CellTiming:
        """The first blocks are slow, at a low clock, and not valid."""
        ns = tuple((3 * a, 3 * b) if n < count else (a, b) for n, (a, b) in enumerate(arm.ns))
        telemetry = tuple(bad if n < count else t for n, t in enumerate(timing.telemetry))
        return msgspec.structs.replace(timing, arms=(msgspec.structs.replace(arm, ns=ns),), telemetry=telemetry)

    most = BLOCKS - stats.MIN_QUADS
    assert most > 0
    (trip,) = guard.trips(baseline, HERE, [spoiled(most)])
    assert trip.verdict == "within the band"
    (trip,) = guard.trips(baseline, HERE, [spoiled(most + 1)])
    assert (trip.verdict, trip.reason) == ("refused", f"fewer than {stats.MIN_QUADS} valid blocks")
