"""Builds the image and runs it as a user would, where a container engine answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import docker

ROOT = Path(__file__).resolve().parents[1]
TAG = "flashladder"


def build(client: Any, build_args: dict[str, str]) -> None:
    """Build the image, printing what the engine says. Exits on an error."""
    for message in client.api.build(path=str(ROOT), tag=TAG, buildargs=build_args, rm=True, decode=True):
        print(message.get("stream", ""), end="", flush=True)
        if "error" in message:
            sys.exit(f"container: the image was not built: {message['error']}")


def run(client: Any, command: list[str], results: Path, gpu: bool) -> None:
    """Run a command of the image as the calling user, with `results` at /results. Exits when it fails."""
    requests = [docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])] if gpu else []
    running = client.containers.run(
        TAG,
        command,
        user=f"{os.getuid()}:{os.getgid()}",
        volumes={str(results): {"bind": "/results", "mode": "rw"}},
        device_requests=requests,
        detach=True,
    )
    try:
        for line in running.logs(stream=True, follow=True):
            sys.stdout.write(line.decode())
        status = running.wait()["StatusCode"]
    finally:
        running.remove(force=True)
    if status:
        sys.exit(f"container: {' '.join(command)} ended with {status}")


def main() -> None:
    """`run.py [COMMAND...]`: without a command, doctor and the ablation."""
    try:
        client = docker.from_env(timeout=3600)
        client.ping()
    except docker.errors.DockerException as error:
        print(f"container: no engine answers ({error}): nothing is built; 'nox -s container_steps' needs none")
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    build(client, {"COMMIT": commit or "unknown"})
    gpu = shutil.which("nvidia-smi") is not None
    results = Path(tempfile.mkdtemp(prefix="flashladder-results-"))
    commands = [sys.argv[1:]] if sys.argv[1:] else [["doctor"], ["ablation", "--preset", "quick", "--out", "/results"]]
    for command in commands:
        run(client, command, results, gpu)
    foreign = [file for file in results.rglob("*") if file.stat().st_uid != os.getuid()]
    if foreign:
        sys.exit(f"container: {foreign[0]} belongs to user {foreign[0].stat().st_uid}, not to the caller")
    print(f"container: {sum(1 for _ in results.rglob('*'))} files of the caller's in {results}")


if __name__ == "__main__":
    main()
