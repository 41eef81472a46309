"""Where the time goes, and what limited a row: the server's counters against the client's clock."""

import msgspec
import pytest

from harness.base.measured import Distribution, Numbers
from harness.base.reason import sentence
from harness.numbers.summary import CellSummary
from harness.numbers.time_split import TimeSplit, limited_by, time_split, timed_others
from harness.numbers.warnings import host_cpu_notes
from harness.records.records import ProcessMark
from harness.records.samples import MachineLoad, MetricsSample, ServerLoad, parse_metrics, server_load
from tests.support.wording import Wording

VLLM = """
vllm:request_queue_time_seconds_bucket{le="0.3"} 1
vllm:request_queue_time_seconds_sum 2.0
vllm:request_queue_time_seconds_count 20
vllm:request_prefill_time_seconds_sum 1.0
vllm:request_decode_time_seconds_sum 15.0
"""


def numbers(e2e_s: float = 1.0, sent: int = 20) -> Numbers:
    connect = Distribution(n=2, mean=0.01)
    return Numbers(
        sent=sent, succeeded=sent, failed=0, unfinished=0, e2e=Distribution(n=sent, mean=e2e_s), connect=connect
    )


def counted(timed_requests: float = 20.0) -> ServerLoad:
    return ServerLoad(queue_s=2.0, prefill_s=1.0, decode_s=15.0, timed_requests=timed_requests)


def split(**values: float | None) -> TimeSplit:
    stages = {"api_s": 0.05, "queue_s": 0.05, "prefill_s": 0.1, "decode_s": 0.8, **values}
    return TimeSplit(e2e_s=1.0, **stages)


def test_the_counters_of_stages_are_read_from_histograms_and_from_llama_cpp() -> None:
    assert parse_metrics(VLLM) == {"queue_s": 2.0, "prefill_s": 1.0, "decode_s": 15.0, "timed_requests": 20.0}
    text = "llamacpp:prompt_seconds_total 1.5\nllamacpp:tokens_predicted_seconds_total 8\n"
    assert parse_metrics(text) == {"prefill_s": 1.5, "decode_s": 8.0}
    text = "sglang:queue_time_seconds_sum 3\nsglang:queue_time_seconds_count 4\n"
    assert parse_metrics(text) == {"queue_s": 3.0, "timed_requests": 4.0}


def test_stages_are_counted_from_the_last_sample_before_to_the_first_after_the_measured_time() -> None:
    samples = [MetricsSample(at, "c", {"queue_s": at, "timed_requests": 10 * at}) for at in (1.0, 2.0, 5.0, 9.0, 12.0)]
    load = server_load(samples, measured_wall_s=(2.5, 8.0))
    assert (load.queue_s, load.timed_requests, load.prefill_s) == (7.0, 70.0, None)
    assert server_load(samples, measured_wall_s=(0.5, 8.0)).queue_s is None  # no sample before
    assert server_load(samples, measured_wall_s=(2.5, 13.0)).queue_s is None  # none after


def test_the_rest_of_a_request_is_the_api() -> None:
    found = time_split(numbers(), counted())
    assert found is not None
    parts = (found.queue_s, found.prefill_s, found.decode_s, found.api_s, found.connect_s, found.e2e_s)
    assert parts == pytest.approx((0.1, 0.05, 0.75, 0.1, 0.001, 1.0))


def test_what_the_server_does_not_say_is_none() -> None:
    assert time_split(numbers(), ServerLoad()) is None
    assert time_split(numbers(), counted(), mixed=True) is None
    assert time_split(numbers(), counted(timed_requests=31.0)) is None  # others than the measured requests
    assert time_split(numbers(), counted(timed_requests=15.0)) is None
    negative = time_split(numbers(e2e_s=0.85), counted())
    assert negative is not None and negative.api_s is None
    assert time_split(numbers(e2e_s=0.5), counted()) is None  # the server's times of a request are 0.9 s
    llama = time_split(numbers(), ServerLoad(prefill_s=1.0, decode_s=15.0))
    assert llama is not None and (llama.queue_s, llama.api_s, llama.decode_s) == (None, None, 0.75)


