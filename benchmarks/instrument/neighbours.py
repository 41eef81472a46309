"""Other load generators, each found as a program: its command for the same work, and its own file of results.

vLLM's file is read by `harness.imports`, the others are read here.
"""

import shutil
import subprocess
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.instrument.client import Client, Failed, Said, Work
from harness.imports.write import read_file
from harness.records.records import Request

PROMPT_TOKENS = 50


class Neighbour(NamedTuple):
    """A tool: the package whose version it is, the program to look for, and how it is run."""

    package: str
    program: str
    run: Callable[[Work, str, Path], Said]  # with its program and a tokenizer's folder


def vllm_bench(work: Work, program: str, tokenizer: Path) -> Said:
    """`vllm bench serve`, which keeps at most `users` requests in flight."""
    _run(
        work,
        [
            program, "bench", "serve", "--backend", "openai-chat", "--base-url", work.server.url,
            "--endpoint", "/v1/chat/completions", "--model", "paced", "--tokenizer", str(tokenizer),
            "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
            "--random-output-len", str(work.server.schedule.chunks), "--num-prompts", str(work.requests),
            "--max-concurrency", str(work.users), "--ignore-eos", "--save-result", "--save-detailed",
            "--result-dir", ".", "--result-filename", "result.json", "--disable-tqdm", "--ready-check-timeout-sec", "0",
        ],
    )  # fmt: skip
    path = _written(work.folder / "result.json")
    return Said(read_file(path)[1].parts[0].records, tried=1)


def aiperf(work: Work, program: str, tokenizer: Path) -> Said:
    work.run(  # not told to be offline, when it would take a tokenizer from the hub's cache only
        [
            program, "profile", "--model", "paced", "--url", work.server.url, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(tokenizer), "--concurrency", str(work.users), "--request-count", str(work.requests),
            "--isl", str(PROMPT_TOKENS), "--osl", str(work.server.schedule.chunks),
            "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--export-level", "records",
            "--output-artifact-dir", "out", "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry",
            "--random-seed", "1",
        ]
    )  # fmt: skip
    return Said(read_aiperf(_written(work.folder / "out" / "profile_export.jsonl")))


def guidellm(work: Work, program: str, tokenizer: Path) -> Said:
    _run(
        work,
        [
            program, "run", "--backend", f"kind=openai_http,target={work.server.url},model=paced",
            "--profile", f"kind=concurrent,streams={work.users}",
            "--constraint", f"kind=max_requests,count={work.requests}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--data",
            f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={work.server.schedule.chunks}",
            "--output", "kind=json,path=result.json", "--disable-console",
        ],
    )  # fmt: skip
    return Said(read_guidellm(_written(work.folder / "result.json")))


def genai_bench(work: Work, program: str, tokenizer: Path) -> Said:
    """It looks each second whether it has sent enough, and so sends some more."""
    _run(
        work,
        [
            program, "benchmark", "--api-backend", "vllm", "--api-base", work.server.url, "--api-key", "none",
            "--task", "text-to-text", "--api-model-name", "paced", "--model", "paced",
            "--model-tokenizer", str(tokenizer), "--num-concurrency", str(work.users),
            "--traffic-scenario", f"D({PROMPT_TOKENS},{work.server.schedule.chunks})", "--max-time-per-run", "3",
            "--max-requests-per-run", str(work.requests), "--warmup-ratio", "0", "--cooldown-ratio", "0",
            "--experiment-base-dir", ".", "--experiment-folder-name", "out",
            "--server-engine", "vLLM", "--server-version", "0", "--server-gpu-type", "MI300", "--server-gpu-count", "1",
        ],
    )  # fmt: skip
    return Said(read_genai_bench(_only(work.folder / "out", "*_num_concurrency_*.json")))


