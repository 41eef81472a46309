"""The answer of `harness expect`: what fits, how fast it can be, and whether a measured speed is normal."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from harness.base.errors import HarnessError, did_you_mean
from harness.base.units import GIB, NOTHING, figures, gib
from harness.hardware.bounds import (
    TYPICAL_DECODE,
    TYPICAL_PREFILL,
    Word,
    compute_flops,
    decode_bound,
    describe_base,
    in_weights,
    judge,
    kv_bytes,
    ttft_floor,
    typical_decode,
)
from harness.hardware.fit import OTHER_BYTES, ModelFit, ServerSettings, estimate_fit
from harness.hardware.gpu_table import GpuSpec
from harness.hardware.model import ModelShape
from harness.hardware.weights import BYTES_PER_PARAM, NUMBER_BITS
from harness.machine.memory import (
    NO_GPU,
    Pool,
    SafeShare,
)
from harness.questions.expect.trace_time import TraceBound, trace_bound, trace_facts
from harness.records.manifest import ModelSize
from harness.workload.agent_traces.turn_tokens import TurnTokens

MAX_CONTEXT = 100_000_000
CONTEXTS, USERS, PROMPTS = (512, 4096, 16384, 65536), (1, 4, 16, 64), (512, 2048, 8192)
_WORDS: dict[Word | None, str] = {
    "at-limit": "at the limit of the hardware",
    "normal": "normal",
    "slow": "slow",
    None: "above what this hardware allows without speculation",
}


_WRONG = (
    "Something is wrong: eager mode, kernels not made for this GPU, a CPU fallback, another process or a power limit."
)


class Question(Struct, frozen=True, kw_only=True):
    """What `harness expect` is asked."""

    model: str | None = None
    params: str | None = None  # such as 14B, as of `active_params`
    active_params: str | None = None
    bits: str | None = None  # of a size: 16, or the name of a type of weights
    gpu: str | None = None
    bandwidth_gb_s: float | None = None
    gpus: int = 1
    context: int | None = None
    users: int = 1
    measured_tok_s: float | None = None  # of all users together
    kv_cache_dtype: str = "auto"
    memory_gib: tuple[float, float] | None = None  # free and total, instead of this machine's


class ContextBound(Struct, frozen=True, kw_only=True):
    """One user after a context of so many tokens."""

    context: int
    max_tok_s: float
    typical_tok_s: tuple[float, float]


class UsersBound(Struct, frozen=True, kw_only=True):
    """Users at once, all of them together."""

    users: int
    context: int = 0  # of each user; 0 where the cache is not known
    max_tok_s: float
    spread_max_tok_s: float | None = None  # estimate for experts that all users touch


class PromptFloor(Struct, frozen=True, kw_only=True):
    """The time to the first token after a prompt without a cached part."""

    tokens: int
    min_ttft_s: float
    typical_ttft_s: tuple[float, float] | None = None  # None: the compute is not known


class OtherWeights(Struct, frozen=True, kw_only=True):
    """The same model in another type of weights, for the users and the context of the question."""

    name: str
    read_bytes: float
    max_tok_s: float  # of all users together
    spread_max_tok_s: float | None = None  # as of UsersBound
    typical_tok_s: tuple[float, float] | None = None  # of one user
    fits: bool | None  # weights, and the cache of all users; None: unknown


class Expectation(Struct, frozen=True, kw_only=True):
    """The output of `harness expect --json`. Missing is null."""

    sentence: str
    model: ModelSize | None = None
    gpu: str | None = None
    gpus: int = 1
    bandwidth_gb_s: float | None = None  # of each GPU
    bandwidth_source: str | None = None
    fp16_tflops: float | None = None
    measured_bandwidth_gb_s: float | None = None  # by `--measure` on this machine
    context: int = 0
    users: int = 1
    one_user_max_tok_s: float | None = None  # after `context` tokens, as of the following
    one_user_typical_tok_s: tuple[float, float] | None = None
    users_max_tok_s: float | None = None
    measured_tok_s: float | None = None
    share: float | None = None  # measured / share_of_tok_s
    share_of_tok_s: float | None = None  # users_max_tok_s, or less: with the experts of several users
    word: Word | None = None  # by this share
    share_of_measured: float | None = None  # the same with the measured bandwidth
    contexts: list[ContextBound] = []
    many_users: list[UsersBound] = []
    prompts: list[PromptFloor] = []
    weights: list[OtherWeights] = []
    trace: TraceBound | None = None  # of `--trace`
    trace_facts: list[str] = []
    pools: list[Pool] = []
    memory: SafeShare | None = None
    max_memory_bytes: float | None = None  # of an APU whose own memory is not known: the most that can be fitted
    fit: ModelFit | None = None
    doubts: list[str] = []

    @property
    def fits(self) -> bool | None:
        """Whether memory is left and the model, if there is one, fits; None: unknown."""
        if (self.memory is not None and self.memory.utilization is None) or self.excess_bytes > 0:
            return False
        return None if self.fit is None else self.fit.fits

    @property
    def room_bytes(self) -> float | None:
        """The bytes of each GPU that a model can have."""
        return self.max_memory_bytes if self.memory is None else self.memory.budget_bytes

    @property
    def excess_bytes(self) -> float:
        """The bytes of weights of one GPU beyond its memory; 0 where one is not known."""
        if self.model is None or self.room_bytes is None:
            return 0.0
        return max(0.0, self.model.weights_bytes / self.gpus - self.room_bytes)


class RecordedTurns(NamedTuple):
    """The turns of a trace, by conversation."""

    conversations: list[list[TurnTokens]]
    characters_per_token: float  # of estimates


class Hardware(NamedTuple):
    """What is known of the hardware. Without the GPU, `source` may name one that is not in the table."""

    gpu: GpuSpec | None
    source: str | None  # of its bandwidth
    pools: list[Pool]  # of this machine's memory, if it is meant
    memory: SafeShare | None
    measured_gb_s: float | None  # read bandwidth of this machine


def with_trace(expected: Expectation, recorded: RecordedTurns, gpu: GpuSpec | None, longest: int | None) -> Expectation:
    """Return the answer with the least time of a trace. Raises HarnessError where GPU or model is not known."""
    size = expected.model
    if size is None or gpu is None:
        what, option = ("the model", "MODEL") if size is None else ("the GPU", "--gpu NAME")
        raise HarnessError(
            f"--trace: the speed of {what} is not known, and so is the time of the trace", next_step=f"Give {option}."
        )
    conversations, characters = recorded
    bound = trace_bound(conversations, size, gpu, gpus=expected.gpus, characters_per_token=characters)
    has_compute = size.params is not None and compute_flops(size, gpu) is not None
    facts = trace_facts(bound, has_compute=has_compute, has_cache_size=size.kv_token_bytes is not None, longest=longest)
    return replace(expected, trace=bound, trace_facts=list(facts))


def expectation(question: Question, shape: ModelShape | None, hardware: Hardware) -> Expectation:
    """Return what the hardware allows. Raises HarnessError where neither it nor the model is known."""
    gpu, source, pools, memory, measured_gb_s = hardware
    if shape is None and memory is None and gpu is None:
        raise HarnessError(NO_GPU, next_step="Give --gpu NAME or --bandwidth GB/S, and a model; or measure: --measure.")
    fit = None
    if shape is not None and (question.context or shape.longest):
        settings = ServerSettings(
            max_model_len=question.context,
            max_num_seqs=question.users if question.users > 1 else None,
            tensor_parallel=question.gpus,
            kv_cache_dtype=question.kv_cache_dtype,
        )
        fit = estimate_fit(shape, memory, settings)
    size = None if shape is None else shape.size
    draft = Expectation(
        sentence="",
        model=size,
        gpus=question.gpus,
        context=question.context or 0,
        users=question.users,
        pools=pools,
        memory=memory,
        fit=fit,
        doubts=[
            *([] if size is None else size.doubts),
            *(f"not known: {why}" for why in ([] if shape is None or fit is not None else shape.unknown)),
        ],
    )
    if gpu is None:
        what = f"{source} is not in the table" if source else "No GPU is known"
        speed = f"{what}: the speed is not known. Give --gpu or --bandwidth."
        return replace(draft, sentence="" if shape is None else speed)
    draft = replace(
        draft,
        gpu=gpu.name,
        bandwidth_gb_s=gpu.bandwidth_gb_s,
        bandwidth_source=source,
        fp16_tflops=gpu.fp16_tflops,
        max_memory_bytes=None if gpu.max_memory_gib is None or memory is not None else gpu.max_memory_gib * GIB,
        measured_bandwidth_gb_s=measured_gb_s,
    )
    if size is None or shape is None:
        return replace(draft, sentence=_sentence_without_size(question, gpu, shape))
    return _with_speed(draft, size, gpu, shape.longest, question.measured_tok_s)


def _sentence_without_size(question: Question, gpu: GpuSpec, shape: ModelShape | None) -> str:
    name = gpu.name[:1].upper() + gpu.name[1:]
    reads = "" if question.bandwidth_gb_s is not None and question.gpu is None else f"{name} reads "
    fact = f"{reads}{figures(gpu.bandwidth_gb_s)} GB/s."
    if shape is None:
        return f"{fact} Give a model for its speed."
    by_hand = "Give its size instead: `harness expect 14B --bits 16`."
    return f"{shape.name}: its speed is not known: {shape.unsized}. {by_hand} {fact}"


def parse_params(option: str, text: str) -> float:
    """Return a number of parameters such as 14B or 0.6b. Raises HarnessError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)([bmt]?)", text.lower())
    params = float(match[1]) * {"b": 1e9, "m": 1e6, "t": 1e12, "": 1.0}[match[2]] if match else 0.0
    if not 1e3 <= params <= 1e14:
        raise HarnessError(
            f"{option}: a number of parameters is expected (got '{text[:50]}')", next_step="Write 14B, 0.6B or 500M."
        )
    return params


