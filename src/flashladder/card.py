"""The reproduction card: one page on a run beside the pinned one. Pure but for reading the two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from flashladder import claims, rundir, tables
from flashladder.claims import Judged, Outcome, View
from flashladder.diagnose import rounded
from flashladder.ladder import NO_LADDER, Ladder, Leg
from flashladder.model import Cell, Record
from flashladder.rundir import RunDir
from flashladder.summary import aliases
from flashladder.tables import NOT_MEASURED, Table

MATTERS = (
    "GPU",
    "architecture",
    "SMs",
    "L2 (MiB)",
    "driver",
    "CUDA of the driver",
    "power limit (W)",
    "largest SM clock (MHz)",
    "largest memory clock (MHz)",
    "ECC",
    "MIG",
    "torch",
    "CUDA of torch",
    "cuDNN",
    "nvcc",
    "container",
)
"""Facts of the machine that a time depends on."""
MIN_RANKED = 3
WITHOUT_NUMBERS = ("not measured", "not applicable")
ORDER: tuple[Outcome, ...] = ("not reproduced", "reproduced", "not measured", "not applicable")


class Fact(Record, frozen=True, kw_only=True):
    """One fact of the machine, of the pinned run and of this one."""

    name: str
    evidence: str
    here: str
    matters: bool
    """They differ, and times depend on it."""


class Rank(Record, frozen=True, kw_only=True):
    """Kendall's tau between the two runs' times of the rungs that both timed at a leg's cell: 1, the same order."""

    leg: str
    cell: str
    rungs: int
    tau: float | None


class Step(Record, frozen=True, kw_only=True):
    """A ratio of both runs: `other`'s time over `arm`'s."""

    arm: str
    other: str
    where: str
    evidence: float | None
    evidence_ci: tuple[float, float] | None = None
    here: float | None
    here_ci: tuple[float, float] | None = None


class Binaries(Record, frozen=True, kw_only=True):
    """How many rungs that both runs built are the same, by the library's bytes and by the machine code alone."""

    shared: int
    same_library: int
    known_code: int
    """Of which both runs recorded the machine code's sum for this architecture."""
    same_code: int


class Card(Record, frozen=True, kw_only=True):
    run: str
    evidence: str
    facts: tuple[Fact, ...]
    binaries: Binaries
    ranks: tuple[Rank, ...]
    counts: dict[Outcome, int]
    claims: tuple[Judged, ...]
    steps: tuple[Step, ...]


def card(run: RunDir, pinned: RunDir, ladder: Ladder) -> Card:
    """A run beside the pinned one; raises FlashladderError when either has no diagnosis."""
    here, evidence = View(run, ladder), View(pinned, ladder)
    judged = claims.evaluate_run(here, evidence)
    return Card(
        run=here.info.id,
        evidence=evidence.info.id,
        facts=_facts(evidence, here),
        binaries=_binaries(evidence, here),
        ranks=ranks(evidence, here),
        counts=claims.counts(judged),
        claims=tuple(judged),
        steps=tuple(_steps(evidence, here)),
    )


def _facts(evidence: View, here: View) -> tuple[Fact, ...]:
    theirs, mine = ({row[0]: row[1] for row in tables.machine(view.info).rows} for view in (evidence, here))
    peers = {
        f"peer {name}": (_peer(name, evidence), _peer(name, here))
        for name in sorted({*evidence.info.machine.peers, *here.info.machine.peers})
    }
    compilers = tuple(", ".join(sorted({b.compiler for b in view.builds.values()})) for view in (evidence, here))
    named = {name: (theirs.get(name, "-"), mine.get(name, "-")) for name in dict.fromkeys([*theirs, *mine])}
    rows = {**named, "compiler": compilers, **peers}
    return tuple(
        Fact(name=name, evidence=a, here=b, matters=a != b and (name in MATTERS or name not in named))
        for name, (a, b) in rows.items()
    )


def _peer(name: str, view: View) -> str:
    versions = view.info.machine.peers
    return versions[name] or "not installed" if name in versions else "unknown"


