"""What a trace holds and what of it fits, for `harness check` and before a run; and its conversations for the load."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from msgspec import Struct, structs

from harness.base.errors import HarnessError
from harness.base.files import open_file
from harness.scenario.behaviour import AgentTrace
from harness.workload.agent_traces.context_fit import (
    ConversationFit,
    TraceFit,
    fit_conversation,
    recorded_tokens,
    sum_fits,
)
from harness.workload.agent_traces.conversation import Conversation
from harness.workload.agent_traces.prefix_reuse import prompt_reuse
from harness.workload.agent_traces.replay_plan import DelayRule, delays_of_longest_chain_s
from harness.workload.agent_traces.trace_index import ConversationPlace, find_conversations, read_conversation

_NO_LIMIT = 2**60  # tokens of a context


class TraceTotals(Struct, frozen=True, kw_only=True):
    """The sums of all conversations of a trace."""

    formats: tuple[str, ...]
    conversations: int
    agents: int
    steps: int
    delays_s: float
    removed_s: float  # of these delays, by the rule of the load
    chains_s: tuple[float, ...]  # of each conversation: the delays that wait for each other, by this rule
    notes: dict[str, int]
    # Of the prompts, that an earlier prompt of their conversation starts with. None: some are text and some are tokens.
    shared_share: float | None
    fit: TraceFit
    sha256: str  # of the files


def min_duration_s(totals: TraceTotals, users: int) -> float:
    """Return how long the replay of all conversations takes at least: the delays of the user who has most of them."""
    return max(sum(totals.chains_s[user::users]) for user in range(users))


def delay_rule(trace: AgentTrace) -> DelayRule:
    return DelayRule(scale=trace.delay_scale, max_s=trace.max_delay_s)


def fit_of(conversation: Conversation, trace: AgentTrace) -> ConversationFit:
    """Return which steps of a conversation fit into the context that the load names; all if it names none."""
    tokens = recorded_tokens(trace.characters_per_token)
    return fit_conversation(conversation, trace.context_tokens or _NO_LIMIT, tokens)


@lru_cache(maxsize=4)
def conversation_places(path: Path, format: str | None) -> list[ConversationPlace]:
    """Return the places of a trace's conversations. A process reads an unchanged trace once. Raises HarnessError."""
    places = find_conversations(path, format)
    if not places:
        raise HarnessError(f"{path}: there is no conversation in it", next_step="Check the path.")
    return places


def trace_totals(path: Path, trace: AgentTrace) -> TraceTotals:
    """Read all conversations, one at a time, and return their sums. Raises HarnessError for a damaged one."""
    totals = _totals_of(path, trace)
    if not totals.fit.kept_steps:
        raise HarnessError(
            f"{path}: no step of the trace fits into a context of {trace.context_tokens:,} tokens",
            next_step="Raise agent_trace.context_tokens together with the context of the server.",
        )
    return totals


def fit_in_context(path: Path, trace: AgentTrace, context_tokens: int, characters_per_token: float) -> TraceFit:
    """Return which steps of a trace fit into a context, whatever context the load names; perhaps none of them.

    characters_per_token: of the estimate where the load names none. Raises HarnessError for a damaged trace.
    """
    size = trace.characters_per_token or characters_per_token
    return _totals_of(path, structs.replace(trace, context_tokens=context_tokens, characters_per_token=size)).fit


def _totals_of(path: Path, trace: AgentTrace) -> TraceTotals:
    return _trace_totals(path, structs.replace(trace, start=None), _changed(path))  # a list has no hash


@lru_cache(maxsize=4)
def _trace_totals(path: Path, trace: AgentTrace, _changed: tuple[float, ...]) -> TraceTotals:
    conversation_places.cache_clear()
    places, rule, notes = conversation_places(path, trace.format), delay_rule(trace), Counter[str]()
    chains_s = array("d")
    agents, steps, delays_s, removed_s, size, shared = 0, 0, 0.0, 0.0, 0, 0

    def fits() -> Iterator[ConversationFit]:
        nonlocal agents, steps, delays_s, removed_s, size, shared
        for place in places[: trace.conversations]:
            conversation = read_conversation(place)
            notes.update(conversation.notes)
            notes.update(settings_not_sent=sum(bool(step.settings) for step in conversation.steps))
            reuse = prompt_reuse(conversation)
            size, shared = size + sum(prompt.size for prompt in reuse), shared + sum(prompt.shared for prompt in reuse)
            agents += len(conversation.agents)
            steps += len(conversation.steps)
            delays_s += sum(step.delay_s for step in conversation.steps)
            removed_s += sum(rule.removed_s(step.delay_s) for step in conversation.steps)
            fit = fit_of(conversation, trace)
            chains_s.append(delays_of_longest_chain_s(conversation, fit.kept, rule))
            yield fit

    fit = sum_fits(trace.context_tokens or _NO_LIMIT, fits())
    formats = tuple(sorted({place.format for place in places}))
    digest = _digest(list(dict.fromkeys(place.path for place in places)))
    return TraceTotals(
        formats=formats,
        conversations=len(places[: trace.conversations]),
        agents=agents,
        steps=steps,
        delays_s=delays_s,
        removed_s=removed_s,
        chains_s=tuple(chains_s),
        notes={code: number for code, number in notes.items() if number},
        shared_share=shared / size if size and len(formats) == 1 else None,
        fit=fit,
        sha256=digest,
    )


def _changed(path: Path) -> tuple[float, ...]:
    """Return what changes when a file of the trace changes."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    try:
        return tuple(number for file in files for number in (file.stat().st_size, file.stat().st_mtime_ns))
    except OSError as error:
        raise HarnessError(
            f"{path}: the trace cannot be read ({error.strerror})", next_step="Check the path."
        ) from None


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with open_file(path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
