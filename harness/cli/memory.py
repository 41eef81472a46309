"""The command that answers the memory question before a start."""

import sys
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from harness.cli.common import app, console
from harness.errors import ExitCode, HarnessError


@app.command(short_help="The largest safe gpu_memory_utilization, and the KV cache that it leaves.")
def memory(
    model: Annotated[
        str | None, typer.Option("--model", help="A model's folder, or a hub id in this machine's Hugging Face cache.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest request in tokens (default: the model's).")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests that are to run at once.")] = None,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", min=1, help="GPUs that share the model.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option(help="As vLLM's: auto, bfloat16, float16, fp8.")] = "auto",
    free: Annotated[
        float | None, typer.Option(min=0, metavar="GIB", help="Instead of this machine's: as vLLM's log tells.")
    ] = None,
    total: Annotated[float | None, typer.Option(min=0, metavar="GIB", help="Belongs to --free.")] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Ask the runtime in a container of this image; the surest source.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    root: Annotated[Path, typer.Option("--root", help="Where /proc and /sys are.")] = Path("/"),
) -> None:
    """The largest gpu_memory_utilization with which vLLM starts now, how it was computed, and what is left for a model.

    Exit code 4 when the model does not fit, or when nothing is left.
    """
    from harness.machine.pool import Pool, pools
    from harness.memory.answer import Answer, Wish, room_of, share, share_of
    from harness.fraction import GIB
    from harness.memory.model import find_model, read_model
    from harness.memory.words import of_answer
    from harness.serve.probe import ask_image

    if (free is None) != (total is None) or (free is not None and image is not None):
        raise HarnessError("--free and --total belong together, and not to --image", next_step="Give both, or neither.")
    read = None if model is None else read_model(find_model(model), model)
    wish = Wish(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        tensor_parallel=tensor_parallel,
        kv_cache_dtype=kv_cache_dtype,
    )
    found: list[Pool] = []
    answer = None
    if free is not None and total is not None:
        sizes = [int(Decimal(str(size)) * GIB) for size in (free, total)]
        answer = share(sizes[0], sizes[1], source="given", gpus=tensor_parallel)
    else:
        found = pools(root) if image is None else ask_image(image, lambda line: print(line, file=sys.stderr))
        if found or read is None:  # without a GPU, what a model needs can be told all the same
            source: Literal["driver", "container"] = "driver" if image is None else "container"
            answer = share_of(found, source=source, tensor_parallel=tensor_parallel)
    room = None if read is None else room_of(read, answer, wish)
    everything = Answer(pools=found, share=answer, room=room)
    if as_json:
        print(msgspec.json.encode(everything).decode())
    else:
        console().print("\n".join(of_answer(everything)), markup=False, highlight=False, soft_wrap=True)
    if (answer is not None and answer.utilization is None) or (room is not None and room.fits is False):
        raise typer.Exit(ExitCode.FAILED)