def _binaries(evidence: View, here: View) -> Binaries:
    arch = here.info.machine.arch or ""
    pairs = [(b, evidence.builds[name]) for name, b in here.builds.items() if name in evidence.builds]
    code = [(a.cubins[arch], b.cubins[arch]) for a, b in pairs if arch in a.cubins and arch in b.cubins]
    return Binaries(
        shared=len(pairs),
        same_library=sum(a.sha256 == b.sha256 for a, b in pairs),
        known_code=len(code),
        same_code=sum(a == b for a, b in code),
    )


def ranks(evidence: View, here: View) -> tuple[Rank, ...]:
    """The order of the ladder's times, leg by leg."""
    return tuple(_rank(evidence, here, leg) for leg in here.ladder.legs)


def _rank(evidence: View, here: View, leg: Leg) -> Rank:
    times = [
        (a, b)
        for rung in leg.rungs
        if (a := evidence.results.median_us(leg.cell, rung.id)) is not None
        and (b := here.results.median_us(leg.cell, rung.id)) is not None
    ]
    return Rank(leg=leg.name, cell=leg.cell.id, rungs=len(times), tau=_tau(times))


def _tau(times: Sequence[tuple[float, float]]) -> float | None:
    if len(times) < MIN_RANKED:
        return None
    signs = [
        ((a > c) - (a < c), (b > d) - (b < d)) for n, (a, b) in enumerate(times) for c, d in times[:n]
    ]  # tau-b: scipy.stats takes seconds to import
    pairs = math.sqrt(sum(x * x for x, _ in signs) * sum(y * y for _, y in signs))
    return rounded(sum(x * y for x, y in signs) / pairs) if pairs else None


def _steps(evidence: View, here: View) -> Iterable[Step]:
    """Each rung over its parent at its leg's cell; the pinned run's best rung over each peer."""
    for leg in here.ladder.legs:
        for rung in leg.rungs[1:]:
            yield _step(evidence, here, leg.cell, rung.id, rung.parent or "")
    best = aliases(evidence.results).get("champion")
    if best is None:
        return
    cell = here.ladder.cell_of(here.ladder[best])
    for peer in evidence.results.peers:
        at_leg = _step(evidence, here, cell, best, peer)
        if at_leg.evidence is not None:
            yield at_leg
        yield from _mean(evidence, here, best, peer)


def _step(evidence: View, here: View, cell: Cell, arm: str, other: str) -> Step:
    theirs, mine = (view.results.comparison(cell, arm, other) for view in (evidence, here))
    return Step(
        arm=arm,
        other=other,
        where=cell.id,
        evidence=theirs.ratio if theirs is not None else None,
        evidence_ci=theirs.ci if theirs is not None else None,
        here=mine.ratio if mine is not None else None,
        here_ci=mine.ci if mine is not None else None,
    )


def _mean(evidence: View, here: View, arm: str, other: str) -> Iterable[Step]:
    """Geometric means over the headline cells that both runs have, if there are any."""
    ratios = [
        (a.ratio, b.ratio)
        for cell in tables.headline_cells(evidence.results)
        if (a := evidence.results.comparison(cell, arm, other)) is not None
        and (b := here.results.comparison(cell, arm, other)) is not None
        and a.ratio is not None
        and b.ratio is not None
    ]
    if ratios:
        theirs, mine = (math.exp(fmean(map(math.log, side))) for side in zip(*ratios, strict=True))
        where = f"geometric mean of {len(ratios)} headline cells"
        yield Step(arm=arm, other=other, where=where, evidence=theirs, here=mine)


# --- shown ----------------------------------------------------------------------------------------------------------


