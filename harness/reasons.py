"""Reasons, notes, evidence and verdicts as sentences: the only module that makes text of them.

data/reasons.yaml has the sentence of each code of a Reason. The functions below make those that no template can make.
"""

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from harness.columns import METRIC_WORDS, NUMBER_WORDS
from harness.files import PACKAGE, read_bytes
from harness.summary import ALPHA, MARGIN, MAX_REPEATS, POWER, LimitedBy, Reason, Verdict
from harness.units import GIB, count, date_time, duration, figures, gib

OTHERWISE = "†"  # next to a number of a row that means something else than in the first row; a note says what
LIMIT_WORDS: dict[LimitedBy, str] = {
    "client": "load generator", "kv_cache": "KV cache", "queue": "queueing", "api": "API process", "prefill": "prefill",
    "decode": "decode",
}  # fmt: skip
_MAX_LOG_CHARS = 300  # of a log line in a sentence
_OPTIONAL_PART = re.compile(r"\[([^]|]*)(?:\|([^]]*))?\]")


@cache
def reason_templates() -> dict[str, str]:
    """The template of each code that has one."""
    return msgspec.yaml.decode(read_bytes(PACKAGE / "data" / "reasons.yaml"), type=dict[str, str])


def sentence(reason: Reason) -> str:
    """A reason as a sentence. The cell that it is about comes first."""
    if reason.code in COMPOSED:
        text = COMPOSED[reason.code](**reason.values)
    elif reason.code in reason_templates():
        text = _fill_template(reason.code, reason.values)
    else:  # written by a newer harness
        text = f"{reason.code} {msgspec.json.encode(reason.values).decode()}"
    return text if reason.cell is None else f"{reason.cell}: {text}"


def sentences(reasons: Iterable[Reason]) -> list[str]:
    return [sentence(reason) for reason in reasons]


def evidence(reasons: Iterable[Reason]) -> str:
    """The evidence of a check on one line."""
    return "; ".join(sentences(reasons))


def number_names(fields: Sequence[str]) -> str:
    """Fields of Numbers as a list: "TTFT, TPOT and chunk gaps"."""
    names = [NUMBER_WORDS[field] for field in fields]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


class _ReasonFormatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec.startswith("#"):
            return count(value, *format_spec[1:].split("|"))
        if format_spec.startswith("?"):
            return format_spec[1:].split("|")[not value]
        if format_spec in _FORMATS:
            return _FORMATS[format_spec](value)
        return super().format_field(value, format_spec)


_FORMATTER = _ReasonFormatter()


def _fill_template(code: str, values: Mapping[str, Any]) -> str:
    def choose_part(match: re.Match[str]) -> str:
        names = [name for _, name, _, _ in _FORMATTER.parse(match[1]) if name]
        return match[1] if all(values.get(name) for name in names) else match[2] or ""

    return _FORMATTER.format(_OPTIONAL_PART.sub(choose_part, reason_templates()[code]), **values)


def _nested_sentence(reason: Mapping[str, Any]) -> str:
    """The sentence of a reason that is a value of another one."""
    return sentence(msgspec.convert(reason, Reason))


def _client_limited(fields: Sequence[str]) -> str:
    return f"client-limited ({number_names(fields)}): " if fields else "client-limited: "


def format_amount(amount: float, unit: str, load: str | None = None) -> str:
    """A number of users, requests/s, or times a trace; with the name of the load if it is one of a mix."""
    if unit == "users":
        return count(round(amount), "user" if load is None else f"{load} user")
    return f"{amount:.3g} {unit}" + ("" if load is None else f" of {load}")


def format_amounts(loads: Iterable[Mapping[str, Any]]) -> str:
    """The amounts of several loads: "20 chat users and 3 job users"."""
    return " and ".join(format_amount(**load) for load in loads)


def _format_number(amount: float, unit: str, **_: Any) -> str:
    """An amount without its unit."""
    return f"{round(amount):,}" if unit == "users" else f"{amount:.3g}"


def _format_indices(numbers: Sequence[int], total: int) -> str:
    return ", ".join(map(str, numbers)) + (" ..." if total > len(numbers) else "")


# Sentences that no template can make. The docstring is the entry in docs/run-directory.md.


def _unreadable_lines(file: str, lines: Sequence[int], total: int) -> str:
    """Lines of a file that cannot be read: the first of them, and how many."""
    return f"{file}: {count(total, 'line')} cannot be read (line {_format_indices(lines, total)})"


