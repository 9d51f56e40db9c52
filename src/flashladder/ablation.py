"""One run: what was asked for, where its records go, and the stages in order."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from tabulate import tabulate

from flashladder import (
    artifact,
    card,
    claims,
    diagnose,
    doctor,
    durable,
    explain,
    machine,
    native,
    paths,
    report,
    rundir,
    summary,
    tables,
    tune,
)
from flashladder import build as building
from flashladder.arms import ArmSpec, peer_specs
from flashladder.blocking import candidate_rung, spills
from flashladder.errors import BuildError, DriftError, EnvironmentInvalidError, Exit, FlashladderError
from flashladder.ladder import (
    CHOICE,
    Ladder,
    gated_name,
    gpu_named,
    load_ladder,
    load_metrics,
    load_presets,
    load_shapes,
    preset_cells,
    value_cells,
)
from flashladder.model import (
    DTYPES,
    BuildRecord,
    Cell,
    CellTiming,
    CheckRecord,
    DtypeName,
    EagerTiming,
    L2Mode,
    Machine,
    Mask,
    MetricSet,
    NcuRecord,
    PlanChoice,
    Preset,
    Rung,
    RunInfo,
    Tuning,
)
from flashladder.ninja import Progress
from flashladder.peers import PEERS
from flashladder.profiling import profile_cells
from flashladder.rundir import RunDir
from flashladder.stages import CHECKERS, build_rungs, check_arms, known_rates, measure_roofs, measure_values, time_cells
from flashladder.tune import arm_of, plan_specs, plans_of
from flashladder.worker import dismiss, prepare


@dataclass(frozen=True)
class Selection:
    """What the user asked for; empty filters mean everything of the preset."""

    preset: str = "default"
    rungs: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[DtypeName, ...] = ()
    masks: tuple[Mask, ...] = ()
    out: Path | None = None
    seed: int = 0


def select_cells(selection: Selection) -> dict[Cell, L2Mode]:
    """The cells of the preset that pass the filters.

    Raises FlashladderError when a shape filter names neither a set nor a shape, or when nothing is left.
    """
    preset = load_presets()[selection.preset]
    sets = load_shapes()
    ids = {shape.id for s in sets.values() for shape, _ in s.entries}
    for name in selection.shapes:
        if name not in sets and name not in ids:
            raise FlashladderError(
                f"no shape or set {name!r}; expected one of {', '.join(sets)} or a shape such as {min(ids)}"
            )
    cells = preset_cells(preset)
    if selection.shapes:
        cells = {
            cell: declared.l2
            for name, declared in sets.items()
            for cell in declared.cells(selection.dtypes or preset.dtypes)
            if name in selection.shapes or cell.shape.id in selection.shapes
        }
    cells = {
        cell: l2
        for cell, l2 in cells.items()
        if (not selection.dtypes or cell.dtype in selection.dtypes)
        and (not selection.masks or cell.mask in selection.masks)
    }
    if not cells:
        raise FlashladderError(
            f"nothing to measure: no cell of preset {selection.preset!r} passes the filters; loosen one of them"
        )
    return cells


def read_cells(ladder: Ladder, rungs: Iterable[Rung], selection: Selection) -> dict[Cell, L2Mode]:
    """The cells that rungs and variants are read at, of the types and masks that the user chose."""
    full = load_presets()["full"]
    declared = preset_cells(msgspec.structs.replace(full, sets=tuple(load_shapes()), dtypes=DTYPES, max_seq=None))
    return {
        cell: declared[cell]
        for cell in map(ladder.cell_of, rungs)
        if (not selection.dtypes or cell.dtype in selection.dtypes)
        and (not selection.masks or cell.mask in selection.masks)
    }


def profile_selection(selection: Selection) -> Selection:
    """The request with what a profile takes where the user names nothing: few shapes, one dtype, one mask."""
    reference = load_ladder().reference
    return replace(
        selection,
        shapes=selection.shapes or load_presets()[selection.preset].profile,
        dtypes=selection.dtypes or (reference.dtype,),
        masks=selection.masks or (reference.mask,),
    )


def target_archs(asked: Sequence[str]) -> tuple[str, ...]:
    """The architectures to build for: those asked for, else the GPU present, else all that the project supports.

    FLASHLADDER_ARCHS asks where the user does not: an image sets it to those that its libraries were built for.
    """
    asked = asked or os.environ.get("FLASHLADDER_ARCHS", "").split()
    if asked:
        unknown = [a for a in asked if not re.fullmatch(r"(sm|compute)_\d+a?", a)]
        if unknown:
            raise FlashladderError(
                f"no architecture {unknown[0]!r}; expected sm_NN, such as {building.ALL_ARCHS[-1]}, or compute_NN (PTX)"
            )
        return tuple(asked)
    present = machine.gpu_arch()
    return (present,) if present else building.ALL_ARCHS


def runnable(rungs: Sequence[Rung], arch: str | None) -> list[Rung]:
    """Those that a GPU of `arch` can run: a library for several architectures may hold nothing for it."""
    return [r for r in rungs if arch is None or r.runs_on(arch)]


@dataclass
class Session:
    """A run in progress on this machine's GPU."""

    run: RunDir
    ladder: Ladder
    rungs: tuple[Rung, ...]
    cells: dict[Cell, L2Mode]
    preset: Preset
    seed: int
    peers: list[ArmSpec]
    named: frozenset[str] = frozenset()
    """The arms that the user named; the run may measure more of them, so that a cell stays whole."""
    shared: frozenset[Cell] | None = None
    """The cells that every arm is profiled in, None for all; in the others those that are read there, and parents."""
    specs: list[ArmSpec] = field(default_factory=list)
    builds: list[BuildRecord] = field(default_factory=list)
    checks: list[CheckRecord] = field(default_factory=list)

    def build(self, progress: Progress) -> None:
        """Build for this GPU; raises BuildError when no rung builds."""
        prepare(CHECKERS + 1)  # and one to time
        self.builds, specs = build_rungs(self.run, runnable(self.rungs, machine.gpu_arch()), target_archs(()), progress)
        if self.rungs and not specs:
            reasons = "; ".join(f"{r.rung}: {r.reason}" for r in self.builds)
            raise BuildError(f"no rung was built: {reasons or 'none supports this GPU'}")
        self.specs = [*specs.values(), *self.peers]

    def check(self, progress: Progress) -> list[CheckRecord]:
        dtypes = tuple(dict.fromkeys(cell.dtype for cell in self.cells))
        head_dims = sorted({cell.shape.head_dim for cell in self.cells})
        self.checks = check_arms(self.run, self.specs, dtypes, head_dims, self.seed, progress)
        return self.checks

    def measure_roofs(self, progress: Progress) -> None:
        dtypes = tuple(dict.fromkeys(cell.dtype for cell in self.cells)) if self.preset.roof else ()
        measure_roofs(self.run, dtypes, self.preset, self.seed, progress)

    def time(self, progress: Progress) -> None:
        ladder = self.ladder
        if any(rung.id in self.named for rung in ladder.variants):
            shapes = tuple({cell.shape.id for cell in self.cells})
            ladder = replace(ladder, variant_shapes={rung.id: shapes for rung in ladder.rungs})
        time_cells(self.run, ladder, self.specs, self.cells, self.preset, self.seed, progress)

    def measure_values(self, progress: Progress) -> None:
        """Time the ladder's champions, as far as the session measures them, on every kind of values."""
        champions = {rung.id for rung in self.ladder.champions(machine.gpu_arch())}
        specs = [spec for spec in self.specs if spec.name in champions]
        cells = value_cells() if self.preset.values else []
        measure_values(self.run, specs, cells, self.preset, self.seed, progress)

    def profile(self, *, metric_set: MetricSet, launches: int, limit_s: float, progress: Progress) -> list[NcuRecord]:
        """Profile the chosen cells; raises as profiling.profile_cells() does."""
        dismiss()
        return profile_cells(
            self.run,
            self.profile_items(),
            load_metrics(),
            machine.gpu_arch() or "",
            known_rates(self.run),
            metric_set=metric_set,
            launches=launches,
            limit_s=limit_s,
            seed=self.seed,
            progress=progress,
        )

    def profile_items(self) -> list[tuple[ArmSpec, Cell]]:
        """What a profile is of: the arms that the user named, or all.

        Variants come last, and where none is named only in the cell that they are read at.
        """
        specs = [spec for spec in self.specs if not self.named or spec.name in self.named]
        ours = [self.ladder[spec.name] for spec in specs if spec.kind != "peer"]
        read = {(name, self.ladder.cell_of(rung)) for rung in ours for name in (rung.id, rung.parent)}

        def takes(spec: ArmSpec, cell: Cell) -> bool:
            if spec.kind == "variant" and not self.named:
                return cell == self.ladder.cell_of(self.ladder[spec.name])
            return self.shared is None or cell in self.shared or (spec.name, cell) in read

        items = [(spec, cell) for cell in self.cells for spec in specs if takes(spec, cell)]
        return sorted(items, key=lambda item: item[0].kind == "variant")

    def tune(self, rung: str, progress: Progress) -> None:
        """Time every plan of a rung that was built and checked, and record which its own plan chooses."""
        base = next(spec for spec in self.specs if spec.name == rung)
        specs = plan_specs(base, plans_of(self.ladder[rung]))
        time_cells(self.run, self.ladder, specs, self.cells, self.preset, self.seed, progress)
        self.run.replace("plan", timed_choices(self.run, base))

    def tune_blockings(self, tuning: Tuning, progress: Progress) -> None:
        """Build, check and time the candidates, each at its own head dimension; those that fail stay in the records."""
        parent = self.ladder[tuning.rung]
        for head_dim in sorted({c.head_dim for c in tuning.candidate}):
            rungs = tuple(candidate_rung(c, parent) for c in tuning.candidate if c.head_dim == head_dim)
            cells = {cell: l2 for cell, l2 in self.cells.items() if cell.shape.head_dim == head_dim}
            part = replace(self, rungs=rungs, cells=cells, peers=[], specs=[], builds=[])
            part.build(progress)
            spilling = {b.rung for b in part.builds if spills(b)}
            part.specs = [spec for spec in part.specs if spec.name not in spilling]
            part.check(progress)
            part.time(progress)
            self.builds += part.builds
            self.checks += part.checks

    def diagnose(self) -> None:
        write_diagnosis(self.run)

    def raise_on_failures(self) -> None:
        """Raise with the stage's exit code when a rung did not build or a rung failed its checks."""
        raise_on_build_faults(self.rungs, self.builds)
        rungs = {r.id for r in self.rungs}
        bad = [r for r in self.checks if r.arm in rungs and r.status not in ("pass", "unsupported")]
        if bad:
            error = FlashladderError(
                f"{len(bad)} checks failed; the first: {bad[0].arm} on {bad[0].case}: {bad[0].reason}"
            )
            error.exit_code = Exit.INCORRECT
            raise error


