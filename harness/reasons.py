"""The sentence for each code of a Reason: the only place where reasons, notes, evidence and verdicts become text.

First how an entry is filled, then the tables, by what they are about, each after the functions that it needs; verdicts
are last. An entry is a format string over the reason's values, or a function of them. `{n:#request}` is a number with
its noun, `{yes:?one|other}` one of two texts, `[part|other]` the other text, or none, where a value of the part is
missing; `_FORMATS` has the other formats.
"""

import math
import re
import string
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from harness.columns import METRIC_WORDS, NUMBER_WORDS
from harness.summary import ALPHA, MARGIN, MAX_REPEATS, POWER, LimitedBy, Reason, Verdict
from harness.units import GIB, count, duration, figures, gib

OTHERWISE = "†"  # next to a number of a row that means something else than in the first row; a note says what
Table = dict[str, str | Callable[..., str]]
LIMIT_WORDS: dict[LimitedBy, str] = {
    "client": "load generator", "kv_cache": "KV cache", "queue": "queueing", "api": "API process", "prefill": "prefill",
    "decode": "decode",
}  # fmt: skip
_LOG_CHARS = 300  # of a log line, within a sentence


def sentence(reason: Reason) -> str:
    """A reason in words, after the cell that it is about."""
    entry = SENTENCES.get(reason.code)
    if entry is None:  # of a newer harness
        text = f"{reason.code} {msgspec.json.encode(reason.values).decode()}"
    else:
        text = _filled(entry, reason.values) if isinstance(entry, str) else entry(**reason.values)
    return text if reason.cell is None else f"{reason.cell}: {text}"


def sentences(reasons: Iterable[Reason]) -> list[str]:
    """Reasons in words."""
    return [sentence(reason) for reason in reasons]


def evidence(reasons: Iterable[Reason]) -> str:
    """The evidence of a check in words."""
    return "; ".join(sentences(reasons))


def number_words(numbers: Sequence[str]) -> str:
    """Fields of Numbers as a list: "TTFT, TPOT and chunk gaps"."""
    known = [NUMBER_WORDS[name] for name in numbers]
    return " and ".join(part for part in (", ".join(known[:-1]), *known[-1:]) if part)


def documented() -> list[tuple[str, str]]:
    """Each code with its sentence, or what it says; for docs/run-directory.md."""
    return [
        (code, _template(entry) if isinstance(entry, str) else (entry.__doc__ or "").strip())
        for code, entry in SENTENCES.items()
    ]


def _template(entry: str) -> str:
    """A format string for readers: without formats, a choice in brackets."""
    entry = re.sub(r"\{\w+:\?([^}]*)\}", r"[\1]", entry)
    entry = re.sub(r"\{(\w+):#([^}|]*)\|?([^}]*)\}", lambda m: f"{{{m[1]}}} {m[3] or m[2] + 's'}", entry)
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", entry).replace("{{", "{").replace("}}", "}")


class _Words(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec.startswith("#"):
            return count(value, *format_spec[1:].split("|"))
        if format_spec.startswith("?"):
            return format_spec[1:].split("|")[not value]
        known = _FORMATS.get(format_spec)
        return super().format_field(value, format_spec) if known is None else known(value)


_WORDS = _Words()
_OPTIONAL = re.compile(r"\[([^]|]*)(?:\|([^]]*))?\]")


def _filled(entry: str, values: Mapping[str, Any]) -> str:
    """A format string with its values; of a part in brackets the text after `|`, if any, where a value is missing."""

    def part(match: re.Match[str]) -> str:
        known = all(values.get(name) for _, name, _, _ in _WORDS.parse(match[1]) if name)
        return match[1] if known else match[2] or ""

    return _WORDS.format(_OPTIONAL.sub(part, entry), **values)


def _inner(reason: Mapping[str, Any]) -> str:
    """A reason that is a value of another one."""
    return sentence(msgspec.convert(reason, Reason))


def _limited(numbers: Sequence[str]) -> str:
    return f"client-limited ({number_words(numbers)}): " if numbers else "client-limited: "


_FORMATS: dict[str, Callable[[Any], str]] = {
    "reason": _inner,
    "limited": _limited,
    "metric": METRIC_WORDS.__getitem__,
    "verdict": lambda verdict: _of_verdict(msgspec.convert(verdict, Verdict)),
    "bound": lambda code: "least" if code == "below" else "most",
    "figures": figures,
    "figures3": lambda value: figures(value, 3),
    "percent": lambda share: f"{figures(100 * share)} %",
    "changed": lambda change: f"{'rose' if change > 0 else 'fell'} by {figures(100 * abs(change))} %",
    "faster": lambda ratio: f"{_percent(abs(ratio - 1))} {'faster' if ratio >= 1 else 'slower'}",
    "factor": lambda ratio: _factor(ratio),
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
    "amount": lambda one: amount_words(**one),
    "amounts": lambda loads: amounts_words(loads),
    "number": lambda one: _number_of(**one),
    "list": ", ".join,
    "and": " and ".join,
    "ms": lambda seconds: f"{figures(1000 * seconds)} ms",
    "ms.0": lambda seconds: f"{1000 * seconds:.0f} ms",
    "ms.1": lambda seconds: f"{1000 * seconds:.1f} ms",
}


def _listed(numbers: Sequence[int], total: int) -> str:
    return ", ".join(map(str, numbers)) + (" ..." if total > len(numbers) else "")


# The run, and the settings of a sweep.


def _unreadable_lines(file: str, lines: Sequence[int], total: int) -> str:
    """Lines of a file that cannot be read: the first of them, and how many."""
    return f"{file}: {count(total, 'line')} cannot be read (line {_listed(lines, total)})"


def _resumed(times: int, at: Sequence[float], again: int, attempts: Sequence[str] = ()) -> str:
    """The run was resumed: how often, when, and where the records of earlier attempts are."""
    when = ", ".join(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment)) for moment in at[-3:])
    text = f"the run was resumed {count(times, 'time')} ({'last: ' if times > 3 else ''}{when}); "
    text += f"{count(again, 'incomplete or invalid cell was', 'incomplete or invalid cells were')} measured again"
    kept = attempts[0] if len(attempts) == 1 else "attempts"
    return f"{text}, the earlier attempts are in {kept}" if attempts else text


