"""Starts of servers in comparisons: what refuses, what is told, what is noise; and in the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.base.reason import sentences
from harness.numbers import comparable
from harness.numbers.comparable import run_differences
from harness.numbers.summarize import summarize, write_summary
from harness.questions.compare.page import comparison_page
from harness.questions.compare.sides import compare_runs
from harness.records.manifest import Contents, Machine, Phase, ServedBy, Startup, UnlikeError, read_run
from harness.report.charts.timeline import observed_starts
from harness.report.markdown import render
from harness.scenario.plan import Cell
from tests.support.made_runs import scenario, served_by, write_made_run
from tests.support.report_runs import write_report
from tests.support.wording import Wording

STARTUP = Startup(
    engine="vllm", version="0.32.0", attention_backend="TRITON_ATTN", max_model_len=8192, weights_gib=1.75,
    model_load_s=4.5, compile_s=12.25, compile_cache="cold", kv_cache_tokens=100_000, kv_cache_gib=10.5,
    max_concurrency=12.207,
)  # fmt: skip
PHASES = {
    "pull": 0.0, "create": 1.0, "process": 9.0, "weights": 4.0, "compile": 15.0, "ready": 0.5, "first answer": 0.5,
}  # fmt: skip


def serving(
    startup: dict[str, Any] | None = None, phases: dict[str, float] | None = None, **changes: Any
) -> Callable[[Cell], ServedBy]:
    """How every cell of a made run was served."""
    values = {
        "startup": msgspec.structs.replace(STARTUP, **(startup or {})),
        "phases": [Phase(name=name, seconds=seconds) for name, seconds in (PHASES | (phases or {})).items()],
        "effective": {"max_num_seqs": 16, "dtype": "bfloat16"},
        "contents": Contents(
            rocm="7.2.0", versions={"TRITON_BRANCH": "a"}, environment={"HSA_NO_SCRATCH_RECLAIM": "1"}
        ),
    }
    return lambda cell: served_by(**(values | changes))


def steady(factor: float = 1.0) -> Callable[[Cell], float]:
    return lambda cell: factor * (1 + 0.001 * cell.repeat)


def two(folder: Path, other: Callable[[Cell], ServedBy], **manifest: Any) -> list[list[Path]]:
    write_made_run(folder / "one", steady(), served=serving())
    write_made_run(folder / "two", steady(), served=other, **manifest)
    return [[folder / "one"], [folder / "two"]]


@pytest.mark.parametrize(
    ("other", "key", "values"),
    [
        (serving({"attention_backend": "ROCM_ATTN"}), "startup.attention_backend", ("TRITON_ATTN", "ROCM_ATTN")),
        (serving(effective={"max_num_seqs": 1024, "dtype": "bfloat16"}), "effective.max_num_seqs", ("16", "1024")),
        (serving(contents=Contents(rocm="7.3.0", versions={"TRITON_BRANCH": "a"})), "contents.rocm",
         ("7.2.0", "7.3.0")),
    ],
)  # fmt: skip
def test_settings_must_be_equal(
    tmp_path: Path, other: Callable[[Cell], ServedBy], key: str, values: tuple[str, str]
) -> None:
    with pytest.raises(UnlikeError) as raised:
        compare_runs(two(tmp_path, other))
    found = raised.value.reason.values
    assert (found["key"], found["value"], found["other_value"], found["more"]) == (f"servers.a.{key}", *values, 1)


def test_seconds_and_memory_never_refuse_and_noise_is_not_told(tmp_path: Path) -> None:
    changed = {"compile_s": 60.0, "compile_cache": "warm", "model_load_s": 4.9, "kv_cache_tokens": 100_500}
    other = serving({**changed, "weights_gib": 1.76}, {"weights": 4.9, "compile": 62.5})
    compared = compare_runs(two(tmp_path, other))
    measured = {difference.key: difference.values for difference in compared.differences}
    assert measured == {
        "servers.*.startup.compile_cache": ["cold", "warm"],
        "servers.*.startup.compile_s": ["12.25", "60"],
        "servers.*.phases.compile": ["15", "62.5"],
    }
    assert compared.notes == []


def test_kv_caches_of_different_sizes_are_told_before_the_verdicts(tmp_path: Path, wording: Wording) -> None:
    compared = compare_runs(two(tmp_path, serving({"kv_cache_tokens": 50_000})))
    assert "100,000" in sentences(compared.notes)[0] and "50,000" in sentences(compared.notes)[0]
    wording(sentences(compared.notes)[0])
    assert [note[:2] for note in sentences(compared.notes)] == ["a:", "b:"]
    text = render(comparison_page(compared))
    assert text.index("KV cache") < text.index("- a / x")
    assert {d.key for d in compared.differences} == {"servers.*.startup.kv_cache_tokens"}


def test_servers_of_a_run_whose_kv_caches_differ_are_noted(tmp_path: Path, wording: Wording) -> None:
    half, whole = serving({"kv_cache_tokens": 50_000}), serving()
    write_made_run(tmp_path / "run", served=lambda cell: (half if cell.server == "a" else whole)(cell))
    (note,) = [note for note in sentences(summarize(tmp_path / "run").notes) if "KV cache" in note]
    assert "50,000" in note and "100,000" in note
    wording(note)


def test_settings_follow_from_image_arguments_and_machine(tmp_path: Path) -> None:
    changed: dict[str, Any] = {
        "startup": {"version": "0.33.0", "attention_backend": "ROCM_ATTN"},
        "effective": {"max_num_seqs": 256},
    }
    image = serving(**changed, image="vllm/vllm-openai-cpu:v0.33", contents=Contents(rocm="7.3.0"))
    compared = compare_runs(two(tmp_path / "image", image), about="image")
    assert [(note.code, note.values) for note in compared.notes] == [
        ("engine_versions", {"server": server, "engine": "vllm", "versions": {"one": "0.32.0", "two": "0.33.0"}})
        for server in ("a", "b")
    ]
    arguments = serving(**changed, arguments=["--port", "8000", "--max-num-seqs", "256"])
    compare_runs(two(tmp_path / "arguments", arguments), about="arguments")
    machine = Machine(name="other", kernel="6.18", cores=16)
    compare_runs(two(tmp_path / "machine", serving(**changed), machine=machine), about="machine")


def test_a_diff_of_two_runs_has_the_new_facts(tmp_path: Path) -> None:
    other = serving(
        {"kv_cache_tokens": 50_000, "offloaded_layers": "20/25"},
        effective={"max_num_seqs": 16, "dtype": "half", "launch_command": ["s", "--port", "8002", "-np", "8"]},
        contents=Contents(rocm="7.2.0", versions={"TRITON_BRANCH": "b"}, environment={"HSA_NO_SCRATCH_RECLAIM": "1"}),
    )
    two(tmp_path, other, machine=Machine(name="strix", kernel="6.17", cores=32, rocm="7.14"))
    found = run_differences([read_run(tmp_path / name) for name in ("one", "two")])
    assert {difference.key: difference.values for difference in found} == {
        "servers.*.startup.offloaded_layers": ["nothing", "20/25"],
        "servers.*.startup.kv_cache_tokens": ["100000", "50000"],
        "servers.*.effective.dtype": ["bfloat16", "half"],
        "servers.*.effective.launch_command": ["nothing", '["s","-np","8"]'],
        "servers.*.contents.versions.TRITON_BRANCH": ["a", "b"],
        "machine.rocm": ["unknown", "7.14"],
    }


@pytest.mark.parametrize(
    ("key", "values", "noise"),
    [
        ("servers.a.phases.weights", [1.0, 1.9], True), ("servers.a.phases.weights", [1.0, 2.1], False),
        ("servers.a.phases.weights", [100.0, 109.0], True), ("phases.first answer", [0.1, 0.2], True),
        ("phases.weights", ["nothing", 20.0], True), ("startup.compile_s", [10.0, 12.0], False),
        ("startup.compile_s", ["nothing", 12.0], False), ("startup.kv_cache_tokens", [100_000, 100_900], True),
        ("startup.kv_cache_tokens", [100_000, 98_000], False),
        ("startup.kv_cache_tokens", [100_000, "nothing"], False),
        ("servers.a.startup.max_model_len", [8192, 8191], False), ("machine.cores", [100, 100.5], False),
    ],
)  # fmt: skip
def test_what_is_noise(key: str, values: list[Any], noise: bool) -> None:
    assert comparable.is_noise(key, values) == noise


def test_cells_that_share_a_start_count_once(tmp_path: Path) -> None:
    write_made_run(tmp_path / "run", made_of=scenario(restart=False, repeats=2), served=serving())
    run = read_run(tmp_path / "run")
    assert {server: len(found) for server, found in observed_starts(run).items()} == {"a": 2, "b": 2}


def test_the_page_has_the_facts_of_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_made_run(folder, served=serving(effective={"max_num_seqs": 16, "note": "<script>alert(1)</script>"}))
    summary = summarize(folder)
    write_summary(folder, summary)
    page = write_report(folder).read_text(encoding="utf-8")
    for text in (
        "<dt>engine</dt><dd>vllm</dd>", "<dt>kv_cache_tokens</dt><dd>100000</dd>",
        "<dt>compile_cache</dt><dd>cold</dd>", "<dt>rocm</dt><dd>7.2.0</dd>", "TRITON_BRANCH: a",
    ):  # fmt: skip
        assert text in page
    assert "<script>alert(1)" not in page
    assert page.count("<dt>engine</dt>") == 2  # alike starts are shown once a server
