"""The emitters, one module a group of instructions; importing a module registers its emitters."""

from __future__ import annotations

from importlib import import_module

from flashladder.emulator.emitter import REGISTRY

GROUPS = (
    "arithmetic",
    "floating",
    "logic",
    "compare",
    "convert",
    "move",
    "memory",
    "atomic",
    "control",
    "warp",
    "barrier",
    "ampere",
    "hopper",
)
"""Modules of this package, in the order of the documentation."""


def load_all() -> None:
    """Registers every emitter."""
    for group in GROUPS:
        import_module(f"{__name__}.{group}")


def coverage() -> str:
    """A Markdown table of every instruction that has an emitter, for docs/emulator.md."""
    load_all()
    lines = ["| Group | Instructions |", "| --- | --- |"]
    for group in GROUPS:
        title = (import_module(f"{__name__}.{group}").__doc__ or "").strip().rstrip(".")
        names = ", ".join(f"`{e.name}`" for e in sorted(REGISTRY.values(), key=lambda e: e.name) if e.group == group)
        lines.append(f"| {title} | {names} |")
    return "\n".join(lines) + "\n"
