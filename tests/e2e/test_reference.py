"""Checks against another run: what is kept of it, and which runs are not compared."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.base.errors import ExitCode, RunError
from harness.base.reason import because, evidence
from harness.numbers.comparison import CheckResult
from harness.numbers.summarize import (
    read_summary,
    summarize,
    summarize_with_counts,
    with_checks,
    write_reference,
    write_summary,
)
from harness.numbers.summary import Reference, Summary
from harness.questions.compare.sides import compare_runs, make_reference, read_baseline
from harness.questions.report.store import write_results
from harness.records.manifest import Run, read_run
from harness.run.running import RunFile
from harness.scenario.plan import Cell
from tests.support.command import called, harness, only_run, write
from tests.support.made_runs import scenario, served_by, write_made_run
from tests.support.wording import Wording

SLOS = "e2e<=2.6s"
CHECKS = [f"attainment({SLOS}) >= baseline", "wall <= 1.1 * baseline"]


def reference_of(base: Path, new: Path, **more: Any) -> Reference:
    return make_reference(base, read_run(new), summarize(new), **more)


def checks_of(new: Path, reference: Reference) -> list[CheckResult]:
    return with_checks(summarize_with_counts(new), read_run(new), reference).summary.checks


def two(tmp_path: Path, factor: float = 1.05) -> tuple[Path, Path]:
    write_made_run(tmp_path / "old", lambda cell: 10.0 + 0.01 * cell.repeat, made_of=scenario())
    write_made_run(tmp_path / "new", lambda cell: factor * (10.0 + 0.01 * cell.repeat), made_of=scenario(checks=CHECKS))
    return tmp_path / "old", tmp_path / "new"


def test_the_baseline_is_judged_by_the_slos_of_the_run(tmp_path: Path) -> None:
    old, new = two(tmp_path)
    reference = reference_of(old, new)
    assert (reference.run, reference.refused) == ("old", None)
    assert [(row.server, row.pooled.slos[SLOS].attainment) for row in reference.rows] == [("a", 1.0), ("b", 1.0)]
    result = checks_of(new, reference)
    against = [(one.status, one.value, one.evidence[0].values["against"]) for one in result]
    assert against == [
        ("failed", 0.0, {"value": 1.0, "name": "old"}),
        ("inconclusive", pytest.approx(10.53, abs=0.01), {"value": pytest.approx(10.03, abs=0.01), "name": "old"}),
    ]
    # A pipeline does not know whether today's image is another than yesterday's.
    assert reference_of(old, new, about="image_digest").refused is None


def test_what_was_compared_with_stays_with_the_run(tmp_path: Path, wording: Wording) -> None:
    old, new = two(tmp_path)
    write_summary(old, summarize(old))
    given = reference_of(old, new)
    write_reference(new, given)
    before = summarize(new)
    (old / "requests.jsonl").unlink()
    assert summarize(new) == before and before.checks == checks_of(new, given)
    assert not (new / "baseline.json.new").exists()
    # A published baseline has a summary only.
    (new / "baseline.json").unlink()
    result = checks_of(new, reference_of(old, new))
    assert [(one.status, one.code) for one in result] == [
        ("inconclusive", "no_baseline"),
        ("inconclusive", "too_close"),
    ]
    wording(evidence(result[0].evidence))


def test_a_summary_with_another_definition_has_no_ratio_of_that_number(tmp_path: Path, wording: Wording) -> None:
    for name in ("old", "new"):
        write_made_run(
            tmp_path / name, made_of=scenario(checks=["tpot_mean <= 2 * baseline", "ttft_mean <= 2 * baseline"])
        )
    summary = summarize(tmp_path / "old")
    (tmp_path / "old" / "requests.jsonl").unlink()
    other = [msgspec.structs.replace(row, definitions={"tpot": "(last - first) / tokens"}) for row in summary.rows]
    for rows, found in ((summary.rows, ["passed", "passed"]), (other, ["inconclusive", "passed"])):
        write_summary(tmp_path / "old", msgspec.structs.replace(summary, rows=rows))
        reference = reference_of(tmp_path / "old", tmp_path / "new")
        result = checks_of(tmp_path / "new", reference)
        assert [one.status for one in result] == found
    assert "'tpot'" in evidence(result[0].evidence)
    wording(evidence(result[0].evidence))


def test_unlike_runs_are_not_compared_and_the_check_says_why(tmp_path: Path, wording: Wording) -> None:
    write_made_run(tmp_path / "old")
    write_made_run(
        tmp_path / "new", made_of=scenario(checks=CHECKS[1:]), served=lambda cell: served_by(image_digest="sha256:2222")
    )
    new = tmp_path / "new"
    refused = reference_of(tmp_path / "old", new)
    assert refused.rows == [] and refused.refused is not None
    why = refused.refused
    assert (why.code, why.values["key"].endswith("image_digest")) == ("runs_differ", True)
    assert why.values["other_value"] == "sha256:2222"
    (result,) = checks_of(tmp_path / "new", refused)
    assert (result.status, result.code) == ("inconclusive", "no_baseline")
    wording(evidence(result.evidence))
    assert reference_of(tmp_path / "old", new, about="image_digest").refused is None
    assert reference_of(tmp_path / "old", new, about="machine").refused == refused.refused


def test_an_invalid_run_is_neither_side(tmp_path: Path, wording: Wording) -> None:
    old, new = two(tmp_path)
    reference = reference_of(old, new)
    with (new / "requests.jsonl").open("ab") as file:
        file.write(b'{"torn')
    why = "not compared with old: this run is INVALID"
    for one in checks_of(new, reference):
        assert (one.status, evidence(one.evidence)) == ("inconclusive", f"a / x: {why}; b / x: {why}")
    write_made_run(tmp_path / "bad", status="invalid", reasons=[because("run_error", "it was cut")])
    with pytest.raises(RunError) as raised:
        read_baseline(tmp_path / "bad")
    wording(raised.value)
    assert raised.value.exit_code == ExitCode.INVALID


def test_a_run_against_a_baseline_is_summarised_once(tmp_path: Path) -> None:
    """The baseline is made from its summary, before that is written."""
    old, new = two(tmp_path)
    (new / "baseline.json").unlink(missing_ok=True)
    seen = []

    def against(run: Run, summary: Summary) -> Reference:
        seen.append((run.ended_wall_s is not None, summary.valid, (new / "summary.json").exists()))
        return make_reference(old, run, summary)

    RunFile(new, read_run(new), write_results, against).finish()
    assert seen == [(True, True, False)]
    assert [one.code for one in read_summary(new).checks] == [one.code for one in summarize(new).checks]
    assert (new / "report.html").exists() and read_run(new).status == "valid"


@pytest.mark.parametrize(("factor", "options", "code"), [(1.3, (), 5), (1.3, ("--provisional",), 4), (2.0, (), 4)])
def test_a_provisional_result_fails_a_report_where_it_is_asked_for_or_large(
    factor: float, options: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    for name, wall_s in (("old", 10.0), ("new", 10.0 * factor)):
        write_made_run(tmp_path / "runs" / name, lambda cell, wall_s=wall_s: wall_s + 0.01 * cell.repeat)  # type: ignore[misc]
    done = called("report", "new", "--baseline", "old", "--check", "a/x: wall <= baseline", *options, cwd=tmp_path)
    assert (done.code, done.err) == (code, ""), done.out


def test_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert harness("run", path.name, cwd=tmp_path).code == 0
    first = only_run(tmp_path / "runs").name
    args = ("--runs", "more", "--baseline", f"runs/{first}")
    done = harness("run", path.name, *args, "--check", "wall <= 100 * baseline", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    second = only_run(tmp_path / "more")
    assert (second / "baseline.json").exists()
    kept = (second / "summary.json").read_bytes()
    again = called("report", str(second), "--format", "json", cwd=tmp_path)
    assert (again.code, msgspec.json.decode(again.out)) == (0, msgspec.json.decode(kept))
    asked = called("report", str(second), "--check", "wall <= 0.001 * baseline", "--baseline", first, cwd=tmp_path)
    assert (asked.code, asked.err) == (4, "")
    assert "FAILED wall <= 0.001 * baseline: one / burst: " in asked.out
    assert (second / "summary.json").read_bytes() == kept, "it was asked this once"


def test_a_check_and_a_comparison_of_the_same_runs_have_the_same_interval(tmp_path: Path) -> None:
    """With and without earlier equal runs; in the run's own checks, in those of compare, and in its verdict."""
    checks = ["wall <= 1.1 * baseline", "e2e_p50 <= 1.1 * baseline"]
    for number, factor in enumerate((1.0, 1.02, 1.01, 1.0, 1.02, 1.01, 1.05)):
        made_of = scenario(checks=checks)

        def wall_s(cell: Cell, factor: float = factor) -> float:
            return factor * (10.0 + 0.01 * cell.repeat)

        write_made_run(tmp_path / f"r{number}", wall_s, made_of=made_of, started_wall_s=1000.0 + number)
    base, new = tmp_path / "r0", tmp_path / "r6"
    widths = []
    for runs in (None, tmp_path):
        own = checks_of(new, reference_of(base, new, runs=runs))
        comparison = compare_runs([[base], [new]], runs=runs, checks=checks)
        assert [(one.low, one.high) for one in own] == [(one.low, one.high) for one in comparison.checks]
        wall, verdict = own[0], next(one for one in comparison.verdicts if one.side == own[0].row)
        assert wall.low and wall.high and wall.bound and verdict.low and verdict.high
        value = wall.bound / 1.1
        assert (wall.low, wall.high) == pytest.approx((value / verdict.high, value / verdict.low))
        widths.append(wall.high / wall.low)
    assert widths[1] < widths[0], "equal runs show how far runs differ"
