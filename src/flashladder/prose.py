"""What people wrote about the pinned run. Every figure in it is a name that the records fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prose:
    """Texts in Markdown, filled in."""

    chapters: Mapping[str, str] = field(default_factory=dict)
    rungs: Mapping[str, str] = field(default_factory=dict)
    """Rung -> what it does, why, and what came of it."""


NONE = Prose()
