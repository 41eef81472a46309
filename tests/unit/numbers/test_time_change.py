"""Which part of a request's time changed."""

from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.measured import Distribution, Numbers
from harness.numbers.summary import CellSummary
from harness.numbers.time_change import main_part, time_changes
from harness.numbers.time_split import TimeSplit
from harness.records.samples import ServerLoad


def cell(e2e_s: float, ttft_s: float, tokens: int = 100, split: TimeSplit | None = None) -> CellSummary:
    streamed: dict[str, Any] = {
        "e2e": Distribution(n=10, mean=e2e_s), "ttft": Distribution(n=10, mean=ttft_s),
        "tpot": Distribution(n=10, mean=(e2e_s - ttft_s) / tokens),
    }  # fmt: skip
    numbers = Numbers(sent=10, succeeded=10, failed=0, unfinished=0, output_tokens=10 * tokens, **streamed)
    return CellSummary(id="c", server="s", load="l", repeat=1, numbers=numbers, server_load=ServerLoad(), time=split)


def parts(side: CellSummary, base: CellSummary) -> dict[str, float]:
    return {change.part: round(change.seconds, 6) for change in time_changes([side], [base])}


def test_the_servers_times_say_which_stage() -> None:
    base = cell(2.0, 0.5, split=TimeSplit(e2e_s=2.0, queue_s=0.1, prefill_s=0.3, decode_s=1.5, api_s=0.1))
    side = cell(2.6, 1.0, split=TimeSplit(e2e_s=2.6, queue_s=0.15, prefill_s=0.8, decode_s=1.55, api_s=0.1))
    assert parts(side, base) == {"prefill": 0.5, "queue": 0.05, "decode": 0.05, "api": 0.0, "tokens": 0.0}
    changes = time_changes([side], [base])
    assert main_part(changes) == "prefill" and sum(change.share for change in changes) == pytest.approx(1.0)


def test_without_them_the_client_says_first_token_or_decode() -> None:
    assert main_part(time_changes([cell(2.6, 1.1)], [cell(2.0, 0.5)])) == "first_token"
    assert main_part(time_changes([cell(2.6, 0.5)], [cell(2.0, 0.5)])) == "decode"


def test_longer_answers_are_no_slower_decode() -> None:
    base = cell(2.0, 0.5, tokens=100)
    longer = cell(0.5 + 1.5 * 1.4, 0.5, tokens=140)
    assert main_part(time_changes([longer], [base])) == "tokens"
    assert parts(longer, base) == {"tokens": 0.6, "decode": 0.0, "first_token": 0.0}


def test_what_is_not_known_names_no_part() -> None:
    plain = Numbers(sent=1, succeeded=1, failed=0, unfinished=0, e2e=Distribution(n=1, mean=1.0))
    silent = CellSummary(id="c", server="s", load="l", repeat=1, numbers=plain, server_load=ServerLoad())
    assert time_changes([silent], [cell(2.0, 0.5)]) == [] and main_part([]) is None
    assert time_changes([], [cell(2.0, 0.5)]) == [] and time_changes([cell(2.0, 0.5)], [cell(2.0, 0.5)]) == []


def test_a_cell_without_a_stage_does_not_hide_the_stages() -> None:
    def split(queue_s: float, api_s: float | None) -> TimeSplit:
        return TimeSplit(e2e_s=2.0 + queue_s, queue_s=queue_s, prefill_s=0.4, decode_s=1.5, api_s=api_s)

    base = [cell(2.1, 0.5, split=split(0.1, 0.1)) for _ in range(3)]
    side = [cell(2.2, 0.6, split=split(0.2, api_s)) for api_s in (0.1, None, 0.1)]
    assert main_part(time_changes(side, base)) == "queue"
    parts = {change.part: round(change.seconds, 6) for change in time_changes(side, base)}
    assert parts["api"] == 0.0
    rare = [cell(2.2, 0.6, split=split(0.2, api_s)) for api_s in (0.1, None, None)]
    assert "api" not in {change.part for change in time_changes(rare, base)}
    assert main_part(time_changes(rare, base)) == "queue"
    without = [*side[:1], cell(2.2, 0.6), cell(2.2, 0.6)]
    assert main_part(time_changes(without, base)) == "first_token", "most cells have no stages"


def test_loads_weigh_the_same_where_a_cell_has_no_stages() -> None:
    def of(load: str, e2e_s: float, queue_s: float | None) -> CellSummary:
        split = None
        if queue_s is not None:
            split = TimeSplit(e2e_s=e2e_s, queue_s=queue_s, prefill_s=0.4, decode_s=e2e_s - queue_s - 0.4, api_s=0.0)
        return replace(cell(e2e_s, 0.5, split=split), load=load)

    base = [of(load, e2e_s, 0.1) for load, e2e_s in (("a", 1.0), ("b", 9.0)) for _ in range(3)]
    side = [*base[:5], of("b", 9.0, None), of("a", 1.0, 0.1)]
    changes = {change.part: change.seconds for change in time_changes([*side[:-1], of("a", 1.3, 0.4)], base)}
    assert changes["decode"] == pytest.approx(0.0) and changes["queue"] > 0
