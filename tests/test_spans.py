"""`harness export --to otlp`: one span for each record, taken by a real receiver of OTLP over HTTP."""

import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status as OtlpStatus

from harness.errors import HarnessError
from harness.process import free_port
from harness.report import spans
from harness.rundir.manifest import Startup
from tests.command import called
from tests.http_double import Handler, listening
from tests.made_runs import MONOTONIC_S, WALL_S, request, served_by, write_lines, write_made_run

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Received:
    """What a receiver got: requests of OTLP, and their headers."""

    def __init__(self) -> None:
        self.batches: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.url = ""

    @property
    def spans(self) -> list[OtlpSpan]:
        scopes = [scope for batch in self.batches for each in batch.resource_spans for scope in each.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    @property
    def resource(self) -> dict[str, Any]:
        return plain(self.batches[0].resource_spans[0].resource.attributes)


def plain(attributes: Any) -> dict[str, Any]:
    return {one.key: value_of(one.value) for one in attributes}


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return [value_of(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def receiver() -> Iterator[Received]:
    got = Received()

    class Double(Handler):
        def do_POST(self) -> None:
            body = self.body()
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces" and got.status == 200:
                got.headers.append({name.lower(): value for name, value in self.headers.items()})
                got.batches.append(ExportTraceServiceRequest.FromString(body))
            self.answer(got.status if self.path == "/v1/traces" else 404)

    with listening(Double) as got.url:
        yield got


@pytest.fixture
def otlp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    with receiver() as got:
        monkeypatch.setenv(ENDPOINT, got.url)
        yield got


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "made"
    write_made_run(folder, served=lambda cell: served_by(startup=Startup(engine="vllm")))
    return folder


def test_one_span_for_each_record_with_its_exact_times(run: Path, otlp: Received) -> None:
    ok = request(
        id="a", sent_s=MONOTONIC_S + 3, conversation=4, turn=1, cached_tokens=5, reasoning_tokens=2, finish="stop"
    )
    records = [
        ok,
        request(id="w", phase="warmup"),
        request(id="h", error="http", status=500, chunks_s=[], output_tokens=None, finish=None, message="my prompt"),
        request(id="t", error="timeout", status=None, finish=None),
        request(id="u", error="abandoned", finish=None),
    ]
    write_lines(run / "requests.jsonl", records)
    # The process of `request` has no start mark in this run: its clock is that of the cell.
    assert spans.send_spans(run) == (5, 0)
    first, warmup, failed, late, left = otlp.spans
    attributes = plain(first.attributes)
    assert (first.name, first.kind) == ("chat m", OtlpSpan.SPAN_KIND_CLIENT)
    assert first.start_time_unix_nano == pytest.approx((WALL_S + 3) * 1e9, abs=1000)
    assert first.end_time_unix_nano - first.start_time_unix_nano == 1_500_000_000
    assert attributes == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "m",
        "gen_ai.request.stream": True, "gen_ai.request.max_tokens": 11, "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.5, "gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": 11,
        "gen_ai.usage.cache_read.input_tokens": 5, "gen_ai.usage.reasoning.output_tokens": 2,
        "gen_ai.conversation.id": "r1-a-x/7/4", "server.address": "127.0.0.1", "server.port": 8000,
        "http.response.status_code": 200, "amd_llm_load.outcome": "succeeded", "amd_llm_load.phase": "measured",
        "amd_llm_load.server": "a", "amd_llm_load.load": "x", "amd_llm_load.repeat": 1, "amd_llm_load.cell": "r1-a-x",
        "amd_llm_load.user_class": "BatchAgent", "amd_llm_load.user": 0, "amd_llm_load.turn": 1,
        "amd_llm_load.request_id": "a", "amd_llm_load.time_per_output_token": pytest.approx(0.1),
    }  # fmt: skip
    assert plain(warmup.attributes)["amd_llm_load.phase"] == "warmup"
    outcomes = [
        (one.status.code, plain(one.attributes).get("error.type"), plain(one.attributes)["amd_llm_load.outcome"])
        for one in (first, failed, late, left)
    ]
    unset, error = OtlpStatus.STATUS_CODE_UNSET, OtlpStatus.STATUS_CODE_ERROR
    assert outcomes == [
        (unset, None, "succeeded"), (error, "500", "failed"), (error, "timeout", "failed"), (unset, None, "abandoned"),
    ]  # fmt: skip
    assert otlp.resource["amd_llm_load.run"] == "made" and otlp.resource["service.name"] == "amd-llm-load"
    assert otlp.resource["amd_llm_load.simulated"] is False
    assert b"my prompt" not in b"".join(batch.SerializeToString() for batch in otlp.batches)


def test_a_second_export_sends_the_same_ids(run: Path, otlp: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "BATCH", 7)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    number = len((run / "requests.jsonl").read_bytes().splitlines())
    assert spans.send_spans(run) == spans.send_spans(run) == (number, 0)
    ids = [(one.trace_id, one.span_id) for one in otlp.spans]
    assert len(otlp.batches) == 2 * -(-number // 7)
    assert ids[:number] == ids[number:] and len(set(ids)) == number
    assert {one["x-token"] for one in otlp.headers} == {"abc"}
    assert otlp.resource["service.name"] == "mine"


def test_the_command_says_what_it_sent_and_where_it_cannot(run: Path, otlp: Received, tmp_path: Path) -> None:
    with (run / "requests.jsonl").open("ab") as file:
        file.write(b'{"id": 3}\n')
    number = len((run / "requests.jsonl").read_bytes().splitlines()) - 1
    done = called("export", str(run), "--to", "otlp", cwd=tmp_path)
    assert done == (0, f"otlp: {number} spans\n", "1 line of requests.jsonl left out: not readable\n")
    otlp.status = 400
    unreachable = {ENDPOINT: f"http://user:secret@127.0.0.1:{free_port()}", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    for env, said in (
        ({}, f"{ENDPOINT}={otlp.url}: spans cannot be sent"),
        (unreachable, "spans cannot be sent"),
        (
            {ENDPOINT: "127.0.0.1:4318"},
            "must be an address that begins with http:// or https:// (got '127.0.0.1:4318')",
        ),
        ({ENDPOINT: ""}, f"{ENDPOINT} is not set"),
    ):
        code, out, err = called("export", str(run), "--to", "otlp", cwd=tmp_path, env=env)
        assert (code, out) == (1, "") and said in err and "secret" not in err


def test_without_its_packages_or_times_there_is_an_error(
    run: Path, otlp: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "processes.jsonl").unlink()
    with pytest.raises(HarnessError, match="no record has a time of day"):
        spans.send_spans(run)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(HarnessError) as caught:
        spans.send_spans(run)
    assert caught.value.next_step == "pip install 'amd-llm-load[otel]'"
    assert otlp.batches == []
