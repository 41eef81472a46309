"""Which server is faster from which context depth on: the whole way from records to the answer, with a known truth."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from harness.base.reason import Reason
from harness.base.units import NOTHING
from harness.engines import find_engine
from harness.numbers.comparison import MARGIN
from harness.numbers.summary import CellSummary, Summary
from harness.questions.capacity.decide import find_crossing
from harness.questions.compare.page import comparison_answer
from harness.questions.compare.sides import compare_runs
from harness.questions.crossover.chart import crossover_charts
from harness.questions.crossover.decide import DEPTH, FEW_CACHED, Side, setting_answers, speculation_answers
from harness.questions.crossover.page import speculation_tables
from harness.questions.joint import analyse
from harness.questions.report.headline import run_answer
from harness.records.manifest import Run, Startup
from harness.records.records import Request
from harness.scenario import Load, Prompts, prompts_of
from harness.scenario.file import load_scenario
from harness.scenario.plan import Cell
from harness.simulated.engine import PRESETS, EngineConfig, Sequence, SimulatedEngine
from tests.support.made_runs import request, served_by, write_lines, write_made_run
from tests.support.nightly import NIGHTLY
from tests.support.virtual import VirtualWork, closed_loop
from tests.support.wording import Wording

ENGINES = {
    "steep": replace(PRESETS["instant"], step_base_s=0.002, step_per_kv_token_s=1e-6, prefill_per_token_s=20e-6),
    "flat": replace(PRESETS["instant"], step_base_s=0.005, step_per_kv_token_s=1e-7, prefill_per_token_s=10e-6),
}
ENGINES["plain"] = replace(ENGINES["flat"], step_base_s=0.02, step_per_sequence_s=0.001, prefill_per_token_s=0)
ENGINES["drafts"] = replace(ENGINES["plain"], num_speculative_tokens=3, acceptance_rate=0.6, draft_per_token_s=0.001)
# Speculation that speeds up decode and makes a token of the prompt dearer.
TAXED = {
    "plain": replace(ENGINES["plain"], prefill_per_token_s=200e-6),
    "drafts": replace(ENGINES["drafts"], prefill_per_token_s=260e-6),
}
ACCEPTED = {"code": 0.9, "chat": 0.2, "structured": 0.6}
LEVELS = (512, 4096, 16384)
OUTPUT, PROMPT = 24, 64
TEXT = """
version: 1
question: From which depth on?
model: m
servers: {steep: {template: vllm-cpu}, flat: {template: vllm-cpu}}
loads:
  depth: {user: batch, requests: 4, output_tokens: 24, vary: {prompts.system_tokens: [0, 1024, 8192]}}
