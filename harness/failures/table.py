"""The table of known failures and of removed flags. Causes and fixes are filled in from the matching line of a log."""

import ast
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import yaml
from msgspec import Struct

from harness.engines import engines, safe_utilization_from_log
from harness.redact import masked

# Files in the order of preference for one line; within a file the first row that matches decides.
FILES = ("docker", "memory", "gpu", "*", "host", "requests", "arguments", "exits", "engine")  # *: rows of the engines
Phase = Literal["create", "start", "load", "request", "stop"]
Severity = Literal[  # the most specific first
    "cause",  # why it failed
    "signal",  # an exit code that names a signal: a cause in the log says more, an unknown exception less
    "exception",  # an exception that is not in the table
    "wrapper",  # says only that something failed; the reason is elsewhere in the log
    "end",  # any other exit code that says something
    "request",  # of a single request: the server continues
    "warning",  # also seen in healthy starts, so never the cause
]
RANKS: tuple[Severity, ...] = get_args(Severity)


class Rule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row. `cause` and `fix` contain {names}: named groups of `match`, or values that are computed from them."""

    id: str
    phase: Phase
    where: Literal["docker", "log", "http", "exit"]
    severity: Severity = "cause"
    scenario: bool = False  # of a request: the scenario is wrong, so all such requests will be refused
    fetching: bool = False  # of fetching the model: the server has recovered once the model is loaded
    chatter: bool = False  # logged at the level INFO, where other rows would only match quoted user text
    match: list[str | dict[str, str]]  # plain words, or {plain words that each matching line has: regular expression}
    samples: list[str]  # real lines, each explained by this row
    cause: str
    fix: str
    hopeless: str = ""  # the fix if no value of the variable in `fix` is enough
    source: str


class Pattern(Struct, frozen=True):
    """One expression of a row."""

    rule: Rule
    needle: str  # plain words of a matching line; much faster to search for
    regex: re.Pattern[str]


class Replacements(Struct, frozen=True, forbid_unknown_fields=True):
    """gone.yaml: advice for arguments, variables and protected flags that a server does not know."""

    names: dict[str, str]
    variables: dict[str, str]
    protected: dict[str, str]


class RemovedFlag(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of removed_flags.yaml."""

    flag: str
    gone_in: str | None  # the first version without it; None: not known
    instead: str
    source: str

    @property
    def advice(self) -> str:
        since = f" since {self.gone_in}" if self.gone_in else ""
        return f"vLLM does not know it any more{since}: {self.instead} ({self.source})"


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rows."""
    engine_rows = [row for engine in engines() for row in engine.failures]
    rows = [row for name in FILES for row in (engine_rows if name == "*" else _read_yaml(f"table/{name}.yaml"))]
    return tuple(msgspec.convert(rows, list[Rule]))


@cache
def rules_by_id() -> dict[str, Rule]:
    return {rule.id: rule for rule in rules()}


@cache
def patterns() -> tuple[Pattern, ...]:
    """Return all expressions in the order of preference: in "load failed: REASON", the reason explains the line."""

    def compile_bounded(regex: str) -> re.Pattern[str]:
        # An inner `.*` takes quadratic time on a line that repeats the words before it.
        return re.compile(re.sub(r"(?<!\\)\.\*(?!\)?$)", ".{0,1000}", regex))

    return tuple(
        Pattern(rule, needle, compile_bounded(regex))
        for rule in sorted(rules(), key=lambda rule: rule.severity in ("wrapper", "exception"))
        for entry in rule.match
        for needle, regex in ([(entry, re.escape(entry))] if isinstance(entry, str) else entry.items())
    )


@cache
def replacements() -> Replacements:
    return msgspec.convert(_read_yaml("gone.yaml"), Replacements)


@cache
def removed_flags() -> dict[str, RemovedFlag]:
    """Return removed_flags.yaml, by flag."""
    return {row.flag: row for row in msgspec.convert(_read_yaml("removed_flags.yaml"), list[RemovedFlag])}


def _read_yaml(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))


WORKING_SEQUENCES = 64  # with so many, a sampler's warm-up is small compared with any model's weights
MIN_CACHE_GIB = 1.0  # if no message has the needed size: with less, a server runs almost no request
FRAGMENTED_MEMORY = (
    "as much was free as was asked for, so the memory is in pieces: set PYTORCH_HIP_ALLOC_CONF="
    "expandable_segments:True in `environment` (PyTorch 2.11 or newer; not where the start hangs with it), or "
)
MAX_VALUE_CHARS = 300
STEP = 0.05  # of gpu_memory_utilization, if a message has no number to compute from
MAX_NUMBER = 1e15  # a log can print anything
MAX_GPUS = 10_000
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
# Lines of vLLM with its memory settings in GiB: plain words of the line, and an expression.
_MEMORY_SETTINGS = {
    "--gpu-memory-utilization": r"--gpu-memory-utilization[= '\",]+(?P<gpu_memory_utilization>\d+(?:\.\d+)?|\.\d+)",
    "--gpu_memory_utilization": r"--gpu_memory_utilization[= '\",]+(?P<gpu_memory_utilization>\d+(?:\.\d+)?|\.\d+)",
    "Available KV cache memory: ": r"Available KV cache memory: (?P<kv_gib>-?\d+(?:\.\d+)?) GiB",
    " GiB) on startup": r"\((?P<free_gib>\d+(?:\.\d+)?)/(?P<total_gib>\d+(?:\.\d+)?) GiB\) on startup",
    "total_gpu_memory (": r"total_gpu_memory \((?P<total_gib>\d+(?:\.\d+)?) ?GiB\)",
    "total capacity of ": r"total capacity of (?P<total_gib>\d+(?:\.\d+)?) GiB",
    "Requested memory: ": r"Initial free memory: (?P<free_gib>\d+(?:\.\d+)?) GiB; "
    r"Requested memory: (?P<gpu_memory_utilization>\d+(?:\.\d+)?) \(util\), (?P<wanted_gib>\d+(?:\.\d+)?) GiB",
}
SETTING_WORDS = tuple(word.encode() for word in ("non-default args: ", *_MEMORY_SETTINGS))


def parse_settings(line: str) -> dict[str, Any]:
    """Return the server's settings that a line of vLLM's or Lemonade's log contains."""
    if (printed := _ARGUMENTS.search(line)) is not None:
        try:
            arguments = ast.literal_eval(printed[1])
        except (ValueError, SyntaxError):
            return {}
        return arguments if isinstance(arguments, dict) else {}
    settings: dict[str, Any] = {}
    for words, regex in _MEMORY_SETTINGS.items():
        if words in line and (match := re.search(regex, line)) is not None:
            settings |= match.groupdict()
    if "wanted_gib" in settings and (utilization := float(settings["gpu_memory_utilization"])) > 0:
        settings["total_gib"] = f"{float(settings['wanted_gib']) / utilization:.2f}"
    return {name: value for name, value in settings.items() if abs(float(value)) < MAX_NUMBER}


