"""The live numbers of a load: accumulators, their merge, and what the harness writes next to them."""

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.load.live_metrics import (
    ALL,
    Accumulator,
    ArrivedTokens,
    CounterDelta,
    LiveNumbers,
    Observed,
    OtherClient,
    RequestInFlight,
    bucket_middle_s,
    decode_delta,
    percentiles,
)
from harness.numbers import share_test
from harness.numbers.share_test import LatencySample
from harness.questions.live import checks_of_row
from harness.records.records import AT_LEAST, OBSERVED, ErrorKind
from harness.scenario import Load
from harness.scenario.check_syntax import Slo, parse_check, request_slos, slos_key
from tests.support.live_deltas import Worker, delta, request
from tests.support.made_runs import one_cell


def test_a_percentile_is_at_most_one_percent_off_and_processes_add_up() -> None:
    rng = random.Random(4)
    values = [math.exp(rng.gauss(-2, 1.5)) for _ in range(5000)]
    whole = Accumulator()
    for part in range(3):
        mine = Accumulator()
        mine.count([request(ttft=value, tpot=0.0) for value in values[part::3]], ())
        whole.merge(mine)
    values.sort()
    shares = (0.5, 0.9, 0.95, 0.99)
    for share, found in zip(shares, percentiles(whole.latencies["ttft"], shares), strict=True):
        exact = values[math.ceil(share * len(values)) - 1]
        assert found is not None and abs(found / exact - 1) <= 0.0101
    assert percentiles({}, (0.5, 0.99)) == [None, None]
    assert sum(whole.latencies["ttft"].values()) == 5000


def test_live_numbers_have_the_definitions_of_a_report(tmp_path: Path) -> None:
    """Requests a second and attainment of the same records, with failed, abandoned and unfinished ones."""
    text = "ttft<=150ms"
    slos = parse_check(f"attainment({text}) >= 0.5").slos
    kinds: list[ErrorKind | None] = [*[None] * 7, "http", "timeout", "unfinished"]
    changes: list[dict[str, Any]] = [{"error": kind} for kind in kinds]
    # In time, too late; and one whose first token had come in time.
    changes += [{"error": "abandoned", "chunks_s": [], "ended_s": ended_s} for ended_s in (0.1, 0.5)]
    changes.append({"error": "abandoned", "chunks_s": [0.1]})
    changes[0] |= {"ttft": 0.2}
    records = [request(index=i, id=str(i), cell="r1-a-x", load="x", **change) for i, change in enumerate(changes)]
    records = [msgspec.structs.replace(record, message=None, sent_s=float(i)) for i, record in enumerate(records)]
    live = Accumulator()
    live.count(records, slos)
    load = Load(user="chat", users=1, requests=len(records))
    report = one_cell(tmp_path / "run", records, load, checks=[f"attainment({text}) >= 0.1"]).rows[0].pooled
    assert report.window_s is not None and report.requests_per_s is not None
    numbers = live.numbers(report.window_s, with_slos=True)
    assert numbers["requests_per_s"] == pytest.approx(report.requests_per_s, rel=1e-3)
    assert report.requests_per_s * report.window_s == pytest.approx(7)
    assert numbers["attainment"] == pytest.approx(report.slos[text].attainment, rel=1e-3)
    assert (live.met, live.cut_met, live.cut_unknown, live.failed, live.cut) == (6, 1, 1, 2, 4)
    assert numbers["failed_per_s"] == pytest.approx(2 / report.window_s, rel=1e-3)


def test_a_slow_rate_is_not_rounded_to_zero() -> None:
    live = Accumulator()
    live.count([request()], ())
    assert live.numbers(30_000.0, with_slos=False)["requests_per_s"] == pytest.approx(1 / 30_000, rel=1e-3)


