"""Sentences about the numbers of a run: its validity, notes, verdicts, failures and findings, and how it was made."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from harness.base import units
from harness.base.errors import ExitCode
from harness.base.metrics import METRICS, number_names
from harness.base.reason import Reason, evidence, sentence
from harness.base.units import count
from harness.failures.diagnosis import FailedRequests
from harness.numbers.comparison import Comparison, Verdict
from harness.numbers.gate import gate_code
from harness.numbers.summary import ENOUGH, CellSummary, Row, RunFinding, Summary
from harness.numbers.validity import BROKEN, DEATHS, RESTARTS
from harness.records.manifest import OTHERWISE, OWN_EXPORT, Run
from harness.report import words
from harness.report.elements import Bullet, Paragraph, pasted_parts
from harness.report.verdict_text import limit_text, verdict_sentence, verdict_style
from harness.scenario import asks_known
from harness.scenario.plan import mix_of

_SHOWN_ERROR = 0.0005  # a smaller error of the load generator is not shown
# Notes on what may have changed the numbers of a run that is VALID, and what they are about.
DOUBTS = {"kernel_event": "what the kernel logged", "other_model": "the other model in the answers"}
SHOWN = 7  # verdicts that a report shows at once; the rest is folded
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]\d+)?")  # 2, 2.1, 1,234 and 1.2e+02 alike


_ENDS = {
    "ended": "died", "closed": "died", "restarted": "was restarted", "removed": "was removed by another process",
    "paused": "was paused by another process", "unreachable": "could not be reached any more",
}  # fmt: skip


def death_answer(summary: Summary, run: Run) -> str:
    """How and when the server of a run ended, and where its log is; empty where it did not."""
    codes = (*DEATHS, *RESTARTS)
    ended_cells = {reason.cell for reason in summary.reasons if reason.code in codes and reason.values.get("broken")}
    dead = {reason.cell for reason in summary.reasons if reason.code in codes}
    # All stages of a load have the reason, and the server ended in one of them.
    cell = next((cell for cell in summary.cells if cell.id in (ended_cells or dead)), None)
    if cell is None:
        return ""
    reasons = [reason for reason in summary.reasons if reason.cell == cell.id and reason.code in codes]
    values: dict[str, Any] = {}
    for reason in reasons:
        values |= reason.values
    is_restart = all(reason.code in RESTARTS for reason in reasons)
    ended = "restarted" if is_restart else _ENDS.get(values.get("how", "ended"), "died")
    what = "The gateway of the server" if values.get("of_gateway") else "The server"
    name = f" {cell.server}" if len({row.server for row in summary.rows}) > 1 else ""
    sent, after_s = values.get("sent", cell.numbers.sent), values.get("after_s")
    when = f"after {count(sent + _sent_before(cell, summary, run), 'request')}"
    if after_s is not None:
        load = "the load" if len(run.order) == 1 else cell.load
        load += f" of repeat {cell.repeat}" if run.scenario.repeats > 1 else ""
        when += f", {f'{units.figures(after_s)} s' if after_s < 90 else units.duration(after_s)} into {load}"
    facts = [f"exit code {values['exit_code']}"] if values.get("exit_code") is not None else []
    facts += ["out of memory"] if any(reason.code == "out_of_memory" for reason in reasons) else []
    why = values.get("cause") or values.get("detail")
    why = f"nothing listens at {why} any more" if values.get("how") == "closed" else why
    facts += [str(why)] if why and "out of memory" not in facts else []
    others = any(row.invalid is None and row.failed is None for row in summary.rows)
    whose = f"The numbers of {cell.server} / {cell.load}" if others else "Its numbers"
    ran = run.ran.get(cell.id)
    log = f"Its log: logs/{cell.id}.server.log in the folder of the run (`harness explain LOG` reads it)."
    if ran is not None and ran.served_by.template is None:
        log = "Read its own log (`harness explain LOG`)."
    happened = f"{what}{name} {ended} {when}{': ' * bool(facts)}{', '.join(facts)}"
    if all(reason.code == "counters_decreased" for reason in reasons):  # no request shows when, and nothing shows why
        happened = f"The counters of the server{name} went back: a restart, or several servers behind this address"
    return f"{happened}. {whose} cannot be used. {log}"


def _sent_before(cell: CellSummary, summary: Summary, run: Run) -> int:
    """The requests that the server of a cell got in earlier cells, warm-up included, since it was started."""
    ran = list(run.ran)
    before = set(ran[: ran.index(cell.id)] if cell.id in ran else [])
    served_by = run.ran[cell.id].served_by if cell.id in ran else None
    is_started = served_by is not None and served_by.template is not None  # by the harness, for some of the cells
    earlier = [other for other in summary.cells if other.id in before and other.server == cell.server]
    if is_started and run.scenario.restart:
        earlier = [other for other in earlier if cell.group and other.group == cell.group]
    elif is_started:
        earlier = [other for other in earlier if other.repeat == cell.repeat]
    return sum(other.numbers.sent + (other.warmup.requests if other.warmup else 0) for other in earlier)


def in_flight(row: Row, run: Run) -> int | None:
    """How many requests a row of a closed loop has in flight at most; None: that is not fixed, or not known."""
    load = run.scenario.loads.get(row.load)
    is_closed = load is not None and run.origin is None and load.trace is None and load.arrivals is None
    return words.max_in_flight(load) if load is not None and is_closed and mix_of(row.load) is None else None


def load_descriptions(run: Run) -> dict[str, str]:
    """Each load in words; none of an imported run, because its scenario only names what the tool reported."""
    loads = run.scenario.loads if run.origin is None else {}
    return {name: words.describe_load(load) for name, load in loads.items()}


_UNCHECKED = {
    "running": ("UNFINISHED", "the run is still in progress, or was killed; its records so far are shown"),
    "interrupted": ("INTERRUPTED", "the run was stopped before its end; its records so far are shown"),
    "live": ("LIVE", "controlled in the web UI, so it has no verdict; its records are shown"),
    "failed": ("NOT COMPLETED", "the run could not be carried out; its records so far are shown"),
}


def validity(summary: Summary, run: Run) -> tuple[str, str]:
    """VALID or INVALID, or why there is no verdict yet: a word and a sentence. Reasons are listed separately."""
    if run.status in _UNCHECKED:
        return _UNCHECKED[run.status]
    if summary.valid:
        failed = sum(row.failed is not None for row in summary.rows)
        result = f"; {failed} of {count(len(summary.rows), 'row')} failed, which is their result" if failed else ""
        return "VALID", f"all conditions of a trustworthy measurement held{result}"
    if summary.valid is None:
        return "UNCHECKED", (
            "an imported file does not show whether the load generator kept up, the server stayed up and the tokens "
            "were counted right"
        )
    invalid = [row.name for row in summary.rows if row.invalid is not None]
    are_row_reasons = all(reason.cell is not None for reason in summary.reasons)  # else no row can be trusted
    if are_row_reasons and 0 < len(invalid) < min(len(summary.rows), 4):
        return "INVALID", f"do not trust {' and '.join(invalid)}; the run is not compared with other runs"
    if any(verdict.ratio is not None for verdict in (summary.comparison.verdicts if summary.comparison else [])):
        return "INVALID", "rows with a cell that is not valid have no verdict, and the run is not compared with others"
    return "INVALID", "do not trust the rows concerned; the run is not compared with other runs"


def state(summary: Summary, run: Run, sign: str = "") -> Paragraph:
    """One word on a run with its sentence, and its colour: the validity, else the result of its checks.

    A run that was stopped before its end is not "bad". `sign`: that some of its numbers have.
    """
    (word, text), total = validity(summary, run), count(len(summary.checks), "check")
    text += f", but for the numbers with {sign}" if sign and word == "VALID" else ""
    if run.status in _UNCHECKED or summary.valid is False:
        style = "bad" if run.status == "failed" or run.status not in _UNCHECKED else "unsure"
        return Paragraph(text, style, word)
    by_status: dict[str, list[str]] = defaultdict(list)
    for result in summary.checks:
        by_status[result.status].append(result.check)
    parts = [(status, f"{len(names)} of {total}: {', '.join(names)}") for status in ("failed", "inconclusive")
             if (names := by_status[status])]  # fmt: skip
    if (gate := _gate_status(summary)) and summary.checks:
        parts.insert(len(parts) if gate == "inconclusive" else 0, (gate, "the comparison with the tolerance"))
    if summary.checks and any(answers.word == "inconclusive" for answers in summary.same_answers):
        parts.append(("inconclusive", "the comparison of the answers"))
    if parts:
        (status, first), *others = parts
        first += "".join(f"; {other} {more}" for other, more in others)
        return Paragraph(first, "bad" if status == "failed" else "unsure", status.upper())
    if summary.valid is None or not summary.checks:
        return Paragraph(text, "unsure" if summary.valid is None else "good", word)
    return Paragraph(f"{total} passed, and {text}", "good", "PASSED")


def _gate_status(summary: Summary) -> str:
    """The result of the gates of a run; empty without gates, and where all passed."""
    verdicts = [] if summary.comparison is None else summary.comparison.verdicts
    code = gate_code(verdict.gate for verdict in verdicts)
    return {ExitCode.FAILED: "failed", ExitCode.INCONCLUSIVE: "inconclusive"}.get(code, "")


def notes_sentence(summary: Summary, number: int, sign: str) -> str:
    """What so many notes on the validity come to, in one plain line. `sign`: that late numbers have; empty if none."""
    limited = [row for row in summary.rows if row.client_limited]
    if any(note.code == "host_cpu_full" for note in summary.notes):
        why = "This machine was busy"
    else:
        why = "The load generator was late" if limited else ""
    if limited and not sign:
        return why if summary.valid is False else f"{why}; no number shown is affected"
    if limited:
        return f"{why}: {late_numbers_text(max(map(largest_error, limited)), sign)}"
    if any(note.code == "import_defined" and note.values["other"] for note in summary.notes):
        return f"Numbers with {OTHERWISE} are defined otherwise"
    return f"{why}, but the load generator kept up" if why else f"{count(number, 'note')} on these numbers"


def late_numbers_text(error: float, sign: str) -> str:
    """What the sign of a number means that the load generator limited. `error`: the largest one, as a share."""
    wrong = f"may be wrong by up to {units.figures(100 * error, 2)}\u00a0%"
    return f"numbers with {sign} {'were read late' if error < _SHOWN_ERROR else wrong}"


def largest_error(row: Row) -> float:
    """By how much at most the load generator changed the numbers that it limited, as a share."""
    limited = (error for metric, error in row.client_error.items() if METRICS[metric].field in row.client_limited)
    return max(map(max, limited), default=0.0)


def client_limit_sentence(summary: Summary, sign: str = "") -> str:
    """Which numbers of which rows the load generator limited, and by how much at most; empty where none are.

    `sign`: of such numbers, where they are shown.
    """
    rows: dict[str, list[str]] = defaultdict(list)
    for row in summary.rows:
        if row.client_limited:
            error = largest_error(row)
            by = "" if error < _SHOWN_ERROR else f" (by {units.figures(100 * error)}\u00a0% at most)"
            rows[number_names(row.client_limited)].append(f"{row.name}{by}")
    if not rows:
        return ""
    parts = "; ".join(f"{numbers} of {', '.join(names)}" for numbers, names in rows.items())
    rest = "intervals are wider by that" if summary.valid else "the run is not compared with other runs"
    return f"the load generator{sign and f' ({sign})'} was late, which affects {parts}; {rest}"


def verdict_sentences(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """The style and the sentence of each verdict. Verdicts that differ only in their side become one."""
    same_but_side: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in _sort_for_report(verdicts):
        same_but_side[verdict.baseline, verdict_sentence(verdict, side="")].append(verdict)
    sentences = []
    for (baseline, _), group in same_but_side.items():
        side = ", ".join(dict.fromkeys(verdict.side for verdict in group))
        if group[0].ratio is None:  # others name it
            side += f" against {baseline}"
        sentences.append((verdict_style(group[0]), verdict_sentence(group[0], side=side)))
    return sentences


def _sort_for_report(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts in their order; if a report cannot show all, slower and faster first, the largest effect first."""
    if len(verdicts) <= SHOWN:
        return list(verdicts)
    order = ("slower", "faster", "inconclusive", "same")
    return sorted(verdicts, key=lambda v: (order.index(v.word), -abs(math.log(v.ratio)) if v.ratio else 0.0))


