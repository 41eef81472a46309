"""The page of `harness quick`: one table, how near the hardware it is, the worst finding, and what to do next."""

from collections.abc import Iterator, Sequence

from harness.base.units import NOTHING, count, figures
from harness.questions.quick.decide import QuickLevel, QuickReport
from harness.report import words
from harness.report.elements import Bullet, Bullets, Element, Grid, Paragraph, TableColumn
from harness.report.sections import simulated_note
from harness.report.sentences import finding_parts, no_findings

_COLUMNS = (
    TableColumn(
        "users", "Users", "Users at once, each with one request after the other.", "loads.users.stages", group="name",
    ),
    TableColumn(
        "user_rate", "tok/s per user",
        'Output tokens a second that each user gets after the first token; "over E2E" where the text comes in too few '
        "pieces: of the whole answer, its start included.",
        "output tokens after the first ÷ time from the first to the last, inside the level", group="name",
    ),
    TableColumn(
        "rate", "tok/s together",
        "Output tokens a second of all users. It includes the wait for first tokens, so it is a little less than the "
        "users' speeds together.",
        "output tokens inside the level ÷ its seconds", group="name",
    ),
    TableColumn(
        "prefill", "Prefill tok/s", "Prompt tokens a second until the first token, of requests that were alone.",
        "mean uncached prompt tokens ÷ mean TTFT", group="name",
    ),
    TableColumn(
        "ttft", "TTFT ms", "Time to the first token: the median of the level's requests, however few.",
        "first chunk − request sent; 50th percentile", group="name",
    ),
    TableColumn(
        "answers", "Answers", "Complete answers. Cut: in flight at the end, as planned; these are no failures.",
        "successful requests", group="name",
    ),
)  # fmt: skip
LEGEND = "Per user: after the first token. Together: the wait for first tokens included. TTFT: the median."
_TELEMETRY = "GPUs, memory and power are those of the server's machine, {machine}; this machine sent the load."
_SHARE_UNKNOWN = "Share of what the hardware allows: not known (it takes a known GPU, and the model's files here)."


def quick_page(report: QuickReport) -> list[Element]:
    """Return the page of a quick measurement."""
    server = f", {report.server}" if report.server else ""
    return [
        Paragraph(f"{report.model} at {report.url}{server}", "title"),
        Paragraph(report.death or lead(report.users, is_known=not report.notes), "lead"),
        *simulated_note(report.simulated),
        *_reasons(report),
        levels_grid(report.users),
        Paragraph(_about(report), "fine"),
        *([] if report.telemetry is None else [Paragraph(_TELEMETRY.format(machine=report.telemetry), "fine")]),
        *([Bullets([Bullet(text, "inconclusive") for text in report.notes])] if report.notes else []),
        Paragraph(report.share_sentence or _SHARE_UNKNOWN),
        *_finding(report),
        Paragraph("Next", "heading"),
        Bullets([Bullet(what, code=command) for command, what in report.next.items()]),
    ]


def levels_grid(levels: Sequence[QuickLevel]) -> Grid:
    """The table of a quick run, the same in its own page and in the run's."""
    return Grid(id="results", columns=_COLUMNS, rows=[_cells(level) for level in levels])


def lead(levels: Sequence[QuickLevel], *, is_known: bool) -> str:
    """The answer. `is_known`: False where notes say that the times of tokens are not known."""
    first, most = levels[0], levels[-1]
    if first.user_tok_s is None:
        if first.answer_tok_s is None:
            return "No speed: no answer came in pieces."
        why = "it comes in too few pieces to time its tokens" if is_known else "the times of its tokens are not known"
        return f"{figures(first.answer_tok_s)} tok/s for one user over the whole answer: {why}"
    together = "" if most.tok_s is None else f", {figures(most.tok_s)} tok/s for {most.users} users together"
    return f"{figures(first.user_tok_s)} tok/s for one user{together}"


def _reasons(report: QuickReport) -> list[Element]:
    if report.valid:
        return []
    reasons = Bullets([Bullet(text, "bad") for text in report.reasons])
    return [Paragraph("do not trust these numbers", "bad", "INVALID"), reasons]


def _cells(level: QuickLevel) -> list[str]:
    numbers = (level.user_tok_s, level.tok_s, level.prefill_tok_s, level.ttft_ms)
    answers = [f"{level.answers}", *([f"{level.cut} cut"] if level.cut else [])]
    answers += [f"{level.failed} FAILED"] if level.failed else []
    texts = [NOTHING if number is None else figures(number) for number in numbers]
    if level.user_tok_s is None and level.answer_tok_s is not None:
        texts[0] = f"{figures(level.answer_tok_s)} {words.OVER_E2E}"
    return [f"{level.users}", *texts, ", ".join(answers)]


def _about(report: QuickReport) -> str:
    """How it was measured, in one line."""
    prompt = "" if report.prompt_tokens is None else f"prompts of about {count(report.prompt_tokens, 'token')}, "
    level = "" if report.level_s is None else f", {report.level_s:g}\u00a0s for each number of users"
    counted = "" if report.tokens_counted else "; the server reports no tokens, so each chunk counts as one"
    visible = next((level.visible_ms for level in report.users if level.visible_ms is not None), None)
    text = "no text is visible within these tokens" if visible is None else f"text comes after {figures(visible)} ms"
    reasons = f"; the model reasons first, {text}" if any(level.reasons for level in report.users) else ""
    asked = f"{prompt}answers of at most {report.answer_tokens} tokens{level}"
    prefill = "; prefill is that of one request at a time, since others make it wait" if report.prefill_tok_s else ""
    return f"{LEGEND} {asked[:1].upper()}{asked[1:]}{counted}{reasons}{prefill}."


def _finding(report: QuickReport) -> Iterator[Element]:
    finding = report.finding
    if finding is None:
        if report.valid:
            failed = ["failed requests"] if any(level.failed for level in report.users) else []
            yield no_findings([level.answers for level in report.users], failed)
        return
    yield Paragraph("Worst finding", "heading")
    parts = list(finding_parts(finding))
    actions = [place for place, part in enumerate(parts) if part.mark == "Do"]
    first = parts[: actions[1]] if len(actions) > 1 else parts  # the best action only; the report has all
    yield Bullets([Bullet(f"{finding.measured} [{finding.code}]", "inconclusive", parts=first)], "findings")
