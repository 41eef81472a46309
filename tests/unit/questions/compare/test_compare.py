"""Verdicts within a run and across runs: words, sentences, refusals."""

import functools
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.base.errors import ExitCode, HarnessError, RunError
from harness.base.measured import Distribution, Numbers
from harness.numbers.cell_numbers import compute_numbers
from harness.numbers.comparable import collect_facts, find_differences, refuse_unlike
from harness.numbers.comparison import Comparison, Difference, Verdict
from harness.numbers.summary import CellSummary, Row
from harness.numbers.verdicts import ComparedSides, compare_rows, decide_verdicts, work_metric
from harness.questions.compare.page import comparison_answer
from harness.questions.compare.sides import compare_runs
from harness.records.manifest import Machine, Origin, ServedBy, UnlikeError, write_run
from harness.records.records import read_requests
from harness.records.samples import ServerLoad
from harness.report.verdict_text import verdict_sentence
from harness.scenario import Arrivals, Load, Scenario, Server
from harness.scenario import Pair as Wanted
from harness.scenario.behaviour import Lengths, Structured
from harness.scenario.plan import Cell
from harness.scenario.workers import Workers
from tests.support.command import harness
from tests.support.made_runs import scenario, served_by, write_lines, write_made_run
from tests.support.wording import Wording

TIGHT = [0.996, 0.998, 1.0, 1.002, 1.004]


def judge(side: list[float], base: list[float], others: int = 0) -> Verdict:
    """The verdict on one pair of a run, in a table with `others` that say nothing."""
    pair = ComparedSides(
        side="b / x", baseline="a / x", metric="wall", side_speeds=[side], baseline_speeds=[base], within_run=True
    )
    dull = msgspec.structs.replace(pair, side="d", side_speeds=[TIGHT], baseline_speeds=[TIGHT])
    return decide_verdicts([pair, *[dull] * others]).verdicts[0]


def scaled(factor: float, values: Sequence[float] = TIGHT) -> list[float]:
    return [factor * value for value in values]


WIDE = [0.7, 0.85, 1.0, 1.2, 1.4]
ONE = {"basis": "one_run", "provisional": True}


@pytest.mark.parametrize(
    ("side", "base", "others", "expected", "part"),
    [
        (scaled(1.5), TIGHT, 0, {"word": "faster", "reason": None, "n": (5, 5), "provisional": False}, ""),
        (scaled(0.8), TIGHT, 4, {"word": "slower"},
         "1.25x slower than a / x by wall time (95 % interval 1.24x to 1.26x, p < 0.001)."),
        # "Same" where the interval is inside the margin, also where the difference is sure.
        (scaled(1.003), TIGHT, 0, {"word": "same"},
         "the same as a / x by wall time (within 0.76 %)."),
        (scaled(1.01), TIGHT, 0, {"word": "same"}, ""),
        (scaled(1.018), TIGHT, 0, {"word": "inconclusive", "reason": "in_margin", "needed": 42}, ""),
        (scaled(1.025), scaled(1.0, [0.99, 0.995, 1.0, 1.005, 1.01]), 0, {"reason": "not_beyond"}, ""),
        # Two and three repeats suffice for a large difference.
        ([2.0, 2.02, 1.98], [1.0, 1.01, 0.99], 6, {"word": "faster", "n": (3, 3)}, ""),
        ([1.0, 1.01], [1.1, 1.11], 0, {"word": "slower", "n": (2, 2)}, "1.10x slower than a / x by wall time"),
        (scaled(23 / 68, [1.0, 1.02, 0.99]), [1.0, 1.01, 0.985], 1, {"word": "slower"}, "2.94x slower than"),
        (scaled(7 / 68, [1.0, 1.02, 0.99]), [1.0, 1.01, 0.985], 1, {"word": "slower"}, "9.67x slower than"),
        (scaled(1.1, WIDE), WIDE, 0, {"reason": "includes_one", "needed": None, "needed_for_same": None},
         "cannot tell: between 36 % slower and 64 % faster than a / x by wall time. At this spread, more than 100 "
         "repeats a side show a difference of this size"),
        # The correction for several comparisons takes a verdict away.
        ([1.05, 1.06, 1.04], [1.0, 1.01, 0.99], 0, {"word": "faster"}, ""),
        ([1.05, 1.06, 1.04], [1.0, 1.01, 0.99], 6, {"word": "inconclusive", "reason": "corrected", "comparisons": 7},
         "With 7 comparisons the corrected p-value is "),
        # One repeat.
        ([1.5], [1.0], 0, ONE | {"word": "faster", "ratio": 1.5, "needed": 5},
         "about 1.5x faster (one run, not repeated) than a / x by wall time (95 % interval 1.28x to 1.76x). "
         "Provisional: `--repeats 5` confirms it."),
        ([1.05], [1.0], 0, ONE | {"word": "inconclusive", "reason": "includes_one", "needed": 5},
         "(one run, not repeated). Provisional: `--repeats 5` should settle it."),
        ([1.18], [1.0], 1, ONE | {"word": "inconclusive", "needed": 5},
         "not decided: 0.85 to 38 % faster than a / x by wall time (one run, not repeated)."),
        ([1.5], TIGHT, 4, ONE | {"word": "faster"}, ""),
        ([], TIGHT, 1, {"ratio": None, "p": None, "n": (0, 5), "reason": "refused"}, ""),
        # Servers without any spread.
        ([2.0] * 5, [1.0] * 5, 0, {"word": "faster"}, ""),
        ([0.1] * 5, [0.3 - 0.2] * 5, 0, {"word": "same"}, "(no difference seen)"),
    ],
)  # fmt: skip
def test_a_verdict(side: list[float], base: list[float], others: int, expected: dict[str, Any], part: str) -> None:
    verdict = judge(side, base, others)
    assert {name: getattr(verdict, name) for name in expected} == expected
    assert part in verdict_sentence(verdict, side="")
    if verdict.ratio is not None:
        assert verdict.low is not None and verdict.high is not None, "a ratio has an interval"
        assert verdict.low <= verdict.ratio <= verdict.high


