"""Command lines of vLLM and of the engines behind Lemonade, checked before the start.

Names are read as vLLM's parser reads them: `_` means `-` in a name, `--flag=value`, `--config.key value`. Lemonade
takes `vllm_args` apart at spaces, strips quotes, refuses the flags that it sets itself, and appends the rest to the
command line of vllm-server (src/cpp/server/backends/vllm/vllm_arg_resolver.cpp, since v10.9.0).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from harness.engines import engines
from harness.errors import HarnessError, Problem
from harness.failures.table import removed_flags, replacements
from harness.machine.gpus import VISIBLE, Card, has_fp8, shown
from harness.scenario import Load, Scenario, Server, at_once
from harness.scenario.behaviour import max_of, unread
from harness.serve.compose_file import Service, parse_bytes, tag_of
from harness.serve.lemonade import MAX_THREADS, PREFIXES, bare_name, pool_size
from harness.serve.template import variable_of

_NEGATIVE = re.compile(r"-[\d.]")
_DASHES = re.compile(r"-*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*")  # hyphens as web pages print them
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def removed_in(words: Sequence[str], image: str) -> list[str]:
    """What of a command line the vLLM in an image cannot know, as far as the image's tag tells its version."""
    version = version_of(image)
    gone = [row for flag in flags_in(words) if (row := removed_flags().get(flag)) is not None]
    return [
        f"{row.flag}: {row.advice}"
        for row in gone
        if version is not None and row.gone_in is not None and version >= tuple(map(int, row.gone_in.split(".")))
    ]


def flags_in(words: Sequence[str]) -> list[str]:
    """The names of the options in a command line, as the parser reads them: `--max_num_seqs=4` is `--max-num-seqs`."""
    names = []
    for word in takewhile(lambda word: word != "--", words):
        if word.startswith("--"):
            name = word.partition("=")[0].partition(".")[0]
            names.append("--" + name[2:].replace("_", "-"))
        elif word.startswith("-") and len(word) > 1 and not _NEGATIVE.match(word):
            names.append(word.partition("=")[0].partition(".")[0])
    return names


def printed_dashes(words: Iterable[str]) -> list[str]:
    """Flags that were copied from where two hyphens are shown as one dash, which no parser takes for hyphens."""
    found = [(word, dash) for word in words if (dash := _DASHES.match(word)) is not None]
    return [
        f"'{word}' starts with a printed dash, not with hyphens: type --{word[dash.end() :].partition(' ')[0]}"
        for word, dash in found
    ]


def value_of(words: Sequence[str], *names: str) -> str | None:
    """The value of an option in a command line, as `--name value` or `--name=value`; the last one counts."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else following
    return found


def ranks_of(words: Sequence[str]) -> int:
    """How many GPUs a command line of vLLM asks for."""
    value = value_of(words, "--tensor-parallel-size", "-tp")
    return int(value) if value and value.isdigit() else 1


def vllm_refuses(words: list[str]) -> list[str]:
    """What vLLM would say no to, each with advice; `words` are its command line."""
    seqs = value_of(words, "--max-num-seqs") or ""
    tokens = value_of(words, "--max-num-batched-tokens") or ""
    if seqs.isdigit() and tokens.isdigit() and int(tokens) < int(seqs):
        return [
            f"max_num_batched_tokens is {tokens}, and max_num_seqs {seqs}: vLLM refuses fewer tokens in a step than "
            "requests; raise the one or lower the other"
        ]
    return []


def version_of(image: str) -> tuple[int, int, int] | None:
    """The version of vLLM that an image's tag names, such as v0.25.0 or ..._vllm_0.23.0; None where it names none."""
    name, _, tag = image.partition("@")[0].rpartition(":")
    _, marked, after = tag.rpartition("vllm_")
    if not marked and "vllm" not in name:
        return None
    match = _VERSION.match(after if marked else tag)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


MIN_SHM = 1 << 30  # RCCL and vLLM's own queues; with Docker's 64 MB it dies as the ranks meet
_RENDER_NODE = re.compile(r"/dev/dri/renderD\d+")


