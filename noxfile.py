"""Sessions are one command each; `uvx nox -s NAME` makes the environment from the lock and runs it."""

import shutil
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = True


def _install(session: nox.Session, *arguments: str) -> None:
    gpu = ["--extra=gpu"] if shutil.which("nvidia-smi") else []
    session.run_install(
        "uv", "sync", "--locked", *gpu, *arguments, env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    )


@nox.session
def ablation(session: nox.Session) -> None:
    """Build, check, time and report; without a GPU, rebuild and regenerate from the recorded run."""
    _install(session, "--no-dev")
    session.run("flashladder", "ablation", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, formatting, types and unit tests. GPU tests: -- -m gpu."""
    _install(session)
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("clang-format", "--dry-run", "--Werror", *_kernel_sources(session))
    session.run(
        "pytest",
        "-n",
        "auto",
        "--durations=20",
        *(session.posargs or ["-m", "not gpu and not mutants and not browser"]),
        env={"OPENBLAS_NUM_THREADS": "1"},  # a worker a core: further threads wait for each other
    )


@nox.session
def page(session: nox.Session) -> None:
    """Load report.html in a headless Chromium and look at it; screenshots: build/screenshots."""
    _install(session, "--group=browser")
    if shutil.which("chromium") is None:
        session.run("playwright", "install", "--with-deps", "chromium")
    session.run("pytest", "-m", "browser", "tests/browser", *session.posargs)


@nox.session(venv_backend="none")
def paper(session: nox.Session) -> None:
    """Build paper/report.tex twice, which must give the same bytes: build/paper/report.pdf."""
    if shutil.which("latexmk") is None:
        packages = "latexmk texlive-latex-recommended texlive-fonts-recommended lmodern"
        session.error(f"latexmk is missing; install it (Debian, Ubuntu: apt-get install {packages})")
    made = []
    for name in ("paper", "paper-again"):
        folder = Path("build", name).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        session.run(
            *("latexmk", "-pdf", "-halt-on-error", "-interaction=nonstopmode", "-silent", "-cd"),
            *(f"-output-directory={folder}", "paper/report.tex"),
            external=True,
            env={"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1"},
        )
        made.append((folder / "report.pdf").read_bytes())
    if made[0] != made[1]:
        session.error("two builds of the paper differ")
    warnings = [line for line in (folder / "report.log").read_text(errors="replace").splitlines() if "Overfull" in line]
    if warnings:
        session.error(f"the paper has text outside its columns: {warnings[0]}")
    session.log(f"build/paper/report.pdf, {len(made[0])} bytes, the same twice")


@nox.session
def mutants(session: nox.Session) -> None:
    """Delete every synchronisation of every rung, plant bugs in the last ones, run every variant, on the emulator."""
    _install(session)
    session.run("pytest", "-n", "auto", "-m", "mutants", *session.posargs)


@nox.session
def guard(session: nox.Session) -> None:
    """Time the present kernels against a commit's; without a GPU compare machine code. Another base: -- main."""
    _install(session, "--no-dev")
    session.run("flashladder", "guard", *session.posargs)


@nox.session
def cuda12(session: nox.Session) -> None:
    """Compile the device code of every rung and variant with CUDA 12.8 (NVRTC). Some alone: -- r13 r22."""
    _install(session, "--no-dev", "--group=cuda-check")
    session.run("python", "-m", "flashladder.nvrtc", *session.posargs)


@nox.session
def container(session: nox.Session) -> None:
    """Build the image and run it, where a container engine answers. Another command: -- check --preset quick."""
    session.run_install(
        "uv", "sync", "--locked", "--only-group=container", env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    )
    session.run("python", "container/run.py", *session.posargs)


@nox.session(venv_backend="none")
def container_steps(session: nox.Session) -> None:
    """Build the Dockerfile's steps without an engine, on a stand-in for its base, and run commands inside."""
    session.run(sys.executable, "container/steps.py", *session.posargs)


def _kernel_sources(session: nox.Session) -> list[str]:
    suffixes = {".cu", ".cuh", ".h", ".cc", ".cpp"}
    folders = ("kernel", "examples", "src/flashladder/emulator", "tests/emulated")
    return sorted(str(p) for folder in folders for p in Path(folder).rglob("*") if p.suffix in suffixes)
