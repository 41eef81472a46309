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
from harness.errors import Problem
from harness.failures.table import removed_flags, replacements
from harness.scenario import Server
from harness.serve.compose_file import tag_of
from harness.serve.lemonade import PREFIXES, bare_name

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


def version_of(image: str) -> tuple[int, int, int] | None:
    """The version of vLLM that an image's tag names, such as v0.25.0 or ..._vllm_0.23.0; None where it names none."""
    name, _, tag = image.partition("@")[0].rpartition(":")
    _, marked, after = tag.rpartition("vllm_")
    if not marked and "vllm" not in name:
        return None
    match = _VERSION.match(after if marked else tag)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


_ITSELF = "Lemonade sets it itself and refuses it"
OLDEST, OLDEST_VLLM = (11, 0, 0), (11, 5, 0)
_LEMONADE_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_QUOTES = (
    "Lemonade strips quotes, so JSON does not reach vLLM (lemonade-sdk/lemonade#1912); "
    "leave it out, or measure it with the template vllm-rocm"
)


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
    match = _LEMONADE_VERSION.fullmatch(tag_of(image))
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
    return problems + [
        f"{flag}: {removed_flags()[flag].advice}" for flag in dict.fromkeys(flags) if flag in removed_flags()
    ]


def llamacpp_problems(text: str) -> list[str]:
    """What Lemonade would refuse in `llamacpp_args`, each with advice."""
    flags = dict.fromkeys(word.partition("=")[0] for word in text.split() if word.startswith("-"))
    rows = [row for engine in engines() for row in engine.command.protected]
    advice = {flag: row.advice for row in rows for flag in row.flags}
    found = [f"{flag}: {_ITSELF}; {advice[flag]}" for flag in flags if flag in advice]
    return printed_dashes(text.split()) + found
