"""The commands use what they are given."""

import ast

import pytest

from harness.base.files import ROOT

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
