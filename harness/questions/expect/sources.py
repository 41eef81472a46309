"""Where the model and the hardware of the question are known from: options, the model's files, and this machine."""

import re
from pathlib import Path

from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.base.errors import HarnessError
from harness.base.units import GIB, figures
from harness.hardware.bandwidth import read_measured
from harness.hardware.bounds import slowest_gpu
from harness.hardware.gpu_table import GpuSpec, find_gpu, fitted_memory, identify_gpu
from harness.hardware.model import ModelShape, find_model, read_model, require_known_dtype
from harness.machine.gpus import list_gpus, select_serving_gpus
from harness.machine.memory import (
    Pool,
    SafeShare,
    compute_given_share,
    compute_pool_share,
    compute_share,
    list_pools,
)
from harness.questions.expect.decide import (
    Expectation,
    Hardware,
    Question,
    RecordedTurns,
    expectation,
    parse_bits,
    parse_params,
    with_trace,
)
from harness.questions.expect.trace_time import TraceQuestion
from harness.records.manifest import ModelSize
from harness.workload.agent_traces.turn_tokens import trace_turns


def answer(
    question: Question,
    root: Path = Path("/"),
    measured_gb_s: float | None = None,
    trace: TraceQuestion | None = None,
) -> Expectation:
    """Return what the hardware allows. `measured_gb_s`: read bandwidth of this machine, measured just now.

    Raises HarnessError for an unknown GPU, for a model that cannot be read, and where neither is known.
    """
    require_known_dtype(question.kv_cache_dtype)
    question = _with_size(question)
    shape = _read_shape(question)
    hardware = _read_hardware(question, root, measured_gb_s)
    expected = expectation(question, shape, hardware)
    if trace is None:
        return expected
    return with_trace(expected, _read_turns(trace), hardware.gpu, None if shape is None else shape.longest)


def _read_turns(trace: TraceQuestion) -> RecordedTurns:
    if not trace.path.exists():
        raise HarnessError(f"--trace: {trace.path}: there is no such file or folder", next_step="Give its path.")
    turns = trace_turns(trace.path, trace.conversations, trace.characters_per_token)
    return RecordedTurns(list(turns), trace.characters_per_token)


def _read_hardware(question: Question, root: Path, measured_gb_s: float | None) -> Hardware:
    gpu, source, is_local = _choose_gpu(question, root, measured_gb_s)
    pools = list_pools(root) if is_local and question.memory_gib is None else []
    memory = _choose_memory(question, gpu, is_local, pools)
    if measured_gb_s is None and is_local and gpu is not None:
        measured_gb_s = read_measured(root)
    return Hardware(gpu, source, pools, memory, measured_gb_s)


_SIZE = r"(\d{1,5}(?:\.\d{1,3})?[bmt])(?:-a(\d{1,5}(?:\.\d{1,3})?[bmt]))?"  # 14B, or 30B-A3B of a mixture of experts


def _with_size(question: Question) -> Question:
    """Return the question with `params` where a size is given as the model. A folder of that name is a model."""
    name = question.model or ""
    size = re.fullmatch(_SIZE, name, re.IGNORECASE)
    if size is None or Path(name).exists():
        return question
    return replace(question, model=None, params=size[1], active_params=question.active_params or size[2])


def _find_model(name: str) -> Path:
    """Return a model's folder or file; one that is not here, whose name has its size, can be asked for by that."""
    try:
        return find_model(name)
    except HarnessError as error:
        size = re.search(rf"(?<![0-9a-z.]){_SIZE}(?![0-9a-z])", name[:200], re.IGNORECASE)
        if size is None:
            raise
        by_size = command_line("harness", "expect", size[0], "--bits", 4)
        raise HarnessError(
            error.what,
            next_step=f"Give its folder or a GGUF file (nothing is downloaded here), or ask by its size: {by_size}",
        ) from None


def _refuse_without_size(question: Question) -> None:
    for option, value in (("--bits", question.bits), ("--active-params", question.active_params)):
        if value is not None and question.params is None:
            why = "no model is given" if question.model is None else f"{question.model[:100]} is a model with files"
            raise HarnessError(
                f"{option} goes with a size, and {why}", next_step="Leave it out, or give a size: harness expect 14B"
            )


