"""Real vLLM and real llama.cpp in containers, loaded by the command that a user calls."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.real.parts import Ran, llamacpp, run, vllm, write_scenario
from tests.support.engines.paths import QWEN3_100M

Say = Callable[[str], None]
LIMIT_GIB, SHARE = 8, 0.4  # the memory of vLLM's container, and vLLM's share of it
SEQUENCES = 4  # at once in vLLM: ten at a time must queue
BATCHES = {"one-at-a-time": (1, 3), "four-at-a-time": (4, 8), "ten-at-a-time": (10, 20)}  # size, requests
TOKENS = 16  # of every answer of these
WORK: dict[str, Any] = {"user": "batch", "batch_size": 4, "requests": 12}
CHOICES = ("response_format", "structured_outputs")  # ways to send them


class Timed(NamedTuple):
    """A finished run, and when its command was started (Unix time)."""

    ran: Ran
    began_wall_s: float


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Prints for the reader of the log of a run that passes, too."""

    def print_through(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    return print_through


@pytest.fixture(scope="session")
def on_vllm(tmp_path_factory: pytest.TempPathFactory) -> Timed:
    """One start of vLLM that many tests look at: with a share of the memory, under loads of every form."""
    loads: dict[str, dict[str, Any]] = {
        name: {"user": "batch", "batch_size": size, "requests": requests, "output_tokens": TOKENS}
        for name, (size, requests) in BATCHES.items()
    }
    loads["text"] = {**WORK, "output_tokens": {"uniform": [4, 12]}, "endpoint": "completions"}
    loads["whole"] = {**WORK, "output_tokens": 8, "endpoint": "completions", "stream": False}
    for way in CHOICES:
        answer = {"choice": ["billing", "delivery", "returns"], "send": way}
        loads[way.replace("_", "-")] = {**WORK, "output": "natural", "output_tokens": 48, "answer": answer}
    memory = {"gpu_memory_utilization": SHARE, "kv_cache_gib": None, "mem_limit": f"{LIMIT_GIB}g"}
    scenario = write_scenario(
        tmp_path_factory.mktemp("vllm"),
        "on-vllm",
        question="Does batching pay on this machine's CPU, and what does --max-num-seqs do to it?",
        model="qwen3-100m",
        servers={"vllm": vllm(QWEN3_100M, max_num_seqs=SEQUENCES, **memory)},
        loads=loads,
        prompts={"tokens": {"uniform": [20, 60]}, "tokenizer": "server", "system_tokens": 10},
    )
    began = time.time()
    return Timed(run(scenario), began)


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Timed:
    """One run on llama.cpp with two slots: people in chats, an agent by Anthropic's API, then bursts."""
    scenario = write_scenario(
        tmp_path_factory.mktemp("llamacpp"),
        "chatting",
        model="tiny",
        servers={"llamacpp": llamacpp(parallel=2)},
        loads={
            "chat": {"user": "chat", "users": 3, "requests": 24, "turns": 4, "think_s": [0, 0.1],
                     "output_tokens": 32, "output": "natural"},
            "agent": {"user": "agent", "endpoint": "messages", "requests": 6, "output": "natural", "output_tokens": 16,
                      "agent": {"steps": 3, "tools": 2, "result_tokens": 30, "tool_time": {"mean_s": 0}}},
            "bursts": {"user": "batch", "batch_size": 5, "requests": 60, "output_tokens": 256, "stream": False},
        },
        prompts={"tokens": 40, "system_tokens": 20},
    )  # fmt: skip
    began = time.time()
    return Timed(run(scenario), began)
