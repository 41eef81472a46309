"""`python -m harness.docs` writes what is made of the program: docs/servers.md, docs/failures.md, the tables of
docs/doctor.md, docs/run-directory.md and the README."""

import json
import re
from collections.abc import Iterable
from typing import Any

from harness.analysis.summarize import read_summary
from harness.engines import engines, template_of
from harness.failures.table import IN_PIECES, Rule, removed_flags, replacements, rules
from harness.machine.findings import TOPICS
from harness.machine.findings import known as known_findings
from harness.machine.gpus import WORDS, columns, table
from harness.paths import ROOT
from harness.reasons import documented
from harness.report import markdown
from harness.rundir.manifest import read_run
from harness.serve.template import BY_THE_HARNESS, GATEWAYS, Variable, limits, templates, variables

HEAD = """\
# Servers

<!-- Made by `python -m harness.docs`; edit compose/*.yaml.j2 and harness/engines/*.yaml instead. -->

A server is a Compose template of `compose/` with values for its variables. The template is the one definition: the
harness renders it and starts it through the Docker SDK, and `harness compose SCENARIO` prints the same for
`docker compose up`. A Compose key that the harness does not carry out is refused by name.

```yaml
servers:
  vllm:
    template: vllm-rocm
    variables: {max_model_len: 8192, max_num_seqs: 10}
```

All of them are published on 127.0.0.1, also those of a [Docker Engine on another
machine](doctor.md#a-docker-engine-on-another-machine). What gives a container the machine that it runs on is refused
unless the server consents in the scenario, which `harness check` and the report show:

| `allow: [...]` | lets through |
|---|---|
| `docker-socket` | a volume with the socket of Docker, containerd, Podman or CRI-O, or a folder that holds one |
| `host-files` | a volume of `/proc`, `/sys`, `/dev`, `/boot`, a whole home, credentials in `/etc` |
| | or of the container engine's data; hidden files of a home, but for `.cache`, `.local/share`, `.NAME/models` |
| | a writable one of `/etc`, `/usr`, `/bin`, `/lib`; of the whole `/opt`, `/srv`, `/tmp`, `/mnt`, `/media` |
| | or of what is in `/var` and `/run`, but for `/var/tmp/...` and `/run/media/...`; a folder that holds one of these |
| `host-devices` | a device that is not a GPU's (`/dev/kfd`, `/dev/dri`, `/dev/accel`), such as a disk or `/dev/mem` |
| `host-ipc` | `ipc: host` |
| `open-port` | `publish` with an address that other machines reach, such as `0.0.0.0` or `[::]` |
| `privileges` | `cap_add` or `security_opt` in a template of your own; those that ship need none |

Paths count as they lead through `..` and symbolic links. `/` is always refused, and so are `privileged`, `pid`,
`network_mode` and `userns_mode`, which the harness does not carry out.

A secret such as `HF_TOKEN` comes from your shell: write `${HF_TOKEN}` in `environment` or in an argument; the value
itself is refused, and in logs it is blacked out, as is every other value that came in by `${NAME}`. `model` takes no
`${NAME}`. A type that ends in `?` also takes `null`. `model` is the scenario's own and is
not set here; what else a template sets is refused in `extra_args`.

By engine: {pages},
[a server that already runs](running-server.md); in front of them, [gateways](gateways.md).
"""

LOCUST = "Not a server: what `harness compose` puts in front of one, Locust's web UI."
COLUMNS = "| variable | type | default | meaning |\n|---|---|---|---|\n"


