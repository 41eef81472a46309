"""llama-bench's JSON, JSON Lines and Markdown. Read against the README and output code of llama.cpp, 2024 to 2026.

A test processes a prompt (pp), generates tokens (tg) or does both (pg), one at a time and without a server. Each
repetition is a repeat. A Markdown table has only the mean and the standard deviation.
"""

import re
from collections.abc import Iterator
from itertools import count
from math import isfinite
from statistics import fmean
from typing import Any

from msgspec import Struct

from harness.base.errors import HarnessError
from harness.base.measured import Distribution, Numbers
from harness.base.plausible import why_no_speed
from harness.base.reason import because
from harness.base.redact import printable
from harness.base.units import significant
from harness.imports import FILE_TIME, ONE_USER, Count, Format, Imported, ImportedPart, Source, unix_time

DEFINITIONS = {
    "output_tok_s": "tokens / time of the generation alone: one sequence, without a server, sampling or a tokenizer",
    "input_tok_s": "prompt tokens / time of the prompt alone: one sequence, without a server or a tokenizer",
    "ttft": "the time of the prompt alone, without a server, a tokenizer or the first token's sampling",
    "tpot": "time of the generation / generated tokens, the first included",
    "e2e": "the time of prompt and generation, without a server or a tokenizer",
}
_SPEED_FIELDS = ("input_tok_s", "output_tok_s", "ttft", "tpot", "e2e")
_NO_RECORDS = "llama-bench sends no requests"
_NO_TOKENS = "the test generates no tokens"
_MISSING = {
    "wall": "the file has the time of each test, not that of all",
    "requests_per_s": _NO_RECORDS,
    "gap": _NO_RECORDS,
    "tokens_per_chunk": _NO_RECORDS,
    "ttfo": _NO_RECORDS,
}
_MODEL = ("model_filename", "model")
# The settings of a test, each with its name in a table; the last lines are of older builds and of ik_llama.cpp. A field
# that is not listed may be a measured value, which would make a server of each row.
_SETTINGS = frozenset((
    *_MODEL, "backends", "backend", "be", "n_batch", "n_ubatch", "n_threads", "threads", "th", "cpu_mask", "cpu_strict",
    "poll", "type_k", "type_v", "n_gpu_layers", "ngl", "n_cpu_moe", "ncmoe", "split_mode", "sm", "load_mode", "lm",
    "main_gpu", "mg", "no_kv_offload", "nkvo", "flash_attn", "fa", "devices", "dev", "tensor_split", "ts",
    "tensor_buft_overrides", "ot", "use_mmap", "mmap", "use_direct_io", "dio", "embeddings", "embd", "no_op_offload",
    "nopo", "no_host", "noh", "fit_target", "fitt", "fit_min_ctx", "fitc", "rpc_servers", "rpc", "numa",
    "defrag_thold", "mul_mat_q", "mmq", "low_vram", "lv", "f16_kv", "cuda", "hip", "opencl", "vulkan", "kompute",
    "metal", "sycl", "gpu_blas", "blas", "tensor_buft_override", "type_kv",
    "mla_attn", "mla", "attn_max_batch", "amb", "repack", "rtr", "fused_moe", "fmoe", "ser", "mqkv", "muge", "rcache",
    "sas", "ger", "use_thp", "thp", "no_fug", "no_ooae", "cuda_params", "khad", "vhad", "tgb", "n_threads_batch",
))  # fmt: skip
# What a test measures, and which build measured it.
_NO_SETTINGS = frozenset((
    "build_commit", "build_number", "build", "cpu_info", "gpu_info", "model_type", "model_size", "model_n_params",
    "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns",
    "samples_ts", "size", "params", "test", "t/s", "table_speed", "unread",
))  # fmt: skip
_BENCHY = re.compile(r"^llama-benchy\b", re.MULTILINE)
_SERVED = re.compile(r"\(m?s\)|ttf|latency", re.IGNORECASE)  # in the head of a table: latencies of a server
_TEST = re.compile(r"(?:pp ?(?P<pp>\d{1,9}))?\+?(?:tg ?(?P<tg>\d{1,9}))?(?: ?@ ?d ?(?P<depth>\d{1,9}))?")
# Some locales print a decimal comma, always with two digits; "1,180" could be a thousand.
_NUMBER = r"\d{1,9}(?:\.\d{1,9}|,\d{1,2})?"
_SPEED = re.compile(rf"(?P<mean>{_NUMBER}) *(?:±|\+-|\+/-) *(?P<deviation>{_NUMBER})")
_RULE = re.compile(r":?-+:?")  # a cell of the line below a table's head
_DEVIATION = re.compile(r"±|\+-|\+/-")
_BUILD = re.compile(r"build: (?P<commit>[0-9a-f]{4,40}) \((?P<number>\d{1,9})\)")
MAX_DIFFERENCE = 0.01  # between a mean and that of its samples
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_MAX_ROWS, _MAX_ROW = 5, 300  # unread rows that a note names, and characters of each
_SHORT = 12  # characters of a setting's name and value in a server's name


