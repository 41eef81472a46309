"""Measure a GPU's read bandwidth inside the image of a server, in a container that is removed at the end."""

import contextlib
import re

from harness.base.command_line import command_line
from harness.base.errors import ServerError
from harness.machine.gpus import find_device_groups
from harness.serve.docker_engine import (
    DOCKER_ERRORS,
    connect,
    get_local_digests,
    make_docker_error,
    make_labels,
    make_name,
)

MAX_S = 180
_RUN, _CELL = "expect", "bandwidth"

# On the first GPU that it sees.
SCRIPT = """
import time, torch
gpu = torch.cuda.is_available()
device = torch.device("cuda" if gpu else "cpu")
free = torch.cuda.mem_get_info()[0] if gpu else 1 << 28
size = min(4 << 30, free // 4)
block = torch.ones(size // 4, dtype=torch.float32, device=device)
half = block.view(torch.bfloat16).view(-1, 4096)
vector = torch.ones(4096, dtype=torch.bfloat16, device=device)
best = 0.0
for work in (lambda: block.sum(), lambda: torch.mv(half, vector)):
    for _ in range(10 if gpu else 2):
        began = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        best = max(best, 4 * block.numel() / (time.perf_counter() - began) / 1e9)
print("read GB/s:", best)
"""


def measure_gpu(image: str) -> float:
    """Return the GB/s that reductions read in a container of an image with torch. Nothing is pulled.

    Raises ServerError.
    """
    if not get_local_digests([image]):
        raise ServerError(
            f"--measure: the image {image} is not on this machine", next_step=command_line("docker", "pull", image)
        )
    with contextlib.closing(connect()) as client:
        try:
            container = client.containers.create(
                image,
                entrypoint=["python3", "-c", SCRIPT],
                name=make_name(_RUN, _CELL),
                labels=make_labels(_RUN, _CELL),
                devices=[f"{device}:{device}:rwm" for device in ("/dev/kfd", "/dev/dri")],
                group_add=[str(group) for group in find_device_groups()],
                network_mode="none",
            )
        except DOCKER_ERRORS as error:
            raise make_docker_error("--measure: the container cannot be created", error) from None
        try:
            container.start()
            end = container.wait(timeout=MAX_S)
            log = container.logs(tail=50).decode("utf-8", "replace")
        except DOCKER_ERRORS as error:
            raise make_docker_error("--measure: the container failed", error) from None
        finally:
            with contextlib.suppress(*DOCKER_ERRORS):
                container.remove(force=True)
    match = re.search(r"read GB/s: (\d+(?:\.\d+)?)", log)
    if match is None or not float(match[1]):
        raise ServerError(
            f"--measure: the measurement in {image} ended with exit code {end.get('StatusCode')}",
            detail="\n".join(log.splitlines()[-10:]),
            next_step="`harness doctor` finds problems of the GPU; `harness expect` works without --measure.",
        )
    return float(match[1])