def servers_page() -> str:
    """docs/servers.md."""
    parts = [HEAD.replace("{pages}", ", ".join(engine.page for engine in engines() if engine.page is not None))]
    for name in (*templates(), *GATEWAYS, "locust"):
        known = template_of(name)
        introduction = LOCUST if known is None else known.introduction
        parts.append(f"\n## {name}\n{introduction}\n\n{COLUMNS}")
        parts += [_variable_row(key, value) for key, value in variables(name).items() if key not in BY_THE_HARNESS]
    return "".join(parts)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _variable_row(name: str, variable: Variable) -> str:
    default = "required" if variable.required else f"`{_shown(variable.default)}`"
    allowed = f": {', '.join(variable.choices)}" if variable.choices else f" {limits(variable)}".rstrip()
    allowed += ", or `auto`" if variable.auto else ""
    return _row((f"`{name}`", variable.type + allowed, default, variable.doc)) + "\n"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def readme() -> str:
    """README.md with the table of the committed example run, and the servers' names, between their marks."""
    example = ROOT / "docs" / "example"
    shown = ("server", "load", "wall", "rate", "ttft_p50", "speedup", "verdict")
    table = markdown.table(read_summary(example), read_run(example), shown)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = ", ".join(f"`{name}`" for engine in engines() if not engine.gateway for name in engine.templates)
    servers = f"{names}, and the gateway `{'`, `'.join(GATEWAYS)}` ([their variables](docs/servers.md));"
    for opening, closing, made in (
        ("<!-- table: .*? -->", "<!-- /table -->", f"\n{table}\n"),
        ("<!-- servers -->", "<!-- /servers -->", servers),
    ):
        text = re.sub(rf"({opening}\n).*?({closing})", rf"\1{made}\n\2", text, flags=re.DOTALL)
    return text


def doctor_page() -> str:
    """docs/doctor.md with new tables between their marks."""
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    for name, made in (("targets", targets_table()), ("findings", findings_tables())):
        before, opening, rest = page.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        page = f"{before}{opening}\n{made}\n{closing}{after}"
    return page


def targets_table() -> str:
    """The support of each server for each target, with its source."""
    servers = columns()
    lines = [f"Read on {table().checked}.", ""]
    lines.append(_row(["target", "family", *(server.title for server in servers.values())]))
    lines.append("|---" * (2 + len(servers)) + "|")
    for row in table().targets:
        standings = [WORDS[row.standing(server)] for server in servers]
        lines.append(_row([f"`{row.target}`", f"{row.family}; {row.architecture}", *standings]))
    lines += ["", *(f"- {server.title}: {server.source}" for server in servers.values())]
    return "\n".join(lines) + "\n"


def findings_tables() -> str:
    """Every finding with its levels, its fix and its source, by topic."""
    parts = []
    for topic, title in TOPICS.items():
        parts += [f"### {title}", "", _row(["finding", "looks at", "levels", "fix", "source"]), "|---|---|---|---|---|"]
        for row in known_findings().values():
            if row.topic == topic:
                levels = ", ".join(["ok", *row.levels])
                fixes = [row.fix] if isinstance(row.fix, str) else list(row.fix.values())
                fix = re.sub(r"\{(\w+)\}", lambda m: m[1].upper(), "<br>".join(fixes)) or "-"
                parts.append(_row([f"`{row.id}`", row.looks_at, levels, fix, row.source]))
        parts.append("")
    return "\n".join(parts)


def run_directory_page() -> str:
    """docs/run-directory.md with the list of reason codes."""
    rows = "".join(f"| `{code}` | {text.replace('|', chr(92) + '|')} |\n" for code, text in documented())
    text = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
    made = f"<!-- reasons -->\n| code | sentence, or what it says |\n|---|---|\n{rows}<!-- /reasons -->"
    before, _, rest = text.partition("<!-- reasons -->")
    return before + made + rest.partition("<!-- /reasons -->")[2]


