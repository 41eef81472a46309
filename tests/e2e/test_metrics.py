"""Server metrics: parsing of real excerpts, the scraper against a real HTTP server, and what samples say."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.records.samples import MetricsSample, Scraper, ServerLoad, parse_metrics, read_metrics, server_load
from tests.support.command import until
from tests.support.http_double import Handler, listening

# From a vLLM 0.32 that served 86 requests, and what llama.cpp's server prints.
VLLM = """\
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79525309067e+09
vllm:num_requests_running{engine="0",model_name="m"} 10.0
vllm:num_requests_waiting{engine="0",model_name="m"} 40.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 40.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 2585.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 0.0
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 2585.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 11008.0
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_bucket{engine="0",le="+Inf",model_name="m"} 86.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 86.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 11008.0
"""
OF_VLLM = {
    "running": 10.0, "waiting": 40.0, "kv_usage": 0.25, "preemptions": 3.0, "prompt_tokens": 2585.0,
    "generated_tokens": 11008.0, "prefix_queries": 2585.0, "prefix_hits": 0.0, "started_s": 1795253090.67,
}  # fmt: skip
OLD_VLLM = """\
vllm:num_requests_running{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
# TYPE vllm:gpu_prefix_cache_queries counter
vllm:gpu_prefix_cache_queries_total{model_name="m"} 8.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 2.0
"""
TWO_ENGINES = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.7
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 50.0
"""
LLAMACPP = """\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 120
llamacpp:tokens_predicted_total 640
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds nan
llamacpp:requests_processing 4
llamacpp:requests_deferred 2
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, OF_VLLM),
        (OLD_VLLM, {"running": 1.0, "kv_usage": 0.5, "prefix_queries": 8.0, "prefix_hits": 2.0}),
        (TWO_ENGINES, {"running": 7.0, "kv_usage": 0.7, "generated_tokens": 150.0}),
        (LLAMACPP, {"running": 4.0, "waiting": 2.0, "prompt_tokens": 120.0, "generated_tokens": 640.0}),
        ("# TYPE vllm:num_preemptions counter\nvllm:num_preemptions 2\n", {"preemptions": 2.0}),  # without its suffix
        ("up 1\nllamacpp:requests_processing nan\n", {}),
    ],
    ids=["vllm", "older names", "engines are added up", "llama.cpp", "counter", "nothing known"],
)
def test_what_servers_print(text: str, expected: dict[str, float]) -> None:
    assert parse_metrics(text) == expected


@contextmanager
def serving(answers: Iterator[tuple[int, str]]) -> Iterator[str]:
    """A server whose answers come from an iterator."""

    class Double(Handler):
        def do_GET(self) -> None:
            self.answer(*next(answers))

    with listening(Double) as url:
        yield f"{url}/metrics"


def test_the_scraper_reads_at_the_start_meanwhile_and_at_the_end(tmp_path: Path) -> None:
    path, before = tmp_path / "metrics.jsonl", time.time()
    counting = ((200, f"vllm:generation_tokens_total {number}\n") for number in itertools.count(1))
    with serving(counting) as url, Scraper(url, "r1-a-x", path, interval_s=0.05) as scraper:
        assert len(read_metrics(path)["r1-a-x"]) == 1  # before any load
        until(lambda: len(read_metrics(path)["r1-a-x"]) >= 3)
        during = len(read_metrics(path)["r1-a-x"])
    samples = read_metrics(path)["r1-a-x"]
    assert scraper.last_failure is None
    assert during < len(samples)
    assert [sample.values for sample in samples] == [{"generated_tokens": float(i + 1)} for i in range(len(samples))]
    walls = [sample.wall_s for sample in samples]
    assert walls == sorted(walls)
    assert before <= walls[0] and walls[-1] <= time.time()


def test_the_scraper_survives_any_answer_and_keeps_the_key_secret(tmp_path: Path) -> None:
    path, keys = tmp_path / "metrics.jsonl", list[str | None]()
    answers = iter([(200, "up 1\n"), (401, "broken"), (200, "<html><body>404</body></html>"), (200, VLLM)])

    class Double(Handler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            self.answer(*next(answers))

    with listening(Double) as url:
        scraper = Scraper(f"{url}/metrics", "c", path, api_key="sesame")
        assert [scraper.scrape_now() for _ in range(2)] == [True, False]
        assert scraper.last_failure is not None and "sesame" not in scraper.last_failure
        assert [scraper.scrape_now() for _ in range(2)] == [False, True]
    assert keys == ["Bearer sesame"] * 4
    assert not scraper.scrape_now()  # nothing listens any more
    assert scraper.last_failure.startswith("ConnectionError")
    assert [sample.values.get("running") for sample in read_metrics(path)["c"]] == [None, 10.0]
    with Scraper(None, "c", tmp_path / "none.jsonl") as scraper:  # without a URL nothing is scraped
        pass
    assert scraper.last_failure is None and not (tmp_path / "none.jsonl").exists()


def sample(at: float, **values: float) -> MetricsSample:
    return MetricsSample(at, "c", values)


BEFORE = {"preemptions": 1.0, "generated_tokens": 50.0, "prefix_queries": 10.0, "prefix_hits": 0.0}
AFTER = {"preemptions": 3.0, "generated_tokens": 950.0, "prefix_queries": 50.0, "prefix_hits": 10.0}
SAMPLES = [
    sample(100.0, running=0, waiting=0, kv_usage=0.0, **BEFORE),
    sample(101.0, running=4, waiting=2, kv_usage=0.4),
    sample(102.0, running=2, waiting=0, kv_usage=0.1),
    sample(103.0, running=0, waiting=0, kv_usage=0.0, **AFTER),
]


def test_what_the_samples_of_a_cell_say() -> None:
    assert server_load(SAMPLES, 100.5, 102.9, (100.6, 102.5)) == ServerLoad(
        running_max=4.0,
        running_mean=3.0,
        waiting_max=2.0,
        kv_usage_max=0.4,
        preemptions=2.0,
        generated_tokens=900.0,
        restarted=False,
        prefix_hit_ratio=0.25,
    )


def test_counters_are_only_given_when_they_were_read_before_and_after() -> None:
    late, early = server_load(SAMPLES, 99.0, 102.0), server_load(SAMPLES, 100.5, 103.5)
    for load in (late, early, server_load(SAMPLES[:1]), server_load([])):
        assert (load.preemptions, load.generated_tokens, load.prefix_hit_ratio) == (None, None, None)
    assert server_load([]) == ServerLoad()


def test_a_counter_that_appears_with_its_first_event_started_at_zero() -> None:
    samples = [sample(1.0, running=0), sample(2.0, running=0, generated_tokens=30)]
    assert server_load(samples).generated_tokens == 30.0
    assert server_load([sample(1.0), sample(2.0, generated_tokens=30)]).generated_tokens is None


def test_a_restart_is_noticed() -> None:
    from_zero = [sample(1.0, generated_tokens=500), sample(2.0, generated_tokens=10)]
    assert server_load(from_zero) == ServerLoad(restarted=True)
    assert server_load([sample(1.0, started_s=1e9), sample(2.0, started_s=1e9 + 30)]).restarted
    assert not server_load([sample(1.0, started_s=1e9), sample(2.0)]).restarted


def test_counters_that_go_back_without_a_restart_that_shows() -> None:
    slowly = [sample(float(at), generated_tokens=50_000 - 100 * at) for at in range(1, 5)]
    assert server_load(slowly) == ServerLoad(decreased=True)
    one, other = {"generated_tokens": 10, "started_s": 2e9}, {"generated_tokens": 900, "started_s": 1e9}
    behind_one_address = [sample(1.0, **other), sample(2.0, **one), sample(3.0, **other)]
    assert server_load(behind_one_address) == ServerLoad(decreased=True)
    same_process = [sample(1.0, **other), sample(2.0, **other | {"generated_tokens": 5})]
    assert server_load(same_process) == ServerLoad(decreased=True)
    restarted = [sample(1.0, **other), sample(2.0, **one | {"generated_tokens": 800})]  # it counted on at once
    assert server_load(restarted) == ServerLoad(restarted=True)
