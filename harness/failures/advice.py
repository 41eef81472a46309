"""The cause and the fix of a table row, filled in for one line of a log."""

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

from harness.failures.table import Rule, removed_flags, replacements
from harness.redact import masked
from harness.utilization import safe_from_printed

WORKING_SEQUENCES = 64  # a sampler's warm-up with so many is small beside any model's weights
SMALLEST_CACHE_GIB = 1.0  # where no message says what is needed: with less a server serves hardly anybody
IN_PIECES = (
    "as much was free as was asked for, so the memory is in pieces: set PYTORCH_HIP_ALLOC_CONF="
    "expandable_segments:True in `environment` (PyTorch 2.11 or newer; not where the start hangs with it), or "
)
MOST_CHARS = 300  # of a value that a line says
STEP = 0.05  # of gpu_memory_utilization, where a message has no number to compute from
_ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
_PRINTED = (  # what vLLM prints of memory: for its arguments, in GiB
    re.compile(r"--gpu[-_]memory[-_]utilization[= '\",]+(?P<gpu_memory_utilization>[\d.]+)"),
    re.compile(r"Available KV cache memory: (?P<kv_gib>-?[\d.]+) GiB"),
    re.compile(r"\((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on startup"),
    re.compile(r"total_gpu_memory \((?P<total_gib>[\d.]+) ?GiB\)"),
    re.compile(r"total capacity of (?P<total_gib>[\d.]+) GiB"),
    re.compile(
        r"Initial free memory: (?P<free_gib>[\d.]+) GiB; "
        r"Requested memory: (?P<gpu_memory_utilization>[\d.]+) \(util\), (?P<wanted_gib>[\d.]+) GiB"
    ),
)
SETTINGS = (
    b"non-default args: ", b"--gpu-memory-utilization", b"--gpu_memory_utilization", b"Available KV cache memory: ",
    b" GiB) on startup", b"total_gpu_memory (", b"total capacity of ", b"Requested memory: ",
)  # fmt: skip
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def cause_and_fix(rule: Rule, match: re.Match[str], settings: Mapping[str, Any]) -> tuple[str, str]:
    """Cause and fix of a row for a matching line. `settings`: what the log said before of the server's arguments."""
    said = {name: masked((value or "").strip()) for name, value in match.groupdict().items()}
    shown = {name: value[:MOST_CHARS] for name, value in said.items() if value}
    known = _settings(settings) | _computed(rule, said) | shown
    known |= _fraction(rule, said, settings)
    hopeless = rule.hopeless and (known.get("safe") == "" or known.get("raised") == "")
    return _put_in(rule.cause, known), _put_in(rule.hopeless if hopeless else rule.fix, known)


def settings_in(line: str) -> dict[str, Any]:
    """The arguments that a line of vLLM's or Lemonade's log names, as far as words are made of them."""
    found = _ARGUMENTS.search(line)
    if found is not None:
        try:
            arguments = ast.literal_eval(found[1])
        except (ValueError, SyntaxError):
            return {}
        return arguments if isinstance(arguments, dict) else {}
    made: dict[str, Any] = {}
    for printed in _PRINTED:
        if (given := printed.search(line)) is not None:
            made |= given.groupdict()
    if "wanted_gib" in made and float(made["gpu_memory_utilization"]) > 0:
        made["total_gib"] = f"{float(made['wanted_gib']) / float(made['gpu_memory_utilization']):.2f}"
    return made


def _settings(settings: Mapping[str, Any]) -> dict[str, str]:
    try:
        used = float(settings["gpu_memory_utilization"])
    except (KeyError, TypeError, ValueError):
        return {}
    return {"used": f"{used:g}", "lower": f"{max(0.0, used - STEP):.2f}"}


def _fraction(rule: Rule, said: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """The gpu_memory_utilization that gives the KV cache what it lacks; empty where none does."""
    if rule.id not in ("mem.no_cache_blocks", "mem.kv_lt_one_request"):
        return {}
    try:
        used, total = float(settings["gpu_memory_utilization"]), float(settings["total_gib"])
        have = float(said["have"] if "have" in said else settings["kv_gib"])
        need = float(said.get("need", SMALLEST_CACHE_GIB))
        most = 1.0 if settings.get("free_gib") is None else min(1.0, (float(settings["free_gib"]) - 0.01) / total)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}
    raised = math.ceil((used + (need - have + 0.01) / total) * 100 - 1e-9) / 100  # both are rounded to hundredths
    return {"raised": f"{raised:g}" if raised <= most else "", "lacking": f"{need - have:.2f}"}


def _in_pieces(want: str, free: str) -> bool:
    """Whether as much was free as was asked for."""
    asked, left = (
        float(number) * _UNITS.get(unit, 0) for number, _, unit in (want.partition(" "), free.partition(" "))
    )
    return 0 < asked <= left


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
    if rule.id == "mem.hip_oom" and said.get("want") and said.get("free") and _in_pieces(said["want"], said["free"]):
        made["pieces"] = IN_PIECES
    if {"heads", "size"} <= number.keys():
        heads, size = int(number["heads"]), int(number["size"])
        made["divisor"] = f"{max((n for n in range(1, size) if heads % n == 0), default=1)}"
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


def _put_in(text: str, known: Mapping[str, str]) -> str:
    """`text` with its {names} filled in. What is said of a number that is not known is left out."""

    def without(remark: re.Match[str]) -> str:
        kept = [part for part in remark[0][2:-1].split(", ") if all(known.get(n) for n in _FILLED.findall(part))]
        return f" ({', '.join(kept)})" if kept else ""

    text = _REMARK.sub(without, text)
    text = _FILLED.sub(lambda name: known.get(name[1], ""), text)
    return re.sub(r"  +", " ", text).replace(" :", ":").replace(" ,", ",").strip(" :;,")
