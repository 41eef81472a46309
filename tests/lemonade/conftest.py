"""A real Lemonade with llama.cpp, and one with vLLM, shared by the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.docker.conftest import client, compose_environment
from tests.lemonade.parts import Lemond, lemond, versions
from tests.real.conftest import say

__all__ = ["client", "compose_environment", "say"]


@pytest.fixture(scope="session", autouse=True)
def _tested_versions(request: pytest.FixtureRequest) -> None:
    """Print which Lemonade is tested: sid moves each day."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("\ntested: " + ", ".join(f"{name} {version}" for name, version in versions().items()))


@pytest.fixture(scope="module")
def on_llamacpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lemond]:
    with lemond(tmp_path_factory.mktemp("lemond")) as server:
        yield server


@pytest.fixture(scope="module")
def on_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lemond]:
    with lemond(tmp_path_factory.mktemp("lemond"), gpu=True) as server:
        yield server
