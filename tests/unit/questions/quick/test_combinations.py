"""`harness quick` with prompts, contexts, users and rates: what is read, the scenario that is made, and its numbers."""

import itertools
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.files import ROOT
from harness.cli import app
from harness.numbers.stats import mean_of_repeats
from harness.numbers.summarize import summarize_with_counts
from harness.questions.quick.combinations import (
    ANSWERS,
    MAX_COMBINATIONS,
    READERS,
    REFUSED,
    Combinations,
    combinations_scenario,
    fit_answers,
    own_words,
    refuse_too_long,
)
from harness.questions.quick.combinations_page import (
    UNKNOWN,
    combination_elements,
    combination_notes,
    facts_to_paste,
    forum_page,
    lead_of_combinations,
)
from harness.questions.quick.command import read_wanted
from harness.questions.quick.decide import CombinationNumbers, CombinationsReport, Repeated, combination_numbers
from harness.questions.quick.search import combinations_report
from harness.records.manifest import Machine
from harness.records.records import Request
from harness.records.run_data import load as load_run
from harness.report.elements import Grid
from harness.report.markdown import render
from harness.run.experiment import Target
from harness.run.running_server import combination_words
from harness.scenario import Load, Prompts, Scenario, Server, Warmup
from harness.scenario.plan import Cell, plan
from harness.scenario.shape import decode
from tests.support.made_runs import request, scenario, write_made_run

URL = "http://127.0.0.1:8000"
COMMAND = typer.main.get_command(app).commands["quick"]  # type: ignore[attr-defined]


def parsed(*words: str) -> dict[str, Any]:
    """The values of the command's parameters."""
    with COMMAND.make_context("quick", list(words)) as context:
        return dict(context.params)


def wanted(*words: str) -> Combinations:
    found = read_wanted(parsed(URL, *words))
    assert found is not None
    return found


def made(*words: str, exact: bool = False) -> Scenario:
    problems: list[Any] = []
    decoded = decode(combinations_scenario(wanted(*words), "m", exact=exact), Scenario, {}, problems)
    assert decoded is not None and problems == []
    return decoded


def test_the_line_of_the_manual() -> None:
    line = "--prompt 512,2048 --output 128 --users 1,4,16 --depth 0,8k --rate 1,2,4 --repeats 3"
    found = wanted(*shlex.split(line))
    assert found == Combinations(
        prompts=[512, 2048], depths=[0, 8192], output=128, users=[1, 4, 16], rates=[1.0, 2.0, 4.0], repeats=3,
        requests=None, fixed=False, budget_s=1800.0,
    )  # fmt: skip
    assert found.number == 2 * 2 * (3 + 3)


def test_without_options_it_is_the_measurement_of_15_seconds() -> None:
    assert read_wanted(parsed(URL)) is None
    assert read_wanted(parsed(URL, "--model", "m", "--json")) is None


@pytest.mark.parametrize("words", [("--markdown",), ("--ignore-eos",), ("-r", "3"), ("--budget", "30min")])
def test_what_is_not_given(words: Sequence[str]) -> None:
    found = wanted(*words)
    assert (found.prompts, found.depths, found.output, found.users, found.rates) == ([512], [0], 128, [1], [])
    assert (found.repeats, found.requests, found.budget_s) == (3, None, 1800.0)


@pytest.mark.parametrize(
    ("words", "depths"),
    [("-d 0,8k", [0, 8192]), ("-d 0 8k 0", [0, 8192]), ("-d 0 -d 8192", [0, 8192]), ("--depth=1.5K", [1536]),
     ("-d 0 8k --users 4", [0, 8192])],
)  # fmt: skip
def test_lists(words: str, depths: list[int]) -> None:
    assert wanted(*words.split()).depths == depths
    assert own_words(words.split())[0].startswith("-")


def test_an_address_after_a_list_is_no_number() -> None:
    assert parsed("--users", "1", "4", URL)["address"] == URL


