"""The measurement of a GPU's bandwidth in a container, where it must fail."""

import pytest

from harness.base.errors import ServerError
from harness.serve.container_bandwidth import measure_gpu
from harness.serve.docker_engine import RUN_LABEL, connect
from tests.docker.conftest import BASE


def test_a_measurement_that_fails_leaves_no_container() -> None:
    """There is no GPU here, or no torch in the image."""
    with pytest.raises(ServerError, match="^--measure: "):
        measure_gpu(BASE)
    with pytest.raises(ServerError, match="amd-llm-load-test/absent:1") as caught:
        measure_gpu("amd-llm-load-test/absent:1")
    assert caught.value.next_step == "docker pull amd-llm-load-test/absent:1"
    assert connect().containers.list(all=True, filters={"label": f"{RUN_LABEL}=expect"}) == []
