"""MLPerf's edge-agentic workload: its score, its missing turns, and what differs from the reference."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.files import SCENARIOS
from harness.base.reason import Reason
from harness.questions.joint import analyse
from harness.questions.mlperf_edge import NAME, edge_tables
from harness.records.manifest import Machine, ModelSize, Startup, write_run
from harness.records.records import Request
from harness.run.experiment import Recording, Target, prepare
from harness.scenario import Server
from harness.scenario.behaviour import AgentTrace
from harness.scenario.plan import Cell
from tests.support.agent_traces import edge_rows, write_rows
from tests.support.made_runs import request, scenario, served_by, write_made_run

SCENARIO = SCENARIOS / "edge-agentic.yaml"


def test_the_scenario_sends_what_the_rules_say(tmp_path: Path) -> None:
    load = prepare(SCENARIO, Target("http://127.0.0.1:9")).scenario.loads["conversations"]
    trace = load.agent_trace
    assert trace is not None and load.requests == 13, "those of the example"
    assert (load.users, load.output_tokens, load.output, load.timeout_s) == (1, 1024, "natural", 600)
    assert load.extra_body == {"seed": 42, "chat_template_kwargs": {"enable_thinking": False}}
    assert (trace.delay_scale, trace.session_header, trace.score) == (0, "X-Session-ID", "inline-iou")


def test_another_trace_and_a_slice_of_it_set_the_number_of_turns(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [row for name in "abc" for row in edge_rows(name)])
    for number, turns in ((None, 9), (2, 6), (1, 3), (50, 9)):
        made = prepare(SCENARIO, Target("http://127.0.0.1:9"), recording=Recording(path, number))
        load = made.scenario.loads["conversations"]
        assert load.requests == turns and load.agent_trace is not None and load.agent_trace.file == str(path)
    example = prepare(SCENARIO, recording=Recording(None, 1)).scenario.loads["conversations"]
    assert example.requests == 5


@pytest.mark.parametrize(
    ("name", "given", "option"),
    [("first-look", Recording(None, 3), "--slice"), ("edge-agentic", Recording(Path("gone")), "--trace"),
     ("soak", Recording(SCENARIO), "--trace")],
)  # fmt: skip
def test_options_that_cannot_be(name: str, given: Recording, option: str) -> None:
    with pytest.raises(HarnessError) as caught:
        prepare(SCENARIOS / f"{name}.yaml", recording=given)
    assert caught.value.what.startswith(f"{option}: ") and caught.value.next_step


def measured(
    folder: Path,
    scores: list[float | None],
    turns: int,
    late: int | None = None,
    *,
    machine: Machine | None = None,
    fields: dict[str, Any] | None = None,
    **served: Any,
) -> Any:
    """Write a run with a request for each score; the one with the number `late` took longer than a turn may."""
    path = write_rows(folder.parent / f"{folder.name}.jsonl", edge_rows())
    load = prepare(SCENARIO).scenario.loads["conversations"]
    assert load.agent_trace is not None
    load = replace(load, requests=turns, agent_trace=replace(load.agent_trace, file=str(path)))

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        mine: dict[str, Any] = {"cell": cell.id, "load": cell.load, "process": process}
        made = [
            request(id=f"{at}", index=at, sent_s=start_s + 2.0 * at, action_iou=score, **mine | (fields or {}))
            for at, score in enumerate(scores)
        ]
        return [replace(one, ended_s=601.0) if one.index == late else one for one in made]

    made_of = scenario(servers={"a": Server(template="llamacpp")}, loads={"c": load}, repeats=1)
    run = write_made_run(folder, made_of=made_of, requests=requests, served=lambda cell: served_by(**served))
    write_run(folder, run if machine is None else replace(run, machine=machine))
    return analyse(folder).summary


def answer_of(summary: Any) -> Reason:
    (answer,) = [answer for answer in summary.answers if answer.code == "mlperf_edge"]
    assert isinstance(answer, Reason)
    return answer


def settings_of(answer: Reason) -> dict[str, Any]:
    return {setting["name"]: setting["is_same"] for setting in answer.values["settings"]}


def test_the_score_is_the_mean_of_the_scorable_turns(tmp_path: Path) -> None:
    summary = measured(tmp_path / "run", [1.0, None, 0.5, 0.0], 4)
    answer = answer_of(summary)
    values = {key: answer.values[key] for key in ("iou", "scored", "expected", "missing")}
    assert values == {"iou": 0.5, "scored": 3, "expected": 4, "missing": 0}
    assert answer.text.startswith(NAME)
    table = edge_tables(summary)[0]
    assert [list(row)[1:] for row in table.rows[:3]] == [
        ["0.6335", "0.5000", ""], ["1,006", "3", "no"], ["0", "0", "yes"],
    ]  # fmt: skip


def test_turns_that_were_not_sent_or_took_too_long_are_missing(tmp_path: Path) -> None:
    assert answer_of(measured(tmp_path / "few", [1.0, 1.0], 5)).values["missing"] == 3
    late = answer_of(measured(tmp_path / "late", [1.0, 1.0], 2, late=1)).values
    assert (late["missing"], late["iou"]) == (1, 0.5)


def test_what_differs_is_named_and_what_is_not_known(tmp_path: Path) -> None:
    same: dict[str, Any] = {
        "model": "Qwen3.6-27B-Q4_K_M", "version": "b8999-cfff1fc", "effective": {"parallel": 1},
        "startup": Startup(engine="llama.cpp", max_model_len=32768),
        "arguments": ["--reasoning", "off", "--flash-attn", "on", "-ngl", "99", "--seed", "42"],
    }  # fmt: skip
    found = settings_of(answer_of(measured(tmp_path / "same", [1.0] * 3, 3, **same)))
    assert [name for name, is_same in found.items() if is_same is not True] == ["Data", "Hardware"]
    other = {
        **same,
        "model": "Qwen3.6-27B-Q8_0",
        "startup": Startup(engine="vllm", max_model_len=8192),
        "effective": {},
    }
    found = settings_of(answer_of(measured(tmp_path / "other", [1.0] * 3, 3, **other)))
    assert {name for name, is_same in found.items() if is_same is False} == {
        "Data", "Model", "Engine", "Context of a request",
    }  # fmt: skip
    assert found["Hardware"] is None, "no GPU and no CPU is recorded"
    assert found["Requests at once (slots)"] is None and found["Flash attention"] is None


def test_a_load_without_a_score_has_no_such_answer(tmp_path: Path) -> None:
    write_made_run(tmp_path / "run")
    assert [answer.code for answer in analyse(tmp_path / "run").summary.answers] == []
    assert AgentTrace(file="x").score is None


@pytest.mark.parametrize(
    ("model", "weights", "is_same"),
    [("Qwen3.6-27B-Q4_K_M", None, True), ("qwen3.6-27b", "Q4_K - Medium", True), ("Qwen3.6-27B-Q4_K_M", "F16", False),
     ("Qwen3.6-27B", None, False), ("Qwen3.6-35B-A3B", "Q4_K_M", False), ("Qwen3.6-27B", "Q4_K - Small", False)],
)  # fmt: skip
def test_the_weights_that_a_server_reports_decide_and_not_its_name(
    tmp_path: Path, model: str, weights: str | None, is_same: bool
) -> None:
    effective = {} if weights is None else {"model_ftype": weights}
    answer = answer_of(measured(tmp_path / "run", [1.0], 1, model=model, effective=effective))
    assert settings_of(answer)["Model"] is is_same


STRIX_HALO = {"target": "gfx1151", "compute_units": 40, "integrated": True, "render_node": "/dev/dri/renderD128"}
TIMED: dict[str, Any] = {"prompt_tokens": 1000, "cached_tokens": 400, "output_tokens": 11}
SIZE = ModelSize(name="m", weights_bytes=16e9, read_bytes=16e9, params=27e9, kv_token_bytes=100_000)


def run_on_strix_halo(folder: Path, more: dict[str, Any] | None = None, **served: Any) -> dict[str, Any]:
    """Two turns, of which each takes 2 s, and the answer of the run."""
    machine = Machine(name="strix", gpus=[STRIX_HALO])
    known: dict[str, Any] = {"model_size": SIZE, "template": "llamacpp"}
    made = measured(folder, [1.0, 1.0], 2, machine=machine, fields=TIMED | (more or {}), **known | served)
    return answer_of(made).values


def test_the_time_has_its_share_of_what_the_hardware_allows(tmp_path: Path) -> None:
    """256 GB/s and 59.4 TFLOPS: 600 new tokens, then 10 steps that read the weights and 1,000 to 1,009 tokens."""
    prefill_s = 2 * 27e9 * 600 / 59.4e12
    decode_s = sum((16e9 + 100_000 * (1000 + step)) / 256e9 for step in range(10))
    values = run_on_strix_halo(tmp_path / "run")
    assert values["share_unknown"] is None and values["bound_s"] == pytest.approx(2 * (prefill_s + decode_s))
    assert values["share"] == pytest.approx(values["bound_s"] / values["seconds"])
    # With speculation a run is faster than the bound, and the share says how much.
    faster = run_on_strix_halo(tmp_path / "fast", model_size=replace(SIZE, read_bytes=256e9))
    assert faster["share"] == pytest.approx(faster["bound_s"] / faster["seconds"]) and faster["share"] > 1


def test_an_unknown_share_has_its_reason(tmp_path: Path) -> None:
    for name, more, served, why in (
        ("model", {}, {"model_size": None}, "model"),
        ("url", {}, {"url": "http://192.0.2.1:8000", "template": None}, "gpu"),
        ("tokens", {"prompt_tokens": None}, {}, "tokens"),
        ("cached", {"cached_tokens": None}, {}, "cached_tokens"),
    ):
        values = run_on_strix_halo(tmp_path / name, more, **served)
        assert (values["bound_s"], values["share"], values["share_unknown"]) == (None, None, why)


def test_a_turn_that_took_too_long_makes_the_run_invalid(tmp_path: Path) -> None:
    for late in (None, 1):
        summary = measured(tmp_path / f"{late}", [1.0, 1.0], 2, late=late)
        reasons = {reason.code for reason in summary.reasons}
        assert ("turns_missing" in reasons) is (late is not None)