_RUN: Table = {
    "text": "{text}",  # of older versions, whose reasons were sentences
    "run_error": "{error}",
    "setting_not_started": "did not start: [{cause}; to solve it: {fix}|{error}]",
    "setting_died": "{death:reason}[; to solve it: {fix}]",
    "setting_not_applied": "the sweep asks for {key} {asked}, and the server runs with {ran}",
    "setting_failed": "{row} failed: {why:reason}",
    "drift": "drift: the first cell of a server start was {ratio:faster} (95 % interval {low:factor} to {high:factor} "
    "times as fast, {starts:#start}) when it was repeated at its end. Rows that were measured early and late in a "
    "start differ by more than their settings; look at heat, and at other programs",
    "no_drift": "no drift: the first cell of a server start was {ratio:faster} (95 % interval {low:factor} to "
    "{high:factor} times as fast, {starts:#start}) when it was repeated at its end",
    "settings_failed": "every setting of the sweep failed",
    "interrupted": "interrupted before all cells had run",
    "interrupted_at_end": "interrupted at the end",
    "live_load": "a live load, changed by hand, has no verdicts",
    "run_status": "it is {status}",
    "cells_missing": "only {ran} of {planned} planned cells ran",
    "unreadable_lines": _unreadable_lines,
    "unknown_cell": "requests.jsonl: {records:#record} of the cell '{unknown}', which is not in the plan",
    "resumed": _resumed,
    "budget": "budget of {seconds:duration}: {decided} of {verdicts:#verdict} decided[; p-values and intervals allow "
    "for {looks:#look} at the data]",
    "budget_unmeasured": "the budget was spent before these rows were measured: {rows:list}",
    "budget_open": "open after the budget: {rows:list}[; about {needed} repeats a side would probably decide|]",
    "hours_apart": "up to {hours:.1f} hours lie between cells of this run: what changed on the machine meanwhile "
    "widens the intervals, and rows whose repeats are not interleaved across such a pause have no verdict",
}


# What ended or spoiled a cell.


def _server_death(
    how: str, exit_code: int | None = None, detail: str = "", cause: str | None = None, of_gateway: bool = False
) -> str:
    """How a server ended: `how` of `death`, with the cause where the failure table knows it."""
    said = {
        "ended": f"it ended with exit code {exit_code}",
        "restarted": "it was restarted",
        "removed": "its container was removed by another process",
        "paused": "its container was paused by another process",
        "closed": f"nothing listens at {detail} any more",
        "unreachable": detail,
    }[how]
    return ("its gateway: " if of_gateway else "") + said + (f": {cause}" if cause else "")


def _server_died(**values: Any) -> str:
    """The server died during the load: how, and why."""
    return f"the server died during the load: {_server_death(**values)}"


def _server_unreachable(**values: Any) -> str:
    """The server could not be reached any more: what the way to it reported."""
    return f"the server could not be reached any more: {_server_death(**values)}"


def _server_log(line: str, failure: str | None = None, number: int | None = None, fix: str | None = None) -> str:
    """What the log of a server that died says: the line, and how to solve it."""
    if failure is None:
        return f"the last line of its log: {line}"
    where = "its log ends with" if number is None else f"line {number} of its log says"
    shown = line[:_LOG_CHARS] + ("..." if len(line) > _LOG_CHARS else "")
    return f"{where}: {shown or 'nothing'}; to solve it: {fix}"


_LOADED_AGAIN = "the model was loaded again, and requests may have been sent twice without a trace"


def _backend_restarted(
    server: str, before: int | None, now: int | None, options: str = "", options_before: str = ""
) -> str:
    """The server restarted its backend during the load."""
    other = f"; since then it has other options ({options}; before: {options_before})"
    return (
        f"{server} restarted its backend during the load (process {before}, then {now}): "
        f"{_LOADED_AGAIN}{other if options != options_before else ''}"
    )


def _processes_killed(processes: Sequence[str], going_on: bool = False, remote: bool = False) -> str:
    """Load processes without an end record."""
    whose, be, was = ("process", "is", "was") if len(processes) == 1 else ("processes", "are", "were")
    still = f"{be} still going on, or " if going_on else ""
    how = "lost (killed, or its link was cut)" if remote else "killed"
    advice = "" if going_on else "; run again (the kernel kills when memory runs out, which `dmesg` tells)"
    names = ", ".join(processes)
    return f"load {whose} {names} {still}{was} {how}: what was sent and not yet recorded is not known{advice}"


