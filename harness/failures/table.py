"""The table of known failures and of removed flags. Causes and fixes are filled in from the matching line of a log."""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from harness.base.command_line import quote
from harness.base.files import read_table
from harness.base.redact import masked
from harness.engines import engines, safe_utilization_from_log
from harness.engines.flags import flag_name, flags_in_text
from harness.engines.settings import protected_flags

_FOLDER = Path(__file__).parent
# Files in the order of preference for one line; within a file the first row that matches decides.
# *: rows of the engines. `kernel` comes before `gpu`: its lines name the GPU's fault exactly.
FILES = ("docker", "memory", "kernel", "gpu", "*", "host", "requests", "arguments", "exits", "engine")
Phase = Literal["create", "start", "load", "request", "stop"]
Severity = Literal[  # the most specific first
    "cause",  # why it failed
    "signal",  # an exit code that names a signal: a cause in the log says more, an unknown exception less
    "crash",  # a process crashed: its signal, or an error that it logged before, says more
    "exception",  # an exception that is not in the table
    "wrapper",  # says only that something failed; the reason is elsewhere in the log
    "end",  # any other exit code that says something
    "request",  # of a single request: the server continues
    "warning",  # also seen in healthy starts, so never the cause
]
RANKS: tuple[Severity, ...] = get_args(Severity)


class Rule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row. `cause` and `fix` contain {names}: named groups of `match` and `next`, or values computed from them."""

    id: str
    phase: Phase
    where: Literal["docker", "log", "http", "exit"]
    severity: Severity = "cause"
    scenario: bool = False  # of a request: the scenario is wrong, so all such requests will be refused
    servers_only: bool = False  # of a process {name}: one that is no server's is a warning, such as a browser
    fetching: bool = False  # of fetching the model: the server has recovered once the model is loaded
    gpu_access: bool = False  # a server that became ready without a GPU has not recovered from it
    effect_of: list[str] = []  # rows: after a line of one of these it only follows from that
    chatter: bool = False  # logged at the level INFO, where other rows would only match quoted user text
    match: list[str | dict[str, str]]  # plain words, or {plain words that each matching line has: regular expression}
    next: str | None = None  # a regular expression for one of the next lines, which has more groups
    min_count: int = 1  # fewer such lines are no finding
    samples: list[str]  # real lines, each explained by this row
    cause: str
    fix: str | dict[str, str]  # by the name of the server that wrote the log; `any`: of every other log
    source: str

    @property
    def fixes(self) -> dict[str, str]:
        """Return the fixes by server; `any` is always one of them."""
        return self.fix if isinstance(self.fix, dict) else {"any": self.fix}


# Names of processes, threads, libraries, units and groups that may be a server's; the kernel cuts them to 15 letters.
_SERVER_NAME = re.compile(
    r"(?i)python|^pt_|vllm|enginecor|llama|lemon|\blemond|sglang|litellm|local-?ai|^ray\b|raylet|ray::|kobold|tabby|"
    r"triton|text-generation|\btgi|lmdeploy|mlc_|mistralrs|uvicorn|gunicorn|granian|hypercorn|aphrodite|"
    r"lms?[- _]?studio|\brunner|worker|router|^server$|^main$|^thread|rocm|hip|hsa-runtime|rocblas|rccl|ggml|torch|"
    r"clinfo|vulkaninfo|amd-smi|docker|containerd|libpod|crio|kubepods|^conmon|vte-spawn|^harness$|^locust$"
)
# Names that users give to the systemd units of their servers: of models and of what they do.
_SERVER_UNIT = re.compile(
    r"(?i)\bai\b|\bai[-_]|[-_]ai\b|llm|inference|\bserve|model|chat|\bgpt|embed|rerank|openai|qwen|gemma|mistral|mixtral|"
    r"\bphi|deepseek|\bglm|kimi|granite|minimax|nemotron|whisper|comfy|gguf|\bgpu|^(?:session-|run-|tmux-)"
)
_DESKTOP_UNIT = re.compile(
    r"(?i)gnome|kde|plasma|kwin|xdg|gdm|sddm|lightdm|display-manager|pipewire|wireplumber|pulse|dbus|app-|user@|systemd-"
)


def is_server_name(name: str) -> bool:
    """Check whether a process, library or systemd unit may be a server's."""
    if _SERVER_NAME.search(name) is not None:
        return True
    is_unit = name.endswith((".service", ".scope")) and _DESKTOP_UNIT.search(name) is None
    return is_unit and _SERVER_UNIT.search(name) is not None


class Pattern(Struct, frozen=True):
    """One expression of a row."""

    rule: Rule
    needle: str  # plain words of a matching line; much faster to search for
    regex: re.Pattern[str]


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
    rows = list[Rule]()
    for name in FILES:
        path = _FOLDER / "table" / f"{name}.yaml"
        rows += msgspec.convert(engine_rows, list[Rule]) if name == "*" else read_table(path, list[Rule])
    return tuple(rows)


@cache
def rules_by_id() -> dict[str, Rule]:
    return {rule.id: rule for rule in rules()}


@cache
def patterns() -> tuple[Pattern, ...]:
    """Return all expressions in the order of preference: in "load failed: REASON", the reason explains the line."""

    return tuple(
        Pattern(rule, needle, _compile_bounded(regex))
        for rule in sorted(rules(), key=lambda rule: rule.severity in ("wrapper", "exception"))
        for entry in rule.match
        for needle, regex in ([(entry, re.escape(entry))] if isinstance(entry, str) else entry.items())
    )


