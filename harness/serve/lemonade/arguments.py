"""What Lemonade refuses or spoils in the arguments that it is given for its backends, told before anything starts.

Lemonade takes `vllm_args` apart at spaces, strips quotes, refuses the flags that it sets itself, and appends the rest
to the command line of vllm-server (src/cpp/server/backends/vllm/vllm_arg_resolver.cpp, since v10.9.0).
`hints` returns what is no mistake, but what a scenario should know of Lemonade before it runs.
"""

import re
from collections.abc import Sequence
from typing import Any

from harness.scenario.lengths import most_of, unread
from harness.scenario.scenario import Load, Scenario, Server, at_once
from harness.serve.compose.template import variable_of
from harness.serve.compose.values import tag_of
from harness.serve.lemonade import MOST, PREFIXES, bare_name, pool_size
from harness.serve.vllm.flags import flags_in, printed_dashes, removed_flags, vllm_refuses

_ITSELF = "Lemonade sets it itself and refuses it"
PROTECTED = {
    "--model": f"{_ITSELF}; the model is the scenario's, of the variable checkpoint where there is one",
    "--served-model-name": f"{_ITSELF}; vLLM behind it knows the model as user.NAME, a built-in one as NAME",
    "--host": f"{_ITSELF}; its vLLM listens inside the container only",
    "--port": f"{_ITSELF}; it takes the next free one from 8001",
    "--max-model-len": f"{_ITSELF}; set ctx_size",
    "--enable-prefix-caching": f"{_ITSELF}: prefix caching is always on; --no-enable-prefix-caching turns it off",
}
# llama-server's, by their short names too (llamacpp_server.cpp); checked before llama-server is started.
_LLAMACPP = {
    ("--model", "-m", "--hf-repo", "-hf", "--hf-file", "-mr", "-mf"): "the model is the scenario's, of the checkpoint",
    ("--ctx-size", "-c"): "set ctx_size",
    ("--port",): "it takes the next free one from 8001",
    ("--device", "-dev"): "set llamacpp_backend, or HIP_VISIBLE_DEVICES in environment",
    ("--jinja", "--no-jinja"): "it is on already",
    ("--metrics",): "it is on already",
    ("--mmproj", "-mm", "-mmu", "--mmproj-url", "--no-mmproj", "--mmproj-auto", "--no-mmproj-auto"): "of the model",
    ("--model-draft", "-md", "--spec-draft-model"): "of the model",
    ("--embeddings", "--embedding", "--reranking", "--rerank"): "it belongs to models of that kind",
}
LLAMACPP_PROTECTED = {flag: f"{_ITSELF}; {advice}" for flags, advice in _LLAMACPP.items() for flag in flags}
OLDEST, OLDEST_VLLM = (11, 0, 0), (11, 5, 0)
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_QUOTES = (
    "Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
    "leave it out, or measure it with the template vllm-rocm"
)
MOST_TOKENS = 8192  # a request that asks for more makes Lemonade count its prompt first


def server_problems(server: Server, model: str, path: str) -> list[str]:
    """What is wrong with a server, if its template is `lemonade`; `path` such as $.servers.a."""
    if server.template != "lemonade":
        return []
    given = server.variables
    problems = variable_problems(given, f"{path}.variables")
    problems += image_problems(str(given.get("image") or ""), _is_vllm(given, model), f"{path}.variables.image")
    if given.get("checkpoint") is not None and model.startswith(PREFIXES) and not model.startswith("user."):
        bare = bare_name(model)
        problems.append(
            f"$.model: Lemonade registers a checkpoint as user.NAME only (got '{model}'). Write {bare} or user.{bare}."
        )
    # llama-server answers to any name; vLLM to its own alone.
    named = server.gateway is not None and given.get("checkpoint") is not None and given.get("recipe") != "llamacpp"
    if named and bare_name(model) == model:
        problems.append(
            f"{path}.gateway: it asks for '{model}', and vLLM behind Lemonade knows it as 'user.{model}' only; "
            f"write the scenario's model as user.{model}"
        )
    return problems