def container_problems(service: Service) -> list[str]:
    """What the service's own keys rule out, wherever it is started."""
    ranks = ranks_of(service.command or [])
    if ranks == 1:
        return []
    problems = []
    size = service.shm_size
    if service.ipc != "host" and (size is None or ("$" not in size and parse_bytes(size) < MIN_SHM)):
        has = f"shm_size: {size}" if size else "Docker's 64 MB of /dev/shm"
        problems.append(f"{ranks} GPUs exchange data through /dev/shm, and {has} is too small; set shm_size: 16g")
    nodes = {node for device in service.devices for node in _RENDER_NODE.findall(device)}
    if nodes and not any(device.split(":")[0] == "/dev/dri" for device in service.devices) and len(nodes) < ranks:
        problems.append(f"tensor_parallel_size is {ranks}, and `devices` gives {len(nodes)} GPU to the container")
    for name in VISIBLE:
        visible = service.environment.get(name)
        if visible is not None and "$" not in visible and len(visible.split(",")) < ranks:
            problems.append(f"tensor_parallel_size is {ranks}, and {name} shows {visible or 'none'}")
    return problems


def refuse_unfit(service: Service, cards: Sequence[Card], words: Sequence[str] | None = None) -> None:
    """Raise HarnessError for what the GPUs that the service is given cannot do.

    `cards`: all of this machine; without any, nothing is said, and nothing of a service that is given none. `words`:
    vLLM's arguments, where they are not the service's command.
    """
    words = (service.command or []) if words is None else words
    given = shown_to(service, cards)
    if not given:
        return
    ranks = ranks_of(words)
    if ranks > len(given):
        targets = ", ".join(sorted({str(card["target"]) for card in given}))
        left_out = len(cards) - len(given)
        has = "this machine has" if not left_out else "it is given"
        more = f"; {left_out} more {'is' if left_out == 1 else 'are'} left out" if left_out else ""
        raise HarnessError(
            f"tensor_parallel_size is {ranks}, and {has} {len(given)} AMD GPU{'s' if len(given) > 1 else ''} "
            f"({targets}){more}",
            next_step="Lower tensor_parallel_size.",
        )
    lacking = ", ".join(sorted({str(card["target"]) for card in given[:ranks] if not has_fp8(str(card["target"]))}))
    for flag, names in (("quantization", ("--quantization", "-q")), ("kv_cache_dtype", ("--kv-cache-dtype",))):
        value = value_of(words, *names) or ""
        if "fp8" in value.lower() and lacking:
            raise HarnessError(
                f"{flag} is {value}, and {lacking} has no FP8",
                next_step="FP8 needs CDNA (Instinct) or RDNA 4 (gfx1200, gfx1201); take a model in FP16 or AWQ"
                + (" and kv_cache_dtype: auto." if flag == "kv_cache_dtype" else "."),
            )


def shown_to(service: Service, cards: Sequence[Card]) -> list[Card]:
    """The GPUs that the service is given; none where it has no device of them, or where a variable decides."""
    if not any(device.startswith(("/dev/kfd", "/dev/dri")) for device in service.devices):
        return []
    numbers = [number for name in VISIBLE for number in service.environment.get(name, "0").split(",")]
    if not cards or not all(number.strip().isdigit() for number in numbers):
        return []  # ids of GPUs, or a variable of the shell
    return shown(cards, service.devices, service.environment)


_ITSELF = "Lemonade sets it itself and refuses it"
OLDEST, OLDEST_VLLM = (11, 0, 0), (11, 5, 0)
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_QUOTES = (
    "Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
    "leave it out, or measure it with the template vllm-rocm"
)
MAX_TOKENS = 8192  # a request that asks for more makes Lemonade count its prompt first


def server_problems(server: Server, model: str) -> Iterator[Problem]:
    """What is wrong with a server, if its template is `lemonade`; paths are below the server's, or $.model."""
    if server.template != "lemonade":
        return
    given = server.variables
    for problem in _variable_problems({name: value for name, value in given.items() if value is not None}, model):
        yield problem.below(".variables")
    if given.get("checkpoint") is not None and model.startswith(PREFIXES) and not model.startswith("user."):
        bare = bare_name(model)
        text = f"Lemonade registers a checkpoint as user.NAME only (got '{model}'). Write {bare} or user.{bare}."
        yield Problem("$.model", text)
    # llama-server answers to any name; vLLM to its own alone.
    named = server.gateway is not None and given.get("checkpoint") is not None and given.get("recipe") != "llamacpp"
    if named and bare_name(model) == model:
        yield Problem(
            ".gateway",
            f"it asks for '{model}', and vLLM behind Lemonade knows it as 'user.{model}' only; "
            f"write the scenario's model as user.{model}",
        )


