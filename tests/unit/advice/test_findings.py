"""Each rule finds its cause in a run on the embedded engine, first; healthy runs have no finding; advice helps."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from harness.advice.expect import share
from harness.advice.findings import RULES, with_findings
from harness.analysis.summarize import Summarized, summarize_with_counts
from harness.base.files import pretty_json
from harness.base.summary import Row, RunFinding, Summary
from harness.records.manifest import GpuMemory, Machine, ModelSize, read_run, write_run
from harness.records.records import Request
from harness.records.samples import GpuSample, HostSample, TelemetrySample
from harness.report import html, markdown
from harness.report.elements import Paragraph
from harness.report.page import answer, run_page
from harness.report.terminal import print_report
from harness.scenario import Load
from harness.scenario.plan import Cell
from harness.simulated.engine import EngineConfig
from tests.support.engine_runs import HEALTHY, STRIX, EngineSetup, write_engine_run


def batch(at_once: int, requests: int = 40, output_tokens: int = 10) -> Load:
    return Load(user="batch", in_flight=at_once, requests=requests, output_tokens=output_tokens)


def chat(users: int, requests: int = 60, **more: Any) -> Load:
    return Load(user="chat", users=users, requests=requests, output_tokens=20, think_s=[0.1, 1.0], **more)


class Cause(Struct, frozen=True):
    """A server and loads with one cause."""

    setup: EngineSetup
    loads: dict[str, Load]
    prompt_tokens: int = 100
    more: dict[str, Any] = {}  # of write_engine_run
    others: dict[str, EngineSetup] = {}  # servers next to it


def on_gpu(read_gb: float, engine: EngineConfig = HEALTHY, **more: Any) -> EngineSetup:
    """A server on a Strix Halo with a model that reads so much for each token."""
    size = ModelSize(name="m", weights_bytes=read_gb * 1e9, read_bytes=read_gb * 1e9, params=read_gb / 2 * 1e9)
    return EngineSetup(engine=engine, served={"model_size": size} | more.pop("served", {}), **more)


def watched(**values: Any) -> Callable[[Cell, float], list[TelemetrySample]]:
    """Samples of one GPU and the host, every half second."""

    def samples(cell: Cell, wall_s: float) -> list[TelemetrySample]:
        gpu = GpuSample(busy_percent=99.0, clock_mhz=2000.0, **values.get("gpu", {}))
        host = HostSample(cpu_busy=0.1, memory_available_bytes=values.get("free", 60 << 30))
        return [
            TelemetrySample(wall_s=wall_s + 0.5 * at, cell=cell.id, gpus={"renderD128": gpu}, host=host)
            for at in range(-4, 80)
        ]

    return samples


def leaves_after(chunks: int) -> Callable[[Request], Request]:
    """Every second user leaves after so many chunks; the server does not notice."""
    return lambda one: (
        one if one.index % 2 else replace(
            one, chunks_s=one.chunks_s[:chunks], ended_s=one.chunks_s[chunks - 1], error="abandoned", message="left",
            output_tokens=None, prompt_tokens=None, finish=None,
        )
    )  # fmt: skip


STRIX_HALO = Machine(name="strix", gpus=[{"target": "gfx1151", "compute_units": 40, "integrated": True}])
MI300X = Machine(name="node", gpus=[{"target": "gfx942", "compute_units": 304, "integrated": False}])
GPU = {"template": "vllm-rocm", "machine": STRIX_HALO}
VLLM = {"engine": "vllm", "version": "0.32.0"}
TIGHT = replace(STRIX, max_num_seqs=256)
LONG = replace(HEALTHY, max_num_batched_tokens=8192, max_model_len=8192)
SMALL_SHM = {"container": {"HostConfig": {"ShmSize": 64 << 20, "IpcMode": "private"}},
             "effective": {"tensor_parallel_size": 2}}  # fmt: skip
ONE = {"one": batch(1)}
HELD = {"gpu_memory_before": [GpuMemory(render_node="renderD128", used_bytes=50 << 30, total_bytes=96 << 30)]}
CAUSES: dict[str, Cause] = {
    "more_is_slower": Cause(EngineSetup(engine=TIGHT), {"five": batch(5), "ten": batch(10)}, 360),
    "kv_cache_full": Cause(EngineSetup(engine=TIGHT), {"ten": batch(10)}, 360),
    "queue_with_room": Cause(EngineSetup(engine=replace(HEALTHY, max_num_seqs=2)), {"eight": batch(8)}),
    "context_unused": Cause(
        EngineSetup(engine=replace(HEALTHY, max_model_len=32_768, num_gpu_blocks=2100)), {"four": batch(4)}
    ),
    "prefix_recomputed": Cause(
        EngineSetup(engine=replace(HEALTHY, enable_prefix_caching=False)), {"talk": chat(4, turns=6)}, 400
    ),
    "prompts_freeze_answers": Cause(EngineSetup(engine=LONG), {"mixed": batch(6, 60, 30)}, 4000),
    "abandoned_computed": Cause(EngineSetup(), {"leave": chat(4, 60)}, more={"measured": leaves_after(5)}),
    "listen_queue_full": Cause(
        EngineSetup(),
        {"burst": batch(8)},
        more={"measured": lambda one: replace(one, connect_s=1.01, connect_retries=1)},
    ),
    "gateway_share": Cause(EngineSetup(gateway=True, api_s=0.03), ONE, others={"direct": EngineSetup()}),
    "api_process": Cause(EngineSetup(api_s=0.1), ONE),
    "slow_decode": Cause(on_gpu(0.5, startup=VLLM), ONE, more=GPU),
    "eager_mode": Cause(on_gpu(0.5, startup=VLLM, served={"effective": {"enforce_eager": True}}), ONE, more=GPU),
    "untuned_kernels": Cause(
        on_gpu(0.5, startup=VLLM, log="Using default MoE config. Performance might be sub-optimal!"), ONE, more=GPU
    ),
    "aiter_off": Cause(on_gpu(10.0, startup=VLLM), ONE, more={"template": "vllm-rocm", "machine": MI300X}),
    "cpu_offload": Cause(
        EngineSetup(startup={"engine": "llama.cpp", "offloaded_layers": "20/33"}),
        ONE,
        more={"template": "llamacpp", "machine": STRIX_HALO},
    ),
    "power_limited": Cause(
        on_gpu(0.5, startup=VLLM, telemetry=watched(gpu={"power_w": 55.0, "held_back": {"power": 1.0}})), ONE, more=GPU
    ),
    "other_work": Cause(EngineSetup(), ONE, more={"ran": HELD}),
    "overheated": Cause(EngineSetup(telemetry=watched(gpu={"held_back": {"heat": 0.5}})), ONE),
    "slower_over_time": Cause(
        EngineSetup(change=lambda engine, at_s: replace(engine, slowdown=1 + at_s / 60)), {"one": batch(1, 200)}
    ),
    "memory_moved": Cause(EngineSetup(telemetry=watched(free=1 << 28)), ONE),
    "slow_prefill": Cause(
        on_gpu(1.7, replace(HEALTHY, prefill_per_token_s=2e-3), startup=VLLM), {"one": batch(1, 20)}, 300, more=GPU
    ),
    "small_shared_memory": Cause(EngineSetup(startup=VLLM, served=SMALL_SHM), ONE, more=GPU),
    "versions_differ": Cause(
        EngineSetup(startup=VLLM), ONE, more=GPU, others={"older": EngineSetup(startup=VLLM | {"version": "0.20.1"})}
    ),
    "setting_replaced": Cause(
        EngineSetup(variables={"max_num_seqs": 64}, served={"effective": {"max_num_seqs": 8}}), ONE
    ),
    "cold_start": Cause(EngineSetup(engine=replace(HEALTHY, compile_s=1.0, compile_steps=1)), {"one": batch(1, 20)}),
    "load_generator": Cause(
        EngineSetup(marks={"loop_lag_p50_s": 0.02, "loop_lag_p99_s": 0.04}),
        {"four": batch(4)},
        more={"measured": lambda one: replace(one, clock="read")},
    ),
    "speculation_rejected": Cause(EngineSetup(more={"drafted_tokens": 5.0, "accepted_tokens": 1.0}), ONE),
    "slo_beyond_hardware": Cause(on_gpu(2.0, startup=VLLM), ONE, more=GPU | {"checks": ["tpot_p50 <= 5ms"]}),
}


def measured(folder: Path, cause: Cause, setup: EngineSetup | None = None, **more: Any) -> Summarized:
    known = cause.more | more
    ran = known.pop("ran", {})
    servers = cause.others | {"a": setup or cause.setup}
    run = write_engine_run(folder, servers, cause.loads, prompt_tokens=cause.prompt_tokens, **known)
    if ran:
        write_run(folder, replace(run, cells=[replace(cell, **ran) for cell in run.cells]))
    return with_findings(summarize_with_counts(folder))


def found(folder: Path, cause: Cause, setup: EngineSetup | None = None, **more: Any) -> list[RunFinding]:
    findings = measured(folder, cause, setup, **more).summary.findings
    assert findings is not None
    return findings


def test_each_rule_has_a_cause() -> None:
    assert CAUSES.keys() == {rule.code for rule in RULES}


@pytest.mark.parametrize("code", CAUSES)
def test_a_run_with_one_cause_has_its_finding_first(tmp_path: Path, code: str) -> None:
    findings = found(tmp_path / "run", CAUSES[code])
    assert [one.code for one in findings][:1] == [code]
    assert all(action.do and action.verify for action in findings[0].actions)


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_has_no_finding(tmp_path: Path, seed: int) -> None:
    setups = [HEALTHY, replace(HEALTHY, enable_prefix_caching=True), replace(HEALTHY, max_num_batched_tokens=512),
              replace(HEALTHY, step_base_s=0.03, jitter=0.05)]  # fmt: skip
    loads = [
        {"one": batch(1), "eight": batch(8)},
        {"few": chat(3), "many": chat(12)},
        {"turns": chat(6)},
        {"burst": Load(user="batch", batch_size=6, requests=48, output_tokens=16)},
        {"long": batch(4, output_tokens=60)},
    ]
    setup = EngineSetup(engine=setups[seed % 4], api_s=0.002 * (seed % 3), telemetry=watched())
    assert found(tmp_path / "run", Cause(setup, loads[seed % 5], 50 + 37 * seed), seed=seed) == []


# By rule: the change of the engine, or of how it is run, that its first action asks for.
Change = Callable[[EngineSetup, RunFinding], tuple[EngineSetup, dict[str, Any]]]


def later(from_chunk: int, by_s: float, load: str | None = None) -> Callable[[Request], Request]:
    """All chunks from this one on are later, whatever the reason."""
    return lambda one: (
        one if load not in (None, one.load) else replace(
            one, chunks_s=[at + by_s * (place >= from_chunk) for place, at in enumerate(one.chunks_s)],
            ended_s=one.ended_s + by_s,
        )
    )  # fmt: skip


def test_pauses_are_not_of_prompts_that_one_small_step_computes(tmp_path: Path) -> None:
    paused = Cause(EngineSetup(), {"four": batch(4)}, 67, more={"measured": later(5, 2.0)})
    assert "prompts_freeze_answers" not in [one.code for one in found(tmp_path / "run", paused)]


def test_more_is_slower_needs_more_in_the_engine(tmp_path: Path) -> None:
    """It runs four at once anyway: a limit of four would change nothing."""
    four = EngineSetup(engine=replace(HEALTHY, max_num_seqs=4))
    busy = Cause(four, {"four": batch(4), "ten": batch(10)}, more={"measured": later(0, 1.0, "ten")})
    assert "more_is_slower" not in [one.code for one in found(tmp_path / "run", busy)]


def of_engine(**names: Any) -> Change:
    """A change of the engine: values, or names of the finding's values."""

    def change(setup: EngineSetup, one: RunFinding) -> tuple[EngineSetup, dict[str, Any]]:
        given = {key: one.values[name] if isinstance(name, str) else name for key, name in names.items()}
        return replace(setup, engine=replace(setup.engine, **given)), {}

    return change


