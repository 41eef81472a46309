"""LLM metrics of stock Locust: in its log, its CSV files, its HTML report, and for Prometheus."""

import csv
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from harness.analysis.summarize import summarize
from harness.base.process import free_port
from harness.imports.write import import_file
from harness.load.live_metrics import ALL, LiveNumbers, Observed
from harness.load.live_outputs import (
    LATENCIES,
    PRINT_S,
    LoadSnapshot,
    StockOutput,
    html_section,
    insert_html_section,
    text_table,
    whole_csv,
)
from harness.scenario import Load, Scenario, Server
from harness.scenario.check_syntax import parse_check
from harness.serve.document import (
    MonitoringTarget,
    list_panels,
    make_dashboard,
    make_monitoring,
    make_prometheus_config,
)
from tests.support.command import PATIENCE_S, Done, called, until
from tests.support.load_runs import by_hand, composed, end, log_of, start
from tests.unit.run.test_live_numbers import Worker, delta, request

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


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """The samples of an exposition: by name and the values of labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


REQUESTS = (
    request(prompt_tokens=16), request(ttft=0.2, prompt_tokens=17), request(error="timeout"),
    request(error="abandoned"), request(user_class="<Agent>", prompt_tokens=1, tokens=5),
)  # fmt: skip


def test_table_csv_and_report_have_the_same_numbers_and_escape_names() -> None:
    lines = text_table(numbers_of(*REQUESTS), final=True)
    rows = [line.split()[:4] for line in lines[1:4]]
    assert rows == [["<Agent>", "1", "0", "0"], ["Chat", "4", "1", "2"], [ALL, "5", "1", "2"]]
    assert lines[4].startswith(f"Goodput: requests that met {SLOS} (40.0% of the requests that ended, ")
    assert len(text_table(numbers_of(*REQUESTS))) == 6  # the last seconds as well
    assert "no request has ended yet" in text_table(numbers_of())[-1]
    numbers = numbers_of(*REQUESTS)
    by_class = {row["user_class"]: row for row in csv.DictReader(io.StringIO(whole_csv(numbers)))}
    assert {name: (row["ended"], row["failed"], row["tokens"]) for name, row in by_class.items()} == {
        ALL: ("5", "1", "27"), "<Agent>": ("1", "0", "5"), "Chat": ("4", "1", "22"),
    }  # fmt: skip
    assert by_class["Chat"]["attainment"] == "0.25" and by_class["Chat"]["slos"] == SLOS
    section = html_section(numbers)
    assert "<td>&lt;Agent&gt;</td>" in section and "<Agent>" not in section
    assert insert_html_section('<body><div id="root"></div></body>', numbers).startswith("<body><section")


def test_prometheus_gets_exact_counts_and_sums() -> None:
    samples = samples_of(generate_latest(LoadSnapshot(numbers_of(*REQUESTS), 3, True, None, 0)).decode())
    prefix, ttft = "amd_llm_load_live", LATENCIES["ttft"][0]
    outcomes = {name: samples[f"{prefix}_requests_total", name, "Chat"] for name in ("succeeded", "failed", "cut")}
    assert outcomes == {"succeeded": 2, "failed": 1, "cut": 1}
    assert samples[f"{prefix}_errors_total", "timeout"] == 1
    assert samples[f"{prefix}_slo_met_requests_total", "Chat"] == 1
    assert (samples[f"{prefix}_users",], samples[f"{prefix}_running",]) == (3, 1)
    assert samples[f"{prefix}_requests_in_flight", "Chat"] == 2
    assert [samples[f"{ttft}_bucket", bound, "Chat"] for bound in ("0.08", "0.25", "+Inf")] == [0, 2, 2]
    assert samples[f"{ttft}_count", "Chat"] == 2 and samples[f"{ttft}_sum", "Chat"] == pytest.approx(0.3)
    usage = "gen_ai_client_token_usage"
    assert samples[f"{usage}_sum", "input", "Chat"] == 33 and samples[f"{usage}_sum", "output", "Chat"] == 22
    assert samples[f"{usage}_count", "input", "Chat"] == 2
    assert (f"{prefix}_workers",) not in samples  # a single process
    without_slos = generate_latest(LoadSnapshot(numbers_of(*REQUESTS, slos=""), 3, True, None, 0)).decode()
    assert not [name for name, *_ in samples_of(without_slos) if "slo_met" in name]


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


def test_what_stock_locust_writes_is_what_was_recorded(tmp_path: Path, engine: str) -> None:
    options = ["--output-tokens", "5", "--slos", "e2e<=3600s", "--csv", "out/x", "--html", "page.html"]
    records = by_hand(tmp_path, engine, "batch", *options, "--turns", "7", "--processes", "2")
    assert "--turns: BatchAgent ignores this option (got '7')" in log_of(tmp_path)
    assert "--output-tokens: " not in log_of(tmp_path)
    rows = {row["user_class"]: row for row in csv.DictReader((tmp_path / "out/x_llm.csv").read_text().splitlines())}
    assert {name: int(row["ended"]) for name, row in rows.items()} == {ALL: len(records), "BatchAgent": len(records)}
    assert int(rows[ALL]["tokens"]) == sum(one.output_tokens or 0 for one in records) == 5 * len(records)
    assert rows[ALL]["attainment"] == "1.0" and rows[ALL]["goodput_req_s"] == rows[ALL]["req_s"]
    assert (tmp_path / "out/x_llm_history.csv").read_text().startswith("wall_s,t_s,user_class,")
    (line,) = [line for line in log_of(tmp_path).splitlines() if line.startswith("BatchAgent ")]
    assert line.split()[1:4] == [str(len(records)), "0", "0"]
    summary = summarize(import_file(tmp_path / "r.jsonl", tmp_path / "runs", again=True))
    (row,) = summary.rows
    assert (row.load, row.pooled.sent, row.pooled.succeeded) == ("batchagent", len(records), len(records))
    assert summary.valid is None  # no file shows whether the load generator kept up
    page = (tmp_path / "page.html").read_text()
    assert page.count('<section id="llm-metrics">') == 1 and f"<td>{len(records)}</td>" in page


def test_a_report_of_records_is_made_once_and_says_what_is_no_record(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    lines = [msgspec.json.encode(request(index=number, id=str(number), sent_s=5.0 + number)) for number in range(3)]
    (folder / "requests.jsonl").write_bytes(b"\n".join(lines))

    def report(given: Path, *more: str) -> Done:
        return called("report", str(given), "--runs", "runs", *more, cwd=tmp_path)

    done = report(folder, "--format", "json")
    assert (done.code, done.err) == (0, "") and json.loads(done.out)["rows"][0]["pooled"]["sent"] == 3
    assert report(folder / "requests.jsonl").code == 0
    (folder / "requests.jsonl").write_bytes(lines[0] + b"\n" + lines[1].replace(b'"measured"', b'"x"'))
    done = report(folder)
    assert done.code == 1 and "requests.jsonl: record 2: " in done.err
    (folder / "requests.jsonl").write_bytes(lines[0].replace(b'"measured"', b'"warmup"'))
    assert "holds only warm-up requests" in report(folder).err
    assert len(list((tmp_path / "runs").iterdir())) == 1


@contextmanager
def loaded(folder: Path, engine: str, *more: str) -> Iterator[str]:
    """The address of /metrics of a load that goes on."""
    port = str(free_port())
    options = ["--headless", "--users", "2", "--spawn-rate", "10", "--output-tokens", "3", "--metrics-port", port]
    child = start(folder, engine, "batch", *options, "--slos", "e2e<=3600s", *more)
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        until(lambda: child.poll() is not None or b"requests_total{" in read(url))
        assert child.poll() is None, log_of(folder)
        yield url
        child.send_signal(signal.SIGTERM)
        assert end(child) == 0, log_of(folder)
    finally:
        child.kill()
        child.wait()


def read(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        if error.code != 503:  # a Prometheus that has just started
            raise
        error.close()
        return b""
    except OSError:  # nothing listens yet
        return b""


def test_metrics_have_a_port_of_their_own_without_a_web_ui(tmp_path: Path, engine: str) -> None:
    with loaded(tmp_path, engine, "--processes", "2") as url:
        samples = samples_of(read(url).decode())
        ended = samples["amd_llm_load_live_requests_total", "succeeded", "BatchAgent"]
        assert ended >= 1 == samples["amd_llm_load_live_running",]
        assert samples["amd_llm_load_live_slo_met_requests_total", "BatchAgent"] == ended
        assert samples["gen_ai_client_token_usage_sum", "output", "BatchAgent"] == 3 * ended
        assert samples["amd_llm_load_live_workers",] == 2
        name = ("amd_llm_load_live_requests_total", "succeeded", "BatchAgent")
        until(lambda: samples_of(read(url).decode())[name] > ended)
    assert "Traceback" not in log_of(tmp_path)


@pytest.mark.parametrize("port", ["70000", "taken"])
def test_a_port_for_metrics_that_cannot_be_used_ends_the_start(tmp_path: Path, engine: str, port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = str(taken.getsockname()[1]) if port == "taken" else port
        assert end(start(tmp_path, engine, "batch", "--headless", "--metrics-port", given)) == 1
    assert f"--metrics-port: cannot listen on 127.0.0.1:{given} (" in log_of(tmp_path)
    assert "Traceback" not in log_of(tmp_path)


def test_a_compose_file_with_grafana_has_all_that_its_services_need() -> None:
    plain = Scenario(
        version=1, question="q", model="m", servers={"s": Server(template="simulated")}, loads={"l": Load(user="chat")},
    )  # fmt: skip
    before, after = (yaml.safe_load(composed(plain, workers=2, grafana=with_it)) for with_it in (False, True))
    services, configs = after["services"], after["configs"]
    assert set(services) - set(before["services"]) == {"prometheus", "grafana"}
    command = services["locust"]["command"]
    assert command[command.index("--metrics-port") :] == ["--metrics-port", "9646", "--metrics-host", "0.0.0.0"]
    mounted = [one["source"] for name in ("prometheus", "grafana") for one in services[name]["configs"]]
    assert sorted(mounted) == sorted(configs)
    jobs = json.loads(configs["prometheus"]["content"])["scrape_configs"]
    targets = [(job["job_name"], job["static_configs"][0]["targets"]) for job in jobs]
    assert targets == [("load", ["locust:9646"]), ("server", ["server:8000"])]
    shown = json.loads(configs["grafana-dashboard"]["content"].replace("$$", "$"))
    assert [panel["title"] for panel in shown["panels"]] == [title for title, _, _ in list_panels()]
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"] and "ports" not in services["prometheus"]
    images = [services[name]["image"] for name in ("prometheus", "grafana")]
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)


def test_the_dashboard_has_the_structure_that_grafana_reads() -> None:
    """Grafana is in no package index that this project may use; what its documentation requires is checked here."""
    dashboard = make_dashboard()
    assert dashboard["uid"] and dashboard["title"] and dashboard["schemaVersion"] >= 36
    places: set[tuple[int, int]] = set()
    for number, panel in enumerate(dashboard["panels"], start=1):
        assert (panel["id"], panel["type"], panel["datasource"]["uid"]) == (number, "timeseries", "prometheus")
        box = panel["gridPos"]
        cells = {(box["x"] + x, box["y"] + y) for x in range(box["w"]) for y in range(box["h"])}
        assert not cells & places and max(x for x, _ in cells) < 24, "panels do not overlap, and a line has 24 columns"
        places |= cells
        assert panel["fieldConfig"]["defaults"]["unit"] in ("s", "reqps", "short", "percentunit")
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
    source = make_monitoring(None)["configs"]["grafana-source"]["content"].replace("$$", "$")
    assert [(one["uid"], one["type"]) for one in json.loads(source)["datasources"]] == [("prometheus", "prometheus")]


def test_a_real_prometheus_reads_them(tmp_path: Path, engine: str) -> None:
    program = shutil.which("prometheus") or ""
    if not program:
        reason = "Prometheus is not installed (apt install prometheus)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with loaded(tmp_path, engine) as url:
        target = url.removeprefix("http://").removesuffix("/metrics")
        config = make_prometheus_config(target, MonitoringTarget(engine.removeprefix("http://"), "/metrics"))
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        port = free_port()
        command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
        with (tmp_path / "prometheus.log").open("w") as log:
            child = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
            )
        try:
            api = f"http://127.0.0.1:{port}/api/v1"

            def value(query: str) -> float | None:
                answer = read(f"{api}/query?{urllib.parse.urlencode({'query': query})}")
                result = json.loads(answer)["data"]["result"] if answer else []
                return float(result[0]["value"][1]) if result else None

            ttft = LATENCIES["ttft"][0]
            rate = "sum(rate(amd_llm_load_live_requests_total[1m]))"
            until(lambda: (value(rate) or 0) > 0)
            median = value(f"histogram_quantile(0.5, sum by (le) ({ttft}_bucket))")
            assert median is not None and median > 0
            assert value("sum(amd_llm_load_live_slo_met_requests_total) / sum(amd_llm_load_live_requests_total)") == 1
            targets = json.loads(read(f"{api}/targets"))["data"]["activeTargets"]
            assert [(one["health"], one["lastError"]) for one in targets] == [("up", "")] * 2
            queries = {query: legend for _, _, panel in list_panels() for legend, query in panel.items()}
            shown = [query for query, legend in queries.items() if legend != "{{error_type}}"]  # there are no errors
            until(lambda: None not in [value(query) for query in shown])
            assert value(next(query for query, legend in queries.items() if legend == "{{error_type}}")) is None
        finally:
            child.terminate()
            child.wait()
