"""Runs a ninja build graph in the repository's root, or another."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from flashladder import paths
from flashladder.toolchain import find_ninja

Progress = Callable[[int, int, str], None]
"""(done, total, what is running)"""


def silent(done: int, total: int, what: str) -> None:
    """A Progress that shows nothing."""


def relative(path: Path) -> str:
    """`path` as a build graph names it: from the repository's root, so that no absolute path enters an object file."""
    return os.path.relpath(path, paths.ROOT).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def run(lines: Sequence[str], name: str, progress: Progress = silent, root: Path | None = None) -> str:
    """Build everything that `lines` describe, going on past failures, and return what ninja said.

    The caller sees what failed by what does not exist: rules must create their output whole or not at all. `root` holds
    build/ and what the lines name; default: the repository's.
    """
    root = root or paths.ROOT
    (root / "build").mkdir(exist_ok=True)
    with (root / "build" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds at once would write the same outputs
        return _run(lines, name, progress, root)


def _run(lines: Sequence[str], name: str, progress: Progress, root: Path) -> str:
    file = root / "build" / f"{name}.ninja"
    file.write_text("\n".join(["builddir = build", *lines]) + "\n")
    command = [find_ninja(), "-k", "0", "-f", str(file.relative_to(root))]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    output = []
    with subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if step := re.match(r"\[(\d+)/(\d+)\] ", line):
                progress(int(step[1]), int(step[2]), "")
    return "".join(output)
