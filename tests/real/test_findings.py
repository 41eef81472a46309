"""Real llama.cpp and vLLM, set up wrong on purpose: the first finding names what was done to them.

Their weights are random, so that their answers are nonsense, which a report says first: that one is left out here.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.real.conftest import Say
from tests.real.parts import llamacpp, run, vllm, write_scenario

CHATS = {"user": "chat", "users": 1, "requests": 24, "turns": 6, "think_s": [0, 0.1], "output_tokens": 16}


class Wrong(NamedTuple):
    """A server, its load, and the finding."""

    server: dict[str, Any]
    load: dict[str, Any]
    code: str
    prompt_tokens: int = 60


WRONG = {
    "llamacpp-one-slot": Wrong(
        llamacpp(parallel=1, ctx_size=8192),
        {"user": "batch", "in_flight": 6, "requests": 30, "output_tokens": 32},
        "queue_with_room",
    ),
    "vllm-few-sequences": Wrong(
        vllm(max_num_seqs=2),
        {"user": "batch", "in_flight": 8, "requests": 40, "output_tokens": 32},
        "queue_with_room",
    ),
    "vllm-small-cache": Wrong(
        vllm(extra_args=["--num-gpu-blocks-override", "18"]),
        {"user": "batch", "in_flight": 10, "requests": 40, "output_tokens": 200},
        "kv_cache_full",
        400,
    ),
    "vllm-no-prefix-caching": Wrong(
        vllm(enable_prefix_caching=False), CHATS, "prefix_recomputed", 150
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG)
def test_the_first_finding_is_what_was_set_up_wrong(tmp_path: Path, name: str, say: Say) -> None:
    wrong = WRONG[name]
    scenario = write_scenario(
        tmp_path,
        "wrong",
        model="tiny",
        servers={"s": wrong.server},
        loads={"l": wrong.load},
        prompts={"tokens": wrong.prompt_tokens},
        warmup={"requests": 2},
    )
    ran = run(scenario)
    say(ran.said)
    codes = [finding.code for finding in ran.summary.findings or []]
    assert [code for code in codes if code != "nonsense_answers"][:1] == [wrong.code], codes
