"""The terminal and Markdown reports, to the letter, on a small summary made by hand."""

import io
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace
from rich.console import Console

from harness.base.measured import NO_SAMPLE, Distribution
from harness.base.reason import Reason, because
from harness.cli.common import exit_after_run
from harness.failures.diagnosis import FailedRequests
from harness.numbers.comparison import CheckResult, Comparison, Verdict
from harness.numbers.summarize import summarize
from harness.numbers.summary import Summary
from harness.numbers.time_split import TimeSplit
from harness.questions.capacity.page import capacity_page
from harness.questions.capacity.record import CapacityReport
from harness.questions.report.decide import decided
from harness.questions.report.page import print_report, run_page
from harness.report import markdown, sentences, terminal
from harness.report.elements import (
    LIMITED,
    Bullet,
    Bullets,
    Element,
    Fold,
    Grid,
    Paragraph,
    TableColumn,
    lined_up,
    plain_grid,
)
from harness.report.results_table import format_errors, table_columns, table_lines
from harness.report.terminal import fold_command, print_page
from harness.run.progress import wrapped
from harness.scenario import Load, Server, Stage
from tests.support.faults import fault
from tests.support.made_runs import scenario, write_made_run
from tests.support.made_summaries import FEW, MANY, numbers, row, run, summary
from tests.support.wording import Wording

STAGED = Load(user="chat", output_tokens=8, stages=[Stage(users=users, for_s=60.0) for users in (5, 20, 5)])


def printed(of: Summary, width: int, *, explain: bool = False) -> str:
    out = io.StringIO()
    print_report(of, run(), Path("runs/x"), Console(file=out, width=width), explain=explain)
    return out.getvalue()


def test_a_wide_terminal_has_one_table(wording: Wording) -> None:
    wording(printed(summary(), 170))


def test_a_narrow_terminal_has_two_tables_or_a_block_for_each_row(wording: Wording) -> None:
    text = printed(summary(), 90).splitlines()
    assert max(map(len, text)) <= 90
    wording([" ".join(line.split()) for line in text if line.startswith("Server ")])
    *text, page = printed(summary(), 40).splitlines()
    assert max(len(line.rstrip()) for line in text) <= 40
    begin = text.index("vllm / one")
    assert text[begin + 1].endswith(" 13.07 s")
    assert any(line.endswith(" 2 of 25") for line in text[text.index("vllm / ten") :])
    wording([" ".join(line.split()) for line in text[begin:]])


def test_a_table_too_wide_for_the_terminal_is_several_or_a_list(wording: Wording) -> None:
    time = TimeSplit(connect_s=0.001, queue_s=0.02, prefill_s=0.3, decode_s=4.0, e2e_s=5.0)
    timed = summary()
    timed = replace(timed, rows=[replace(row, time=time) for row in timed.rows])
    wide, narrow = printed(timed, 170).splitlines(), printed(timed, 50).splitlines()
    title = "Where the time goes, mean of each request"
    wording(wide[wide.index(title) + 1])
    wording([narrow[narrow.index(title) + 1], narrow[narrow.index(title) + 5]])
    alone = printed(replace(timed, rows=timed.rows[:1]), 50).splitlines()
    assert alone[alone.index(title) + 1 :][:3] == ["vllm / one", "Connect, ms  1.00", "Queue, ms    20.0"]


def test_probes_that_the_load_generator_limited_are_counted(wording: Wording) -> None:
    report = CapacityReport(
        run="r", load="people", unit="users", step=1.0, max_level=256, slos=[], shares=[], budget_s=60.0
    )
    one, ten = summary().rows
    out = io.StringIO()
    limited = replace(summary(), rows=[one, replace(ten, client_limited=["ttft"])])
    print_page(capacity_page(report, limited), Console(file=out, width=200))
    assert "harness report r --explain" in out.getvalue()
    wording(out.getvalue())


