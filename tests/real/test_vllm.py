"""Real vLLM in a container: batching, the limit on sequences, exact counts, what the harness itself costs."""

import itertools
import math

import pytest

from harness.numbers.summary import CellSummary
from harness.records.records import Request, read_marks
from harness.records.samples import MetricsSample, read_metrics
from tests.real.conftest import BATCHES, LIMIT_GIB, SEQUENCES, SHARE, TOKENS, Say, Timed
from tests.real.parts import DTYPE, MAX_MODEL_LEN, Ran, left_behind, predicted
from tests.support.command import reasons_but_slowness, stamped_by_kernel
from tests.support.engines.paths import QWEN3_100M

CELLS = {f"r1-vllm-{load}": sizes for load, sizes in BATCHES.items()}  # size of a batch, measured requests


def of_cell(ran: Ran, cell: str) -> list[Request]:
    return [record for record in ran.records if record.cell == cell]


def measured(ran: Ran, cell: str) -> list[Request]:
    return [record for record in of_cell(ran, cell) if record.phase == "measured"]


def summary_of(ran: Ran, cell: str) -> CellSummary:
    return next(found for found in ran.summary.cells if found.id == cell)


def wall_s(ran: Ran, cell: str) -> float:
    value = summary_of(ran, cell).numbers.wall
    assert value is not None
    return value


def samples_of(ran: Ran, cell: str) -> list[MetricsSample]:
    return read_metrics(ran.folder / "metrics.jsonl")[cell]


def counter(ran: Ran, cell: str, name: str) -> float:
    """How far a counter of the server went on during a cell."""
    samples = samples_of(ran, cell)
    return samples[-1].values[name] - samples[0].values[name]


def test_the_run_is_valid_and_says_so(on_vllm: Timed, say: Say) -> None:
    ran = on_vllm.ran
    say(ran.said)
    assert ran.error == ""
    assert ran.code in (0, 3) and reasons_but_slowness(ran.folder) == []
    assert [cell.id for cell in ran.manifest.cells] == [f"r1-vllm-{load}" for load in ran.manifest.scenario.loads]
    assert not ran.summary.simulated
    assert {cell.served_by.model for cell in ran.manifest.cells} == {"qwen3-100m"}
    assert (ran.folder / "report.html").stat().st_size > 100_000
    assert left_behind(ran.folder) == []


def test_every_planned_request_left_one_good_record(on_vllm: Timed) -> None:
    for cell, (wave, planned) in CELLS.items():
        good = [(r.index, r.error, r.status, r.output_tokens, r.finish) for r in measured(on_vllm.ran, cell)]
        assert sorted(good) == [(index, None, 200, TOKENS, "length") for index in range(planned)]
        assert [r.error for r in of_cell(on_vllm.ran, cell) if r.phase == "warmup"] == [None] * wave


def test_chunks_carry_the_kernels_time(on_vllm: Timed) -> None:
    records = [record for record in on_vllm.ran.records if record.cell in CELLS]
    assert stamped_by_kernel(records)
    for record in records:
        assert 1 <= len(record.chunks_s) <= TOKENS  # vLLM may send what it has made meanwhile as one chunk
        assert record.headers_s is not None and 0 < record.headers_s <= record.chunks_s[0] + 0.01
        assert record.chunks_s == sorted(record.chunks_s)
        assert record.chunks_s[-1] <= record.ended_s
    assert any(len(record.chunks_s) > 1 for record in records)


