"""What the hardware allows: bounds of decode and prefill, and how near a measured speed is to them.

Each token of a user reads all active weights and the KV cache of its context once, so the memory bandwidth bounds the
tokens a second; compute bounds many users and long prompts. docs/expect.md has the formulas.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.units import GIB, figures
from harness.engines import find_template
from harness.hardware.gpu_table import GpuSpec, identify_gpu
from harness.hardware.weights import BYTES_PER_PARAM, NUMBER_BITS
from harness.machine.gpus import select_container_gpus
from harness.numbers.formulas import latency_s
from harness.numbers.prefill import is_first_token_blank, timed_prompts
from harness.records.manifest import CellRun, ModelSize, Run
from harness.records.run_data import CellData, RunData

Word = Literal["at-limit", "normal", "slow"]
AT_LIMIT, NORMAL = 0.75, 0.45  # smallest shares of the bound for these words
SMALL_MODEL_TOK_S, SMALL_NORMAL = 100.0, 0.35  # above this bound the overhead of each step counts, and less is normal
TYPICAL_DECODE = (0.60, 0.90)  # of the bandwidth, with one user
TYPICAL_PREFILL = (0.20, 0.60)  # of the compute
MANY_USERS = 1.5  # from so many on average in decode, an answer is not of one user
MAX_PREFILL_LOAD = 0.2
MAX_DOUBTFUL_SHARE = 1.5  # of a bound whose model is not known from its files
MAX_SHARE = 1.02  # above it only speculation explains a speed; clocks and counts differ by less


class Share(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How near a measured speed is to what the hardware allows."""

    share: float  # measured / of_tok_s; above 1 with speculation
    word: Word | None  # by this share; None: above the bound, or no word is defined
    usual_share: float  # that engines usually reach or exceed with such a model
    bound_tok_s: float
    of_tok_s: float  # the bound; with the experts of several users the estimate for all of them
    measured_tok_s: float
    awq_tok_s: float | None = None  # bound of one user with AWQ weights, where they have 16 bit
    sentence: str


def classify(share: float, bound_tok_s: float) -> Word | None:
    """Return the word for a share of the bound of one user; None above the bound, which only speculation reaches."""
    if share > MAX_SHARE:
        return None
    if share >= AT_LIMIT:
        return "at-limit"
    lowest = SMALL_NORMAL if bound_tok_s > SMALL_MODEL_TOK_S else NORMAL
    return "normal" if share >= lowest else "slow"


def judge(tok_s: float, bound: float, likely: float, one_user: float) -> tuple[float, float, Word | None]:
    """Return what the speed of all users is compared with, its share of that, and the word of this share.

    It is the bound, or the `likely` speed with the experts that all users touch. Within the bound a speed above the
    likely one is no sign of speculation: the users' tokens chose the same experts.
    """
    base = bound if tok_s > MAX_SHARE * bound else min(bound, likely)
    return base, tok_s / base, classify(tok_s / base if base == bound else min(tok_s / base, 1.0), one_user)


def describe_base(base: float, bound: float) -> str:
    """Return what a share is of, in words."""
    most = f"at most {figures(bound)} tok/s"
    return most if base == bound else f"about {figures(base)} tok/s with the experts of all users, of {most}"


def kv_bytes(size: ModelSize, context: float) -> float:
    """Return the bytes of the KV cache that a token reads after `context` tokens; 0 where it is not known."""
    kept = min(context, size.window) if size.window is not None else context
    return (size.kv_token_bytes or 0) * context + size.sliding_token_bytes * kept


def weights_read(size: ModelSize, tokens: float) -> float:
    """Return the bytes of the weights that a step of so many tokens reads; of experts an estimate, unless it is one."""
    idle = float((1.0 - size.routed_share) ** max(1.0, tokens))  # the share of the experts that none of them uses
    return size.read_bytes + size.routed_bytes * (1.0 - idle - size.routed_share)


def decode_bound(
    size: ModelSize, gpu: GpuSpec, *, users: float = 1, context: float = 0, gpus: int = 1, spread: bool = False
) -> float:
    """Return the most output tokens a second of all users together.

    The weights are read once a step, the KV cache of each user once. For mixtures of experts it counts the experts of
    one user, so that it stays a bound; with `spread` it estimates those of all, which routers choose independently.
    """
    step_bytes = weights_read(size, users if spread else 1) + users * kv_bytes(size, context)
    step_s = step_bytes / (gpu.bandwidth_gb_s * 1e9 * gpus)
    flops = compute_flops(size, gpu)
    if size.params is not None and flops is not None:
        step_s = max(step_s, users * 2 * size.params / (flops * gpus))
    return users / step_s


