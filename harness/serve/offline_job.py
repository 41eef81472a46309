# mypy: disable-error-code="import-not-found"
"""The offline bound: runs inside a container that has vLLM, and knows nothing else of this project.

Reads requests (JSON lines: index, phase, messages, max_tokens, ignore_eos), gives all of a phase to the engine at once,
and writes what came of them. Its own options come first, `--`, then those of vLLM's engine, as `vllm serve` has them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def main() -> None:
    started = {"wall_s": time.time(), "monotonic_s": time.monotonic()}
    ours = argparse.ArgumentParser()
    ours.add_argument("--requests", required=True)
    ours.add_argument("--answers", required=True)
    cut = sys.argv.index("--")
    asked = ours.parse_args(sys.argv[1:cut])
    with open(asked.requests, encoding="utf-8") as file:
        requests = [json.loads(line) for line in file]
    import vllm

    llm = vllm.LLM(**engine_arguments(sys.argv[cut + 1 :]))
    loaded = time.monotonic()
    lines: list[dict[str, Any]] = []
    for phase in ("warmup", "measured"):
        chosen = [request for request in requests if request["phase"] == phase]
        if chosen:
            print(f"[offline] {phase}: {len(chosen)} requests", flush=True)
            lines += answers_of(llm, vllm.SamplingParams, chosen)
    head = {**started, "loaded_s": loaded, "ended_s": time.monotonic(), "version": vllm.__version__}
    with open(asked.answers, "w", encoding="utf-8") as file:
        for line in [head, *lines]:
            file.write(json.dumps(line) + "\n")
    print("[offline] done", flush=True)


def engine_arguments(words: list[str]) -> dict[str, Any]:
    """The keywords of vllm.LLM, read by vLLM's own parser. Statistics are on: they hold each request's times."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.12
        from vllm.utils import FlexibleArgumentParser
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    return {**vars(parsed), "disable_log_stats": False}


def answers_of(llm: Any, parameters: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sampling = [
        parameters(temperature=0, max_tokens=request["max_tokens"], ignore_eos=request["ignore_eos"])
        for request in requests
    ]
    began = time.monotonic()
    outputs = llm.chat([request["messages"] for request in requests], sampling, use_tqdm=False)
    ended = time.monotonic()
    return [answer(request, output, began, ended) for request, output in zip(requests, outputs)]  # noqa: B905


def answer(request: dict[str, Any], output: Any, began: float, ended: float) -> dict[str, Any]:
    """One line. `ended_s` is the request's own where vLLM tells it, on the same clock, else that of all."""
    first = output.outputs[0]
    last = getattr(output.metrics, "last_token_ts", None) if output.metrics is not None else None
    return {
        "index": request["index"],
        "phase": request["phase"],
        "began_s": began,
        "ended_s": last if last is not None and began < last <= ended else ended,
        "prompt_tokens": len(output.prompt_token_ids or []),
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": len(first.token_ids),
        "finish": first.finish_reason,
    }


if __name__ == "__main__":
    main()
