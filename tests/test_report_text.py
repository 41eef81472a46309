"""The terminal and Markdown reports, to the letter, on a small summary made by hand."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from harness import units
from harness.report import export, markdown, sentences, terminal
from harness.report.table import format_errors, table_columns, table_lines
from harness.rundir.manifest import CellRun, Machine, Run, ServedBy
from harness.scenario import Load, Scenario, Server
from harness.summary import (
    NO_SAMPLE,
    CellSummary,
    CheckResult,
    Comparison,
    Distribution,
    FailedRequests,
    Numbers,
    Reason,
    Row,
    ServerLoad,
    Summary,
    Verdict,
    because,
)

FEW = Distribution(n=5, mean=0.05, min=0.04, max=0.06)
MANY = Distribution(n=200, mean=0.05, min=0.04, max=1.2, p50=0.0523, p90=0.0911, p95=1.0985)


def run() -> Run:
    scenario = Scenario(
        version=1,
        question="How much faster is the work in batches?",
        model="m",
        servers={"vllm": Server(template="simulated", container=False)},
        loads={
            "one": Load(user="batch", batch_size=1, requests=25, output_tokens=50),
            "ten": Load(user="batch", batch_size=10, requests=25, output_tokens=50),
        },
    )
    served_by = ServedBy(url="http://127.0.0.1:1", simulated=True)
    cells = [
        CellRun(
            id=f"r1-vllm-{load}", server="vllm", load=load, repeat=1, started_wall_s=0, ended_wall_s=1,
            served_by=served_by,
        )
        for load in ("one", "ten")
    ]  # fmt: skip
    return Run(
        id="20260921-140000-first-look", status="valid", started_wall_s=0.0, scenario_name="first-look",
        scenario=scenario, workload_sha256="ab", cells=cells, machine=Machine(name="m"),
    )  # fmt: skip


def numbers(wall_s: float, times: Distribution, failed: int = 0) -> Numbers:
    return Numbers(
        sent=25, succeeded=25 - failed, failed=failed, unfinished=0, output_tokens=1250, wall_s=wall_s,
        output_tok_s=1250 / wall_s, requests_per_s=25 / wall_s, ttft_s=times, ttfo_s=times, tpot_s=FEW, e2e_s=times,
    )  # fmt: skip


def row(load: str, of: Numbers) -> Row:
    return Row(
        server="vllm", load=load, cells=[f"r1-vllm-{load}"], wall_s=[of.wall_s or 0.0],
        output_tok_s=[of.output_tok_s or 0.0], pooled=of,
    )  # fmt: skip


def summary() -> Summary:
    one, ten = numbers(13.07, MANY), numbers(4.18, MANY, failed=2)
    verdict = Verdict(
        side="vllm / ten", baseline="vllm / one", metric="wall_s", ratio=3.127, low=3.05, high=3.21, p=0.008,
        n=(5, 5), word="faster",
    )  # fmt: skip
    cells = [
        CellSummary(id=f"r1-vllm-{load}", server="vllm", load=load, repeat=1, numbers=of, server_load=ServerLoad())
        for load, of in (("one", one), ("ten", ten))
    ]
    return Summary(
        run="20260921-140000-first-look",
        scenario="first-look",
        question="How much faster is the work in batches?",
        simulated=True,
        valid=True,
        reasons=[],
        rows=[row("one", one), row("ten", ten)],
        cells=cells,
        comparison=Comparison(metric="wall_s", comparisons=1, noise_floor=0.02, noise_source=[], verdicts=[verdict]),
        checks=[
            CheckResult(check="error_rate == 0", status="failed", evidence=[because("text", text="2 of 50 failed")])
        ],
    )


def printed(of: Summary, width: int, folder: Path = Path("runs/x"), explain: bool = False) -> str:
    out = io.StringIO()
    terminal.print_report(of, run(), folder, Console(file=out, width=width), explain=explain)
    return out.getvalue()


def test_a_wide_terminal_has_one_table() -> None:
    assert printed(summary(), 170).splitlines() == [
        "SIMULATED ENGINE: these numbers come from a model, not from hardware",
        "How much faster is the work in batches?",
        "ten is 3.13x faster by wall time than one.",
        "first-look, run 20260921-140000-first-look",
        "",
        "                 Wall  Completion  Aggregate                TTFT    TTFT            TPOT             TPOT"
        "     E2E     E2E                     Speedup",
        "Server  Load     time      tokens      tok/s  Requests/s  p50 ms  p95 ms          p50 ms           p95 ms"
        "  p95 ms  max ms   Errors             (95 %)  Verdict",
        "vllm    one   13.07 s       1,250       95.6        1.91    52.3   1,098  n/a (needs 11)  n/a (needs 130)"
        "   1,098   1,200        0       1 (baseline)  baseline",
        "vllm    ten    4.18 s       1,250      299.0        5.98    52.3   1,098  n/a (needs 11)  n/a (needs 130)"
        "   1,098   1,200  2 of 25  3.13× (3.05–3.21)  faster",
        "",
        "- vllm / ten: 3.13x faster than vllm / one by wall time (95 % interval 3.05x to 3.21x, p = 0.008).",
        "- By wall time; one comparison. Differences under 2\u00a0% are treated as noise.",
        "",
        "VALID: all conditions of a trustworthy measurement held",
        "",
        "- FAILED error_rate == 0: 2 of 50 failed",
        "",
        "Report: none yet; `harness report runs/x` writes it",
    ]


def test_a_narrow_terminal_stacks_two_tables_within_its_width() -> None:
    text = printed(summary(), 90).splitlines()
    assert max(len(line) for line in text) <= 90
    heads = [" ".join(line.split()) for line in text if line.startswith("Server ")]
    assert heads == [
        "Server Load time tokens tok/s Requests/s (95 %) Verdict",
        "Server Load p50 ms p95 ms p50 ms p95 ms p95 ms max ms Errors",
    ]
    long = "a-name-as-long-as-a-scenario-ever-allows"
    rows = [replace(row, server=long, load=long) for row in summary().rows]
    wide = printed(replace(summary(), rows=rows), 80)
    assert max(len(line) for line in wide.splitlines()) <= 80
    assert "13.07 s" in wide and "299.0" in wide


@pytest.mark.parametrize(
    ("failed", "unfinished", "said"),
    [(0, 0, "0"), (2, 0, "2 of 25"), (0, 7, "7 unfinished"), (2, 7, "2 of 25, 7 unfinished")],
)
def test_what_did_not_finish_is_no_error(failed: int, unfinished: int, said: str) -> None:
    of = replace(numbers(1.0, MANY, failed), unfinished=unfinished, succeeded=25 - failed - unfinished)
    assert format_errors(of) == said
    assert of.error_rate == failed / 25  # what a check sees


@pytest.mark.parametrize("width", [56, 40])
def test_where_no_table_fits_the_numbers_stand_one_below_the_other(width: int) -> None:
    *text, page = printed(summary(), width).splitlines()
    assert max(len(line.rstrip()) for line in text) <= width
    begin = text.index("vllm / one")
    assert text[begin : begin + 3] == ["vllm / one", "Wall time          13.07 s", "Completion tokens  1,250"]
    assert text[begin + 12 : begin + 14] == ["Speedup (95 %)     1 (baseline)", "Verdict            baseline"]
    assert {"vllm / ten", "Wall time          4.18 s", "Errors             2 of 25"} < set(text[begin + 14 :])


def test_a_cause_that_several_rows_have_is_reported_once() -> None:
    def failed(load: str, count: int, kind: str, message: str, **known: str) -> FailedRequests:
        return FailedRequests(server="vllm", load=load, kind=kind, count=count, message=message, **known)

    long = {"id": "req.long", "fix": "ask for less"}
    of = [
        failed("one", 3, "http", "status 400: 9000 tokens", cause="too long (9000 tokens)", **long),
        failed("one", 2, "timeout", "nothing for 7 s"),
        failed("ten", 1, "http", "status 400: 9100 tokens", cause="too long (9100 tokens)", **long),
        failed("ten", 1, "timeout", "nothing for 9 s"),
        failed("ten", 1, "timeout", "no first byte"),
        failed("ten", 1, "http", "too long for vllm", cause="too long for vllm", **long),
    ]
    said = sentences.failure_sentences(replace(summary(), failures=of))
    assert [text.partition(";")[0] for text in said] == [
        "vllm / one: 3 requests, vllm / ten: 1 request (http): too long (9000 tokens)",
        "vllm / one: 2 requests, vllm / ten: 1 request (timeout): nothing known of it",
        "vllm / ten: 1 request (timeout): nothing known of it",
        "vllm / ten: 1 request (http): too long for vllm",
    ]
    assert said[0].endswith('; to solve it: ask for less; said was "status 400: 9000 tokens"')


def test_no_colour_where_there_is_no_terminal_and_some_where_there_is() -> None:
    assert "\x1b" not in printed(summary(), 80)
    out = io.StringIO()
    terminal.print_report(summary(), run(), Path("x"), Console(file=out, width=80, force_terminal=True))
    assert "\x1b[" in out.getvalue()


def test_markup_in_a_text_from_outside_is_not_acted_on() -> None:
    broken = replace(
        summary(),
        valid=False,
        reasons=[because("text", text="[red]x[/red]\n[/] \x1b[31m[link=x]")],
        notes=[because("text", text="vllm / ten: [bold]warm")],
    )
    text = printed(broken, 170).splitlines()
    assert text[13:16] == [
        "INVALID: rows with a cell that is not valid have no verdict, and the run is not compared with others",
        "- [red]x[/red] [/] \ufffd[31m[link=x]",
        "- vllm / ten: [bold]warm",
    ]


def test_markdown() -> None:
    text = markdown.render(summary(), run())
    lines = text.split("<details>")[0].splitlines()
    assert lines[:5:2] == [
        "## How much faster is the work in batches?", "**ten is 3.13x faster by wall time than one.**",
        "> **SIMULATED ENGINE: these numbers come from a model, not from hardware**",
    ]  # fmt: skip
    assert lines[7] == "|:---|:---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|:---|"
    assert lines[9] == (
        "| vllm | ten | 4.18 s | 1,250 | 299.0 | 5.98 | 52.3 | 1,098 | n/a (needs 11) | n/a (needs 130) | 1,098 "
        "| 1,200 | 2 of 25 | 3.13× (3.05–3.21) | faster |"
    )
    assert [line[:30] for line in lines[11:]] == [
        "- vllm / ten: 3.13x faster tha", "- By wall time; one comparison", "", "**VALID: all conditions of a t", "",
        "- **FAILED**: `error_rate == 0", "",
    ]  # fmt: skip
    assert (
        "<details><summary>Each load</summary>\n\n"
        "- `one`: `batch user, bursts: requests 25, batch_size 1, output_tokens 50`\n"
        "- `ten`: `batch user, bursts: requests 25, batch_size 10, output_tokens 50`\n"
    ) in text
    assert "5 repeats of every row, interleaved, a fresh server for each; seed 42.\n" in text
    text = markdown.render(summary(), replace(run(), status="running"))
    assert "**UNFINISHED: " in text


def test_markdown_keeps_texts_from_outside_plain() -> None:
    assert markdown.escape("a|b <script> & [x](y)\n# *z* `q` ~~s~~") == (
        r"a\|b &lt;script&gt; &amp; \[x\](y) # \*z\* \`q\` \~\~s\~\~"
    )
    assert markdown.inline_code("a `b`") == r"a \`b\`"


def test_the_same_reason_in_many_cells_is_said_once() -> None:
    many = [Reason("server_exit", {"exit_code": i}, cell=f"r{i}-vllm-one") for i in range(1, 4)]
    many += [
        Reason("text", {"text": f"of a chunk each {gap} ms"}, cell=f"r{i}-vllm-ten")
        for i, gap in ((1, "2"), (2, "2.1"), (3, "1,250"), (1, "1e+02"))
    ]
    others = [because("text", text="no room: on the disk"), because("text", text="r9-x: y")]
    broken = replace(summary(), valid=False, reasons=[*many, *others])
    text = printed(broken, 170).splitlines()
    assert text[14:18] == [
        "- r1-vllm-one: the server died with exit code 1 (likewise in 2 other cells)",
        "- r1-vllm-ten: of a chunk each 2 ms (likewise in 3 other cells)",
        "- no room: on the disk",
        "- r9-x: y",
    ]


def test_what_is_said_of_several_verdicts_is_said_once() -> None:
    def verdict(side: str, metric: str, **values: Any) -> Verdict:
        known: dict[str, Any] = {"ratio": 1.5, "low": None, "high": None, "p": None, "word": "inconclusive"}
        return Verdict(side=side, baseline="a / x", metric=metric, n=(1, 1), unit="runs", **known | values)

    unknown: dict[str, Any] = {"reason": "run_variation_unknown", "needed": 4}
    refused: dict[str, Any] = {"reason": "refused", "refused": because("run_invalid"), "ratio": None}
    said = sentences.verdict_sentences([
        verdict("b / x", "wall_s", **unknown),
        verdict("b / y", "ttft_p50", **unknown),
        verdict("b / z", "wall_s", word="faster", ratio=2.0, low=1.9, high=2.1, p=0.01),
        verdict("c / x", "wall_s", **unknown),
        verdict("c / y", "ttft_p50", **refused),
        verdict("b / y", "e2e_p95", **unknown),
        verdict("c / y", "e2e_p95", **refused),
    ])  # fmt: skip
    assert [(word, text.partition(", how far")[0]) for word, text in said] == [
        ("inconclusive", "b / x, c / x: inconclusive: by wall time"),
        ("inconclusive", "b / y: inconclusive: by TTFT p50, E2E p95"),
        ("faster", "b / z: 2.00x faster than a / x by wall time (95 % interval 1.90x to 2.10x, p = 0.010)."),
        ("inconclusive", "c / y: inconclusive: this run is INVALID."),
    ]


def test_a_load_of_fixed_duration_has_a_rate_and_no_wall_time() -> None:
    timed = Load(user="chat", users=8, duration_s=60, output_tokens=128, output="natural", think_s=[1, 2.5])
    one = replace(numbers(10.0, MANY), wall_s=None, window="timed", window_s=60.0)
    other = run()
    scenario = replace(other.scenario, loads={"one": timed})
    of = replace(summary(), rows=[replace(row("one", one), wall_s=[])], comparison=None, checks=[])
    text = markdown.render(of, replace(other, scenario=scenario))
    assert "| vllm | one | 1,250 | 125 | 2.50 | 52.3 |" in text
    said = "chat user, closed loop: users 8, duration_s 60, think_s [1 2.5], output_tokens 128, output natural"
    assert f"- `one`: `{said}`\n" in text


def test_answers_in_one_piece_have_no_first_token() -> None:
    whole = replace(numbers(10.0, MANY), ttft_s=NO_SAMPLE, tpot_s=NO_SAMPLE)
    of = replace(summary(), rows=[row("one", whole)], comparison=None, checks=[])
    latencies = [column for column in table_columns(of) if column.group == "latency" and column.unit == "ms"]
    assert [column.show(line) for line in table_lines(of, run()) for column in latencies] == [
        *["–"] * 4,
        "1,098",
        "1,200",
    ]


def test_csv_has_raw_numbers_and_leaves_the_unknown_empty() -> None:
    first, second = csv.DictReader(io.StringIO(export.csv_table(summary(), run())))
    assert (first["server"], first["load"], first["wall_s"], first["speedup"]) == ("vllm", "one", "13.07", "")
    assert (second["failed"], second["ttft_p95_s"], second["tpot_p50_s"]) == ("2", "1.0985", "")
    assert (second["speedup"], second["p"], second["verdict"]) == ("3.127", "0.008", "faster")


def test_figures_have_no_exponent() -> None:
    given = (0.0321, 0.26, 9.96, 12.3, 110.4, 1234.5)
    assert [units.figures(value) for value in given] == ["0.032", "0.26", "10", "12", "110", "1,234"]
