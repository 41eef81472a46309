"""Starts of the embedded engine with nothing compiled, with what the start before compiled, and after an update."""

from pathlib import Path

from msgspec.structs import replace

from harness.numbers.summarize import read_summary
from harness.records.manifest import read_run, write_run
from tests.support.command import going, harness, only_run, until
from tests.support.simulated import spawned

ENGINE = '--weights-s, "0.2", --compile-s, "0.3"'
TEXT = f"""
version: 1
question: Why does it take so long to start?
model: m
servers:
  cold:
    template: simulated
    container: false
    caches: new
    variables: {{preset: instant, start_compile_s: 1.5, extra_args: [{ENGINE}]}}
  warm:
    template: simulated
    container: false
    caches: cold
    variables: {{preset: instant, start_compile_s: 1.5, extra_args: [{ENGINE}]}}
  updated:
    template: simulated
    container: false
    caches: cold
    variables: {{preset: instant, start_compile_s: 1.5, extra_args: [{ENGINE}, --build, "2"]}}
loads: {{one-user: {{user: batch, requests: 20, output_tokens: 4}}}}
prompts: {{tokens: 20}}
warmup: {{requests: 2}}
repeats: 1
"""


def test_what_a_start_finds_compiled(tmp_path: Path) -> None:
    (tmp_path / "startup.yaml").write_text(TEXT)
    done = harness("run", "startup.yaml", cwd=tmp_path)
    assert done.code == 0, done
    (folder,) = (tmp_path / "runs").glob("2*")
    summary = read_summary(folder)
    starts = {start.server: start for start in summary.starts}
    assert {name: start.compiled for name, start in starts.items()} == {
        "cold": "cold", "warm": "warm", "updated": "cold",
    }  # fmt: skip
    for start in starts.values():
        assert list(start.phases) == ["process", "weights", "compile", "ready", "first answer"]
        assert start.ready_s is not None and abs(sum(start.phases.values()) - start.ready_s) < 1e-6
        assert start.phases["weights"] > 0.19
    assert min(starts["cold"].phases["compile"], starts["updated"].phases["compile"]) > 1.49
    assert starts["warm"].phases["compile"] < starts["cold"].phases["compile"]
    found, ready = starts["warm"].found_bytes, starts["cold"].ready_bytes
    assert starts["cold"].found_bytes == 0 and found is not None and ready is not None
    assert found > ready > 0, "also what the requests of the cold start compiled"
    answer, *_ = summary.answers
    assert answer.code == "startup" and answer.values["provisional"]
    assert answer.text in " ".join(done.out.split())
    assert not (folder / "compiled").exists(), "kept until the end of the run only"
    assert "--compile-cache" in read_run(folder).cells[0].served_by.arguments


def test_a_server_that_ran_already(tmp_path: Path) -> None:
    (tmp_path / "startup.yaml").write_text(TEXT)
    with spawned("--model", "m", "--preset", "instant", quiet=True) as engine:
        done = harness("run", "startup.yaml", "--url", engine.url, cwd=tmp_path)
    assert done.code == 0, done
    (folder,) = (tmp_path / "runs").glob("2*")
    summary = read_summary(folder)
    (start,) = summary.starts
    assert (start.ready_s, start.phases, start.caches) == (None, {}, None)
    assert start.first is not None
    assert summary.answers[0].values["ready_s"] == {}


def test_a_cut_between_the_servers_is_resumed_from_the_one_that_compiles(tmp_path: Path) -> None:
    (tmp_path / "startup.yaml").write_text(TEXT)
    runs = tmp_path / "runs"
    with going("run", "startup.yaml", cwd=tmp_path) as command:
        until(lambda: any(read_run(file.parent).ran for file in runs.glob("*/run.json")))
        command.interrupt()
        command.end()
        command.nothing_left()
    folder = only_run(runs)
    manifest = read_run(folder)
    # It may have come further until it was interrupted.
    write_run(folder, replace(manifest, cells=[cell for cell in manifest.cells if cell.server == "cold"]))
    done = harness("run", "--resume", folder.name, cwd=tmp_path)
    assert done.code == 0, done
    (resumed,) = read_run(folder).resumed
    assert resumed.kept == 0 and resumed.again[0] == "r1-cold-one-user"
    starts = {start.server: start.compiled for start in read_summary(folder).starts}
    assert starts == {"cold": "cold", "warm": "warm", "updated": "cold"}
