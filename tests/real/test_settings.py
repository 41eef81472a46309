"""The settings that the product prints, applied: a real server reports that it runs with them."""

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from harness.base.process import free_port
from harness.numbers.summarize import summarize_data
from harness.questions.findings.rules import RowFacts
from harness.records.records import read_requests
from harness.records.run_data import load
from tests.real.conftest import Say
from tests.real.parts import RUN_S, harness, llamacpp, run, run_folder, vllm, write_scenario
from tests.support.command import PATIENCE_S
from tests.support.engines.paths import LEMONADE, QWEN3_4M, TINY_GGUF, VLLM_VENV
from tests.support.faults import fault

LOAD = {"user": "batch", "in_flight": 2, "requests": 6, "output_tokens": 8}
# By setting the value, and what the server's own report then says of it; None: it is in no report but its log.
# The heads of the tiny model are too small for q8_0, which is what is advised.
LLAMACPP: dict[str, tuple[Any, Any]] = {
    "sequences": (4, 4), "context": (16384, 4096), "batched_tokens": (256, None), "batch": (1024, None),
    "kv_type": ("bf16", None), "kv_type_v": ("bf16", None), "flash_attention": ("on", None),
    "prefix_cache": (None, None), "offload": (None, None),
}  # fmt: skip
LLAMACPP_LOG = ["n_ubatch = 256", "n_batch = 1024", "(bf16)", "n_slots = 4", "flash_attn = enabled"]
VLLM: dict[str, tuple[Any, Any]] = {
    "sequences": (5, None), "context": (1024, None), "batched_tokens": (1024, None), "prefix_cache": (None, True),
    "chunked_prefill": (None, None),
}  # fmt: skip
VLLM_LOG = ["'max_num_seqs': 5", "'max_model_len': 1024", "'max_num_batched_tokens': 1024"]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


def row_of(folder: Path | None) -> RowFacts:
    assert folder is not None
    data = load(folder)
    summary = summarize_data(data).summary
    return RowFacts(data, summary, summary.rows[0])


@contextmanager
def served(command: list[str | Path], log: Path) -> Iterator[str]:
    """A server of this machine, started as its owner does, until the end of the block."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    with log.open("wb") as file:
        words = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        deadline, is_ready = time.monotonic() + RUN_S, False
        while not is_ready:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
            try:
                is_ready = requests.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status_code == 200
            except requests.ConnectionError:
                continue
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def attached(folder: Path, url: str, model: str) -> RowFacts:
    folder.mkdir()
    scenario = write_scenario(
        folder, "attached", model=model, servers={"s": {"template": "vllm-cpu"}}, loads={"l": LOAD}
    )
    done = harness("run", scenario, "--url", url, "--runs", folder / "runs")
    assert done.returncode in (0, 3, 5), done.stderr
    return row_of(run_folder(scenario))


@fault("input", "settings of a finding are pasted: llama.cpp and vLLM, started by their owner",
       seen="the server reports each of them", kept="its other settings")  # fmt: skip
@pytest.mark.parametrize("engine", ["llama.cpp", "vLLM"])
def test_arguments_of_a_server_that_its_owner_starts(tmp_path: Path, say: Say, engine: str) -> None:
    if engine == "vLLM":
        start: list[str | Path] = [
            VLLM_VENV / "bin/vllm",
            "serve",
            QWEN3_4M,
            "--served-model-name",
            "first-name",  # answers have this one
            "tiny",
            "--enforce-eager",
        ]
        start += ["--dtype", "float32"]
        first, known, log = ["--max-num-seqs", "2", "--no-enable-prefix-caching"], VLLM, VLLM_LOG
    else:
        start = [LEMONADE / "bin/llama-server", "-m", TINY_GGUF, "--alias", "tiny", "--threads", "1", "--metrics"]
        start += ["--log-verbosity", "4"]
        first, known, log = ["--parallel", "1", "--ctx-size", "4096"], LLAMACPP, LLAMACPP_LOG
    with served([*start, *first], tmp_path / "first.log") as url:
        row = attached(tmp_path / "before", url, "tiny")
    (text,) = row.action("", {name: value for name, (value, _) in known.items()}).settings.values()
    say(text)
    with served([*start, *shlex.split(text)], tmp_path / "second.log") as url:
        row = attached(tmp_path / "after", url, "tiny")
    records = read_requests(row.data.folder / "requests.jsonl")
    assert {record.model for record in records} <= {"first-name", "tiny"}, "both are names of the model"
    assert "other_model" not in [note.code for note in row.summary.notes]
    assert {name: row.setting(name) for name, (_, seen) in known.items() if seen is not None} == {
        name: seen for name, (_, seen) in known.items() if seen is not None
    }
    printed = (tmp_path / "second.log").read_text()
    assert [words for words in log if words not in " ".join(printed.split())] == []


@fault("input", "settings of a finding are pasted: llama.cpp and vLLM, in a scenario",
       seen="the server reports each of them", kept="its other settings")  # fmt: skip
@pytest.mark.parametrize(
    ("server", "changes", "expected"),
    [
        (
            llamacpp(parallel=1, ctx_size=4096),
            {"sequences": 4, "context": 8192, "batch": 1024},
            {"sequences": 4, "context": 2048},
        ),
        (
            vllm(max_num_seqs=2, enable_prefix_caching=False),
            {"sequences": 5, "context": 1024, "batched_tokens": 1024, "prefix_cache": None},
            {"sequences": 5, "context": 1024, "batched_tokens": 1024, "prefix_cache": True},
        ),
    ],
    ids=["llama.cpp", "vLLM"],
)
def test_variables_of_a_scenario(
    tmp_path: Path, say: Say, server: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    known: dict[str, Any] = {"model": "tiny", "loads": {"l": LOAD}}
    ran = run(write_scenario(tmp_path / "before", "s", servers={"s": server}, **known))
    text = row_of(ran.folder).action("", changes).settings["servers.s.variables"]
    say(text)
    changed = server | {"variables": server["variables"] | yaml.safe_load(text)}
    row = row_of(run(write_scenario(tmp_path / "after", "s", servers={"s": changed}, **known)).folder)
    assert {name: row.setting(name) for name in expected} == expected