def test_a_rate_alone_has_no_closed_loop_and_inf_is_all_at_once() -> None:
    assert (wanted("--rate", "0.5").users, wanted("--rate", "0.5").rates) == ([], [0.5])
    assert wanted("--request-rate", "inf", "--num-prompts", "64") == wanted("--users", "64", "--requests", "64")
    assert wanted("--request-rate", "inf", "--max-concurrency", "4") == wanted("--users", "4")


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("--prompt 0", "--prompt: "), ("--prompt x", "--prompt: "), ("--prompt 1,,2", "--prompt: "),
        ("--prompt 2M", "--prompt: "), ("--prompt 1.0001k", "--prompt: "), ("--prompt -5", "--prompt: "),
        ("--output 0", "--output: "), ("--output 1,2", "--output: "), ("--output md", "--output: "),
        ("--depth 1000001", "--depth: "), ("--users 0", "--users: "), ("--users 100001", "--users: "),
        ("--rate 0", "--rate: "), ("--rate nan", "--rate: "), ("--rate inf", "--rate: "), ("--rate 1e9", "--rate: "),
        ("--requests 3 --users 4", "--requests: "), ("--requests x", "--requests: "), ("--budget 5", "--budget: "),
        ("--repeats 0", ""), ("--repeats x", ""), ("--max-concurrency 4 --request-rate 2", "--max-concurrency"),
        ("--runs 3", "--runs: "), ("--prompt", ""),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_names_its_option_and_what_to_do(words: str, begins: str) -> None:
    with pytest.raises(HarnessError) as error:
        wanted(*words.split())
    assert error.value.what.startswith(begins) and error.value.next_step and error.value.exit_code == 1


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("--users 4 --max-concurrency 8", "--users and --max-concurrency: "), ("-n16 --tg 12", "-n and --tg: "),
        ("--depth 0 -d 1k", "--depth and -d: "), ("--rate=1 --request-rate=2", "--rate and --request-rate: "),
        ("-r 2 --repetitions 3", "-r and --repetitions: "), ("--pp 1,2 --prompt 1", "--prompt and --pp: "),
        ("--requests 8 --num-prompts 9", "--requests and --num-prompts: "),
        ("--base-url http://a:1 --target http://b:1", "--base-url and --target: "),
    ],
)  # fmt: skip
def test_two_names_of_an_option_with_different_values_are_refused(words: str, begins: str) -> None:
    with pytest.raises(HarnessError) as error:
        parsed(*words.split())
    assert error.value.what.startswith(begins) and error.value.next_step


@pytest.mark.parametrize(
    "words",
    ["--users 4,8 --max-concurrency 8,4", "-n128 --tg 128", "--depth 1024 -d 1k", "--requests 1,000 --num-prompts 1k",
     "--users 4 --users 8", "--base-url http://a:1/ --url http://a:1", "--rate 1 --request-rate 1.0", ""],
)  # fmt: skip
def test_the_same_values_by_two_names_are_one(words: str) -> None:
    parsed(*words.split())


def test_every_option_with_several_names_is_checked_for_them() -> None:
    several = {param.name for param in COMMAND.params if len(param.opts) > 1 and not getattr(param, "is_flag", False)}
    assert several == set(READERS)


