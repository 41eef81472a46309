"""Which steps of a trace fit into a context: each is kept, too long, or after one that is too long."""

from pathlib import Path

import pytest

from harness.workload.agent_traces.context_fit import (
    StepTokens,
    fit_conversation,
    recorded_tokens,
    sum_fits,
)
from tests.support.agent_traces import made_files, read_all, read_weka, weka_request


@pytest.mark.parametrize(
    ("context", "kept", "too_long", "after", "state"),
    [
        (31, (0, 1, 2, 3, 4, 5), (), (), "fits"),  # the peak: 21 + 10
        (30, (0, 1, 3, 4, 5), (2,), (), "ends_early"),
        (23, (0, 3, 5), (1, 2, 4), (), "ends_early"),
        (22, (0, 3, 5), (1, 2, 4), (), "ends_early"),
        (21, (0, 3), (1, 2, 4, 5), (), "ends_early"),
        (18, (), (0, 1, 2, 4, 5), (3,), "left_out"),
    ],
)
def test_a_conversation_ends_at_the_first_step_that_is_too_long(
    tmp_path: Path, context: int, kept: tuple[int, ...], too_long: tuple[int, ...], after: tuple[int, ...], state: str
) -> None:
    made = read_all(made_files(tmp_path)["weka"])[0]
    fit = fit_conversation(made, context)
    assert (fit.kept, fit.too_long, fit.after, fit.state, fit.peak_tokens) == (kept, too_long, after, state, 31)
    assert sorted((*fit.kept, *fit.too_long, *fit.after)) == [0, 1, 2, 3, 4, 5]
    sums = [sum(pair) for pair in zip(*([tokens.prompt or 0, tokens.output or 0] for tokens in (
        fit.kept_tokens, fit.left_out_tokens)), strict=True)]  # fmt: skip
    assert sums == [9 + 17 + 21 + 8 + 14 + 12, 60]


def test_shorter_steps_after_a_long_one_are_not_sent(tmp_path: Path) -> None:
    """A context that was compacted: the third prompt is short again, but it needs the second answer."""
    made = read_weka(
        tmp_path, weka_request(0, 8, [1, 2]), weka_request(1, 80, list(range(20))), weka_request(2, 8, [1, 2])
    )
    fit = fit_conversation(made, 50)
    assert (fit.kept, fit.too_long, fit.after) == ((0,), (1,), (2,))
    assert (fit.kept_tokens, fit.left_out_tokens) == (StepTokens(8, 10), StepTokens(88, 20))


def test_an_empty_answer_takes_one_token(tmp_path: Path) -> None:
    made = read_weka(tmp_path, weka_request(0, 8, [1, 2], out=0))
    assert fit_conversation(made, 8).state == "left_out"
    assert fit_conversation(made, 9).state == "fits"


def test_unknown_tokens_are_kept_and_counted_or_estimated(tmp_path: Path) -> None:
    made = read_all(made_files(tmp_path)["edge-agentic"])[0]
    fit = fit_conversation(made, 10)
    assert (fit.kept, fit.unknown_steps, fit.peak_tokens, fit.kept_tokens) == (
        (0, 1, 2),
        3,
        None,
        StepTokens(None, None),
    )
    tools = len('[{"type":"function","function":{"name":"list_files","parameters":{"type":"object"}}}]')
    estimates = [-(-(characters + tools) // 4) for characters in (25, 83, 106)]
    answers = [-(-characters // 4) for characters in (45, 10, 25)]
    tokens = recorded_tokens(4.0)(made)
    assert tokens == [StepTokens(*pair) for pair in zip(estimates, answers, strict=True)]
    fit = fit_conversation(made, estimates[1] + answers[1], recorded_tokens(4.0))
    assert (fit.kept, fit.too_long, fit.unknown_steps) == ((0, 1), (2,), 0)


def test_the_sums_of_a_trace(tmp_path: Path) -> None:
    made = [read_all(path)[0] for path in made_files(tmp_path).values()]
    total = sum_fits(120, (fit_conversation(one, 120) for one in made))
    assert (total.fits, total.ends_early, total.left_out) == (3, 1, 1)  # copilot's first call takes 100 + 20
    assert (total.kept_steps, total.too_long_steps, total.after_steps, total.unknown_steps) == (3 + 6 + 4 + 1, 4, 1, 6)
    same = sum_fits(120, (fit_conversation(one, 120) for one in made))
    other = sum_fits(119, (fit_conversation(one, 119) for one in made))
    assert total == same and total.kept_sha256 != other.kept_sha256
    longer = sum_fits(121, (fit_conversation(one, 121) for one in made))
    assert longer.kept_sha256 == total.kept_sha256  # the same steps may be compared