def test_one_repeat_has_the_interval_of_its_blocks() -> None:
    """Without enough blocks the variation between equal runs is assumed."""
    pair = ComparedSides(
        side="b / x", baseline="a / x", metric="wall", side_speeds=[[2.11]], baseline_speeds=[[1.0]], within_run=True,
        errors=((0.01, 9), (0.01, 9)),
    )  # fmt: skip
    (verdict,) = decide_verdicts([pair]).verdicts
    half_width = 2.1009 * 0.01 * 2**0.5  # Student's t with 18 degrees of freedom
    assert verdict.low == pytest.approx(2.11 * np.exp(-half_width), rel=1e-4)
    assert (verdict.word, verdict.provisional, verdict.basis) == ("faster", True, "one_run")
    few = msgspec.structs.replace(pair, errors=((0.01, 9), None))
    (assumed,) = decide_verdicts([few]).verdicts
    assert assumed.low == pytest.approx(2.11 * np.exp(-2.7764 * 0.04 * 2**0.5), rel=1e-4)


@pytest.mark.parametrize(
    ("rooms", "word", "reason", "widened"),
    [
        ((0.0, 0.0), "faster", None, None),
        ((0.02, 0.01), "faster", None, (pytest.approx(1.0202, rel=1e-4), pytest.approx(1.01005, rel=1e-4))),
        ((0.09, 0.0), "inconclusive", "client", (pytest.approx(1.0942, rel=1e-4), 1.0)),
        ((0.0, 0.5), "faster", None, (1.0, pytest.approx(1.6487, rel=1e-4))),  # an even larger difference
    ],
)
def test_a_late_load_generator_widens_the_interval(
    rooms: tuple[float, float], word: str, reason: str | None, widened: Any
) -> None:
    pair = ComparedSides(
        side="b / x", baseline="a / x", metric="wall", side_speeds=[scaled(1.1)], baseline_speeds=[TIGHT],
        within_run=True, error_margins=rooms,
    )  # fmt: skip
    (verdict,) = decide_verdicts([pair]).verdicts
    assert (verdict.word, verdict.reason, verdict.widened) == (word, reason, widened)


WORK = Load(user="batch", requests=5)
OPEN = msgspec.structs.replace(WORK, arrivals=Arrivals(rate=2.0))
VECTORS = msgspec.structs.replace(WORK, endpoint="embeddings")
FORM = msgspec.structs.replace(WORK, output="natural", answer=Structured(choice="auto", send="grammar"))


@pytest.mark.parametrize(
    ("one", "changes", "metric"),
    [
        (WORK, {"batch_size": 5}, "wall"),
        (OPEN, {}, "wall"),
        (msgspec.structs.replace(WORK, output_tokens=Lengths(uniform=[2, 9])), {}, "wall"),
        (WORK, {"requests": 6}, "output_tok_s"),
        (msgspec.structs.replace(WORK, output="natural"), {}, "output_tok_s"),
        (OPEN, {"arrivals": Arrivals(rate=4.0)}, "output_tok_s"),
        (FORM, {"answer": Structured(choice="auto", send="nothing")}, "wall"),
        (FORM, {"answer": Structured(choice=["a", "b"])}, "output_tok_s"),
        (VECTORS, {}, "wall"),
        (VECTORS, {"endpoint": "chat"}, "output_tok_s"),
        (Load(user="batch", duration_s=9, endpoint="embeddings"), {}, "input_tok_s"),
    ],
)
def test_the_metric_follows_the_work(one: Load, changes: dict[str, Any], metric: str) -> None:
    assert work_metric([one, msgspec.structs.replace(one, **changes)]) == metric


