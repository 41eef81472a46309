"""A run with a budget of time: it ends in time, adds repeats where verdicts are open, and has no more false alarms."""

import math
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from harness.analysis.summarize import read_summary
from harness.judge.verdicts import ComparedSides, decide_verdicts, level_parts
from harness.run.budget import is_check_due, open_rows
from harness.rundir.manifest import read_run
from harness.summary import OPEN, Comparison, Numbers, Row, Summary, Verdict
from tests.command import harness, only_run, server, write
from tests.nightly import draws, room
from tests.test_resume import assert_whole, records_of

NOTHING = Numbers(sent=0, succeeded=0, failed=0, unfinished=0)
RIGHT = {"same", "inconclusive"}  # what may be said of equal rows


def compared(values: list[list[float]], numbers: list[int], looks: list[int]) -> Comparison:
    """The verdicts on rows, each with so many repeats, against the first one."""
    pairs = [min(numbers[0], number) for number in numbers[1:]]
    return decide_verdicts(
        [
            ComparedSides(
                side=str(row), baseline="0", metric="output_tok_s", within_run=True,
                side_speeds=[values[row][:number]], baseline_speeds=[values[0][:number]],
                parts=level_parts(number, looks),
            )
            for row, number in enumerate(pairs, 1)
        ]
    )  # fmt: skip


def spent(dice: np.random.Generator, effects: list[float], planned: int, last: int) -> list[str]:
    """The words of a run with a budget for `last` repeats of rows with these effects, by the rules of the product."""
    values = [[math.exp(dice.normal(effect, 0.03)) for _ in range(last)] for effect in effects]
    numbers, looks, going = [planned] * len(effects), [], set(range(len(effects)))
    for repeat in range(planned, last):
        if is_check_due(repeat, planned):
            looks.append(repeat)
            verdicts = compared(values, numbers, looks).verdicts
            undecided = [verdict for verdict in verdicts if verdict.reason in OPEN]
            undecided = [verdict for verdict in undecided if verdict.needed or verdict.needed_for_same]
            going = {int(name) for verdict in undecided for name in (verdict.side, verdict.baseline)}
        for row in going:
            numbers[row] = repeat + 1
    return [verdict.word for verdict in compared(values, numbers, looks).verdicts]


@pytest.mark.parametrize("last", [5, 10, 21])
def test_equal_rows_are_called_different_in_five_percent_at_most(last: int) -> None:
    dice, trials = np.random.default_rng(last), draws(1000 if last <= 10 else 300)
    wrong = sum(not RIGHT.issuperset(spent(dice, [0.0, 0.0, 0.0], 5, last)) for _ in range(trials))
    assert wrong / trials <= 0.05 + room(0.05, trials)


def test_rows_that_differ_are_found_and_need_no_more_repeats() -> None:
    dice, trials = np.random.default_rng(1), draws(200)
    words = [spent(dice, [0.0, 0.2, 0.06], 5, 20) for _ in range(trials)]
    assert sum(large == "faster" for large, _ in words) / trials >= 0.99
    assert sum(small == "faster" for _, small in words) / trials >= 0.8


def test_the_levels_of_all_looks_are_alpha_together() -> None:
    assert [number for number in range(1, 50) if is_check_due(number, 5)] == [5, 10, 20, 40]
    assert [number for number in range(1, 10) if is_check_due(number, 1)] == [1, 2, 4, 8]
    looks = [5, 10, 20]
    assert level_parts(5, []) == 1  # there was no time for more: the data were looked at once
    assert [level_parts(repeats, looks) for repeats in (5, 7, 10, 20, 27)] == [2, 2, 4, 8, 8]
    assert sum(1 / level_parts(repeats, looks) for repeats in (5, 10, 20, 27)) == 1


