"""The table of known failures and of removed flags: rows of YAML files, compiled."""

import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import yaml
from msgspec import Struct

from harness.engines import engines


class Removed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of removed_flags.yaml."""

    flag: str
    gone_in: str | None  # the first version without it; None where it is not known
    instead: str
    source: str

    @property
    def advice(self) -> str:
        since = f" since {self.gone_in}" if self.gone_in else ""
        return f"vLLM does not know it any more{since}: {self.instead} ({self.source})"


@cache
def removed_flags() -> dict[str, Removed]:
    """The table, by flag."""
    text = Path(__file__).with_name("removed_flags.yaml").read_text(encoding="utf-8")
    rows: list[Removed] = msgspec.convert(yaml.safe_load(text), list[Removed])
    return {row.flag: row for row in rows}


# Files in the order of preference for one line; within a file the first row that matches decides.
FILES = ("docker", "memory", "gpu", "*", "host", "requests", "arguments", "exits", "engine")  # *: rows of the engines
Phase = Literal["create", "start", "load", "request", "stop"]
Where = Literal["docker", "log", "http", "exit"]
Severity = Literal[  # the most telling first
    "cause",  # why it failed
    "signal",  # an exit code that names a signal: a cause in the log says more, an unknown exception less
    "exception",  # an exception that is not in the table
    "wrapper",  # says only that something failed, for a reason that stands elsewhere in the log
    "end",  # any other exit code that says something
    "request",  # of a single request: the server goes on
    "warning",  # also seen in starts that went well, so never the cause
]
RANKS: tuple[Severity, ...] = get_args(Severity)


class Rule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row. Named groups of `match` stand in `cause` and `fix` as {name}, see harness.failures.advice."""

    id: str
    phase: Phase
    where: Where
    severity: Severity = "cause"
    scenario: bool = False  # of a request: all alike will be refused as well, because the scenario is wrong
    fetching: bool = False  # of fetching the model: got over once it is loaded
    chatter: bool = False  # told at the level of INFO, where else only users are quoted
    match: str | list[str]  # regular expressions, searched in one line without its prefix
    samples: list[str]  # lines as they were seen, each explained by this row
    cause: str
    fix: str
    hopeless: str = ""  # the fix where no value of the variable in `fix` is enough
    source: str


class Pattern(Struct, frozen=True):
    """One expression of a row."""

    rule: Rule
    regex: re.Pattern[str]
    needle: str  # plain words that a matching line holds; much cheaper to look for


class Replacements(Struct, frozen=True, forbid_unknown_fields=True):
    """gone.yaml."""

    names: dict[str, str]
    variables: dict[str, str]
    protected: dict[str, str]


# A line may repeat what stands before `.*` as often as it likes: without a bound that takes quadratic time.
_BETWEEN = re.compile(r"(?<!\\)\.\*(?!\)?$)")


@cache
def rules() -> tuple[Rule, ...]:
    """Every row."""
    of_engines = [row for engine in engines() for row in engine.failures]
    rows = [row for name in FILES for row in (of_engines if name == "*" else _read(Path("table") / f"{name}.yaml"))]
    return tuple(msgspec.convert(rows, list[Rule]))


@cache
def patterns() -> tuple[Pattern, ...]:
    """Every expression, in the order of preference: a line such as "load failed: REASON" is explained by its reason."""
    return tuple(
        Pattern(rule, re.compile(_BETWEEN.sub(".{0,1000}", text)), needle(text))
        for rule in sorted(rules(), key=lambda rule: rule.severity in ("wrapper", "exception"))
        for text in ([rule.match] if isinstance(rule.match, str) else rule.match)
    )


@cache
def replacements() -> Replacements:
    return msgspec.convert(_read(Path("gone.yaml")), Replacements)


def _read(name: Path) -> Any:
    return yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))


_TOKEN = re.compile(
    r"\\[AbBdDsSwWZ]|\\(?P<escaped>.)|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<open>\((?:\?(?:P<\w+>|:|=|!|<=|<!))?)|(?P<close>\))"
    r"|(?P<or>\|)|(?P<quantifier>[*+?]\??|\{[\d,]*\}\??)|(?P<other>[.^$])|(?P<plain>.)"
)


def needle(regex: str) -> str:
    """The longest run of plain characters that everything matched by `regex` holds; empty when there is none."""
    runs, run, depth = [""], "", 0
    for token, inside in _tokens(regex):
        depth += bool(token["open"]) - bool(token["close"])
        if token["or"] and not depth:
            return ""  # alternatives: each belongs into an expression of its own
        character = token["escaped"] or token["plain"]
        if token["quantifier"]:
            run = run if token["quantifier"][0] == "+" or not run else run[:-1]
        if character and not inside:
            run += character
            continue
        runs.append(run)
        run = ""
    return max([*runs, run], key=len)


def _tokens(regex: str) -> list[tuple[re.Match[str], bool]]:
    """The tokens of an expression, and of each whether it is in a group that may be absent or has alternatives."""
    tokens = list(_TOKEN.finditer(regex))
    loose = [False] * len(tokens)
    opened: list[int] = []
    for place, token in enumerate(tokens):
        if token["open"]:
            opened.append(place)
        elif token["close"]:
            begin = opened.pop()
            following = tokens[place + 1]["quantifier"] if place + 1 < len(tokens) else None
            depth = 0
            branches = False
            for inner in tokens[begin + 1 : place]:
                depth += bool(inner["open"]) - bool(inner["close"])
                branches = branches or (bool(inner["or"]) and depth == 0)
            absent = following is not None and following[0] in "*?{"
            if branches or absent or tokens[begin]["open"] in ("(?!", "(?<!", "(?=", "(?<="):
                loose[begin : place + 1] = [True] * (place + 1 - begin)
    return list(zip(tokens, loose, strict=True))
