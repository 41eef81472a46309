"""Files that other tools really wrote become runs with the numbers that they hold, and with what is not known."""

import json
import shutil
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.base.errors import HarnessError
from harness.base.files import ROOT
from harness.base.measured import Numbers
from harness.base.reason import evidence
from harness.imports import Source, lemonade_bench, llama_bench, vllm
from harness.imports.write import FORMATS, import_file, read_file
from harness.numbers.summarize import summarize
from harness.numbers.summary import Summary
from harness.questions.compare.sides import compare_runs
from harness.questions.report import junit_cases
from harness.questions.report.headline import run_answer
from harness.questions.report.page import run_page
from harness.records.manifest import DEFINITIONS, Run, read_run
from harness.records.records import Request, read_requests
from harness.report import markdown
from harness.report import sentences as of_report
from harness.report.charts import figures
from harness.report.verdict_text import verdict_sentence
from tests.support.command import called
from tests.support.wording import Wording

DATA = ROOT / "tests" / "data" / "imports"
GOOD = {
    "vllm-chat.json": "vllm",
    "vllm-rate.json": "vllm",
    "vllm-plain.json": "vllm",
    "lemonade-from-source.json": "lemonade",
}
BAD = ("vllm-fail.json",)


def imported(name: str, runs: Path, **options: Any) -> tuple[Run, Summary, list[Request]]:
    folder = import_file(DATA / name, runs, **options)
    return read_run(folder), summarize(folder), list(read_requests(folder / "requests.jsonl"))


def changed(name: str, to: Path, change: Any) -> Path:
    """A copy of a sample with something changed in it."""
    value = json.loads((DATA / name).read_text())
    change(value)
    to.write_text(json.dumps(value))
    return to


def pooled(summary: Summary, load: str) -> Numbers:
    (row,) = [row for row in summary.rows if row.load == load]
    return row.pooled


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_every_sample_is_recognised_and_its_reports_say_where_the_run_is_from(
    name: str, tmp_path: Path, wording: Wording
) -> None:
    if name in GOOD:
        value = read_file(DATA / name)[0].value
        assert [known for known, form in FORMATS.items() if form.matches(value)] == [GOOD[name]]
    folder = import_file(DATA / name, tmp_path / "runs", machine="box")
    run, summary = read_run(folder), summarize(folder)
    assert run.origin is not None and set(run.origin.definitions) <= set(DEFINITIONS)
    shown = called("report", folder.name, "--runs", str(tmp_path / "runs"), "--explain", cwd=tmp_path)
    if name in GOOD:
        assert (run.status, run.reasons, summary.valid, shown.code) == ("unchecked", [], None, 0)
    else:
        numbers = summary.rows[0].pooled
        assert (run.status, summary.valid, shown.code, numbers.failed == 2) == ("invalid", False, 3, True)
        assert numbers.ttft.n == numbers.succeeded and numbers.ttft.min is not None and numbers.ttft.min > 0
        records = read_requests(folder / "requests.jsonl")
        assert all(not record.chunks_s for record in records if record.error)
    text = " ".join(shown.out.split())
    assert "imported from" in text and "defined otherwise:" in text
    page = called("report", folder.name, "--runs", str(tmp_path / "runs"), "--format", "html", cwd=tmp_path)
    wording([line for line in page.out.splitlines() if "Imported:" in line])


def test_vllm_with_detail_has_records_with_the_files_own_times(tmp_path: Path) -> None:
    raw = json.loads((DATA / "vllm-chat.json").read_text())
    run, summary, records = imported("vllm-chat.json", tmp_path, machine="box")
    numbers = pooled(summary, "concurrency-4")
    assert (run.scenario.model, run.machine.name, len(records)) == ("qwen3-4m", "box", 12)
    assert [r.chunks_s[0] for r in records] == raw["ttfts"]
    assert [r.output_tokens for r in records] == raw["output_lens"] == [8] * 12
    assert [r.prompt_tokens for r in records] == raw["input_lens"]
    assert [r.chunks_s[-1] for r in records] == pytest.approx(raw["latencies"], rel=1e-9)
    assert numbers.ttft.mean == pytest.approx(raw["mean_ttft_ms"] / 1000, rel=1e-9)
    assert (numbers.tpot.n, raw["mean_tpot_ms"]) == (0, pytest.approx(3.125, abs=0.001))  # eight tokens in three pieces
    assert numbers.gap.mean == pytest.approx(raw["mean_itl_ms"] / 1000, rel=1e-9)
    assert (numbers.output_tokens, numbers.prompt_tokens) == (96, 176)
    assert numbers.ttft.p50 is not None and numbers.ttft.p99 is None
    assert run.versions == {"vllm bench serve": "unknown"}
    # The load is named by rate and concurrency.
    assert set(imported("vllm-rate.json", tmp_path)[0].scenario.loads) == {"rate-50-concurrency-4"}
    path = changed("vllm-chat.json", tmp_path / "x.json", lambda raw: raw.update(max_concurrency=None))
    run = read_run(import_file(path, tmp_path / "all"))
    assert run.scenario.loads["all-at-once"].users == 4, "as the records show"


def test_vllm_without_detail_has_numbers_and_no_records(tmp_path: Path) -> None:
    raw = json.loads((DATA / "vllm-plain.json").read_text())
    _, summary, records = imported("vllm-plain.json", tmp_path)
    numbers = pooled(summary, "concurrency-4")
    assert records == []
    assert (numbers.sent, numbers.succeeded, numbers.output_tok_s) == (12, 12, raw["output_throughput"])
    assert numbers.ttft.mean == raw["mean_ttft_ms"] / 1000
    assert numbers.ttft.p50 == raw["median_ttft_ms"] / 1000
    assert numbers.ttft.p99 is None, "12 requests do not carry it"
    assert numbers.e2e.n == 0 and numbers.e2e.mean is None, "the file has no e2el"
    assert numbers.gap.n == 0
    assert unknown_fields(summary)[vllm._NO_RECORDS] == ["gap", "tokens_per_chunk"]


