"""`harness tune` without a process: results of starts, causes of failures, what took effect, its page."""

import io
import json
import math
import shlex
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console
from typer import Exit

from harness.base.errors import HarnessError, StartError
from harness.base.files import ROOT, pretty_json
from harness.base.measured import Distribution, Numbers, SloAttainment
from harness.base.reason import Reason, because
from harness.failures.table import rules
from harness.numbers.comparison import SameAnswers, Verdict
from harness.numbers.summary import CellSummary, Row, RunFinding, Summary
from harness.questions.report.page import shown_summary
from harness.questions.tune.command import exit_after_tune
from harness.questions.tune.decide import Trial, TuneAnswer, decide
from harness.questions.tune.page import answer_line, gain_text, history, result_text, tune_page
from harness.questions.tune.proof import (
    QUESTIONS,
    proof_rooms,
    proof_values,
    read_answered,
    search_reasons,
    slo_checks,
    users_value,
    value_of,
)
from harness.questions.tune.proof_run import proof_scenario
from harness.questions.tune.record import Goal, TuneQuestion, TuneReport, flat_keys, read_tune, write_tune
from harness.questions.tune.search import (
    LoadWatch,
    _read_to_resume,
    define_tune,
    restored,
    users_ladder,
    with_budget,
)
from harness.questions.tune.spelling import failure_of, to_paste
from harness.records.manifest import read_run, write_run
from harness.records.samples import MachineLoad, ServerLoad
from harness.report import html, markdown, terminal
from harness.report.elements import Chart, Grid, Paragraph
from harness.run.experiment import Experiment, Target
from harness.run.progress import Progress
from harness.run.running import start_failure
from harness.scenario import Arrivals, Baseline, Load, Scenario, Server, Sweep, SweepRow, asks_known
from harness.serve.compose_file import parse_compose
from harness.serve.facts import find_fallback, find_ignored_settings
from harness.serve.lemonade import RunningModel, find_other_load
from harness.workload import workload_sha256
from tests.support.http_double import Handler, listening
from tests.support.made_runs import request, scenario, served_by, write_made_run
from tests.support.made_summaries import row_of
from tests.support.tune_reports import changed_report, store
from tests.support.wording import Wording

QUESTION = TuneQuestion(budget_s=3600, names={"sequences": "max_num_seqs", "memory": "gpu_memory_utilization"})
REPORT = TuneReport(question=QUESTION)
SLO = "ttft_p95<=2s"


def cell(name: str = "c", server: str = "default", repeat: int = 1, **changes: Any) -> CellSummary:
    given: dict[str, Any] = {"output_tok_s": 50.0, "window_s": 10.0}
    given |= {key: changes.pop(key) for key in ("output_tok_s", "e2e", "slos") if key in changes}
    numbers = Numbers(sent=10, succeeded=10, failed=0, unfinished=0, **given)
    known: dict[str, Any] = {"id": name, "server": server, "load": "l", "repeat": repeat, "server_load": ServerLoad()}
    return CellSummary(numbers=numbers, **(known | changes))


def met(attainment: float, goodput: float) -> dict[str, SloAttainment]:
    return {"slo": SloAttainment(met=1, attainment=attainment, goodput=goodput)}


def test_a_result_is_more_where_the_goal_is_met_better() -> None:
    two = [cell("a", output_tok_s=20.0), cell("b", output_tok_s=80.0)]
    assert value_of(two, QUESTION) == pytest.approx(40.0), "the geometric mean of the loads"
    latency = cell(e2e=Distribution(n=10, mean=0.5))
    assert value_of([latency], replace(QUESTION, goal="latency")) == 2.0
    power = cell(machine_load=MachineLoad(samples=3, gap_max_s=1, energy_per_token_j=0.25))
    assert value_of([power], replace(QUESTION, goal="energy")) == 4.0
    goodput = replace(QUESTION, goal="goodput", slos=[SLO])
    assert value_of([cell(slos=met(0.8, 1.6))], goodput) == 1.6


def test_no_result_has_a_reason() -> None:
    limited = replace(QUESTION, slos=[SLO])
    broken = because("error_rate", "too many failed")
    cases: list[tuple[CellSummary, TuneQuestion, str]] = [
        (cell(problems=[broken]), QUESTION, "error_rate"),
        (cell(output_tok_s=None), QUESTION, "no_goal_value"),
        (cell(), replace(QUESTION, goal="energy"), "no_goal_value"),
        (cell(slos=met(0.94, 1.0)), limited, "slo_broken"),
        (cell(slos=met(0.0, 0.0)), replace(limited, goal="goodput"), "slo_broken"),
    ]
    for summary, question, code in cases:
        result = value_of([summary], question)
        assert isinstance(result, Reason) and result.code == code
    assert value_of([cell(slos=met(0.96, 1.0))], limited) == pytest.approx(50.0)
    assert slo_checks(limited) == ["attainment(ttft<=2s) >= 0"] and slo_checks(QUESTION) == []


