"""What `harness expect` says: the answer first, then the bounds by context, users and prompt, and the memory."""

from collections.abc import Sequence

from harness.base.units import NOTHING, figures, gib
from harness.hardware.fit import format_fit
from harness.machine.memory import (
    format_pool,
    format_share,
)
from harness.questions.expect.decide import Expectation, range_text
from harness.report.elements import Bullet, Bullets, Element, Grid, Paragraph, TableColumn


def expect_page(expectation: Expectation) -> list[Element]:
    """The answer, the sentence first: that of a trace, unless the model does not fit."""
    page: list[Element] = [Paragraph(expectation.sentence, "lead")] if expectation.sentence else []
    if expectation.trace is not None:
        facts = Bullets(list(map(Bullet, expectation.trace_facts)))
        time: list[Element] = [Paragraph(expectation.trace.sentence, "lead"), facts]
        page = [*page, *time] if expectation.fits is False else [*time, *page]
    if expectation.share_of_measured is not None and expectation.measured_bandwidth_gb_s is not None:
        note = (
            ": the measured bandwidth is too low"
            if expectation.share_of_measured > 1 and expectation.share_of_tok_s == expectation.users_max_tok_s
            else ""
        )
        share = f"{100 * expectation.share_of_measured:.0f} %"
        page.append(
            Paragraph(f"It is {share} of the {figures(expectation.measured_bandwidth_gb_s)} GB/s measured here{note}.")
        )
    if expectation.bandwidth_source is not None and expectation.bandwidth_source != "--bandwidth":
        source = f"Bandwidth: {figures(expectation.bandwidth_gb_s or 0)} GB/s ({expectation.bandwidth_source})."
        page.append(Paragraph(source))
    if expectation.one_user_max_tok_s is not None:
        page += _speed_tables(expectation)
    return [*page, *_memory_elements(expectation), *(Paragraph(f"Note: {doubt}.") for doubt in expectation.doubts)]


def _speed_tables(expectation: Expectation) -> list[Element]:
    tables: list[Element] = []
    if expectation.contexts:
        tables += _table(
            [
                ["One user, context of", *(f"{bound.context:,} tokens" for bound in expectation.contexts)],
                ["tok/s at most", *(figures(bound.max_tok_s) for bound in expectation.contexts)],
                ["typical", *(range_text(bound.typical_tok_s) for bound in expectation.contexts)],
            ]
        )
    context = expectation.many_users[0].context
    rows = [
        [
            f"Users, context {context:,}" if context else "Users at once",
            *(f"{bound.users:,}" for bound in expectation.many_users),
        ],
        ["tok/s of all at most", *(figures(bound.max_tok_s) for bound in expectation.many_users)],
    ]
    if any(bound.spread_max_tok_s is not None for bound in expectation.many_users):
        rows.append(
            ["with all users' experts", *(figures(bound.spread_max_tok_s or 0) for bound in expectation.many_users)]
        )
    tables += _table(rows)
    if expectation.prompts and expectation.prompts[0].typical_ttft_s is not None:
        tables += _table(
            [
                ["Prompt, none cached", *(f"{bound.tokens:,} tokens" for bound in expectation.prompts)],
                ["TTFT at least", *(_time(bound.min_ttft_s) for bound in expectation.prompts)],
                ["typical", *(_time_range(bound.typical_ttft_s) for bound in expectation.prompts)],
            ]
        )
    if expectation.weights:
        names = {True: "yes", False: "NO", None: NOTHING}
        fits = (
            "fits" if expectation.model is not None and expectation.model.kv_token_bytes is not None else "weights fit"
        )
        title = "Other weights" if expectation.users == 1 else f"Other weights, {expectation.users:,} users"
        title += f", context {expectation.context:,}" if expectation.context and expectation.contexts else ""
        rows = [
            [title, *(bound.name for bound in expectation.weights)],
            ["GB a token reads", *(figures(bound.read_bytes / 1e9) for bound in expectation.weights)],
            ["tok/s at most", *(figures(bound.max_tok_s) for bound in expectation.weights)],
            ["with all users' experts", *(figures(bound.spread_max_tok_s or 0) for bound in expectation.weights)],
            ["typical", *(range_text(bound.typical_tok_s) for bound in expectation.weights)],
            [fits, *(names[bound.fits] for bound in expectation.weights)],
        ]
        first = expectation.weights[0]
        is_shown = (True, True, True, first.spread_max_tok_s, first.typical_tok_s, first.fits)
        tables += _table([row for row, value in zip(rows, is_shown, strict=True) if value is not None])
        tables.append(
            Paragraph(
                "To go faster: weights of fewer bytes, or speculative decoding (times the accepted tokens a step)."
            )
        )
    return tables


def _time(value_s: float) -> str:
    return f"{figures(value_s, 2)} s" if value_s >= 1 else f"{figures(1000 * value_s, 2)} ms"


def _time_range(values: tuple[float, float] | None) -> str:
    if values is None:
        return NOTHING
    low, high = _time(values[0]), _time(values[1])
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low} to {high}"


def _table(rows: Sequence[Sequence[str]]) -> list[Element]:
    """A table whose first row is its head; numbers are aligned right."""
    (first, *others), *below = rows
    columns = [TableColumn("what", first, group="text"), *(TableColumn(title, title) for title in others)]
    return [Grid(columns=columns, rows=below)]


def _memory_elements(expectation: Expectation) -> list[Element]:
    """The memory of the GPUs, and how the model fits."""
    elements: list[Element] = [Paragraph(format_pool(pool)) for pool in expectation.pools]
    if expectation.memory is not None:
        elements += _described(
            format_share(expectation.memory, is_gguf=expectation.fit is not None and expectation.fit.is_gguf)
        )
    if expectation.fit is not None:
        elements += _described(format_fit(expectation.fit))
    if expectation.excess_bytes > 0 and (expectation.fit is None or expectation.fit.fits is not False):
        elements.append(Paragraph(f"does not fit: the weights need {gib(expectation.excess_bytes)} more on each GPU"))
    elif expectation.model is not None and expectation.memory is None and expectation.measured_tok_s is None:
        weights = gib(expectation.model.weights_bytes)
        text = f"whether weights of {weights} fit is not known: --free and --total give the memory in GiB"
        elements.append(Paragraph(text))
    return elements


def _described(lines: tuple[str, list[str]]) -> list[Element]:
    """A line, and a list of what belongs to it."""
    head, details = lines
    return [Paragraph(head), Bullets(list(map(Bullet, details)))]
