"""The inline IoU of MLPerf Endpoints' edge-agentic workload: how alike the shell commands of two answers are.

The actions of an answer are the known programs that its `bash` calls start, with their number. The score of a turn is
the sum of the smaller numbers over the sum of the larger ones: 1 for the same programs, 0 for none in common.
(https://github.com/mlcommons/endpoints, examples/11_Edge_Agentic_Example)
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

TOOL = "bash"
MAX_CHARS = 1_000_000  # of the commands of one answer; the longest recorded one has 12,683
_ALIASES = {
    **dict.fromkeys(("python2", "python3", "py"), "python"),
    "pip3": "pip",
    **dict.fromkeys(("egrep", "fgrep", "rg", "ag"), "grep"),
    **dict.fromkeys(("less", "more"), "cat"),
    "gawk": "awk",
    "locate": "find",
    "wget": "curl",
    "apt-get": "apt",
    **dict.fromkeys(("sphinx-build", "sphinx-quickstart"), "sphinx"),
    ".": "source",
}
_OTHERS = (
    "pytest pylint cython make conda cat head tail wc diff grep sed awk tr sort uniq cut find ls xargs cp mv rm mkdir "
    "touch tee source which alias unset export git curl true false timeout date yum apt python pip"
)
_PROGRAMS = frozenset(_ALIASES.values()) | frozenset(_OTHERS.split())
_PREFIXES = frozenset(("env", "time", "nice", "sudo", "exec", "command"))
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`""")
_SEPARATOR = re.compile(r"\|\||\||&&|;|\n")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_VERSION = re.compile(r"\.\d+(?:\.\d+)?$")

Actions = Mapping[str, int]  # known programs, with how often they are started


def actions_of(calls: Iterable[tuple[str, str | None]]) -> Counter[str]:
    """Return the actions of an answer. `calls`: name and arguments (JSON) of each. Takes time in proportion to them."""
    actions: Counter[str] = Counter()
    for name, arguments in calls:
        if name == TOOL and (command := _command(arguments)) is not None:
            actions.update(_programs(command[:MAX_CHARS]))
    return actions


def iou(recorded: Actions, generated: Actions) -> float | None:
    """Return the score of a turn, from 0 to 1; None where the recorded answer has no known program."""
    if not recorded:
        return None
    names = recorded.keys() | generated.keys()
    least = sum(min(recorded.get(name, 0), generated.get(name, 0)) for name in names)
    return least / sum(max(recorded.get(name, 0), generated.get(name, 0)) for name in names)


def mean_iou(scores: Sequence[float]) -> float | None:
    """Return the score of a run, from the scores of its turns, with 4 decimals; None without any."""
    return round(fmean(scores), 4) if scores else None


def _command(arguments: str | None) -> str | None:
    """Return the command of a call; None for arguments that are no JSON object with one."""
    try:
        decoded = msgspec.json.decode(arguments or "")
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(decoded, dict):
        return None
    command = decoded.get("command") or decoded.get("cmd")
    return command if isinstance(command, str) else None


def _programs(command: str) -> Iterable[str]:
    """Yield the known programs that a command starts, in its order."""
    for piece in _SEPARATOR.split(_QUOTED.sub(" ", command)):
        words = (word for word in piece.split() if not _ASSIGNMENT.match(word) and word not in _PREFIXES)
        first = next(words, "")
        name = _VERSION.sub("", first.rpartition("/")[2].lower())
        name = _ALIASES.get(name, name)
        if name in _PROGRAMS:
            yield name