def test_users_are_read_between_the_levels_around_the_slo(wording: Wording) -> None:
    levels, loads = users_ladder("chat", Load(user="chat", users=8, duration_s=60))
    assert list(levels.values()) == [2, 4, 8, 16, 32] == [load.users for load in loads.values()]
    open_levels, open_loads = users_ladder("o", Load(user="chat", users=8, duration_s=60, arrivals=Arrivals(rate=0.5)))
    assert [load.arrivals.rate for load in open_loads.values() if load.arrivals] == list(open_levels.values())
    question = replace(QUESTION, goal="users", slos=[SLO], levels=levels)

    def users(*shares: float) -> float | Reason:
        cells = [cell(name, load=name, slos=met(share, 1.0)) for name, share in zip(levels, shares, strict=True)]
        return users_value(cells, question)

    assert users(1, 1, 0.97, 0.93, 0.5) == pytest.approx(8 * math.sqrt(2))
    assert users(1, 1, 1, 1, 1) == 32
    assert users(0.475, 0.2, 0.1, 0, 0) == pytest.approx(1.0), "half the share at two users"
    none = users(0, 0, 0, 0, 0)
    assert isinstance(none, Reason) and none.code == "slo_broken"
    wording(none.text)


def test_a_load_of_the_search_ends_once_enough_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch = LoadWatch(Load(user="batch", batch_size=10, requests=1000))
    watch.add_records([request(phase="warmup", sent_s=90.0)] * 50)
    assert not watch.is_done(), "a warm-up is not measured"
    watch.add_records([request(sent_s=95.0)] * 29)
    now = 106.0
    assert not watch.is_done(), "three waves are 30"
    watch.add_records([request(sent_s=96.0)])
    assert watch.is_done() and watch.measured_s(106.0) == 11.0
    slow = LoadWatch(Load(user="batch", batch_size=10, requests=1000))
    slow.add_records([request(sent_s=95.0)])
    now = 396.0
    assert slow.is_done(), "at most five minutes"


def test_a_failure_of_the_table_has_the_cause_that_excludes() -> None:
    causes = {
        rule.id: failure_of(because("setting_not_started", "", failure=rule.id), QUESTION.names)["cause"]
        for rule in rules()
    }
    assert causes["mem.free_lt_util"] == causes["mem.hip_oom"] == causes["host.oom_kill"] == "memory"
    assert causes["mem.no_cache_blocks"] == causes["mem.kv_lt_one_request"] == "cache"
    assert causes["cli.unknown_flag"] == "flag" and causes["engine.start_timeout"] == "timeout"
    assert causes["gpu.fault"] == "other"
    error = StartError("it ended: unrecognized arguments: --max-num-seqs", failure="cli.unknown_flag")
    assert failure_of(start_failure(error), QUESTION.names)["blamed"] == ["sequences"]
    image = replace(QUESTION, names={"backend": "image"})
    advised = StartError("unknown", failure="cli.unknown_flag", cause="unknown", fix="see --help of the image")
    assert failure_of(start_failure(advised), image.names)["blamed"] == [], "advice blames no setting"
    batches = replace(QUESTION, names={"batched_tokens": "ubatch_size", "batch": "batch_size"})
    unknown = StartError("it does not know --ubatch-size 128", failure="cli.unknown_flag")
    assert failure_of(start_failure(unknown), batches.names)["blamed"] == ["batched_tokens"], "not a part of its name"
    eager = StartError("unrecognized arguments: --no-enforce-eager", failure="cli.unknown_flag")
    assert failure_of(start_failure(eager), {"compiled": "enforce_eager"})["blamed"] == ["compiled"]


def test_a_setting_that_took_no_effect_is_found() -> None:
    effective = {"max_num_seqs": 256, "enforce_eager": True, "kv_cache_dtype": "auto", "flash_attn": "enabled"}
    served = served_by(effective=effective | {"cache_dtype": "fp8"})
    ignored = {"max_num_seqs": 5, "--enforce-eager": False, "kv_cache_dtype": "fp8"}
    reasons = find_ignored_settings(served, ignored)
    assert [reason.values["key"] for reason in reasons] == list(ignored)
    assert {reason.code for reason in reasons} == {"setting_not_applied"}
    applied = {"--max-num-seqs": 256, "flash_attn": "on", "--cache-dtype": "fp8_e4m3", "kv_cache_dtype": "auto", "x": 1}
    assert find_ignored_settings(served, applied) == []
    assert len(find_ignored_settings(served, {"flash_attn": "off"})) == 1
    (off,) = find_ignored_settings(served, {"--no-enforce-eager": True})
    assert off.values == {"key": "--no-enforce-eager", "asked": True, "ran": False}
    assert find_ignored_settings(served, {"--no-enforce-eager": False, "--no-flash-attn": True}) == []