def image_problems(image: str, vllm: bool, path: str) -> list[str]:
    """What is wrong with an image whose tag tells its version."""
    match = _VERSION.fullmatch(tag_of(image))
    version = tuple(int(part) for part in match.groups()) if match else OLDEST_VLLM
    if version < OLDEST:
        return [f"{path}: {image} is older than v11.0.0, whose API the harness speaks; take a newer one"]
    if vllm and version < OLDEST_VLLM:
        return [
            f"{path}: {image} is older than v11.5.0, and lacks the compiler that vLLM's Triton calls: vLLM would not "
            "start; take v11.5.0 or newer"
        ]
    return []


def _is_vllm(variables: dict[str, Any], model: str) -> bool:
    given = any(variables.get(name) is not None for name in ("vllm_args", "vllm_backend"))
    return given or variables.get("recipe") == "vllm" or model.endswith("-vLLM")  # as Lemonade calls its own


def variable_problems(variables: dict[str, Any], path: str) -> list[str]:
    """What is wrong with a server's variables beyond their types; `path` such as $.servers.a.variables."""
    problems = []
    recipe, args = variables.get("recipe"), variables.get("vllm_args")
    if isinstance(args, str):
        problems += [f"{path}.vllm_args: {problem}" for problem in vllm_problems(args)]
    if isinstance(own := variables.get("llamacpp_args"), str):
        problems += [f"{path}.llamacpp_args: {problem}" for problem in llamacpp_problems(own)]
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
    if dashes := printed_dashes(words):
        return dashes
    if words and not words[0].startswith("-"):
        return [f"'{words[0]}': a flag that begins with '-' is expected, as in --max-num-seqs 10"]
    flags = flags_in(words)
    problems = [f"{flag}: {PROTECTED[flag]}" for flag in dict.fromkeys(flags) if flag in PROTECTED]
    problems += [f"{flag}: {removed_flags()[flag].advice}" for flag in dict.fromkeys(flags) if flag in removed_flags()]
    return problems + _contradictions(flags) + vllm_refuses(words)


def llamacpp_problems(text: str) -> list[str]:
    """What Lemonade would refuse in `llamacpp_args`, each with advice."""
    flags = [word.partition("=")[0] for word in text.split() if word.startswith("-")]
    return printed_dashes(text.split()) + [
        f"{flag}: {LLAMACPP_PROTECTED[flag]}" for flag in dict.fromkeys(flags) if flag in LLAMACPP_PROTECTED
    ]


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


def hints(scenario: Scenario, threads: int | None) -> list[str]:
    """Sentences for `harness check`; `threads` of the processor that Lemonade will run on, None where not known."""
    servers = {name: server for name, server in scenario.servers.items() if server.template == "lemonade"}
    return [
        hint
        for name, server in servers.items()
        for load_name, load in scenario.loads.items()
        for hint in _hints_of(f"{name} under {load_name}", server, load, threads)
    ]


def _hints_of(where: str, server: Server, load: Load, threads: int | None) -> list[str]:
    found = []
    size = MOST if threads is None else pool_size(threads, tag_of(str(variable_of(server, "image"))))
    if at_once(load) > size:
        found.append(
            f"{where}: {at_once(load):,} requests will be in flight, and Lemonade serves {size} at once"
            f"{' at most' if threads is None else ' on this machine'}: above that its own queue is measured, "
            "not the engine's"
        )
    ctx_size = variable_of(server, "ctx_size")
    most = 0 if load.endpoint == "embeddings" or unread(load.output_tokens) else most_of(load.output_tokens)
    if isinstance(ctx_size, int) and most >= ctx_size:
        found.append(
            f"{where}: answers of {most:,} tokens do not fit into the ctx_size of {ctx_size:,}: every request will fail"
        )
    elif most > MOST_TOKENS:
        found.append(
            f"{where}: for answers of more than {MOST_TOKENS:,} tokens Lemonade has vLLM count each prompt first, "
            "which is measured with it"
        )
    return found
