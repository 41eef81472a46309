"""The history of a scenario: change points, what changed in the manifests there, and the gate."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from harness.base.errors import ExitCode, HarnessError, RunError
from harness.numbers.comparison import TOLERANCE
from harness.numbers.gate import gate_code
from harness.numbers.stats import GATES_PER_HISTORY, MIN_HISTORY, find_levels, find_shift
from harness.numbers.summarize import read_summary, summarize, write_summary
from harness.questions.compare.sides import compare_runs
from harness.questions.history.decide import History, Point, Series, _decide, _with_gate
from harness.questions.history.earlier_runs import read_history
from harness.questions.history.page import _series_chart, history_html, left_out_sentences, series_cells
from harness.questions.results import add_result, collect_board
from harness.records.manifest import Machine, Run
from harness.report.charts import Figure
from harness.scenario import Scenario, Server
from tests.support.command import called, harness
from tests.support.made_runs import WALL_S, scenario, served_by, write_made_run
from tests.support.nightly import draws, room, scatter
from tests.support.wording import Wording

RUN_SD = 0.02  # between runs
STEP = 1 / 1.1


def histories(seed: int, number: int, rows: int = 1, runs: int = GATES_PER_HISTORY) -> list[np.ndarray[Any, Any]]:
    """Speeds of equal runs: for each history an array of rows by runs."""
    dice = np.random.default_rng(seed)
    return [np.exp(dice.normal(0, RUN_SD, (rows, runs))) for _ in range(number)]


@pytest.mark.parametrize(("rows", "number"), [(1, draws(200)), (8, draws(40))])
def test_gates_of_a_history_without_a_step_raise_few_false_alarms(rows: int, number: int) -> None:
    """Each run of 60 is gated; `slower` and `faster` both count. At most 5 % of the histories may have one."""
    alarms = 0
    for history in histories(1, number, rows):
        words = {find_shift(row[:n].tolist(), rows).word for n in range(2, GATES_PER_HISTORY + 1) for row in history}
        alarms += bool(words & {"slower", "faster"})
    assert alarms <= (0.05 + room(0.05, number)) * number


@pytest.mark.parametrize(("rows", "number"), [(1, 1000), (8, 200)])
def test_a_history_without_a_step_has_few_change_points(rows: int, number: int) -> None:
    found = sum(
        any(len(find_levels(row.tolist(), rows).starts) > 1 for row in history)
        for history in histories(2, number, rows)
    )
    assert found <= 0.05 * number


@pytest.mark.parametrize(("rows", "at"), [(1, 15), (8, 57)])
def test_a_step_of_ten_percent_is_found_within_three_runs(rows: int, at: int) -> None:
    gated = divided = 0
    for (row,) in histories(3, 200):
        row[at:] *= STEP
        gated += any(find_shift(row[: at + after].tolist(), rows).word == "slower" for after in (1, 2, 3))
        starts = find_levels(row[: at + 3].tolist(), rows).starts
        divided += len(starts) == 2 and abs(starts[1] - at) <= 1
    assert gated >= 0.9 * 200
    assert divided >= 0.9 * 200


def test_a_step_becomes_the_new_level() -> None:
    """The gate reports it for three runs at most; then the history starts anew, and is too short for a while."""
    ((row,),) = histories(4, 1, runs=40)
    row[20:] *= 0.8
    words = [find_shift(row[:n].tolist()).word for n in range(21, 41)]
    assert words[:3] == ["slower"] * 3
    assert words[3] == "inconclusive"
    assert words[-1] == "no_shift"
    assert find_shift(row.tolist()).history == list(range(20, 39))


def test_one_outlier_does_not_divide_the_history() -> None:
    ((row,),) = histories(5, 1, runs=40)
    row[20] *= 0.7
    assert find_levels(row.tolist()) == ([0], [20], [])
    assert find_shift(row[:21].tolist()).word == "slower", "while it is the newest it may be a step"
    assert find_levels(row[:21].tolist()).undecided == [20]
    for end in (22, 23, 24, 40):
        after = find_shift(row[:end].tolist())
        assert after.word == "no_shift"
        assert after.history == [place for place in range(end - 1) if place != 20]


@pytest.mark.parametrize("runs", [0, MIN_HISTORY - 1, MIN_HISTORY])
def test_a_short_history_is_inconclusive(runs: int) -> None:
    """And says how many runs are needed."""
    ((row,),) = histories(10, 1, runs=runs + 1)
    found = find_shift(row.tolist())
    assert len(found.history) == runs
    if runs < MIN_HISTORY:
        assert (found.word, found.low, found.needed) == ("inconclusive", None, MIN_HISTORY)
        row[-1] /= 3
        assert find_shift(row.tolist()).word == "inconclusive"
    else:
        assert found.needed is not None
        assert (found.word == "no_shift") == (found.needed <= runs)
        row[-1] /= 1.5
        assert find_shift(row.tolist()).word == "slower", "five runs find what is large"


def test_equal_values() -> None:
    """Without variance the margin alone decides."""
    assert find_levels([2.0] * 30) == ([0], [], [])
    assert find_levels([2.0] * 15 + [1.9] * 15) == ([0, 15], [], [])
    assert find_levels([2.0] * 15 + [1.98] * 15) == ([0], [], []), "one percent is within the margin"
    assert find_shift([2.0] * 20 + [1.98]).word == "no_shift"
    slower = find_shift([2.0] * 20 + [1.9])
    assert (slower.word, slower.window) == ("slower", 1)
    assert slower.ratio == pytest.approx(0.95)
    assert find_shift([2.0] * 20 + [2.1]).word == "faster"
    assert find_levels([]) == ([], [], [])


ONE = scenario(servers={"a": Server(template="vllm-cpu")}, repeats=1)
SPREAD = (1.0, 1.004, 0.996, 1.002, 0.998)


def history_run(
    folder: Path, number: int, wall_s: float, *, digest: str = "sha256:1111", made_of: Scenario = ONE, **manifest: Any
) -> Run:
    """Run `number` of a history, an hour after the one before it."""
    path = folder / f"run-{number:02}"
    run = write_made_run(
        path, lambda cell: wall_s * SPREAD[number % 5], made_of=made_of,
        served=lambda cell: served_by(image_digest=digest), **({"started_wall_s": WALL_S + 3600 * number} | manifest),
    )  # fmt: skip
    write_summary(path, summarize(path))
    return run


def history_of(folder: Path, number: int = 11) -> History:
    return read_history(folder / "runs" / f"run-{number:02}", folder / "runs", folder / "results")


@pytest.fixture
def stepped(tmp_path: Path) -> Path:
    """Eight runs, and four of an image that is 10 % slower."""
    for number in range(12):
        new = number >= 8
        history_run(tmp_path / "runs", number, 11.0 if new else 10.0, digest="sha256:2222" if new else "sha256:1111")
    return tmp_path


def test_a_change_point_names_what_changed_in_the_manifests(stepped: Path) -> None:
    found = history_of(stepped)
    assert (found.machine, found.model, found.runs) == ("strix", "m", [f"run-{n:02}" for n in range(12)])
    (series,) = found.series
    assert (series.server, series.load, series.metric) == ("a", "x", "wall")
    assert [(level.first, level.last, level.runs) for level in series.levels] == [
        ("run-00", "run-07", 8),
        ("run-08", "run-11", 4),
    ]
    (change,) = found.change_points
    assert (change.before, change.after, change.sides) == ("run-07", "run-08", ("run-07", "run-08"))
    assert change.moved[0].ratio == pytest.approx(1 / 1.1, abs=0.003)
    assert [(one.key, one.values) for one in change.differences] == [
        ("servers.a.image_digest", ["sha256:1111", "sha256:2222"])
    ]
    # Filed runs alone have the same history.
    for number in range(12):
        add_result(stepped / "runs" / f"run-{number:02}", stepped / "results")
    filed = stepped / "results" / "strix" / "which" / "run-11"
    of_filed = read_history(filed, stepped / "nowhere", stepped / "results")
    assert of_filed.without_records == found.runs
    assert replace(of_filed, without_records=[]) == found


def test_the_level_is_that_of_the_other_runs(tmp_path: Path) -> None:
    """The speed of a run is relative to it, so that it must not include the run itself."""
    for number in range(3):
        history_run(tmp_path / "runs", number, 10.0)
    (alone,), (third,) = history_of(tmp_path, 0).series, history_of(tmp_path, 2).series
    assert (alone.level, alone.ratio, series_cells(alone)[3]) == (None, None, "–")
    first, second, newest = (point.value for point in third.points)
    assert third.level == pytest.approx(math.sqrt(first * second))
    assert third.level is not None and third.ratio == pytest.approx(third.level / newest)


def test_commands_say_of_which_runs_the_stored_summary_is_used(stepped: Path) -> None:
    filed = [add_result(stepped / "runs" / f"run-{n:02}", stepped / "results") for n in (8, 9)]
    names = [f"results/strix/which/run-{n:02}" for n in (8, 9)]
    assert len(filed) == 2
    said = "requests.jsonl is missing; the stored summary is used"
    for given in (names, ["runs/run-08", names[1]]):
        assert called("compare", *given, cwd=stepped).err == "", "filed runs are meant to have nothing else"
    (stepped / "runs" / "run-08" / "requests.jsonl").unlink()
    (stepped / "runs" / "run-08" / "summary.json").write_bytes((stepped / names[0] / "summary.json").read_bytes())
    assert called("compare", "runs/run-08", names[1], cwd=stepped).err == f"runs/run-08: {said}\n"


def changed_summary(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads((folder / "summary.json").read_text())
    change(value)
    (folder / "summary.json").write_text(json.dumps(value))


def with_speed(value: dict[str, Any], factor: float) -> None:
    """Another speed in cells and rows alike; the window, tokens and latencies stay."""
    for one in [*(cell["numbers"] for cell in value["cells"]), *(row["pooled"] for row in value["rows"])]:
        one["wall"] /= factor
        for name in ("output_tok_s", "input_tok_s", "requests_per_s"):
            one[name] = None if one.get(name) is None else one[name] * factor
    for row in value["rows"]:
        row["wall"] = [each / factor for each in row["wall"]]
        for name in ("output_tok_s", "input_tok_s"):
            row[name] = [each * factor for each in row[name]]


def with_window(value: dict[str, Any], factor: float) -> None:
    """The same with the window, in which the longest answer does not fit."""
    with_speed(value, factor)
    for one in [*(cell["numbers"] for cell in value["cells"]), *(row["pooled"] for row in value["rows"])]:
        one["window_s"] /= factor


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another run": lambda value: value.update(run="run-07"),
    "a row's values": lambda value: value["rows"][0].update(wall=[1.0]),
    "a row of no server": lambda value: value["rows"][0].update(server="z"),
    "valid in spite of a reason": lambda value: value.update(reasons=[{"code": "x", "text": "y"}]),
    "not checked, and no import": lambda value: value.update(valid=None),
    "another speed": lambda value: with_speed(value, 1000),
    "a pooled speed": lambda value: value["rows"][0]["pooled"].update(wall=1.0),
    "an answer longer than all": lambda value: with_window(value, 1000),
    "a token in a nanosecond": lambda value: value["cells"][0]["numbers"].update(answer_tok_s=1e9),
    "another format": lambda value: value.update(format_version=99),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_stored_summaries_are_not_taken_on_trust(stepped: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Where the records are, the numbers are theirs. A filed run has no records: its summary must be its own."""
    expected = history_of(stepped)
    runs, filed = stepped / "runs", stepped / "results" / "strix" / "which"
    for number in range(12):
        add_result(runs / f"run-{number:02}", stepped / "results")
    for number in (3, 11):
        changed_summary(runs / f"run-{number:02}", change)
    (runs / "run-05" / "summary.json").unlink()
    assert read_history(runs / "run-11", runs, stepped / "nowhere") == expected

    changed_summary(filed / "run-03", change)
    found = read_history(filed / "run-11", stepped / "nowhere", stepped / "results")
    assert (found.left_out, len(found.runs)) == ({"unreadable": ["run-03"]}, 11)
    changed_summary(filed / "run-11", change)
    refusals: list[Callable[[], object]] = [
        lambda: read_history(filed / "run-11", stepped / "nowhere", stepped / "results"),
        lambda: compare_runs([[filed / "run-00"], [filed / "run-11"]]),
        lambda: read_summary(filed / "run-11"),
    ]
    refused = set()
    for refuse in refusals:
        with pytest.raises(HarnessError) as error:
            refuse()
        refused.add(error.value.what)
    assert len(refused) == 1 and "run-11/summary.json" in refused.pop()
    assert [text.partition(":")[0] for text in collect_board(stepped / "results", stepped).unreadable] == [
        str(filed / name / "summary.json") for name in ("run-03", "run-11")
    ]


