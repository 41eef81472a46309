"""Each rule finds its cause in a run on the embedded engine, first; healthy runs have no finding; advice helps.

What an engine does, the embedded engine does: it queues, preempts, speculates, computes for users who left, gets
slower. What a machine has is a tree of the kernel's files, read by the harness itself: clocks held back, memory in use.
What a server prints and what Docker reports (eager mode, versions, /dev/shm) is written into the manifest.
"""

import io
import json
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import yaml
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from harness.base.files import SCENARIOS, pretty_json
from harness.base.reason import because
from harness.base.units import GIB
from harness.hardware.bounds import share
from harness.machine.gpus import read_gpu_memory, read_machine
from harness.machine.telemetry import Meter, find_files, read_files
from harness.numbers.summarize import Summarized, summarize, summarize_with_counts
from harness.numbers.summary import Action, Row, RunFinding, Summary
from harness.questions.capacity.blocks import parse_slos
from harness.questions.capacity.record import CapacityReport, MixMember, write_capacity
from harness.questions.findings.decide import RULES, _row_facts, with_findings
from harness.questions.findings.rules import RowFacts
from harness.questions.report.page import print_report, run_html, run_page
from harness.records.manifest import Machine, ModelSize, read_run, write_run
from harness.records.records import Request
from harness.records.run_data import load
from harness.records.samples import GpuSample, HostSample, TelemetrySample
from harness.report import markdown
from harness.report.elements import Paragraph, lined_up
from harness.report.result_card import render_card
from harness.scenario import Load, Server, Sweep, SweepRow
from harness.scenario.behaviour import Abandon
from harness.scenario.plan import Cell
from harness.simulated.engine import EngineConfig
from tests.support import fake_gpus, machines
from tests.support.engine_runs import HEALTHY, STRIX, EngineSetup, write_engine_run
from tests.support.made_runs import scenario, served_by, write_made_run
from tests.support.nightly import NIGHTLY
from tests.support.wording import Wording


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


def watched(
    held_back: str | None = None, *, since_s: float = 0.0, available_gib: float = 60, gtt_gib: float = 0.1
) -> Callable[[Cell, float], list[TelemetrySample]]:
    """Samples of the files of a kernel, every half second. `held_back`: what lowers the clocks of its GPU."""

    def samples(cell: Cell, wall_s: float) -> list[TelemetrySample]:
        meter, found = Meter(), []
        with TemporaryDirectory() as name:
            root = Path(name)
            fake_gpus.gpu(root, mem_info_gtt_used=f"{int(gtt_gib * GIB)}\n", gpu_metrics=fake_gpus.apu_table())
            fake_gpus.host(root, available_kb=int(available_gib * GIB) >> 10)
            for at in range(-4, 80):
                held = {} if held_back is None else {held_back: max(0, at - int(2 * since_s) + 1)}
                (root / fake_gpus.device() / "gpu_metrics").write_bytes(fake_gpus.apu_table(**held))
                gpus, host, _ = meter.sample(read_files(root, find_files(root)), 0.5 * at)
                found.append(TelemetrySample(wall_s=wall_s + 0.5 * at, cell=cell.id, gpus=gpus, host=host))
        return found

    return samples


def machine(make: Callable[[Path], Path]) -> Machine:
    with TemporaryDirectory() as root:
        return read_machine(make(Path(root)))


def memory_in_use(gib: float) -> dict[str, Any]:
    """The GPU's memory before the server started, of a Strix Halo with 96 GiB."""
    with TemporaryDirectory() as root:
        kernel = machines.gpu(Path(root), 110501, vram_gib=96, gtt_gib=15.5, vram_used_gib=gib)
        return {"gpu_memory_before": read_gpu_memory(kernel)}


def drafting(**changes: Any) -> EngineConfig:
    """Four tokens are drafted in each step, which takes longer with each request."""
    return replace(HEALTHY, num_speculative_tokens=4, draft_per_token_s=0.003, **changes)


def hotter(engine: EngineConfig, at_s: float) -> EngineConfig:
    return replace(engine, slowdown=1 + at_s / 60)


STRIX_HALO, MI300X = machine(machines.strix_halo_carve_out), machine(machines.mi300x_eight)
LEAVING = Abandon(share=0.5, after_tokens=5)
GPU = {"template": "vllm-rocm", "machine": STRIX_HALO}
VLLM = {"engine": "vllm", "version": "0.32.0"}
TIGHT = replace(STRIX, max_num_seqs=256)
LONG = replace(HEALTHY, max_num_batched_tokens=8192, max_model_len=8192)
SMALL_SHM: dict[str, dict[str, Any]] = {"container": {"HostConfig": {"ShmSize": 64 << 20, "IpcMode": "private"}},
             "effective": {"tensor_parallel_size": 2}}  # fmt: skip
ONE = {"one": batch(1)}
UNANSWERED: dict[str, Any] = {"error": "unfinished", "chunks_s": [], "output_tokens": None, "finish": None}
STUB: dict[str, Any] = {"output_tokens": 1, "finish": "stop", "fixed_length": False}


def bundled(one: Request, size: int = 16, via: str | None = "nginx/1.22.1") -> Request:
    """The answer behind a proxy that passes on so many chunks at a time."""
    count = len(one.chunks_s)
    chunks_s = [one.chunks_s[min(count - 1, place - place % size + size - 1)] for place in range(count)]
    return replace(one, chunks_s=chunks_s, coalesced=count - len(set(chunks_s)), coalesced_late=0, text_chars=4 * count,
                   first_arrival_chars=4 * min(size, count), first_words=1, via=via)  # fmt: skip


