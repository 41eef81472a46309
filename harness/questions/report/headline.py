"""The first sentence of a run's page: the answer to the question that the run asked.

It is about the first of these that a run has: checks against a baseline (regression), SLOs, loads measured together
(interference), rows compared with a baseline row (speedup); else the numbers of its rows.
"""

import math
from collections.abc import Mapping, Sequence

from harness.base import units
from harness.base.errors import HarnessError
from harness.base.metrics import METRICS
from harness.base.reason import sentence
from harness.base.units import count
from harness.numbers.check_values import format_check_value
from harness.numbers.checks import evaluate
from harness.numbers.comparable import engine_versions
from harness.numbers.comparison import CheckResult, Verdict
from harness.numbers.summary import Row, Summary
from harness.questions.capacity.decide import LevelPoint, crossing_level, levels_answer
from harness.questions.crossover.speculation import short_answers
from harness.questions.same_answers.page import answers_sentence, row_sentence
from harness.questions.soak import soak_answer
from harness.questions.startup import startup_facts
from harness.records.manifest import QUICK, Run
from harness.report import words
from harness.report.comparisons import gates_answer, largest_effect, levels_by_server, short_row_names, speedup_answer
from harness.report.elements import LIMITED
from harness.report.sentences import death_answer
from harness.report.verdict_text import format_speedup, undecided_text
from harness.scenario import asks_known
from harness.scenario.check_syntax import ANSWER_SHARES, SLO_METRICS, Check, parse_check
from harness.scenario.plan import load_of_part, mix_of

_CUT = ("running", "interrupted", "failed")
_BOUNDED = (*SLO_METRICS, *ANSWER_SHARES, "output_tok_s", "input_tok_s", "requests_per_s", "wall")


def run_answer(summary: Summary, run: Run) -> str:
    """The answer of a run, or why it has no answer; with the versions if its servers have several of one engine."""
    if why := _why_unanswered(summary, run):
        return why
    answer = _run_answer(summary, run)
    gated = summary.comparison is not None and any(verdict.gate for verdict in summary.comparison.verdicts)
    gates = [gates_answer(summary.comparison.verdicts)] if summary.comparison is not None and gated else []
    answer = " ".join([*gates, answer, *map(answers_sentence, summary.same_answers)]).strip()
    for engine, versions in engine_versions(run).items():
        versions_text = ", ".join(f"{name} {version}" for name, version in versions.items())
        answer += f" The servers run different versions of {engine} ({versions_text}), so the comparison includes what "
        answer += "changed between them."
    return answer


def _why_unanswered(summary: Summary, run: Run) -> str:
    """Why a run has no answer; empty where it has one. The end of its server is one, and so are the hours before it."""
    if summary.soaks or death_answer(summary, run):
        return ""
    if run.status in _CUT:
        is_failed = run.status == "failed" and bool(run.reasons)
        return f"No answer: {sentence(run.reasons[0])}." if is_failed else "No answer: the run did not come to its end."
    if summary.valid is not False or run.status == "live":
        return ""
    why = next((reason.text for reason in summary.reasons), "")
    return f"No answer: the run is INVALID{why and f', because {why}'}."


def _run_answer(summary: Summary, run: Run) -> str:
    is_cut = run.status in _CUT
    death = death_answer(summary, run)
    if summary.soaks:  # a server that failed makes the run INVALID, and is the answer; so do the hours before an end
        answers = [death] * bool(death) + [sentence(soak_answer(soak)) for soak in summary.soaks]
        return " ".join([*answers, *(["The run did not come to its end."] if is_cut else [])])
    if is_cut or (summary.valid is False and death):
        return death
    checks = [(check, result) for result in summary.checks if (check := _parse_or_none(result.check)) is not None]
    if relative := [result for check, result in checks if check.relative]:
        return _regression_answer(relative)
    interference, slos = _interference_answer(summary), [pair for pair in checks if _is_slo(pair[0])]
    if slos:  # what is known of the mix comes before an SLO that is not decided
        are_open = not any(result.status == "failed" for _, result in slos)
        answers = [_slo_answer(slos, summary, run), interference]
        return " ".join(filter(None, reversed(answers) if are_open and interference else answers[:1]))
    if interference:
        return interference
    if summary.scenario == QUICK:
        return _measurements_answer(summary.rows)
    if summary.answers:
        return " ".join(map(sentence, startup_facts(short_answers(summary.answers))[0]))
    if summary.comparison is not None and summary.comparison.verdicts:
        verdicts = summary.comparison.verdicts
        is_answered = len(verdicts) == 1 and verdicts[0].gate is not None  # by the answer of the gate
        return "" if is_answered else speedup_answer(summary.comparison, summary.rows, run)
    answer_rows = [
        row for row in summary.rows if row.load in run.scenario.loads and asks_known(run.scenario.loads[row.load])
    ]
    if answer_rows and len(answer_rows) == len(summary.rows):
        return "" if summary.same_answers else " ".join(map(row_sentence, answer_rows))
    return _measurements_answer(summary.rows)


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
    if failed := [check for check in checks if check.status == "failed"]:
        others = f" {len(failed)} of {total} against the baseline failed." if len(failed) > 1 else ""
        return f"Worse than the baseline allows: `{failed[0].check}` is not met. {_so_far(failed[0])}.{others}"
    if undecided := [check for check in checks if check.status == "inconclusive"]:
        first = undecided[0]
        text = f"Cannot tell yet whether it is worse than the baseline allows: `{first.check}` is not decided. "
        return f"{text}{_so_far(first)}.{_settled_by(first)}"
    return f"Not worse than the baseline allows: {total} passed."


