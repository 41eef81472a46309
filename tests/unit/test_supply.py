"""What is installed: every dependency has a version and hashes, and the image has a list of its parts (SBOM)."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.base.files import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def locked(path: Path) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package."""
    found = {}
    for entry in re.split(r"\n(?=\S)", path.read_text()):
        if match := re.match(r"([\w.-]+)==(\S+)", entry):
            found[match[1]] = match[2], entry.count("--hash=sha256:")
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_line_has_a_version_and_hashes(path: Path) -> None:
    entries = [line for line in path.read_text().splitlines() if line[:1] not in ("#", " ")]
    assert len(entries) == len(locked(path)) > 40
    assert all(hashes for _version, hashes in locked(path).values())


def test_what_the_package_requires_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required, dev = project["dependencies"], project["optional-dependencies"]["dev"]
    for requirements, name in ((required, "run"), (required + dev, "dev")):
        names = {re.split(r"[<>=;\[ ]", requirement)[0].lower() for requirement in requirements}
        assert names <= locked(ROOT / "requirements" / f"{name}.txt").keys()
    run, dev = (locked(ROOT / "requirements" / f"{name}.txt") for name in ("run", "dev"))
    assert run.items() <= dev.items()


def test_the_list_of_the_image_names_all_its_parts(tmp_path: Path) -> None:
    made = tmp_path / "sbom.json"
    tool = Path(sys.executable).with_name("cyclonedx-py")
    subprocess.run([tool, "requirements", ROOT / "requirements" / "run.txt", "--output-file", made], check=True)
    parts = json.loads(made.read_text())["components"]
    listed = {part["name"].lower().replace("_", "-"): part["version"] for part in parts}
    assert listed == {name: version for name, (version, _) in locked(ROOT / "requirements" / "run.txt").items()}
    assert all(part["externalReferences"][0]["hashes"] for part in parts)