FAILURES_HEAD = """\
# Failures

<!-- Made by `python -m harness.docs`; edit harness/failures/table/*.yaml or harness/engines/*.yaml instead. -->

What the harness recognises in logs, in what Docker says, in exit codes and in the errors of an API. Each failure is
reported as cause, evidence (the line of the log, with its number), fix (the flag and the value for this machine, where
they follow from the line) and source. `harness run` does so for a server that does not start or dies and for requests
that fail; `harness explain LOGFILE` does it for a log from elsewhere:

```
docker logs SERVER 2>&1 | harness explain -
journalctl -u lemond | harness explain -
dmesg | harness explain -
docker inspect -f '{{json .State}}' SERVER | harness explain -
```

What looks like a secret (tokens, `--api-key`, `Authorization`) is blacked out in what is shown, and control characters
are left out.

Time stamps and prefixes of Docker, Compose, journald and of each server, such as `(EngineCore pid=9) ERROR ...`, are
left out before a line is compared. Source lines of a traceback are not looked at: they name errors
that did not happen.

Which of several is the cause: a kill for memory that Docker reports, then what Docker said, then the first line of
the log that is a cause. A **wrapper** ("Engine core initialization failed") only says that there is a cause
elsewhere, and is shown as what the cause came through; it is the answer only where nothing else is known, after an
exception that is not in the table, whatever its class is called. A **warning** is in good starts, too, and is never
the cause. A cause that the log tells at the level WARNING comes after what is an error or was raised, and one of
fetching the model is got over once the model is loaded. Lines of INFO and DEBUG, of access logs, and lines that quote
a prompt are what users said, and name no failure. What was said before the server became ready does not explain how
it ended. Refused requests do not, either.

A server that was stopped, by the first words of its own shutdown such as "cleaning up before exit" (`stopping` in
harness/engines/*.yaml), **stopped normally**: wrappers and unknown exceptions after that
line, such as `EngineDeadError`, are part of the stop. Before it, they are a crash.

A load whose first 5 requests (warm-up included) all fail for a mistake of the **scenario** is ended at once: the rest
would fail as well. So is one that is steered by hand.

Words in capitals are values of the line, or computed from it.
"""
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


def failures_page() -> str:
    """The page: a section a kind, a row a rule."""
    parts = [FAILURES_HEAD]
    for kind, title in TITLES.items():
        parts.append(f"\n## {title}\n| failure | for example | cause | fix |\n|---|---|---|---|\n")
        parts += [_failure_row(rule) for rule in rules() if _kind(rule) == kind]
    known = replacements()
    parts.append(
        "\n## Arguments that vLLM no longer knows\n| argument | gone in | instead | source |\n|---|---|---|---|\n"
    )
    parts += [
        f"| `{flag}` | {gone.gone_in or '?'} | {_cell(gone.instead)} | {gone.source} |\n"
        for flag, gone in removed_flags().items()
    ]
    parts.append("\n## Environment variables that vLLM no longer knows\n| variable | instead |\n|---|---|\n")
    parts += [f"| `{name}` | {_cell(instead)} |\n" for name, instead in known.variables.items()]
    parts.append("\n## Arguments that Lemonade sets itself\n| argument | instead |\n|---|---|\n")
    parts += [f"| `{flag}` | {_cell(instead)} |\n" for flag, instead in known.protected.items()]
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
    fix = f"{rule.fix}; where no value is enough: {rule.hopeless}" if rule.hopeless else rule.fix
    return (
        f"| `{rule.id}`{marks} | <code>{_code(shown)}</code> | {_cell(_capitals(rule.cause))} "
        f"| {_cell(_capitals(fix))}. Source: {_cell(source)} |\n"
    )


def _capitals(text: str) -> str:
    text = re.sub(r"\{(?:gone|instead)\}", "", text)  # what the tables below say
    text = text.replace("{pieces}", f"where more was free than was asked for: {IN_PIECES.partition(': ')[2]}")
    return re.sub(r"(?<!\$)\{([a-z]+)\}", lambda name: name[1].upper(), text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _code(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([`*_\[\]|~$\\])", r"\\\1", text)


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    (ROOT / "docs" / "servers.md").write_text(servers_page(), encoding="utf-8")
    (ROOT / "docs" / "failures.md").write_text(failures_page(), encoding="utf-8")
    (ROOT / "docs" / "doctor.md").write_text(doctor_page(), encoding="utf-8")
    (ROOT / "docs" / "run-directory.md").write_text(run_directory_page(), encoding="utf-8")
