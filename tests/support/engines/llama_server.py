# mypy: disable-error-code="import-not-found"
"""llama.cpp's HTTP server from the xllamacpp wheel, started with the options that llama-server takes."""

from __future__ import annotations

import argparse
import signal
import sys

import xllamacpp


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llama-server", description=__doc__)
    parser.add_argument("-m", "--model", required=True, help="path of a GGUF file")
    parser.add_argument("-a", "--alias", default=None, help="the name that /v1/models shows")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-np", "--parallel", type=int, default=1, help="slots: requests served at a time")
    parser.add_argument("-c", "--ctx-size", type=int, default=4096, help="context in tokens, shared by all slots")
    parser.add_argument("-b", "--batch-size", type=int, default=2048, help="most tokens in one step")
    parser.add_argument("-ngl", "--n-gpu-layers", type=int, default=0, help="without effect in the CPU build")
    parser.add_argument("-s", "--seed", type=int, default=None)
    parser.add_argument("-n", "--predict", type=int, default=-1, help="most tokens per answer; -1: no limit")
    parser.add_argument("-t", "--threads", type=int, default=-1)
    parser.add_argument("-md", "--model-draft", default=None, help="path of a GGUF file that drafts")
    parser.add_argument("--metrics", action="store_true", help="serve /metrics")
    return parser.parse_args()


def main() -> None:
    asked = options()
    params = xllamacpp.CommonParams()
    params.model.path = asked.model
    if asked.alias:
        params.model_alias = {asked.alias}
    params.hostnames = [asked.host]
    params.port = asked.port
    params.n_parallel = asked.parallel
    params.n_ctx = asked.ctx_size
    params.n_batch = asked.batch_size
    params.n_gpu_layers = asked.n_gpu_layers
    if asked.seed is not None:
        params.sampling.seed = asked.seed
    params.n_predict = asked.predict
    params.cpuparams.n_threads = asked.threads
    params.endpoint_metrics = asked.metrics
    if asked.model_draft is not None:
        params.speculative.draft.mparams.path = asked.model_draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    # Blocked before the server starts its threads: they inherit the mask, and sigwait below gets the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        sys.exit(f"llama-server: error: {error}")
    print(f"llama-server: listening on {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()
