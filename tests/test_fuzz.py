"""Every reader of files gives a value or a declared error for any bytes, and in bounded time."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.analysis.summarize import read_summary, summarize
from harness.errors import HarnessError
from harness.failures.explain import MAX_FINDINGS, scan
from harness.files import ROOT, SCENARIOS
from harness.imports.write import read_file
from harness.rundir.manifest import read_run
from harness.rundir.records import read_marks, read_requests
from harness.rundir.samples import read_metrics, read_telemetry
from harness.scenario import Trace
from harness.scenario.file import load_scenario
from harness.serve.compose_file import parse_compose, read_compose
from harness.workload.prompt_file import read_rows
from harness.workload.traces import Replay
from tests.made_runs import scenario, write_made_run
from tests.nightly import draws

# The same examples each time; a deadline in ms for one of them, generous for a busy machine.
FUZZ = settings(
    derandomize=True, max_examples=draws(100), deadline=10_000, suppress_health_check=list(HealthCheck), database=None
)
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
    """Call it; only a declared error may come out."""
    try:
        read()
    except HarnessError as error:
        assert error.what and "\n" not in error.what


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "made"
    write_made_run(folder, made_of=scenario(repeats=1))
    return folder


@given(seed=SEEDS)
@FUZZ
def test_run_directories(made: Path, seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(("run.json", "requests.jsonl", "processes.jsonl", "metrics.jsonl"))
    path, good = made / name, (made / name).read_bytes()
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_run(made),
        lambda: list(read_requests(made / "requests.jsonl")),
        lambda: read_marks(made / "processes.jsonl"),
        lambda: read_metrics(made / "metrics.jsonl"),
        lambda: summarize(made),
    )
    try:
        if rng.random() < 0.3:
            path.write_bytes(bytes_changed(good, rng))
        elif name == "run.json":
            path.write_text(json.dumps(changed(json.loads(good), rng)))
        else:
            path.write_text("".join(f"{json.dumps(one)}\n" for one in changed(lines(path), rng)))
        for read in readers:
            survives(read)
    finally:
        path.write_bytes(good)


@given(seed=SEEDS)
@FUZZ
def test_summaries_and_telemetry(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    golden = ROOT / "tests" / "golden" / "versions" / "0.2.0"
    folder = tmp_path_factory.mktemp("summary")
    (folder / "summary.json").write_text(json.dumps(changed(json.loads((golden / "summary.json").read_bytes()), rng)))
    (folder / "telemetry.jsonl").write_bytes(bytes_changed((golden / "telemetry.jsonl").read_bytes(), rng))
    survives(lambda: read_summary(folder))
    survives(lambda: read_telemetry(folder / "telemetry.jsonl"))


@given(seed=SEEDS)
@FUZZ
def test_scenarios(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("scenario") / "a.yaml"
    data = rng.choice(sorted(SCENARIOS.glob("*.yaml"))).read_bytes()
    if rng.random() < 0.5:
        path.write_bytes(bytes_changed(data, rng))
    else:
        path.write_text(yaml.safe_dump(changed(yaml.safe_load(data), rng)))
    survives(lambda: load_scenario(path))


COMPOSE = {
    "services": {
        "server": {
            "image": "a:1", "command": ["--port", "8000"], "environment": {"A": "b"}, "devices": ["/dev/kfd:/dev/kfd"],
            "shm_size": "8g", "group_add": ["44"], "ports": ["127.0.0.1:8000:8000"], "volumes": ["cache:/root/.cache"],
            "healthcheck": {"test": ["CMD", "true"], "interval": "5s"}, "ipc": "host",
        }
    },
    "volumes": {"cache": {}},
}  # fmt: skip


@given(seed=SEEDS)
@FUZZ
def test_compose_files(seed: int) -> None:
    rng = random.Random(seed)
    text = yaml.safe_dump(changed(COMPOSE, rng))
    if rng.random() < 0.3:
        text = bytes_changed(text.encode(), rng).decode("utf-8", "replace")
    survives(lambda: parse_compose(text))
    survives(lambda: read_compose(text))


IMPORTS = sorted(path for path in (ROOT / "tests" / "data" / "imports").rglob("*.json*") if path.is_file())


@given(seed=SEEDS)
@FUZZ
def test_files_of_other_tools(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    source = rng.choice(IMPORTS)
    path = tmp_path_factory.mktemp("import") / source.name
    data = source.read_bytes()
    if rng.random() < 0.3:
        path.write_bytes(bytes_changed(data, rng))
    elif source.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(one)}\n" for one in changed(lines(source), rng)))
    else:
        path.write_text(json.dumps(changed(json.loads(data), rng)))
    survives(lambda: read_file(path))


TRACES = {
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,396,9\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,a\n",
    "mooncake": b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n',
    "requests": b'{"cell":"c","phase":"measured","process":1,"sent_s":1.5,"prompt_tokens":3,"output_tokens":4}\n',
}


@given(seed=SEEDS)
@FUZZ
def test_traces_and_prompts(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("trace") / "trace"
    name = rng.choice(sorted(TRACES))
    path.write_bytes(bytes_changed(TRACES[name] * 3, rng))
    survives(lambda: Replay(path, msgspec.convert({"file": "trace"}, Trace)))
    path.write_bytes(bytes_changed(b'{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n', rng))
    survives(lambda: read_rows(path))


LOGS = sorted((ROOT / "tests" / "data").glob("st*/*.txt"))


@given(seed=SEEDS)
@FUZZ
def test_logs(seed: int) -> None:
    rng = random.Random(seed)
    data = bytes_changed(rng.choice(LOGS).read_bytes(), rng)
    scanned = scan(io.BytesIO(data))
    assert len(scanned.findings) <= MAX_FINDINGS and "\x1b" not in scanned.last