@pytest.mark.parametrize(
    ("failed", "unfinished", "text"),
    [(0, 0, "0"), (2, 0, "2 of 25"), (0, 7, "0 (7 cut)"), (2, 7, "2 of 25 (7 cut)")],
)
def test_what_did_not_finish_is_no_error(failed: int, unfinished: int, text: str) -> None:
    of = replace(numbers(1.0, MANY, failed), unfinished=unfinished, succeeded=25 - failed - unfinished)
    assert (format_errors(of), of.error_rate) == (text, failed / 25)


@pytest.mark.parametrize(
    ("status", "valid", "checks", "word", "style"),
    [
        ("valid", True, [], "VALID", "good"),
        ("valid", True, ["passed"], "PASSED", "good"),
        ("valid", True, ["passed", "failed", "inconclusive"], "FAILED", "bad"),
        ("valid", True, ["passed", "inconclusive"], "INCONCLUSIVE", "unsure"),
        ("invalid", False, ["passed"], "INVALID", "bad"),
        ("unchecked", None, ["passed"], "UNCHECKED", "unsure"),
        ("interrupted", False, [], "INTERRUPTED", "unsure"),
        ("running", True, ["failed"], "UNFINISHED", "unsure"),
        ("live", None, [], "LIVE", "unsure"),
        ("failed", False, [], "NOT COMPLETED", "bad"),
    ],
)
def test_a_run_has_one_word_and_one_that_was_cut_is_not_red(
    status: Any, valid: bool | None, checks: list[Any], word: str, style: str
) -> None:
    results = [CheckResult(check=f"c{number}", status=each) for number, each in enumerate(checks)]
    of, made = replace(summary(), valid=valid, checks=results), replace(run(), status=status)
    state = sentences.state(of, made)
    assert (state.word, state.style) == (word, style)
    states = [each for each in lined_up(run_page(of, made)) if isinstance(each, Paragraph)]
    assert [each for each in states if each.style in ("good", "unsure", "bad")] == [state]


@pytest.mark.parametrize(
    ("checks", "gate", "word"),
    [
        (["passed"], "no_slowdown", "PASSED"), (["passed"], "slower", "FAILED"), (["passed"], None, "PASSED"),
        (["passed"], "cannot_tell", "INCONCLUSIVE"), (["inconclusive"], "slower", "FAILED"),
        (["failed"], "cannot_tell", "FAILED"), ([], "slower", "VALID"),
    ],
)  # fmt: skip
def test_the_word_of_a_run_with_checks_is_that_of_its_exit_code(checks: list[Any], gate: Any, word: str) -> None:
    """VALID is about the measurement: without checks the answer above it is that of the gate."""
    verdict = Verdict(
        side="b / x", baseline="a / x", metric="wall", ratio=0.8, low=0.75, high=0.85, p=0.001, n=(5, 5), word="slower",
        gate=gate, tolerance=0.1,
    )  # fmt: skip
    comparison = Comparison(metric="wall", comparisons=1, noise_floor=0.02, noise_source=[], verdicts=[verdict])
    results = [CheckResult(check=f"c{number}", status=status) for number, status in enumerate(checks)]
    of = replace(summary(), valid=True, checks=results, comparison=comparison)
    state = sentences.state(of, run())
    assert state.word == word
    codes = {"PASSED": 0, "FAILED": 4, "INCONCLUSIVE": 5, "VALID": 4}
    try:
        exit_after_run(of)
        code = 0
    except typer.Exit as end:
        code = end.exit_code
    assert code == codes[word]


@pytest.mark.parametrize(("provisional", "status"), [(False, "inconclusive"), (True, "failed")])
def test_a_provisional_check_fails_on_every_page_where_that_was_asked_for(provisional: bool, status: str) -> None:
    results = [CheckResult(check="c", code="provisional"), CheckResult(check="d", code="too_close")]
    of = decided(replace(summary(), checks=results), None, provisional=provisional)
    assert [result.status for result in of.checks] == [status, "inconclusive"]


