"""The kernels behind flashladder.attention: which rung is the fastest on a GPU, and its library."""

from __future__ import annotations

import sys
from pathlib import Path

from flashladder import build, machine
from flashladder.ablation import target_archs
from flashladder.errors import BuildError, EnvironmentInvalidError
from flashladder.ladder import load_ladder
from flashladder.model import Rung

RUNGS = {"sm_90a": "r38_first_look"}
PORTABLE = "r13_tuned"
"""The fastest rung on an architecture, and on all others; each chooses among its kernels by the problem's shape."""
MIN_ARCH = 80


def arch_of(major: int, minor: int) -> str:
    """machine.arch_of(); raises EnvironmentInvalidError below MIN_ARCH."""
    if 10 * major + minor < MIN_ARCH:
        raise EnvironmentInvalidError(
            f"flashladder.attention: this GPU has compute capability {major}.{minor}, expected {MIN_ARCH / 10} or "
            "newer; use torch.nn.functional.scaled_dot_product_attention"
        )
    return machine.arch_of(major, minor)


def rung(arch: str) -> Rung:
    """The fastest rung on an architecture."""
    return load_ladder()[RUNGS.get(arch, PORTABLE)]


def library(arch: str) -> Path:
    """The library of that rung, compiled when build/ has none that runs there; raises BuildError."""
    chosen = rung(arch)
    for archs in ([arch], target_archs(()), build.ALL_ARCHS):
        for made in build.targets([chosen], archs):
            runs = arch in made.archs or any(a.startswith("compute_") for a in made.archs)
            if runs and made.library.exists():
                return made.library
    (target,) = build.targets([chosen], [arch])
    print(f"flashladder: compiling {chosen.id} for {arch}; build/ keeps it", file=sys.stderr, flush=True)
    if failed := build.compile_targets([target]):
        raise BuildError(f"{chosen.id} does not compile for {arch}: {build.first_error(failed[chosen.id])}")
    return target.library
