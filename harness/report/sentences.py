"""What a report says in sentences: each row, the validity, and how the comparison was made."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from harness import units
from harness.columns import METRIC_WORDS, RATES, WORK
from harness.reasons import number_words, sentence, sentences, speed, verdict_sentence, verdict_text
from harness.report import words
from harness.report.table import LIMITED, TableLine
from harness.rundir.manifest import Run
from harness.scenario.plan import alone, mix_of
from harness.summary import Comparison, FailedRequests, Reason, Row, Summary, Verdict
from harness.units import count

SHOWN = 7  # verdicts that a report shows at once; the rest is folded
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]\d+)?")  # 2, 2.1, 1,234 and 1.2e+02 alike


def of_row(line: TableLine, run: Run) -> str:
    """A row of the table as one sentence."""
    numbers = line.row.pooled
    load = run.scenario.loads.get(line.row.load)
    work = words.load_in_words(load) if load and run.origin is None else ""
    text = f"{work[0].upper()}{work[1:]}. " if work else ""
    if not numbers.succeeded:
        return f"{text}None of {units.count(numbers.sent, 'request')} succeeded."
    text += f"{_outcome(line)}{_against_baseline(line)}"
    ttft = numbers.ttft_s
    if ttft.p50 is not None:
        text += f"; median TTFT {units.milliseconds(ttft.p50)}\u00a0ms"
        if ttft.p95 is not None:
            text += f", p95 {units.milliseconds(ttft.p95)}\u00a0ms"
    wrong = numbers.failed + numbers.unfinished
    if wrong:
        text += f"; {units.count(wrong, 'request')} of {numbers.sent:,} failed or did not finish"
    return f"{text}."


def _outcome(line: TableLine) -> str:
    numbers = line.row.pooled
    if numbers.wall_s is not None:
        return f"A run took {units.seconds(numbers.wall_s)}"
    if numbers.output_tok_s is not None:
        return f"{units.significant(numbers.output_tok_s)} tokens a second in all"
    if numbers.vectors is not None and numbers.input_tok_s is not None:
        return f"{units.significant(numbers.input_tok_s)} tokens of prompts a second in all"
    return "Neither wall time nor rate is known"


def _against_baseline(line: TableLine) -> str:
    if line.baseline:
        return ", the baseline for the others"
    verdict = line.verdict
    if verdict is None or verdict.ratio is None:
        return ""
    by = f"by {METRIC_WORDS[verdict.metric]}"
    base = line.against or "the baseline"
    factor = f", {by} {speed(verdict.ratio)} than {base}"
    return {
        "faster": factor,
        "slower": factor,
        "same": f", {by} the same as {base}",
    }.get(verdict.word, f"{factor}, which is inconclusive")


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
    for verdict in by_weight(verdicts):
        sides[verdict.metric + verdict_sentence(verdict, side="")].append(verdict)
    metrics: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for alike in sides.values():
        first = alike[0]
        # Only verdicts without a ratio can be equal by several metrics.
        by = None if first.word != "inconclusive" or first.reason in ("refused", "no_values") else "*"
        name = ", ".join(dict.fromkeys(verdict.side for verdict in alike))
        metrics[name, verdict_sentence(first, side=name, by=by)].append(first)
    return [(found[0].word, _of_metrics(name, found)) for (name, _), found in metrics.items()]


def _of_metrics(name: str, verdicts: Sequence[Verdict]) -> str:
    by = ", ".join(METRIC_WORDS[verdict.metric] for verdict in verdicts)
    return verdict_sentence(verdicts[0], side=name, by=by)


def by_weight(verdicts: Sequence[Verdict]) -> list[Verdict]:
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


def in_short(verdict: Verdict, comparison: Comparison) -> str:
    """A verdict's details, where its side, word and baseline are already shown."""
    if verdict.ratio is None:
        return f"{verdict_text(verdict)}."
    floor = f"±{units.figures(100 * comparison.noise_floor)}\u00a0%"
    # Only the baseline of all rows is shown with them.
    own = verdict.baseline == comparison.verdicts[0].baseline
    by = "" if comparison.metric is not None else f" by {METRIC_WORDS[verdict.metric]}"  # else it is said above
    alike = by if own else f" as {verdict.baseline}{by}"
    if verdict.word == "same":
        return f"as fast{alike} within {floor}, which is noise"
    factor = f"{speed(verdict.ratio)}{'' if own else f' than {verdict.baseline}'}{by}"
    if verdict.word != "inconclusive":
        return factor
    if verdict.reason == "in_margin":
        return f"about as fast{alike}, but not surely within {floor}{_settled(verdict)}"
    return f"{factor}, but {_doubt(verdict)}{_settled(verdict)}"


def in_short_by_side(comparison: Comparison) -> list[tuple[str, str, str]]:
    """The word, the side, and what one needs to know; verdicts on one side that have the same word as one."""
    groups: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for verdict in by_weight(comparison.verdicts):
        groups[verdict.word, verdict.side, verdict.baseline].append(verdict)
    found = []
    for (word, side, base), alike in groups.items():
        if len(alike) == 1 or None in {verdict.ratio for verdict in alike}:
            found += [(word, side, in_short(verdict, comparison)) for verdict in alike]
            continue
        factors = ", ".join(f"{METRIC_WORDS[verdict.metric]} {speed(verdict.ratio or 0)}" for verdict in alike)
        against = "" if base == comparison.verdicts[0].baseline else f" than {base}"
        doubts = {f", but {_doubt(verdict)}{_settled(verdict)}" for verdict in alike if word == "inconclusive"}
        found.append((word, side, f"{factors}{against}{doubts.pop() if len(doubts) == 1 else ''}"))
    return found