def test_answers_of_a_burst_grow_together(on_vllm: Timed, say: Say) -> None:
    """How much faster that is depends on what else this machine does, so the speedup is only printed."""
    each_s = {load: wall_s(on_vllm.ran, f"r1-vllm-{load}") / requests for load, (_, requests) in BATCHES.items()}
    one, four, ten = each_s.values()
    say(f"real vLLM: {one:.3f} s a request one at a time, {one / four:.2f} x as fast four at a time, "
        f"{one / ten:.2f} x ten at a time")  # fmt: skip
    for name, (size, _) in BATCHES.items():
        records = measured(on_vllm.ran, f"r1-vllm-{name}")
        answers = [(r.sent_s + r.chunks_s[0], r.sent_s + r.chunks_s[-1]) for r in records]
        growing = [sum(begun <= first < ended for begun, ended in answers) for first, _ in answers]
        assert max(growing) >= min(size, SEQUENCES)
    row = next(row for row in on_vllm.ran.summary.rows if row.load == "ten-at-a-time")
    assert row.wall == [wall_s(on_vllm.ran, "r1-vllm-ten-at-a-time")]


def test_a_limit_on_sequences_shows_as_a_queue_and_in_ttft(on_vllm: Timed, say: Say) -> None:
    free, limited = ("r1-vllm-four-at-a-time", "r1-vllm-ten-at-a-time")
    for cell in CELLS:
        assert all(sample.values["running"] <= SEQUENCES for sample in samples_of(on_vllm.ran, cell))
    queue = summary_of(on_vllm.ran, limited).server_load
    assert queue.running_max is not None and 1 < queue.running_max <= SEQUENCES
    assert queue.waiting_max is not None and 1 <= queue.waiting_max <= 10 - SEQUENCES
    assert summary_of(on_vllm.ran, free).server_load.waiting_max == 0
    # Of ten, six wait for a whole answer at least.
    ttft = {cell: summary_of(on_vllm.ran, cell).numbers.ttft.mean for cell in (free, limited)}
    say(
        f"--max-num-seqs {SEQUENCES}: mean TTFT {ttft[free]} s four at a time, {ttft[limited]} s ten at a time "
        f"({queue.running_max:.0f} running, {queue.waiting_max:.0f} waiting)"
    )
    assert (ttft[limited] or 0.0) > (ttft[free] or math.inf)


def test_the_report_advises_more_sequences_where_requests_wait(on_vllm: Timed) -> None:
    summary = on_vllm.ran.summary
    found = {one.code: one for one in summary.findings or []}["queue_with_room"]
    assert "vllm / ten-at-a-time" in found.rows
    action, row = found.actions[0], next(row for row in summary.rows if row.load == "ten-at-a-time")
    assert action.settings == {"servers.vllm.variables": "max_num_seqs: 10"}
    # Where a slow warm-up is in the server's times, they are not the requests', and nothing is promised.
    assert (action.gain is None) == (row.time is None or row.time.queue_s is None or not summary.valid)
    assert action.gain is None or action.gain.values["factor"] < 1  # of the mean TTFT


def test_token_counts_agree_exactly_with_the_servers(on_vllm: Timed, say: Say) -> None:
    ran = on_vllm.ran
    cells = [cell.id for cell in ran.manifest.cells]
    for cell in cells:
        records = of_cell(ran, cell)
        generated = sum(record.output_tokens or 0 for record in records)
        prompts = sum(record.prompt_tokens or 0 for record in records)
        assert (generated, prompts) == (counter(ran, cell, "generated_tokens"), counter(ran, cell, "prompt_tokens"))
        assert summary_of(ran, cell).server_load.generated_tokens == generated
    for cell, sizes in CELLS.items():
        assert counter(ran, cell, "generated_tokens") == TOKENS * sum(sizes)
    # One token of the question whether the model answers came before; no other request comes in between.
    assert samples_of(ran, cells[0])[0].values["generated_tokens"] == 1
    for before, after in itertools.pairwise(cells):
        last, first = samples_of(ran, before)[-1].values, samples_of(ran, after)[0].values
        assert last["generated_tokens"] == first["generated_tokens"]
    own = sum(record.output_tokens or 0 for record in ran.records)
    total = samples_of(ran, cells[-1])[-1].values["generated_tokens"]
    say(f"vllm:generation_tokens_total {total:.0f} = {own} in the records + 1 of the readiness probe")
    assert total == own + 1