prompts: {tokens: 64, salt: false}
repeats: 2
"""


def measured(
    engine: SimulatedEngine, load: Load, prompts: Prompts, cell: Cell, start_s: float, process: int
) -> list[Request]:
    """The answers of a cell in virtual time, after one of each user that fills the cache."""
    depth, new, accepted = prompts.system_tokens, prompts.tokens, ACCEPTED.get(prompts.kind)
    assert isinstance(new, int)
    made_of, found = dict[int, tuple[Sequence, list[float]]](), list[Request]()
    now, asked = start_s, msgspec.to_builtins(load.output_tokens)

    def send() -> None:
        number = len(made_of)
        starts_s = made_of[load.users][0].arrived_s if number > load.users else now
        if number < load.users + (load.requests or math.inf) and now < starts_s + (load.duration_s or math.inf):
            prompt = [*range(1, depth + 1), *range(10**6 * (number + 1), 10**6 * (number + 1) + new)]
            made_of[number] = Sequence(number, prompt, asked, now, accepted), []
            engine.add(made_of[number][0])

    for _ in range(load.users):
        send()
    while (step := engine.begin(now)) is not None:
        now += step.duration_s
        for sequence in engine.complete(step, now):
            made_of[sequence.key][1].append(now - sequence.arrived_s)
            if sequence.output_tokens >= asked:
                send()
    for number, (sequence, chunks) in made_of.items():
        of_cell = {"cell": cell.id, "load": cell.load, "process": process, "id": f"{cell.id}-{number}"}
        phase = {"phase": "warmup" if number < load.users else "measured", "index": number - load.users}
        tokens = {"prompt_tokens": depth + new, "output_tokens": asked, "asked_tokens": asked}
        times = {"sent_s": sequence.arrived_s, "ended_s": chunks[-1], "chunks_s": chunks}
        times |= {"first_visible_s": chunks[0], "headers_s": chunks[0] / 2}
        found.append(request(**of_cell, **phase, **tokens, **times, cached_tokens=sequence.cached_tokens))
    return found


def made(
    folder: Path,
    text: str = TEXT,
    *,
    cached: bool = True,
    spread: float = 0.01,
    engines: dict[str, EngineConfig] = ENGINES,
    name: str = "run",
) -> tuple[Run, Summary]:
    path = folder / "which.yaml"
    path.write_text(text)
    scenario, dice = load_scenario(path), random.Random(5)
    counted: dict[str, dict[str, int]] = {}

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        load = scenario.loads[cell.load]
        slowdown, seed = math.exp(dice.gauss(0, spread)), dice.randrange(1 << 30)
        config = replace(engines[cell.server], slowdown=slowdown, seed=seed, enable_prefix_caching=cached)
        engine = SimulatedEngine(config)
        found = measured(engine, load, prompts_of(scenario, load), cell, start_s, process)
        drafted = {"drafts": engine.drafts, "drafted_tokens": engine.drafted, "accepted_tokens": engine.accepted}
        counted[cell.id] = drafted if config.num_speculative_tokens else {}
        return found

    run = write_made_run(folder / name, made_of=scenario, requests=requests, served=lambda cell: served_by())
    samples = [msgspec.json.decode(line) for line in (folder / name / "metrics.jsonl").read_bytes().splitlines()]
    for before, sample in itertools.pairwise(samples):
        sample["values"] |= counted[sample["cell"]] if before["cell"] == sample["cell"] else {}
    write_lines(folder / name / "metrics.jsonl", samples)
    return run, analyse(folder / name).summary


USERS = """
version: 1
question: Up to how many users does speculation pay?
model: m
servers: {plain: {template: vllm-cpu}, drafts: {template: vllm-cpu}}
loads:
  users: {user: batch, duration_s: 5, output_tokens: 64, vary: {users: [1, 4, 8, 16, 24]}}
prompts: {tokens: 64, salt: false}
repeats: 2
"""
TURNS = """
version: 1
question: Does speculation pay?
model: m
servers: {plain: {template: vllm-cpu}, drafts: {template: vllm-cpu}}
loads:
  new: {user: batch, requests: 24, output_tokens: 96, vary: {prompts.kind: [KINDS], prompts.tokens: [512, 8192, 32768]}}
