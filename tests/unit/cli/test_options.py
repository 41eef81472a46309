"""The commands use what they are given."""

import ast
from pathlib import Path

import certifi
import pytest
from typer.main import get_command

from harness.base.errors import HarnessError
from harness.base.files import ROOT
from harness.cli import app
from harness.cli.common import find_run, find_runs
from harness.records.directory import slug
from tests.support.command import called
from tests.support.made_runs import write_made_run

COMMANDS = [
    node
    for path in sorted((ROOT / "harness" / "cli").glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and "cli.command(" in "".join(map(ast.unparse, node.decorator_list))
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_uses_every_option_that_it_has(command: ast.FunctionDef) -> None:
    used = {node.id for line in command.body for node in ast.walk(line) if isinstance(node, ast.Name)}
    assert {argument.arg for argument in command.args.args} - used == set()


@pytest.mark.parametrize(
    "words",
    [
        ["quick", "http://h"], ["quick", "h:8000", "--prompt", "512"], ["quick", "--base-url", "http://h"], ["quick"],
        ["capacity", "--url", "http://h"], ["run", "--url", "h"],
    ],
)  # fmt: skip
def test_an_authority_is_refused_for_an_address_without_tls(tmp_path: Path, words: list[str]) -> None:
    done = called(*words, "--ca", certifi.where(), cwd=tmp_path)
    assert done.code == 1 and done.err.startswith("error: --ca: is for a server that already runs behind TLS\n")


@pytest.mark.parametrize("words", [["https://h"], ["--target", "HTTPS://h"], ["https://h", "--url", "https://h/"]])
def test_an_authority_is_taken_for_every_https_address(words: list[str]) -> None:
    get_command(app).commands["quick"].make_context("quick", [*words, "--ca", "ca.pem"])  # type: ignore[attr-defined]


def test_a_run_is_found_by_the_name_of_its_scenario(tmp_path: Path) -> None:
    """The id has it in lower case, without other characters, and short; other scenarios may have the same part."""
    names = ["my_chat", "My-Chat", "my_chat", "a-name-of-more-than-forty-characters-one", "x"]
    names += [f"a-name-of-more-than-forty-characters-{end}" for end in ("one-and-more", "two")]
    ids = [f"20270115-08000{place}-{slug(name)}-abcd" for place, name in enumerate(names)]
    for name, run in zip(names, ids, strict=True):
        write_made_run(tmp_path / run, id=run, scenario_name=name)
    assert find_run(Path("my_chat"), tmp_path).name == ids[2]
    assert find_run(Path("My-Chat"), tmp_path).name == ids[1]
    assert [folder.name for folder in find_runs(Path("my_chat:2"), tmp_path)] == [ids[0], ids[2]]
    assert find_run(Path(names[5]), tmp_path).name == ids[5]
    assert find_run(Path("my-chat"), tmp_path).name == ids[2], "what the id has is a name, too"
    for absent in ("MY_CHAT", "elsewhere/x"):
        with pytest.raises(HarnessError, match="neither a run directory"):
            find_run(Path(absent), tmp_path)
    (tmp_path / ids[2] / "run.json").write_text("{")
    assert find_run(Path("my_chat"), tmp_path).name == ids[2], "its reader says what is wrong with it"
