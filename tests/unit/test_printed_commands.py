"""Every command that the product prints, run in a shell: what comes from outside is one argument, and runs nothing.

Programs are replaced by one that notes its arguments. Who adds a printed command adds it here; the first test finds
commands that are texts with values in them.
"""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.files import inline_yaml
from harness.cli import common
from harness.cli.stored import _refuse_mixed_sides
from harness.failures.diagnosis import scan_text
from harness.failures.table import format_cause_and_fix, rules
from harness.numbers.summarize import read_summary, summarize_data
from harness.questions.compare.decide import refuse_invalid
from harness.questions.findings.rules import RowFacts
from harness.questions.quick.search import next_commands
from harness.questions.tune.record import resume_command
from harness.questions.tune.spelling import to_paste
from harness.records.directory import no_records_error
from harness.records.manifest import Startup
from harness.records.run_data import RunData, load
from harness.report.terminal import fold_command
from harness.scenario import Server
from harness.scenario.workers import Workers
from harness.serve.compose_file import parse_compose
from tests.support.faults import fault
from tests.support.made_runs import scenario, served_by, write_made_run

SOURCE = Path(__file__).parents[2] / "harness"
HOSTILE = [
    "$(touch PWNED)", "m; touch PWNED #", "`touch PWNED`", "a'b\"c$HOME && touch PWNED", "-x|touch PWNED",
    "\x9b2J\u202eb", "a  b\n touch PWNED\n", "${IFS}>PWNED", "<(touch PWNED)", "a\\", "\u2028touch PWNED",
    "\udcff*~{a,b}!x",
]  # fmt: skip
PROGRAMS = [
    "ausyscall", "curl", "docker", "env", "gunzip", "harness", "journalctl", "kill", "lemonade", "llama-server",
    "mkdir", "pip", "sudo", "systemctl", "vllm",
]  # fmt: skip
_NAMED = "|".join(map(re.escape, PROGRAMS))
_CODE = re.compile(rf"`((?:{_NAMED}) [^`]*)`")
_LINE = re.compile(rf"(?:^|: |; )((?:{_NAMED}) [^`]*)$", re.MULTILINE)


def commands(text: str) -> list[str]:
    """The commands in a text: in backticks, or up to the end of the line."""
    return _CODE.findall(text) or _LINE.findall(text)


@pytest.fixture
def pasted(tmp_path: Path) -> Callable[[str], list[list[str]]]:
    """Runs a command in a shell, and returns the programs that it called with their arguments."""
    programs, folder = tmp_path / "programs", tmp_path / "folder"
    programs.mkdir()
    folder.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text('#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@" END >> "$PASTED"\n')
        (programs / name).chmod(0o755)

    def run(text: str) -> list[list[str]]:
        (tmp_path / "calls").write_bytes(b"")
        known = {
            "PATH": str(programs),
            "HOME": "/h",
            "LC_ALL": "C.UTF-8",
            "PASTED": str(tmp_path / "calls"),
            "KEY": "k",
        }
        script = f"set +H; enable -n kill; {text}"
        done = subprocess.run(["/bin/bash", "-c", script], cwd=folder, capture_output=True, env=known)
        assert (done.returncode, done.stderr, list(folder.iterdir())) == (0, b"", []), text
        words = (tmp_path / "calls").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
        ends = [-1, *(place for place, word in enumerate(words) if word == "END")]
        return [words[start + 1 : end] for start, end in zip(ends, ends[1:], strict=False)]

    return run


def made(folder: Path, word: str, **served: Any) -> RunData:
    """A run in which everything that a user, a server or a file names is `word`."""
    known = scenario(repeats=1, servers={"a": Server(template="running")}, api_key_env="KEY")
    write_made_run(folder / "run", made_of=known, served=lambda cell: served_by(template=None))
    data = load(folder / "run")
    given = {"url": f"http://h/{word}", "model": word} | served
    cells = [replace(cell, served_by=replace(cell.served_by, **given)) for cell in data.run.cells]
    run = replace(data.run, id=word, scenario_name=word, scenario=replace(known, model=word), cells=cells)
    return replace(data, run=run)


def row_of(data: RunData) -> RowFacts:
    summary = summarize_data(data).summary
    return RowFacts(data, summary, summary.rows[0])


def of_findings(folder: Path, word: str) -> Iterator[str]:
    """What findings print of a server that ran already, of one that was started, of a search, and of quick."""
    for place, template in enumerate((None, "vllm-rocm")):
        data = made(folder / str(place), word, template=template)
        for is_search in (False, True):
            if is_search:
                (data.folder / "capacity.json").touch()
            yield row_of(data).run_again
            yield row_of(data).verify("variables")
        if template is None:
            yield row_of(replace(data, run=replace(data.run, scenario_name="quick"))).run_again


