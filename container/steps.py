"""Builds the Dockerfile's steps without a container engine, on a stand-in for its base image, and runs commands inside.

This proves the steps, not the base image: the stand-in is Debian without CUDA, so the locked wheels' nvcc compiles.
torch is left out and few kernels are prebuilt, for time; EXTRAS, ARCHS and PREBUILD of the Dockerfile say which.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("buildah", "debootstrap", "crun")
STAND_IN = "localhost/flashladder-standin"
IMAGE = "localhost/flashladder-steps"
SUITE = "bookworm"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
DRIVER = ("--storage-driver", "overlay")
RUNG = "r08_mma_sync"
CALLER, OTHER = 4242, 4243
"""Users without a name; the first owns the results."""


def say(text: str) -> None:
    print(f"container_steps: {text}", flush=True)


def buildah(*arguments: str, capture: bool = False) -> str:
    """Run buildah; exits when it fails."""
    done = subprocess.run(["buildah", *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        sys.exit(f"container_steps: 'buildah {' '.join(arguments)}' ended with {done.returncode}")
    return done.stdout or ""


def make_stand_in() -> None:
    """A minimal Debian as an image, unless an earlier session left it."""
    known = subprocess.run(["buildah", "inspect", *DRIVER, "--type", "image", STAND_IN], capture_output=True)
    if known.returncode == 0:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ("--variant=minbase", "--include=ca-certificates")
        subprocess.run(["debootstrap", *options, SUITE, folder / "root"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "-C", folder / "root", "-cf", folder / "base.tar", "."], check=True)
        shutil.rmtree(folder / "root")
        (folder / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        buildah("bud", *DRIVER, "--quiet", "--isolation=chroot", "-t", STAND_IN, str(folder))


def build(more: list[str]) -> None:
    """The Dockerfile's steps; `more` are further options of `buildah bud`."""
    values = {"EXTRAS": "", "ARCHS": "sm_80 compute_80", "PREBUILD": f"--rung {RUNG}", "COMMIT": "steps"}
    arguments = [f"--build-arg={name}={value}" for name, value in {"BASE": STAND_IN, **values}.items()]
    if CERTIFICATES.exists():
        arguments += [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro", "--build-arg=UV_SYSTEM_CERTS=1"]
    buildah("bud", *DRIVER, "--format=docker", "--isolation=chroot", "--layers", *arguments, *more, "-t", IMAGE, ".")


def run(container: str, user: int, results: Path, *command: str) -> str:
    """Run a command of the image as `user` with `results` at /results, and return what it printed."""
    say(f"as user {user}: flashladder {' '.join(command)}")
    volume = f"--volume={results}:/results"
    options = ("--isolation=chroot", f"--user={user}:{user}", volume)
    output = buildah("run", *DRIVER, *options, container, "--", "flashladder", *command, capture=True)
    print(output, flush=True)
    return output


def require(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"container_steps: {what}")


def try_commands(container: str, results: Path) -> None:
    """What a user does without a GPU; files must belong to the owner of the results, whoever starts it."""
    run(container, OTHER, results, "doctor")
    require(RUNG in run(container, OTHER, results, "ladder"), f"the ladder does not show {RUNG}")
    started = time.monotonic()
    run(container, OTHER, results, "build", "--rung", RUNG)
    require(time.monotonic() - started < 10, f"{RUNG} is prebuilt, yet was compiled again")
    said = run(container, 0, results, "ablation", "--rung", RUNG, "--out", "/results")
    require(said.startswith("No GPU here: nothing is timed."), "the CPU path does not say first that there is no GPU")
    files = [file for file in results.rglob("*") if file.is_file()]
    require(bool(files), "the ablation left nothing in /results")
    foreign = [file for file in files if file.stat().st_uid != CALLER]
    require(not foreign, f"{foreign[:1]} does not belong to the owner of /results")
    say(f"{len(files)} files in /results, all of user {CALLER}")


def main() -> None:
    """`steps.py [OPTION...]`: further options of `buildah bud`, as --build-arg=EXTRAS="--extra gpu"."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"container_steps: {', '.join(missing)} missing; apt-get install --no-install-recommends {' '.join(TOOLS)}"
        )
    if os.geteuid() != 0:
        sys.exit("container_steps: debootstrap and chroot need root; run it as root")
    say("this proves the Dockerfile's steps, not its base image, which a minimal Debian stands in for")
    make_stand_in()
    started = time.monotonic()
    build(sys.argv[1:])
    say(f"built in {time.monotonic() - started:.0f} s")
    container = buildah("from", *DRIVER, IMAGE, capture=True).strip()
    try:
        with tempfile.TemporaryDirectory() as name:
            os.chown(name, CALLER, CALLER)
            try_commands(container, Path(name))
    finally:
        buildah("rm", *DRIVER, container, capture=True)
    say("the steps build and run")


if __name__ == "__main__":
    main()
