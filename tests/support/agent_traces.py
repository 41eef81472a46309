"""Small recorded conversations in the form of the public formats, with our own words and numbers."""

import json
from pathlib import Path
from typing import Any

from harness.workload.agent_traces.conversation import Conversation
from harness.workload.agent_traces.trace_index import find_conversations, read_conversation

Json = dict[str, Any]

LIST_FILES: Json = {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object"}}}


def call(id: str, name: str = "list_files", arguments: Any = '{"folder": "."}') -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def edge_rows(id: str = "boat", **first: Any) -> list[Json]:
    """A conversation of three requests: a task, two results at once, a question of the user."""
    rows: list[Json] = [
        {"role": "user", "content": "Paint the boat.", "system": "You paint.", "tools": [LIST_FILES], **first},
        {"role": "assistant", "reasoning_content": "Which colours?", "tool_calls": [call("a"), call("b", "look", {})]},
        {"role": "tool", "delay_seconds": 0.25, "tool_results": [
            {"tool_call_id": "a", "content": "red.txt"}, {"tool_call_id": "b", "content": "a boat"}]},
        {"role": "assistant", "content": "It is red."},
        {"role": "user", "content": "Blue, please.", "delay_seconds": 3, "max_new_tokens": 9, "temperature": 0.5},
        {"role": "assistant", "tool_calls": [call("c")]},
    ]  # fmt: skip
    return [{"conversation_id": id, "turn": turn, **row} for turn, row in enumerate(rows, start=1)]


def weka_request(t: float, tokens: int, ids: list[int], **more: Any) -> Json:
    request = {"t": float(t), "type": "s", "model": "large", "in": tokens, "out": 10, "hash_ids": ids, **more}
    return {key: value for key, value in request.items() if value is not None}


def weka_file(*requests: Json, **more: Any) -> Json:
    return {"id": "w", "models": ["large"], "block_size": 4, "hash_id_scope": "local", "requests": [*requests], **more}


def sub_agent(t: float, duration_ms: float | None, *requests: Json, **more: Any) -> Json:
    entry = {"t": t, "type": "subagent", "agent_id": "s", "subagent_type": "Find", "requests": [*requests], **more}
    return entry if duration_ms is None else {**entry, "duration_ms": duration_ms, "status": "completed"}


def weka_with_sub_agents() -> Json:
    """Two sub-agents that start together after the first answer (at 5.5 s), and a parent that waits for both."""
    return weka_file(
        weka_request(0, 9, [1, 2], api_time=5.5, think_time=0.0),
        sub_agent(26.0, 20_000, weka_request(0, 8, [50, 51], api_time=3.0, think_time=0.0),
                  weka_request(7, 14, [50, 51, 52], api_time=2.0, think_time=4.0)),
        sub_agent(46.25, 40_000, weka_request(0, 12, [50, 51, 60], api_time=39.0, think_time=0.0)),
        weka_request(50, 17, [1, 2, 3, 4], api_time=4.0, think_time=44.0),
        weka_request(57, 21, [1, 2, 3, 4, 5], api_time=2.0, think_time=3.0),
    )  # fmt: skip


def span(name: str, start: str, end: str, messages: Any, output: str | None = None, **attributes: Any) -> Json:
    more = {f"gen_ai.{key.replace('__', '.')}": value for key, value in attributes.items()}
    made = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.input.messages": messages, **more}
    if output is not None:
        made["gen_ai.output.text"] = output
    day = "2026-05-04T10:00:"
    return {"span_id": name, "parent_span_id": None, "name": name, "start_time": f"{day}{start}",
            "end_time": f"{day}{end}", "attributes": made, "status": {"code": 1}}  # fmt: skip


def says(role: str, content: str) -> Json:
    return {"role": role, "content": content}


def otel_session() -> Json:
    """One call, then two at the same time, then one that quotes both outside an assistant message."""
    task = [says("system", "Be brief."), says("user", "Plan a garden.")]
    beds = [*task, says("assistant", "Beds and a pond."), says("user", "Beds?")]
    counts = {"usage__input_tokens": 12, "usage__output_tokens": 5}
    return {
        "trace_id": "garden",
        "spans": [
            span("plan", "00", "02", json.dumps(task), "Beds and a pond.", **counts),
            span("beds", "02.5", "05", json.dumps(beds), "Roses."),
            span("pond", "03", "04", [says("user", "Ponds?")], "Frogs."),
            {**span("tool", "04", "04.5", None), "attributes": {"gen_ai.operation.name": "execute_tool"}},
            span("sum", "06", "09", [*task, says("user", "You said Roses. and Frogs. Sum up.")], "Roses and frogs."),
        ],
    }  # fmt: skip


def tracelab_row(index: int, total: int, prefix: int, sent: str, ended: str, **more: Any) -> Json:
    first = "user_message" if index == 0 else "tool_result"
    events = [(first, sent), ("text", ended), ("usage_report", "10:09:59Z")]
    return {
        "provider": "codex", "session_id": "s1", "round_index": index, "round_id": f"r{index}", "model": "m",
        "input_tokens_total": total, "prefix_tokens": prefix, "newly_append_tokens": total - prefix,
        "output_tokens": 7, "reasoning_output_tokens": None, "tools": [],
        "timing_events": [{"event_type": kind, "timestamp": f"2026-05-04T{at}"} for kind, at in events], **more,
    }  # fmt: skip


def tracelab_rows() -> list[Json]:
    tool = {"tool_name": "look", "tool_wall_latency_ms": 1500, "tool_internal_latency_ms": None, "is_error": True}
    return [
        tracelab_row(0, 200, 130, "10:00:00Z", "10:00:02.5Z", tools=[tool]),
        tracelab_row(1, 330, 200, "10:00:04Z", "10:00:05Z"),
        tracelab_row(2, 400, 64, "10:00:05.5Z", "10:00:09Z"),
    ]


def copilot_call(at: str, duration_ms: float, prompt: int, segments: list[tuple[str, int]], **more: Any) -> Json:
    parts = [{"type": kind, "role": "user", "sequenceId": place, "token_len": size}
             for place, (kind, size) in enumerate(segments)]  # fmt: skip
    tokens = {"total": prompt + 20, "prompt": prompt, "completion": 20, "cached": 64, "cached_pct": 0.5}
    return {
        "message_id": at, "timestamp": f"2026-06-02T08:00:{at}", "duration_ms": duration_ms, "initiator_type": "user",
        "model": "Model A", "result": "Success", "status_code": "OK", "tokens": tokens, "message_metadata": parts[::-1],
        **more,
    }  # fmt: skip


def copilot_session(**more: Any) -> Json:
    calls = [{"name": "edit", "status": 1, "duration_ms": 400}, {"name": "run", "status": 2, "duration_ms": None}]
    batch = {"timestamp": "x", "duration_ms": 900, "request_id": "00.000", "function_calls": calls}
    return {
        "session_id": "c1",
        "date": "2026-06-02",
        "turns": [
            {"turn_id": "t0", "tool_batches": [batch], "llm_calls": [
                copilot_call("00.000", 2000, 100, [("System", 60), ("UserMessage", 40)]),
                copilot_call("03.500", 1000, 150, [("System", 60), ("UserMessage", 40), ("ToolResult", 30)])]},
            {"turn_id": "t1", "tool_batches": [], "llm_calls": [
                copilot_call("10.000", 500, 90, [("System", 60), ("UserMessage", 50)], result="UserCancel")]},
        ],
        **more,
    }  # fmt: skip


def write_rows(path: Path, rows: list[Json]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_document(path: Path, value: Json, indent: int | None = None) -> Path:
    path.write_text(json.dumps(value, indent=indent))
    return path


def made_files(folder: Path) -> dict[str, Path]:
    """One file of each format."""
    return {
        "edge-agentic": write_rows(folder / "edge.jsonl", [*edge_rows(), *edge_rows("house")]),
        "weka": write_document(folder / "weka.json", weka_with_sub_agents()),
        "otel": write_document(folder / "otel.json", otel_session(), indent=2),
        "tracelab": write_rows(folder / "tracelab.jsonl", tracelab_rows()),
        "copilot": write_rows(folder / "copilot.jsonl", [copilot_session(), copilot_session(session_id="c2")]),
    }


def read_all(path: Path) -> list[Conversation]:
    return [read_conversation(place) for place in find_conversations(path)]


def read_weka(folder: Path, *requests: Json, **more: Any) -> Conversation:
    """Write a file of these requests and read it."""
    return read_all(write_document(folder / "weka.json", weka_file(*requests, **more)))[0]