def format_cause_and_fix(rule: Rule, match: re.Match[str], settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the cause and the fix of a row for a matching line. `settings`: those that the log had before."""
    groups = {name: masked((value or "").strip()) for name, value in match.groupdict().items()}
    values = _compute_values(rule, groups) | _find_replacements(groups)
    values |= {name: value[:MAX_VALUE_CHARS] for name, value in groups.items() if value}
    values = _lower_utilization(settings) | values | _raise_utilization(rule, groups, settings)
    is_hopeless = rule.hopeless and "" in (values.get("safe"), values.get("raised"))
    return _fill_placeholders(rule.cause, values), _fill_placeholders(
        rule.hopeless if is_hopeless else rule.fix, values
    )


def _lower_utilization(settings: Mapping[str, Any]) -> dict[str, str]:
    try:
        used = float(settings["gpu_memory_utilization"])
    except (KeyError, TypeError, ValueError):
        return {}
    return {"used": f"{used:g}", "lower": f"{max(0.0, used - STEP):.2f}"}


def _raise_utilization(rule: Rule, groups: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the gpu_memory_utilization that gives the KV cache what it lacks; "" if none does."""
    if rule.id not in ("mem.no_cache_blocks", "mem.kv_lt_one_request"):
        return {}
    try:
        used, total = float(settings["gpu_memory_utilization"]), float(settings["total_gib"])
        have = float(groups["have"] if "have" in groups else settings["kv_gib"])
        need = float(groups.get("need", MIN_CACHE_GIB))
        free = settings.get("free_gib")
        max_utilization = 1.0 if free is None else min(1.0, (float(free) - 0.01) / total)
        raised = math.ceil((used + (need - have + 0.01) / total) * 100 - 1e-9) / 100  # both are rounded to hundredths
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return {}
    return {"raised": f"{raised:g}" if raised <= max_utilization else "", "lacking": f"{need - have:.2f}"}


def _compute_values(rule: Rule, groups: Mapping[str, str]) -> dict[str, str]:
    """Return values of a row's placeholders that are computed from the numbers of the line."""
    number = {name: float(value) for name, value in groups.items() if re.fullmatch(r"-?\d+(?:\.\d+)?", value)}
    number = {name: value for name, value in number.items() if abs(value) < MAX_NUMBER}
    values: dict[str, str] = {}
    if {"free", "total", "util"} <= number.keys():
        values["safe"] = f"{safe_utilization_from_log(groups['free'], groups['total']) or ''}"
    if {"need", "have", "len"} <= number.keys():  # GiB and tokens: a KV cache grows with the length
        values["more"] = f"{max(0.01, math.ceil((number['need'] - number['have']) * 100) / 100):.2f}"
        if number["need"] > 0:  # in blocks of 16 tokens; the printed GiB are rounded
            tokens = number["len"] * max(0.0, number["have"] - 0.005) / (number["need"] + 0.005)
            values["max"] = f"{math.floor(tokens / 16) * 16}"
    if rule.id == "mem.hip_oom" and 0 < _parse_size(groups.get("want", "")) <= _parse_size(groups.get("free", "")):
        values["pieces"] = FRAGMENTED_MEMORY
    if {"heads", "size"} <= number.keys():
        heads, gpu_count = int(number["heads"]), int(number["size"])
        divisors = (count for count in range(1, min(gpu_count, MAX_GPUS)) if heads % count == 0)
        values["divisor"] = f"{max(divisors, default=1)}"
    if rule.id == "mem.sampler_warmup" and "seqs" in number:
        values["fewer"] = f"{max(1, min(WORKING_SEQUENCES, int(number['seqs']) // 2))}"
    if rule.id == "req.context":  # the context that this request needs
        needed = number.get("asked") or number.get("prompt", 0.0) + number.get("output", 0.0)
        if needed > number.get("limit", 0.0):
            values["needed"] = f"{needed:.0f}"
    if "seconds" in number:
        values["longer"] = f"{max(3600, 2 * int(number['seconds']))}"
    return values


def _parse_size(text: str) -> float:
    """Return the bytes of a text such as "1.50 GiB"; 0 without a unit."""
    number, _, unit = text.partition(" ")
    return float(number) * _UNITS[unit] if unit in _UNITS else 0.0


def _find_replacements(groups: Mapping[str, str]) -> dict[str, str]:
    """Return advice for arguments and variables that a server does not know (any more)."""
    known, removed = replacements(), removed_flags()
    values: dict[str, str] = {}
    if "args" in groups:
        flags = dict.fromkeys(re.findall(r"--?[A-Za-z][\w-]*", groups["args"].replace("_", "-")))
        advice = [f"{flag}: {removed[flag].advice}; " for flag in flags if flag in removed]
        advice += [f"{flag} is no argument: {known.names[flag]}; " for flag in flags if flag in known.names]
        values["gone"] = "".join(advice)
    for group, table in (("variable", known.variables), ("flag", known.protected)):
        if group in groups:
            instead = table.get(groups[group].partition("=")[0])
            values["instead"] = f"; {instead}" if instead else ""
    return values


_NAME = re.compile(r"(?<!\$)\{([a-z]+)\}")
_REMARK = re.compile(r" \([^()]*(?<!\$)\{[a-z]+\}[^()]*\)")


def _fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with its {names} filled in, without the parts of a remark in parentheses whose value is unknown."""

    def fill_remark(match: re.Match[str]) -> str:
        parts = match[0][2:-1].split(", ")
        known = [part for part in parts if all(values.get(name) for name in _NAME.findall(part))]
        return f" ({', '.join(known)})" if known else ""

    text = _NAME.sub(lambda name: values.get(name[1], ""), _REMARK.sub(fill_remark, text))
    return re.sub(r"  +", " ", text).replace(" :", ":").replace(" ,", ",").strip(" :;,")
