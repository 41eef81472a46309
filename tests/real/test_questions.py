"""Real llama.cpp: a draft model, whose acceptance is known, a context in the cache, and the template of any engine."""

from pathlib import Path
from typing import Any

from harness.base.files import SCENARIOS
from tests.real.conftest import Say
from tests.real.parts import llamacpp, run, write_scenario
from tests.support.engines.paths import BASE_IMAGE, LLAMA_SERVER


def any_engine(*arguments: str) -> dict[str, Any]:
    """The same server as an engine that the harness does not know."""
    command = ["-m", "/models/tiny.gguf", "-a", "tiny", "--host", "0.0.0.0", "--port", "8000", *arguments]
    volumes = llamacpp()["variables"]["volumes"]
    access = {"devices": [], "groups": [], "volumes": volumes, "health": "/health", "metrics": "/metrics"}
    variables = {"image": BASE_IMAGE, "entrypoint": [str(LLAMA_SERVER)], "command": command, **access}
    return {"template": "openai", "variables": variables}


def test_a_draft_model_and_a_cached_context(tmp_path: Path, say: Say) -> None:
    work = {"user": "batch", "requests": 8, "output_tokens": 24}
    scenario = write_scenario(
        tmp_path,
        "questions",
        model="tiny",
        servers={
            "plain": any_engine("--parallel", "2", "--ctx-size", "20480", "--threads", "1", "--metrics"),
            # The model drafts for itself, so each drafted token is right.
            "drafts": llamacpp(parallel=2, extra_args=["--threads", "1", "--model-draft", "/models/tiny.gguf"]),
        },
        loads={
            "users": {**work, "vary": {"users": [1, 2]}},
            "depth": {**work, "vary": {"prompts.system_tokens": [0, 600]}},
        },
    )
    ran = run(scenario)
    say(ran.said)
    assert ran.error == "" and ran.code in (0, 3)
    plain = next(cell for cell in ran.summary.cells if cell.server == "plain")
    assert plain.server_load.generated_tokens, "the metrics of an engine without a template of its own"
    users, depth = (answer.values["parts"] for answer in ran.summary.answers if answer.code == "setting_answer")
    (speculation,) = [part for part in users if "tokens_per_step" in part]
    assert speculation["side"] == "drafts" and speculation["share"] > 0.9 and 3 < speculation["tokens_per_step"] <= 4
    # On a busy machine a note that the load generator was the limit may follow.
    assert [part["speed"] for part in depth if "speed" in part] == ["turn", "decode", "first"]
    uncached = [part for part in depth if "share" in part and "tokens_per_step" not in part]
    assert not uncached, "all of the context was in the cache"


def test_the_edge_workload_in_short(tmp_path: Path, say: Say) -> None:
    trace = {"file": str(SCENARIOS / "edge-agentic-example.jsonl"), "conversations": 2, "delay_scale": 0,
             "score": "inline-iou", "session_header": "X-Session-ID"}  # fmt: skip
    conversations = {"user": "agent_trace", "users": 1, "requests": 9, "output": "natural", "output_tokens": 16,
                     "timeout_s": 600, "extra_body": {"seed": 42}, "agent_trace": trace}  # fmt: skip
    servers = {"engine": llamacpp(parallel=1, ctx_size=4096)}
    edge: dict[str, Any] = {"prompts": {"salt": False}, "warmup": {"requests": 0}}
    ran = run(write_scenario(tmp_path, "edge", model="tiny", servers=servers, loads={"edge": conversations}, **edge))
    say(ran.said)
    (answer,) = [answer for answer in ran.summary.answers if answer.code == "mlperf_edge"]
    assert (ran.error, answer.values["missing"]) == ("", 0)
    assert answer.values["iou"] == 0.0, "the model's random words are no commands"
    rows = {row["name"]: (row["here"], row["is_same"]) for row in answer.values["settings"]}
    assert rows["Requests at once (slots)"] == ("1", True) and rows["Context of a request"][0] == "4,096"
