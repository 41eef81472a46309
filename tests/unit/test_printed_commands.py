"""Every command that the product prints, run in a shell: what comes from outside is one argument, and runs nothing.

Programs are replaced by one that notes its arguments. Who adds a printed command adds it here; the first test finds
commands that are texts with values in them.
"""

import ast
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import yaml
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.files import inline_yaml
from harness.base.process import free_port
from harness.base.reason import because
from harness.cli import common
from harness.cli.actions import _print_next
from harness.failures.diagnosis import scan_text
from harness.failures.table import format_cause_and_fix, rules
from harness.imports.write import import_file
from harness.machine.inspection import diagnose
from harness.numbers.summarize import read_summary, summarize_data
from harness.numbers.validity import DEATHS
from harness.questions.capacity.record import CapacityReport, write_capacity
from harness.questions.compare.command import _refuse_mixed_sides, _suggest_about
from harness.questions.compare.decide import refuse_invalid
from harness.questions.findings.rules import RowFacts
from harness.questions.live import live
from harness.questions.plan.decide import _what_to_measure
from harness.questions.quick import search
from harness.questions.quick.command import found_server
from harness.questions.quick.search import next_commands
from harness.questions.tune.page import changed_elements, tune_elements
from harness.questions.tune.record import resume_command
from harness.questions.tune.spelling import to_paste
from harness.records.changed_server import ChangedServer
from harness.records.directory import no_records_error
from harness.records.manifest import Startup, UnlikeError
from harness.records.run_data import RunData, load
from harness.report.elements import Bullets, Paragraph
from harness.report.terminal import fold_command
from harness.run.experiment import prepare
from harness.run.orchestrator import run_steps
from harness.scenario import Server
from harness.scenario.workers import Workers
from harness.serve import container_bandwidth, lint, probe
from harness.serve.compose_file import parse_compose
from harness.workload.job import read_api_key
from tests.support import machines
from tests.support.command import called, write
from tests.support.faults import fault
from tests.support.made_runs import scenario, served_by, write_made_run
from tests.support.tune_reports import changed_report

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
_LINE = re.compile(rf"(?:^ *|: |; )((?:{_NAMED}) [^`\n]*)$", re.MULTILINE)


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
            "USER": "me",
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
                asked: Any = {"load": as_text(word), "slos": [as_text(word)], "shares": [0.95], "max_level": 8}
                write_capacity(data.folder, CapacityReport(unit="users", step=1.0, budget_s=60.0, **asked))
            yield row_of(data).run_again
            yield row_of(data).verify("variables")
        if template is None:
            yield row_of(replace(data, run=replace(data.run, scenario_name="quick"))).run_again