def test_a_fallback_is_found() -> None:
    first = served_by(model="m", effective={"recipe": "vllm", "device": "gpu"})
    assert find_fallback(first, first) is None
    other = find_fallback(replace(first, effective={"recipe": "llamacpp"}), first)
    assert other is not None and other.values["key"] == "recipe"
    assert find_fallback(replace(first, model="other"), first) is not None
    assert find_fallback(replace(first, effective={}), first) is None, "not reported"


def test_a_load_that_lemonade_only_reports_is_found(wording: Wording) -> None:
    old = RunningModel(name="m", recipe="vllm", pid=1, recipe_options={"ctx_size": 4096}, checkpoint="c")
    new = replace(old, pid=2, recipe_options={"ctx_size": 8192})
    asked = {"ctx_size": 8192, "vllm_args": ""}
    assert find_other_load(asked, old, new) is None
    wording(str(find_other_load(asked, old, replace(new, pid=1))))
    assert "ctx_size" in str(find_other_load(asked, old, replace(old, pid=2))) and "4096" in str(
        find_other_load(asked, old, replace(old, pid=2))
    )
    wording(str(find_other_load(asked, old, replace(old, pid=2))))
    assert "'llamacpp'" in str(find_other_load(asked, old, replace(new, recipe="llamacpp")))
    wording(str(find_other_load(asked, old, replace(new, recipe="llamacpp"))))
    assert find_other_load({"ctx_size": 4096}, old, old) is None, "nothing to change"


def test_the_results_of_the_proof_are_those_of_complete_blocks() -> None:
    cells = [
        cell(f"r{repeat}-{side}", side, repeat, output_tok_s=10.0 * repeat + place)
        for repeat in (1, 2, 3)
        for place, side in enumerate(("default", "first"))
    ]
    cells[5] = replace(cells[5], problems=[because("x", "x")])
    cells.append(cell("s", "second", failed=because("setting_not_started", "x")))
    summary = Summary(run="r", scenario="s", question="q", simulated=True, valid=True, reasons=[], rows=[], cells=cells)
    values = proof_values(summary, QUESTION, ["default", "first", "second"])
    assert values == {"default": pytest.approx([10.0, 20.0]), "first": pytest.approx([11.0, 21.0])}


def test_what_is_pasted_is_that_of_the_server(tmp_path: Path) -> None:
    lemonade = Server(
        template="lemonade", variables={"checkpoint": "a/b", "recipe": "vllm", "ctx_size": 4096, "vllm_args": "--x 1"}
    )
    pasted = to_paste(scenario(servers={"s": lemonade}, model="M"), "s")
    ((load, command),) = pasted.commands.items()
    words = shlex.split(command)
    body = {"model_name": "user.M", "ctx_size": 4096, "vllm_args": "--x 1", "save_options": True}
    assert words[:2] == ["curl", "http://127.0.0.1:13305/api/v1/load"] and json.loads(words[-1]) == body
    assert list(pasted.texts) == ["compose.yaml"], "its files and its second container are of Compose"
    running = replace(lemonade, template="running", variables={"ctx_size": 4096, "vllm_args": "--x 1"})
    ours = to_paste(scenario(servers={"s": running}, model="M", api_key_env="KEY"), "s", "http://h:1/").commands
    command = """curl http://h:1/api/v1/load --header 'Authorization: Bearer'" ${KEY}" --header """
    assert list(ours) == [load] and ours[load].startswith(command)
    assert json.loads(shlex.split(ours[load])[-1])["model_name"] == "M"
    cleared = replace(running, variables={"ctx_size": 4096, "vllm_args": None})
    (without,) = to_paste(scenario(servers={"s": cleared}, model="M"), "s").commands.values()
    assert json.loads(shlex.split(without)[-1])["vllm_args"] == "", "else the server keeps those that it has saved"
    llama = Server(template="llamacpp", variables={"model_path": "/m.gguf", "parallel": 4})
    texts, commands = to_paste(scenario(servers={"s": llama}, model="M"), "s")
    own = shlex.split(commands["command of llama.cpp"])
    assert (
        own[:5] == ["llama-server", "--alias", "M", "--host", "127.0.0.1"] and "--parallel 4" in commands["docker run"]
    )
    assert "--publish 127.0.0.1:8080:8080" in commands["docker run"] and "--host 0.0.0.0" in commands["docker run"]
    assert parse_compose(texts["compose.yaml"]).server.ports == ["127.0.0.1:8080:8080"]
    vllm = Server(template="vllm-rocm", variables={"environment": {"VLLM_ROCM_USE_AITER": "1", "K": "${K}"}})
    commands = to_paste(scenario(servers={"s": vllm}, model="M"), "s").commands
    assert commands["command of vLLM"].startswith("env VLLM_NO_USAGE_STATS=1 VLLM_ROCM_USE_AITER=1 vllm serve M ")
    assert "--ulimit memlock=-1:-1" in commands["docker run"]