def hidden_verdicts_text(verdict_words: Iterable[str]) -> str:
    """The verdicts that are not shown: "12 more: 8 faster, 4 same"; empty if all are."""
    counts = Counter(verdict_words)
    parts = ", ".join(f"{number} {word.replace('_', ' ')}" for word, number in counts.items())
    return f"{counts.total()} more: {parts}" if counts else ""


def group_reasons(reasons: Sequence[Reason]) -> list[str]:
    """Reasons or notes as sentences; those of several cells that differ only in numbers become one."""
    groups: dict[object, list[Reason]] = defaultdict(list)
    for number, reason in enumerate(reasons):
        texts = tuple((key, _NUMBER.sub("#", value)) for key, value in reason.values.items() if isinstance(value, str))
        groups[number if reason.cell is None else (reason.code, texts)].append(reason)
    return [
        sentence(group[0]) + (f" (likewise in {count(len(group) - 1, 'other cell')})" if len(group) > 1 else "")
        for group in groups.values()
    ]


def failure_sentences(summary: Summary) -> list[str]:
    """One sentence for each cause of failed requests: how many of which rows, the cause and its fix if known."""
    groups: dict[tuple[str, str | None, str], list[FailedRequests]] = defaultdict(list)
    for failed in summary.failures:
        groups[failed.kind, failed.id, _NUMBER.sub("#", failed.cause or failed.message)].append(failed)
    dead = {
        (cell.server, cell.load) for cell in summary.cells if any(problem.code in DEATHS for problem in cell.problems)
    }

    def is_of_death(rows: Sequence[FailedRequests]) -> bool:
        return rows[0].kind in BROKEN and all((row.server, row.load) in dead for row in rows)

    return [_failure_sentence(rows, is_dead=is_of_death(rows)) for rows in groups.values()]


