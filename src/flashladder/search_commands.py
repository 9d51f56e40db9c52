"""The commands that look for a faster kernel and guard what was found: limits, loop, guard."""

from __future__ import annotations

import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from flashladder import (
    ablation,
    brief,
    challenge,
    doctor,
    durable,
    guard,
    history,
    limits_report,
    loop,
    machine,
    paths,
    rundir,
    summary,
    tables,
)
from flashladder.arms import ArmSpec
from flashladder.errors import BuildError, EnvironmentInvalidError, Exit, FlashladderError
from flashladder.ladder import gpu_called, gpu_named, load_gpus, load_ladder, load_presets, load_tuning
from flashladder.model import DTYPES, MASKS, Cell, DtypeName, Gpu, L2Mode, Mask, Shape
from flashladder.rundir import RunDir
from flashladder.stages import build_rungs
from flashladder.terminal import bar


@click.command(name="limits")
@click.option(
    "--gpu", "slug", metavar="NAME", help="As l4, a100, h100, h200; default: the one here, or the pinned run's."
)
@click.option("--shape", "shape_id", metavar="ID", help="As b8h32s2048d64, b1h32kv8s1x8192d128; any size.")
@click.option("--dtype", type=click.Choice(DTYPES), default="fp16", show_default=True, help="Element type.")
@click.option("--mask", type=click.Choice(MASKS), default="full", show_default=True, help="Mask.")
@click.option("--top", type=click.IntRange(min=1), default=12, show_default=True, help="Designs that are shown.")
@click.option("--json", "as_json", is_flag=True, help="Print everything, every design too, as one JSON object.")
def limits_command(
    slug: str | None, shape_id: str | None, dtype: DtypeName, mask: Mask, top: int, as_json: bool
) -> None:
    """From a GPU's limits back to the kernel: floors by resource, designs that fit, ranked, beside what was measured.

    Needs no GPU: limits are those of experiments/gpus.toml, measurements those of the recorded runs.
    """
    gpu = _gpu(slug)
    shape = load_ladder().turns[0][2].shape if shape_id is None else Shape.of_id(shape_id)
    if shape is None or not _is_sound(shape):
        raise FlashladderError(
            f"no shape {shape_id!r}; expected bBhHsSdD as b8h32s2048d64, with kvN after h and xN after s where K and V "
            f"have other heads or rows, heads a multiple of kv's, sizes up to {MAX_SIZE}, and a head_dim of 64 or 128"
        )
    cell = Cell(shape=shape, dtype=dtype, causal=mask == "causal")
    found = limits_report.limits_of(cell, gpu, limits_report.runs_to_look_in())
    click.echo(summary.to_json(found) if as_json else limits_report.text(found, top))


MAX_SIZE = 1 << 24
"""Of a batch, heads and rows: the tiles of a problem are counted one by one."""


def _is_sound(shape: Shape) -> bool:
    sizes = (shape.batch, shape.heads_q, shape.heads_kv, shape.seq_q, shape.seq_k)
    fits = 0 < min(sizes) <= max(sizes) <= MAX_SIZE
    return fits and shape.heads_q % shape.heads_kv == 0 and shape.head_dim in (64, 128)


def _gpu(slug: str | None) -> Gpu:
    if slug is not None:
        return gpu_called(slug)
    name = machine.gpu_name()
    if name is None and ablation.pinned_run() is not None:
        name = rundir.find().info.machine.gpu
    found = gpu_named(name) if name is not None else None
    if found is None:
        known = ", ".join(gpu.slug for gpu in load_gpus())
        raise FlashladderError(f"experiments/gpus.toml has no limits of {name or 'a GPU here'}; expected --gpu {known}")
    return found


