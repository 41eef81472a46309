"""The rows of a run as CSV: raw numbers, units in the column names, nothing rounded."""

import csv
import io

from harness.redact import csv_field
from harness.report import schedules
from harness.report.machine_load import VALUES, raw
from harness.report.table import TableLine, lines
from harness.rundir.manifest import Run
from harness.scenario.mixes import others
from harness.summary import Summary

_LATENCIES = ("ttft", "ttfo", "tpot", "e2e", "chunk_gap", "ttft_sched", "e2e_sched", "connect")
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_ANSWERS = ("checked", "valid", "valid_share", "labelled", "right", "right_share")
_VERDICT = {  # field of a Verdict, by column
    "speedup_against": "baseline", "speedup_by": "metric", "speedup": "ratio", "speedup_low": "low",
    "speedup_high": "high", "p": "p", "verdict": "word",
}  # fmt: skip


def render(summary: Summary, run: Run) -> str:
    """One line a row; an empty field is a number that is not known."""
    rows = [_record(line, others(line.row.load, run.scenario.mixes)) for line in lines(summary, run)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["server", "load"], lineterminator="\n")
    writer.writerow({name: csv_field(name) for name in writer.fieldnames})
    writer.writerows({name: csv_field(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _record(line: TableLine, beside: list[str]) -> dict[str, str | int | float | None]:
    numbers = line.row.pooled
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
        **{f"answers_{name}": raw(numbers.answers, name) for name in _ANSWERS},
        **{f"prompt_tokens_{name}": raw(numbers.prompts, name) for name in ("asked", "got")},
    }
    for name in _LATENCIES:
        sample = getattr(numbers, f"{name}_s")
        record |= {f"{name}_{statistic}_s": getattr(sample, statistic) for statistic in _STATISTICS}
    record |= schedules.values(line.row)
    record |= {name: raw(line.row.machine_load, field) for name, field, *_ in VALUES}
    for slos, attained in numbers.slos.items():
        record |= {f"attainment({slos})": attained.attainment, f"goodput_req_s({slos})": attained.goodput_req_s}
    return (
        record
        | {"baseline": int(line.baseline)}
        | {name: raw(line.verdict, at) for name, at in _VERDICT.items()}
        | {"verdict": line.words}
    )
