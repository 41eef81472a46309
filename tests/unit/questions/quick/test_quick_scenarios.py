"""A running server: which one, which model, how fast, and the scenario that fits it."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.base.errors import HarnessError, ServerError
from harness.base.files import SCENARIOS
from harness.base.process import free_port
from harness.questions.check import GENERATOR_START_S, preview
from harness.questions.quick import search as quick
from harness.questions.quick.command import found_server
from harness.questions.quick.search import (
    EFFORTS,
    FIRST_TOKENS,
    LEVELS,
    MAX_PROMPT_TOKENS,
    Effort,
    choose_effort,
    choose_words,
    find_servers,
    model_of,
    next_commands,
    probe_server,
    quick_scenario,
    speed_of,
)
from harness.records.manifest import Machine, RemoteMachine, Run
from harness.run.experiment import Target, prepare
from harness.run.orchestrator import run
from harness.run.progress import Progress
from harness.run.request_speed import PROMPT_WORDS, RequestSpeed
from harness.serve import probe
from harness.workload import SALT_WORDS
from tests.support.chat_double import KEY, LISTED, double
from tests.support.command import called, write
from tests.support.faults import fault
from tests.support.http_double import Handler, listening
from tests.support.made_runs import request, write_made_run


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


class Terminal(io.StringIO):
    """The keyboard of a user."""

    def isatty(self) -> bool:
        return True


class Printer(Handler):
    """Another program on a port."""

    def do_GET(self) -> None:
        self.answer(200, "<title>Printer</title>", "text/html")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "RETRY_EVERY_S", 0.01)


@pytest.mark.parametrize(
    ("speed", "effort"),
    [
        (RequestSpeed(0.02, 0.01), EFFORTS[0]),
        (RequestSpeed(0.3, 0.05), EFFORTS[2]),
        (RequestSpeed(1.7, 0.2), EFFORTS[3]),  # 5 tok/s
        (RequestSpeed(60.0, 10.0), EFFORTS[3]),
    ],
)
def test_the_work_fits_the_speed(speed: RequestSpeed, effort: Effort) -> None:
    assert choose_effort(speed) == effort


@pytest.mark.parametrize(
    ("changes", "ttft_s", "tpot_s"),
    [
        ({}, 0.5, 0.1),
        ({"output_tokens": None}, 0.5, 0.1),  # a chunk is taken for a token
        ({"output_tokens": 12, "finish": "stop"}, 0.5, 0.1),  # the last one has no text
        ({"output_tokens": 31, "asked_tokens": 31, "text_chars": 124, "first_arrival_chars": 4, "first_words": 1},
         0.5, 1 / 30),  # three tokens in each chunk but the first
        # Their speed is not in the stream: half of the time is taken for the prompt.
        ({"chunks_s": [1.0 + 1e-6 * i for i in range(11)]}, 0.75, 0.75 / 11),
        ({"chunks_s": [0.5, 1.0, 1.5]}, 0.75, 0.75 / 11),
        ({"chunks_s": [], "output_tokens": None}, 0.75, 0.75 / FIRST_TOKENS),
        ({"chunks_s": [1.0], "output_tokens": None}, 0.75, 0.75 / FIRST_TOKENS),
    ],
)  # fmt: skip
def test_the_speed_is_that_of_tokens(changes: dict[str, Any], ttft_s: float, tpot_s: float) -> None:
    values = {"asked_tokens": 12, "fixed_length": False} | changes
    assert speed_of(request(**values)) == pytest.approx((ttft_s, tpot_s, 20))


def test_impossible_counts_of_a_probe_are_missing() -> None:
    class Wrong(Handler):
        def do_POST(self) -> None:
            self.body()
            counts = {"prompt_tokens": 10**400, "completion_tokens": 10**400}
            told = json.dumps({"choices": [{"delta": {"content": "a"}}], "usage": counts})
            self.answer(200, f"data: {told}\n\n", "text/event-stream")

    with listening(Wrong) as url:
        made = probe.time_request(url, {"model": "m", "messages": [], "max_tokens": 12}, None, None, 1.0)
    assert (made.prompt_tokens, made.output_tokens, len(made.chunks_s)) == (None, None, 1)
    assert speed_of(made).prompt_tokens is None and speed_of(made).tpot_s == pytest.approx(made.ended_s / 24)


def test_a_probe_has_the_fields_of_a_record() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 12, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    with listening(double(per_word=5)) as url:
        made = probe.time_request(url, body, None, None, 1.0)
    assert (made.prompt_tokens, made.reasoning_chunks, len(made.chunks_s), made.error) == (10, 1, 2, None)
    assert 0 < made.chunks_s[0] <= made.chunks_s[1] <= made.ended_s
    assert (made.text_chars, made.first_arrival_chars, made.asked_tokens) == (2, 2, 12)


def test_a_slow_server_takes_a_minute_at_most() -> None:
    assert (
        max(len(LEVELS) * one.level_s + one.drain_s for one in EFFORTS) <= 46
    )  # and the start and the end of the load


@pytest.mark.parametrize(
    ("per_word", "words"), [(None, 100), (1, 100), (2, 35), (9, 15), (-1, 100), ("many", 100), (10**320, 100)]
)
def test_a_prompt_has_fewer_words_where_each_has_more_tokens(per_word: Any, words: int) -> None:
    with listening(double(per_word=per_word)) as url:
        assert quick_scenario(Target(url))["prompts"]["tokens"] == words


@pytest.mark.parametrize("template", [0, 20, 60])
@pytest.mark.parametrize("per_word", [1.0, 1.3, 2.3])
def test_a_prompt_has_at_most_128_tokens(template: int, per_word: float) -> None:
    words = choose_words(round(template + per_word * PROMPT_WORDS[0]))
    assert template + per_word * (words + SALT_WORDS) <= MAX_PROMPT_TOKENS


def test_the_next_commands_work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_made_run(tmp_path / "run")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    made = next_commands(run, "http://127.0.0.1:8000", 8.0, {"--model": "two", "--api-key-env": None})
    assert [one.split()[1] for one in made] == ["capacity", "expect", "live", "quick"]
    expect = next(one for one in made if " expect " in one)
    assert expect == "harness expect SIZE --gpu NAME --measured 8"
    others = made.keys() - {expect}
    assert all("http://127.0.0.1:8000 --model two" in one and "--api-key-env" not in one for one in others)
    folder = tmp_path / f"models--{run.scenario.model.replace('/', '--')}" / "snapshots" / "a"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    commands = [one.split()[1] for one in next_commands(run, "http://127.0.0.1:8000", 8.0, {})]
    assert commands == ["capacity", "expect", "quick"]
    elsewhere = [one.split()[1] for one in next_commands(run, "http://192.0.2.1:8000", 8.0, {})]
    assert elsewhere == ["capacity", "expect", "live", "quick"], "the GPU of this machine says nothing about another"
    dead = next_commands(run, "http://127.0.0.1:8000", 8.0, {}, died=True)
    assert list(dead) == ["harness explain LOG"], "nothing can be measured there"


def test_what_is_normal_is_asked_of_the_servers_gpu(tmp_path: Path) -> None:
    run = write_made_run(tmp_path / "run")
    old, known_card = {"target": "gfx906", "name": "ip discovery"}, {"target": "gfx1100", "vram_bytes": 24 << 30}
    box = Machine(name="box", gpus=[old, known_card])
    known = "harness expect SIZE --gpu 'Radeon RX 7900 XTX' --measured 8"

    def asked(run: Run, url: str) -> str:
        return next(command for command in next_commands(run, url, 8.0, {}) if " expect " in command)

    assert asked(replace(run, machine=box), "http://127.0.0.1:8000") == "harness expect SIZE --measured 8"
    assert asked(replace(run, machine=box), "http://192.0.2.1:8000") == "harness expect SIZE --gpu NAME --measured 8"
    remote = RemoteMachine(machine=box, harness="1", offset_s=0.0, error_s=0.01)
    for url in ("http://127.0.0.1:8000", "http://192.0.2.1:8000"):  # the first through a tunnel
        assert asked(replace(run, remote=remote), url) == known


@pytest.mark.parametrize("key", [None, KEY])
def test_the_servers_of_this_machine_are_found(key: str | None) -> None:
    with listening(Printer) as printer, listening(double(key=key)) as url, listening(double()) as other:
        ports = [free_port(), *(port_of(each) for each in (printer, url, other))]
        assert find_servers(ports) == [url, other]


def test_without_a_server_the_error_says_where_it_looked() -> None:
    closed = free_port()
    with listening(Printer) as printer, pytest.raises(ServerError) as caught:
        port = printer.rpartition(":")[2]
        find_servers([closed, int(port)])
    assert caught.value.exit_code == 2
    assert str(closed) in caught.value.what and port in caught.value.what


@fault("input", "`harness quick` without an address finds a server",
       seen="the server and its model, and a question; without a terminal and without `--yes`, exit code 1",
       kept="no request is sent before the user agrees")  # fmt: skip
@pytest.mark.parametrize(
    ("typed", "is_agreed", "agrees"),
    [(None, False, False), ("n\n", False, False), (None, True, True), ("\n", False, True), ("y\n", False, True)],
)
def test_a_server_that_was_found_gets_load_once_the_user_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str | None, is_agreed: bool, agrees: bool
) -> None:
    said, asked = list[str](), list[str]()
    monkeypatch.setattr(sys, "stdin", None if typed is None else Terminal(typed))
    with listening(double(["tiny"], asked=asked)) as url:
        monkeypatch.setattr(quick, "PORTS", (free_port(), port_of(url)))
        if agrees:
            assert found_server(None, None, said.append, is_agreed=is_agreed) == url
            assert said[0] == f"{url}: 'tiny'" and len(said) == (1 if is_agreed else 2)
        else:
            done = called("quick", cwd=tmp_path)
            assert (done.code, list(tmp_path.iterdir())) == (1, [])
            assert (f"{url}: 'tiny'" in done.out + done.err) and ("--yes" in done.err) == (typed is None)
    assert asked == []


@fault("input", "`harness quick` without an address finds several servers", seen="harness quick http://...", code=1,
       kept="nothing, no request was sent")  # fmt: skip
def test_of_several_servers_none_gets_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    with listening(double(["a"], asked=asked)) as url, listening(double(key=KEY, asked=asked)) as other:
        monkeypatch.setattr(quick, "PORTS", (port_of(url), port_of(other)))
        done = called("quick", "--yes", cwd=tmp_path)
    assert (done.code, asked) == (1, [])
    assert f"harness quick {url}\n" in done.err
    assert f"{url}: 'a'" in done.err and f"{other}: {other} wants an API key" in done.err


def test_the_first_chat_model_is_taken_and_its_load_waited_for(tmp_path: Path) -> None:
    asked: list[str] = []
    with listening(double(busy=3, asked=asked)) as url:
        made = quick_scenario(Target(url))
        assert model_of(url) == "Qwen3-8B"
    assert made["model"] == "Qwen3-8B" and set(asked) == {"Qwen3-8B"}
    assert made["loads"]["users"]["output_tokens"] == EFFORTS[0].output_tokens


def test_a_key_is_named_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    with listening(double(key=KEY)) as url:
        with pytest.raises(ServerError):
            quick_scenario(Target(url))
        made = quick_scenario(Target(url), key_name="KEY_OF_TEST")
    assert made["api_key_env"] == "KEY_OF_TEST" and KEY not in json.dumps(made)


def test_a_server_without_a_chat_model_is_refused() -> None:
    with listening(double(LISTED[:2])) as url, pytest.raises(ServerError, match="no chat model"):
        quick_scenario(Target(url))


def test_the_time_of_a_run_follows_from_one_request_to_the_server(tmp_path: Path) -> None:
    with listening(double()) as url:
        target = Target(url)
        experiment = prepare(write(tmp_path), target, "Qwen3-8B")
        speed, startup = probe_server(target, experiment.scenario, print, timed=True)
        shown = preview(experiment, RequestSpeed(1.0, 0.5))
    assert speed is not None and speed.ttft_s > 0 and speed.tpot_s >= 0 and startup is None
    # A wave of warm-up and three bursts of 5 tokens, and the start of the load generator.
    assert shown.estimated_s == pytest.approx(4 * (1.0 + 5 * 0.5) + GENERATOR_START_S)


@pytest.mark.parametrize(
    ("load", "prompts", "seconds"),
    [
        ({}, {"tokens": 100}, 4 * 3.0),
        ({}, {"tokens": 1000}, 4 * 21.0),  # TTFT is in proportion to the prompt
        ({}, {"tokens": 100, "system_tokens": 3000}, 60.0 + 4 * 3.0),  # the shared part once
        ({"user": "agent", "agent": {"steps": 4, "result_tokens": 200}}, {"tokens": 1000}, 7 * 9.0 + 7),  # of 1,600
        ({"user": "rag", "rag": {"document_tokens": 900}}, {"tokens": 100}, 7 * 21.0),
        ({"endpoint": "embeddings", "output": "natural"}, {"tokens": 1000}, 4 * 20.0),
    ],
)
def test_the_estimate_has_the_time_of_long_prompts(
    tmp_path: Path, load: dict[str, Any], prompts: dict[str, Any], seconds: float
) -> None:
    burst = {"user": "batch", "requests": 6, "output_tokens": 10} | load
    burst |= {"batch_size": 2} if burst["user"] == "batch" else {"users": 1}
    path = write(tmp_path, loads={"burst": burst}, prompts=prompts)
    shown = preview(prepare(path, Target("http://127.0.0.1:9")), RequestSpeed(2.0, 0.1))
    assert shown.estimated_s == pytest.approx(seconds + GENERATOR_START_S)


def test_check_says_that_prompts_exceed_the_context_of_a_running_server(tmp_path: Path) -> None:
    loads = {name: {"user": "batch", "requests": 1} for name in ("short", "long")}
    loads["long"]["prompts"] = {"tokens": 32768}
    path = write(tmp_path, loads=loads)
    with listening(double(["tiny"], context=4096)) as url:
        done = called("check", str(path), "--url", url, cwd=tmp_path)
        sweep = {"user": "batch", "requests": 1, "vary": {"prompts.tokens": [8, 32768]}}
        swept = called("check", str(write(tmp_path, "swept", loads={"depth": sweep})), "--url", url, cwd=tmp_path)
        minute = {"short": loads["short"] | {"duration_s": 9}}
        del minute["short"]["requests"]
        timed = called("check", str(write(tmp_path, "timed", loads=minute)), "--duration", "1h", "--json", cwd=tmp_path)
    assert (done.code, swept.code, timed.code) == (2, 0, 0)
    assert "under long: no request fits into the context of 4,096 tokens" in done.err
    assert "estimated time" in done.out and "under short" not in done.out + done.err
    assert "under depth-tokens-32768: no request fits" in swept.out and "depth-tokens-8: no" not in swept.out
    assert json.loads(timed.out)["estimated_s"] > 3600


@fault("server", "`harness check --url` during the measurement of another user", seen="--time-request", code=0,
       kept="that measurement: the server generates nothing unless `--time-request` is given")  # fmt: skip
def test_check_generates_nothing_unless_a_request_is_to_be_timed(tmp_path: Path) -> None:
    asked: list[str] = []
    given = ["check", str(write(tmp_path)), "--model", "Qwen3-8B", "--json"]
    with listening(double(asked=asked, context=4096)) as url:
        dry = called(*given, "--url", url, cwd=tmp_path)
        assert (dry.code, asked) == (0, [])
        timed = called(*given, "--url", url, "--time-request", cwd=tmp_path)
    assert timed.code == 0 and set(asked) == {"Qwen3-8B"}
    without, measured = (json.loads(done.out) for done in (dry, timed))
    assert "--time-request" in without["assumed"] and "as measured" in measured["assumed"]
    assert without["estimated_s"] < 60, "no start of a server is in it"
    assert called(*given, "--time-request", cwd=tmp_path).code == 1


def test_the_models_of_loads_are_named_in_their_order_and_the_server_has_them() -> None:
    shipped = SCENARIOS / "model-switching.yaml"
    scenario = prepare(shipped, Target("http://127.0.0.1:9"), "one,two").scenario
    assert (scenario.model, scenario.loads["alternating"].model) == ("one", ["one"] * 3 + ["two"] * 3)
    with pytest.raises(HarnessError, match=r"--model: the loads name 2 models \(got 1\)"):
        prepare(shipped, model="one")
    with listening(double()) as url:
        experiment = prepare(shipped, Target(url), "Qwen3-8B,absent")
        with pytest.raises(ServerError, match="does not serve 'absent'; it serves"):
            probe_server(Target(url), experiment.scenario, print)


def test_loads_that_take_all_models_in_turns_take_as_many_as_are_given(tmp_path: Path) -> None:
    """Each model has as many requests in a row, in the warm-up too, which loads the third one."""
    shipped = SCENARIOS / "model-switching.yaml"
    scenario = prepare(shipped, Target("http://127.0.0.1:9"), "one,two,three").scenario
    load = scenario.loads["alternating"]
    assert (scenario.model, load.model, load.requests) == ("one", ["one"] * 3 + ["two"] * 3 + ["three"] * 3, 36)
    assert scenario.warmup is not None and scenario.warmup.requests == 9
    assert prepare(shipped, model="one,two,three").scenario.loads == scenario.loads
    with pytest.raises(HarnessError, match=r"--model: the loads name 2 models \(got 3\)"):
        prepare(shipped, model="one,two,one")
    burst = {"user": "batch", "batch_size": 2, "requests": 6}
    apart = {"a": burst | {"model": "x"}, "b": burst | {"model": "y"}}
    uneven = {"a": burst | {"model": ["x", "x", "y"]}}
    for name, loads in {"apart": apart, "uneven": uneven}.items():
        with pytest.raises(HarnessError, match=r"--model: the loads name 2 models \(got 3\)"):
            prepare(write(tmp_path, name, loads=loads), model="one,two,three")


def test_a_model_that_the_server_does_not_have_is_answered_with_those_it_has(tmp_path: Path) -> None:
    class Strict(double()):  # type: ignore[misc]
        def do_POST(self) -> None:
            self.answer(404, '{"error": {"message": "The model `absent` does not exist."}}')

    with listening(Strict) as url, pytest.raises(ServerError, match="does not serve 'absent'; it serves") as caught:
        probe_server(Target(url), prepare(write(tmp_path), Target(url), "absent").scenario, print)
    assert "`--model Qwen3-8B`" in caught.value.next_step


def test_a_run_whose_server_lacks_a_model_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_RETRY_S", 0.0)
    for scenario, given in (("soak", "absent"), ("model-switching", "Qwen3-8B,absent")):
        said = Console(file=io.StringIO())
        with listening(double()) as url, pytest.raises(ServerError, match="does not serve 'absent'; it serves"):
            run(prepare(SCENARIOS / f"{scenario}.yaml", Target(url), given), tmp_path / "runs", Progress(said))
        assert said.file.getvalue() == "" and list(tmp_path.iterdir()) == []  # type: ignore[attr-defined]