def _resumed(times: int, at: Sequence[float], again: int, attempts: Sequence[str] = ()) -> str:
    """The run was resumed: how often, when, and where the records of earlier attempts are."""
    when = ", ".join(map(date_time, at[-3:]))
    text = f"the run was resumed {count(times, 'time')} ({'last: ' if times > 3 else ''}{when}); "
    text += f"{count(again, 'incomplete or invalid cell was', 'incomplete or invalid cells were')} measured again"
    folder = attempts[0] if len(attempts) == 1 else "attempts"
    return f"{text}, the earlier attempts are in {folder}" if attempts else text


def _server_death(
    how: str, exit_code: int | None = None, detail: str = "", cause: str | None = None, of_gateway: bool = False
) -> str:
    """How a server ended: `how` of `death`, with the cause where the failure table knows it."""
    ends = {
        "ended": f"it ended with exit code {exit_code}",
        "restarted": "it was restarted",
        "removed": "its container was removed by another process",
        "paused": "its container was paused by another process",
        "closed": f"nothing listens at {detail} any more",
        "unreachable": detail,
    }
    return ("its gateway: " if of_gateway else "") + ends[how] + (f": {cause}" if cause else "")


def _server_died(**death: Any) -> str:
    """The server died during the load: how, and why."""
    return f"the server died during the load: {_server_death(**death)}"


def _server_unreachable(**death: Any) -> str:
    """The server could not be reached any more: what the way to it reported."""
    return f"the server could not be reached any more: {_server_death(**death)}"


def _server_log(line: str, failure: str | None = None, number: int | None = None, fix: str | None = None) -> str:
    """What the log of a server that died says: the line, and how to solve it."""
    if failure is None:
        return f"the last line of its log: {line}"
    where = "its log ends with" if number is None else f"line {number} of its log says"
    shown = line[:_MAX_LOG_CHARS] + ("..." if len(line) > _MAX_LOG_CHARS else "")
    return f"{where}: {shown or 'nothing'}; to solve it: {fix}"


def _backend_restarted(
    server: str, before: int | None, now: int | None, options: str = "", options_before: str = ""
) -> str:
    """The server restarted its backend during the load."""
    other = f"; since then it has other options ({options}; before: {options_before})"
    return (
        f"{server} restarted its backend during the load (process {before}, then {now}): the model was loaded again, "
        f"and requests may have been sent twice without a trace{other if options != options_before else ''}"
    )


def _processes_killed(processes: Sequence[str], going_on: bool = False, **_: Any) -> str:
    """Load processes without an end record."""
    noun, be, was = ("process", "is", "was") if len(processes) == 1 else ("processes", "are", "were")
    alive = f"{be} still going on, or " if going_on else ""
    advice = "" if going_on else "; run again (the kernel kills when memory runs out, which `dmesg` tells)"
    names = ", ".join(processes)
    return f"load {noun} {names} {alive}{was} killed or lost: what was sent and not yet recorded is not known{advice}"


def _request_repeated(requests: int, indices: Sequence[int]) -> str:
    """Requests that were recorded more than once."""
    shown = _format_indices(indices, requests)
    return f"requests.jsonl: {count(requests, 'request')} recorded more than once (index {shown})"


def _resent(resent: int, sent: int, within_s: float, max_share: float | None = None) -> str:
    """Requests that were sent twice because the server closed a kept connection."""
    text = (
        f"{resent:,} of {count(sent, 'request')} were sent twice ({resent / sent:.1%}): the server closed a kept "
        f"connection within {within_s:g} s after a response"
    )
    allowed = "" if max_share is None else f"; at most {max_share:.0%} is allowed, because the server may do them twice"
    return text + allowed


def _tokens_differ(server: float, min_tokens: int, max_tokens: int | None, max_share: float) -> str:
    """The server's counter of generated tokens differs from the client's count."""
    client = f"{min_tokens:,}"
    if max_tokens is None:
        client = f"at least {client}"
    elif min_tokens != max_tokens:
        client = f"{client} to {max_tokens:,}"
    return (
        f"the server counted {server:,.0f} generated tokens and the client {client}, warm-up included: "
        f"they differ by more than {max_share:.0%}"
    )


