"""What a report says in sentences: the answer first, then each load, the validity, and how the comparison was made.

The answer is about the first of these that a run has: checks against a baseline (regression), SLOs, loads measured
together (interference), rows compared with a baseline row (speedup); else what was measured.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from harness import units
from harness.columns import METRIC_WORDS, RATES, WORK
from harness.errors import HarnessError
from harness.judge.checks import evaluate
from harness.judge.verdicts import without_concurrency
from harness.reasons import evidence, number_words, sentence, sentences, speed, verdict_sentence
from harness.report import words
from harness.report.table import LIMITED
from harness.rundir.manifest import Run
from harness.scenario.check_syntax import JUDGED_BY_SLOS, LATENCIES, Check, parse_check
from harness.scenario.plan import alone, mix_of
from harness.summary import CheckResult, Comparison, FailedRequests, Reason, Row, Summary, Verdict
from harness.units import count

SHOWN = 7  # verdicts that a report shows at once; the rest is folded
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]\d+)?")  # 2, 2.1, 1,234 and 1.2e+02 alike
_BOUNDED = (*JUDGED_BY_SLOS, "output_tok_s", "input_tok_s", "requests_per_s", "wall")


def answer_of(summary: Summary, run: Run) -> str:
    """The answer of a run; why there is none where it is INVALID or did not end."""
    if run.status in ("running", "interrupted", "failed"):
        return "No answer: the run did not come to its end."
    if summary.valid is False and run.status != "live":
        return "No answer: the run is INVALID."
    checks = [(check, result) for result in summary.checks if (check := _read(result.check)) is not None]
    relative = [result for check, result in checks if check.relative]
    bounds = [(check, result) for check, result in checks if not check.relative and _is_bound(check)]
    if relative:
        return _regression(relative)
    if bounds:
        return _slos(bounds, summary, run)
    if effect := _interference(summary):
        return effect
    if summary.comparison is not None and summary.comparison.verdicts:
        return _speedup(summary.comparison, summary.rows)
    return _plain(summary.rows)


def answer_of_comparison(comparison: Comparison) -> str:
    """The answer of `harness compare`: whether a side is slower than the first."""
    verdicts = comparison.verdicts
    slower = _extreme(verdicts, "slower")
    number = sum(verdict.word == "slower" for verdict in verdicts)
    total = count(len(verdicts), "comparison")
    if slower is not None:
        which = "the largest: " if number > 1 else ""
        return f"Regression: {number} of {total}, {which}{_fact(slower, named=True)} than {slower.baseline}."
    unknown = sum(verdict.word == "inconclusive" for verdict in verdicts)
    if unknown:
        return f"Inconclusive: {unknown} of {total} cannot be decided, and none is slower."
    faster = _extreme(verdicts, "faster")
    better = "" if faster is None else f" The largest gain: {_fact(faster, named=True)}."
    return f"No regression: none of {total} is slower.{better}"


def _read(text: str) -> Check | None:
    try:
        return parse_check(text)
    except (ValueError, HarnessError):
        return None


def _is_bound(check: Check) -> bool:
    """Whether a check is what users or a job must get, and no condition of the run such as its error rate."""
    return check.metric in _BOUNDED or check.metric.rpartition("_")[0] in LATENCIES


def _regression(checks: Sequence[CheckResult]) -> str:
    total = count(len(checks), "check")
    failed = [check for check in checks if check.status == "failed"]
    if failed:
        first = f"{failed[0].check} ({evidence(failed[0].evidence)})"
        return f"Regression against the baseline: {len(failed)} of {total} failed: {first}."
    open_ = sum(check.status == "inconclusive" for check in checks)
    if open_:
        return f"Inconclusive: {open_} of {total} against the baseline cannot be decided, and none failed."
    return f"No regression against the baseline: {total} passed."


def _slos(bounds: Sequence[tuple[Check, CheckResult]], summary: Summary, run: Run) -> str:
    texts = [check.text for check, _ in bounds]
    curve = _curve(summary.rows, run)
    if curve and all(check.load is None for check, _ in bounds):
        return " ".join(_capacity(server, levels, texts, summary) for server, levels in curve.items())
    results = [result for _, result in bounds]
    total = count(len(results), "SLO check")
    failed = [result for result in results if result.status == "failed"]
    if failed:
        found = f"{failed[0].check}: {evidence(failed[0].evidence)}"
        return f"No: {len(failed)} of {total} failed. {found}."
    if open_ := [result for result in results if result.status == "inconclusive"]:
        found = f"{open_[0].check}: {evidence(open_[0].evidence)}"
        return f"Inconclusive: {len(open_)} of {total} cannot be decided. {found}."
    if len(results) == 1:
        return f"Yes: {results[0].check} is met. {evidence(results[0].evidence)}."
    return f"Yes: {total} passed: {', '.join(result.check for result in results[:3])}{', ...' * (len(results) > 3)}."


def _curve(rows: Sequence[Row], run: Run) -> dict[str, list[tuple[float, str, Row]]]:
    """By server its rows as (level, in words, row), where they differ in concurrency or rate alone; else empty."""
    found: dict[str, list[tuple[float, str, Row]]] = {}
    kinds: dict[str, set[bytes]] = {}
    for row in rows:
        load = run.scenario.loads.get(row.load)
        if load is None or run.origin is not None or mix_of(row.load) is not None or load.trace is not None:
            return {}
        if load.arrivals is not None:
            if load.arrivals.rate is None:
                return {}
            level, what = load.arrivals.rate, f"{load.arrivals.rate:g} requests/s"
            kind = b"open"
        else:
            level = words.concurrency(load)
            what = count(level, *(("chat user",) if load.user == "chat" else ("request at once", "requests at once")))
            kind = without_concurrency(load)
        found.setdefault(row.server, []).append((level, what, row))
        kinds.setdefault(row.server, set()).add(kind)
    alone = any(len({level for level, _, _ in levels}) < max(2, len(levels)) for levels in found.values())
    return {} if alone or any(len(kind) > 1 for kind in kinds.values()) else found


def _capacity(server: str, levels: list[tuple[float, str, Row]], texts: Sequence[str], summary: Summary) -> str:
    """Up to which level a server meets all bounds, and from where on it does not."""
    passed, missed, doubt = "", "", ""
    for _, what, row in sorted(levels, key=lambda level: level[0]):
        mine = [
            text for text in texts if (check := parse_check(text)).server in (None, row.server) and check.load is None
        ]
        found = {result.status for result in evaluate(mine, [row], summary.comparison)}
        if "failed" in found:
            missed = what
            break
        if "inconclusive" in found:
            doubt = doubt or what
        elif not doubt:
            passed = what
    slos = " and ".join(texts)
    text = f"{server} meets {slos} {f'up to {passed}' if passed else 'at no measured load'}"
    text += f"; {doubt} cannot be decided" if doubt else ""
    if missed:
        text += f", and misses {'it' if len(texts) == 1 else 'them'} at {missed}"
    elif passed and not doubt:
        text += ", the most that was measured"
    return f"{text}."


def _interference(summary: Summary) -> str:
    """The largest effect of concurrent loads on one of them."""
    rows = {row.name: row for row in summary.rows}
    verdicts = summary.comparison.verdicts if summary.comparison is not None else []
    found = [verdict for verdict in verdicts if verdict.ratio is not None and _is_effect(verdict, rows)]
    if not found:
        return ""
    worst = _extreme(found, "slower")
    if worst is None:
        return "No part of the mix is shown to be slower together than alone."
    rate = worst.metric in RATES
    unit = "tok/s" if rate else "s" if worst.metric == "wall_s" else "ms"
    alone, together = (_value(rows[name], worst.metric) for name in (worst.baseline, worst.side))
    factor = speed(worst.ratio or 0.0, *(("higher", "lower") if rate else ("shorter", "longer")))
    metric = METRIC_WORDS[worst.metric]
    return f"Together, {worst.side} is slowed most: {metric} {alone} → {together} {unit}, {factor}."


def _is_effect(verdict: Verdict, rows: Mapping[str, Row]) -> bool:
    """Whether a verdict is of a part of a mix against the same load alone."""
    row = rows.get(verdict.side)
    return row is not None and mix_of(row.load) is not None and verdict.baseline == f"{row.server} / {alone(row.load)}"


def _value(row: Row, metric: str) -> str:
    if metric in WORK:
        rate: float | None = getattr(row.pooled, metric)
        return units.significant(rate)
    latency, _, at = metric.rpartition("_")
    value: float | None = getattr(getattr(row.pooled, f"{latency}_s"), at)
    return units.milliseconds(value)


def _speedup(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The fastest and the slowest row against the baseline."""
    base = comparison.verdicts[0].baseline
    mine = [verdict for verdict in comparison.verdicts if verdict.baseline == base]
    best, worst = _extreme(mine, "faster"), _extreme(mine, "slower")
    short = _short_names(rows)
    against = short.get(base, base)
    others = len({verdict.side for verdict in mine}) > 1
    if best is not None:
        first = f"{short.get(best.side, best.side)} is {'the fastest: ' if others else ''}{_fact(best)} than {against}"
        last = "" if worst is None else f"; {short.get(worst.side, worst.side)} is {_fact(worst)}"
        return f"{first}{last}."
    if worst is not None:
        nothing = f"Nothing is faster than {against}: " if others else ""
        return f"{nothing}{short.get(worst.side, worst.side)} is {_fact(worst)} than {against}."
    same = list(dict.fromkeys(short.get(verdict.side, verdict.side) for verdict in mine if verdict.word == "same"))
    floor = f"±{units.figures(100 * comparison.noise_floor)}\u00a0%"
    unknown = [verdict for verdict in mine if verdict.word == "inconclusive"]
    if not unknown:
        return f"No difference: {', '.join(same)} and {against} are equally fast within {floor}."
    needed = [verdict.needed for verdict in unknown if verdict.needed is not None]
    settles = f" About {max(needed)} {unknown[0].unit} a side would decide." if len(needed) == len(unknown) else ""
    which = "the comparison" if len(mine) == 1 else f"{len(unknown)} of {len(mine)} comparisons"
    return f"Inconclusive: {which} with {against} cannot be decided.{settles}"


