"""The HTML page: one file, nothing fetched, texts from outside stay text, and its size does not grow with the run."""

import base64
import gzip
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from harness.analysis.summarize import read_summary
from harness.errors import HarnessError
from harness.files import ROOT
from harness.report.charts.data import MAX_BINS, MAX_POINTS, distribution_points, read_chart_data
from harness.report.html import LIBRARY, Forest, render, write_report
from harness.rundir.manifest import read_run, write_run
from harness.summary import because
from tests.report_runs import HOSTILE, write_run_directory


class Page(html.parser.HTMLParser):
    """What a browser would make of the page, as far as the tests ask."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.blobs: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.blobs[self._inside] = data
        else:
            self.text.append(data)

    def charts(self) -> dict[str, Any]:
        packed: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(self.blobs["charts-gz"])))
        return packed


def numbers_of(value: Any) -> int:
    """How many numbers a figure holds."""
    inner = list(value.values()) if isinstance(value, dict) else value
    return sum(map(numbers_of, inner)) if isinstance(inner, list) else isinstance(value, int | float)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    write_run_directory(path, repeats=2, requests=30, faults=3)
    write_report(path)
    return path


def test_nothing_is_referred_to_outside_the_file(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    for _tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "url(" not in page.blobs["style"] and "@import" not in page.blobs["style"]
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_what_comes_from_outside_stays_text(folder: Path, tmp_path: Path) -> None:
    write_run_directory(tmp_path, repeats=1, requests=12, faults=3)
    run, summary = read_run(tmp_path), read_summary(tmp_path)
    served = replace(run.cells[0].served_by, version=HOSTILE, arguments=[HOSTILE], container={"a": HOSTILE})
    cells = [replace(run.cells[0], served_by=served), *run.cells[1:]]
    write_run(tmp_path, replace(run, cells=cells))
    said = [because("text", text=HOSTILE)]
    hostile = replace(summary, question=HOSTILE, reasons=said, notes=said, valid=False)
    rows = [replace(summary.rows[0], server=HOSTILE), *summary.rows[1:]]
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(replace(hostile, rows=rows)))
    page = Page(write_report(tmp_path).read_text())
    assert [tag for tag, _ in page.tags].count("img") == 0
    assert [tag for tag, _ in page.tags].count("script") == 4
    assert page.text.count(HOSTILE) > 10
    names = [trace["name"] for trace in page.charts()["charts"]["throughput"]["data"]]
    assert names[0].startswith("&lt;/script&gt;&lt;script&gt;")


def test_the_order_of_the_page(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert write_report(folder).read_text() == text  # the same run gives the same page
    order = ["<h1", 'class="state good"', 'class="verdicts"', 'class="simulated"', 'class="main"', 'id="charts"',
             'id="errors"', 'id="runs"', 'id="method"', 'id="setup"']  # fmt: skip
    places = [text.index(mark) for mark in order]
    assert places == sorted(places)


def test_every_chart_has_a_table_and_every_column_its_formula(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    ids = [attributes.get("id") for _, attributes in page.tags]
    for chart in page.charts()["charts"]:
        assert f"chart-{chart}" in ids
    assert len([a for tag, a in page.tags if tag == "caption"]) == len(page.charts()["charts"])
    for _, attributes in page.tags:
        if target := attributes.get("popovertarget"):
            assert target in ids
        if (href := attributes.get("href")) and href != "#":
            assert href[1:] in ids


def test_many_requests_give_a_small_page(tmp_path: Path) -> None:
    write_run_directory(tmp_path, repeats=1, requests=4_000, chunks=8)
    path = write_report(tmp_path)
    assert path.stat().st_size < 1_000_000
    figures = Page(path.read_text()).charts()
    assert numbers_of(figures["charts"]["cdf-ttft"]["data"]) <= 6 * (2 * MAX_POINTS + 4)
    assert len(figures["timelines"]) == 6
    for timeline in figures["timelines"].values():
        assert max(len(trace["x"]) for trace in timeline["data"]) <= 2 * MAX_BINS


def test_the_library_is_the_one_that_was_published_and_draws_all_that_charts_ask_for(folder: Path) -> None:
    """Its sum is that of the file in npm's plotly.js-basic-dist-min 4.1.1, whose licence asks to come along."""
    assets = ROOT / "harness" / "report" / "assets"
    library = (assets / LIBRARY).read_bytes()
    assert hashlib.sha256(library).hexdigest() == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert b"v4.1.1" in library[:100]
    assert (assets / "plotly-basic.LICENSE").read_text().startswith("MIT License")
    figures = Page((folder / "report.html").read_text()).charts()
    drawn = [*figures["charts"].values(), *figures["timelines"].values()]
    assert {trace["type"] for figure in drawn for trace in figure["data"]} == {"scatter", "bar"}


