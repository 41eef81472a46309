"""The least time that a recorded trace takes on this hardware, one turn at a time, with and without a prefix cache."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from harness.base.errors import HarnessError
from harness.base.units import count, duration, figures, percent
from harness.hardware.bounds import turn_floor
from harness.hardware.gpu_table import GpuSpec
from harness.records.manifest import ModelSize
from harness.workload.agent_traces.context_fit import CHARACTERS_PER_TOKEN
from harness.workload.agent_traces.turn_tokens import MAX_ESTIMATED_OUTPUT, TurnTokens


class TraceQuestion(NamedTuple):
    """The trace that `harness expect` is asked about."""

    path: Path
    conversations: int | None = None  # the first so many
    characters_per_token: float = CHARACTERS_PER_TOKEN


class TraceBound(Struct, frozen=True, kw_only=True):
    """The least time of a trace's conversations, one turn at a time."""

    min_s: float  # with a prefix cache that has the start of every earlier prompt
    uncached_min_s: float  # without one
    prefill_s: float  # of min_s: prompts with the first token of each answer
    decode_s: float  # of min_s and of uncached_min_s: the other tokens
    conversations: int
    turns: int
    prompt_tokens: int
    cached_tokens: int  # of them
    output_tokens: int
    peak_tokens: int  # of the longest turn, with its answer
    estimated_turns: int  # whose prompt or answer is estimated from its characters
    characters_per_token: float
    unknown_prompts: int = 0  # turns that are not counted
    unknown_outputs: int = 0  # turns of which only the prompt is counted
    sentence: str


def trace_bound(
    conversations: Iterable[list[TurnTokens]],
    size: ModelSize,
    gpu: GpuSpec,
    *,
    gpus: int = 1,
    characters_per_token: float = CHARACTERS_PER_TOKEN,
) -> TraceBound:
    """Return the least time of these conversations. Raises HarnessError where no turn has known tokens."""
    read = list(conversations)
    turns = [turn for conversation in read for turn in conversation]
    prefill_s = uncached_s = decode_s = 0.0
    prompts = cached = outputs = peak = 0
    for prompt, turn in ((turn.prompt, turn) for turn in turns if turn.prompt):
        output = turn.output or 0
        with_s, answer_s = turn_floor(size, gpu, prompt=prompt, cached=turn.cached, output=output, gpus=gpus)
        without_s, _ = turn_floor(size, gpu, prompt=prompt, cached=0, output=output, gpus=gpus)
        prefill_s, uncached_s, decode_s = prefill_s + with_s, uncached_s + without_s, decode_s + answer_s
        prompts, cached, outputs = prompts + prompt, cached + turn.cached, outputs + output
        peak = max(peak, prompt + output)
    if not prompts:
        raise HarnessError(
            "--trace: no turn of the trace has known tokens", next_step="Use a trace with their numbers."
        )
    name = gpu.name if gpus == 1 else f"{gpus} x {gpu.name}"
    sentence = f"At least {duration(prefill_s + decode_s)} on {name} with a prefix cache, "
    sentence += f"{duration(uncached_s + decode_s)} without; {count(len(turns), 'turn')}."
    return TraceBound(
        min_s=prefill_s + decode_s,
        uncached_min_s=uncached_s + decode_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        conversations=len(read),
        turns=len(turns),
        prompt_tokens=prompts,
        cached_tokens=cached,
        output_tokens=outputs,
        peak_tokens=peak,
        estimated_turns=sum(turn.is_estimated for turn in turns),
        characters_per_token=characters_per_token,
        unknown_prompts=sum(not turn.prompt for turn in turns),
        unknown_outputs=sum(turn.output is None for turn in turns if turn.prompt),
        sentence=sentence,
    )


def trace_facts(bound: TraceBound, *, has_compute: bool, has_cache_size: bool, longest: int | None) -> Iterator[str]:
    """Yield the facts below the sentence: of what the time consists, and what is assumed."""
    yield (
        f"{count(bound.conversations, 'conversation')}, one turn at a time: prompts at least "
        f"{duration(bound.prefill_s)}, answers at least {duration(bound.decode_s)}"
    )
    yield (
        f"{bound.prompt_tokens:,} prompt tokens, {percent(bound.cached_tokens / bound.prompt_tokens, 0)} of them the "
        f"start of an earlier prompt; {bound.output_tokens:,} output tokens; the longest turn has "
        f"{bound.peak_tokens:,} tokens"
    )
    if bound.estimated_turns:
        yield (
            f"estimated are the tokens of {bound.estimated_turns:,} of {count(bound.turns, 'turn')}: "
            f"{figures(bound.characters_per_token)} characters a token, answers as long as the recorded ones and of at "
            f"most {MAX_ESTIMATED_OUTPUT:,} tokens"
        )
    else:
        yield "the tokens are those that the trace recorded; a chat template adds more"
    yield "not counted: pauses, templates, tools' time, gaps between requests; speculation can make answers faster"
    if bound.unknown_prompts or bound.unknown_outputs:
        yield (
            f"not known, so not counted: {count(bound.unknown_prompts, 'prompt')} with its answer, and "
            f"{count(bound.unknown_outputs, 'answer')}"
        )
    if not has_compute:
        yield "the compute is not known, so a prompt costs one read of the weights, and the bound is far too low"
    if not has_cache_size:
        yield "the KV cache is not known, so its reads, which grow with the depth, are not counted"
    if longest is not None and bound.peak_tokens > longest:
        yield f"the model's context of {longest:,} tokens is too short for the longest turn"
