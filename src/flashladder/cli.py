"""The command line. Each command is one stage over a run directory; `ablation` is all of them."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from tabulate import tabulate

from flashladder import (
    __version__,
    ablation,
    agreement,
    blocking,
    card,
    challenge_cli,
    claims,
    doctor,
    eager,
    eager_timing,
    emulation,
    machine,
    profiling,
    rundir,
    summary,
    tables,
    tune,
    validate,
)
from flashladder import build as building
from flashladder import verify as verifying
from flashladder.emulator.device import SCHEDULES, Options, Schedule
from flashladder.errors import BuildError, Exit, FlashladderError
from flashladder.ladder import NO_LADDER, load_ladder, load_presets, load_tuning
from flashladder.model import DTYPES, MASKS, MetricSet, Prediction, Rung, Tuning
from flashladder.search_commands import COMMANDS as SEARCH_COMMANDS
from flashladder.stages import build_rungs
from flashladder.terminal import bar as _bar

F = TypeVar("F", bound=Callable[..., Any])


class _Commands(click.Group):
    """Commands in the order of the data flow; a user's mistake is one line and its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlashladderError as error:
            click.echo(f"flashladder: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read the output has left, which click ends quietly
            what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
            click.echo(
                f"flashladder: {what}; see that the path is right, that it may be written and has room", err=True
            )
            ctx.exit(Exit.ENVIRONMENT)
        except KeyboardInterrupt:
            click.echo("flashladder: interrupted; the same command goes on where this one stopped", err=True)
            ctx.exit(Exit.INTERRUPTED)


def _rung_filter(command: F) -> F:
    option = click.option(
        "--rung", "rungs", multiple=True, metavar="ID", help="Only this rung (id or prefix); repeatable."
    )
    return option(command)


def _variants_option(command: F) -> F:
    return click.option("--variants", is_flag=True, help="The leave-one-out variants too.")(command)


def _rungs(names: tuple[str, ...], variants: bool) -> tuple[Rung, ...]:
    """The rungs that are named, or all of the ladder; with `variants` those as well where none is named."""
    ladder = load_ladder()
    return ladder.select(names) + (ladder.variants if variants and not names else ())


def _cell_filters(command: F) -> F:
    """--shape, --dtype, --mask."""
    options = (
        click.option(
            "--shape", "shapes", multiple=True, metavar="SET|ID", help="Only this set or shape, as b2h8s512d64."
        ),
        click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Only this element type."),
        click.option("--mask", "masks", multiple=True, type=click.Choice(MASKS), help="Only this mask."),
    )
    return functools.reduce(lambda f, option: option(f), reversed(options), command)


def _peer_filter(command: F) -> F:
    return click.option("--peer", "peers", multiple=True, metavar="NAME", help="Only this peer; repeatable.")(command)


def _run_options(command: F) -> F:
    """--out, --seed."""
    options = (
        click.option(
            "--out", type=click.Path(path_type=Path, file_okay=False), help="Run directory to fill or resume."
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random inputs and orders."),
    )
    return functools.reduce(lambda f, option: option(f), reversed(options), command)


def _gpu_options(command: F) -> F:
    """Options of the stages that need a GPU."""
    preset = click.option(
        "--preset",
        type=click.Choice([name for name, p in load_presets().items() if p.sets and name not in NO_LADDER]),
        default="default",
        show_default=True,
        help="Sweep size.",
    )
    return preset(_run_options(command))


def _selection(kwargs: dict[str, Any]) -> ablation.Selection:
    return ablation.Selection(
        preset=kwargs["preset"],
        rungs=kwargs.get("rungs", ()),
        peers=kwargs.get("peers", ()),
        shapes=kwargs["shapes"],
        dtypes=kwargs["dtypes"],
        masks=kwargs["masks"],
        out=kwargs["out"],
        seed=kwargs["seed"],
    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """FlashAttention's forward pass, from a naive CUDA kernel to the fastest one, one measured change at a time."""


@main.command()
@_rung_filter
def ladder(rungs: tuple[str, ...]) -> None:
    """Show the rungs: what each changes and what was predicted."""
    rows = []
    for rung in load_ladder().select(rungs):
        rows.append([rung.id, rung.parent or "", rung.change, "\n".join(map(_claim, rung.predictions))])
    click.echo(tabulate(rows, ["rung", "parent", "change", "predicted"], "simple", maxcolwidths=[None, None, 48, 44]))


def _claim(p: Prediction) -> str:
    low, high = p.ratio
    what = "speed-up" if p.metric == "time" else f"{p.metric} {p.direction},"
    return f"{what} x{low:g}" + (f" to x{high:g}" if high != low else "")


@main.command()
@_rung_filter
@click.option("--arch", "archs", multiple=True, metavar="sm_NN", help="Architecture; default: the GPU present, or all.")
@_variants_option
@click.option(
    "--update-lock", is_flag=True, help="Write this compiler's resource lock and its sums instead of comparing."
)
def build(rungs: tuple[str, ...], archs: tuple[str, ...], variants: bool, update_lock: bool) -> None:
    """Compile the rungs, show their resources, compare them with the resource lock."""
    chosen = _rungs(rungs, variants)
    with _bar("build", "step") as progress:
        records, _ = build_rungs(None, chosen, ablation.target_archs(archs), progress)
    click.echo(ablation.resource_table(records))
    ablation.raise_on_build_faults(chosen, records)
    if not records:
        raise BuildError(f"no chosen rung runs on {', '.join(archs)}; see min_arch in experiments/ladder.toml")
    of_ladder = {rung.id for rung in chosen if rung.kind == "rung"}
    locked = [r for r in records if r.rung in of_ladder]  # variants have no resource lock
    if update_lock:
        ladder = load_ladder()
        declared = [rung.id for rung in (*ladder.rungs, *ladder.variants)]
        if locked:
            click.echo(f"wrote {building.write_lock(locked, declared)}")
        click.echo(f"wrote {verifying.write_sums(verifying.sums_of(records), records[0].compiler, declared)}")
    elif locked:
        click.echo(building.check_lock(locked))


@main.command()
@click.argument("run", required=False)
@_rung_filter
@_variants_option
@click.option("--libraries", is_flag=True, help="Compare the whole libraries too, where the host's tools are the same.")
def verify(run: str | None, rungs: tuple[str, ...], variants: bool, libraries: bool) -> None:
    """Compile everything anew in an empty folder and compare its SHA-256 with the repository's. Needs no GPU.

    With RUN, a run directory or id: with what that run recorded of its machine code.
    """
    reference, nvcc, choice = verifying.repository() if run is None else verifying.recorded(rundir.find(run))
    click.echo(choice)
    if libraries and (said := verifying.other_host(reference)):
        click.echo(said)
        libraries = False
    if gone := verifying.undeclared(reference, load_ladder()):
        click.echo(f"not declared any more, so not compared: {', '.join(gone)}")
    chosen = verifying.choose(reference, _rungs(rungs, variants or run is not None), missing_is_error=run is None)
    with _bar("verify", "step") as progress:
        found = verifying.rebuild(chosen, nvcc, libraries=libraries, progress=progress)
    click.echo(verifying.compare(reference, found))
    pinned = ablation.pinned_run()
    if run is None and pinned is not None:
        click.echo(verifying.measured_by(pinned, reference.compiler, found))


def _emulation_options(command: F) -> F:
    """How the emulator runs kernels."""
    options = (
        click.option("--schedule", type=click.Choice(SCHEDULES), default="fifo", help="Which ready thread runs next."),
        click.option("--races", type=click.Choice(["on", "off"]), default="on", help="Look for races."),
    )
    return functools.reduce(lambda f, option: option(f), reversed(options), command)


@main.command()
@_rung_filter
@_cell_filters
@_gpu_options
@click.option(
    "--on", "where", type=click.Choice(["gpu", "cpu", "both"]), default="gpu", show_default=True, help="Where it runs."
)
@click.option("--case", "only", multiple=True, metavar="ID", help="Only this case of the gate (cpu, both); repeatable.")
@_emulation_options
def check(where: str, only: tuple[str, ...], schedule: Schedule, races: str, **kwargs: Any) -> None:
    """Run the correctness gate, on the GPU or, emulated, on the CPU; or run its small cases on both and compare."""
    selection = _selection(kwargs)
    options = Options(schedule=schedule, races=races == "on", seed=selection.seed)
    if only and where == "gpu":
        raise FlashladderError("--case is for '--on cpu' and '--on both'; on a GPU alone the whole gate runs")
    if where == "cpu":
        _check_on_cpu(emulation.open_check(selection, options, only))
        return
    session = ablation.open_session(selection)
    with _bar("build", "step") as progress:
        session.build(progress)
    if where == "both":
        _compare(session, emulation.beside(session, selection, options, only))
        return
    with _bar("check", "case") as progress:
        records = session.check(progress)
    click.echo(ablation.check_table(records))
    click.echo(f"records: {session.run.path}")
    session.raise_on_failures()


def _compare(session: ablation.Session, emulated: emulation.CpuCheck) -> None:
    with _bar("emulate", "step") as progress:
        emulated.build(progress)
    with _bar("compare", "case") as progress:
        records = emulated.compare(session.specs, progress)
    click.echo(tables.terminal(tables.agreement(records)))
    click.echo(f"a share is of the tolerance: {agreement.TOLERANCE}")
    click.echo(f"records: {session.run.path}")
    emulated.raise_on_disagreement(records)


def _check_on_cpu(session: emulation.CpuCheck) -> None:
    with _bar("emulate", "step") as progress:
        session.build(progress)
    with _bar("check on the CPU", "case") as progress:
        records = session.check(progress)
    click.echo(ablation.check_table(records))
    session.raise_on_failures()


@main.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--arch", "min_arch", type=click.IntRange(80, 90), default=80, show_default=True, help="Compute NN.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the schedule.")
@_emulation_options
def emulate(file: Path, arguments: tuple[str, ...], min_arch: int, seed: int, schedule: Schedule, races: str) -> None:
    """Run a CUDA program of your own on the CPU: FILE.cu with its main(), then its ARGUMENTS.

    Prints what the program prints; races, deadlocks and bad accesses follow on stderr, with exit code 23.
    """
    options = Options(schedule=schedule, races=races == "on", seed=seed)
    with _bar("emulate", "step") as progress:
        program = emulation.build_program(file, min_arch, progress)
    sys.exit(emulation.run_program(program, arguments, options))


@main.command()
@_rung_filter
@_peer_filter
@_cell_filters
@_gpu_options
def time(**kwargs: Any) -> None:
    """Check what is not checked yet, then time it on the GPU."""
    session = ablation.open_session(_selection(kwargs))
    _measure(session)
    click.echo(f"records: {session.run.path}")
    session.raise_on_failures()


@main.command()
@_peer_filter
@_cell_filters
@_gpu_options
def peers(**kwargs: Any) -> None:
    """Check and time the peers alone: other implementations, and cuBLAS's rate as the roof."""
    session = ablation.open_session(_selection(kwargs), peers_alone=True)
    _measure(session)
    click.echo(ablation.peer_tables(session.run))
    click.echo(f"records: {session.run.path}")


@main.command()
@_rung_filter
@_peer_filter
@_cell_filters
@_gpu_options
@click.option(
    "--set", "metric_set", type=click.Choice(get_args(MetricSet)), default="light", show_default=True, help="Metrics."
)
@click.option("--launches", type=click.IntRange(min=1), default=1, show_default=True, help="Calls that are profiled.")
@click.option("--limit", type=float, default=120.0, show_default=True, help="Seconds for one arm in one cell.")
@click.option("--take-over", metavar="RUN", help="Count nothing: add RUN's profiles of the same machine code to --out.")
def profile(metric_set: MetricSet, launches: int, limit: float, take_over: str | None, **kwargs: Any) -> None:
    """Profile with Nsight Compute what passed the gate, and say what limits it.

    Without --shape: the preset's few shapes, at the reference's type and mask, and each rung and its parent where the
    rung is read. With --rung or --peer: the named ones alone. `--set times` needs no permission.
    """
    if take_over is not None:
        if kwargs["out"] is None:
            raise FlashladderError("--take-over needs --out: the run that lacks the profiles")
        run = rundir.find(str(kwargs["out"]))
        taken = profiling.profiles_of_same_code(run, rundir.find(take_over))
        for record in taken:
            run.append("ncu", record)
        click.echo(f"{run.path}: {len(taken)} profiles taken over; 'flashladder report RUN --diagnose' judges them")
        return
    session = ablation.open_profile_session(_selection(kwargs))
    with _bar("build", "step") as progress:
        session.build(progress)
    with _bar("check", "case") as progress:
        session.check(progress)
    try:
        with _bar("profile", "kernel") as progress:
            records = session.profile(metric_set=metric_set, launches=launches, limit_s=limit, progress=progress)
    finally:
        session.diagnose()
        click.echo(ablation.bottleneck_table(session.run))
    click.echo(f"records: {session.run.path}")
    profiling.raise_on_failures(records)


@main.command(name="tune")
@click.option("--rung", default="r13_tuned", show_default=True, metavar="ID", help="A rung that plans, or Hopper's.")
@click.option("--judge", metavar="RUN", help="Time nothing: record what the plan now chooses beside RUN's times.")
@_run_options
def tune_command(rung: str, judge: str | None, out: Path | None, seed: int) -> None:
    """Time what could have been chosen, and say what the choices cost.

    Of a rung that plans: every tile and number of splits. Of the rung that experiments/tune.toml names: its candidates.
    """
    if judge is not None:
        if out is not None:
            raise FlashladderError("--judge times nothing, so --out has no use; leave one out")
        run = rundir.find(judge)
        with _bar("build", "step") as progress:
            ablation.judge_plan(run, progress)
        _say_regrets(run)
        return
    ladder, tuning = load_ladder(), load_tuning()
    rung = ladder.select((rung,))[0].id
    if rung == tuning.rung:
        _tune_blockings(tuning, out, seed)
        return
    if not ladder.has(ladder[rung], "splits"):
        raise FlashladderError(f"{rung} leaves nothing to choose; expected {tuning.rung} or a rung that plans")
    session = ablation.open_session(ablation.Selection(preset="tune", rungs=(rung,), out=out, seed=seed))
    session.peers.clear()
    with _bar("build", "step") as progress:
        session.build(progress)
    with _bar("check", "case") as progress:
        session.check(progress)
    session.raise_on_failures()
    with _bar("tune", "cell") as progress:
        session.tune(rung, progress)
    _say_regrets(session.run)


def _say_regrets(run: rundir.RunDir) -> None:
    click.echo(tables.terminal(tune.table(tune.regrets(run.timings(), run.choices()))))
    click.echo(f"records: {run.path}")


def _tune_blockings(tuning: Tuning, out: Path | None, seed: int) -> None:
    session = ablation.open_session(ablation.Selection(preset="blocking", rungs=(tuning.rung,), out=out, seed=seed))
    with _bar("tune", "step") as progress:
        session.tune_blockings(tuning, progress)
    found = blocking.scores(session.run.timings(), [c.name for c in tuning.candidate])
    click.echo(tables.terminal(blocking.table(found, tuning)))
    for name, reason in blocking.untimed(session.builds, session.checks).items():
        click.echo(f"{name} was not timed: {reason}")
    click.echo(f"records: {session.run.path}")


@main.command(name="eager")
@_run_options
def eager_command(out: Path | None, seed: int) -> None:
    """Time an eager call of flashladder.attention and its wait beside those of operations on one element."""
    with _bar("eager", "cell") as progress:
        run = eager_timing.measure(out, seed, progress)
    for record in run.eager():
        click.echo(f"{record.cell.id}, {record.rung}\n{tables.terminal(eager.table(record))}\n")
    click.echo(f"records: {run.path}")


def _measure(session: ablation.Session) -> None:
    with _bar("build", "step") as progress:
        session.build(progress)
    with _bar("check", "case") as progress:
        session.check(progress)
    with _bar("roof", "product") as progress:
        session.measure_roofs(progress)
    with _bar("time", "cell") as progress:
        session.time(progress)
    with _bar("values", "kind") as progress:
        session.measure_values(progress)
    session.diagnose()


@main.command(name="report")
@click.argument("run", required=False)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write the report there instead.")
@click.option("--check", "check_only", is_flag=True, help="Write nothing; fail when a generated file has drifted.")
@click.option("--diagnose", "again", is_flag=True, help="First judge the run's raw records anew (diagnosis.jsonl).")
def report_command(run: str | None, out: Path | None, check_only: bool, again: bool) -> None:
    """Regenerate tables, figures and pages from a run's records. Needs no GPU.

    RUN is a run directory or id; without it the pinned run, whose pages stand in the repository.
    """
    found = rundir.find(run)
    if again:
        ablation.write_diagnosis(found)
    click.echo(ablation.write_report(found, out, check_only))


@main.command(name="summary")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the whole summary as one JSON object.")
def summary_command(run: str | None, as_json: bool) -> None:
    """Print a run's results: the ablation table, or everything as JSON."""
    found = rundir.find(run)
    if as_json:
        click.echo(summary.to_json(summary.summary(found, load_ladder())))
    else:
        click.echo(ablation.terminal_table(found))


@main.command(name="claims")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def claims_command(run: str | None, as_json: bool) -> None:
    """Hold every declared claim against a run: reproduced, not reproduced, not applicable or not measured.

    The evidence run's number stands beside this run's. Exit code 12 when a claim is not reproduced.
    """
    found = rundir.find(run)
    judged = claims.evaluate_run(claims.View(found, load_ladder()))
    if as_json:
        click.echo(summary.to_json(claims.report(found, judged)))
    else:
        click.echo(_wrapped(claims.table(judged)))
        click.echo(f"run {found.info.id} on {found.info.machine.gpu}: {claims.sentence(judged)}")
    if claims.counts(judged)["not reproduced"]:
        sys.exit(Exit.NOT_REPRODUCED)


@main.command(name="card")
@click.argument("run", required=False)
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def card_command(run: str | None, markdown: bool, as_json: bool) -> None:
    """One page on a run beside the pinned one: machines, order of the ladder, claims, ratios.

    Exit code 12 when a claim is not reproduced.
    """
    made = card.card(rundir.find(run), rundir.find(), load_ladder())
    click.echo(summary.to_json(made) if as_json else card.text(made, markdown=markdown).rstrip("\n"))
    if made.counts["not reproduced"]:
        sys.exit(Exit.NOT_REPRODUCED)


def _wrapped(table: tables.Table) -> str:
    """A table of sentences for a terminal."""
    widths = {"statement": 56, "outcome": 40}
    columns = [widths.get(name) for name in table.columns]
    return tabulate(table.rows, table.columns, "simple", disable_numparse=True, maxcolwidths=columns)


@main.command(name="validate")
@click.argument("runs", nargs=-1)
@click.option("--derived", is_flag=True, help="Judge the samples anew and compare every derived record.")
@click.option("--seal", is_flag=True, help="Write the sums of a run in which nothing else is wrong (sums.json).")
def validate_command(runs: tuple[str, ...], derived: bool, seal: bool) -> None:
    """Look for every fault of recorded runs: schema, sums, counts, hashes, plausibility, medians. Default: all runs.

    Each fault is a line with file and line number; exit code 13 when there is one.
    """
    found = [rundir.find(name) for name in runs] or rundir.recorded()
    if not found:
        raise FlashladderError("no run is recorded here; name a run directory")
    faults = 0
    with _bar("validate", "run") as progress:
        for number, run in enumerate(found):
            progress(number, len(found), run.path.name)
            validation = validate.validate(run, load_ladder(), derived=derived, sealed=not seal)
            for fault in validation.faults:
                click.echo(str(fault))
            faults += len(validation.faults)
            if not validation.faults:
                if seal:
                    run.seal()
                click.echo(f"{run.path}: {'sealed' if seal else 'valid'}: {validation.checked}")
    if faults:
        click.echo(f"flashladder: {faults} faults", err=True)
        sys.exit(Exit.TAMPERED)


@main.command(name="explain")
@click.argument("rung")
@click.argument("shape", required=False)
@click.option("--run", "run_id", help="A run directory or id; default: the pinned run.")
def explain_command(rung: str, shape: str | None, run_id: str | None) -> None:
    """One screen on RUNG at SHAPE: change, prediction, outcome, counters that moved, findings, next step."""
    click.echo(ablation.explanation(rundir.find(run_id), rung, shape))


challenge_cli.register(main, _bar)


@main.command(name="ablation")
@_rung_filter
@_peer_filter
@_cell_filters
@_gpu_options
def ablation_command(**kwargs: Any) -> None:
    """Build, check, time, diagnose and report. Without a GPU: build, check statically, regenerate the pinned report."""
    selection = _selection(kwargs)
    if machine.gpu_name() is None:
        _without_gpu(selection)
        return
    session = ablation.open_session(selection)
    click.echo(f"run: {session.run.path}")
    _measure(session)
    click.echo(ablation.terminal_table(session.run))
    click.echo(ablation.write_report(session.run, session.run.path, check_only=False))
    click.echo(ablation.write_card(session.run))
    session.run.seal()
    session.raise_on_failures()


def _without_gpu(selection: ablation.Selection) -> None:
    chosen = load_ladder().select(selection.rungs)
    ablation.select_cells(selection)  # a wrong filter is an error here too
    statement = ablation.recorded_statement()
    click.echo(statement)
    archs = ablation.target_archs(())
    with _bar("build", "step") as progress:
        records, _ = build_rungs(None, chosen, archs, progress)
    ablation.raise_on_build_faults(chosen, records)
    kernels = sum(len(r.kernels) for r in records)
    click.echo(f"built {len(records)} rungs, {kernels} kernels for {', '.join(archs)}; one change a rung")
    click.echo(building.check_lock(records))
    on_cpu = replace(selection, out=None, shapes=(), masks=("causal",))
    _check_on_cpu(emulation.open_check(on_cpu, Options(seed=selection.seed), emulation.quick_cases(on_cpu)))
    pinned = ablation.pinned_run()
    if pinned is not None:
        click.echo(ablation.write_report(pinned, selection.out, check_only=False))
        click.echo(ablation.terminal_table(pinned))
    click.echo(statement)


@main.command(name="doctor")
def doctor_command() -> None:
    """Check this machine: GPU, driver, compilers, torch, profiler, disk; one line each with the fix."""
    faults = 0
    for finding in doctor.examine():
        click.echo(f"{finding.level:5} {finding.name}: {finding.text}")
        faults += finding.level == "fault"
    if faults:
        sys.exit(Exit.ENVIRONMENT)


for command in SEARCH_COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    main()
