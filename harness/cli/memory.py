"""The command that answers the memory question before a start."""

import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from harness.cli.common import command, console, root_folder
from harness.errors import ExitCode, HarnessError

if TYPE_CHECKING:
    from harness.machine.pool import Pool
    from harness.memory.answer import Share


MOST_GIB = 1 << 20  # no machine has more, and beyond numbers lose their bytes


def _dtype(given: str) -> str:
    from harness.memory.cache import known_dtype

    known_dtype(given)
    return given


@command(short_help="The largest safe gpu_memory_utilization, and the KV cache that it leaves.")
def memory(
    model: Annotated[
        str | None, typer.Option(help="A model's folder, or a hub id in this machine's Hugging Face cache.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest request in tokens (default: the model's).")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests that are to run at once.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="As vLLM's: auto, bfloat16, float16, fp8.", callback=_dtype)
    ] = "auto",
    free: Annotated[
        float | None, typer.Option(min=0, metavar="GIB", help="Instead of this machine's: as vLLM's log tells.")
    ] = None,
    total: Annotated[float | None, typer.Option(min=0, metavar="GIB", help="Belongs to --free.")] = None,
    image: Annotated[
        str | None, typer.Option(help="Ask the runtime in a container of this image; the surest source.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    root: Annotated[Path, typer.Option(help="Where /proc and /sys are.", callback=root_folder)] = Path("/"),
) -> None:
    """The largest gpu_memory_utilization with which vLLM starts now, how it was computed, and what is left for a model.

    Exit code 4 when the model does not fit, or when nothing is left.
    """
    from harness.memory.answer import Answer, Wish, room_of
    from harness.memory.model import find_model, read_model
    from harness.memory.words import of_answer

    read = None if model is None else read_model(find_model(model), model)
    wish = Wish(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        tensor_parallel=tensor_parallel,
        kv_cache_dtype=kv_cache_dtype,
    )
    pools: list[Pool] = []
    share: Share | None
    if free is not None and total is not None:
        share = _given(free, total, tensor_parallel)
    else:
        pools, share = _found(image, root, tensor_parallel, needed=read is None)
    answer = Answer(pools=pools, share=share, room=None if read is None else room_of(read, share, wish))
    if as_json:
        print(msgspec.json.encode(answer).decode())
    else:
        console().print("\n".join(of_answer(answer)), soft_wrap=True)
    if (share is not None and share.utilization is None) or (answer.room is not None and answer.room.fits is False):
        raise typer.Exit(ExitCode.FAILED)


def _given(free: float, total: float, gpus: int) -> "Share":
    from harness.memory.answer import share
    from harness.units import GIB

    if not (math.isfinite(free) and math.isfinite(total) and free <= MOST_GIB and 0 < total <= MOST_GIB):
        raise HarnessError(
            f"--free {free:g} --total {total:g}: two sizes in GiB are expected, as in 76.45 and 96",
            next_step="Take them from vLLM's line `Free memory on device (76.45/96.0 GiB)`.",
        )
    sizes = [int(Decimal(str(size)) * GIB) for size in (free, total)]
    return share(sizes[0], max(1, sizes[1]), source="given", gpus=gpus)


def _found(image: str | None, root: Path, gpus: int, *, needed: bool) -> "tuple[list[Pool], Share | None]":
    """This machine's pools and their share; no share without a GPU, where it is not needed."""
    from harness.machine.pool import pools
    from harness.memory.answer import share_of
    from harness.serve.docker.probe import ask_image

    if image is not None:
        told = ask_image(image, lambda line: print(line, file=sys.stderr))
        return told, share_of(told, source="container", tensor_parallel=gpus)
    found = pools(root)
    # What a model needs can be told without a GPU.
    return found, share_of(found, tensor_parallel=gpus) if found or needed else None
