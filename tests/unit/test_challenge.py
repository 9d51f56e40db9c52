"""The referee: its states, its verdicts, and what is left when it is killed, the disk full or the GPU gone.

The children of a GPU are scripted; the ledger, the pointer, the processes that die are real.
"""

from __future__ import annotations

import json
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from flashladder import accept, challenge, check, durable, ledger, machine, stages, worker
from flashladder.arrays import HostMemory
from flashladder.candidate import name_of
from flashladder.cli import main
from flashladder.errors import EnvironmentInvalidError, Exit, FlashladderError
from flashladder.grid import Launched
from flashladder.ladder import load_ladder
from flashladder.ledger import Champion
from flashladder.model import (
    ArmTiming,
    BlockTelemetry,
    BuildRecord,
    CellTiming,
    ChallengeVerdict,
    CheckRecord,
    State,
)
from tests.cheats import RIGHT
from tests.saboteurs import PyArm, right
from tests.unit.forked import die, forked

STATES: tuple[State, ...] = ("PROPOSED", "BUILD", "GRID", "CORRECT", "SCREEN", "MEASURE", "CONFIRM")
DEFAULT = Champion(id=load_ladder().rungs[-1].id)
TELEMETRY = BlockTelemetry(
    sm_clock_mhz=1700, memory_clock_mhz=2600, power_w=600.0, temperature_c=50, event_reasons=0, valid=True
)
FINISHED = worker.Outcome(end="finished", at=None, detail="")


def _timing(item: worker.TimingItem, blocks: int, gain: float, rng: np.random.Generator) -> CellTiming:
    """0.1 % noise; the candidate's time is the champion's over `gain`."""

    def arm(spec: str, us: float) -> ArmTiming:
        ns = us * 1e3 * np.exp(rng.normal(0, 1e-3, (blocks, 2)))
        return ArmTiming(
            arm=spec, kind="rung", status="timed", blocks=tuple(range(blocks)), ns=tuple(map(tuple, ns.tolist()))
        )

    times = {accept.CHAMPION: 1e4, accept.TWIN: 1e4, accept.CANDIDATE: 1e4 / gain}
    return CellTiming(
        cell=item.cell,
        l2=item.l2,
        seed=0,
        input_sets=1,
        warmup_s=0.2,
        telemetry=(TELEMETRY,) * blocks,
        arms=tuple(arm(spec.name, times[spec.name]) for spec in item.arms),
    )


@dataclass
class Gpu:
    """The children of a machine with a GPU."""

    gain: float = 1.05
    confirmed_gain: float | None = None
    failing: dict[type, worker.Outcome] | None = None
    wrong: str | None = None
    forged: bool = False
    """The gate in the child says pass, whatever the candidate writes."""

    def supervise(
        self, job: worker.Job, say: Callable[[worker.Message], None], limit_s: float = 120.0
    ) -> worker.Outcome:
        if (outcome := (self.failing or {}).get(type(job))) is not None:
            return outcome
        if isinstance(job, worker.BuildJob) and job.rung is not None:
            record = BuildRecord(
                rung=job.rung.id, status="built", sha256="aa", compiler="nvcc", flags=(), archs=job.archs
            )
            say(worker.BuildDone(record=record, library="x.so"))
        elif isinstance(job, worker.GridJob):
            launched = Launched(
                cell=job.case.cell, blocks=2, kernels=("k",), streams=1, config={}, plan=None, multiprocessors=132
            )
            say(worker.GridDone(record=launched))
        elif isinstance(job, worker.CheckJob):
            for item in job.items:
                say(worker.CheckDone(record=self._check(item)))
        elif isinstance(job, worker.WitnessJob):
            arm = PyArm("right", HostMemory(), right)
            for case in job.cases:
                o, lse = check.testify(arm, case, HostMemory(), job.seed)
                say(worker.WitnessDone(case=case.id, o=bytes(len(o)) if self.forged else o, lse=lse))
        elif isinstance(job, worker.TimingJob):
            self._time(job, say)
        return FINISHED

    def _check(self, item: worker.CheckItem) -> CheckRecord:
        return CheckRecord(
            arm=item.arm.name,
            sha256=item.arm.sha256,
            case=item.case.id,
            cell=item.case.cell,
            status="fail" if self.wrong else "pass",
            reason=self.wrong,
            seed=0,
        )

    def _time(self, job: worker.TimingJob, say: Callable[[worker.Message], None]) -> None:
        gain = self.gain
        if self.confirmed_gain is not None and job.seed % 7 == 5:  # of seed 0, CONFIRM is the sixth state
            gain = self.confirmed_gain
        for number, item in enumerate(job.items):
            say(worker.TimingDone(record=_timing(item, job.preset.blocks, gain, np.random.default_rng(number))))
            for arm, launches in ((accept.CHAMPION, 1), (accept.CANDIDATE, 1000)):
                say(worker.Clock(cell=item.cell, arm=None, launches=0))
                time.sleep(1e-4)
                say(worker.Clock(cell=item.cell, arm=arm, launches=launches))


