"""The sentences of reports: the answer first, then each load, the validity, and how the comparison was made.

The answer is about the first of these that a run has: checks against a baseline (regression), SLOs, loads measured
together (interference), rows compared with a baseline row (speedup); else the numbers of its rows.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from harness.base import units
from harness.base.errors import HarnessError
from harness.base.metrics import METRICS, number_names
from harness.base.summary import (
    CheckResult,
    Comparison,
    FailedRequests,
    Reason,
    Row,
    RunFinding,
    Summary,
    Verdict,
    evidence,
    sentence,
)
from harness.base.units import count
from harness.numbers.checks import evaluate
from harness.numbers.comparable import engine_versions
from harness.numbers.validity import DEATHS, RESTARTS
from harness.questions.capacity.decide import LevelPoint, crossing_level, levels_answer
from harness.questions.findings.rules import ENOUGH
from harness.questions.quick import decide as quick
from harness.questions.same_answers.page import answers_sentence, row_sentence
from harness.questions.soak import soak_answer
from harness.records.manifest import OTHERWISE, Run
from harness.report import words
from harness.report.comparisons import gates_answer, largest_effect, levels_by_server, short_row_names, speedup_answer
from harness.report.elements import Bullet
from harness.report.verdict_text import describe_change, format_speedup, limit_text, verdict_sentence, verdict_style
from harness.scenario import asks_known
from harness.scenario.check_syntax import SLO_METRICS, Check, parse_check
from harness.scenario.plan import load_of_part, mix_of

_SHOWN_ERROR = 0.0005  # a smaller error of the load generator is not shown
SHOWN = 7  # verdicts that a report shows at once; the rest is folded
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]\d+)?")  # 2, 2.1, 1,234 and 1.2e+02 alike
_BOUNDED = (*SLO_METRICS, "output_tok_s", "input_tok_s", "requests_per_s", "wall")


def run_answer(summary: Summary, run: Run) -> str:
    """The answer of a run, or why it has no answer; with the versions if its servers have several of one engine."""
    answer = _run_answer(summary, run)
    if answer.startswith("No answer"):
        return answer
    gated = summary.comparison is not None and any(verdict.gate for verdict in summary.comparison.verdicts)
    gates = [gates_answer(summary.comparison.verdicts)] if summary.comparison is not None and gated else []
    answer = " ".join([*gates, answer, *map(answers_sentence, summary.same_answers)]).strip()
    for engine, versions in engine_versions(run).items():
        known = ", ".join(f"{name} {version}" for name, version in versions.items())
        answer += f" The servers run different versions of {engine} ({known}), so the comparison includes what changed "
        answer += "between them."
    return answer


def _run_answer(summary: Summary, run: Run) -> str:
    is_cut = run.status in ("running", "interrupted", "failed")
    death = death_answer(summary, run)
    if summary.soaks:  # a server that failed makes the run INVALID, and is the answer; so do the hours before an end
        answers = [death] * bool(death) + [sentence(soak_answer(found)) for found in summary.soaks]
        return " ".join([*answers, *(["The run did not come to its end."] if is_cut else [])])
    if is_cut:
        return death or "No answer: the run did not come to its end."
    if summary.valid is False and (death or run.status != "live"):
        return death or "No answer: the run is INVALID."
    checks = [(check, result) for result in summary.checks if (check := _parse_or_none(result.check)) is not None]
    if relative := [result for check, result in checks if check.relative]:
        return _regression_answer(relative)
    if slos := [(check, result) for check, result in checks if _is_slo(check)]:
        return _slo_answer(slos, summary, run)
    if interference := _interference_answer(summary):
        return interference
    if summary.scenario == quick.NAME:
        return _measurements_answer(summary.rows)
    if summary.answers:
        return " ".join(map(sentence, summary.answers))
    if summary.comparison is not None and summary.comparison.verdicts:
        verdicts = summary.comparison.verdicts
        is_said = len(verdicts) == 1 and verdicts[0].gate is not None  # by the answer of the gate
        return "" if is_said else speedup_answer(summary.comparison, summary.rows, run)
    known = [row for row in summary.rows if row.load in run.scenario.loads and asks_known(run.scenario.loads[row.load])]
    if known and len(known) == len(summary.rows):
        return "" if summary.same_answers else " ".join(map(row_sentence, known))
    return _measurements_answer(summary.rows)


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
    when = f"after {count(sent, 'request')}" + (f" of {cell.load}" if cell.stage is not None else "")
    if after_s is not None:
        when += f", {f'{units.figures(after_s)} s' if after_s < 90 else units.duration(after_s)} into the load"
    facts = [f"exit code {values['exit_code']}"] if values.get("exit_code") is not None else []
    facts += ["out of memory"] if any(reason.code == "out_of_memory" for reason in reasons) else []
    why = values.get("cause") or values.get("detail")
    why = f"nothing listens at {why} any more" if values.get("how") == "closed" else why
    facts += [str(why)] if why and "out of memory" not in facts else []
    ran = run.ran.get(cell.id)
    log = f"Its log: logs/{cell.id}.server.log in the folder of the run (`harness explain LOG` reads it)."
    if ran is not None and ran.served_by.template is None:
        log = "Read its own log (`harness explain LOG`)."
    return f"{what}{name} {ended} {when}{': ' * bool(facts)}{', '.join(facts)}. Its numbers cannot be used. {log}"


def comparison_answer(comparison: Comparison) -> str:
    """The answer of `harness compare`: whether a side is slower than the first; and other versions of the engine."""
    versions = [each for each in comparison.differences if each.key.endswith("startup.version")]
    shown = [f"The engine's versions differ: {', '.join(each.values)}." for each in versions[:1]]
    answers = map(answers_sentence, comparison.same_answers)
    verdicts = [_comparison_answer(comparison)] if comparison.verdicts else []
    return " ".join([*map(sentence, comparison.answers), *verdicts, *answers, *shown])


def _comparison_answer(comparison: Comparison) -> str:
    """What the worst verdict shows of a slowdown, and how many others there are."""
    verdicts = comparison.verdicts
    faster = None if comparison.answers else largest_effect(verdicts, "faster")
    shown = "" if faster is None else f"{faster.side} is {describe_change(faster)}. "
    failed = [check.check for check in comparison.checks if check.status == "failed"]
    checks = f" {count(len(failed), 'check')} failed: {', '.join(failed)}." if failed else ""
    return f"{shown}{gates_answer(verdicts)}{checks}"


def _parse_or_none(text: str) -> Check | None:
    try:
        return parse_check(text)
    except (ValueError, HarnessError):
        return None


def _is_slo(check: Check) -> bool:
    """Whether a check bounds what users or a job get; a check of the error rate does not."""
    return check.metric in _BOUNDED or bool(METRICS[check.metric].latency)


def _regression_answer(checks: Sequence[CheckResult]) -> str:
    total = count(len(checks), "check")
    failed = [check for check in checks if check.status == "failed"]
    if failed:
        first = f"{failed[0].check} ({evidence(failed[0].evidence)})"
        return f"Regression against the baseline: {len(failed)} of {total} failed: {first}."
    undecided = sum(check.status == "inconclusive" for check in checks)
    if undecided:
        return f"Inconclusive: {undecided} of {total} against the baseline cannot be decided, and none failed."
    return f"No regression against the baseline: {total} passed."


def _slo_answer(checks: Sequence[tuple[Check, CheckResult]], summary: Summary, run: Run) -> str:
    curves = levels_by_server(summary.rows, run)
    if curves and all(check.load is None for check, _ in checks):
        slos = [check.text for check, _ in checks]
        return " ".join(_capacity_answer(server, levels, slos, summary) for server, levels in curves.items())
    results = [result for _, result in checks]
    total = count(len(results), "SLO check")
    if failed := [result for result in results if result.status == "failed"]:
        return f"No: {len(failed)} of {total} failed. {failed[0].check}: {evidence(failed[0].evidence)}."
    if undecided := [result for result in results if result.status == "inconclusive"]:
        first = f"{undecided[0].check}: {evidence(undecided[0].evidence)}"
        return f"Inconclusive: {len(undecided)} of {total} cannot be decided. {first}."
    if len(results) == 1:
        return f"Yes: {results[0].check} is met. {evidence(results[0].evidence)}."
    return f"Yes: {total} passed: {', '.join(result.check for result in results[:3])}{', ...' * (len(results) > 3)}."


def in_flight(row: Row, run: Run) -> int | None:
    """How many requests a row of a closed loop has in flight at most; None: that is not fixed, or not known."""
    load = run.scenario.loads.get(row.load)
    is_closed = load is not None and run.origin is None and load.trace is None and load.arrivals is None
    return words.max_in_flight(load) if load is not None and is_closed and mix_of(row.load) is None else None


def _capacity_answer(server: str, levels: list[tuple[float, str, Row]], slos: Sequence[str], summary: Summary) -> str:
    """The highest level at which a server meets all SLOs, and the lowest at which it misses one."""
    levels = sorted(levels, key=lambda level: level[0])
    nets: dict[int, int] = {}  # by place among the levels, from 1
    points: list[LevelPoint] = []
    for place, (level, _, row) in enumerate(levels, 1):
        own = [slo for slo in slos if parse_check(slo).server in (None, row.server)]
        results = evaluate(own, [row], summary.comparison)
        statuses = {result.status for result in results}
        nets[place] = -1 if "failed" in statuses else 0 if "inconclusive" in statuses else 1
        excesses = [excess for result in results if (excess := _excess(result)) is not None]
        points += [LevelPoint(level, min(excesses))] if excesses else []
    answer = levels_answer(nets, None)
    what = " and ".join(slos)
    estimate = crossing_level(points)
    likely = f"; about {units.significant(estimate)} are likely" if estimate and len(points) > 1 else ""
    if answer is None:
        return f"{server}: {what} cannot be decided at any measured load{likely}."
    text = f"{server} meets {what} {f'up to {levels[int(answer.low) - 1][1]}' if answer.low else 'at no measured load'}"
    if answer.above:
        text += f", and misses {'it' if len(slos) == 1 else 'them'} at {levels[int(answer.above) - 1][1]}"
    elif answer.kind == "more_than":
        text += ", the most that was measured"
    undecided = [
        levels[place - 1][1] for place in range(int(answer.low or 0) + 1, int(answer.above or len(levels) + 1))
    ]
    text += f"; {undecided[0]} cannot be decided{likely}" if undecided else ""
    return f"{text}."


def _excess(result: CheckResult) -> float | None:
    """By how much a row meets a check, positive, or breaks it, negative."""
    if result.value is None or not result.bound:
        return None
    if parse_check(result.check).metric == "attainment":
        return result.value - result.bound
    return math.log(result.bound / result.value) if result.value > 0 else None


def _interference_answer(summary: Summary) -> str:
    """The largest effect of concurrent loads on one of them."""
    rows = {row.name: row for row in summary.rows}
    verdicts = summary.comparison.verdicts if summary.comparison is not None else []
    effects = [verdict for verdict in verdicts if verdict.ratio is not None and _is_mix_against_alone(verdict, rows)]
    if not effects:
        return ""
    worst = largest_effect(effects, "slower")
    if worst is None:
        return "No part of the mix is shown to be slower together than alone."
    alone, together = (_format_pooled_metric(rows[name], worst.metric) for name in (worst.baseline, worst.side))
    slower = ("higher", "lower") if METRICS[worst.metric].more_is_better else ("shorter", "longer")
    factor = format_speedup(worst.ratio or 0.0, *slower)
    return f"Together, {worst.side} is slowed most: {METRICS[worst.metric].title} {alone} → {together}, {factor}."


def _is_mix_against_alone(verdict: Verdict, rows: Mapping[str, Row]) -> bool:
    """Whether a verdict is of a part of a mix against the same load alone."""
    row = rows.get(verdict.side)
    return (
        row is not None
        and mix_of(row.load) is not None
        and verdict.baseline == f"{row.server} / {load_of_part(row.load)}"
    )


def _format_pooled_metric(row: Row, metric: str) -> str:
    """The value of a verdict's metric over all repeats, with its unit."""
    value = METRICS[metric].of(row.pooled)
    return units.NOTHING if value is None else words.format_metric(value, metric)