CAUSES: dict[str, Cause] = {
    "nonsense_answers": Cause(
        EngineSetup(), ONE, more={"measured": lambda one: replace(one, odd_text="reserved" if one.index % 9 else None)}
    ),
    "short_answers": Cause(
        EngineSetup(),
        {"one": batch(1, 20), "eight": batch(8)},
        more={"measured": lambda one: one if one.load == "one" else replace(one, **STUB, chunks_s=one.chunks_s[:1])},
    ),
    "users_unserved": Cause(
        EngineSetup(),
        {"six": chat(6)},
        more={"measured": lambda one: one if one.user < 3 else replace(one, **UNANSWERED, ended_s=900.0)},
    ),
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
    "abandoned_computed": Cause(EngineSetup(deaf=True), {"leave": chat(4, 60, abandon=LEAVING)}),
    "listen_queue_full": Cause(
        EngineSetup(),
        {"burst": batch(8)},
        more={"measured": lambda one: replace(one, connect_s=1.01, connect_retries=1)},
    ),
    "gateway_share": Cause(EngineSetup(gateway=True, api_s=0.03), ONE, others={"direct": EngineSetup()}),
    "api_process": Cause(EngineSetup(api_s=0.1), ONE),
    "stream_bundled": Cause(EngineSetup(), {"four": batch(4, output_tokens=96)}, more={"measured": bundled}),
    "slow_decode": Cause(on_gpu(0.5, startup=VLLM), ONE, more=GPU),
    "eager_mode": Cause(on_gpu(0.5, startup=VLLM, served={"effective": {"enforce_eager": True}}), ONE, more=GPU),
    "untuned_kernels": Cause(
        on_gpu(0.5, startup=VLLM, log="Using default MoE config. Performance might be sub-optimal!"), ONE, more=GPU
    ),
    "aiter_off": Cause(on_gpu(10.0, startup=VLLM), ONE, more={"template": "vllm-rocm", "machine": MI300X}),
    "aiter_failing": Cause(
        on_gpu(0.5, startup=VLLM, variables={"environment": {"VLLM_ROCM_USE_AITER": "1"}}), ONE, more=GPU
    ),
    "cpu_offload": Cause(
        on_gpu(0.5, startup={"engine": "llama.cpp", "offloaded_layers": "20/33"}),
        ONE,
        more={"template": "llamacpp", "machine": STRIX_HALO},
    ),
    "power_limited": Cause(on_gpu(0.5, startup=VLLM, telemetry=watched("power")), ONE, more=GPU),
    "other_work": Cause(EngineSetup(), ONE, more={"ran": memory_in_use(50)}),
    "overheated": Cause(EngineSetup(change=hotter, telemetry=watched("heat", since_s=8)), {"one": batch(1, 200)}),
    "slower_over_time": Cause(EngineSetup(change=hotter, telemetry=watched()), {"one": batch(1, 200)}),
    "memory_moved": Cause(EngineSetup(telemetry=watched(available_gib=0.25)), ONE),
    "slow_prefill": Cause(
        on_gpu(1.7, replace(HEALTHY, prefill_per_token_s=2e-3), startup=VLLM), {"one": batch(1, 20)}, 300, more=GPU
    ),
    "small_shared_memory": Cause(EngineSetup(startup=VLLM, served=SMALL_SHM), ONE, more=GPU),
    "versions_differ": Cause(
        EngineSetup(startup=VLLM), ONE, more=GPU, others={"older": EngineSetup(startup=VLLM | {"version": "0.20.1"})}
    ),
    "setting_replaced": Cause(
        EngineSetup(variables={"max_num_seqs": 64}, engine=replace(HEALTHY, max_num_seqs=8)), ONE
    ),
    "cold_start": Cause(EngineSetup(engine=replace(HEALTHY, compile_s=1.0, compile_steps=1)), {"one": batch(1, 20)}),
    "load_generator": Cause(
        EngineSetup(marks={"loop_lag_p50_s": 0.02, "loop_lag_p99_s": 0.04}),
        {"four": batch(4)},
        more={"measured": lambda one: replace(one, clock="read")},
    ),
    "speculation_rejected": Cause(EngineSetup(engine=drafting(acceptance_rate=0.2)), ONE),
    "speculation_costs": Cause(
        EngineSetup(engine=drafting(acceptance_rate=0.7)),
        {"one": batch(1), "four": batch(4), "eight": batch(8)},
        others={"plain": EngineSetup()},
    ),
    "unexplained_limit": Cause(EngineSetup(engine=TIGHT), {"ten": batch(10, 6)}, 360, more={"repeats": 1}),
    "slo_beyond_hardware": Cause(on_gpu(2.0, startup=VLLM), ONE, more=GPU | {"checks": ["tpot_p50 <= 5ms"]}),
}


@pytest.fixture(scope="module")
def of_cause(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Summary]:
    """The summary of the run of each cause, which is measured once."""
    return cache(lambda code: measured(tmp_path_factory.mktemp(code) / "run", CAUSES[code]).summary)


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
def test_a_run_with_one_cause_has_its_finding_first(of_cause: Callable[[str], Summary], code: str) -> None:
    findings = of_cause(code).findings or []
    assert [one.code for one in findings][:1] == [code]
    assert all(action.do and action.verify for action in findings[0].actions)


def test_what_costs_a_known_share_of_the_time_comes_first(tmp_path: Path) -> None:
    """A queue of two thirds of the time, and a /dev/shm of which no number of the run shows the cost."""
    cause = CAUSES["queue_with_room"]
    both = replace(cause.setup, startup=VLLM, served={"effective": {"max_num_seqs": 2, **SMALL_SHM["effective"]},
                                                      "container": SMALL_SHM["container"]})  # fmt: skip
    findings = found(tmp_path / "run", cause, both, **GPU)
    assert [(one.code, one.cost is None) for one in findings] == [
        ("queue_with_room", False), ("small_shared_memory", True)
    ]  # fmt: skip


def test_a_bundle_changes_neither_tpot_nor_who_is_blamed(tmp_path: Path) -> None:
    """A proxy passes on 16 chunks at a time, another all at the end; the load generator is late as well."""
    late = {"loop_lag_p50_s": 0.006, "loop_lag_p99_s": 0.01}
    cause = Cause(EngineSetup(marks=late), {"four": batch(4, output_tokens=96)})
    plain = measured(tmp_path / "plain", cause).summary.rows[0].pooled
    made = measured(tmp_path / "made", cause, measured=bundled).summary
    (one,) = made.findings or []
    assert (one.code, one.values["via"], made.rows[0].client_limited) == ("stream_bundled", "nginx/1.22.1", [])
    assert one.actions[0].settings == {"nginx": "proxy_buffering off;"}
    assert made.rows[0].pooled.tpot.p50 == pytest.approx(plain.tpot.p50, rel=0.01)
    assert (made.rows[0].pooled.ttft.p50 or 0) > (plain.ttft.p50 or 0)
    held = measured(tmp_path / "held", cause, measured=lambda one: bundled(one, 200, None)).summary
    (one,) = held.findings or []
    whole, row = held.rows[0].pooled.answer_tok_s, held.rows[0]
    assert (one.values["pieces"], row.pooled.tpot.n, "tpot" in row.missing) == (1, 0, True)
    assert whole == pytest.approx(plain.answer_tok_s, rel=1e-6)


def test_several_tokens_an_event_are_no_bundle(tmp_path: Path) -> None:
    """Speculation and a stream interval: the first token comes alone, in long words as well."""

    def merged(one: Request) -> Request:
        chunks_s = [one.chunks_s[0], *one.chunks_s[8::8], *one.chunks_s[-1:]]
        return replace(one, chunks_s=chunks_s, text_chars=4 * 96, first_arrival_chars=9, first_words=1)

    cause = Cause(EngineSetup(), {"four": batch(4, output_tokens=96)})
    for name, change in {"interval": {"measured": merged}, "drafts": {}}.items():
        setup = EngineSetup(engine=drafting(acceptance_rate=0.8)) if name == "drafts" else None
        codes = [one.code for one in found(tmp_path / name, cause, setup, **change)]
        assert "stream_bundled" not in codes, name


def test_few_requests_show_nothing(tmp_path: Path) -> None:
    """Each cause in so short a run: a limit on sequences was once advised after ten requests of two users."""
    for code in ("more_is_slower", "kv_cache_full", "queue_with_room", "prompts_freeze_answers", "api_process"):
        cause = CAUSES[code]
        loads = {name: replace(load, requests=4) for name, load in cause.loads.items()}
        findings = found(tmp_path / code, replace(cause, loads=loads))
        assert [one.code for one in findings if one.code != "unexplained_limit"] == [], code
        assert [action.settings for one in findings for action in one.actions if action.settings] == [], code


