"""The live numbers as tables, files of stock Locust, and metrics of Prometheus."""

import csv
import io
import logging
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from harness.load.live_metrics import ALL, LiveNumbers, Observed, RequestInFlight
from harness.load.live_outputs import (
    LATENCIES,
    PRINT_S,
    StockOutput,
    html_section,
    insert_html_section,
    metrics_app,
    metrics_of,
    text_table,
    whole_csv,
)
from harness.scenario.check_syntax import parse_check
from tests.support.expositions import samples_of
from tests.support.live_deltas import Worker, delta, request
from tests.support.wording import Wording

SLOS = "ttft<=150ms, tpot<=30ms"


def numbers_of(*requests: Any, slos: str = SLOS) -> LiveNumbers:
    """Live numbers of a load that has ended."""
    counter = Worker(parse_check(f"attainment({slos}) >= 0").slos if slos else ())
    for one in requests:
        counter.add(one)
    numbers = LiveNumbers(slos=slos)
    numbers.add_delta("a", delta(counter, {"Chat": 2}))
    numbers.tick(3, Observed(None))
    return numbers


REQUESTS = (
    request(prompt_tokens=16), request(ttft=0.2, prompt_tokens=17), request(error="timeout"),
    request(error="abandoned"), request(user_class="<Agent>", prompt_tokens=1, tokens=5),
)  # fmt: skip


def test_table_csv_and_report_have_the_same_numbers_and_escape_names(wording: Wording) -> None:
    lines = text_table(numbers_of(*REQUESTS), final=True)
    rows = [line.split()[:4] for line in lines[1:4]]
    assert rows == [["<Agent>", "1", "0", "0"], ["Chat", "4", "1", "2"], [ALL, "5", "1", "2"]]
    assert str(SLOS) in lines[4] and "40.0" in lines[4]
    wording(lines[4])
    assert len(text_table(numbers_of(*REQUESTS))) == 6  # the last seconds as well
    wording(text_table(numbers_of())[-1])
    numbers = numbers_of(*REQUESTS)
    by_class = {row["user_class"]: row for row in csv.DictReader(io.StringIO(whole_csv(numbers)))}
    assert {name: (row["ended"], row["failed"], row["tokens"]) for name, row in by_class.items()} == {
        ALL: ("5", "1", "27"), "<Agent>": ("1", "0", "5"), "Chat": ("4", "1", "22"),
    }  # fmt: skip
    assert by_class["Chat"]["attainment"] == "0.25" and by_class["Chat"]["slos"] == SLOS
    section = html_section(numbers)
    assert "<td>&lt;Agent&gt;</td>" in section and "<Agent>" not in section
    assert insert_html_section('<body><div id="root"></div></body>', numbers).startswith("<body><section")


class Scraped(Collector):
    def __init__(self, numbers: LiveNumbers) -> None:
        self.numbers = numbers

    def collect(self) -> Iterator[Metric]:
        return metrics_of(self.numbers, users=3, running=True, workers=None, missing=None)


def scraped(numbers: LiveNumbers) -> dict[tuple[str, ...], float]:
    return samples_of(generate_latest(Scraped(numbers)).decode())


def test_requests_of_the_warm_up_count_while_they_are_in_flight_and_then_their_tokens() -> None:
    """As of a live load whose first user warms the server up: nobody is missing, and no token."""
    counter, numbers, now = Worker(), LiveNumbers(), time.monotonic()
    warm = RequestInFlight("Chat", now - 20, 0.5, chunks=40, warmup=True)
    first, second = (RequestInFlight("Chat", now - 20, 0.5, chunks=40), RequestInFlight("Chat", now - 20))
    counter.note(warm, first, second)
    numbers.add_delta("a", delta(counter, {"Chat": 3}))
    found = numbers.whole_test()[ALL]
    assert (found["ttft_n"], found["tokens"], numbers.waiting()[ALL]) == (3, 80, 1)
    assert found["output_tok_s"] == pytest.approx(4, rel=0.05)
    counter.add(request(phase="warmup", output_tokens=41, ended_s=20.0))
    counter.note(first, second)
    numbers.add_delta("a", delta(counter, {"Chat": 2}))
    found = numbers.whole_test()[ALL]
    assert (numbers.warmup, found["ended"], found["ttft_n"], found["tokens"]) == (1, 0, 2, 81)


def test_a_scrape_may_name_its_metrics() -> None:
    statuses: list[str] = []
    asked = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": "name[]=amd_llm_load_live_users"}
    body = metrics_app(Scraped(numbers_of()))(asked, lambda status, _headers: statuses.append(status))
    assert (statuses, samples_of(b"".join(body).decode())) == (["200 OK"], {("amd_llm_load_live_users",): 3})


def test_prometheus_gets_exact_counts_and_sums() -> None:
    samples = scraped(numbers_of(*REQUESTS))
    prefix, ttft = "amd_llm_load_live", LATENCIES["ttft"][0]
    outcomes = {name: samples[f"{prefix}_requests_total", name, "Chat"] for name in ("succeeded", "failed", "cut")}
    assert outcomes == {"succeeded": 2, "failed": 1, "cut": 1}
    assert samples[f"{prefix}_errors_total", "timeout"] == 1
    assert samples[f"{prefix}_slo_met_requests_total", "Chat"] == 1
    assert (samples[f"{prefix}_users",], samples[f"{prefix}_running",]) == (3, 1)
    assert samples[f"{prefix}_requests_in_flight", "Chat"] == 2
    assert [samples[f"{ttft}_bucket", bound, "Chat"] for bound in ("0.08", "0.25", "+Inf")] == [0, 2, 2]
    assert samples[f"{ttft}_count", "Chat"] == 2 and samples[f"{ttft}_sum", "Chat"] == pytest.approx(0.3)
    assert samples[f"{prefix}_output_tokens_total", "Chat"] == 22
    assert (samples[f"{prefix}_requests_waiting", "Chat"], samples[f"{prefix}_oldest_waiting_seconds",]) == (0, 0)
    usage = "gen_ai_client_token_usage"
    assert samples[f"{usage}_sum", "input", "Chat"] == 33 and samples[f"{usage}_sum", "output", "Chat"] == 22
    assert samples[f"{usage}_count", "input", "Chat"] == 2
    assert (f"{prefix}_workers",) not in samples  # a single process
    without_slos = scraped(numbers_of(*REQUESTS, slos=""))
    assert not [name for name, *_ in without_slos if "slo_met" in name]


def test_the_table_is_printed_every_few_seconds_of_a_load(tmp_path: Path) -> None:
    options = Namespace(
        headless=True, print_stats=False, only_summary=False, csv_prefix=str(tmp_path / "a/x"), html_file=None
    )
    output, numbers = StockOutput(options), numbers_of(*REQUESTS)
    log, printed = logging.getLogger("locust.stats_logger"), io.StringIO()
    log.addHandler(handler := logging.StreamHandler(printed))
    level, log.level = log.level, logging.INFO
    try:
        for _ in range(2 * PRINT_S):
            output.update(numbers)
        assert printed.getvalue().count("LLM metrics") == 2 == printed.getvalue().count("last 10 s")
        output.finish(numbers)
    finally:
        log.removeHandler(handler)
        log.level = level
    history = list(csv.DictReader((tmp_path / "a/x_llm_history.csv").read_text().splitlines()))
    assert [row["user_class"] for row in history] == [ALL, "<Agent>", "Chat"]  # of the one point: no line comes twice
    assert len((tmp_path / "a/x_llm.csv").read_text().splitlines()) == 4
