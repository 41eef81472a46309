"""Why a server did not start or died: table.yaml against what Docker and the server's log say."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
import yaml
from msgspec import Struct

DEFAULT_FRACTION = 0.92  # vLLM's default gpu_memory_utilization; a larger proposal is never made


class Failure(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An explained failure."""

    id: str
    cause: str
    fix: str
    line: str  # the text that gave it away
    source: str


class Rule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of failures.yaml."""

    id: str
    regex: str
    cause: str
    fix: str
    source: str
    wrapper: bool = False


class State(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a server ended, as its supervisor tells."""

    exit_code: int | None = None
    oom_killed: bool = False
    error: str = ""  # what the Docker Engine said when it could not start the container


@cache
def rules() -> tuple[tuple[Rule, re.Pattern[str]], ...]:
    """The table, compiled."""
    text = Path(__file__).with_name("table.yaml").read_text(encoding="utf-8")
    return tuple((rule, re.compile(rule.regex)) for rule in msgspec.convert(yaml.safe_load(text), list[Rule]))


def explain(log_text: str, state: State = State()) -> Failure | None:  # noqa: B008 - a frozen value
    """The most specific known cause, or None.

    What Docker said comes before the log, the first telling line before later ones, and any specific rule before
    a wrapper such as "Engine core initialization failed", which only says that there is a reason further up.
    """
    lines = [line.strip() for line in (*state.error.splitlines(), *log_text.splitlines()) if line.strip()]
    if state.oom_killed:
        return _out_of_memory(lines)
    for wrapper in (False, True):
        for line in lines:
            for rule, pattern in rules():
                match = pattern.search(line) if rule.wrapper is wrapper else None
                if match is not None:
                    return _failure(rule, match, line)
    return _by_exit_code(state, lines)


def _failure(rule: Rule, match: re.Match[str], line: str) -> Failure:
    words = {name: value or "" for name, value in match.groupdict().items()}
    if "free" in words:
        words["safe"] = f"{safe_fraction(float(words['free']), float(words['total'])):.2f}"
    fix, cause = _put_in(rule.fix, words), _put_in(rule.cause, words)
    return Failure(id=rule.id, cause=cause, fix=fix, line=line[-500:], source=rule.source)


def _put_in(text: str, words: Mapping[str, str]) -> str:
    if any(f"{{{name}}}" in text and not value for name, value in words.items()):
        text = re.sub(r" \([^()]*\{\w+\}[^()]*\)", "", text)  # a remark whose number is not known
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value.strip())
    return text.replace("  ", " ").strip(" :")


def safe_fraction(free_gib: float, total_gib: float) -> float:
    """The largest gpu_memory_utilization in hundredths that passes vLLM's check, which wants free >= total x fraction.

    vLLM prints GiB rounded to hundredths, so free may be 0.005 less than printed.
    """
    fraction = (min(free_gib, total_gib) - 0.005) / (total_gib + 0.005)
    return max(0.0, min(DEFAULT_FRACTION, math.floor(fraction * 100) / 100))


def _out_of_memory(lines: list[str]) -> Failure:
    return Failure(
        id="out-of-memory",
        cause="the kernel killed it because the container's memory limit was reached",
        fix="raise mem_limit, or take a smaller model",
        line=lines[-1][-500:] if lines else "",
        source="Docker Engine, State.OOMKilled",
    )


_EXIT_CODES = {
    0: ("it ended by itself without an error", "check its command: it should keep running"),
    126: ("its program may not be executed", "set `entrypoint` to what starts the server in this image"),
    127: ("its program was not found", "set `entrypoint` to what starts the server in this image"),
    132: ("illegal instruction", "the image is built for a newer CPU than this one"),
    134: ("it aborted itself", "read the log"),
    135: ("bus error", "set ipc: host, or shm_size such as 16g"),
    137: ("it was killed from outside, or the host ran out of memory", "look for 'Out of memory' in `dmesg`"),
    139: ("it crashed with a segmentation fault", "read the log and `dmesg`"),
}


def _by_exit_code(state: State, lines: list[str]) -> Failure | None:
    code = state.exit_code
    if code is None:
        return None
    known = _EXIT_CODES.get(128 - code if code < 0 else code)  # a process that a signal ended has a negative code
    if known is None:
        return None
    line = lines[-1][-500:] if lines else ""
    return Failure(id=f"exit-{code}", cause=known[0], fix=known[1], line=line, source="exit code")