def parse_tokens(option: str, text: str) -> int:
    """Return a number of tokens such as 8192, 32k or 1M, of 1,024 and its square. Raises HarnessError."""
    match = re.fullmatch(r"([0-9]{1,9})([km]?)", text.lower())
    tokens = int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2]] if match else 0
    if not 1 <= tokens <= MAX_CONTEXT:
        what = f"{option}: a number of tokens from 1 to {MAX_CONTEXT:,} is expected (got '{text[:50]}')"
        raise HarnessError(what, next_step="Write 8192, or 8k.")
    return tokens


def parse_bits(text: str) -> tuple[float, Any]:
    """Return bytes of a parameter and the width in which it is multiplied, for 4 or Q4_K_M. Raises HarnessError."""
    wanted = {"16": "FP16", "BF16": "FP16", "8": "FP8", "INT8": "FP8", "4": "AWQ", "GPTQ": "AWQ"}.get(
        text.upper(), text.upper()
    )
    if wanted in BYTES_PER_PARAM:
        return BYTES_PER_PARAM[wanted], NUMBER_BITS.get(wanted, 16)
    raise HarnessError(
        f"--bits: '{text[:50]}' is no type of weights; {did_you_mean(wanted[:50], BYTES_PER_PARAM)}",
        next_step="Give 16, 8 or 4, or one of these names.",
    )


