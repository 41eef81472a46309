"""action.yml: its scripts, run as GitHub's runner does, measure, show and end as the measurement did."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from junitparser import JUnitXml

from harness.base.files import ROOT
from harness.base.process import free_port
from harness.records.manifest import read_run
from tests.support.command import PATIENCE_S, write

BIN = Path(sys.executable).parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
EXPRESSION = re.compile(r"\$\{\{ (.+?) \}\}")


class ActionRunner:
    """Does the scripts of the action in a folder with the files that GitHub's runner gives."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder = folder
        self.inputs = {name: str(entry["default"]) for name, entry in ACTION["inputs"].items()}
        self.inputs |= {name.replace("_", "-"): value for name, value in inputs.items()}
        self.outputs: dict[str, str] = {}
        self.paths: list[str] = []  # what is uploaded
        self.runner_os = "Linux"
        self.summary = folder / "summary.md"
        self.printed = ""

    def _filled(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            place, _, name = match[1].rpartition(".")
            return {"inputs": self.inputs, "steps.measure.outputs": self.outputs}[place].get(name, "")

        return EXPRESSION.sub(value, text)

    def step(self, name: str) -> int:
        (step,) = (step for step in STEPS if step["name"] == name)
        assert step["shell"] == "bash"
        output, temporary = self.folder / "output", self.folder / "temporary"
        output.write_text("")
        temporary.mkdir(exist_ok=True)
        env = {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(self.summary), "RUNNER_TEMP": str(temporary), "GITHUB_ACTION_PATH": str(ROOT),
            "RUNNER_OS": self.runner_os, **{key: self._filled(text) for key, text in step.get("env", {}).items()},
        }  # fmt: skip
        script = temporary / "step.sh"
        script.write_text(step["run"])
        shell: list[str | Path] = ["bash", "--noprofile", "--norc", "-eo", "pipefail", script]
        done = subprocess.run(
            shell,
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
        self.printed = done.stdout + done.stderr
        if step.get("id") == "find":
            self.paths = _list_output(output.read_text())
        else:
            self.outputs |= dict(line.split("=", 1) for line in output.read_text().splitlines())
        return done.returncode


def command_in(folder: Path, script: str) -> None:
    """Install a script as the command `harness` of the action that runs in a folder."""
    command = folder / "temporary" / "amd-llm-load" / "bin" / "harness"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/bash\n{script}\n")
    command.chmod(0o755)


def _list_output(text: str) -> list[str]:
    """Return the lines of the one output in a file for outputs, `NAME<<TOKEN`, lines, `TOKEN`; without it none."""
    if not text:
        return []
    first, *lines, last = text.splitlines()
    assert first == f"paths<<{last}"
    return lines


def test_it_is_an_action_whose_scripts_have_no_expressions() -> None:
    check = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.github-actions", str(ROOT / "action.yml")]
    for command in (check, [str(BIN / "zizmor"), "--offline", "--quiet", str(ROOT / "action.yml")]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for step in STEPS:
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
            continue
        assert "${{" not in step["run"]
        done = subprocess.run(["bash", "-n"], input=step["run"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    used = set(re.findall(r"inputs\.([a-z-]+)", (ROOT / "action.yml").read_text()))
    assert used - {"x"} == set(ACTION["inputs"])
    for path in re.findall(r"\$GITHUB_ACTION_PATH/([a-z./]+)", (ROOT / "action.yml").read_text()):
        assert (ROOT / path).exists()


def test_a_run_is_measured_shown_and_kept(tmp_path: Path) -> None:
    runner = ActionRunner(tmp_path, scenario=write(tmp_path, checks=["error_rate == 0"]).name)
    assert runner.step("Measure") == 0, runner.printed
    assert runner.outputs["verdict"] == "passed" and runner.outputs["exit-code"] == "0"
    folder = tmp_path / runner.outputs["run"]
    assert read_run(folder).status == "valid" and (folder / "report.html").exists()
    assert JUnitXml.fromfile(str(tmp_path / "runs" / "junit.xml")).failures == 0
    assert runner.step("Show") == 0, runner.printed
    assert "**PASSED" in runner.summary.read_text()
    assert runner.step("Find the run") == 0
    assert runner.paths == [f"./{folder.relative_to(tmp_path)}", "./runs/junit.xml"]
    assert runner.step("Result") == 0


@pytest.mark.parametrize(
    ("checks", "code", "verdict"), [(["wall <= 1 ms"], 4, "failed"), (["ttft_p99 <= 10 s"], 5, "unknown")]
)
def test_it_ends_as_the_measurement_did(checks: list[str], code: int, verdict: str, tmp_path: Path) -> None:
    runner = ActionRunner(tmp_path, scenario=write(tmp_path, checks=checks).name)
    assert runner.step("Measure") == 0, "the summary and the artifact come before the result"
    assert (runner.outputs["verdict"], runner.outputs["exit-code"]) == (verdict, str(code)), runner.printed
    assert runner.step("Show") == 0 and runner.summary.read_text()
    assert runner.step("Result") == code
    runner.inputs["allow-unknown"] = "true"
    assert runner.step("Result") == (0 if code == 5 else code)


def test_the_summary_says_what_the_exit_code_says(tmp_path: Path) -> None:
    """Of a gate, in both words of `args` and of the input; also where checks pass, and of each of several runs."""
    slow = {"template": "simulated", "container": False, "variables": {"extra_args": ["--slowdown", "3"]}}
    servers = {"old": {"template": "simulated", "container": False}, "new": slow}
    scenario = write(tmp_path, servers=servers, repeats=4, checks=["error_rate == 0"], question="Slower?").name
    runner = ActionRunner(tmp_path, scenario=scenario, tolerance="10%", args="--times=2")
    assert runner.step("Measure") == 0
    assert (runner.outputs["verdict"], runner.outputs["exit-code"]) == ("failed", "4"), runner.printed
    assert runner.step("Show") == 0
    shown = runner.summary.read_text()
    assert shown.startswith("`harness run`: failed (exit code 4)\n") and "PASSED" not in shown
    assert shown.count("Slower: new / burst") == shown.count("**FAILED") == 2


def test_the_summary_has_the_checks_against_a_baseline(tmp_path: Path) -> None:
    name = write(tmp_path).name
    first = ActionRunner(tmp_path, scenario=name)
    assert first.step("Measure") == 0 and first.outputs["exit-code"] == "0", first.printed
    check = "--check=wall <= 0.001 * baseline"
    for args, code, word in ((f"{check}\n--provisional", "4", "**FAILED"), ("", "0", "VALID")):
        runner = ActionRunner(tmp_path, scenario=name, baseline=Path(first.outputs["run"]).name, args=args)
        runner.summary = tmp_path / f"summary-{code}.md"
        assert runner.step("Measure") == 0 and runner.outputs["exit-code"] == code, runner.printed
        assert runner.step("Show") == 0 and word in runner.summary.read_text()


def test_the_summary_has_the_reason_of_an_error(tmp_path: Path) -> None:
    """As code, and as one line of an `::error::` command, in which % is escaped."""
    scenario = write(tmp_path).name
    for number, (inputs, reason) in enumerate([
        ({"scenario": "no-such%0A.yaml"}, "there is no such scenario"),
        ({"scenario": scenario, "tolerance": "a%bit"}, "a%bit"),
        ({"command": "compare", "baseline": "gone`<b>", "against": "gone"}, "gone`<b>"),
    ]):  # fmt: skip
        runner = ActionRunner(tmp_path, **inputs)
        runner.summary = tmp_path / f"summary-{number}.md"
        assert runner.step("Measure") == 0 and runner.outputs["verdict"] == "usage", runner.printed
        (line,) = (line for line in runner.printed.splitlines() if line.startswith("::error::amd-llm-load: "))
        assert reason.replace("%", "%25") in line and "%0A" not in line
        resumed = runner.printed.index("::error::")
        assert runner.printed[:resumed].count("::stop-commands::") == 1
        assert runner.step("Show") == 0 and runner.step("Result") == 1
        head, blank, *lines = runner.summary.read_text().splitlines()
        assert (head.endswith("usage (exit code 1)"), blank) == (True, "")
        assert lines[0].startswith("    error: ") and reason in lines[0] and any("    next: " in line for line in lines)
        assert all(line.startswith("    ") for line in lines if line)


def test_an_error_is_bounded(tmp_path: Path) -> None:
    runner = ActionRunner(tmp_path, scenario="any.yaml")
    command_in(tmp_path, "for i in {1..9000}; do printf 'error: %s µµµ\\r::add-mask::x\\n' $i$i$i >&2; done; exit 2")
    assert runner.step("Measure") == 0, runner.printed
    (line,) = (line for line in runner.printed.splitlines() if line.startswith("::error::"))
    assert line == "::error::amd-llm-load: 111 µµµ::add-mask::x"
    assert runner.step("Show") == 0, runner.printed
    data = runner.summary.read_bytes()
    assert len(data) < 20_000 and b"\r" not in data and "    error: 111 µµµ" in data.decode()


def test_a_refused_input_is_in_the_summary(tmp_path: Path) -> None:
    for inputs in ({}, {"scenario": "a.yaml", "args": "--resume=x"}, {"scenario": "a\nb"}, {"command": "rm"}):
        runner = ActionRunner(tmp_path, **inputs)
        assert runner.step("Measure") == 1
        (line,) = (line for line in runner.printed.splitlines() if line.startswith("::error::"))
        assert runner.summary.read_text() == f"{line.removeprefix('::error::')}\n"
        runner.summary.unlink()


def test_the_folder_of_runs_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    runner = ActionRunner(tmp_path, scenario=write(tmp_path).name)
    assert runner.step("Measure") == 0 and runner.outputs["verdict"] == "passed", runner.printed
    assert runner.step("Find the run") == 0
    assert runner.paths == [runner.outputs["run"], "./runs/junit.xml"] and "//" not in runner.outputs["run"]
    assert (tmp_path / runner.outputs["run"] / "run.json").exists()


def test_runs_are_compared(tmp_path: Path) -> None:
    runner = ActionRunner(tmp_path, scenario=write(tmp_path).name, args="--times=2\n--repeats=1\n\n")
    assert runner.step("Measure") == 0, runner.printed
    first, second = sorted(path.parent.name for path in (tmp_path / "runs").glob("*/run.json"))
    assert runner.outputs["run"].endswith(second)
    compare = ActionRunner(tmp_path, command="compare", baseline=f"{first}\n", against=second, tolerance="90%")
    assert compare.step("Measure") == 0, compare.printed
    assert compare.outputs["exit-code"] in ("0", "5"), "the machine may be busy"
    assert compare.outputs["run"] == ""
    assert JUnitXml.fromfile(str(tmp_path / "runs" / "compare.xml")).tests >= 1
    assert compare.step("Show") == 0 and (tmp_path / "runs" / "compare.md").read_text() in compare.summary.read_text()
    assert compare.step("Find the run") == 0 and compare.paths == ["./runs/compare.xml", "./runs/compare.md"]
    refused = ActionRunner(tmp_path, command="compare", baseline="no-such-run", against=second)
    assert refused.step("Measure") == 0
    assert (refused.outputs["verdict"], refused.step("Result")) == ("usage", 1)


def test_a_run_that_was_cut_is_kept(tmp_path: Path) -> None:
    """A job that times out ends the step `Measure` without outputs; what an earlier step wrote stays where it is."""
    runner = ActionRunner(tmp_path)
    runner.step("Check the runner")
    for name, files in (("earlier", ["run.json"]), ("cut", ["run.json"]), ("none", [])):
        (tmp_path / "runs" / name).mkdir(parents=True)
        for file in files:
            (tmp_path / "runs" / name / file).touch()
    assert runner.step("Find the run") == 0 and runner.paths == [], "nothing was started"
    (tmp_path / "temporary" / "amd-llm-load-before").write_text("./runs/earlier\n")
    assert runner.step("Find the run") == 0 and runner.paths == ["./runs/cut"]


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (0, "usage"),
        (2, "not-ready"),
        (3, "invalid"),
        (130, "interrupted"),
        (99, "error"),
        (137, "error"),
        (143, "error"),
    ],
)
def test_every_exit_code_has_a_verdict(code: int, verdict: str, tmp_path: Path) -> None:
    """137 and 143: killed, as without memory. 0 without a run: nothing was measured."""
    runner = ActionRunner(tmp_path, scenario="any.yaml")
    command_in(tmp_path, f"exit {code}")
    assert runner.step("Measure") == 0
    assert runner.outputs["verdict"] == verdict
    assert runner.step("Show") == 0 and verdict in runner.summary.read_text()
    assert runner.step("Result") == (code or 1)


def test_a_running_server_needs_no_scenario(tmp_path: Path) -> None:
    server = ActionRunner(tmp_path, url=f"http://127.0.0.1:{free_port()}")
    assert server.step("Measure") == 0
    assert server.outputs["verdict"] == "not-ready", server.printed
    neither = ActionRunner(tmp_path)
    assert neither.step("Measure") == 1 and "::error::" in neither.printed and not neither.outputs


@pytest.mark.parametrize("command", ["run", "compare"])
def test_options_that_the_action_sets_are_refused(command: str, tmp_path: Path) -> None:
    for word in (
        "--markdown=x", "--format=json", "--format", "--format json", "--form=json",
        "--junit=elsewhere", "--jun", "--runs=x", "--runs",
        "--help", "-h", "--version", "--resume=20260101", "--resume",
    ):  # fmt: skip
        runner = ActionRunner(tmp_path, command=command, scenario="x.yaml", baseline="a", against="b", args=word)
        assert runner.step("Measure") == 1 and not runner.outputs, word
        assert "::error::" in runner.printed


def test_a_report_that_is_too_long_is_cut(tmp_path: Path) -> None:
    """GitHub refuses a summary of more than 1 MiB, and then the step has failed."""
    runner = ActionRunner(tmp_path, command="compare")
    runner.outputs = {"verdict": "passed", "exit-code": "0", "run": ""}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "compare.md").write_text("a line of the report, 6 µs\n" * 100_000)
    assert runner.step("Show") == 0, runner.printed
    data = runner.summary.read_bytes()
    assert len(data) < 2**20 and len(data) > 900_000
    lines = data.decode().splitlines()
    assert "passed" in lines[0] and lines[-1] == "a line of the report, 6 µs"


def test_it_needs_linux(tmp_path: Path) -> None:
    runner = ActionRunner(tmp_path)
    assert runner.step("Check the runner") == 0
    for name in ("Windows", "macOS", ""):
        runner.runner_os = name
        assert runner.step("Check the runner") == 1 and "::error::" in runner.printed


HOSTILE = ["$(touch pwned)", "' ; touch pwned '", "x\nexit-code=0", "--help"]
MORE = [
    "; touch pwned", "`touch pwned`", '" ; touch pwned "', "x\ntouch pwned", "| touch pwned", "&& touch pwned",
    "\\\ntouch pwned", "${{ x }}", "*", "::error::x",
]  # fmt: skip


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("text", [*HOSTILE, *(pytest.param(text, marks=pytest.mark.nightly) for text in MORE)])
def test_what_an_input_says_is_never_run(text: str, command: str, tmp_path: Path) -> None:
    """All inputs have it; nothing but an error comes of it."""
    given = dict.fromkeys(("url", "baseline", "against", "tolerance", "args"), text)
    scenario = text if command == "compare" else "none.yaml"
    runner = ActionRunner(tmp_path, command=command, scenario=scenario, **given)
    code = runner.step("Measure")
    assert not list(tmp_path.rglob("pwned"))
    assert code == 1 or runner.outputs["exit-code"] not in ("", "0"), runner.printed
    assert set(runner.outputs) in (set(), {"run", "verdict", "exit-code"})
    assert runner.step("Result") != 0
    for name in ("command", "runs", "scenario") if command == "run" else ():
        runner = ActionRunner(tmp_path, **{"scenario": "none.yaml", name: text})
        runner.step("Measure")
        assert not list(tmp_path.rglob("pwned")) and runner.step("Result") != 0, name
