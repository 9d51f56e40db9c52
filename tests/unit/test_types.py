"""Types: mypy, strictly. A test, so that it shares the cores with the others."""

from __future__ import annotations

import subprocess
import sys

from flashladder import paths


def test_types_are_right() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=paths.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
