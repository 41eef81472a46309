"""What a change of model costs: from records to the answer, with a known time of a switch."""

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.base.reason import Reason
from harness.numbers.summary import Summary
from harness.questions.crossover.chart import crossover_charts
from harness.questions.joint import analyse
from harness.questions.report.headline import run_answer
from harness.questions.switching import MIN_REQUESTS, ModelRequest, _answer
from harness.records.manifest import read_run
from harness.records.records import Request
from harness.scenario import model_at
from harness.scenario.file import load_scenario
from harness.scenario.plan import Cell
from tests.support.made_runs import request, write_made_run
from tests.support.nightly import NIGHTLY, draws, scatter
from tests.support.wording import Wording

SWITCH_S, TTFT_S = 0.8, 0.1
TEXT = """
version: 1
question: What does a change cost?
model: first
servers: {one: {template: vllm-cpu}}
loads: {turns: {user: batch, requests: 12, output_tokens: 11, model: [first, first, first, second, second, second]}}
repeats: 3
"""


def made(
    folder: Path,
    text: str = TEXT,
    *,
    switch_s: float = SWITCH_S,
    seed: int = 1,
    wrong: bool = False,
    loads_anew: Sequence[str] = ("first", "second", "third"),
) -> Summary:
    """A run on a server that loads these models anew after each change; its times have a spread of 5 %."""
    (folder / "s.yaml").write_text(text)
    scenario, dice = load_scenario(folder / "s.yaml"), random.Random(seed)

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        load, found, now, loaded = scenario.loads[cell.load], list[Request](), start_s, "first"
        run_noise = math.exp(dice.gauss(0, 0.01))
        for index in range(-1, load.requests or 0):
            model = model_at(load, index) or "first"
            ttft_s = TTFT_S * math.exp(dice.gauss(0, 0.05))
            ttft_s += (model != loaded and model in loads_anew) * switch_s * run_noise * math.exp(dice.gauss(0, 0.05))
            chunks = [ttft_s + 0.01 * number for number in range(11)]
            times = {"sent_s": now, "ended_s": chunks[-1], "chunks_s": chunks, "first_visible_s": ttft_s}
            of_cell = {"cell": cell.id, "load": cell.load, "process": process, "id": f"{cell.id}-{index}"}
            phase = {"phase": "warmup" if index < 0 else "measured", "index": index}
            answered = "other" if wrong and index == 4 else model
            found.append(request(**of_cell, **phase, **times, headers_s=0.001, model=answered))
            now, loaded = now + chunks[-1], model
        return found

    write_made_run(folder / f"run{seed}", made_of=scenario, requests=requests)
    return analyse(folder / f"run{seed}").summary


def test_the_cost_of_a_change_and_how_many_waited(tmp_path: Path, wording: Wording) -> None:
    summary = made(tmp_path)
    (answer,) = summary.answers
    values = answer.values
    assert (values["changes"], values["waited"]) == (12, 12), "the first one, too: the warm-up ended with the other"
    assert values["cost_s"] == pytest.approx(SWITCH_S, rel=0.05)
    assert values["low_s"] < SWITCH_S < values["high_s"]
    assert values["same_s"] == pytest.approx(TTFT_S, rel=0.05)
    assert list(values["by_model_s"]) == ["first", "second"]
    assert values["stay"] == []
    wording(answer.text)
    assert summary.valid, summary.reasons
    (chart,) = crossover_charts(summary, read_run(tmp_path / "run1"))
    assert chart.figure["data"][0]["x"] == ["same model", "to first", "to second"]
    assert run_answer(summary, read_run(tmp_path / "run1")) == answer.text


