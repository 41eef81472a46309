"""Fuzz every parser of untrusted bytes with a coverage-guided fuzzer: atheris, which only this script needs.

    pip install atheris && python -m benchmarks.fuzz   # a million inputs for each parser, one parser after the other
    python -m benchmarks.fuzz sse http --runs 50000    # some parsers, fewer inputs

A parser may raise HarnessError. Any other exception is a finding: its input is kept in the output folder and the run
continues. An input that takes more than 20 s or 2 GB is kept, too, and ends the run of its parser.
"""

import argparse
import contextlib
import io
import json
import random
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["harness", "yaml"]):
    import httptools
    import yaml

    from harness.base.errors import HarnessError
    from harness.base.files import ROOT, SCENARIOS
    from harness.failures.diagnosis import explain_message, scan
    from harness.failures.table import patterns
    from harness.imports.write import FORMATS, read_file
    from harness.load.exchange import Collector, Exchange, Failure
    from harness.load.sse import EventTooLong, Parser
    from harness.records.manifest import read_run
    from harness.records.records import read_marks, read_requests
    from harness.scenario import Trace
    from harness.scenario import file as scenario_file
    from harness.scenario.shape import load_yaml
    from harness.serve import compose_file
    from harness.workload.prompt_file import read_rows
    from harness.workload.traces import Replay
    from tests.unit.test_fuzz import COMPOSE, IMPORTS, LOGS, TRACES, changed

EXAMPLES, RUNS = ROOT / "examples", ROOT / "tests" / "runs"
WORK = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a","tool_calls":[{"function":{"arguments":"{"}}]}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n%s\r\n"
HTTP = [
    HEAD % b"" + EVENT + USAGE,
    HEAD % b"Transfer-Encoding: chunked\r\n" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(EVENT + USAGE), EVENT + USAGE),
    b'HTTP/1.1 200 OK\r\n\r\n{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"usage":{}}',
    b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 No\r\nRetry-After: 3\r\n\r\n{"error":{"message":"busy"}}',
    HEAD % b"" + b'event: error\ndata: {"error":{"code":500,"message":"x"}}\n\n',
]


def at(name: str, data: bytes) -> Path:
    (WORK / name).write_bytes(data)
    return WORK / name


def sse(data: bytes) -> None:
    whole, parts, step = Parser(), Parser(), 1 + len(data) // 16
    with contextlib.suppress(EventTooLong):
        assert whole.feed(data) == [one for n in range(0, len(data), step) for one in parts.feed(data[n : n + step])]
        assert whole.stray_text() == parts.stray_text()


