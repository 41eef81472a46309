"""A card has what decides the numbers, in few lines, and no text from outside does anything where it is pasted."""

import re
from pathlib import Path
from typing import Any

import pytest

from harness.base.errors import RunError
from harness.numbers.summarize import summarize
from harness.questions.results import result_card
from harness.records.manifest import Machine, ModelSize, Run
from harness.report.result_card import MAX_LINES, code, render_card
from harness.scenario import Load, Server
from harness.scenario.behaviour import AgentTrace
from tests.support.command import called
from tests.support.made_runs import scenario, served_by, write_made_run

HOSTILE = [
    "@everyone", "a | b", "x\n\n# title", "`code`", "``two``", "</details><script>alert(1)</script>", "#12 GH-3",
    "[link](http://x)", "![i](http://x)", "\u202eevil", "\\", "`", "``` \n", "a\r\n| b |", "~~~", "*b* _i_", "http://x",
]  # fmt: skip
MACHINE = Machine(
    name="strix", kernel="6.17.1", cpu="Ryzen", ram_bytes=128 * 2**30, rocm="7.0.2",
    gpus=[{"target": "gfx1151", "name": "Radeon 8060S", "vram_bytes": 2**29, "gtt_bytes": 116 * 2**30,
           "integrated": True, "performance_level": "auto"}],
    kernel_parameters={"power profile": "performance", "ttm.pages_limit": "30408704", "amdgpu version": "6.14.14"},
)  # fmt: skip


def made(folder: Path, **manifest: Any) -> Run:
    size = ModelSize(name="qwen3", weights_bytes=8 * 2**30, read_bytes=8e9)
    served = served_by(image="vllm:v1", image_digest="vllm@sha256:ab", model_size=size)
    options: dict[str, Any] = {"machine": MACHINE, "served": lambda cell: served}
    return write_made_run(folder, lambda cell: 10.0 + 0.01 * cell.repeat, **(options | manifest))


def test_a_card(tmp_path: Path) -> None:
    made(tmp_path / "one", scenario_name="vllm-or-llamacpp")
    text = result_card(tmp_path / "one", ["vllm-or-llamacpp"])
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES and lines[0] == "**`m` on `Radeon 8060S gfx1151`**"
    row = next(line for line in lines if "`a / x`" in line)
    assert re.fullmatch(r"\| `a / x` \| [\d.]+ \([\d.]+ to [\d.]+\) \| .+ \| 0 \| 5 \|", row)
    for part in ("VRAM (UMA) and 116", "RAM", "performance", "Linux 6.17.1", "ROCm 7.0.2",
                 "amdgpu 6.14.14", "ttm.pages_limit=30408704", "vllm@sha256:ab", "--max-num-seqs 8", "VALID",
                 "harness run vllm-or-llamacpp", "2027-01-15"):  # fmt: skip
        assert part in text, part
    made(tmp_path / "two")
    assert "harness run which.yaml" in result_card(tmp_path / "two", [])
    shown = called("results", "card", "one", "--runs", str(tmp_path), cwd=tmp_path)
    assert (shown.code, len(shown.out.splitlines())) == (0, len(lines))
    for action, form in (("card", "html"), ("card", "json"), ("add", "markdown")):
        refused = called("results", action, "one", "--format", form, "--runs", str(tmp_path), cwd=tmp_path)
        assert (refused.code, refused.out) == (1, "") and "--format" in refused.err


def test_a_large_run_stays_a_card(tmp_path: Path) -> None:
    servers = {f"s{number}": Server(template="vllm-cpu") for number in range(6)}
    loads = {f"l{number}": Load(user="batch", batch_size=2, requests=4, output_tokens=11) for number in range(5)}
    run = made(tmp_path / "large", made_of=scenario(servers=servers, loads=loads, repeats=1))
    text = render_card(run, summarize(tmp_path / "large"), "harness run which.yaml")
    assert len(text.splitlines()) <= MAX_LINES and "22 more rows" in text


def test_an_invalid_run_has_no_card(tmp_path: Path) -> None:
    made(tmp_path / "one", status="invalid")
    with pytest.raises(RunError):
        result_card(tmp_path / "one", [])


def outside_of_code(text: str) -> str:
    """A text without its code spans, as CommonMark finds them."""
    return re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_from_outside_stays_a_code_span(text: str, tmp_path: Path) -> None:
    for span in (code(text), code(text, in_cell=True)):
        assert outside_of_code(span) == "" and "\n" not in span and "\u202e" not in span
    assert "|" not in code(text, in_cell=True)
    machine = Machine(
        name=text, cpu=text, kernel=text, rocm=text, kernel_parameters={"power profile": text, text: text}
    )
    served = served_by(image=text, image_digest=text, version=text, arguments=[text, text])
    given = scenario(model=text if text.isprintable() and text.isascii() else "m")
    run = made(tmp_path / "one", made_of=given, machine=machine, served=lambda cell: served, scenario_name=text)
    card = render_card(run, summarize(tmp_path / "one"), text)
    plain = made(tmp_path / "plain", machine=Machine(name="m", cpu="c"))
    usual = render_card(plain, summarize(tmp_path / "plain"), "harness run which.yaml")
    assert len(card.splitlines()) == len(usual.splitlines()) <= MAX_LINES
    assert outside_of_code(card) == outside_of_code(usual)


def test_the_command_sends_the_same_requests(tmp_path: Path) -> None:
    trace = AgentTrace(file="/data/mine.jsonl", conversations=2)
    loads = {"x": Load(user="agent_trace", requests=4, agent_trace=trace)}
    running = served_by(template=None, url="http://127.0.0.1:1")
    made(tmp_path / "one", made_of=scenario(loads=loads), served=lambda cell: running, scenario_name="edge-agentic")
    (line,) = [line for line in result_card(tmp_path / "one", ["edge-agentic"]).splitlines() if "repeat it" in line]
    assert line == "- repeat it: `harness run edge-agentic --url URL --model m --trace mine.jsonl --slice 2`"
    (tmp_path / "one" / "inputs.json").write_text('{"options": {"--duration": "40s", "--slice": "2"}}')
    assert "--model m --duration 40s --trace mine.jsonl --slice 2`" in result_card(tmp_path / "one", ["edge-agentic"])