def effects(summary: Summary) -> list[list[tuple[Verdict, str]]]:
    """The interference in each part of a mix: verdicts against the same load alone, in words."""
    parts: dict[str, list[tuple[Verdict, str]]] = defaultdict(list)
    if summary.comparison is not None:
        for verdict in _of_mixes(summary, summary.comparison):
            parts[verdict.side].append((verdict, _effect(verdict, summary.comparison, summary)))
    return list(parts.values())


def _of_mixes(summary: Summary, comparison: Comparison) -> list[Verdict]:
    mixed = {row.name: f"{row.server} / {alone(row.load)}" for row in summary.rows if mix_of(row.load) is not None}
    return [verdict for verdict in comparison.verdicts if mixed.get(verdict.side) == verdict.baseline]


def but_for_effects(summary: Summary) -> Comparison | None:
    """The comparison without what `effects` says; None where nothing is left."""
    if summary.comparison is None:
        return None
    mixed = _of_mixes(summary, summary.comparison)
    left = [verdict for verdict in summary.comparison.verdicts if verdict not in mixed]
    return msgspec.structs.replace(summary.comparison, verdicts=left) if left else None


def _effect(verdict: Verdict, comparison: Comparison, summary: Summary) -> str:
    """A number alone, together, the factor, and how sure that is."""
    rows = {row.name: row for row in summary.rows}
    alone, together = (_value(rows[name], verdict.metric) for name in (verdict.baseline, verdict.side))
    rate = verdict.metric in RATES
    unit = "tok/s" if rate else "s" if verdict.metric == "wall_s" else "ms"
    numbers = f"{alone} → {together} {unit}"
    if verdict.ratio is None:
        return f"{numbers if units.NOTHING not in (alone, together) else 'not known'}: {verdict_text(verdict)}."
    more, less = ("higher", "lower") if rate else ("shorter", "longer")
    text = f"{numbers}, {speed(verdict.ratio, more, less)}"
    if verdict.word == "same":
        return f"{text}, within ±{units.figures(100 * comparison.noise_floor)}\u00a0%, which is noise"
    return text if verdict.word != "inconclusive" else f"{text}, but {_doubt(verdict)}{_settled(verdict)}"


def _value(row: Row, metric: str) -> str:
    if metric in WORK:
        rate: float | None = getattr(row.pooled, metric)
        return units.NOTHING if rate is None else units.significant(rate)
    latency, _, at = metric.rpartition("_")
    value: float | None = getattr(getattr(row.pooled, f"{latency}_s"), at)
    return units.NOTHING if value is None else units.milliseconds(value)


def _doubt(verdict: Verdict) -> str:
    if verdict.low is not None and verdict.high is not None and verdict.low <= 1 <= verdict.high:
        return "the 95\u00a0% interval includes 1"
    if verdict.reason == "apart":
        return "the repeats of the two rows are not interleaved"
    if verdict.reason == "run_variation_unknown":
        return "the variation between runs is not known"
    return f"{min(verdict.n)} against {max(verdict.n)} values are too few to be sure"


def _settled(verdict: Verdict) -> str:
    return f"; about {verdict.needed} would decide" if verdict.needed else ""


def gathered(reasons: Sequence[Reason]) -> list[str]:
    """Reasons or notes in words, those of several cells that differ in numbers only as one."""
    alike: dict[object, list[Reason]] = defaultdict(list)
    for number, reason in enumerate(reasons):
        texts = tuple((key, _NUMBER.sub("#", value)) for key, value in reason.values.items() if isinstance(value, str))
        alike[number if reason.cell is None else (reason.code, texts)].append(reason)
    return [
        sentence(many[0]) + (f" (likewise in {units.count(len(many) - 1, 'other run')})" if len(many) > 1 else "")
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
    counts = ", ".join(f"{one.server} / {one.load}: {units.count(one.count, 'request')}" for one in rows)
    text = f"{counts} ({failed.kind})"
    repeated = not failed.message or failed.message[-20:] in (failed.cause or "")
    said = "" if repeated else f'; said was "{failed.message}"'
    if failed.cause is None:
        return f"{text}: nothing known of it{said}"
    return f"{text}: {failed.cause}; to solve it: {failed.fix}{said}"


def by_what(comparison: Comparison) -> str:
    """What speed was judged by, where it is the same for all; else all there are."""
    kinds = {
        "wall_s": "wall time",
        "output_tok_s": "output tokens per second",
        "input_tok_s": "prompt tokens per second",
    }
    if comparison.metric is not None:
        return kinds.get(comparison.metric, METRIC_WORDS[comparison.metric])
    found = dict.fromkeys(kinds.get(verdict.metric, METRIC_WORDS[verdict.metric]) for verdict in comparison.verdicts)
    return f"{' or '.join(found)}, as each line says" if found else "no metric"


def of_method(comparison: Comparison) -> str:
    """How the verdicts were reached."""
    correction = (
        ("no comparison could be made", "one comparison")[comparison.comparisons]
        if comparison.comparisons < 2
        else f"{comparison.comparisons} comparisons, p-values corrected for that"
    )
    floor = units.figures(100 * comparison.noise_floor)
    return f"By {by_what(comparison)}; {correction}. Differences under {floor}\u00a0% are treated as noise." + (
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
    repeats = units.count(scenario.repeats, "repeat")
    return f"{repeats} of every row, interleaved, {fresh}; seed {scenario.seed}."
