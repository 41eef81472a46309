"""The quality of answers, next to their speed, where rows are compared."""

from harness.analysis.derive import add_up
from harness.analysis.tally import AnswerTally, answers_of, prompts_of
from harness.analysis.validity import answer_difference as difference
from harness.judge.verdicts import metric_of
from harness.reasons import sentence
from harness.scenario import Load
from harness.scenario.behaviour import Structured
from harness.summary import Answers, PromptLengths
from tests.made_runs import request


def answers(valid: int, right: int | None = None) -> Answers:
    return Answers(checked=10, valid=valid, labelled=0 if right is None else 10, right=right)


def test_sides_that_are_worth_the_same_need_no_words() -> None:
    assert difference("a", [answers(9, 8)], "b", [answers(9, 8)]) is None
    assert difference("a", [answers(8), answers(10)], "b", [answers(9)]) is None  # 18 of 20 and 9 of 10
    assert difference("a", [None], "b", [answers(9)]) is None
    assert difference("a", [answers(9, 1)], "b", [answers(9)]) is None  # of one side nobody knows what is right


def test_sides_that_are_not_are_told_with_counts() -> None:
    note = difference("a", [answers(9, 8)], "b", [answers(10, 8)])
    assert note is not None and sentence(note) == (
        "the answers of a and b are not of equal quality: valid are 9 of 10 (90.0%) and 10 of 10 (100.0%). "
        "Speed alone does not say which of the two is better"
    )


def test_parts_of_a_file_are_counted_as_one() -> None:
    whole, first, second = AnswerTally(), AnswerTally(), AnswerTally()
    for index in range(8):
        one = request(
            index=index, answer_valid=index > 1, answer_right=index > 4, asked_prompt_tokens=10,
            prompt_tokens=15 if index != 6 else 19,
        )  # fmt: skip
        whole.add(one)
        (first if index < 3 else second).add(one)
    add_up(first, second)
    assert first == whole
    assert answers_of(whole) == Answers(checked=8, valid=6, valid_share=0.75, labelled=8, right=3, right_share=0.375)
    assert prompts_of(whole) == PromptLengths(requests=8, asked=80, got=124, added=5, otherwise=1)
    assert (answers_of(AnswerTally()), prompts_of(AnswerTally())) == (None, None)


def test_fixed_work_of_another_kind_is_compared_by_its_wall_time() -> None:
    def load(**more: object) -> Load:
        return Load(**({"user": "batch", "requests": 9} | more))  # type: ignore[arg-type]

    told = [load(output="natural", answer=Structured(choice="auto", send=send)) for send in ("grammar", "nothing")]
    assert metric_of(told) == "wall_s"
    assert metric_of([load(output="natural", answer=Structured(choice=form)) for form in ("auto", ["a", "b"])]) == (
        "output_tok_s"
    )
    assert metric_of([load(output="natural")]) == "output_tok_s"
    assert metric_of([load(endpoint="embeddings", output="natural")]) == "wall_s"
    assert metric_of([load(endpoint="embeddings"), load()]) == "output_tok_s"
    timed = Load(user="batch", duration_s=9, endpoint="embeddings")
    assert metric_of([timed, timed]) == "input_tok_s"
