"""A proposer for the loop: a search over the parameters that experiments/tune.toml declares, by Optuna.

A candidate is the last Hopper kernel with other tiles: rows, keys, stages, turns, for each head dimension. An attempt
changes one head dimension and leaves the other as the champion has it. Which tiles fit follows from the GPU's limits
(limits.py); where nothing is known yet the model's order decides, then Optuna's TPE sampler. All that it knows it reads
from the ledger: what it printed when it proposed, and the ratios of the cells of that head dimension.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from flashladder import limits, paths
from flashladder.errors import FlashladderError
from flashladder.ladder import gpu_called, gpu_named, load_ladder, load_shapes, load_tuning
from flashladder.limits import Design, Fit
from flashladder.loop import NOTHING_MORE, Attempt, Brief
from flashladder.model import Blocking, Cell, Gpu, Record, Shape, Tuning

HEAD_DIMS = (64, 128)
FAILED = -1.0
"""Log-ratio of a candidate that gave none: it did not build, was wrong, or was not timed."""
STARTUP = 4
ASKS = 8
PARAMETERS = ("tile_m", "tile_n", "stages", "ping_pong")

Point = tuple[int, int, int, int]
"""The values of PARAMETERS."""


class Note(Record, frozen=True, kw_only=True):
    """What this proposer prints: the tiles of a candidate, and which head dimension they were changed for."""

    tiles: dict[str, Point]
    """By head dimension."""
    changed: int


def space(tuning: Tuning, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Parameter -> the values that the declared candidates of a head dimension take."""
    points = [point_of(c) for c in tuning.candidate if c.head_dim == head_dim]
    return {name: tuple(sorted({p[i] for p in points})) for i, name in enumerate(PARAMETERS)}


def point_of(blocking: Blocking) -> Point:
    return blocking.tile_m, blocking.tile_n, blocking.stages, int(blocking.ping_pong)


def blocking_of(head_dim: int, point: Point) -> Blocking:
    tile_m, tile_n, stages, turns = point
    return Blocking(head_dim=head_dim, tile_m=tile_m, tile_n=tile_n, stages=stages, ping_pong=bool(turns))


@cache
def feasible(tuning: Tuning, head_dim: int, gpu: Gpu) -> tuple[Point, ...]:
    """The points of the space that fit the GPU with all their stages, the best of the model first."""
    cell = _cell(head_dim)
    found = []
    for point in itertools.product(*space(tuning, head_dim).values()):
        tile_m, tile_n, stages, turns = point
        fitted = limits.fit(Design(instruction="wgmma", tile_m=tile_m, tile_n=tile_n, stages=stages), head_dim, gpu)
        if isinstance(fitted, Fit) and fitted.design.stages == stages:
            us = limits.predict(fitted, cell, gpu, gpu.boost_hz).us
            found.append((us, -stages, turns, (tile_m, tile_n, stages, turns)))
    return tuple(point for *_, point in sorted(found))


def _cell(head_dim: int) -> Cell:
    """The largest shape of the headline set of that head dimension, full."""
    shapes = [s for s, _ in load_shapes()["headline"].entries if s.head_dim == head_dim]
    return Cell(shape=max(shapes, key=lambda s: s.seq_q), dtype=load_ladder().reference.dtype, causal=False)


@dataclass
class Known:
    """What the ledger tells of one head dimension: log of the first champion's time over each point's."""

    scores: dict[Point, float] = field(default_factory=dict)

    @property
    def best(self) -> Point:
        return max(self.scores, key=lambda point: self.scores[point])


def known(start: Mapping[int, Point], ledger: Sequence[Attempt]) -> tuple[dict[int, Known], dict[int, Point]]:
    """What is known of each head dimension, and the tiles of the champion.

    An attempt's ratio is against the champion of its time, whose own score it is added to.
    """
    scores = {d: Known({point: 0.0}) for d, point in start.items()}
    champion = dict(start)
    for attempt in ledger:
        try:
            note = msgspec.json.decode(attempt.note, type=Note)
        except msgspec.DecodeError:  # another proposer's
            continue
        d = note.changed
        point = note.tiles[str(d)]
        logs = [math.log(r.ratio) for cell, r in attempt.ratios.items() if _head_dim(cell) == d]
        base = scores[d].scores[champion[d]]
        value = base + math.fsum(logs) / len(logs) if logs else FAILED
        if point != champion[d]:
            scores[d].scores[point] = value
        if attempt.outcome == "accepted":
            champion = {int(key): tiles for key, tiles in note.tiles.items()}
    return scores, champion


def _head_dim(cell_id: str) -> int | None:
    shape = Shape.of_id(cell_id.split("-")[0])
    return None if shape is None else shape.head_dim


