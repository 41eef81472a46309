"""Exports hold what the records hold, and other programs read them."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.numbers import formulas
from harness.numbers.summarize import summarize
from harness.numbers.time_split import TimeSplit
from harness.questions.results import add_result
from harness.records.manifest import read_run
from harness.records.records import Request, read_requests
from harness.report import export
from tests.support.command import called
from tests.support.made_runs import MONOTONIC_S, WALL_S, request, scenario, value_of, write_lines, write_made_run
from tests.support.wording import Wording

SLOS = "ttft<=1s, tpot<=50ms"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "made"
    checks = [f"goodput({SLOS}) >= 0.5", "error_rate == 0", "wall <= 1 ms"]
    write_made_run(folder, lambda cell: 10.0 + 0.01 * cell.repeat, made_of=scenario(checks=checks))
    return folder


def test_parquet_holds_every_record(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "BATCH", 7)
    records = list(read_requests(run / "requests.jsonl"))
    assert export.export(run, tmp_path / "r.parquet") == (len(records), 0)
    file = pyarrow.parquet.ParquetFile(tmp_path / "r.parquet")
    assert file.num_row_groups == -(-len(records) // 7), "written batch by batch"
    table = file.read()
    assert table.column_names == list(export.record_columns())
    assert str(table.schema.field("chunks_s").type) == "list<element: double>"
    assert export.arrow_table(run).equals(table)
    rows = table.to_pylist()
    fields = [name for name in Request.__struct_fields__ if name != "bad_fields"]
    assert {row["bad_fields"] for row in rows} == {None}
    assert [{name: row[name] for name in fields} for row in rows] == [
        {name: getattr(record, name) for name in fields} for record in records
    ]
    for row, record in zip(rows, records, strict=True):
        assert (row["run"], row["server"], row["repeat"]) == ("made", record.cell[3], int(record.cell[1]))
        derived = tuple(value_of(formula, record) for formula in (formulas.ttft, formulas.tpot, formulas.e2e))
        assert (row["ttft"], row["tpot"], row["e2e"]) == derived
        assert row["sent_wall_s"] == pytest.approx(WALL_S + record.sent_s - MONOTONIC_S)


def test_csv_holds_every_record(run: Path, tmp_path: Path) -> None:
    failed = request(id="bad", error="timeout", chunks_s=[], output_tokens=None, message='said "no",\nthen nothing')
    unexpected = request(id="odd", cell="other", message='=HYPERLINK("http://x")')
    write_lines(run / "requests.jsonl", [request(), failed, unexpected])
    with (run / "requests.jsonl").open("ab") as file:
        file.write(b'{"id": "torn')
    assert export.export(run, tmp_path / "r.csv") == (3, 1)
    with (tmp_path / "r.csv").open(newline="") as text:
        good, bad, odd = csv.DictReader(text)
    assert list(good) == list(export.record_columns())
    assert json.loads(good["chunks_s"]) == request().chunks_s
    assert (good["server"], good["ttft"], good["fixed_length"], good["error"]) == ("a", "0.5", "1", "")
    assert (bad["message"], bad["chunks_s"], bad["ttft"], bad["output_tokens"]) == (failed.message, "[]", "", "")
    assert (odd["server"], odd["repeat"], odd["cell"], odd["sent_wall_s"]) == ("", "", "other", "")
    assert odd["message"].startswith("'="), "no formula"


def test_what_cannot_be_exported(run: Path, tmp_path: Path, wording: Wording) -> None:
    """Another ending, Parquet without its package, and a run whose records are elsewhere or lost."""
    with pytest.raises(HarnessError) as raised:
        export.export(run, tmp_path / "r.xlsx")
    assert "--to" in raised.value.what
    wording(raised.value)
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from harness.cli import main; sys.argv = ['harness', 'export', sys.argv[1], '--to', sys.argv[2]]; main()"
    )
    command = [sys.executable, "-c", code, str(run)]
    done = subprocess.run([*command, str(tmp_path / "r.parquet")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, list(tmp_path.glob("r.*"))) == (1, "", [])
    assert "amd-llm-load[parquet]" in done.stderr
    wording(done.stderr)
    for records, advice in (
        (False, "files records only with --records"),
        (True, "gunzip --keep "),
    ):
        target, _ = add_result(run, tmp_path / "results", records=records)
        with pytest.raises(HarnessError) as raised:
            export.export(target, tmp_path / "r.csv")
        wording(raised.value)
        assert advice in raised.value.next_step


def test_the_command(run: Path, tmp_path: Path, wording: Wording) -> None:
    assert called("export", "made", "--to", "r.parquet", cwd=tmp_path) == (0, "r.parquet: 50 records\n", "")
    (run / "requests.jsonl").write_bytes(b'{"torn')
    done = called("export", "made", "--to", "r.csv", cwd=tmp_path)
    assert done[0] == 0
    wording(list(done[1:]))


@pytest.mark.parametrize("name", ["records.csv", "records.parquet", "vllm-bench.json"])
def test_a_target_that_cannot_be_written(name: str, run: Path, tmp_path: Path, wording: Wording) -> None:
    """A folder that is not there, a folder in its place, and a file that is replaced."""
    (tmp_path / "folder" / name).mkdir(parents=True)
    row = ("--row", "a/x") if name.endswith("json") else ()
    refused = [called("export", "made", "--to", f"nodir/{name}", *row, cwd=tmp_path)]
    if not row:  # a run of several cells has several files
        refused.append(called("export", "made", "--to", f"folder/{name}", cwd=tmp_path))
    for done in refused:
        assert done.code == 1 and ".new" not in done.err and "\nnext: " in done.err
    wording([done.err for done in refused])
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [name], "nothing is left"


def test_a_file_that_is_there_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("old")
    assert called("export", "made", "--to", "r.csv", cwd=tmp_path).code == 0
    assert (tmp_path / "r.csv").read_text().startswith("run,")


def test_rows_as_csv_and_where_the_time_goes(run: Path) -> None:
    summary, manifest = summarize(run), read_run(run)
    split = TimeSplit(connect_s=0.001, queue_s=0.25, prefill_s=0.125, decode_s=0.5, api_s=0.0625, e2e_s=0.9375)
    summary = replace(summary, rows=[replace(summary.rows[0], time=split, limited_by="queue"), summary.rows[1]])
    row = summary.rows[0].pooled
    first, second = csv.DictReader(export.csv_table(summary, manifest).splitlines())
    assert float(first["ttft_p50"]) == row.ttft.p50
    assert float(first["gap_mean"]) == row.gap.mean
    assert (first["error_rate"], first["ttft_p99"], first[f"attainment({SLOS})"]) == ("0.0", "", "0.0")
    assert (first["baseline"], second["baseline"], first["speedup"]) == ("1", "0", "")
    assert summary.comparison is not None and second["verdict"] == summary.comparison.verdicts[0].word
    names = ["api_mean_s", "queue_mean_s", "prefill_mean_s", "decode_mean_s", "limited_by"]
    assert [first[name] for name in names] == ["0.0625", "0.25", "0.125", "0.5", "queue"]
    assert {second[name] for name in names} == {""}