def default_run_path(what: str) -> Path:
    """experiments/results/GPU/DATE-COMMIT-WHAT: the same command on the same day and commit resumes its run."""
    name = machine.gpu_name() or "cpu"
    declared = gpu_named(name)
    slug = declared.slug if declared else "".join(c if c.isalnum() else "-" for c in name.lower())
    commit, dirty = machine.git_state()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return paths.RESULTS / slug / f"{date}-{commit[:7]}{'-dirty' if dirty else ''}-{what}"


def open_session(selection: Selection, *, peers_alone: bool = False) -> Session:
    """Check the machine and the request, then open or resume the run directory.

    With `peers_alone` no rung is measured but those that the run holds already.

    Raises EnvironmentInvalidError when this machine cannot measure, FlashladderError on a bad request.
    """
    ladder = load_ladder()
    preset = load_presets()[selection.preset]
    chosen = () if peers_alone else ladder.select(selection.rungs)
    if preset.variants and not peers_alone and not selection.rungs:
        chosen = (*chosen, *ladder.variants)
    cells = select_cells(selection)
    asked = tuple(spec.name for spec in peer_specs(selection.peers or preset.peers, None))
    name = f"{selection.preset}-peers" if peers_alone else selection.preset
    run = open_run(selection.preset, selection.out or default_run_path(name))
    rungs = measured_rungs(ladder, chosen, [r.rung for r in run.builds()])
    peers = peer_specs(measured_peers(asked, run.timings()), machine.gpu_arch())
    named = frozenset([r.id for r in chosen if selection.rungs] + [n for n in asked if selection.peers])
    return Session(run, ladder, rungs, cells, preset, selection.seed, peers, named)