def propose(
    tuning: Tuning,
    gpu: Gpu,
    start: Mapping[int, Point],
    ledger: Sequence[Attempt],
    number: int,
    seed: int,
    startup: int = STARTUP,
) -> Note | None:
    """The next candidate; None when every point that fits was tried. Head dimensions take turns.

    `startup`: attempts of a head dimension that the model's order decides.
    """
    scores, champion = known(start, ledger)
    order = HEAD_DIMS[(number - 1) % 2 :] + HEAD_DIMS[: (number - 1) % 2]
    for head_dim in order:
        left = [p for p in feasible(tuning, head_dim, gpu) if p not in scores[head_dim].scores]
        if left:
            point = _next(left, scores[head_dim], space(tuning, head_dim), seed + number, startup)
            tiles = {**champion, head_dim: point}
            return Note(tiles={str(d): tiles[d] for d in HEAD_DIMS}, changed=head_dim)
    return None


def _next(left: Sequence[Point], seen: Known, values: dict[str, tuple[int, ...]], seed: int, startup: int) -> Point:
    """One of the untried points: the model's first, at the start; then the sampler's, if it finds an untried one."""
    if len(seen.scores) <= startup:
        return left[0]
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space_of = {name: optuna.distributions.CategoricalDistribution(choices) for name, choices in values.items()}
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for point, value in seen.scores.items():
        parameters = dict(zip(PARAMETERS, point, strict=True))
        if all(parameters[name] in values[name] for name in PARAMETERS):
            study.add_trial(optuna.trial.create_trial(params=parameters, distributions=space_of, value=value))
    for _ in range(ASKS):
        trial = study.ask(space_of)
        point = tuple(trial.params[name] for name in PARAMETERS)
        if point in left:
            return point
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return left[0]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise FlashladderError("optuna is missing; run 'uv sync --group search'") from error
    return optuna


# --- the candidate --------------------------------------------------------------------------------------------------

NAME = "candidate"
_RUNG = re.compile(r"^FLASHLADDER_DISPATCH_RUNG\(\w+, kConfig, (?P<sizes>\w+)\)$", re.MULTILINE)


def source(tiles: Mapping[str, Point]) -> str:
    """The last Hopper rung with these tiles. Its kernels of fewer rows, which small grids take, stay as they are."""
    fields: dict[str, int] = {}
    for head_dim, point in tiles.items():
        fields |= blocking_of(int(head_dim), point).fields
    changes = "".join(f"  config.{name} = {value};\n" for name, value in fields.items())
    text = (paths.ROOT / load_ladder().rungs[-1].source).read_text()
    found = _RUNG.search(text)
    assert found is not None
    sizes = found["sizes"]
    return (
        f"{text[text.index('#define') : found.start()].replace('kConfig', 'kLast')}"
        f"constexpr Config kConfig = [] {{\n  Config config = kLast;\n{changes}  return config;\n}}();\n\n"
        f"namespace flashladder {{\ntemplate <int D>\nstruct LastSizes : {sizes}<D> {{\n"
        f"  static constexpr Config m128(Config) {{ return {sizes}<D>::m128(kLast); }}\n"
        f"  static constexpr Config m64(Config) {{ return {sizes}<D>::m64(kLast); }}\n}};\n"
        f"}}  // namespace flashladder\n\nFLASHLADDER_DISPATCH_RUNG({NAME}, kConfig, LastSizes)\n"
    )


def start_of(brief: Brief, tuning: Tuning) -> dict[int, Point]:
    """The tiles that the loop began with: of its first champion's Config, else those that hand tuning chose."""
    config = brief.diagnosis.config if brief.diagnosis is not None else {}
    if config.get("tile_m_128"):
        return {d: point_of(Blocking.of(config, d)) for d in HEAD_DIMS}
    chosen = {c.head_dim: c.blocking for c in tuning.choice}
    return {c.head_dim: point_of(c) for c in tuning.candidate if chosen[c.head_dim] == c.name}


def main() -> None:
    """Reads a brief on stdin, writes the candidate that it names, prints what was chosen."""
    brief = msgspec.json.decode(sys.stdin.buffer.read(), type=Brief)
    tuning = load_tuning()
    name = brief.diagnosis.gpu if brief.diagnosis is not None else None
    gpu = (gpu_named(name) if name is not None else None) or gpu_called("h100")
    try:
        note = propose(tuning, gpu, start_of(brief, tuning), brief.ledger, brief.number, brief.seed)
    except FlashladderError as error:
        sys.exit(f"{error}")
    if note is None:
        sys.exit(NOTHING_MORE)
    Path(brief.candidate).write_text(source(note.tiles))
    print(msgspec.json.encode(note).decode())


if __name__ == "__main__":
    main()