@pytest.mark.parametrize(
    "changes",
    [
        {"start_times": None},
        {"ttfts": [-1.0] * 12},
        {"ttfts": None},
        {"itls": None},
        {"errors": None},
        {"input_lens": None, "output_lens": None},
    ],
)
def test_vllm_lists_that_cannot_be_records_leave_numbers(changes: Any, tmp_path: Path) -> None:
    found = read_file(changed("vllm-chat.json", tmp_path / "x.json", lambda raw: raw.update(changes)))[1]
    assert found.missing == dict.fromkeys(("gap", "tokens_per_chunk"), vllm._NO_RECORDS)
    (part,) = found.parts
    assert part.records == [] and part.numbers is not None and part.numbers.output_tok_s is not None
    assert ("ttft" in part.missing) == (-1.0 in (changes.get("ttfts") or ()))


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("vllm-chat.json", "date", "20261101-1"),
        ("vllm-plain.json", "date", "yesterday"),
        ("vllm-plain.json", "date", None),
        ("lemonade-from-source.json", "timestamp", "20261101"),
    ],
)
def test_a_time_of_day_that_cannot_be_read_is_that_of_the_file(
    name: str, key: str, text: str | None, tmp_path: Path
) -> None:
    path = changed(name, tmp_path / "x.json", lambda raw: raw.update({key: text}))
    imported = read_file(path)[1]
    assert [note.code for note in imported.notes if "time" in note.code] == ["import_file_time"]
    assert imported.parts[0].ended_wall_s == pytest.approx(path.stat().st_mtime)


def test_lemonade_has_the_servers_own_speed_and_no_zero_for_nothing(tmp_path: Path) -> None:
    run, summary, records = imported("lemonade-from-source.json", tmp_path)
    rows = {row.server: row.pooled for row in summary.rows}
    assert records == [] and set(rows) == {"llamacpp-vulkan", "flm-npu"}
    gpu, npu = rows["llamacpp-vulkan"], rows["flm-npu"]
    assert (gpu.sent, gpu.ttft.mean, gpu.ttft.p50, gpu.ttft.p95) == (12, 0.08, 0.0795, None)
    assert (gpu.output_tok_s, gpu.e2e.max, gpu.wall) == (44.5, 3.1, None)
    assert (npu.ttft.n, npu.ttft.mean, npu.output_tok_s) == (0, None, 25.6)
    assert run.cells[0].served_by.arguments == ["ctx_size=4096", "-b", "2048"]
    assert run.origin is not None and run.origin.version == "11.7.0"
    older = changed("lemonade-from-source.json", tmp_path / "x.json", lambda raw: raw.update(hardware={"cpu": "a CPU"}))
    before = read_run(import_file(older, tmp_path))
    assert before.origin is not None and before.origin.version is None
    assert [cell.served_by.version for cell in before.cells] == [None, None]
    versions = {cell.server: cell.served_by.version for cell in run.cells}
    assert versions == {
        "llamacpp-vulkan": "Lemonade 11.7.0, llamacpp:vulkan b8600", "flm-npu": "Lemonade 11.7.0, flm:npu"}  # fmt: skip


def test_lemonade_rows_of_two_speeds_have_no_ratio_and_the_reason_is_given(tmp_path: Path, wording: Wording) -> None:
    """The tool writes the server's decoding speed and tokens / whole request under one name."""
    folder = import_file(DATA / "lemonade-from-source.json", tmp_path)
    run, summary = read_run(folder), summarize(folder, ["output_tok_s >= 0.1 * baseline", "speedup >= 0.1"])
    meanings = [row.definitions["output_tok_s"] for row in summary.rows]
    assert meanings == [lemonade_bench.DECODING, lemonade_bench.WHOLE_REQUEST]
    assert summary.comparison is not None and summary.comparison.comparisons == 0
    (verdict,) = summary.comparison.verdicts
    assert (verdict.word, verdict.ratio, verdict.p) == ("inconclusive", None, None)
    assert "'output_tok_s'" in verdict_sentence(verdict)
    wording(verdict_sentence(verdict))
    assert [check.code for check in summary.checks] == ["no_baseline", "no_value"]
    wording([evidence(check.evidence) for check in summary.checks])
    text = markdown.render(run_page(summary, run))
    assert "| flm-npu | chat-short | " in text and "25.6†" in text and "0.57" not in text and "0.58" not in text
    assert "†" in text
    wording([line for line in text.splitlines() if line.startswith("†")])
    throughput = figures.throughput_chart(summary, run)
    assert [trace["name"] for trace in throughput.figure["data"]] == ["llamacpp-vulkan"], "not on one axis"


@pytest.mark.parametrize(
    ("tokens", "ttft", "took", "speed", "meaning"),
    [
        (128, 80.0, 3000.0, 44.5, lemonade_bench.DECODING),
        (128, 80.0, 3000.0, 128 / 3.0, lemonade_bench.WHOLE_REQUEST),  # though it reports the time of the prompt
        (128, 0.0, 3000.0, 128 / 3.0, lemonade_bench.WHOLE_REQUEST),
        (128, 0.0, 3000.0, 44.5, None),  # a server that reports its decoding would report the prompt, too
        (128, 800.0, 3000.0, 43.5, None),  # a decoding speed would leave no room for the prompt
        (128, 80.0, 3000.0, 0.0, None),
    ],
)
def test_what_tells_the_two_speeds_of_lemonade_apart(
    tokens: int, ttft: float, took: float, speed: float, meaning: str | None
) -> None:
    def all_alike(value: float) -> dict[str, float]:
        return dict.fromkeys(("mean", "min", "max"), value)

    scenario = {"name": "s", "category": "chat", "failed_runs": 0}
    scenario |= {"output_tokens": tokens, "ttft_ms": all_alike(ttft)}
    scenario |= {"duration_ms": all_alike(took), "tps": all_alike(speed)}
    assert (
        lemonade_bench.speed_definition(Source(Path("f"), "", scenario).read(lemonade_bench.LemonadeScenario))
        == meaning
    )


def test_runs_of_one_tool_and_work_are_compared(tmp_path: Path) -> None:
    groups: list[list[Path]] = [[], []]
    for number in range(6):

        def faster(raw: dict[str, Any], number: int = number) -> None:
            speed = 1.25 if number % 2 else 1.0
            raw["date"] = f"20261121-1300{number:02}"
            raw["start_times"] = [at / speed * (1 + number / 1e4) for at in raw["start_times"]]
            raw["ttfts"] = [at / speed for at in raw["ttfts"]]
            raw["itls"] = [[gap / speed for gap in gaps] for gaps in raw["itls"]]

        path = changed("vllm-chat.json", tmp_path / f"{number}.json", faster)
        groups[number % 2].append(import_file(path, tmp_path / "runs"))
    comparison = compare_runs(groups)
    assert (comparison.metric, comparison.verdicts[0].n) == ("output_tok_s", (3, 3))
    assert comparison.verdicts[0].ratio == pytest.approx(1.25, rel=0.01)


