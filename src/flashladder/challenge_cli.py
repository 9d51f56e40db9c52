"""The command `flashladder challenge`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import click
import msgspec

from flashladder import candidate, ledger, machine, paths
from flashladder import challenge as challenging
from flashladder.errors import Exit, FlashladderError
from flashladder.ladder import load_ladder
from flashladder.model import DTYPES, MASKS, DtypeName, Mask
from flashladder.ninja import Progress

Bar = Callable[[str, str], AbstractContextManager[Progress]]


def register(main: click.Group, bar: Bar) -> None:
    """Add the command to `main`; `bar` shows progress."""

    @main.command(name="challenge")
    @click.argument("kernel", type=click.Path(path_type=Path), required=False)
    @click.option("--against", metavar="RUNG", help="Measure against this rung; the champion stays.")
    @click.option("--first", metavar="RUNG", help="Champion where nobody was accepted yet; default: the last rung.")
    @click.option("--shape", "shapes", multiple=True, metavar="SET|ID", help="Only this set or shape; repeatable.")
    @click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Only this element type.")
    @click.option("--mask", "masks", multiple=True, type=click.Choice(MASKS), help="Only this mask.")
    @click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of ledger and champion.")
    @click.option("--seed", type=click.IntRange(min=0), help="Seed of inputs and orders; default: a fresh one.")
    @click.option(
        "--budget",
        type=click.IntRange(min=1),
        default=challenging.BUDGET,
        show_default=True,
        help="Challenges that share the chance of a false accept.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
    @click.option("--template", type=click.Path(path_type=Path), help="Write a candidate to begin with: .cu or .py.")
    def command(
        kernel: Path | None,
        against: str | None,
        first: str | None,
        shapes: tuple[str, ...],
        dtypes: tuple[DtypeName, ...],
        masks: tuple[Mask, ...],
        out: Path | None,
        seed: int | None,
        budget: int,
        as_json: bool,
        template: Path | None,
    ) -> None:
        """Hand in KERNEL, a .cu or .py file, against the champion: built, checked, timed, confirmed; a verdict.

        Without a GPU it is built and checked on the emulator. Exit code 0: accepted; 10, 11: not better, worse
        somewhere; 20 to 23: build, time limit, grid, wrong; 30: nothing could be timed here.
        """
        folder = out or challenging.default_out()
        if template is not None:
            click.echo(_write_template(template, folder, first))
            return
        if kernel is None:
            raise FlashladderError("no kernel is named; expected a .cu or .py file, or --template FILE")
        request = challenging.Request(kernel, folder, against, shapes, dtypes, masks, seed, budget, first)
        with ExitStack() as stack, challenging.raised_as_environment():
            verdict = challenging.challenge(
                request,
                lambda line: click.echo(line, err=True),
                lambda title: stack.enter_context(bar(title, "case" if title == "check" else "cell")),
            )
        click.echo(msgspec.json.encode(verdict).decode() if as_json else challenging.summary(verdict))
        if verdict.exit_code != Exit.OK:
            sys.exit(verdict.exit_code)


def _write_template(file: Path, folder: Path, first: str | None) -> str:
    default = challenging.default_champion(load_ladder(), machine.gpu_arch(), first)
    champion = ledger.read(folder, default).champion
    if champion.file is not None:
        source = folder / champion.file
        return candidate.write_template(file, source, candidate.name_of(source))
    rung = load_ladder()[champion.id]
    return candidate.write_template(file, paths.ROOT / rung.source, rung.id)