BETTER: dict[str, Change] = {
    "more_is_slower": of_engine(max_num_seqs="at_once"),
    "queue_with_room": of_engine(max_num_seqs="fits"),
    "prefix_recomputed": of_engine(enable_prefix_caching=True),
    "prompts_freeze_answers": of_engine(max_num_batched_tokens="less"),
    "gateway_share": lambda setup, one: (replace(setup, gateway=False, api_s=0.0), {}),
    "cold_start": lambda setup, one: (setup, {"warmup": 4}),
}


def value_of(row: Row, metric: str) -> float:
    numbers = row.pooled
    known = {
        "ttft_mean": numbers.ttft.mean, "e2e_mean": numbers.e2e.mean, "gap_max": numbers.gap.max,
        "output_tok_s": numbers.output_tok_s,
    }  # fmt: skip
    value = known[metric]
    assert value is not None
    return value


def test_every_expected_gain_is_measured(tmp_path: Path) -> None:
    gains = {
        code for code, cause in CAUSES.items()
        for one in found(tmp_path / code, cause)[:1] if any(action.gain for action in one.actions)
    }  # fmt: skip
    assert gains == BETTER.keys()


@pytest.mark.parametrize("code", BETTER)
def test_an_expected_gain_has_the_direction_of_its_measurement(tmp_path: Path, code: str) -> None:
    cause = CAUSES[code]
    before = measured(tmp_path / "before", cause).summary
    assert before.findings is not None
    one = before.findings[0]
    expected = one.actions[0].gain
    assert expected is not None
    setup, more = BETTER[code](cause.setup, one)
    after = measured(tmp_path / "after", cause, setup, **more).summary
    values = [
        next(value_of(row, expected.values["metric"]) for row in summary.rows if row.name == one.rows[0])
        for summary in (before, after)
    ]
    ratio = values[1] / values[0]
    assert (ratio > 1) == (expected.values["factor"] > 1)
    assert abs(ratio - 1) > 0.05


