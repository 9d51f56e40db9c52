"""The image: everything that it is made from is pinned, and its linter is content."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from flashladder import ablation, build, paths

DOCKERFILE = (paths.ROOT / "Dockerfile").read_text()
INSTRUCTIONS = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
DIGEST = r"@sha256:[0-9a-f]{64}"


def _arguments() -> dict[str, str]:
    return {m[1]: m[2].strip('"') for line in INSTRUCTIONS if (m := re.match(r"ARG (\w+)=(.*)", line))}


def unpinned(instructions: list[str]) -> list[str]:
    """Images that FROM or COPY --from name without a digest; stages of the file and ARGs' defaults are resolved."""
    stages = {m[1] for line in instructions if (m := re.match(r"FROM \S+ AS (\S+)", line))}
    named = [m[1] for line in instructions if (m := re.match(r"(?:FROM |COPY .*--from=)(\S+)", line))]
    images = [re.sub(r"\$\{(\w+)\}", lambda m: _arguments()[m[1]], name) for name in named if name not in stages]
    return [image for image in images if not re.search(DIGEST + "$", image)]


def test_every_image_has_a_digest() -> None:
    assert sum(line.startswith("FROM ") for line in INSTRUCTIONS) == 3
    assert unpinned(INSTRUCTIONS) == []
    assert unpinned(["FROM debian:12", "FROM debian:12@sha256:12 AS x", "COPY --from=busybox /a /b", "FROM x"]) == [
        "debian:12",
        "debian:12@sha256:12",
        "busybox",
    ]


def test_every_wheel_is_of_the_lock_or_has_a_hash() -> None:
    installs = [line for line in INSTRUCTIONS if re.search(r"\b(pip|uv|conda|curl|wget)\b.*(install|sync|http)", line)]
    assert len(installs) == 1
    (commands,) = (line.split("&&") for line in installs)
    pip = [c for c in commands if "pip install" in c]
    assert len(pip) == 1
    assert "--require-hashes" in pip[0]
    assert pip[0].split()[-2:] == ["-r", "uv.txt"]
    assert re.fullmatch(r"uv==[\d.]+ --hash=sha256:[0-9a-f]{64}\n", (paths.ROOT / "container" / "uv.txt").read_text())
    (sync,) = (c for c in commands if "uv sync" in c)
    assert {"--locked", "--no-dev", "--no-install-project"} <= set(sync.split())


def test_the_image_runs_as_no_root_and_has_every_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    users = [line.split()[1] for line in INSTRUCTIONS if line.startswith("USER ")]
    assert users == ["1000:1000"]
    monkeypatch.setenv("FLASHLADDER_ARCHS", _arguments()["ARCHS"])
    archs = ablation.target_archs(())
    assert {*build.ALL_ARCHS, "sm_86", "compute_80"} == set(archs)
    defaults = re.findall(r"^ARG ARCHS=.*$", DOCKERFILE, re.MULTILINE)
    assert len(defaults) == 2
    assert len(set(defaults)) == 1


def test_what_the_image_copies_is_not_ignored() -> None:
    kept = {line[1:] for line in (paths.ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [
        source
        for line in INSTRUCTIONS
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
        if source != "."
    ]
    assert {source.split("/")[0] for source in sources} <= kept
    assert all((paths.ROOT / name).exists() for name in kept)


def test_hadolint_is_content() -> None:
    beside = Path(sysconfig.get_path("scripts")) / "hadolint"
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    assert hadolint is not None, "hadolint is of the group dev: run 'uv sync'"
    done = subprocess.run([hadolint, paths.ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
