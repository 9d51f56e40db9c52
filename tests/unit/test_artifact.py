"""The artifact appendix: what committees ask for, from records and declarations, in Markdown and LaTeX."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from flashladder import artifact, claims, paths
from flashladder.artifact import Facts, Section, Steps
from flashladder.claims import Order, View
from flashladder.ladder import load_presets, preset_cells
from tests.unit import synthetic as made

ASKED = (
    "Algorithm",
    "Program",
    "Compilation",
    "Run-time environment",
    "Hardware",
    "Execution",
    "Metrics",
    "Output",
    "Experiments",
    "Disk space",
    "Time to prepare",
    "Time to complete",
    "Publicly available",
    "Code licence",
    "Data licence",
)
SAMPLE = (
    Section(
        "A & B", ("Run `a_b 5 %` with 10 % of *this*.", Steps(("flashladder x_y", "two")), (("Term", "what `c`"),))
    ),
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    run = made.diagnosed(tmp_path_factory.mktemp("run"), [made.timing(made.REFERENCE)])
    view = View(run, made.LADDER)
    claim = claims.Claim(
        id="r03", text="gains {value} x", predicate=Order(arm="r03_warp_reduce", verdict="faster"), archs=("sm_90a",)
    )
    judged = claims.evaluate([claim], view, lambda _: view)
    return Facts(
        info=run.info,
        ladder=made.LADDER,
        builds=run.builds(),
        timings=run.timings(),
        judged=judged,
        record_bytes=5 << 20,
        download_bytes=1_500_000_000,
    )


def test_everything_that_committees_ask_for_is_there(facts: Facts) -> None:
    made_of = artifact.sections(facts)
    check_list = made_of[1].parts[0]
    assert isinstance(check_list, tuple)
    assert tuple(term for term, _ in check_list) == ASKED
    titles = " ".join(section.title for section in made_of)
    for word in ("Abstract", "Description", "Installation", "workflow", "expected results", "reuse", "Notes"):
        assert word in titles


def test_facts_are_those_of_the_records(facts: Facts) -> None:
    page = artifact.markdown(artifact.sections(facts), "Generated.")
    for words in ("nvcc 13.0.88", "the recorded run takes 5 MiB", "up to 2 GB to download", "NVIDIA H100 80GB HBM3"):
        assert words in page
    assert re.search(r"- \*\*`r03`\*\*: gains \d+\.\d+ x Expected: faster, on sm_90a\.", page)
    assert not re.search(r"\bNone\b", page)


def test_the_time_is_that_of_warm_up_and_samples_of_whole_presets(facts: Facts) -> None:
    assert "not recorded" in artifact._times(facts)
    cells = preset_cells(load_presets()["quick"])
    arm = made.arm_timing("r05_swizzle", 100.0, np.random.default_rng(0))
    arm = msgspec.structs.replace(arm, ns=((1e9, 2e9),), launches_per_sample=10)
    timings = [msgspec.structs.replace(made.timing(cell), warmup_s=30.0, arms=(arm,)) for cell in cells]
    told = artifact._times(replace(facts, timings=timings))
    assert f"preset `quick` {len(cells):.2f} min" in told
    assert "default" not in told


def test_markdown_escapes_text_and_keeps_code() -> None:
    page = artifact.markdown(SAMPLE, "Generated.")
    assert page == (
        "# Artifact appendix\n\n<!-- Generated. -->\n\n## A & B\n\nRun `a_b 5 %` with 10 % of \\*this\\*.\n\n"
        "    flashladder x_y\n    two\n\n- **Term**: what `c`\n"
    )


def test_latex_escapes_text_code_and_titles() -> None:
    page = artifact.latex(SAMPLE, "Generated.")
    assert page == (
        "% Generated.\n\n\\subsection*{A \\& B}\n\nRun \\texttt{a\\_b 5 \\%} with 10 \\% of *this*.\n\n"
        "\\begin{verbatim}\nflashladder x_y\ntwo\n\\end{verbatim}\n\n"
        "\\begin{description}\n\\item[Term] what \\texttt{c}\n\\end{description}\n"
    )


def test_a_download_is_the_largest_wheel_of_each_package() -> None:
    lock = """
    [[package]]
    name = "a"
    wheels = [{ url = "x", size = 5 }, { url = "y", size = 7 }]
    [[package]]
    name = "b"
    [[package]]
    name = "c"
    wheels = [{ url = "z" }]
    """
    assert artifact.download_bytes(lock) == 7
    assert artifact.download_bytes((paths.ROOT / "uv.lock").read_text()) > 1e9


def test_the_licence_is_that_of_the_package() -> None:
    assert f'license = "{artifact.LICENCE}"' in (paths.ROOT / "pyproject.toml").read_text()
