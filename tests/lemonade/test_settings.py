"""The settings that the product prints for Lemonade, pasted: it runs the model with them at once, and keeps them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.numbers.summarize import summarize_data
from harness.questions.findings.rules import RowFacts
from harness.records.run_data import load
from tests.lemonade.parts import Lemond, write
from tests.real.conftest import Say
from tests.real.parts import run_folder
from tests.support.command import PATIENCE_S, harness
from tests.support.faults import fault

# The heads of the tiny model are too small for q8_0, which is what is advised.
LLAMACPP: dict[str, Any] = {
    "sequences": 4, "context": 8192, "batched_tokens": 256, "batch": 1024, "kv_type": "bf16", "kv_type_v": "bf16",
    "flash_attention": "on", "prefix_cache": None, "offload": None,
}  # fmt: skip
VLLM: dict[str, Any] = {"sequences": 5, "context": 1024, "batched_tokens": 1024, "prefix_cache": None}


def measured(server: Lemond, folder: Path, model: str) -> RowFacts:
    """The only row of a run on the model that is loaded."""
    folder.mkdir()
    scenario = write(folder, model=model)
    done = harness("run", str(scenario), "--url", server.url, "--runs", "runs", cwd=folder)
    found = run_folder(scenario)
    assert found is not None, done.err
    data = load(found)
    summary = summarize_data(data).summary
    return RowFacts(data, summary, summary.rows[0])


def paste(row: RowFacts, changes: dict[str, Any], say: Say) -> None:
    (command,) = row.action("", changes).commands.values()
    say(command)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert '"status":"success"' in done.stdout, done.stdout + done.stderr


@fault("input", "settings of a finding are pasted: Lemonade with llama.cpp",
       seen="the server reports each of them, at once and after an unload", kept="its other settings")  # fmt: skip
@pytest.mark.parametrize("name", ["Gguf", "user.Gguf"])
def test_settings_of_llamacpp(on_llamacpp: Lemond, tmp_path: Path, say: Say, name: str) -> None:
    before = on_llamacpp.load("user.Gguf", llamacpp_args="-np 1 --threads 1", ctx_size=4096)
    paste(measured(on_llamacpp, tmp_path / "before", name), LLAMACPP, say)
    for _ in range(2):  # at once, and after an unload by what it has kept
        now = on_llamacpp.running("user.Gguf")
        props = requests.get(f"http://127.0.0.1:{now.port}/props", timeout=PATIENCE_S).json()
        assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (4, 2048)
        words = " ".join(now.command)
        for expected in (
            "--threads 1", "--parallel 4", "--ubatch-size 256", "--batch-size 1024", "--cache-type-k bf16",
            "--cache-type-v bf16", "--flash-attn on", "--cache-reuse 256", "--n-gpu-layers 999",
        ):  # fmt: skip
            assert expected in words
        assert "-np" not in now.command and now.pid != before.pid
        on_llamacpp.unload()
        on_llamacpp.load(name)
    row = measured(on_llamacpp, tmp_path / "after", name)
    assert (row.setting("sequences"), row.setting("context")) == (4, 2048)
    assert row.action("", LLAMACPP).commands == {}, "they are in use already"
    saved = requests.get(on_llamacpp.url + "/api/v1/models/user.Gguf/options", timeout=PATIENCE_S).json()["saved"]
    assert saved["ctx_size"] == 8192 and "--parallel 4" in saved["llamacpp_args"]
    requests.delete(on_llamacpp.url + "/api/v1/models/user.Gguf/options", timeout=PATIENCE_S)
    on_llamacpp.unload()


@fault("input", "settings of a finding are pasted: Lemonade with vLLM",
       seen="the server reports each of them, at once and after an unload", kept="its other settings")  # fmt: skip
def test_settings_of_vllm(on_vllm: Lemond, tmp_path: Path, say: Say) -> None:
    on_vllm.load("user.Tiny", vllm_args="--max-num-seqs=2 --no-enable-prefix-caching", ctx_size=2048)
    before = on_vllm.running("user.Tiny")
    assert before.get_option("--max-num-seqs") == "2" and "--no-enable-prefix-caching" in before.command
    paste(measured(on_vllm, tmp_path / "before", "user.Tiny"), VLLM, say)
    now = on_vllm.running("user.Tiny")
    assert [now.get_option(flag) for flag in ("--max-num-seqs", "--max-model-len", "--max-num-batched-tokens")] == [
        "5", "1024", "1024"
    ]  # fmt: skip
    assert "--no-enable-prefix-caching" not in now.command
    listed = requests.get(f"http://127.0.0.1:{now.port}/v1/models", timeout=PATIENCE_S).json()
    assert listed["data"][0]["max_model_len"] == 1024, "by its own report"
    metrics = requests.get(f"http://127.0.0.1:{now.port}/metrics", timeout=PATIENCE_S).text
    assert 'enable_prefix_caching="True"' in metrics
    on_vllm.unload()
    kept = on_vllm.load("user.Tiny")
    assert kept.get_option("--max-num-seqs") == "5"
    on_vllm.unload()
