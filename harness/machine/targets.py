"""What a gfx target is called in shops, and where it stands with each server: targets.yaml, with date and sources."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec import Struct

Standing = Literal["validated", "supported", "code", "wheels", "prepared", "unsupported"]
WORDS: dict[Standing, str] = {
    "validated": "validated by its makers",
    "supported": "supported",
    "code": "has code for it",
    "wheels": "builds exist, not tried by their makers",
    "prepared": "prepared, cannot be installed yet",
    "unsupported": "unsupported",
}


class Server(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server of the table, in words, and where its column was read."""

    title: str
    source: str
    image: str | None = None  # the repository of its image, as far as the column speaks of one


class Target(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of the table."""

    target: str
    family: str
    architecture: str
    servers: dict[str, Standing] = {}

    def standing(self, server: str) -> Standing:
        return self.servers.get(server, "unsupported")

    @property
    def instinct(self) -> bool:
        return self.architecture.startswith("CDNA")


class Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """targets.yaml."""

    checked: str  # the day on which the sources were read
    servers: dict[str, Server]
    targets: list[Target]


@cache
def table() -> Table:
    text = Path(__file__).with_name("targets.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), Table)


def without_code(image: str, targets: Iterable[str]) -> list[str]:
    """Those of the targets for which an image, such as vllm/vllm-openai-rocm:v0.25.0, is known to have no code."""
    for name, server in table().servers.items():
        if server.image is not None and image.startswith((f"{server.image}:", f"{server.image}@")):
            rows = {target: target_of(target) for target in targets}
            return [target for target, row in rows.items() if row is None or row.standing(name) == "unsupported"]
    return []


def has_fp8(target: str) -> bool:
    """Whether vLLM computes FP8 on this gfx target; true for one that it does not know.

    As vLLM's ROCm platform has it (`supports_fp8`): CDNA and RDNA 4, not RDNA 3 and 3.5.
    """
    return re.match(r"gfx(10[0-3]|11)", target) is None


def target_of(name: str) -> Target | None:
    """The row of a target such as gfx1151; None for one that the table does not have."""
    return next((row for row in table().targets if row.target == name), None)
