"""Pinned images, and notes before a start: old pins, flags and variables that vLLM has removed."""

from datetime import timedelta
from typing import Any

import pytest
import yaml

from harness.base.files import COMPOSE
from harness.scenario import Gateway, Load, Scenario, Server
from harness.serve.lint import find_vllm_version, pin_notes, removed_notes
from harness.serve.template import (
    GATEWAYS,
    find_pin,
    find_variable_problems,
    pins,
    prepare_server,
    read_variables,
    templates,
)
from tests.support.command import harness
from tests.support.wording import Wording


def scenario(template: str, gateway: Gateway | None = None, **variables: Any) -> Scenario:
    server = Server(template=template, variables=variables, gateway=gateway)
    return Scenario(version=1, question="q", model="m", servers={"s": server}, loads={"l": Load(user="batch")})


def test_each_pin_is_the_default_of_its_templates_and_of_no_other() -> None:
    pinned = {name for name in (*templates(), *GATEWAYS) if read_variables(name)["image"].pinned}
    assert pinned == {name for pin in pins() for name in pin.templates} - {"monitoring"}
    for name in pinned:
        assert read_variables(name)["image"].default == find_pin(name).image
    for pin in pins():
        assert pin.version in pin.image and pin.source.startswith("https://") and pin.day.year >= 2025
        assert not pin.image.endswith((":latest", ":nightly")) and ":" in pin.image
    monitoring = yaml.safe_load((COMPOSE / "monitoring.yaml").read_text())
    images = [service["image"] for service in monitoring["services"].values()]
    assert images == [pin.image for pin in pins() if "monitoring" in pin.templates]


def test_a_pin_older_than_120_days_is_noted(wording: Wording) -> None:
    pin = find_pin("vllm-rocm")
    used = scenario("vllm-rocm")
    assert pin_notes(used, pin.day + timedelta(days=120)) == []
    (note,) = pin_notes(used, pin.day + timedelta(days=121))
    assert "'s'" in note and "121" in note
    wording(note)
    assert pin_notes(scenario("vllm-rocm", image="me/mine:1"), pin.day + timedelta(days=999)) == []
    assert pin_notes(scenario("simulated"), pin.day + timedelta(days=999)) == []
    front = scenario("simulated", Gateway(template="litellm"))
    assert len(pin_notes(front, find_pin("litellm").day + timedelta(days=999))) == 1


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai-rocm:v0.31.0", (0, 31, 0)),
        ("localhost:5000/vllm/vllm-openai-rocm:v0.17.1@sha256:0123", (0, 17, 1)),
        ("rocm/vllm:rocm7.14.0_rdna_ubuntu24.04_py3.14_pytorch_2.11.0_vllm_0.23.0", (0, 23, 0)),
        ("rocm/vllm-dev:nightly", None),
        ("me/vllm", None),
        ("docker.io/kyuz0/vllm-therock-gfx1151:latest", None),
    ],
)
def test_the_version_that_a_tag_names(image: str, version: tuple[int, ...] | None) -> None:
    assert find_vllm_version(image) == version


REMOVED = ["--swap-space", "16", "--disable-log-requests", "--num_scheduler_steps=8"]


def test_flags_and_variables_that_are_removed_are_noted_before_the_start(wording: Wording) -> None:
    environment = {"VLLM_USE_V1": "0", "VLLM_USE_TRITON_FLASH_ATTN": "0", "VLLM_LOGGING_LEVEL": "DEBUG"}
    notes = removed_notes(scenario("vllm-rocm", extra_args=REMOVED, environment=environment))
    named = ("--swap-space", "--disable-log-requests", "--num-scheduler-steps", *sorted(environment, reverse=True))
    assert len(notes) == len(named)
    assert all(any(name in note for note in notes) for name in named)
    assert "0.31.0" in notes[0] and "--swap-space" in notes[0]
    wording(notes[0])
    old = removed_notes(scenario("vllm-rocm", image="vllm/vllm-openai-rocm:v0.17.1", extra_args=REMOVED))
    assert [flag for flag in named[:3] if any(flag in note for note in old)] == list(named[1:3])
    unknown = removed_notes(scenario("vllm-rocm", image="me/mine:7", extra_args=["--swap-space", "16"]))
    assert len(unknown) == 1 and "--swap-space" in unknown[0]
    wording(unknown[0])
    behind = removed_notes(scenario("lemonade", vllm_args="--swap-space 16", environment={"VLLM_USE_V1": "0"}))
    assert len(behind) == 2
    assert removed_notes(scenario("llamacpp", extra_args=["--device", "ROCm0"])) == []


@pytest.mark.parametrize("template", ["vllm-rocm", "vllm-cpu", "vllm-offline"])
def test_the_longest_context_may_be_left_to_vllm(template: str) -> None:
    used = scenario(template, max_model_len="auto")
    assert list(find_variable_problems(used.servers["s"])) == []
    command = [str(word) for word in prepare_server(used, "s").service.command or []]
    assert command[command.index("--max-model-len") + 1] == "auto"
    (problem,) = find_variable_problems(scenario(template, max_model_len="long").servers["s"])
    assert "auto" in problem.text


def test_check_and_run_note_them(tmp_path: Any) -> None:
    (tmp_path / "s.yaml").write_text(
        "version: 1\nquestion: Does it start?\nmodel: m\n"
        "servers: {s: {template: vllm-rocm, variables: {max_model_len: auto, extra_args: [--swap-space, '16']}}}\n"
        "loads: {l: {user: batch, batch_size: 1, requests: 20}}\n"
    )
    done = harness("check", "s.yaml", cwd=tmp_path)
    assert done.code == 0 and "--swap-space (removed in 0.18.0)" in " ".join(done.out.split())