def _measurements_answer(rows: Sequence[Row]) -> str:
    """The numbers of the first rows, for a run that compares nothing."""
    if not rows:
        return "Nothing was measured."
    short = short_row_names(rows)
    if len(rows) == 1:
        return f"{rows[0].name}: {_describe_numbers(rows[0])}."
    shown = "; ".join(f"{short.get(row.name, row.name)}: {_describe_numbers(row)}" for row in rows[:3])
    more = f"; {count(len(rows) - 3, 'more row')} below" if len(rows) > 3 else ""
    return f"{shown}{more}."


def _describe_numbers(row: Row) -> str:
    numbers = row.pooled
    parts = [f"{units.seconds(numbers.wall)} wall time"] if numbers.wall is not None else []
    if numbers.output_tok_s is not None:
        parts.append(f"{units.significant(numbers.output_tok_s)} tok/s")
    elif numbers.input_tok_s is not None:
        parts.append(f"{units.significant(numbers.input_tok_s)} prompt tok/s")
    for name, sample in (("TTFT", numbers.ttft), ("E2E", numbers.e2e)):
        if sample.p50 is not None:
            parts.append(f"median {name} {units.milliseconds(sample.p50)}\u00a0ms")
            break
    if parts:
        return ", ".join(parts)
    succeeded = f"{numbers.succeeded:,} of {count(numbers.sent, 'request')} succeeded"
    # Of a test of a prompt alone, that there is no output is no news.
    of_prompt = numbers.output_tokens is None and "input_tok_s" in row.missing
    why = row.missing.get("input_tok_s" if of_prompt else "output_tok_s")
    return succeeded if why is None else f"the speed is not known ({why}); {succeeded}"


