"""The GitHub workflows: right by GitHub's schema, without common mistakes, and their steps do what they say."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import yaml
from junitparser import JUnitXml

from harness.base.files import ROOT
from harness.cli import app
from harness.records.records import read_marks
from tests.support.command import called, write
from tests.support.made_runs import write_lines

BIN = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def read(name: str) -> dict[Any, Any]:
    document = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    assert isinstance(document, dict)
    return document


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path.name)["jobs"].values() for step in job["steps"]]


def test_by_the_schema_of_github_and_without_common_mistakes(tmp_path: Path) -> None:
    """zizmor: unpinned actions, values of a caller inside a script, tokens that stay, and so on."""
    wrong = tmp_path / ".github" / "workflows" / "wrong.yml"
    wrong.parent.mkdir(parents=True)
    text = WORKFLOWS[0].read_text()
    for mistake, command in (
        (text.replace("runs-on:", "run-on:"), ["check-jsonschema", "--builtin-schema", "vendor.github-workflows"]),
        (text.replace('"$SCENARIO" --runs', "${{ inputs.scenario }} --runs"), ["zizmor", "--offline", "--quiet"]),
    ):
        check = [str(BIN / command[0]), *command[1:]]
        done = subprocess.run([*check, *WORKFLOWS], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        wrong.write_text(mistake)
        assert subprocess.run([*check, wrong], capture_output=True).returncode != 0, "it would notice"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_are_bash_and_call_what_there_is(path: Path) -> None:
    for step in steps(path):
        script = step.get("run")
        if script is None:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]), "pinned"
            continue
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        for command, rest in re.findall(r"\bharness ([a-z]+)(.*)", script):
            known = {option for parameter in COMMANDS[command].params for option in parameter.opts}
            assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known
        for target in re.findall(r"\bmake ([a-z-]+)", script):
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_who_may_start_what() -> None:
    assert list(read("amd-gate.yml")[True]) == ["workflow_dispatch"], "no stranger's fork runs on the GPU's machine"
    assert read("amd-gate.yml")["jobs"]["gate"]["runs-on"] == ["self-hosted", "amd-gpu"]
    assert set(read("ci.yml")[True]) == {"push", "pull_request"}
    for path in WORKFLOWS:
        assert read(path.name)["permissions"] == {"contents": "read"}


class Runner:
    """Does the scripts of the gate's steps in a folder, as GitHub's runner does: `bash -e FILE`."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder = folder
        job = read("amd-gate.yml")["jobs"]["gate"]
        assert "defaults" not in job and not any("shell" in step for step in job["steps"]), (
            "the shell is GitHub's default"
        )
        self._steps = {step["name"]: step for step in job["steps"] if "run" in step}
        self._inputs = inputs
        self.outputs: dict[str, str] = {}
        self._job_env = {name: self._filled(value) for name, value in job["env"].items()}
        self.summary = folder / "summary.md"

    def _filled(self, text: str) -> str:
        """A text with its expressions worked out: of inputs, with or without a default, and of the step `baseline`."""

        def value(match: re.Match[str]) -> str:
            given = re.fullmatch(r"inputs\.([a-z_]+)(?: \|\| '([^']*)')?", match[1])
            if given is not None:
                return self._inputs.get(given[1], "") or given[2] or ""
            output = re.fullmatch(r"steps\.baseline\.outputs\.([a-z]+)", match[1])
            assert output is not None, match[1]
            return self.outputs.get(output[1], "")

        return re.sub(r"\$\{\{ (.+?) \}\}", value, text)

    def step(self, name: str) -> int:
        step = self._steps[name]
        output = self.folder / "output"
        output.write_text("")
        env = {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(self.summary), **self._job_env,
            **{key: self._filled(value) for key, value in step.get("env", {}).items()},
        }  # fmt: skip
        script = self.folder / "step.sh"
        script.write_text(step["run"])
        done = subprocess.run(["bash", "-e", script], cwd=self.folder, env=env, capture_output=True, text=True)
        self.output = done.stdout + done.stderr
        self.outputs |= dict(line.split("=", 1) for line in output.read_text().splitlines())
        return done.returncode

    def junit(self, name: str) -> JUnitXml:
        return JUnitXml.fromfile(str(self.folder / "ci-junit" / name))


CHECKS = {"checks": "wall <= 60 s; goodput(e2e<=9s) > 0", "relative_checks": "wall <= 1000 * baseline", "about": ""}


def test_the_gate_closes_on_a_run_slower_than_its_history(tmp_path: Path) -> None:
    """The first run is published, without records; ten made runs of before are ten times as fast."""
    runner = Runner(tmp_path, scenario=write(tmp_path, checks=["error_rate == 0"]).name, **CHECKS)
    assert runner.step("Find the last published run") == 0
    assert runner.step("Measure") == 0, runner.output
    assert [(one.tests, one.failures) for one in map(runner.junit, ("run-1.xml", "run-2.xml"))] == [(4, 0)] * 2
    first, second = sorted((tmp_path / "ci-runs").iterdir())
    assert runner.step("Show") == 0
    assert "**PASSED" in runner.summary.read_text()
    done = called("results", "add", str(first), cwd=tmp_path)
    assert done.code == 0, done
    target = tmp_path / done.out.partition(":")[0]
    assert runner.step("Find the last published run") == 0
    assert runner.outputs == {"run": str(target.relative_to(tmp_path))}
    summary = json.loads((target / "summary.json").read_text())
    run = json.loads((target / "run.json").read_text())
    wall_s = summary["rows"][0]["wall"][0] / 10
    for number in range(10):
        earlier = target.parent / f"{number}"
        earlier.mkdir()
        earlier_s = wall_s * (1 + 0.001 * (number % 3))
        row, numbers = summary["rows"][0], summary["cells"][0]["numbers"]
        times = numbers["window_s"] / earlier_s
        of_time = {"wall": earlier_s, "window_s": earlier_s, "e2e": numbers["e2e"] | {"max": earlier_s}}
        rates = {name: numbers[name] * times for name in ("output_tok_s", "input_tok_s", "requests_per_s")}
        numbers |= of_time | rates
        row["pooled"] |= of_time | rates
        row |= {name: [numbers[name]] for name in ("wall", "output_tok_s", "input_tok_s")} | {"client_limited": []}
        (earlier / "summary.json").write_text(json.dumps(summary | {"run": f"{number}"}))
        when = {"id": f"{number}", "started_wall_s": run["started_wall_s"] - 3600 * (10 - number)}
        (earlier / "run.json").write_text(json.dumps(run | when))
        (earlier / "report.md").write_text("")
    shutil.rmtree(target)
    # This machine may have been busy with other work, which would leave no verdict.
    for marks in (first / "processes.jsonl", second / "processes.jsonl"):
        write_lines(marks, [msgspec.structs.replace(mark, loop_lag_mean_s=None) for mark in read_marks(marks)])
    assert runner.step("Compare with the history") == 4, runner.output
    (suite,) = runner.junit("compare.xml")
    assert (suite.tests, suite.failures) == (1, 1)
    assert "slower" in runner.summary.read_text()