def in_weights(size: ModelSize, name: str) -> ModelSize | None:
    """Return the model in a type of weights of BYTES_PER_PARAM; None where its parameters are not known.

    vLLM keeps the output head at 16 bit, llama.cpp does not; the input embedding and the like stay as they are.
    """
    if size.params is None:
        return None
    per_param = BYTES_PER_PARAM[name]
    head = size.head_params * ((per_param if name.startswith("Q") else BYTES_PER_PARAM["FP16"]) - per_param)
    idle_bytes, idle_params = (1 - size.routed_share) * size.routed_bytes, (1 - size.routed_share) * size.routed_params
    rest_bytes = max(0.0, size.weights_bytes - size.read_bytes - idle_bytes)
    return replace(
        size,
        weights_bytes=per_param * (size.params + idle_params) + head + rest_bytes,
        read_bytes=per_param * size.params + head,
        routed_bytes=per_param * size.routed_params,
        number_bits=NUMBER_BITS.get(name, 16),
    )


def typical_decode(bound_tok_s: float) -> tuple[float, float]:
    """Return the range of tok/s of one user that engines usually reach."""
    return _usual_share(bound_tok_s) * bound_tok_s, TYPICAL_DECODE[1] * bound_tok_s


def _usual_share(bound_tok_s: float) -> float:
    """Return the lower end of typical shares: 60 %, for small models less, but no less than 60 tok/s or 35 %."""
    low = TYPICAL_DECODE[0]
    return max(SMALL_NORMAL, min(low, low * SMALL_MODEL_TOK_S / bound_tok_s))


def ttft_floor(
    size: ModelSize, gpu: GpuSpec, tokens: float, gpus: int = 1, cached: float = 0, *, spread: bool = False
) -> tuple[float, float | None]:
    """Return the least seconds to the first token after `tokens` uncached prompt tokens: by bandwidth, by compute.

    Each attends to the `cached` ones and to the uncached ones before it. `spread`: as of `decode_bound`.
    """
    read_s = weights_read(size, tokens if spread else 1) / (gpu.bandwidth_gb_s * 1e9 * gpus)
    flops = compute_flops(size, gpu)
    if size.params is None or flops is None:
        return read_s, None
    compute_s = 2 * (size.params - size.head_params) * tokens / flops
    pairs = _attended(cached + tokens, None) - _attended(cached, None)
    sliding_pairs = _attended(cached + tokens, size.window) - _attended(cached, size.window)
    # Two products of keys, queries and values for each pair; engines compute them in 16 bit.
    attention = 4 * (size.attention_width * pairs + size.sliding_attention_width * sliding_pairs)
    return read_s, (compute_s + attention / ((gpu.fp16_tflops or 0) * 1e12 or flops)) / gpus


def turn_floor(
    size: ModelSize, gpu: GpuSpec, *, prompt: float, cached: float, output: float, gpus: int = 1
) -> tuple[float, float]:
    """Return the least seconds of one request that runs alone: of its prompt with the first token, of the other tokens.

    Each token after the first reads the KV cache of all before it. At least one token of a prompt is computed.
    """
    cached = max(0.0, min(cached, prompt - 1))
    read_s, compute_s = ttft_floor(size, gpu, prompt - cached, gpus, cached)
    steps = max(0.0, output - 1)
    # The time of a step grows evenly with the context; beyond a sliding window less, so the mean stays a bound.
    ends_s = [1 / decode_bound(size, gpu, context=prompt + more, gpus=gpus) for more in (0, max(0.0, steps - 1))]
    return max(read_s, compute_s or 0.0), steps * sum(ends_s) / 2


def _attended(tokens: float, window: int | None) -> float:
    """Return the pairs of a token and one that it attends to, after so many tokens."""
    near = tokens if window is None else min(tokens, window)
    return near * near / 2 + (tokens - near) * near


def compute_flops(size: ModelSize, gpu: GpuSpec) -> float | None:
    """Return the operations a second for the model's type of numbers; None where they are not known."""
    by_bits = {4: gpu.fp4_tflops or gpu.fp8_tflops, 8: gpu.fp8_tflops}
    tflops = by_bits.get(size.number_bits or 16) or gpu.fp16_tflops
    return None if tflops is None else tflops * 1e12