def _client_shared_reads(
    numbers: Sequence[str], chunks: float, first_chunks: float, max_share: float, remedy: Mapping[str, Any]
) -> str:
    """Chunks, or first chunks, that the load generator read late."""
    shares = [(chunks, "the chunks"), (first_chunks, "the first chunks")]
    late = " and ".join(f"{share:.1%} of {name}" for share, name in shares if share > max_share)
    return (
        f"{_client_limited(numbers)}{late} were fetched late, together with a later one: their times are upper bounds; "
        f"at most {max_share:.0%} is allowed; {_nested_sentence(remedy)}"
    )


def _listen_queue(retried: int, overflows: int, open_loop: bool) -> str:
    """The server's listen queue was full, so that connections waited."""
    facts = []
    if retried:
        schedule = ", TTFT and E2E latency from schedule" if open_loop else ""
        facts.append(
            f"{count(retried, 'connection')} waited 1 s or more for the server to accept; this is in wall time and "
            f"rates{schedule}, and in no other latency"
        )
    if overflows:
        facts.append(
            f"the kernel counted {count(overflows, 'overflow')} in the server's container; where Docker's proxy "
            "forwards the port, TTFT and E2E latency include the wait"
        )
    return (
        f"the server's listen queue overflowed: {'; '.join(facts)}. Put a gateway that keeps connections in front of "
        "the server, or let fewer requests arrive at once"
    )


def _answers_differ(
    side: str, baseline: str, valid: Sequence[Sequence[int]] = (), right: Sequence[Sequence[int]] = ()
) -> str:
    """The answers of two sides are not equally valid or right. Values: [number, of] of the side and the baseline."""

    def format_share(number: int, total: int) -> str:
        return f"{number:,} of {total:,} ({number / total:.1%})"

    parts = [
        f"{word} are {format_share(*shares[0])} and {format_share(*shares[1])}"
        for word, shares in (("valid", valid), ("right", right))
        if shares
    ]
    return (
        f"the answers of {side} and {baseline} are not of equal quality: {'; '.join(parts)}. "
        "Speed alone does not say which of the two is better"
    )


def _capacity_frontier(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    corners: Sequence[Sequence[float | None]],
    complete: bool,
    unresolved: Sequence[Sequence[float]] = (),
) -> str:
    """How much of one load of a mix fits next to how much of the other. `corners`, `unresolved`: amounts of both."""
    parts: list[str] = []
    if not complete:  # what is not known to fit may do so
        corners = [corner for corner in corners if corner[1] is not None]
    for first_amount, second_amount in corners:
        # Only the first pair has units and names.
        format_one: Callable[..., str] = _format_number if parts else format_amount
        fitting = f"no {second['load']}" if second_amount is None else format_one(second_amount, **second)
        parts.append(f"{fitting} next to {format_one(first_amount or 0.0, **first)}")
    text = f"holds {', '.join(parts)}"
    if unresolved:
        pairs = [
            f"{_format_number(second_amount, **second)} next to {_format_number(first_amount, **first)}"
            for first_amount, second_amount in unresolved
        ]
        text += f"; unresolved, so what is likelier counts: {', '.join(pairs)}"
    known = f"so far it {text}" if parts else "no pair is known to fit"
    return text if complete else f"unresolved: {known}; the search was stopped early"


def _check_value(
    row: str,
    unit: str,
    value: float | None = None,
    limited: bool = False,
    against: Mapping[str, Any] | None = None,
    interval: Sequence[float | None] | None = None,
    decision: Mapping[str, Any] | None = None,
    rows: int = 1,
    **_: Any,  # of older versions
) -> str:
    """The value of a row, with its 95 % interval, the baseline's value and what would decide."""
    parts = []
    if value is not None:
        text = _format_check_value(value, unit)
        text += " (client-limited)" if limited else ""
        if against is not None:
            base = against["value"]
            factor = f", {figures(value / base, 3)} times as much" if base else ""
            text += f" against {_format_check_value(base, unit)} of {against['name']}{factor}"
        parts.append(text)
    if interval is not None:
        low, high = (None if bound is None else _format_check_value(bound, unit) for bound in interval)
        bounds = f"up to {high}" if low is None else f"from {low}" if high is None else f"{low} to {high}"
        parts.append(f"95 % interval {bounds}")
    decided = "" if decision is None else f"; {_nested_sentence(decision)}"
    return f"{row}: {', '.join(parts)}{decided}" + (f" (worst of {rows} rows)" if rows > 1 else "")


def _format_check_value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{figures(value, 4)} s" if value >= 1 else f"{figures(value * 1000, 4)} ms"
    return f"{figures(value * 100, 3)} %" if unit == "%" else f"{figures(value, 4)} {unit}".rstrip()


