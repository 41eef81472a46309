"""A real Lemonade of Debian sid: as a server of a scenario in a container, or as a process of this machine."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml
from msgspec import Struct

from harness.base.process import free_port
from harness.serve.lemonade import Api, RunningModel, get_health
from tests.support.command import PATIENCE_S
from tests.support.engines.paths import LEMONADE, LEMONADE_IMAGE, QWEN3_4M, TINY_GGUF, VLLM_VENV

# vLLM on the CPU behind Lemonade: one process, and a type that every CPU computes quickly.
VLLM_SERVER = f"""#!/bin/sh
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
export VLLM_ENABLE_V1_MULTIPROCESSING=0
unset PYTHONPATH
exec {VLLM_VENV}/bin/python -m vllm.entrypoints.openai.api_server "$@" --dtype float32
"""
MODELS = {
    "Gguf": {"source": "local_path", "checkpoint": str(TINY_GGUF), "recipe": "llamacpp", "labels": ["chat"]},
    "Other": {"source": "local_path", "checkpoint": str(TINY_GGUF), "recipe": "llamacpp", "labels": ["chat"]},
    "Broken": {"source": "local_path", "checkpoint": "/etc/hostname", "recipe": "llamacpp", "labels": ["chat"]},
    "Tiny": {"source": "local_path", "checkpoint": str(QWEN3_4M), "recipe": "vllm", "labels": ["chat"]},
}
# In sysfs, of a GPU that Lemonade's vLLM supports. It is only seen, never used.
GPU = {
    "kfd/kfd/topology/nodes/1/properties": "gfx_target_version 110501\ndrm_render_minor 128\ncwsr_size 1\n"
    "ctl_stack_size 1\n",
    "drm/renderD128/device/mem_info_vram_total": "68719476736\n",
    "drm/renderD128/device/mem_info_vram_used": "0\n",
    "drm/renderD128/device/mem_info_gtt_total": "68719476736\n",
    "drm/renderD128/device/mem_info_gtt_used": "0\n",
}


def versions() -> dict[str, str]:
    """The versions of Debian's packages that are tested."""
    return dict(line.split() for line in (LEMONADE / "versions").read_text().splitlines())


def container_variables(**variables: Any) -> dict[str, Any]:
    """Variables of the template: llama.cpp of Debian behind Lemonade."""
    given = {
        "image": LEMONADE_IMAGE,
        "checkpoint": "/models/tiny.gguf",
        "recipe": "llamacpp",
        "llamacpp_backend": "system",
        "llamacpp_args": "--parallel 4 --threads 1",
        "ctx_size": 8192,
        "offline": True,
        "no_fetch_executables": True,
        "huggingface_cache": None,
        "devices": [],
        "groups": [],
        "volumes": [f"{TINY_GGUF}:/models/tiny.gguf:ro"],
    }
    return given | variables


class Lemond(Struct, frozen=True):
    """A Lemonade that runs on this machine."""

    url: str
    log: Path

    @property
    def api(self) -> Api:
        return Api(self.url)

    def load(self, model: str, **options: Any) -> RunningModel:
        """Load a model as its owner would, and return it."""
        body = {"model_name": model, **options}
        answer = requests.post(self.url + "/api/v1/load", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text + self.log.read_text()[-3000:]
        return self.running(model)

    def unload(self) -> None:
        requests.post(self.url + "/api/v1/unload", json={}, timeout=PATIENCE_S)

    def running(self, model: str) -> RunningModel:
        health = get_health(self.api)
        found = None if health is None else health.find(model)
        assert found is not None, health
        return found

    def chat(self, model: str, tokens: int = 3, **more: Any) -> requests.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": tokens, **more}
        return requests.post(self.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S)


@contextmanager
def lemond(folder: Path, *, gpu: bool = False, api_key: str | None = None, **defaults: Any) -> Iterator[Lemond]:
    """Run lemond on a free port until the end of the block, with settings and models of its own below `folder`.

    `gpu`: with a GPU in a sysfs that only it sees, and vLLM behind it instead of llama.cpp.
    """
    settings = {
        "auto_check_model_updates": False, "broadcast": False, "ctx_size": 2048, "global_timeout": int(PATIENCE_S),
        "no_fetch_executables": True, "offline": True, **defaults,
    }  # fmt: skip
    (folder / "defaults.json").write_text(json.dumps(settings))
    for name in ("config/lemonade", "cache", "home", "run"):
        (folder / name).mkdir(parents=True, mode=0o700)
    (folder / "config/lemonade/user_models.json").write_text(json.dumps(MODELS))
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_proxy")} | {
        "HOME": str(folder / "home"),
        "LEMONADE_DEFAULTS_PATH": str(folder / "defaults.json"),
        "PATH": f"{LEMONADE}/bin:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_RUNTIME_DIR": str(folder / "run"),
    }
    if api_key is not None:
        environment["LEMONADE_API_KEY"] = api_key
    port = free_port()
    command = [f"{LEMONADE}/bin/lemond", "--host", "127.0.0.1", "--port", str(port), "--no-broadcast"]
    if gpu:
        environment["LEMONADE_VLLM_ROCM_BIN"] = str(folder / "vllm-server")
        show_gpu = f'mount --bind {folder}/class /sys/class && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", show_gpu, "sh", *command]
        _make_gpu(folder)
    log = folder / "lemond.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        server = Lemond(f"http://127.0.0.1:{port}", log)
        deadline = time.monotonic() + PATIENCE_S
        while get_health(Api(server.url, api_key)) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield server
    finally:  # killed with all that it started: asked to end, it first waits until a killed engine has started again
        with suppress(psutil.NoSuchProcess):
            lemonade = psutil.Process(process.pid)
            for one in [*lemonade.children(recursive=True), lemonade]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        with suppress(ProcessLookupError):  # a killed engine leaves processes of its own
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)


def _make_gpu(folder: Path) -> None:
    for name, text in GPU.items():
        (folder / "class" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "class" / name).write_text(text)
    (folder / "vllm-server").write_text(VLLM_SERVER)
    (folder / "vllm-server").chmod(0o755)
    # Without it Lemonade asks the hub for the model's quantization.
    hub = folder / "home/.cache/huggingface/hub" / f"models--{str(QWEN3_4M).replace('/', '--')}" / "snapshots/x"
    hub.mkdir(parents=True)
    (hub / "config.json").write_text('{"quantization_config": {"quant_method": "none"}}')


SCENARIO: dict[str, Any] = {
    "version": 1,
    "question": "How does a Lemonade that already runs answer?",
    "model": "Gguf",
    "servers": {"s": {"template": "lemonade"}},
    "loads": {"four": {"user": "batch", "batch_size": 4, "requests": 12, "output_tokens": 8}},
    "prompts": {"tokens": 20},
    "warmup": {"requests": 1},
    "repeats": 1,
    "restart": False,
}


def write(folder: Path, **keys: Any) -> Path:
    """A scenario of a Lemonade that runs already."""
    path = folder / "attached.yaml"
    path.write_text(yaml.safe_dump(SCENARIO | keys))
    return path