class LlamaBenchTest(Struct, frozen=True, kw_only=True):
    n_prompt: Count
    n_gen: Count
    n_depth: Count = 0
    avg_ts: float | None = None  # tokens a second
    stddev_ts: float | None = None
    samples_ts: list[float | None] = []
    samples_ns: list[float | None] = []
    test_time: str | None = None
    build_commit: str | None = None
    build_number: Count | None = None
    backends: str | None = None
    backend: str | None = None  # of a Markdown table
    table_speed: str | None = None  # of a Markdown table, as it is there
    unread: list[str] = []  # of the first test of Markdown tables: their rows that are no test

    @property
    def speeds(self) -> list[float]:
        """The samples that can be a speed."""
        return [speed for speed in self.samples_ts if speed is not None and self.why_not(speed) is None]

    @property
    def mean(self) -> float | None:
        """The mean, where it can be a speed."""
        return self.avg_ts if self.avg_ts is not None and self.why_not(self.avg_ts) is None else None

    def why_not(self, speed: float) -> str | None:
        """Why a number cannot be a speed of this test. One token of `tg1` is timed as any other: it is no answer."""
        return why_no_speed(speed, decoding=not self.n_prompt)

    def time_differs(self) -> tuple[float, float] | None:
        """The first sample's speed, and that by its time, where the two differ; None: none do."""
        tokens = self.n_prompt + self.n_gen
        for speed, ns in zip(self.samples_ts, self.samples_ns, strict=False):
            if speed is None or ns is None or ns <= 0 or self.why_not(speed) is not None:
                continue
            by_time = tokens * 1e9 / ns
            if abs(speed - by_time) > MAX_DIFFERENCE * max(speed, by_time):
                return speed, by_time
        return None

    @property
    def name(self) -> str:
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "-".join([*parts, *([f"d{self.n_depth}"] if self.n_depth else [])])


def read_tables(text: str) -> list[dict[str, Any]]:
    """Return the tests of all Markdown tables of llama-bench in a text, in the form of its JSON.

    A row without a speed is a test without one, and the first test has the rows that cannot be read. Raises
    HarnessError for a table of another tool.
    """
    if _BENCHY.search(text):
        raise _other_tool("the text is of llama-benchy, which measures a server")
    build = _BUILD.search(text)
    about = {} if build is None else {"build_commit": build["commit"], "build_number": int(build["number"])}
    tests, head, unread = list[dict[str, Any]](), list[str](), list[str]()
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if {"test", "t/s"} <= set(cells):
            head = cells
            _refuse_served(head)
        elif head and not all(map(_RULE.fullmatch, cells)):
            row = _table_row(dict(zip(head, cells, strict=False)) if len(cells) == len(head) else {})
            if row is None:
                unread.append(line)
            else:
                tests.append(row | about)
    if not tests:
        return []
    if not any(_DEVIATION.search(test["table_speed"]) for test in tests):
        shown = ", ".join(dict.fromkeys(printable(test["table_speed"])[:_SHORT] for test in tests[:_MAX_ROWS]))
        raise HarnessError(
            f"no row of the table has a speed as llama-bench writes it, such as 75.3 ± 0.1 (t/s: {shown})",
            next_step="Nothing was written. Measure again; `llama-bench -o json` has each repetition.",
        )
    tests[0]["unread"] = unread
    return tests


def _refuse_served(head: list[str]) -> None:
    """Raise HarnessError for the head of a table of a tool that measures a server."""
    if latencies := [name for name in head if _SERVED.search(name)]:
        raise _other_tool(f"the table has latencies of a server ({', '.join(map(printable, latencies))})")


def _other_tool(what: str) -> HarnessError:
    return HarnessError(
        f"{what}: it is not of llama-bench, which measures without one",
        next_step="Nothing was written. Results of that tool are not read; `harness quick URL` measures the server.",
    )


def _table_row(row: dict[str, str]) -> dict[str, Any] | None:
    """A row of a table in the form of llama-bench's JSON; None: it is no test."""
    test = _TEST.fullmatch(row.get("test", ""))
    if test is None or not (test["pp"] or test["tg"]):
        return None
    parts = (("n_prompt", "pp"), ("n_gen", "tg"), ("n_depth", "depth"))
    speed = _SPEED.fullmatch(row["t/s"])
    names = {} if speed is None else {"avg_ts": "mean", "stddev_ts": "deviation"}
    return {
        **row,
        **{name: int(test[part] or 0) for name, part in parts},
        **{name: float(speed[part].replace(",", ".")) for name, part in names.items() if speed is not None},
        "table_speed": row["t/s"],
    }