def test_the_log_of_lemonade_has_the_time_of_a_load_and_of_an_eviction(tmp_path: Path) -> None:
    made(tmp_path, TEXT.replace("vllm-cpu", "lemonade"))
    run = read_run(tmp_path / "run1")
    lines = [(-50.0, "(Router) Evicting model: user.A"), (-48.0, "(Router) Evicted model: user.A")]  # before the load
    lines += [(0.1, "(Router) Evicting model: user.A"), (2.2, "(Router) Evicted model: user.A")]
    lines += [(2.3, "(LlamaCpp) Loading model: user.B"), (2.7, "(WrappedServer) llama-server is ready!")]
    stamps = [(datetime.fromtimestamp(run.cells[0].started_wall_s + at_s, UTC), words) for at_s, words in lines]
    text = "".join(f"{at:%Y-%m-%dT%H:%M:%S.%f}123Z {at:%F %T} [Info] {words}\n" for at, words in stamps)
    (tmp_path / "run1/logs").mkdir(exist_ok=True)
    (tmp_path / "run1/logs" / f"{run.cells[0].id}.server.log").write_text(f"{text}no stamp (LlamaCpp) Loading model: C")
    (answer,) = analyse(tmp_path / "run1").summary.answers
    assert answer.values["logged_s"] == {"eviction": pytest.approx(2.1), "load": pytest.approx(0.4)}


def test_a_server_that_keeps_both_models_costs_nothing(tmp_path: Path) -> None:
    values = [made(tmp_path, switch_s=0, seed=seed).answers[0].values for seed in range(1, 11)]
    assert values[0]["low_s"] < 0 < values[0]["high_s"] and values[0]["stay"] == ["first", "second"]
    assert [one["waited"] for one in values] == [0] * 10, "noise is no wait"


def test_one_model_that_answers_for_another_is_invalid(tmp_path: Path) -> None:
    summary = made(tmp_path, wrong=True)
    assert [reason.code for reason in summary.reasons] == ["model_changed"] * 3


def test_a_load_with_one_model_has_no_change(tmp_path: Path) -> None:
    text = TEXT.replace("model: [first, first, first, second, second, second]", "model: first")
    one_run = made(tmp_path, text.replace("repeats: 3", "repeats: 1"))
    assert one_run.answers == [], "no change"


def test_the_models_that_stay_loaded(tmp_path: Path, wording: Wording) -> None:
    """A third model takes the place of another one, so a change to the first never waits."""
    text = TEXT.replace("second, second, second", "second, second, third, third, first, first")
    summary = made(tmp_path, text, loads_anew=["second", "third"])
    assert summary.answers[0].values["stay"] == ["first"] and summary.answers[0].values["waited"] == 6
    (tmp_path / "all").mkdir()
    (answer,) = made(tmp_path / "all", text).answers
    assert answer.values["stay"] == []
    wording(answer.text)


MIX = """
version: 1
question: What does a change cost?
model: first
servers: {one: {template: vllm-cpu}}
loads:
  long: {user: batch, duration_s: 12, output_tokens: 2, model: first}
  short: {user: batch, duration_s: 12, output_tokens: 2, model: second}
mixes: {both: [long, short]}
repeats: 1
"""


def test_models_of_a_mix_are_in_the_order_of_sending(tmp_path: Path) -> None:
    """The short load's requests are in the middle of the long one's: the model changes twice, as often as it waits."""
    (tmp_path / "s.yaml").write_text(MIX)

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        own = cell.load.rpartition(".")[2]
        times = {"long": [float(index) for index in range(12)], "short": [5.2, 5.4, 5.6]}[own]
        found = []
        for index, at_s in enumerate(times):
            ttft_s = TTFT_S + SWITCH_S * (bool(cell.mix) and at_s in (5.2, 6.0))
            sent = {"sent_s": start_s + at_s, "ended_s": ttft_s + 0.01, "chunks_s": [ttft_s, ttft_s + 0.01]}
            of_cell = {"cell": cell.id, "load": cell.load, "process": process, "id": f"{cell.id}-{index}"}
            model = {"long": "first", "short": "second"}[own]
            more = {"index": index, "headers_s": 0.001, "first_visible_s": ttft_s, "model": model}
            found.append(request(**of_cell, **sent, **more, phase="measured", output_tokens=2, asked_tokens=2))
        return found

    write_made_run(tmp_path / "run", made_of=load_scenario(tmp_path / "s.yaml"), requests=requests)
    (answer,) = analyse(tmp_path / "run").summary.answers
    assert (answer.values["load"], answer.values["changes"], answer.values["waited"]) == ("both", 2, 2)
    assert answer.values["cost_s"] == pytest.approx(SWITCH_S)