def test_a_fixed_number_of_requests_leaves_no_room_for_those_of_others() -> None:
    def known(timed: float, sent: int = 100, warmup: int | None = 5) -> bool:
        load = ServerLoad(queue_s=2.0, prefill_s=1.0, decode_s=15.0, timed_requests=timed)
        return time_split(numbers(sent=sent), load, warmup=warmup) is not None

    assert [known(timed) for timed in (97, 98, 107, 108)] == [False, True, True, False]
    assert [known(timed, warmup=None) for timed in (80, 150)] == [True, True], (
        "of a timed load warm-up and cut ones, too"
    )
    assert not known(17, sent=10, warmup=30), "no wider than for others"


@pytest.mark.parametrize(
    ("lost", "timed", "known"),
    [
        ({"abandoned": 20}, 40.0, False),  # the server timed the abandoned requests too, and they were shorter
        ({"abandoned": 20}, 30.0, False),  # half of them
        ({"abandoned": 20}, 20.0, True),  # it did not
        ({"failed": 20}, 20.0, True),  # refused at once
        ({"failed": 20}, 40.0, False),
        ({"unfinished": 20}, 40.0, False),
        ({"abandoned": 20}, None, False),  # llama.cpp: totals without a count
        ({}, 25.0, True),  # a few of the warm-up
    ],
)
def test_the_two_sides_are_of_the_same_requests(lost: dict[str, int], timed: float | None, known: bool) -> None:
    measured = msgspec.structs.replace(numbers(), sent=20 + sum(lost.values()), **lost)
    load = ServerLoad(queue_s=2.0, prefill_s=1.0, decode_s=15.0, timed_requests=timed)
    found, why = time_split(measured, load), timed_others(measured, load)
    assert (found is not None, why is None) == (known, known)
    if why is not None:
        abandoned = lost.get("abandoned", 0)
        assert why.values["abandoned"] == abandoned and why.values["others"] == 20 - abandoned


LATE = {"wall": (0.2, 0.0)}
FULL = ServerLoad(kv_usage_max=0.96, waiting_max=2.0)


@pytest.mark.parametrize(
    ("found", "load", "client_error", "limit"),
    [
        (split(queue_s=0.04), FULL, {}, "decode"),  # full for a moment only
        (None, ServerLoad(kv_usage_max=0.97, waiting_max=1.0, preemptions=1.0), {}, None),
        (None, ServerLoad(kv_usage_max=1.0, waiting_max=3.0, preemptions=40.0), {}, "kv_cache"),
        (None, FULL, {}, "kv_cache"),  # nothing says for how long
        (split(queue_s=0.5), FULL, LATE, "client"),
        (split(queue_s=0.5), FULL, {"wall": (0.19, 0.0)}, "kv_cache"),
        (split(queue_s=0.2), ServerLoad(kv_usage_max=0.96), {}, "queue"),  # full, and no request waited for it
        (split(queue_s=0.2, api_s=0.4), ServerLoad(), {}, "queue"),
        (split(api_s=0.2), ServerLoad(), {}, "api"),
        (split(prefill_s=0.5, decode_s=0.4), ServerLoad(), {}, "prefill"),
        (split(), ServerLoad(), {}, "decode"),
        (split(queue_s=None, api_s=None), ServerLoad(), {}, None),
    ],
)
def test_what_limited_a_cell(
    found: TimeSplit | None, load: ServerLoad, client_error: dict[str, tuple[float, float]], limit: str | None
) -> None:
    assert limited_by(found, load, client_error, sent=100) == limit


def cell(name: str, host_cpu_mean: float | None) -> CellSummary:
    did = MachineLoad(samples=9, gap_max_s=1.0, host_cpu_mean=host_cpu_mean)
    return CellSummary(
        id=name, server="a", load="x", repeat=1, numbers=numbers(), server_load=ServerLoad(), machine_load=did
    )


def test_a_busy_host_is_explained_by_what_the_load_generator_used(wording: Wording) -> None:
    mark = ProcessMark(event="end", process=0, cell="r1", wall_s=1.0, monotonic_s=1.0, cpu_max=0.12)
    (note,) = host_cpu_notes([cell("r1", 0.97), cell("r2", 1.0), cell("r3", 0.94), cell("r4", None)], [mark])
    assert "100" in sentence(note)
    wording(sentence(note))
    assert "12" in sentence(note)
    wording(sentence(note))
    assert list(host_cpu_notes([cell("r1", 0.5)], [mark])) == []
