"""A model's download, as Lemonade streams its progress."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import requests

from harness.errors import ServerError
from harness.failures.unexpected_response import decoded
from harness.serve.ask import lines_of, reason
from harness.serve.lemonade.api import PREFIX, Api, text_of

SILENCE_S = 300.0  # between two events; a hub may take its time
OFFLINE = (
    "Set offline and no_fetch_executables to false for one run: what is downloaded stays on the volume. "
    "Without a network, put the model into the folder that huggingface_cache names."
)


class Progress(msgspec.Struct, frozen=True):
    """An event of a download."""

    file: str = ""
    file_index: int = 0
    total_files: int = 0
    bytes_total: float = 0.0
    percent: float = 0.0

    def in_words(self) -> str:
        part = f" ({self.file_index} of {self.total_files})" if self.total_files > 1 else ""
        of = f" of {self.bytes_total / 1e9:.1f} GB" if self.bytes_total else ""
        return f"downloading {self.file[:200] or 'the model'}{part}: {self.percent:.0f} %{of}"


def download(api: Api, body: dict[str, Any], told: list[str], until: float) -> None:
    """Wait until the model is there; `told` gets the progress in words. Raises ServerError, also for an error event."""
    name = body["model_name"]
    try:
        with api.post(f"{PREFIX}/pull", body, SILENCE_S, stream=True) as response:
            if response.status_code != 200:
                said = text_of(response)
                step = OFFLINE if "offline" in said else "Check its name, and that the machine reaches the hub."
                raise ServerError(f"Lemonade cannot download '{name}': {said}", next_step=step)
            for kind, data in events(lines_of(response)):
                if kind == "error":
                    raise _failed(name, data)
                if kind == "complete":
                    return
                told[-1:] = [_progress(data).in_words()]
                if time.monotonic() > until:
                    return
    except requests.RequestException as error:
        raise ServerError(
            f"the download of '{name}' by Lemonade broke off ({reason(error)})", next_step="Run it again: it goes on."
        ) from None


def events(lines: Iterator[bytes]) -> Iterator[tuple[str, bytes]]:
    """Kind and data of server-sent events."""
    kind, data = "progress", b""
    for line in lines:
        if line.startswith(b"event:"):
            kind = line.removeprefix(b"event:").strip().decode("utf-8", "replace")
        elif line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
        elif not line.strip():
            if data:
                yield kind, data
            kind, data = "progress", b""
    if data:
        yield kind, data


def _progress(data: bytes) -> Progress:
    try:
        return msgspec.json.decode(data, type=Progress, strict=False)
    except (ValueError, RecursionError):
        return Progress()


def _failed(name: str, data: bytes) -> ServerError:
    try:
        said = decoded(data)["error"]
        said = said.get("message") if isinstance(said, dict) else said
    except (ValueError, KeyError, TypeError):
        said = None
    said = (said if isinstance(said, str) else data.decode("utf-8", "replace"))[:300]
    return ServerError(
        f"Lemonade could not download '{name}': {said}",
        next_step="Check the network of the container, the model's name, and HF_TOKEN for a gated model.",
    )
