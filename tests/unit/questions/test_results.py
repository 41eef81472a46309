"""Runs filed by machine and scenario, and the leaderboard over them."""

import gzip
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from harness.base.errors import ExitCode, HarnessError, RunError
from harness.base.files import RESULTS
from harness.base.reason import because
from harness.numbers.summarize import read_summary, summarize, write_summary
from harness.questions import results as boards
from harness.questions.report import junit_cases
from harness.questions.results import Figure, add_result, collect_board, read_figures
from harness.records.directory import folder_name
from harness.records.manifest import Machine, RemoteMachine, read_run, write_run
from harness.report.html import render_page
from harness.report.markdown import render
from harness.report.result_card import render_card
from harness.scenario.plan import Cell
from tests.support.command import called
from tests.support.made_runs import WALL_S, served_by, write_made_run
from tests.support.wording import Wording

DIGEST = "vllm/vllm-openai-cpu@sha256:" + "4f2a9c" * 10 + "abcd"


def board_html(board: boards.Board) -> str:
    return render_page(boards.board_page(board), "Leaderboard", ["leaderboard"])


def steady(factor: float = 1.0) -> Callable[[Cell], float]:
    return lambda cell: factor * (10.0 if cell.server == "a" else 8.0) * (1 + 0.001 * cell.repeat)


def test_a_run_is_filed_and_shown_under_the_machine_of_its_server(tmp_path: Path) -> None:
    parameters = {"power profile": "performance"}
    gpus = [{"target": "gfx1151", "name": "ip discovery"}]
    box = Machine(name="gpu-box", cpu="Ryzen AI", ram_bytes=128 * 2**30, kernel="6.18", gpus=gpus,
                  kernel_parameters=parameters)  # fmt: skip
    remote = RemoteMachine(machine=box, harness="1", offset_s=0.0, error_s=0.01)
    run = write_made_run(tmp_path / "one", steady(), remote=remote)
    target, _ = add_result(tmp_path / "one", tmp_path / "results")
    assert target == tmp_path / "results/gpu-box/which/one"
    board = collect_board(tmp_path / "results", tmp_path)
    assert board.machines == {"gpu-box": "Radeon 8060S gfx1151"}
    assert {entry.machine for group in board.groups for entry in group.entries} == {"gpu-box"}
    assert {entry.power for group in board.groups for entry in group.entries} == {"performance"}
    facts = board.manifests["one"]
    assert facts["GPU"] == "Radeon 8060S gfx1151", "by the table: the kernel's name is that of a driver"
    assert (facts["CPU"], facts["Kernel"], facts["Load generator"]) == ("Ryzen AI", "6.18", run.machine.name)
    card = render_card(run, read_summary(target), "harness run which.yaml")
    assert "Radeon 8060S" in card and "6.18" in card and "performance" in card
    assert '"gpu-box"' in junit_cases.render(read_summary(target), run)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_filed_run(tmp_path: Path) -> None:
    run = write_made_run(tmp_path / "one", steady())
    target, names = add_result(tmp_path / "one", tmp_path / "results")
    assert target == tmp_path / "results/strix/which/one"
    assert names == ["run.json", "summary.json", "report.md"]
    assert set(content(target)) == set(names), "and no raw records"
    assert read_run(target) == replace(run, kind="plan")
    assert read_summary(target) == summarize(tmp_path / "one")
    assert (target / "report.md").read_text().startswith("## Which is faster?\n")
    _, names = add_result(tmp_path / "one", tmp_path / "results", records=True)
    assert names[-1] == "requests.jsonl.gz"
    before = content(target)
    assert gzip.decompress(before["requests.jsonl.gz"]) == (tmp_path / "one" / "requests.jsonl").read_bytes()
    add_result(tmp_path / "one", tmp_path / "results", records=True)
    assert content(target) == before, "the second time nothing changes"


def test_only_a_valid_run_is_published(tmp_path: Path, wording: Wording) -> None:
    run = write_made_run(tmp_path / "one", steady())
    lines = (tmp_path / "one" / "requests.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "one" / "requests.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RunError) as raised:
        add_result(tmp_path / "one", tmp_path / "results")
    assert raised.value.exit_code == ExitCode.INVALID
    assert "109" in raised.value.what
    wording(raised.value)
    write_made_run(tmp_path / "two", steady())
    write_run(tmp_path / "two", replace(run, status="interrupted", reasons=[because("interrupted", "stopped")]))
    with pytest.raises(RunError) as caught:
        add_result(tmp_path / "two", tmp_path / "results")
    wording(caught.value)
    assert not (tmp_path / "results").exists()


def test_a_search_is_not_ranked(tmp_path: Path, wording: Wording) -> None:
    write_made_run(tmp_path / "one", steady(), kind="search")
    with pytest.raises(HarnessError) as caught:
        add_result(tmp_path / "one", tmp_path / "results")
    wording(caught.value)


