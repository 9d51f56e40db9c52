"""The commands that look for a faster kernel and guard what was found: limits, loop, guard."""

from __future__ import annotations

import click

from flashladder import ablation, limits_report, machine, rundir, summary
from flashladder.errors import FlashladderError
from flashladder.ladder import gpu_called, gpu_named, load_gpus, load_ladder
from flashladder.model import DTYPES, MASKS, Cell, DtypeName, Gpu, Mask, Shape


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
            "have other heads or rows, heads a multiple of kv's, and a head_dim of 64 or 128"
        )
    cell = Cell(shape=shape, dtype=dtype, causal=mask == "causal")
    found = limits_report.limits_of(cell, gpu, limits_report.runs_to_look_in())
    click.echo(summary.to_json(found) if as_json else limits_report.text(found, top))


def _is_sound(shape: Shape) -> bool:
    sizes = (shape.batch, shape.heads_q, shape.heads_kv, shape.seq_q, shape.seq_k)
    return min(sizes) > 0 and shape.heads_q % shape.heads_kv == 0 and shape.head_dim in (64, 128)


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


COMMANDS = (limits_command,)