@click.command(name="loop", context_settings={"ignore_unknown_options": True})
@click.argument("proposer", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to fill or resume."
)
@click.option("--first", "first_rung", metavar="RUNG", help="Champion to begin with; default: the last rung.")
@click.option("--iterations", type=click.IntRange(min=1), default=100, show_default=True, help="Attempts.")
@click.option("--minutes", type=click.FloatRange(min=0), help="Wall time.")
@click.option("--gpu-minutes", type=click.FloatRange(min=0), help="Time of challenges on the GPU.")
@click.option("--money", type=click.FloatRange(min=0), help="What the machine may cost; needs --rate.")
@click.option("--rate", type=click.FloatRange(min=0), help="What it costs an hour.")
@click.option("--patience", type=click.IntRange(min=1), default=2, show_default=True, help="Non-accepts in a row.")
@click.option("--build-failures", type=click.IntRange(min=1), default=3, show_default=True, help="In all.")
@click.option("--roof", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Share of the roof.")
@click.option("--shape", "shapes", multiple=True, metavar="SET|ID", help="Challenge in these alone; repeatable.")
@click.option("--limit", type=float, default=900.0, show_default=True, help="Seconds for one challenge.")
@click.option("--proposer-limit", type=float, default=600.0, show_default=True, help="Seconds for one proposal.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed that the proposer is given.")
@click.option("--referee", hidden=True, help="A stand-in for 'flashladder challenge'.")
def loop_command(
    proposer: tuple[str, ...],
    out: Path,
    first_rung: str | None,
    iterations: int,
    minutes: float | None,
    gpu_minutes: float | None,
    money: float | None,
    rate: float | None,
    patience: int,
    build_failures: int,
    roof: float,
    shapes: tuple[str, ...],
    limit: float,
    proposer_limit: float,
    seed: int,
    referee: str | None,
) -> None:
    """Let PROPOSER hand in candidates to 'flashladder challenge', one after the other, until a criterion ends it.

    PROPOSER is an executable and its arguments, or 'search', which searches the declared parameters with Optuna
    (uv sync --group search). It reads the champion, its diagnosis and the ledger on stdin as JSON, writes the file that
    "candidate" names, and ends: 0 proposed, 3 nothing more. Exit code 40 when a criterion ended the loop.
    """
    if money is not None and not rate:
        raise FlashladderError("--money needs --rate: what the machine costs an hour")
    first = challenge.default_champion(load_ladder(), machine.gpu_arch(), first_rung).id
    diagnosis = _diagnosis(first)
    begun = loop.Loop(
        folder=loop.Folder(out),
        proposer=_proposer(proposer),
        budget=loop.Budget(
            iterations=iterations,
            wall_s=None if minutes is None else 60 * minutes,
            gpu_s=None if gpu_minutes is None else 60 * gpu_minutes,
            money=money,
            rate=rate or 0.0,
            patience=patience,
            build_failures=build_failures,
            roof=roof,
        ),
        first=loop.Champion(id=first, file=str(paths.ROOT / load_ladder()[first].source)),
        diagnosis=diagnosis,
        seed=seed,
        on_gpu=machine.gpu_name() is not None,
        referee_options=("--first", first, *(word for shape in shapes for word in ("--shape", shape))),
        referee=loop.REFEREE if referee is None else (referee,),
        proposer_limit_s=proposer_limit,
        referee_limit_s=limit,
    )
    if machine.gpu_name() is None:
        click.echo("No GPU here: no candidate can be timed, so none is accepted; each counts as a non-accept.")
    progress = begun.run(click.echo)
    attempts = begun.folder.attempts()
    file = out / "history.svg"
    durable.replace(file, history.plot(attempts))
    click.echo(
        f"{progress.attempts} attempts, {progress.accepted} accepted, gain {progress.gain:.4f}; "
        f"{progress.wall_s / 60:.1f} minutes, of them {progress.gpu_s / 60:.1f} on the GPU, money {progress.money:.2f}"
    )
    click.echo(f"champion: {out / loop.CHAMPION}; ledger: {out / loop.LEDGER}; history: {file}")
    click.echo(f"stopped: {progress.stopped}")
    if progress.stopped != loop.NOTHING_LEFT:
        sys.exit(Exit.KILLED)


def _proposer(named: tuple[str, ...]) -> tuple[str, ...]:
    if named[0] == "search":
        arch = machine.gpu_arch()
        if arch is not None and arch != load_ladder()[load_tuning().rung].needed_arch:
            raise FlashladderError(f"'search' searches the tiles of {load_tuning().rung}; the GPU here is {arch}")
        return (*loop.SEARCH, *named[1:])
    found = shutil.which(named[0])
    if found is None:
        raise FlashladderError(f"{named[0]} is no executable; expected one, or 'search'")
    return (str(Path(found).absolute()), *named[1:])  # a link, as of a virtual environment's python, stays one


def _diagnosis(rung: str) -> loop.Diagnosis | None:
    """Of a rung, in a run that timed it: on a GPU like this one, else on another, whose roof says nothing here. Of
    several it is the pinned one, or the last.
    """
    name, ladder = machine.gpu_name(), load_ladder()

    def worth(run: RunDir) -> tuple[bool, bool, str]:
        return run.info.machine.gpu == name, summary.is_pinned(run), run.info.date

    for run in sorted(rundir.recorded(), key=worth, reverse=True):
        if any(build.rung == rung for build in run.builds()) and run.diagnosis():
            found = brief.diagnosis_of(run, ladder, rung)
            if found is not None:
                return found if name in (None, found.gpu) else msgspec.structs.replace(found, roof_share=None)
    return None


@click.command(name="guard")
@click.argument("base", default="HEAD")
@click.option("--rung", "rungs", multiple=True, metavar="ID", help="Only this rung (id or prefix); repeatable.")
@click.option("--arch", "archs", multiple=True, metavar="sm_NN", help="Architecture; default: the GPU present, or all.")
@click.option("--shape", "shapes", multiple=True, metavar="SET|ID", help="Time in these; default: the ladder's.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Run directory to fill or resume.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random inputs and orders.")
@click.option("--update-baseline", is_flag=True, help="Measure and store the times of the present tree instead.")
@click.option("--why", help="Why the stored times are replaced; kept in the log.")
def guard_command(
    base: str,
    rungs: tuple[str, ...],
    archs: tuple[str, ...],
    shapes: tuple[str, ...],
    out: Path | None,
    seed: int,
    update_baseline: bool,
    why: str | None,
) -> None:
    """Rebuild the kernels of commit BASE and time the present ones against them, in pairs and in one process.

    Exit code 11 when one is slower, its whole interval above 2 %, or slower than its stored time by more than sessions
    differ. Without a GPU the machine code is compared and nothing is timed.
    """
    if update_baseline != (why is not None):
        raise FlashladderError("--update-baseline and --why TEXT go together: a stored time is replaced for a reason")
    if why is not None:
        _update_baseline(why, shapes, out, seed)
        return
    commit, ladder = guard.commit_of(base), load_ladder()
    chosen, archs = ladder.select(rungs), ablation.target_archs(archs)
    here = guard.digests_here(chosen, archs)
    with guard.checkout(commit) as root:
        gone = () if rungs else sorted(guard.declared_in(root) - {rung.id for rung in ladder.rungs})
        click.echo(f"base {commit[:12]}: building what differs", err=True)
        theirs = guard.build_base(root, guard.BaseJob(rungs=chosen, archs=archs, digests=here))
    same = {name: built.digest for name, built in theirs.items() if built.digest is not None}
    with bar("build", "step") as progress:
        ours = guard.build_here(guard.BaseJob(rungs=chosen, archs=archs, digests=same), progress)
    found = guard.changes(ours, theirs, gone)
    differing = guard.change_table(found)
    click.echo(f"base {commit[:12]}: {len(found) - len(differing.rows)} of {len(found)} rungs are the same")
    if differing.rows:
        click.echo(tables.terminal(differing))
    if failed := [c for c in found if c.kind == "does not build"]:
        raise BuildError(f"{failed[0].rung} {failed[0].reason}")
    if machine.gpu_name() is None:
        click.echo("No GPU here: machine code was compared, nothing was timed.")
        return
    arms = guard.specs(chosen, found, ours, theirs)
    _time_against(commit, arms, [c.rung for c in found if c.is_timed], shapes, out, seed)


def _time_against(
    commit: str, arms: list[ArmSpec], timed: list[str], shapes: tuple[str, ...], out: Path | None, seed: int
) -> None:
    """Time what differs and what is stored; exit with the code of the worst that was found."""
    gpu = _gpu(None)
    stored = guard.read_baseline(gpu.slug)
    if stored is not None:
        if (fault := guard.unlogged(gpu.slug)) is not None:
            raise FlashladderError(fault)
        names = {arm.name for arm in arms}
        arms += [spec for spec in _present_arms() if spec.name not in names]
    if not arms:
        click.echo("Nothing differs and no times are stored for this GPU: nothing was timed.")
        return
    run, cells = _guard_run(out, shapes, commit[:12]), _guard_cells(shapes)
    with bar("guard", "step") as progress:
        guard.measure(run, arms, cells, load_presets()["default"], seed, progress)
    timings = [timing for timing in run.timings() if timing.cell in cells]  # others may be of earlier binaries
    slowdowns = guard.slowdowns(timings, run.checks(), timed)
    if slowdowns:
        click.echo(tables.terminal(guard.slowdown_table(slowdowns)))
    trips = [] if stored is None else guard.trips(stored, run.info.machine, timings)
    if trips:
        click.echo(tables.terminal(guard.trip_table(trips)))
    click.echo(f"records: {run.path}")
    undecided = [s for s in slowdowns if s.verdict in ("not timed", "insufficient samples")]
    if any(s.verdict == "regression" for s in slowdowns):
        sys.exit(Exit.REGRESSION)
    if undecided:
        raise EnvironmentInvalidError(
            f"{undecided[0].rung} in {undecided[0].cell} was not compared: {undecided[0].reason}"
        )
    if stored is not None and any(t.verdict == "slower" for t in trips):
        click.echo(f"slower than stored: compare with that commit, 'flashladder guard {stored.commit[:12]}'")
        sys.exit(Exit.REGRESSION)


def _present_arms() -> list[ArmSpec]:
    """Of the rungs whose times are stored."""
    rungs = guard.guarded(load_ladder(), machine.gpu_arch())
    with bar("build", "step") as progress:
        records, specs = build_rungs(None, rungs, ablation.target_archs(()), progress)
    ablation.raise_on_build_faults(rungs, records)
    return list(specs.values())


def _guard_cells(shapes: tuple[str, ...]) -> dict[Cell, L2Mode]:
    ladder = load_ladder()
    named = shapes or tuple(dict.fromkeys(leg.cell.shape.id for leg in ladder.legs))
    return ablation.select_cells(ablation.Selection(shapes=named, dtypes=(ladder.reference.dtype,)))


def _guard_run(out: Path | None, shapes: tuple[str, ...], name: str) -> RunDir:
    """A run directory of this machine. Raises EnvironmentInvalidError when it cannot measure."""
    _guard_cells(shapes)  # a wrong filter is an error before anything is built
    if faults := [f for f in doctor.examine() if f.level == "fault"]:
        raise EnvironmentInvalidError("; ".join(f"{f.name}: {f.text}" for f in faults))
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S")
    run, here = RunDir(out or paths.BUILD / "guard" / f"{now}-{name}"), machine.fingerprint()
    known = (run.path / rundir.INFO).exists()
    run.write_info(ablation.resumed(run, here, "default") if known else ablation.new_info(run, "default", here))
    return run


def _update_baseline(why: str, shapes: tuple[str, ...], out: Path | None, seed: int) -> None:
    """Time the last rungs in several sessions, each in a process of its own, and store the medians."""
    if machine.gpu_name() is None:
        raise EnvironmentInvalidError("no GPU here: a baseline is measured; nothing was stored")
    commit, dirty = machine.git_state()
    if dirty:
        raise FlashladderError("tracked files differ from the commit; commit first: a baseline names what it is of")
    gpu, cells, sessions = _gpu(None), _guard_cells(shapes), list[RunDir]()
    arms = _present_arms()
    first = _guard_run(out, shapes, "baseline")
    for session in range(guard.SESSIONS):
        run = RunDir(first.path / f"session{session}")
        with bar(f"session {session + 1} of {guard.SESSIONS}", "step") as progress:
            guard.measure(run, arms, cells, load_presets()["default"], seed, progress)
        sessions.append(run)
    made = guard.baseline_of(sessions, first.info.machine, commit, first.info.date)
    file = guard.write_baseline(made, gpu.slug, why)
    click.echo(f"wrote {file} and its line in {file.parent / guard.LOG}; commit both. Records: {first.path}")


COMMANDS = (limits_command, loop_command, guard_command)
