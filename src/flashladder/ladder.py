"""Reads and checks what experiments/*.toml declares. Pure: no GPU, no compiler."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from flashladder import paths
from flashladder.errors import FlashladderError
from flashladder.model import (
    HOPPER,
    Cell,
    DtypeName,
    Gpu,
    L2Mode,
    Mask,
    Past,
    Preset,
    Record,
    Rung,
    Shape,
    ShapeSet,
    Tuning,
)

T = TypeVar("T")

CONTROL = "#control"
"""Suffix of the baseline's second arm in every cell: the run's own A/A comparison."""
CHOICE = "@"
"""Stands between a rung and the plan that it is made to follow (tune.py)."""
NO_LADDER = ("tune", "blocking")
"""The presets whose runs are of one rung's choices."""
VALUES = "values"
"""The set whose cells are timed on every kind of values, and on normal ones beside them alone."""


def gated_name(arm: str) -> str:
    """The name under which the gate checked an arm: a baseline's control and a rung's forced plans are its own."""
    return arm.removesuffix(CONTROL).split(CHOICE)[0]


class _ShapeEntry(Record, frozen=True, kw_only=True):
    batch: int
    heads: int
    seq: int
    head_dim: int
    heads_kv: int | None = None
    seq_k: int | None = None
    masks: tuple[Mask, ...] = ("full", "causal")

    def shape(self) -> Shape:
        return Shape(
            batch=self.batch,
            heads_q=self.heads,
            heads_kv=self.heads if self.heads_kv is None else self.heads_kv,
            seq_q=self.seq,
            seq_k=self.seq if self.seq_k is None else self.seq_k,
            head_dim=self.head_dim,
        )


class _SetEntry(Record, frozen=True, kw_only=True):
    l2: L2Mode
    shapes: tuple[_ShapeEntry, ...]


class _Reference(Record, frozen=True, kw_only=True):
    shape: _ShapeEntry
    dtype: DtypeName
    mask: Mask
    baseline: str


class _LegEntry(Record, frozen=True, kw_only=True):
    name: str
    first: str
    shape: _ShapeEntry
    mask: Mask | None = None  # the reference's


class _LadderFile(Record, frozen=True, kw_only=True):
    reference: _Reference
    leg: tuple[_LegEntry, ...] = ()
    rung: tuple[dict[str, Any], ...]


class _AblationFile(Record, frozen=True, kw_only=True):
    shapes: dict[str, tuple[str, ...]]
    variant: tuple[dict[str, Any], ...]


class _PastEntry(Record, frozen=True, kw_only=True):
    what: str
    then: str
    kind: Literal["measured", "predicted"]
    steps: tuple[str, str] | None = None
    arms: tuple[str, ...] = ()
    cell: _ShapeEntry | None = None
    mask: Mask = "full"
    counter: str | None = None


class _HistoryFile(Record, frozen=True, kw_only=True):
    source: str
    entry: tuple[_PastEntry, ...]


class _GpuFile(Record, frozen=True, kw_only=True):
    gpu: tuple[Gpu, ...]


class _MoreMetrics(Record, frozen=True, kw_only=True):
    archs: tuple[str, ...]
    metrics: tuple[str, ...]


class Metrics(Record, frozen=True, kw_only=True):
    """What the profiler is asked for (experiments/metrics.toml)."""

    light: tuple[str, ...]
    more: tuple[_MoreMetrics, ...] = ()

    def names(self, arch: str) -> list[str]:
        """The metrics that an architecture (sm_NN or sm_NNa) has, with those of the predictions."""
        more = [name for entry in self.more if arch.rstrip("a") in entry.archs for name in entry.metrics]
        predicted = [p.metric for r in load_ladder().rungs for p in r.predictions if p.metric != "time"]
        return list(dict.fromkeys([*self.light, *more, *predicted]))


@dataclass(frozen=True)
class Leg:
    """A part of the ladder that is read at one cell. A later leg begins with the rung that it starts from."""

    name: str
    cell: Cell
    rungs: tuple[Rung, ...]


