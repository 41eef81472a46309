# mypy: disable-error-code="import-not-found"
"""The offline job: runs inside a container that has vLLM, and imports nothing else of this project.

Reads requests (JSON lines: index, phase, messages, max_tokens, ignore_eos), gives all of a phase to the engine at once,
and writes their results. Its own options come first, then `--`, then options of vLLM's engine, as for `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def main() -> None:
    started = {"wall_s": time.time(), "monotonic_s": time.monotonic()}
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", required=True)
    parser.add_argument("--answers", required=True)
    separator = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:separator])
    with open(options.requests, encoding="utf-8") as file:
        requests = [json.loads(line) for line in file]
    import vllm

    llm = vllm.LLM(**parse_engine_arguments(sys.argv[separator + 1 :]))
    loaded = time.monotonic()
    lines: list[dict[str, Any]] = []
    for phase in ("warmup", "measured"):
        phase_requests = [request for request in requests if request["phase"] == phase]
        if phase_requests:
            print(f"[offline] {phase}: {len(phase_requests)} requests", flush=True)
            lines += answer_requests(llm, vllm.SamplingParams, phase_requests)
    head = {**started, "loaded_s": loaded, "ended_s": time.monotonic(), "version": vllm.__version__}
    with open(options.answers, "w", encoding="utf-8") as file:
        for line in [head, *lines]:
            file.write(json.dumps(line) + "\n")
    print("[offline] done", flush=True)


def parse_engine_arguments(words: list[str]) -> dict[str, Any]:
    """Return the keywords of vllm.LLM, read by vLLM's own parser, with statistics, which have each request's times."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # of 0.12 and later

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    return {**vars(parsed), "disable_log_stats": False}


def answer_requests(llm: Any, sampling_params: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sampling = [
        sampling_params(temperature=0, max_tokens=request["max_tokens"], ignore_eos=request["ignore_eos"])
        for request in requests
    ]
    began = time.monotonic()
    outputs = llm.chat([request["messages"] for request in requests], sampling, use_tqdm=False)
    ended = time.monotonic()
    return [make_line(request, output, began, ended) for request, output in zip(requests, outputs)]  # noqa: B905


def make_line(request: dict[str, Any], output: Any, began: float, ended: float) -> dict[str, Any]:
    """Return a request's result. `ended_s` is its own end if vLLM reports it on the same clock, else that of all."""
    completion = output.outputs[0]
    last = getattr(output.metrics, "last_token_ts", None) if output.metrics is not None else None
    return {
        "index": request["index"],
        "began_s": began,
        "ended_s": last if last is not None and began < last <= ended else ended,
        "prompt_tokens": len(output.prompt_token_ids or []),
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": len(completion.token_ids),
        "finish": completion.finish_reason,
    }


if __name__ == "__main__":
    main()