def test_each_pair_has_the_metric_of_its_loads(wording: Wording) -> None:
    """A timed load in a scenario does not take the wall time from loads that are the same fixed work."""
    loads = {
        "work": Load(user="batch", requests=5),
        "people": Load(user="chat", duration_s=5.0),
        "vectors": Load(user="batch", duration_s=5.0, endpoint="embeddings"),
    }
    scenario = Scenario(
        version=1, question="?", model="m", servers=dict.fromkeys("ab", Server(template="vllm-cpu")), loads=loads,
        compare=[Wanted(row="b/people", against="a/people"), Wanted(row="b/vectors", against="a/people")],
    )  # fmt: skip

    def row(server: str, load: str, factor: float) -> Row:
        wall = [factor * value for value in TIGHT] if load == "work" else []
        rate = [2.0 / factor * value for value in TIGHT]
        return Row(
            server=server, load=load, cells=[], wall=wall, output_tok_s=[] if load == "vectors" else rate,
            input_tok_s=rate, pooled=compute_numbers([]),
        )  # fmt: skip

    rows = [row(server, load, factor) for server, factor in (("a", 2.0), ("b", 1.0)) for load in loads]
    found = compare_rows(rows, {}, ("a", "work"), scenario)
    assert found is not None and found.metric is None
    assert [(v.side, v.baseline, v.metric, v.word) for v in found.verdicts] == [
        ("b / people", "a / people", "output_tok_s", "faster"),  # the scenario names it
        ("b / vectors", "a / people", "output_tok_s", "inconclusive"),
        ("b / work", "a / work", "wall", "faster"),
        ("b / vectors", "a / vectors", "input_tok_s", "faster"),
    ]
    wording([verdict_sentence(v) for v in found.verdicts])


def cell(server: str, load: str, repeat: int, open_loop: bool, **latencies: float) -> CellSummary:
    """A cell of 200 requests whose latencies are given; from schedule they are 0.1 s longer."""

    def distribution(value: float) -> Distribution:
        return Distribution(n=200, p50=value, p90=2 * value, p95=3 * value)

    samples: dict[str, Any] = {name: distribution(value) for name, value in latencies.items()}
    if open_loop:
        samples |= {f"{name}_sched": distribution(value + 0.1) for name, value in latencies.items() if name != "tpot"}
    numbers = Numbers(sent=200, succeeded=200, failed=0, unfinished=0, **samples)
    return CellSummary(
        id=f"r{repeat}-{server}-{load}", server=server, load=load, repeat=repeat, numbers=numbers,
        server_load=ServerLoad(),
    )  # fmt: skip


def compared(
    loads: dict[str, Load],
    of: Callable[[str, str], dict[str, float]],
    tok_s: dict[str, float] | None = None,
    few: str | None = None,
) -> Comparison:
    """Servers a and b with the first load as baseline; six repeats, 0.1 % apart, of throughputs that are alike.

    `few`: a cell of five requests.
    """
    cells = {
        found.id: found
        for server in "ab"
        for load in loads
        for repeat in range(1, 7)
        for found in [
            cell(
                server, load, repeat, loads[load].arrivals is not None,
                **{name: value * (1 + 0.001 * repeat) for name, value in of(server, load).items()},
            )
        ]
    }  # fmt: skip
    if few is not None:
        numbers = msgspec.structs.replace(cells[few].numbers, ttft=Distribution(n=5, mean=0.1))
        cells[few] = msgspec.structs.replace(cells[few], numbers=numbers)
    rows = [
        Row(
            server=server, load=load, wall=[], pooled=compute_numbers([]),
            output_tok_s=[(tok_s or {}).get(load, 100.0) + k for k in range(6)],
            cells=[one.id for one in cells.values() if (one.server, one.load) == (server, load)],
        )
        for server in "ab"
        for load in loads
    ]  # fmt: skip
    scenario = Scenario(version=1, question="?", model="m", servers={}, loads=loads)
    found = compare_rows(rows, cells, ("a", next(iter(loads))), scenario)
    assert found is not None
    return found


CHAT = Load(user="chat", users=5, duration_s=60.0, think_s=[2.0, 8.0])


def words_of(found: Comparison) -> list[tuple[str, str, str]]:
    return [(verdict.side, verdict.metric, verdict.word) for verdict in found.verdicts]


