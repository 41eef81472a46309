"""Finds the earlier runs of a run's scenario on its machine, and why others are left out."""

from collections import defaultdict
from pathlib import Path

from harness.base.errors import HarnessError
from harness.numbers.comparison import TOLERANCE
from harness.numbers.summarize import has_only_summary, summary_of
from harness.questions.compare.decide import refuse_invalid
from harness.questions.history.decide import History, LeftOut, Summarized, decide_history, exclusion
from harness.records.directory import list_runs
from harness.records.manifest import Run, read_run


def read_history(folder: Path, runs: Path, results: Path, tolerance: float = TOLERANCE) -> History:
    """The history of the run in `folder`, from the run directories below `runs` and the filed `results`.

    `tolerance`: the slowdown that fails, 0.1 for 10 %.

    Raises RunError unless the run is VALID.
    """
    run, newest = read_run(folder), summary_of(folder)
    refuse_invalid(folder, run, newest, "is compared with its history")
    earlier, left_out, without_records = _collect_earlier(run, runs, results)
    without_records += [run.id] if has_only_summary(folder) else []
    return decide_history(run, newest, earlier, left_out, without_records, tolerance)


def _collect_earlier(
    current: Run, runs: Path, results: Path
) -> tuple[list[Summarized], dict[LeftOut, list[str]], list[str]]:
    """The earlier runs that did the same work as `current`, oldest first, each once; those that cannot be used; and
    those of the first whose records are missing.
    """
    left_out = defaultdict[LeftOut, list[str]](list)
    by_key: dict[tuple[str, float], Summarized] = {}
    without_records = []
    seen = {(current.id, current.started_wall_s)}
    for folder, run in list_runs(runs, results):
        try:
            if isinstance(run, HarnessError):
                raise run
            key = (run.id, run.started_wall_s)
            if run.scenario_name != current.scenario_name or key in seen:
                continue
            reason = exclusion(run, current)
            if reason is None:
                summary = summary_of(folder)
                reason = "not_valid" if summary.valid is False else None
        except HarnessError:
            left_out["unreadable"].append(folder.name)
            continue
        if reason is None:
            seen.add(key)
            by_key[key] = run, summary
            without_records += [run.id] if has_only_summary(folder) else []
        elif run.id not in left_out[reason]:
            left_out[reason].append(run.id)
    earlier = sorted(by_key.values(), key=lambda entry: entry[0].started_wall_s)
    return earlier, dict(left_out), sorted(without_records)
