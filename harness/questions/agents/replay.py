"""What the replay of a trace of agents showed: the time of a turn and of a conversation, and what the cache had."""

from collections.abc import Mapping, Sequence

from harness.base import units
from harness.base.measured import Distribution
from harness.base.reason import Reason, because
from harness.base.units import count, duration
from harness.numbers.summary import CacheHits, ReplayNumbers, Row, StepRange, Summary
from harness.report.elements import Element, Fact, Facts, Grid, Paragraph, TableColumn
from harness.scenario import Load


def replay_answers(rows: Sequence[Row], loads: Mapping[str, Load]) -> list[Reason]:
    """How long a turn and a conversation take; none unless all loads replay a trace."""
    replays = [(row, row.replay) for row in rows if row.replay is not None]
    if not replays or not all(load.user == "agent_trace" for load in loads.values()):
        return []
    is_named = len(replays) > 1
    return [_answer(row, replay, loads[row.load].users, is_named=is_named) for row, replay in replays]


def _answer(row: Row, replay: ReplayNumbers, users: int, *, is_named: bool) -> Reason:
    turn, whole, tools = row.pooled.e2e, replay.duration, replay.tools
    values: dict[str, float] = {"users": users, "conversations": whole.n}
    parts = []
    if (turn_s := middle_s(turn)) is not None:
        values |= {"turn_s": turn_s, "turns": turn.known_count}
        values |= {} if turn.p90 is None else {"turn_p90_s": turn.p90}
        parts.append(f"a turn takes {duration(turn_s)} ({_spread(turn)})")
    if (whole_s := middle_s(whole)) is not None:
        values |= {"conversation_s": whole_s, "tools_s": middle_s(tools) or 0.0}
        of = f" ({_middle_name(whole)} of {whole.n:,})" if whole.n > 1 else ""
        parts.append(f"a conversation {duration(whole_s)}{of}, {_tools_text(middle_s(tools))}")
    else:
        parts.append(_no_time_text(replay))
    text = f"{count(users, 'agent')} at once: {', '.join(parts)}."
    return because("replay", f"{row.name}: {text}" if is_named else text, row=row.name, **values)


def middle_s(sample: Distribution) -> float | None:
    """The median, or the mean of few."""
    return sample.mean if sample.p50 is None else sample.p50


def _middle_name(sample: Distribution) -> str:
    return "mean" if sample.p50 is None else "p50"


def _spread(turn: Distribution) -> str:
    """What the middle is of, and the slow tail of a sample."""
    if turn.p90 is not None:
        return f"p50; {duration(turn.p90)} at p90"
    longest = "" if turn.max is None or turn.n < 2 else f"; the longest {duration(turn.max)}"
    return f"{_middle_name(turn)} of {turn.known_count:,}{longest}"


def _tools_text(tools_s: float | None) -> str:
    return "of which no time is of tools" if not tools_s else f"of which {duration(tools_s)} are tools"


def replay_elements(summary: Summary) -> list[Element]:
    """The facts and tables of each row that replays a trace."""
    replays = [(row, row.replay) for row in summary.rows if row.replay is not None]
    elements: list[Element] = []
    for row, replay in replays:
        name = f": {row.name}" if len(replays) > 1 else ""
        elements += [*([Paragraph(row.name, "part")] if name else []), Facts(_facts(row, replay))]
        elements += _tables(replay, name)
    return elements


def _facts(row: Row, replay: ReplayNumbers) -> list[Fact]:
    facts = [
        ("Turn", _percentiles(row.pooled.e2e, "request until its answer, with its tool calls, is complete")),
        ("Conversation", _conversation_text(replay)),
        ("Output", _output_text(row)),
        ("Prompts", _prompts_text(row, replay)),
        ("Cache", _cache_text(replay)),
        ("Conversations", _conversations_text(replay)),
        ("Steps", _steps_text(replay) if replay.conversations else ""),
        ("Delays", _delays_text(replay) if replay.conversations else ""),
    ]
    return [Fact(label, text) for label, text in facts if text]


def _percentiles(sample: Distribution, of: str) -> str:
    parts = [
        f"{name} {duration(value)}" for name in ("p50", "p90", "p99") if (value := getattr(sample, name)) is not None
    ]
    if sample.mean is None:
        return ""
    if len(parts) < 2:
        parts = [
            f"{_middle_name(sample)} {duration(middle_s(sample) or 0.0)}",
            f"longest {duration(sample.max or 0.0)}",
        ]
    return f"{', '.join(parts)} ({of}; n = {sample.known_count:,})"


def _conversation_text(replay: ReplayNumbers) -> str:
    whole = [middle_s(sample) for sample in (replay.duration, replay.served, replay.tools)]
    if None in whole or not replay.duration.n:
        return _no_time_text(replay)
    with_tools, without, tools = (duration(value or 0.0) for value in whole)
    text = f"{with_tools} with the tools' time, {without} without it; the tools {tools}"
    if replay.duration.n == 1:
        return f"{text} (of the one that was replayed whole)"
    return f"{text} ({_middle_name(replay.duration)} of {replay.duration.n:,} that were replayed whole)"


