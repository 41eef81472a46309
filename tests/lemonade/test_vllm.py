"""A real Lemonade that already runs, with a real vLLM behind it: on the CPU, next to a GPU that is only seen."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from harness.base.errors import ServerError
from harness.failures.diagnosis import scan_text
from harness.numbers.summarize import read_summary
from harness.records.manifest import read_run
from harness.records.records import read_requests
from harness.serve.lemonade import LemonadeMonitor
from harness.serve.lifecycle import attach_to_server
from harness.serve.probe import make_token_counter
from tests.lemonade.parts import Lemond, versions, write
from tests.real.conftest import Say
from tests.real.parts import run_folder
from tests.support.command import PATIENCE_S, harness

ARGUMENTS = (
    "--max-num-seqs 8 --kv-cache-memory-bytes 256M --speculative-config.method ngram "
    "--speculative-config.num_speculative_tokens 3 --speculative-config.prompt_lookup_max 3"
)


@pytest.fixture(scope="module")
def loaded(on_vllm: Lemond) -> Iterator[Lemond]:
    on_vllm.load("user.Tiny", vllm_args=ARGUMENTS)
    yield on_vllm


def test_what_runs(loaded: Lemond) -> None:
    endpoint = attach_to_server(loaded.url, "Tiny")
    found = endpoint.started
    assert found.model == "user.Tiny"  # vLLM knows no other name
    # Lemonade lists the version that its release pins; the engine reports its own.
    assert found.version == f"Lemonade {versions()['lemonade-server']}, vllm:rocm 0.32.0"
    assert found.startup is not None
    assert (found.startup.engine, found.startup.kv_cache_tokens is not None) == ("vllm", True)
    assert found.effective["recipe_options"]["vllm_args"] == ARGUMENTS
    assert "--enforce-eager" in found.effective["launch_command"]
    assert make_token_counter(loaded.url, "user.Tiny", None, endpoint.ask_engine)("one two three") > 1
    assert LemonadeMonitor(loaded.api, "Tiny", None).fetch("/version") == ""  # what answers there serves user.Tiny
    assert loaded.chat("Tiny").status_code == 404
    assert "data: [DONE]" not in loaded.chat("Tiny", stream=True).text


def test_a_run_counts_every_token_exactly(loaded: Lemond, tmp_path: Path, say: Say) -> None:
    """It speculates by n-grams, which greedy answers of random weights have: they soon repeat themselves."""
    load = {"user": "batch", "requests": 4, "output_tokens": 32, "vary": {"users": [1, 2]}}
    scenario = write(tmp_path, model="Tiny", loads={"users": load})
    done = harness("run", str(scenario), "--url", loaded.url, "--runs", "runs", cwd=tmp_path)
    say(done.out + done.err)
    assert (done.code, done.err) == (0, "")
    folder = run_folder(scenario)
    assert folder is not None
    summary, records = read_summary(folder), list(read_requests(folder / "requests.jsonl"))
    for cell in read_run(folder).cells:
        assert (cell.served_by.model, cell.problems) == ("user.Tiny", [])
        counted = next(one.server_load for one in summary.cells if one.id == cell.id)
        assert counted.generated_tokens == sum(32 for one in records if one.cell == cell.id and one.output_tokens == 32)
        # A step gives the tokens that were accepted and one more. The first token is not drafted.
        assert counted.drafts and counted.drafted_tokens and counted.accepted_tokens
        assert counted.accepted_tokens <= counted.drafted_tokens <= 3 * counted.drafts
        assert counted.drafts + counted.accepted_tokens < counted.generated_tokens
    drafts, speeds = summary.answers[0].values["parts"]
    assert drafts["share"] > 0.5 and 1.5 < drafts["tokens_per_step"] <= 4
    assert speeds["rates"].keys() == {"1", "2"}


def test_an_engine_that_is_killed_under_load(loaded: Lemond, say: Say) -> None:
    watch = LemonadeMonitor(loaded.api, "user.Tiny", None)
    state, running = watch.state(), loaded.running("user.Tiny")
    assert running.pid is not None
    body = {"model": "user.Tiny", "stream": True, "max_tokens": 1500, "ignore_eos": True,
            "messages": [{"role": "user", "content": "Hello."}]}  # fmt: skip
    start = loaded.log.stat().st_size
    with requests.post(loaded.url + "/v1/chat/completions", json=body, stream=True, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(running.pid, signal.SIGKILL)
        rest = b"\n".join(lines)
    assert b"data: [DONE]" not in rest
    assert [problem.code for problem in watch.problems(state)] in (["backend_lost"], ["backend_reset"])
    cause = scan_text(loaded.log.read_bytes()[start:].decode()).cause()
    say(f"{cause}")
    # Its exit code is in the log only if Lemonade sees its end before the end of the connection.
    assert cause is not None and cause.id == "lemonade.backend_died"


@pytest.mark.nightly  # two starts of vLLM; llama.cpp in a container has the same test
def test_an_unknown_flag_is_named(on_vllm: Lemond) -> None:
    start = on_vllm.log.stat().st_size
    body = {"model_name": "user.Tiny", "vllm_args": "--no-such-flag"}
    answer = requests.post(on_vllm.url + "/api/v1/load", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 500
    cause = scan_text(on_vllm.log.read_bytes()[start:].decode()).cause()
    assert cause is not None and cause.id == "cli.unknown_flag" and "--no-such-flag" in cause.cause


@pytest.mark.nightly  # a start of vLLM for Lemonade's own words
def test_an_argument_that_lemonade_sets_is_refused(on_vllm: Lemond) -> None:
    body = {"model_name": "user.Tiny", "vllm_args": "--enable-prefix-caching"}
    answer = requests.post(on_vllm.url + "/api/v1/load", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 500 and "is managed by Lemonade" in answer.text
    with pytest.raises(ServerError):
        attach_to_server(on_vllm.url, "Absent")