def _request_repeated(requests: int, indices: Sequence[int]) -> str:
    """Requests that were recorded more than once."""
    return f"requests.jsonl: {count(requests, 'request')} recorded more than once (index {_listed(indices, requests)})"


def _never_sent(never_sent: int, planned: int, what: str, why: str, users: int, processes: int) -> str:
    """Requests or arrivals of an open loop that were due and never sent."""
    because = {
        "going_on": "it has not ended",
        "killed": "a load process was killed",
        "busy": f"all users were busy until the end; {_more_users(users, processes)}",
    }[why]
    return f"{never_sent:,} of the {planned:,} {what} that were due in the measured time were never sent: {because}"


def _more_users(users: int, processes: int) -> str:
    """Raise the number of users or processes."""
    return f"raise 'users' ({users:,}), the maximum number in flight, or 'processes' ({processes})"


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
    own = f"{min_tokens:,}"
    if max_tokens is None:
        own = f"at least {own}"
    elif min_tokens != max_tokens:
        own = f"{own} to {max_tokens:,}"
    return (
        f"the server counted {server:,.0f} generated tokens and the client {own}, warm-up included: "
        f"they differ by more than {max_share:.0%}"
    )


_CELL: Table = {
    # While it ran:
    "server_death": _server_death,
    "server_died": _server_died,
    "server_unreachable": _server_unreachable,
    "server_log": _server_log,
    "generator_exit": "the load generator ended with exit code {exit_code}[; its log has {exception}]",
    "generator_stuck": "no request was recorded for {seconds:g} s while users raised {exception}",
    "generator_silent": "no request ended for {seconds:.0f} s although each may take {timeout_s:g} s",
    "process_killed": "the load was stopped because a load process was killed",
    "mix_ended": "the load was stopped together with the others of its mix",
    "out_of_time": "the budget of the run was spent before the cell had ended",
    "scenario_mistake": "the load was ended because the first {requests} requests all failed because of a "
    "scenario error: {cause}; to solve it: {fix}",
    "backend_reset": "{server}'s watchdog reset the backend during the load[ ({reason})]: " + _LOADED_AGAIN,
    "backend_restarted": _backend_restarted,
    "backend_lost": "after the load {server} did not have the model any more: its backend died or was unloaded",
    "orphan_memory": "{name} used GPU memory next to the server",
    # By its files:
    "not_run": "it has not run",
    "not_reached": "it was not reached: the load ended before its turn",
    "going_on": "it has not ended",
    "not_ended": "it did not complete",
    "mix_apart": "its loads were measured at the same time for {together_s:.1f} of {asked_s:.1f} s; at least "
    "{min_share:.0%} is needed[: a 'duration_s' of {enough_s} s or more would do, since what passes until all are "
    "measured does not grow with it]",
    "out_of_memory": "the server was killed because memory ran out",
    "server_exit": "the server died with exit code {exit_code}",
    "server_restarted": "the server was restarted {times:#time}",
    "counters_restarted": "the server was restarted: its counters restarted at 0",
    "memory_in_use": "{used_bytes:gib_number} of {total_bytes:gib} of the memory of {gpu} were in use before the "
    "server started; at most {max_share:.0%} is allowed",
    "processes_missing": "{started} of {planned:#load process|load processes} started",
    "processes_killed": _processes_killed,
    "records_lost": "load process {process} sent {sent:#request} and the file has {found:#record}",
    "records_unwritten": "load process {process} wrote {recorded:#record} and the file has {found:,}",
    "request_repeated": _request_repeated,
    "mark_repeated": "processes.jsonl: load process {process} has {marks:,} {event} marks",
    "times_contradict": "requests.jsonl: the times of {answers:#answer} contradict each other (chunks that go back in "
    "time, end after their answer or are missing)",
    "stopped_early": "load process {process} was stopped (SIGTERM or SIGINT) {left_s:.1f} s before the end of the "
    "{asked_s:g} s to measure; run again",
    "users_gone": "{gone:#user} of {users:,} ended before the load did (an exception, or StopUser in the "
    "locustfile): the log of the load generator says more",
    "users_missing": "{came:,} of {users:#user} had started at the end of the measured time",
    "requests_missing": "{planned:,} measured requests were planned and {sent:,} were sent",
    "never_sent": _never_sent,
    "work_unfinished": "{requests:#request} of the planned work did not finish",
    "error_rate": "{failed:,} of {sent:#request} failed ({kinds:counts}): an error rate of {rate:.2%}, and at most "
    "{max_rate:.2%} is allowed",
    "resent": _resent,
    "none_succeeded": "no measured request succeeded",
    "wrong_length": "{wrong:,} of {answers:,} answers do not have the fixed length [of {tokens:,} tokens ]that "
    "{trace:?their row of the trace asks for|was asked for}",
    "prompt_lengths": "{otherwise:,} of {prompts:,} prompts do not have the exact length that was asked for "
    "(beyond the {added:,} tokens that were added to most of them): the tokenizer is not the server's",
    "tokens_differ": _tokens_differ,
    "value_out_of_bounds": "{field} of the server's answers is not possible in {requests:#request}: it must be at "
    "{code:bound} {limit:,} (got {got})",
    "value_of_other_type": "{field} of the server's answers is not possible in {requests:#request}: it has a value of "
    "another type ({got}), and counts as missing",
    "gpu_throttled": "the GPU {gpu} was throttled by heat (or PROCHOT) during {heat_s:.1f} of {window_s:.1f} s; "
    "{invalid:?at most|up to} {max_share:.0%} is allowed",
}


