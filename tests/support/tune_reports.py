"""Reports of `harness tune` by the keys of tune.json."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from harness.questions.tune.record import TuneQuestion, TuneReport, write_tune

ASKED = TuneReport(question=TuneQuestion(budget_s=3600))


def changed_report(report: TuneReport = ASKED, **keys: Any) -> TuneReport:
    """A report with these keys of tune.json; the rest stays."""
    records = dict[str, Any]()
    for name in ("question", "trials", "proof"):
        record = getattr(report, name)
        places = {field.encode_name: field.name for field in msgspec.structs.fields(record)}
        records[name] = replace(record, **{places[key]: value for key, value in keys.items() if key in places})
    others = {key: value for key, value in keys.items() if key in ("folder", "changed")}
    return replace(report, **records, **others)


def store(folder: Path, report: TuneReport) -> None:
    write_tune(folder, report.question, report.trials, report.proof)
