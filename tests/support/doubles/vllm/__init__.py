"""As much of vLLM as the offline job uses, with its names; every answer has the tokens that it was asked for.

`--model broken` raises what a missing model raises, `--model slow` takes a while to load.
"""

import time
from types import SimpleNamespace
from typing import Any

__version__ = "0.32.0"


class SamplingParams:
    def __init__(self, temperature: float, max_tokens: int, ignore_eos: bool) -> None:
        assert temperature == 0
        self.max_tokens = max_tokens
        self.ignore_eos = ignore_eos


class LLM:
    def __init__(self, model: str, max_num_seqs: int, disable_log_stats: bool, **_: Any) -> None:
        assert disable_log_stats is False  # else no request has times
        if model == "broken":
            raise OSError("broken is not a local folder and is not a valid model identifier")
        if model == "slow":
            time.sleep(3)
        self.at_once = max_num_seqs

    def chat(self, prompts: list[Any], sampling: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        """In batches of max_num_seqs; only the times of those before the last batch are told."""
        answers = []
        for first in range(0, len(prompts), self.at_once):
            time.sleep(0.05)
            now = time.monotonic()
            told = SimpleNamespace(last_token_ts=now) if first + self.at_once < len(prompts) else None
            for prompt, asked in list(zip(prompts, sampling, strict=True))[first : first + self.at_once]:
                words = " ".join(message["content"] for message in prompt).split()
                output = SimpleNamespace(token_ids=[1] * asked.max_tokens, finish_reason="length")
                answers.append(
                    SimpleNamespace(prompt_token_ids=words, num_cached_tokens=0, outputs=[output], metrics=told)
                )
        return answers