# The load generator's own limits.


def _client_shared_reads(
    numbers: Sequence[str], chunks: float, first_chunks: float, max_share: float, remedy: Mapping[str, Any]
) -> str:
    """Chunks, or first chunks, that the load generator read late."""
    shares = [(chunks, "the chunks"), (first_chunks, "the first chunks")]
    which = " and ".join(f"{share:.1%} of {name}" for share, name in shares if share > max_share)
    return (
        f"{_limited(numbers)}{which} were fetched late, together with a later one: their times are upper bounds; "
        f"at most {max_share:.0%} is allowed; {_inner(remedy)}"
    )


def _client_read_clock(
    numbers: Sequence[str], share: float, lag_s: float, max_s: float, remedy: Mapping[str, Any]
) -> str:
    """Chunk times are those of the read, and load processes ran late."""
    of = "half" if share == 0.5 else f"{share * 100:g} %"
    return (
        f"{_limited(numbers)}chunk times are those of the read, and {of} of the timers of a load process fired "
        f"{lag_s * 1000:.1f} ms or more late; at most {max_s * 1000:.0f} ms is allowed; {_inner(remedy)}"
    )


_CLIENT: Table = {
    "client_cpu": "client-limited: load process {process} used {share:.0%} of a core, more than {max_share:.0%}; "
    "{remedy:reason}",
    "client_send_lag": "client-limited: half of the requests were sent {lag_s:ms.1} or more behind schedule; at most "
    "{max_s:ms.0} is allowed[; {remedy:reason}]",
    "client_shared_reads": _client_shared_reads,
    "client_read_clock": _client_read_clock,
    "client_loop_lag": "{numbers:limited}timers of a load process fired {lag_s:ms.1} late on average, {share:.1%} of "
    "the time that a request took; at most {max_s:ms.1} is allowed; {remedy:reason}",
    "remedy_run_again": "a load process was killed: run again",
    "remedy_free_core": "other processes used its core during {share:.0%} of the time: "
    "stop them, or send from another machine",
    "remedy_processes": "use more 'processes' ({processes}) or machines (--workers), or fewer streams at once",
    "remedy_users": _more_users,
}


# Notes on a cell or a run.


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
    parts = [
        f"{word} are {_share(shares[0])} and {_share(shares[1])}"
        for word, shares in (("valid", valid), ("right", right))
        if shares
    ]
    return (
        f"the answers of {side} and {baseline} are not of equal quality: {'; '.join(parts)}. "
        "Speed alone does not say which of the two is better"
    )


def _share(counts: Sequence[int]) -> str:
    return f"{counts[0]:,} of {counts[1]:,} ({counts[0] / counts[1]:.1%})"


