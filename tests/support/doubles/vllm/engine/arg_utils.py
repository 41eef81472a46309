"""The engine's options, as far as the template gives them."""

from argparse import ArgumentParser


class EngineArgs:
    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        for name in ("model", "dtype", "max-model-len", "max-num-batched-tokens", "kv-cache-dtype"):
            parser.add_argument(f"--{name}")
        for name in ("seed", "tensor-parallel-size", "max-num-seqs"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--gpu-memory-utilization", type=float)
        for name in ("enable-prefix-caching", "enforce-eager"):
            parser.add_argument(f"--{name}", action="store_true")
            parser.add_argument(f"--no-{name}", action="store_true")
        return parser