Install = Callable[[Gpu], None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that an H200 is here, with these children."""
    here = machine.fingerprint()
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(machine, "gpu_arch", lambda: "sm_90a")
    monkeypatch.setattr(machine, "fingerprint", lambda: here)
    monkeypatch.setattr(challenge, "prepare", lambda _: None)
    monkeypatch.setattr("flashladder.doctor.examine", lambda: iter(()))

    def install(children: Gpu) -> None:
        monkeypatch.setattr(challenge, "supervise", children.supervise)
        monkeypatch.setattr(stages, "supervise", children.supervise)

    return install


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    return path


def _challenge(file: Path, say: Callable[[str], None] = lambda _: None, **request: object) -> ChallengeVerdict:
    full = challenge.Request(file=file, out=file.parent / "out", seed=0, **request)  # type: ignore[arg-type]
    with challenge.raised_as_environment():
        return challenge.challenge(full, say)


def _ledger(file: Path) -> ledger.Ledger:
    return ledger.read(file.parent / "out", DEFAULT)


def _pointer(file: Path) -> Champion:
    return msgspec.json.decode((file.parent / "out" / ledger.CHAMPION).read_bytes(), type=Champion)


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_a_faster_candidate_passes_every_state_and_is_the_next_champion(gpu: Install, file: Path) -> None:
    gpu(Gpu())
    verdict = _challenge(file)
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("accepted", "CONFIRM", 0), verdict.reason
    assert verdict.champion == DEFAULT.id
    assert verdict.geomean is not None
    assert verdict.geomean.low < 1.05 < verdict.geomean.high
    assert [entry.state for entry in _ledger(file).entries] == [*STATES, "ACCEPTED"]
    assert _pointer(file) == _ledger(file).champion
    assert _pointer(file).sha256 == verdict.candidate
    again = _challenge(file)
    assert again.champion == verdict.challenge


@pytest.mark.parametrize(
    ("children", "code", "state", "reason"),
    [
        (Gpu(gain=1.0), Exit.NOT_BETTER, "SCREEN", "a gain of 1.00% is excluded"),
        (Gpu(gain=0.9), Exit.NOT_BETTER, "SCREEN", "a gain of 1.00% is excluded"),
        (Gpu(confirmed_gain=1.0), Exit.NOT_BETTER, "CONFIRM", "less than 1.00% faster"),
        (Gpu(confirmed_gain=0.9), Exit.REGRESSION, "CONFIRM", "slower by 11.1"),
        (Gpu(wrong="round 1: o_max error 1, limit 0"), Exit.INCORRECT, "CORRECT", "round 1: o_max error"),
        (Gpu(forged=True), Exit.INCORRECT, "CORRECT", "judged in another process: o_max error"),
    ],
)
def test_any_other_is_reverted_and_the_champion_stays(
    gpu: Install, file: Path, children: Gpu, code: Exit, state: State, reason: str
) -> None:
    gpu(children)
    verdict = _challenge(file)
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("reverted", state, code), verdict.reason
    assert reason in (verdict.reason or "")
    assert _pointer(file) == DEFAULT
    assert _ledger(file).entries[-1].state == "REVERTED"


def test_against_a_rung_the_champion_stays(gpu: Install, file: Path) -> None:
    gpu(Gpu())
    verdict = _challenge(file, against="r13_tuned")
    assert (verdict.verdict, verdict.champion) == ("accepted", "r13_tuned")
    assert _pointer(file) == DEFAULT


def test_the_first_champion_is_the_rung_that_is_named_until_somebody_is_accepted(gpu: Install, file: Path) -> None:
    gpu(Gpu())
    assert _challenge(file, first="r13_tuned").champion == "r13_tuned"
    assert _pointer(file).id.startswith("0001-")
    file.write_text(file.read_text() + "\n// another\n")
    assert _challenge(file, first="r12_kv_split").champion.startswith("0001-")


def test_a_refusal_of_what_every_kernel_takes_is_wrong(gpu: Install, file: Path) -> None:
    class Refusing(Gpu):
        def _check(self, item: worker.CheckItem) -> CheckRecord:
            record = super()._check(item)
            return msgspec.structs.replace(record, status="unsupported", reason="not this length")

    gpu(Refusing())
    verdict = _challenge(file)
    assert verdict.exit_code == Exit.INCORRECT
    assert "it refuses the input: not this length" in (verdict.reason or "")


def test_a_champion_that_was_altered_is_not_measured_against(gpu: Install, file: Path) -> None:
    gpu(Gpu())
    _challenge(file)
    (file.parent / "out" / (_pointer(file).file or "")).write_text(RIGHT + "#")
    verdict = _challenge(file)
    assert (verdict.verdict, verdict.exit_code) == ("not timed", Exit.ENVIRONMENT)
    assert "is not the file that was accepted" in (verdict.reason or "")


# --- fault drills ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_killed_in_any_state_nothing_is_accepted_and_the_next_start_says_so(
    gpu: Install, file: Path, state: State
) -> None:
    gpu(Gpu())

    def say(line: str) -> None:
        if line.endswith(state):
            die()

    assert forked(lambda: _challenge(file, say)) == -signal.SIGKILL
    assert _ledger(file).entries[-1].state == state
    assert _ledger(file).champion == DEFAULT
    said: list[str] = []
    verdict = _challenge(file, said.append)
    assert said[0] == f"challenge 0001-mine was interrupted in {state}: it is reverted; hand the file in again"
    assert (verdict.challenge, verdict.verdict) == ("0002-mine", "accepted")
    interrupted = next(e.verdict for e in _ledger(file).entries if e.verdict is not None)
    assert (interrupted.state, interrupted.exit_code) == (state, Exit.INTERRUPTED)


def test_killed_between_ledger_and_pointer_the_acceptance_stands(
    gpu: Install, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(Gpu())
    mend = ledger.Ledger.mend

    def dying(self: ledger.Ledger) -> str | None:
        if self.entries and self.entries[-1].state == "ACCEPTED":
            die()
        return mend(self)

    def run() -> None:
        monkeypatch.setattr(ledger.Ledger, "mend", dying)
        _challenge(file)

    assert forked(run) == -signal.SIGKILL
    assert _pointer(file) == DEFAULT
    said: list[str] = []
    assert _challenge(file, said.append).champion == "0001-mine"
    assert said[0] == "champion.json did not name the ledger's champion; it names 0001-mine again"


@pytest.mark.parametrize("state", STATES)
def test_a_full_disk_ends_the_challenge_and_leaves_whole_lines(gpu: Install, file: Path, state: State) -> None:
    gpu(Gpu())

    def run() -> int:
        def say(line: str) -> None:
            if line.endswith(state):  # as if the disk took a few bytes more
                size = (file.parent / "out" / ledger.LEDGER).stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, size + 50))

        with pytest.raises(EnvironmentInvalidError, match="make room, then start again") as error:
            _challenge(file, say)
        return error.value.exit_code

    assert forked(run) == Exit.ENVIRONMENT
    left = _ledger(file)
    assert (left.faults, left.champion) == ([], DEFAULT)
    assert left.entries[-1].verdict is None
    said: list[str] = []
    assert _challenge(file, said.append).verdict == "accepted"
    assert "was interrupted in" in said[0]


def test_a_killed_referee_takes_a_kernel_that_never_ends_along(file: Path) -> None:
    told = file.parent / "pid"
    file.write_text(f"import os\nopen({str(told)!r}, 'w').write(str(os.getpid()))\nwhile True: pass\n{RIGHT}")

    def run() -> None:
        def say(line: str) -> None:
            if line.endswith("BUILD"):
                threading.Thread(target=_die_once, args=(told,)).start()

        _challenge(file, say)

    assert forked(run) == -signal.SIGKILL
    pid = int(told.read_text())
    for _ in range(100):
        if not _is_running(pid):
            break
        time.sleep(0.05)
    assert not _is_running(pid)


def _die_once(told: Path) -> None:
    while not told.exists() or not told.read_text():
        time.sleep(0.02)
    die()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_lost_gpu_is_no_verdict_on_the_candidate(gpu: Install, file: Path) -> None:
    crash = worker.Outcome(end="crash", at=None, detail="CUDA error: device lost")
    gpu(Gpu(failing={worker.TimingJob: crash, worker.ProbeJob: crash}))
    verdict = _challenge(file)
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("not timed", "SCREEN", Exit.ENVIRONMENT)
    assert verdict.reason == "the GPU is lost: CUDA error: device lost; start again when it is back"


@pytest.mark.parametrize(
    ("job", "end", "code", "state"),
    [
        (worker.GridJob, "crash", Exit.GRID, "GRID"),
        (worker.TimingJob, "crash", Exit.INCORRECT, "SCREEN"),
        (worker.TimingJob, "timeout", Exit.TIMEOUT, "SCREEN"),
        (worker.GridJob, "timeout", Exit.TIMEOUT, "GRID"),
    ],
)
def test_a_crash_or_a_hang_where_the_gpu_lives_is_the_candidates(
    gpu: Install, file: Path, job: type, end: str, code: Exit, state: State
) -> None:
    gpu(Gpu(failing={job: worker.Outcome(end=end, at=None, detail="why")}))  # type: ignore[arg-type]
    verdict = _challenge(file)
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("reverted", state, code)
    assert verdict.reason == f"{end}: why"


def _with_line(data: bytes, number: int, line: bytes) -> bytes:
    lines = data.split(b"\n")
    lines[number - 1] = line
    return b"\n".join(lines)


def test_a_line_that_cannot_be_read_is_reported_and_kept(gpu: Install, file: Path) -> None:
    gpu(Gpu(gain=1.0))
    _challenge(file)
    book = file.parent / "out" / ledger.LEDGER
    damaged = _with_line(book.read_bytes(), 2, b"\xff{half a li")
    book.write_bytes(damaged)
    said: list[str] = []
    _challenge(file, said.append)
    assert said[0].startswith("ledger.jsonl:2 cannot be read and counts for nothing: ")
    assert book.read_bytes().startswith(damaged)


def test_an_altered_verdict_counts_for_nothing(gpu: Install, file: Path) -> None:
    gpu(Gpu(gain=1.0))
    _challenge(file)
    book = file.parent / "out" / ledger.LEDGER
    mine = Champion(id="mine", file="runs/0001-mine/candidate.py", sha256="00")
    last = msgspec.structs.replace(_ledger(file).entries[-1], state="ACCEPTED", accepted=mine)
    book.write_bytes(_with_line(book.read_bytes(), len(_ledger(file).entries), msgspec.json.encode(last)))
    (file.parent / "out" / ledger.CHAMPION).write_bytes(msgspec.json.encode(mine))
    said: list[str] = []
    assert _challenge(file, said.append).champion == DEFAULT.id
    assert "its sum is another" in said[0]
    assert f"champion.json did not name the ledger's champion; it names {DEFAULT.id} again" in said


def test_a_damaged_acceptance_gives_the_champion_before_it(gpu: Install, file: Path) -> None:
    gpu(Gpu())
    _challenge(file)
    book = file.parent / "out" / ledger.LEDGER
    book.write_bytes(book.read_bytes()[:-20])  # the end of the line that accepted
    said: list[str] = []
    assert _challenge(file, said.append).champion == DEFAULT.id
    assert "cannot be read" in said[0]
    assert f"champion.json did not name the ledger's champion; it names {DEFAULT.id} again" == said[1]
    assert "was interrupted in CONFIRM" in said[2]


def test_somebody_elses_line_while_a_challenge_runs_ends_it(gpu: Install, file: Path) -> None:
    gpu(Gpu())

    def say(line: str) -> None:
        if line.endswith("GRID"):
            with (file.parent / "out" / ledger.LEDGER).open("a") as book:
                book.write('{"state":"ACCEPTED"}\n')

    with pytest.raises(EnvironmentInvalidError, match="was changed while a challenge ran"):
        _challenge(file, say)
    assert _ledger(file).champion == DEFAULT


def test_a_line_that_was_written_can_be_read_whatever_its_numbers_are(tmp_path: Path) -> None:
    verdict = ChallengeVerdict(
        verdict="reverted", state="GRID", exit_code=Exit.GRID, candidate="", champion="", seconds=1, challenge="1"
    )
    with ledger.held(tmp_path, DEFAULT) as book:
        entry = ledger.Entry(
            time=durable.now(), challenge="1", state="REVERTED", candidate="", champion="", seed=0, verdict=verdict
        )
        book.append(entry)
    left = ledger.read(tmp_path, DEFAULT)
    assert (left.faults, len(left.entries)) == ([], 1)


def test_two_challenges_cannot_hold_one_folder(tmp_path: Path) -> None:
    with (
        ledger.held(tmp_path, DEFAULT),
        pytest.raises(FlashladderError, match="another challenge runs"),
        ledger.held(tmp_path, DEFAULT),
    ):
        pass


# --- the command ----------------------------------------------------------------------------------------------------


def _invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["challenge", *map(str, arguments)])


def test_the_command_prints_one_json_object_and_the_exit_code_tells(gpu: Install, file: Path) -> None:
    gpu(Gpu(gain=1.0))
    result = _invoke(file, "--json", "--out", file.parent / "out")
    assert result.exit_code == Exit.NOT_BETTER
    printed = json.loads(result.stdout)
    assert {"verdict", "state", "reason", "ratios", "candidate", "champion", "seconds"} <= printed.keys()
    assert all({"ratio", "low", "high"} == one.keys() for one in printed["ratios"].values())
    gpu(Gpu())
    result = _invoke(file, "--out", file.parent / "out")
    assert result.exit_code == Exit.OK
    assert "accepted after CONFIRM" in result.stdout


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.cu", None, "does not exist"),
        ("a.txt", "x", "is no candidate; expected one of .cu, .py"),
        ("a.py", "x = 1", "defines no function 'forward'"),
        ("a.cu", "int main() {}", "has 0 lines FLASHLADDER_RUNG"),
    ],
)
def test_what_is_no_candidate_is_told_in_a_line_and_leaves_nothing(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    result = _invoke(tmp_path / name, "--out", tmp_path / "out")
    assert result.exit_code == Exit.USAGE
    assert message in result.stderr
    assert not list(tmp_path.glob("out/runs/*"))


def test_a_wrong_shape_or_rung_is_told_before_anything_is_written(file: Path) -> None:
    for arguments in (("--shape", "b1"), ("--against", "r99"), ("--first", "r99")):
        result = _invoke(file, "--out", file.parent / "out", *arguments)
        assert result.exit_code == Exit.USAGE
        assert not list(file.parent.glob("out/runs/*"))


@pytest.mark.parametrize("suffix", [".cu", ".py"])
def test_a_template_is_a_candidate_of_its_own_name_and_is_not_overwritten(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"idea{suffix}"
    assert _invoke("--template", path, "--out", tmp_path / "out").exit_code == 0
    assert name_of(path) == "idea"
    again = _invoke("--template", path, "--out", tmp_path / "out")
    assert again.exit_code == Exit.USAGE
    assert "exists" in again.stderr


def test_without_a_gpu_the_states_up_to_correct_run_for_real(tmp_path: Path) -> None:
    """A candidate that forgets the mask at one length: every child is a process."""
    file = tmp_path / "mine.py"
    file.write_text(RIGHT.replace("if causal:", "if causal and k.shape[2] != 65:"))
    verdict = _challenge(file, masks=("causal",))
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("reverted", "CORRECT", Exit.INCORRECT)
    assert "error" in (verdict.reason or "")


def test_a_template_whose_file_begins_with_a_digit_defines_a_name_of_c(tmp_path: Path) -> None:
    assert _invoke("--template", tmp_path / "3-x.cu", "--out", tmp_path / "out").exit_code == 0
    assert name_of(tmp_path / "3-x.cu") == "k3_x"