def test_what_limited_a_short_run_is_never_called_no_problem(tmp_path: Path) -> None:
    """Seven requests on a KV cache that is full: what is known is shown, with how many more would tell the reason."""
    cause = CAUSES["unexplained_limit"]
    made = measured(tmp_path / "run", cause).summary
    (one,) = made.findings or []
    assert (made.rows[0].limited_by, one.values["limited_by"], one.values["few"]) == ("kv_cache", "kv_cache", True)
    assert one.cost is not None and one.cost > 0.2 and [action.settings for action in one.actions] == [{}]
    for name, text in outputs(tmp_path / "run", made).items():
        assert "no problem" not in text and "unexplained" in text, name


def test_too_few_requests_for_findings_are_said(tmp_path: Path) -> None:
    for requests, good in ((9, False), (10, True)):  # of each of two repeats
        made = measured(tmp_path / f"{requests}", Cause(EngineSetup(), {"one": batch(1, requests)})).summary
        assert made.findings == []
        for name, text in outputs(tmp_path / f"{requests}", made).items():
            assert name == "json" or ("no problem" in text) == good, name


def test_what_failed_is_never_next_to_no_problem(tmp_path: Path) -> None:
    """A third of the requests do not fit into the context; no rule is about that, and no cause is a word for it."""
    message = "status 400: request (4805 tokens) exceeds the available context size (4096 tokens), try increasing it"
    refused: dict[str, Any] = {"error": "http", "message": message, "chunks_s": [], "output_tokens": None}

    def too_long(one: Request) -> Request:
        return one if one.index % 3 else replace(one, **refused, finish=None, status=400)

    cause = Cause(EngineSetup(), {"one": batch(1, 60)}, more={"measured": too_long})
    checked = Cause(EngineSetup(), {"one": batch(1, 60)}, more={"checks": ["tpot_p50 <= 1ms"]})
    for name, each in {"failed": cause, "checked": checked}.items():
        made = measured(tmp_path / name, each).summary
        assert (made.findings, made.valid) == ([], True)
        for form, text in outputs(tmp_path / name, made).items():
            assert form == "json" or ("no problem" not in text and "no cause" in text), (name, form)


@pytest.mark.parametrize("code", ["kernel_event", "other_model"])
def test_a_note_that_doubts_a_run_is_never_next_to_no_problem(tmp_path: Path, code: str) -> None:
    made = measured(tmp_path / "run", Cause(EngineSetup(), {"one": batch(1, 60)})).summary
    note = because(code, "the GPU hung, and the kernel reset it")
    doubted = replace(made, notes=[*made.notes, note])
    assert (doubted.findings, doubted.valid) == ([], True)
    for form, text in outputs(tmp_path / "run", doubted).items():
        assert form == "json" or ("no problem" not in text and "see the note" in text), form
    card = render_card(read_run(tmp_path / "run"), doubted, "harness run one.yaml")
    assert f"- `{note.text}`\n- VALID" in card


def test_a_cache_that_is_full_for_a_moment_limits_nothing(tmp_path: Path) -> None:
    """A few preemptions in hundreds of requests: the column and the findings agree."""
    for blocks, limit, codes_found in ((71, "decode", []), (68, "kv_cache", ["kv_cache_full"])):
        setup = EngineSetup(engine=replace(HEALTHY, num_gpu_blocks=blocks, max_model_len=512))
        made = measured(tmp_path / f"{blocks}", Cause(setup, {"eight": batch(8, 200, 30)}), repeats=1).summary
        assert made.cells[0].server_load.preemptions, blocks
        assert (made.rows[0].limited_by, [one.code for one in made.findings or []]) == (limit, codes_found), blocks


def test_few_answers_show_that_eight_users_queue_behind_five_slots(tmp_path: Path) -> None:
    """As many as `harness quick` gets, also of a server without metrics, whose slots are known."""
    loads, five = (
        {"four": batch(4, 8, 60), "eight": batch(8, 10, 60)},
        EngineSetup(engine=replace(HEALTHY, max_num_seqs=5)),
    )
    (one,) = found(tmp_path / "five", Cause(five, loads))
    assert (one.code, one.rows, one.values["slots"], one.values["fits"]) == ("queue_with_room", ["a / eight"], 5, 8)
    assert found(tmp_path / "eight", Cause(EngineSetup(engine=replace(HEALTHY, max_num_seqs=8)), loads)) == []
    for slots, engine in ((5, five.engine), (8, HEALTHY), (None, five.engine), (5, HEALTHY)):
        folder = tmp_path / f"{slots}-of-{engine.max_num_seqs}"
        effective = {} if slots is None else {"max_num_seqs": slots}
        measured(folder, Cause(EngineSetup(engine=engine, startup=VLLM, served={"effective": effective}), loads))
        (folder / "metrics.jsonl").write_text("")
        findings = with_findings(summarize_with_counts(folder)).summary.findings or []
        expected = ["queue_with_room"] if (slots, engine) == (5, five.engine) else []
        assert [one.code for one in findings] == expected, (slots, engine.max_num_seqs)


def sparse(folder: Path, waiting: float = 0.0) -> list[str]:
    """The findings of a run of whose server metrics only the first and the last sample of each cell are known."""
    of_cells: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        row["values"] |= {"waiting": waiting} if "waiting" in row["values"] else {}
        of_cells.setdefault(row["cell"], []).append(row)
    ends = [row for rows in of_cells.values() for row in (rows[0], rows[-1])]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ends))
    return [one.code for one in with_findings(summarize_with_counts(folder)).summary.findings or []]


@pytest.mark.parametrize("waiting", [0.0, 2.0])
def test_a_queue_that_few_samples_show_is_known_by_the_servers_times(tmp_path: Path, waiting: float) -> None:
    """Batches of four on two slots, in a load too short for samples."""
    two = EngineSetup(engine=replace(HEALTHY, max_num_seqs=2))
    four = Load(user="batch", batch_size=4, requests=24, output_tokens=8)
    measured(tmp_path / "run", Cause(two, {"work": four}, 20))
    assert sparse(tmp_path / "run", waiting) == ["queue_with_room"]


def test_few_samples_blame_no_slots_that_are_free_or_that_the_cache_cannot_fill(tmp_path: Path) -> None:
    """Bursts and steady loads on servers with room, and a cache that holds fewer requests than there are slots.

    30 healthy runs have none of these findings: a false-alarm rate under 10 % (95 % upper bound).
    """
    burst, steady = Load(user="batch", batch_size=6, requests=24, output_tokens=8), batch(6, 24, 8)
    loads: dict[str, Load] = {"burst": burst, "steady": steady, "talk": chat(6, 24)}
    for seed in range(5):
        for slots in (6, 8):
            engine = replace(HEALTHY, max_num_seqs=slots, max_num_batched_tokens=128 << (seed % 3))
            folder = tmp_path / f"{seed}-{slots}"
            measured(folder, Cause(EngineSetup(engine=engine), loads, 20 + 80 * seed), seed=seed, repeats=1)
            assert "queue_with_room" not in sparse(folder), (seed, slots)
    tight = replace(HEALTHY, max_num_seqs=4, num_gpu_blocks=50, max_model_len=512)  # 800 tokens: two requests
    measured(tmp_path / "tight", Cause(EngineSetup(engine=tight), {"eight": batch(8, 24, 8)}, 360))
    assert "queue_with_room" not in sparse(tmp_path / "tight", 2.0)