def read(source: Source) -> Imported:
    """Return one server for each combination of settings, and one load for each test."""
    results = source.value if isinstance(source.value, list) else [source.value]
    tests = [source.read(LlamaBenchTest, value, f"$[{i}]") for i, value in enumerate(results)]
    servers = _name_servers(results, tests)
    parts: list[ImportedPart] = []
    for i, (test, server) in enumerate(zip(tests, servers, strict=True)):
        if not test.n_prompt and not test.n_gen:
            raise source.error_at(f"$[{i}]", "a test without a prompt and without generated tokens")
        parts += _make_parts(source, f"$[{i}]", test, server, parts)
    models = {server: str(next((v for key in _MODEL if (v := value.get(key))), "unknown"))
              for server, value in zip(servers, results, strict=True)}  # fmt: skip
    build = tests[0]
    version = _version(build)
    return Imported(
        tool="llama-bench",
        version=version,
        model=", ".join(dict.fromkeys(models.values())),
        versions=dict.fromkeys(servers, f"llama.cpp {version}") if version else {},
        models=models,
        arguments={server: _settings(value) for server, value in zip(servers, results, strict=True)},
        parts=parts,
        work=sorted({part.load for part in parts}),
        definitions=DEFINITIONS,
        missing=_MISSING,
        notes=[
            ONE_USER,
            *([FILE_TIME] if any(unix_time(test.test_time, _TIME) is None for test in tests) else []),
            *_speed_notes(tests, servers),
            *_column_notes(results),
            *_unread_notes(build.unread),
        ],
    )


def _version(test: LlamaBenchTest) -> str | None:
    """The build, and its commit unless that repeats the number."""
    number, commit = test.build_number, test.build_commit
    if not commit or number is None:
        return commit or None
    return f"b{number}" if commit in (f"b{number}", str(number)) else f"b{number} ({commit})"


def _speed_notes(tests: list[LlamaBenchTest], servers: list[str]) -> Iterator[Any]:
    for test, server in zip(tests, servers, strict=True):
        row, speeds, total = f"{server} / {test.name}", test.speeds, len(test.samples_ts)
        if len(speeds) < total:
            missing = total - len(speeds)
            text = f"{row}: {missing} of {total} samples_ts are no speed and count as missing"
            why = (test.why_not(speed) for speed in test.samples_ts if speed is not None)
            text += next((f" ({reason})" for reason in why if reason is not None), "")
            yield because("import_samples_missing", text, row=row, missing=missing, total=total)
        elif speeds and test.mean and abs(test.mean - (mean := fmean(speeds))) > MAX_DIFFERENCE * max(test.mean, mean):
            text = f"{row}: avg_ts ({test.mean:,} tok/s) is not the mean of samples_ts ({significant(mean)} tok/s); "
            text += "the samples are used"
            yield because("import_mean_differs", text, row=row, mean=test.mean, samples_mean=mean)
        if (by_time := test.time_differs()) is not None:
            text = f"{row}: samples_ns ({significant(by_time[1])} tok/s) contradict samples_ts "
            text += f"({significant(by_time[0])} tok/s); samples_ts are used"
            yield because("import_time_differs", text, row=row, samples_ts=by_time[0], by_samples_ns=by_time[1])
        if not speeds and test.mean is not None and test.stddev_ts is not None and isfinite(test.stddev_ts):
            text = f"{row}: {test.mean:,} ± {test.stddev_ts:,} tok/s (standard deviation); the single repetitions are "
            text += "not in the file"
            yield because("import_deviation", text, row=row, mean=test.mean, deviation=test.stddev_ts)


def _unread_notes(rows: list[str]) -> Iterator[Any]:
    """A note that names the rows of a table without a test; of many, the first."""
    shown = [" ".join(printable(row).split())[:_MAX_ROW] for row in rows[:_MAX_ROWS]]
    if shown:
        text = f"{len(rows)} of the table's rows cannot be read: {'; '.join(shown)}"
        yield because("import_rows_unread", text, unread=len(rows), rows=shown)


def _column_notes(results: list[Any]) -> Iterator[Any]:
    """A note on fields that are not known as settings."""
    unknown = dict.fromkeys(key for value in results for key in value if key not in _SETTINGS | _NO_SETTINGS)
    if unknown:
        names = [" ".join(printable(key).split())[:_MAX_ROW] for key in unknown][:_MAX_ROWS]
        text = f"not known as settings of llama-bench, so left out: {', '.join(names)}. Rows that differ in nothing "
        text += "else count as repeats"
        yield because("import_columns_unknown", text, columns=names)