def test_a_counter_reports_everything_once() -> None:
    slos = (
        Slo(text="ttft<=150ms", latency="ttft", operator="<=", bound_s=0.15),
        Slo(text="tpot<=30ms", latency="tpot", operator="<=", bound_s=0.03),
    )
    counter = Worker(slos)
    for one in (
        request(),
        request(ttft=0.2),
        request(tpot=0.04),
        request(error="http"),
        request(error="http", message="the last"),
        request(error="timeout"),
        request(error="abandoned"),
        request(error="unfinished"),
        request(phase="warmup"),
        request(user_class="Agent", tokens=5),
    ):
        counter.add(one)
    given = delta(counter, {"Chat": 2, "Agent": 1, "Gone": 0})
    assert (given.in_flight_of, given.warmup) == ({"Chat": 2, "Agent": 1}, 1)
    assert given.messages == {"http": "the last", "timeout": "it was timeout"}
    numbers = LiveNumbers()
    numbers.add_delta("a", given)
    assert numbers.failures() == {"http": 2, "timeout": 1}
    chat = [by_class["Chat"] for by_class in given.seconds.values() if "Chat" in by_class]
    assert (sum(one.ended for one in chat), sum(one.failed for one in chat), sum(one.met for one in chat)) == (8, 3, 1)
    assert sum(one.tokens for one in chat) == 33
    assert all(int(given.now) - second in (0, 1) for second in given.seconds)
    assert (empty := delta(counter)) == CounterDelta(now=empty.now)
    # An answer that came in one read has no TPOT here either: its chunks' times say when the read was.
    for one in (request(chunks_s=[0.3, 0.3, 0.3], coalesced=2, coalesced_late=0), request()):
        counter.add(one)
    numbers = LiveNumbers()
    numbers.add_delta("a", delta(counter))
    assert [sum(numbers.total["Chat"].latencies[name].values()) for name in ("ttft", "tpot")] == [2, 1]
    # What no worker of ours sent is left out.
    assert [decode_delta(raw) for raw in (None, b"", b"\x93\x01\x02\x03", "text", 7)] == [None] * 5


def test_percentiles_with_requests_that_wait_are_those_of_a_report() -> None:
    """Kaplan-Meier of the whole product, on the middles of the buckets; "larger than" where it is not reached."""
    rng = random.Random(7)
    for waiting in (0, 3, 40, 200):
        live = Accumulator()
        live.count([request(ttft=rng.expovariate(2), tpot=0.0) for _ in range(150)], ())
        ages = [rng.expovariate(0.5) for _ in range(waiting)]
        live.add_in_flight([RequestInFlight("Chat", 100.0 - age_s) for age_s in ages], 100.0)
        observed, censored = (
            [bucket_middle_s(bucket) for bucket, n in histogram.items() for _ in range(n)]
            for histogram in (live.latencies["ttft"], live.censored.get("ttft", {}))
        )
        values = np.array([*observed, *censored])
        states = np.array([OBSERVED] * len(observed) + [AT_LEAST] * len(censored), dtype=np.int8)
        report = share_test.percentiles([LatencySample(values, values, states)], [500, 900, 950])
        numbers = live.numbers(1.0, with_slos=False)
        for name, known in zip(("ttft_p50", "ttft_p90", "ttft_p95"), report, strict=True):
            assert numbers[name] == (None if known.value_s is None else pytest.approx(known.value_s, rel=1e-3))
            assert (f"{name}_above" in numbers) == (known.value_s is None)
        assert numbers["ttft_n"] == 150 + waiting


def test_requests_that_wait_do_not_look_good() -> None:
    """Two of eight have their first token; of the others only their age is known. A p99 of eight is none."""
    worker, numbers = Worker(), LiveNumbers()
    now = time.monotonic()
    streaming = [RequestInFlight("Chat", now - 30, 0.5, chunks=40), RequestInFlight("Chat", now - 30, 1.0, chunks=20)]
    waiting = [RequestInFlight("Chat", now - 5 - age_s) for age_s in range(5)]
    whole = RequestInFlight("Chat", now - 60, streams=False)  # its first token cannot be seen
    done = RequestInFlight("Chat", now - 90, 2.0, chunks=3, ended=True)  # its record is being made
    worker.note(*streaming, *waiting, whole, done)
    numbers.add_delta("a", delta(worker, {"Chat": 9}))
    clients = numbers.whole_test()[ALL]
    assert (clients["ended"], clients["tokens"], clients["ttft_n"], clients["e2e_n"]) == (0, 63, 8, 8)
    assert (clients["ttft_p50"], clients["ttft_p99"], clients["ttft_max"]) == (None, None, None)
    # The fourth of eight, with each age as a value: half of them take longer.
    assert clients["ttft_p50_above"] == pytest.approx(5.0, rel=0.02)
    assert clients["ttft_max_above"] == pytest.approx(9.0, rel=0.02)
    assert clients["e2e_max_above"] == pytest.approx(60.0, rel=0.02)
    assert "tpot_max_above" not in clients and clients["tpot_p50"] is None
    assert numbers.waiting() == {ALL: 5, "Chat": 5}
    assert numbers.oldest_waiting_s() == pytest.approx(9.0, rel=0.01)
    worker.note()
    numbers.add_delta("a", delta(worker))
    assert (numbers.waiting(), numbers.oldest_waiting_s(), numbers.whole_test()[ALL]["ttft_n"]) == ({ALL: 0}, None, 0)
    # Also where a request was cut: of the two, one had its first token.
    for cut in (request(error="timeout", ended_s=20.0), request(error="abandoned", chunks_s=[0.5], ended_s=3.0)):
        worker.add(cut)
    numbers.add_delta("a", delta(worker))
    clients = numbers.whole_test()[ALL]
    assert clients["ttft_n"] == 2 and clients["ttft_max_above"] == pytest.approx(20.0, rel=0.02)


