"""A real LiteLLM proxy before the embedded engine, both in containers: what passes through it, and what it costs."""

from typing import Any

import pytest

from harness.base.files import ROOT
from harness.records.records import Request
from harness.records.samples import read_metrics
from tests.docker.conftest import build_image
from tests.real.conftest import Say
from tests.real.parts import RUN_S, Ran, left_behind, run, write_scenario
from tests.support.command import reasons_but_slowness, stamped_by_kernel
from tests.support.engines.paths import BASE_IMAGE, LITELLM_VENV

TOKENS = 16
LOADS = {"one-at-a-time": (1, 20), "ten-at-a-time": (10, 40)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    engine: dict[str, Any] = {"template": "simulated", "variables": {"image": build_image(), "preset": "instant"}}
    litellm = {
        "image": BASE_IMAGE,
        "entrypoint": [str(LITELLM_VENV / "bin" / "litellm")],
        "volumes": [f"{LITELLM_VENV}:{LITELLM_VENV}:ro"],
        "environment": {"LITELLM_MASTER_KEY": "${KEY_OF_THE_TEST}"},
    }
    scenario = write_scenario(
        tmp_path_factory.mktemp("litellm"),
        "tax",
        question="What does a LiteLLM proxy cost?",
        model="my/model",
        servers={
            "direct": engine,
            "through": engine | {"gateway": {"template": "litellm", "variables": litellm}, "startup_timeout_s": RUN_S},
        },
        loads={
            name: {"user": "batch", "batch_size": size, "requests": number, "output_tokens": TOKENS}
            for name, (size, number) in LOADS.items()
        },
        api_key_env="KEY_OF_THE_TEST",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_THE_TEST", "sk-of-a-test-0123456789")
        return run(scenario)


def measured(ran: Ran, cell: str) -> dict[int, Request]:
    return {record.index: record for record in ran.records if (record.cell, record.phase) == (cell, "measured")}


def test_streams_and_usage_arrive_right(ran: Ran, say: Say) -> None:
    say(ran.said)
    assert (ran.code in (0, 3), ran.error) == (True, "") and reasons_but_slowness(ran.folder) == []
    assert stamped_by_kernel(ran.records)
    for name, (_, number) in LOADS.items():
        direct, through = (measured(ran, f"r1-{server}-{name}") for server in ("direct", "through"))
        assert sorted(direct) == sorted(through) == list(range(number))
        for index, record in through.items():
            assert (record.error, record.status, record.finish) == (None, 200, "length")
            # ignore_eos got through drop_params, so every answer has its full length.
            assert record.output_tokens == record.asked_tokens == TOKENS
            assert record.prompt_tokens == direct[index].prompt_tokens
            assert 1 < len(record.chunks_s) <= TOKENS


def test_the_report_has_the_proxys_share(ran: Ran) -> None:
    found = {one.code: one for one in ran.summary.findings or []}["gateway_share"]
    expected = found.actions[0].gain
    assert set(found.rows) == {f"through / {load}" for load in LOADS}
    assert not ran.summary.valid or expected is not None, "an INVALID run promises nothing"
    assert expected is None or 0 < expected.values["factor"] < 1


def test_what_stood_in_front_is_recorded_and_the_metrics_are_the_servers(ran: Ran) -> None:
    by_cell = {cell.id: cell.served_by for cell in ran.manifest.cells}
    assert by_cell["r1-direct-one-at-a-time"].gateway is None
    front = by_cell["r1-through-one-at-a-time"].gateway
    assert front is not None
    lock = (ROOT / "tests" / "support" / "engines" / "litellm.lock").read_text().splitlines()
    pinned = next(line for line in lock if line.startswith("litellm=="))
    assert (front.template, f"litellm=={front.version}", front.model) == ("litellm", pinned, "my/model")
    assert [phase.name for phase in front.phases] == ["pull", "create", "port open", "health", "first answer"]
    samples = read_metrics(ran.folder / "metrics.jsonl")["r1-through-ten-at-a-time"]
    grown = samples[-1].values["generated_tokens"] - samples[0].values["generated_tokens"]
    of_cell = [record for record in ran.records if record.cell == "r1-through-ten-at-a-time"]
    assert grown == sum(record.output_tokens or 0 for record in of_cell)
    assert all(b"sk-of-a-test" not in file.read_bytes() for file in ran.folder.rglob("*") if file.is_file())
    assert left_behind(ran.folder) == []