def http(data: bytes) -> None:
    """The first byte says how the others are cut into reads, the last of which ends the connection."""
    size = max(data[0] + 1 if data else 1, len(data) // 16)
    exchange = Exchange("x", sent_ns=0, request_bytes=100)
    collector = Collector(exchange)
    try:
        for number, read in enumerate([*(data[n : n + size] for n in range(1, len(data), size)), b""]):
            exchange.arrivals.append(number, None)
            collector.parse(read)
            exchange.process()
    except (EOFError, httptools.HttpParserError) as error:
        exchange.failure = Failure("not_api", str(error))
    except Failure as failure:
        exchange.failure = failure
    answer = exchange.finish_answer()
    answer.drop_impossible_counts(4, exchange.request_bytes)
    exchange.add_times()
    assert answer.output_tokens is None or 0 <= answer.output_tokens <= 4


def below_yaml(module: Any, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """A reader of YAML with JSON in its place: YAML is slow, and fuzzed by itself."""

    def one(data: bytes) -> None:
        stand_in: Any = mock.patch.object(module, "load_yaml", lambda text, _: (json.loads(text), {}))
        with stand_in, contextlib.suppress(json.JSONDecodeError, RecursionError, UnicodeDecodeError):
            read(at("file", data))

    return one


def trace(data: bytes) -> None:
    found = Replay(at("trace", data), Trace(file="trace"))
    for number in range(min(len(found), 3)):
        found.hash_ids(number), found.conversation(number)


def short(path: Path) -> bytes:
    """A file as a seed, its long lists and its lines cut: most of them is the same again."""
    raw = path.read_bytes()
    with contextlib.suppress(ValueError):
        return json.dumps(json.loads(raw, object_hook=cut)).encode()
    return b"".join(raw.splitlines(True)[:3])


def cut(one: dict[str, Any]) -> dict[str, Any]:
    return {key: value[:2] if isinstance(value, list) else value for key, value in one.items()}


def records(data: bytes) -> None:
    list(read_requests(at("records", data), []))
    read_marks(at("records", data), [])


def log(data: bytes) -> None:
    scan(io.BytesIO(data))
    explain_message(data.decode("utf-8", "replace"))


Parse = Callable[[bytes], object]
YAML = b"a: [1, &x {b: 010}, *x]\n'c': 1e3\n? [d]\n: |\n  e\n<<: *x\n"
ROWS = [
    b'{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n',
    b'[{"conversations": [{"from": "human"}]}]',
]
SAMPLES = [sample.encode() for pattern in patterns() for sample in pattern.rule.samples]
PARSERS: dict[str, tuple[Parse, list[bytes]]] = {
    "sse": (sse, [EVENT, USAGE, b"event: error\r\ndata: a\rdata\n\n", b"\xef\xbb\xbfdata: a\n\n: ping\n"]),
    "http": (http, [bytes([size]) + one for one in HTTP for size in (3, 40, 255)]),
    "records": (records, [short(path) for name in ("req", "proc") for path in EXAMPLES.glob(f"*/{name}*.jsonl")]),
    "manifest": (lambda data: read_run(at("run.json", data).parent), [*map(short, RUNS.glob("*/run.json"))]),
    "log": (log, [*map(short, LOGS), *SAMPLES]),
    "prompts": (lambda data: read_rows(at("prompts", data)), ROWS),
    "scenario": (
        below_yaml(scenario_file, scenario_file.read_scenario),
        [json.dumps(yaml.safe_load(path.read_text())).encode() for path in SCENARIOS.glob("*.yaml")],
    ),
    "compose": (
        below_yaml(
            compose_file,
            lambda path: compose_file.fill_variables(compose_file.parse_compose(path.read_text()), {"A": "b"}),
        ),
        [json.dumps(COMPOSE).encode()],
    ),
    "yaml": (lambda data: load_yaml(data.decode("utf-8", "replace"), []), [YAML]),
}
for number, seed in enumerate(TRACES):
    PARSERS[f"trace-{number}"] = (trace, [seed * 2, seed])
for name in FORMATS:
    seeds = [short(path) for path in IMPORTS if name.partition("-")[0] in str(path.relative_to(ROOT))]
    PARSERS[f"import-{name}"] = (lambda data: read_file(at("results.json", data)), seeds)


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Other values in a JSON document or in a line of such; other bytes in half of the cases, and of anything else."""
    rng = random.Random(seed)
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    with contextlib.suppress(ValueError, RecursionError):
        if rng.random() < 0.5 and lines[place][:1] in b"{[":
            lines[place] = json.dumps(changed(json.loads(lines[place]), rng)).encode()
            return b"\n".join(lines)[:most]
    return bytes(atheris.Mutate(data, most))


def fuzz(name: str, folder: Path, runs: int, seconds: int) -> None:
    """Fuzz one parser in this process, which ends with it. Each finding is printed once, with its place."""
    parse, seeds = PARSERS[name]
    (folder / "corpus").mkdir()
    for number, seed in enumerate(seeds):
        (folder / "corpus" / f"seed-{number}").write_bytes(seed)
    found: set[str] = set()

    def one(data: bytes) -> None:
        try:
            parse(data)
        except HarnessError:
            return
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            if place not in found:
                found.add(place)
                (folder / f"finding-{len(found)}").write_bytes(data)
                print(f"FINDING {place}: {str(error)[:200]}", file=sys.stderr, flush=True)

    longest = max(1024, min(2 * max(map(len, seeds)), 16384))
    options = [f"-max_len={longest}", "-timeout=20", "-rss_limit_mb=2048", "-seed=1", f"-artifact_prefix={folder}/"]
    options += [f"-runs={runs}", f"-max_total_time={seconds}", str(folder / "corpus")]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parsers", nargs="*", default=list(PARSERS), metavar="PARSER", help=", ".join(PARSERS))
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each parser (1,000,000)")
    parser.add_argument("--seconds", type=int, default=0, help="at most so long for each parser (no limit)")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # one parser, in this process
    given = parser.parse_args()
    if given.here:
        fuzz(given.parsers[0], given.here, given.runs, given.seconds)
    failed = False
    print("| parser | inputs | edges | features | corpus | s | findings |\n|---|---:|---:|---:|---:|---:|---:|")
    for name in given.parsers:
        folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
        again = [sys.executable, "-m", "benchmarks.fuzz", name, "--here", folder, "--runs", given.runs]
        with (folder / "output.txt").open("w") as written:
            command = [str(word) for word in (*again, "--seconds", given.seconds)]
            failed |= subprocess.run(command, stdout=written, stderr=subprocess.STDOUT).returncode != 0
        said = (folder / "output.txt").read_text(errors="replace")
        counts = re.findall(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)", said, re.M) or [("0", "", "", "")]
        seconds = re.findall(r"^Done \d+ runs in (\d+) second", said, re.M) or ["did not end"]
        findings = re.findall(r"^FINDING .*|^==\d+== ?ERROR: .*", said, re.M)
        numbers = [f"{int(counts[-1][0]):,}", *counts[-1][1:], *seconds, str(len(findings))]
        print("|", name, "|", " | ".join(numbers), "|", flush=True)
        print("".join(f"    {folder}: {finding}\n" for finding in findings), end="", file=sys.stderr, flush=True)
        failed |= bool(findings)
    sys.exit(failed)


if __name__ == "__main__":
    main()
