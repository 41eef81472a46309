"""What the tests on real engines share: the servers as a scenario names them, the command as a user calls it."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from harness.base.units import GIB
from harness.hardware.model import compute_capacity, make_layout, read_model
from harness.machine.gpus import choose_cpu_dtype
from harness.numbers.summary import Summary
from harness.records.manifest import Run, read_run
from harness.records.records import Request, read_requests
from tests.support import prefork
from tests.support.command import PATIENCE_S
from tests.support.engines.paths import BASE_IMAGE, LLAMA_SERVER, LLAMACPP_VENV, QWEN3_4M, TINY_GGUF, VLLM_VENV

T = TypeVar("T")
MAX_MODEL_LEN = 2048
RUN_S = 3000.0  # of a start, or of a run; against hanging only
CPU_BLOCK = 128  # tokens, of vLLM on a CPU
DTYPE = choose_cpu_dtype()  # of weights, activations and KV cache, as the template chooses it
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}[DTYPE]


def vllm(model: Path = QWEN3_4M, **variables: Any) -> dict[str, Any]:
    """A server of a scenario: vLLM on the CPU. It takes about 30 s to start, longer on a busy machine.

    A lone answer of the default model arrives as a whole; QWEN3_100M streams like a real one.
    """
    given = {
        "image": BASE_IMAGE,
        "entrypoint": [str(VLLM_VENV / "bin" / "vllm"), "serve"],
        "model_path": f"/models/{model.name}",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 10,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
        "kv_cache_gib": 1,
        "omp_threads": "nobind",  # one thread: two that wait for each other are slow where others use the cores
        "shm_size": "1g",
        "huggingface_cache": None,
        # The last: no process of its own for the worker, as on one GPU; each process imports vLLM for ten seconds.
        "environment": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        "volumes": [f"{VLLM_VENV}:{VLLM_VENV}:ro", f"{model}:/models/{model.name}:ro"],
    }
    return {"template": "vllm-cpu", "variables": given | variables, "startup_timeout_s": RUN_S}


def llamacpp(**variables: Any) -> dict[str, Any]:
    """A server of a scenario: llama.cpp. It starts within a second."""
    given = {
        "image": BASE_IMAGE,
        "entrypoint": [str(LLAMA_SERVER)],
        "model_path": "/models/tiny.gguf",
        "parallel": 10,
        "ctx_size": 20480,
        "gpu_layers": None,
        "devices": [],
        "groups": [],
        "llama_cache": None,
        "shader_cache": None,
        "extra_args": ["--threads", "1"],  # as for vLLM
        "volumes": [f"{LLAMACPP_VENV}:{LLAMACPP_VENV}:ro", f"{TINY_GGUF}:/models/tiny.gguf:ro"],
    }
    return {"template": "llamacpp", "variables": given | variables, "startup_timeout_s": RUN_S}


def predicted(model: Path, gib: float) -> tuple[int, float]:
    """Tokens and concurrency of a KV cache of so many GiB."""
    geometry = read_model(model).geometry
    assert geometry is not None
    capacity = compute_capacity(make_layout(geometry, DTYPE_BYTES, block=CPU_BLOCK), int(gib * GIB), MAX_MODEL_LEN)
    return capacity.tokens, capacity.concurrency


def write_scenario(folder: Path, name: str, **keys: Any) -> Path:
    """A scenario file with one start per server. Made on the spot: the paths of the engines are this machine's."""
    scenario = {
        "version": 1,
        "question": "What do the tests find on a real engine?",
        "prompts": {"tokens": 40},
        "repeats": 1,
        "restart": False,
        "metrics_interval_s": 0.2,
        "checks": ["error_rate == 0"],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(scenario | keys, sort_keys=False), encoding="utf-8")
    return path


class Ran(NamedTuple):
    """A finished `harness run`."""

    code: int
    said: str  # on standard output
    error: str  # on standard error
    folder: Path  # the run directory

    @property
    def records(self) -> list[Request]:
        """Every record; none of them may be damaged."""
        damaged: list[int] = []
        records = list(read_requests(self.folder / "requests.jsonl", damaged))
        assert damaged == []
        return records

    @property
    def manifest(self) -> Run:
        return read_run(self.folder)

    @property
    def summary(self) -> Summary:
        """As `harness run` left it, not derived anew."""
        return msgspec.json.decode((self.folder / "summary.json").read_bytes(), type=Summary)


def harness(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """A command of the harness that ends by itself."""
    return subprocess.run([prefork.SCRIPT, *arguments], capture_output=True, text=True, timeout=RUN_S)


@contextmanager
def running(scenario: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`harness run` as a process; the run directory is made in `runs`, next to the scenario.

    What it says goes into files next to the scenario: no process reads a pipe while it runs. If it still runs at the
    end it gets Ctrl-C, so that a failed test leaves no container behind.
    """
    command: list[str | Path] = [prefork.SCRIPT, "run", scenario, "--runs", scenario.parent / "runs"]
    with scenario.with_suffix(".out").open("wb") as out, scenario.with_suffix(".err").open("wb") as err:
        process = prefork.Popen(command, stdout=out, stderr=err)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(scenario: Path) -> Ran:
    """`harness run` to its end."""
    with running(scenario) as process:
        try:
            process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            said = scenario.with_suffix(".out").read_text()
            raise AssertionError(f"harness run: not over within {RUN_S:g} s; it said:\n{said}") from None
    return outcome(scenario, process.returncode)


def outcome(scenario: Path, code: int) -> Ran:
    """What the run of a scenario said and left."""
    said, error = (scenario.with_suffix(ending).read_text() for ending in (".out", ".err"))
    folder = run_folder(scenario)
    assert folder is not None, error
    return Ran(code, said, error, folder)


def run_folder(scenario: Path) -> Path | None:
    """The directory of a scenario's only run; None while there is none."""
    return next((scenario.parent / "runs").glob(f"*-{scenario.stem}-*"), None)


def left_behind(folder: Path) -> list[str]:
    """Containers, networks and volumes that carry a run's label, as the docker command tells."""
    run_id = folder.name
    label = f"label=amd-llm-load.run={run_id}"
    listings = [
        ["ps", "--all", "--filter", label, "--format", "{{.Names}}"],
        ["network", "ls", "--filter", label, "--format", "{{.Name}}"],
        ["volume", "ls", "--filter", label, "--format", "{{.Name}}"],
    ]
    return [name for listing in listings for name in docker(*listing).split()]


def docker(*arguments: str) -> str:
    """What a command of the docker client prints."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