def load_descriptions(run: Run) -> dict[str, str]:
    """Each load in words; none of an imported run, because its scenario only names what the tool reported."""
    loads = run.scenario.loads if run.origin is None else {}
    return {name: words.describe_load(load) for name, load in loads.items()}


_UNCHECKED = {
    "running": "UNFINISHED: the run is still in progress, or was killed; its records so far are shown",
    "interrupted": "INTERRUPTED: the run was stopped before its end; its records so far are shown",
    "live": "LIVE: controlled in the web UI, so it has no verdict; its records are shown",
    "failed": "FAILED: the run could not be carried out; its records so far are shown",
}


def validity_sentence(summary: Summary, run: Run) -> str:
    """VALID or INVALID, or why there is no verdict yet. Reasons are listed separately."""
    if run.status in _UNCHECKED:
        return _UNCHECKED[run.status]
    if summary.valid:
        failed = sum(row.failed is not None for row in summary.rows)
        result = f"; {failed} of {count(len(summary.rows), 'row')} failed, which is their result" if failed else ""
        return f"VALID: all conditions of a trustworthy measurement held{result}"
    if summary.valid is None:
        return (
            "UNCHECKED: an imported file does not show whether the load generator kept up, the server stayed up and "
            "the tokens were counted right"
        )
    if any(verdict.ratio is not None for verdict in (summary.comparison.verdicts if summary.comparison else [])):
        return "INVALID: rows with a cell that is not valid have no verdict, and the run is not compared with others"
    return "INVALID: do not trust the rows concerned; the run is not compared with other runs"