@dataclass(frozen=True)
class Ladder:
    """The rungs in order, the cell and baseline that the ladder's table is read at, and the leave-one-out variants."""

    rungs: tuple[Rung, ...]
    reference: Cell
    baseline: str
    turns: tuple[tuple[str, str, Cell], ...] = ()
    """Where another cell shows the rungs better: (name of that leg, its first rung, its cell)."""
    variants: tuple[Rung, ...] = ()
    variant_shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rung -> ids of the shapes at which its variants are measured."""

    def __getitem__(self, rung_id: str) -> Rung:
        for rung in (*self.rungs, *self.variants):
            if rung.id == rung_id:
                return rung
        raise FlashladderError(f"no rung {rung_id!r}; the ladder has {', '.join(r.id for r in self.rungs)}")

    def has_variant_at(self, variant: Rung, shape: Shape) -> bool:
        """Whether the variant is measured at that shape."""
        return shape.id in self.variant_shapes.get(variant.parent or "", ())

    @property
    def legs(self) -> tuple[Leg, ...]:
        ids = [rung.id for rung in self.rungs]
        starts = [0, *(ids.index(first) for _, first, _ in self.turns), len(ids)]
        named = [("portable", self.reference), *((name, cell) for name, _, cell in self.turns)]
        return tuple(
            Leg(name, cell, self.rungs[max(start - 1, 0) : end])
            for (name, cell), start, end in zip(named, starts[:-1], starts[1:], strict=True)
        )

    def champions(self, arch: str | None) -> tuple[Rung, ...]:
        """The last portable rung and the last of all that a GPU of `arch` runs (None: any): one where they are one."""
        running = [rung for rung in self.rungs if arch is None or rung.runs_on(arch)]
        portable = [rung for rung in running if rung.min_arch < HOPPER]
        return tuple({rung.id: rung for rung in (*portable[-1:], *running[-1:])}.values())

    def cell_of(self, rung: Rung) -> Cell:
        """The cell that a rung is read at. A variant's: its parent's, or of the last leg before that measures it."""
        if rung in self.rungs:
            return next(leg.cell for leg in self.legs if rung in leg.rungs)
        parent = self[rung.parent or ""]
        before = [leg.cell for leg in self.legs if self.rungs.index(leg.rungs[0]) < self.rungs.index(parent)]
        cell = next((c for c in reversed(before) if self.has_variant_at(rung, c.shape)), self.cell_of(parent))
        return msgspec.structs.replace(cell, dtype=rung.dtype or cell.dtype)

    def has(self, rung: Rung, field: str) -> bool:
        """Whether the configuration field stands as a rung changed it, the last to touch it: `forced` puts it back."""
        while field not in {*rung.changes, *rung.forced} and rung.parent is not None:
            rung = self[rung.parent]
        return field in rung.changes

    def select(self, names: tuple[str, ...]) -> tuple[Rung, ...]:
        """The rungs and variants that `names` (ids or their unambiguous prefixes) stand for, in order.

        The ladder's rungs when empty.
        """
        if not names:
            return self.rungs
        known_ids = [r.id for r in (*self.rungs, *self.variants)]
        chosen: set[str] = set()
        for name in names:
            matches = [i for i in known_ids if i == name] or [i for i in known_ids if i.startswith(name)]
            if len(matches) != 1:
                known = ", ".join(known_ids)
                raise FlashladderError(
                    f"{name!r} names {len(matches)} rungs; expected an id or an unambiguous prefix of one of {known}"
                )
            chosen.add(matches[0])
        return tuple(r for r in (*self.rungs, *self.variants) if r.id in chosen)


def load_toml(file: Path, record: type[T]) -> T:
    try:
        return msgspec.convert(tomllib.loads(file.read_text()), record, strict=False)
    except FileNotFoundError as error:
        raise FlashladderError(f"{file} does not exist; run from a checkout of flashladder") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise FlashladderError(f"{file}: {error}") from error


def parse_ladder(file: Path, variants: Path | None = None) -> Ladder:
    """Read a ladder file and one of variants.

    Raises FlashladderError on unknown fields, duplicate ids or a parent that comes later.
    """
    raw = load_toml(file, _LadderFile)
    rungs = _parse_rungs(file, raw.rung, "rung", ())
    ref = raw.reference
    cell = Cell(shape=ref.shape.shape(), dtype=ref.dtype, causal=ref.mask == "causal")
    turns = []
    for leg in raw.leg:
        if leg.first not in {rung.id for rung in rungs}:
            raise FlashladderError(f"{file}: leg {leg.name}: no rung {leg.first!r}")
        causal = (leg.mask or ref.mask) == "causal"
        turns.append((leg.name, leg.first, msgspec.structs.replace(cell, shape=leg.shape.shape(), causal=causal)))
    ladder = Ladder(rungs=rungs, reference=cell, baseline=ref.baseline, turns=tuple(turns))
    if variants is None:
        return ladder
    ablation = load_toml(variants, _AblationFile)
    declared = _parse_rungs(variants, ablation.variant, "variant", rungs)
    return replace(ladder, variants=declared, variant_shapes=ablation.shapes)


def _parse_rungs(
    file: Path, entries: Sequence[dict[str, Any]], kind: Literal["rung", "variant"], above: Sequence[Rung]
) -> tuple[Rung, ...]:
    rungs: list[Rung] = []
    for entry in entries:
        entry = {**entry, "kind": kind}
        entry["predictions"] = entry.pop("prediction", ())
        try:
            rung = msgspec.convert(entry, Rung, strict=False)
        except msgspec.ValidationError as error:
            raise FlashladderError(f"{file}: {kind} {entry.get('id', '?')}: {error}") from error
        seen = [r.id for r in (*above, *rungs)]
        if rung.id in seen:
            raise FlashladderError(f"{file}: {kind} {rung.id} is declared twice")
        if rung.parent is not None and rung.parent not in seen:
            raise FlashladderError(f"{file}: {kind} {rung.id}: parent {rung.parent!r} is not declared above it")
        rungs.append(rung)
    return tuple(rungs)


@cache
def load_ladder() -> Ladder:
    return parse_ladder(paths.EXPERIMENTS / "ladder.toml", paths.EXPERIMENTS / "ablation.toml")


@cache
def load_shapes() -> dict[str, ShapeSet]:
    sets = load_toml(paths.EXPERIMENTS / "shapes.toml", dict[str, _SetEntry])
    return {
        name: ShapeSet(name=name, l2=entry.l2, entries=tuple((e.shape(), e.masks) for e in entry.shapes))
        for name, entry in sets.items()
    }


@cache
def load_presets() -> dict[str, Preset]:
    return load_toml(paths.EXPERIMENTS / "presets.toml", dict[str, Preset])


@cache
def load_tuning() -> Tuning:
    """Raises FlashladderError when a choice is no candidate of its head dimension."""
    tuning = load_toml(paths.EXPERIMENTS / "tune.toml", Tuning)
    names = {(c.head_dim, c.name) for c in tuning.candidate}
    for choice in tuning.choice:
        if (choice.head_dim, choice.blocking) not in names:
            raise FlashladderError(
                f"tune.toml: the choice {choice.blocking!r} is no candidate at head_dim {choice.head_dim}; "
                f"expected one of {', '.join(name for d, name in sorted(names) if d == choice.head_dim)}"
            )
    return tuning


@cache
def load_history() -> tuple[str, tuple[Past, ...]]:
    """Where the figures of earlier work come from, and the figures."""
    raw, dtype = load_toml(paths.EXPERIMENTS / "history.toml", _HistoryFile), load_ladder().reference.dtype
    past = (
        Past(
            what=e.what,
            then=e.then,
            kind=e.kind,
            steps=e.steps,
            arms=e.arms,
            cell=None if e.cell is None else Cell(shape=e.cell.shape(), dtype=dtype, causal=e.mask == "causal"),
            counter=e.counter,
        )
        for e in raw.entry
    )
    return raw.source, tuple(past)


@cache
def load_metrics() -> Metrics:
    return load_toml(paths.EXPERIMENTS / "metrics.toml", Metrics)


@cache
def load_gpus() -> tuple[Gpu, ...]:
    return load_toml(paths.EXPERIMENTS / "gpus.toml", _GpuFile).gpu


def gpu_named(name: str) -> Gpu | None:
    """The declared limits of the GPU that NVML calls `name`: the longest declared name it starts with."""
    matches = [gpu for gpu in load_gpus() if re.match(re.escape(gpu.name) + r"(?![A-Za-z0-9])", name)]
    return max(matches, key=lambda gpu: len(gpu.name), default=None)


def gpu_called(slug: str) -> Gpu:
    """The declared limits of the GPU with that short name. Raises FlashladderError when none is declared."""
    for gpu in load_gpus():
        if gpu.slug == slug:
            return gpu
    known = ", ".join(gpu.slug for gpu in load_gpus())
    raise FlashladderError(f"no GPU {slug!r} in experiments/gpus.toml; expected one of {known}")


def value_cells() -> list[Cell]:
    """The cells in which the champions are timed on every kind of values."""
    return load_shapes()[VALUES].cells((load_ladder().reference.dtype,))


def timed_sets() -> list[ShapeSet]:
    """The declared sets whose cells are timed on normal values, each from the L2 state of its set."""
    return [declared for name, declared in load_shapes().items() if name != VALUES]


def preset_cells(preset: Preset) -> dict[Cell, L2Mode]:
    """The cells that a preset measures, each once, with the L2 mode of the first set that names it."""
    cells: dict[Cell, L2Mode] = {}
    for name in preset.sets:
        for cell in load_shapes()[name].cells(preset.dtypes):
            if preset.max_seq is None or cell.shape.seq_k <= preset.max_seq:
                cells.setdefault(cell, load_shapes()[name].l2)
    return cells