def answered(changed: Sequence[float], same: Sequence[float]) -> Reason:
    """The answer of a single run with these times to the first token."""
    requests = [ModelRequest("one", "second", True, ttft_s) for ttft_s in changed]
    requests += [ModelRequest("one", "first", False, ttft_s) for ttft_s in same]
    answer = _answer("one", requests, {})
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("changed", "same", "spread_s"),
    [(20, 5, 0.01), (5, 20, 0.01), (20, 5, 0.1), (MIN_REQUESTS, MIN_REQUESTS, 0.03)],
)
def test_the_interval_of_one_run_covers_the_switch(changed: int, same: int, spread_s: float) -> None:
    """Both means are uncertain. `spread_s`: of the times without a change; after one it is 0.01 s."""
    dice, trials, covered = random.Random(4), draws(2000), 0
    for _ in range(trials):
        after = [0.5 + dice.gauss(0, 0.01) for _ in range(changed)]
        values = answered(after, [0.2 + dice.gauss(0, spread_s) for _ in range(same)]).values
        covered += values["low_s"] <= 0.3 <= values["high_s"]
    assert covered >= (0.94 - scatter(0.94, trials)) * trials


def test_a_prompt_that_is_sometimes_cached_does_not_make_the_interval_too_narrow() -> None:
    """Without a change the first token comes after 0.1 s or 0.3 s: two such requests are often alike."""
    dice, trials, covered, known = random.Random(4), draws(2000), 0, 0
    for _ in range(trials):
        same = [dice.choice([0.1, 0.3]) + dice.gauss(0, 0.002) for _ in range(dice.randrange(1, 12))]
        values = answered([0.5 + dice.gauss(0, 0.01) for _ in range(20)], same).values
        if values["low_s"] is not None:
            known += 1
            covered += values["low_s"] <= 0.3 <= values["high_s"]
    assert known and covered >= (0.93 - scatter(0.93, known)) * known


@pytest.mark.parametrize(("changed", "same"), [(20, 1), (1, 20), (4, 2)])
def test_a_cost_without_an_interval_says_what_is_missing(changed: int, same: int, wording: Wording) -> None:
    answer = answered([0.5] * changed, [0.1] * same)
    assert (answer.values["cost_s"], answer.values["low_s"]) == (pytest.approx(0.4), None)
    assert answer.values["provisional"]
    wording(answer.text)


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_the_interval_of_a_few_repeats_covers_the_switch(repeats: int) -> None:
    dice, trials, covered = random.Random(4), draws(2000), 0
    for _ in range(trials):
        requests = []
        for run in range(repeats):
            cost_s = 0.3 * math.exp(dice.gauss(0, 0.02))
            for number in range(6):
                is_changed = number % 2 == 0
                ttft_s = 0.2 + is_changed * cost_s + dice.gauss(0, 0.01)
                requests.append(ModelRequest(str(run), "ab"[is_changed], is_changed, ttft_s))
        answer = _answer("one", requests, {})
        assert answer is not None and not answer.values["provisional"]
        covered += answer.values["low_s"] <= 0.3 <= answer.values["high_s"]
    assert covered >= (0.94 - scatter(0.94, trials)) * trials


def test_the_interval_covers_the_switch(tmp_path: Path) -> None:
    runs, covered = (200 if NIGHTLY else 20), 0
    for seed in range(runs):
        values = made(tmp_path, seed=100 + seed).answers[0].values
        covered += values["low_s"] <= SWITCH_S <= values["high_s"]
    assert covered >= 0.9 * runs - 1
