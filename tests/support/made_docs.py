"""`python -m tests.support.made_docs` writes what pages say of the program: the parts between marks.

A mark is a comment such as `<!-- servers -->`, and `<!-- /servers -->` at the end of the part.
"""

import inspect
import json
import re
from typing import Any

import msgspec
import typer

from harness.base.files import ROOT, SCENARIO_SCHEMA
from harness.base.metrics import LATENCIES, VALUES
from harness.cli import app
from harness.cli.common import COMMANDS
from harness.engines import engines, find_template
from harness.engines.settings import protected_flags
from harness.failures.table import Rule, removed_flags, removed_variables, rules
from harness.machine.findings import TOPICS, finding_kinds
from harness.machine.gpus import STANDING_LABELS, read_gfx_table, support_columns
from harness.numbers.summarize import read_summary
from harness.questions.findings.decide import RULES
from harness.questions.shipped import FACTS, look_at_scenarios
from harness.records.manifest import read_run
from harness.report import markdown
from harness.report.elements import Grid
from harness.report.results_table import results_table
from harness.serve.template import GATEWAYS, HARNESS_VARIABLES, Variable, format_limits, read_variables, templates
from tests.support.field_docs import error_kinds_table, fields_tables
from tests.support.reasons_in_source import reasons_in_source
from tests.support.scenario_keys import keys_tables
from tests.support.scenario_schema import schema_text

LOCUST = "Not a server: what `harness compose` puts in front of one, Locust's web UI."
COLUMNS = "| variable | type | default | meaning |\n|---|---|---|---|\n"


def servers_tables() -> str:
    """The variables of each template."""
    parts = []
    for name in (*templates(), *GATEWAYS, "locust"):
        known = find_template(name)
        introduction = LOCUST if known is None else known.introduction
        parts.append(f"\n## {name}\n{introduction}\n\n{COLUMNS}")
        parts += [_row(key, value) for key, value in read_variables(name).items() if key not in HARNESS_VARIABLES]
    return "".join(parts)


def _row(name: str, variable: Variable) -> str:
    default = "required" if variable.required else f"`{_shown(variable.default)}`"
    allowed = f": {', '.join(variable.choices)}" if variable.choices else f" {format_limits(variable)}".rstrip()
    allowed += ", or `auto`" if variable.auto else ""
    return table_row(f"`{name}`", variable.type + allowed, default, variable.doc)


def table_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def example_table() -> str:
    """The table of the committed example run."""
    example = ROOT / "docs" / "example"
    shown = ("server", "load", "wall", "rate", "ttft_p50", "speedup", "verdict")
    table = results_table(read_summary(example), read_run(example))
    places = [place for place, column in enumerate(table.columns) if column.key in shown]
    columns = [table.columns[place] for place in places]
    chosen = Grid(columns=columns, rows=[[row[place] for place in places] for row in table.rows])
    return f"\n{markdown.render([chosen])}\n"


def server_names() -> str:
    names = ", ".join(f"`{name}`" for engine in engines() if not engine.gateway for name in engine.templates)
    return f"{names}, and the gateway `{'`, `'.join(GATEWAYS)}` ([their variables](docs/servers.md)).\n"


def reasons_table() -> str:
    """Each reason code with its texts."""
    texts = {code: " / ".join(found).replace("{}", "…") for code, found in reasons_in_source().items()}
    rows = "".join(f"| `{code}` | {_cell(text)} |\n" for code, text in texts.items())
    return f"| code | sentence |\n|---|---|\n{rows}"


TITLES = {
    "docker": "The container cannot be made",
    "start": "The server does not start",
    "load": "It dies or fails under load",
    "http": "Requests fail",
    "exit": "How it ended",
    "warning": "Warnings",
    "wrapper": "Wrappers",
    "exception": "Anything else",
}
_SAMPLE_CHARS = 110


def failures_tables() -> str:
    """A section a kind, a row a rule."""
    parts = []
    for kind, title in TITLES.items():
        parts.append(f"\n## {title}\n| failure | for example | cause | fix |\n|---|---|---|---|\n")
        parts += [_failure_row(rule) for rule in rules() if _kind(rule) == kind]
    parts.append(
        "\n## Arguments that vLLM no longer knows\n| argument | gone in | instead | source |\n|---|---|---|---|\n"
    )
    parts += [
        f"| `{flag}` | {gone.gone_in or '?'} | {_cell(gone.instead)} | {gone.source} |\n"
        for flag, gone in removed_flags().items()
    ]
    parts.append("\n## Environment variables that vLLM no longer knows\n| variable | instead |\n|---|---|\n")
    parts += [f"| `{name}` | {_cell(instead)} |\n" for name, instead in removed_variables().items()]
    parts.append("\n## Arguments that Lemonade sets itself\n| argument | instead |\n|---|---|\n")
    parts += [f"| `{flag}` | {_cell(instead)} |\n" for flag, instead in protected_flags("vllm_args").items()]
    return "".join(parts)


def _kind(rule: Rule) -> str:
    if rule.severity in ("warning", "wrapper", "exception"):
        return rule.severity
    if rule.where in ("docker", "http", "exit"):
        return rule.where
    return "load" if rule.phase in ("load", "request") else "start"