def test_tokens_count_when_they_arrive_and_once() -> None:
    """A chunk counts as one token, then as the fewest that a chunk of an ended request had; the end adds the rest."""
    tokens, total, sums = ArrivedTokens(), 0, []

    def second(*chunks: int) -> None:
        nonlocal total
        total += tokens.take_new([RequestInFlight("Chat", 0.0, 0.1, chunks=one) for one in chunks]).get("Chat", 0)
        sums.append(total)

    second(10, 4)
    second(20, 8)
    tokens.add_ended(request(tokens=20, output_tokens=60))  # three tokens a chunk
    second(10)
    tokens.add_ended(request(tokens=12, output_tokens=25))  # two, of a short answer
    second(30)
    tokens.add_ended(request(tokens=30, output_tokens=61))  # two
    second(6)
    second()  # its record is late: a sum never falls
    tokens.add_ended(request(error="disconnect", chunks_s=[0.1] * 6))  # what had arrived of it
    second()
    assert sums == [14, 28, 60 + 30, 60 + 25 + 90, 175, 175, 175]
    tokens.add_ended(request(tokens=20, output_tokens=60))
    second()
    assert total == 60 + 25 + 61 + int(6 * 61 / 30) + 60


def test_the_checks_are_those_of_the_row() -> None:
    checks = ["error_rate == 0", "a/bulk: goodput(e2e<=9s) >= 1 req/s", "attainment(ttft<=1s, tpot<=50ms) >= 90%"]
    checks += ["bulk: ttft_p95 <= 2 s", "tpot_mean <= 1s"]
    found = {
        server: slos_key(request_slos([checks_of_row(own, server, "bulk")]))
        for server, own in (("a", checks), ("b", checks), ("c", [*checks[:2], *checks[3:]]))
    }
    assert found == {"a": "e2e<=9s", "b": "ttft<=1s, tpot<=50ms", "c": "ttft<=2s"}
    assert checks_of_row(checks[:2], "b", "bulk") == ""


def test_the_numbers_add_up_workers_and_classes(clock: list[float]) -> None:
    clock[0] = 1000.5
    numbers = LiveNumbers(lag_s=4, slos="ttft<=150ms")
    workers = {name: Worker((Slo(text="", latency="ttft", operator="<=", bound_s=0.15),)) for name in "ab"}
    for second in range(30):
        clock[0] = 1000.5 + second
        for name, counter in workers.items():
            for _ in range(5):
                counter.add(request())
            counter.add(request(user_class="Agent", error="http"))
            if second % 3 == "ab".index(name):
                numbers.add_delta(name, delta(counter, {"Chat": 6, "Agent": 1}))
        numbers.tick(12, Observed(None))
    recent = numbers.recent()
    assert list(recent) == [ALL, "Agent", "Chat"]
    assert (recent[ALL]["ended"], recent["Chat"]["ended"], recent["Agent"]["failed"]) == (120, 100, 20)  # of 10 s
    assert (recent[ALL]["requests_per_s"], recent["Chat"]["output_tok_s"], recent["Chat"]["goodput"]) == (
        10.0,
        110.0,
        10.0,
    )
    assert (recent["Chat"]["attainment"], recent["Agent"]["attainment"]) == (1.0, 0.0)
    # A hundred requests carry a p90, and no p95.
    assert (recent["Chat"]["ttft_n"], recent["Chat"]["ttft_p95"]) == (100, None)
    assert recent["Chat"]["ttft_p90"] == pytest.approx(0.1, rel=0.0101)
    assert recent["Agent"]["ttft_p50"] is None
    assert numbers.in_flight() == {ALL: 14, "Chat": 12, "Agent": 2}
    assert numbers.client_limited() is None
    numbers.add_delta("a", delta(workers["a"], {"Chat": 6, "Agent": 1}, busy=0.96))
    assert numbers.client_limited() == 0.96
    clock[0] += 60
    assert numbers.in_flight() == {ALL: 0}  # workers that are silent hold nothing
    assert [point["t"] for point in numbers.points] == [float(t) for t in range(0, 30, 2)]
    # From the first request sent until the last one that ended, however long the page is open.
    assert numbers.whole_test()[ALL]["ended"] == 354
    assert numbers.whole_test()[ALL]["requests_per_s"] == pytest.approx(295 / (29.0 + 0.3), rel=1e-3)
    numbers.reset()
    assert (numbers.whole_test()[ALL]["ended"], numbers.whole_test()[ALL]["requests_per_s"]) == (0, None)


