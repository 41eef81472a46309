"""The JSON of other tools: our importer reads back what was written, and nothing that is not known is a number."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness import __version__
from harness.base.errors import HarnessError
from harness.base.metrics import METRICS
from harness.imports.write import import_file
from harness.numbers.summarize import summarize
from harness.records.manifest import read_run, write_run
from harness.records.records import Request, read_requests
from harness.records.run_data import load as load_run
from harness.report.export import choose_format, export_as
from harness.report.sentences import design_sentence
from harness.report.vllm_bench import bench_results
from harness.scenario import Arrivals, Load, Server
from harness.scenario.plan import Cell
from tests.support.command import called
from tests.support.made_runs import request, scenario, write_made_run
from tests.support.stored_runs import SOURCES, run_directory
from tests.support.wording import Wording


def with_failures(cell: Cell, process: int, start_s: float) -> list[Request]:
    """A warm-up request, fourteen answers, a failure before the first token, one after it, and a request cut at the
    end.
    """
    common = {"cell": cell.id, "load": cell.load, "process": process}
    records = [request(id=f"{cell.id}-w", phase="warmup", sent_s=start_s, **common)]
    records += [
        request(id=f"{cell.id}-{index}", index=index, sent_s=start_s + 2.0 + 0.37 * index, prompt_tokens=20 + index,
                **common)
        for index in range(14)
    ]  # fmt: skip
    lost: dict[str, Any] = {"output_tokens": None, "prompt_tokens": None, **common}
    early: dict[str, Any] = {"chunks_s": [], "first_visible_s": None, "error": "rejected", "message": "busy"}
    late: dict[str, Any] = {"chunks_s": [0.5, 0.6], "error": "disconnect"}
    cut: dict[str, Any] = {"chunks_s": [0.5], "error": "unfinished"}
    ends = (early, late, cut)
    return records + [
        request(id=f"{cell.id}-e{n}", index=14 + n, sent_s=start_s + 3.0 + n, **lost, **end)
        for n, end in enumerate(ends)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "made"
    loads = {"x": Load(user="batch", batch_size=2, requests=17, output_tokens=11)}
    write_made_run(folder, made_of=scenario(loads=loads, repeats=2), requests=with_failures)
    return folder


def test_a_result_with_its_lists_comes_back_as_the_same_records(run: Path, tmp_path: Path) -> None:
    files = export_as(run, tmp_path / "vllm-bench.json", "vllm-bench", detailed=True)
    names = [f"vllm-bench.r{n}-{server}-x.json" for n in (1, 2) for server in "ab"]
    assert sorted(file.name for file in files) == names and files[0].name == names[0], "in the order of the run"
    value = json.loads(files[0].read_text())
    assert (value["num_prompts"], value["completed"], value["failed"]) == (16, 14, 2), "a cut request is in no count"
    early = value["errors"].index("rejected: busy")
    lists = ("input_lens", "output_lens", "ttfts", "latencies")
    assert [value[name][early] for name in lists] == [None] * 4 and value["itls"][early] == []
    assert not {"generated_texts", "queue_times", "rtfx"} & set(value), "not recorded"
    assert (value["max_concurrency"], value["request_rate"], value["p99_ttft_ms"]) == (2, "inf", None)
    ours = sorted(
        (one for one in read_requests(run / "requests.jsonl") if one.cell == "r1-a-x" and one.phase == "measured"),
        key=lambda one: one.sent_s,
    )
    ours = [one for one in ours if one.error != "unfinished"]
    back = list(read_requests(import_file(files[0], tmp_path / "back") / "requests.jsonl"))
    assert [one.sent_s for one in back] == pytest.approx([one.sent_s - ours[0].sent_s for one in ours])
    assert [one.chunks_s for one in back] == [pytest.approx(one.chunks_s, abs=1e-12) for one in ours]
    assert [one.output_tokens for one in back] == [one.output_tokens for one in ours]
    assert [one.prompt_tokens for one in back] == [one.prompt_tokens for one in ours]
    assert [bool(one.error) for one in back] == [bool(one.error) for one in ours]


def test_results_without_lists_come_back_with_the_same_numbers(run: Path, tmp_path: Path) -> None:
    (file,) = export_as(run, tmp_path / "summary.json", "vllm-bench-sweep")
    values = json.loads(file.read_text())
    assert sorted(
        ((value["server"], value["load"], value["run_number"]) for value in values), key=lambda place: place[::-1]
    ) == [
        ("a", "x", 0), ("b", "x", 0), ("a", "x", 1), ("b", "x", 1),
    ]  # fmt: skip
    assert "ttfts" not in values[0]
    back = summarize(import_file(file, tmp_path / "back"))
    assert sorted((row.server, row.load) for row in back.rows) == [("a", "x"), ("b", "x")]
    assert [len(row.cells) for row in back.rows] == [2, 2]
    numbers = back.cells[0].numbers
    assert (numbers.sent, numbers.succeeded, numbers.failed) == (16, 14, 2)
    assert numbers.ttft.p50 == pytest.approx(values[0]["median_ttft_ms"] / 1000)
    assert numbers.output_tok_s == values[0]["output_throughput"]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_result_has_the_numbers_of_the_report_or_a_note(name: str, tmp_path: Path) -> None:
    """A stage and a load of a mix have no result: answers of other loads are in their time."""
    folder = run_directory(SOURCES[name], tmp_path / "runs")
    cells, run = {cell.id: cell for cell in summarize(folder).cells}, read_run(folder)
    exported = bench_results(load_run(folder))
    assert set(exported.left_out) == {f"{cell.server}/{cell.load}" for cell in run.cells if set(cell.load) & set("@.")}
    assert set(exported.notes) == NOTED.get(name, set())
    for cell, content in exported.results:
        numbers = cells[cell].numbers
        if f"{content['server']}/{content['load']}" in exported.notes:
            continue
        if numbers.output_tok_s is not None:
            assert content["output_throughput"] == pytest.approx(numbers.output_tok_s, rel=0.02)
        for key, latency in (("mean_ttft_ms", numbers.ttft), ("mean_tpot_ms", numbers.tpot)):
            if content[key] is not None:
                assert latency.mean is not None and content[key] / 1000 == pytest.approx(latency.mean, rel=0.02)


# Users that leave before the end of an answer, timed loads of a few answers, and an open loop of three seconds.
NOTED = {
    "chat": {"one/people"},
    "capacity": {"one/users-2", "one/users-4", "one/users-8"},
    "open-loop": {"one/wave"},
}


def test_rows_without_a_result_are_named(tmp_path: Path, wording: Wording) -> None:
    """The others are written; without others it is an error that says what to export in their place."""
    names = ("mix", "stages", "chat")
    for name in names:
        run_directory(SOURCES[name], tmp_path / "runs")
    mix, stages, chat = (called("export", name, "--to", "vllm-bench.json", cwd=tmp_path) for name in names)
    assert (mix.code, mix.out.split()) == (0, ["vllm-bench.r1-one-chat.json", "vllm-bench.r1-one-job.json"])
    assert (stages.code, chat.code) == (1, 0) and not list(tmp_path.glob("*people@*"))
    sweep = called("export", "stages", "--to", "vllm-bench-sweep.json", cwd=tmp_path)
    one_row = called("export", "stages", "--to", "vllm-bench.json", "--row", "one/people@6", cwd=tmp_path)
    assert [done.code for done in (sweep, one_row)] == [1, 1]
    assert called("export", "stages", "--to", "github-action-benchmark.json", cwd=tmp_path).code == 0
    wording([done.err for done in (mix, stages, chat, one_row)])


def test_a_tpot_of_bundled_tokens_is_null(tmp_path: Path) -> None:
    """vLLM's formula takes the first chunk for one token: of five tokens in each chunk it gives a shorter TPOT."""

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        common = {"cell": cell.id, "load": cell.load, "process": process, "output_tokens": 25}
        bundles: dict[str, Any] = {"chunks_s": [0.5, 1.0, 1.5, 2.0, 2.5], "ended_s": 2.5, "asked_tokens": 25}
        return [request(id=f"{cell.id}-{n}", index=n, sent_s=start_s + 3 * n, **common, **bundles) for n in range(9)]

    load = Load(user="batch", requests=9, output_tokens=25)
    write_made_run(tmp_path / "made", made_of=scenario(loads={"x": load}, repeats=1), requests=requests)
    (first, _) = bench_results(load_run(tmp_path / "made")).results
    assert [first.content[f"{name}_tpot_ms"] for name in ("mean", "median", "std", "p90")] == [None] * 4
    assert first.content["mean_ttft_ms"] == pytest.approx(500) and first.content["mean_itl_ms"] == pytest.approx(500)