def test_the_harness_itself_costs_little_time(on_vllm: Timed, say: Say) -> None:
    """From `harness run` to its first request, without the engine's own start-up."""
    ran = on_vllm.ran
    cell = next(iter(CELLS))
    marks = read_marks(ran.folder / "processes.jsonl")
    mark = next(mark for mark in marks if mark.cell == cell and mark.event == "start")
    records = of_cell(ran, cell)
    to_wall_s = mark.wall_s - mark.monotonic_s - on_vllm.began_wall_s
    first, first_measured = (
        min(record.sent_s for record in records if record.phase == phase) + to_wall_s
        for phase in ("warmup", "measured")
    )
    phases = {phase.name: phase.seconds for phase in ran.manifest.cells[0].served_by.phases}
    by_log = ["process", "weights", "warm-up", "ready"]
    assert list(phases) == ["pull", "create", *by_log, "first answer"]
    engine = sum(phases[name] for name in (*by_log, "first answer"))
    command = ran.manifest.started_wall_s - on_vllm.began_wall_s
    before = phases["pull"] + phases["create"]
    ready = command + sum(phases.values())
    say(
        f"from `harness run` to the first measured request: {first_measured:.2f} s, of it {engine:.2f} s the engine's "
        f"start and {first_measured - first:.2f} s warm-up; the harness itself {first - engine:.2f} s "
        f"(command {command:.2f} s, image and container {before:.2f} s, "
        f"load generator {first - ready:.2f} s)"
    )
    assert 0 < first - engine < engine / 2  # which the machine's speed changes alike


def test_the_start_is_recorded_with_what_vllm_says(on_vllm: Timed, say: Say) -> None:
    served = on_vllm.ran.manifest.cells[0].served_by
    assert all(cell.served_by.startup == served.startup for cell in on_vllm.ran.manifest.cells)
    known, phases = served.startup, {phase.name: phase.seconds for phase in served.phases}
    assert known is not None
    assert (known.engine, known.version, known.architecture) == ("vllm", served.version, "Qwen3ForCausalLM")
    assert (known.max_model_len, known.compile_s) == (MAX_MODEL_LEN, None)  # no compiling: eager
    assert known.kv_cache_tokens is not None and known.max_concurrency is not None
    assert known.max_concurrency == pytest.approx(known.kv_cache_tokens / MAX_MODEL_LEN, rel=0.001)
    assert known.kv_cache_blocks is not None and known.kv_block_size is not None
    assert known.kv_cache_blocks * known.kv_block_size == known.kv_cache_tokens  # metrics and log agree
    assert known.weights_s is not None and known.weights_s <= phases["weights"] + 0.1
    assert known.init_engine_s is not None and known.init_engine_s <= phases["warm-up"] + 0.1
    assert phases["process"] > phases["weights"]
    assert (served.effective["enforce_eager"], served.effective["dtype"]) == (True, DTYPE)
    assert served.effective["max_num_seqs"] == SEQUENCES
    say("start of real vLLM: " + ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in served.phases))


def test_vllm_made_of_its_share_of_the_memory_the_kv_cache_that_is_predicted(on_vllm: Timed) -> None:
    for cell in on_vllm.ran.manifest.cells:
        arguments, startup = cell.served_by.arguments, cell.served_by.startup
        assert arguments[arguments.index("--gpu-memory-utilization") + 1] == str(SHARE)
        assert startup is not None and startup.kv_cache_gib is not None and startup.kv_cache_tokens is not None
        assert 0.5 * SHARE * LIMIT_GIB < startup.kv_cache_gib < SHARE * LIMIT_GIB  # the rest is weights and program
        minimum, maximum = (predicted(QWEN3_100M, startup.kv_cache_gib + off)[0] for off in (-0.005, 0.005))
        assert minimum <= startup.kv_cache_tokens <= maximum
