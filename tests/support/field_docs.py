"""Tables of the fields of our files, read from the source of their types and the comments there."""

import ast
import inspect
import io
import re
import tokenize
from typing import Any

import msgspec

from harness.base import measured, reason
from harness.failures import diagnosis
from harness.numbers import comparison, schedule, summary, time_split
from harness.records import manifest, records, samples

# Of each file: its types, the first one with a heading of its own.
FILES: dict[str, tuple[Any, ...]] = {
    "requests.jsonl": (records.Request, records.BadField),
    "processes.jsonl": (records.ProcessMark, records.ReplayedConversation),
    "telemetry.jsonl": (
        samples.TelemetrySample, samples.GpuSample, samples.HostSample, samples.ContainerSample,
    ),
    "metrics.jsonl": (samples.MetricsSample,),
    "run.json": (
        manifest.Run, manifest.CellRun, manifest.ServedBy, manifest.Startup, manifest.Phase, manifest.Contents,
        manifest.KeptSteps, manifest.ServerDeath, manifest.GpuMemory, manifest.Machine, manifest.Resumption,
        manifest.Origin,
        manifest.RowOrigin, reason.Reason,
    ),
    "summary.json": (
        summary.Summary, summary.Row, summary.TurnNumbers, summary.ReplayNumbers, summary.StepRange, summary.CacheHits,
        summary.CellSummary, measured.Numbers, measured.Distribution, measured.LogSpread,
        measured.SloAttainment, measured.ScheduleKept, measured.Answers, measured.PromptLengths, samples.ServerLoad,
        samples.MachineLoad, time_split.TimeSplit, summary.ClientLimit, schedule.WarmupResult, summary.BadFields,
        diagnosis.FailedRequests, comparison.CheckResult, comparison.Comparison, comparison.Verdict,
        comparison.Difference,
        summary.RunFinding, summary.Action,
    ),
    "baseline.json": (summary.Reference,),
}  # fmt: skip
_TYPES = {
    r"\b(?:Wall)?Seconds\b|\bDuration\b|\bAfter\b|\bNumber\b|\bfloat\b": "number",
    r"\bCount\b|\bWhole\b|\bint\b": "integer",
    r"\bbool\b": "boolean", r"\bstr\b|\bOddText\b": "text", r"\bAny\b": "anything", r"['\"](\w+)['\"]": r"\1",
}  # fmt: skip


def fields_tables() -> str:
    """A section a file, a table a type."""
    parts = []
    for file, types in FILES.items():
        parts.append(f"\n## {file}\n")
        for index, struct in enumerate(types):
            parts.append(f"\n### {struct.__name__}\n" if index else "\n")
            parts += ["| field | type | meaning |\n|---|---|---|\n", *_rows(struct)]
    return "".join(parts) + "\n"


def error_kinds_table() -> str:
    """Each kind of error of a request with the comment at its place in the source."""
    source = inspect.getsource(records).split("ErrorKind = Literal[\n")[1].split("\n]")[0]
    rows = re.findall(r'"(\w+)",  # (.+)', source)
    return "| error | meaning |\n|---|---|\n" + "".join(f"| `{kind}` | {meaning} |\n" for kind, meaning in rows)


def _rows(struct: Any) -> list[str]:
    base = struct.__base__
    rows = _rows(base) if base is not msgspec.Struct else []
    source = inspect.getsource(struct)
    comments, alone = _comments(source)
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for field in body.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            first, last = field.lineno, field.end_lineno or field.lineno
            while first - 1 in alone:
                first -= 1
            meaning = " ".join(comments[line] for line in range(first, last + 1) if line in comments)
            meaning = re.sub(r"\bNone\b", "null", meaning).replace("|", "\\|").rstrip(";")
            rows.append(f"| `{field.target.id}` | {_type(field.annotation)} | {meaning} |\n")
    return rows


def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """The comments by line, those of a choice after it, and the lines that are nothing but a comment."""
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# fmt"):
            line, text = token.start[0], token.string.removeprefix("# ")
            choice = re.match(r'\s*"(\w+)",\s*#', token.line)
            comments[line] = f"`{choice[1]}`: {text};" if choice else text
            if token.line.strip().startswith("#"):
                alone.add(line)
    return comments, alone


def _type(annotation: ast.expr) -> str:
    """A type in words; a field that may be None is left out or null."""
    if "Literal" in ast.unparse(annotation):
        constants = [one.value for one in ast.walk(annotation) if isinstance(one, ast.Constant)]
        return ", ".join(f"`{value}`" for value in constants if isinstance(value, str))
    text = re.sub(r"Annotated\[(\w+),.*?\](?= \||$)", r"\1", ast.unparse(annotation)).replace(" | None", "")
    for pattern, word in _TYPES.items():
        text = re.sub(pattern, word, text)
    text = re.sub(r"\bdict\[\w+, (.+)\]", r"\1 by name", text)
    return re.sub(r"\b(?:list|tuple)\[(.+)\]", r"list of \1", text).replace("|", "or")
