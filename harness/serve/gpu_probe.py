"""What the GPU's runtime itself tells of its memory, asked in a container of a server's image with its devices.

This is what vLLM will see: `torch.cuda.mem_get_info`, after the runtime has taken its own share.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from harness.errors import ServerError
from harness.machine.gpu_memory import Pool, pools
from harness.machine.gpus import gpus
from harness.scenario import Server
from harness.serve import containers, labels
from harness.serve.compose_file import filled_in, parse
from harness.serve.document import rendered
from harness.serve.engine import connect, ensure_image
from harness.serve.location import engine_location
from harness.units import gib

PROBED = "vllm-rocm"  # the template whose container asks: it has the devices and groups
PROBE_S = 180.0  # torch imports for ten seconds, from a cold disk for a minute
PROGRAM = """
import json, torch
found = []
for number in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(number)
    about = torch.cuda.get_device_properties(number)
    arch = getattr(about, "gcnArchName", "") or about.name
    found.append({"free": free, "total": total, "target": arch.split(":")[0]})
print("MEMORY " + json.dumps(found))
"""


class RuntimeGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU as the runtime reports."""

    free: int
    total: int
    target: str


def ask_image(image: str, on_progress: Callable[[str], None], variables: dict[str, Any] | None = None) -> list[Pool]:
    """The GPUs that the runtime in an image sees, in its order; `variables` are those of the template PROBED.

    Raises ServerError: no Docker, no image, no device, no torch in it.
    """
    given = {"image": image, **(variables or {})}
    service = parse(rendered(Server(template=PROBED, variables=given), "probe", port=8000))
    asked = msgspec.structs.replace(
        filled_in(service, os.environ).server,
        entrypoint=["python3"],
        command=["-c", PROGRAM],
        volumes=[volume for volume in service.server.volumes if volume.startswith("/")],  # no caches
        ports=[],
        healthcheck=None,
        ulimits={},  # a rootless engine may refuse them, and nothing here needs them
        configs=[],
    )
    owner = labels.owned(f"memory-{secrets.token_hex(4)}", "probe")
    with contextlib.closing(connect()) as client:
        ensure_image(client, image, on_progress)
        on_progress(f"asking the runtime in {image}")
        code, text = containers.run_once(client, asked, "ask", owner, PROBE_S)
    of_driver = pools(cards=list(gpus())) if engine_location().is_here else []  # a runtime sees all
    seen = _answer(image, code, text)
    same = [pool.target for pool in of_driver] == [gpu.target for gpu in seen]
    return [_pool(gpu, number, of_driver[number] if same else None) for number, gpu in enumerate(seen)]


def _answer(image: str, code: int, text: str) -> list[RuntimeGpu]:
    lines = [line.removeprefix("MEMORY ") for line in text.splitlines() if line.startswith("MEMORY ")]
    try:
        found = msgspec.convert(json.loads(lines[-1]), list[RuntimeGpu])
    except (IndexError, ValueError, msgspec.ValidationError):
        raise ServerError(
            f"the runtime in {image} does not tell its memory (exit code {code})",
            next_step="The image needs python3 with torch for ROCm, as vLLM's images have it.",
            detail=text[-2000:],
        ) from None
    if not found:
        raise ServerError(
            f"the runtime in {image} sees no GPU",
            next_step="Is the image built for this GPU, and may its user open /dev/kfd and /dev/dri?",
        )
    return found


def _pool(gpu: RuntimeGpu, number: int, of_driver: Pool | None) -> Pool:
    """The GPU with what the driver knows of it: whether the memory is the host's."""
    doubts = []
    total = of_driver.total_bytes if of_driver is not None else None
    if total is not None and abs(gpu.total - total) > total // 20:
        doubts.append(f"the runtime reports {gib(gpu.total, 2)} in total, the driver {gib(total, 2)}")
    return Pool(
        render_node=of_driver.render_node if of_driver is not None else f"GPU {number}",
        target=gpu.target,
        kind=of_driver.kind if of_driver is not None else "vram",
        total_bytes=gpu.total,
        used_bytes=max(0, gpu.total - gpu.free),
        free_bytes=gpu.free,
        unified=of_driver.unified if of_driver is not None else False,
        host_available_bytes=of_driver.host_available_bytes if of_driver is not None else None,
        doubts=doubts,
    )