def verdict(ratio: float, low: float, high: float) -> Verdict:
    return Verdict(side="s", baseline="b", metric="m", ratio=ratio, low=low, high=high, p=0.01, n=(3, 3), word="faster")


TRIALS = [
    Trial(server="default", value=1.0),
    Trial(server="try-2", settings={"memory": 0.9}, cause="memory", reason=because("x", "no <memory>")),
    Trial(server="try-3", settings={"sequences": 5}, value=1.4, ratio=1.4, kept=True, why="finding", finding="f"),
]
FOUND = changed_report(
    REPORT,
    spent_s=0.0,
    run="r",
    folder="my runs/r",
    proof="p",
    verdict="set",
    settings={"max_num_seqs": 5},
    ratio=1.42,
    low=1.35,
    high=1.49,
    starts=10,
    blocks=3,
    trials=TRIALS,
    verdicts=[verdict(1.42, 1.35, 1.49)],
    sides=[{"max_num_seqs": 5}],
    paste={"a shell": "{}"},
)


def test_the_first_line_is_the_answer(wording: Wording) -> None:
    assert "max_num_seqs" in answer_line(FOUND)
    wording(answer_line(FOUND))
    two = changed_report(
        FOUND, settings={"max_num_seqs": 5, "enforce_eager": True, "x": 1}, defaults={"max_num_seqs": 4}
    )
    assert "max_num_seqs" in answer_line(two) and "enforce_eager" in answer_line(two)
    wording(answer_line(two))
    kept = changed_report(FOUND, verdict="keep", settings={}, ratio=1.004, low=0.99, high=1.018)
    wording(answer_line(kept))
    assert "0.4" in answer_line(kept) and "1.8" in answer_line(kept)
    wording(answer_line(kept))
    unsure = changed_report(FOUND, verdict="inconclusive", needed=8)
    assert "max_num_seqs" in answer_line(unsure)
    wording(answer_line(unsure))
    invalid = changed_report(unsure, needed=None, reasons=[because("proof_invalid", "x")])
    assert "max_num_seqs" in answer_line(invalid)
    wording(answer_line(invalid))
    missing = changed_report(unsure, ratio=None, needed=None, reasons=[because("proof_missing", "x")])
    assert "40" in answer_line(missing)
    wording(answer_line(missing))
    only = changed_report(FOUND, settings={"gpu_memory_utilization": 0.75}, ratio=None, low=None, high=None)
    assert "gpu_memory_utilization" in answer_line(only) and "0.75" in answer_line(only)
    wording(answer_line(only))
    none = changed_report(verdict="inconclusive", reasons=[because("nothing_started", "no settings")])
    wording(answer_line(none))


@pytest.mark.parametrize(
    ("goal", "ratio", "low", "high", "text"),
    [
        ("throughput", 1.37, 1.368, 1.373, "37 % more output tokens a second (36.8 to 37.3 %)"),
        ("throughput", 4.17, 4.16, 4.19, "4.17 times the output tokens a second (4.16 to 4.19 times)"),
        ("throughput", 1.98, 1.9, 2.06, "98 % more output tokens a second (90 % more to 2.06 times)"),
        ("goodput", 0.97, 0.93, None, "3 % fewer requests a second within the SLOs (at least 7 % fewer)"),
        ("users", 1.5, None, None, "50 % more users within the SLOs"),
        ("latency", 1.25, 1.2, 1.3, "20 % lower mean end-to-end latency (17 to 23 %)"),
        ("energy", None, None, None, ""),
    ],
)
def test_a_gain_is_a_change_of_the_metric(goal: Goal, ratio: float, low: float, high: float, text: str) -> None:
    assert gain_text(changed_report(REPORT, goal=goal), ratio, low, high) == text


def test_a_search_without_an_answer_says_what_has_not_ended(wording: Wording) -> None:
    begun = changed_report(FOUND, verdict=None)
    command = "`harness tune --resume 'my runs/r'` goes on"
    assert str(command) in answer_line(begun)
    wording(answer_line(begun))
    ended = changed_report(begun, ended=because("tune_patience", "x"))
    assert str(command) in answer_line(ended)
    wording(answer_line(ended))


