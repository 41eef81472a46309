"""Same answers: the interval, flips above the noise, the word, and how often it is wrong."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from typer import Exit

from harness.cli.common import exit_after_answers
from harness.numbers.comparison import Comparison, SameAnswers
from harness.numbers.known_answers import (
    KnownAnswer,
    answers_doubt,
    compare_answers,
    interval_word,
    paired_interval,
    tango_interval,
)
from harness.questions.compare.page import comparison_page, comparison_xml
from harness.questions.compare.sides import compare_runs
from harness.questions.joint import analyse
from harness.questions.report import junit_cases
from harness.questions.report.page import run_page
from harness.questions.same_answers.page import answers_charts, answers_sentence
from harness.records.manifest import read_run
from harness.records.records import Request
from harness.report.markdown import render
from harness.scenario import Load, Server
from harness.scenario.behaviour import Structured, check_answer, read_answer
from harness.scenario.plan import Cell, plan
from tests.support.made_runs import request, scenario, write_made_run
from tests.support.nightly import draws, room
from tests.support.wording import Wording

Side = dict[int, list[KnownAnswer]]


def side(texts: list[list[str]], right: str = "42") -> Side:
    """The answers to questions whose right answer is `right`."""
    return {number: [KnownAnswer(text, text == right) for text in texts] for number, texts in enumerate(texts)}


def found(own: Side, base: Side) -> SameAnswers:
    result = compare_answers(own, base, ("own", "base"))
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("gained", "lost", "n", "low", "high"),
    [  # without a change its ends are z² / (n + z²), that of Wilson
        (0, 0, 44, -0.0803, 0.0803),
        (0, 0, 1000, -0.0038, 0.0038),
        (12, 40, 1000, -0.0432, -0.0144),
        (40, 12, 1000, 0.0144, 0.0432),
    ],
)
def test_the_interval_is_tangos(gained: int, lost: int, n: int, low: float, high: float) -> None:
    assert tango_interval(gained, lost, n) == pytest.approx((low, high), abs=5e-5)


def test_what_a_server_changes_when_asked_again_is_no_flip() -> None:
    steady, noisy = [["42", "42"]] * 100, [["42", "42"], ["42", "7"], ["7", "42"], ["7", "7"]] * 25
    same = found(side(noisy), side(noisy))
    assert (same.noise, same.right, same.difference) == ((0.5, 0.5), (0.5, 0.5), 0.0)
    assert same.flips == pytest.approx(-0.25) and same.flips_low is not None  # the pairs of one question go together
    other = found(side([["7", "7"]] * 4 + steady[4:]), side(steady))
    assert (other.differ, other.noise, other.flips, other.lost, other.gained) == (0.04, (0.0, 0.0), 0.04, 4, 0)
    equal = found(side(steady), side(steady))
    assert (equal.flips, equal.flips_low, equal.word) == (0.0, 0.0, "inconclusive")  # 100 questions are too few
    assert equal.flips_high == pytest.approx(1 - 0.05**0.01)


def test_another_wrong_answer_is_a_flip_and_no_loss() -> None:
    other = found(side([["7", "7"]] * 10), side([["8", "8"]] * 10))
    assert (other.differ, other.flips, other.difference, other.lost) == (1.0, 1.0, 0.0, 0)


def test_answers_asked_once_have_no_noise_and_cut_ones_no_verdict() -> None:
    once = found(side([["42"]] * 2000), side([["42"]] * 2000))
    assert (once.noise, once.flips, once.word) == ((None, None), None, "same")
    cut = {number: [KnownAnswer("42", True, number % 10 == 0)] * 2 for number in range(2000)}
    assert (found(cut, cut).cut, found(cut, cut).word) == (0.1, "inconclusive")
    assert compare_answers(side([["42"]]), {7: [KnownAnswer("42", True)]}, ("a", "b")) is None


def free(texts: list[str], right: int) -> Side:
    """Answers to questions of which each has another right answer; the first `right` are right. Asked twice."""
    return {
        number: [KnownAnswer(f"right {number}" if number < right else text, number < right)] * 2
        for number, text in enumerate(texts)
    }


def letters(texts: list[str]) -> Side:
    """Answers to questions with four choices, whose right ones are A, B, C, D in turn. Asked twice."""
    return {
        number: [KnownAnswer(text, text == "ABCD"[number % 4])] * 2 for number, text in enumerate(texts)
    }  # fmt: skip


REFUSAL, OTHER = ["I cannot help"] * 1000, ["I am sorry"] * 1000
NONSENSE = [f"x{number}" for number in range(1000)]
GUESSED = np.random.default_rng(3).choice(list("ABCD"), (2, 1000)).tolist()


@pytest.mark.parametrize(
    ("own", "base", "word", "code"),
    [
        (free(REFUSAL, 0), free(OTHER, 0), "inconclusive", "answers_guessed"),
        (free(REFUSAL, 0), free(REFUSAL, 0), "inconclusive", "answers_guessed"),  # nothing flips, and nothing is right
        (free(NONSENSE, 3), free(REFUSAL, 0), "inconclusive", "answers_guessed"),
        (free(REFUSAL, 290), free(OTHER, 280), "inconclusive", "answers_wrong"),
        (free(REFUSAL, 20), free(OTHER, 900), "worse", None),  # it broke
        (free(REFUSAL, 0), free(OTHER, 150), "worse", None),  # the baseline is weak, and does not guess
        (free(REFUSAL, 500), free(NONSENSE, 500), "same", None),  # half of the answers flip
        (free(REFUSAL, 499), free(NONSENSE, 499), "inconclusive", "answers_flip"),
        (free(OTHER, 900), free(REFUSAL, 0), "inconclusive", "answers_flip"),
        (letters(["A"] * 1000), letters(["B"] * 1000), "inconclusive", "answers_guessed"),
        (letters(GUESSED[0]), letters(GUESSED[1]), "inconclusive", "answers_guessed"),
        (letters(["?"] * 1000), letters(GUESSED[0]), "inconclusive", "answers_guessed"),  # 25 % are guessed
        (letters(GUESSED[0]), letters(["A", "B", "C", "D"] * 250), "worse", None),
    ],
)
def test_same_needs_right_answers_and_worse_a_baseline_that_does_not_guess(
    own: Side, base: Side, word: str, code: str | None
) -> None:
    result = found(own, base)
    assert (result.word, result.reason and result.reason.code) == (word, code)


def test_the_cause_names_what_all_answers_have_in_common() -> None:
    reason = found(free(REFUSAL, 0), free(OTHER, 0)).reason
    assert reason is not None and reason.values == {"right": 0.0, "guess": 0.5, "alike": 1.0}
    nonsense = answers_doubt(free(NONSENSE, 200))
    assert nonsense is not None and nonsense.values == {"right": 0.2, "alike": 0.001}
    halves = answers_doubt(side([["42"], ["7"]] * 500))
    assert halves is not None and (halves.code, halves.values["guess"]) == ("answers_guessed", 0.5)


@pytest.mark.parametrize("right", [1, 3, 30])
def test_few_questions_are_no_doubt(right: int) -> None:
    """All of a few questions right is no guess, nor are 30 of 100."""
    assert answers_doubt(free(NONSENSE[: min(right, 100)] if right < 30 else NONSENSE[:100], right)) is None


def drawn(random: np.random.Generator, right: float, lost: float, gained: float) -> SameAnswers:
    """The verdict on two sides drawn anew: 1,000 questions twice, 1 % of the answers change when asked again.

    Of the wrong answers of the two sides, half differ.
    """
    base, draw, differs = random.random(1000) < right, random.random(1000), random.random(1000) < 0.5
    own = np.where(base, draw >= lost / right, draw < gained / (1 - right))
    keys = random.integers(0, 400, 1000).tolist()
    sides = []
    for place, rights in enumerate((own, base)):
        again = rights[:, None] != (random.random((1000, 2)) < 0.01)
        sides.append(
            {
                number: [
                    KnownAnswer(f"r{keys[number]}" if one else f"w{number}-{place * differs[number]}", bool(one))
                    for one in again[number]
                ]
                for number in range(1000)
            }
        )
    return found(*sides)


@pytest.mark.parametrize(
    ("right", "lost", "gained", "word", "share"),
    [
        (0.35, 0.03, 0.03, "same", 0.90),
        (0.50, 0.03, 0.03, "same", 0.90),
        (0.90, 0.03, 0.03, "same", 0.90),
        (0.90, 0.07, 0.01, "worse", 0.80),
        (0.50, 0.07, 0.01, "worse", 0.80),
        (0.90, 0.88, 0.00, "worse", 1.00),
        (0.20, 0.03, 0.03, "inconclusive", 1.00),
    ],
)
def test_the_words_of_the_method_page(right: float, lost: float, gained: float, word: str, share: float) -> None:
    random, count = np.random.default_rng(1), draws(100)
    seen = Counter[str](drawn(random, right, lost, gained).word for _ in range(count))
    assert seen[word] >= (share - room(share, count)) * count, seen
    assert word == "inconclusive" or not seen["worse" if word == "same" else "same"]


def words(lost: float, gained: float, noise: float, trials: int, n: int = 1000) -> Counter[str]:
    """Verdicts on a side with so much less right answers, `gained` - `lost` of all questions, asked twice.

    80 % are right. Each answer, right or wrong, changes with `noise`, which brings the two sides nearer: the shares of
    questions are those with which the right answers still differ by `gained` - `lost`.
    """
    random, seen = np.random.default_rng(1), Counter[str]()
    net = (lost - gained) / (1 - 2 * noise)
    lost, gained = (max(lost + gained, net) + net) / 2, (max(lost + gained, net) - net) / 2
    for _ in range(trials):
        base, draw = random.random(n) < 0.8, random.random(n)
        own = np.where(base, draw >= lost / 0.8, draw < gained / 0.2)
        rights = [(side[:, None] != (random.random((n, 2)) < noise)).mean(axis=1) for side in (own, base)]
        seen[interval_word(*paired_interval(rights[0] - rights[1]))] += 1
    return seen


def test_noise_alone_brings_no_flips() -> None:
    random = np.random.default_rng(5)
    sides = [side(np.where(random.random((5000, 2)) < 0.02, "7", "42").tolist()) for _ in range(2)]
    flips = found(*sides)
    assert flips.flips == pytest.approx(0.0, abs=0.004)
    assert all(share == pytest.approx(0.039, abs=0.006) for share in flips.noise)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_error_rates_are_those_of_the_method_page(noise: float) -> None:
    assert words(0.045, 0.015, noise, 100)["worse"] <= 7  # on the bound: 2.4 of 100
    assert words(0.08, 0.02, noise, 100)["worse"] >= 72  # 6 points: 83 to 88 of 100


@pytest.mark.nightly  # a minute
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_a_loss_on_the_bound_is_seldom_called_worse_and_one_of_six_points_mostly(noise: float) -> None:
    for lost, gained in ((0.03, 0.0), (0.045, 0.015), (0.06, 0.03)):
        found = words(lost, gained, noise, 1000)
        assert found["worse"] <= 50 and found["same"] <= 50
    for lost, gained in ((0.06, 0.0), (0.07, 0.01), (0.08, 0.02)):
        assert words(lost, gained, noise, 1000)["worse"] >= 800


@pytest.mark.parametrize(
    ("text", "right", "read"),
    [
        ("The answer is 42.", "42", "42"),
        ("30 + 12 = **42**", "42", "42"),
        ("1,234", "1234", "1234"),
        ("From 3-4: -5", "-5", "-5"),
        ("It is 2011-05-13.", "2011-05-13", "2011-05-13"),
        ("Answer: **B**", "B", "b"),
        ("B) Chen", "B", "b) chen"),
        ("a , b,C.", "a, b, c", "a,b,c"),
        ('```json\n{"b": 1, "a": 2}\n```', '{"a": 2, "b": 1}', '{"a": 2, "b": 1}'),
        ("<think>41</think>\n42", "42", "42"),
        ("no JSON", '{"a": 2}', "no json"),
        ("", "x", ""),
        ("Some  Text", None, "some text"),
    ],
)
def test_an_answer_is_read_in_one_spelling(text: str, right: str | None, read: str) -> None:
    assert read_answer(text, right) == read


def test_a_right_answer_is_recognised_and_the_digest_is_of_the_reading() -> None:
    form = Structured(known="computed")
    first, second, wrong = (check_answer(form, [], "42", text) for text in ("42", "It is 42.", "43"))
    assert (first.right, second.right, wrong.right) == (True, True, False)
    assert first.digest == second.digest != wrong.digest
    assert check_answer(form, [], "x", "  ").valid is False


def asked(wrong: dict[str, int]) -> Callable[[Cell, int, float], list[Request]]:
    """Requests of a cell: 1,000 questions twice, so many of them wrong by server."""

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        return [
            request(
                id=f"{cell.id}-{index}", cell=cell.id, load=cell.load, process=process, index=index,
                sent_s=start_s + index, finish="stop", fixed_length=False,
                item=index % 1000, answer_valid=True,
                answer_right=index % 1000 >= wrong[cell.server],
                answer_digest="right" if index % 1000 >= wrong[cell.server] else "wrong",
            )
            for index in range(2000)
        ]  # fmt: skip

    return requests


KNOWN = scenario(
    servers={"a": Server(template="vllm-cpu"), "b": Server(template="vllm-cpu")},
    loads={"x": Load(user="batch", requests=2000, output="natural", answer=Structured(known="computed"))},
    repeats=1,
)


def test_a_run_and_a_comparison_notice_wrong_answers(tmp_path: Path) -> None:
    write_made_run(tmp_path / "one", made_of=KNOWN, requests=asked({"a": 50, "b": 130}))
    summary = analyse(tmp_path / "one").summary
    (verdict,) = summary.same_answers
    assert (verdict.side, verdict.baseline, verdict.word, verdict.lost, verdict.gained) == ("b", "a", "worse", 80, 0)
    assert verdict.right == (0.87, 0.95) and verdict.flips == pytest.approx(0.08)
    assert summary.comparison is None  # their speed is not compared
    answers = summary.rows[0].pooled.answers
    assert answers is not None and (answers.right_share, answers.changed_share) == (0.95, 0.0)
    text = render(run_page(summary, read_run(tmp_path / "one")))
    assert "WORSE" in text and "(-8.0)" in text
    write_made_run(tmp_path / "two", made_of=KNOWN, requests=asked({"a": 50, "b": 50}), git_commit="abd")
    comparison = compare_runs([[tmp_path / "one"], [tmp_path / "two"]])
    seen = {one.side: (one.word, one.difference) for one in comparison.same_answers}
    assert seen == {"a (two)": ("same", 0.0), "b (two)": ("same", 0.08)}
    assert "b (two)" in render(comparison_page(comparison))


def failing(cells: tuple[str, ...]) -> Callable[[Cell, int, float], list[Request]]:
    """Requests of which 60 % fail in some cells; the others have right answers."""

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        made = asked({"a": 50, "b": 50})(cell, process, start_s)
        fails = [cell.id in cells and number % 5 < 3 for number in range(len(made))]
        return [
            replace(one, error="http", message="HTTP 500", answer_right=None, answer_digest=None) if fail else one
            for one, fail in zip(made, fails, strict=True)
        ]

    return requests


def test_answers_of_cells_that_are_not_valid_do_not_count(tmp_path: Path, wording: Wording) -> None:
    names = [cell.id for cell in plan(KNOWN) if cell.server == "b"]
    run = write_made_run(tmp_path / "one", made_of=KNOWN, requests=failing(tuple(names)))
    summary = analyse(tmp_path / "one").summary
    (verdict,) = summary.same_answers
    assert (verdict.word, verdict.questions, verdict.reason and verdict.reason.code) == (
        "inconclusive", 0, "answers_not_valid",
    )  # fmt: skip
    assert (verdict.difference, verdict.low, verdict.differ, verdict.right) == (None, None, None, (None, None))
    assert [(reason.code, reason.cell) for reason in verdict.left_out] == [("error_rate", names[0])]
    assert ": same" not in render(run_page(summary, run)) and "skipped" in junit_cases.render(summary, run)
    wording(answers_sentence(verdict))
    (chart,) = answers_charts(summary)
    assert chart.figure["data"] == [] and len(chart.body[0]) == len(chart.head)


def test_a_verdict_on_the_valid_cells_names_those_left_out(tmp_path: Path, wording: Wording) -> None:
    twice = replace(KNOWN, repeats=2)
    names = [cell.id for cell in plan(twice) if cell.server == "b"]
    write_made_run(tmp_path / "one", made_of=twice, requests=failing((names[1],)))
    (verdict,) = analyse(tmp_path / "one").summary.same_answers
    assert (verdict.word, verdict.questions, verdict.right) == ("same", 1000, (0.95, 0.95))
    assert [reason.cell for reason in verdict.left_out] == [names[1]]
    wording(answers_sentence(verdict))


def test_the_verdicts_of_a_comparison_are_in_the_order_of_the_scenario(tmp_path: Path) -> None:
    servers = {name: Server(template="vllm-cpu") for name in ("gamma", "b", "zeta", "a", "delta")}
    many = replace(KNOWN, servers=servers)
    for name, commit in (("one", "abc"), ("two", "abd")):
        right = asked(dict.fromkeys(servers, 50))
        write_made_run(tmp_path / name, made_of=many, requests=right, git_commit=commit)
    found = compare_runs([[tmp_path / "one"], [tmp_path / "two"]]).same_answers
    assert [one.side for one in found] == [f"{name} (two)" for name in servers]


def test_the_answer_of_one_server_says_that_its_answers_were_cut(tmp_path: Path) -> None:
    def cut(cell: Cell, process: int, start_s: float) -> list[Request]:
        return [replace(one, finish="length") for one in asked({"a": 2000})(cell, process, start_s)]

    one = replace(KNOWN, servers={"a": Server(template="vllm-cpu")})
    write_made_run(tmp_path / "one", made_of=one, requests=cut)
    summary = analyse(tmp_path / "one").summary
    (row,) = summary.rows
    assert row.pooled.answers is not None and row.pooled.answers.cut_share == 1.0
    assert [(note.code, note.values) for note in summary.notes if note.code.startswith("answers")] == [
        ("answers_cut", {"cut": 1.0})
    ]


def test_a_single_run_without_right_answers_says_so(tmp_path: Path) -> None:
    one = replace(KNOWN, servers={"a": Server(template="vllm-cpu")})
    write_made_run(tmp_path / "one", made_of=one, requests=asked({"a": 1000}))
    summary = analyse(tmp_path / "one").summary
    (note,) = (note for note in summary.notes if note.code.startswith("answers"))
    assert (note.code, note.values["right"], note.values["alike"]) == ("answers_guessed", 0.0, 1.0)
    assert note.text in render(run_page(summary, read_run(tmp_path / "one")))
    write_made_run(tmp_path / "other", made_of=one, requests=asked({"a": 50}))
    assert not [note for note in analyse(tmp_path / "other").summary.notes if note.code.startswith("answers")]


def test_answers_without_a_verdict_are_skipped_in_junit_and_have_exit_code_5() -> None:
    unknown, worse = found(free(REFUSAL, 0), free(OTHER, 0)), found(free(REFUSAL, 0), free(OTHER, 900))
    made: dict[str, Any] = {"metric": None, "comparisons": 0, "noise_floor": 0.02, "noise_source": [], "verdicts": []}
    page = comparison_xml(Comparison(**made, same_answers=[unknown, worse]))
    assert (page.count("<skipped"), page.count("<failure")) == (1, 1)
    with pytest.raises(Exit) as ended:
        exit_after_answers([unknown])
    assert ended.value.exit_code == 5
    exit_after_answers([worse])  # within a run it is the result; `compare` fails
