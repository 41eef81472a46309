"""Serving against the offline bound of vLLM in one run and one table. llama.cpp serves, which starts in a second."""

from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import Say
from tests.real.parts import DTYPE, RUN_S, left_behind, llamacpp, run, write_scenario
from tests.support.engines.paths import BASE_IMAGE, QWEN3_4M, VLLM_VENV

REQUESTS, TOKENS = 20, 16


def offline(**variables: Any) -> dict[str, Any]:
    given = {
        "image": BASE_IMAGE,
        "python": str(VLLM_VENV / "bin" / "python"),
        "model_path": "/models/qwen3-4m",
        "dtype": DTYPE,
        "max_model_len": 2048,
        "max_num_seqs": 10,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": None,
        "enforce_eager": True,
        "devices": [],
        "groups": [],
        "shm_size": "1g",
        "huggingface_cache": None,
        "triton_cache": None,
        "environment": {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": 1,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: each imports vLLM, which takes ten seconds
        },
        "volumes": [f"{VLLM_VENV}:{VLLM_VENV}:ro", f"{QWEN3_4M}:/models/qwen3-4m:ro"],
    }
    return {"template": "vllm-offline", "variables": given | variables, "startup_timeout_s": RUN_S}


@pytest.mark.nightly  # a start of vLLM; tests/docker/test_offline.py has the job with a double of it
def test_serving_and_the_offline_bound_in_one_table(tmp_path: Path, say: Say) -> None:
    scenario = write_scenario(
        tmp_path,
        "bound",
        question="How near does serving come to the offline bound?",
        model="qwen3-4m",
        servers={"serving": llamacpp(), "offline": offline()},
        loads={"ten": {"user": "batch", "batch_size": 10, "requests": REQUESTS, "output_tokens": TOKENS}},
        prompts={"tokens": 40, "salt": False},  # each cell has other words, and so another number of tokens
    )
    ran = run(scenario)
    say(ran.said)
    assert (ran.code, ran.error) == (0, "")
    by_cell = {
        server: {record.index: record for record in ran.records if record.cell == f"r1-{server}-ten"}
        for server in ("serving", "offline")
    }
    served, bound = by_cell["serving"], by_cell["offline"]
    assert sorted(bound) == sorted(served) == list(range(-10, REQUESTS))
    for index, record in bound.items():
        assert (record.error, record.finish, record.output_tokens) == (None, "length", TOKENS)
        # The same prompts through the same tokenizer and chat template (make_gguf.py).
        assert record.prompt_tokens == served[index].prompt_tokens
        assert (record.chunks_s, record.phase) == ([], "warmup" if index < 0 else "measured")
    ends = {round(record.ended_s, 4) for index, record in bound.items() if index >= 0}
    assert len(ends) > 1  # vLLM tells when each ended: with ten at a time the second ten are later
    rows = {row.server: row for row in ran.summary.rows}
    assert rows["offline"].wall[0] is not None and rows["serving"].wall[0] is not None
    by_id = {cell.id: cell.served_by for cell in ran.manifest.cells}
    by = by_id["r1-offline-ten"]
    assert (by.template, (by.version or "")[:6]) == ("vllm-offline", "0.32.0")
    assert [phase.name for phase in by.phases][:2] == ["pull", "create"]
    assert left_behind(ran.folder) == []
    say(f"{REQUESTS} requests of {TOKENS} tokens: {rows['serving'].wall[0]:.2f} s served ten at a time, "
        f"{rows['offline'].wall[0]:.2f} s offline")  # fmt: skip