def test_users_who_think_are_compared_by_latency() -> None:
    """TTFT doubles and throughput, which their think time sets, stays."""
    found = compared({"x": CHAT}, lambda server, _: {"ttft": 0.1 if server == "a" else 0.2, "tpot": 0.05})
    assert words_of(found) == [
        ("b / x", "ttft_p50", "slower"), ("b / x", "ttft_p95", "slower"),
        ("b / x", "tpot_p50", "same"), ("b / x", "tpot_p95", "same"),
    ]  # fmt: skip
    assert found.comparisons == 4


def test_answers_of_another_length_are_compared_with_those_of_the_same_load_only() -> None:
    """A word on 16 against 64 tokens would be about the loads, not about a server."""
    loads = {"short": Load(user="batch", requests=8, output_tokens=16), "long": Load(user="batch", requests=8)}
    found = compared(loads, lambda server, _: {"e2e": 1.0})
    assert [(verdict.side, verdict.baseline) for verdict in found.verdicts] == [
        ("b / short", "a / short"), ("b / long", "a / long"),
    ]  # fmt: skip


def test_an_open_loop_is_compared_by_latency_from_schedule() -> None:
    found = compared({"x": OPEN}, lambda server, _: {"ttft": 0.1 if server == "a" else 0.3, "tpot": 0.05})
    assert [metric for _, metric, _ in words_of(found)] == ["ttft_sched_p50", "ttft_sched_p95", "tpot_p50", "tpot_p95"]
    assert found.verdicts[0].ratio == pytest.approx(0.2 / 0.4, rel=0.01)
    # Without streaming E2E is what is felt.
    assert words_of(compared({"x": OPEN}, lambda server, _: {"e2e": 1.0 if server == "a" else 3.0})) == [
        ("b / x", "e2e_sched_p50", "slower"), ("b / x", "e2e_sched_p95", "slower"),
    ]  # fmt: skip


def test_work_and_users_who_think_are_not_compared_with_each_other() -> None:
    loads = {"x": CHAT, "job": Load(user="batch", duration_s=60.0)}
    found = compared(loads, lambda *_: {"ttft": 0.1, "tpot": 0.05})
    assert {(v.side, v.baseline, v.metric.partition("_")[0]) for v in found.verdicts} == {
        ("b / x", "a / x", "ttft"), ("b / x", "a / x", "tpot"), ("b / job", "a / job", "output"),
    }  # fmt: skip


def test_a_latency_that_some_repeat_has_too_few_requests_for() -> None:
    found = compared({"x": CHAT}, lambda *_: {"ttft": 0.1}, few="r3-b-x")
    assert [(v.metric, v.word, v.reason) for v in found.verdicts] == [("ttft_p50", "inconclusive", "refused")]


# Across runs.


def noisy(seed: int, factor: float = 1.0, spread: float = 0.004) -> Callable[[Cell], float]:
    dice = np.random.default_rng(seed)
    return lambda cell: float(factor * (10.0 if cell.server == "a" else 8.0) * np.exp(dice.normal(0, spread)))


def write_runs(folder: Path, runs: dict[str, int], factor: float = 1.0, **manifest: Any) -> dict[str, list[Path]]:
    """So many runs of each name, which differ by 0.4 %; each name is slower than the one before it by `factor`."""
    made: dict[str, list[Path]] = {}
    for place, (name, count) in enumerate(runs.items()):
        for number in range(count):
            write_made_run(folder / f"{name}-{number}", noisy(10 * place + number, factor**place), **manifest)
            made.setdefault(name, []).append(folder / f"{name}-{number}")
    return made


def test_runs_of_the_same_configuration_and_a_slower_one(tmp_path: Path) -> None:
    made = write_runs(tmp_path, {"base": 5, "slow": 5}, 1.1)
    again = write_runs(tmp_path, {"dull": 0, "again": 4})
    same = compare_runs([made["base"][:4], again["again"]])
    assert (same.metric, same.comparisons, same.noise_floor, [one.code for one in same.noise_source]) == (
        "wall", 2, 0.02, ["variation_measured"]
    )  # fmt: skip
    assert [(v.side, v.word, v.n, v.provisional) for v in same.verdicts] == [
        ("a / x", "inconclusive", (4, 4), False), ("b / x", "inconclusive", (4, 4), False),
    ]  # fmt: skip
    slow = compare_runs([made["base"], made["slow"]])
    assert [(v.word, v.n, v.baseline) for v in slow.verdicts] == [
        ("slower", (5, 5), "base-0 and 4 more runs"), ("slower", (5, 5), "base-0 and 4 more runs"),
    ]  # fmt: skip
    assert slow.verdicts[0].ratio == pytest.approx(1 / 1.1, rel=0.01)


