"""The page of `harness quick`: one table, how near the hardware it is, the worst finding, and what to do next."""

from collections.abc import Iterator

from harness.analysis.quick import QuickLevel, QuickReport
from harness.base.units import NOTHING, count, figures
from harness.report import words
from harness.report.elements import Bullet, Bullets, Element, Paragraph, plain_grid
from harness.report.sentences import finding_parts

_HEAD = ("Users", "tok/s per user", "tok/s of all", "Prefill tok/s", "TTFT ms", "Answers")
_SHARE_UNKNOWN = "Share of what the hardware allows: not known (it takes a known GPU, and the model's files here)."


def quick_page(report: QuickReport) -> list[Element]:
    """Return the page of a quick measurement."""
    server = f", {report.server}" if report.server else ""
    return [
        Paragraph(f"{report.model} at {report.url}{server}", "title"),
        Paragraph(_lead(report), "lead"),
        *([Paragraph(words.SIMULATED, "simulated")] if report.simulated else []),
        *_reasons(report),
        plain_grid(_HEAD, [_cells(level) for level in report.users]),
        Paragraph(_about(report), "fine"),
        *([Bullets([Bullet(text, "inconclusive") for text in report.notes])] if report.notes else []),
        Paragraph(report.share_sentence or _SHARE_UNKNOWN),
        *_finding(report),
        Paragraph("Next", "heading"),
        Bullets([Bullet(what, code=command) for command, what in report.next.items()]),
    ]


def _lead(report: QuickReport) -> str:
    most = report.users[-1]
    first = report.users[0] if report.users else None
    if report.one_user_tok_s is None:
        whole = None if first is None else first.answer_tok_s
        if whole is None:
            return "No speed: no answer came in pieces."
        why = (
            "the times of its tokens are not known" if report.notes else "it comes in too few pieces to time its tokens"
        )
        return f"{figures(whole)} tok/s for one user over the whole answer: {why}"
    together = "" if most.tok_s is None else f", {figures(most.tok_s)} tok/s for {most.users} users together"
    return f"{figures(report.one_user_tok_s)} tok/s for one user{together}"


def _reasons(report: QuickReport) -> list[Element]:
    if report.valid:
        return []
    reasons = Bullets([Bullet(text, "bad") for text in report.reasons])
    return [Paragraph("INVALID: do not trust these numbers", "bad"), reasons]


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
    level = "" if report.level_s is None else f", {report.level_s:g} s for each number of users"
    counted = "" if report.tokens_counted else "; the server reports no tokens, so each chunk counts as one"
    visible = next((one.visible_ms for one in report.users if one.visible_ms is not None), None)
    text = "no text is visible within these tokens" if visible is None else f"text comes after {figures(visible)} ms"
    reasons = f"; the model reasons first, {text}" if any(one.reasons for one in report.users) else ""
    asked = f"{prompt}answers of at most {report.answer_tokens} tokens{level}"
    prefill = "; prefill is that of one request at a time, since others make it wait" if report.prefill_tok_s else ""
    return f"Medians, of few answers means; {asked}{counted}{reasons}{prefill}."


def _finding(report: QuickReport) -> Iterator[Element]:
    finding = report.finding
    if finding is None:
        if report.valid:
            yield Paragraph("FINDINGS: no problem found", "good")
        return
    yield Paragraph("Worst finding", "heading")
    parts = list(finding_parts(finding))
    actions = [place for place, part in enumerate(parts) if part.mark == "Do"]
    first = parts[: actions[1]] if len(actions) > 1 else parts  # the best action only; the report has all
    yield Bullets([Bullet(f"{finding.measured} [{finding.code}]", "inconclusive", parts=first)], "findings")