def open_profile_session(selection: Selection) -> Session:
    """open_session() for a profile, where the user names no shape also of the cells that rungs are read at."""
    session = open_session(profile_selection(selection))
    if selection.shapes:
        return session
    rungs = [rung for rung in session.rungs if not session.named or rung.id in session.named]
    read = read_cells(session.ladder, rungs, selection)
    return replace(session, cells={**read, **session.cells}, shared=frozenset(session.cells))


def open_run(preset: str, path: Path) -> RunDir:
    """Check the machine, then open or resume the run directory.

    Raises EnvironmentInvalidError when this machine cannot measure.
    """
    faults = [f for f in doctor.examine() if f.level == "fault"]
    if machine.gpu_name() is None:
        raise EnvironmentInvalidError("no GPU here, one is needed; 'flashladder ablation' shows what works without")
    if faults:
        raise EnvironmentInvalidError("; ".join(f"{f.name}: {f.text}" for f in faults))
    run = RunDir(path)
    here = machine.fingerprint()
    if (run.path / "run.json").exists():
        run.write_info(resumed(run, here, preset))
    else:
        run.write_info(new_info(run, preset, here))
    return run


def new_info(run: RunDir, preset: str, here: Machine) -> RunInfo:
    """The info of a run that starts now, from the commit that is checked out."""
    commit, dirty = machine.git_state()
    date = durable.now()
    return RunInfo(id=run.path.name, preset=preset, date=date, commit=commit, dirty=dirty, machine=here)