def test_one_run_against_one_is_provisional(tmp_path: Path) -> None:
    write_made_run(tmp_path / "one", noisy(1))
    write_made_run(tmp_path / "slow", noisy(3, 1.5))
    write_made_run(tmp_path / "two", noisy(2))
    made = compare_runs([[tmp_path / "one"], [tmp_path / "slow"]])
    assert [(v.word, v.basis, v.provisional) for v in made.verdicts] == [("slower", "runs", True)] * 2
    assert made.verdicts[0].ratio == pytest.approx(1 / 1.5, rel=0.02)
    half_width = 2.7764 * 0.04 * 2**0.5
    assert made.verdicts[0].low == pytest.approx(made.verdicts[0].ratio * np.exp(-half_width), rel=1e-4)
    assert made.comparisons == 2
    equal = compare_runs([[tmp_path / "one"], [tmp_path / "two"]])
    assert [(v.word, v.reason, v.gate, v.gate_needed) for v in equal.verdicts] == [
        ("inconclusive", reason, "cannot_tell", 5) for reason in ("in_margin", "in_margin")
    ]
    assert [reason.code for reason in equal.noise_source] == ["variation_assumed"]
    assert comparison_answer(equal).startswith("Cannot tell: ")
    three = compare_runs([[tmp_path / "one"], [tmp_path / "two"], [tmp_path / "slow"]])
    assert [v.side for v in three.verdicts] == ["a / x (two)", "b / x (two)", "a / x (slow)", "b / x (slow)"]


@pytest.mark.parametrize(
    ("factor", "options", "code", "gate"),
    [
        (1.0, (), 5, "cannot_tell"),
        (1.0, ("--provisional",), 5, "cannot_tell"),
        (1.0, ("--tolerance", "30%"), 0, "no_slowdown"),
        (1.1, (), 5, "cannot_tell"),
        (1.25, (), 5, "size_unknown"),
        (1.25, ("--tolerance", "2"), 5, "provisional"),
        (1.25, ("--tolerance", "2", "--provisional"), 4, "slower"),
        (1.6, (), 4, "slower"),  # the whole interval is beyond 25 %
        (0.7, (), 0, "no_slowdown"),
    ],
)
def test_the_exit_code_of_a_gate(tmp_path: Path, factor: float, options: tuple[str, ...], code: int, gate: str) -> None:
    write_made_run(tmp_path / "one", noisy(1))
    write_made_run(tmp_path / "two", noisy(2, factor))
    done = harness("compare", "one", "two", *options, "--format", "json", cwd=tmp_path)
    assert (done.code, done.err) == (code, "")
    verdicts = msgspec.json.decode(done.out)["verdicts"]
    assert [verdict["gate"] for verdict in verdicts] == [gate] * 2
    shown = harness("compare", "one", "two", *options, "--format", "markdown", cwd=tmp_path).out
    assert ("--provisional" in shown) == (gate == "provisional")
    xml = harness("compare", "one", "two", *options, "--format", "junit", cwd=tmp_path).out
    outcomes = {0: (0, 0), 4: (2, 0), 5: (0, 2)}  # failures and skipped cases
    assert f'failures="{outcomes[code][0]}" errors="0" skipped="{outcomes[code][1]}"' in xml


def test_earlier_equal_runs_show_how_far_runs_differ(tmp_path: Path) -> None:
    """Of the same machine, work and configuration, below `runs` and `results`, each once."""
    runs, results = tmp_path / "runs", tmp_path / "results"
    for number in range(6):
        write_made_run(runs / f"run-{number}", noisy(number), started_wall_s=1000.0 + number)
    write_made_run(runs / "other", noisy(8), started_wall_s=1000.0, served=OTHER_ARGUMENTS["served"])
    write_made_run(runs / "elsewhere", noisy(8), started_wall_s=1000.0, machine=Machine(name="halo"))
    write_made_run(runs / "later", noisy(8), started_wall_s=2000.0)
    shutil.copytree(runs / "run-1", results / "strix" / "which" / "run-1")
    groups = [[runs / "run-4"], [runs / "run-5"]]
    alone, known = compare_runs(groups), compare_runs(groups, runs=runs, results=results)
    (source,) = known.noise_source
    assert (source.code, source.values["compared"], source.values["runs"]) == ("variation_measured", 2, 4)
    assert 0.0005 < source.values["low"] <= source.values["high"] < 0.01
    assert [v.provisional for v in known.verdicts] == [False, False]
    narrow, wide = known.verdicts[0], alone.verdicts[0]
    assert (narrow.low or 0) > (wide.low or 0) and (narrow.high or 9) < (wide.high or 0)
    assert narrow.ratio == wide.ratio
    # Equal runs of the other side count as well.
    other = compare_runs([[runs / "run-5"], [runs / "other"]], about="arguments", runs=runs)
    assert other.noise_source[0].values["runs"] == 5