def test_rows_are_named_as_the_bad_ones_only_where_all_reasons_are_of_cells() -> None:
    """A reason of the whole run, such as another client, leaves no row to trust."""
    one, ten = summary().rows
    of_cell, of_run = replace(because("run_error", "late"), cell="r1-vllm-ten"), because("run_error", "another client")
    bad = replace(ten, invalid=of_cell)
    for reasons, text in (
        ([of_cell], "do not trust vllm / ten; the run is not compared with other runs"),
        ([of_cell, of_run], "do not trust the rows concerned; the run is not compared with other runs"),
    ):
        of = replace(summary(), rows=[one, bad], valid=False, reasons=reasons, comparison=None)
        assert sentences.validity(of, run()) == ("INVALID", text)


@pytest.mark.parametrize(
    ("codes", "limited", "line"),
    [
        ([], {}, "2 notes on these numbers"),
        (["host_cpu_full"], {}, "This machine was busy, but the load generator kept up"),
        (["host_cpu_full"], {"wall": (0, 0.03)}, "This machine was busy: numbers with ‡ may be wrong by up to 3\xa0%"),
        ([], {"wall": (0.0, 0.0)}, "The load generator was late: numbers with ‡ were read late"),
    ],
)  # fmt: skip
def test_the_notes_come_to_one_line(codes: list[str], limited: dict[str, tuple[float, float]], line: str) -> None:
    one, ten = summary().rows
    late = replace(ten, client_limited=list(limited), client_error={**limited, "output_tok_s": (0.5, 0.5)})
    of = replace(summary(), rows=[one, late], notes=[because(code, "busy") for code in codes])
    assert sentences.notes_sentence(of, 2, LIMITED) == line


def test_the_sign_of_a_late_load_generator_is_explained_only_where_a_number_has_it() -> None:
    """Of a timed load the wall time is not shown, so nothing has the sign."""
    timed = [replace(each, pooled=replace(each.pooled, window="timed", wall=None)) for each in summary().rows]
    for field, has_sign in (("wall", False), ("output_tok_s", True)):
        late = replace(timed[1], client_limited=[field], client_error={field: (0, 0.03)})
        of = replace(summary(), rows=[timed[0], late])
        out = io.StringIO()
        print_report(of, run(), Path("x"), Console(file=out, width=150), explain=True)
        for text in (out.getvalue(), markdown.render(run_page(of, run()))):
            assert text.count("load generator") and (LIMITED in text) == has_sign


def test_only_what_failed_is_red() -> None:
    def colours(failed: int) -> bool:
        of = replace(numbers(4.18, MANY, failed=failed), unfinished=3)
        out = io.StringIO()
        alone = replace(summary(), rows=[row("ten", of)], comparison=None, checks=[], simulated=False)
        print_report(
            alone, run(), Path("x"), Console(file=out, width=170, color_system="standard", force_terminal=True)
        )
        return "\x1b[1;31m" in out.getvalue()

    assert (colours(0), colours(2)) == (False, True)


def test_a_cause_that_several_rows_have_is_reported_once(wording: Wording) -> None:
    def failed(load: str, count: int, kind: str, message: str, **known: str) -> FailedRequests:
        return FailedRequests(server="vllm", load=load, kind=kind, count=count, message=message, **known)

    long = {"id": "req.long", "fix": "ask for less"}
    failures = [
        failed("one", 3, "http", "status 400: 9000 tokens", cause="too long (9000 tokens)", **long),
        failed("ten", 1, "http", "status 400: 9100 tokens", cause="too long (9100 tokens)", **long),
        failed("ten", 1, "timeout", "no first byte"),
    ]
    wording(sentences.failure_sentences(replace(summary(), failures=failures)))


