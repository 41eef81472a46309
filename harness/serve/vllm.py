"""Command lines of `vllm serve`, checked before the start: what vLLM, these GPUs or the container cannot do.

Names are read as vLLM's parser reads them: `_` means `-` in a name, `--flag=value`, `--config.key value`.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from harness.errors import HarnessError
from harness.failures.table import removed_flags as removed_flags
from harness.machine.gfx_support import has_fp8
from harness.machine.gpus import VISIBLE, Card, shown
from harness.serve.compose_file import Service, parse_bytes

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