def test_a_run_whose_records_are_damaged_is_refused_as_compare_refuses_it(stepped: Path) -> None:
    """Its run.json and summary.json say VALID; its records do not."""
    records = stepped / "runs" / "run-11" / "requests.jsonl"
    records.write_text(records.read_text().partition("\n")[0])
    whats, refusals = set(), list[Callable[[], object]]()
    refusals.append(lambda: history_of(stepped))
    refusals.append(lambda: compare_runs([[stepped / "runs" / "run-10"], [stepped / "runs" / "run-11"]]))
    for refuse in refusals:
        with pytest.raises(RunError) as error:
            refuse()
        whats.add(error.value.what.partition("only a VALID run")[2].partition(": ")[2])
    assert len(whats) == 1
    assert history_of(stepped, 10).left_out == {"later": ["run-11"]}
    (stepped / "runs" / "run-03" / "requests.jsonl").write_text("")
    assert history_of(stepped, 10).left_out == {"not_valid": ["run-03"], "later": ["run-11"]}


def test_a_difference_near_a_change_point_is_found(tmp_path: Path) -> None:
    """The first run of the slower image happens to be fast, so that the change point is one run late."""
    for number in range(12):
        new = number >= 7
        history_run(
            tmp_path / "runs", number, 11.0 if number >= 8 else 10.0, digest="sha256:2222" if new else "sha256:1111"
        )
    (change,) = history_of(tmp_path).change_points
    assert (change.before, change.after, change.sides) == ("run-07", "run-08", ("run-06", "run-09"))
    assert [one.key for one in change.differences] == ["servers.a.image_digest"]