def test_texts_from_outside_are_not_acted_on_and_equal_reasons_are_one(wording: Wording) -> None:
    died = "the server died with exit code {}"
    codes = range(1, 4)
    reasons = [Reason("server_exit", died.format(code), {"exit_code": code}, f"r{code}-vllm-one") for code in codes]
    reasons.append(because("run_error", "[red]x[/red]\n[/] \x1b[31m[link=x]"))
    broken = replace(summary(), valid=False, reasons=reasons, notes=[because("run_error", "vllm: [bold]warm")])
    shown = printed(broken, 170).splitlines()
    start = next(number for number, line in enumerate(shown) if line.startswith("INVALID"))
    wording(shown[start : start + 3])
    wording([line for line in printed(broken, 170).splitlines() if "--explain" in line])
    assert "[bold]" in printed(broken, 170, explain=True)
    wording(markdown.escape("a|b <script> & [x](y)\n# *z* `q` ~~s~~"))
    assert markdown.inline_code("a `b`") == r"a \`b\`"


OBEYED = "\x9b2J\x1b[2J\u202eb\u2066c\u200b\x7f\u2028d\ufeff\x85e"


def test_a_command_in_a_sentence_is_on_one_line() -> None:
    command, out = f"harness tune --resume '{'a b ' * 30}'", io.StringIO()
    page = [Paragraph(f"No answer yet, because the search has not ended; `{command}` goes on")]
    print_page(page, Console(file=out, width=60, color_system=None))
    assert f"`{command}`" in out.getvalue() and len(out.getvalue().splitlines()) > 1


@fault(
    "input", "control characters in what a report says, in Markdown too", seen="U+FFFD in their place", kept="as it was"
)
def test_no_element_has_what_a_terminal_obeys_and_code_stays_code() -> None:
    column = TableColumn("x", OBEYED)
    page: list[Element] = [
        *(Paragraph(text, style) for style in ("", "title", "lead", "warning") for text in (OBEYED, f"`a{OBEYED}`")),
        Bullets([Bullet(OBEYED, mark="x", code=OBEYED, parts=[Bullet("", mark="y", code=f"a\n```{OBEYED}\n````")])]),
        Grid(title=OBEYED, columns=[column], rows=[[OBEYED]], below=[OBEYED]),
        Fold(OBEYED, [Paragraph(OBEYED)]),
    ]
    text, out = markdown.render(page), io.StringIO()
    print_page(page, Console(file=out, width=150, color_system=None), explain=True)
    for shown in (text, out.getvalue()):
        assert shown.replace("\n", "").isprintable() and shown.count("\ufffd2J") >= 10
    assert "\n    `````\n" in text, "a fence that nothing within it ends"


def test_markdown(wording: Wording) -> None:
    text = markdown.render(run_page(summary(), run()))
    lines = text.split("<details>")[0].splitlines()
    wording(lines[:7:2])
    assert lines[9] == "|:---|:---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|:---|"
    assert "4.18" in lines[11] and "1,250" in lines[11]
    wording(lines[11])
    assert lines[15] == "### Verdicts"
    wording(lines[15:18] + lines[-4:])
    wording([line for line in text.splitlines() if line.startswith("- `") or line.startswith("5 repeats")])
    assert "seed 42.\n" in text
    assert "**UNFINISHED: " in markdown.render(run_page(summary(), replace(run(), status="running")))


def test_verdicts_that_differ_only_in_their_side_are_one_sentence(wording: Wording) -> None:
    def verdict(side: str, metric: str, **values: Any) -> Verdict:
        known: dict[str, Any] = {"ratio": 1.5, "low": None, "high": None, "p": None, "word": "inconclusive"}
        return Verdict(side=side, baseline="a / x", metric=metric, n=(1, 1), unit="runs", **known | values)

    unknown: dict[str, Any] = {"reason": "run_variation_unknown", "needed": 4}
    refused: dict[str, Any] = {
        "reason": "refused",
        "refused": because("run_invalid", "this run is INVALID"),
        "ratio": None,
    }
    texts = sentences.verdict_sentences([
        verdict("b / x", "wall", **unknown),
        verdict("b / z", "wall", word="faster", ratio=2.0, low=1.9, high=2.1, p=0.01),
        verdict("c / x", "wall", **unknown),
        verdict("c / y", "ttft_p50", **refused),
        verdict("c / y", "e2e_p95", **refused),
    ])  # fmt: skip
    wording(texts)