def _extreme(verdicts: Sequence[Verdict], word: str) -> Verdict | None:
    """The verdict with that word whose ratio is the farthest from 1."""
    found = [verdict for verdict in verdicts if verdict.word == word and verdict.ratio is not None]
    return max(found, key=lambda verdict: max(verdict.ratio or 0, 1 / (verdict.ratio or 1)), default=None)


def _fact(verdict: Verdict, *, named: bool = False) -> str:
    side = f"{verdict.side} is " if named else ""
    return f"{side}{speed(verdict.ratio or 0.0)} by {METRIC_WORDS[verdict.metric]}"


def _short_names(rows: Sequence[Row]) -> dict[str, str]:
    """Rows by what tells them apart: the load where all are of one server, the server where all are of one load."""
    servers, loads = {row.server for row in rows}, {row.load for row in rows}
    if len(servers) > 1 and len(loads) > 1:
        return {}
    return {row.name: row.load if len(servers) == 1 else row.server for row in rows}


def _plain(rows: Sequence[Row]) -> str:
    """What was measured, where nothing is compared."""
    if not rows:
        return "Nothing was measured."
    short = _short_names(rows)
    if len(rows) == 1:
        return f"{rows[0].name}: {_measured(rows[0])}."
    shown = "; ".join(f"{short.get(row.name, row.name)}: {_measured(row)}" for row in rows[:3])
    more = f"; {count(len(rows) - 3, 'more row')} below" if len(rows) > 3 else ""
    return f"{shown}{more}."