def test_a_run_ends_in_time_and_says_what_is_open(tmp_path: Path) -> None:
    servers = {"one": server(), "two": server()}
    long = {"user": "chat", "users": 1, "duration_s": 3000, "output_tokens": 5, "output": "natural"}
    short = {"user": "batch", "batch_size": 2, "requests": 6, "output_tokens": 5}
    path = write(tmp_path, servers=servers, loads={"short": short, "long": long}, repeats=3)
    done = harness("run", path.name, "--runs", "runs", "--budget", "5min", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "Budget: " in done.out
    run = only_run(tmp_path / "runs")
    manifest = read_run(run)
    assert manifest.budget is not None and manifest.budget.seconds == 300
    assert manifest.order == ["r1-one-short"]  # the next load alone takes longer than the budget
    assert manifest.budget.unmeasured == ["one / long", "two / short", "two / long"]
    assert_whole(run)
    assert [note.code for note in read_summary(run).notes if note.code.startswith("budget")] == [
        "budget", "budget_unmeasured",
    ]  # fmt: skip


def test_a_cell_that_is_cut_is_not_in_the_run(tmp_path: Path) -> None:
    slow = {"user": "batch", "batch_size": 1, "requests": 100_000, "output_tokens": 50}
    short = {"user": "batch", "batch_size": 2, "requests": 6, "output_tokens": 5}
    servers = {"one": server("--step-base-s", "0.02")}
    began_s = time.monotonic()
    write(tmp_path, "alone", servers=servers, loads={"short": short})
    alone = harness("run", "alone.yaml", "--runs", "alone", cwd=tmp_path)
    budget_s = round(6 * (time.monotonic() - began_s))  # this machine decides what a short time is
    assert alone.code in (0, 3), alone.err
    path = write(tmp_path, servers=servers, loads={"short": short, "slow": slow}, repeats=2)
    done = harness("run", path.name, "--runs", "runs", "--budget", f"{budget_s}s", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    run = only_run(tmp_path / "runs")
    assert read_run(run).order == ["r1-one-short"]
    assert_whole(run)
    assert records_of(run / "attempts" / "1").keys() == {"r1-one-slow"}
    assert "the budget was spent before these rows were measured: one / slow" in " ".join(done.out.split())


def test_a_budget_that_is_too_short_or_no_time(tmp_path: Path) -> None:
    path = write(tmp_path)
    done = harness("run", path.name, "--budget", "1s", cwd=tmp_path)
    assert done.code == 3 and "--budget: 1 s were spent before the first cell had ended" in " ".join(done.err.split())
    for given in ("soon", "0h", "-1h"):
        done = harness("run", path.name, f"--budget={given}", cwd=tmp_path)
        assert done.code == 1 and f"--budget: a time above 0 with its unit is expected, got '{given}'" in done.err


def test_only_open_rows_get_more_repeats() -> None:
    def verdict(side: str, reason: str | None, needed: int | None = 9) -> Verdict:
        return Verdict(
            side=f"{side} / x", baseline="a / x", metric="wall_s", ratio=1.0, low=0.9, high=1.1, p=0.5, n=(5, 5),
            word="inconclusive" if reason else "same", reason=reason, needed=needed,  # type: ignore[arg-type]
        )  # fmt: skip

    rows = [Row(server=name, load="x", cells=[], wall_s=[], output_tok_s=[], pooled=NOTHING) for name in "abcd"]
    refused = [verdict("b", "refused"), verdict("c", "apart"), verdict("d", "in_margin", None)]
    one_run = replace(verdict("d", None), basis="one_run", provisional=True)
    for verdicts, open_names in (
        ([verdict("b", "includes_one"), verdict("c", None)], "ab"), (refused, ""), ([one_run], "ad"),
    ):  # fmt: skip
        comparison = Comparison(metric=None, comparisons=1, noise_floor=0.02, noise_source=[], verdicts=verdicts)
        summary = Summary(
            run="r", scenario="s", question="q", simulated=False, valid=True, reasons=[], rows=rows, cells=[],
            comparison=comparison,
        )  # fmt: skip
        assert open_rows(summary) == {(name, "x") for name in open_names}
