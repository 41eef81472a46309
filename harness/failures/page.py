"""docs/failures.md, made of the table."""

import re

from harness.failures.advice import IN_PIECES
from harness.failures.table import Rule, removed_flags, replacements, rules

HEAD = """\
# Failures

<!-- Made by `python -m harness.docs`; edit harness/failures/table/*.yaml or harness/engines/*.yaml instead. -->

What the harness recognises in logs, in what Docker says, in exit codes and in the errors of an API. Each failure is
told as cause, evidence (the line of the log, with its number), fix (the flag and the value for this machine, where
they follow from the line) and source. `harness run` does so for a server that does not start or dies and for requests
that fail; `harness explain LOGFILE` does it for a log from elsewhere:

```
docker logs SERVER 2>&1 | harness explain -
journalctl -u lemond | harness explain -
dmesg | harness explain -
docker inspect -f '{{json .State}}' SERVER | harness explain -
```

A log in UTF-16, as PowerShell's `>` writes it, is read as well. What looks like a secret (tokens, `--api-key`,
`Authorization`) is blacked out in what is shown, and control characters are left out.

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

Words in capitals stand for what the line says or what is computed from it.
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
    parts = [HEAD]
    for kind, title in TITLES.items():
        parts.append(f"\n## {title}\n| failure | for example | cause | fix |\n|---|---|---|---|\n")
        parts += [_row(rule) for rule in rules() if _kind(rule) == kind]
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


def _row(rule: Rule) -> str:
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