def test_the_exit_code_says_how_the_settings_failed() -> None:
    def code(*codes: str, **changes: Any) -> int:
        trials = [Trial(cause="other", reason=because(one, "x")) for one in codes]
        with pytest.raises(Exit) as ended:
            exit_after_tune(changed_report(REPORT, trials=trials, verdict="inconclusive", **changes))
        return ended.value.exit_code

    none = [because("nothing_started", "x")]
    assert code("setting_not_started", "setting_not_started", reasons=none) == 2
    assert code("setting_died", reasons=none) == code("setting_not_started", "slo_broken", reasons=none) == 3
    assert (code(reasons=[because("proof_invalid", "x")]), code()) == (3, 5)


def test_a_page_of_a_search_has_no_findings_and_no_failed_settings() -> None:
    numbers = Numbers(sent=1, succeeded=1, failed=0, unfinished=0)
    rows = [
        row_of(numbers, name, "l", failed=failed)
        for name, failed in (("default", because("setting_not_started", "long")), ("try-2", None))
    ]
    finding = RunFinding(code="f", rows=["try-2"], measured="m", means="m", why="w", actions=[], cost=None)
    summary = Summary(
        run="r", scenario="s", question="q", simulated=True, valid=True, reasons=[], rows=rows, cells=[],
        findings=[finding], notes=[because("setting_failed", "long"), because("other", "x")],
    )  # fmt: skip
    assert shown_summary(summary, is_searched=False) is summary
    shown = shown_summary(summary, is_searched=True)
    assert (shown.findings, [row.server for row in shown.rows]) == (None, ["try-2"])
    assert [note.code for note in shown.notes] == ["other"]
    assert len(shown_summary(replace(summary, rows=rows[:1]), is_searched=True).rows) == 1, "a table has a row"
    late, cut = replace(because("client_error", "delays"), cell="r1-try-2-l"), because("interrupted", "it was cut")
    for reasons, left in (([late], []), ([cut, late], [cut])):
        shown = shown_summary(replace(summary, valid=False, reasons=reasons), is_searched=True)
        assert (shown.reasons, shown.valid) == (left, not left)


def test_a_running_server_that_takes_no_settings_is_not_one_that_is_down(wording: Wording) -> None:
    class Server(Handler):
        def do_GET(self) -> None:
            self.answer(200 if self.path == "/v1/models" else 404, b'{"data": [{"id": "m"}]}')

    def refused(url: str) -> HarnessError:
        with pytest.raises(HarnessError) as error:
            define_tune(Experiment(Path("s.yaml"), scenario(model="m"), Target(url)), "throughput", None, None, [], 60)
        return error.value

    with listening(Server) as url:
        healthy = refused(url)
    assert "--url" in healthy.next_step
    wording(healthy.what)
    down = refused(url)
    assert "settings" not in down.what
    wording(down.what)


def compared(word: Literal["same", "worse", "inconclusive"], difference: float) -> SameAnswers:
    low, high = difference - 0.01, difference + 0.01
    return SameAnswers(
        side="first", baseline="default", load="l", questions=1000, differ=0.0, noise=(0.0, 0.0),
        right=(0.9 + difference, 0.9), lost=0.0, gained=0.0, difference=difference, low=low, high=high,
        word=word,
    )  # fmt: skip


def test_the_answer_says_whether_settings_answer_the_same(wording: Wording) -> None:
    same, worse = compared("same", 0.001), compared("worse", -0.08)
    faster = replace(verdict(1.42, 1.35, 1.49), word="faster")
    found = changed_report(FOUND, same_answers=True, answers=[same], verdicts=[faster])
    assert "max_num_seqs" in answer_line(found)
    wording(answer_line(found))
    kept = changed_report(found, verdict="keep", settings={}, ratio=None, low=None, high=None, answers=[worse])
    assert "8.0" in answer_line(kept) and "9.0" in answer_line(kept)
    wording(answer_line(kept))
    unsure = changed_report(found, verdict="inconclusive", answers=[compared("inconclusive", -0.03)])
    assert "3.0" in answer_line(unsure)
    wording(answer_line(unsure))
    wording(answer_line(changed_report(unsure, answers=[None])))
    reason = because("answers_worse", "worse")
    left_out = Trial(server="try-4", settings={"memory": 0.8}, cause="other", reason=reason)
    text = markdown.render(tune_page(changed_report(found, trials=[*found.trials.starts, left_out])))
    assert "gpu_memory_utilization" in text.replace("\\", "") and "0.8" in text.replace("\\", "")
    wording(text.replace("\\", ""))
    assert "max_num_seqs" in text.replace("\\", "") and "1,000" in text.replace("\\", "")
    wording(text.replace("\\", ""))