def of_lemonade(folder: Path, word: str) -> Iterator[str]:
    """The load of a model with other settings."""
    options = {"recipe_options": {"ctx_size": 4096, "llamacpp_args": f"--parallel 1 --x {word}"}}
    startup = Startup(engine="llama.cpp")
    (text,) = (
        row_of(made(folder, word, effective=options, startup=startup)).action("", {"sequences": 4}).settings.values()
    )
    yield text


def of_errors(folder: Path, word: str) -> Iterator[str]:
    """The next steps of errors."""
    path, data = folder / word, made(folder / "made", word)
    path.mkdir()
    (path / "requests.jsonl.gz").touch()
    sides = ["compare", "A", "B", "--against", "C", word]
    failing: list[Callable[[], object]] = [
        lambda: common.find_run(Path("absent"), path), lambda: common.find_runs(Path("absent:3"), path),
        lambda: read_summary(path), lambda: refuse_invalid(replace(data.run, status="failed"), None, "is compared"),
    ]  # fmt: skip
    if not word.startswith("-"):  # then it is another option
        failing.append(lambda: _refuse_mixed_sides([Path("A"), Path("B"), Path(word)], sides))
    yield no_records_error(path).next_step
    for call in failing:
        with pytest.raises(HarnessError) as caught:
            call()
        yield caught.value.next_step.replace("Write --against", "harness --against").removesuffix(".")


def of_pages(folder: Path, word: str) -> Iterator[str]:
    """The commands to go on with."""
    data = made(folder, word)
    yield from next_commands(data.run, f"http://h/{word}", 5.0, {"--api-key-env": "KEY", "--model": word})
    yield resume_command(folder / word)
    yield Workers(names=[], machines=1, bind=word, port=1).command


def of_settings(folder: Path, word: str) -> Iterator[str]:
    """What starts a server without the harness."""
    word = plain(word)
    servers = {
        "vllm": Server(template="vllm-rocm", variables={"extra_args": ["--x", word], "environment": {"A": word}}),
        "llama": Server(template="llamacpp", variables={"model_path": "/m.gguf", "extra_args": [word]}),
        "running": Server(template="running", variables={"llamacpp_args": word.replace("$$", "$")}),
    }
    for name in servers:
        for place, text in to_paste(scenario(servers=servers, api_key_env="KEY"), name, "http://h").items():
            if place != "compose.yaml":
                yield text