@pytest.mark.parametrize(
    "factors",
    [
        (1, 1, 3.8, 3.8),  # a confirmed regression
        (1, 3.8, 3.8, 3.8, 3.8),
        (3.8, 3.8, 1, 3.8),  # a defect that is back
        (1, 3.8, 1, 3.8),
        (1, 1, 1, 1.4, 1.4, 1.4),
    ],
)
def test_a_difference_is_no_variation_between_equal_runs(tmp_path: Path, factors: Sequence[float]) -> None:
    """Of runs with the same recorded keys; the last is compared with the oldest of those before it that differ."""
    runs = tmp_path / "runs"
    for number, factor in enumerate(factors):
        write_made_run(runs / f"run-{number}", noisy(number, factor), started_wall_s=1000.0 + number)
    base, side = runs / f"run-{factors.index(1)}", runs / f"run-{len(factors) - 1}"
    found = compare_runs([[base], [side]], runs=runs)
    assert found.noise_source[0].values["runs"] == len(factors) - 2
    assert [v.word for v in found.verdicts] == ["slower", "slower"]
    assert all(v.low and v.high and v.high / v.low < 1.5 for v in found.verdicts)
    done = harness("compare", "runs/" + base.name, "runs/" + side.name, "--runs", "runs", "--provisional", cwd=tmp_path)
    assert (done.code, done.err) == (4, "")
    checks = ["wall <= 1.1 * baseline"]
    checked = compare_runs([[base], [side]], runs=runs, checks=checks, provisional=True).checks
    assert {result.status for result in checked} == {"failed"}


def _same(served: ServedBy, _: Cell) -> ServedBy:
    return served


def test_runs_at_two_addresses_name_both(tmp_path: Path) -> None:
    """A server that already ran may have moved, so the address refuses nothing; it assigns earlier runs."""
    runs = tmp_path / "runs"
    for number, (path, factor) in enumerate([("fast", 1.0), ("slow", 1.25), ("fast", 1.0), ("slow", 1.25)]):
        served = served_by(template=None, image=None, url=f"http://127.0.0.1:8000/{path}")
        start: dict[str, Any] = {"started_wall_s": 1000.0 + number, "served": functools.partial(_same, served)}
        write_made_run(runs / f"run-{number}", noisy(number, factor), **start)
    found = compare_runs([[runs / "run-2"], [runs / "run-3"]], runs=runs)
    assert [(each.key, each.values) for each in found.differences] == [
        ("servers.*.url", ["http://127.0.0.1:8000/fast", "http://127.0.0.1:8000/slow"])
    ]
    assert found.noise_source[0].values["runs"] == 2
    assert all(v.low and v.high and v.high / v.low < 1.35 for v in found.verdicts)


def test_another_number_of_machines_is_reported_and_refuses_nothing(tmp_path: Path) -> None:
    one = write_made_run(tmp_path / "one")
    two = msgspec.structs.replace(one, id="two", workers=Workers(machines=2, bind="10.0.0.1"))
    rows = [("a", "x"), ("b", "x")]
    refuse_unlike([one, two], rows, [0, 1], None)
    assert find_differences([collect_facts(run, rows) for run in (one, two)]) == [
        Difference(key="load_machines", values=["1", "2"])
    ]
    imported = msgspec.structs.replace(one, origin=Origin(tool="t", files={}, imported_wall_s=0.0, importer="1"))
    assert "load_machines" not in collect_facts(imported, rows)


def refused(tmp_path: Path, about: str | None = None, **other: Any) -> UnlikeError:
    """The refusal of a run that differs in `other` from the usual one."""
    write_made_run(tmp_path / "one", noisy(1))
    write_made_run(tmp_path / "two", noisy(2), **other)
    with pytest.raises(UnlikeError) as raised:
        compare_runs([[tmp_path / "one"], [tmp_path / "two"]], about=about)
    assert raised.value.exit_code == ExitCode.USAGE
    return raised.value


def serving_digest(digest: Callable[[Cell], str]) -> dict[str, Any]:
    return {"served": lambda cell: served_by(image_digest=digest(cell))}