def test_a_distribution_keeps_its_ends_and_every_point_of_a_small_sample() -> None:
    assert distribution_points([3.0, 1.0, 2.0]) == ([1.0, 2.0, 3.0], [0.33333, 0.66667, 1.0])
    assert distribution_points([]) == ([], [])
    values, shares = distribution_points(float(i) for i in range(1, 100_001))
    assert len(values) == MAX_POINTS
    assert (values[0], shares[0], values[-1], shares[-1]) == (1.0, 1e-5, 100_000.0, 1.0)
    assert all(abs(share - value / 100_000) < 1e-5 for value, share in zip(values, shares, strict=True))


def test_the_timeline_counts_every_token_and_joins_the_clocks(folder: Path) -> None:
    timelines = {line.cell: line for line in read_chart_data(folder).timelines}
    line = timelines["r1-open-batch-10"]
    # 30 measured and 10 warm-up requests of 50 tokens each, less the three that failed.
    assert sum(line.tok_s) * line.step_s == pytest.approx(37 * 50, abs=1)
    assert max(line.in_flight) == 10
    assert line.warmup_until_s is not None and line.warmup_until_s < 0 < line.ends_s
    assert all(-5 < at < line.ends_s + 1 for at in line.server.at_s)


def test_a_run_that_was_killed_before_anything_happened(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path, repeats=1, requests=1)
    write_run(tmp_path, replace(run, status="running", cells=[], ended_wall_s=None))
    summary = replace(read_summary(tmp_path), rows=[], cells=[], comparison=None, checks=[])
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(summary))
    for name in ("requests", "processes", "metrics"):
        (tmp_path / f"{name}.jsonl").unlink()
    text = "".join(Page(write_report(tmp_path).read_text()).text)
    assert "UNFINISHED" in text and "No request was recorded." in text
    (tmp_path / "summary.json").unlink()
    with pytest.raises(HarnessError, match=re.escape(f"{tmp_path}/summary.json: there is no summary")):
        write_report(tmp_path)


def test_intervals_share_one_logarithmic_scale() -> None:
    scale = Forest(0.5, 2.0)
    assert [scale.place(ratio) for ratio in (0.1, 0.5, 1.0, 2.0, 9.0)] == [0.0, 0.0, 50.0, 100.0, 100.0]
    assert 0 < Forest.around([]).place(1.0) < 100


def test_a_text_from_outside_does_not_turn_the_page_round(tmp_path: Path) -> None:
    """What a browser obeys and nobody sees: the terminal shows it as a mark, and so does the page."""
    write_run_directory(tmp_path, repeats=1, requests=12, faults=2)
    controls = "\x00\x07\x1b\x7f\x9b\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    run = read_run(tmp_path)
    servers = {f"{name}{controls}": server for name, server in run.scenario.servers.items()}
    run = replace(run, scenario=replace(run.scenario, servers=servers))
    summary = replace(read_summary(tmp_path), question=f"Is it {controls}fast?")
    text = render(summary, run, read_chart_data(tmp_path))
    page = Page(text)
    assert "Is it " + "\ufffd" * len(controls) + "fast?" in "".join(page.text)
    assert not set(controls) & set(text)
    assert not set(controls) & set(json.dumps(page.charts(), ensure_ascii=False))
