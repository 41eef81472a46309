"""The records of a run as OpenTelemetry spans, one for each request, sent to a receiver of OTLP.

Names and attributes follow the semantic conventions for generative AI; docs/tracing.md lists them. Times and token
counts are sent, and never a prompt, an answer or the text of an error.
"""

import os
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.analysis import derive
from harness.errors import HarnessError, reason_of
from harness.report.export import Exported, dated_records
from harness.rundir.manifest import CellRun, Run
from harness.rundir.records import CUT, Request

OTLP = "otlp"  # the value of --to
EXTRA = "otel"  # the optional dependencies of pyproject.toml
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # the first one wins
BATCH = 512
PREFIX = "amd_llm_load"
_OPERATIONS = {"chat": "chat", "completions": "text_completion", "embeddings": "embeddings"}


def send_spans(folder: Path) -> Exported:
    """Send one span for each record of a run directory to the receiver that the environment names.

    Sending a run again sends spans with the same ids. Raises HarnessError without a receiver or the packages, for a run
    without records or without times of day, and when the receiver does not take the spans.
    """
    endpoint = _receiver_address()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError:
        raise HarnessError(
            f"--to {OTLP}: needs packages of OpenTelemetry, which are not installed",
            next_step=f"pip install 'amd-llm-load[{EXTRA}]'",
        ) from None
    damaged: list[int] = []
    run, records = dated_records(folder, damaged)
    # What the environment says of the resource (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) goes first.
    resource = Resource(_run_attributes(run)).merge(OTELResourceDetector().detect())
    cells = {cell.id: cell for cell in run.cells}
    spans = (
        _make_span(run, cells.get(request.cell), request, wall_s, resource)
        for request, wall_s in records
        if wall_s is not None
    )
    sent = 0
    exporter = OTLPSpanExporter()
    try:
        while batch := list(islice(spans, BATCH)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ValueError("the receiver refused them")  # the exporter has logged why
            sent += len(batch)
    except (OSError, ValueError) as error:  # of `requests`: both
        raise HarnessError(
            f"{endpoint}: spans cannot be sent ({reason_of(error)}); {sent:,} were sent before",
            next_step="Is a receiver of OTLP over HTTP at this address? Then run the command again.",
        ) from None
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    if not sent:
        raise HarnessError(f"{folder}: no record has a time of day, which a span needs")
    return Exported(sent, len(damaged))


def _receiver_address() -> str:
    """The variable of the receiver with its address, without a password."""
    for name in ENDPOINTS:
        if value := os.environ.get(name, "").strip():
            if urlsplit(value).scheme not in ("http", "https"):
                raise HarnessError(f"{name}: must be an address that begins with http:// or https:// (got '{value}')")
            return f"{name}={value.rpartition('@')[2]}"
    raise HarnessError(
        f"--to {OTLP}: {ENDPOINTS[1]} is not set",
        next_step="Set it to a receiver of OTLP over HTTP, such as http://127.0.0.1:4318.",
    )


def _run_attributes(run: Run) -> dict[str, str | bool]:
    return {
        "service.name": "amd-llm-load",
        "service.version": run.versions.get("amd-llm-load", "unknown"),
        f"{PREFIX}.run": run.id,
        f"{PREFIX}.scenario": run.scenario_name,
        f"{PREFIX}.machine": run.machine.name,
        f"{PREFIX}.simulated": run.simulated,
    }


def _make_span(run: Run, cell: CellRun | None, request: Request, wall_s: float, resource: Any) -> Any:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    digest = sha256(f"{run.id}/{request.cell}/{request.process}/{request.id}/{request.sent_s}".encode()).digest()
    attributes = {name: value for name, value in _request_attributes(run, cell, request).items() if value is not None}
    failed = request.error is not None and request.error not in CUT
    start_ns = round(wall_s * 1e9)
    return ReadableSpan(
        name=f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
        context=SpanContext(
            int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]), False, TraceFlags(TraceFlags.SAMPLED)
        ),
        resource=resource,
        attributes=attributes,
        kind=SpanKind.CLIENT,
        status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
        start_time=start_ns,
        end_time=start_ns + max(0, round(request.ended_s * 1e9)),
    )


def _request_attributes(run: Run, cell: CellRun | None, request: Request) -> dict[str, Any]:
    """The attributes of a request. None: not known."""
    load = run.scenario.loads.get(cell.load if cell else request.load)
    served = cell.served_by if cell else None
    address = urlsplit(served.gateway.url if served and served.gateway else served.url if served else "")
    succeeded = request.error is None
    outcome = "succeeded" if succeeded else request.error if request.error in CUT else "failed"
    return {
        "gen_ai.operation.name": _OPERATIONS[load.endpoint if load else "chat"],
        # Of a server that does not say which engine it is, the API is known.
        "gen_ai.provider.name": (served.startup.engine if served and served.startup else None) or "openai",
        "gen_ai.request.model": (served.model if served else None) or run.scenario.model,
        "gen_ai.request.stream": True if load and load.stream and load.endpoint != "embeddings" else None,
        "gen_ai.request.max_tokens": request.asked_tokens,
        "gen_ai.response.finish_reasons": [request.finish] if request.finish else None,
        "gen_ai.response.time_to_first_chunk": derive.ttft_s(request),
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": request.reasoning_tokens,
        "gen_ai.conversation.id": (
            None if request.conversation is None else f"{request.cell}/{request.process}/{request.conversation}"
        ),
        "server.address": address.hostname,
        "server.port": (address.port or {"http": 80, "https": 443}.get(address.scheme)) if address.hostname else None,
        "http.response.status_code": request.status,
        "error.type": (
            None if outcome != "failed" else str(request.status) if request.error == "http" and request.status
            else request.error
        ),
        f"{PREFIX}.outcome": outcome,
        f"{PREFIX}.phase": request.phase,
        f"{PREFIX}.server": cell.server if cell else None,
        f"{PREFIX}.load": cell.load if cell else request.load,
        f"{PREFIX}.repeat": cell.repeat if cell else None,
        f"{PREFIX}.cell": request.cell,
        f"{PREFIX}.user_class": request.user_class,
        f"{PREFIX}.user": request.user,
        f"{PREFIX}.turn": request.turn,
        f"{PREFIX}.request_id": request.id,
        f"{PREFIX}.time_per_output_token": derive.tpot_s(request) if succeeded else None,
    }  # fmt: skip