def test_what_no_request_shows_is_null(tmp_path: Path) -> None:
    """Answers in one piece have no TTFT, a server without counts has no tokens; neither is 0."""

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        whole: dict[str, Any] = {"chunks_s": [], "first_visible_s": None, "output_tokens": None, "prompt_tokens": None}
        common = {"cell": cell.id, "load": cell.load, "process": process, **whole}
        return [request(id=f"{cell.id}-{n}", index=n, sent_s=start_s + n, **common) for n in range(4)]

    load = Load(user="chat", arrivals=Arrivals(rate=2.0, spacing="even"), requests=4, stream=False)
    made = scenario(loads={"x": load}, repeats=1, servers={"a": scenario().servers["a"]})
    write_made_run(tmp_path / "made", made_of=made, requests=requests)
    (file,) = export_as(tmp_path / "made", tmp_path / "vllm-bench.json", "vllm-bench", detailed=True)
    value = json.loads(file.read_text())
    assert file.name == "vllm-bench.json", "a run of one cell is the file itself"
    assert (value["request_rate"], value["burstiness"]) == (2.0, None)
    unknown = (
        "total_input_tokens", "total_output_tokens", "output_throughput", "total_token_throughput", "mean_ttft_ms",
        "mean_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_ttft_ms", "max_output_tokens_per_s", "tokenizer_id",
    )  # fmt: skip
    assert [value[name] for name in unknown] == [None] * len(unknown)
    assert value["ttfts"] == value["output_lens"] == [None] * 4
    assert value["mean_e2el_ms"] == pytest.approx(1500)


