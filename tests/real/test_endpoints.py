"""Completions, exact prompt lengths, structured answers, and a share of the memory on real engines."""

from pathlib import Path

import pytest

from harness.rundir.manifest import Run
from harness.summary import Row
from tests.real.conftest import Say
from tests.real.parts import Ran, llamacpp, predicted, run, vllm, write_scenario

LIMIT_GIB, SHARE = 8, 0.4
WORK = {"user": "batch", "batch_size": 4, "requests": 12}


def rows(ran: Ran) -> dict[str, Row]:
    return {row.load: row for row in ran.summary.rows}


def exact(folder: Path, model: str, server: dict[str, object]) -> Ran:
    loads = {
        "chat": {**WORK, "output_tokens": {"uniform": [4, 12]}},
        "text": {**WORK, "output_tokens": 8, "endpoint": "completions"},
        "whole": {**WORK, "output_tokens": 8, "endpoint": "completions", "stream": False},
    }
    prompts = {"tokens": {"uniform": [20, 120]}, "tokenizer": "server", "system_tokens": 10}
    return run(write_scenario(folder, "exact", model=model, servers={"it": server}, loads=loads, prompts=prompts))


def labels(folder: Path, model: str, server: dict[str, object], ways: tuple[str, ...]) -> Ran:
    loads = {
        way.replace("_", "-"): {
            **WORK,
            "output": "natural",
            "output_tokens": 48,
            "answer": {"choice": "auto", "send": way},
        }
        for way in ways
    }
    prompts = {"kind": "classification"}
    return run(write_scenario(folder, "labels", model=model, servers={"it": server}, loads=loads, prompts=prompts))


def test_llamacpp_counts_prompts_exactly_and_completes(tmp_path: Path, say: Say) -> None:
    _is_exact(exact(tmp_path, "tiny", llamacpp()), say)


def test_llamacpp_keeps_to_choices(tmp_path: Path, say: Say) -> None:
    _keeps_to(labels(tmp_path, "tiny", llamacpp(), ("response_format", "grammar")), say)


@pytest.mark.timeout(600)
def test_vllm_counts_prompts_exactly_and_completes_in_its_share_of_the_memory(tmp_path: Path, say: Say) -> None:
    memory = {"gpu_memory_utilization": SHARE, "kv_cache_gib": None, "mem_limit": f"{LIMIT_GIB}g"}
    ran = exact(tmp_path, "qwen3-100m", vllm(**memory))
    _is_exact(ran, say)
    _of_share(ran.manifest)


@pytest.mark.timeout(600)
def test_vllm_keeps_to_choices(tmp_path: Path, say: Say) -> None:
    _keeps_to(labels(tmp_path, "qwen3-100m", vllm(), ("response_format", "structured_outputs")), say)


def _is_exact(ran: Ran, say: Say) -> None:
    assert (ran.code, ran.error, ran.summary.reasons) == (0, "", [])
    for name, row in rows(ran).items():
        prompts = row.pooled.prompts
        assert prompts is not None and (prompts.requests, prompts.otherwise) == (12, 0)
        say(f"{name}: every prompt has its planned length and {prompts.added} tokens of the template")
    for record in ran.records:
        assert (record.error, record.output_tokens) == (None, record.asked_tokens)
        assert bool(record.chunks_s) == (record.load != "whole")


def _keeps_to(ran: Ran, say: Say) -> None:
    assert (ran.code, ran.error, ran.summary.reasons) == (0, "", [])
    for name, row in rows(ran).items():
        answers = row.pooled.answers
        assert answers is not None
        say(f"{name}: {answers.valid} of {answers.checked} valid, {answers.right} right (random weights)")
        assert (answers.checked, answers.valid) == (12, 12)


def _of_share(manifest: Run) -> None:
    """vLLM made of the share the KV cache that is predicted."""
    for cell in manifest.cells:
        arguments, startup = cell.served_by.arguments, cell.served_by.startup
        assert arguments[arguments.index("--gpu-memory-utilization") + 1] == str(SHARE)
        assert startup is not None and startup.kv_cache_gib is not None and startup.kv_cache_tokens is not None
        assert 0.5 * SHARE * LIMIT_GIB < startup.kv_cache_gib < SHARE * LIMIT_GIB  # the rest is weights and program
        minimum, maximum = (predicted(startup.kv_cache_gib + off)[0] for off in (-0.005, 0.005))
        assert minimum <= startup.kv_cache_tokens <= maximum