def test_names_are_safe_as_folders(tmp_path: Path) -> None:
    folders = {
        "strix": "strix", "max-num-seqs_2.1": "max-num-seqs_2.1", "Strix": "strix-0b3437", "../../etc": "etc-74ccf3",
        "a/b": "a-b-c14cdd", "": "", "..": "unnamed-5ec1f7", "reference": "reference-52367a",
        "ä" * 300: "unnamed-172956", "x" * 300: "x" * 60 + "-0d4e2c",
    }  # fmt: skip
    assert {name: folder_name(name) for name in folders} == folders
    write_made_run(tmp_path / "one", steady(), machine=Machine(name="../up"), scenario_name="my scenario")
    target, _ = add_result(tmp_path / "one", tmp_path / "results")
    assert target.resolve().is_relative_to(tmp_path / "results")
    assert len(target.relative_to(tmp_path / "results").parts) == 3


@pytest.fixture
def filed(tmp_path: Path) -> Path:
    """Two machines, the same work; on one of them twice, and once on a model of an engine."""
    hostile = Machine(name="<script>alert(1)</script>|x", gpus=[{"target": "gfx942", "name": "MI300X"}] * 2)
    for name, factor, machine, simulated in (
        ("old", 1.0, Machine(name="strix", cpu="Ryzen"), False),
        ("new", 0.9, Machine(name="strix", cpu="Ryzen"), False),
        ("far", 0.3, hostile, False),
        ("sim", 0.1, Machine(name="strix", cpu="Ryzen"), True),
    ):
        served = served_by(image="vllm:v1", image_digest=DIGEST, simulated=simulated)
        started = WALL_S + (86400 if name == "new" else 0)
        of: Any = {"machine": machine, "served": lambda cell, served=served: served, "started_wall_s": started}
        write_made_run(tmp_path / name, steady(factor), **of)
        add_result(tmp_path / name, tmp_path / "results")
    return tmp_path / "results"


def test_the_leaderboard_ranks_only_like_with_like(filed: Path) -> None:
    board = collect_board(filed, RESULTS)
    assert list(board.machines.items()) == [
        ("<script>alert(1)</script>|x", "2x Instinct MI300X gfx942"),
        ("strix", "Ryzen"),
    ]
    real, model = board.groups
    assert (real.simulated, model.simulated, real.metric) == (False, True, "wall")
    assert [(e.run, e.server, e.best) for e in real.entries] == [
        ("far", "b", True), ("far", "a", False), ("new", "b", True), ("old", "b", False), ("new", "a", False),
        ("old", "a", False),
    ]  # fmt: skip
    assert [(e.run, e.server) for e in model.entries] == [("sim", "b"), ("sim", "a")]
    best = real.best_of("strix")
    assert best is not None and best.mean == pytest.approx(7.2 * 1.003, rel=1e-5)
    assert best.low and best.mean and best.high and best.low < best.mean < best.high
    assert best.cells(3) == {
        "#": "3", "Machine": "strix (best)", "Server / load": "b / x", "Mean": "7.22 s",
        "Interval (95 %)": "7.21–7.24", "Repeats": "5", "tok/s": "6.09", "TTFT p50, ms": "903",
        "Errors": "0", "Validity": "VALID", "Date": "2027-01-16", "Run": "new", "Image": "sha256:4f2a9c4f2a9c",
        "Version": "0.32.0", "Power": "not recorded",
    }  # fmt: skip


def test_an_invalid_or_damaged_entry_is_shown_and_never_ranked(filed: Path, wording: Wording) -> None:
    far = next(filed.glob("*/which/far"))
    write_summary(far, replace(read_summary(far), valid=False, reasons=[because("interrupted", "stopped")]))
    (filed / "strix/which/old/summary.json").write_text("{")
    board = collect_board(filed, RESULTS)
    assert [(e.run, e.valid, e.best) for e in board.groups[0].entries] == [
        ("new", True, True), ("new", True, False), ("far", False, False), ("far", False, False),
    ]  # fmt: skip
    assert len(board.unreadable) == 1
    wording(board.unreadable[0])
    assert '<span class="word v-unusable">INVALID</span>' in board_html(board)
    assert "- not readable: " in render(boards.board_page(board))