_NOTES: Table = {
    "clocks_joined": "{machines} machines sent the load, their clocks joined to {error_ms:.1f} ms: wall time and "
    "rates may be off by so much, latencies are not",
    "load_retried": "{server} needed two attempts to load the model; its log has the reason of the first",
    "host_access": "the scenario lets its container reach this machine: {exposures}",
    "own_queue": "up to {in_flight:,} requests were in flight, and [{server}|the server] serves {at_once} at once: "
    "above that the numbers include its own queue",
    "telemetry_gap": "no telemetry sample for {gap_s:.1f} s of the measured time (reading its files took up "
    "to {took_s:.1f} s): the energy is not known",
    "energy_differs": "the energy is {power_j:,.0f} J by the power readings and {counter_j:,.0f} J by the GPUs' own "
    "counters: they differ by more than {max_share:.0%}",
    "host_cpu_full": "the host's CPU was up to {share:.0%} busy in {cells:#run}, which does not make them INVALID[: "
    "the busiest load process used {client:.0%} of one core ({max_share:.0%} is allowed), so the server or another "
    "program used the rest]",
    "shared_reads_unclear": "{share:.1%} of the chunks arrived together with a later one (the server or a proxy sends "
    "several at once, or the load generator was late[; at a chunk each {chunk_s:ms} it cannot be decided]): their "
    "times are upper bounds",
    "shared_reads_server": "{share:.1%} of the chunks arrived together with a later one and were read in good time: "
    "the server, or what is before it, sends several at once",
    "read_clock": "the chunk times of {answers:,} of {requests:#request} are those of the read, not of the kernel",
    "connections_opened": "{opened:,} of {requests:#request} opened a connection of their own, which took {mean_s:ms} "
    "on average and {max_s:ms} at most: no latency has it, wall time and rates do",
    "listen_queue": _listen_queue,
    "retry_after": "after {requests:#request} the server asked for a wait (Retry-After), {total_s:,.1f} s in total: "
    "{open_loop:?only continued conversations waited, the schedule did not|their users waited as long as asked, or "
    "until the load ended}; no latency has it, wall time and rates do",
    "tokens_unknown": "the server did not report the tokens of {answers:,} of {requests:#request}: tok/s is not known",
    "tokens_too_few": "the server counted fewer tokens than it sent pieces of text in {answers:#answer} of "
    "{requests:,}: its count, and every rate that uses it, is too low",
    "reasoning_share": "{share:.0%} of the {tokens:,} output tokens were reasoning",
    "tool_calls": "{answers:#answer} held {calls:#tool call}, {valid:,} of them valid; steps without one went on as "
    "planned",
    "abandoned": "{requests:#request was abandoned by its user|requests were abandoned by their users}: no latency has "
    "them",
    "unfinished": "{requests:#request} did not finish [within drain_s ({drain_s:g} s) after the end|before the load "
    "was ended early]: latencies lack the longest",
    "steady": "the server was steady after [{seconds:.1f} s|its bound] and {requests:#warm-up request}",
    "not_steady": "the server was NOT steady after [{seconds:.1f} s|its bound] and {requests:#warm-up request}, the "
    "bound of the warm-up (max_s, max_requests): the measured numbers may still drift",
    "no_token_counter": "the server gave no token counter in {cells} of {of:#cell}: the client's count could not be "
    "checked against it",
    "stages_unchecked": "a server's token counter is that of all stages together: no stage's count was checked "
    "against it",
    "imported": "imported from {tool} [{version}|of unknown version]: {files:sha256}",
    "runs_unchecked": "NOT CHECKED: nothing shows whether the load generator kept up and the server stayed up in the "
    "imported {runs:list}",
    "import_unknown": "not known: {fields:list}[ of {rows:list}]: {why}",
    "import_defined": "[{other:mark} ]defined otherwise: {field}[ of {rows:list}]: {meaning}",
    "import_file_missing": "{file} was not next to the file: {unknown} are not known",
    "import_file_time": "the file has no time of day; its writing time is used as the end of the run",
    "import_time_zone": "the file's `date` has no time zone; it is taken for UTC",
    "import_local_time": "the file's `timestamp` is local time though it ends in Z; it is taken for UTC",
    "import_failed_end": "when a failed request ended is not in the file; it is taken to have ended with its last "
    "event",
    "import_one_user": "one request at a time: says nothing of several users",
    "over_ssh": "{server}: the load went through an ssh tunnel (over_ssh), which adds to every latency. To measure "
    "without it: publish the port on an address of the server's machine, or run the harness there",
    "left_to_engine": "{server}: {key} was left to the engine, which does not say what it took; it depends on the "
    "memory of the device, so set it where machines are compared",
    "memory_share": "({free_bytes:gib2} free - {reserve_bytes:gib2} reserve) / {total_bytes:gib2} total = {share:.4f}, "
    "down to hundredths[, at most {max_share:g} (the engine's default)]",
    "memory_share_of_host": "({available_bytes:gib2} available on the host - {kept_bytes:gib2} left to it) / "
    "{total_bytes:gib2} total = {share:.4f}, down to hundredths[, at most {max_share:g} (the engine's default)]",
    "kv_cache_sizes": "[{server}: ]KV caches of different sizes (tokens): {sizes:counts}. The larger one holds more "
    "requests at once, whatever else differs; set kv_cache_gib or gpu_memory_utilization so that they are equal, "
    "or compare just that",
    "answers_differ": _answers_differ,
}


# Why two sides have no ratio, and how far equal runs differ.


_COMPARISON: Table = {
    "row_not_valid": "{row} has a cell that is not valid ({why:reason})",
    "other_work": "one makes text and the other embeddings, which have no output tokens",
    "number_unknown": "the {metric:metric} of {row} is not known: {why}",
    "definitions_differ": "the definitions of '{field}' differ, so no ratio is given. {row}: {meaning}. {other}: "
    "{other_meaning}",
    "too_few_requests": "a {metric:metric} needs {needed} successful requests in each repeat",
    "client_limited": "client-side bottleneck: the load generator, not the server, limited the {metric:metric} of one "
    "side or both; the validity of the run lists the rows, the cause and the remedy",
    "run_invalid": "this run is INVALID",
    "definitions_of_runs": "runs whose definitions of '{field}' differ[ in the row {row}] are not compared: {run} and "
    "{other}",
    "runs_differ": "runs that differ in '{key}' are not compared: {value} in {run}, {other_value} in {other}[ "
    "(and {more} more)]",
    "about_equal": "the runs do not differ in '{about}', which the comparison is about",
    "noise_not_measured": "not measured",
    "noise_unknown": "not measured for {scenario} on {machine}[; what is stored is of another {other}]",
    "noise_measured": "A/A on {machine}, {runs} runs of '{server}', {first_day}[ to {last_day}]",
}


# What a capacity search found.


def amount_words(amount: float, unit: str, load: str | None = None) -> str:
    """So many users, requests/s, or times a trace; of a load of a mix with its name."""
    if unit == "users":
        return count(round(amount), "user" if load is None else f"{load} user")
    return f"{amount:.3g} {unit}" + ("" if load is None else f" of {load}")


def amounts_words(loads: Iterable[Mapping[str, Any]]) -> str:
    """Loads with their amounts: "20 chat users and 3 job users"."""
    return " and ".join(amount_words(**load) for load in loads)


