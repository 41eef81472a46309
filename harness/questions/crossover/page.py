"""The table of speculation: what it gains and costs at each level, and how many drafts are accepted."""

from typing import Any

from harness.base.units import NOTHING, factor, short_percent
from harness.numbers.summary import Summary
from harness.report.elements import Grid, plain_grid

_HEAD = ("Server", "Load", "Varied", "At", "Whole turn", "Decode", "First token", "Throughput", "Drafts accepted")
_COLUMNS = ("turn", "decode", "first", "rate")


def speculation_tables(summary: Summary) -> list[Grid]:
    """Return the table of a run of which one server speculates: a row for each server, load and level.

    Ratios to the server without speculation: of speeds and throughput, above 1 is better; of the time to the first
    token, above 1 is later.
    """
    rows: list[list[str]] = []
    for answer in summary.answers:
        if answer.code != "setting_answer":
            continue
        parts = answer.values["parts"]
        name = ", ".join(filter(None, (answer.values["load"], answer.values["others"])))
        for side in dict.fromkeys(part["side"] for part in parts if "by_level" in part):
            own = [part for part in parts if part.get("side") == side]
            rows += [[side, name, answer.values["axis"], f"{int(level):,}", *cells] for level, cells in _levels(own)]
    return [plain_grid(_HEAD, rows)] if rows else []


def _levels(parts: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the cells of each level of a server."""
    ratios = {
        (part["speed"], str(level)): ratio
        for part in parts
        if "ratios" in part
        for level, ratio in zip(part["levels"], part["ratios"], strict=True)
    }
    shares: dict[str, float | None] = next(part["by_level"] for part in parts if "by_level" in part)
    return [
        (
            level,
            [
                *(f"{factor(ratios[speed, level])}x" if (speed, level) in ratios else NOTHING for speed in _COLUMNS),
                NOTHING if share is None else short_percent(share),
            ],
        )
        for level, share in shares.items()
    ]