def _failure_sentence(rows: list[FailedRequests], *, is_dead: bool) -> str:
    first = rows[0]
    counts = ", ".join(f"{row.server} / {row.load}: {count(row.count, 'request')}" for row in rows)
    repeated = not first.message or first.message[-20:] in (first.cause or "")
    message = "" if repeated else f'. Message: "{first.message}"'
    cause = "nothing known of it" if first.cause is None else f"{first.cause}; to solve it: {first.fix}"
    if is_dead:
        cause, message = "the server had died", ""
    return f"{counts} ({first.kind}): {cause}{message}"


def no_findings(succeeded: Sequence[int], problems: Sequence[str]) -> Paragraph:
    """That there is no finding. `succeeded`: requests of each row; with few, most rules show nothing. `problems`: what
    the page shows all the same.
    """
    few = [number for number in succeeded if number < ENOUGH]
    if not few and not problems:
        return Paragraph("no problem found", "good", "FINDINGS")
    parts = [f"no cause found for {' and '.join(problems)}" if problems else "none"]
    if few:
        least, most = min(few), max(few)
        number = count(most, "request") if least == most else f"{least} to {count(most, 'request')}"
        rows = "" if len(succeeded) == 1 else f" of {count(len(few), 'row')}"
        verb = "is" if most == 1 else "are"
        parts.append(f"{number}{rows} {verb} too few for most findings, which need {ENOUGH}")
    return Paragraph("; ".join(parts), "unsure", "FINDINGS")