@pytest.mark.parametrize(("fewer", "at_once"), [(1, 5), (5, 5)])
def test_a_full_cache_takes_as_many_sequences_as_fit(tmp_path: Path, fewer: int, at_once: int) -> None:
    """The cache has 2,048 tokens, a request at most 380: more fit than the one at a time that was measured, too."""
    cause = Cause(EngineSetup(engine=TIGHT), {"fewer": batch(fewer), "ten": batch(10)}, 360)
    before = measured(tmp_path / "before", cause).summary
    assert before.findings is not None
    (one, *_) = before.findings
    action = one.actions[0]
    assert (one.code, one.values["at_once"], list(action.settings.values())) == (
        "more_is_slower", at_once, [f"max_num_seqs: {at_once}"]
    )  # fmt: skip
    setup = replace(cause.setup, engine=replace(TIGHT, max_num_seqs=at_once))
    after = measured(tmp_path / "after", cause, setup).summary
    ratio = value_of(after.rows[1], "output_tok_s") / value_of(before.rows[1], "output_tok_s")
    assert action.gain is not None and ratio > 0.95 * action.gain.values["factor"]


def first_settings(folder: Path, code: str, **served: Any) -> dict[str, str]:
    cause = CAUSES[code]
    template = served.pop("template", "simulated")
    setup = replace(cause.setup, startup=served.pop("startup", {}), served=served)
    (one, *_) = found(folder, cause, setup, template=template)
    return one.actions[0].settings


