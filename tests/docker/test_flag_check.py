"""A server's flags against its image's own help, on a real Docker Engine with a stand-in for vLLM."""

from pathlib import Path

import docker
import pytest

from harness.errors import ServerError
from harness.serve.compose.compose import Service
from harness.serve.docker import labels
from harness.serve.vllm.flag_check import cache_path, check_flags
from tests.docker.conftest import remains

# Prints thirty options, and says with what it was called.
STAND_IN = 'echo "$0" >&2; for n in $(seq 30); do echo "  --option-$n VALUE, -o$n VALUE"; done; exit %d'


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return labels.owned(tmp_path.name.replace("_", "-"), "c")


def service(image: str, code: int = 0, *flags: str, **keys: object) -> Service:
    entrypoint = ["sh", "-c", STAND_IN % code]
    given = {"volumes": ["amd-llm-load-none:/root/.cache"], "ports": ["127.0.0.1:1:1"], "init": True} | keys
    return Service(image=image, entrypoint=entrypoint, command=["model", *flags], **given)  # type: ignore[arg-type]


def test_a_wrong_flag_is_refused_and_the_help_is_read_once(
    image: str, client: docker.DockerClient, owner: dict[str, str]
) -> None:
    said: list[str] = []
    found = client.images.get(image)
    wrong = service(image, 0, "--option-7=1", "--optio-12", "3")
    for _ in range(2):
        with pytest.raises(ServerError, match="--optio-12: this vLLM has no such option; did you mean '--option-12'"):
            check_flags(client, found, wrong, "--help=all", owner, said.append)
    check_flags(client, found, service(image, 0, "--option-7=1"), "--help=all", owner, said.append)
    assert said == [f"asking {image} which flags it knows, once for this image"]
    assert cache_path(str(found.id), wrong).is_file()
    assert remains(client, owner[labels.RUN]) == []
    assert "amd-llm-load-none" not in [volume.name for volume in client.volumes.list()]


@pytest.mark.parametrize(
    ("code", "keys", "words"),
    [
        (1, {}, "the image's --help=all ended with 1 and 60 options"),
        (0, {"devices": ["/dev/no-such-device"]}, "cannot be run: "),
    ],
)
def test_a_help_that_cannot_be_read_is_said_and_stops_nothing(
    image: str, client: docker.DockerClient, owner: dict[str, str], code: int, keys: dict[str, object], words: str
) -> None:
    said: list[str] = []
    odd = service(image, code, "--no-such-option", **keys)
    check_flags(client, client.images.get(image), odd, "--help=all", owner, said.append)
    assert said[-1].startswith("the flags are not checked: ")
    assert words in said[-1]
    assert not cache_path(str(client.images.get(image).id), odd).exists()
    assert remains(client, owner[labels.RUN]) == []