def test_other_definitions_and_other_work_are_refused(tmp_path: Path, wording: Wording) -> None:
    vllm = import_file(DATA / "vllm-chat.json", tmp_path)
    other = import_file(DATA / "vllm-plain.json", tmp_path)
    with pytest.raises(HarnessError) as caught:
        compare_runs([[vllm], [other]], about="versions")
    assert "'output_tok_s'" in str(caught.value)
    wording(caught.value)
    for run in (vllm, other):
        assert summarize(run).rows[0].definitions["output_tok_s"] in caught.value.what

    def longer(raw: dict[str, Any]) -> None:
        raw["input_lens"][0] = 999

    path = changed("vllm-chat.json", tmp_path / "y.json", longer)
    with pytest.raises(HarnessError) as caught:
        compare_runs([[vllm], [import_file(path, tmp_path)]])
    assert "'workload_sha256'" in str(caught.value)
    wording(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("vllm-chat.json", lambda raw: raw["ttfts"].__setitem__(2, "x"),
         r"\$\.ttfts\[2\]: Expected `float . null`, got `str`"),
        ("vllm-chat.json", lambda raw: raw["errors"].pop(), "errors 11"),
        ("vllm-chat.json", lambda raw: raw.pop("duration"), "missing required field `duration`"),
        ("vllm-chat.json", lambda raw: raw.update(total_output_tokens=10**400),
         r"\$\.total_output_tokens: Expected `int` <= "),
        ("vllm-chat.json", lambda raw: raw.update(completed=9),
         "\\$\\.completed .* 9.* 12"),
        ("vllm-chat.json", lambda raw: raw["output_lens"].__setitem__(3, 9),
         "\\.total_output_tokens .* 96.* 97"),
        ("vllm-plain.json", lambda raw: raw.update(completed=9),
         "num_prompts .* 12.* 9"),
    ],
)  # fmt: skip
def test_a_file_with_a_wrong_value_or_contradictory_totals_is_refused(
    name: str, change: Any, text: str, tmp_path: Path, wording: Wording
) -> None:
    with pytest.raises(HarnessError, match=text) as caught:
        import_file(changed(name, tmp_path / "x.json", change), tmp_path / "runs")
    wording(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_damaged_or_of_no_known_tool_is_refused(tmp_path: Path, wording: Wording) -> None:
    lines = [json.dumps(RESULT) + "\n"] * 12
    vllm, told = (DATA / "vllm-chat.json").read_text(), []
    for text, given, error in (
        ("".join(lines[:-1]) + lines[-1][:100], None, r"line 12 of 12 is not JSON \(Input data was truncated\)"),
        ("".join(lines[:4]) + "{oops}\n" + "".join(lines[5:]), None, r"line 5 of 12 is not JSON \(.*\)"),
        (vllm[:500], None, r"\(Input data was truncated\)"),
        ("<html>", None, "x.json"),
        ("Metric,avg\nTime to First Token (ms),40\n", None, "x.json"),
        ("", None, "empty"),
        ("[]", None, "x.json"),
        ('{"hello": 1}', None, r"\(.*: hello\)"),
        (vllm, "lemonade", "lemonade .* vllm"),
        (vllm, "vlm", "'vlm'.*'vllm'"),
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(HarnessError, match=error) as caught:
            import_file(tmp_path / "x.json", tmp_path / "runs", given)
        told.append(caught.value.what)
    wording(told)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "x.json").write_text('{"hello": 1}')
    with pytest.raises(HarnessError) as caught:
        import_file(tmp_path / "x.json", tmp_path)
    assert [line.split(":")[0] for line in caught.value.detail.splitlines()] == list(FORMATS)


def test_the_command_prints_a_run_for_each_file_also_next_to_files_that_cannot_be_read(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "given")
    names = ["given/none.json", "given/vllm-chat.json", "given/no.json", "given/vllm-rate.json"]
    done = called("import", *names, "--machine", "box", "--runs", "runs", cwd=tmp_path)
    assert done.code == 1
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in errors] == ["given/none.json", "given/no.json"]
    folders = [Path(line) for line in done.out.splitlines()]
    assert [read_run(tmp_path / folder).machine.name for folder in folders] == ["box", "box"]
    listed = called("list", "runs", "--runs", "runs", cwd=tmp_path)
    assert listed.code == 0 and all(folder.name in listed.out for folder in folders)


def test_an_import_is_neither_valid_nor_invalid_in_any_report(tmp_path: Path, wording: Wording) -> None:
    folder = import_file(DATA / "vllm-plain.json", tmp_path)
    run, summary = read_run(folder), summarize(folder)
    assert of_report.validity(summary, run)[0] == "UNCHECKED"
    assert (of_report.state(summary, run).style, msgspec.to_builtins(summary)["valid"]) == ("unsure", None)
    case = xml.fromstring(junit_cases.render(summary, run)).find(".//testcase")
    assert case is not None and [part.tag for part in case] == ["skipped"]
    assert called("report", str(folder), cwd=tmp_path).code == 0
    with pytest.raises(HarnessError) as caught:
        import_file(DATA / "vllm-plain.json", tmp_path)
    wording(caught.value)


def test_a_comparison_says_which_runs_are_not_checked(tmp_path: Path) -> None:
    def earlier(value: Any) -> None:
        value["date"] = "20200101-000000"

    first = import_file(DATA / "vllm-plain.json", tmp_path / "a")
    second = import_file(changed("vllm-plain.json", tmp_path / "vllm-plain.json", earlier), tmp_path / "b")
    notes = compare_runs([[first], [second]]).notes
    assert [(note.code, note.values["runs"]) for note in notes] == [("runs_unchecked", [first.name, second.name])]


# A result of vllm bench serve without --save-detailed, as versions of 2026 write it.
RESULT: dict[str, Any] = {
    "date": "20260830-203806", "endpoint_type": "openai", "backend": "openai", "model_id": "llama-3b",
    "num_prompts": 300, "request_rate": 10.0, "burstiness": 1.0, "max_concurrency": None, "duration": 36.0,
    "completed": 300, "failed": 0, "total_input_tokens": 299700, "total_output_tokens": 81000,
    "request_throughput": 8.33, "output_throughput": 2250.0, "mean_ttft_ms": 54.5, "median_ttft_ms": 53.0,
    "p99_ttft_ms": 89.7, "mean_tpot_ms": 13.6, "median_tpot_ms": 13.5, "p99_tpot_ms": 17.6,
}  # fmt: skip


def import_text(text: str, folder: Path, name: str = "x.json") -> tuple[Run, Summary]:
    path = folder / name
    path.write_text(text)
    run = import_file(path, folder / "runs")
    return read_run(run), summarize(run)


def unknown_fields(summary: Summary) -> dict[str, list[str]]:
    """The fields that are not known, by the reason."""
    return {note.values["why"]: note.values["fields"] for note in summary.notes if note.code == "import_unknown"}


