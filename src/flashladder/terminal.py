"""What every command shows on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from flashladder.ninja import Progress


@contextmanager
def bar(title: str, unit: str) -> Iterator[Progress]:
    """A progress bar on stderr; where that is no terminal, a line every few seconds."""
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(
        desc=title, unit=unit, leave=False, dynamic_ncols=True, mininterval=seconds, miniters=1, delay=0.5
    ) as shown:

        def update(done: int, total: int, what: str) -> None:
            if shown.total is None:  # what an earlier session did must not count in this one's rate
                shown.initial = done
                shown.n = done
            shown.total = total
            shown.set_postfix_str(what, refresh=False)
            shown.update(done - shown.n)

        yield update
