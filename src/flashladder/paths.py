"""Where the parts of the repository are."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(os.environ.get("FLASHLADDER_ROOT", Path(__file__).resolve().parents[2]))
KERNEL = ROOT / "kernel"
EXPERIMENTS = ROOT / "experiments"
RESULTS = EXPERIMENTS / "results"
PAPER = ROOT / "paper"
BUILD = ROOT / "build"
