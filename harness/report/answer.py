"""The first sentence of a report: the answer to the scenario's question, in its own terms.

The first of these that a run has: checks against a baseline (regression), SLOs, loads measured together, rows compared
with a baseline row (speedup); else what was measured.
"""

from collections.abc import Sequence

from harness import units
from harness.columns import METRIC_WORDS
from harness.errors import HarnessError
from harness.judge.checks import evaluate
from harness.judge.verdicts import but_for_concurrency
from harness.reasons import evidence, speed
from harness.report import sentences, words
from harness.rundir.manifest import Run
from harness.scenario.check_syntax import JUDGED_BY_SLOS, LATENCIES, Check, parse_check
from harness.scenario.plan import mix_of
from harness.summary import CheckResult, Comparison, Row, Summary, Verdict

_BOUNDED = (*JUDGED_BY_SLOS, "output_tok_s", "input_tok_s", "requests_per_s", "wall")


def of_run(summary: Summary, run: Run) -> str:
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


def of_comparison(comparison: Comparison) -> str:
    """The answer of `harness compare`: whether a side is slower than the first."""
    verdicts = comparison.verdicts
    slower = _extreme(verdicts, "slower")
    number = sum(verdict.word == "slower" for verdict in verdicts)
    total = units.count(len(verdicts), "comparison")
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
    total = units.count(len(checks), "check")
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
    total = units.count(len(results), "SLO check")
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
            what = units.count(
                level, *(("chat user",) if load.user == "chat" else ("request at once", "requests at once"))
            )
            kind = but_for_concurrency(load)
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
    text = f"{server} meets {slos} up to {passed}" if passed else f"{server} meets {slos} at no measured load"
    if doubt:
        text = (
            f"{text}; {doubt} cannot be decided" if passed else f"{server}: whether it meets {slos} cannot be decided"
        )
        text += "" if passed else f" at {doubt}"
    if missed:
        text += f", and misses {'it' if len(texts) == 1 else 'them'} at {missed}"
    elif passed and not doubt:
        text += ", the most that was measured"
    return f"{text}."


def _interference(summary: Summary) -> str:
    """The largest effect of concurrent loads on one of them."""
    found = [pair for pairs in sentences.effects(summary) for pair in pairs if pair[0].ratio is not None]
    if not found:
        return ""
    verdict, text = max(found, key=lambda pair: (pair[0].word == "slower", -(pair[0].ratio or 1.0)))
    if verdict.word != "slower":
        return "No part of the mix is shown to be slower together than alone."
    return f"Together, {verdict.side} is slowed most: {METRIC_WORDS[verdict.metric]} {text}."


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
    more = f"; {units.count(len(rows) - 3, 'more row')} below" if len(rows) > 3 else ""
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
    return ", ".join(parts) or f"{numbers.succeeded:,} of {units.count(numbers.sent, 'request')} succeeded"
