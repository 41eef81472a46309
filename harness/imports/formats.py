"""The formats that are read, and which of them a file is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, did_you_mean
from harness.imports import aiperf, genai_bench, guidellm, lemonade, vllm
from harness.imports.source import Imported, Source, has, read_source

FORMATS: dict[str, tuple[Callable[[Any], bool], Callable[[Source], Imported]]] = {
    "vllm": (vllm.is_it, vllm.read),
    "guidellm": (guidellm.is_it, guidellm.read),
    "aiperf": (aiperf.is_it, aiperf.read),
    "genai-bench": (genai_bench.is_it, genai_bench.read),
    "lemonade": (lemonade.is_it, lemonade.read),
}
WRITTEN_BY = {
    "vllm": "vllm bench serve --save-result [--save-detailed]",
    "guidellm": "guidellm run --output kind=json,path=FILE",
    "aiperf": "aiperf profile --export-level records: profile_export.jsonl",
    "genai-bench": "genai-bench benchmark: the file of one run, *_num_concurrency_*.json",
    "lemonade": "lemonade bench --json --output FILE",
}


def read_file(path: Path, given: str | None = None) -> tuple[Source, Imported]:
    """What a file says. `given` is the name of its format; otherwise the file itself shows it.

    Raises HarnessError for a file that is of none of the formats, or not of the given one.
    """
    if given is not None and given not in FORMATS:
        raise HarnessError(f"--format: there is no format '{given}'; {did_you_mean(given, FORMATS)}")
    source = read_source(path)
    found = [name for name, (is_it, _) in FORMATS.items() if is_it(source.value)]
    if given is not None and given not in found:
        said = f"; it looks like {found[0]}" if found else ""
        raise HarnessError(
            f"{path}: not what {given} writes{said}", next_step=f"{given} is read from: {WRITTEN_BY[given]}"
        )
    if not found:
        aiperf.refuse_aggregate(source)
        keys = ", ".join(map(str, list(source.value)[:6])) if has(source.value) and source.value else ""
        raise HarnessError(
            f"{path}: not a file of any tool that is known" + (f" (its keys: {keys})" if keys else ""),
            next_step="Known are the files below; docs/imports.md says more.",
            detail="\n".join(f"{name}: {command}" for name, command in WRITTEN_BY.items()),
        )
    return source, FORMATS[given or found[0]][1](source)
