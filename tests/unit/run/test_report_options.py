"""The options of a run that a resumed run has as well."""

import os
from pathlib import Path

import msgspec
import pytest

from harness.base.errors import HarnessError
from harness.cli.report_options import ReportOptions
from harness.records.directory import INPUTS, report_options, work_options
from harness.records.manifest import Run
from harness.report.junit import Case, document, error_xml, join
from tests.support.made_runs import write_made_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_made_run(tmp_path / "runs" / "one")


def resumed(folder: Path, first: ReportOptions, given: ReportOptions) -> tuple[ReportOptions, list[str]]:
    notes: list[str] = []
    kept = {"--duration": "8s", **first.kept(folder.parent)}
    (folder / INPUTS).write_bytes(msgspec.json.encode({"options": kept}))
    return given.with_earlier(folder, notes.append), notes


def test_options_of_the_first_start_apply_unless_others_are_given(tmp_path: Path, run: Run) -> None:
    folder, base = tmp_path / "runs" / "one", tmp_path / "runs" / "base"
    write_made_run(base)
    first = ReportOptions("5%", True, Path("base"), "image", tmp_path / "j.xml", tmp_path / "m.md")
    again, notes = resumed(folder, first, ReportOptions())
    assert (again.share, again.provisional, again.baseline, again.about) == (0.05, True, base.resolve(), "image")
    assert (again.junit, again.markdown, notes) == (first.junit, first.markdown, [])
    again, _ = resumed(folder, first, ReportOptions("10%", junit=Path("other.xml")))
    assert (again.share, again.junit, again.markdown) == (0.1, Path("other.xml"), first.markdown)
    assert resumed(folder, ReportOptions(), ReportOptions()) == (ReportOptions(), [])
    inputs = msgspec.json.decode((folder / INPUTS).read_bytes())
    assert (report_options(inputs), work_options(inputs)) == ({}, {"--duration": "8s"})
    with pytest.raises(HarnessError):
        ReportOptions("1%").kept(folder.parent)


def test_a_file_of_another_run_is_left_alone(tmp_path: Path, run: Run) -> None:
    folder, path = tmp_path / "runs" / "one", tmp_path / "j.xml"
    case, mine = Case(group="validity", name="n", evidence="e"), {"run": run.id}
    ended = error_xml(run.scenario_name, HarnessError("the run did not end"))
    own = [ended, document(run.scenario_name, [case], mine)]
    others = [
        "",
        "text",
        error_xml("else", HarnessError("it failed")),
        document(run.scenario_name, [case], {"run": "b"}),
    ]
    for text in (*own, *others, join([own[1], own[1]])):
        path.write_text(text)
        again, notes = resumed(folder, ReportOptions(junit=path), ReportOptions())
        assert (again.junit is not None, len(notes)) == (text in own, text not in own)
    again, notes = resumed(folder, ReportOptions(markdown=tmp_path / "gone" / "m.md"), ReportOptions())
    assert (again.markdown, len(notes)) == (None, 1) and "--markdown" in notes[0]


def test_a_pipe_and_the_file_of_a_series_are_not_kept(tmp_path: Path, run: Run) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert ReportOptions(junit=tmp_path / "pipe", markdown=Path("/dev/stdout")).kept(tmp_path) == {}
    assert ReportOptions(junit=tmp_path / "j.xml").kept(tmp_path, is_series=True) == {}