def _measured(row: Row) -> str:
    numbers = row.pooled
    parts = [f"{units.seconds(numbers.wall_s)} wall time"] if numbers.wall_s is not None else []
    if numbers.output_tok_s is not None:
        parts.append(f"{units.significant(numbers.output_tok_s)} tok/s")
    elif numbers.input_tok_s is not None:
        parts.append(f"{units.significant(numbers.input_tok_s)} prompt tok/s")
    for name, sample in (("TTFT", numbers.ttft_s), ("E2E", numbers.e2e_s)):
        if sample.p50 is not None:
            parts.append(f"median {name} {units.milliseconds(sample.p50)}\u00a0ms")
            break
    return ", ".join(parts) or f"{numbers.succeeded:,} of {count(numbers.sent, 'request')} succeeded"


def of_loads(run: Run) -> dict[str, str]:
    """Each load in words; of an imported run none, since its load is what the other tool says of it."""
    loads = run.scenario.loads if run.origin is None else {}
    return {name: words.load_in_words(load) for name, load in loads.items()}


def of_validity(summary: Summary, run: Run) -> str:
    """VALID or INVALID, or why there is no verdict yet. Reasons are listed separately."""
    if run.status == "running":
        return "UNFINISHED: the run is still in progress, or was killed; its records so far are shown"
    if run.status == "interrupted":
        return "INTERRUPTED: the run was stopped before its end; its records so far are shown"
    if run.status == "live":
        return "LIVE: controlled in the web UI, so it has no verdict; its records are shown"
    if run.status == "failed":
        return "FAILED: the run could not be carried out; its records so far are shown"
    if (limited := of_client(summary)) and summary.valid is not None:
        return f"{'VALID' if summary.valid else 'INVALID'}, CLIENT-LIMITED: {limited}"
    if summary.valid:
        failed = sum(row.failed is not None for row in summary.rows)
        result = f"; {failed} of {count(len(summary.rows), 'row')} failed, which is their result" if failed else ""
        return f"VALID: all conditions of a trustworthy measurement held{result}"
    if summary.valid is None:
        return (
            "NOT CHECKED: an imported file does not show whether the load generator kept up, the server stayed up and "
            "the tokens were counted right"
        )
    if any(verdict.ratio is not None for verdict in (summary.comparison.verdicts if summary.comparison else [])):
        return "INVALID: rows with a cell that is not valid have no verdict, and the run is not compared with others"
    return "INVALID: do not trust the rows concerned; the run is not compared with other runs"