def state_sentence(summary: Summary, run: Run) -> tuple[str, Literal["good", "unsure", "bad"]]:
    """One word on a run with its sentence, and its colour: the validity, else the result of its checks.

    A run that was stopped before its end is not "bad".
    """
    validity, total = validity_sentence(summary, run), count(len(summary.checks), "check")
    if run.status in _UNCHECKED or summary.valid is False:
        return validity, "bad" if run.status == "failed" or run.status not in _UNCHECKED else "unsure"
    by_status: dict[str, list[str]] = defaultdict(list)
    for result in summary.checks:
        by_status[result.status].append(result.check)
    parts = [(each, f"{len(of)} of {total}: {', '.join(of)}") for each in ("failed", "inconclusive")
             if (of := by_status[each])]  # fmt: skip
    if parts:
        (word, text), *others = parts
        text += "".join(f"; {other} {more}" for other, more in others)
        return f"{word.upper()}: {text}", "bad" if word == "failed" else "unsure"
    if summary.valid is None or not summary.checks:
        return validity, "unsure" if summary.valid is None else "good"
    return f"PASSED: {total} passed, and {validity.partition(': ')[2]}", "good"


def notes_sentence(summary: Summary, number: int, sign: str) -> str:
    """What so many notes on the validity come to, in one plain line. `sign`: that late numbers have; empty if none."""
    limited = [row for row in summary.rows if row.client_limited]
    if any(note.code == "host_cpu_full" for note in summary.notes):
        why = "This machine was busy"
    else:
        why = "The load generator was late" if limited else ""
    if limited and not sign:
        return f"{why}; no number shown is affected"
    if limited:
        error = max(map(_largest_error, limited))
        most = f"{units.figures(100 * error, 2)}\u00a0%"
        how = "were read late" if error < _SHOWN_ERROR else "are exact to" if error < 0.1 else "may be wrong by"
        return f"{why}: numbers with {sign} {how}" + f" {most}" * (error >= _SHOWN_ERROR)
    if any(note.code == "import_defined" and note.values["other"] for note in summary.notes):
        return f"Numbers with {OTHERWISE} are defined otherwise"
    return f"{why}, but the load generator kept up" if why else f"{count(number, 'note')} on these numbers"