def _no_time_text(replay: ReplayNumbers) -> str:
    """Why no conversation has a time, and what would give it one."""
    if replay.whole:
        return "each conversation that was replayed whole began in the warm-up (`warmup: {requests: 0}` has none)"
    return "no conversation was replayed whole (more `requests` or `duration_s` reach the end of some)"


def _output_text(row: Row) -> str:
    """The output of all, and of one answer with its slow tail: percentiles of seconds, inverted."""
    parts = []
    if row.pooled.output_tok_s is not None:
        parts.append(f"{units.significant(row.pooled.output_tok_s)} tok/s of all together")
    tpot = row.pooled.tpot
    if tpot.p50:
        parts.append(f"one answer streams at {units.significant(1 / tpot.p50)} tok/s (p50)")
    if tpot.p90:
        parts.append(f"one of the slowest tenth at {units.significant(1 / tpot.p90)} tok/s or less")
    return ", ".join(parts)


def _prompts_text(row: Row, replay: ReplayNumbers) -> str:
    every = row.pooled.input_tok_s
    if replay.uncached_tok_s is None:
        return "uncached tok/s not known: the server does not report the cached tokens of all prompts"
    total = "" if every is None else f", of {units.significant(every)} tok/s with the cached ones"
    return f"{units.significant(replay.uncached_tok_s)} uncached tok/s{total}"


def _cache_text(replay: ReplayNumbers) -> str:
    hits = replay.hits
    if hits is None:
        return "hits not known: the server does not report cached tokens, or the trace does not show what is shared"
    about = "about " if hits.is_scaled else ""
    share = f" ({units.short_percent(hits.served / hits.planned)})" if hits.planned else ""
    of_prompts = (
        f"{about}{hits.planned:,} tokens ({units.short_percent(hits.planned / hits.prompt_tokens)} of the prompts)"
    )
    text = f"of {of_prompts} that a cache could have, the server took {hits.served:,} from it{share}"
    text += f"; {hits.beyond:,} more came from the cache" if hits.beyond else ""
    return text + _template_text(hits)


def _template_text(hits: CacheHits) -> str:
    if hits.is_scaled:
        return "; the server counts other tokens than the trace, so its planned tokens are scaled to the server's count"
    if hits.template_tokens is None:
        return ""
    return f"; the chat template adds {count(hits.template_tokens, 'token')} to each prompt"


def _conversations_text(replay: ReplayNumbers) -> str:
    if not replay.conversations:  # records of stock Locust
        return "not known: only runs of the harness store what became of each conversation and its steps"
    return f"{count(replay.conversations, 'conversation')} started, {replay.whole:,} of them replayed whole"


def _steps_text(replay: ReplayNumbers) -> str:
    """What became of the steps of the conversations that were started; counts of 0 are left out."""
    counts = [
        (replay.failed, "failed"),
        (replay.not_sent, "not sent, because they depend on a failed one"),
        (replay.too_long, "left out, because they are too long for the context or depend on such a step"),
        (replay.before_start, "before the start inside the trace"),
        (replay.open, "open when the load ended"),
    ]
    return "; ".join([f"{replay.ended:,} answered", *(f"{number:,} {what}" for number, what in counts if number)])


def _delays_text(replay: ReplayNumbers) -> str:
    if not replay.delays_s:
        return ""
    removed = f", of which {duration(replay.removed_s)} were removed" if replay.removed_s else ""
    return f"{duration(replay.delays_s)} recorded before the steps that were due{removed}"


def _tables(replay: ReplayNumbers, name: str) -> list[Grid]:
    by_step = _table(f"By step of the agent{name}", "Steps", replay.by_step)
    by_depth = _table(f"By tokens of the prompt{name}", "Prompt tokens", replay.by_depth)
    return [*by_step, *by_depth]


def _table(title: str, first: str, ranges: Sequence[StepRange]) -> list[Grid]:
    columns = [
        TableColumn("range", first, group="name"),
        TableColumn("requests", "Requests", "Successful requests"),
        TableColumn("prompt", "Prompt", "Mean tokens of a prompt, as the server counts them"),
        TableColumn("new", "New", "Tokens that no cache could have", "prompt − the larger of planned hits and cached"),
        TableColumn("cached", "Cached", "Tokens that the server took from its cache"),
        TableColumn(
            "recomputed", "Computed again", "Tokens that a cache without bounds had, and the server computed",
            "planned hits − cached, of each request at least 0",
        ),
        TableColumn("ttft_p50", "TTFT p50, ms"),
        TableColumn("ttft_p90", "TTFT p90, ms", "Needs 64 requests"),
    ]  # fmt: skip
    rows = [
        [
            _range_text(steps),
            f"{steps.requests:,}",
            *(
                _tokens(value)
                for value in (steps.prompt_tokens, steps.new_tokens, steps.cached_tokens, steps.recomputed_tokens)
            ),
            units.milliseconds(steps.ttft_p50),
            units.milliseconds(steps.ttft_p90),
        ]
        for steps in ranges
    ]
    return [Grid(title=title, columns=columns, rows=rows)] if rows else []


def _range_text(steps: StepRange) -> str:
    return f"{steps.first:,}" if steps.first == steps.last else f"{steps.first:,} to {steps.last:,}"


def _tokens(value: float | None) -> str:
    return units.NOTHING if value is None else f"{value:,.0f}"