def _with_speed(
    draft: Expectation, size: ModelSize, gpu: GpuSpec, longest: int | None, measured_tok_s: float | None
) -> Expectation:
    context, gpus = draft.context, draft.gpus
    bound = decode_bound(size, gpu, context=context, gpus=gpus)
    total = decode_bound(size, gpu, users=draft.users, context=context, gpus=gpus)
    likely = decode_bound(size, gpu, users=draft.users, context=context, gpus=gpus, spread=True)
    counts = sorted({*USERS, draft.users})
    user_context = 0 if size.kv_token_bytes is None else context or min(4096, longest or 4096)
    lengths = sorted({length for length in CONTEXTS if longest is None or length <= longest} | {context} - {0})
    if size.kv_token_bytes is None:
        lengths = []
    prompts = sorted({length for length in PROMPTS if length <= (context or longest or length)} | {context} - {0})
    result = replace(
        draft,
        one_user_max_tok_s=bound,
        one_user_typical_tok_s=typical_decode(bound),
        users_max_tok_s=total,
        share_of_tok_s=likely,
        contexts=[_context_bound(size, gpu, length, gpus) for length in lengths],
        many_users=[_users_bound(size, gpu, users, user_context, gpus) for users in counts],
        prompts=[_prompt_floor(size, gpu, tokens, gpus) for tokens in prompts],
        weights=list(_other_weights(size, gpu, draft)),
    )
    if measured_tok_s is not None:
        base, share, word = judge(measured_tok_s, total, likely, bound)
        result = replace(result, measured_tok_s=measured_tok_s, share=share, share_of_tok_s=base, word=word)
        if draft.measured_bandwidth_gb_s:
            own = replace(gpu, bandwidth_gb_s=draft.measured_bandwidth_gb_s)
            by_measured = decode_bound(size, own, users=draft.users, context=context, gpus=gpus, spread=base < total)
            result = replace(result, share_of_measured=measured_tok_s / by_measured)
    return replace(result, sentence=_unfit_sentence(result, gpu) or _sentence(result, gpu))


def _context_bound(size: ModelSize, gpu: GpuSpec, context: int, gpus: int) -> ContextBound:
    bound = decode_bound(size, gpu, context=context, gpus=gpus)
    return ContextBound(context=context, max_tok_s=bound, typical_tok_s=typical_decode(bound))


def _users_bound(size: ModelSize, gpu: GpuSpec, users: int, context: int, gpus: int) -> UsersBound:
    bound = decode_bound(size, gpu, users=users, context=context, gpus=gpus)
    likely = (
        decode_bound(size, gpu, users=users, context=context, gpus=gpus, spread=True) if size.routed_bytes else None
    )
    return UsersBound(users=users, context=context, max_tok_s=bound, spread_max_tok_s=likely)


