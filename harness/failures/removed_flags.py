"""Flags that vLLM no longer knows, and what to write instead: told before a start as well as after one that failed."""

from functools import cache
from pathlib import Path

import msgspec
import yaml


class Removed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of removed_flags.yaml."""

    flag: str
    gone_in: str | None  # the first version without it; None where it is not known
    instead: str
    source: str

    @property
    def advice(self) -> str:
        since = f" since {self.gone_in}" if self.gone_in else ""
        return f"vLLM does not know it any more{since}: {self.instead} ({self.source})"


@cache
def removed_flags() -> dict[str, Removed]:
    """The table, by flag."""
    text = Path(__file__).with_name("removed_flags.yaml").read_text(encoding="utf-8")
    rows: list[Removed] = msgspec.convert(yaml.safe_load(text), list[Removed])
    return {row.flag: row for row in rows}