def _number_of(amount: float, unit: str, **_: Any) -> str:
    return f"{round(amount):,}" if unit == "users" else f"{amount:.3g}"


def _capacity_frontier(
    first: Mapping[str, Any], second: Mapping[str, Any], corners: Sequence[Sequence[float | None]], complete: bool
) -> str:
    """How much of one load of a mix fits next to how much of the other. `corners`: amounts of both."""
    parts: list[str] = []
    for one, other in corners:
        companion = amount_words(one or 0.0, **first) if not parts else _number_of(one or 0.0, first["unit"])
        room = f"no {second['load']}" if other is None else _number_of(other, second["unit"])
        parts.append(f"{room if parts or other is None else amount_words(other, **second)} next to {companion}")
    said = f"holds {', '.join(parts)}"
    return said if complete else f"unresolved: so far it {said}; a longer --budget can decide"


_CAPACITY: Table = {
    "capacity_found": "holds {level:amount}[ next to {next_to:amounts}], 95 % interval {low:number} to {high:number}[; "
    "at {above:number} {broken} is broken]",
    "capacity_more_than": "holds more than {max:amount}[ next to {next_to:amounts}], the maximum asked for "
    "(--max-users raises it)",
    "capacity_none": "does not hold even {one:amount}[ next to {next_to:amounts}]: [{broken} is broken|the server "
    "died, or no answer came]",
    "capacity_unresolved": "unresolved[ next to {next_to:amounts}]: [at least {low:amount}; ][at most {high:amount}; "
    "]a longer --budget can decide",
    "capacity_frontier": _capacity_frontier,
    "capacity_knee_knee": "more concurrency stops paying at {level:,} users, 95 % interval {low:,} to {high:,} (90 % "
    "of the best {peak_tok_s:figures3} tok/s)[; from {hurts_from:,} users on more users make it slower]",
    "capacity_knee_none": "no knee in range: throughput still rises at {max:,} users, the maximum asked for",
    "capacity_knee_unclear": "where more concurrency stops paying is unresolved: [not below {low:,} users, and ]the "
    "best measured level is {peak_level:,} users with {peak_tok_s:figures3} tok/s; a longer --budget can decide",
    "capacity_knee_drift": "the throughput of an early level was {ratio:.2f} times as high at the end: the machine "
    "drifted, so the answer mixes both states",
    "capacity_drift": "answers of the first level took {ratio:longer} at the end than at the start (95 % interval of "
    "the ratio {low:.2f} to {high:.2f}): the machine drifted, so the answer mixes both states",
    "crossing_from": "{side} gives more tok/s than {base} from {level:users_up}, 95 % interval {low:up} to {high:up}; "
    "with fewer, {base} does",
    "crossing_until": "{side} gives more tok/s than {base} below {level:users_up}, 95 % interval {low:up} to "
    "{high:up}; from there on {base} does",
    "crossing_always": "{side} gives more tok/s than {base} at all levels measured, {first:,} to {last:,} users",
    "crossing_never": "{base} gives more tok/s than {side} at all levels measured, {first:,} to {last:,} users",
    "crossing_cannot_tell": "whether {side} or {base} gives more tok/s is inconclusive at the levels measured",
    "capacity_not_started": "the server did not start: {error}",
    "capacity_died": "the server died at {loads:amounts}, which counts as not held",
    "capacity_budget": "the budget of {budget_s:.0f} s was spent before the answer was known; a longer --budget can "
    "find it, or --max-users where the first probes have too many",
}


# A prediction of `harness plan`.

_PLAN: Table = {
    # Why a row has no prediction:
    "plan_invalid": "a cell of it is not valid ({why:reason})",
    "plan_no_records": "imported: there are no records of its requests",
    "plan_not_items": "a request of user `{user}` is not one item; measure a batch load",
    "plan_open_loop": "a schedule decides its rate, not the machine; measure a load without arrivals or trace",
    "plan_mixed": "it is part of a mix or a stage, so its rate is that of a part; measure the load alone",
    "plan_client_limited": "the load generator was the limit of its rate",
    "plan_too_short": "[measured for too short a time to know how the rate varies; each repeat needs "
    "{needed_s:duration2} or more (20 times the p95 latency), or run 3 or more repeats|too few requests to measure a "
    "rate; run more requests]",
    "plan_stalled": "no request made progress during a part of the measured time",
    "plan_trend": "its rate {change:changed} during the measured time, so no steady rate is known (heat, or too short "
    "a warm-up); measure longer, after `warmup: {{until: steady}}`",
    "plan_lengths_bursts": "a burst waits for its slowest answer, which other lengths change in a way that is not "
    "measured; measure with in_flight instead of batch_size",
    "plan_lengths_unknown": "the server did not report the tokens of all requests",
    "plan_lengths_outside": "the items have {mean:figures3} {which} tokens on average and the run measured "
    "{low:figures3} to {high:figures3}; measure with items of those lengths",
    "plan_lengths_unidentified": "its lengths vary too little to know the cost of a prompt token and of an output "
    "token[ (standard error of the factor: {error:percent})]; measure with lengths that vary, such as the items "
    "themselves (prompts: {{kind: file}}), or more requests",
    # Notes on one:
    "plan_no_blocks": "the measured time is too short to see a trend; the interval is that of the {repeats} repeats",
    "plan_widened": "its rate {change:changed} during the measured time; the interval is wider by as much on both "
    "sides",
    "plan_runs_unknown": "run-to-run variation is unknown (one repeat, no stored noise): a standard deviation of "
    "{sd:.0%} is assumed; `harness noise SCENARIO --runs 5 --every 60`, or more repeats, measure it",
    "plan_repeats_only": "run-to-run variation is that of {repeats} repeats of one run; other days can differ more "
    "(`harness noise` measures it)",
    # What all of them assume:
    "plan_same_lengths": "the items have the lengths of the run's requests",
    "plan_given_lengths": "the items have the lengths of the {rows:,} rows of the file",
    "plan_same_server": "same machine, server, model, settings and load; one start of the server, and no failure",
    "plan_alone": "nothing else uses the machine",
    "plan_steady": "the measured rate holds for the whole job; its warm-up takes no extra time",
    "plan_power": "energy and cost are of {package:?the package with its CPU (APU)|the GPUs that served} alone, not "
    "of the whole machine at the wall",
    "plan_no_power": "no power was measured, so energy and cost are not known",
}