@pytest.mark.parametrize(
    ("option", "value", "range_text"),
    [
        ("--requests", "0", "from 1 to 10,000,000"), ("--users", "0", "from 1 to 100,000"),
        ("--users", "100001", "from 1 to 100,000"), ("--repeats", "0", "from 1 to 1,000"),
        ("--repeats", "1001", "from 1 to 1,000"), ("--requests", "x", "from 1 to 10,000,000"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_names_the_range(option: str, value: str, range_text: str) -> None:
    with pytest.raises(HarnessError) as error:
        wanted(option, value)
    assert (range_text in error.value.what) and f"(got '{value}')" in error.value.what
    assert "500" not in error.value.next_step


@pytest.mark.parametrize(
    ("words", "template", "option", "shorter"),
    [
        ("--depth 32k --output 16", 0, "--depth", "1520"), ("--prompt 2000 --output 100", 0, "--prompt", "1948"),
        ("--prompt 10 --output 3000", 12, "--output", "2026"), ("--prompt 3000 --depth 100", 0, "--prompt", "1820"),
        ("--depth 0,2k --prompt 64,512", 8, "--depth", "1400"), ("--prompt 1921", 0, "--prompt", "1920"),
        ("--prompt 1912", 9, "--prompt", "1911"), ("--prompt 5k --output 5k", 0, "--output", None),
    ],
)  # fmt: skip
def test_a_request_beyond_the_context_is_refused_in_words_of_the_line(
    words: str, template: int, option: str, shorter: str | None
) -> None:
    with pytest.raises(HarnessError) as error:
        refuse_too_long(wanted(*words.split()), 2048, template)
    assert error.value.what.startswith(f"{option}: ") and "2,048" in error.value.what
    assert (f"{option} {shorter} or less" in error.value.next_step) == (shorter is not None)
    if shorter is not None:
        given = words.split()
        fits = {"--prompt": "512", "--output": "128"} | dict(zip(given[::2], given[1::2], strict=True))
        fitting = wanted(*itertools.chain(*(fits | {option: shorter}).items()))
        refuse_too_long(fitting, 2048, template)  # what it advises is accepted


def test_a_request_that_fits_or_a_context_that_is_not_known_is_no_error() -> None:
    refuse_too_long(wanted("--prompt", "1920"), 2048, 0)
    refuse_too_long(wanted("--prompt", "1911"), 2048, 9)
    refuse_too_long(wanted("--depth", "500k"), None, 0)


def test_too_many_combinations() -> None:
    many = ",".join(map(str, range(1, MAX_COMBINATIONS + 2)))
    with pytest.raises(HarnessError) as error:
        wanted("--users", many)
    assert f"{MAX_COMBINATIONS + 1}" in error.value.what


@pytest.mark.parametrize("word", REFUSED)
def test_a_word_that_means_something_else_says_what_to_write(word: str) -> None:
    for words in ([URL, word, "1"], [URL, f"{word}=1"]):
        with pytest.raises(HarnessError) as error:
            parsed(*words)
        assert error.value.what.startswith(f"{word}: ") and error.value.next_step


def test_the_loads_are_in_the_order_that_is_told() -> None:
    asked_for = made("-p", "64,128", "-n", "16", "-d", "0,1k", "--users", "1,4", "--rate", "2,0.5")
    closed = [f"pp{p}-tg16{d}-u{u}" for d in ("", "-d1024") for p in (64, 128) for u in (1, 4)]
    assert list(asked_for.loads) == closed + [
        f"pp{p}-tg16{d}-r{r}" for d in ("", "-d1024") for p in (64, 128) for r in ("2", "0p5")
    ]
    cells = plan(asked_for)
    assert [cell.load for cell in cells[:3]] == closed[:3] and cells[
        len(asked_for.loads)
    ].load == "pp128-tg16-d1024-r0p5"
    load = asked_for.loads["pp128-tg16-d1024-u4"]
    assert load.prompts is not None and (load.prompts.tokens, load.prompts.system_tokens) == (128, 1024)
    assert (load.users, load.requests, load.output_tokens, load.output) == (4, 4 * ANSWERS[0], 16, "natural")
    rate = asked_for.loads["pp64-tg16-r0p5"]
    assert rate.arrivals is not None and (rate.arrivals.rate, rate.requests, rate.users) == (0.5, 10, 10)
    assert asked_for.repeats == 3 and asked_for.prompts.tokenizer is None
    assert made("-p", "9", exact=True).prompts.tokenizer == "server"


def test_requests_and_fixed_lengths() -> None:
    asked_for = made("--requests", "20", "--users", "2", "--rate", "1", "--ignore-eos")
    assert {(load.requests, load.output) for load in asked_for.loads.values()} == {(20, "fixed")}


@pytest.mark.parametrize("words", [
    "--prompt 64,128 --output 16 --depth 0,1024 --users 1,4 --rate 0.5,2 --repeats 2 --ignore-eos",
    "--prompt 512 --output 128 --users 1 --repeats 3",
    "--prompt 512 --output 128 --depth 4096 --rate 1 --repeats 1",
])  # fmt: skip
def test_a_run_tells_the_options_that_made_it(words: str) -> None:
    assert combination_words(made(*words.split())) == words.split()


def test_another_scenario_has_no_such_options() -> None:
    asked_for = made("--users", "4")
    (load,) = asked_for.loads.values()
    assert combination_words(Scenario(version=1, question="", model="", servers={}, loads={"users@4": load})) == []
    assert combination_words(Scenario(version=1, question="", model="", servers={}, loads={"pp9-tg9-u1": load})) == []


def test_as_many_answers_as_the_budget_allows() -> None:
    asked, whole = wanted("--users", "1,4", "--budget", "100s"), made("--users", "1,4")

    def estimate(each: float) -> Any:
        return lambda fitted: each * sum(load.requests for load in fitted.loads.values())

    for each, answers in ((1.0, 4), (6.0, 2), (15.0, 1)):
        fitted, about_s = fit_answers(whole, asked, estimate(each))
        assert {name: load.requests for name, load in fitted.loads.items()} == {
            "pp512-tg128-u1": answers, "pp512-tg128-u4": 4 * answers,
        }  # fmt: skip
        assert about_s == each * 5 * answers <= 100
    with pytest.raises(HarnessError) as error:
        fit_answers(whole, asked, estimate(30.0))
    assert error.value.what.startswith("--budget: ") and error.value.exit_code == 1
    fixed = wanted("--users", "1,4", "--requests", "8", "--budget", "1s")
    with pytest.raises(HarnessError):
        fit_answers(made("--users", "1,4", "--requests", "8"), fixed, estimate(1.0))


def test_the_interval_is_that_of_students_t() -> None:
    assert mean_of_repeats([2.0]) == (2.0, None, None) or mean_of_repeats([2.0]).low is None
    same = mean_of_repeats([5.0, 5.0, 5.0])
    assert (same.value, same.low, same.high) == pytest.approx((5.0, 5.0, 5.0))
    values = [90.0, 100.0, 110.0]
    found, logs = mean_of_repeats(values), list(map(math.log, values))
    mean = sum(logs) / 3
    error = math.sqrt(sum((log - mean) ** 2 for log in logs) / 2 / 3)
    assert found.value == pytest.approx(math.exp(mean))
    assert (found.low, found.high) == pytest.approx(
        (math.exp(mean - 4.302653 * error), math.exp(mean + 4.302653 * error))
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_contains_the_truth_as_often_as_it_says(seed: int) -> None:
    draw = np.random.default_rng(seed)
    hits = 0
    for _ in range(1000):
        found = mean_of_repeats(np.exp(draw.normal(math.log(100.0), 0.05, 3)).tolist())
        assert found.low is not None and found.high is not None
        hits += found.low <= 100.0 <= found.high
    assert 930 <= hits <= 970


def repeated(value: float, plus_minus: float | None = 1.0) -> Repeated:
    return Repeated(value=value, plus_minus=plus_minus, repeats=[value])


def numbers(**changes: Any) -> CombinationNumbers:
    values: dict[str, Any] = {
        "load": "pp512-tg128-u1", "prompt": 512, "output": 128, "depth": 0, "users": 1, "rate": None, "repeats": 3,
        "answers": 12, "failed": 0, "prompt_tokens": 523, "answer_tokens": 128, "cached_share": None,
        "pp": repeated(3251.0, 71.0), "tg": repeated(95.8, 0.61), "tok_s": repeated(90.0), "ttft_ms": repeated(158.0),
        "tpot_ms": repeated(10.4),
    }  # fmt: skip
    return CombinationNumbers(**values | changes)


def rows(found: Sequence[CombinationNumbers]) -> dict[str, list[list[str]]]:
    return {one.id: [list(row) for row in one.rows] for one in combination_elements(found) if isinstance(one, Grid)}


def test_the_tests_have_the_names_that_people_know() -> None:
    deep = numbers(depth=8192, cached_share=0.99, pp=repeated(2764.0, None), failed=1)
    assert rows([numbers(), deep]) == {"tests": [
        ["pp512", "3,251 ± 71", "158 ± 1", "", "523", "12"], ["tg128", "95.8 ± 0.61", "", "10.4 ± 1", "", ""],
        ["pp512 @ d8192", "2,764", "158 ± 1", "", "523", "12, 1 FAILED"],
        ["tg128 @ d8192", "95.8 ± 0.61", "", "10.4 ± 1", "", ""],
    ]}  # fmt: skip
    several = rows([numbers(), numbers(users=4, pp=None), numbers(users=None, rate=0.5, pp=None)])
    assert [row[0] for row in several["loads"]] == ["1 user", "4 users", "0.5 requests/s"]
    assert [row[1] for row in several["loads"]] == ["pp512+tg128"] * 3
    assert len(several["tests"]) == 2 and "loads" not in rows([numbers()])
    assert "tests" not in rows([numbers(users=4)])


def test_what_is_not_known_is_said() -> None:
    lost = numbers(depth=1000, cached_share=0.5, pp=None)
    assert len(combination_notes([lost])) == 1 and "50 %" in combination_notes([lost])[0]
    assert len(combination_notes([numbers(depth=1000, pp=None)])) == 1
    assert len(combination_notes([numbers(answer_tokens=57)])) == 1
    assert combination_notes([numbers(), numbers(depth=1000, cached_share=0.99), numbers(answer_tokens=None)]) == []
    nothing = numbers(pp=None, tg=None, tok_s=None, ttft_ms=None, tpot_ms=None, prompt_tokens=None)
    assert rows([nothing])["tests"][0][1:5] == ["–", "–", "", "–"]
    assert lead_of_combinations([nothing]) and lead_of_combinations([])


def test_numbers_of_a_run(tmp_path: Any) -> None:
    """Two repeats of one user: 11 tokens at 10 a second after half a second, 80 of 100 tokens of the prompt new."""

    def answers(cell: Cell, process: int, start_s: float) -> list[Request]:
        mine = {"cell": cell.id, "load": cell.load, "process": process, "prompt_tokens": 100, "cached_tokens": 20}
        return [request(id=f"{cell.id}-{index}", index=index, sent_s=start_s + 2.0 * index, **mine) for index in (0, 1)]

    folder = tmp_path / "run"
    prompts = Prompts(tokens=80, system_tokens=20)
    load = Load(user="batch", requests=2, output_tokens=11, prompts=prompts)
    servers = {"running": Server(template="running")}
    asked = scenario(servers=servers, loads={"pp80-tg11-d20-u1": load}, repeats=2, warmup=Warmup(requests=0))
    write_made_run(folder, made_of=asked, requests=answers)
    data = load_run(folder)
    (found,) = combination_numbers(data, summarize_with_counts(folder).summary)
    assert (found.prompt, found.depth, found.output, found.users, found.repeats) == (80, 20, 11, 1, 2)
    assert found.cached_share == 1.0 and found.answers == 4 and found.answer_tokens == 11
    assert found.pp is not None and found.pp.value == pytest.approx(160) and found.pp.plus_minus == pytest.approx(0)
    assert found.tg is not None and found.tg.value == pytest.approx(10)
    assert found.ttft_ms is not None and found.ttft_ms.value == pytest.approx(500)
    assert found.tpot_ms is not None and found.tpot_ms.value == pytest.approx(100)


def test_the_next_commands_reach_the_server_and_the_runs(tmp_path: Path) -> None:
    write_made_run(tmp_path / "run", made_of=made("-p", "512", "-n", "64", "-d", "4k", "-r", "3"), id="run")
    given = {"--model": None, "--ca": Path("ca.pem"), "--telemetry": "ssh://h", "--runs": Path("mine")}
    reported, capacity = combinations_report(tmp_path / "run", Target("https://h:1"), given).next
    assert reported == "harness report run --runs mine"
    assert capacity == "harness capacity --url https://h:1 --ca ca.pem --telemetry ssh://h --runs mine"


def report(**changes: Any) -> CombinationsReport:
    values: dict[str, Any] = {
        "run": "runs/x", "url": URL, "model": "m", "simulated": False, "valid": True, "reasons": [],
        "combinations": [numbers()], "notes": [], "facts": {}, "next": {},
    }  # fmt: skip
    return CombinationsReport(**values | changes)


def test_texts_of_a_server_are_text_in_a_forum() -> None:
    page = render(forum_page(report(model="a|b<img src=x>*c*", facts={"Engine": "x|[y](z)`", "ROCm": None})))
    assert "a\\|b&lt;img src=x&gt;\\*c\\*" in page and "x\\|\\[y\\](z)\\`" in page
    assert f"- **ROCm:** {UNKNOWN}" in page
    assert "| pp512 | 3,251 ± 71 |" in page
    invalid = render(forum_page(report(valid=False, reasons=["another client"])))
    assert "INVALID" in invalid and "another client" in invalid
    assert "SIMULATED" in render(forum_page(report(simulated=True)))


def test_nothing_is_invented_about_another_machine(tmp_path: Any) -> None:
    run = write_made_run(tmp_path / "run")
    machine = Machine(
        name="secret-host", kernel="6.18", cpu="A CPU", ram_bytes=64 << 30, rocm="7.2",
        kernel_parameters={"power profile": "balanced", "cpu governor": "powersave"},
        gpus=[{"target": "gfx1151", "integrated": True, "vram_bytes": 512 << 20, "gtt_bytes": 120 << 30,
               "performance_level": "auto"}],
    )  # fmt: skip
    run = replace(run, machine=machine)
    here = facts_to_paste(run, run.cells[0], is_here=True)
    assert here["Kernel"] == "6.18" and here["ROCm"] == "7.2"
    assert here["GPU memory"] == "0.5 GiB VRAM (UMA) and 120.0 GiB GTT"
    assert here["Power"] == "balanced, cpu governor powersave, gpu performance level auto"
    assert here["Machine"] == "Radeon 8060S gfx1151, A CPU, 64.0 GiB RAM"
    assert not any("secret-host" in (text or "") for text in here.values()), "a name of a machine is nobody's business"
    there = facts_to_paste(run, run.cells[0], is_here=False)
    assert {there[name] for name in ("Machine", "Kernel", "ROCm", "Power", "GPU memory")} == {None}
    bare = facts_to_paste(replace(run, machine=Machine(name="x")), run.cells[0], is_here=True)
    assert {bare[name] for name in ("Machine", "Kernel", "ROCm", "Power", "GPU memory")} == {None}


# docs/your-words.md

PAGE = (ROOT / "docs" / "your-words.md").read_text()
ROWS = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in PAGE.splitlines()
        if line.startswith("| `")]  # fmt: skip
NAMES = {"NAME": "m", "URL": URL, "FILE": "f", "KEY": "k"}


def words_of(cell: str) -> list[str]:
    (code,) = re.findall(r"`([^`]+)`", cell) or [""]
    return shlex.split(code)


def meaning(words: Sequence[str]) -> tuple[Any, ...]:
    address = [] if any(word in ("--url", "--base-url", "--target") for word in words) else [URL]
    values = parsed(*address, *words)
    url = (values["address"] or values["base_url"]).removesuffix("/v1")
    return url, values["model"], values["api_key_env"], values["as_json"], read_wanted(values)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_of_the_page_is_so(row: tuple[str, ...]) -> None:
    there, here = words_of(row[0]), words_of(row[1])
    ours = meaning(here)
    try:
        theirs = meaning(there)
    except HarnessError as error:
        assert error.next_step
    else:
        assert theirs == ours and here


@pytest.mark.parametrize("line", [line for line in PAGE.splitlines() if line.startswith("harness quick ")])
def test_each_command_of_the_page_is_read(line: str) -> None:
    _, _, *words = shlex.split(line)
    assert parsed(*words)["address"] or parsed(*words)["base_url"]


def test_each_word_that_is_read_or_refused_is_on_the_page() -> None:
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", PAGE))
    options = {name for param in COMMAND.params for name in param.opts if param.param_type_name == "option"}
    own = {"--yes", "--ca", "--telemetry", "-h", "--help"}
    assert options - own - named == set()
    advice = {REFUSED[word] for word in REFUSED if word in named}
    assert [word for word in REFUSED if REFUSED[word] not in advice] == []