def _variable_problems(given: dict[str, Any], model: str) -> Iterator[Problem]:
    """What is wrong with a server's variables beyond their types. `given`: those that are not null."""
    recipe = given.get("recipe")
    for name, check in (("vllm_args", vllm_problems), ("llamacpp_args", llamacpp_problems)):
        if isinstance(given.get(name), str):
            yield from (Problem(f".{name}", text) for text in check(given[name]))
    for name, of in (("vllm_args", "vllm"), ("llamacpp_args", "llamacpp"), ("llamacpp_backend", "llamacpp")):
        if name in given and recipe is not None and recipe != of:
            yield Problem(f".{name}", f"has no effect with the recipe {recipe}; remove it")
    if {"vllm_args", "llamacpp_args"} <= given.keys() and recipe is None:
        yield Problem(".llamacpp_args", "a model has one recipe; give vllm_args or llamacpp_args, not both")
    if "checkpoint" in given and recipe is None:
        yield Problem(".recipe", "is needed with 'checkpoint': vllm or llamacpp")
    if "checkpoint" not in given and recipe is not None:
        yield Problem(".recipe", "belongs to 'checkpoint'; a model that Lemonade knows has its own; remove it")
    image = str(given.get("image") or "")
    match = _VERSION.fullmatch(tag_of(image))
    version = tuple(int(part) for part in match.groups()) if match else OLDEST_VLLM
    # Names of Lemonade's own models for vLLM end so.
    vllm = not given.keys().isdisjoint(("vllm_args", "vllm_backend")) or recipe == "vllm" or model.endswith("-vLLM")
    if version < OLDEST:
        yield Problem(".image", f"{image} is older than v11.0.0, whose API the harness speaks; take a newer one")
    elif vllm and version < OLDEST_VLLM:
        yield Problem(
            ".image",
            f"{image} is older than v11.5.0, and lacks the compiler that vLLM's Triton calls: vLLM would not start; "
            "take v11.5.0 or newer",
        )


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
    protected = replacements().protected
    problems = [f"{flag}: {_ITSELF}; {protected[flag]}" for flag in dict.fromkeys(flags) if flag in protected]
    problems += [f"{flag}: {removed_flags()[flag].advice}" for flag in dict.fromkeys(flags) if flag in removed_flags()]
    return problems + _contradictions(flags) + vllm_refuses(words)


def llamacpp_problems(text: str) -> list[str]:
    """What Lemonade would refuse in `llamacpp_args`, each with advice."""
    flags = dict.fromkeys(word.partition("=")[0] for word in text.split() if word.startswith("-"))
    rows = [row for engine in engines() for row in engine.command.protected]
    advice = {flag: row.advice for row in rows for flag in row.flags}
    found = [f"{flag}: {_ITSELF}; {advice[flag]}" for flag in flags if flag in advice]
    return printed_dashes(text.split()) + found


def _contradictions(flags: Sequence[str]) -> list[str]:
    problems = [
        f"{flag} and --no-{flag[2:]} contradict each other; keep one"
        for flag in dict.fromkeys(flags)
        if f"--no-{flag[2:]}" in flags and flag not in replacements().protected
    ]
    problems += [f"{flag}: is given twice; keep one" for flag in dict.fromkeys(flags) if flags.count(flag) > 1]
    both = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
    if all(flag in flags for flag in both):
        problems.append(f"{both[0]} has no effect on the KV cache together with {both[1]}; keep one")
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
    size = MAX_THREADS if threads is None else pool_size(threads, tag_of(str(variable_of(server, "image"))))
    if at_once(load) > size:
        found.append(
            f"{where}: {at_once(load):,} requests will be in flight, and Lemonade serves {size} at once"
            f"{' at most' if threads is None else ' on this machine'}: above that its own queue is measured, "
            "not the engine's"
        )
    ctx_size = variable_of(server, "ctx_size")
    answer = 0 if load.endpoint == "embeddings" or unread(load.output_tokens) else max_of(load.output_tokens)
    if isinstance(ctx_size, int) and answer >= ctx_size:
        found.append(
            f"{where}: answers of {answer:,} tokens do not fit into ctx_size ({ctx_size:,}): every request will fail"
        )
    elif answer > MAX_TOKENS:
        found.append(
            f"{where}: for answers of more than {MAX_TOKENS:,} tokens Lemonade has vLLM count each prompt first, "
            "which is measured with it"
        )
    return found
