"""The flags of a server's command line against its image's own help, before a start that takes minutes.

The help is read once per image, program and mounts, and kept in the user's cache folder
(`$XDG_CACHE_HOME/amd-llm-load/flags`, else `~/.cache/...`); removing that folder is safe.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

import docker
import msgspec
from docker.models.images import Image

from harness import paths
from harness.errors import ServerError
from harness.files import UNDECODABLE, read_bytes
from harness.serve.compose.compose import Service
from harness.serve.docker.containers import run_once
from harness.serve.vllm.flags import options_of, unknown_flags

HELP_S = 180.0  # vLLM imports for ten seconds, and for a minute from a cold disk
FEWEST = 20  # a help with fewer options is none, or of another program


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of a program, as a file of the cache."""

    image: str  # id
    entrypoint: list[str] | None
    options: list[str]


def check_flags(
    client: docker.DockerClient,
    image: Image,
    service: Service,
    help_argument: str,
    owner: dict[str, str],
    say: Callable[[str], None],
) -> None:
    """Refuse what the program in the image would refuse. Raises ServerError that lists every such flag.

    Says so and goes on where the help cannot be read: on another machine's devices, or of an image made differently.
    """
    path = cache_path(str(image.id), service)
    try:
        options = msgspec.json.decode(read_bytes(path), type=Known).options
    except (OSError, *UNDECODABLE):
        say(f"asking {service.image} which flags it knows, once for this image")
        try:
            options = _asked(client, service, help_argument, owner)
        except ServerError as error:
            say(f"the flags are not checked: {error.what}")
            return
        with contextlib.suppress(OSError):  # a home that cannot be written costs ten seconds per start
            path.parent.mkdir(parents=True, exist_ok=True)
            known = Known(image=str(image.id), entrypoint=service.entrypoint, options=options)
            path.write_bytes(msgspec.json.encode(known))
    problems = unknown_flags(service.command or [], options)
    if not problems:
        return
    raise ServerError(
        f"vLLM in {service.image} would not start with these flags: {'; '.join(problems)}",
        next_step="Correct the server's extra_args in the scenario (or take another image). "
        "All flags of this image were read from its own help.",
        detail="\n".join(problems),
    )


def _asked(client: docker.DockerClient, service: Service, help_argument: str, owner: dict[str, str]) -> list[str]:
    """The options in the program's own help. Raises ServerError where it cannot be read."""
    # No volumes of the harness: they are made later, and hold nothing that the help needs.
    asked = msgspec.structs.replace(
        service, command=[help_argument], volumes=_mounts(service), ports=[], healthcheck=None, configs=[]
    )
    code, text = run_once(client, asked, "help", owner, HELP_S)
    options = options_of(text)
    if code != 0 or len(options) < FEWEST:
        raise ServerError(f"the image's {help_argument} ended with {code} and {len(options)} options")
    return options


def _mounts(service: Service) -> list[str]:
    return [volume for volume in service.volumes if volume.startswith("/")]


def cache_path(image_id: str, service: Service) -> Path:
    """Where the options of a program are kept. Mounts count, because they may hold the program."""
    key = msgspec.json.encode([image_id, service.entrypoint, _mounts(service)])
    return paths.cache() / "flags" / f"{hashlib.sha256(key).hexdigest()[:24]}.json"