def test_vllm_files_of_2025_are_read_without_keys_that_they_do_not_have(tmp_path: Path) -> None:
    old = {key: value for key, value in RESULT.items() if key not in ("endpoint_type", "failed", "burstiness")}
    _, summary = import_text(json.dumps(old), tmp_path)
    numbers = pooled(summary, "rate-10")
    assert (numbers.sent, numbers.succeeded, numbers.output_tokens, numbers.wall) == (300, 300, 81000, 36.0)
    assert (numbers.output_tok_s, numbers.ttft.p50, numbers.tpot.p50) == (2250.0, 0.053, 0.0135)
    least = {"model_id": "m", "num_prompts": 4, "completed": 3, "total_input_tokens": 40, "duration": 2.0}
    _, summary = import_text(json.dumps(least | {"total_output_tokens": 30}), tmp_path, "least.json")
    numbers = pooled(summary, "vllm")
    assert (numbers.sent, numbers.failed, numbers.output_tokens, numbers.output_tok_s) == (4, 1, 30, None)
    assert "import_file_time" in [note.code for note in summary.notes]
    assert {"output_tok_s", "requests_per_s", "ttft", "e2e"} <= set(summary.rows[0].missing)


@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_vllm_file_of_several_results_has_a_load_for_each(form: str, tmp_path: Path) -> None:
    results = [
        RESULT,
        RESULT | {"request_rate": 30.0, "duration": 40.0, "output_throughput": 5900.0, "total_output_tokens": 236_000},
        RESULT
        | {"request_rate": "inf", "duration": 20.0, "output_throughput": 11400.0, "total_output_tokens": 228_000},
    ]
    text = json.dumps(results) if form == "list" else "".join(json.dumps(result) + "\n" for result in results)
    _, summary = import_text(text, tmp_path)
    assert [row.load for row in summary.rows] == ["rate-10", "rate-30", "all-at-once"]
    assert [row.pooled.output_tok_s for row in summary.rows] == [2250.0, 5900.0, 11400.0]


def test_results_of_a_vllm_sweep_with_equal_settings_are_repeats(tmp_path: Path) -> None:
    results = [
        RESULT
        | {"output_throughput": speed, "total_output_tokens": round(speed * RESULT["duration"])}
        | {"run_number": number, "max_num_seqs": seqs}
        for seqs, speeds in ((8, (1000.0, 1010.0, 990.0)), (64, (2000.0, 2010.0, 1990.0)))
        for number, speed in enumerate(speeds)
    ]
    run, summary = import_text(json.dumps(results), tmp_path)
    assert [(row.load, row.output_tok_s) for row in summary.rows] == [
        ("rate-10-max-num-seqs-8", [1000.0, 1010.0, 990.0]),
        ("rate-10-max-num-seqs-64", [2000.0, 2010.0, 1990.0]),
    ]
    first = summary.rows[0].pooled
    assert (first.sent, first.output_tok_s, first.ttft.n, first.ttft.p50) == (900, 1000.0, 900, 0.053)
    assert run.scenario.repeats == 3 and run.status == "unchecked"


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ([1], "\\$\\[1\\]: "),
        ({"hello": 1}, "\\$\\[1\\]: "),
        (RESULT | {"duration": "x"}, r"\$\[1\]\.duration: Expected `float`"),
        (RESULT | {"model_id": "other"}, " 2 models"),
        (RESULT | {"output_throughput": None, "total_output_tokens": None}, "embeddings"),
    ],
)
def test_a_faulty_result_among_several_is_named(second: Any, text: str, tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError, match=text) as caught:
        import_text(json.dumps([RESULT, second]), tmp_path)
    wording(caught.value)


def test_a_number_that_cannot_be_is_missing_with_its_reason(tmp_path: Path) -> None:
    zeros = {"median_ttft_ms": 0.0, "total_input_tokens": 0, "output_throughput": 0.0}
    run, summary = import_text(json.dumps(RESULT | zeros), tmp_path)
    (row,) = summary.rows
    assert (row.pooled.ttft.n, row.pooled.ttft.mean, row.pooled.prompt_tokens) == (0, None, None)
    assert row.pooled.output_tok_s is None and row.pooled.tpot.p50 == 0.0135
    assert {"ttft", "prompt_tokens", "output_tok_s"} <= set(row.missing)
    assert summarize(tmp_path / "runs" / run.id, ["ttft_p50 <= 1s"]).checks[0].code == "no_value"
    # NaN, which Python's json module writes, is no number either.
    _, summary = import_text(json.dumps(RESULT | {"median_tpot_ms": float("nan")}), tmp_path, "nan.json")
    assert (summary.rows[0].pooled.tpot.p50, summary.rows[0].pooled.tpot.mean) == (None, 0.0136)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5, None])
def test_a_latency_of_a_list_that_cannot_be_is_missing(bad: Any, tmp_path: Path) -> None:
    path = changed("vllm-chat.json", tmp_path / "x.json", lambda raw: raw["ttfts"].__setitem__(2, bad))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    summary = summarize(import_file(path, tmp_path / "runs"))
    (row,) = summary.rows
    assert (row.pooled.ttft.n, row.pooled.output_tok_s is None, row.pooled.failed) == (0, False, 0)


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"output_throughput": 9e4}, "output_tok_s"),
        ({"request_throughput": 9e4}, "requests_per_s"),
        ({"duration": 0}, "output_tok_s"),
        ({"mean_ttft_ms": -5.0}, "ttft"),
        ({"p99_ttft_ms": 1e-6}, "ttft"),
    ],
)
def test_a_number_that_contradicts_others_is_missing(values: Any, missing: str, tmp_path: Path) -> None:
    path = changed("vllm-plain.json", tmp_path / "x.json", lambda raw: raw.update(values))
    (part,) = read_file(path)[1].parts
    assert missing in part.missing


def test_a_result_of_a_duration_of_zero_has_no_numbers_that_a_median_would_take(tmp_path: Path) -> None:
    least = {"model_id": "m", "num_prompts": 3, "completed": 3, "total_input_tokens": 30, "duration": 2.0}
    least |= {"total_output_tokens": 24, "output_throughput": 12.0, "request_throughput": 1.5}
    zeros = dict.fromkeys(
        ("completed", "total_input_tokens", "total_output_tokens", "duration", "output_throughput"), 0
    )
    nothing = least | zeros | {"request_throughput": float("nan")}
    _, summary = import_text(json.dumps(least) + "\n" + json.dumps(nothing), tmp_path)
    (row,) = summary.rows
    assert (row.wall, row.pooled.wall, row.pooled.output_tok_s) == ([2.0], 2.0, 12.0)
    assert [cell.numbers.output_tokens for cell in summary.cells] == [24, None]
    assert {"wall", "prompt_tokens", "output_tokens", "output_tok_s", "requests_per_s"} <= set(row.missing)