def text(made: Card, *, markdown: bool) -> str:
    """The page, with a final newline in Markdown."""
    show: Callable[[Table], str] = tables.markdown if markdown else tables.terminal
    plain: Callable[[str], str] = tables.markdown_escape if markdown else str
    head = "## {}" if markdown else "{}"
    parts = [
        ("# Reproduction card\n\n" if markdown else "")
        + f"Run {plain(made.run)} beside the pinned {plain(made.evidence)}.",
        head.format("Machines"),
        show(facts(made)),
        plain(differences(made)),
        head.format("Order of the ladder"),
        show(order(made)),
        head.format("Claims"),
        plain(claims.sentence(made.claims)) + ".",
    ]
    for outcome in ORDER:
        mine = [j for j in made.claims if j.outcome == outcome]
        if mine:
            parts.append(f"### {outcome.capitalize()}" if markdown else f"{outcome}:")
            parts.append(plain(", ".join(j.id for j in mine)) if outcome in WITHOUT_NUMBERS else show(_numbers(mine)))
    parts += [head.format("Ratios"), show(ratios(made))]
    return "\n\n".join(parts) + ("\n" if markdown else "")


def _numbers(judged: Sequence[Judged]) -> Table:
    """Claims of one outcome: what is said in full where it does not hold."""
    table = claims.table(judged, statements=judged[0].outcome == "not reproduced")
    return table if judged[0].outcome == "not reproduced" else table.without("outcome")


def facts(made: Card) -> Table:
    rows = [(f.name, f.evidence, f.here, "matters" if f.matters else "") for f in made.facts]
    return Table(("what", "pinned run", "this run", "difference"), tuple(rows))


def differences(made: Card) -> str:
    """What of the environment differs and matters, and whether the binaries are the same."""
    names = [f.name for f in made.facts if f.matters]
    b = made.binaries
    code = f", the machine code is the same in {b.same_code} of {b.known_code}" if b.known_code else ""
    return (
        f"Differences that matter: {', '.join(names) or 'none'}. "
        f"Of {b.shared} kernels that both runs built {b.same_library} libraries have the same sha256{code}."
    )


def order(made: Card) -> Table:
    rows = [(r.leg, r.cell, str(r.rungs), NOT_MEASURED if r.tau is None else f"{r.tau:.3f}") for r in made.ranks]
    return Table(("leg", "cell", "rungs timed in both", "Kendall's tau"), tuple(rows))


def ratios(made: Card) -> Table:
    rows = [(s.arm, s.other, s.where, _ratio(s.evidence, s.evidence_ci), _ratio(s.here, s.here_ci)) for s in made.steps]
    return Table(("kernel", "over", "where", "pinned run", "this run"), tuple(rows))


def _ratio(value: float | None, ci: tuple[float, float] | None) -> str:
    if value is None:
        return NOT_MEASURED
    return tables.number(value) if ci is None else tables.interval(value, ci)


# --- other machines -------------------------------------------------------------------------------------------------


def others(pinned: RunDir, ladder: Ladder) -> Table:
    """Every other recorded run of the ladder, a row each: how it compares with the pinned one."""
    evidence = View(pinned, ladder)
    rows = [
        _row(evidence, View(run, ladder))
        for run in rundir.recorded()
        if run.path.resolve() != pinned.path.resolve() and run.info.preset not in NO_LADDER and run.diagnosis()
    ]
    names = [f"Kendall's tau, {leg.name}" for leg in ladder.legs]
    columns = ("run", "GPU", "date", "rungs timed", "best rung", f"x {ladder.baseline}", "claims reproduced", *names)
    return Table(columns, tuple(row for row in rows if row is not None))


def _row(evidence: View, here: View) -> tuple[str, ...] | None:
    """None when no rung was timed."""
    best = aliases(here.results).get("champion")
    if best is None:
        return None
    judged = claims.evaluate_run(here, evidence)
    n = claims.counts(judged)
    ladder, results = here.ladder, here.results
    timed = sum(any(results.median_us(c, r.id) for c in results.cells) for r in ladder.rungs)
    return (
        f"{here.run.path.parent.name}/{here.run.path.name}",
        here.info.machine.gpu or "unknown",
        here.info.date[:10],
        f"{timed} of {len(ladder.rungs)}",
        best,
        tables.comparison(results.comparison(ladder.reference, best, ladder.baseline)),
        f"{n['reproduced']} of {n['reproduced'] + n['not reproduced']} measured",
        *(NOT_MEASURED if r.tau is None else f"{r.tau:.3f}" for r in ranks(evidence, here)),
    )
