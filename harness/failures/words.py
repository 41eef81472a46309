"""The words of a row for one line of a log: what the line says, and what is computed from it."""

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

from harness.failures.removed import removed_flags
from harness.failures.table import Rule, replacements
from harness.fraction import safe_from_printed

WORKING_SEQUENCES = 64  # a sampler's warm-up with so many is small beside any model's weights
STEP = 0.05  # of gpu_memory_utilization, where a message has no number to compute from
_ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
_UTILIZATION = re.compile(r"--gpu[-_]memory[-_]utilization[= '\",]+([\d.]+)")


def in_words(rule: Rule, match: re.Match[str], settings: Mapping[str, Any]) -> tuple[str, str]:
    """Cause and fix of a row for a matching line. `settings`: what the log said before of the server's arguments."""
    said = {name: (value or "").strip() for name, value in match.groupdict().items()}
    known = _settings(settings) | _computed(rule, said) | {name: value for name, value in said.items() if value}
    return _put_in(rule.cause, known), _put_in(rule.fix, known)


def settings_in(line: str) -> dict[str, Any]:
    """The arguments that a line of vLLM's or Lemonade's log names, as far as words are made of them."""
    found = _ARGUMENTS.search(line)
    if found is not None:
        try:
            arguments = ast.literal_eval(found[1])
        except (ValueError, SyntaxError):
            return {}
        return arguments if isinstance(arguments, dict) else {}
    given = _UTILIZATION.search(line)
    return {} if given is None else {"gpu_memory_utilization": given[1]}


def _settings(settings: Mapping[str, Any]) -> dict[str, str]:
    try:
        used = float(settings["gpu_memory_utilization"])
    except (KeyError, TypeError, ValueError):
        return {}
    return {"used": f"{used:g}", "lower": f"{max(0.0, used - STEP):.2f}"}


def _computed(rule: Rule, said: Mapping[str, str]) -> dict[str, str]:
    """What the row asks for and the line does not say."""
    number = {name: float(value) for name, value in said.items() if re.fullmatch(r"-?\d+(?:\.\d+)?", value)}
    made: dict[str, str] = {}
    if {"free", "total", "util"} <= number.keys():
        made["safe"] = f"{safe_from_printed(said['free'], said['total']) or ''}"
    if {"need", "have", "len"} <= number.keys():  # GiB and tokens: a KV cache grows with the length
        made["more"] = f"{max(0.01, math.ceil((number['need'] - number['have']) * 100) / 100):.2f}"
        if number["need"] > 0:  # in blocks of 16 tokens; the printed GiB are rounded
            tokens = number["len"] * max(0.0, number["have"] - 0.005) / (number["need"] + 0.005)
            made["most"] = f"{math.floor(tokens / 16) * 16}"
    if rule.id == "mem.sampler_warmup":
        made["fewer"] = f"{max(1, min(WORKING_SEQUENCES, int(number['seqs']) // 2)):d}"
    if rule.id == "req.context":
        made |= _room(number)
    if "seconds" in number:
        made["longer"] = f"{max(3600, 2 * int(number['seconds'])):d}"
    return made | _instead(said)


def _room(number: Mapping[str, float]) -> dict[str, str]:
    """How long a context this request needs."""
    asked = number.get("asked") or number.get("prompt", 0.0) + number.get("output", 0.0)
    return {"needed": f"{asked:.0f}"} if asked > number.get("limit", 0.0) else {}


def _instead(said: Mapping[str, str]) -> dict[str, str]:
    known = replacements()
    made: dict[str, str] = {}
    if "args" in said:
        flags = dict.fromkeys(re.findall(r"--?[A-Za-z][\w-]*", said["args"].replace("_", "-")))
        removed = removed_flags()
        advice = [f"{flag}: {removed[flag].advice}; " for flag in flags if flag in removed]
        advice += [f"{flag} is no argument: {known.names[flag]}; " for flag in flags if flag in known.names]
        made["gone"] = "".join(advice)
    if "variable" in said:
        instead = known.variables.get(said["variable"])
        made["instead"] = f"; {instead}" if instead else ""
    if "flag" in said:
        instead = known.protected.get(said["flag"].partition("=")[0])
        made["instead"] = f"; {instead}" if instead else ""
    return made


_FILLED = re.compile(r"(?<!\$)\{([a-z]+)\}")
_REMARK = re.compile(r" \([^()]*(?<!\$)\{[a-z]+\}[^()]*\)")
_MOST_CHARS = 300  # of a value


def _put_in(text: str, known: Mapping[str, str]) -> str:
    """`text` with its {names} filled in. What is said of a number that is not known is left out."""

    def without(remark: re.Match[str]) -> str:
        kept = [part for part in remark[0][2:-1].split(", ") if all(known.get(n) for n in _FILLED.findall(part))]
        return f" ({', '.join(kept)})" if kept else ""

    text = _REMARK.sub(without, text)
    text = _FILLED.sub(lambda name: known.get(name[1], "")[:_MOST_CHARS], text)
    return re.sub(r"  +", " ", text).replace(" :", ":").replace(" ,", ",").strip(" :;,")