# The evidence of checks.


def _check_value(
    row: str,
    unit: str,
    value: float | None = None,
    counted: Mapping[str, int] | None = None,
    limited: bool = False,
    against: Mapping[str, Any] | None = None,
    interval: Sequence[float | None] | None = None,
    decision: Mapping[str, Any] | None = None,
    rows: int = 1,
) -> str:
    """The value of a row, with its 95 % interval, the baseline's value and what would decide."""
    parts = []
    if value is not None:
        text = _in_unit(value, unit)
        if counted is not None:
            text += f", {counted['number']:,} of {counted['of']:,}"
            text += " sent met every SLO" if "left" in counted else ""
            left = counted.get("left", 0)
            text += f" ({left:,} more were abandoned before one was missed)" if left else ""
        text += " (client-limited)" if limited else ""
        if against is not None:
            base = against["value"]
            factor = f", {figures(value / base, 3)} times as much" if base else ""
            text += f" against {_in_unit(base, unit)} of {against['name']}{factor}"
        parts.append(text)
    if interval is not None:
        low, high = interval
        known = f"from {_in_unit(low, unit)}" if low is not None else f"up to {_in_unit(high or 0.0, unit)}"
        if low is not None and high is not None:
            known = f"{_in_unit(low, unit)} to {_in_unit(high, unit)}"
        parts.append(f"95 % interval {known}")
    decided = "" if decision is None else f"; {_inner(decision)}"
    return f"{row}: {', '.join(parts)}{decided}" + (f" (worst of {rows} rows)" if rows > 1 else "")


def _in_unit(value: float, unit: str) -> str:
    if unit == "s":
        return f"{figures(value, 4)} s" if value >= 1 else f"{figures(value * 1000, 4)} ms"
    return f"{figures(value * 100, 3)} %" if unit == "%" else f"{figures(value, 4)} {unit}".rstrip()


def _latency_missing(latency: str, needed: int, there: int | None = None, only: str | None = None) -> str:
    """Too few requests have a latency. `only`: the requests that can have one."""
    one = f"an {latency}" if latency.startswith("e") else f"a {latency}"
    whose = f": only {only} have one" if only else ""
    if there is None:
        return f"no successful request has {one}; {needed} is needed{whose}"
    found = f"{there:,} values exist" if latency == "gap" else f"there are {there:,}"
    return f"needs {needed:,} successful requests that have {one}; {found}{whose}"


_CHECKS: Table = {
    "check_value": _check_value,
    "check_missing": "{row}: {why:reason}",
    "check_no_row": "there is no row that it applies to",
    "check_unreadable": "{error}",
    "more_requests": "needs about {more:#more request} to decide[; of the baseline {baseline_factor:figures} times "
    "as many as now]",
    "more_repeats": "more repeats make the interval narrower",
    "too_close": "too close to the bound: more than {max_requests:,} requests would be needed to decide",
    "not_compared_with": "not compared with {name}: {why:reason}",
    "baseline_without_value": "of the baseline {name}: {why:reason}",
    "baseline_without_row": "the baseline {name} has no such row",
    "no_baseline": "there is no baseline: the run is not VALID, or has one row only; give one with --baseline RUN",
    "nothing_compared": "nothing was compared: the run is not VALID, or has one row only",
    "is_baseline": "it is the baseline itself",
    "no_comparison": "its work is not the baseline's, and it is compared with nothing",
    "paced_users": "users who think or follow a schedule are compared by latency; check one, relative to the baseline",
    "no_verdict": "{verdict:verdict}",
    "no_interval": "needs at least 2 repeats of this row and of the baseline",
    "latency_missing": _latency_missing,
    "no_tokens": "not known: the server has to report the tokens of every answer",
    "no_prompt_tokens": "not known: the server has to report the prompt tokens of every answer",
    "tool_unknown": "not known: {why}",
    "none_sent": "no request was sent; 1 is needed",
    "no_wall_time": "a load without a fixed number of requests has no wall time",
    "none_measured": "not known: no request was measured",
    "no_answer_checked": "no answer was checked; the load needs an 'answer', and requests that succeed",
    "labels_unknown": "the right answers are not known; 'prompts.kind: classification' has labels",
    "slos_uncounted": "its summary does not say how many requests met {slos}; its records are needed",
    "slos_unknown": "of {unknown:,} of {requests:,} successful requests it is not known whether they met {slos}: the "
    "answers must be streamed, and their tokens reported",
    "slos_too_few": "needs {needed:,} requests; {sent:,} were sent, of which {met:,} met every SLO",
}