def test_the_time_series_is_thinned_and_not_cut(clock: list[float]) -> None:
    clock[0] = 0.0
    numbers, first = LiveNumbers(), None
    for second in range(6000):
        clock[0] = float(second)
        numbers.tick(1, Observed(None))
        first = first or numbers.series_id
    assert 600 <= len(numbers.points) <= 1200
    assert numbers.points[0]["t"] == 0.0 and numbers.points[-1]["t"] >= 5990.0
    assert (numbers.step_s, numbers.series_id - (first or 0)) == (8, 2)


def observe(folder: Path, observed: Observed, *counts: tuple[float, float]) -> None:
    """Append samples: seconds ago, and the tokens that the server had generated."""
    with (folder / "metrics.jsonl").open("a") as file:
        for ago_s, tokens in counts:
            sample = {"wall_s": time.time() - ago_s, "cell": "c", "values": {"generated_tokens": tokens}}
            file.write(json.dumps(sample) + "\n")
    observed.update()


def test_another_client_of_the_server(tmp_path: Path) -> None:
    """Tokens beyond those of requests that ended, also of the warm-up, and those that may still come."""
    observed, others, worker = Observed(tmp_path), OtherClient(lag_s=4), Worker()

    def state(*counts: tuple[float, float]) -> dict[str, Any] | None:
        observe(tmp_path, observed, *counts)
        others.update(observed)
        return others.state()

    assert state() is None
    for number in range(10):
        worker.add(request(tokens=11, asked_tokens=20, phase="warmup" if number < 5 else "measured"))
    worker.asked_in_flight = 40
    others.add_delta("a", delta(worker))
    assert state((20.0, 1000.0), (10.0, 1200.0)) is None
    found = state((8.0, 1250.0), (1.0, 9999.0))  # the last one is too new
    assert found is not None
    assert (found["tokens"], found["tokens_per_s"]) == (100.0, pytest.approx(50 / 2, rel=0.1))
    assert found["answers_per_s"] == pytest.approx(50 / 2 / 11, rel=0.1)
    worker.add(request(tokens=90, asked_tokens=90))
    worker.asked_in_flight = 0
    others.add_delta("b", delta(worker))  # of another process: what is in flight in the first is still ours
    assert (state() or {})["tokens"] == 100.0  # until there is a newer count


def test_another_client_is_not_known_without_a_bound_or_after_a_restart(tmp_path: Path) -> None:
    observed, others, worker = Observed(tmp_path), OtherClient(), Worker()
    observe(tmp_path, observed, (20.0, 0.0), (5.0, 900.0))
    others.update(observed)
    assert others.state() == {"tokens": 900.0, "tokens_per_s": None, "answers_per_s": None}
    observe(tmp_path, observed, (4.0, 10.0), (3.5, 30.0))
    others.update(observed)
    assert others.state() is None  # within the tolerance since the server was started again
    observe(tmp_path, observed, (3.0, 500.0))
    others.update(observed)
    assert (others.state() or {})["tokens"] == 490.0
    worker.add(request(error="unfinished", output_tokens=None))
    others.add_delta("a", delta(worker))
    observe(tmp_path, observed, (2.5, 900.0))
    others.update(observed)
    assert others.state() is None


def test_the_newest_samples_of_server_and_machine(tmp_path: Path) -> None:
    observed = Observed(tmp_path)
    now = time.time()
    lines = [
        {"wall_s": now - 2, "cell": "c", "values": {"running": 3.0, "waiting": 1.0, "generated_tokens": 100.0}},
        {"wall_s": now, "cell": "c", "values": {"running": 4.0, "kv_usage": 0.5, "generated_tokens": 160.0}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{torn")
    gpus = {"renderD128": {"busy_percent": 90.0, "temperatures_c": {"edge": 60.0}, "power_w": 50.5}}
    (tmp_path / "telemetry.jsonl").write_text(json.dumps({"wall_s": now, "cell": "c", "gpus": gpus}) + "\n")
    observed.update()
    assert observed.values["server"] == {"running": 4.0, "kv_usage": 0.5, "tok_s": pytest.approx(30.0, rel=0.01)}
    assert observed.values["gpus"] == {"renderD128": {"busy_percent": 90.0, "power_w": 50.5}}
    (tmp_path / "metrics.jsonl").write_text("")
    late = Observed(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**lines[0], "wall_s": now - 60}) + "\n")
    late.update()
    assert (late.values["server"], late.values["gpus"]) == (None, None)  # what is old says nothing of now