def plain(word: str) -> str:
    """The word without what a scenario may not have, and as Compose writes it."""
    return re.sub(r"[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "", word).replace("$", "$$")


PRINTED: list[Callable[[Path, str], Iterator[str]]] = [of_findings, of_lemonade, of_errors, of_pages, of_settings]


@fault("input", "a name of a model, a server, a folder or a run that a shell would run",
       seen="each is one quoted argument in every command to paste", kept="as it was")  # fmt: skip
@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.parametrize("printed", PRINTED, ids=lambda one: one.__name__)
def test_a_value_is_one_argument(
    tmp_path: Path, pasted: Callable[[str], list[list[str]]], printed: Callable[[Path, str], Iterator[str]], word: str
) -> None:
    expected = plain(word).replace("$$", "$") if printed is of_settings else word
    count = 0
    for text in printed(tmp_path, word):
        assert text.isprintable(), "a terminal shows it as it is"
        for command in commands(text):
            count += 1
            called = pasted(command)
            given = {decoded(argument) for words in called for argument in words}
            assert any(expected in one for one in given) or "--params" in given, (command, called)
            for row in fold_command(command, 20):  # as a narrow terminal shows it
                assert row.isprintable()
            assert pasted("\n".join(fold_command(command, 20))) == called
    assert count


def decoded(argument: str) -> str:
    """The argument; of what Lemonade is sent its values."""
    return "|".join(map(str, json.loads(argument).values())) if argument.startswith('{"model_name"') else argument


_FILLED = re.compile(r"`[^`]*\{[a-z]+\}[^`]*`")
IN_TABLES = {rule.id for rule in rules() if any(map(_FILLED.search, rule.fixes.values()))}


@fault("input", "a log has names that a shell would run", seen="each is quoted in the commands of `harness explain`",
       kept="as it was")  # fmt: skip
@pytest.mark.parametrize("word", HOSTILE)
def test_what_a_log_says_runs_nothing(pasted: Callable[[str], list[list[str]]], word: str) -> None:
    assert "systemd.exited" in IN_TABLES
    for rule in rules():
        names = re.findall(r"\(\?P<(\w+)>", json.dumps([rule.match, rule.next]))
        for server in rule.fixes if rule.id in IN_TABLES else ():
            fix = format_cause_and_fix(rule, dict.fromkeys(names, word), server)[1]
            assert commands(fix), ascii(fix)  # a lone surrogate cannot be sent between processes of the tests
            for command in commands(fix):
                pasted(command)


def test_the_unit_of_a_log_is_one_argument(pasted: Callable[[str], list[list[str]]]) -> None:
    line = "box systemd[1]: x;touch${IFS}PWNED.service: Main process exited, code=exited, status=1/FAILURE"
    (finding,) = scan_text(line).findings
    (command,) = commands(finding.fix)
    assert pasted(command)[0] in (
        ["journalctl", "-u", "x;touch${IFS}PWNED.service", "-b"], ["harness", "explain", "-"]
    )  # fmt: skip


def test_no_command_is_a_text_with_values_in_it() -> None:
    """All are made by `command_line`, which quotes them."""
    before = re.compile(rf"(?:^|[`\n(]|: )(?:{_NAMED}|rm|chmod|chown|cp|mv|git|ssh) (?:[^`.;,:]*[ =])?$")
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        runs_it = path.name in ("containers.py", "process.py")  # itself, in a container or a shell
        for node in () if runs_it else ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            text = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    text += str(part.value)
                elif before.search(text):
                    found.append(f"{path.relative_to(SOURCE)}: {ast.unparse(node)}")
    assert found == []


def test_a_fragment_of_yaml_is_what_it_was_made_of() -> None:
    for value in (
        *HOSTILE, 1e-05, 1e22, 0.78, 5, True, None, "yes", "1e3", "null", ["a: b", "#", *HOSTILE],
        {"on": HOSTILE, "\x85": 1.0},
    ):  # fmt: skip
        text = inline_yaml(value)
        assert text.isprintable() and yaml.safe_load(f"key: {text}") == {"key": value}


@pytest.mark.parametrize("word", HOSTILE)
def test_settings_of_a_scenario_are_what_they_were_made_of(tmp_path: Path, word: str) -> None:
    data = made(tmp_path, word, template="vllm-rocm", effective={}, startup=Startup(engine="vllm"))
    environment, extra = {"A": word, word: "1"}, ["--x", word, "--cpu-offload-gb", "4"]
    server = Server(template="vllm-rocm", variables={"environment": environment, "extra_args": extra})
    data = replace(data, run=replace(data.run, scenario=replace(data.run.scenario, servers={"a": server})))
    changes = {"sequences": 5, "memory": 0.00001, "aiter": None, "api_processes": None}
    settings = row_of(data).action("", changes).settings["servers.a.variables"]
    assert all(line.isprintable() for line in settings.splitlines())
    assert yaml.safe_load(settings) == {
        "max_num_seqs": 5, "gpu_memory_utilization": 0.00001,
        "environment": environment | {"VLLM_ROCM_USE_AITER": "1"},
        "extra_args": [*extra, "--api-server-count", "2"],
    }  # fmt: skip


@pytest.mark.parametrize("given", [["-np", "1"], ["--parallel=1"], ["--parallel", "1", "-n", "-1"], ["-n", "-1"]])
def test_settings_replace_what_the_arguments_have_of_them(tmp_path: Path, given: list[str]) -> None:
    """The engine takes the last of two."""
    data = made(tmp_path, "m", template="llamacpp", startup=Startup(engine="llama.cpp"))
    server = Server(template="llamacpp", variables={"extra_args": [*given, "--threads", "1"]})
    data = replace(data, run=replace(data.run, scenario=replace(data.run.scenario, servers={"a": server})))
    pasted = yaml.safe_load(row_of(data).action("", {"sequences": 4}).settings["servers.a.variables"])
    kept = [*given[given.index("-n") :], "--threads", "1"] if "-n" in given else ["--threads", "1"]
    assert pasted == {"parallel": 4} | ({} if given == ["-n", "-1"] else {"extra_args": kept})


def test_lemonade_gets_no_argument_that_it_refuses(tmp_path: Path) -> None:
    """It switches the cache on itself, unless its user has switched it off."""
    options = {"recipe_options": {"vllm_args": "--no-enable-prefix-caching --max-num-seqs=2"}}
    data = made(tmp_path, "m", effective=options, startup=Startup(engine="vllm"))
    (command,) = row_of(data).action("", {"prefix_cache": None, "sequences": 5}).settings.values()
    assert json.loads(shlex.split(command)[-1])["vllm_args"] == "--max-num-seqs 5"
    options["recipe_options"]["vllm_args"] = "--max-num-seqs=2"
    data = made(tmp_path / "on", "m", effective=options, startup=Startup(engine="vllm"))
    assert row_of(data).action("", {"prefix_cache": None}).settings == {}, "it is on already"


@pytest.mark.parametrize("word", HOSTILE)
def test_a_compose_file_is_what_it_was_made_of(word: str) -> None:
    variables = {"extra_args": ["--x", plain(word)], "environment": {"A": plain(word)}}
    known = scenario(servers={"s": Server(template="vllm-rocm", variables=variables)})
    service = parse_compose(to_paste(known, "s")["compose.yaml"]).server
    assert (service.command or [])[-2:] == ["--x", plain(word)] and service.environment["A"] == plain(word)