def test_the_proof_asks_the_questions_and_does_not_count_their_speed(tmp_path: Path) -> None:
    question, trials = replace(QUESTION, same_answers=True), [Trial(server="default", value=1.0)]
    made = scenario(servers={"default": Server(template="simulated")}, repeats=1)
    run = write_made_run(tmp_path / "run", made_of=made)
    proof = proof_scenario(run, question, trials, {"default": {}, "first": {}}, 3, {})
    assert [name for name, load in proof.loads.items() if asks_known(load)] == [QUESTIONS]
    assert (proof.repeats, proof.loads[QUESTIONS].requests) == (3, 1000)
    assert proof_scenario(run, QUESTION, trials, {"default": {}}, 3, {}).loads == made.loads
    cells = [
        cell(f"r{repeat}-{load}", repeat=repeat, load=load, output_tok_s=speed)
        for repeat in (1, 2)
        for load, speed in (("l", 10.0), (QUESTIONS, 1.0))
    ]
    summary = Summary(run="r", scenario="s", question="q", simulated=True, valid=True, reasons=[], rows=[], cells=cells)
    assert proof_values(summary, question, ["default"]) == {"default": pytest.approx([10.0, 10.0])}


@pytest.mark.parametrize(
    ("load", "amount"),
    [
        (Load(user="batch", batch_size=10, requests=400, output_tokens=8), (40, None)),
        (Load(user="batch", users=2, duration_s=60.0, output_tokens=8), (None, 13.0)),
        (Load(user="batch", users=9, requests=400, arrivals=Arrivals(rate=2.0), output_tokens=8), (None, 13.0)),
    ],
)
def test_a_proof_is_as_long_as_the_search_and_can_be_resumed(
    tmp_path: Path, load: Load, amount: tuple[int | None, float | None]
) -> None:
    """Work in whole waves, a time or a schedule as a time; and the same requests when it is read from run.json."""
    made = scenario(servers={"default": Server(template="simulated")}, loads={"x": load}, repeats=1)
    run = write_made_run(tmp_path / "run", made_of=made)
    ended = [replace(one, stopped_after_s=12.5) for one in run.cells]
    trial = Trial(server="default", value=1.0, cells=[one.id for one in ended])
    sides: dict[str, dict[str, Any]] = {"default": {}, "first": {}}
    succeeded = {cell.id: 34 for cell in ended}
    proof = proof_scenario(replace(run, cells=ended), QUESTION, [trial], sides, 3, succeeded)
    assert {(load.requests, load.duration_s) for load in proof.loads.values()} == {amount}
    again = msgspec.json.decode(msgspec.json.encode(proof), type=Scenario)
    assert workload_sha256(again, tmp_path) == workload_sha256(proof, tmp_path)


def test_delays_of_the_load_generator_widen_the_answer_in_their_direction() -> None:
    """The slower one may be as fast as the other: its tok/s may be 30 % higher without the delays."""

    def row(server: str, **error: tuple[float, float]) -> Row:
        pooled = Numbers(sent=1, succeeded=1, failed=0, unfinished=0)
        return row_of(pooled, server, "l", client_error=error)

    summary = Summary(run="r", scenario="s", question="q", simulated=True, valid=True, reasons=[], rows=[], cells=[])
    late = replace(summary, rows=[row("default", output_tok_s=(0.0, 0.3)), row("first")])
    rooms = proof_rooms(late, "throughput", "first")
    assert rooms == pytest.approx((math.log(1.3), 0.0))
    assert proof_rooms(late, "users", "first") == proof_rooms(summary, "throughput", "first") == (0.0, 0.0)
    timed = replace(summary, rows=[row("default", e2e_p50=(0.5, 0.0)), row("first")])
    assert proof_rooms(timed, "latency", "first") == pytest.approx((math.log(2), 0.0)), "it may take half the time"
    values, sides = [10.0, 10.1, 9.9], [({"sequences": 5}, [12.0, 12.1, 11.9])]
    assert decide("throughput", values, sides).verdict == "set"
    widened = decide("throughput", values, sides, error_margins=[rooms])
    assert (widened.verdict, (widened.low or 0) < 1 < (widened.ratio or 0)) == ("inconclusive", True)


def test_an_answer_without_a_proof_has_the_ratio_of_the_search_and_the_time_that_is_missing(wording: Wording) -> None:
    cut = changed_report(
        FOUND, verdict="inconclusive", ratio=None, low=None, high=None, sides=[], verdicts=[], more_s=1140.0
    )
    assert "max_num_seqs" in answer_line(cut) and "40" in answer_line(cut)
    wording(answer_line(cut))
    assert "command: `harness tune --resume 'my runs/r' --budget 83min`" in markdown.render(tune_page(cut))
    assert "--budget 83min" in markdown.render(tune_page(changed_report(cut, spent_s=3600.0)))
    short = changed_report(cut, budget_s=90.0, spent_s=60.0, more_s=47.0)
    assert "--budget 3min" in markdown.render(tune_page(short)), "more than was given"
    assert "--resume" not in markdown.render(tune_page(changed_report(cut, more_s=None))), "more time changes nothing"