prompts: {salt: false}
repeats: 2
"""


def tokens_of_step(config: EngineConfig) -> float:
    return sum(config.acceptance_rate**place for place in range(config.num_speculative_tokens + 1))


def true_users(config: EngineConfig) -> float:
    """The number of users with which speculation gains nothing: a step costs as many times more as it has tokens."""
    tokens = tokens_of_step(config)
    checked = config.draft_per_token_s * config.num_speculative_tokens
    return config.step_base_s * (tokens - 1) / (config.step_per_sequence_s * (1 - tokens) + checked)


def true_turn(plain: EngineConfig, drafts: EngineConfig, output: int) -> float:
    """The prompt at which a turn takes equally long: the tax on prefill is the gain of all decode steps.

    A last step that is cut drafts less: the steps of an answer are not a whole number, as in the mean.
    """
    steps = (output - 1) / tokens_of_step(drafts)
    step_s = plain.step_base_s + plain.step_per_sequence_s
    tax = drafts.prefill_per_token_s - plain.prefill_per_token_s
    drafted_s = drafts.draft_per_token_s * drafts.num_speculative_tokens
    gain = plain.step_per_kv_token_s * (output - 1 - steps)  # of each token of the context, in the steps saved
    return ((output - 1) * step_s - steps * (step_s + drafted_s)) / (tax - gain)


def true_depth(steep: EngineConfig, flat: EngineConfig) -> float:
    """Where a token of both takes equally long, by the formula of a step; the context includes prompt and answer."""
    context = (flat.step_base_s - steep.step_base_s) / (steep.step_per_kv_token_s - flat.step_per_kv_token_s)
    return context - PROMPT - OUTPUT / 2


def test_the_depth_from_which_the_other_server_decodes_faster(tmp_path: Path) -> None:
    run, summary = made(tmp_path)
    (answer,) = summary.answers
    decode, first = answer.values["parts"]
    truth = true_depth(ENGINES["steep"], ENGINES["flat"])
    assert (decode["speed"], decode["kind"], decode["side"]) == ("decode", "from", "flat")
    assert decode["at"] == pytest.approx(truth, rel=0.05)
    assert decode["low"] < truth < decode["high"] and decode["high"] - decode["low"] < 0.3 * truth
    assert (first["kind"], first["levels"]) == ("from", [0, 1024, 8192])
    assert run_answer(summary, run) == answer.text
    base = [(verdict.side, verdict.baseline) for verdict in summary.comparison.verdicts] if summary.comparison else []
    assert ("flat / depth-system-tokens-8192", "steep / depth-system-tokens-8192") in base, "only like with like"
    decode_chart, first_chart = crossover_charts(summary, run)
    assert [trace["x"] for trace in decode_chart.figure["data"]] == [[0, 1024, 8192]] * 2
    (band,) = decode_chart.figure["layout"]["shapes"]
    assert (band["x0"], band["x1"]) == (decode["low"], decode["high"])
    assert first_chart.body[0][:2] == ["steep", "0"]


def test_the_users_up_to_which_speculation_pays(tmp_path: Path, wording: Wording) -> None:
    _, summary = made(tmp_path, USERS)
    rate, drafts = summary.answers[0].values["parts"]
    config = ENGINES["drafts"]
    assert drafts["tokens_per_step"] == pytest.approx(tokens_of_step(config), rel=0.05)
    wording(summary.answers[0].text)
    assert (rate["speed"], rate["kind"], rate["side"]) == ("rate", "until", "drafts")
    assert rate["low"] < true_users(ENGINES["drafts"]) < rate["high"]
    assert rate["at"] == pytest.approx(true_users(ENGINES["drafts"]), rel=0.1)


def test_one_server_that_speculates_and_one_that_does_not(tmp_path: Path, wording: Wording) -> None:
    """With one server, the answer says what is missing for one, and the numbers."""
    text = USERS.replace("[1, 4, 8, 16, 24]", "[1, 2]").replace("repeats: 2", "repeats: 1")
    _, summary = made(tmp_path, text.replace("plain: {template: vllm-cpu}, ", ""))
    drafts, rates = summary.answers[0].values["parts"]
    assert drafts["tokens_per_step"] == pytest.approx(tokens_of_step(ENGINES["drafts"]), rel=0.1)
    assert list(rates["rates"]) == ["1", "2"]
    (tmp_path / "plain").mkdir()
    text = text.replace(", drafts: {template: vllm-cpu}", "")
    run, summary = made(tmp_path / "plain", text)
    none, rates = summary.answers[0].values["parts"]
    assert none == {"side": "plain", "reported": False, "start": {"vLLM": find_engine("vllm-cpu").speculation}}  # type: ignore[union-attr]
    assert rates["rates"]["2"] == pytest.approx(summary.rows[1].pooled.output_tok_s)
    wording(run_answer(summary, run))
    none_drafted = [replace(cell, server_load=replace(cell.server_load, drafted_tokens=0)) for cell in summary.cells]
    (answer,) = setting_answers(run, summary.rows, none_drafted)  # llama.cpp counts them also without speculation
    assert answer.values["parts"][0]["reported"] is True
    served = [replace(cell, served_by=served_by(template=None, startup=Startup(engine="sglang"))) for cell in run.cells]
    (answer,) = setting_answers(replace(run, cells=served), summary.rows, summary.cells)
    assert list(answer.values["parts"][0]["start"]) == ["SGLang"]
    other = replace(run.scenario, question="How many users?")
    assert setting_answers(replace(run, scenario=other), summary.rows, summary.cells) == []


def test_a_run_with_and_a_run_without_speculation(tmp_path: Path) -> None:
    """The same answer as of two servers in one run; with one run a side of an assumed spread."""
    text = USERS.replace("plain: {template: vllm-cpu}, drafts", "SIDE")
    for name, engine in (("with", "drafts"), ("again", "drafts"), ("without", "plain")):
        made(tmp_path, text.replace("SIDE", "running"), engines={"running": ENGINES[engine]}, name=name)
    for sides in (("with", "without"), ("without", "with")):
        comparison = compare_runs([[tmp_path / side] for side in sides])
        (answer,) = comparison.answers
        assert (answer.values["kind"], answer.values["levels"]) == ("until", [1, 4, 8, 16, 24])
        assert answer.values["at"] == pytest.approx(true_users(ENGINES["drafts"]), rel=0.1)
        assert answer.values["ratios"][0] > 1.5 and answer.values["ratios"][-1] < 1 and answer.values["provisional"]
        assert comparison_answer(comparison).startswith(answer.text)
    assert compare_runs([[tmp_path / "with"], [tmp_path / "again"]]).answers == [], "both speculate"


def test_runs_of_whole_turns_with_and_without_speculation(tmp_path: Path) -> None:
    text = TURNS.replace("plain: {template: vllm-cpu}, drafts", "running").replace("KINDS", "code, structured")
    for name, engine in (("without", "plain"), ("with", "drafts")):
        made(tmp_path, text, engines={"running": TAXED[engine]}, name=name)
    comparison = compare_runs([[tmp_path / "without"], [tmp_path / "with"]])
    lead, *answers = comparison.answers
    found = [(answer.values["speed"], answer.values["kind"], answer.values["provisional"]) for answer in answers]
    assert found == [("turn", "until", True)] * 2
    assert [one["of"] for one in lead.values["pays"]] == ["code", "structured"]
    assert answers[0].values["at"] > answers[1].values["at"]
    assert comparison_answer(comparison).startswith(f"{lead.text} ")


def test_turns_of_answers_of_other_lengths_are_not_compared(tmp_path: Path, wording: Wording) -> None:
    run, summary = made(tmp_path, TURNS.replace("KINDS", "structured"), engines=TAXED)

    def cells(tokens: float | None) -> list[CellSummary]:
        """The cells, where the server that speculates sent so many times the tokens of the other one."""
        factors = {"plain": 1.0, "drafts": tokens}
        return [
            replace(cell, numbers=replace(cell.numbers, output_tokens=None if of is None else int(24 * 96 * of)))
            for cell in summary.cells
            for of in [factors[cell.server]]
        ]

    for tokens, code in ((1.01, "turn"), (0.9, None), (None, None)):
        (answer,) = setting_answers(run, summary.rows, cells(tokens))
        assert answer.values["parts"][0].get("speed") == code
        assert [part.get("speed") for part in answer.values["parts"][1:3]] == ["decode", "first"]
    wording(answer.text)


def test_drafts_that_no_server_counts_are_unknown(tmp_path: Path) -> None:
    run, summary = made(tmp_path, TURNS.replace("KINDS", "structured"), engines=TAXED)
    hidden = [
        replace(cell, server_load=replace(cell.server_load, drafted_tokens=None, accepted_tokens=None))
        if cell.server == "plain" or "8192" in cell.load
        else cell
        for cell in summary.cells
    ]
    (answer,) = setting_answers(run, summary.rows, hidden)
    accepted = answer.values["parts"][-1]
    assert accepted["by_level"]["8192"] is None and accepted["by_level"]["512"] == pytest.approx(0.39, abs=0.05)
    rows = speculation_tables(replace(summary, answers=[answer]))[0].rows
    assert [row[-1] == NOTHING for row in rows] == [False, True, False]


def test_equal_servers_are_not_said_to_differ_by_the_whole_turn() -> None:
    """Drafts that gain as much as they cost, three repeats with 1.5 % between them: how often an answer is wrong."""
    spaces, wrong = (2000 if NIGHTLY else 200), 0
    for seed in range(spaces):
        dice = random.Random(seed)
        runs = [
            {level: [math.exp(dice.gauss(0, 0.015)) / (2 + level / 5000) for _ in range(3)] for level in LEVELS}
            for _ in range(2)
        ]
        answer = find_crossing(*runs, linear=True)
        equal = all(abs(ratio - 1) <= MARGIN for ratio in answer.ratios)
        wrong += answer.kind != "cannot_tell" and not equal
    assert wrong <= 0.05 * spaces


def test_a_server_without_a_cache_is_named(tmp_path: Path) -> None:
    _, summary = made(tmp_path, cached=False)
    note = summary.answers[0].values["parts"][-1]
    assert (note["level"], note["share"]) == (1024, 0.0) and note["share"] < FEW_CACHED


def test_a_load_generator_that_was_the_limit_is_named_in_the_answer(tmp_path: Path, wording: Wording) -> None:
    run, summary = made(tmp_path)
    assert "Warning" not in run_answer(summary, run)
    limits = {"steep": ("8192",), "flat": ("1024", "8192")}
    rows = [
        replace(row, client_limited=["tpot"] if row.load.endswith(limits[row.server]) else []) for row in summary.rows
    ]
    (answer,) = setting_answers(run, rows, summary.cells)
    assert limited(answer) == [{"side": "steep", "levels": [8192]}, {"side": "flat", "levels": [1024, 8192]}]
    wording(answer.text)
    rows = [replace(row, client_limited=["e2e"]) for row in summary.rows]
    (answer,) = setting_answers(run, rows, summary.cells)
    assert limited(answer) == [], "without speculation no whole turns are compared"


def limited(answer: Reason) -> list[dict[str, Any]]:
    """The warnings in an answer that the load generator was the limit."""
    return [part for part in answer.values["parts"] if set(part) == {"side", "levels"}]


@pytest.mark.parametrize("field", ["e2e", "tpot", "ttft"])
def test_a_limited_turn_of_speculation_is_named_in_the_answer(tmp_path: Path, field: str) -> None:
    run, summary = made(tmp_path, TURNS.replace("KINDS", "structured"), engines=TAXED)
    rows = [replace(row, client_limited=[field] if row.load.endswith("32768") else []) for row in summary.rows]
    (answer,) = setting_answers(run, rows, summary.cells)
    assert limited(answer) == [{"side": server, "levels": [32768]} for server in ("plain", "drafts")]
    assert "Warning" not in setting_answers(run, summary.rows, summary.cells)[0].text


def test_a_comparison_of_runs_names_where_the_load_generator_was_the_limit(tmp_path: Path, wording: Wording) -> None:
    text = TURNS.replace("plain: {template: vllm-cpu}, drafts", "running").replace("KINDS", "code, structured")
    sides = []
    for name, engine in (("without", "plain"), ("with", "drafts")):
        run, summary = made(tmp_path, text, engines={"running": TAXED[engine]}, name=name)
        ends = {"without": ("8192", "32768"), "with": ()}[name]
        rows = [replace(row, client_limited=["e2e"] if row.load.endswith(ends) else []) for row in summary.rows]
        sides.append(Side(name, [run], [replace(summary, rows=rows)]))
    answers = speculation_answers(sides[0], sides[1:])
    warnings = [answer for answer in answers if answer.code == "client_limited"]
    assert [warning.values for warning in warnings] == [{"side": "without", "levels": [8192, 32768]}] * 2
    wording([warning.text for warning in warnings])


def test_one_server_and_one_repeat(tmp_path: Path) -> None:
    text = TEXT.replace(", flat: {template: vllm-cpu}", "").replace("repeats: 2", "repeats: 1")
    run, summary = made(tmp_path, text, spread=0)
    decode, _ = summary.answers[0].values["parts"]
    shallow, deep = (0.002 + 1e-6 * (depth + PROMPT + OUTPUT / 2 + 1) for depth in (0, 8192))
    assert decode["ratio"] == pytest.approx(deep / shallow, rel=0.002)
    assert len(crossover_charts(summary, run)) == 2
    (tmp_path / "two").mkdir()
    _, summary = made(tmp_path / "two", TEXT.replace("repeats: 2", "repeats: 1"), spread=0)
    decode, _ = summary.answers[0].values["parts"]
    assert decode["provisional"] and decode["low"] < true_depth(ENGINES["steep"], ENGINES["flat"]) < decode["high"]


def test_prompts_of_a_load_keep_the_other_keys_of_the_scenario(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(TEXT)
    assert [load.prompts for load in load_scenario(path).loads.values()] == [
        replace(load_scenario(path).prompts, system_tokens=depth) for depth in (0, 1024, 8192)
    ]
    assert load_scenario(path).swept is not None and DEPTH in TEXT


def test_the_interval_covers_the_depth() -> None:
    """Two engines of random costs in virtual time, three repeats, 1.5 % between them."""
    spaces, covered, found = (400 if NIGHTLY else 40), 0, 0
    for seed in range(spaces):
        dice = random.Random(seed)
        flat = replace(ENGINES["flat"], step_base_s=dice.uniform(0.008, 0.02), step_per_kv_token_s=1e-7)
        context = dice.uniform(1500, 20_000)
        steep = replace(flat, step_base_s=flat.step_base_s * dice.uniform(0.4, 0.8))
        steep = replace(steep, step_per_kv_token_s=1e-7 + (flat.step_base_s - steep.step_base_s) / context)
        runs = [{depth: [speed(one, depth, dice) for _ in range(3)] for depth in (0, 2048, 8192, 32768)}
                for one in (steep, flat)]  # fmt: skip
        answer = find_crossing(*runs, linear=True)
        if answer.low is not None and answer.high is not None:
            found += 1
            covered += answer.low <= true_depth(steep, flat) <= answer.high
    assert found >= 0.95 * spaces and covered >= 0.9 * found


def test_the_interval_covers_the_users() -> None:
    """Speculation of random costs, three runs of each number of users, 1.5 % between them."""
    spaces, covered, found = (1000 if NIGHTLY else 100), 0, 0
    for seed in range(spaces):
        dice = random.Random(seed)
        acceptance, tokens = dice.uniform(0.4, 0.9), dice.randint(2, 5)
        config = replace(ENGINES["plain"], num_speculative_tokens=tokens, acceptance_rate=acceptance)
        costs = config.step_base_s * (tokens_of_step(config) - 1) / dice.uniform(2, 20)
        extra = (costs - config.step_per_sequence_s * (1 - tokens_of_step(config))) / tokens
        config = replace(config, draft_per_token_s=extra)
        runs = [
            {n: [spec_speed(one, n, dice) for _ in range(3)] for n in (1, 2, 4, 8, 16, 32)}
            for one in (replace(config, num_speculative_tokens=0), config)
        ]
        answer = find_crossing(*runs, linear=True)
        if answer.low is not None and answer.high is not None:
            found += 1
            covered += answer.low <= true_users(config) <= answer.high
    assert found >= 0.95 * spaces and covered >= 0.9 * found


def spec_speed(config: EngineConfig, users: int, dice: random.Random) -> float:
    """Tokens a second of one user in one run."""
    step_s = config.step_s(users, 0, 0, 0, config.num_speculative_tokens * users)
    return tokens_of_step(config) / step_s * math.exp(dice.gauss(0, 0.015))


def speed(config: EngineConfig, depth: int, dice: random.Random) -> float:
    """Tokens a second of one run."""
    config = replace(config, slowdown=math.exp(dice.gauss(0, 0.015)), jitter=0.02, block_size=1024)
    config = replace(config, num_gpu_blocks=64, max_model_len=2**16)  # a pool of many blocks takes long to make
    work = VirtualWork(prompt_tokens=(depth + PROMPT, depth + PROMPT), output_tokens=(OUTPUT, OUTPUT))
    times = [one.tpot_s or 0 for one in closed_loop(config, 1, work, requests=4, seed=dice.randrange(1 << 30))]
    return len(times) / sum(times)


def test_the_prompt_up_to_which_a_whole_turn_with_speculation_is_faster(tmp_path: Path, wording: Wording) -> None:
    """It decodes faster at every length, and still costs more than it gains from a length on."""
    run, summary = made(tmp_path, TURNS.replace("KINDS", "structured"), engines=TAXED)
    (answer,) = summary.answers
    turn, decode, first, accepted = answer.values["parts"]
    truth = true_turn(TAXED["plain"], TAXED["drafts"], output=96)
    assert (turn["speed"], turn["kind"], turn["side"], turn["speculates"]) == ("turn", "until", "drafts", True)
    assert turn["low"] < truth < turn["high"]
    assert turn["at"] == pytest.approx(truth, rel=0.1)
    assert min(decode["ratios"]) > 1.5, "decode alone says that it pays everywhere"
    assert first["ratios"][-1] == pytest.approx(260 / 200, rel=0.05)
    assert first["low"] < 260 / 200 < first["high"]
    assert accepted["by_level"].keys() == {"512", "8192", "32768"}
    wording(answer.text)
    titles = [chart.id for chart in crossover_charts(summary, run)]
    assert titles == ["crossover-new-turn", "crossover-new-decode", "crossover-new-first"]
    (table,) = speculation_tables(summary)
    assert [row[:4] for row in table.rows] == [
        ["drafts", "new, structured", "prompts.tokens", level] for level in ("512", "8,192", "32,768")
    ]
    assert float(table.rows[-1][6][:-1]) == pytest.approx(1.3, abs=0.06)


def test_speculation_pays_by_kind_of_prompt(tmp_path: Path, wording: Wording) -> None:
    run, summary = made(tmp_path, TURNS.replace("KINDS", "code, chat"), engines=TAXED)
    lead, *details = summary.answers
    assert [(one["of"], one["kind"]) for one in lead.values["pays"]] == [("code", "until"), ("chat", "until")]
    for one in lead.values["pays"]:
        drafts = replace(TAXED["drafts"], acceptance_rate=ACCEPTED[one["of"]])
        assert one["low"] < true_turn(TAXED["plain"], drafts, output=96) < one["high"]
        share = (tokens_of_step(drafts) - 1) / drafts.num_speculative_tokens
        assert lead.values["accepted"][one["of"]] == pytest.approx(share, abs=0.03)
    assert len(details) == 2 and run_answer(summary, run) == lead.text, "the details are in the table"
    assert len(speculation_tables(summary)[0].rows) == 6
    wording(lead.text)