def test_columns_without_a_value_are_left_out() -> None:
    timed = Load(user="chat", users=8, duration_s=60, output_tokens=128, output="natural", think_s=[1, 2.5])
    one = replace(numbers(10.0, MANY), wall=None, window="timed", window_s=60.0, ttft=NO_SAMPLE, tpot=NO_SAMPLE)
    scenario = replace(run().scenario, loads={"one": timed})
    of = replace(summary(), rows=[replace(row("one", one), wall=[])], comparison=None, checks=[])
    text = markdown.render(run_page(of, replace(run(), scenario=scenario)))
    assert "| vllm | one | 1,250 | 125 | 2.50 | 1,098 |" in text, "no wall time, no first token"
    described = "chat user, closed loop: users 8, duration_s 60, think_s [1 2.5], output_tokens 128, output natural"
    assert f"- `one`: {markdown.escape(described)}\n" in text
    assert latencies_of(of) == [{"E2E p95": "1,098", "E2E max": "1,200"}], "no first token"


def latencies_of(of: Summary) -> list[dict[str, str]]:
    """The latencies of the main table's rows, by column."""
    lines = table_lines(of, run())
    columns = [column for column in table_columns(of, lines) if column.unit == "ms"]
    return [{column.title: column.show(line) for column in columns} for line in lines]


def test_what_one_user_sees() -> None:
    """Decode speed, and the speed of prompts where it is known."""

    def shown(tpot: Distribution, prefill_tok_s: float | None) -> list[str]:
        one = replace(row("one", replace(numbers(1.0, MANY), tpot=tpot)), prefill_tok_s=prefill_tok_s)
        (line,) = table_lines(replace(summary(), rows=[one]), run())
        columns = table_columns(summary(), [line])
        return [column.show(line) for column in columns if column.key in ("user_rate", "prefill")]

    assert shown(FEW, 2000.0) == ["20 (n = 5)", "2,000"], "1 / 50 ms"
    assert shown(MANY, 2000.0) == ["19.12", "2,000"]
    assert shown(FEW, None) == ["20 (n = 5)"]
    assert shown(NO_SAMPLE, None) == []


def test_a_percentile_that_no_row_has_is_replaced_by_a_lower_one_or_the_mean() -> None:
    some = replace(MANY, n=70, p90=None, p95=None)
    of = replace(summary(), rows=[row("one", numbers(1.0, FEW)), row("ten", numbers(1.0, some))])
    tpot = {"TPOT mean": "50.0 (n = 5)"}
    assert latencies_of(of) == [
        {"TTFT p50": "n/a (needs 11)", **tpot, "E2E p50": "n/a (needs 11)", "E2E max": "60.0"},
        {"TTFT p50": "52.3", **tpot, "E2E p50": "52.3", "E2E max": "1,200"},
    ]
    quick = replace(of, scenario="quick")  # makes no claim about its requests
    assert latencies_of(quick) == [
        {f"{name} mean": "50.0 (n = 5)" for name in ("TTFT", "TPOT", "E2E")} | {"E2E max": "60.0"},
        {"TTFT mean": "50.0 (n = 70)", **tpot, "E2E mean": "50.0 (n = 70)", "E2E max": "1,200"},
    ]
    assert latencies_of(replace(of, rows=[row("one", replace(numbers(1.0, FEW), ttft=NO_SAMPLE, tpot=NO_SAMPLE))])) == [
        {"E2E mean": "50.0 (n = 5)", "E2E max": "60.0"}
    ]