def test_the_files_of_the_action_have_one_direction_each(tmp_path: Path) -> None:
    run = tmp_path / "made"
    write_made_run(run, lambda cell: 10.0 + 0.01 * cell.repeat, made_of=scenario(repeats=3))
    files = export_as(run, tmp_path / "github-action-benchmark.json", "github-action-benchmark")
    assert [file.name for file in files] == [f"github-action-benchmark.{way}.json" for way in ("bigger", "smaller")]
    summary = summarize(run)
    for file, more_is_better in zip(files, (True, False), strict=True):
        entries = json.loads(file.read_text())
        names = [entry["name"] for entry in entries]
        assert entries and len(set(names)) == len(names)
        titles = {metric.title: metric for metric in METRICS.values()}
        for entry in entries:
            assert set(entry) <= {"name", "unit", "value", "range", "extra"}, "the action's keys"
            assert isinstance(entry["value"], float) and entry["value"] > 0
            assert all(isinstance(entry[key], str) for key in entry if key != "value")
            assert titles[entry["name"].rpartition(": ")[2]].more_is_better == more_is_better
    entries = {entry["name"]: entry for entry in json.loads(files[0].read_text())}
    entry = entries["a / x: output tok/s"]
    row = summary.rows[0]
    low, _, high = entry["range"].partition(" to ")
    assert float(low) <= min(row.output_tok_s) <= entry["value"] <= max(row.output_tok_s) <= float(high) * 1.001
    assert "made" in entry["extra"]
    (only, _) = export_as(run, tmp_path / "b.json", "github-action-benchmark", row="b/x")
    assert {entry["name"].partition(":")[0] for entry in json.loads(only.read_text())} == {"b / x"}


def test_failed_requests_are_in_the_history(tmp_path: Path) -> None:
    """Of a load that allows some; an entry of a load without any has no such line."""

    def requests(cell: Cell, process: int, start_s: float) -> list[Request]:
        common = {"cell": cell.id, "load": cell.load, "process": process}
        lost: dict[str, Any] = {"error": "rejected", "chunks_s": [], "output_tokens": None, "first_visible_s": None}
        failed = [lost if n % 3 == 2 and cell.server == "a" else {} for n in range(24)]
        return [
            request(id=f"{cell.id}-{n}", index=n, sent_s=start_s + n, **common, **fields)
            for n, fields in enumerate(failed)
        ]

    made = scenario(loads={"x": Load(user="batch", requests=24)}, repeats=1, max_error_rate=1.0)
    write_made_run(tmp_path / "made", made_of=made, requests=requests)
    files = export_as(tmp_path / "made", tmp_path / "g.json", "github-action-benchmark")
    entries = [entry for file in files for entry in json.loads(file.read_text())]
    assert entries
    for entry in entries:
        assert ("8 of 24 requests failed" in entry["extra"].splitlines()) == entry["name"].startswith("a / x"), entry


