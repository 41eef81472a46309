"""What the commands that compare refuse, say first, and suggest."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.units import read_count
from harness.numbers.comparison import Verdict
from harness.numbers.gate import with_gate
from harness.questions.history.decide import Point, Series
from harness.questions.history.page import outcome_sentence
from harness.report.verdict_text import gate_answer, gate_word, verdict_sentence, verdict_style
from harness.scenario import Load, Server
from tests.support.command import called
from tests.support.made_runs import scenario, served_by, write_made_run
from tests.support.wording import Wording

ONE = scenario(servers={"a": Server(template="vllm-cpu")}, repeats=1)
HALVES = {
    load: Load(user="batch", batch_size=size, requests=8, output_tokens=11) for load, size in (("x", 8), ("y", 4))
}


def two_a_side(folder: Path, factor: float = 1.3) -> None:
    for name, wall_s in (("a1", 10.0), ("a2", 10.2), ("b1", 10 * factor), ("b2", 10.2 * factor)):
        write_made_run(folder / "runs" / name, lambda cell, wall_s=wall_s: wall_s, made_of=ONE)  # type: ignore[misc]


def test_a_run_of_one_server_has_no_tolerance_and_is_no_baseline_of_itself(tmp_path: Path, wording: Wording) -> None:
    two_a_side(tmp_path)
    done = called("report", "a1", "--tolerance", "10%", cwd=tmp_path)
    assert (done.code, done.out) == (1, "") and "--tolerance" in done.err
    wording(done.err)
    own = ("--baseline", "a1", "--check", "ttft_p50 <= 1.1 * baseline")
    done = called("report", "a1", *own, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    wording(done.err)
    assert called("report", "a2", *own, cwd=tmp_path).code in (0, 5)


def test_sides_that_are_mixed_up_are_refused(tmp_path: Path, wording: Wording) -> None:
    two_a_side(tmp_path)
    done = called("compare", "a1", "a2", "--against", "b1", "b2", cwd=tmp_path)
    assert done.code == 1 and "b2" in done.err
    wording(done.err)
    assert "--against b1 --against b2" in done.err
    for given in (("a1", "a2", "--against", "b1", "--against", "b2"), ("--against", "b1", "a1", "a2")):
        assert called("compare", *given, cwd=tmp_path).code == 5
    other = scenario(servers={"c": Server(template="vllm-cpu")}, repeats=1)
    write_made_run(tmp_path / "runs" / "other", made_of=other)
    done = called("compare", "a1", "a2", "--against", "other", cwd=tmp_path)
    assert done.code == 1
    wording(done.err)


def test_a_load_that_only_one_run_has_is_named(tmp_path: Path, wording: Wording) -> None:
    less = replace(ONE, loads={"x": HALVES["x"]})
    write_made_run(tmp_path / "runs" / "less", made_of=less, workload_sha256="12" * 32)
    write_made_run(tmp_path / "runs" / "more", made_of=replace(ONE, loads=HALVES))
    done = called("compare", "less", "more", cwd=tmp_path)
    assert done.code == 1 and "loads.y" in done.err
    wording(done.err)


def test_loads_of_one_server_say_what_each_gives(tmp_path: Path, wording: Wording) -> None:
    made_of = replace(ONE, loads=HALVES, repeats=3)
    write_made_run(
        tmp_path / "runs" / "two", lambda cell: (10 if cell.load == "x" else 12.3) + 0.01 * cell.repeat, made_of=made_of
    )
    lead = called("report", "two", cwd=tmp_path).out.splitlines()[1]
    assert "12.32" in lead and "10.02" in lead
    wording(lead)


def test_a_server_that_died_is_the_answer_and_the_advice(tmp_path: Path, wording: Wording) -> None:
    write_made_run(tmp_path / "runs" / "died", made_of=ONE, served=lambda cell: served_by(exit_code=1))
    done = called("report", "died", cwd=tmp_path)
    assert done.code == 3
    wording(done.out.splitlines()[1])
    assert "logs/r1-a-x.server.log" in done.out
    done = called("plan", "died", "--items", "500k", cwd=tmp_path)
    assert "in_flight" not in done.err
    wording(done.err)


@pytest.mark.parametrize(
    ("given", "number"), [("500000", 500_000), ("500,000", 500_000), ("500k", 500_000), ("1.5M", 1_500_000)]
)
def test_a_number_of_items(given: str, number: int) -> None:
    assert read_count("--items", given) == number


@pytest.mark.parametrize("given", ["", "0", "-1", "5,00", "1.5", "k", "1e6", "9999999M"])
def test_what_is_no_number_of_items(given: str) -> None:
    with pytest.raises(HarnessError, match="--items"):
        read_count("--items", given)


def verdict(ratio: float, low: float, high: float, *, n: int, tolerance: float, provisional: bool = False) -> Verdict:
    found = Verdict(
        side="b / x", baseline="a / x", metric="wall", ratio=ratio, low=low, high=high, p=0.001, n=(n, n),
        word="slower" if high < 1 else "inconclusive", provisional=provisional,
    )  # fmt: skip
    return with_gate(found, tolerance, provisional=False)


def test_one_scale_and_a_label_that_agrees_with_the_text() -> None:
    found = verdict(1 / 1.3, 1 / 1.4, 1 / 1.19, n=2, tolerance=0.1, provisional=True)
    assert (found.gate, verdict_style(found)) == ("provisional", "probably_slower")
    assert not re.search(r"\dx ", verdict_sentence(found) + gate_answer(found)), "percent alone"


def test_at_the_tolerance_the_advice_is_another_one(wording: Wording) -> None:
    at_it = verdict(1 / 1.1, 1 / 1.3, 0.99, n=2, tolerance=0.1)
    assert (at_it.gate, at_it.gate_needed) == ("size_unknown", None)
    assert "--tolerance" in gate_answer(at_it)
    wording(gate_answer(at_it))
    assert verdict(1 / 1.05, 1 / 1.2, 0.99, n=2, tolerance=0.1).gate_needed == 5
    assert "99.99 %" in gate_answer(verdict(1 / 1.3, 1 / 1.4, 1 / 1.2, n=2, tolerance=0.9999))


def test_only_a_proven_verdict_is_slower_without_a_doubt(wording: Wording) -> None:
    proven = verdict(1 / 1.1, 1 / 1.3, 0.97, n=5, tolerance=0.1)
    provisional = verdict(1 / 1.1, 1 / 1.3, 0.97, n=5, tolerance=0.1, provisional=True)
    corrected = replace(proven, word="inconclusive", reason="corrected", p=0.119, comparisons=3)
    shown = [(gate_answer(one).split(":")[0], gate_word(one)) for one in (proven, provisional, corrected)]
    probably = ("Probably slower", "probably slower (size not known)")
    assert shown == [("Slower", "slower (size not known)"), probably, probably]
    assert "p-value is 0.12" in gate_answer(corrected)
    wording(gate_answer(corrected))


def test_a_history_that_varies_too_much_names_its_spread(wording: Wording) -> None:
    points = [Point(run=f"r{n}", started_wall_s=n, value=8.0 + n) for n in range(6)]
    series = Series(
        server="a", load="x", metric="wall", points=points, levels=[], left_out={}, value=13.0, runs=5, since="r0",
        ratio=1.0, ratio_low=0.6, ratio_high=1.6, needed=None,
    )  # fmt: skip
    text = outcome_sentence(series, "r5")
    assert "8.00" in text and "12.00" in text and "100" not in text
    wording(text)