SENTENCES: Table = {**_RUN, **_CELL, **_CLIENT, **_NOTES, **_COMPARISON, **_CAPACITY, **_PLAN, **_CHECKS}


# Verdicts.


def verdict_sentence(verdict: Verdict, *, side: str | None = None, by: str | None = None) -> str:
    """A verdict in words: its side, word, reason, and what would settle it.

    `side` and `by` replace the side and the metric, where several verdicts become one sentence.
    """
    text = verdict_text(verdict, by=by)
    named = f"{verdict.word}: {text}" if verdict.word == "inconclusive" else text
    return f"{verdict.side if side is None else side}: {named}."


def _of_verdict(verdict: Verdict) -> str:
    return f"{verdict.word}: {verdict_text(verdict)}"


def verdict_text(verdict: Verdict, *, by: str | None = None) -> str:
    """A verdict in words, without its side and word."""
    metric = METRIC_WORDS[verdict.metric]
    by = f"by {by or metric}"
    if verdict.refused is not None:
        return sentence(verdict.refused)
    if verdict.reason == "no_values":
        sides = zip((verdict.side, verdict.baseline), verdict.n, strict=True)
        empty = " and ".join(name for name, number in sides if not number)
        why = "no valid repeat has one" if verdict.metric == "wall_s" else "no valid repeat reports it"
        return f"there is no {metric} of {empty}; {why}"
    if verdict.ratio is None or verdict.low is None or verdict.high is None or verdict.p is None:
        return _without_interval(verdict, by)
    bounds = f"95 % interval {_factor(verdict.low)} to {_factor(verdict.high)}"
    shown = f"{by} ({bounds}, p = {_p(verdict.p)})"
    if verdict.word == "same":
        return f"the same within ±{_percent(MARGIN)} as {verdict.baseline} {shown}"
    if verdict.word in ("faster", "slower"):
        low, high = sorted(_times(bound, verdict.ratio < 1) for bound in (verdict.low, verdict.high))
        bounds = f"95 % interval {_factor(low)}x to {_factor(high)}x"
        return f"{speed(verdict.ratio)} than {verdict.baseline} {by} ({bounds}, p = {_p(verdict.p)})"
    return f"{by}, {_doubt(verdict, bounds)}; {_settles(verdict)}"


def _without_interval(verdict: Verdict, by: str) -> str:
    if verdict.reason == "too_few":
        return f"{by}, too few repeats for a confidence interval; at least {verdict.needed} repeats a side can decide"
    if verdict.reason == "apart":
        return (
            f"{by}, {speed(verdict.ratio or 1.0)}; the repeats of the two rows are not interleaved: "
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


def _doubt(verdict: Verdict, bounds: str) -> str:
    number, base = verdict.n
    if verdict.reason == "in_margin":
        return (
            f"the difference of {_percent(abs((verdict.ratio or 1) - 1))} is within the ±{_percent(MARGIN)} that are "
            f"treated as noise, but its {bounds} is not"
        )
    if verdict.reason == "too_few":
        among = "" if verdict.comparisons == 1 else f" in {verdict.comparisons} comparisons"
        return f"{number} against {count(base, verdict.unit[:-1])} can never reach p < {ALPHA:g}{among}"
    if verdict.reason == "includes_one":
        return f"the {bounds} includes 1"
    return f"p = {_p(verdict.p or 0.0)} is not below {ALPHA:g}"


def _settles(verdict: Verdict) -> str:
    """How many repeats or runs would settle a verdict."""
    ratio, low, high = verdict.ratio or 1.0, verdict.low or 0.0, verdict.high or math.inf
    effect = abs(math.log(ratio)) > math.log1p(MARGIN)
    text = f"at this spread, {_about(verdict.needed, verdict.unit)} a side show "
    text += "a difference of this size" if effect else f"that the sides are the same within ±{_percent(MARGIN)}"
    if effect and low <= 1 <= high:  # whether there is a difference at all
        text += f", {_about(verdict.needed_for_same, verdict.unit)} that there is none"
    return f"{text}, with a probability of {POWER * 100:.0f} %"


def _about(needed: int | None, unit: str) -> str:
    return f"more than {MAX_REPEATS} {unit}" if needed is None else f"about {needed} {unit}"


def speed(ratio: float, more: str = "faster", less: str = "slower") -> str:
    """A ratio of speeds in words: "2.00x faster", "2.38x slower"."""
    return f"{_factor(_times(ratio, ratio < 1))}x {less if ratio < 1 else more}"


def _times(ratio: float, inverted: bool) -> float:
    return ratio if not inverted else 1 / ratio if ratio > 0 else math.inf


def _factor(value: float) -> str:
    """A ratio with so many digits that its distance from 1 is seen."""
    distance = abs(value - 1)
    return f"{value:.4f}" if distance < 0.005 else f"{value:.3f}" if distance < 0.05 else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{figures(value * 100)} %"


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
