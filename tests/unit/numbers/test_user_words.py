"""Whether a server keeps its users apart, by made records."""

from pathlib import Path
from typing import Any

import pytest

from harness.numbers.user_words import Isolation, isolation_of, isolation_reasons
from harness.records.records import Request
from harness.records.run_data import CellData, load
from harness.scenario.plan import Cell
from tests.support.made_runs import request, scenario, write_made_run

AT_S = request().sent_s


def cell(folder: Path, *requests: dict[str, Any]) -> CellData:
    """A cell with these requests, each 1.5 s long."""

    def made(planned: Cell, process: int, at_s: float) -> list[Request]:
        common = {"cell": planned.id, "load": planned.load, "process": process}
        return [request(id=str(place), index=place, **common, **fields) for place, fields in enumerate(requests)]

    write_made_run(folder / "run", requests=made, made_of=scenario(repeats=1))
    return next(iter(load(folder / "run").cells.values()))


def test_words_are_counted_also_of_failed_answers(tmp_path: Path) -> None:
    data = cell(
        tmp_path,
        {"user": 0, "own_word": True}, {"user": 1, "own_word": False}, {"user": 1},
        {"user": 2, "own_word": True, "foreign_user": 0}, {"user": 3, "error": "disconnect", "foreign_user": 1},
    )  # fmt: skip
    assert isolation_of([data]) == Isolation(answers=3, own=2, foreign=2)


def test_without_words_nothing_is_known(tmp_path: Path) -> None:
    data = cell(tmp_path, {"user": 0}, {"user": 1})
    assert isolation_of([data]) is None and list(isolation_reasons(data)) == []


def test_a_reason_names_both_users_their_requests_times_and_cache(tmp_path: Path) -> None:
    data = cell(
        tmp_path,
        {"user": 3, "sent_s": AT_S, "cached_tokens": 5, "prompt_tokens": 8},
        {"user": 8, "sent_s": AT_S + 1, "own_word": False, "foreign_user": 3},
        {"user": 3, "sent_s": AT_S + 9, "own_word": True},
    )
    (reason,) = isolation_reasons(data)
    (leak,) = reason.values["leaks"]
    assert (reason.code, reason.values["answers"], reason.values["foreign"]) == ("users_mixed", 2, 1)
    assert (leak["user"], leak["other"], leak["index"], leak["sent_s"], leak["cached_tokens"]) == (8, 3, 1, 1.0, None)
    assert leak["of"] == {
        "user": 3, "index": 0, "sent_s": 0.0, "ended_s": 1.5, "cached_tokens": 5, "prompt_tokens": 8,
        "at_the_same_time": True,
    }  # fmt: skip


@pytest.mark.parametrize(("at_s", "same_time"), [(-0.5, True), (-5.0, False)])
def test_the_other_request_is_the_last_one_before_the_end(tmp_path: Path, at_s: float, same_time: bool) -> None:
    leak = {"user": 1, "sent_s": AT_S + 10, "foreign_user": 0}
    data = cell(tmp_path, {"user": 0, "sent_s": AT_S}, {"user": 0, "sent_s": AT_S + 10 + at_s}, leak)
    (reason,) = isolation_reasons(data)
    other = reason.values["leaks"][0]["of"]
    assert (other["index"], other["at_the_same_time"]) == (1, same_time)


@pytest.mark.parametrize(
    ("own", "answers", "foreign", "tested"),
    [(20, 100, 0, True), (19, 100, 0, False), (0, 0, 0, False), (0, 100, 1, True)],
)
def test_a_model_that_repeats_no_words_has_not_been_tested(own: int, answers: int, foreign: int, tested: bool) -> None:
    assert Isolation(answers=answers, own=own, foreign=foreign).is_tested is tested
