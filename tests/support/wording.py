"""What the product says in a test is in tests/golden/wording, a file for each folder of tests, and not in the test.

A test asserts codes and values, and gives what is said to the fixture `wording`. After a change of wording:
`python -m tests.support.wording tests/unit/machine ...` runs these tests and writes their sections anew. Read the
difference aloud.
"""

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.base.errors import HarnessError
from harness.base.files import ROOT
from harness.base.reason import Reason

Wording = Callable[..., None]
FOLDER = ROOT / "tests" / "golden" / "wording"
WRITES = "WORDING_IS_WRITTEN"
HEAD = "== "


def shown(said: object, temporary: Path, **names: object) -> str:
    """What is said, with a name for each value that differs between two runs of a test."""
    if isinstance(said, HarnessError):
        text = said.what + (f"\nnext: {said.next_step}" if said.next_step else "")
    elif isinstance(said, Reason):
        text = f"{said.code}: {said.text}"
    else:
        text = "\n".join(map(str, said)) if isinstance(said, list | tuple) else str(said)
    for name, value in names.items():
        text = text.replace(str(value), name)
    text = text.replace(str(ROOT), "ROOT")
    text = re.sub(rf"{re.escape(str(temporary))}/[\w.-]+", "DIR", text)
    text = re.sub(r"\b(127\.0\.0\.1|localhost):([1-5]\d|6[0-4])\d{3}\b", r"\1:PORT", text)  # one that was free
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) or "nothing"


def short_id(value: object) -> str | None:
    """The name of a parameter in the golden file, for parameters that are long texts: the last 40 characters."""
    return value[-40:] if isinstance(value, str) else None


def golden_file(test: Path) -> Path:
    """The file of a test's folder: tests/unit/machine has unit-machine.txt."""
    return FOLDER / f"{'-'.join(test.parent.relative_to(ROOT / 'tests').parts)}.txt"


def read_sections(path: Path) -> dict[str, list[str]]:
    """The texts of each test."""
    sections: dict[str, list[str]] = {}
    for part in re.split(rf"^{HEAD}", path.read_text(encoding="utf-8") if path.exists() else "", flags=re.M)[1:]:
        name, _, body = part.partition("\n")
        texts = re.split(r"^- ", body, flags=re.M)[1:]
        sections[name] = [re.sub(r"^  ", "", text.strip(), flags=re.M) for text in texts]
    return sections


def write_section(path: Path, name: str, texts: list[str]) -> None:
    """Replace the texts of a test; other processes write the same file."""
    path.parent.mkdir(exist_ok=True)
    lock = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sections = read_sections(path) | {name: texts}
        written = [
            "\n".join([f"{HEAD}{name}", *("- " + text.replace("\n", "\n  ") for text in sections[name])])
            for name in sorted(sections)
        ]
        path.write_text(re.sub(r" +$", "", "\n\n".join(written) + "\n", flags=re.M), encoding="utf-8")
    finally:
        os.close(lock)


def main(*folders: str) -> int:
    """Write the sections anew of all tests in these folders; of a file of tests only those that it says."""
    for folder in filter(os.path.isdir, folders):
        stem = golden_file((ROOT / folder).resolve() / "test.py").stem
        for path in (*FOLDER.glob(f"{stem}.txt"), *FOLDER.glob(f"{stem}-*.txt")):
            path.unlink()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *folders]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, WRITES: "1"}).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