def _prompt_floor(size: ModelSize, gpu: GpuSpec, tokens: int, gpus: int) -> PromptFloor:
    read_s, compute_s = ttft_floor(size, gpu, tokens, gpus)
    if compute_s is None:
        return PromptFloor(tokens=tokens, min_ttft_s=read_s)
    low, high = TYPICAL_PREFILL
    likely_s, _ = ttft_floor(size, gpu, tokens, gpus, spread=True)
    typical = (max(likely_s, compute_s / high), max(likely_s / TYPICAL_DECODE[0], compute_s / low))
    return PromptFloor(tokens=tokens, min_ttft_s=max(read_s, compute_s), typical_ttft_s=typical)


def _other_weights(size: ModelSize, gpu: GpuSpec, draft: Expectation) -> Iterable[OtherWeights]:
    """Yield the model in the usual types of weights. A model comes with MXFP4 or not."""
    for name in (kind for kind in BYTES_PER_PARAM if kind != "MXFP4"):
        if (other := in_weights(size, name)) is None:
            return
        bound = _users_bound(other, gpu, draft.users, draft.context, draft.gpus)
        fits = None
        if draft.memory is not None:
            needed = other.weights_bytes + draft.users * kv_bytes(size, draft.context)
            states = 0 if draft.fit is None else draft.users * draft.fit.state_bytes
            remaining_bytes = draft.memory.budget_bytes - needed / draft.gpus - states
            fits = True if remaining_bytes > OTHER_BYTES[1] else None if remaining_bytes > OTHER_BYTES[0] else False
        yield OtherWeights(
            name=name,
            read_bytes=other.read_bytes,
            max_tok_s=bound.max_tok_s,
            spread_max_tok_s=bound.spread_max_tok_s if draft.users > 1 else None,
            typical_tok_s=typical_decode(bound.max_tok_s) if draft.users == 1 else None,
            fits=fits,
        )


def _unfit_sentence(expected: Expectation, gpu: GpuSpec) -> str | None:
    """Return that the weights, or the wanted context, do not fit; None where they do, and for a measured speed."""
    if (
        expected.measured_tok_s is not None
        or expected.fits is not False
        or expected.model is None
        or expected.room_bytes is None
    ):
        return None
    where = gpu.name if expected.gpus == 1 else f"each of {expected.gpus} x {gpu.name}"
    room = f"{'at most ' if expected.memory is None else ''}{gib(expected.room_bytes)}"
    weights = expected.model.weights_bytes
    if expected.excess_bytes > 0:
        needs = f"its weights take {gib(weights / expected.gpus)}, of {room}"
        return f"{expected.model.name} does not fit on {where}: {needs}."
    if not expected.context or expected.fit is None or expected.fit.request_bytes is None:
        return None
    needs = f"{gib(weights / expected.gpus)} of weights and {gib(expected.fit.request_bytes)} of KV cache, of {room}"
    return f"{expected.model.name} does not fit on {where} with a context of {expected.context:,} tokens: {needs}."


def _sentence(expected: Expectation, gpu: GpuSpec) -> str:
    model = expected.model.name if expected.model is not None else "the model"
    whom = "one user" if expected.users == 1 else f"{expected.users:,} users at once"
    counted = expected.model is not None and expected.model.kv_token_bytes is not None
    after = f" after {expected.context:,} tokens" if expected.context else " with an empty context" if counted else ""
    if expected.context and not counted:
        after = f", without the KV cache of {expected.context:,} tokens, which is not known"
    name = gpu.name if expected.gpus == 1 else f"{expected.gpus} x {gpu.name}"
    bandwidth = f"{figures(gpu.bandwidth_gb_s * expected.gpus)} GB/s"
    where, most = f"{model} on {name}", expected.users_max_tok_s or 0
    given = f"({whom}{after}, {bandwidth})"
    if expected.measured_tok_s is not None and expected.share is not None and expected.share_of_tok_s is not None:
        speed = f"{figures(expected.measured_tok_s)} tok/s is {_WORDS[expected.word]}"
        wrong = f" {_WRONG}" if expected.word == "slow" else ""
        share_text = f"{100 * expected.share:.0f} % of {describe_base(expected.share_of_tok_s, most)}"
        return f"{speed} for {where}: {share_text} {given}.{wrong}"
    typical = f"; {range_text(expected.one_user_typical_tok_s)} is typical" if expected.users == 1 else ""
    return f"{where}: {describe_base(expected.share_of_tok_s or most, most)} {given}{typical}."


def range_text(values: tuple[float, float] | None) -> str:
    return NOTHING if values is None else f"{figures(values[0], 2)} to {figures(values[1], 2)}"