def share(data: RunData, cell: CellData) -> Share | None:
    """Return how near the decode speed of a cell is to what its GPU allows.

    None where model, GPU or speed is not known.
    """
    name = next((name for name, other in data.cells.items() if other is cell), None)
    ran = None if name is None else data.run.ran.get(name)
    if ran is None:
        return None
    size, (gpu, gpus) = run_model(ran), run_gpu(data.run, ran)
    speed = decode_speed(cell)
    if size is None or size.read_bytes <= 0 or gpu is None or speed is None:
        return None
    tok_s, users, context = speed
    bound = decode_bound(size, gpu, users=users, context=context, gpus=gpus)
    likely = decode_bound(size, gpu, users=users, context=context, gpus=gpus, spread=True)
    one_user = decode_bound(size, gpu, gpus=gpus)
    base, reached, word = judge(tok_s, bound, likely, one_user)
    if word == "slow" and users >= MANY_USERS and _prefill_load(cell, size, gpu, gpus) > MAX_PREFILL_LOAD:
        word = None  # prompts of other users take much of the time between two tokens
    whom = "one user" if users < MANY_USERS else f"{users:.0f} users at once"
    name = gpu.name if gpus == 1 else f"{gpus} x {gpu.name}"
    part, than = f"{100 * reached:.0f} % of", "allows" if base == bound else "is estimated to allow"
    if reached > MAX_SHARE and base == bound:
        part, whom = f"{figures(reached)} times", f"{whom} without speculation"
    awq = in_weights(size, "AWQ") if users < MANY_USERS and size.number_bits in (None, 16) else None
    awq = None if awq is None or awq.read_bytes > size.read_bytes / 2 else awq
    numbers = f"{figures(tok_s)} of {describe_base(base, bound)}; {name}, {figures(gpu.bandwidth_gb_s * gpus)} GB/s"
    return Share(
        share=reached,
        word=word,
        usual_share=_usual_share(one_user),
        bound_tok_s=bound,
        of_tok_s=base,
        measured_tok_s=tok_s,
        awq_tok_s=None if awq is None else decode_bound(awq, gpu, context=context, gpus=gpus),
        sentence=f"{part} what this GPU {than} for {whom} ({numbers})",
    )


def prefill_bound(data: RunData, cell: CellData) -> tuple[float, float, str] | None:
    """Return the prefill speed of a cell, a speed that its GPU cannot reach for these prompts, and the GPU's name.

    None where model, GPU or speed is not known.
    """
    name = next((name for name, other in data.cells.items() if other is cell), None)
    ran = None if name is None else data.run.ran.get(name)
    prompts = timed_prompts(cell)
    if ran is None or prompts is None:
        return None
    size, (gpu, gpus) = run_model(ran), run_gpu(data.run, ran)
    if size is None or size.read_bytes <= 0 or gpu is None:
        return None
    floors = [
        ttft_floor(size, gpu, tokens, gpus, cached)
        for tokens, cached in zip(prompts.uncached.tolist(), prompts.cached.tolist(), strict=True)
    ]
    least_s = sum(max(read_s, compute_s or 0.0) for read_s, compute_s in floors)
    total = float(prompts.uncached.sum())
    bound = total / least_s * (MAX_DOUBTFUL_SHARE if size.doubts else MAX_SHARE)
    return total / float(prompts.ttft_s.sum()), bound, gpu.name if gpus == 1 else f"{gpus} x {gpu.name}"


def _prefill_load(cell: CellData, size: ModelSize, gpu: GpuSpec, gpus: int) -> float:
    """Return the share of the time that the cell's prompts need at the lowest typical share of the compute."""
    rows = cell.counted.where(cell.counted.good)
    tokens = float(np.nansum(rows.prompt_tokens)) - float(np.nansum(rows.cached_tokens))
    flops = compute_flops(size, gpu)
    if flops is None:
        return 1.0
    params = size.params if size.params is not None else size.read_bytes / 2
    return 2 * params * tokens / (flops * gpus * TYPICAL_PREFILL[0]) / _window_s(cell)


def _window_s(cell: CellData) -> float:
    rows = cell.counted
    if cell.window_s is not None:
        return cell.window_s[1] - cell.window_s[0]
    return float((rows.sent_s + rows.ended_s).max() - rows.sent_s.min())


