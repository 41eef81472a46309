"""Real vLLM in a container: batching, the limit on sequences, exact counts, what the harness itself costs."""

import itertools

import pytest

from harness.rundir.records import Request, read_marks
from harness.rundir.samples import MetricsSample, read_metrics
from harness.summary import CellSummary
from tests.real.conftest import Say, Timed
from tests.real.parts import Ran, left_behind, predicted

# The first test waits for two starts, which take minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)
PLANNED = 20  # measured requests of a cell, after a wave of warm-up
TOKENS = 16  # of every answer
LOADS = {"one-at-a-time": 1, "five-at-a-time": 5, "ten-at-a-time": 10}
CELLS = {f"r1-{server}-{load}": size for server in ("seqs-10", "seqs-2") for load, size in LOADS.items()}


def of_cell(ran: Ran, cell: str) -> list[Request]:
    return [record for record in ran.records if record.cell == cell]


def measured(ran: Ran, cell: str) -> list[Request]:
    return [record for record in of_cell(ran, cell) if record.phase == "measured"]


def summary_of(ran: Ran, cell: str) -> CellSummary:
    return next(found for found in ran.summary.cells if found.id == cell)


def wall_s(ran: Ran, cell: str) -> float:
    value = summary_of(ran, cell).numbers.wall_s
    assert value is not None
    return value


def samples_of(ran: Ran, cell: str) -> list[MetricsSample]:
    return read_metrics(ran.folder / "metrics.jsonl")[cell]


def counter(ran: Ran, cell: str, name: str) -> float:
    """How far a counter of the server went on during a cell."""
    samples = samples_of(ran, cell)
    return samples[-1].values[name] - samples[0].values[name]


def test_the_run_is_valid_and_says_so(batching: Timed, say: Say) -> None:
    ran = batching.ran
    say(ran.said)
    assert (ran.code, ran.error) == (0, "")
    assert (ran.manifest.status, ran.manifest.reasons, ran.summary.reasons) == ("valid", [], [])
    assert [cell.id for cell in ran.manifest.cells] == list(CELLS)
    assert not ran.summary.simulated
    assert {cell.served_by.model for cell in ran.manifest.cells} == {"qwen3-100m"}
    assert (ran.folder / "report.html").stat().st_size > 100_000
    assert left_behind(ran.folder) == []


def test_every_planned_request_left_one_good_record(batching: Timed) -> None:
    for cell, wave in CELLS.items():
        good = [(r.index, r.error, r.status, r.output_tokens, r.finish) for r in measured(batching.ran, cell)]
        assert sorted(good) == [(index, None, 200, TOKENS, "length") for index in range(PLANNED)]
        assert [r.error for r in of_cell(batching.ran, cell) if r.phase == "warmup"] == [None] * wave


def test_chunks_carry_the_kernels_time(batching: Timed) -> None:
    for record in batching.ran.records:
        assert record.clock == "kernel"
        assert 1 < len(record.chunks_s) <= TOKENS  # vLLM may send what it has made meanwhile as one chunk
        assert record.headers_s is not None and 0 < record.headers_s <= record.chunks_s[0] + 0.01
        assert record.chunks_s == sorted(record.chunks_s)
        assert record.chunks_s[-1] <= record.ended_s


def test_at_once_is_faster_than_one_at_a_time(batching: Timed, say: Say) -> None:
    one, five, ten = (wall_s(batching.ran, f"r1-seqs-10-{load}") for load in LOADS)
    say(f"same work, real vLLM: {one:.2f} s one at a time, {one / five:.2f} x five at a time, {one / ten:.2f} x ten")
    assert one / five > 1.2
    assert one / ten > 1.5
    row = next(row for row in batching.ran.summary.rows if (row.server, row.load) == ("seqs-10", "ten-at-a-time"))
    assert row.wall_s == [ten]


def test_a_limit_on_sequences_shows_as_a_queue_and_in_ttft(batching: Timed, say: Say) -> None:
    free, limited = ("r1-seqs-10-ten-at-a-time", "r1-seqs-2-ten-at-a-time")
    queue = summary_of(batching.ran, limited).server_load
    assert queue.running_max is not None and queue.running_max <= 2
    assert queue.waiting_max is not None and 1 <= queue.waiting_max <= 8
    for sample in samples_of(batching.ran, limited):
        assert sample.values["running"] <= 2
    maximum = max(sample.values["running"] for sample in samples_of(batching.ran, free))
    assert 2 < maximum <= 10
    # The last of ten waits for whole answers. The median may be either way: together, all prompts are read first.
    ttft = {cell: max(r.chunks_s[0] for r in measured(batching.ran, cell)) for cell in (free, limited)}
    say(
        f"ten at a time: longest TTFT {ttft[free]:.3f} s with --max-num-seqs 10 ({maximum:.0f} running), "
        f"{ttft[limited]:.3f} s with 2 ({queue.running_max:.0f} running, {queue.waiting_max:.0f} waiting)"
    )
    assert ttft[limited] > ttft[free]
    for cell in (free, limited):
        assert summary_of(batching.ran, cell).numbers.ttft_s.p50 is not None