def shown_problems(summary: Summary) -> list[str]:
    """What the page of a run shows that is no finding: failed requests and checks, the result of hours, and notes."""
    failed_checks = any(check.status == "failed" for check in summary.checks)
    drifts = any(soak.word in ("failed", "drifts") for soak in summary.soaks)
    noted = {note.code for note in summary.notes}
    shown = {
        "failed requests": bool(summary.failures), "failed checks": failed_checks, "what the hours show": drifts,
        **{f"{what} (see the note)": code in noted for code, what in DOUBTS.items()},
    }  # fmt: skip
    return [name for name, is_shown in shown.items() if is_shown]


def finding_sentence(finding: RunFinding) -> str:
    """What was measured, where."""
    others = f" (and {units.count(len(finding.rows) - 1, 'more row')})" if len(finding.rows) > 1 else ""
    return f"{finding.rows[0]}{others}: {finding.measured} [{finding.code}]"


def finding_parts(finding: RunFinding) -> Iterator[Bullet]:
    """The other parts of a finding, each with its name. A setting is verbatim."""
    yield Bullet(finding.means, mark="Meaning")
    yield Bullet(finding.why, mark="Why")
    if finding.same_cost_as:
        yield Bullet(f"the time of [{finding.same_cost_as}]: each of the two actions may win it back", mark="Cost")
    elif finding.cost is not None:
        yield Bullet(f"up to {units.figures(100 * finding.cost, 2)} % of the time", mark="Cost")
    for action in finding.actions:
        yield Bullet(action.do, mark="Do")
        yield from pasted_parts(action.commands, action.settings)
        if action.gain is not None:
            yield Bullet(sentence(action.gain), mark="Expect")
        if action.risk:
            yield Bullet(action.risk, mark="Risk")
        yield from pasted_parts({"Verify": action.verify})


