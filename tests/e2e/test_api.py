"""The public API: the functions and types that `harness` names, for notebooks and scripts."""

import gzip
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import harness
from harness import HarnessError, LoadedRun, compare, load_run, plan, summarize
from harness.base.errors import RunError
from harness.base.files import ROOT
from harness.numbers.summarize import summarize as summarize_folder
from harness.numbers.summarize import write_summary
from harness.records.manifest import write_run
from harness.report.export import record_columns
from tests.support.wording import Wording

BEFORE, AFTER = ROOT / "examples" / "before", ROOT / "examples" / "after"


API = "from harness import compare, load_run, summarize"
MODULES = "import harness.numbers.summarize, harness.questions.compare.sides, harness.api"


@pytest.mark.parametrize("lines", [API, f"{MODULES}; {API}", f"{API}; {MODULES}; {API}"])
def test_functions_stay_functions_whatever_is_imported_first(lines: str) -> None:
    code = f"import harness, sys\nassert not [name for name in sys.modules if name.startswith('harness.')]\n{lines}\n"
    code += "import types\nassert all(type(f) is types.FunctionType for f in (compare, load_run, summarize))"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)


def test_no_module_has_the_name_of_a_public_one() -> None:
    assert {module.name for module in pkgutil.iter_modules(harness.__path__)} & set(harness.__all__) == set()
    assert set(harness.__all__) <= set(dir(harness)) & set(dir(harness.api))
    with pytest.raises(AttributeError, match="'load_runs'"):
        _ = harness.load_runs


def test_a_run_is_loaded_and_summarized() -> None:
    run = load_run(str(BEFORE))
    assert (type(run), run.id, run.manifest.status, run.path) == (LoadedRun, "before", "valid", BEFORE)
    summary = summarize(run)
    assert summary == summarize(BEFORE)
    assert (summary.findings, replace(summary, findings=None)) == ([], summarize_folder(BEFORE))
    summary = summarize(run, checks=["error_rate == 0", "output_tok_s >= 0.8 * baseline"], baseline=AFTER)
    assert [check.status for check in summary.checks[-2:]] == ["passed", "inconclusive"]
    assert summary.checks[-1].code == "no_baseline", "what they differ in is not named with --about"
    with pytest.raises(HarnessError, match="given twice"):
        summarize(run, checks=["output_tok_s >= 0.8 * baseline"], baseline=BEFORE)


def test_a_published_run_has_its_stored_summary(tmp_path: Path, wording: Wording) -> None:
    """A summary made without the records would say that nothing was sent."""
    for name in ("run.json", "report.md"):
        (tmp_path / name).write_bytes((BEFORE / name).read_bytes() if name == "run.json" else b"")
    stored = summarize_folder(BEFORE)
    write_summary(tmp_path, stored)
    assert summarize(tmp_path) == stored
    with pytest.raises(HarnessError) as caught:
        summarize(tmp_path, checks=["error_rate == 0"])
    wording(caught.value)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(HarnessError) as caught:
        summarize(tmp_path)
    wording(caught.value)
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress((BEFORE / "requests.jsonl").read_bytes()))
    with pytest.raises(HarnessError) as caught:
        summarize(tmp_path)
    wording(caught.value)


@pytest.mark.parametrize("checks", ["error_rate == 0", ["speed < 3"], ["nosuch/load: error_rate == 0"]])
def test_wrong_checks_are_refused(checks: list[str]) -> None:
    with pytest.raises(HarnessError, match="check|server"):
        summarize(BEFORE, checks=checks)
    with pytest.raises(HarnessError, match="check|server"):
        compare(BEFORE, AFTER, checks=checks)


def test_checks_of_a_comparison_are_for_the_rows_of_the_other_runs(tmp_path: Path, wording: Wording) -> None:
    """They may name a server that the baseline does not have; then no row is in common, and the check is right."""
    manifest = load_run(AFTER).manifest
    servers = {"renamed": manifest.scenario.servers["engine"]}
    cells = [replace(cell, server="renamed") for cell in manifest.cells]
    renamed = Path(shutil.copytree(AFTER, tmp_path / "renamed"))
    write_run(renamed, replace(manifest, scenario=replace(manifest.scenario, servers=servers), cells=cells))
    with pytest.raises(HarnessError) as caught:
        compare(BEFORE, renamed, checks=["engine/one-at-a-time: error_rate == 0"])
    assert "'engine'" in str(caught.value)
    wording(caught.value)
    with pytest.raises(HarnessError) as raised:
        compare(BEFORE, renamed, checks=["renamed/one-at-a-time: error_rate == 0"])
    assert "after has renamed / one-at-a-time" in str(raised.value)
    wording(raised.value)


@pytest.mark.parametrize(
    ("items", "amounts", "name"),
    [(0, {}, "items"), (1.5, {}, "items"), (10, {"deadline_s": float("nan")}, "deadline_s"),
     (10, {"price_per_kwh": -1.0}, "price_per_kwh")],
)  # fmt: skip
def test_items_deadline_and_price_must_be_possible(
    items: int, amounts: dict[str, float], name: str, wording: Wording
) -> None:
    with pytest.raises(HarnessError) as caught:
        plan(BEFORE, items, **amounts)
    assert str(name) in str(caught.value)
    wording(caught.value)


def test_records_are_a_table(tmp_path: Path) -> None:
    run = load_run(BEFORE)
    table = run.to_arrow()
    assert (table.num_rows, table.column_names) == (60, list(record_columns()))
    assert [request.id for request in run.requests()] == table.column("id").to_pylist()
    frame = pytest.importorskip("pandas") and run.to_pandas()
    assert (frame.shape, frame.e2e.max()) == ((60, len(record_columns())), max(table.column("e2e").to_pylist()))
    (tmp_path / "run.json").write_bytes((BEFORE / "run.json").read_bytes())
    with pytest.raises(HarnessError):
        load_run(tmp_path).to_arrow()
    (tmp_path / "requests.jsonl").write_text("{torn\n")
    with pytest.warns(UserWarning, match="1 lines left out"):
        assert load_run(tmp_path).to_arrow().num_rows == 0


def test_runs_are_compared() -> None:
    comparison = compare(BEFORE, load_run(AFTER), about="arguments")
    assert [(verdict.word, verdict.provisional) for verdict in comparison.verdicts] == [("inconclusive", True)] * 2
    assert comparison == compare([BEFORE], [AFTER], about="arguments")
    with pytest.raises(HarnessError):
        compare(BEFORE)


def test_errors_say_what_is_wrong(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(HarnessError) as raised:
        summarize(tmp_path)
    wording(raised.value)
    assert raised.value.__notes__ == [raised.value.next_step]
    source = ROOT / "tests" / "runs" / "server-died"
    for name in ("requests.jsonl", "processes.jsonl"):
        (tmp_path / name).write_bytes(gzip.decompress((source / f"{name}.gz").read_bytes()))
    (tmp_path / "run.json").write_bytes((source / "run.json").read_bytes())
    with pytest.raises(RunError):
        compare(BEFORE, tmp_path)