def _read_shape(question: Question) -> ModelShape | None:
    _refuse_without_size(question)
    if question.model is not None:
        path = _find_model(question.model)
        return read_model(path, None if Path(question.model).expanduser().exists() else question.model)
    if question.params is None:
        return None
    params = parse_params("MODEL", question.params)
    active = params if question.active_params is None else parse_params("--active-params", question.active_params)
    if active > params:
        raise HarnessError(
            f"--active-params: {question.active_params} are more than all parameters ({question.params})",
            next_step="Give those of one token, as 3B of 30B.",
        )
    bits = question.bits or "16"
    per_param, number_bits = parse_bits(bits)
    size_name = question.params if question.active_params is None else f"{question.params}-A{question.active_params}"
    name = f"{size_name.upper()} at {bits}{' bit' if bits.isdigit() else ''}"
    size = ModelSize(
        name=name,
        weights_bytes=params * per_param,
        read_bytes=active * per_param,
        params=active,
        routed_bytes=params * per_param if active < params else 0,
        routed_params=params if active < params else 0,
        routed_share=active / params,
        number_bits=number_bits,
        doubts=[
            "without the model's files the KV cache is not counted, and the input embedding is",
            *(
                ["is it a mixture of experts? Then a token reads less: add --active-params, such as 3B"]
                if active == params
                else []
            ),
        ],
    )
    return ModelShape(name=name, weights_bytes=int(size.weights_bytes), size=size)


def _choose_gpu(question: Question, root: Path, measured_gb_s: float | None) -> tuple[GpuSpec | None, str | None, bool]:
    """Return the GPU, the source of its bandwidth, and whether it is that of this machine.

    Without the GPU the source is the name of one that is not in the table, if there is one.
    """
    if question.bandwidth_gb_s is not None:
        by_hand = f"{figures(question.bandwidth_gb_s)} GB/s"
        gpu = GpuSpec(names=[by_hand], target="", bandwidth_gb_s=question.bandwidth_gb_s, fp16_tflops=None)
        if question.gpu is not None:
            gpu = replace(find_gpu(question.gpu), bandwidth_gb_s=question.bandwidth_gb_s)
        return gpu, "--bandwidth", False
    if question.gpu is not None:
        gpu = find_gpu(question.gpu)
        source = f"data sheet, for {gpu.memory}" if gpu.memory else "data sheet"
        if question.gpu.lower().startswith("gfx"):
            source += f"; {question.gpu.lower()} is taken for {gpu.name}"
        return gpu, source, False
    cards = select_serving_gpus(list(list_gpus(root)))
    if cards:
        names = [str(card.get("target")) if (spec := identify_gpu(card)) is None else spec.name for card in cards]
        slowest = slowest_gpu(cards[: question.gpus])
        if slowest is None:
            return None, next(name for name in names if name.startswith("gfx")), True
        fitted = fitted_memory(slowest, root)
        source = f"data sheet, for {slowest.memory}" if slowest.memory else "data sheet"
        slowest, source = fitted or (slowest, source)
        if len(set(names)) > 1:
            which = "first" if question.gpus == 1 else f"slowest of the first {question.gpus}"
            source += f"; the {which} of this machine's {', '.join(names)}"
        return slowest, source, True
    gb_s = measured_gb_s or read_measured(root)
    if gb_s is None:
        return None, None, True
    cpu = GpuSpec(names=["this machine's CPU"], target="", bandwidth_gb_s=gb_s, fp16_tflops=None)
    return cpu, "measured", True


def _choose_memory(question: Question, gpu: GpuSpec | None, is_local: bool, pools: list[Pool]) -> SafeShare | None:
    if question.memory_gib is not None:
        return compute_given_share(*question.memory_gib, question.gpus)
    if pools:
        return compute_share(pools, tensor_parallel=question.gpus)
    if is_local or gpu is None or gpu.memory_gib is None:
        return None
    total = gpu.memory_gib * GIB
    return compute_pool_share(total, total, source="given", gpus=question.gpus)
