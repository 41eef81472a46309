"""The commands that read, list and show, and what is said of a command line that cannot be understood."""

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import __version__
from harness.base.errors import INTERRUPTED
from harness.base.process import free_port
from harness.base.reason import sentences
from harness.records.manifest import read_run
from tests.support import prefork
from tests.support.command import HARNESS, PATIENCE_S, called, going, harness, only_run, until, write
from tests.support.wording import Wording


@pytest.fixture(scope="module")
def folder_with_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run below runs/."""
    folder = tmp_path_factory.mktemp("made")
    path = write(folder)
    assert harness("run", path.name, "--runs", "runs", cwd=folder).code == 0
    return folder


def test_version_and_help(tmp_path: Path) -> None:
    assert called("--version", cwd=tmp_path) == (0, f"amd-llm-load {__version__}\n", "")
    done = called(cwd=tmp_path)  # no command shows the help
    assert (done.code, done.out, done.err) == (1, "", called("--help", cwd=tmp_path).out)
    assert re.search(r"^  clean +\S", done.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["run"], ""),
        (["quick", "not an address"], "address: 'not an address' "),
        (["run", "S", "--url", "http://x", "--api-key-env", "KEY"], "--api-key-env"),
        (["liv"], "no such command 'liv'"),
        (["import", "none.json"], "none.json: "),
        (["run", "first-look", "--repeats", "0"], "--repeats: "),
        (["worker", "--master", "x", "--processes", "2k"], "--processes: "),
        (["compare", "a", "b", "--format", "csv"], "--format: 'csv' "),
        (["list", "--nope"], "no such option: --nope"),
        (["check", "first-look", "y"], "got unexpected extra argument(s) (y)"),
        (["live", "first-look", "--model=-x"], "--model: '-x' "),
        (["run", "S", "--metrics-url", "http://127.0.0.1:1"], "--metrics-url needs --url"),
        (["run", "S", "--bind", "1.2.3.4"], "--bind needs --workers"),
        (["report", "some", "--about", "image"], "--about needs --baseline"),
        (
            ["run", "--resume", "x", "--repeats", "3", "--check", "x"],
            "--resume ",
        ),
        (["run", "S", "--workers", ""], "--workers: "),
        (["run", "S", "--workers", "1", "--bind", "1/2"], "--bind: '1/2' "),
        (["run", "S", "--check", "foo < 1"], "--check 'foo < 1': 'foo' "),
        (["run", "S", "--slo", "foo < 1"], "--check 'foo < 1': 'foo' "),
        (["run", "S", "--check", "two/burst: wall < 1 s"], "--check 'two/burst: wall < 1 s': 'two' "),
        (["run", "S", "--baseline", "gone"], "gone: "),
    ],
)
def test_the_first_mistake_of_a_command_line_is_reported(
    tmp_path: Path, arguments: list[str], error: str, wording: Wording
) -> None:
    path = write(tmp_path)
    done = called(*[str(path) if word == "S" else word for word in arguments], cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {error}")
    wording(done.err)
    assert list(tmp_path.iterdir()) == [path]


def test_all_mistakes_of_a_scenario_are_reported(tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path, checks=["wall"], api_key_env="NOT_SET_AT_ALL")
    done = called("run", path.name, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert [line.split(": ")[0] for line in done.err.splitlines()[:-1]] == [
        "error",
        "$.checks[0] (line 22)",
        "$.api_key_env (line 23)",
    ]
    wording(done.err)


def test_check_shows_the_plan(tmp_path: Path, wording: Wording) -> None:
    loads = {
        "one": {"user": "batch", "requests": 10, "output_tokens": 20},
        "ten": {"user": "chat", "users": 10, "duration_s": 30},
    }
    path = write(tmp_path, loads=loads, repeats=2, baseline={"server": "one", "load": "ten"})
    done = called("check", path.name, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    wording(done.out)
    assert list(tmp_path.iterdir()) == [path], "nothing was run or written"


def test_compose(tmp_path: Path, wording: Wording) -> None:
    servers = {"a": {"template": "simulated", "container": False}, "b": {"template": "vllm-rocm"}}
    path = write(tmp_path, servers=servers)
    for option, template in (((), "simulated"), (("--server", "b"), "vllm-rocm")):
        found = yaml.safe_load(called("compose", path.name, *option, cwd=tmp_path).out)
        assert (found["x-amd-llm-load"]["template"], set(found["services"])) == (template, {"server", "locust"})
    done = called("compose", path.name, "--server", "c", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    wording(done.err)


def test_runs(folder_with_run: Path, tmp_path: Path, wording: Wording) -> None:
    done = called("list", "runs", "--runs", "nowhere", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    wording(done.out)
    by_option = called("list", "runs", "--runs", str(folder_with_run / "runs"), cwd=tmp_path)
    by_variable = called("list", "runs", cwd=tmp_path, env={"HARNESS_RUNS": str(folder_with_run / "runs")})
    assert by_option == by_variable
    heading, line = by_option.out.splitlines()
    assert heading.split() == ["Run", "Started", "Cells", "Status"]
    assert line.split()[0] == only_run(folder_with_run / "runs").name
    # Where other tests have the cores, it may have been limited.
    assert re.search(r" 1/1 +valid\b.* \(simulated\)$", line)
    narrow = called(
        "list", "runs", "--runs", str(folder_with_run / "runs"), cwd=tmp_path, env={"COLUMNS": "80"}
    ).out.splitlines()
    assert narrow[1].split()[0] == only_run(folder_with_run / "runs").name and max(map(len, narrow)) <= 80


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of each file and folder: of what is only read, none changes."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


READING = [
    *(["report", "RUN", "--format", kind] for kind in ("markdown", "json", "html", "junit", "csv")),
    ["report", "RUN"],
    ["report", "RUN", "--explain"],
    ["report", "RUN", "--check", "error_rate == 0"],
    ["report", "RUN", "--check", "error_rate == 0", "--format", "html"],
    ["compare", "RUN", "RUN"],
    ["list"],
    ["compare", "--history", "RUN"],
    ["compare", "--history", "RUN", "--format", "html"],
    ["plan", "RUN"],
    ["export", "RUN", "--to", "../out.csv"],
    ["explain", "RUN"],
    ["results", "add", "RUN", "--results", "../results"],
]


@pytest.mark.parametrize("is_whole", [True, False])
def test_reading_never_writes(folder_with_run: Path, tmp_path: Path, is_whole: bool) -> None:
    """A run directory may be read-only, also one of a killed run."""
    folder = tmp_path / "a" / "runs"
    shutil.copytree(folder_with_run / "runs", folder)
    run = only_run(folder)
    if not is_whole:
        (run / "summary.json").unlink()
        (run / "report.html").unlink()
    before = state(folder)
    for command in READING:
        done = called(*(run.name if word == "RUN" else word for word in command), cwd=folder.parent)
        assert done.code in (0, 1, 3, 5) and "Traceback" not in done.err, (command, done)
        assert done.code != 1 or command[0] in ("plan", "results", "explain", "compare"), (command, done)
        assert state(folder) == before, command
    assert sorted(path.name for path in folder.parent.iterdir()) == ["runs"]


def test_report_shows_a_run_in_each_format(folder_with_run: Path) -> None:
    run = only_run(folder_with_run / "runs")
    terminal = called("report", run.name, cwd=folder_with_run)
    assert (terminal.code, terminal.err) == (0, "")
    assert re.search(r"^(VALID|PASSED): ", terminal.out, re.MULTILINE)
    explained = called("report", f"runs/{run.name}", "--explain", cwd=folder_with_run)
    assert explained.code == 0 and len(explained.out) > len(terminal.out)
    text = called("report", run.name, "--format", "json", cwd=folder_with_run)
    assert json.loads(text.out) == json.loads((run / "summary.json").read_text())
    html = called("report", run.name, "--format", "html", cwd=folder_with_run)
    assert (html.code, html.err) == (0, "")
    assert html.out == (run / "report.html").read_text()


def test_a_misspelt_run(folder_with_run: Path) -> None:
    run = only_run(folder_with_run / "runs").name
    done = called("report", f"{run[:-1]}x", cwd=folder_with_run)
    assert (done.code, done.out) == (1, "")
    assert f"'{run}'" in done.err.splitlines()[0]


def without_reader(start: Any, arguments: list[str], **options: Any) -> tuple[int, bytes]:
    """The exit code and the errors of a command whose standard output is closed before anything is written."""
    pipe = start([HARNESS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    pipe.stdout.close()
    with pipe.stderr:
        said = pipe.stderr.read()
    return pipe.wait(20), said


def test_a_reader_that_has_seen_enough_hides_no_failure(folder_with_run: Path) -> None:
    run = only_run(folder_with_run / "runs").name
    for arguments in (["report", run], ["report", run, "--format", "json"], ["--help"]):
        assert without_reader(prefork.Popen, arguments, cwd=folder_with_run) == (0, b""), arguments
    arguments = ["report", "gone", "--format", "junit"]
    error = called(*arguments, cwd=folder_with_run).err.encode()
    assert without_reader(subprocess.Popen, arguments, cwd=folder_with_run) == (1, error)


def test_an_output_that_is_full(folder_with_run: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [HARNESS, "list"], cwd=folder_with_run, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S
        )
    said = b"error: the output: No space left on device; what else would be printed is dropped\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_terminal_that_is_not_in_utf_8_gets_the_table(folder_with_run: Path) -> None:
    run = only_run(folder_with_run / "runs").name
    in_ascii = harness("report", run, cwd=folder_with_run, env={"PYTHONIOENCODING": "ascii"}).out
    assert in_ascii == harness("report", run, cwd=folder_with_run).out.encode("ascii", "backslashreplace").decode()


def test_a_live_load_ends_with_ctrl_c(tmp_path: Path, wording: Wording) -> None:
    path, port = write(tmp_path), free_port()
    with going("live", path.name, "--port", str(port), "--runs", "runs", cwd=tmp_path) as live:

        def page() -> str:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
                    return str(answer.read().decode())
            except OSError:
                return ""

        until(lambda: "<title>Locust" in page())
        live.interrupt()
        done = live.end()
        live.nothing_left()
    assert (done.code, done.err) == (130, f"{INTERRUPTED}\n")
    assert f"Locust: http://127.0.0.1:{port}\n" in done.out
    manifest = read_run(only_run(tmp_path / "runs"))
    assert manifest.status == "live"
    wording(sentences(manifest.reasons))


def test_live_on_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        done = called("live", write(tmp_path).name, "--port", str(port), cwd=tmp_path)
    assert (done.code, done.out) == (1, "") and f"--port: {port} " in done.err


def test_live_takes_one_load_and_no_mix(tmp_path: Path, wording: Wording) -> None:
    load = {"user": "batch", "batch_size": 1, "duration_s": 5}
    loads, mixes = {"a": load, "b": load}, {"both": ["a", "b"]}
    path = write(tmp_path, loads=loads, mixes=mixes, checks=[], warmup={"duration_s": 1})
    for given in ("both", "both.b"):  # of which b would come alone, without a word
        done = called("live", path.name, "--load", given, cwd=tmp_path)
        assert (done.code, done.out) == (1, "")
        wording(done.err)
