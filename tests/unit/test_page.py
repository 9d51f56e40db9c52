"""The page: self-contained, the same each time, safe against any text, whole for those who see no chart."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace as with_fields
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from flashladder import charts, page, paths, prose, rundir
from flashladder.document import Document, load
from flashladder.errors import EnvironmentInvalidError
from flashladder.ladder import load_ladder
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

replace = msgspec.structs.replace
NASTY = "a|b </script><script>alert(1)</script> & \"quoted\" 'x' {{ 7 * 7 }} <b>"
LARGEST = 3_000_000
"""Bytes that a phone may have to load."""


class Elements(HTMLParser):
    """Elements with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = False
        self.feed(html.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    run = made.diagnosed(tmp_path_factory.mktemp("run"), [made.timing(cell) for cell in made.CELLS])
    return load(run, made.LADDER, in_repository=False)


@pytest.fixture(scope="module")
def html(document: Document) -> bytes:
    return page.page(document, prose.NONE)


@pytest.fixture(scope="module")
def pinned() -> Elements:
    return Elements(page.page(load(rundir.find(), load_ladder(), in_repository=True), prose.NONE))


def data(html: bytes) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html.decode(), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_same_run_gives_the_same_bytes(document: Document, html: bytes) -> None:
    assert page.page(document, prose.NONE) == html
    assert len(html) < LARGEST


def test_nothing_is_loaded_from_elsewhere(html: bytes) -> None:
    elements = Elements(html)
    assert not [a for a in elements.all("script") + elements.all("img") + elements.all("iframe") if "src" in a]
    assert {a["href"] for a in elements.all("link")} == {"data:,"}
    assert all((a["href"] or "").startswith("#") for a in elements.all("a"))


def test_the_links_of_the_pinned_page_lead_to_files_and_places_that_exist(pinned: Elements) -> None:
    ids = {attributes.get("id") for _, attributes in pinned.found}
    targets = [a["href"] or "" for a in pinned.all("a")]
    assert any(target.endswith("timing.jsonl") for target in targets)
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in ids, target
        else:
            assert (paths.PAPER / "generated" / target).is_file(), target


def test_every_rung_has_a_card_and_every_measured_cell_a_row(pinned: Elements) -> None:
    results = load(rundir.find(), load_ladder(), in_repository=True).results
    assert [a["id"] for a in pinned.all("article")] == [rung.id for rung in load_ladder().rungs]
    rows = [a for a in pinned.all("tr") if "data-dtype" in a]
    assert len(rows) == len(results.cells)
    assert {(a["data-dtype"], a["data-mask"], a["data-dim"]) for a in rows} == {
        (c.dtype, c.mask, str(c.shape.head_dim)) for c in results.cells
    }


def test_ids_are_unique_and_headings_skip_no_level(pinned: Elements) -> None:
    ids = [a["id"] for _, a in pinned.found if "id" in a]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in pinned.found if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_charts_are_named_and_reachable_and_every_table_has_a_caption(pinned: Elements) -> None:
    drawn = [a for a in pinned.all("div") if a.get("class") == "chart"]
    assert len(drawn) >= 4
    assert all(a.get("aria-label") and a.get("tabindex") == "0" for a in drawn)
    assert len(pinned.all("caption")) == len(pinned.all("table"))
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _ in pinned.found}


def test_any_text_is_shown_as_it_is(tmp_path: Path) -> None:
    rungs = (replace(made.RUNGS[0], change=NASTY), *made.RUNGS[1:])
    run = made.diagnosed(tmp_path, [made.timing(made.REFERENCE)], info=replace(made.INFO, id=NASTY))
    ladder = with_fields(made.LADDER, rungs=rungs)
    html = page.page(load(run, ladder, in_repository=False), prose.NONE)
    assert NASTY in Elements(html).text
    assert len(Elements(html).all("script")) == 3
    assert NASTY in json.dumps(data(html), ensure_ascii=False).replace('\\"', '"')


@pytest.mark.parametrize(
    "timings",
    [
        pytest.param([], id="nothing timed"),
        pytest.param([made.timing(made.REFERENCE)], id="no headline"),
        pytest.param([made.timing(made.REFERENCE, arms=("r02_grid",))], id="one rung"),
        pytest.param([made.timing(made.REFERENCE, arms=(made.BASELINE,))], id="no rung"),
        pytest.param([made.timing(made.REFERENCE, blocks=8)], id="insufficient samples"),
    ],
)
def test_the_page_copes_with_what_is_missing(tmp_path: Path, timings: list[object]) -> None:
    run = made.diagnosed(tmp_path, timings)  # type: ignore[arg-type]
    elements = Elements(page.page(load(run, made.LADDER, in_repository=False), prose.NONE))
    assert len(elements.all("article")) == len(made.RUNGS)
    assert "not profiled in this run" in elements.text


def test_the_charts_hold_the_run_s_numbers(document: Document) -> None:
    results = document.results
    chart = charts.ladders(results)["portable"]
    points = {row["rung"]: row for row in chart["data"]["values"]}
    assert points["r05_swizzle"]["us"] == pytest.approx(results.median_us(made.REFERENCE, "r05_swizzle"), rel=1e-3)
    assert "r04_vector_io" not in points
    pairs = {(row["shape"], row["mask"], row["peer"]): row for row in charts.ratios(results)}
    against = results.comparison(made.HEADLINE[0], "r05_swizzle", made.BASELINE)
    assert against is not None
    assert pairs["B32 H32 S512 D64", "full", made.BASELINE]["ratio"] == pytest.approx(against.ratio, rel=1e-3)


def test_a_run_without_counters_has_no_roofline(document: Document) -> None:
    assert charts.rooflines(document.results) == {}


def test_names_on_the_roofline_do_not_touch() -> None:
    results = load(rundir.find(), load_ladder(), in_repository=True).results
    for memory, chart in charts.rooflines(results).items():
        points, names = (layer["data"]["values"] for layer in chart["layer"][-2:])
        assert points == charts.roofline_rows(results, memory)
        assert 3 <= len(names) <= len(points)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page.library.cache_clear()
    with pytest.raises(EnvironmentInvalidError, match="vl-convert-python") as error:
        page.library()
    assert "\n" not in str(error.value)
    page.library.cache_clear()


def test_another_run_is_not_of_the_repository(tmp_path: Path) -> None:
    run = made.diagnosed(tmp_path, [])
    assert load(RunDir(run.path), made.LADDER, in_repository=True).records is None