def _failure_row(rule: Rule) -> str:
    sample = rule.samples[0]
    shown = sample if len(sample) <= _SAMPLE_CHARS else f"{sample[:_SAMPLE_CHARS]}..."
    marks = " (scenario)" if rule.scenario else ""
    source = re.sub(r"https://\S+[^\s;,]", r"<\g<0>>", rule.source)
    fix = "; ".join(text if server == "any" else f"*{server}*: {text}" for server, text in rule.fixes.items())
    return (
        f"| `{rule.id}`{marks} | <code>{_code(shown)}</code> | {_cell(_capitals(rule.cause))} "
        f"| {_cell(_capitals(fix))}. Source: {_cell(source)} |\n"
    )


def _capitals(text: str) -> str:
    text = re.sub(r"\{(?:gone|instead)\}", "", text)  # what the tables below say
    return re.sub(r"(?<!\$)\{([a-z]+)\}", lambda name: name[1].upper(), text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _code(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([`*_\[\]|~$\\])", r"\\\1", text)


def targets_table() -> str:
    """The support of each server for each GPU target, with its source."""
    columns, table = support_columns(), read_gfx_table()
    parts = [f"\nRead on {table.checked}.\n\n"]
    parts.append(table_row("target", "family", *(column.title for column in columns.values())))
    parts.append("|---" * (2 + len(columns)) + "|\n")
    for row in table.targets:
        standings = [STANDING_LABELS[row.standing(key)] for key in columns]
        parts.append(table_row(f"`{row.target}`", f"{row.family}; {row.architecture}", *standings))
    return "".join(parts) + "\n" + "".join(f"- {column.title}: {column.source}\n" for column in columns.values()) + "\n"


def rules_table() -> str:
    """Every finding about a run."""
    rows = []
    for rule in RULES:
        when = f"{rule.when}; {rule.requests} requests or more" if rule.requests else rule.when
        rows.append(table_row(f"`{rule.code}`", when, rule.means, rule.actions))
    return "".join(["\n", table_row("finding", "when", "meaning", "actions"), "|---|---|---|---|\n", *rows, "\n"])


def findings_tables() -> str:
    """Every finding of the doctor with its levels, its fix and its source, by topic."""
    parts = ["\n"]
    for topic, title in TOPICS.items():
        head = table_row("finding", "looks at", "levels", "fix", "source")
        parts.append(f"### {title}\n\n{head}|---|---|---|---|---|\n")
        for kind in finding_kinds().values():
            if kind.topic == topic:
                fixes = [kind.fix] if isinstance(kind.fix, str) else list(kind.fix.values())
                fix = re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), "<br>".join(fixes)) or "-"
                levels = ", ".join(["ok", *kind.levels])
                parts.append(table_row(f"`{kind.id}`", kind.looks_at, levels, fix, kind.source))
        parts.append("\n")
    return "".join(parts)


def metrics_table() -> str:
    """What a check may name, of the table of metrics."""
    rows = [table_row(f"`{latency.name}_` ...", _about(latency.about, latency.only)) for latency in LATENCIES]
    rows += [table_row(f"`{metric.name}`", metric.about) for metric in VALUES]
    return "".join([table_row("metric", "is"), "|---|---|\n", *rows])


def _about(about: str, only: str) -> str:
    return f"{about} (of {only})" if only else about


def commands_sections() -> str:
    """Each command with its help, arguments and options, in the order of use."""
    parts = []
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for heading, names in COMMANDS.items():
        parts.append(f"\n## {heading}\n")
        for name in names:
            command = commands[name]
            context = command.make_context(f"harness {name}", [], resilient_parsing=True)
            parts.append(f"\n### harness {name}\n`{' '.join(command.collect_usage_pieces(context))}`\n\n")
            parts[-1] = parts[-1].replace("`[OPTIONS]", f"`harness {name} [OPTIONS]")
            parts.append(f"{inspect.cleandoc(command.help)}\n\n| argument or option | meaning |\n|---|---|\n")
            records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
            for names_, text in filter(None, records):
                if "--help" not in names_:
                    parts.append(table_row(f"`{names_.partition(' <')[0]}`", " ".join(text.split())))
    return "".join([*parts, "\n"])


MADE = {
    "README.md": {"table": example_table, "servers": server_names},
    "docs/commands.md": {"commands": commands_sections},
    "docs/scenario-keys.md": {"keys": keys_tables, "metrics": metrics_table},
    "docs/servers.md": {"servers": servers_tables},
    "docs/failures.md": {"failures": failures_tables},
    "docs/findings.md": {"targets": targets_table, "findings": findings_tables, "rules": rules_table},
    "docs/fields.md": {"errors": error_kinds_table, "fields": fields_tables, "reasons": reasons_table},
}


def made(page: str) -> str:
    """Return a page with its parts made anew."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in MADE[page].items():
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        text = before + opening + make() + closing + after
    return text


def scenario_facts() -> str:
    """The file with the facts of the scenarios that ship."""
    listed = msgspec.json.format(msgspec.json.encode(list(look_at_scenarios())), indent=1)
    return f"{listed.decode()}\n"


if __name__ == "__main__":
    SCENARIO_SCHEMA.write_bytes(schema_text())
    FACTS.write_text(scenario_facts(), encoding="utf-8")
    for path in MADE:
        (ROOT / path).write_text(made(path), encoding="utf-8")