def state_of(summary: Summary, run: Run) -> Literal["good", "unsure", "bad"]:
    """How a report marks what `of_validity` says."""
    if summary.valid is None and run.status == "unchecked":
        return "unsure"
    if not summary.valid or run.status != "valid":
        return "bad"
    return "unsure" if of_client(summary) else "good"


def of_client(summary: Summary) -> str:
    """Which numbers of which rows the load generator limited; empty where none are."""
    rows: dict[str, list[str]] = defaultdict(list)
    for row in summary.rows:
        if row.client_limited:
            rows[number_words(row.client_limited)].append(row.name)
    if not rows:
        return ""
    parts = "; ".join(f"{numbers} of {', '.join(names)}" for numbers, names in rows.items())
    rest = "all other numbers are valid" if summary.valid else "the run is not compared with other runs"
    return f"the load generator ({LIMITED}), not the server, was the limit of {parts}; {rest}"


def of_verdicts(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """The word and the sentence of each; verdicts that differ in nothing but side or metric as one."""
    sides: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in _by_weight(verdicts):
        sides[verdict.metric + verdict_sentence(verdict, side="")].append(verdict)
    metrics: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for alike in sides.values():
        first = alike[0]
        # Only verdicts without a ratio can be equal by several metrics.
        by = None if first.word != "inconclusive" or first.reason in ("refused", "no_values") else "*"
        name = ", ".join(dict.fromkeys(verdict.side for verdict in alike))
        metrics[name, verdict_sentence(first, side=name, by=by)].append(first)
    return [
        (found[0].word, verdict_sentence(found[0], side=name, by=", ".join(METRIC_WORDS[v.metric] for v in found)))
        for (name, _), found in metrics.items()
    ]


def _by_weight(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts in their order; where a report cannot show all of them, slower and faster first, the largest first."""
    if len(verdicts) <= SHOWN:
        return list(verdicts)
    order = ("slower", "faster", "inconclusive", "same")
    return sorted(verdicts, key=lambda one: (order.index(one.word), -abs(math.log(one.ratio)) if one.ratio else 0.0))


def rest_in_words(words_: Iterable[str]) -> str:
    """Verdicts that are not shown: "12 more: 8 faster, 4 same"; empty where there are none."""
    counted = Counter(words_)
    parts = ", ".join(f"{number} {word}" for word, number in counted.items())
    return f"{counted.total()} more: {parts}" if counted else ""


def gathered(reasons: Sequence[Reason]) -> list[str]:
    """Reasons or notes in words, those of several cells that differ in numbers only as one."""
    alike: dict[object, list[Reason]] = defaultdict(list)
    for number, reason in enumerate(reasons):
        texts = tuple((key, _NUMBER.sub("#", value)) for key, value in reason.values.items() if isinstance(value, str))
        alike[number if reason.cell is None else (reason.code, texts)].append(reason)
    return [
        sentence(many[0]) + (f" (likewise in {count(len(many) - 1, 'other run')})" if len(many) > 1 else "")
        for many in alike.values()
    ]


def of_failures(summary: Summary) -> list[str]:
    """Why requests failed: each cause once, how many of which rows, what to do; what was said where it is not known."""
    alike: dict[tuple[str, str | None, str], list[FailedRequests]] = defaultdict(list)
    for failed in summary.failures:
        alike[failed.kind, failed.id, _NUMBER.sub("#", failed.cause or failed.message)].append(failed)
    return [_of_failed(many) for many in alike.values()]


def _of_failed(rows: list[FailedRequests]) -> str:
    failed = rows[0]
    counts = ", ".join(f"{one.server} / {one.load}: {count(one.count, 'request')}" for one in rows)
    text = f"{counts} ({failed.kind})"
    repeated = not failed.message or failed.message[-20:] in (failed.cause or "")
    said = "" if repeated else f'; said was "{failed.message}"'
    if failed.cause is None:
        return f"{text}: nothing known of it{said}"
    return f"{text}: {failed.cause}; to solve it: {failed.fix}{said}"


def of_method(comparison: Comparison) -> str:
    """What was compared, how many comparisons were corrected for, and what is treated as noise."""
    found = list(dict.fromkeys(METRIC_WORDS[verdict.metric] for verdict in comparison.verdicts))
    by = " or ".join(found) + (", as each line says" if len(found) > 1 else "") if found else "no metric"
    correction = (
        ("no comparison could be made", "one comparison")[comparison.comparisons]
        if comparison.comparisons < 2
        else f"{comparison.comparisons} comparisons, p-values corrected for that"
    )
    floor = units.figures(100 * comparison.noise_floor)
    return f"By {by}; {correction}. Differences under {floor}\u00a0% are treated as noise." + (
        f" Variation between runs: {'; '.join(sentences(comparison.noise_source))}." if comparison.noise_source else ""
    )


def of_load(run: Run) -> str:
    """Repeats, order, and whether servers were fresh, in a sentence; of an imported run where it comes from."""
    if run.origin is not None:
        version = run.origin.version or "of unknown version"
        return f"Imported: measured by {run.origin.tool} {version}, not by this suite."
    scenario = run.scenario
    stages = ", one for all stages of a load" if any(load.stages for load in scenario.loads.values()) else ""
    fresh = f"a fresh server for each{stages}" if scenario.restart else "warm: one server per repeat"
    repeats = count(scenario.repeats, "repeat")
    return f"{repeats} of every row, interleaved, {fresh}; seed {scenario.seed}."
