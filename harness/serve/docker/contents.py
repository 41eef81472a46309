"""What an image brings along that decides about speed: its ROCm, the versions that it lists, what it sets."""

import re
import tarfile

from docker.models.containers import Container

from harness.engines import engines
from harness.redact import masked
from harness.rundir.manifest import Contents
from harness.serve.docker.containers import unpacked
from harness.serve.docker.daemon import DOCKER_ERRORS

ROCM_VERSION = "/opt/rocm/.info/version"
VERSIONS = "/app/versions.txt"  # of vLLM's images
_MOST_BYTES = 65536
# Of the environment that an image sets: GPU runtime, engines, and the libraries that they compute with.
_MATTERS = re.compile(
    r"^(?:HIP|HSA|ROCM|ROC[RM]|AMD|GPU|GFX|PYTORCH|TORCH|TRITON|FLASH_ATTENTION|AITER|MIOPEN|TENSILE|HIPBLAS\w*|NCCL|RCCL"
    rf"|{'|'.join(prefix for engine in engines() for prefix in engine.command.environment)}"
    r"|SAFETENSORS|TOKENIZERS|OMP|MKL|OPENBLAS|MALLOC|CUDA)_|^LD_PRELOAD$"
)


def contents(container: Container) -> Contents:
    """What the container's image holds, read through the Docker API. Unknown is None; a file it lacks is no error."""
    try:
        config = container.image.attrs["Config"] if container.image is not None else {}
    except DOCKER_ERRORS:
        config = {}
    pairs = [str(entry).partition("=") for entry in config.get("Env") or []]
    return Contents(
        rocm=file_in(container, ROCM_VERSION),
        versions=masked(listed(file_in(container, VERSIONS) or "")),
        environment=masked({name: text for name, _, text in sorted(pairs) if _MATTERS.match(name)}),
    )


def file_in(container: Container, path: str) -> str | None:
    """A small text file of a container; None where it has no such file, or the engine does not hand it out."""
    try:
        stream, about = container.get_archive(path)
        if about is None or about["size"] > _MOST_BYTES:
            return None
        return unpacked(stream).decode("utf-8", "replace").strip() or None
    except (*DOCKER_ERRORS, tarfile.TarError, KeyError):
        return None


def listed(text: str) -> dict[str, str]:
    """Lines such as `TRITON_BRANCH: 57c693b6` as a dictionary; a line of another form is its own value."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, value = line.partition(": ")
        found[name if colon else f"line {len(found) + 1}"] = value.strip() if colon else line
    return found
