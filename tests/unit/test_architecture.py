"""The import table: arrows go one way, and only the load room knows Locust and gevent."""

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutations import misplaced
from harness.base.files import ROOT
from harness.engines import engines
from harness.serve.template import GATEWAYS, templates

# Which other packages a package may import, besides base: the whole table, in the order of the arrows.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"api", "numbers", "questions"},
    "__version__": set(),
    "base": set(),
    "simulated": set(),
    "engines": set(),
    "scenario": {"engines"},
    "failures": {"engines"},
    "records": {"engines", "failures", "scenario"},
    "workload": {"records", "scenario"},
    "numbers": {"engines", "failures", "records", "scenario"},
    "machine": {"engines", "records"},
    "hardware": {"engines", "machine", "numbers", "records"},
    "report": {
        "__version__", "engines", "failures.diagnosis", "hardware.gpu_table", "numbers", "records", "scenario",
    },
    "imports": {"__version__", "numbers", "records", "scenario"},
    "load": {
        "__version__", "engines", "failures.unexpected_response", "numbers.formulas",
        "records.arrivals", "records.records", "records.columns", "scenario", "workload",
    },
    "serve": {
        "engines", "failures", "load.anthropic_api", "load.openai_api", "load.sse", "machine", "records", "scenario",
        "workload",
    },
    "run": {
        "__version__", "engines", "failures", "hardware", "load.live_metrics", "machine", "numbers", "records",
        "scenario", "serve", "workload",
    },
    "questions": {
        "engines", "failures", "hardware", "machine", "numbers", "records", "report", "run", "scenario",
        "serve", "workload",
    },
    "api": {"numbers", "questions", "records", "report", "scenario"},
    "cli": {
        "__version__", "engines", "failures", "hardware", "imports", "machine", "numbers", "questions", "records",
        "report", "run", "scenario", "serve",
    },
    "__main__": {"cli"},
}  # fmt: skip


# Which question may import which other one, and why.
BETWEEN: dict[tuple[str, str], str] = {
    ("compare", "crossover"): "from how many users on one side is faster",
    ("compare", "same_answers"): "runs may differ in their answers",
    ("crossover", "capacity"): "where two curves cross is a level",
    ("findings", "capacity"): "a level that is not held is no finding",
    ("history", "compare"): "each run is compared with the earlier ones",
    ("quick", "findings"): "its page says why it is slow",
    ("results", "compare"): "runs are ranked by their verdicts",
    ("shipped", "check"): "how long a scenario takes",
    ("tune", "capacity"): "the goal may be the users that are held",
    ("tune", "findings"): "a finding says what to try next",
    ("tune", "same_answers"): "settings may change the answers",
    # The page of a run has the answers of all of them; the joint adds them to a summary.
    **{("report", name): "its page" for name in (
        "agents", "bisect", "capacity", "compare", "crossover", "findings", "isolation", "joint", "mlperf_edge",
        "quick", "same_answers", "soak", "startup", "tune")},
    **{("joint", name): "its answer" for name in (
        "agents", "crossover", "findings", "mlperf_edge", "same_answers", "soak", "startup", "switching")},
    ("results", "joint"): "a filed run has all answers",
    ("results", "report"): "a filed run has its page",
    ("results", "startup"): "a card has the time until ready",
}  # fmt: skip
SHARED_NAMES = {
    "__init__",
    "__main__",
    "command",
    "search",
    "decide",
    "record",
    "page",
    "chart",
}  # a part that every room may have


LOCUSTFILES = sorted((ROOT / "locustfiles").glob("*.py"))
MAX_LINES = 60  # of a function, without its decorators


def modules() -> list[Path]:
    return sorted((ROOT / "harness").rglob("*.py"))


def room(path: Path) -> str:
    """The package of a module. The command of a question is part of the command line, which alone imports it."""
    parts = path.relative_to(ROOT / "harness").with_suffix("").parts
    return "cli" if parts[-1] == "command" else parts[0]


class Source(NamedTuple):
    """What the tests look at in a module."""

    imports: set[str]
    classes: list[str]
    texts: list[str]  # that the program uses: no docstrings, no names of modules
    long: list[str]  # functions
    names: set[str]  # that it gives: of functions, parameters, variables and fields
    aligned: bool  # whether it pads a text to a width