def test_users_of_a_live_load_are_counted_and_not_taken_from_its_form(tmp_path: Path) -> None:
    """A live load starts with one user, and a person sets eight: none of them is "1 of 1 users" without an answer."""
    four = EngineSetup(engine=replace(HEALTHY, max_num_seqs=4))
    made = measured(tmp_path / "run", Cause(four, {"eight": batch(8, 24, 60)}))
    run = made.data.run
    loads = {name: replace(load, users=1, in_flight=None, batch_size=1) for name, load in run.scenario.loads.items()}
    write_run(tmp_path / "run", replace(run, status="live", scenario=replace(run.scenario, loads=loads)))
    live = with_findings(summarize_with_counts(tmp_path / "run"))
    assert [fact.in_flight for fact in _row_facts(live.data, live.summary)] == [8]
    assert "users_unserved" not in [one.code for one in live.summary.findings or []]


def test_a_queue_is_found_where_the_end_cut_most_answers(tmp_path: Path) -> None:
    """Three answers of eight users, as of a slow server with four slots; with a slot for each user nothing is found."""
    cut: Any = {"error": "unfinished", "message": "cut", "finish": None}

    def ends(one: Request) -> Request:
        return replace(one, **cut) if (one.index or 0) % 8 >= 3 else one

    for slots, expected in ((4, ["queue_with_room"]), (8, [])):
        engine = EngineSetup(engine=replace(HEALTHY, max_num_seqs=slots))
        made = measured(tmp_path / f"{slots}", Cause(engine, {"eight": batch(8, 8, 60)}), measured=ends).summary
        assert (made.rows[0].pooled.succeeded, made.rows[0].pooled.unfinished) in ((3, 5), (6, 10))
        assert [one.code for one in made.findings or []] == expected


def test_a_shorter_queue_promises_a_bound_that_the_measurement_keeps(tmp_path: Path) -> None:
    """More requests at once slow each other: TTFT is not that of an idle server."""
    cause, five = CAUSES["queue_with_room"], EngineSetup(engine=replace(HEALTHY, max_num_seqs=2))
    (one,) = found(tmp_path / "before", cause, five)
    gain = one.actions[0].gain
    assert gain is not None and " at least " in gain.text
    wide = EngineSetup(engine=replace(HEALTHY, max_num_seqs=8))
    before, after = (
        measured(tmp_path / name, cause, setup).summary.rows[0].pooled
        for name, setup in (("again", five), ("after", wide))
    )
    assert (after.ttft.mean or 0) >= gain.values["factor"] * (before.ttft.mean or 0)
    assert one.cost is not None and (after.e2e.mean or 0) >= (1 - one.cost) * (before.e2e.mean or 0)


def test_a_server_that_notices_who_leaves_computes_nothing_for_them(tmp_path: Path) -> None:
    cause = CAUSES["abandoned_computed"]
    made = measured(tmp_path / "run", cause, replace(cause.setup, deaf=False)).summary
    assert (made.rows[0].pooled.abandoned > 20, made.findings) == (True, [])


def test_two_causes_of_slow_decode_have_one_cost(tmp_path: Path) -> None:
    cause = CAUSES["eager_mode"]
    both = replace(cause.setup, log="Using default MoE config. Performance might be sub-optimal!")
    first, second = found(tmp_path / "run", cause, both, **GPU)
    assert (first.code, second.code, first.cost) == ("eager_mode", "untuned_kernels", second.cost)
    assert (first.same_cost_as, second.same_cost_as) == ("", "eager_mode")


def test_prompts_of_several_requests_are_computed_together(tmp_path: Path) -> None:
    """At 35 % of the compute each of four waits for the prompts of all."""
    prefill_s = 14e9 * 2 / 59.4e12 / 0.35
    engine = replace(HEALTHY, step_base_s=28 / 256 / 0.7, step_per_kv_token_s=0.0, prefill_per_token_s=prefill_s)
    setup = on_gpu(28.0, engine, startup=VLLM)
    assert found(tmp_path / "four", Cause(setup, {"four": batch(4, 24)}, 250, more=GPU)) == []
    slow = replace(setup, engine=replace(engine, prefill_per_token_s=20 * prefill_s))
    (one,) = found(tmp_path / "slow", Cause(slow, {"four": batch(4, 24, 2)}, 250, more=GPU))
    assert (one.code, round(one.values["share"], 3)) == ("slow_prefill", 0.018)


FAST = on_gpu(28.0, replace(HEALTHY, step_base_s=28 / 256 / 0.7, step_per_kv_token_s=0.0, prefill_per_token_s=1e-5))


def early(one: Request) -> Request:
    """A blank comes after 1 ms, and the rest as before."""
    return replace(one, chunks_s=[0.001, *one.chunks_s], first_text_s=one.chunks_s[0])


def test_a_prefill_above_what_the_hardware_allows_is_not_given(tmp_path: Path) -> None:
    """A prompt of 250 tokens reads 28 GB of weights at 256 GB/s: 0.11 s."""
    fast = Cause(FAST, {"one": batch(1, 12)}, 250, more=GPU)
    healthy = measured(tmp_path / "healthy", fast).summary
    assert (healthy.rows[0].prefill_tok_s or 0) > 1000 and "prefill_above_hardware" not in codes(healthy)
    cached = measured(tmp_path / "cached", fast, measured=lambda one: moved(one, 0.1)).summary
    (note,) = [note for note in cached.notes if note.code == "prefill_above_hardware"]
    assert cached.rows[0].prefill_tok_s is None
    assert note.values["row"] == "a / one" and note.values["tok_s"] > note.values["bound_tok_s"] > 2000
    unknown = measured(
        tmp_path / "unknown", fast, replace(FAST, served={}), measured=lambda one: moved(one, 0.1)
    ).summary
    assert unknown.rows[0].prefill_tok_s and "prefill_above_hardware" not in codes(unknown), "nothing bounds it"


def moved(one: Request, by_s: float) -> Request:
    """The answer as if its first token had come so much earlier."""
    return replace(one, chunks_s=[one.chunks_s[0] - by_s, *one.chunks_s[1:]])


def test_a_first_token_that_is_blank_gives_no_prefill_and_no_share(tmp_path: Path) -> None:
    one = Cause(FAST, {"one": batch(1, 12)}, 250, more=GPU)
    assert measured(tmp_path / "healthy", one).summary.hardware_shares
    slow = Cause(on_gpu(2.8, replace(HEALTHY, prefill_per_token_s=2e-3)), {"one": batch(1, 12)}, 250, more=GPU)
    blank = measured(tmp_path / "blank", slow, measured=early).summary
    assert (blank.rows[0].prefill_tok_s, blank.hardware_shares) == (None, [])
    assert "first_token_blank" in codes(blank)
    together = measured(tmp_path / "four", replace(slow, loads={"four": batch(4, 12)}), measured=early).summary
    assert together.rows[0].prefill_tok_s is None and "first_token_blank" not in codes(together)


