"""What Lemonade refuses or spoils in the arguments that it is given for its backends, told before anything starts.

Lemonade takes `vllm_args` apart at spaces, strips quotes, refuses the flags that it sets itself, and appends the rest
to the command line of vllm-server (src/cpp/server/backends/vllm/vllm_arg_resolver.cpp, since v10.9.0).
"""

import re
from collections.abc import Sequence
from typing import Any

from harness.scenario import Server
from harness.serve.flags import flags_in, removed_flags
from harness.serve.lemonade.names import bare_name

_ITSELF = "Lemonade sets it itself and refuses it"
PROTECTED = {
    "--model": f"{_ITSELF}; the model is the scenario's, of the variable checkpoint where there is one",
    "--served-model-name": f"{_ITSELF}; vLLM behind it knows the model as user.NAME, a built-in one as NAME",
    "--host": f"{_ITSELF}; its vLLM listens inside the container only",
    "--port": f"{_ITSELF}; it takes the next free one from 8001",
    "--max-model-len": f"{_ITSELF}; set ctx_size",
    "--enable-prefix-caching": f"{_ITSELF}: prefix caching is always on; --no-enable-prefix-caching turns it off",
}
_QUOTES = (
    "Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
    "leave it out, or measure it with the template vllm-rocm"
)
MOST_TOKENS = 8192  # a request that asks for more makes Lemonade count its prompt first


def server_problems(server: Server, model: str, path: str) -> list[str]:
    """What is wrong with a server of the template `lemonade`; `path` such as $.servers.a."""
    problems = variable_problems(server.variables, f"{path}.variables")
    if server.gateway is not None and server.variables.get("checkpoint") is not None and bare_name(model) == model:
        problems.append(
            f"{path}.gateway: it asks for '{model}', and vLLM behind Lemonade knows it as 'user.{model}' only; "
            f"write the scenario's model as user.{model}"
        )
    return problems


def variable_problems(variables: dict[str, Any], path: str) -> list[str]:
    """What is wrong with a server's variables beyond their types; `path` such as $.servers.a.variables."""
    problems = []
    recipe, args = variables.get("recipe"), variables.get("vllm_args")
    if isinstance(args, str):
        problems += [f"{path}.vllm_args: {problem}" for problem in vllm_problems(args)]
    for name, of in (("vllm_args", "vllm"), ("llamacpp_args", "llamacpp"), ("llamacpp_backend", "llamacpp")):
        if variables.get(name) is not None and recipe is not None and recipe != of:
            problems.append(f"{path}.{name}: has no effect with the recipe {recipe}; remove it")
    given = [name for name in ("vllm_args", "llamacpp_args") if variables.get(name) is not None]
    if len(given) == 2 and recipe is None:
        problems.append(f"{path}.llamacpp_args: a model has one recipe; give vllm_args or llamacpp_args, not both")
    if variables.get("checkpoint") is not None and recipe is None:
        problems.append(f"{path}.recipe: is needed with 'checkpoint': vllm or llamacpp")
    if variables.get("checkpoint") is None and recipe is not None:
        problems.append(f"{path}.recipe: belongs to 'checkpoint'; a model that Lemonade knows has its own; remove it")
    return problems


def vllm_problems(text: str) -> list[str]:
    """What Lemonade or vLLM would refuse in `vllm_args`, each with advice."""
    if re.search(r"[\"'{}]", text):
        return [f"{text!r}: {_QUOTES}"]
    words = text.split()
    if words and not words[0].startswith("-"):
        return [f"'{words[0]}': a flag that begins with '-' is expected, as in --max-num-seqs 10"]
    flags = flags_in(words)
    problems = [f"{flag}: {PROTECTED[flag]}" for flag in dict.fromkeys(flags) if flag in PROTECTED]
    problems += [f"{flag}: {removed_flags()[flag].advice}" for flag in dict.fromkeys(flags) if flag in removed_flags()]
    return problems + _contradictions(flags)


def _contradictions(flags: Sequence[str]) -> list[str]:
    problems = [
        f"{flag} and --no-{flag[2:]} contradict each other; keep one"
        for flag in dict.fromkeys(flags)
        if f"--no-{flag[2:]}" in flags and flag not in PROTECTED
    ]
    problems += [f"{flag}: is given twice; keep one" for flag in dict.fromkeys(flags) if flags.count(flag) > 1]
    both = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
    if all(flag in flags for flag in both):
        problems.append(f"{both[0]} has no say over the KV cache beside {both[1]}; keep one")
    return problems
