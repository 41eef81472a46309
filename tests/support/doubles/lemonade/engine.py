"""`vllm-server` and `llama-server` of the double: the embedded engine, told with the flags of the real ones.

python engine.py --as vllm-server|llama-server FLAGS
"""

import argparse
import sys

import msgspec

from harness.simulated import __main__ as simulated
from harness.simulated.server import VERSION, ServerConfig, SimulatedServer

FREE_GIB, TOTAL_GIB = 76.45, 96.0  # of the machine that it pretends to run on
CACHE = (
    b'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
    b'gpu_memory_utilization="0.92",kv_cache_max_concurrency="12.5",kv_cache_size_tokens="51200",'
    b'num_gpu_blocks="3200"} 1.0\n'
)


class VllmServer(SimulatedServer):
    """With the settings of its cache among the metrics, as the real one has them."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        self._routes["GET", "/metrics"] = lambda http: http.answer(200, CACHE + self.metrics.render(), kind)


class LlamaServer(SimulatedServer):
    """With /props in place of what only vLLM has."""

    model_path = ""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        del self._routes["GET", "/version"]
        slot = {"n_ctx": config.engine.max_model_len}
        props = {"default_generation_settings": slot, "total_slots": 4, "model_path": self.model_path,
                 "build_info": f"b0-{VERSION}"}  # fmt: skip
        self._routes["GET", "/props"] = lambda http: http.answer(200, msgspec.json.encode(props))


def main() -> None:
    name = sys.argv[2]
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    for flag in ("--port", "--host", "--served-model-name", "--max-num-seqs", "--max-num-batched-tokens"):
        parser.add_argument(flag)
    for flag in ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--dtype", "--quantization"):
        parser.add_argument(flag)
    parser.add_argument("--model", "-m")
    parser.add_argument("--max-model-len", "--ctx-size", "-c")
    parser.add_argument("-np", "--parallel")
    for flag in ("--jinja", "--metrics"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--enable-prefix-caching", "--enforce-eager"):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=False)
    given = parser.parse_args(sys.argv[3:])
    if given.gpu_memory_utilization and float(given.gpu_memory_utilization) * TOTAL_GIB > FREE_GIB:
        share = float(given.gpu_memory_utilization)
        sys.exit(
            f"ValueError: Free memory on device cuda:0 ({FREE_GIB}/{TOTAL_GIB} GiB) on startup is less than desired "
            f"GPU memory utilization ({share:g}, {share * TOTAL_GIB:.2f} GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes."
        )
    command = ["harness.simulated", "--preset", "instant"]
    command += ["--host", "127.0.0.1", "--port", given.port, "--model", given.served_model_name or "llama"]
    slots = given.parallel or ("4" if name == "llama-server" else None)
    for flag, value in (("--max-num-seqs", given.max_num_seqs or slots), ("--max-model-len", given.max_model_len)):
        command += [flag, value] if value else []
    command += ["--enable-prefix-caching" if given.enable_prefix_caching else "--no-enable-prefix-caching"]
    LlamaServer.model_path = str(given.model)
    vars(simulated)["SimulatedServer"] = LlamaServer if name == "llama-server" else VllmServer
    sys.argv = command
    sys.exit(simulated.main())


if __name__ == "__main__":
    main()
