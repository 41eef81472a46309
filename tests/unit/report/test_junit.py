"""JUnit files, read by another program, say what the exit code says."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase
from msgspec.structs import replace

from harness.base.errors import ServerError
from harness.base.reason import because
from harness.numbers.comparison import Comparison, Gate, Verdict
from harness.numbers.summarize import summarize
from harness.numbers.summary import Summary
from harness.questions.compare.page import comparison_xml
from harness.questions.report import junit_cases
from harness.records.manifest import read_run
from harness.report import junit
from harness.report.verdict_text import verdict_sentence
from harness.scenario.plan import Cell
from tests.support.command import called, harness, server, write
from tests.support.faults import fault
from tests.support.made_runs import scenario, served_by, write_made_run
from tests.support.wording import Wording


def cases(text: str) -> dict[str, tuple[str, str]]:
    """Outcome and evidence of each case, as another program reads the file."""
    suites = JUnitXml.fromstring(text.encode())
    outcomes: dict[str, tuple[str, str]] = {}
    for suite in suites:
        for case in suite:
            assert isinstance(case, TestCase)
            outcomes[f"{case.classname} | {case.name}"] = outcome(case)
        counted = (suite.tests, suite.failures, suite.errors, suite.skipped)
        words = [word for word, _ in outcomes.values()]
        assert counted == (len(outcomes), words.count("failure"), words.count("error"), words.count("skipped"))
    assert (suites.tests, suites.failures, suites.errors, suites.skipped) == counted
    return outcomes


def outcome(case: TestCase) -> tuple[str, str]:
    words = {Failure: "failure", Error: "error", Skipped: "skipped"}
    if not case.result:
        return "passed", case.system_out
    (result,) = case.result
    return words[type(result)], result.text


def properties_of(text: str) -> dict[str, str]:
    (suite,) = JUnitXml.fromstring(text.encode())
    return {each.name: each.value for each in suite.properties()}  # type: ignore[no-untyped-call]


def junit_of(folder: Path, **changes: Any) -> tuple[Summary, str]:
    made_of = scenario(checks=["error_rate == 0", "wall <= 9 s", "ttft_p95 <= 2s"])

    def wall_s(cell: Cell) -> float:
        return (10.0 if cell.server == "a" else 12.0) + 0.01 * cell.repeat

    write_made_run(folder, wall_s, made_of=made_of, **changes)
    summary = summarize(folder)
    return summary, junit_cases.render(summary, read_run(folder))


def test_a_run(tmp_path: Path, wording: Wording) -> None:
    summary, text = junit_of(tmp_path / "run")
    outcomes = {name.removeprefix("amd-llm-load.which."): value for name, value in cases(text).items()}
    validity, *checks, compared = outcomes
    assert {name: outcomes[name][0] for name in checks} == {
        "checks | error_rate == 0": "passed",
        "checks | wall <= 9 s": "failure",
        "checks | ttft_p95 <= 2s": "skipped",
    }
    assert validity.startswith("validity | ") and outcomes[validity][0] == "passed"
    # Slower, which is what the run found out: no regression.
    assert compared.startswith("comparison | b / x ") and outcomes[compared][0] == "passed"
    wording([validity, compared])
    assert outcomes["checks | wall <= 9 s"][1] == "a / x: 10.03 s; b / x: 12.03 s"
    assert "1.505" in outcomes["checks | ttft_p95 <= 2s"][1] and "273" in outcomes["checks | ttft_p95 <= 2s"][1]
    wording(outcomes["checks | ttft_p95 <= 2s"][1])
    assert summary.comparison is not None
    (verdict,) = summary.comparison.verdicts
    evidence = outcomes[compared][1]
    assert (verdict.word, evidence.splitlines()[0]) == ("slower", verdict_sentence(verdict))
    (suite,) = JUnitXml.fromstring(text.encode())
    assert (suite.name, suite.hostname, suite.timestamp) == ("which", "strix", "2027-01-15T08:00:00")
    assert properties_of(text) == {
        "run": "run", "question": "Which is faster?", "model": "m", "machine": "strix", "workload_sha256": "ab" * 32,
    }  # fmt: skip


def test_an_invalid_or_unfinished_run_is_an_error(tmp_path: Path, wording: Wording) -> None:
    _, text = junit_of(tmp_path / "run", served=lambda cell: served_by(exit_code=139 if cell.id == "r1-a-x" else None))
    validity, *_, verdict = cases(text).values()
    assert validity[0] == "error" and "139" in validity[1]
    wording(validity[1])
    assert verdict[0] == "skipped"
    wording(verdict[1])
    for status in ("running", "failed", "interrupted"):
        reasons = [because("run_error", "why")] if status != "running" else []
        _, text = junit_of(tmp_path / status, status=status, reasons=reasons)
        assert next(iter(cases(text).values()))[0] == "error"


def two_runs(folder: Path) -> None:
    other = replace(served_by(), version="0.30")
    write_made_run(folder / "runs" / "old", lambda cell: 10 + 0.01 * cell.repeat)
    write_made_run(folder / "runs" / "new", lambda cell: 9 + 0.01 * cell.repeat, served=lambda _: other)


def test_each_gate_of_a_comparison_has_its_outcome(wording: Wording) -> None:
    def verdict(word: str) -> Verdict:
        refused = because("run_error", "<because> & so on")
        return Verdict(
            side=f"{word} / x", baseline="a / x (before)", metric="output_tok_s", ratio=None, low=None, high=None,
            p=None, n=(5, 5), word=word, refused=refused,
        )  # fmt: skip

    gates: list[Gate] = ["no_slowdown", "slower", "provisional", "size_unknown", "cannot_tell"]
    five = [replace(verdict(gate), gate=gate) for gate in gates]
    comparison = Comparison(metric="output_tok_s", comparisons=5, noise_floor=0.02, noise_source=[], verdicts=five)
    outcomes = list(cases(comparison_xml(comparison)).values())
    assert [word for word, _ in outcomes] == ["passed", "failure", "skipped", "skipped", "skipped"]
    assert "<because> & so on" in outcomes[1][1]
    wording(outcomes[1][1])


def test_a_comparison_of_runs(tmp_path: Path, wording: Wording) -> None:
    two_runs(tmp_path)
    checks = ("--check", "output_tok_s >= 2 * baseline", "--check", "wall <= 1.2 * baseline")
    done = called("compare", "old", "new", "--about", "version", "--format", "junit", *checks, cwd=tmp_path)
    assert (done.code, done.err) == (4, ""), "a check failed"
    named = {name.removeprefix("amd-llm-load.compare."): value for name, value in cases(done.out).items()}
    *of_checks, a, b = named
    assert {name: named[name][0] for name in of_checks} == {
        "checks | output_tok_s >= 2 * baseline": "failure",
        "checks | wall <= 1.2 * baseline": "passed",
    }
    assert a.startswith("comparison | a / x ") and b.startswith("comparison | b / x ")
    assert named[a][0] == named[b][0] == "passed"
    wording([a, b])
    assert (
        "9.03" in named["checks | wall <= 1.2 * baseline"][1] and "0.9" in named["checks | wall <= 1.2 * baseline"][1]
    )
    wording(named["checks | wall <= 1.2 * baseline"][1])
    properties = properties_of(done.out)
    assert properties["differs.servers.*.version"] == f"old: {served_by().version}; new: 0.30"
    assert (properties["baseline"], properties["side.1"], "method" in properties) == ("old", "new", True)


@pytest.mark.parametrize(
    ("form", "check", "code", "shown"),
    [
        ("terminal", "wall <= 0.5 * baseline", 4, "wall <= 0.5 * baseline: a / x: 9.03 s"),
        ("markdown", "ttft_p95 <= baseline", 5, "`ttft_p95 <= baseline`: a / x: needs 130 "),
        ("json", "wall <= 0.5 * baseline", 4, '"code": "broken"'),
    ],
)
def test_each_format_shows_the_checks_of_a_comparison(
    tmp_path: Path, form: str, check: str, code: int, shown: str, wording: Wording
) -> None:
    two_runs(tmp_path)
    options = ("--about", "version", "--check", check, "--format", form)
    done = called("compare", "old", "new", *options, cwd=tmp_path)
    assert done.code == code
    assert shown in done.out
    if form != "json":
        wording([line for line in done.out.splitlines() if check in line and line.startswith("- ")])


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "text"),
    [
        (("old", "new"), 1, "UnlikeError", "'servers.a.version'"),
        (("old", "bad"), 3, "RunError", "bad: "),
        (("old", "--against", "new", "--against", "bad", "--check", "wall <= 1 s"), 1, "HarnessError", "2 a"),
        (("old", "new", "--check", "c/d: wall <= 1 s"), 1, "HarnessError", "'c'"),
    ],
)
def test_a_refused_comparison_is_a_file_with_an_error(
    arguments: tuple[str, ...], code: int, kind: str, text: str, tmp_path: Path, wording: Wording
) -> None:
    two_runs(tmp_path)
    write_made_run(tmp_path / "runs" / "bad", status="invalid", reasons=[because("run_error", "why")])
    done = called("compare", *arguments, "--format", "junit", cwd=tmp_path)
    assert done.code == code and text in done.err
    ((name, (word, evidence)),) = cases(done.out).items()
    assert name.startswith("amd-llm-load.compare.comparison | ") and word == "error"
    wording([name, evidence])
    assert text in evidence and f'type="{kind}"' in done.out


@given(st.text(), st.text())
def test_a_file_with_any_text_can_be_read(what: str, detail: str) -> None:
    ((word, _),) = cases(junit.error_xml("s", ServerError(what, detail=detail))).values()
    assert word == "error"


OBEYED = "\x9b2J\x1b[2J\u202eb\u2066c\u200b\x7f\u2028d\ufeff\x85e"


@fault("input", "control characters in what a JUnit file says", seen="U+FFFD in their place", kept="as it was")
def test_no_text_has_what_a_terminal_obeys(tmp_path: Path) -> None:
    made, _ = junit_of(tmp_path / "run")
    run = read_run(tmp_path / "run")
    broken = replace(
        made, question=OBEYED, scenario=OBEYED, valid=False, reasons=[because("x", f"a\n{OBEYED}")],
        notes=[because("x", OBEYED)],
        checks=[replace(made.checks[0], check=OBEYED, evidence=[because("x", OBEYED)])],
    )  # fmt: skip
    machine, scenario = replace(run.machine, name=OBEYED), replace(run.scenario, model=OBEYED)
    text = junit_cases.render(broken, replace(run, id=OBEYED, machine=machine, scenario=scenario))
    text += junit.error_xml(OBEYED, ServerError(OBEYED, detail=OBEYED, next_step=OBEYED))
    assert {char for char in text if not char.isprintable()} == {"\n", "\xa0"} and text.count("\ufffd2J") >= 10


def test_the_command_line_and_an_inconclusive_check(tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path, checks=["error_rate == 0"])
    ran = harness("run", path.name, "--junit", "out/j.xml", "--check", "ttft_p95 <= 60s", cwd=tmp_path)
    assert (ran.code, ran.err) == (5, "")
    wording([line for line in ran.out.splitlines() if line.startswith("note:")])
    text = (tmp_path / "out" / "j.xml").read_text()
    assert [word for word, _ in cases(text).values()] == ["passed", "passed", "skipped"]
    (run,) = (tmp_path / "runs").iterdir()
    assert read_run(run).scenario.checks == ["error_rate == 0", "ttft_p95 <= 60s"]
    for form, shown in (
        ("terminal", "- inconclusive ttft_p95 <= 60s: one / burst: "),
        ("markdown", "- **inconclusive**: `ttft_p95 <= 60s`: one / burst: "),
        ("json", '"status": "inconclusive"'),
        ("csv", "server,load,"),
        ("junit", text),
    ):
        again = called("report", run.name, "--format", form, cwd=tmp_path)
        assert (again.code, shown in again.out) == (5, True), form
    page = (run / "report.html").read_text()
    assert "<b>INCONCLUSIVE</b>" in page and "<b>PASSED</b>" not in page
    again = called("report", run.name, "--check", "wall <= 1 ms", "--format", "junit", cwd=tmp_path)
    assert (again.code, [word for word, _ in cases(again.out).values()][-1]) == (4, "failure"), "it weighs more"


def test_a_file_of_markdown_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for name in (".", "gone/page.md"):
        done = called("run", "first-look", "--markdown", name, cwd=tmp_path)
        assert done.code == 1 and done.err.startswith(f"error: --markdown: {name}: "), done
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_leaves_a_file_with_the_error(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"one": server("--no-such-option")})
    ran = harness("run", path.name, "--junit", "j.xml", cwd=tmp_path)
    ((word, evidence),) = cases((tmp_path / "j.xml").read_text()).values()
    assert (ran.code, word) == (2, "error")
    assert ran.err.splitlines()[0] == f"error: {evidence.splitlines()[0]}"
    (tmp_path / "file").write_text("")
    done = harness("run", path.name, "--junit", "file/j.xml", "--runs", "other", cwd=tmp_path)
    assert (done.code, (tmp_path / "other").exists()) == (1, False)
    assert "--junit" in done.err and "file/j.xml" in done.err
    done = called("report", "gone", "--format", "junit", cwd=tmp_path)
    assert (done.code, [word for word, _ in cases(done.out).values()]) == (1, ["error"])
