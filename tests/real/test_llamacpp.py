"""Real llama.cpp in a container: chats and bursts, and the same server through Docker Compose."""

import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from harness.records.records import Request
from tests.real.conftest import Say, Timed
from tests.real.parts import Ran, left_behind, llamacpp, run, write_scenario
from tests.support.command import reasons_but_slowness, stamped_by_kernel


def of_load(timed: Timed, load: str) -> list[Request]:
    return [record for record in timed.ran.records if record.load == load]


def test_the_run_is_valid_and_leaves_nothing_running(chatting: Timed, say: Say) -> None:
    ran = chatting.ran
    say(ran.said)
    assert ran.error == ""
    assert ran.code in (0, 3) and reasons_but_slowness(ran.folder) == []
    assert {cell.served_by.model for cell in ran.manifest.cells} == {"tiny"}
    assert left_behind(ran.folder) == []


def test_every_chat_request_left_one_good_record(chatting: Timed) -> None:
    records = of_load(chatting, "chat")
    good = [record for record in records if record.phase == "measured"]
    assert sorted((r.index, r.error, r.status) for r in good) == [(index, None, 200) for index in range(24)]
    assert {record.user for record in records} == {0, 1, 2}
    assert stamped_by_kernel(records)
    for record in records:
        assert record.chunks_s == sorted(record.chunks_s)
        assert record.asked_tokens == 32 and not record.fixed_length
        assert record.output_tokens is not None and 1 <= record.output_tokens <= 32


def test_prompts_grow_with_the_turns(chatting: Timed) -> None:
    conversations: dict[int | None, list[Request]] = defaultdict(list)
    for record in of_load(chatting, "chat"):
        conversations[record.conversation].append(record)
    assert None not in conversations and len(conversations) >= 6
    for turns in conversations.values():
        turns.sort(key=lambda record: record.turn or 0)
        assert [record.turn for record in turns] == list(range(1, len(turns) + 1))
        for before, after in pairwise(turns):
            assert before.prompt_tokens is not None and before.output_tokens is not None
            assert after.prompt_tokens is not None
            # The question and most of the answer come back. A piece of a character does not: it has no text.
            assert after.prompt_tokens > before.prompt_tokens + 40
    assert max(len(turns) for turns in conversations.values()) == 4


def test_an_agent_by_anthropics_api_reuses_its_context(chatting: Timed, say: Say) -> None:
    records = [record for record in of_load(chatting, "agent") if record.phase == "measured"]
    assert sorted((r.index, r.error, r.status, r.turn) for r in records) == [
        (i, None, 200, i % 3 + 1) for i in range(6)
    ]
    assert all(record.prompt_tokens and record.output_tokens and record.chunks_s for record in records)
    (row,) = [row for row in chatting.ran.summary.rows if row.load == "agent"]
    assert [one.requests for one in row.turns] == [2, 2, 2]
    for one in row.turns[1:]:
        assert one.cached_tokens and one.new_tokens and one.new_tokens > 30
    say(", ".join(f"turn {one.turn}: {one.recomputed_tokens} tokens computed again" for one in row.turns))


def test_bursts_have_the_length_that_was_asked_for(chatting: Timed) -> None:
    records = [record for record in of_load(chatting, "bursts") if record.phase == "measured"]
    assert sorted((r.index, r.error, r.output_tokens) for r in records) == [(i, None, 256) for i in range(60)]
    assert [record.chunks_s for record in records] == [[]] * 60  # not streamed: there is no TTFT
    sizes = Counter(record.batch for record in records)
    assert None not in sizes and max(sizes.values()) == 5


def test_the_servers_counter_agrees_exactly(chatting: Timed, say: Say) -> None:
    for cell in chatting.ran.summary.cells:
        own = sum(r.output_tokens or 0 for r in chatting.ran.records if r.cell == cell.id)
        counted = cell.server_load.generated_tokens
        say(f"{cell.id}: llamacpp:tokens_predicted_total went on by {counted}, records: {own}")
        assert counted == own


def test_the_report_advises_smaller_steps_where_long_prompts_stop_answers_and_they_help(
    tmp_path: Path, say: Say
) -> None:
    """A long prompt stops running answers for a step. How many tokens they get meanwhile depends on no clock."""
    scenario = write_scenario(
        tmp_path,
        "pauses",
        model="tiny",
        servers={
            "usual": llamacpp(parallel=4, ctx_size=16384),
            "small": llamacpp(parallel=4, ctx_size=16384, batch_size=256),
        },
        loads={"documents": {"user": "batch", "in_flight": 4, "requests": 20, "output_tokens": 16}},
        prompts={"tokens": 600},
    )
    ran = run(scenario)
    say(ran.said)
    # On a fast machine the pauses are shorter than the rule asks for; its unit tests need no machine.
    for one in [finding for finding in ran.summary.findings or [] if finding.code == "prompts_freeze_answers"]:
        assert one.rows[0] == "usual / documents"
        (text,) = one.actions[0].settings.values()
        assert re.fullmatch(r"batch_size: \d+", text) and 256 <= one.values["less"] < 2048
    usual, small = (tokens_of_others(ran, f"r1-{server}-documents") for server in ("usual", "small"))
    say(f"tokens of running answers while a prompt was computed, median: {usual:g} usually, {small:g} in small steps")
    assert small > 1.5 * usual


def tokens_of_others(ran: Ran, cell: str) -> float:
    """Of all requests of a cell the median of the chunks that others got from its sending to its first one."""
    records = [one for one in ran.records if (one.cell, one.phase) == (cell, "measured")]
    arrived = [(one.index, one.sent_s + chunk_s) for one in records for chunk_s in one.chunks_s]
    return float(
        np.median(
            [
                sum(other != one.index and 0 < at - one.sent_s < one.chunks_s[0] for other, at in arrived)
                for one in records
            ]
        )
    )


def test_the_report_advises_more_slots_that_keep_their_context(chatting: Timed) -> None:
    found = {one.code: one for one in chatting.ran.summary.findings or []}
    (action,) = found["queue_with_room"].actions
    assert action.settings == {"servers.llamacpp.variables": "parallel: 5\nctx_size: 20480"}  # the model's 4,096 each


def test_starts_with_nothing_compiled_and_with_what_was_compiled(tmp_path: Path, say: Say) -> None:
    """llama.cpp compiles nothing on a CPU, so both starts are alike; the volumes of the run come and go."""
    scenario = write_scenario(
        tmp_path,
        "starts",
        question="Why does it take so long to start?",
        model="tiny",
        servers={"cold": {**llamacpp(), "caches": "new"}, "warm": {**llamacpp(), "caches": "cold"}},
        loads={"one-user": {"user": "batch", "requests": 20, "output_tokens": 8}},
    )
    ran = run(scenario)
    say(ran.said)
    assert ran.code in (0, 3), ran.error
    starts = {start.server: start for start in ran.summary.starts}
    assert list(starts) == ["cold", "warm"]
    for start in starts.values():
        assert start.ready_s is not None and {"pull", "create", "process", "weights", "first answer"} <= set(
            start.phases
        )
        assert start.found_bytes is not None and start.first is not None
    assert [answer.code for answer in ran.summary.answers][:2] == ["startup", "startup_difference"]
    assert left_behind(ran.folder) == []