def test_a_number_that_the_client_limited_is_marked_and_never_ranked(filed: Path, wording: Wording) -> None:
    unmarked = collect_board(filed, RESULTS)
    far = next(filed.glob("*/which/far"))
    summary = read_summary(far)
    limited = {"a": ["wall"], "b": ["wall", "ttft"]}
    rows = [replace(row, client_limited=limited[row.server]) for row in summary.rows]
    write_summary(far, replace(summary, rows=rows))
    assert "‡" not in board_html(unmarked) + render(boards.board_page(unmarked))
    board = collect_board(filed, RESULTS)
    page = render(boards.board_page(board))
    (meaning,) = {line for line in page.splitlines() if "numbers with ‡ " in line}
    assert meaning in board_html(board)
    wording(meaning)
    real, _ = board.groups
    assert [(e.run, e.server, e.ranked, e.best) for e in real.entries] == [
        ("new", "b", True, True), ("old", "b", True, False), ("new", "a", True, False), ("old", "a", True, False),
        ("far", "b", False, False), ("far", "a", False, False),
    ]  # fmt: skip
    far_b, far_a = real.rows[-2:]
    assert [far_b[name][-1] for name in ("#", "Mean", "TTFT p50, ms")] == ["–", "‡", "‡"]
    assert (far_a["Mean"][-1], far_a["TTFT p50, ms"][-1] == "‡", far_a["Validity"]) == ("‡", False, "CLIENT-LIMITED")


def test_page_and_markdown_need_nothing_else_and_texts_stay_texts(filed: Path) -> None:
    board = collect_board(filed, RESULTS)
    page, text = board_html(board), render(boards.board_page(board))
    assert re.findall(r"""(?:src|href)=["']?[^#"']""", page) == [] and "<script" not in text
    assert page.count("<script") == 2, "the theme switch"
    shown = html.unescape(page)
    assert all(part in shown for part in ("<script>alert(1)</script>|x", "SIMULATED ENGINE", "2027-01-16"))
    assert shown.index("which") < shown.index("Third-party")
    assert [line.partition(": b")[0] for line in text.splitlines()[4:8]] == [
        "| Scenario | &lt;script&gt;alert(1)&lt;/script&gt;\\|x (2x Instinct MI300X gfx942) | strix (Ryzen) |",
        "|:---|:---|:---|",
        "| which · m | 2.41 s", "| which · m (SIMULATED) | – | 0.802 s",
    ]  # fmt: skip


def test_the_commands(tmp_path: Path, wording: Wording) -> None:
    for form in ("terminal", "markdown", "html"):
        empty = called("results", "--format", form, cwd=tmp_path)
        assert (empty.code, empty.err) == (0, "")
        wording([line.strip() for line in empty.out.splitlines() if "results add" in line])
    write_made_run(tmp_path / "runs" / "one", steady())
    published = called("results", "add", "one", "--records", cwd=tmp_path)
    names = "run.json, summary.json, report.md, requests.jsonl.gz"
    assert published == (0, f"results/strix/which/one: {names}\n", "")
    shown = called("report", "results/strix/which/one", cwd=tmp_path)
    assert shown.err == "", "a filed run is meant to have nothing else"
    table = called("results", cwd=tmp_path).out
    assert [line.split()[:6] for line in table.splitlines() if line[:1].isdigit()] == [
        ["1", "strix", "(best)", "b", "/", "x"], ["2", "strix", "a", "/", "x", "10.03"],
    ]  # fmt: skip
    (group,) = json.loads(called("results", "--format", "json", cwd=tmp_path).out)["groups"]
    assert [(entry["server"], entry["ranked"]) for entry in group["entries"]] == [("b", True), ("a", True)]
    page = called("results", "--format", "html", cwd=tmp_path).out
    assert page == board_html(collect_board(tmp_path / "results", RESULTS))
    for given, reason in (
        (["--results", "none"], "--results: "),
        (["add"], "add: "),
        (["add", "none"], "none: "),
    ):
        done = called("results", *given, cwd=tmp_path)
        assert (done.code, done.out) == (1, "") and done.err.startswith(f"error: {reason}")
        wording(done.err)


def test_third_party_figures_have_a_source_and_a_class(tmp_path: Path, wording: Wording) -> None:
    figures = read_figures(RESULTS / "reference" / "third-party.yaml")
    assert len(figures) > 20
    assert {figure.claim for figure in figures} == {"community", "vendor", "paper"}
    for figure in figures:
        assert figure.source and figure.date and any(c.isdigit() for c in figure.result), figure
        assert figure.url is None or figure.url.startswith("https://")
    path = tmp_path / "reference" / "third-party.yaml"  # of one's own
    path.parent.mkdir()
    own = Figure(hardware="h", model="m", setup="s", load="l", result="1", claim="vendor", source="x", date="2026")
    path.write_bytes(b"figures: [" + msgspec.json.encode(own) + b"]")
    assert collect_board(tmp_path, RESULTS).figures == [own]
    path.write_text("figures: [{hardware: h}]")
    with pytest.raises(HarnessError) as caught:
        collect_board(tmp_path, RESULTS)
    wording(caught.value)