def is_padded(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("ljust", "rjust", "center")
    spec = node.format_spec if isinstance(node, ast.FormattedValue) else None
    first = spec.values[0] if isinstance(spec, ast.JoinedStr) and spec.values else None
    return isinstance(first, ast.Constant) and str(first.value)[:1] in ("<", ">", "^")


def given_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return None


@cache
def source(path: Path) -> Source:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = Source(set(), [], [], [], set(filter(None, map(given_name, nodes))), any(map(is_padded, nodes)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (node.end_lineno or 0) - node.lineno >= MAX_LINES:
                found.long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.texts.append(node.value)
    return found


def test_imports_follow_the_table() -> None:
    for path in modules():
        names, here = source(path).imports, room(path)
        if here != "load":
            assert not {name for name in names if name.split(".")[0] in ("locust", "gevent")}, path
        own = {tuple(name.split(".")[1:3]) for name in names if name.startswith("harness.")}
        allowed = ALLOWED[here] | {"base", here}
        assert {".".join(name) for name in own if not {name[0], ".".join(name)} & allowed} == set(), path


def test_what_reads_the_answers_of_a_probe_needs_no_gevent() -> None:
    """A probe's answer is read as the load generator reads it, but without its event loop."""
    found = {name.partition(".")[2] for name in ALLOWED["serve"] if name.startswith("load.")}
    todo = sorted(found)
    while todo:
        names = source(ROOT / "harness" / "load" / f"{todo.pop()}.py").imports
        assert not {name for name in names if name.split(".")[0] in ("locust", "gevent")}
        new = {name.split(".")[2] for name in names if name.startswith("harness.load.")} - found
        found |= new
        todo += sorted(new)
    assert "sse" in found


def question(name: str) -> str:
    """The room of a module below harness.questions."""
    return name.split(".")[2]


def test_arrows_between_questions_have_a_reason() -> None:
    found = set()
    for path in modules():
        if room(path) == "questions":  # without their commands
            here = path.relative_to(ROOT / "harness" / "questions").with_suffix("").parts[0]
            names = {name for name in source(path).imports if name.startswith("harness.questions.")}
            found |= {(here, question(name)) for name in names if question(name) != here}
    assert found == set(BETWEEN)
    TopologicalSorter({here: {other for one, other in BETWEEN if one == here} for here, _ in BETWEEN}).prepare()


# What reads or writes something outside the program: modules, and the beginnings of names of our own functions.
DOES_IO = {"os", "io", "pathlib", "shutil", "subprocess", "tempfile", "requests", "socket", "rich"}
FUNCTIONS_OF_IO = re.compile(r"(read|write|replace|list|open|store|append|fetch)(_|$)|(load|summary_of|find_model)$")
PURE = {
    "pathlib.PurePath": "it joins names",
    "harness.engines.settings.read_setting": "of a server's variables",
    "harness.base.files.DOCS": "an address",
}


def does_io(name: str) -> bool:
    """Whether an imported name may touch files, processes or the network."""
    first, *others = name.split(".")
    if name in PURE or first != "harness":
        return name not in PURE and first in DOES_IO
    is_of_io = others[:2] in (["base", "files"], ["base", "process"], ["base", "https"], ["records", "directory"])
    is_module = (ROOT.joinpath(*name.split("."))).with_suffix(".py").exists()
    is_starting = others[0] in ("run", "serve", "load")
    return is_of_io or is_starting or (not is_module and bool(FUNCTIONS_OF_IO.match(others[-1])))


def test_what_decides_is_pure() -> None:
    """A `decide.py` gets what was read: it can be run on made data, and read without a thought of files."""
    found = {
        str(path.relative_to(ROOT)): sorted(filter(does_io, source(path).imports))
        for path in modules()
        if path.stem == "decide"
    }
    assert {path: names for path, names in found.items() if names} == {}
    for path in found:
        called = {node.func.attr for node in ast.walk(ast.parse((ROOT / path).read_text()))
                  if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}  # fmt: skip
        assert not called & {"open", "exists", "glob", "iterdir", "read_text", "read_bytes", "write_text"}, path


def test_a_file_name_says_what_is_in_it() -> None:
    names = Counter(path.stem for path in modules())
    assert {name for name, times in names.items() if times > 1} <= SHARED_NAMES


def test_the_arrows_go_one_way() -> None:
    TopologicalSorter(
        {here: {name.split(".")[0] for name in others} | ({"base"} - {here}) for here, others in ALLOWED.items()}
    ).prepare()


def test_a_newcomer_can_name_the_parts() -> None:
    assert len(ALLOWED) - 1 <= 20  # `__version__` is in `__init__`
    assert {room(path) for path in modules()} == set(ALLOWED) - {"__version__"}


def test_the_locustfiles_see_the_load_room_and_what_it_sees() -> None:
    for path in LOCUSTFILES:
        own = {name for name in source(path).imports if name.startswith("harness")}
        assert all(name.split(".")[1] in ALLOWED["load"] | {"base", "load", "numbers"} for name in own), path


def test_the_load_room_names_all_its_modules() -> None:
    here = ROOT / "harness" / "load"
    named = re.findall(r"^([a-z_]+\.py)\b", (here / "__init__.py").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in here.glob("*.py") if path.name != "__init__.py")


def test_the_first_file_of_a_question_names_all_its_modules() -> None:
    for folder in {path.parent for path in (ROOT / "harness" / "questions").glob("*/*.py")}:
        named = set(re.findall(r"\b([a-z_]+\.py)\b", (folder / "__init__.py").read_text().replace("numbers/", "/")))
        assert {path.name for path in folder.glob("*.py")} - {"__init__.py"} <= named, folder


def test_class_names_are_unique() -> None:
    names = Counter(name for path in [*modules(), *LOCUSTFILES] for name in source(path).classes)
    assert [name for name, times in names.items() if times > 1] == []


# Where a server type may be named in the program's own texts and names, and why.
NAMED_IN = {
    "engines": "the facts of each",
    "serve/lemonade.py": "what only Lemonade needs",
    "serve/lint.py": "flags of vLLM, also behind Lemonade, and their checks",
    "machine/memory.py": "what vLLM makes of a GPU's memory",
    "hardware/geometry.py": "names of architectures",
    "hardware/gguf_geometry.py": "the same",
    "hardware/fit.py": "the same",
    "machine/inspection.py": "the same",
    "run/machine_fit.py": "the same",
    "run/model_files.py": "where their images keep models",
    "questions/expect/command.py": "the same",
    "questions/mlperf_edge.py": "the engine of the reference, and its flags",
    "failures/table.py": "flags that vLLM removed",
    "imports": "formats of other tools",
    "report/export.py": "the same",
    "report/vllm_bench.py": "the same",
    "cli/stored.py": "the same",
    "simulated": "the embedded engine answers as vLLM does",
}
NO_NAMES = ("openai", "simulated")  # an API, and our own engine
TYPES = [re.escape(engine.name) for engine in engines() if engine.name not in NO_NAMES]
SERVERS = re.compile("|".join(["llama", "local-ai", *TYPES]), re.IGNORECASE)


def test_a_server_type_is_named_in_its_file_and_nowhere_else() -> None:
    named = {
        str(path.relative_to(ROOT / "harness")) for path in modules() if any(map(SERVERS.search, source(path).texts))
    }
    allowed = {path: next((at for at in NAMED_IN if path == at or path.startswith(f"{at}/")), None) for path in named}
    assert [path for path, at in allowed.items() if at is None] == []
    assert set(allowed.values()) == set(NAMED_IN) - {"engines"}, "an exception that nothing needs"


def test_each_template_belongs_to_one_server_type() -> None:
    owned = [template for engine in engines() for template in engine.templates]
    assert sorted(owned) == sorted([*templates(), *GATEWAYS])
    assert len({engine.name for engine in engines()}) == len({engine.place for engine in engines()}) == len(engines())


# What lays out text for a terminal, and why. All else is a page: a list of elements that harness/report/ prints.
LAYS_OUT = {
    "report": "it prints elements",
    "cli/common.py": "the console to which it prints them",
    "run/progress.py": "what a run does at the moment, rewritten in place",
    "questions/report/page.py": "the address of the page, which is never broken",
    "load/live_outputs.py": "the table next to Locust's own in its log, in the process of Locust and in its format",
    "load/sequencer.py": "lines of one length in a file of counters",
}


def test_a_page_is_a_list_of_elements() -> None:
    """No other module has a layout of its own: rich's tables, panels and styles, or columns made of padded texts."""
    found = {
        str(path.relative_to(ROOT / "harness"))
        for path in modules()
        if source(path).aligned or any(name.split(".")[0] == "rich" for name in source(path).imports)
    }
    assert {next((at for at in LAYS_OUT if path == at or path.startswith(f"{at}/")), path) for path in found} == set(
        LAYS_OUT
    )


def test_no_function_is_long() -> None:
    assert [name for path in [*modules(), *LOCUSTFILES] for name in source(path).long] == []


# A name is the noun of what it holds: a row, a cell, a request. These words are no nouns.
NO_NOUNS = {"again", "each", "found", "known", "made", "one"}
KEYS = {  # of scenarios, run directories and the class of a user, which have these names
    "load/sequencer.py": {"again"},
    "load/user.py": {"again"},
    "numbers/summary.py": {"again"},
    "records/manifest.py": {"again"},
    "records/records.py": {"again"},
    "scenario/behaviour.py": {"known"},
    "scenario/plan.py": {"again"},
}


def test_a_name_is_a_noun() -> None:
    given = {
        str(path.relative_to(ROOT / "harness")): {name for name in source(path).names if name.strip("_") in NO_NOUNS}
        for path in modules()
    }
    assert {path: names for path, names in given.items() if names} == KEYS
    assert not any(source(path).names & NO_NOUNS for path in LOCUSTFILES)


def test_every_seeded_defect_has_its_place() -> None:
    assert list(misplaced()) == []