def inference_perf(work: Work, program: str, tokenizer: Path) -> Said:
    config = {
        "api": {"type": "chat", "streaming": True},
        "data": {"type": "mock"},  # a prompt of three words: those of a given length are no chats
        "load": {
            "type": "concurrent",
            "stages": [{"num_requests": work.requests, "concurrency_level": work.users}],
        },
        "server": {"type": "vllm", "model_name": "paced", "base_url": work.server.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
        "storage": {"local_storage": {"path": "out"}},
        "report": {
            "request_lifecycle": {
                "per_request": True,
                "per_request_fields": {"request": False, "response": False, "response_chunks": False},
                "use_server_output_tokens": True,
            }
        },
    }
    (work.folder / "config.yml").write_bytes(msgspec.json.encode(config))  # JSON is YAML
    _run(work, [program, "--config_file", "config.yml"])
    return Said(read_inference_perf(_only(work.folder / "out", "per_request_lifecycle_metrics.json")))


NEIGHBOURS = {
    "vllm": Neighbour("vllm", "vllm", vllm_bench),
    "aiperf": Neighbour("aiperf", "aiperf", aiperf),
    "guidellm": Neighbour("guidellm", "guidellm", guidellm),
    "genai-bench": Neighbour("genai-bench", "genai-bench", genai_bench),
    "inference-perf": Neighbour("inference-perf", "inference-perf", inference_perf),
}


def client_of(name: str, program: str, tokenizer: Path) -> Client:
    run = NEIGHBOURS[name].run
    return lambda work: run(work, program, tokenizer)


def version_of(name: str, program: str) -> str:
    """What the package of a program says, asked of the interpreter that the program names in its first line."""
    with Path(shutil.which(program) or program).open("rb") as file:
        first = file.readline().decode(errors="replace")
    if not first.startswith("#!"):
        return "of unknown version"
    ask = f"import importlib.metadata as m; print(m.version({NEIGHBOURS[name].package!r}))"
    said = subprocess.run([*first[2:].split(), "-c", ask], capture_output=True, text=True)
    return said.stdout.strip() or "of unknown version"


def read_aiperf(path: Path) -> list[Request]:
    """Its requests have a TTFT and the gaps between chunks in ms, and the server's token counts."""
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    lines.sort(key=lambda line: line["metadata"]["request_start_ns"])
    zero = lines[0]["metadata"]["request_start_ns"]
    records = []
    for index, line in enumerate(lines):
        values = {name: metric["value"] for name, metric in line["metrics"].items()}
        gaps = values.get("inter_chunk_latency", [])
        first = values.get("time_to_first_token")
        failed = line.get("error") or first is None
        times = [] if failed else [at / 1e3 for at in accumulate(gaps, initial=first)]
        sent_s = (line["metadata"]["request_start_ns"] - zero) / 1e9
        records.append(_record(index, sent_s, times, values.get("usage_completion_tokens")))
    return records


def read_guidellm(path: Path) -> list[Request]:
    """Its requests have the wall-clock times of the first and the last token."""
    requests = msgspec.json.decode(path.read_bytes())["benchmarks"][0]["requests"]
    sent = [one for one in (*requests["successful"], *requests["errored"]) if one["info"]["timings"]["request_start"]]
    sent.sort(key=lambda one: one["info"]["timings"]["request_start"])
    records = []
    for index, one in enumerate(sent):
        timings = one["info"]["timings"]
        start = timings["request_start"]
        ends = {timings["first_token_iteration"], timings["last_token_iteration"]} - {None}
        times = [at - start for at in sorted(ends)] if one in requests["successful"] else []
        records.append(_record(index, start - sent[0]["info"]["timings"]["request_start"], times, one["output_tokens"]))
    return records


def read_genai_bench(path: Path) -> list[Request]:
    """Its requests have durations and no times of day; they keep the order in which they ended."""
    document = msgspec.json.decode(path.read_bytes())
    scale = {"s": 1.0, "ms": 1e-3}[document.get("_time_unit", "s")]
    return [
        _record(
            index,
            0.0,
            [one["ttft"] * scale, one["e2e_latency"] * scale] if one["error_code"] is None else [],
            one["num_output_tokens"],
        )
        for index, one in enumerate(document["individual_request_metrics"])
    ]


def read_inference_perf(path: Path) -> list[Request]:
    """Its requests have the time of each chunk with content, on one clock."""
    records = []
    for index, one in enumerate(msgspec.json.decode(path.read_bytes())):
        start = one["start_time"]
        told = None if one["error"] else one["info"]["response_metrics"]
        times = [time - start for time in told["output_token_times"]] if told else []
        usage = (told or {}).get("server_usage") or {}
        records.append(_record(index, start, times, usage.get("completion_tokens", len(times))))
    return records


def _record(index: int, sent_s: float, chunks_s: list[float], tokens: int | None) -> Request:
    return Request(
        id=str(index), cell="", load="", user_class="imported", index=index, user=0, process=0, phase="measured",
        sent_s=sent_s, ended_s=chunks_s[-1] if chunks_s else 0.0, chunks_s=chunks_s,
        output_tokens=tokens if chunks_s else None, error=None if chunks_s else "unknown",
    )  # fmt: skip


def _run(work: Work, command: list[str]) -> None:
    work.run(command, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def _written(path: Path) -> Path:
    if not path.exists():
        raise Failed(f"wrote no {path.name}")
    return path


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.rglob(pattern))
    if len(found) != 1:
        raise Failed(f"wrote {len(found)} files {pattern}")
    return found[0]


def small_tokenizer(folder: Path) -> Path:
    """Something that counts words, so that nothing has to be fetched."""
    folder.mkdir()
    words = [f"w{number}" for number in range(1000)]
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 100000}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    return folder