def resumed(run: RunDir, here: Machine, preset: str) -> RunInfo:
    """The run's info when it goes on here: another card may, since every comparison stays within a cell and so a card.

    The run is of the larger of its presets, and names every commit that it went on from.

    Raises EnvironmentInvalidError when more than the card differs.
    """
    info = run.info
    sizes = {name: len(preset_cells(declared)) for name, declared in load_presets().items()}
    if sizes[preset] > sizes.get(info.preset, 0):
        info = msgspec.structs.replace(info, preset=preset)
    if msgspec.structs.replace(here, gpu_digest=info.machine.gpu_digest) != info.machine:
        raise EnvironmentInvalidError(
            f"{run.path} was made on another machine ({_differences(info.machine, here)}); give another --out"
        )
    commit, _ = machine.git_state()
    if commit not in (info.commit, *info.later_commits):
        info = msgspec.structs.replace(info, later_commits=(*info.later_commits, commit))
    known = (info.machine.gpu_digest, *info.cards)
    if here.gpu_digest is None or here.gpu_digest in known:
        return info
    return msgspec.structs.replace(info, cards=(*info.cards, here.gpu_digest))


def _differences(there: Machine, here: Machine) -> str:
    """The fields in which two fingerprints differ, with both values."""
    fields = [f for f in Machine.__struct_fields__ if getattr(there, f) != getattr(here, f)]
    return ", ".join(f"{f} {getattr(there, f)}, here {getattr(here, f)}" for f in fields)


def measured_rungs(ladder: Ladder, chosen: Sequence[Rung], recorded: Sequence[str]) -> tuple[Rung, ...]:
    """The rungs that a session measures: those asked for, their parents, and those that the run holds already.

    A cell is measured as a whole, so that any two of its arms can be paired; leaving out a recorded rung would lose it.
    """
    wanted = {r.id for r in chosen} | {r.parent for r in chosen} | set(recorded)
    return tuple(r for r in (*ladder.rungs, *ladder.variants) if r.id in wanted)


def measured_peers(asked: Sequence[str], timings: Sequence[CellTiming]) -> tuple[str, ...]:
    """The peers that a session measures: those asked for, and for the same reason those that the run holds already."""
    recorded = {gated_name(arm.arm) for timing in timings for arm in timing.arms if arm.kind == "peer"}
    return tuple(name for name in PEERS if name in recorded or name in asked)


def raise_on_build_faults(rungs: Sequence[Rung], records: Sequence[BuildRecord]) -> None:
    """Raise BuildError when a rung failed to build or its machine code contradicts its declaration."""
    faults = [f"{r.rung}: {r.reason}" for r in records if r.status == "failed"]
    faults += building.static_faults(rungs, records)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise BuildError(f"{faults[0]}{more}")