OTHER = scenario(servers={"b": Server(template="vllm-cpu")}, repeats=1)


def test_the_run_before_a_shift_is_one_of_its_row(tmp_path: Path) -> None:
    """The newest two runs with the row show the shift; a run without the row is between them."""
    for number in range(13):
        new = number >= 10
        history_run(
            tmp_path / "runs", number, 11.0 if new else 10.0, digest="sha256:2222" if new else "sha256:1111",
            made_of=OTHER if number == 11 else ONE,
        )  # fmt: skip
    found = history_of(tmp_path, 12)
    (series,) = found.series
    assert (series.word, series.window, series.left_out) == ("slower", 2, {"no_row": ["run-11"]})
    assert found.sides == ["run-09", "run-12"]
    assert [one.key for one in found.differences] == ["servers.a.image_digest"]


def test_an_outlier_is_not_the_run_before_a_shift() -> None:
    """Of the newest three runs one is an outlier: the shift started before it."""
    point = Point(run="", started_wall_s=0.0, value=1.0)
    states = ["level"] * 8 + ["undecided", "outlier", "undecided"]
    points = [replace(point, run=f"run-{number}", state=state) for number, state in enumerate(states)]
    series = Series(server="a", load="x", metric="wall", points=points, levels=[], left_out={}, window=2)
    assert series.before_window == "run-7"