@pytest.mark.parametrize(
    ("other", "key", "value", "other_value", "more"),
    [
        ({"made_of": scenario(model="n")}, "model", "m", "n", 0),
        ({"machine": Machine(name="strix", kernel="6.18", cores=32)}, "machine.kernel", "6.17", "6.18", 0),
        ({"versions": {"locust": "2.47.0", "gevent": "25.5"}}, "versions.gevent", "nothing", "25.5", 0),
        ({"made_of": scenario(restart=False)}, "scenario.restart", "true", "false", 0),
        ({"served": lambda cell: served_by(arguments=["--port", "9", "--max-num-seqs", "4"])}, "servers.a.arguments",
         "--max-num-seqs 8", "--max-num-seqs 4", 1),
        (serving_digest(lambda cell: "sha256:2222" if cell.server == "b" else "sha256:1111"),
         "servers.b.image_digest", "sha256:1111", "sha256:2222", 0),
        (serving_digest(lambda cell: f"sha256:{1111 * cell.repeat}"), "servers.a.image_digest", "sha256:1111",
         "sha256:1111, then sha256:2222, then sha256:3333, then sha256:4444, then sha25...", 1),
        # Never compared, whatever the comparison is about.
        ({"about": "workload_sha256", "workload_sha256": "cd" * 32}, "workload_sha256", "ab" * 32, "cd" * 32, 0),
        ({"about": "simulated", "served": lambda cell: served_by(simulated=True)}, "simulated", "false", "true", 0),
    ],
)  # fmt: skip
def test_the_refusal_names_the_key_and_both_values(
    tmp_path: Path, other: dict[str, Any], key: str, value: str, other_value: str, more: int, wording: Wording
) -> None:
    found = refused(tmp_path, **other)
    sides = {"run": "one", "value": value, "other": "two", "other_value": other_value}
    assert (found.reason.code, found.reason.values) == ("runs_differ", {"key": key, **sides, "more": more})
    assert all(str(value) in found.what for value in (key, value, other_value))
    wording(found)


VERSIONS = {"locust": "2.47.0"}
CHECKSUM = {"versions": VERSIONS | {"load generator": "2222"}}
OTHER_ARGUMENTS = {"served": lambda cell: served_by(arguments=["--max-num-seqs", "4"])}


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ([CHECKSUM | {"locustfiles": {"batch": "3333"}}], "load generator"),
        ([OTHER_ARGUMENTS], "arguments"),
        ([{"machine": Machine(name="halo", kernel="6.18", cores=16)}], "machine"),
        ([CHECKSUM, CHECKSUM | {"versions": VERSIONS | {"load generator": "2222", "gevent": "25"}}], "versions"),
        ([CHECKSUM, OTHER_ARGUMENTS], None),  # of three sides, each in something else
    ],
)
def test_the_command_that_a_refusal_suggests_works_as_it_is(
    tmp_path: Path, changes: list[dict[str, Any]], about: str | None, wording: Wording
) -> None:
    runs = tmp_path / "my runs"
    manifest = {"versions": VERSIONS | {"load generator": "1111"}, "locustfiles": {"batch": "1111"}}
    for number, change in enumerate([{}, *changes]):
        write_made_run(runs / f"run-{number}", noisy(number), **manifest | change)
    names = [f"run-{number}" for number in range(len(changes) + 1)]
    refusal = harness("compare", *names, "--runs", "my runs", "--format", "json", cwd=tmp_path)
    assert refusal.code == 1
    last = refusal.err.splitlines()[-1]
    if about is None:
        wording(last)
        return
    pasted = last[last.index("harness compare") :]
    assert shlex.split(pasted)[:4] == ["harness", "compare", "--about", about]
    done = harness(*shlex.split(pasted)[1:], cwd=tmp_path)
    assert (done.code in (0, 4, 5), done.err) == (True, "")
    assert len(msgspec.json.decode(done.out)["verdicts"]) == 2 * len(changes)


def newer(cell: Cell) -> ServedBy:
    return served_by(image="vllm/vllm-openai-cpu:v0.33", image_digest="sha256:2222", version="0.33.0")


@pytest.mark.parametrize("about", ["image", "servers"])
def test_the_one_thing_that_it_is_about_may_differ_with_what_follows_from_it(tmp_path: Path, about: str) -> None:
    write_made_run(tmp_path / "one", noisy(1))
    write_made_run(tmp_path / "two", noisy(2, 0.8), served=newer)
    made = compare_runs([[tmp_path / "one"], [tmp_path / "two"]], about=about)
    assert [v.ratio for v in made.verdicts] == [pytest.approx(1.25, rel=0.01)] * 2


def with_variable(value: int) -> Scenario:
    server = Server(template="vllm-cpu", variables={"max_num_seqs": value})
    return scenario(servers={"a": server, "b": server})


def limited(value: int) -> Callable[[Cell], ServedBy]:
    container = {"Cmd": ["--max-num-seqs", str(value)], "HostConfig": {"PortBindings": value, "IpcMode": "host"}}
    return lambda cell: served_by(arguments=["--max-num-seqs", str(value)], container=container)


def test_a_variable_brings_its_arguments(tmp_path: Path, wording: Wording) -> None:
    for value in (4, 8):
        folder = tmp_path / f"seqs-{value}"
        write_made_run(folder, noisy(value), made_of=with_variable(value), served=limited(value))
    groups = [[tmp_path / "seqs-4"], [tmp_path / "seqs-8"]]
    assert len(compare_runs(groups, about="max_num_seqs").verdicts) == 2
    assert len(compare_runs(groups, about="variables").verdicts) == 2
    with pytest.raises(HarnessError) as raised:
        compare_runs(groups, about="image")
    assert "'servers.a.variables.max_num_seqs'" in raised.value.what
    wording(raised.value)
    assert "servers.b.container.Cmd" in raised.value.detail