def codes(summary: Summary) -> set[str]:
    return {note.code for note in summary.notes}


def test_speculation_costs_from_a_number_of_users_on(tmp_path: Path, of_cause: Callable[[str], Summary]) -> None:
    one = next(one for one in of_cause("speculation_costs").findings or [] if one.code == "speculation_costs")
    ratios = one.values["ratios"]
    assert (one.values["from"], one.rows) == (4, ["a / eight", "a / four"])
    assert ratios["1"] < 1 < ratios["4"] < ratios["8"]
    assert one.actions[0].settings == {"servers.a.variables": 'extra_args: ["--num-speculative-tokens", "0"]'}
    vllm = first_settings(tmp_path / "run", "speculation_rejected", template="vllm-rocm", startup=VLLM)
    assert vllm == {"servers.a.variables": "speculative_config: null"}


@pytest.mark.parametrize(
    ("selection", "rows"), [("two: ", ["other / two", "a / two"]), ("other/one: ", ["other / one"])]
)
def test_an_slo_is_of_the_rows_that_its_check_is_for(tmp_path: Path, selection: str, rows: list[str]) -> None:
    cause = CAUSES["slo_beyond_hardware"]
    loads, more = {"one": batch(1), "two": batch(2)}, cause.more | {"checks": [f"{selection}tpot_p50 <= 5ms"]}
    made = found(tmp_path / "run", replace(cause, loads=loads, others={"other": cause.setup}, more=more))
    assert [one.rows for one in made if one.code == "slo_beyond_hardware"] == [rows]


def test_memory_that_a_card_took_of_the_host_is_found(tmp_path: Path) -> None:
    card = machine(lambda root: machines.radeon(root, 110000, 24))
    setup = EngineSetup(telemetry=watched(gtt_gib=4))
    (one,) = found(tmp_path / "run", Cause(setup, ONE, more={"machine": card}))
    assert (one.code, one.values["gtt_bytes"]) == ("memory_moved", 4 * GIB)


def test_the_log_tells_that_aiter_fails(tmp_path: Path) -> None:
    line = (
        "WARNING AITER is not found or not supported on the current platform, QuarkOCP_MX will fall back to emulation."
    )
    (one,) = found(tmp_path / "run", Cause(on_gpu(0.5, startup=VLLM, log=f"INFO a\n{line}\n"), ONE, more=GPU))
    assert (one.code, one.values["line"]) == ("aiter_failing", line)
    assert one.actions[0].settings == {"servers.a.variables": 'environment: {"VLLM_ROCM_USE_AITER": "0"}'}


def test_a_count_of_cached_tokens_that_is_not_reported_is_not_zero(tmp_path: Path) -> None:
    setup, loads = EngineSetup(engine=replace(HEALTHY, enable_prefix_caching=False)), {"talk": chat(4, turns=6)}
    setup = replace(setup, served={"effective": {"enable_prefix_caching": True}})
    assert found(tmp_path / "run", Cause(setup, loads, 400)) == []


@pytest.mark.parametrize("seed", range(20) if NIGHTLY else range(6, 11))  # each set-up, each kind of load
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
    "speculation_costs": of_engine(num_speculative_tokens=0),
}


def value_of(row: Row, metric: str) -> float:
    numbers = row.pooled
    known = {
        "ttft_mean": numbers.ttft.mean, "e2e_mean": numbers.e2e.mean, "gap_max": numbers.gap.max,
        "output_tok_s": numbers.output_tok_s, "tpot_mean": numbers.tpot.mean,
    }  # fmt: skip
    value = known[metric]
    assert value is not None
    return value


def test_every_expected_gain_is_measured(of_cause: Callable[[str], Summary]) -> None:
    firsts = {code: (of_cause(code).findings or [])[:1] for code in CAUSES}
    gains = {code for code, first in firsts.items() for one in first if any(action.gain for action in one.actions)}
    assert gains == BETTER.keys()


@pytest.mark.parametrize("code", BETTER)
def test_an_expected_gain_has_the_direction_of_its_measurement(
    tmp_path: Path, of_cause: Callable[[str], Summary], code: str
) -> None:
    cause, before = CAUSES[code], of_cause(code)
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


LOAD = "a shell (Lemonade loads the model again, and keeps the settings)"


