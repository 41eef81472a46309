"""The wheel, installed without the checkout, works from an empty directory."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from harness.base.files import COMPOSE, LOCUSTFILES, RESULTS, ROOT, SCENARIOS
from tests.support.command import PATIENCE_S
from tests.support.simulated import spawned


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `harness` command of a new environment that has the wheel; its dependencies are those of the tests."""
    at = tmp_path_factory.mktemp("wheel")
    source = at / "source"
    for name in ("harness", "scenarios", "compose", "locustfiles", "results/reference", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel: list[str | Path] = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", at, source]
    subprocess.run([*pip, *wheel], check=True, capture_output=True, cwd=at)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", at / "venv"], check=True)
    python = at / "venv" / "bin" / "python"
    (built,) = at.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", built], check=True, cwd=at)
    (packages,) = (at / "venv" / "lib").glob("python*/site-packages")
    # A .pth line adds the dependencies after the wheel, and does not run the .pth file of the editable install.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python.with_name("harness")


def run(installed: Path, *args: str, cwd: Path, quiet: bool = True) -> str:
    """The output of a command; `quiet`: it has no progress."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([installed, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and not (quiet and done.stderr), done.stderr
    return done.stdout


def test_the_wheel_has_every_file_that_the_commands_read(installed: Path) -> None:
    (package,) = (installed.parent.parent / "lib").glob("python*/site-packages/harness")
    wanted = [path for folder in (SCENARIOS, COMPOSE, LOCUSTFILES, RESULTS) for path in folder.rglob("*")]
    wanted += (ROOT / "docs").glob("*.md")
    names = {str(path.relative_to(ROOT)) for path in wanted if path.is_file() and path.suffix != ".pyc"}
    shipped = [path for path in package.glob("shipped/**/*.*") if path.suffix != ".pyc"]
    assert names == {str(path.relative_to(package / "shipped")) for path in shipped}
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "harness").rglob("*.*") if path.suffix != ".pyc"}
    assert own <= {str(path.relative_to(package.parent)) for path in package.rglob("*.*")}


def test_the_metadata_is_complete_and_valid_as_a_package_index_checks_it(installed: Path) -> None:
    (text,) = (installed.parent.parent / "lib").glob("python*/site-packages/amd_llm_load-*.dist-info/METADATA")
    found = Metadata.from_email(text.read_bytes(), validate=True)
    assert (found.name, str(found.version)) == ("amd-llm-load", run(installed, "--version", cwd=text.parent).split()[1])
    assert (found.license_expression, found.license_files) == ("MIT", ["LICENSE"])
    assert found.summary and found.keywords and found.author and found.classifiers
    assert str(found.requires_python) == ">=3.11" and found.description_content_type == "text/markdown"
    assert found.description == (ROOT / "README.md").read_text()
    assert found.provides_extra == ["tokenizer", "parquet", "notebook", "dev"]


def test_scenarios_are_listed_and_found_by_each_name(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(run(installed, "list", "scenarios", "--json", cwd=tmp_path))
    assert sorted(scenario["path"] for scenario in listed) == sorted(
        str(path.relative_to(ROOT)) for path in SCENARIOS.glob("*.yaml")
    )
    assert all(scenario["needs"] and scenario["estimated_s"] for scenario in listed)
    for name in ("first-look", "first-look.yaml", "scenarios/first-look.yaml"):
        assert "/site-packages/" in run(installed, "check", name, cwd=tmp_path).splitlines()[0]


def test_a_quick_measurement_and_its_report(installed: Path, tmp_path: Path) -> None:
    with spawned(quiet=True) as running:
        text = run(installed, "quick", running.url, "--json", cwd=tmp_path, quiet=False)
    quick = json.loads(text)
    assert quick["valid"] and quick["simulated"] and quick["model"] == "simulated"
    assert [level["users"] for level in quick["users"]] == [1, 4, 8]
    assert all(level["answers"] and level["tok_s"] > 0 for level in quick["users"])
    assert min(quick["one_user_tok_s"], quick["prefill_tok_s"], quick["ttft_ms"]) > 0
    assert quick["share"] is None and quick["prompt_tokens"] <= 128 and len(quick["next"]) == 4
    assert (tmp_path / quick["run"] / "report.html").exists()
    for name in (quick["run"], "last", "quick"):
        assert "VALID" in run(installed, "report", name, cwd=tmp_path)
