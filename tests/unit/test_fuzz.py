"""Every reader of files gives a value or a declared error for any bytes, and in bounded time."""

import gzip
import io
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.base.errors import HarnessError
from harness.base.files import ROOT, SCENARIOS
from harness.failures.diagnosis import MAX_FINDINGS, scan
from harness.imports.write import read_file
from harness.numbers.summarize import read_summary, summarize
from harness.records.manifest import read_run
from harness.records.records import read_marks, read_requests
from harness.records.samples import read_metrics, read_telemetry
from harness.scenario import Trace
from harness.scenario.file import load_scenario
from harness.serve.compose_file import parse_compose, read_compose
from harness.workload.agent_traces.context_fit import fit_conversation
from harness.workload.agent_traces.prefix_reuse import prompt_reuse
from harness.workload.prompt_file import read_rows
from harness.workload.traces import Replay
from tests.support.agent_traces import made_files, read_all
from tests.support.made_runs import scenario, write_made_run
from tests.support.nightly import draws

# The same examples each time.
FUZZ = settings(
    derandomize=True, max_examples=draws(100), deadline=None, suppress_health_check=list(HealthCheck), database=None
)
MAX_CPU_S = 60  # PyYAML takes 2 s for a thousand nested brackets, as many as Python's recursion limit lets through
ODD: list[Any] = [
    None, True, -1, 0, 2**53 + 1, 2**64, -(2**70), 10**300, 1e308, -1e308, 5e-324, "", "\x00\x1b[31m", "=1", "9" * 50,
    [], {}, [None], {"a": 1}, [[[[]]]], "../../etc/passwd",
]  # fmt: skip
SEEDS = st.integers(0, 2**32)


def changed(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON document in which a few places have another value, are missing or are there twice."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 5))):
        place, steps = value, rng.randrange(1, 8)
        for _ in range(steps):
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if not isinstance(place[key], dict | list) or rng.random() < 0.2 or not place[key]:
                kind = rng.random()
                if kind < 0.7:
                    place[key] = rng.choice(ODD)
                elif kind < 0.85:
                    del place[key]
                elif isinstance(place, list):
                    place.append(place[key])
                break
            place = place[key]
    return value


def bytes_changed(data: bytes, rng: random.Random) -> bytes:
    """A copy of a file with a piece cut out, repeated, or replaced by junk."""
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    junk = rng.choice((b"", b"\x00", b"\xff\xfe", b"[" * 5000, b"{" * 5000, b'"', b"\n", b"9" * 5000, data[begin:end]))
    return data[:begin] + junk + data[min(end, begin + rng.choice((0, 1, 100, 10_000))) :]


def survives(read: Callable[[], object]) -> None:
    """Call it; only a declared error may come out, and the work is bounded."""
    before_s = time.process_time()
    try:
        read()
    except HarnessError as error:
        assert error.what and "\n" not in error.what
    assert time.process_time() - before_s < MAX_CPU_S


def write_changed(path: Path, data: bytes, rng: random.Random) -> None:
    """Write a changed copy of a file, which is JSON, JSON Lines or YAML by the name of `path`."""
    if rng.random() < 0.3:
        path.write_bytes(bytes_changed(data, rng))
    elif path.suffix == ".jsonl":
        values = changed([json.loads(line) for line in data.splitlines()], rng)
        path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(changed(yaml.safe_load(data), rng)))
    else:
        path.write_text(json.dumps(changed(json.loads(data), rng)))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "made"
    write_made_run(folder, made_of=scenario(repeats=1))
    return folder


@given(seed=SEEDS)
@FUZZ
def test_run_directories(run_folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = run_folder / rng.choice(("run.json", "requests.jsonl", "processes.jsonl", "metrics.jsonl"))
    good = path.read_bytes()
    try:
        write_changed(path, good, rng)
        survives(lambda: read_run(run_folder))
        survives(lambda: list(read_requests(run_folder / "requests.jsonl")))
        survives(lambda: read_marks(run_folder / "processes.jsonl"))
        survives(lambda: read_metrics(run_folder / "metrics.jsonl"))
        survives(lambda: summarize(run_folder))
    finally:
        path.write_bytes(good)


COMPOSE = b"""
services:
  server:
    image: a:1
    command: [--port, '8000']
    environment: {A: b}
    devices: ['/dev/kfd:/dev/kfd']
    shm_size: 8g
    ports: ['127.0.0.1:8000:8000']
    volumes: ['cache:/root/.cache']
    healthcheck: {test: [CMD, 'true'], interval: 5s}
volumes: {cache: {}}
"""
TRACES = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,396,9\n",
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,a\n",
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n',
    b'{"cell":"c","phase":"measured","process":1,"sent_s":1.5,"prompt_tokens":3,"output_tokens":4}\n',
)
PROMPTS = b'{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n'
SUMMARY = ROOT / "docs" / "example" / "summary.json"
TELEMETRY = ROOT / "tests" / "runs" / "steady" / "telemetry.jsonl.gz"
IMPORTS = sorted((ROOT / "tests" / "data" / "imports").glob("*.json"))
LOGS = sorted((ROOT / "tests" / "data").glob("st*/*.txt"))


def read_compose_text(path: Path) -> None:
    text = path.read_bytes().decode("utf-8", "replace")
    read_compose(text)
    parse_compose(text)


@given(seed=SEEDS)
@FUZZ
def test_files(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """One changed file of each kind, with its reader."""
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("files")
    scenario_file, imported = rng.choice(sorted(SCENARIOS.glob("*.yaml"))), rng.choice(IMPORTS)
    readers: dict[str, tuple[bytes, Callable[[Path], object]]] = {
        "summary.json": (SUMMARY.read_bytes(), lambda path: read_summary(path.parent)),
        "telemetry.jsonl": (gzip.decompress(TELEMETRY.read_bytes()), read_telemetry),
        "scenario.yaml": (scenario_file.read_bytes(), load_scenario),
        "compose.yaml": (COMPOSE, read_compose_text),
        imported.name: (imported.read_bytes(), read_file),
    }
    for name, (data, read) in readers.items():
        write_changed(folder / name, data, rng)
        survives(partial(read, folder / name))
    (folder / "trace").write_bytes(bytes_changed(rng.choice(TRACES) * 3, rng))
    survives(lambda: Replay(folder / "trace", msgspec.convert({"file": "trace"}, Trace)))
    (folder / "prompts").write_bytes(bytes_changed(PROMPTS, rng))
    survives(lambda: read_rows(folder / "prompts"))
    scanned = scan(io.BytesIO(bytes_changed(rng.choice(LOGS).read_bytes(), rng)))
    assert len(scanned.findings) <= MAX_FINDINGS and "\x1b" not in scanned.last


@given(seed=SEEDS)
@FUZZ
def test_agent_traces(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """A changed trace of each format; what can be read can also be counted."""
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("traces")

    def read(path: Path) -> None:
        for made in read_all(path):
            prompt_reuse(made)
            fit_conversation(made, 100)
            assert all(step.delay_s >= 0 for step in made.steps)

    for path in made_files(folder).values():
        write_changed(path, path.read_bytes(), rng)
        survives(partial(read, path))