def decode_speed(cell: CellData) -> tuple[float, float, float] | None:
    """Return tokens a second of all users in decode, the mean number of users that decode, and their mean context.

    None where no answer was streamed with known tokens, and where a wait is between the first token, a blank, and the
    second.
    """
    if is_first_token_blank(cell):
        return None
    rows = cell.counted.where(cell.counted.good)
    tpot_s = latency_s(rows, "tpot")
    has_tpot = tpot_s > 0
    if not has_tpot.any():
        return None
    decode_s = float((rows.last_chunk_s - rows.first_arrival_s)[has_tpot].sum())
    window_s = _window_s(cell)
    users = max(1.0, decode_s / window_s) if window_s > 0 else 1.0
    lengths = np.nan_to_num(rows.prompt_tokens[has_tpot]) + np.nan_to_num(rows.output_tokens[has_tpot]) / 2
    return users / float(np.median(tpot_s[has_tpot])), users, float(lengths.mean())


_ACTIVE = re.compile(r"(\d+(?:\.\d+)?)b-a(\d+(?:\.\d+)?)b", re.IGNORECASE)  # of a name such as Qwen3-30B-A3B
_EXPERTS = re.compile(r"moe|mixtral|gptoss|gpt-oss|deepseek|-\d+e\b|glm4|minimax|kimi|ernie4|jamba", re.IGNORECASE)


def run_model(ran: CellRun) -> ModelSize | None:
    """Return the size of a cell's model: from its files, else from what the server reported at its start.

    None where it is not known, and for experts of which the active share is not known.
    """
    served = ran.served_by
    if served.model_size is not None:
        # Of the files; the server may keep the cache as 8 bit.
        halved = 0.5 if str(served.effective.get("kv_cache_dtype")).startswith("fp8") else 1.0
        size = served.model_size
        return replace(
            size,
            kv_token_bytes=None if size.kv_token_bytes is None else size.kv_token_bytes * halved,
            sliding_token_bytes=size.sliding_token_bytes * halved,
        )
    startup = served.startup
    if startup is None or not startup.weights_gib:
        return None
    weights = startup.weights_gib * GIB * _ranks(served.effective)  # each rank reports its own
    name = served.model or ""
    active = _ACTIVE.search(name)
    if active is None and _EXPERTS.search(f"{startup.architecture} {name}"):
        return None
    share = float(active[2]) / float(active[1]) if active is not None and float(active[1]) else 1.0
    return ModelSize(
        name=name,
        weights_bytes=weights,
        read_bytes=weights * share,
        routed_bytes=weights if share < 1 else 0,
        routed_share=share,
        doubts=["the input embedding, which a token does not read, is included"],
    )


def _ranks(effective: dict[str, Any]) -> int:
    ranks = effective.get("tensor_parallel_size")
    return ranks if isinstance(ranks, int) and 1 <= ranks <= 1024 else 1


def run_gpu(run: Run, ran: CellRun) -> tuple[GpuSpec | None, int]:
    """Return the GPU that a cell's server used, of several the slowest, and how many.

    None where it used none, or one of another machine.
    """
    served = ran.served_by
    template = None if served.template is None else find_template(served.template)
    is_local = (
        served.template is not None
        or run.remote is not None
        or re.match(r"https?://(?:127\.|localhost|\[::1\])", served.url) is not None
    )
    layers = served.startup.offloaded_layers if served.startup is not None else None
    on_cpu = (template is not None and template.utilization == "host") or (layers or "").startswith("0/")
    ranks, cards = _ranks(served.effective), used_cards(run, ran)
    if not is_local or on_cpu or not cards:
        return None, 1
    return slowest_gpu(cards[:ranks]), ranks


def slowest_gpu(cards: Sequence[Mapping[str, Any]]) -> GpuSpec | None:
    """Return the GPU that the others wait for in each step; None where one is not in the table."""
    gpus = [identify_gpu(card) for card in cards]
    specs = [spec for spec in gpus if spec is not None]
    return min(specs, key=lambda spec: spec.bandwidth_gb_s) if len(specs) == len(gpus) else None


def used_cards(run: Run, ran: CellRun) -> list[Mapping[str, Any]]:
    """Return the GPUs that a cell's server was given, in its order; none where it is not known which."""
    server = run.scenario.servers.get(ran.server)
    variables = {} if server is None else server.variables
    given, devices, numbers = (variables.get(name) for name in ("environment", "devices", "gpus"))
    environment = {name: str(value) for name, value in given.items()} if isinstance(given, dict) else {}
    if isinstance(numbers, list):
        environment["HIP_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    try:
        return select_container_gpus(run.server_machine.gpus, devices if isinstance(devices, list) else [], environment)
    except (HarnessError, KeyError):  # ids of GPUs, a variable of the shell, or cards of an older manifest
        return []
