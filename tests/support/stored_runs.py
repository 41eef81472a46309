"""The committed runs of tests/runs and of other tools, as folders that the product reads."""

import gzip
import shutil
from pathlib import Path

from harness.base.files import ROOT
from harness.imports.write import import_file

RUNS = ROOT / "tests" / "runs"


IMPORTED = ROOT / "tests" / "data" / "imports"


SOURCES = {path.parent.name: path.parent for path in sorted(RUNS.glob("*/run.json"))}


SOURCES |= {f"import-{path.stem}": path for path in sorted(IMPORTED.glob("*.json"))}


def run_directory(source: Path, folder: Path) -> Path:
    """A copy of a run that the product can read, or the run that it makes of another tool's file."""
    if source.is_file():
        return import_file(source, folder, machine="example")
    if (source / "tune.json").exists():  # its answer comes from the records of its proof
        run_directory(source.with_name(f"{source.name}-proof"), folder)
    copy = Path(shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("summary.json")))
    for packed in copy.glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return copy