def loaded(settings: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The model and the options of the command that makes Lemonade load it."""
    words = shlex.split(settings[LOAD])
    body = json.loads(words[words.index("--data") + 1])
    assert words[0] == "curl" and words[1].endswith("/api/v1/load") and body.pop("save_options") is True
    return body.pop("model_name"), body


def first_action(folder: Path, code: str, **served: Any) -> Action:
    cause = CAUSES[code]
    template = served.pop("template", "simulated")
    setup = replace(cause.setup, startup=served.pop("startup", {}), served=served)
    findings = found(folder, cause, setup, template=template)
    return next(one for one in findings if one.code == code).actions[0]


def first_settings(folder: Path, code: str, **served: Any) -> dict[str, str]:
    return first_action(folder, code, **served).settings


@pytest.mark.parametrize("code", ["load_generator", "cold_start"])
def test_a_quick_run_is_not_advised_to_set_what_it_cannot(tmp_path: Path, code: str) -> None:
    cause = CAUSES[code]
    findings = found(tmp_path / "run", cause, template=None, scenario_name="quick")
    actions = next(one for one in findings if one.code == code).actions
    assert [action.settings for action in actions] == [{}] and "processes" not in actions[0].do


@pytest.mark.parametrize(
    ("load", "marks", "processes"),
    [
        (chat(4, 40), {}, 2),
        (batch(4), {}, None),  # one user, whose requests are in flight at once: a second process has no user
        (chat(4, 40, processes=3), {}, 4),
        (chat(4, 40, processes=4), {}, None),
        (chat(4, 40), {"core_wait": 0.06}, None),  # others had the cores
        (chat(4, 40), {"core_wait": 0.04}, 2),
    ],
)
def test_more_load_processes_are_advised_only_where_the_load_can_have_and_use_them(
    tmp_path: Path, load: Load, marks: dict[str, float], processes: int | None
) -> None:
    late = EngineSetup(marks={"loop_lag_p50_s": 0.03, "loop_lag_p99_s": 0.06, **marks})
    cause = Cause(late, {"load": load}, more=CAUSES["load_generator"].more)
    (one,) = [one for one in found(tmp_path / "run", cause) if one.code == "load_generator"]
    (action,) = one.actions
    assert action.settings == ({} if processes is None else {"loads.load": f"processes: {processes}"})
    assert ("processes" in action.do) == (processes is not None)


# The stories of the seeds, with their numbers.


def test_the_speed_of_14b_in_fp16_is_normal(tmp_path: Path, wording: Wording) -> None:
    """6.4 tok/s with 28 GB a token on Strix Halo, 64 MiB of /dev/shm and one worker: nothing is wrong."""
    slow = replace(HEALTHY, step_base_s=1 / 6.4, step_per_sequence_s=0.0, step_per_kv_token_s=0.0)
    shm = {"container": {"HostConfig": {"ShmSize": 64 << 20, "IpcMode": "private"}}, "effective": {}}
    made = measured(tmp_path / "run", Cause(on_gpu(28.0, slow, startup=VLLM, served=shm), ONE, more=GPU))
    known = share(made.data, next(iter(made.data.cells.values())))
    assert known is not None
    assert (known.word, round(known.share, 2), made.summary.findings) == ("normal", 0.70, [])
    (stated,) = made.summary.hardware_shares
    assert (stated.values["share"], stated.values["word"]) == (known.share, "normal")
    assert "33.2" in stated.text
    wording(stated.text)
    page = lined_up(run_page(made.summary, made.data.run))
    texts = [element.text for element in page if isinstance(element, Paragraph)]
    assert texts.index(stated.text) < 5, "on the first screen"


def test_ten_at_once_took_two_and_a_half_times_as_long(tmp_path: Path) -> None:
    """0.4x with batches of 10 on Lemonade: 5 sequences at once, as a load of the model."""
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
    entry = {"ctx_size": 8192, "vllm_args": args}
    assert (one.code, loaded(one.actions[0].commands)) == ("more_is_slower", ("Qwen3.5-0.8B-FP16-vLLM", entry))


def test_a_context_of_256k_is_not_needed(tmp_path: Path) -> None:
    """A model's own 262,144 tokens, of which requests of a few hundred use nothing."""
    engine = replace(HEALTHY, max_model_len=262_144, num_gpu_blocks=20_000)
    served = {"effective": {"recipe_options": {"ctx_size": 262_144}}, "model": "user.M"}
    story = Cause(EngineSetup(engine=engine, startup=VLLM, served=served), {"five": batch(5)}, more={"template": None})
    (one,) = found(tmp_path / "run", story)
    entry = {"ctx_size": 8192}  # no less: a usual conversation needs it
    assert (one.code, loaded(one.actions[0].commands)) == ("context_unused", ("user.M", entry))


def test_litellm_took_six_percent(tmp_path: Path) -> None:
    """29.95 s directly and 31.84 s through LiteLLM."""
    at_once = {"ten": batch(10, 60, 50)}
    alone_s = measured(tmp_path / "alone", Cause(EngineSetup(), at_once)).summary.rows[0].pooled.e2e.mean
    assert alone_s is not None
    tax = EngineSetup(gateway=True, api_s=alone_s * (31.84 / 29.95 - 1))
    (one, *_) = found(tmp_path / "run", Cause(tax, at_once, others={"direct": EngineSetup()}))
    assert (one.code, one.actions[0].gain is not None) == ("gateway_share", True)
    assert one.cost == pytest.approx(1 - 29.95 / 31.84, abs=0.005)


def one_slot(context: int = 8192, engine: EngineConfig = HEALTHY, **startup: Any) -> EngineSetup:
    """llama.cpp behind Lemonade as it starts by itself: one request at a time, whatever arrives."""
    effective = {"recipe_options": {"ctx_size": context}, "parallel": 1, "ctx_per_slot": context}
    return EngineSetup(
        engine=replace(engine, max_num_seqs=1, max_model_len=context),
        startup={"engine": "llama.cpp", "max_model_len": context, **startup},
        served={"effective": effective, "model": "user.M"},
    )


def entry_of(one: RunFinding, action: int) -> dict[str, Any]:
    model, entry = loaded(one.actions[action].commands)
    assert model == "user.M"
    return entry


def test_one_slot_needs_more_slots_and_each_keeps_its_context(tmp_path: Path) -> None:
    """One finding, whose first action makes no usual conversation impossible."""
    story = Cause(one_slot(), {"five": batch(5)}, more={"template": None})
    (one,) = found(tmp_path / "run", story)
    assert (one.code, len(one.actions)) == ("queue_with_room", 1)
    assert entry_of(one, 0) == {"ctx_size": 5 * 8192, "llamacpp_args": "--parallel 5"}


@pytest.mark.parametrize(("vram_gib", "first"), [(96, "--parallel 5"), (20, "--parallel 4"), (None, "--parallel 5")])
def test_slots_get_shorter_only_where_the_memory_has_no_room_and_hold_a_chat(
    tmp_path: Path, vram_gib: int | None, first: str
) -> None:
    """A context of 32,768 tokens takes 4 GiB, and the GPU has 17 GiB more than the server uses, or 1 GiB."""

    def samples(cell: Cell, wall_s: float) -> list[TelemetrySample]:
        gpu = GpuSample(busy_percent=90, vram_used_bytes=19 * GIB, gtt_used_bytes=0)
        host = HostSample(memory_available_bytes=0)
        return [
            TelemetrySample(wall_s=wall_s + at, cell=cell.id, gpus={"renderD128": gpu}, host=host) for at in range(40)
        ]

    setup = replace(one_slot(32_768, kv_cache_gib=4.0), telemetry=() if vram_gib is None else samples)
    if vram_gib is None:
        setup = replace(setup, telemetry=EngineSetup().telemetry)
    card = None if vram_gib is None else machine(lambda root: machines.radeon(root, 110000, vram_gib))
    more: dict[str, Any] = {"template": None} | ({} if card is None else {"machine": card})
    one = found(tmp_path / "run", Cause(setup, {"five": batch(5)}, more=more))[0]
    assert one.code == "queue_with_room"
    entry = entry_of(one, 0)
    assert (entry["llamacpp_args"], entry["ctx_size"]) == (first, 5 * 32_768 if first.endswith("5") else 4 * 8192)
    assert all(entry_of(one, place)["ctx_size"] >= 8192 * int(entry_of(one, place)["llamacpp_args"].split()[-1])
               for place in range(len(one.actions)))  # fmt: skip


def test_one_slot_without_metrics_is_seen_by_its_answers(tmp_path: Path) -> None:
    """None of them overlap, while five requests are there; with a slot for each, or unknown slots, nothing is found."""
    for slots, expected in ((1, ["queue_with_room"]), (5, [])):
        setup = one_slot()
        served = setup.served | {"effective": setup.served["effective"] | {"parallel": slots}}
        setup = replace(setup, engine=replace(setup.engine, max_num_seqs=slots), served=served)
        folder = tmp_path / f"{slots}"
        measured(folder, Cause(setup, {"five": batch(5)}, more={"template": None}))
        (folder / "metrics.jsonl").write_text("")
        findings = with_findings(summarize_with_counts(folder)).summary.findings or []
        assert [one.code for one in findings] == expected, slots


def stalled(one: Request) -> Request:
    """The answer with all of its time in one pause, between its first chunks and its last ones."""
    half, first_s, last_s = len(one.chunks_s) // 2, one.chunks_s[0], one.chunks_s[-1]
    chunks_s = [first_s + place / 250 if place < half else last_s - (len(one.chunks_s) - 1 - place) / 250
                for place in range(len(one.chunks_s))]  # fmt: skip
    return replace(one, chunks_s=chunks_s)


@pytest.mark.parametrize("users", [1, 5])
def test_no_prompt_freezes_an_answer_that_is_alone(tmp_path: Path, users: int) -> None:
    """With one slot, or one user, no answer is under way while a prompt is computed: pauses have another cause."""
    story = Cause(one_slot(), {"load": batch(users, 40, 30)}, 4000, more={"template": None, "measured": stalled})
    codes = [one.code for one in found(tmp_path / "run", story)]
    assert codes == (["queue_with_room"] if users > 1 else [])


def test_no_prompt_freezes_answers_that_do_not_overlap(tmp_path: Path) -> None:
    """Two users whose requests never meet, on a server whose slots are not known."""
    story = Cause(EngineSetup(engine=replace(HEALTHY, max_num_seqs=1)), {"two": batch(2, 40, 30)}, 2000)
    unknown = replace(story.setup, startup=VLLM, served={"effective": {}})
    folder = tmp_path / "run"
    measured(folder, story, unknown, measured=stalled)
    (folder / "metrics.jsonl").write_text("")
    findings = with_findings(summarize_with_counts(folder)).summary.findings or []
    assert "prompts_freeze_answers" not in [one.code for one in findings]


@pytest.mark.parametrize(
    ("startup", "effective", "step", "less", "has_gain"),
    [
        ({"engine": "llama.cpp"}, {"parallel": 6}, 2048, 512, True),
        ({"engine": "llama.cpp"}, {"parallel": 6, "batch_size": 4096}, 4096, 1000, True),
        (VLLM, {}, None, 512, False),
    ],
)
def test_a_step_that_is_not_given_is_the_engines_own_or_not_known(
    tmp_path: Path, startup: dict[str, Any], effective: dict[str, Any], step: int | None, less: int, has_gain: bool
) -> None:
    cause = CAUSES["prompts_freeze_answers"]
    setup = replace(cause.setup, startup=startup, served={"effective": effective})
    one = next(one for one in found(tmp_path / "run", cause, setup) if one.code == "prompts_freeze_answers")
    assert (one.values["batched_tokens"], one.values["less"]) == (step, less)
    assert (one.actions[0].gain is not None) == has_gain


def test_what_the_cache_has_of_a_prompt_is_in_no_step(tmp_path: Path) -> None:
    """3,900 of 4,000 tokens: a hundred are computed, in one small step."""
    cause = CAUSES["prompts_freeze_answers"]
    findings = found(tmp_path / "run", cause, measured=lambda one: replace(one, cached_tokens=3900))
    assert "prompts_freeze_answers" not in [one.code for one in findings]


def test_a_setting_is_spelled_as_the_server_is_configured(tmp_path: Path) -> None:
    vllm: dict[str, Any] = {"startup": {"engine": "vllm"}}
    of_lemonade = {"recipe_options": {"ctx_size": 8192, "vllm_args": "--gpu-memory-utilization 0.78 --max-num-seqs=64"}}
    assert first_settings(tmp_path / "a", "more_is_slower") == {"servers.a.variables": "max_num_seqs: 5"}
    attached = first_settings(tmp_path / "b", "more_is_slower", template=None, **vllm)
    assert attached == {"arguments of vLLM": "--max-num-seqs 5"}
    lemonade = first_action(
        tmp_path / "c", "more_is_slower", template=None, effective=of_lemonade, model="Qwen3.5-0.8B-FP16-vLLM", **vllm
    )
    entry = {"ctx_size": 8192, "vllm_args": "--gpu-memory-utilization 0.78 --max-num-seqs 5"}
    assert loaded(lemonade.commands) == ("Qwen3.5-0.8B-FP16-vLLM", entry)
    started = first_action(tmp_path / "d", "more_is_slower", template="lemonade", effective=of_lemonade, **vllm)
    assert (list(started.settings), list(started.commands)) == (["servers.a.variables"], [LOAD])
    assert yaml.safe_load(started.settings["servers.a.variables"]) == entry == loaded(started.commands)[1]
    llama = {"engine": "llama.cpp"}
    slots = {"parallel": 2, "ctx_per_slot": 4096}
    changed = first_settings(tmp_path / "e", "queue_with_room", template="llamacpp", effective=slots, startup=llama)
    assert changed == {"servers.a.variables": "parallel: 8\nctx_size: 32768"}


@pytest.mark.parametrize("code", ["listen_queue_full", "load_generator", "cold_start"])
def test_a_finding_about_the_load_sets_nothing_of_the_server(tmp_path: Path, code: str) -> None:
    used = {"recipe_options": {"ctx_size": 8192, "llamacpp_args": "--parallel 4"}}
    served: dict[str, Any] = {"effective": used, "startup": {"engine": "llama.cpp"}}
    for template in (None, "lemonade"):
        settings = first_settings(tmp_path / str(template), code, template=template, **served)
        assert all(place == "the scenario" or place.startswith("loads.") for place in settings), settings


@pytest.mark.parametrize(
    ("load_name", "mixes"), [("people@8", {}), ("both.people", {"both": ["people", "other"]}), ("people-8", {})]
)
def test_a_setting_has_the_key_that_the_scenario_file_has(
    tmp_path: Path, load_name: str, mixes: dict[str, list[str]]
) -> None:
    """A stage, a part of a mix and a row of a sweep have none of their own."""
    eight, folder = {"sequences": 8}, tmp_path / "run"
    swept = Sweep(
        servers={"a": SweepRow(of="vllm", settings=eight)}, loads={"people-8": SweepRow(of="people", settings={})}
    )
    cause, loads = CAUSES["load_generator"], {load_name: replace(batch(8), users=2)}
    setup = replace(cause.setup, startup=VLLM)
    run = write_engine_run(folder, {"a": setup}, loads, template="vllm-rocm", measured=cause.more["measured"])
    write_run(folder, replace(run, scenario=replace(run.scenario, swept=swept, mixes=mixes)))
    (one, *_) = with_findings(summarize_with_counts(folder)).summary.findings or []
    assert [action.settings for action in one.actions] == [{"loads.people": "processes: 2"}]
    facts = RowFacts(load(folder), (summary := summarize(folder)), summary.rows[0])
    assert list(facts.action("", eight).settings) == ["servers.vllm.variables"]


def test_a_setting_that_lemonade_cannot_have_or_has_is_not_printed(tmp_path: Path) -> None:
    """What is in use is no cure; and what is hidden in it cannot be pasted."""
    for number, arguments in enumerate(("--max-num-seqs 5", "--api-key ***")):
        used = {"recipe_options": {"ctx_size": 8192, "vllm_args": arguments}}
        assert first_settings(
            tmp_path / str(number), "more_is_slower", template=None, effective=used, startup={"engine": "vllm"}
        ) == {}  # fmt: skip


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
        "page": run_html(folder, run, summary),
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
            assert name == "json" or ("no problem" in text) == there, name


def test_the_command_that_verifies_works_for_a_server_that_ran_already(tmp_path: Path) -> None:
    def again(template: str | None, *files: str) -> str:
        folder = tmp_path / f"{template}{files}"
        ran = replace(served_by(), url="http://127.0.0.1:8000", template=template)
        run = write_made_run(folder, served=lambda cell: ran)
        for name in files:
            (folder / name).write_text("{}")
        facts = RowFacts(load(folder), (summary := summarize(folder)), summary.rows[0])
        return facts.run_again.replace(run.scenario_name, "NAME")

    inputs = {"scenario": "/elsewhere/NAME.yaml", "telemetry": "ssh://gpu-box?config=/a"}
    ran = replace(served_by(), url="http://127.0.0.1:8000", template=None)
    run = write_made_run(tmp_path / "runs of me/one", served=lambda cell: ran)
    (tmp_path / "runs of me/one/inputs.json").write_bytes(msgspec.json.encode(inputs))
    facts = RowFacts(
        load(tmp_path / "runs of me/one"), (summary := summarize(tmp_path / "runs of me/one")), summary.rows[0]
    )
    where = ["--runs", str(tmp_path / "runs of me")]
    assert shlex.split(facts.run_again)[-4:] == ["--telemetry", inputs["telemetry"], *where]
    assert shlex.split(facts.verify("effective"))[-2:] == where and run.id in facts.verify("effective")
    options = {"--slice": "2", "--trace": "/a b/c.jsonl", "--api-key-env": "A", "--duration": "40s"}
    (tmp_path / "runs of me/one/inputs.json").write_bytes(msgspec.json.encode({**inputs, "options": options}))
    facts = RowFacts(facts.data, summary, summary.rows[0])
    assert shlex.split(facts.run_again)[3:9] == ["--slice", "2", "--trace", "/a b/c.jsonl", "--duration", "40s"]
    assert again("vllm-cpu") == "harness run NAME.yaml"
    assert again(None) == "harness run NAME.yaml --url http://127.0.0.1:8000 --model m"
    assert again(None, "capacity.json") == "harness capacity NAME.yaml --url http://127.0.0.1:8000 --model m", "damaged"


SEARCHES: dict[str, tuple[dict[str, Any], str]] = {
    "scenario": ({"slos": ["ttft_p95 <= 1s"], "knee": True}, "--load chat --check 'ttft_p95 <= 1s' --knee"),
    "own SLOs": ({"at_least": 2.5}, "--load chat --at-least 2.5"),
    "mix": (
        {"load": "both", "slos": ["chat: e2e_p90 <= 9s"], "max_level": 32, "budget_s": 90.0,
         "members": [MixMember(load="chat", unit="users", step=1.0, amount=20.0),
                     MixMember(load="job", unit="users", step=1.0)]},
        "--load both --fix chat=20 --check 'chat: e2e_p90 <= 9s'",
    ),
}  # fmt: skip


def searched(folder: Path, template: str | None, report: CapacityReport, **changes: Any) -> RowFacts:
    """The row of a capacity search. `changes`: of its manifest."""
    ran = replace(served_by(), url="http://127.0.0.1:8000", template=template)
    write_made_run(folder, served=lambda cell: ran)
    summary, data = summarize(folder), load(folder)
    write_capacity(folder, report)
    return RowFacts(replace(data, run=replace(data.run, **changes)), summary, summary.rows[0])


def asked(**fields: Any) -> CapacityReport:
    default: dict[str, Any] = {
        "load": "chat", "unit": "users", "step": 1.0, "max_level": 256, "slos": [], "shares": [], "budget_s": 1800.0,
    }  # fmt: skip
    return CapacityReport(**(default | fields))


@pytest.mark.parametrize("name", SEARCHES)
def test_the_command_that_verifies_a_search_asks_the_same(tmp_path: Path, name: str) -> None:
    fields, words = SEARCHES[name]
    report = asked(**fields)
    more = f"{words} --max-users {report.max_level} --budget {'90s' if report.budget_s == 90 else '30min'}"
    started, ran = searched(tmp_path / "1", "vllm-cpu", report), searched(tmp_path / "2", None, report)
    file, url = f"{started.data.run.scenario_name}.yaml", "--url http://127.0.0.1:8000 --model m"
    assert started.run_again == f"harness capacity {file} {more}"
    assert ran.run_again == f"harness capacity {file} {url} {more}"
    scenario = replace(ran.data.run.scenario, question="How many rag users does this server hold?")
    made = searched(tmp_path / "3", None, report, scenario=scenario)
    assert made.run_again == f"harness capacity {url} --user rag {more}"
    parsed = parse_slos(report.slos, [member.load for member in report.members])
    assert [slo.text for slo in parsed] == report.slos, "the command takes them"


def test_a_search_of_a_scenario_that_ships_is_not_one_of_made_users(tmp_path: Path) -> None:
    facts = searched(tmp_path / "1", None, asked(), scenario_name="capacity-chat")
    inputs = {"scenario": str(SCENARIOS / "capacity-chat.yaml")}
    (tmp_path / "1" / "inputs.json").write_bytes(msgspec.json.encode(inputs))
    assert shlex.split(facts.run_again)[:4] == ["harness", "capacity", "capacity-chat", "--url"]


def test_commands_reach_a_server_as_the_run_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its metrics and its authority, and the folder of the run; a scenario names its key itself."""
    monkeypatch.chdir(tmp_path)
    ran = replace(served_by(), url="https://h:1", template=None)
    keyed = scenario(servers={"a": Server(template="running")}, api_key_env="KEY", repeats=1)
    inputs = {
        "scenario": str(tmp_path / "s.yaml"),
        "metrics_url": "https://h:2/metrics",
        "ca": str(tmp_path / "-ca.pem"),
    }

    def again(name: str, **more: Any) -> str:
        folder = tmp_path / "mine" / f"{name}{len(more)}"
        write_made_run(folder, made_of=keyed, served=lambda cell: ran, scenario_name=name)
        (folder / "inputs.json").write_bytes(msgspec.json.encode(inputs | more))
        return RowFacts(load(folder), (summary := summarize(folder)), summary.rows[0]).run_again

    reached = "--metrics-url https://h:2/metrics --ca ./-ca.pem --runs mine"
    assert again("s") == f"harness run s.yaml --url https://h:1 --model m {reached}"
    assert again("quick") == f"harness run --url https://h:1 --model m --api-key-env KEY {reached}"
    without = again("quick", metrics_url=None)
    assert without == "harness quick https://h:1 --model m --api-key-env KEY --ca ./-ca.pem --runs mine"


def test_the_command_that_tries_an_advice_names_the_folder_of_the_run(tmp_path: Path) -> None:
    folder, cause = tmp_path / "mine" / "run", CAUSES["more_is_slower"]
    setup = replace(cause.setup, startup=VLLM)
    run = write_engine_run(folder, {"a": setup}, cause.loads, prompt_tokens=360, template="vllm-rocm")
    (folder / "inputs.json").write_text('{"scenario": "/s.yaml"}')
    (first, *_) = with_findings(summarize_with_counts(folder)).summary.findings or []
    assert first.actions[0].verify == f"harness tune {run.id} --runs {folder.parent}"
