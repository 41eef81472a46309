"""A real Lemonade with llama.cpp, and one with vLLM, shared by the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.docker.conftest import client, compose_environment
from tests.lemonade.parts import Lemond, lemond
from tests.real.conftest import say

__all__ = ["client", "compose_environment", "say"]


@pytest.fixture(scope="module")
def on_llamacpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lemond]:
    with lemond(tmp_path_factory.mktemp("lemond")) as server:
        yield server


@pytest.fixture(scope="module")
def on_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lemond]:
    with lemond(tmp_path_factory.mktemp("lemond"), gpu=True) as server:
        yield server
