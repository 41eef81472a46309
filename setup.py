"""Copies the folders next to the package into the wheel; all other settings are in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {
    "scenarios": "*.*",  # also the example of recorded agents
    "compose": "*.yaml*",
    "locustfiles": "*.py",
    "results/reference": "*.yaml",
    "docs": "*.md",
}


class BuildWithFolders(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout has the folders in their own place
            return
        for folder, names in SHIPPED.items():
            to = Path(self.build_lib) / "harness" / "shipped" / folder
            shutil.rmtree(to, ignore_errors=True)
            to.mkdir(parents=True)
            for path in Path(folder).glob(names):
                shutil.copy(path, to)


setup(cmdclass={"build_py": BuildWithFolders})