def test_an_outlier_with_another_image_is_not_the_cause_of_a_change_point(tmp_path: Path) -> None:
    for number in range(16):
        wall_s = 20.0 if number == 10 else 11.0 if number >= 8 else 10.0
        history_run(tmp_path / "runs", number, wall_s, digest="sha256:2222" if number == 10 else "sha256:1111")
    found = history_of(tmp_path, 15)
    (change,) = found.change_points
    assert (change.before, change.after, change.sides) == ("run-07", "run-08", ("run-07", "run-08"))
    assert change.differences == []


def test_what_is_no_part_of_the_history_is_counted(tmp_path: Path) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    for number in range(3):
        history_run(runs, number, 10.0)
    add_result(runs / "run-01", results)
    add_result(runs / "run-02", results)
    history_run(runs, 3, 10.0, workload_sha256="cd" * 32)
    history_run(runs, 4, 10.0, status="invalid")
    history_run(runs, 5, 10.0, made_of=scenario(servers=ONE.servers, repeats=1, model="other"))
    history_run(runs, 6, 10.0, machine=Machine(name="other"))
    history_run(runs, 7, 10.0, scenario_name="another")
    history_run(runs, 8, 10.0, made_of=scenario(servers={"a": Server(template="simulated")}, repeats=1))
    history_run(runs, 9, 10.0)
    (runs / "run-10").mkdir()
    (runs / "run-10" / "run.json").write_text("{")
    found = history_of(tmp_path, 9)
    assert found.runs == ["run-00", "run-01", "run-02", "run-09"]
    assert found.left_out == {
        "unreadable": ["run-10"],
        "not_valid": ["run-04"],
        "workload": ["run-03"],
        "model": ["run-05"],
        "machine": ["run-06"],
        "engine_kind": ["run-08"],
    }
    found = history_of(tmp_path, 2)
    assert (len(found.runs), found.sides, found.left_out["later"]) == (3, ["run-01", "run-02"], ["run-09"])
    with pytest.raises(RunError):
        history_of(tmp_path, 4)


def test_the_chart_of_one_run_has_a_range(tmp_path: Path, wording: Wording) -> None:
    def layouts() -> list[Figure]:
        history = history_of(tmp_path, 0)
        return [_series_chart("series", series, history).figure["layout"] for series in history.series]

    history_run(tmp_path / "runs", 0, 10.0)
    for layout in layouts():
        low, high = layout["yaxis"]["range"]
        assert high - low > 0.05 * high, "a dot in the middle and rounded ticks"
        assert len(layout["xaxis"]["ticktext"]) == 1
    left = replace(history_of(tmp_path, 0), left_out={"not_valid": ["a"]})
    wording(left_out_sentences(left))


