"""LLM metrics of stock Locust: in its log, its CSV files, its HTML report, and for Prometheus."""

import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from harness.base.process import free_port
from harness.imports.write import import_file
from harness.load.live_metrics import ALL
from harness.load.live_outputs import LATENCIES
from harness.numbers.summarize import summarize
from harness.serve.document import list_panels, make_prometheus_config
from tests.support.command import PATIENCE_S, Done, called, until
from tests.support.expositions import samples_of
from tests.support.live_deltas import request
from tests.support.load_runs import by_hand, end, log_of, start


def test_what_stock_locust_writes_is_what_was_recorded(tmp_path: Path, engine: str) -> None:
    options = ["--output-tokens", "5", "--check", "e2e_p95<=3600s", "--csv", "out/x", "--html", "page.html"]
    records = by_hand(tmp_path, engine, "batch", *options, "--turns", "7", "--processes", "2")
    assert "--turns: BatchAgent " in log_of(tmp_path)
    assert "--output-tokens: " not in log_of(tmp_path)
    rows = {row["user_class"]: row for row in csv.DictReader((tmp_path / "out/x_llm.csv").read_text().splitlines())}
    assert {name: int(row["ended"]) for name, row in rows.items()} == {ALL: len(records), "BatchAgent": len(records)}
    assert int(rows[ALL]["tokens"]) == sum(one.output_tokens or 0 for one in records) == 5 * len(records)
    assert rows[ALL]["attainment"] == "1.0" and rows[ALL]["goodput"] == rows[ALL]["requests_per_s"]
    assert (tmp_path / "out/x_llm_history.csv").read_text().startswith("wall_s,t_s,user_class,")
    (line,) = [line for line in log_of(tmp_path).splitlines() if line.startswith("BatchAgent ")]
    assert line.split()[1:4] == [str(len(records)), "0", "0"]
    summary = summarize(import_file(tmp_path / "r.jsonl", tmp_path / "runs", reuse=True))
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
    assert "warm-up" in report(folder).err
    assert len(list((tmp_path / "runs").iterdir())) == 1


@contextmanager
def loaded(folder: Path, engine: str, *more: str) -> Iterator[str]:
    """The address of /metrics of a load that goes on."""
    port = str(free_port())
    options = ["--headless", "--users", "2", "--spawn-rate", "10", "--output-tokens", "3", "--metrics-port", port]
    child = start(folder, engine, "batch", *options, "--check", "e2e_p95<=3600s", *more)
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


def test_a_port_for_metrics_that_cannot_be_used_ends_the_start(tmp_path: Path, engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert end(start(tmp_path, engine, "batch", "--headless", "--metrics-port", str(port))) == 1
    assert f"127.0.0.1:{port} (" in log_of(tmp_path)
    assert "Traceback" not in log_of(tmp_path)


def test_a_real_prometheus_reads_them(tmp_path: Path, engine: str) -> None:
    program = shutil.which("prometheus") or ""
    if not program:
        reason = "Prometheus is not installed (apt install prometheus)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with loaded(tmp_path, engine) as url:
        config = make_prometheus_config(url, f"{engine}/metrics")
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
