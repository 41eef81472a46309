"""The command line of a backend, made as Lemonade makes it, with what it refuses in `vllm_args`."""

import re
from typing import Any

PROTECTED = ("--model", "--served-model-name", "--host", "--port", "--max-model-len", "--enable-prefix-caching")


class BadArgument(Exception):
    """What the loading of a model fails with."""


def vllm_arguments(checkpoint: str, served: str, port: int, options: dict[str, Any], family: str) -> list[str]:
    """What follows `vllm-server`; the user's own come last."""
    own = checked(str(options.get("vllm_args") or ""))
    given = {word.split("=")[0] for word in own if word.startswith("--")}
    line = ["--model", checkpoint, "--port", str(port), "--host", "127.0.0.1", "--served-model-name", served]
    consumer = not family.startswith("gfx9")
    if consumer:
        line += ["--enforce-eager"]
    line += ["--max-model-len", str(options["ctx_size"]), "--enable-prefix-caching"]
    if consumer and not given & {"--kv-cache-memory-bytes", "--gpu-memory-utilization"}:
        line += ["--kv-cache-memory-bytes", "4G"]
    return line + own


def llama_arguments(checkpoint: str, port: int, options: dict[str, Any]) -> list[str]:
    own = _words(str(options.get("llamacpp_args") or ""))
    size = str(options["ctx_size"])
    return ["-m", checkpoint, "--ctx-size", size, "--port", str(port), "--jinja", "--metrics", *own]


def checked(text: str) -> list[str]:
    """The words of `vllm_args`. Raises BadArgument in Lemonade's words."""
    words = _words(text)
    flag = False
    for word in words:
        name = word.split("=")[0]
        if name in PROTECTED:
            raise BadArgument(f"vLLM argument '{name}' in vllm_args is managed by Lemonade and cannot be overridden")
        flag = flag or word.startswith("-")
        if not flag:
            raise BadArgument(f"Invalid vLLM argument '{word}' in vllm_args: expected a flag beginning with '-'")
    return words


def _words(text: str) -> list[str]:
    """Split at spaces; quotes are taken off, also those inside of JSON."""
    return [re.sub("[\"']", "", word) for word in re.findall(r"(?:\"[^\"]*\"|'[^']*'|\S)+", text)]