def test_a_percentile_that_is_not_in_the_file_does_not_need_more_requests(tmp_path: Path) -> None:
    run, summary = import_text(json.dumps(RESULT), tmp_path)
    fields = unknown_fields(summary)
    (absent,) = [names for why, names in fields.items() if "--metric-percentiles" in why]
    assert absent == ["ttft_p90", "ttft_p95", "tpot_p90", "tpot_p95"]
    assert ["e2e"] in fields.values()
    checks = summarize(tmp_path / "runs" / run.id, ["ttft_p95 <= 1s", "e2e_p50 <= 1s"]).checks
    assert [check.code for check in checks] == ["no_value", "no_value"]
    assert [check.evidence[0].values["why"]["code"] for check in checks] == ["tool_unknown", "tool_unknown"]
    table = markdown.render(run_page(summary, run))
    assert "| TTFT p50, ms |" in table and "n/a" not in table and "TTFT p95" not in table
    _, few = import_text(json.dumps(RESULT | {"num_prompts": 5, "completed": 5}), tmp_path, "few.json")
    assert "| TTFT mean, ms |" in markdown.render(run_page(few, run))


def test_an_answer_without_a_token_has_no_ttft_of_zero(tmp_path: Path) -> None:
    def empty(raw: dict[str, Any]) -> None:
        raw["ttfts"][2], raw["itls"][2] = 0.0, []

    run = import_file(changed("vllm-chat.json", tmp_path / "x.json", empty), tmp_path / "runs")
    numbers = summarize(run).rows[0].pooled
    assert (numbers.errors, numbers.ttft.n) == ({"empty": 1}, 11)
    assert numbers.ttft.min is not None and numbers.ttft.min > 0


def llama_result(**values: Any) -> dict[str, Any]:
    return {
        "build_commit": "8cf427ff", "build_number": 5163, "backends": "ROCm", "model_filename": "/models/m.gguf",
        "n_batch": 2048, "flash_attn": True, "n_depth": 0, "test_time": "2026-07-14T10:00:00Z", "avg_ns": 1,
        "stddev_ns": 1, "stddev_ts": 1.0,
    } | values  # fmt: skip


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_llama_bench_has_a_load_for_each_test_and_a_repeat_for_each_sample(form: str, tmp_path: Path) -> None:
    tests = [
        llama_result(n_prompt=512, n_gen=0, avg_ts=1300.0, samples_ts=[1290.0, 1300.0, 1310.0], samples_ns=[1, 1, 1]),
        llama_result(n_prompt=0, n_gen=128, avg_ts=75.0, samples_ts=[74.0, 75.0, 76.0], samples_ns=[1, 1, 1]),
        llama_result(n_prompt=300, n_gen=100, avg_ts=200.0, samples_ts=[200.0], samples_ns=[2_000_000_000]),
        llama_result(n_prompt=0, n_gen=128, n_depth=4096, avg_ts=0.0),
    ]
    text = json.dumps(tests) if form == "json" else "\n".join(map(json.dumps, tests))
    run, summary = import_text(text, tmp_path, f"bench.{form}")
    rows = {row.load: row for row in summary.rows}
    assert list(rows) == ["pp512", "tg128", "pp300-tg100", "tg128-d4096"]
    assert {row.server for row in summary.rows} == {"rocm"}
    assert rows["pp512"].input_tok_s == [1290.0, 1300.0, 1310.0] and rows["pp512"].pooled.output_tok_s is None
    assert rows["tg128"].output_tok_s == [74.0, 75.0, 76.0] and rows["tg128"].pooled.tpot.n == 3
    assert rows["tg128"].pooled.tpot.max == pytest.approx(1 / 74)
    both = rows["pp300-tg100"].pooled
    assert (both.input_tok_s, both.output_tok_s, both.e2e.mean) == (150.0, 50.0, 2.0)
    assert rows["tg128-d4096"].pooled.output_tok_s is None, "a speed of 0 cannot be"
    assert run.scenario.model == "/models/m.gguf" and run.cells[0].served_by.version == "llama.cpp b5163 (8cf427ff)"
    assert "flash_attn=True" in run.cells[0].served_by.arguments


def test_llama_bench_samples_that_are_missing_or_contradict_their_mean(tmp_path: Path) -> None:
    tests = [
        llama_result(n_prompt=512, n_gen=0, avg_ts=130.0, samples_ts=[1290.0, 1310.0], samples_ns=[1, 1]),
        llama_result(n_prompt=0, n_gen=128, avg_ts=75.0, samples_ts=[74.0, None, 76.0], samples_ns=[1, None, 1]),
        llama_result(n_prompt=0, n_gen=64, avg_ts=75.0, samples_ts=[None]),
        llama_result(n_prompt=0, n_gen=32, avg_ts=75.0, samples_ts=[74.9, 75.2]),
    ]
    _, summary = import_text(json.dumps(tests), tmp_path)
    rows = {row.load: row for row in summary.rows}
    assert rows["pp512"].input_tok_s == [1290.0, 1310.0]
    assert (rows["tg128"].output_tok_s, rows["tg64"].output_tok_s) == ([74.0, 76.0], [75.0])
    notes = {(note.code, note.values["row"]): note.values for note in summary.notes if "row" in note.values}
    assert notes["import_mean_differs", "ROCm / pp512"]["samples_mean"] == 1300.0
    assert notes["import_samples_missing", "ROCm / tg128"] == {"row": "ROCm / tg128", "missing": 1, "total": 3}
    assert ("import_samples_missing", "ROCm / tg64") in notes and not any(row == "ROCm / tg32" for _, row in notes)


TABLE = """\
ggml_cuda_init: found 1 ROCm devices:
| model               |      size | params | backend | ngl | fa |          test |            t/s |
| ------------------- | --------: | -----: | ------- | --: | -: | ------------: | -------------: |
| gpt-oss 20B MXFP4   | 11.27 GiB | 20.9 B | ROCm    |  99 |  0 |         pp512 | 1012.80 ± 3.10 |
| gpt-oss 20B MXFP4   | 11.27 GiB | 20.9 B | ROCm    |  99 |  0 |        tg 128 |   65.30 ± 0.10 |
| gpt-oss 20B MXFP4   | 11.27 GiB | 20.9 B | ROCm    |  99 |  1 |         pp512 | 1312.80 ± 3.10 |
| gpt-oss 20B MXFP4   | 11.27 GiB | 20.9 B | ROCm    |  99 |  1 | tg128 @ d4096 |   60.00 ± 0.20 |

build: 8cf427ff (5163)
"""