@cache
def next_line_regex(rule_id: str) -> re.Pattern[str] | None:
    """Return the expression for the lines after a line of this row."""
    text = rules_by_id()[rule_id].next
    return None if text is None else _compile_bounded(text)


_REPEATED = re.compile(r"(\\.|\[\^?(?:\\.|[^\]\\])+\]|.)([*+]?)")
_MAX_REPEATS = {" ": 100, "\\": 100, "[": 400, ".": 1000}  # by the first character of what is repeated


def _compile_bounded(regex: str) -> re.Pattern[str]:
    """Compile a regular expression whose repeated characters are bounded, but for those at its end.

    An inner `.*`, or a `\\w+` at the start, takes quadratic time on a line that repeats the words before it.
    """

    def bound(match: re.Match[str]) -> str:
        what, repeated = match.groups()
        is_last = re.fullmatch(r"[?)$]*", regex[match.end() :]) is not None
        if not repeated or what[0] not in _MAX_REPEATS or is_last:
            return match[0]
        return f"{what}{{{int(repeated == '+')},{_MAX_REPEATS[what[0]]}}}"

    return re.compile(_REPEATED.sub(bound, regex))


@cache
def removed_variables() -> dict[str, str]:
    """Return removed_variables.yaml: environment variables that vLLM no longer knows, each with what to do instead."""
    return read_table(_FOLDER / "removed_variables.yaml", dict[str, str])


@cache
def removed_flags() -> dict[str, RemovedFlag]:
    """Return removed_flags.yaml, by flag."""
    return {row.flag: row for row in read_table(_FOLDER / "removed_flags.yaml", list[RemovedFlag])}


MAX_VALUE_CHARS = 300
MAX_NUMBER = 1e15  # a log can print anything


def format_cause_and_fix(rule: Rule, captures: Mapping[str, str | None], server: str | None = None) -> tuple[str, str]:
    """Return the cause and the fix of a row for the groups of a matching line. `server`: the name of its engine."""
    groups = {name: masked((value or "").strip().replace('\\"', '"')) for name, value in captures.items()}
    values = _compute_values(groups) | _find_replacements(groups)
    values |= {name: value[:MAX_VALUE_CHARS] for name, value in groups.items() if value}
    fix = rule.fixes.get(server or "any") or rule.fixes["any"]
    return _fill_placeholders(rule.cause, values), _fill_placeholders(fix, values)


_SIGNALS = {
    4: "illegal instruction", 6: "abort", 7: "bus error", 9: "killed, most often because memory ran out",
    11: "segmentation fault", 15: "asked to end",
}  # fmt: skip


def _compute_values(groups: Mapping[str, str]) -> dict[str, str]:
    """Return values of a row's placeholders that are computed from the numbers of the line."""
    numbers = {name: float(value) for name, value in groups.items() if re.fullmatch(r"-?\d+(?:\.\d+)?", value)}
    numbers = {name: value for name, value in numbers.items() if abs(value) < MAX_NUMBER}
    if "code" in numbers:
        return {"signal": _SIGNALS.get(-int(numbers["code"]), "")}
    if {"free", "total", "util"} <= numbers.keys():
        return {"safe": f"{safe_utilization_from_log(groups['free'], groups['total']) or ''}"}
    if {"need", "have", "len"} <= numbers.keys() and numbers["need"] > 0:  # a KV cache grows with the length
        tokens = numbers["len"] * max(0.0, numbers["have"] - 0.005) / (numbers["need"] + 0.005)  # GiB are rounded
        return {"max": f"{math.floor(tokens / 16) * 16}"}  # in blocks of 16 tokens
    return {}


def _find_replacements(groups: Mapping[str, str]) -> dict[str, str]:
    """Return advice for arguments and variables that a server does not know (any more), or sets itself."""
    removed = removed_flags()
    values: dict[str, str] = {}
    if "args" in groups:
        flags = [flag for flag in flags_in_text(groups["args"]) if flag in removed]
        values["gone"] = "".join(f"{flag}: {removed[flag].advice}; " for flag in flags)
    place = groups.get("place") or "llamacpp_args"  # Lemonade names no place where it checks those
    for group, table in (("variable", removed_variables()), ("flag", protected_flags(place))):
        if group in groups:
            instead = table.get(flag_name(groups[group]) or groups[group].partition("=")[0])
            values["instead"] = f"; {instead}" if instead else ""
    return values


_NAME = re.compile(r"(?<!\$)\{([a-z]+)\}")
_REMARK = re.compile(r" \([^()]*(?<!\$)\{[a-z]+\}[^()]*\)")


def _fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with its {names} filled in, without the parts of a remark in parentheses whose value is unknown."""

    def fill_remark(match: re.Match[str]) -> str:
        parts = match[0][2:-1].split(", ")
        filled = [part for part in parts if all(values.get(name) for name in _NAME.findall(part))]
        return f" ({', '.join(filled)})" if filled else ""

    def fill(part: str, form: Callable[[str], str] = str) -> str:
        return _NAME.sub(lambda name: form(values.get(name[1], "")), part)

    # Between backticks is a command, and its values come from a log.
    parts = _REMARK.sub(fill_remark, text).split("`")
    text = "`".join(fill(part, quote) if number % 2 else fill(part) for number, part in enumerate(parts))
    return re.sub(r"  +", " ", text).replace(" :", ":").replace(" ,", ",").strip(" :;,")