def _slo_answer(checks: Sequence[tuple[Check, CheckResult]], summary: Summary, run: Run) -> str:
    curves = levels_by_server(summary.rows, run)
    if curves and all(check.load is None for check, _ in checks):
        slos = [check.text for check, _ in checks]
        return " ".join(_capacity_answer(server, levels, slos, summary) for server, levels in curves.items())
    results = [result for _, result in checks]
    total = count(len(results), "SLO")
    if failed := [result for result in results if result.status == "failed"]:
        others = f" {len(failed)} of {total} are missed." if len(failed) > 1 else ""
        return f"No: `{failed[0].check}` is missed. {_so_far(failed[0])}.{others}"
    if undecided := [result for result in results if result.status == "inconclusive"]:
        first, met = undecided[0], len(results) - len(undecided)
        rest = f" {count(met, 'other SLO is', 'other SLOs are')} met." if met else ""
        return f"Cannot tell yet whether `{first.check}` is met. {_so_far(first)}.{_settled_by(first)}{rest}"
    if len(results) == 1:
        return f"Yes: `{results[0].check}` is met. {_so_far(results[0])}."
    return (
        f"Yes: all {total} are met: {', '.join(result.check for result in results[:3])}{', ...' * (len(results) > 3)}."
    )


def _so_far(result: CheckResult) -> str:
    """The value of a check, with its interval: "one / job has 14.5 ms so far (12.9 ms to 20.1 ms)"."""
    row_evidence = next(iter(result.evidence), None)
    values = {} if row_evidence is None else row_evidence.values
    unit, against = values.get("unit"), values.get("against")
    if unit is None or (result.value is None and values.get("above") is None):
        return "" if row_evidence is None else sentence(row_evidence)
    shown: float = values["above"] if result.value is None else result.value
    text = f"{result.row} has {'at least ' if result.value is None else ''}{format_check_value(shown, unit)}"
    text += " so far" if result.status == "inconclusive" else ""
    if against and against["value"]:
        base = f"{format_check_value(against['value'], unit)} of {against['name']}"
        return f"{text}, {units.ratio_text(shown / against['value'])} times the {base}"
    if result.low is not None and result.high is not None and result.low < result.high:
        text += f" ({format_check_value(result.low, unit)} to {format_check_value(result.high, unit)})"
    return text


def _settled_by(result: CheckResult) -> str:
    """What decides a check, as a sentence with a space before it; empty where that is not known."""
    if result.more_requests is not None:
        few = "It has too few requests: about" if result.code == "too_few_requests" else "About"
        return f" {few} {count(result.more_requests, 'more request')} should settle it."
    if result.code == "too_close":
        return " The value is too close to the bound to decide."
    if result.code == "unknown_requests":
        values = result.evidence[0].values if result.evidence else {}
        unknown, requests = (values.get("unknown") or 0) + (values.get("censored") or 0), values.get("requests") or 0
        text = f" Of {count(requests, 'request')}, {unknown:,} were cut before it could be known."
        return f"{text} A longer run settles it where the end of the run cut them, but not where their users left."
    return ""


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
        unknown = largest_effect(effects)
        seen = "" if unknown is None else f": {unknown.side} is {undecided_text(unknown)}"
        return f"It is not shown that a part of the mix is slower together than alone{seen}."
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
    rows = [row for row in rows if row.failed is None] or rows  # notes say why a setting failed
    short = short_row_names(rows)
    if len(rows) == 1:
        return f"{rows[0].name}: {_describe_numbers(rows[0])}."
    shown = "; ".join(f"{short.get(row.name, row.name)}: {_describe_numbers(row)}" for row in rows[:3])
    more = f"; {count(len(rows) - 3, 'more row')} below" if len(rows) > 3 else ""
    return f"{shown}{more}."


def _describe_numbers(row: Row) -> str:
    numbers, limited = row.pooled, row.client_limited
    parts = [f"{units.seconds(numbers.wall)} wall time"] if numbers.wall is not None else []
    if numbers.output_tok_s is not None:
        parts.append(f"{units.significant(numbers.output_tok_s)}{LIMITED if 'output_tok_s' in limited else ''} tok/s")
    elif numbers.input_tok_s is not None:
        parts.append(f"{units.significant(numbers.input_tok_s)} prompt tok/s")
    for name, sample in (("TTFT", numbers.ttft), ("E2E", numbers.e2e)):
        if sample.p50 is not None:
            mark = LIMITED if name.lower() in limited else ""
            parts.append(f"median {name} {units.milliseconds(sample.p50)}{mark}\u00a0ms")
            break
    if parts:
        return ", ".join(parts)
    succeeded = f"{numbers.succeeded:,} of {count(numbers.sent, 'request')} succeeded"
    # Of a test of a prompt alone, that there is no output is no news.
    counts_prompts = numbers.output_tokens is None and "input_tok_s" in row.missing
    why = row.missing.get("input_tok_s" if counts_prompts else "output_tok_s")
    return succeeded if why is None else f"the speed is not known ({why}); {succeeded}"
