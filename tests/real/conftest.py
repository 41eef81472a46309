"""Real vLLM and real llama.cpp in containers, loaded by the command that a user calls."""

import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.real.parts import Ran, llamacpp, run, vllm, write_scenario

Say = Callable[[str], None]


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
def batching(tmp_path_factory: pytest.TempPathFactory) -> Timed:
    """One run that many tests look at: vLLM with room for ten sequences and for two, each under three loads."""
    loads = {
        name: {"user": "batch", "batch_size": size, "requests": 20, "output_tokens": 16}
        for name, size in (("one-at-a-time", 1), ("five-at-a-time", 5), ("ten-at-a-time", 10))
    }
    scenario = write_scenario(
        tmp_path_factory.mktemp("vllm"),
        "batching",
        question="Does batching pay on this machine's CPU, and what does --max-num-seqs 2 do to it?",
        model="qwen3-100m",
        servers={"seqs-10": vllm(max_num_seqs=10), "seqs-2": vllm(max_num_seqs=2)},
        loads=loads,
    )
    began = time.time()
    return Timed(run(scenario), began)


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Timed:
    """One run on llama.cpp: people in chats, then bursts."""
    scenario = write_scenario(
        tmp_path_factory.mktemp("llamacpp"),
        "chatting",
        model="tiny",
        servers={"llamacpp": llamacpp()},
        loads={
            "chat": {"user": "chat", "users": 3, "requests": 24, "turns": 4, "think_s": [0, 0.1],
                     "output_tokens": 32, "output": "natural"},
            "bursts": {"user": "batch", "batch_size": 5, "requests": 20, "output_tokens": 32, "stream": False},
        },
        prompts={"tokens": 40, "system_tokens": 20},
    )  # fmt: skip
    began = time.time()
    return Timed(run(scenario), began)