def test_runs_of_one_side_must_agree_in_all(tmp_path: Path) -> None:
    for number, served in enumerate([lambda cell: served_by(), newer, newer]):
        write_made_run(tmp_path / f"run-{number}", noisy(number), served=served)
    for about in ("image", None):
        with pytest.raises(UnlikeError) as raised:
            compare_runs([[tmp_path / "run-0", tmp_path / "run-1"], [tmp_path / "run-2"]], about=about)
        assert raised.value.reason.values["key"] == "servers.a.image"
        assert raised.value.about is None


def test_what_chance_chose_does_not_matter(tmp_path: Path) -> None:
    def served(run: str, port: int) -> Callable[[Cell], ServedBy]:
        return lambda cell: served_by(
            url=f"http://127.0.0.1:{port}",
            arguments=["serve", "--port", str(port), "--log", f"/runs/{run}/{cell.id}.log"],
            container={"HostConfig": {"NetworkMode": run, "PortBindings": {"8000/tcp": port}, "ShmSize": 5}},
            phases=[],
        )

    for number, name in enumerate(["one", "two"]):
        changed = scenario(repeats=4 + number, checks=["error_rate == 0"] * number, question=f"Question {number}?")
        write_made_run(
            tmp_path / name, noisy(number), made_of=changed, served=served(name, 40_000 + number), scenario_name=name,
            git_commit=name,
        )  # fmt: skip
    made = compare_runs([[tmp_path / "one"], [tmp_path / "two"]])
    assert [v.n for v in made.verdicts] == [(1, 1), (1, 1)]
    assert [difference.key for difference in made.differences] == ["git_commit"], "shown, and no reason to refuse"


def test_a_run_that_is_invalid_or_has_not_ended_is_refused(tmp_path: Path, wording: Wording) -> None:
    write_made_run(tmp_path / "one", noisy(1))
    run = write_made_run(tmp_path / "two", noisy(2))
    records = list(read_requests(tmp_path / "two" / "requests.jsonl"))
    write_lines(tmp_path / "two" / "requests.jsonl", records[:-1])
    with pytest.raises(RunError) as it:
        compare_runs([[tmp_path / "one"], [tmp_path / "two"]])
    assert "109" in str(it.value)
    wording(it.value)
    assert it.value.exit_code == ExitCode.INVALID
    write_lines(tmp_path / "two" / "requests.jsonl", records)
    write_run(tmp_path / "two", msgspec.structs.replace(run, status="running"))
    with pytest.raises(RunError) as caught:
        compare_runs([[tmp_path / "one"], [tmp_path / "two"]])
    wording(caught.value)


def test_only_common_rows_are_compared_each_by_its_own_metric(tmp_path: Path, wording: Wording) -> None:
    load = scenario().loads["x"]
    more = scenario(
        servers=scenario().servers | {"c": Server(template="vllm-cpu")},
        loads={"x": load, "y": msgspec.structs.replace(load, output="natural")},
    )
    for number, (name, made_of) in enumerate({"one": more, "two": more, "small": scenario()}.items()):
        write_made_run(tmp_path / name, noisy(number), made_of=made_of)
    write_made_run(tmp_path / "z", noisy(9), made_of=scenario(loads={"z": load}))
    found = compare_runs([[tmp_path / "one"], [tmp_path / "two"]])
    assert found.metric is None
    assert [(v.side, v.metric) for v in found.verdicts] == [
        (f"{server} / {load}", metric) for server in "abc" for load, metric in (("x", "wall"), ("y", "output_tok_s"))
    ]
    found = compare_runs([[tmp_path / "one"], [tmp_path / "small"]])
    assert [v.side for v in found.verdicts] == ["a / x", "b / x"]
    with pytest.raises(HarnessError) as caught:
        compare_runs([[tmp_path / "one"], [tmp_path / "z"]])
    wording(caught.value)


def test_what_cannot_be_compared_at_all(tmp_path: Path, wording: Wording) -> None:
    write_made_run(tmp_path / "one", noisy(1))
    with pytest.raises(HarnessError) as caught:
        compare_runs([[tmp_path / "one"]])
    wording(caught.value)
    with pytest.raises(HarnessError, match="given twice"):
        compare_runs([[tmp_path / "one"], [tmp_path / "one"]])
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with pytest.raises(HarnessError) as caught:
        compare_runs([[tmp_path / "one"], [tmp_path / "copy"]])
    wording(caught.value)
    with pytest.raises(HarnessError) as caught:
        compare_runs([[tmp_path / "one"], [tmp_path / "none"]])
    wording(caught.value)