# The stories of the seeds, with their numbers.


def test_the_speed_of_14b_in_fp16_is_normal(tmp_path: Path) -> None:
    """6.4 tok/s with 28 GB a token on Strix Halo, 64 MiB of /dev/shm and one worker: nothing is wrong."""
    slow = replace(HEALTHY, step_base_s=1 / 6.4, step_per_sequence_s=0.0, step_per_kv_token_s=0.0)
    shm = {"container": {"HostConfig": {"ShmSize": 64 << 20, "IpcMode": "private"}}, "effective": {}}
    made = measured(tmp_path / "run", Cause(on_gpu(28.0, slow, startup=VLLM, served=shm), ONE, more=GPU))
    known = share(made.data, next(iter(made.data.cells.values())))
    assert known is not None
    assert (known.word, round(known.share, 2), made.summary.findings) == ("normal", 0.70, [])
    (stated,) = made.summary.hardware_shares
    assert (stated.values["share"], stated.values["word"], stated.text[-8:]) == (known.share, "normal", ": normal")
    page = answer(made.summary, made.data.run)
    assert [element.text for element in page if isinstance(element, Paragraph)][2] == stated.text


def test_ten_at_once_took_two_and_a_half_times_as_long(tmp_path: Path) -> None:
    """0.4x with batches of 10 on Lemonade: 5 sequences at once, as an entry of recipe_options.json."""
    options = {"recipe_options": {"ctx_size": 8192, "vllm_args": "--gpu-memory-utilization 0.78"}}
    served = {"effective": options, "model": "Qwen3.5-0.8B-FP16-vLLM"}
    bursts = {
        name: Load(user="batch", batch_size=size, requests=40, output_tokens=10)
        for name, size in (("one", 1), ("five", 5), ("ten", 10))
    }
    story = Cause(EngineSetup(engine=TIGHT, startup=VLLM, served=served), bursts, 360, more={"template": None})
    made = measured(tmp_path / "run", story).summary
    speed = {row.load: row.pooled.output_tok_s or 0.0 for row in made.rows}
    assert (round(speed["five"] / speed["one"], 1), round(speed["ten"] / speed["one"], 1)) == (2.0, 0.4)
    assert made.findings is not None
    (one, *_) = made.findings
    args = "--gpu-memory-utilization 0.78 --max-num-seqs 5"
    entry = {"builtin.Qwen3.5-0.8B-FP16-vLLM": {"ctx_size": 8192, "vllm_args": args}}
    assert (one.code, json.loads(one.actions[0].settings["recipe_options.json"])) == ("more_is_slower", entry)


