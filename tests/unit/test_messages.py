"""What the product says, in one file: a changed wording is one visible difference of tests/golden/messages.txt.

`python -m tests.unit.test_messages` writes the file anew. It has no places and no values: {} is where a value comes.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml

from harness.base.files import ROOT
from harness.failures.table import rules
from harness.scenario import contradictions, shape
from tests.support.reasons_in_source import reasons_in_source, templates

GOLDEN = ROOT / "tests" / "golden" / "messages.txt"
ERRORS = (
    "HarnessError", "ServerError", "StartError", "RunError", "ScenarioError", "UnlikeError", "CheckError", "Problem",
    "error_at",
    "problem",
)  # fmt: skip


def is_message(text: str) -> bool:
    """Whether a text is a sentence or part of one, and not a name."""
    return " " in text.strip() and any(letter.isalpha() for letter in text.replace("{}", ""))


def of_errors() -> Iterator[str]:
    """What errors say and advise: the texts of all calls that make one."""
    for path in sorted((ROOT / "harness").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ERRORS:
                for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                    yield from filter(is_message, templates(argument))
    for function in (contradictions._rules, contradictions._rules_of_arrivals, contradictions._rules_of_load):
        yield from of_function(function)
    yield from of_function(shape._mistakes_of)


def of_function(function: Callable[..., object]) -> Iterator[str]:
    """The texts of which a function makes its sentence."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    docstring = ast.get_docstring(made, clean=False) if isinstance(made, ast.FunctionDef) else None
    inside: set[int] = set()  # parts of an f-string belong to it
    for node in ast.walk(made):
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in inside:
            inside |= {id(below) for below in ast.walk(node)}
            found = list(templates(node)) if isinstance(node, ast.expr) else []
            yield from filter(is_message, (text for text in found if text != docstring))


def of_reasons() -> Iterator[str]:
    """Each code of a reason, a note or evidence with its sentence."""
    for code, texts in reasons_in_source().items():
        yield from (f"{code}: {text}" for text in texts)


def of_failures() -> Iterator[str]:
    """Each known failure with its cause and its fix."""
    for rule in sorted(rules(), key=lambda rule: rule.id):
        yield f"{rule.id}: {rule.cause}"
        yield from (
            f"{rule.id}: fix{'' if server == 'any' else f' for {server}'}: {fix}" for server, fix in rule.fixes.items()
        )


def of_doctor() -> Iterator[str]:
    """Each finding of the doctor with what it looks at and its fixes."""
    (path,) = (ROOT / "harness" / "machine").rglob("findings.yaml")
    for row in yaml.safe_load(path.read_text()):
        yield f"{row['id']}: {row['looks_at']}"
        fixes = row.get("fix") or {}
        for key, fix in (fixes if isinstance(fixes, dict) else {"fix": fixes}).items():
            yield f"{row['id']}: {key}: {fix}"


def section(title: str, texts: Iterable[Any]) -> str:
    lines = [" ".join(str(text).split()) for text in texts]
    return "\n".join([f"# {title}", "", *lines, ""])


def messages() -> str:
    """The golden file."""
    return "\n".join(
        [
            section("Reasons, notes and evidence", of_reasons()),
            section("Known failures", of_failures()),
            section("Findings of the doctor", of_doctor()),
            section("Errors and what to do next", sorted({" ".join(text.split()) for text in of_errors()})),
        ]
    )


def test_what_the_product_says_is_in_the_golden_file() -> None:
    assert messages().splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    GOLDEN.write_text(messages(), encoding="utf-8")
