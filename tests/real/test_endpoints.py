"""Completions, exact prompt lengths and structured answers on real engines."""

from pathlib import Path

import tokenizers

from harness.numbers.summary import Row
from harness.workload import text, words_of_tokenizer
from tests.real.conftest import CHOICES, WORK, Say, Timed
from tests.real.parts import Ran, llamacpp, run, write_scenario
from tests.support.engines.paths import QWEN3_100M


def rows(ran: Ran) -> dict[str, Row]:
    return {row.load: row for row in ran.summary.rows}


def test_llamacpp_counts_prompts_exactly_and_completes(tmp_path: Path, say: Say) -> None:
    loads = {
        "chat": {**WORK, "output_tokens": {"uniform": [4, 12]}},
        "text": {**WORK, "output_tokens": 8, "endpoint": "completions"},
        "whole": {**WORK, "output_tokens": 8, "endpoint": "completions", "stream": False},
    }
    prompts = {"tokens": {"uniform": [20, 120]}, "tokenizer": "server", "system_tokens": 10}
    servers = {"it": llamacpp()}
    _is_exact(run(write_scenario(tmp_path, "exact", model="tiny", servers=servers, loads=loads, prompts=prompts)), say)


def test_a_local_tokenizer_gives_exact_counts() -> None:
    path = QWEN3_100M / "tokenizer.json"
    words, tokenizer = words_of_tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    for tokens in (1, 3, 100, 1000):
        assert len(tokenizer.encode(text(tokens, 3, tokens, words), add_special_tokens=False).ids) == tokens


def test_llamacpp_keeps_to_choices(tmp_path: Path, say: Say) -> None:
    loads = {
        way.replace("_", "-"): {
            **WORK,
            "output": "natural",
            "output_tokens": 48,
            "answer": {"choice": "auto", "send": way},
        }
        for way in ("response_format", "grammar")
    }
    loads["known"] = {**WORK, "output": "natural", "output_tokens": 8, "answer": {"known": "computed"}}
    prompts = {"kind": "classification"}
    servers = {"it": llamacpp()}
    ran = run(write_scenario(tmp_path, "labels", model="tiny", servers=servers, loads=loads, prompts=prompts))
    _keeps_to(ran, ("response-format", "grammar"), say)
    known = [record for record in ran.records if record.load == "known" and record.phase == "measured"]
    assert {(record.item, record.error, record.answer_right) for record in known} == {
        (i, None, False) for i in range(12)
    }
    assert all(record.answer_digest for record in known)


def test_vllm_counts_prompts_exactly_and_completes(on_vllm: Timed, say: Say) -> None:
    _is_exact(on_vllm.ran, say)


def test_vllm_keeps_to_choices(on_vllm: Timed, say: Say) -> None:
    _keeps_to(on_vllm.ran, tuple(way.replace("_", "-") for way in CHOICES), say)


def _is_exact(ran: Ran, say: Say) -> None:
    assert (ran.code, ran.error, ran.summary.reasons) == (0, "", [])
    for name, row in rows(ran).items():
        prompts = row.pooled.prompts
        planned = ran.manifest.scenario.loads[name].requests
        assert prompts is not None and (prompts.requests, prompts.otherwise) == (planned, 0)
        say(f"{name}: every prompt has its planned length and {prompts.added} tokens of the template")
    for record in ran.records:
        assert record.error is None
        assert record.output_tokens == record.asked_tokens or not record.fixed_length
        assert bool(record.chunks_s) == (record.load != "whole")


def _keeps_to(ran: Ran, loads: tuple[str, ...], say: Say) -> None:
    assert (ran.code, ran.error, ran.summary.reasons) == (0, "", [])
    for name in loads:
        answers = rows(ran)[name].pooled.answers
        assert answers is not None
        say(f"{name}: {answers.valid} of {answers.checked} valid, {answers.right} right (random weights)")
        assert (answers.checked, answers.valid) == (12, 12)
