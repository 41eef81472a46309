"""`harness expect --trace`: the least time of a recorded trace, compared with sums by hand."""

import json
from pathlib import Path

import pytest

from harness.base.errors import HarnessError
from harness.hardware.bounds import turn_floor
from harness.hardware.gpu_table import find_gpu
from harness.questions.expect.decide import Question
from harness.questions.expect.sources import answer
from harness.questions.expect.trace_time import TraceQuestion, trace_bound
from harness.records.manifest import ModelSize
from harness.workload.agent_traces.turn_tokens import TurnTokens, trace_turns
from tests.support.agent_traces import LIST_FILES, edge_rows, weka_file, weka_request, write_rows
from tests.support.command import harness

HALO = find_gpu("Strix Halo")  # 256 GB/s, 59.4 TFLOPS
SIZE = ModelSize(name="m", weights_bytes=16e9, read_bytes=16e9, params=27e9, kv_token_bytes=100_000)
LONG, SHORT = TurnTokens(2000, 0, 101, False), TurnTokens(2100, 2000, 1, False)


def prefill_s(tokens: int) -> float:
    return max(16e9 / 256e9, 2 * 27e9 * tokens / 59.4e12)


def decode_s(prompt: int, output: int) -> float:
    """Each token after the first reads the weights and the cache of all before it."""
    return sum((16e9 + 100_000 * (prompt + step)) / 256e9 for step in range(output - 1))


def test_the_time_of_turns_is_the_sum_of_their_bounds() -> None:
    found = trace_bound([[LONG], [SHORT]], SIZE, HALO)
    assert found.prefill_s == pytest.approx(prefill_s(2000) + prefill_s(100))
    assert found.decode_s == pytest.approx(decode_s(2000, 101))
    assert found.min_s == pytest.approx(found.prefill_s + found.decode_s)
    assert found.uncached_min_s == pytest.approx(prefill_s(2000) + prefill_s(2100) + decode_s(2000, 101))
    assert (found.conversations, found.turns, found.peak_tokens, found.estimated_turns) == (2, 2, 2101, 0)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (4100, 2000, 102)


def test_a_cached_prompt_computes_one_token_and_reads_the_weights_once() -> None:
    for cached in (500, 501, 10_000):
        found = turn_floor(SIZE, HALO, prompt=501, cached=cached, output=0)
        assert found == pytest.approx((16e9 / 256e9, 0.0))


def test_several_gpus_share_the_work() -> None:
    one, two = (trace_bound([[LONG]], SIZE, HALO, gpus=gpus).min_s for gpus in (1, 2))
    assert two == pytest.approx(one / 2)


def test_a_sliding_window_never_makes_the_bound_too_long() -> None:
    """The cache grows until the window is full, in the middle of the answer."""
    size = ModelSize(name="m", weights_bytes=1e9, read_bytes=1e9, kv_token_bytes=0, sliding_token_bytes=1e6, window=50)
    _, found_s = turn_floor(size, HALO, prompt=1, cached=0, output=101)
    true_s = sum((1e9 + 1e6 * min(1 + step, 50)) / 256e9 for step in range(100))
    assert 0.95 * true_s < found_s <= true_s


def test_turns_without_known_tokens_are_counted_as_unknown() -> None:
    found = trace_bound([[LONG, TurnTokens(None, 0, 5, False), TurnTokens(10, 0, None, False)]], SIZE, HALO)
    assert (found.turns, found.unknown_prompts, found.unknown_outputs, found.prompt_tokens) == (3, 1, 1, 2010)
    with pytest.raises(HarnessError):
        trace_bound([[TurnTokens(None, 0, None, False)]], SIZE, HALO)


def test_the_tokens_of_text_are_estimated(tmp_path: Path) -> None:
    """Two equal conversations: the second has its first prompt in the cache, too."""
    path = write_rows(tmp_path / "t.jsonl", [*edge_rows("a"), *edge_rows("b")])
    first, second = trace_turns(path, None, 1.0)
    tools = len(json.dumps(LIST_FILES, separators=(",", ":"))) + 2
    start = len("You paint.Paint the boat.") + tools
    middle = start + len("Which colours?" + "list_files" + '{"folder": "."}' + "look" + "{}" + "red.txt" + "a boat")
    end = middle + len("It is red.Blue, please.")
    assert [turn[:2] for turn in first] == [(start, 0), (middle, start), (end, middle)]
    assert [turn[:2] for turn in second] == [(start, start), (middle, middle), (end, end)]
    answers = [len("Which colours?" + "list_files" + '{"folder": "."}' + "look" + "{}"), len("It is red."), 9]
    assert [turn.output for turn in first] == answers, "the last has a limit of 9 tokens"
    assert all(turn.is_estimated for turn in first)
    assert len(list(trace_turns(path, 1, 1.0))) == 1


def test_long_answers_of_text_are_cut_as_the_workload_cuts_them(tmp_path: Path) -> None:
    rows = edge_rows()
    rows[1] = {**rows[1], "reasoning_content": "x" * 9000}
    ((turn, *_),) = trace_turns(write_rows(tmp_path / "t.jsonl", rows), None, 4.0)
    assert turn.output == 1024


def test_recorded_tokens_are_not_estimated(tmp_path: Path) -> None:
    """Blocks of 4 tokens: the second prompt starts with the two blocks of the first."""
    path = tmp_path / "w.json"
    requests = (weka_request(0, 9, [1, 2], api_time=1.0), weka_request(5, 17, [1, 2, 3, 4], api_time=1.0))
    path.write_text(json.dumps(weka_file(*requests)))
    (found,) = trace_turns(path, None, 4.0)
    assert found == [TurnTokens(9, 0, 10, False), TurnTokens(17, 8, 10, False)]


def test_what_cannot_be_answered_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", edge_rows())
    for question, trace in (
        (Question(gpu="Strix Halo"), path),
        (Question(model="27B"), path),
        (Question(model="27B", gpu="Strix Halo"), tmp_path / "gone"),
    ):
        with pytest.raises(HarnessError) as caught:
            answer(question, tmp_path, trace=TraceQuestion(trace))
        assert caught.value.what.startswith("--trace: ") and caught.value.next_step


def test_the_command(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", [*edge_rows("a"), *edge_rows("b")])
    asked = ("expect", "27B", "--bits", "Q4_K_M", "--gpu", "Strix Halo", "--trace", str(path))
    whole, part = (json.loads(harness(*asked, *more, "--json", cwd=tmp_path).out) for more in ((), ("--slice", "1")))
    assert [found["trace"]["turns"] for found in (whole, part)] == [6, 3]
    assert whole["trace"]["min_s"] <= whole["trace"]["uncached_min_s"]
    assert whole["trace"]["min_s"] == whole["trace"]["prefill_s"] + whole["trace"]["decode_s"]
    twice = json.loads(harness(*asked, "--characters-per-token", "2", "--json", cwd=tmp_path).out)
    assert twice["trace"]["prompt_tokens"] == pytest.approx(2 * whole["trace"]["prompt_tokens"], rel=0.05)
    assert harness(*asked, cwd=tmp_path).out.splitlines()[0] == whole["trace"]["sentence"]
    for option in ("--slice", "--characters-per-token"):
        done = harness("expect", "27B", "--gpu", "Strix Halo", option, "1", cwd=tmp_path)
        assert (done.code, done.err.startswith(f"error: {option}: ")) == (1, True)