def test_rows_come_and_go(tmp_path: Path) -> None:
    both = scenario(repeats=1)
    for number in range(16):
        history_run(
            tmp_path / "runs", number, 11.0 if number >= 12 else 10.0, made_of=both if 4 <= number != 9 else ONE
        )
    a, b = history_of(tmp_path, 15).series
    assert (a.server, len(a.points), a.left_out) == ("a", 16, {})
    assert (b.server, len(b.points)) == ("b", 11)
    assert b.left_out == {"no_row": ["run-00", "run-01", "run-02", "run-03", "run-09"]}
    assert [level.first for level in b.levels] == ["run-04", "run-12"]
    found = history_of(tmp_path, 12)
    assert [(row.server, row.word, row.runs, row.since) for row in found.series] == [
        ("a", "slower", 12, "run-00"),
        ("b", "slower", 7, "run-04"),
    ]


def gate_shares(runs: int, spread: float, factor: float) -> dict[int, float]:
    """The share of each exit code of a run that takes `factor` as long, after so many equal ones."""
    dice, trials, codes = np.random.default_rng(3), draws(1000), Counter[int]()
    for _ in range(trials):
        values = 10 * np.exp(dice.normal(0, spread, runs + 1)) * np.where(np.arange(runs + 1) == runs, factor, 1.0)
        points = [Point(run=str(at), started_wall_s=float(at), value=float(value)) for at, value in enumerate(values)]
        made = Series(server="a", load="x", metric="wall", points=points, levels=[], left_out={})
        codes[int(gate_code([_with_gate(_decide(made, str(runs), 1), TOLERANCE).gate]))] += 1
    return {code: codes[code] / trials for code in (0, 4, 5)}


@pytest.mark.parametrize(
    ("runs", "spread", "passes"), [(2, 0.01, 0.0), (5, 0.01, 0.97), (5, 0.02, 0.85), (10, 0.02, 0.93)]
)
def test_the_gate_of_a_history(runs: int, spread: float, passes: float) -> None:
    equal, slower = gate_shares(runs, spread, 1.0), gate_shares(runs, spread, 1.1)
    few = scatter(0.05, draws(1000))
    assert equal[0] >= passes - 2 * few and equal[4] == 0
    assert slower[0] <= 0.03 + few


def in_folder(folder: Path) -> Callable[..., tuple[int, Any]]:
    def call(*args: str) -> tuple[int, Any]:
        done = harness(*args, cwd=folder)
        assert done.err == ""
        return done.code, json.loads(done.out) if "json" in args else done.out

    return call


def test_the_command_line(stepped: Path) -> None:
    call = in_folder(stepped)
    code, found = call("compare", "--history", "run-11", "--format", "json")
    assert (code, found["change_points"][0]["after"]) == (5, "run-08")
    code, gated = call("compare", "--history", "run-08", "--format", "json")
    (row,) = gated["series"]
    assert (code, row["word"], row["gate"], row["runs"], row["window"]) == (5, "slower", "size_unknown", 8, 1)
    code, gated = call("compare", "--history", "run-08", "--tolerance", "5%", "--format", "json")
    (row,) = gated["series"]
    assert (code, row["word"], row["gate"], row["tolerance"]) == (ExitCode.FAILED, "slower", "slower", 0.05)
    assert [one["key"] for one in gated["differences"]] == ["servers.a.image_digest"]
    assert [call("compare", "--history", f"run-{n:02}")[0] for n in (3, 9, 11)] == [0, 5, 5]
    code, text = call("compare", "--history", "run-10", "--tolerance", "5", "--format", "markdown")
    assert (code, "| servers.a.image\\_digest | sha256:1111 | sha256:2222 |" in text) == (4, True)
    code, text = call("compare", "--history", "run-08", "--tolerance", "5", "--format", "junit")
    assert (code, '<failure type="slower"' in text) == (4, True)
    code, text = call("compare", "--history", "run-08", "--format", "junit")
    assert (code, '<skipped type="size_unknown"' in text) == (5, True)
    code, text = call("compare", "--history", "run-11")
    assert (code, "Change point: run-07 → run-08" in text) == (5, True)
    code, page = call("compare", "--history", "run-11", "--format", "html")
    assert (code, page) == (5, history_html(history_of(stepped)))
    for wrong in ("--history nothing", "--history run-01 run-02"):
        done = harness("compare", *wrong.split(), cwd=stepped)
        assert (done.code, done.out) == (1, "")