def of_lemonade(folder: Path, word: str) -> Iterator[str]:
    """The load of a model with other settings."""
    options = {"recipe_options": {"ctx_size": 4096, "llamacpp_args": f"--parallel 1 --x {word}"}}
    startup = Startup(engine="llama.cpp")
    (text,) = (
        row_of(made(folder, word, effective=options, startup=startup)).action("", {"sequences": 4}).commands.values()
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
        lambda: read_summary(path),
        lambda: refuse_invalid(path, replace(data.run, status="failed"), None, "is compared"),
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
        yield from to_paste(scenario(servers=servers, api_key_env="KEY"), name, "http://h").commands.values()


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
            assert any(expected in one for one in given) or "SIZE" in given, (command, called)
            for row in fold_command(command, 20):  # as a narrow terminal shows it
                assert row.isprintable()
            assert pasted("\n".join(fold_command(command, 20))) == called
    assert count


Printed = tuple[str, list[list[str]]]  # a text, and the programs that its commands call, with their arguments


def as_path(word: str) -> str:
    """The path of a file in the current folder as an argument, which is no option."""
    return f"./{word}" if word.startswith("-") else word


def as_text(word: str) -> str:
    """The word as JSON and the command line take it: as UTF-8."""
    return word.encode(errors="replace").decode()


def next_step_of(call: Callable[[], object]) -> str:
    with pytest.raises(HarnessError) as caught:
        call()
    return caught.value.next_step


def stopped(folder: Path, word: str) -> Any:
    """A run with records that is in progress, with what it prints in `progress.line`."""
    (folder / word).mkdir()
    (folder / word / "requests.jsonl").write_text("{}\n")
    running = MagicMock(folder=folder / word)
    running.file.discard_if_empty.return_value, running.file.manifest.kind = False, "plan"
    running.experiment.workers = Workers(names=[], machines=1, bind=word, port=1)
    return running


def lines_of(running: Any) -> str:
    return "\n".join(call.args[0] for call in running.progress.line.call_args_list)


def plan_of_a_failed_run(folder: Path, word: str) -> Printed:
    word = as_text(word)
    write_made_run(folder / word, status="failed", id="r")
    done = called("plan", "--items", "9", "--", word, cwd=folder)
    return done.err.partition("\nnext: ")[2], [["harness", "report", as_path(word)]]


def plan_after_a_death(folder: Path, word: str) -> Printed:
    death = because("invalid", "", why={"code": next(iter(DEATHS)), "cell": "c"})
    return _what_to_measure(Path(word), [death]), [["harness", "explain", f"{as_path(word)}/logs/c.server.log"]]


def init_of_a_file(folder: Path, word: str) -> Printed:
    answers = ["--question", "batching", "--server", "llamacpp", "--machine", "none"]
    name, file = as_text(f"{word}.yaml"), as_path(as_text(f"{word}.yaml"))
    text = called("init", *answers, "--", name, cwd=folder).out
    return text, [["harness", "check", file], ["harness", "run", file], ["harness", "run", file, "--times", "2"]]


def init_of_a_server(folder: Path, word: str) -> Printed:
    url = f"http://h/{re.sub('[^!-~]|[?@]', '', word)}"  # others are refused
    answers = ["--question", "chat-users", "--url", url, "--model", "m", "--machine", "none"]
    text = called("init", *answers, "mine.yaml", cwd=folder).out
    given = ["mine.yaml", "--url", url]
    return text, [
        ["harness", "check", *given],
        ["harness", "capacity", *given],
        ["harness", "run", *given, "--times", "2"],
    ]


def live_at_its_end(folder: Path, word: str) -> Printed:
    running, experiment = stopped(folder, word), prepare(write(folder))
    instead: dict[str, Any] = {"preflight": lambda known, _: known, "create_run": Mock(return_value=running)}
    running.progress.live.side_effect = KeyboardInterrupt
    with patch.multiple("harness.questions.live", **instead), pytest.raises(KeyboardInterrupt):
        live(experiment, None, None, free_port(), folder, running.progress)
    return lines_of(running), [["harness", "report", str(folder / word)]]


def run_at_its_end(folder: Path, word: str) -> Printed:
    running, path = stopped(folder, word), str(folder / word)
    with pytest.raises(KeyboardInterrupt):
        run_steps(running, [], Mock(side_effect=KeyboardInterrupt))
    worker = ["harness", "worker", "--master", f"{word}:1"]
    return lines_of(running), [worker, ["harness", "report", path], ["harness", "run", "--resume", path]]


def run_of_several(folder: Path, word: str) -> Printed:
    name, out = f"20270115-080000-{word}-abcd", io.StringIO()
    with redirect_stdout(out):
        _print_next([Path(name), Path(name)], Path(word))
    return out.getvalue(), [
        ["harness", "compare", name, name, "--against", f"{word}:2", "--runs", as_path(word)]
    ]  # fmt: skip


def clean_after_a_search(folder: Path, word: str) -> Printed:
    changed = ChangedServer(url="http://h", model="m", options={}, owner={})
    (found,) = changed_elements(changed_report(folder=str(folder / word / "run"), changed=changed))
    assert isinstance(found, Bullets)
    return found.items[0].parts[0].code, [["harness", "clean", "--runs", str(folder / word)]]


def tune_with_a_proof(folder: Path, word: str) -> Printed:
    found = tune_elements(changed_report(folder=str(folder / "run"), proof=word))[0]
    assert isinstance(found, Paragraph)
    return found.text, [["harness", "report", str(folder / word)]]


def doctor_of_closed_devices(folder: Path, word: str) -> Printed:
    root, group = machines.strix_halo_carve_out(folder / "root"), "g" + re.sub("[:\n]", "", word)
    machines.write(root, {"etc/group": os.fsencode(f"{group}:x:{machines.RENDER_GID}:\n")})
    with patch("os.access", lambda path, mode: False):
        (fix,) = [found.fix for found in diagnose(root, None) if found.id == "access.kfd"]
    return str(fix), [["sudo", "usermod", "-aG", group, "me"]]


def results_of_a_failed_run(folder: Path, word: str) -> Printed:
    word = as_text(word)
    write_made_run(folder / word, status="failed", id="r")
    done = called("results", "add", "--", word, cwd=folder)
    return done.err.partition("\nnext: ")[2], [["harness", "report", as_path(word)]]


def report_without_a_page(folder: Path, word: str) -> Printed:
    word = as_text(word)
    write_made_run(folder / word, id="r")
    text = called("report", "--", word, cwd=folder).out.rpartition("Report: ")[2].replace(" > report.html", "")
    return text, [["harness", "report", as_path(word), "--format", "html"]]


def import_of_the_same_file(folder: Path, word: str) -> Printed:
    file = Path(__file__).parents[1] / "data" / "imports" / "vllm-plain.json"
    first = import_file(file, folder / word)
    return next_step_of(lambda: import_file(file, folder / word)), [["harness", "report", str(first)]]


def compare_of_unlike_runs(folder: Path, word: str) -> Printed:
    error = UnlikeError(because("unlike", ""))
    error.about = "variables"
    with patch("sys.argv", ["harness", "compare", "--", word, "B"]):
        _suggest_about(error)
    return error.next_step, [["harness", "compare", "--about", "variables", "--", word, "B"]]


def quick_of_several_servers(folder: Path, word: str) -> Printed:
    urls = [f"http://h/{word}", "http://h:2"]
    with patch.multiple(search, find_servers=lambda: urls, describe_server=Mock(return_value="")):
        text = next_step_of(lambda: found_server(word, "KEY", print, is_agreed=False))
    return text, [["harness", "quick", urls[0], "--model", word, "--api-key-env", "KEY"]]


def quick_at_its_end(folder: Path, word: str) -> Printed:
    url, path = f"http://h/{word}", as_path(word)
    options = {"--model": word, "--api-key-env": "KEY", "--ca": Path(word), "--runs": Path(word)}
    text = "\n".join(next_commands(made(folder, word).run, url, 5.0, options))
    given = ["--model", word, "--api-key-env", "KEY", "--ca", path, "--runs", path]
    return text, [
        ["harness", "capacity", "--url", url, *given],
        ["harness", "expect", "SIZE", "--gpu", "NAME", "--measured", "5"],
        ["harness", "live", "--url", url, *given],
        ["harness", "quick", url, *given],
        ["harness", "compare", word, "last", "--runs", path],
    ]


def model_of_a_server(folder: Path, word: str) -> Printed:
    with patch.object(probe, "list_models", lambda *_: [word]):
        text = next_step_of(lambda: probe.find_model("http://h", "absent", Mock(), None, print))
    return text.replace("`--model", "`harness --model"), [["harness", "--model", word]]


def image_to_measure_with(folder: Path, word: str) -> Printed:
    with patch.object(container_bandwidth, "get_local_digests", lambda images: {}):
        return next_step_of(lambda: container_bandwidth.measure_gpu(word)), [["docker", "pull", word]]


def folder_to_make(folder: Path, word: str) -> Printed:
    path = f"{folder}/{word}"
    compose: Any = Mock(services={"server": Mock(volumes=[f"{path.replace('$', '$$')}:/models"])})
    with patch.object(lint, "engine_shares_files", lambda: True):
        (problem,) = lint._check_folders(compose)
    return problem.text, [["mkdir", "-p", path]]


CALLED: list[Callable[[Path, str], Printed]] = [
    plan_of_a_failed_run, plan_after_a_death, init_of_a_file, init_of_a_server, live_at_its_end, run_at_its_end,
    run_of_several, clean_after_a_search, tune_with_a_proof, doctor_of_closed_devices, results_of_a_failed_run,
    report_without_a_page, import_of_the_same_file, compare_of_unlike_runs, quick_of_several_servers,
    quick_at_its_end, model_of_a_server, image_to_measure_with, folder_to_make,
]  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.parametrize("printed", CALLED, ids=lambda one: one.__name__)
def test_a_command_calls_what_it_is_meant_to(
    tmp_path: Path, pasted: Callable[[str], list[list[str]]], printed: Callable[[Path, str], Printed], word: str
) -> None:
    text, expected = printed(tmp_path, word)
    assert [call for command in commands(text) for call in pasted(command)] == expected, ascii(text)


@pytest.mark.parametrize("word", HOSTILE)
def test_what_is_no_name_of_a_variable_is_in_no_advice(word: str) -> None:
    """It may be the key itself."""
    with pytest.raises(HarnessError) as caught:
        read_api_key(word)
    assert word not in f"{caught.value.what} {caught.value.next_step}"


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


@pytest.mark.parametrize(
    ("template", "engine", "changes", "place", "text"),
    [
        ("vllm-cpu", "vllm", {"kv_type": None}, "servers.a.variables", 'extra_args: ["--kv-cache-dtype", "fp8"]'),
        ("openai", "vllm", {"sequences": 5}, "arguments of vLLM", "--max-num-seqs 5"),
        ("ollama", "ollama", {"sequences": 5}, "servers.a.variables", "num_parallel: 5"),
        (None, "vllm", {"sequences": 5, "aiter": None}, "arguments of vLLM", "--max-num-seqs 5"),
        (
            "llamacpp", "llama.cpp", {"kv_type": None}, "servers.a.variables",
            'cache_type_k: q8_0\ncache_type_v: q8_0\nflash_attn: "on"',
        ),
    ],
)  # fmt: skip
def test_settings_are_what_the_template_has(
    tmp_path: Path, template: str | None, engine: str, changes: dict[str, Any], place: str, text: str
) -> None:
    """A setting without a variable is an argument; what belongs to it is set, too."""
    data = made(tmp_path, "m", template=template, effective={}, startup=Startup(engine=engine))
    server = Server(template=template or "running")
    data = replace(data, run=replace(data.run, scenario=replace(data.run.scenario, servers={"a": server})))
    settings = row_of(data).action("", changes).settings
    assert list(settings) == [place]
    assert settings[place] == text or yaml.safe_load(settings[place]) == yaml.safe_load(text)


def test_lemonade_gets_no_argument_that_it_refuses(tmp_path: Path) -> None:
    """It switches the cache on itself, unless its user has switched it off."""
    options = {"recipe_options": {"vllm_args": "--no-enable-prefix-caching --max-num-seqs=2"}}
    data = made(tmp_path, "m", effective=options, startup=Startup(engine="vllm"))
    (command,) = row_of(data).action("", {"prefix_cache": None, "sequences": 5}).commands.values()
    assert json.loads(shlex.split(command)[-1])["vllm_args"] == "--max-num-seqs 5"
    options["recipe_options"]["vllm_args"] = "--max-num-seqs=2"
    data = made(tmp_path / "on", "m", effective=options, startup=Startup(engine="vllm"))
    assert row_of(data).action("", {"prefix_cache": None}).commands == {}, "it is on already"


@pytest.mark.parametrize("word", HOSTILE)
def test_a_compose_file_is_what_it_was_made_of(word: str) -> None:
    variables = {"extra_args": ["--x", plain(word)], "environment": {"A": plain(word)}}
    known = scenario(servers={"s": Server(template="vllm-rocm", variables=variables)})
    service = parse_compose(to_paste(known, "s").texts["compose.yaml"]).server
    assert (service.command or [])[-2:] == ["--x", plain(word)] and service.environment["A"] == plain(word)