@pytest.mark.parametrize(
    ("name", "given", "chosen"),
    [
        ("records.csv", None, ".csv"),
        ("vllm-bench.json", None, "vllm-bench"),
        ("vllm-bench-sweep-1.json", None, "vllm-bench-sweep"),
        ("github-action-benchmark.json", None, "github-action-benchmark"),
        ("summary.json", "vllm-bench-sweep", "vllm-bench-sweep"),
        ("results.json", None, None),
        ("vllm-bench.csv", "vllm-bench", None),
        ("vllm-bench.txt", None, None),
    ],
)
def test_the_name_tells_the_format(name: str, given: str | None, chosen: str | None, wording: Wording) -> None:
    if chosen is not None:
        assert choose_format(Path(name), given) == chosen
        return
    with pytest.raises(HarnessError) as raised:
        choose_format(Path(name), given)
    wording(raised.value)


def test_the_command_refuses_what_has_no_such_numbers(run: Path, tmp_path: Path, wording: Wording) -> None:
    to = ("--to", "vllm-bench.json")
    done = called("export", "made", *to, "--row", "b/x", cwd=tmp_path)
    assert (done.code, done.out.split()) == (0, ["vllm-bench.r1-b-x.json", "vllm-bench.r2-b-x.json"])
    refused = [
        called("export", "made", *to, "--row", "c/x", cwd=tmp_path),
        called("export", "made", "--to", "r.csv", "--row", "b/x", cwd=tmp_path),
        called("export", "made", "--to", "github-action-benchmark.json", "--detailed", cwd=tmp_path),
    ]
    assert [done.code for done in refused] == [1, 1, 1]
    assert "c/x" in refused[0].err and "embeddings" not in refused[0].err
    manifest = read_run(run)
    write_run(run, replace(manifest, status="invalid"))
    invalid = called("export", "made", *to, cwd=tmp_path)
    assert invalid.code == 3
    wording([done.err for done in (*refused, invalid)])


def test_what_a_result_says_of_itself_survives_a_round_trip(tmp_path: Path) -> None:
    run = tmp_path / "made"
    write_made_run(run, made_of=scenario(servers={"engine": Server(template="simulated")}, repeats=1))
    (file,) = export_as(run, tmp_path / "vllm-bench.json", "vllm-bench", detailed=True)
    imported = import_file(file, tmp_path / "imported", None, None)
    manifest = read_run(imported)
    assert manifest.simulated and [(cell.server, cell.load) for cell in manifest.cells] == [("engine", "x")]
    origin = manifest.origin
    assert origin is not None and (origin.tool, origin.version) == ("amd-llm-load", __version__)
    assert design_sentence(manifest).count(f"amd-llm-load {__version__}") == 1
    assert set(origin.definitions) == {"output_tok_s", "requests_per_s", "wall"}, "its times are ours"
    again = export_as(imported, tmp_path / "vllm-bench-2.json", "vllm-bench")
    value = json.loads(again[0].read_text())
    assert value["simulated"] is value["imported"] is True
    entries = json.loads(export_as(imported, tmp_path / "g.json", "github-action-benchmark")[0].read_text())
    assert all("SIMULATED" in entry["extra"] and "UNCHECKED" in entry["extra"] for entry in entries)


@pytest.mark.parametrize(
    "change",
    [
        {"tool": "amd-llm-load 0.1.0 (really)"}, {"tool": "amd-llm-load <b>1</b>"}, {"tool": "amd-llm-load 1"},
        {"tool": "amd-llm-load 0.1.0\n"}, {"tool": "amd-llm-load ٠.١.٠"}, {"tool": ["amd-llm-load 0.1.0"]},
        {"repeat": ...},
    ],
)  # fmt: skip
def test_a_file_that_only_resembles_ours_does_not_name_us(change: dict[str, Any], tmp_path: Path) -> None:
    write_made_run(tmp_path / "made", made_of=scenario(repeats=1))
    (file, *_) = export_as(tmp_path / "made", tmp_path / "vllm-bench.json", "vllm-bench", detailed=True)
    value = {key: field for key, field in (json.loads(file.read_text()) | change).items() if field is not ...}
    file.write_text(json.dumps(value))
    if not isinstance(value["tool"], str):
        with pytest.raises(HarnessError):
            import_file(file, tmp_path / "imported")
        return
    manifest = read_run(import_file(file, tmp_path / "imported"))
    assert manifest.origin is not None and manifest.origin.tool == "vllm bench serve"
    assert [cell.server for cell in manifest.cells] == ["running"]


def test_a_search_is_no_result(tmp_path: Path) -> None:
    write_made_run(tmp_path / "made", kind="search")
    for command in (["export", "made", "--to", "vllm-bench.json"], ["results", "card", "made"]):
        done = called(*command, "--runs", str(tmp_path), cwd=tmp_path)
        assert done.code == 1 and "probes of a search" in done.err
