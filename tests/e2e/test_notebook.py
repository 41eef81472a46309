"""The example notebook runs, and its committed outputs are what it prints.

`python -m tests.e2e.test_notebook` writes the outputs anew.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from harness.base.files import ROOT
from tests.support.command import PATIENCE_S

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def executed(to: Path) -> Any:
    """The notebook after a run of all its cells, in a kernel of this Python."""
    code = (
        "import sys, nbformat\n"
        "from nbclient import NotebookClient\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "where = {'metadata': {'path': sys.argv[3]}}\n"
        "options = {'timeout': None, 'kernel_name': 'python3', 'resources': where, 'record_timing': False}\n"
        "NotebookClient(notebook, **options).execute()\n"
        "nbformat.write(notebook, sys.argv[2])\n"
    )
    ipython = Path(tempfile.gettempdir()) / "ipython-of-tests"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(ipython)}
    command = [sys.executable, "-c", code, str(NOTEBOOK), str(to), str(NOTEBOOK.parent)]
    subprocess.run(command, check=True, env=env, timeout=PATIENCE_S)
    return json.loads(to.read_text())


def printed(notebook: Any) -> list[str]:
    """What each code cell printed."""
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join("".join(output["text"]) for output in outputs) for outputs in cells]


def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel", "pandas"):
        pytest.importorskip(package, exc_type=ImportError)
    assert printed(executed(tmp_path / "executed.ipynb")) == printed(json.loads(NOTEBOOK.read_text()))


if __name__ == "__main__":
    executed(NOTEBOOK)
