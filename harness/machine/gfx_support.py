"""Product names of gfx targets (targets.yaml), and the support of each server for them (harness.engines)."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import msgspec
import yaml
from msgspec import Struct

from harness.engines import Column, Standing, engines

WORDS: dict[Standing, str] = {
    "validated": "validated by its makers",
    "supported": "supported",
    "code": "has code for it",
    "wheels": "builds exist, not tried by their makers",
    "prepared": "prepared, cannot be installed yet",
    "unsupported": "unsupported",
}


class GfxTarget(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of the table."""

    target: str
    family: str
    architecture: str

    def standing(self, column: str) -> Standing:
        return columns()[column].targets.get(self.target, "unsupported")

    @property
    def instinct(self) -> bool:
        return self.architecture.startswith("CDNA")


class GfxTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """targets.yaml."""

    checked: str  # the day on which the sources were read
    targets: list[GfxTarget]


@cache
def columns() -> dict[str, Column]:
    """Images and builds of servers, in words, each with its targets."""
    return {key: column for engine in engines() for key, column in engine.columns.items()}


@cache
def table() -> GfxTable:
    text = Path(__file__).with_name("targets.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), GfxTable)


def without_code(image: str, targets: Iterable[str]) -> list[str]:
    """The targets for which an image, such as vllm/vllm-openai-rocm:v0.25.0, is known to have no code."""
    for name, column in columns().items():
        for pattern, only in column.images.items():
            if fnmatchcase(image, pattern):
                known = only or [row.target for row in table().targets if row.standing(name) != "unsupported"]
                return [target for target in dict.fromkeys(targets) if target not in known]
    return []


def has_fp8(target: str) -> bool:
    """Whether vLLM computes FP8 on this gfx target; true for unknown ones.

    As vLLM's ROCm platform has it (`supports_fp8`): CDNA and RDNA 4, not RDNA 3 and 3.5.
    """
    return re.match(r"gfx(10[0-3]|11)", target) is None


def target_of(name: str) -> GfxTarget | None:
    """The row of a target such as gfx1151; None for unknown ones."""
    return next((row for row in table().targets if row.target == name), None)