def test_a_context_of_256k_is_not_needed(tmp_path: Path) -> None:
    """A model's own 262,144 tokens, of which requests of a few hundred use nothing."""
    engine = replace(HEALTHY, max_model_len=262_144, num_gpu_blocks=20_000)
    served = {"effective": {"recipe_options": {"ctx_size": 262_144}}, "model": "user.M"}
    story = Cause(EngineSetup(engine=engine, startup=VLLM, served=served), {"five": batch(5)}, more={"template": None})
    (one,) = found(tmp_path / "run", story)
    entry = {"user.M": {"ctx_size": 1024}}
    assert (one.code, json.loads(one.actions[0].settings["recipe_options.json"])) == ("context_unused", entry)


def test_litellm_took_six_percent(tmp_path: Path) -> None:
    """29.95 s directly and 31.84 s through LiteLLM."""
    at_once = {"ten": batch(10, 60, 50)}
    alone_s = measured(tmp_path / "alone", Cause(EngineSetup(), at_once)).summary.rows[0].pooled.e2e.mean
    assert alone_s is not None
    tax = EngineSetup(gateway=True, api_s=alone_s * (31.84 / 29.95 - 1))
    (one, *_) = found(tmp_path / "run", Cause(tax, at_once, others={"direct": EngineSetup()}))
    assert (one.code, one.actions[0].gain is not None) == ("gateway_share", True)
    assert one.cost == pytest.approx(1 - 29.95 / 31.84, abs=0.005)


def test_llamacpp_with_one_slot_queues_what_fits(tmp_path: Path) -> None:
    """The butler: one request at a time, whatever arrives. Its memory has room for more slots."""
    engine = replace(HEALTHY, max_num_seqs=1)
    served = {
        "effective": {"recipe_options": {"ctx_size": 8192}, "parallel": 1, "ctx_per_slot": 8192},
        "model": "user.M",
    }
    butler = EngineSetup(engine=engine, startup={"engine": "llama.cpp", "max_model_len": 8192}, served=served)
    story = Cause(butler, {"five": batch(5)}, more={"template": None})
    findings = found(tmp_path / "run", story)
    assert {one.code for one in findings} == {"queue_with_room", "context_unused"}
    entries = [json.loads(one.actions[0].settings["recipe_options.json"])["user.M"] for one in findings]
    assert {"ctx_size": 5 * 1024, "llamacpp_args": "--parallel 5"} in entries
    smaller = next(one for one in findings if one.code == "context_unused").actions[0].gain
    more = replace(butler, engine=replace(engine, max_num_seqs=5))
    running = measured(tmp_path / "more", story, more).summary.cells[0].server_load.running_max
    assert smaller is not None and running == smaller.values["factor"] == 5


