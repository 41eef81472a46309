"""The reasons that the source makes: the texts of the calls of `Reason` and `because`, with {} for each value."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache

from harness.base.files import ROOT

Variables = Mapping[str, list[ast.expr]]  # the expressions whose texts, one after the other, are that of a name
_MAKERS = ("Reason", "because")


def templates(node: ast.expr | None, variables: Variables | None = None) -> Iterator[str]:
    """The texts that an expression may give, with {} for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left = list(templates(node.left, variables)) or ["{}"]
        right = list(templates(node.right, variables)) or ["{}"]
        yield from (one + other for one in left for other in right)
    elif isinstance(node, ast.IfExp):
        yield from templates(node.body, variables)
        yield from templates(node.orelse, variables)
    elif isinstance(node, ast.Name) and variables is not None and node.id in variables:
        first, *more = variables[node.id]
        yield from (text + "".join(next(templates(part), "{}") for part in more) for text in templates(first))


@cache
def reasons_in_source() -> dict[str, list[str]]:
    """By code, in alphabetical order."""
    found = defaultdict[str, set[str]](set)
    for path in sorted((ROOT / "harness").rglob("*.py")):
        for variables, call in _calls(ast.parse(path.read_text()), {}):
            codes, texts = (list(templates(argument, variables)) for argument in [*call.args, None, None][:2])
            for code in (code for code in codes if "{}" not in code):
                found[code] |= {" ".join(text.split()) for text in texts or ["{}"] * (len(call.args) > 1)}
    return {code: sorted(found[code]) for code in sorted(found)}


def _calls(
    scope: ast.AST, variables: dict[str, list[ast.expr]]
) -> Iterator[tuple[dict[str, list[ast.expr]], ast.Call]]:
    """Yield the calls that make a reason, in the order of the source, each with the variables of that place."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef):
            yield from _calls(node, dict(variables))
            continue
        yield from _calls(node, variables)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            variables[node.targets[0].id] = [node.value]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            variables[node.target.id] = [*variables.get(node.target.id, []), node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _MAKERS and node.args:
            yield dict(variables), node