def resource_table(records: Sequence[BuildRecord]) -> str:
    """Registers, spills, stack and shared memory a kernel, for the terminal."""
    rows = [
        [k.kernel, k.arch, k.registers, k.spill_store_bytes + k.spill_load_bytes, k.stack_bytes, k.shared_bytes]
        for r in records
        for k in r.kernels
    ]
    rows += [[r.rung, " ".join(r.archs), f"failed: {r.reason}", "", "", ""] for r in records if r.status == "failed"]
    return tabulate(rows, ["kernel", "arch", "registers", "spill B", "stack B", "shared B"], "simple")


def check_table(records: Sequence[CheckRecord]) -> str:
    """Verdicts an arm, and the first thing that went wrong."""
    rows = []
    for arm in dict.fromkeys(r.arm for r in records):
        mine = [r for r in records if r.arm == arm]
        counts = Counter(r.status for r in mine)
        bad = next((r for r in mine if r.status not in ("pass", "unsupported")), None)
        failed = len(mine) - counts["pass"] - counts["unsupported"]
        first = f"{bad.case}: {bad.status}: {bad.reason}" if bad else ""
        rows.append([arm, counts["pass"], counts["unsupported"], failed, first])
    return tabulate(rows, ["arm", "pass", "unsupported", "failed", "first failure"], "simple")


# --- pages ----------------------------------------------------------------------------------------------------------


def pinned_run() -> RunDir | None:
    """The run that the repository's pages are made from; None when none is pinned yet."""
    return None if rundir.pinned_id() is None else rundir.find()


def plan_choices(rung: ArmSpec, cells: Iterable[Cell], multiprocessors: int) -> list[PlanChoice]:
    """What a built rung chooses in each cell on a GPU of so many SMs; raises FlashladderError when it has no choice."""
    library = native.load(Path(rung.library or ""))
    choices = []
    for cell in cells:
        if (plan := library.plan(cell, multiprocessors)) is None:
            raise FlashladderError(f"{rung.name} has one kernel and splits no keys; expected a rung that plans")
        choices.append(PlanChoice(cell=cell, arm=arm_of(rung.name, plan)))
    return choices


def timed_choices(run: RunDir, spec: ArmSpec) -> list[PlanChoice]:
    """What the rung's own plan chooses in each cell of a tuning."""
    return plan_choices(spec, [timing.cell for timing in run.timings()], run.info.machine.sm_count or 1)


def judge_plan(run: RunDir, progress: Progress) -> None:
    """Record anew what the rung of a tuning chooses, by the present source.

    Raises FlashladderError on other runs, BuildError when the rung does not build.
    """
    arms = [arm.arm for timing in run.timings() for arm in timing.arms if CHOICE in arm.arm]
    if not arms:
        raise FlashladderError(f"run {run.info.id} timed no plans; expected one that 'flashladder tune' made")
    rung = load_ladder()[gated_name(arms[0])]
    archs = [arch for arch in building.ALL_ARCHS if rung.runs_on(arch)]
    builds, specs = build_rungs(None, [rung], archs, progress)
    raise_on_build_faults([rung], builds)
    run.replace("plan", timed_choices(run, specs[rung.id]))


def tunings(run: RunDir) -> list[tuple[str, tables.Table]]:
    """Rungs, and what their plans chose beside the best, of the tunings recorded on a run's GPU."""
    return [
        (gated_name(choices[0].arm), tune.table(tune.regrets(other.timings(), choices)))
        for other in rundir.recorded()
        if other.info.machine.gpu == run.info.machine.gpu and (choices := other.choices())
    ]


def eager_runs(run: RunDir) -> list[tuple[RunInfo, list[EagerTiming]]]:
    """The eager calls recorded on a run's GPU, and where."""
    return [
        (other.info, records)
        for other in rundir.recorded()
        if other.info.machine.gpu == run.info.machine.gpu and (records := other.eager())
    ]


def recorded_statement() -> str:
    """What a machine without a GPU must say first and last: nothing was timed, and where the numbers come from."""
    run = pinned_run()
    if run is None:
        return "No GPU here: nothing is timed, and no recorded run is pinned."
    info = run.info
    return f"No GPU here: nothing is timed. The numbers are those recorded on {info.machine.gpu}, run {info.id}."


def write_diagnosis(run: RunDir) -> None:
    """Judge a run's raw records and write diagnosis.jsonl, all that tables and figures read."""
    run.replace("diagnosis", diagnose.diagnose(run, load_ladder()))


