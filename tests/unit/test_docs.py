"""The pages say what the program does: every command, option, exit code, key, field, variable, metric and fault."""

import re
import typing
from pathlib import Path

import msgspec
import pytest
import typer

from harness import __version__
from harness.base.errors import ExitCode
from harness.base.files import ROOT, SCENARIOS
from harness.cli import app
from harness.cli.actions import check
from harness.cli.common import COMMANDS as ORDER
from harness.records.manifest import Status, read_run
from harness.records.records import ErrorKind, Request
from harness.scenario.file import load_scenario
from tests.support import faults
from tests.support.command import called, harness, write
from tests.support.made_docs import MADE, made

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(text: str) -> set[str]:
    """Everything between backticks, also when it stands in a code block of commands."""
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_version_is_that_of_the_newest_changes() -> None:
    newest = re.search(r"^## (\S+) \((.+)\)$", page("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert __version__ == (f"{newest[1]}.dev0" if newest[2] == "unreleased" else newest[1])


def test_every_command_is_in_the_readme() -> None:
    named = set(re.findall(r"`harness ([a-z]+)", page("README.md")))
    assert set(COMMANDS) == named


def test_every_command_is_in_the_help_and_every_option_is_explained(tmp_path: Path) -> None:
    assert sorted(COMMANDS) == sorted(name for names in ORDER.values() for name in names)
    for name, command in COMMANDS.items():
        assert [parameter.name for parameter in command.params if not parameter.help] == [], name
        shown = called(name, "--help", cwd=tmp_path).out
        assert not re.search(r"<(?:str|int|float|path|list|Path)\b|[{}]|\[\[", shown), "names instead of Python types"


def test_every_exit_code_is_in_the_readme_and_in_help(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \|$", page("README.md"), re.MULTILINE)
    assert [int(row) for row in rows] == [code.value for code in ExitCode]
    shown = " ".join(called("--help", cwd=tmp_path).out.split())
    said = shown.partition("Exit codes: ")[2].partition(".")[0].split("; ")
    assert [int(one.split()[0]) for one in said] == [code.value for code in ExitCode]


def test_every_field_of_a_record_and_every_status_is_documented() -> None:
    section = page("docs/fields.md").split("## requests.jsonl")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert set(rows) == {field.name for field in msgspec.structs.fields(Request)}
    assert set(typing.get_args(ErrorKind)) <= code(page("docs/fields.md").split("## requests.jsonl")[0])
    assert set(typing.get_args(Status)) <= code(page("docs/run-directory.md"))


@pytest.mark.parametrize("path", MADE)
def test_the_tables_of_the_pages_are_up_to_date(path: str) -> None:
    assert page(path) == made(path), "python -m tests.support.made_docs"
    assert all(f"<!-- {name} -->" in page(path) for name in MADE[path])


def test_the_table_of_the_readme_is_that_of_the_example_run() -> None:
    assert "| no-limit | one-at-a-time |" in page("README.md")
    example = read_run(ROOT / "docs" / "example")
    assert (example.status, example.scenario_name, example.simulated) == ("valid", "first-look", True)
    assert example.scenario == load_scenario(ROOT / "scenarios" / "first-look.yaml")


def test_the_locustfile_of_the_page_works(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", page("docs/users.md"), re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    write(tmp_path, loads={"mine": {"user": "mine.py", "requests": 4, "output_tokens": 3}})
    done = harness("run", "small.yaml", "--runs", "runs", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")


def test_the_scenario_of_the_page_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", page("docs/scenarios.md"), re.DOTALL)
    (tmp_path / "s.yaml").write_text(block)
    assert load_scenario(tmp_path / "s.yaml").repeats == 5


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_that_ships_is_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(path)
    shown = capsys.readouterr()
    assert (shown.out.splitlines()[0], shown.err) == (f"{path}: valid", "")
    assert "note: with" not in shown.out, "its repeats can decide"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name) if name else path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_one_of_four_groups() -> None:
    groups = re.findall(r"^- \*\*(.+?)\*\*(.*?)(?=^- |\Z)", page("docs/README.md"), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in groups] == ["Tutorials", "How-to guides", "Reference", "Explanation"]
    linked = {name for _, links in groups for name in re.findall(r"\(([a-z-]+)\.md[)#]", links)}
    assert linked | {"README"} == {path.stem for path in (ROOT / "docs").glob("*.md")}


def test_paths_that_the_pages_name_exist() -> None:
    for path in PAGES:
        for name in code(path.read_text(encoding="utf-8")):
            if re.fullmatch(r"(harness|docs|scenarios|locustfiles|compose|tests)/[a-z0-9_./-]*[a-z0-9]", name):
                assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_the_page_of_faults_is_made_from_the_tests() -> None:
    assert (ROOT / "docs" / "reliability.md").read_text() == faults.page()
    assert len(faults.rows()) >= 60
    assert {row.area for row in faults.rows()} == set(faults.AREAS)


def test_every_promise_of_the_security_page_names_a_test_that_there_is() -> None:
    promises = [line for line in page("SECURITY.md").splitlines() if "::" in line]
    named = [name for line in promises for name in re.findall(r"`([\w/]+\.py)::(\w+)`", line)]
    assert len(promises) >= 15
    for file, name in named:
        assert any(f"def {name}(" in path.read_text() for path in (ROOT / "tests").rglob(file)), f"{file}::{name}"