def test_token_counts_agree_exactly_with_the_servers(batching: Timed, say: Say) -> None:
    ran = batching.ran
    for cell, wave in CELLS.items():
        records = of_cell(ran, cell)
        generated = sum(record.output_tokens or 0 for record in records)
        prompts = sum(record.prompt_tokens or 0 for record in records)
        assert generated == TOKENS * (PLANNED + wave)
        assert (generated, prompts) == (counter(ran, cell, "generated_tokens"), counter(ran, cell, "prompt_tokens"))
        assert summary_of(ran, cell).server_load.generated_tokens == generated
    for server in ("seqs-10", "seqs-2"):
        mine = [f"r1-{server}-{load}" for load in LOADS]
        # One token of the question whether the model answers came before; nobody else asks in between.
        assert samples_of(ran, mine[0])[0].values["generated_tokens"] == 1
        for before, after in itertools.pairwise(mine):
            last, first = samples_of(ran, before)[-1].values, samples_of(ran, after)[0].values
            assert last["generated_tokens"] == first["generated_tokens"]
        own = sum(record.output_tokens or 0 for record in ran.records if record.cell in mine)
        total = samples_of(ran, mine[-1])[-1].values["generated_tokens"]
        say(f"{server}: vllm:generation_tokens_total {total:.0f} = {own} in the records + 1 of the readiness probe")
        assert total == own + 1


def test_the_harness_itself_costs_little_time(batching: Timed, say: Say) -> None:
    """From `harness run` to its first request, without the engine's own start-up."""
    ran = batching.ran
    cell = next(iter(CELLS))
    marks = read_marks(ran.folder / "processes.jsonl")
    mark = next(mark for mark in marks if mark.cell == cell and mark.event == "start")
    records = of_cell(ran, cell)
    to_wall_s = mark.wall_s - mark.monotonic_s - batching.began_wall_s
    first, first_measured = (
        min(record.sent_s for record in records if record.phase == phase) + to_wall_s
        for phase in ("warmup", "measured")
    )
    phases = {phase.name: phase.seconds for phase in ran.manifest.cells[0].served_by.phases}
    by_log = ["process", "weights", "warm-up", "ready"]
    assert list(phases) == ["pull", "create", *by_log, "first answer"]
    # Its flags are asked for once for an image: vLLM imports itself for that.
    engine = sum(phases[name] for name in (*by_log, "first answer"))
    command = ran.manifest.started_wall_s - batching.began_wall_s
    before = phases["pull"] + phases["create"]
    ready = command + sum(phases.values())
    say(
        f"from `harness run` to the first measured request: {first_measured:.2f} s, of it {engine:.2f} s the engine's "
        f"flags and start and {first_measured - first:.2f} s warm-up; the harness itself {first - engine:.2f} s "
        f"(command {command:.2f} s, image and container {before:.2f} s, "
        f"load generator {first - ready:.2f} s)"
    )
    assert 0 < first - engine < 10


def test_the_start_is_recorded_with_what_vllm_says(batching: Timed, say: Say) -> None:
    cells = {cell.id: cell.served_by for cell in batching.ran.manifest.cells}
    ten, two = (cells[f"r1-seqs-{maximum}-one-at-a-time"] for maximum in (10, 2))
    for served in (ten, two):
        known, phases = served.startup, {phase.name: phase.seconds for phase in served.phases}
        assert known is not None
        assert (known.engine, known.version, known.architecture) == ("vllm", served.version, "Qwen3ForCausalLM")
        assert (known.max_model_len, known.kv_cache_gib, known.compile_s) == (2048, 1.0, None)  # no compiling: eager
        assert known.kv_cache_tokens is not None and known.max_concurrency is not None
        assert known.max_concurrency == pytest.approx(known.kv_cache_tokens / 2048, rel=0.001)
        assert known.kv_cache_blocks is not None and known.kv_block_size is not None
        assert known.kv_cache_blocks * known.kv_block_size == known.kv_cache_tokens  # metrics and log agree
        assert known.weights_s is not None and known.weights_s <= phases["weights"] + 0.1
        assert known.init_engine_s is not None and known.init_engine_s <= phases["warm-up"] + 0.1
        assert phases["process"] > phases["weights"]
        assert (served.effective["enforce_eager"], served.effective["dtype"]) == (True, "bfloat16")
    assert (ten.effective["max_num_seqs"], two.effective["max_num_seqs"]) == (10, 2)
    say("start of real vLLM: " + ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in ten.phases))


def test_the_kv_cache_is_the_one_that_was_foretold(batching: Timed) -> None:
    for cell in batching.ran.manifest.cells:
        startup = cell.served_by.startup
        assert startup is not None
        assert (startup.kv_cache_tokens, startup.max_concurrency) == predicted(1)