def searched_and_proven(runs: Path, speeds: dict[str, float], **changes: Any) -> Path:
    """A search whose tune.json says 9.00x, and the run of its proof, in which the sides have these tok/s."""
    folder, sides = runs / "r", {"default": {}, "first": {"max_num_seqs": 5}}
    rows = {name: SweepRow(of="one", settings=settings) for name, settings in sides.items()}
    made = scenario(
        servers={name: Server(template="vllm-cpu") for name in sides}, repeats=3, swept=Sweep(servers=rows),
        baseline=Baseline(server="default", load="x"),
    )  # fmt: skip
    write_made_run(runs / "p", lambda cell: (44 + cell.repeat / 100) / speeds[cell.server], made_of=made)
    folder.mkdir()
    told: dict[str, Any] = {"ratio": 9.0, "low": 8.9, "high": 9.1, "sides": [], "verdicts": [verdict(9.0, 8.9, 9.1)]}
    store(folder, changed_report(FOUND, **told | {"spent_s": 60.0} | changes))
    return folder


def test_a_stored_answer_is_that_of_the_proofs_records(tmp_path: Path) -> None:
    for name, speed, word, ratio in (("a", 44.0, "keep", 1.0), ("b", 66.0, "set", 1.5)):
        (runs := tmp_path / name).mkdir()
        report = read_answered(searched_and_proven(runs, {"default": 44.0, "first": speed}))
        assert report is not None and "9.0" not in answer_line(report)
        proof = report.proof
        assert (proof.verdict, proof.blocks, report.start_count) == (word, 3, 9)
        assert proof.ratio == pytest.approx(ratio)
        assert bool(proof.paste) == (word == "set"), "what is stored to paste belongs to what is stored"
        assert [verdict.ratio for verdict in proof.verdicts] == [proof.ratio]


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"proof": None}, []),
        ({"proof": "gone"}, ["proof_missing"]),
        ({"trials": [TRIALS[0], replace(TRIALS[2], settings={"sequences": 6})]}, ["proof_missing"]),
        ({"proof": None, "verdict": "keep", "settings": {}}, []),
    ],
)
def test_a_stored_answer_without_the_records_of_its_proof_is_not_printed(
    tmp_path: Path, changes: dict[str, Any], codes: list[str], wording: Wording
) -> None:
    folder = searched_and_proven(tmp_path, {"default": 44.0, "first": 66.0}, **changes)
    report = read_answered(folder)
    assert report is not None
    assert (report.proof.verdict, report.proof.ratio, report.proof.paste) == ("inconclusive", None, {})
    assert [reason.code for reason in report.proof.reasons] == codes
    assert "max_num_seqs" in answer_line(report) and "9.0" not in answer_line(report)
    wording(answer_line(report))
    assert "40" in answer_line(report)
    wording(answer_line(report))
    with pytest.raises(Exit) as ended:
        exit_after_tune(report)
    assert ended.value.exit_code == 5


def test_the_three_records_are_one_file_with_the_keys_of_before(tmp_path: Path) -> None:
    """Scripts read the keys of tune.json; each record is written by its part and takes its own keys again."""
    raw = (ROOT / "tests" / "runs" / "tune" / "tune.json").read_bytes()
    (tmp_path / "tune.json").write_bytes(raw)
    stored = read_tune(tmp_path)
    assert stored is not None
    keys = flat_keys(replace(stored, folder="runs/tune"))
    newer = {"of_run": "", "finding": "", "advised": {}, "keep": False}
    assert json.loads(pretty_json(keys)) == json.loads(raw) | newer
    store(tmp_path, stored)
    assert read_tune(tmp_path) == stored
    write_tune(tmp_path, stored.question, stored.trials)
    begun = json.loads((tmp_path / "tune.json").read_text())
    known = (begun["starts"], begun["spent_s"], begun["verdict"], begun["proof"], begun["settings"])
    assert known == (3, stored.trials.spent_s, None, None, {}), "a search that goes on has no proof"


def test_an_answer_that_its_proof_does_not_give_is_searched_on(tmp_path: Path) -> None:
    folder = searched_and_proven(tmp_path, {"default": 44.0, "first": 66.0}, proof="gone")
    write_run(folder, read_run(tmp_path / "p"))
    again = _read_to_resume(folder)
    assert (again.proof.verdict, again.proof.run) == (None, None)
    store(folder, changed_report(FOUND, proof=None, verdict="keep"))
    assert _read_to_resume(folder).verdict is None
    store(folder, changed_report(FOUND, verdict="keep"))
    assert _read_to_resume(folder).verdict == "set", "as its records say"