def _latency_missing(latency: str, needed: int, there: int | None = None, only: str | None = None) -> str:
    """Too few requests have a latency. `only`: the requests that can have one."""
    name = f"an {latency}" if latency.startswith("e") else f"a {latency}"
    which = f": only {only} have one" if only else ""
    if there is None:
        return f"no successful request has {name}; {needed} is needed{which}"
    known = f"{there:,} values exist" if latency == "gap" else f"there are {there:,}"
    return f"needs {needed:,} successful requests that have {name}; {known}{which}"


COMPOSED: dict[str, Callable[..., str]] = {
    "unreadable_lines": _unreadable_lines, "resumed": _resumed, "server_death": _server_death,
    "server_died": _server_died, "server_unreachable": _server_unreachable, "server_log": _server_log,
    "backend_restarted": _backend_restarted, "processes_killed": _processes_killed,
    "request_repeated": _request_repeated, "resent": _resent,
    "tokens_differ": _tokens_differ, "client_shared_reads": _client_shared_reads, "listen_queue": _listen_queue,
    "answers_differ": _answers_differ, "capacity_frontier": _capacity_frontier, "check_value": _check_value,
    "latency_missing": _latency_missing,
}  # fmt: skip


# Verdicts.


def verdict_sentence(verdict: Verdict, *, side: str | None = None, by: str | None = None) -> str:
    """A verdict as a sentence: its side, word, reason, and how many more repeats would decide.

    `side` and `by` replace the side and the metric, where several verdicts become one sentence.
    """
    word = "inconclusive: " if verdict.word == "inconclusive" else ""
    return f"{verdict.side if side is None else side}: {word}{_describe_verdict(verdict, by)}."


def _verdict_with_word(verdict: Mapping[str, Any]) -> str:
    """A verdict that is a value of a reason."""
    known = msgspec.convert(verdict, Verdict)
    return f"{known.word}: {_describe_verdict(known)}"


def _describe_verdict(verdict: Verdict, metric: str | None = None) -> str:
    """A verdict without its side and word. `metric` replaces the name of its metric."""
    by = f"by {metric or METRIC_WORDS[verdict.metric]}"
    if verdict.refused is not None:
        return sentence(verdict.refused)
    if verdict.reason == "no_values":
        sides = zip((verdict.side, verdict.baseline), verdict.n, strict=True)
        empty = " and ".join(name for name, number in sides if not number)
        why = "no valid repeat has one" if verdict.metric == "wall_s" else "no valid repeat reports it"
        return f"there is no {METRIC_WORDS[verdict.metric]} of {empty}; {why}"
    if verdict.ratio is None or verdict.low is None or verdict.high is None or verdict.p is None:
        return _describe_without_interval(verdict, by)
    bounds = f"95 % interval {_format_ratio(verdict.low)} to {_format_ratio(verdict.high)}"
    if verdict.word == "same":
        shown = f"{by} ({bounds}, p = {_format_p(verdict.p)})"
        return f"the same within ±{_format_percent(MARGIN)} as {verdict.baseline} {shown}"
    if verdict.word in ("faster", "slower"):
        low, high = sorted(_invert(bound) if verdict.ratio < 1 else bound for bound in (verdict.low, verdict.high))
        bounds = f"95 % interval {_format_ratio(low)}x to {_format_ratio(high)}x"
        return f"{format_speedup(verdict.ratio)} than {verdict.baseline} {by} ({bounds}, p = {_format_p(verdict.p)})"
    return f"{by}, {_why_inconclusive(verdict, bounds)}; {_describe_needed_repeats(verdict)}"


def _describe_without_interval(verdict: Verdict, by: str) -> str:
    if verdict.reason == "too_few":
        return f"{by}, too few repeats for a confidence interval; at least {verdict.needed} repeats a side can decide"
    if verdict.reason == "apart":
        return (
            f"{by}, {format_speedup(verdict.ratio or 1.0)}; the repeats of the two rows are not interleaved: "
            "the run was resumed or paused between them, so the ratio contains what changed on the machine meanwhile; "
            "measure both in one run"
        )
    if verdict.reason != "run_variation_unknown":
        return by
    number, base = verdict.n
    return (
        f"{by}, how far equal runs differ on this machine is not known, and {number} against {count(base, 'run')} "
        f"{'does' if base == 1 else 'do'} not show it; `harness noise SCENARIO --runs 5 --every 60` measures it, or "
        f"compare {verdict.needed} or more runs a side"
    )


