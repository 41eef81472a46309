"""The HTML page: one file, nothing fetched, texts from outside stay text, and its size does not grow with the run."""

import base64
import gzip
import hashlib
import html.parser
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from harness.base.files import ROOT
from harness.base.measured import NO_SAMPLE
from harness.base.reason import because
from harness.numbers.share_test import observed
from harness.numbers.summarize import read_summary
from harness.questions.report.html_parts import fold_long, tiles
from harness.questions.report.page import render_html as render
from harness.questions.report.page import run_html
from harness.records.manifest import Origin, read_run, write_run
from harness.report.charts.data import MAX_BINS, MAX_POINTS, distribution_points, read_chart_data
from harness.report.elements import Fold, Tile, plain_grid
from harness.report.html import LIBRARY
from tests.support.made_summaries import FEW, MANY, numbers, row
from tests.support.made_summaries import run as text_run
from tests.support.made_summaries import summary as text_summary
from tests.support.report_runs import HOSTILE, write_report, write_run_directory
from tests.support.wording import Wording


class Page(html.parser.HTMLParser):
    """The tags, texts and scripts of a page."""

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    write_run_directory(path, repeats=2, requests=30, faults=3)
    write_report(path)
    return path


def test_the_page_refers_to_nothing_outside_and_has_all_that_it_refers_to(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    ids = {attributes.get("id") for _, attributes in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            target = attributes.get(name) or "#"
            assert target == "#" or (target[0] == "#" and target[1:] in ids)
        assert attributes.get("popovertarget", next(iter(ids))) in ids
    assert "url(" not in page.blobs["style"] and "@import" not in page.blobs["style"]
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    charts = page.charts()["charts"]
    assert {f"chart-{chart}" for chart in charts} <= ids
    assert [tag for tag, _ in page.tags].count("caption") == len(charts), "each has a table"
    order = ["<h1", 'class="lead"', 'class="state simulated"', 'class="tiles"', 'class="state bad"', "chart-throughput",
             'class="contents"', 'class="main', 'class="verdicts"', 'id="errors"', 'id="charts"',
             'id="chart-first-token"', 'id="cells"', 'id="method"', 'id="setup"']  # fmt: skip
    places = [text.index(mark) for mark in order]
    assert places == sorted(places)
    assert write_report(folder).read_text() == text, "the same run gives the same page"


def test_the_first_screen_of_a_run_without_an_answer_has_no_numbers(folder: Path) -> None:
    """Three numbers and a chart only where they can be believed; the reasons are there, and the notes are folded."""
    summary, run, data = read_summary(folder), read_run(folder), read_chart_data(folder)
    note, reason = because("run_error", "a note"), because("run_error", "a reason")
    invalid, stopped = replace(summary, valid=False, reasons=[reason], notes=[note]), replace(run, status="interrupted")
    for page, has_numbers in (
        (render(summary, run, data), True), (render(invalid, run, data), False), (render(summary, stopped, data), False)
    ):  # fmt: skip
        first, rest = page.split("<body>")[1].split('class="contents"')
        assert ('class="tiles"' in first, "chart-throughput" in first) == (has_numbers, has_numbers)
        assert ("chart-throughput" in rest) != has_numbers, "it is somewhere"
    first = render(invalid, run, data).split('class="contents"')[0]
    assert first.index("a reason") < first.index("<details") < first.index("a note")


def test_the_sign_of_a_late_load_generator_is_on_a_page_only_with_such_a_number(folder: Path) -> None:
    summary, run, data = read_summary(folder), read_run(folder), read_chart_data(folder)
    for field, has_sign in (("ttfo", False), ("output_tok_s", True)):
        rows = [replace(each, client_limited=[field], client_error={}) for each in summary.rows]
        first = render(replace(summary, rows=rows), run, data).split('class="contents"')[0]
        assert "load generator" in first and ("‡" in first) == has_sign


def test_tables_of_details_are_folded_where_they_are_long() -> None:
    few, long = (plain_grid(["Row"], [["a"]] * number) for number in (8, 9))
    shown, folded = fold_long([few, replace(long, title="Times")])
    assert shown is few and folded == Fold("Times", [long])


def test_what_one_user_gets_is_all_of_one_row(wording: Wording) -> None:
    few = numbers(5.0, FEW)
    assert tiles(replace(text_summary(), rows=[row("one", numbers(13.07, MANY))]), text_run()) == [
        Tile("One user gets", "20 tok/s", "one"),
        Tile("All together", "95.6 tok/s", "one"),
        Tile("First token after", "52.3 ms", "one"),
    ]
    one, ten = text_summary().rows
    quick_start = replace(ten, pooled=replace(ten.pooled, ttft=FEW, tpot=FEW), client_limited=["output_tok_s"])
    shown = tiles(replace(text_summary(), rows=[one, quick_start]), text_run())
    # TTFT and speed of the row with ten at once are better, and are no answer.
    assert [tile.value for tile in shown] == ["20 tok/s", "299\u2021 tok/s", "52.3 ms"]
    assert [tile.where.partition(",")[0] for tile in shown] == ["one", "ten", "one"]
    wording([f"{tile.label}: {tile.where}" for tile in shown])
    assert "10" in tiles(replace(text_summary(), rows=[ten]), text_run())[0].label
    wording(tiles(replace(text_summary(), rows=[ten]), text_run())[0].label)
    other = replace(one, server="other", pooled=replace(one.pooled, tpot=replace(MANY, p50=0.04)))
    shown = tiles(replace(text_summary(), rows=[one, other]), text_run())
    assert shown[0].value == "25 tok/s" and shown[0].where.startswith("other, ") and shown[2].where == shown[0].where
    wording(f"{shown[0].label}: {shown[0].where}")
    vectors = replace(few, output_tok_s=None, ttft=NO_SAMPLE, tpot=NO_SAMPLE, input_tok_s=900.0)
    shown = tiles(replace(text_summary(), rows=[row("one", vectors)]), text_run())
    assert [tile.value for tile in shown] == ["900 tok/s", "50 ms", "5 a second"]
    imported = replace(text_run(), origin=Origin(tool="t", files={}, imported_wall_s=0.0, importer="1"))
    wording(tiles(replace(text_summary(), rows=[one]), imported)[0].label)


def test_texts_from_outside_stay_text(tmp_path: Path) -> None:
    """Markup is escaped; characters that change the direction of the text, and controls, are marks."""
    write_run_directory(tmp_path, repeats=1, requests=12, faults=3)
    controls = "\x00\x07\x1b\x7f\x9b\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    run, summary = read_run(tmp_path), read_summary(tmp_path)
    served = replace(run.cells[0].served_by, version=HOSTILE, arguments=[HOSTILE], container={"a": HOSTILE})
    write_run(tmp_path, replace(run, cells=[replace(run.cells[0], served_by=served), *run.cells[1:]]))
    reasons = [because("run_error", HOSTILE)]
    hostile = replace(summary, question=f"{HOSTILE}{controls}", reasons=reasons, notes=reasons, valid=False)
    rows = [replace(summary.rows[0], server=f"{HOSTILE}{controls}"), *summary.rows[1:]]
    text = run_html(tmp_path, read_run(tmp_path), replace(hostile, rows=rows))
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("img"), tags.count("script")) == (0, 4)
    assert "".join(page.text).count(HOSTILE) > 10
    names = [trace["name"] for trace in page.charts()["charts"]["throughput"]["data"]]
    assert names[0].startswith("&lt;/script&gt;&lt;script&gt;")
    assert HOSTILE + "\ufffd" * len(controls) in "".join(page.text)
    assert not set(controls) & set(text + json.dumps(page.charts(), ensure_ascii=False))


def test_many_requests_give_a_small_page(tmp_path: Path) -> None:
    write_run_directory(tmp_path, repeats=1, requests=4_000, chunks=8)
    path = write_report(tmp_path)
    assert path.stat().st_size < 1_000_000
    figures = Page(path.read_text()).charts()
    assert max(len(trace["x"]) for trace in figures["charts"]["cdf-ttft"]["data"]) <= MAX_POINTS
    assert len(figures["timelines"]) == 6
    for timeline in figures["timelines"].values():
        assert max(len(trace["x"]) for trace in timeline["data"]) <= 2 * MAX_BINS


def test_the_library_is_the_published_one_and_can_draw_all_charts(folder: Path) -> None:
    """Its sum is that of the file in npm's plotly.js-basic-dist-min 4.1.1, whose licence asks to come along."""
    assets = ROOT / "harness" / "report" / "assets"
    library = (assets / LIBRARY).read_bytes()
    assert hashlib.sha256(library).hexdigest() == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert (assets / "plotly-basic.LICENSE").read_text().startswith("MIT License")
    figures = Page((folder / "report.html").read_text()).charts()
    drawn = [*figures["charts"].values(), *figures["timelines"].values()]
    assert {trace["type"] for figure in drawn for trace in figure["data"]} == {"scatter", "bar"}


def test_a_distribution_keeps_its_ends_and_every_point_of_a_small_sample() -> None:
    assert distribution_points([observed(np.array([3.0, 1.0])), observed(np.array([2.0]))]) == (
        [1.0, 2.0, 3.0],
        [0.33333, 0.66667, 1.0],
    )
    assert distribution_points([]) == ([], [])
    values, shares = distribution_points([observed(np.arange(1.0, 100_001.0))])
    assert (len(values), values[0], shares[0], values[-1], shares[-1]) == (MAX_POINTS, 1.0, 1e-5, 100_000.0, 1.0)
    assert all(abs(share - value / 100_000) < 1e-5 for value, share in zip(values, shares, strict=True))


def test_the_timeline_counts_every_token_and_joins_the_clocks(folder: Path) -> None:
    line = {line.cell: line for line in read_chart_data(folder).timelines}["r1-open-batch-10"]
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
    assert "UNFINISHED" in text