def write_report(run: RunDir, out: Path | None, check_only: bool) -> str:
    """Regenerate a run's pages: the repository's for the pinned run, else into `out` or the run's own folder.

    With `check_only` nothing is written and DriftError names the files that differ.
    """
    ladder = load_ladder()
    pinned = out is None and summary.is_pinned(run)
    judged = claims.evaluate_run(claims.View(run, ladder))
    if pinned:
        root, readme = paths.ROOT, (paths.ROOT / report.README).read_text()
        appendix = artifact.sections(_artifact_facts(run, ladder, judged))
        files = report.generate(
            run,
            ladder,
            readme=readme,
            judged=judged,
            others=card.others(run, ladder),
            tunings=tunings(run),
            eager_runs=eager_runs(run),
            appendix=appendix,
        )
    else:
        root = out or run.path
        files = report.generate(run, ladder, judged=judged)
    drifted = report.check(files, root)
    if check_only:
        if drifted:
            raise DriftError(f"{', '.join(drifted)} differ from what run {run.info.id} gives; run 'flashladder report'")
        return f"{len(files)} generated files match run {run.info.id}"
    report.write(files, root)
    text = next(path for path in files if path.endswith(".md"))
    page = next((path for path in files if path.endswith(report.PAGE)), None)
    also = f"{report.PAGE} left out, vl-convert-python is not installed" if page is None else f"page: {root / page}"
    return f"report: {root / text} ({len(drifted)} of {len(files)} files changed); {also}"


def _artifact_facts(run: RunDir, ladder: Ladder, judged: Sequence[claims.Judged]) -> artifact.Facts:
    return artifact.Facts(
        info=run.info,
        ladder=ladder,
        builds=run.builds(),
        timings=run.timings(),
        judged=judged,
        record_bytes=sum(file.stat().st_size for file in run.files),
        download_bytes=artifact.download_bytes((paths.ROOT / "uv.lock").read_text()),
    )


def write_card(run: RunDir) -> str:
    """Write the reproduction card beside a run's report; says where, or why there is none."""
    pinned = pinned_run()
    if pinned is None:
        return "reproduction card: no recorded run is pinned to compare with"
    made = card.card(run, pinned, load_ladder())
    (run.path / "card.md").write_text(card.text(made, markdown=True))
    (run.path / "card.json").write_text(summary.to_json(made) + "\n")
    return f"reproduction card: {run.path / 'card.md'}: {claims.sentence(made.claims)}"


def bottleneck_table(run: RunDir) -> str:
    """What limits the profiled kernels, cell by cell, for a terminal."""
    results = diagnose.load_results(run, load_ladder())
    cells = dict.fromkeys(cell for cell, _ in results.profiles)
    return "\n\n".join(f"{cell.id}\n{tables.terminal(tables.bottlenecks(results, cell))}" for cell in cells)


def explanation(run: RunDir, rung: str, shape: str | None) -> str:
    """One screen on a rung at a shape, by its id, with the reference's dtype and mask; by default the leg's.

    Raises FlashladderError on an unknown rung or a shape without a record.
    """
    ladder = load_ladder()
    results = diagnose.load_results(run, ladder)
    (chosen,) = ladder.select((rung,))
    cells = [c for c in results.cells if (c.dtype, c.mask) == (ladder.reference.dtype, ladder.reference.mask)]
    cell = next((c for c in cells if c.shape.id == shape), None) if shape else ladder.cell_of(chosen)
    if cell is None:
        raise FlashladderError(
            f"no record of {shape!r} in this run; expected one of {', '.join(c.shape.id for c in cells)}"
        )
    return explain.explain(results, run.builds(), chosen, cell)


def peer_tables(run: RunDir) -> str:
    """The peers and their times, for a terminal."""
    results = diagnose.load_results(run, load_ladder())
    all_tables = (tables.peers(results, run.info), tables.roofs(results), tables.peer_times(results))
    return "\n\n".join(map(tables.terminal, all_tables))


def terminal_table(run: RunDir) -> str:
    """The ablation table for a terminal."""
    results = diagnose.load_results(run, load_ladder())
    parts = []
    for leg in diagnose.legs(results):
        table = tables.ablation(results, run.builds(), run.info, leg).without("change", *tables.RESOURCE_COLUMNS)
        parts.append(f"{leg.cell.id}\n{tables.terminal(table)}")
    return "\n\n".join(parts)