def test_a_larger_budget_goes_on_with_what_the_smaller_one_ended() -> None:
    spent = changed_report(FOUND, verdict="inconclusive", spent_s=3500.0, ended=because("tune_budget", "x"))
    more = with_budget(spent, 7200)
    assert (more.question.budget_s, more.proof.verdict) == (7200, None)
    assert more.trials.ended is not None, "the proof has begun"
    assert with_budget(changed_report(spent, proof=None), 7200).trials.ended is None
    assert with_budget(changed_report(FOUND, ended=spent.trials.ended), 7200).verdict == "set"
    with pytest.raises(HarnessError, match="--budget"):
        with_budget(spent, 3000)


def test_a_broken_limit_says_how_many_requests_met_it(wording: Wording) -> None:
    broken = value_of([cell(slos=met(0.3, 1.0))], replace(QUESTION, slos=[SLO]))
    assert isinstance(broken, Reason)
    start = Trial(server="default", reason=broken, met=0.3)
    assert "30" in result_text(start)
    wording(result_text(start))
    best = replace(start, reason=because("slo_broken", "l: 80% of the requests met the SLOs", attainment=0.8))
    (reason,) = search_reasons(QUESTION, [start, best], None, 1.0)
    assert reason.code == "nothing_started" and "80%" in reason.text
    late = Trial(settings={"sequences": 5}, reason=because("client_error", "delays"))
    codes = [reason.code for reason in search_reasons(QUESTION, [Trial(value=1.0), late], {}, 7200.0)]
    assert codes == ["tune_disturbed", "tune_over_budget"], "the budget is an hour"


def test_options_that_were_not_given_back_are_named(tmp_path: Path, wording: Wording) -> None:
    given = replace(scenario(), servers={"default": Server(template="running", variables={"vllm_args": "--x 1"})})
    said = io.StringIO()
    target = Target("http://127.0.0.1:9")
    with restored(Experiment(tmp_path, given, target), Progress(Console(file=said, width=300))):
        pass
    assert "--x 1" in said.getvalue()
    wording(" ".join(said.getvalue().split()))


@pytest.mark.parametrize("stored", ["proven", "open", "damaged", "absent"])
def test_a_server_keeps_only_what_is_proven(tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, sent = {"vllm_args": "--x 1"}, list[dict[str, Any]]()
    given = replace(scenario(), servers={"default": Server(template="running", variables=own)})
    monkeypatch.setattr("harness.questions.tune.search.load_with_options", lambda *words: sent.append(words[2]))
    if stored != "absent":
        store(tmp_path, FOUND if stored == "proven" else changed_report(FOUND, verdict=None))
    if stored == "damaged":
        (tmp_path / "tune.json").write_text('{"keep": tr')
    experiment = Experiment(tmp_path, given, Target("http://127.0.0.1:9"))
    with restored(experiment, Progress(Console(file=io.StringIO())), lambda: tmp_path, keep=True):
        pass
    (options,) = sent
    assert (options == own) == (stored != "proven"), options


def test_the_page_has_the_history_and_the_picture(tmp_path: Path, wording: Wording) -> None:
    page = tune_page(FOUND)
    (grid,) = (element for element in page if isinstance(element, Grid))
    wording([row[1:] for row in grid.rows])
    (chart,) = (element for element in page if isinstance(element, Chart))
    starts, proof = chart.figure["data"]
    assert (starts["name"], starts["x"], starts["y"]) == ("start", [1, 3], [1.0, 1.4]), "the reference is at 1"
    assert (proof["name"], proof["x"]) == ("proof", [4])
    axis = chart.figure["layout"]["xaxis"]
    assert (axis["tickvals"], axis["ticktext"]) == ([1, 2, 3, 4], ["1", "2", "3", "proof"])
    shown = html.render_page(page, "Tune", ["tune"])
    assert "`harness report 'my runs/p'`" in markdown.render(page), "with its folder, and the space"
    assert "memory: x" in shown
    wording(markdown.render(page))
    assert isinstance(page[0], Paragraph) and page[0].style == "lead"
    printed, command = io.StringIO(), "llama-server " + "--flag 1 " * 20 + "--last"
    terminal.print_page(tune_page(changed_report(FOUND, paste={"command": command})), Console(file=printed, width=80))
    pasted = " ".join(printed.getvalue().replace("\\\n", " ").split())
    assert command in pasted, "a shell takes it as one command"
    many = {f"a_setting_of_this_engine_{number}": 100_000 for number in range(5)}
    terminal.print_page(
        [history(changed_report(FOUND, sides=[many]))], Console(file=(narrow := io.StringIO()), width=80)
    )
    lines = narrow.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and sum("Kept" in line for line in lines) == 1, "one table"
    store(tmp_path, FOUND)
    assert read_tune(tmp_path) == changed_report(FOUND, folder=str(tmp_path)) and read_tune(tmp_path / "other") is None
    (tmp_path / "tune.json").write_text("{}")
    with pytest.raises(HarnessError):
        read_tune(tmp_path)
    assert TuneAnswer(verdict="keep").settings == {}
