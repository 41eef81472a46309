"""JUnit files, read by another program, say what the exit code says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase
from msgspec.structs import replace

from harness.analysis.summarize import summarize
from harness.cli import app, common
from harness.errors import ServerError
from harness.reasons import verdict_sentence
from harness.report import junit
from harness.rundir.manifest import read_run
from harness.scenario.plan import Cell
from harness.summary import Comparison, Summary, Verdict, because
from tests.command import harness, server, write
from tests.made_runs import scenario, served_by, write_made_run


def cases(text: str) -> dict[str, tuple[str, str]]:
    """Outcome and evidence of each case, as another program reads the file."""
    suites = JUnitXml.fromstring(text.encode())
    found: dict[str, tuple[str, str]] = {}
    for suite in suites:
        for case in suite:
            assert isinstance(case, TestCase)
            found[f"{case.classname} | {case.name}"] = outcome(case)
        counted = (suite.tests, suite.failures, suite.errors, suite.skipped)
        words = [word for word, _ in found.values()]
        assert counted == (len(found), words.count("failure"), words.count("error"), words.count("skipped"))
    assert (suites.tests, suites.failures, suites.errors, suites.skipped) == counted
    return found


def outcome(case: TestCase) -> tuple[str, str]:
    words = {Failure: "failure", Error: "error", Skipped: "skipped"}
    if not case.result:
        return "passed", case.system_out
    (result,) = case.result
    return words[type(result)], result.text


def made(folder: Path, **changes: Any) -> tuple[Summary, str]:
    made_of = scenario(checks=["error_rate == 0", "wall <= 9 s", "ttft_p95 <= 2s"])

    def wall_s(cell: Cell) -> float:
        return (10.0 if cell.server == "a" else 12.0) + 0.01 * cell.repeat

    write_made_run(folder, wall_s, made_of=made_of, **changes)
    summary = summarize(folder)
    return summary, junit.render(summary, read_run(folder))


def test_a_run(tmp_path: Path) -> None:
    summary, text = made(tmp_path / "run")
    found = cases(text)
    assert summary.comparison is not None
    assert {name: word for name, (word, _) in found.items()} == {
        "amd-llm-load.which.validity | the run is VALID": "passed",
        "amd-llm-load.which.checks | error_rate == 0": "passed",
        "amd-llm-load.which.checks | wall <= 9 s": "failure",
        "amd-llm-load.which.checks | ttft_p95 <= 2s": "skipped",
        # Slower, which is what the run found out: no regression.
        "amd-llm-load.which.comparison | b / x against a / x: wall time": "passed",
    }
    assert found["amd-llm-load.which.checks | wall <= 9 s"][1] == "a / x: 10.03 s; b / x: 12.03 s"
    assert "b / x: needs 130 successful requests" in found["amd-llm-load.which.checks | ttft_p95 <= 2s"][1]
    (verdict,) = summary.comparison.verdicts
    compared = found["amd-llm-load.which.comparison | b / x against a / x: wall time"][1]
    assert (verdict.word, compared.splitlines()[0]) == ("slower", verdict_sentence(verdict))
    (suite,) = JUnitXml.fromstring(text.encode())
    assert (suite.name, suite.hostname, suite.timestamp) == ("which", "strix", "2027-01-15T08:00:00")
    assert properties_of(text) == {
        "run": "run", "question": "Which is faster?", "model": "m", "machine": "strix", "workload_sha256": "ab" * 32,
        "image_digest.a": "sha256:1111", "image_digest.b": "sha256:1111",
    }  # fmt: skip


def test_an_invalid_run_is_an_error(tmp_path: Path) -> None:
    _, text = made(tmp_path / "run", served=lambda cell: served_by(exit_code=139 if cell.id == "r1-a-x" else None))
    word, evidence = cases(text)["amd-llm-load.which.validity | the run is VALID"]
    assert (word, "r1-a-x: the server died with exit code 139" in evidence.splitlines()) == ("error", True)
    (verdict,) = [found for name, found in cases(text).items() if "comparison" in name]
    assert verdict[0] == "skipped" and "a / x has a cell that is not valid (r1-a-x: the server died" in verdict[1]


def test_a_run_that_did_not_end_is_an_error(tmp_path: Path) -> None:
    for status in ("running", "failed", "interrupted"):
        reasons = [because("text", text="why")] if status != "running" else []
        _, text = made(tmp_path / status, status=status, reasons=reasons)
        assert cases(text)["amd-llm-load.which.validity | the run is VALID"][0] == "error"


def verdict(word: str) -> Verdict:
    return Verdict(
        side=f"{word} / x", baseline="a / x (before)", metric="output_tok_s", ratio=None, low=None, high=None, p=None,
        n=(5, 5), word=word, refused=because("text", text="<because> & so on"),
    )  # fmt: skip


def test_a_comparison_of_runs() -> None:
    four = [verdict(word) for word in ("faster", "slower", "same", "inconclusive")]
    compared = Comparison(metric="output_tok_s", comparisons=4, noise_floor=0.02, noise_source=[], verdicts=four)
    found = cases(junit.comparison_xml(compared))
    name = "amd-llm-load.compare.comparison | {} / x against a / x (before): output tok/s"
    assert {key: value[0] for key, value in found.items()} == {
        name.format("faster"): "passed",
        name.format("slower"): "failure",
        name.format("same"): "passed",
        name.format("inconclusive"): "skipped",
    }
    assert found[name.format("slower")][1].splitlines()[0].endswith("slower / x: <because> & so on.")


def properties_of(text: str) -> dict[str, str]:
    (suite,) = JUnitXml.fromstring(text.encode())
    return {one.name: one.value for one in suite.properties()}  # type: ignore[no-untyped-call]


def two_runs(folder: Path) -> None:
    def steady(wall_s: float) -> Callable[[Cell], float]:
        return lambda cell: wall_s + 0.01 * cell.repeat

    other = replace(served_by(), version="0.30")
    write_made_run(folder / "runs" / "old", steady(10))
    write_made_run(folder / "runs" / "new", steady(9), served=lambda _: other)


def test_a_comparison_of_runs_carries_the_differences_and_the_checks(tmp_path: Path) -> None:
    two_runs(tmp_path)
    asked = ("--check", "output_tok_s >= 1.2 * baseline", "--check", "wall <= 0.95 * baseline")
    done = harness("compare", "old", "new", "--about", "version", "--format", "junit", *asked, cwd=tmp_path)
    assert (done.code, done.err) == (4, ""), "a check failed"
    found = {name.removeprefix("amd-llm-load.compare."): value for name, value in cases(done.out).items()}
    assert {name: word for name, (word, _) in found.items()} == {
        "checks | output_tok_s >= 1.2 * baseline": "failure",
        "checks | wall <= 0.95 * baseline": "passed",
        "comparison | a / x against a / x (old): wall time": "skipped",
        "comparison | b / x against b / x (old): wall time": "skipped",
    }
    assert found["checks | wall <= 0.95 * baseline"][1].startswith("a / x: 9.03 s against 10.03 s of old, 0.9 times")
    told = properties_of(done.out)
    assert told["differs.servers.*.version"] == f"old: {served_by().version}; new: 0.30"
    assert (told["baseline"], told["side.1"], "method" in told) == ("old", "new", True)


def test_checks_of_a_comparison_are_in_every_format(tmp_path: Path) -> None:
    two_runs(tmp_path)
    for form, check, code, said in (
        ("terminal", "wall <= 0.5 * baseline", 4, "- FAILED wall <= 0.5 * baseline: a / x: 9.03 s against 10.03 s of"),
        ("markdown", "wall <= 0.5 * baseline", 4, "- **FAILED**: `wall <= 0.5 * baseline`: a / x: 9.03 s against 10"),
        ("json", "wall <= 0.5 * baseline", 4, '"code": "broken"'),
        ("terminal", "ttft_p95 <= baseline", 5, "- inconclusive ttft_p95 <= baseline: a / x: needs 130 "),
        ("terminal", "wall <= 1 * baseline", 0, "- passed wall <= 1 * baseline: "),
    ):
        options = ("--about", "version", "--check", check, "--format", form)
        done = harness("compare", "old", "new", *options, cwd=tmp_path)
        assert (done.code, said in done.out) == (code, True), done


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "said"),
    [
        (("old", "new"), 1, "UnlikeError", "runs that differ in 'servers.a.version' are not compared"),
        (("old", "bad"), 3, "RunError", "bad: only a VALID run is compared"),
        (("old", "--against", "new", "--against", "bad", "--check", "wall <= 1 s"), 1, "HarnessError", "is one of 2 a"),
        (("old", "new", "--check", "c/d: wall <= 1 s"), 1, "HarnessError", "'c' is not a server"),
    ],
)
def test_a_refused_comparison_is_a_file_with_an_error(
    arguments: tuple[str, ...], code: int, kind: str, said: str, tmp_path: Path
) -> None:
    two_runs(tmp_path)
    write_made_run(tmp_path / "runs" / "bad", status="invalid", reasons=[because("text", text="why")])
    done = harness("compare", *arguments, "--format", "junit", cwd=tmp_path)
    assert done.code == code and said in done.err
    ((name, (word, evidence)),) = cases(done.out).items()
    assert (name, word) == ("amd-llm-load.compare.comparison | the runs can be compared", "error")
    assert said in evidence and f'type="{kind}"' in done.out


def test_a_defect_is_a_file_with_an_error_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "find_run", lambda *_, **__: 1 / 0)
    command = typer.main.get_command(app)
    context = command.make_context("harness", ["compare", "a", "b", "--format", "junit"])
    with pytest.raises(ZeroDivisionError), context:
        command.invoke(context)
    ((word, evidence),) = cases(capsys.readouterr().out).values()
    assert (word, evidence) == ("error", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("report", "gone"), "report.validity | the run is VALID"),
        (("report", "gone", "--about", "image"), "report.usage | the command line is understood"),
        (("compare", "gone", "--repeats", "3"), "compare.usage | the command line is understood"),
    ],
)
def test_an_error_before_there_is_a_report_is_a_file_as_well(
    tmp_path: Path, arguments: tuple[str, ...], name: str
) -> None:
    done = harness(*arguments, "--format", "junit", cwd=tmp_path)
    ((case, (word, _)),) = cases(done.out).items()
    assert (done.code, case, word) == (1, f"amd-llm-load.{name}", "error")


@given(st.text(), st.text())
def test_whatever_a_text_holds_the_file_can_be_read(what: str, detail: str) -> None:
    error = ServerError(what, detail=detail)
    ((word, _),) = cases(junit.error_xml("s", error)).values()
    assert word == "error"


def test_the_command_line_and_an_inconclusive_check(tmp_path: Path) -> None:
    path = write(tmp_path, checks=["error_rate == 0"])
    options = ("--junit", "out/j.xml", "--check", "ttft_p95 <= 60s")
    ran = harness("run", path.name, *options, cwd=tmp_path)
    assert (ran.code, ran.err) == (5, "")
    assert "note: check 'ttft_p95 <= 60s' cannot pass: one / burst sends 6 requests in 1 repeat" in ran.out
    text = (tmp_path / "out" / "j.xml").read_text()
    assert [word for word, _ in cases(text).values()] == ["passed", "passed", "skipped"]
    (run,) = (tmp_path / "runs").iterdir()
    assert read_run(run).scenario.checks == ["error_rate == 0", "ttft_p95 <= 60s"]
    for form, shown in (
        ("terminal", "- inconclusive ttft_p95 <= 60s: one / burst: needs 130 "),
        ("markdown", "- **inconclusive**: `ttft_p95 <= 60s`: one / burst: needs 130 "),
        ("json", '"status": "inconclusive"'),
        ("csv", "server,load,"),
        ("junit", text),
        ("openmetrics", 'check_inconclusive{check="ttft_p95 <= 60s"'),
    ):
        again = harness("report", run.name, "--format", form, cwd=tmp_path)
        assert (again.code, shown in again.out) == (5, True), form
    page = (run / "report.html").read_text()
    assert "<b>1 CHECK INCONCLUSIVE</b>" in page and "CHECKS PASSED" not in page
    # A failed check weighs more.
    again = harness("report", run.name, "--check", "wall <= 1 ms", "--format", "junit", cwd=tmp_path)
    assert (again.code, [word for word, _ in cases(again.out).values()]) == (
        4, ["passed", "passed", "skipped", "failure"],
    )  # fmt: skip


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    path = write(tmp_path, servers={"one": server("--no-such-option")})
    ran = harness("run", path.name, "--junit", "j.xml", cwd=tmp_path)
    assert ran.code == 2
    ((word, evidence),) = cases((tmp_path / "j.xml").read_text()).values()
    assert word == "error"
    assert ran.err.splitlines()[0] == f"error: {evidence.splitlines()[0]}"


def test_a_file_that_cannot_be_written_is_noticed_before_the_run(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "there").write_text("")
    done = harness("run", path.name, "--junit", "there/j.xml", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: there/j.xml: the JUnit file cannot be written (")
    assert not (tmp_path / "runs").exists()


def test_the_error_is_that_of_the_summary(tmp_path: Path) -> None:
    summary, _ = made(tmp_path / "run")
    bad = replace(
        summary, valid=False, reasons=[because("text", text="first \x00 reason"), because("text", text="second")]
    )
    (word, evidence), *_ = cases(junit.render(bad, read_run(tmp_path / "run"))).values()
    assert (word, evidence.splitlines()[1:]) == ("error", ["first \N{REPLACEMENT CHARACTER} reason", "second"])