def test_llama_bench_tables_are_read_with_what_differs_between_their_rows(tmp_path: Path) -> None:
    run, summary = import_text(TABLE, tmp_path, "bench.md")
    assert [(row.server, row.load) for row in summary.rows] == [
        ("rocm-fa-0", "pp512"), ("rocm-fa-0", "tg128"), ("rocm-fa-1", "pp512"), ("rocm-fa-1", "tg128-d4096"),
    ]  # fmt: skip
    rates = [(row.pooled.input_tok_s, row.pooled.output_tok_s) for row in summary.rows]
    assert rates == [(1012.8, None), (None, 65.3), (1312.8, None), (None, 60.0)]
    deviations = [note.values["deviation"] for note in summary.notes if note.code == "import_deviation"]
    assert deviations == [3.1, 0.1, 3.1, 0.2]
    assert run.scenario.model == "gpt-oss 20B MXFP4" and run.versions == {"llama-bench": "b5163 (8cf427ff)"}
    # A prompt's speed is compared with a prompt's speed only.
    assert summary.comparison is not None
    (verdict,) = summary.comparison.verdicts
    assert (verdict.side, verdict.baseline, verdict.metric) == (
        "rocm-fa-1 / pp512", "rocm-fa-0 / pp512", "input_tok_s",
    )  # fmt: skip
    assert verdict.ratio == pytest.approx(1312.8 / 1012.8)


def test_rows_of_a_table_without_a_speed_are_missing_and_others_are_named(tmp_path: Path, wording: Wording) -> None:
    table = """\
| backend |            test |           t/s |
| ------- | --------------: | ------------: |
| Vulkan  |           pp512 | 1180.22 ± 5.3 |
| Vulkan  |           tg128 |  60,11 ± 0,10 |
| Vulkan  |   pp512 @ d4096 |     nan ± nan |
| Vulkan  |   tg128 @ d4096 |          fast |
| Vulkan  |           tg256 | 1,180 ± 0,001 |
| Vulkan  |            tg64 |     -5.0 ± 1. |
| Vulkan  |       something |    60.0 ± 0.1 |
| Vulkan  | tg32
"""
    _, summary = import_text(table, tmp_path, "bench.md")
    rates = {row.load: (row.pooled.input_tok_s, row.pooled.output_tok_s) for row in summary.rows}
    assert rates == {"pp512": (1180.22, None), "tg128": (None, 60.11)} | dict.fromkeys(
        ("pp512-d4096", "tg128-d4096", "tg256", "tg64"), (None, None)
    )
    unread = [note.values for note in summary.notes if note.code == "import_rows_unread"]
    assert unread == [{"unread": 2, "rows": ["| Vulkan | something | 60.0 ± 0.1 |", "| Vulkan | tg32"]}]
    missing = [
        note.values for note in summary.notes if note.code == "import_unknown" and "t/s is" in note.values["why"]
    ]
    wording([note["why"] for note in missing])
    expected = [
        ("nan ± nan", "input_tok_s", "ttft", "pp512-d4096"), ("fast", "output_tok_s", "tpot", "tg128-d4096"),
        ("1,180 ± 0,001", "output_tok_s", "tpot", "tg256"), ("-5.0 ± 1.", "output_tok_s", "tpot", "tg64"),
    ]  # fmt: skip
    for note, (given, field, latency, load) in zip(missing, expected, strict=True):
        assert given in note["why"]
        assert (note["fields"], note["rows"]) == ([field, latency], [f"vulkan / {load}"])


@pytest.mark.parametrize("bad", [-5, 0.0, None, float("nan")])
@pytest.mark.parametrize("first", [True, False])
def test_a_test_of_llama_bench_without_a_speed_is_missing_in_its_row(bad: Any, first: bool, tmp_path: Path) -> None:
    tests = [
        {"n_prompt": 512, "n_gen": 0, "avg_ts": 100.0, "samples_ts": [99.0, -1.0], "samples_ns": [1, -1]},
        {"n_prompt": 0, "n_gen": 128, "avg_ts": bad, "stddev_ts": -1.0, "samples_ts": [bad], "samples_ns": [1]},
    ]
    _, summary = import_text(json.dumps(tests[::-1] if first else tests), tmp_path)
    rows = {row.load: row for row in summary.rows}
    assert (rows["pp512"].input_tok_s, rows["tg128"].output_tok_s) == ([99.0], [])
    assert {"output_tok_s", "tpot"} <= set(rows["tg128"].missing) and "input_tok_s" not in rows["pp512"].missing
    samples = [note.values for note in summary.notes if note.code == "import_samples_missing"]
    assert {one["row"]: one["missing"] for one in samples} == {"llama-bench / pp512": 1, "llama-bench / tg128": 1}


@pytest.mark.parametrize(
    "text",
    [
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "| test | t/s |\n| @ d5 | 1 ± 1 |",
    ],
)
def test_a_table_of_something_else_is_refused(text: str, tmp_path: Path, wording: Wording) -> None:
    assert llama_bench.read_tables(text) == []
    with pytest.raises(HarnessError) as caught:
        import_text(text, tmp_path)
    wording(caught.value)
    assert len(caught.value.detail.splitlines()) == len(FORMATS)


def test_a_table_without_any_speed_is_refused_with_what_it_has(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        import_text("| test | t/s |\n|---|---|\n| pp512 | inf |\n| tg64 | fast |\n", tmp_path)
    wording(caught.value)


def lemonade_with(folder: Path, **scenario: Any) -> tuple[Run, Summary]:
    """The sample with other values in its first scenario."""
    folder.mkdir(exist_ok=True)

    def change(raw: dict[str, Any]) -> None:
        raw["models"][0]["results"][0]["scenarios"][0].update(scenario)

    run = import_file(changed("lemonade-from-source.json", folder / "x.json", change), folder / "runs")
    return read_run(run), summarize(run)


def stats(mean: Any, least: Any = None, most: Any = None) -> dict[str, Any]:
    return {"mean": mean, "min": least or mean, "max": most or mean}


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ({"output_tokens": 1, "tps": stats(1e6)}, "1,000,000 tok/s "),
        ({"output_tokens": 1, "tps": stats(0.58)}, "0.58 tok/s "),
        ({"tps": stats(250_000.0)}, "250,000 tok/s "),
        ({"tps": stats(9_100.0, 40.0, 1e6)}, "1,000,000 tok/s "),
        ({"tps": {"mean": 20.0, "min": 0.0, "max": 40.0}}, "0 tok/s "),
        ({"tps": {"mean": 0.0, "min": 0.0, "max": 0.0}}, "0 tok/s "),
        ({"tps": {"mean": float("inf"), "min": 40.0, "max": float("inf")}}, "tps is null"),
        ({"tps": {"mean": float("nan"), "min": 40.0, "max": 45.0}}, "tps is null"),
    ],
)
def test_a_speed_of_lemonade_that_cannot_be_is_missing(
    scenario: Any, reason: str, tmp_path: Path, wording: Wording
) -> None:
    _, summary = lemonade_with(tmp_path, **scenario)
    row, other = summary.rows
    assert (row.pooled.output_tok_s, row.output_tok_s, other.pooled.output_tok_s) == (None, [], 25.6)
    assert (row.pooled.ttft.mean, row.pooled.e2e.mean) == (0.08, 3.0), "its other numbers stay"
    notes = [note.values for note in summary.notes if note.code == "import_unknown"]
    (note,) = [note for note in notes if reason in note["why"]]
    assert note["rows"] == ["llamacpp-vulkan / chat-short"]
    wording(note["why"])
    assert summary.comparison is not None
    assert [verdict.ratio for verdict in summary.comparison.verdicts] == [None]


