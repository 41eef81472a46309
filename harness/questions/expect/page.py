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


def expect_page(found: Expectation) -> list[Element]:
    """The answer, the sentence first."""
    page: list[Element] = [Paragraph(found.sentence, "lead")] if found.sentence else []
    if found.share_of_measured is not None and found.measured_bandwidth_gb_s is not None:
        note = (
            ": the measured bandwidth is too low"
            if found.share_of_measured > 1 and found.share_of_tok_s == found.users_max_tok_s
            else ""
        )
        share = f"{100 * found.share_of_measured:.0f} %"
        page.append(
            Paragraph(f"It is {share} of the {figures(found.measured_bandwidth_gb_s)} GB/s measured here{note}.")
        )
    if found.bandwidth_source is not None and found.bandwidth_source != "--bandwidth":
        source = f"Bandwidth: {figures(found.bandwidth_gb_s or 0)} GB/s ({found.bandwidth_source})."
        page.append(Paragraph(source))
    if found.one_user_max_tok_s is not None:
        page += _speed_tables(found)
    return [*page, *_memory_elements(found), *(Paragraph(f"Note: {doubt}.") for doubt in found.doubts)]


def _speed_tables(found: Expectation) -> list[Element]:
    tables: list[Element] = []
    if found.contexts:
        tables += _table(
            [
                ["One user, context of", *(f"{each.context:,} tokens" for each in found.contexts)],
                ["tok/s at most", *(figures(each.max_tok_s) for each in found.contexts)],
                ["typical", *(range_text(each.typical_tok_s) for each in found.contexts)],
            ]
        )
    context = found.many_users[0].context
    rows = [
        [
            f"Users, context {context:,}" if context else "Users at once",
            *(f"{each.users:,}" for each in found.many_users),
        ],
        ["tok/s of all at most", *(figures(each.max_tok_s) for each in found.many_users)],
    ]
    if any(each.spread_max_tok_s is not None for each in found.many_users):
        rows.append(["with all users' experts", *(figures(each.spread_max_tok_s or 0) for each in found.many_users)])
    tables += _table(rows)
    if found.prompts and found.prompts[0].typical_ttft_s is not None:
        tables += _table(
            [
                ["Prompt, none cached", *(f"{each.tokens:,} tokens" for each in found.prompts)],
                ["TTFT at least", *(_time(each.min_ttft_s) for each in found.prompts)],
                ["typical", *(_time_range(each.typical_ttft_s) for each in found.prompts)],
            ]
        )
    if found.weights:
        names = {True: "yes", False: "NO", None: NOTHING}
        fits = "fits" if found.model is not None and found.model.kv_token_bytes is not None else "weights fit"
        title = "Other weights" if found.users == 1 else f"Other weights, {found.users:,} users"
        title += f", context {found.context:,}" if found.context and found.contexts else ""
        rows = [
            [title, *(each.name for each in found.weights)],
            ["GB a token reads", *(figures(each.read_bytes / 1e9) for each in found.weights)],
            ["tok/s at most", *(figures(each.max_tok_s) for each in found.weights)],
            ["with all users' experts", *(figures(each.spread_max_tok_s or 0) for each in found.weights)],
            ["typical", *(range_text(each.typical_tok_s) for each in found.weights)],
            [fits, *(names[each.fits] for each in found.weights)],
        ]
        first = found.weights[0]
        known = (True, True, True, first.spread_max_tok_s, first.typical_tok_s, first.fits)
        tables += _table([row for row, value in zip(rows, known, strict=True) if value is not None])
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


def _memory_elements(found: Expectation) -> list[Element]:
    """The memory of the GPUs, and how the model fits."""
    elements: list[Element] = [Paragraph(format_pool(pool)) for pool in found.pools]
    if found.memory is not None:
        elements += _described(format_share(found.memory, is_gguf=found.fit is not None and found.fit.is_gguf))
    if found.fit is not None:
        elements += _described(format_fit(found.fit))
    if found.excess_bytes > 0 and (found.fit is None or found.fit.fits is not False):
        elements.append(Paragraph(f"does not fit: the weights need {gib(found.excess_bytes)} more on each GPU"))
    elif found.model is not None and found.memory is None and found.measured_tok_s is None:
        weights = gib(found.model.weights_bytes)
        text = f"whether weights of {weights} fit is not known: --free and --total give the memory in GiB"
        elements.append(Paragraph(text))
    return elements


def _described(lines: tuple[str, list[str]]) -> list[Element]:
    """A line, and a list of what belongs to it."""
    head, details = lines
    return [Paragraph(head), Bullets(list(map(Bullet, details)))]
