"""What a template sets itself and a scenario sets again behind its back, in `extra_args` or in `environment`.

The last flag on a command line counts, so a server would run with another number than its variable says, or listen
where nobody asks. Lemonade's own protected arguments are in harness.serve.lemonade.arguments.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from harness.serve.vllm.flags import flags_in, printed_dashes

SHORT = {  # of the servers' own parsers, by what they mean
    "vllm": {"-q": "--quantization", "-tp": "--tensor-parallel-size"},
    "llamacpp": {
        "-m": "--model", "-mu": "--model", "--model-url": "--model", "-hf": "--hf-repo", "-hfr": "--hf-repo",
        "-a": "--alias", "-np": "--parallel", "-c": "--ctx-size", "-b": "--batch-size", "-ub": "--ubatch-size",
        "-fa": "--flash-attn", "-ctk": "--cache-type-k", "-ctv": "--cache-type-v", "-ngl": "--n-gpu-layers",
        "--gpu-layers": "--n-gpu-layers", "-s": "--seed", "-cb": "--cont-batching", "-nocb": "--cont-batching",
        "-kvu": "--kv-unified",
    },
}  # fmt: skip
_ADVICE = {
    "--host": "the server listens inside its container only; `publish` is the host's address",
    "--served-model-name": "the scenario's `model` is the name for clients",
    "--alias": "the scenario's `model` is the name for clients",
    "--model": "the scenario's `model` says what is served, and `model_path` what is loaded where that differs",
    "--n-gpu-layers": "set the variable 'gpu_layers'",
}
# Templates whose settings are environment variables; what each is, as a variable of the template.
_SETTINGS = {
    "OLLAMA_HOST": "port",
    "OLLAMA_NUM_PARALLEL": "num_parallel",
    "OLLAMA_CONTEXT_LENGTH": "context_length",
    "OLLAMA_MAX_QUEUE": "max_queue",
    "OLLAMA_KEEP_ALIVE": "keep_alive",
    "OLLAMA_FLASH_ATTENTION": "flash_attention",
    "OLLAMA_KV_CACHE_TYPE": "kv_cache_type",
    "LOCALAI_ADDRESS": "port",
    "LOCALAI_CONTEXT_SIZE": "context_size",
    "LOCALAI_MODELS_PATH": "localai_models",
    "LOCALAI_BACKENDS_PATH": "localai_backends",
    "LLAMACPP_PARALLEL": "parallel",
    "VLLM_CPU_KVCACHE_SPACE": "kv_cache_gib",
    "VLLM_CPU_OMP_THREADS_BIND": "omp_threads",
}


def managed_flags(template: str, extra: Sequence[Any], own: Sequence[str], variables: Iterable[str]) -> list[str]:
    """What of `extra` the template sets itself, each with what to do instead.

    `own`: the command line that the template makes without it. `variables`: those that the template declares.
    """
    names = {f"--{name.replace('_', '-')}": name for name in variables}
    if template == "localai":
        names |= {_as_flag(setting): name for setting, name in _SETTINGS.items() if setting.startswith("LOCALAI_")}
    # An offline job's own options end with `--`, and so do those of others that nobody looks at behind it.
    behind = own[own.index("--") + 1 :] if "--" in own else own
    set_by_it = {_plain(flag) for flag in flags_in(behind)} | names.keys() | ({"--model"} if own else set())
    words = [str(word) for word in extra]
    problems = printed_dashes(words)
    for flag in dict.fromkeys(flags_in(words)):
        found = _meant(flag, template, set_by_it)
        if found is not None:
            said = flag if flag == found else f"{flag} ({found})"
            known = f"set the variable '{names[found]}'" if found in names else "remove it"
            problems.append(f"{said}: the template sets it already; {_ADVICE.get(found, known)}")
    return problems


def managed_settings(environment: Any, variables: Iterable[str]) -> list[str]:
    """The names in a server's `environment` that variables of its template stand for."""
    declared = set(variables)
    return [
        f"{name}: the template sets it already; set the variable '{_SETTINGS[name]}'"
        for name in (environment if isinstance(environment, dict) else ())
        if _SETTINGS.get(name) in declared
    ]


def _meant(flag: str, template: str, known: set[str]) -> str | None:
    """The managed flag that `flag` is: by itself, by its short name, switched off, or cut short as vLLM allows it."""
    vllm = template.startswith("vllm")
    plain = _plain(SHORT["vllm" if vllm else template].get(flag, flag) if vllm or template in SHORT else flag)
    if plain in known:
        return plain
    if not vllm or len(plain) < len("--xxxx"):
        return None
    longer = [name for name in known if name.startswith(plain) and name not in ("--devices", "--models")]
    return longer[0] if len(longer) == 1 else None


def _plain(flag: str) -> str:
    return f"--{flag[5:]}" if flag.startswith("--no-") else flag


def _as_flag(setting: str) -> str:
    return "--" + setting.partition("_")[2].lower().replace("_", "-")