def test_a_lemonade_scenario_keeps_what_is_known(tmp_path: Path, wording: Wording) -> None:
    """The tool writes NaN as null."""
    _, good = lemonade_with(tmp_path / "good", tps=stats(44.5, 43.0, 46.0))
    assert good.rows[0].pooled.output_tok_s == 44.5 and "output_tok_s" not in good.rows[0].missing
    _, summary = lemonade_with(tmp_path / "bad", duration_ms={"mean": None, "min": 1.0, "max": None})
    row = summary.rows[0]
    assert (row.pooled.ttft.mean, row.pooled.e2e.n, row.pooled.output_tok_s) == (0.08, 0, None)
    assert "duration_ms" in row.missing["e2e"]
    wording(row.missing["e2e"])


def test_speeds_of_llama_bench_that_cannot_be_are_missing_and_prompts_may_be_fast(tmp_path: Path) -> None:
    tests = [
        llama_result(n_prompt=2048, n_gen=0, avg_ts=61_000.0, samples_ts=[60_000.0, 62_000.0]),
        llama_result(n_prompt=0, n_gen=1, avg_ts=75.0, samples_ts=[75.0]),
        llama_result(n_prompt=0, n_gen=64, avg_ts=75.0, samples_ts=[75.0, 1e6]),
        llama_result(n_prompt=0, n_gen=32, avg_ts=333_383.3, samples_ts=[]),
        llama_result(n_prompt=0, n_gen=16, avg_ts=75.0, stddev_ts=1.0, samples_ts=[]),
    ]
    text = json.dumps(tests).replace("333383.3", "1e999")
    for name, given, why in (("a", json.dumps(tests), "more than one user"), ("b", text, "avg_ts is missing")):
        _, summary = import_text(given, tmp_path, f"{name}.json")
        rows = {row.load: row for row in summary.rows}
        assert rows["pp2048"].input_tok_s == [60_000.0, 62_000.0], "a prompt is processed in parallel"
        assert {load: row.output_tok_s for load, row in rows.items() if load != "pp2048"} == {
            "tg1": [75.0], "tg64": [75.0], "tg32": [], "tg16": [75.0],
        }  # fmt: skip
        assert why in rows["tg32"].missing["output_tok_s"]
        samples = [note.values for note in summary.notes if note.code == "import_samples_missing"]
        assert samples == [{"row": "ROCm / tg64", "missing": 1, "total": 2}]


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"mean_tpot_ms": 0.03, "median_tpot_ms": 0.03, "p99_tpot_ms": 0.05}, ["tpot"]),
        ({"total_output_tokens": 12, "output_throughput": None}, ["tpot", "output_tok_s"]),
        ({"max_concurrency": 1, "duration": 0.004, "output_throughput": 24_000.0, "request_throughput": 3000.0},
         ["ttft", "output_tok_s"]),
        ({"max_concurrency": 4, "duration": 0.004, "output_throughput": 24_000.0, "request_throughput": 3000.0},
         ["ttft"]),
        ({}, []),
    ],
)  # fmt: skip
def test_speeds_of_one_user_that_cannot_be_are_missing_in_vllm(values: Any, missing: list[str], tmp_path: Path) -> None:
    path = changed("vllm-plain.json", tmp_path / "x.json", lambda raw: raw.update(values))
    (part,) = read_file(path)[1].parts
    assert [field for field in ("ttft", "tpot", "output_tok_s", "requests_per_s") if field in part.missing] == missing


NOISE = """\
+ llama-bench -m m.gguf -o json
\x1b[1;32mWelcome to the toolbox!\x1b[0m
[1] 4242
[INFO] ggml_vulkan: 0 = Radeon (RADV) | uma: 1
2026-10-18 10:00:00 loading
"""
PROMPT = "[user@toolbox ~]$ exit\n"
RESULTS = [
    llama_result(n_prompt=512, n_gen=0, avg_ts=1300.0, samples_ts=[1290.0, 1310.0]),
    llama_result(n_prompt=0, n_gen=128, avg_ts=75.0, samples_ts=[75.0]),
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (json.dumps(RESULTS, indent=1), 0),
        (f"{NOISE}{json.dumps(RESULTS, indent=1)}\n", 5),
        (f"{NOISE}{json.dumps(RESULTS)}\n{PROMPT}", 6),
        ("".join(f"{NOISE}{json.dumps(result)}\n" for result in RESULTS), 10),
        ("[\n" + ",\nllama-bench: benchmark 2/2\n".join(json.dumps(one, indent=2) for one in RESULTS) + "\n]\n", 1),
        (f"{NOISE}{TABLE}{PROMPT}", None),
    ],
    ids=["json", "before", "around", "jsonl", "within", "table"],
)
def test_lines_of_other_programs_are_left_out(encoding: str, text: str, lines: int | None, tmp_path: Path) -> None:
    """What a shell adds to a tool's output: `set -x`, jobs, logs, banners; and the encodings of PowerShell."""
    path = tmp_path / "bench.txt"
    path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
    summary = summarize(import_file(path, tmp_path / "runs"))
    rates = {row.load: (row.input_tok_s or row.output_tok_s) for row in summary.rows if row.server != "rocm-fa-0"}
    assert rates["pp512"] == ([1312.8] if lines is None else [1290.0, 1310.0])
    notes = [note.values["lines"] for note in summary.notes if note.code == "import_noise"]
    assert notes == ([lines] if lines else [])