def test_rows_of_other_work_are_said_to_have_no_verdict(tmp_path: Path) -> None:
    short = Load(user="batch", batch_size=2, requests=4, output_tokens=11)
    loads = {
        "one": short,
        "two": replace(short, in_flight=1, batch_size=None),
        "long": replace(short, output_tokens=22),
    }
    for servers, rows in ((["a"], "1 row has"), (["a", "b"], "")):
        folder = tmp_path / "".join(servers)
        known = scenario(servers={name: Server(template="vllm-cpu") for name in servers}, loads=loads)
        run = write_made_run(folder, made_of=known)
        text = sentences.other_work_sentence(summarize(folder), run)
        assert text.startswith(rows) and bool(text) is bool(rows), text


def test_a_long_command_continues_below_and_is_pasted_as_one() -> None:
    words = ["harness", "run", "a.yaml", "--check", "'ttft_p95 <= 2s'", "--model", "m" * 50, "&&", "harness", "list"]
    rows = fold_command(" ".join(words), 60)
    assert rows == [
        "harness run a.yaml --check 'ttft_p95 <= 2s' \\", f"  --model {'m' * 50} \\", "  && harness list"
    ]  # fmt: skip
    assert shlex.split("\n".join(rows).replace("\\\n", "")) == shlex.split(" ".join(words))
    for whole in ("harness list", f"harness 'an open quote {'w ' * 50}", f"docker run {'--rm ' * 20}\\"):
        assert fold_command(whole, 60) == [whole]


def test_the_parts_of_a_finding_are_indented_where_they_are_long() -> None:
    out = io.StringIO()
    verify = "harness run scenarios/first-look.yaml --url http://127.0.0.1:8000 --repeats 5"
    finding = Bullet("slow", parts=[Bullet("", mark="Verify", code=verify, is_command=True)])
    terminal.print_page([Bullets([finding], "findings")], Console(file=out, width=60))
    assert out.getvalue().splitlines()[1:] == [
        "  Verify:", "    harness run scenarios/first-look.yaml \\", "      --url http://127.0.0.1:8000 --repeats 5"
    ]  # fmt: skip


def test_a_table_of_long_texts_breaks_no_word() -> None:
    words = [
        "long_prefill_token_threshold 0, max_num_batched_tokens 256",
        "finding queue_with_room",
        "1.36x (1.35 to 1.37)",
    ]
    grid = plain_grid(["Tried", "Why", "Result", "Kept"], [[*words, "yes"], ["the default", "reference", "1", ""]])
    for width in (64, 80, 100, 200):
        terminal.print_page([grid], Console(file=(out := io.StringIO()), width=width))
        assert set(out.getvalue().split()) == {
            *" ".join(words).split(),
            *["Tried", "Why", "Result", "Kept", "yes", "the", "default", "reference", "1"],
        }
        assert max(map(len, out.getvalue().splitlines())) <= width


def test_a_long_paragraph_goes_on_indented_and_keeps_its_units() -> None:
    """In a pipe of any width; the space before a unit is a plain one again."""
    text = "an answer takes 2.5 s for each number of users, and its first token comes after 1,285 ms of 100 %"
    for width in range(20, 100):
        console = Console(file=io.StringIO(), width=width)
        print_page([Paragraph(text), Bullets([Bullet(text)])], console)
        printed_text = console.file.getvalue()  # type: ignore[attr-defined]
        lines = printed_text.splitlines()
        first = next(place for place, line in enumerate(lines) if line.startswith("-"))
        others = [*lines[1:first], *lines[first + 1 :]]
        assert all(line.startswith("  ") for line in others) and max(map(len, lines)) <= width
        assert [printed_text.count(part) for part in ("2.5 s", "1,285 ms", "100 %")] == [2, 2, 2]
        in_log = wrapped(text, width).splitlines()
        assert " ".join(line.strip() for line in in_log) == text and all(line.startswith("  ") for line in in_log[1:])