def method_sentence(comparison: Comparison) -> str:
    """The metrics, the number of comparisons, and the difference that is treated as noise."""
    metrics = list(dict.fromkeys(METRICS[verdict.metric].title for verdict in comparison.verdicts))
    by = " or ".join(metrics or ["no metric"]) + (", as each line says" if len(metrics) > 1 else "")
    number = comparison.comparisons
    few = {0: "no comparison could be made", 1: "one comparison"}
    correction = few.get(number, f"{number} comparisons, corrected for their number (Holm)")
    floor = units.figures(100 * comparison.noise_floor)
    text = f"By {by}; {correction}. Differences under {floor}\u00a0% are treated as noise."
    tolerance = next((verdict.tolerance for verdict in comparison.verdicts if verdict.tolerance is not None), None)
    if tolerance is not None:
        text += f" A slowdown of {limit_text(tolerance)} or more fails (`--tolerance`)."
    source = evidence(comparison.noise_source)
    return f"{text} Variation between runs: {source}." if source else text


def other_work_sentence(summary: Summary, run: Run) -> str:
    """Which rows have no verdict although they ran, because no row of a comparison does the same work; or nothing."""
    verdicts = summary.comparison.verdicts if summary.comparison is not None else []
    judged = {name for verdict in verdicts for name in (verdict.side, verdict.baseline)}
    others = [row for row in summary.rows if row.name not in judged and row.failed is None and row.invalid is None
              and not asks_known(run.scenario.loads[row.load])]  # fmt: skip
    if not verdicts or not others:
        return ""
    return (
        f"{count(len(others), 'row has', 'rows have')} no verdict: their prompts, lengths of answers or pacing are not "
        "those of the baseline, and no other server has the same load. `compare` in the scenario names other pairs."
    )


def design_sentence(run: Run) -> str:
    """The repeats, their order, and whether servers were fresh; for an imported run its origin."""
    if run.origin is not None:
        version = run.origin.version or "of unknown version"
        if run.origin.tool == OWN_EXPORT:
            return f"Imported: exported by {OWN_EXPORT} {version}, as the file says; whether it was VALID is not known."
        return f"Imported: measured by {run.origin.tool} {version}, not by this suite."
    scenario = run.scenario
    stages = ", one for all stages of a load" if any(load.stages for load in scenario.loads.values()) else ""
    fresh = f"a fresh server for each{stages}" if scenario.restart else "warm: one server per repeat"
    order = ", interleaved" if scenario.repeats > 1 else ""
    ran = max((cell.repeat for cell in run.cells), default=0)
    repeats = count(scenario.repeats, "repeat")
    if 0 < ran < scenario.repeats and run.status not in ("running", "live"):
        repeats = f"{ran} of {repeats}"
    return f"{repeats} of every row{order}, {fresh}; seed {scenario.seed}."