def test_a_setting_is_spelled_as_the_server_is_configured(tmp_path: Path) -> None:
    vllm: dict[str, Any] = {"startup": {"engine": "vllm"}}
    of_lemonade = {"recipe_options": {"ctx_size": 8192, "vllm_args": "--gpu-memory-utilization 0.78 --max-num-seqs=64"}}
    assert first_settings(tmp_path / "a", "more_is_slower") == {"servers.a.variables": "max_num_seqs: 5"}
    attached = first_settings(tmp_path / "b", "more_is_slower", template=None, **vllm)
    assert attached == {"arguments of vLLM": "--max-num-seqs 5"}
    lemonade = first_settings(
        tmp_path / "c", "more_is_slower", template=None, effective=of_lemonade, model="Qwen3.5-0.8B-FP16-vLLM", **vllm
    )
    entry = {"ctx_size": 8192, "vllm_args": "--gpu-memory-utilization 0.78 --max-num-seqs 5"}
    assert json.loads(lemonade["recipe_options.json"]) == {"builtin.Qwen3.5-0.8B-FP16-vLLM": entry}
    started = first_settings(tmp_path / "d", "more_is_slower", template="lemonade", effective=of_lemonade, **vllm)
    assert started.keys() == {"servers.a.variables", "recipe_options.json"}
    llama = {"engine": "llama.cpp"}
    slots = {"parallel": 2, "ctx_per_slot": 4096}
    changed = first_settings(tmp_path / "e", "queue_with_room", template="llamacpp", effective=slots, startup=llama)
    assert changed == {"servers.a.variables": "parallel: 8\nctx_size: 32768"}


def test_a_variable_of_the_environment_joins_those_of_the_scenario(tmp_path: Path) -> None:
    cause = CAUSES["aiter_off"]
    setup = replace(cause.setup, variables={"environment": {"OMP_NUM_THREADS": "8"}})
    (one, *_) = found(tmp_path / "run", cause, setup)
    line = 'environment: {"OMP_NUM_THREADS": "8", "VLLM_ROCM_USE_AITER": "1"}'
    assert one.actions[0].settings == {"servers.a.variables": line}


def outputs(folder: Path, summary: Summary) -> dict[str, str]:
    """Every report of a run as text."""
    run, shown = read_run(folder), io.StringIO()
    print_report(summary, run, folder, Console(file=shown, width=120, color_system=None))
    return {
        "terminal": shown.getvalue(),
        "markdown": markdown.render(run_page(summary, run)),
        "page": html.render_run(folder, run, summary),
        "json": pretty_json(summary).decode(),
    }


def test_every_report_has_the_findings_before_the_tables(tmp_path: Path) -> None:
    made = measured(tmp_path / "run", CAUSES["more_is_slower"])
    for name, text in outputs(tmp_path / "run", made.summary).items():
        text = text.replace("\\", "")  # Markdown escapes a code
        assert all(part in text for part in ("more_is_slower", "max_num_seqs: 5", "harness compare run NEW")), name
    shown = outputs(tmp_path / "run", made.summary)
    for name, heading in (("terminal", "Aggregate"), ("markdown", "|:---")):
        assert shown[name].index("max_num_seqs: 5") < shown[name].index(heading)


def test_without_an_answer_of_a_server_nothing_was_searched(tmp_path: Path) -> None:
    refused = {"measured": lambda one: replace(one, error="http", message="no", chunks_s=[], output_tokens=None)}
    assert measured(tmp_path / "run", Cause(EngineSetup(), ONE, more=refused)).summary.findings is None


def test_no_finding_is_an_answer_and_none_searched_is_not(tmp_path: Path) -> None:
    made = measured(tmp_path / "run", Cause(EngineSetup(), ONE))
    assert made.summary.findings == []
    for searched, there in ((made.summary, True), (replace(made.summary, findings=None), False)):
        for name, text in outputs(tmp_path / "run", searched).items():
            assert name == "json" or ("no problem found" in text) == there, name