def _settings(value: dict[str, Any]) -> list[str]:
    return [f"{key}={value[key]}" for key in value if key in _SETTINGS and isinstance(value[key], str | int | float)]


def _name_servers(results: list[Any], tests: list[LlamaBenchTest]) -> list[str]:
    """The name of each result's server: its backend, and the settings that differ between the results."""
    settings = [dict(setting.split("=", 1) for setting in _settings(value)) for value in results]
    keys = dict.fromkeys(key for setting in settings for key in setting if key not in ("backends", "backend"))
    differing = [key for key in keys if len({setting[key] for setting in settings if key in setting}) > 1]
    backends = [test.backends or test.backend for test in tests]
    default = next((backend for backend in backends if backend), "llama-bench")
    names = []
    for backend, setting in zip(backends, settings, strict=True):
        words = [backend or default]
        words += [_short(key, setting[key]) for key in differing if key in setting]
        names.append("-".join(words))
    return names


def _short(key: str, value: str) -> str:
    """A setting in a server's name, such as "fa-1" of flash_attn; of a model the file's name."""
    if key in _MODEL:
        return value.rpartition("/")[2].removesuffix(".gguf")[-2 * _SHORT :]
    return f"{key.removeprefix('n_')[:_SHORT]}-{value[:_SHORT]}"


def _make_parts(
    source: Source, place: str, test: LlamaBenchTest, server: str, before: list[ImportedPart]
) -> list[ImportedPart]:
    """A part for each repetition, or one with the mean where the file has no samples."""
    if test.samples_ns and len(test.samples_ns) != len(test.samples_ts):
        lengths = f"samples_ns {len(test.samples_ns)}, samples_ts {len(test.samples_ts)}"
        raise source.error_at(place, f"the lists are not equally long: {lengths}")
    time_s = unix_time(test.test_time, _TIME)
    wall_s = source.written_s() if time_s is None else time_s
    first = 1 + sum(part.server == server and part.load == test.name for part in before)
    missing = {"e2e": "only a test of prompt and generation has both"}
    if not test.n_gen:
        missing |= {"output_tok_s": _NO_TOKENS, "tpot": _NO_TOKENS}
    elif test.n_prompt:
        missing = dict.fromkeys(("ttft", "tpot"), "prompt and generation are timed together")
    else:
        missing |= dict.fromkeys(("input_tok_s", "ttft"), "the test processes no prompt")
    if not test.speeds and test.mean is None:
        name, given = ("avg_ts", test.avg_ts) if test.table_speed is None else ("t/s", test.table_speed)
        shown = "missing" if given is None else printable(str(given))[:_MAX_ROW]
        reason = None if test.avg_ts is None or test.avg_ts <= 0 else test.why_not(test.avg_ts)
        why = f"{name} is {shown}, which is no speed" if reason is None else f"{name}: {reason}"
        missing = {field: missing.get(field, why) for field in _SPEED_FIELDS}
    speeds: list[float | None] = [*test.speeds] or [test.mean]
    return [
        ImportedPart(
            server=server,
            load=test.name,
            repeat=repeat,
            endpoint="chat" if test.n_gen else "embeddings",
            at_once=1,
            planned=1,
            numbers=_numbers(test, speed),
            started_wall_s=wall_s,
            ended_wall_s=wall_s,
            missing=missing,
        )
        for repeat, speed in zip(count(first), speeds)
    ]


def _numbers(test: LlamaBenchTest, speed: float | None) -> Numbers:
    """The numbers of a repetition from its speed in tokens a second."""
    tokens = test.n_prompt + test.n_gen
    took_s = None if speed is None else tokens / speed

    def sample(value: float | None) -> Distribution:
        return Distribution(n=0) if value is None else Distribution(n=1, mean=value, min=value, max=value)

    is_combined = test.n_prompt > 0 and test.n_gen > 0
    return Numbers(
        sent=1,
        succeeded=1,
        failed=0,
        unfinished=0,
        prompt_tokens=test.n_prompt or None,
        output_tokens=test.n_gen or None,
        window="timed",
        window_s=took_s,
        input_tok_s=None if speed is None else speed * test.n_prompt / tokens or None,
        output_tok_s=None if speed is None else speed * test.n_gen / tokens or None,
        ttft=sample(took_s if not test.n_gen else None),
        tpot=sample(took_s / test.n_gen if took_s and not is_combined and test.n_gen else None),
        e2e=sample(took_s if is_combined else None),
    )


FORMAT = Format("llama-bench -o json, jsonl or md", ("n_prompt", "n_gen"), read)
