"""The command `harness expect`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.errors import ExitCode, HarnessError
from harness.cli import common as cli

if TYPE_CHECKING:
    from harness.questions.expect.trace_time import TraceQuestion


MeasuredOpt = Annotated[
    float | None, cli.option("TOK/S", "A speed, of all users together: is it normal?", min=0.001, max=1e9)
]
ImageOpt = Annotated[
    str | None, cli.option("NAME", "With --measure: an image with torch (default: the pinned one of vLLM).")
]
FreeOpt = Annotated[
    float | None,
    cli.option("GIB", "Instead of this machine's memory: as vLLM's log has it.", min=0, callback=cli.check_finite),
]
TraceOpt = Annotated[
    Path | None, cli.option("FILE", "Recorded agents: how long their turns take at least, such as edge-agentic's.")
]
SliceOpt = Annotated[
    int | None, cli.option("N", "With --trace: only the first N conversations.", "--slice", min=1, max=100_000)
]
CharactersOpt = Annotated[
    float | None,
    cli.option("N", "With --trace: of a token where only text is recorded (default: 4).", min=0.1, max=100),
]


@cli.command(short_help="What the hardware allows: what fits, how fast it can be, whether a speed is normal.")
def expect(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A size (14B, 30B-A3B), a model's folder, a hub id in this machine's cache, or a GGUF file.",
        ),
    ] = None,
    bits: Annotated[str | None, cli.option("TYPE", "With a size: 16 (default), 8, 4, FP8, AWQ, Q4_K_M, Q8_0.")] = None,
    active_params: Annotated[str | None, cli.option("N", "With a size: those of one token, such as 3B.")] = None,
    gpu: Annotated[str | None, cli.option("NAME", "Another GPU: 7900 XTX, Strix Halo, MI300X, gfx1151.")] = None,
    bandwidth: Annotated[
        float | None, cli.option("GB/S", "Another memory bandwidth.", min=0.1, max=1e6, callback=cli.check_finite)
    ] = None,
    tensor_parallel: Annotated[int, cli.option("N", "GPUs that share the model.", min=1, max=1024)] = 1,
    context: Annotated[str | None, cli.option("N", "Prompt and answer of a request in tokens, as 8192 or 8k.")] = None,
    users: Annotated[int, cli.option("N", "Requests that run at once.", min=1, max=1_000_000)] = 1,
    measured: MeasuredOpt = None,
    measure: Annotated[bool, cli.flag("--measure", "Measure this machine's read bandwidth, and keep it.")] = False,
    image: ImageOpt = None,
    trace: TraceOpt = None,
    slice_: SliceOpt = None,
    characters_per_token: CharactersOpt = None,
    kv_cache_dtype: Annotated[str, cli.option("TYPE", "As vLLM's: auto, bfloat16, float16, fp8.")] = "auto",
    free: FreeOpt = None,
    total: Annotated[float | None, cli.option("GIB", "Belongs to --free.", min=0, callback=cli.check_finite)] = None,
    as_json: cli.JsonOpt = False,
    root: Annotated[Path, cli.option("DIR", "Where /proc and /sys are.", callback=cli.check_root)] = Path("/"),
) -> None:
    """What fits into this machine's memory, how fast a model can be at most, and whether a measured speed is normal.

    Nothing is started or downloaded. Exit code 4 when the model does not fit, or when no memory is left.
    """
    from harness.questions.expect import decide, sources
    from harness.questions.expect.page import expect_page
    from harness.report.terminal import print_page

    recorded = _trace_question(trace, slice_, characters_per_token)
    question = decide.Question(
        model=model,
        active_params=active_params,
        bits=bits,
        gpu=gpu,
        bandwidth_gb_s=bandwidth,
        gpus=tensor_parallel,
        context=None if context is None else decide.parse_tokens("--context", context),
        users=users,
        measured_tok_s=measured,
        kv_cache_dtype=kv_cache_dtype,
        memory_gib=None if free is None or total is None else (free, total),
    )
    measured_gb_s = _measure_bandwidth(image) if measure else None
    expectation = sources.answer(question, root, measured_gb_s, recorded)
    cli.print_json(expectation) if as_json else print_page(expect_page(expectation), cli.console())
    if expectation.fits is False:
        raise typer.Exit(ExitCode.FAILED)


def _trace_question(
    trace: Path | None, conversations: int | None, characters_per_token: float | None
) -> "TraceQuestion | None":
    from harness.questions.expect.trace_time import TraceQuestion

    for option, value in (("--slice", conversations), ("--characters-per-token", characters_per_token)):
        if value is not None and trace is None:
            raise HarnessError(f"{option}: belongs to --trace", next_step="Give --trace FILE.")
    if trace is None:
        return None
    question = TraceQuestion(trace, conversations)
    return question._replace(characters_per_token=characters_per_token) if characters_per_token else question


def _measure_bandwidth(image: str | None) -> float:
    from harness.hardware.bandwidth import measure_cpu, store_measured
    from harness.machine.gpus import list_gpus
    from harness.serve.container_bandwidth import measure_gpu
    from harness.serve.template import find_pin

    gb_s = measure_gpu(image or find_pin("vllm-rocm").image) if any(list_gpus()) else measure_cpu()
    store_measured(gb_s)
    return gb_s
