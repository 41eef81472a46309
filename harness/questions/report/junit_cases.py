"""A run as test cases of JUnit."""

from msgspec.structs import replace

from harness.base.reason import sentence
from harness.numbers.summary import Summary
from harness.questions.same_answers.page import answers_case
from harness.records.manifest import Run
from harness.report import sentences, words
from harness.report.junit import Case, check_case, document, verdict_cases


def render(summary: Summary, run: Run) -> str:
    """The XML of a run: its validity, checks and verdicts."""
    cases = [_validity_case(summary, run), *map(check_case, summary.checks)]
    if summary.comparison is not None:
        cases += verdict_cases(summary.comparison)
    cases += [answers_case(answers, within=True) for answers in summary.same_answers]
    properties = {
        "run": run.id,
        "question": summary.question,
        "model": run.scenario.model,
        "machine": run.server_machine.name,
        "workload_sha256": run.workload_sha256,
    }
    if summary.simulated:
        properties["simulated"] = words.SIMULATED
    if run.remote is not None:
        properties["load_generator"] = run.machine.name
    took_s = None if run.ended_wall_s is None else run.ended_wall_s - run.started_wall_s
    return document(summary.scenario, cases, properties, run.machine.name, run.started_wall_s, took_s)


def _validity_case(summary: Summary, run: Run) -> Case:
    validity, limits = ": ".join(sentences.validity(summary, run)), sentences.client_limit_sentence(summary)
    ended = run.status not in ("running", "failed", "interrupted")
    case = Case(
        group="validity",
        name="the run is VALID",
        evidence="\n".join(filter(None, [validity, limits, *map(sentence, summary.notes)])),
    )
    if not ended or summary.valid is False:
        reasons = [sentence(reason) for reason in summary.reasons or run.reasons] or [validity]
        kind, text = "INVALID" if ended else run.status.upper(), "\n".join([validity, *reasons])
        return replace(case, outcome="error", kind=kind, message=reasons[0], evidence=text)
    if summary.valid is None:  # neither green nor red
        return replace(case, outcome="skipped", kind="NOT CHECKED", message=validity)
    return case
