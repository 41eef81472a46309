"""`vllm-server` and `llama-server` of the double: the embedded engine, told with the flags of the real ones.

python engine.py --as vllm-server|llama-server FLAGS
"""

import argparse
import os
import sys

FREE_GIB, TOTAL_GIB = 76.45, 96.0  # of the machine that it pretends to run on


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
    command = [sys.executable, "-m", "harness.simulated", "--preset", os.environ.get("DOUBLE_PRESET", "instant")]
    command += ["--host", "127.0.0.1", "--port", given.port, "--model", given.served_model_name or "llama"]
    slots = given.parallel or ("4" if name == "llama-server" else None)
    for flag, value in (("--max-num-seqs", given.max_num_seqs or slots), ("--max-model-len", given.max_model_len)):
        command += [flag, value] if value else []
    command += ["--enable-prefix-caching" if given.enable_prefix_caching else "--no-enable-prefix-caching"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