def _largest_error(row: Row) -> float:
    """By how much at most the load generator changed the numbers that it limited, as a share."""
    limited = (error for each, error in row.client_error.items() if METRICS[each].field in row.client_limited)
    return max(map(max, limited), default=0.0)


def client_limit_sentence(summary: Summary, sign: str = "") -> str:
    """Which numbers of which rows the load generator limited, and by how much at most; empty where none are.

    `sign`: of such numbers, where they are shown.
    """
    rows: dict[str, list[str]] = defaultdict(list)
    for row in summary.rows:
        if row.client_limited:
            error = _largest_error(row)
            by = "" if error < _SHOWN_ERROR else f" (by {units.figures(100 * error)}\u00a0% at most)"
            rows[number_names(row.client_limited)].append(f"{row.name}{by}")
    if not rows:
        return ""
    parts = "; ".join(f"{numbers} of {', '.join(names)}" for numbers, names in rows.items())
    rest = "verdicts allow for it" if summary.valid else "the run is not compared with other runs"
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
    return list(map(_failure_sentence, groups.values()))


def _failure_sentence(rows: list[FailedRequests]) -> str:
    first = rows[0]
    counts = ", ".join(f"{row.server} / {row.load}: {count(row.count, 'request')}" for row in rows)
    repeated = not first.message or first.message[-20:] in (first.cause or "")
    message = "" if repeated else f'; said was "{first.message}"'
    cause = "nothing known of it" if first.cause is None else f"{first.cause}; to solve it: {first.fix}"
    return f"{counts} ({first.kind}): {cause}{message}"


def no_findings_sentence(succeeded: Sequence[int], problems: Sequence[str]) -> tuple[str, Literal["good", "unsure"]]:
    """That there is no finding, and its colour. `succeeded`: requests of each row; with few, most rules show nothing.
    `problems`: what the page shows all the same.
    """
    few = [number for number in succeeded if number < ENOUGH]
    if not few and not problems:
        return "FINDINGS: no problem found", "good"
    parts = [f"no cause found for {' and '.join(problems)}" if problems else "none"]
    if few:
        least, most = min(few), max(few)
        number = count(most, "request") if least == most else f"{least} to {count(most, 'request')}"
        rows = "" if len(succeeded) == 1 else f" of {count(len(few), 'row')}"
        verb = "is" if most == 1 else "are"
        parts.append(f"{number}{rows} {verb} too few for most findings, which need {ENOUGH}")
    return f"FINDINGS: {'; '.join(parts)}", "unsure"


def shown_problems(summary: Summary) -> list[str]:
    """What the page of a run shows that is no finding: failed requests, failed checks, and the result of hours."""
    failed_checks = any(check.status == "failed" for check in summary.checks)
    drifts = any(found.word in ("failed", "drifts") for found in summary.soaks)
    shown = {"failed requests": bool(summary.failures), "failed checks": failed_checks, "what the hours show": drifts}
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
        yield from (Bullet("", mark=place, code=text) for place, text in action.settings.items())
        if action.gain is not None:
            yield Bullet(sentence(action.gain), mark="Expect")
        if action.risk:
            yield Bullet(action.risk, mark="Risk")
        yield Bullet("", mark="Verify", code=action.verify)


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
        return f"Imported: measured by {run.origin.tool} {version}, not by this suite."
    scenario = run.scenario
    stages = ", one for all stages of a load" if any(load.stages for load in scenario.loads.values()) else ""
    fresh = f"a fresh server for each{stages}" if scenario.restart else "warm: one server per repeat"
    order = ", interleaved" if scenario.repeats > 1 else ""
    repeats = count(scenario.repeats, "repeat")
    return f"{repeats} of every row{order}, {fresh}; seed {scenario.seed}."
