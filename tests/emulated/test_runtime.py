"""The emulator's C++ runtime, without nvcc: each TEST of tests/emulated/runtime/*.cpp is one test here."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flashladder import paths
from flashladder.emulator.library import RUNTIME, runtime_objects
from flashladder.toolchain import find_cxx, wheel_root

FILES = sorted([*RUNTIME.iterdir(), *(Path(__file__).parent / "runtime").iterdir()])
TEST = re.compile(r"^TEST\((\w+)\)", re.MULTILINE)
NAMES = [name for file in FILES if file.suffix == ".cpp" for name in TEST.findall(file.read_text())]
INCLUDE = wheel_root() / "include"
FLAGS = ("-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", f"-I{RUNTIME}", f"-isystem{INCLUDE}")
SOURCES = [file for file in FILES if file.suffix == ".cpp" and file.parent != RUNTIME]


@pytest.fixture(scope="session")
def program() -> Path:
    """All tests and the runtime in one program that takes names of tests; named by the hash of what it is made from."""
    digest = hashlib.sha256("\0".join([find_cxx(), *FLAGS]).encode())
    for file in FILES:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    target = paths.BUILD / f"runtime-tests-{digest.hexdigest()[:16]}"
    paths.BUILD.mkdir(exist_ok=True)
    with (paths.BUILD / "runtime-tests.lock").open("w") as lock:  # workers of pytest-xdist take turns: one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(target)
    return target


def _build(target: Path) -> None:
    with TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_one(source: Path) -> Path:
            made = Path(directory) / f"{source.stem}.o"
            subprocess.run(["g++", *FLAGS, "-c", source, "-o", made], check=True)
            return made

        objects = [*pool.map(compile_one, SOURCES), *runtime_objects()]
        linked = Path(directory) / "tests"
        subprocess.run(["g++", *objects, "-ldl", "-o", linked], check=True)
        shutil.move(linked, target)


@pytest.mark.parametrize("name", NAMES)
def test_runtime(program: Path, name: str) -> None:
    done = subprocess.run([program, name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
