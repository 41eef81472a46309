"""Run by the Python of the vLLM environment: starts that fail, in one process, so that vLLM is imported once.

`refused_starts.py MODEL CASE...` prints what vLLM says, and a line `== CASE` before each case.
"""

import sys
import traceback
from typing import Any

from vllm import LLM
from vllm.entrypoints.cli.main import main

SETTINGS: dict[str, dict[str, Any]] = {
    "fraction": {"gpu_memory_utilization": 0.99, "max_model_len": 512},
    "kv-cache": {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 4096},
    "context": {"max_model_len": 8192},
}

if __name__ == "__main__":
    model, *cases = sys.argv[1:]
    for case in cases:
        print(f"== {case}", flush=True)
        try:
            if case == "flags":
                sys.argv = ["vllm", "serve", model, "--swap-space", "16", "--disable-log-requests"]
                main()
            elif case == "hub":  # HF_HUB_OFFLINE is set, and there is no cache
                LLM("Qwen/Qwen3-0.6B")
            else:
                LLM(model, dtype="float32", enforce_eager=True, max_num_seqs=4, **SETTINGS[case])
        except SystemExit as end:
            print(f"exit code {end.code}")
        except Exception:
            traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
