"""The rows of a run as CSV: raw numbers, units in the column names, nothing rounded."""

import csv
import io

from harness.report import schedules
from harness.report.machine_load import VALUES
from harness.report.table import Line, lines
from harness.rundir.manifest import Run
from harness.scenario.mixes import others
from harness.summary import Answers, PromptLengths, Summary

_LATENCIES = {
    "ttft": "ttft_s", "ttfo": "ttfo_s", "tpot": "tpot_s", "e2e": "e2e_s", "chunk_gap": "chunk_gap_s",
    "ttft_sched": "ttft_sched_s", "e2e_sched": "e2e_sched_s",
    "connect": "connect_s",
}  # fmt: skip
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def render(summary: Summary, run: Run) -> str:
    """One line a row; an empty field is a number that is not known."""
    rows = [_record(line, others(line.row.load, run.scenario.mixes)) for line in lines(summary, run)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["server", "load"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _record(line: Line, beside: list[str]) -> dict[str, str | int | float | None]:
    numbers, verdict = line.row.pooled, line.verdict
    record: dict[str, str | int | float | None] = {
        "server": line.row.server,
        "load": line.row.load,
        "beside": " ".join(beside),
        "runs": len(line.row.cells),
        "sent": numbers.sent,
        "succeeded": numbers.succeeded,
        "failed": numbers.failed,
        "unfinished": numbers.unfinished,
        "abandoned": numbers.abandoned,
        "error_rate": numbers.error_rate,
        "wall_s": numbers.wall_s,
        "completion_tokens_per_run": line.tokens,
        "output_tok_s": numbers.output_tok_s,
        "requests_per_s": numbers.requests_per_s,
        "input_tok_s": numbers.input_tok_s,
        "vectors": numbers.vectors,
        "client_limited": " ".join(line.row.client_limited),
        **_answers(numbers.answers),
        **_prompts(numbers.prompts),
    }
    for name, field in _LATENCIES.items():
        sample = getattr(numbers, field)
        record |= {f"{name}_{statistic}_s": getattr(sample, statistic) for statistic in _STATISTICS}
    record |= schedules.values(line.row)
    did = line.row.machine_load
    record |= {name: None if did is None else getattr(did, field) for name, field, *_ in VALUES}
    for slos, attained in numbers.slos.items():
        record |= {
            f"attainment({slos})": attained.attainment,
            f"goodput_req_s({slos})": attained.goodput_req_s,
        }
    return record | {
        "baseline": int(line.baseline),
        "speedup_against": verdict.baseline if verdict else None,
        "speedup_by": verdict.metric if verdict else None,
        "speedup": verdict.ratio if verdict else None,
        "speedup_low": verdict.low if verdict else None,
        "speedup_high": verdict.high if verdict else None,
        "p": verdict.p if verdict else None,
        "verdict": verdict.word if verdict else None,
    }


def _answers(answers: Answers | None) -> dict[str, int | float | None]:
    fields = ("checked", "valid", "valid_share", "labelled", "right", "right_share")
    return {f"answers_{name}": None if answers is None else getattr(answers, name) for name in fields}


def _prompts(prompts: PromptLengths | None) -> dict[str, int | None]:
    return {
        "prompt_tokens_asked": None if prompts is None else prompts.asked,
        "prompt_tokens_got": None if prompts is None else prompts.got,
    }