def _why_inconclusive(verdict: Verdict, bounds: str) -> str:
    number, base = verdict.n
    if verdict.reason == "in_margin":
        return (
            f"the difference of {_format_percent(abs((verdict.ratio or 1) - 1))} is within the "
            f"±{_format_percent(MARGIN)} that are treated as noise, but its {bounds} is not"
        )
    if verdict.reason == "too_few":
        among = "" if verdict.comparisons == 1 else f" in {verdict.comparisons} comparisons"
        return f"{number} against {count(base, verdict.unit[:-1])} can never reach p < {ALPHA:g}{among}"
    if verdict.reason == "includes_one":
        return f"the {bounds} includes 1"
    return f"p = {_format_p(verdict.p or 0.0)} is not below {ALPHA:g}"


def _describe_needed_repeats(verdict: Verdict) -> str:
    """How many repeats or runs would decide an inconclusive verdict."""

    def format_needed(needed: int | None) -> str:
        return f"more than {MAX_REPEATS} {verdict.unit}" if needed is None else f"about {needed} {verdict.unit}"

    ratio, low, high = verdict.ratio or 1.0, verdict.low or 0.0, verdict.high or math.inf
    beyond_margin = abs(math.log(ratio)) > math.log1p(MARGIN)
    same = f"that the sides are the same within ±{_format_percent(MARGIN)}"
    text = f"at this spread, {format_needed(verdict.needed)} a side show "
    text += "a difference of this size" if beyond_margin else same
    if beyond_margin and low <= 1 <= high:  # there may be no difference at all
        text += f", {format_needed(verdict.needed_for_same)} that there is none"
    return f"{text}, with a probability of {POWER * 100:.0f} %"


def format_speedup(ratio: float, more: str = "faster", less: str = "slower") -> str:
    """A ratio of speeds: "2.00x faster", "2.38x slower"."""
    return f"{_format_ratio(_invert(ratio))}x {less}" if ratio < 1 else f"{_format_ratio(ratio)}x {more}"


def _invert(ratio: float) -> float:
    return 1 / ratio if ratio > 0 else math.inf


def _format_ratio(value: float) -> str:
    """A ratio with as many digits as its distance from 1 needs."""
    distance = abs(value - 1)
    return f"{value:.4f}" if distance < 0.005 else f"{value:.3f}" if distance < 0.05 else f"{value:.2f}"


def _format_percent(share: float) -> str:
    return f"{figures(100 * share)} %"


def _format_p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


# How templates format a value: `{seconds:duration}`.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "reason": _nested_sentence,
    "limited": _client_limited,
    "metric": METRIC_WORDS.__getitem__,
    "verdict": _verdict_with_word,
    "bound": lambda code: "least" if code == "below" else "most",
    "figures": figures,
    "figures3": lambda value: figures(value, 3),
    "percent": _format_percent,
    "part": lambda share: "half" if share == 0.5 else f"{share * 100:g} %",
    "changed": lambda change: f"{'rose' if change > 0 else 'fell'} by {_format_percent(abs(change))}",
    "faster": lambda ratio: f"{_format_percent(abs(ratio - 1))} {'faster' if ratio >= 1 else 'slower'}",
    "factor": _format_ratio,
    "longer": lambda ratio: f"{abs(100 * (ratio - 1)):.0f} % {'longer' if ratio > 1 else 'shorter'}",
    "up": lambda value: f"{math.ceil(value):,}",
    "users_up": lambda value: count(math.ceil(value), "user"),
    "duration": duration,
    "duration2": lambda seconds: duration(seconds) if seconds >= 10 else f"{seconds:.2g} s",
    "sha256": lambda files: ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in files.items()),
    "mark": lambda _: OTHERWISE,
    "counts": lambda numbers: ", ".join(f"{name} {number:,}" for name, number in numbers.items()),
    "gib": gib,
    "gib2": lambda size: gib(size, 2),
    "gib_number": lambda size: f"{size / GIB:.1f}",
    "amount": lambda load: format_amount(**load),
    "amounts": format_amounts,
    "number": lambda load: _format_number(**load),
    "list": ", ".join,
    "ms": lambda seconds: f"{figures(1000 * seconds)} ms",
    "ms.0": lambda seconds: f"{1000 * seconds:.0f} ms",
    "ms.1": lambda seconds: f"{1000 * seconds:.1f} ms",
}