@pytest.mark.parametrize(
    "text",
    [
        NOISE + json.dumps(RESULTS, indent=1)[:-40],
        NOISE + "".join(f"{json.dumps(result)}\n" for result in RESULTS)[:-40],
        "[\n" + json.dumps(RESULTS[0]) + ",\n",
        NOISE,
        NOISE + "[]\n",
    ],
)
def test_a_damaged_document_between_other_lines_is_refused(text: str, tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        import_text(text, tmp_path)
    wording(caught.value)


def test_measured_columns_of_a_table_are_no_settings(tmp_path: Path) -> None:
    """A table with columns that someone added: the rows of one server stay one."""
    table = """\
| model | backend | fa | test  |            t/s |    W | t/s/W |
| ----- | ------- | -- | ----- | -------------: | ---: | ----: |
| m     | ROCm    |  0 | pp512 | 1012.80 ± 3.10 | 98.2 | 10.31 |
| m     | ROCm    |  0 | tg128 |   65.30 ± 0.10 | 71.4 |  0.91 |
| m     | ROCm    |  1 | pp512 | 1312.80 ± 3.10 | 99.9 | 13.14 |
"""
    run, summary = import_text(table, tmp_path, "bench.md")
    assert [(row.server, row.load) for row in summary.rows] == [
        ("rocm-fa-0", "pp512"), ("rocm-fa-0", "tg128"), ("rocm-fa-1", "pp512"),
    ]  # fmt: skip
    assert not any("W=" in argument for cell in run.cells for argument in cell.served_by.arguments)
    assert [n.values["columns"] for n in summary.notes if n.code == "import_columns_unknown"] == [["W", "t/s/W"]]
    _, clean = import_text(TABLE, tmp_path, "clean.md")
    assert not any(note.code == "import_columns_unknown" for note in clean.notes)


@pytest.mark.parametrize(
    "text",
    [
        "| test | t/s | ttfr (ms) | e2e_ttft (ms) |\n|--|--|--|--|\n| pp512 | 1 ± 0.1 | 5 ± 1 | 6 ± 1 |\n",
        "| model | test | t/s |\n|--|--|--|\n| m | pp512 | 1 ± 0.1 |\n\nllama-benchy (build: 75bc129)\n",
        TABLE + "| test | t/s | TTFT |\n|--|--|--|\n| pp1 | 1 ± 1 | 5 |\n",
    ],
)
def test_a_table_of_a_tool_that_measures_a_server_is_refused(text: str, tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        import_text(text, tmp_path, "x.md")
    wording(caught.value)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"duration": 1e308}, {"wall", "output_tok_s", "requests_per_s"}),
        ({"duration": 2e-301}, {"wall", "output_tok_s", "requests_per_s"}),
        ({"mean_ttft_ms": 2e307, "median_ttft_ms": 2e307, "p99_ttft_ms": 2e307}, {"ttft"}),
        ({"median_ttft_ms": 71_000.0, "p99_ttft_ms": 71_000.0}, {"ttft"}),
        ({"mean_e2el_ms": 9.0, "mean_ttft_ms": 40.0}, {"ttft", "e2e"}),
        ({"total_output_tokens": 40_000_000, "output_throughput": 2e7}, {"output_tokens", "output_tok_s"}),
        ({"total_output_tokens": 120_000, "output_throughput": 60_000.0}, set()),
    ],
)
def test_durations_latencies_and_speeds_out_of_bounds_are_missing(
    values: Any, missing: set[str], tmp_path: Path
) -> None:
    base = {"duration": 2.0, "output_throughput": 48.0, "request_throughput": 6.0, "max_concurrency": 4}
    path = changed("vllm-plain.json", tmp_path / "x.json", lambda raw: raw.update(base | values))
    (part,) = read_file(path)[1].parts
    fields = {"wall", "ttft", "e2e", "output_tok_s", "output_tokens", "requests_per_s"}
    assert fields & set(part.missing) - ({"e2e"} - missing) == missing
    summarize(import_file(path, tmp_path / "runs"))


def test_a_ttft_of_a_list_that_is_longer_than_the_run_is_missing(tmp_path: Path) -> None:
    for long_s in (1e300, 9_999.0):
        path = changed("vllm-chat.json", tmp_path / "x.json", lambda raw: raw["ttfts"].__setitem__(1, long_s))  # noqa: B023
        (part,) = read_file(path)[1].parts
        assert part.records == [] and "ttft" in part.missing


def test_latencies_of_lemonade_that_cannot_be_are_missing(tmp_path: Path) -> None:
    _, summary = lemonade_with(tmp_path / "long", ttft_ms=stats(1e306))
    row = summary.rows[0]
    assert (row.pooled.ttft.n, row.pooled.e2e.mean, "ttft" in row.missing, "e2e" in row.missing) == (
        0,
        3.0,
        True,
        False,
    )
    _, summary = lemonade_with(tmp_path / "above", ttft_ms=stats(4_400.0))
    row = summary.rows[0]
    assert (row.pooled.ttft.n, row.pooled.e2e.n, {"ttft", "e2e"} <= set(row.missing)) == (0, 0, True)


@pytest.mark.parametrize("speed", [1e308, 3_100_000.0])
def test_a_prompt_speed_out_of_bounds_is_missing_and_the_first_sentence_says_so(speed: float, tmp_path: Path) -> None:
    test = llama_result(n_prompt=512, n_gen=0, avg_ts=speed, samples_ts=[speed, speed])
    run, summary = import_text(json.dumps([test]), tmp_path)
    (row,) = summary.rows
    assert (row.pooled.input_tok_s, row.pooled.ttft.n, "input_tok_s" in row.missing) == (None, 0, True)
    assert row.missing["input_tok_s"] in run_answer(summary, run)


def test_samples_of_llama_bench_whose_times_contradict_their_speeds_get_a_note(tmp_path: Path) -> None:
    right, wrong = 64 * 10**9 // 80, 64 * 10**9 // 8
    for ns, noted in ((right, []), (wrong, [8.0])):
        test = llama_result(n_prompt=0, n_gen=64, avg_ts=80.0, samples_ts=[80.0, 80.0], samples_ns=[right, ns])
        _, summary = import_text(json.dumps([test]), tmp_path, f"{ns}.json")
        notes = [note.values for note in summary.notes if note.code == "import_time_differs"]
        assert [note["by_samples_ns"] for note in notes] == noted
        assert summary.rows[0].output_tok_s == [80.0, 80.0]


@pytest.mark.parametrize("noise", ['{"severity": "warn", "text": "GPU found"}\n', "[]\n{}\n"])
def test_json_of_other_programs_before_results_is_left_out(noise: str, tmp_path: Path, wording: Wording) -> None:
    _, summary = import_text(noise + json.dumps(RESULTS, indent=1), tmp_path)
    assert {row.load for row in summary.rows} == {"pp512", "tg128"}
    assert [note.code for note in summary.notes].count("import_noise") == 1
    vllm_text = noise + (DATA / "vllm-plain.json").read_text()
    assert import_text(vllm_text, tmp_path, "v.json")[1].rows[0].pooled.succeeded == 12
    lemonade_text = noise + (DATA / "lemonade-from-source.json").read_text()
    assert len(import_text(lemonade_text, tmp_path, "l.json")[1].rows) == 2
    damaged = json.dumps({"n_prompt": 5}) + "\n" + json.dumps(RESULTS[0])  # a result that lacks something is no noise
    with pytest.raises(HarnessError) as caught:
        import_text(damaged, tmp_path, "d.json")
    wording(caught.value)
