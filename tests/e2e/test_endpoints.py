"""Completions, embeddings and structured answers: on the wire, in records, summed up, in reports and checks."""

import csv
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.base.files import ROOT
from harness.base.measured import Answers, PromptLengths
from harness.base.reason import evidence, sentence, sentences
from harness.numbers.summarize import read_summary
from harness.numbers.summary import Row, Summary
from harness.questions.compare.decide import answer_difference as difference
from harness.records.records import Request, read_requests
from harness.scenario import Prompts
from tests.support.command import PATIENCE_S, SMALL, harness
from tests.support.command import server as embedded
from tests.support.made_runs import one_cell, request
from tests.support.simulated import Spawned, spawned
from tests.support.wording import Wording

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"


@pytest.fixture(scope="module")
def server() -> Iterator[Spawned]:
    with spawned("--preset", "instant", "--model", "tiny") as it:
        yield it


def post(server: Spawned, path: str, body: dict[str, Any], fault: str = "") -> Any:
    headers = {"Content-Type": "application/json", "X-Simulate-Fault": fault}
    asked = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
        return json.loads(response.read())


def answer_text(server: Spawned, fault: str = "", **more: Any) -> str:
    messages = [{"role": "user", "content": "one two three"}]
    answer = post(server, CHAT, {"messages": messages, "max_tokens": 20, **more}, fault)
    assert answer["choices"][0]["finish_reason"] == "stop"
    return str(answer["choices"][0]["message"]["content"])


def test_the_embedded_engine_answers_in_the_form_that_is_asked_for(server: Spawned) -> None:
    schema = {"type": "object", "properties": {"label": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 3}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    value = json.loads(answer_text(server, response_format=form))
    assert value["label"] in ("a", "b") and value["n"] == 3
    chosen = answer_text(server, structured_outputs={"choice": ["yes", "no"]})
    assert chosen in ("yes", "no")
    assert (
        answer_text(server, "wrong", structured_outputs={"choice": ["yes", "no"]}) == {"yes": "no", "no": "yes"}[chosen]
    )
    assert answer_text(server, grammar='root ::= "yes" | "no"') == chosen
    assert answer_text(server, "invalid", structured_outputs={"choice": ["yes", "no"]}) == "none of these"


def run(folder: Path, **keys: Any) -> tuple[Path, Summary, list[Request]]:
    (folder / "s.yaml").write_text(yaml.safe_dump(SMALL | keys, sort_keys=False))
    done = harness("run", "s.yaml", "--runs", "runs", cwd=folder)
    assert done.err == "", done
    (where,) = (folder / "runs").iterdir()
    records = [record for record in read_requests(where / "requests.jsonl") if record.phase == "measured"]
    summary = read_summary(where)
    assert done.code == (4 if any(check.status == "failed" for check in summary.checks) else 0), done.out + done.err
    return where, summary, records


def rows_of(summary: Summary) -> dict[str, Row]:
    return {row.load: row for row in summary.rows}


def test_every_endpoint_is_driven_and_recorded(tmp_path: Path) -> None:
    loads = {
        "chat": {"user": "batch", "requests": 6, "output_tokens": {"uniform": [2, 9]}},
        "text": {"user": "batch", "requests": 6, "output_tokens": 4, "endpoint": "completions"},
        "whole": {"user": "batch", "requests": 6, "output_tokens": 4, "endpoint": "completions", "stream": False},
        "vectors": {"user": "batch", "requests": 6, "endpoint": "embeddings"},
        "messages": {"user": "batch", "requests": 6, "output_tokens": 4, "endpoint": "messages", "output": "natural"},
        "message": {"user": "batch", "requests": 6, "output_tokens": 4, "endpoint": "messages", "output": "natural",
                    "stream": False},
    }  # fmt: skip
    prompts = {"tokens": {"uniform": [5, 50]}, "tokenizer": "server"}
    servers = {"one": embedded("--step-base-s", "0.05")}
    where, summary, records = run(tmp_path, servers=servers, loads=loads, prompts=prompts, restart=False)
    assert summary.reasons == []
    by_load = {name: [record for record in records if record.load == name] for name in loads}
    assert [record.error for record in records] == [None] * 36
    assert all(record.output_tokens == record.asked_tokens for record in records if record.load != "vectors")
    assert len({record.asked_tokens for record in by_load["chat"]}) > 1
    assert all(len(record.chunks_s) == 4 for record in by_load["text"])
    assert all(len(record.chunks_s) == 4 for record in by_load["messages"])
    assert all(record.chunks_s == [] for record in by_load["whole"] + by_load["message"])
    for record in by_load["vectors"]:
        assert (record.vectors, record.output_tokens, record.asked_tokens, record.chunks_s) == (1, None, None, [])
    # The template adds 5 words to a chat; the others are sent as they are.
    rows = rows_of(summary)
    added = {name: row.pooled.prompts.added for name, row in rows.items() if row.pooled.prompts is not None}
    assert added == {"chat": 5, "text": 0, "whole": 0, "vectors": 0, "messages": 5, "message": 5}
    vectors = rows["vectors"].pooled
    assert (vectors.vectors, vectors.ttft.n, vectors.e2e.n, vectors.output_tok_s) == (6, 0, 6, None)
    assert vectors.input_tok_s == pytest.approx((vectors.prompt_tokens or 0) / (vectors.wall or 1))
    table = harness("report", str(where), "--format", "markdown", cwd=tmp_path).out.splitlines()
    cells = next(line for line in table if line.startswith("| one | vectors")).split(" | ")
    heads = next(line for line in table if line.startswith("| Server")).split(" | ")
    shown = dict(zip(heads, cells, strict=True))
    assert (shown["TTFT mean, ms"], shown["TPOT mean, ms"], shown["Aggregate tok/s"]) == ("–", "–", "–")
    assert shown["E2E mean, ms"].endswith(" (n = 6)") and float(shown["Prompt tok/s"].strip("‡").replace(",", "")) > 0


def test_a_fast_wrong_server_does_not_win(tmp_path: Path) -> None:
    slow = ("--step-base-s", "0.02")
    where, summary, records = run(
        tmp_path,
        servers={"one": embedded(*slow), "bad": embedded(*slow, "--fault", "wrong@5", "--fault", "invalid@10")},
        loads={"l": {"user": "batch", "batch_size": 5, "requests": 60, "output_tokens": 16, "output": "natural",
                     "answer": {"choice": "auto"}}},
        prompts={"kind": "classification"},
        checks=["valid_share >= 0.95", "one/l: right_share == 100%"],
    )  # fmt: skip
    assert summary.reasons == []
    good, other = (row.pooled.answers for row in summary.rows)
    assert good == Answers(checked=60, valid=60, valid_share=1.0, labelled=60, right=60, right_share=1.0)
    assert other is not None and (other.valid, other.right) == (54, 48)
    assert [(check.status, evidence(check.evidence)) for check in summary.checks] == [
        ("failed", "bad / l: 90 %"),
        ("passed", "one / l: 100 %"),
    ]
    assert {record.answer_valid for record in records} == {True, False}
    text = (where / "requests.jsonl").read_text()
    assert "none of these" not in text and "billing" not in text
    made = {form: harness("report", str(where), "--format", form, cwd=tmp_path).out for form in
            ("markdown", "csv")}  # fmt: skip
    assert "54 of 60 (90.0 %)" in made["markdown"]
    rows = {row["server"]: row for row in csv.DictReader(made["csv"].splitlines())}
    assert (rows["bad"]["answers_valid"], rows["bad"]["right_share"]) == ("54", "0.8")
    assert "54 of 60 <small>(90.0 %)</small>" in (where / "report.html").read_text()


def test_a_server_with_more_mistakes_gives_worse_answers(tmp_path: Path) -> None:
    questions = (ROOT / "harness" / "data" / "questions.jsonl").read_text().splitlines()[:60]
    (tmp_path / "mine.jsonl").write_text("\n".join(questions))
    where, summary, records = run(
        tmp_path,
        servers={"one": embedded("--fault", "flips:0.05"), "bad": embedded("--fault", "mistakes:0.5")},
        loads={"l": {"user": "batch", "in_flight": 6, "requests": 120, "output": "natural", "output_tokens": 40,
                     "answer": {"known": "file"}}},
        prompts={"kind": "file", "file": "mine.jsonl"},
    )  # fmt: skip
    (verdict,) = summary.same_answers
    assert (verdict.side, verdict.word, verdict.questions, verdict.noise[0]) == ("bad", "worse", 60, 0.0)
    assert (verdict.right[1] or 0) > 0.85 and verdict.noise[1] is not None and 0 < verdict.noise[1] < 0.25
    assert summary.reasons == []  # answers do not depend on how busy this machine is
    page = (where / "report.html").read_text()
    assert "Answers that differ" in page and "Same answers" in page
    assert {len(record.answer_digest or "") for record in records} == {12}


def test_exact_lengths_that_are_not_exact_are_counted_and_make_the_run_invalid(
    tmp_path: Path, wording: Wording
) -> None:
    records = [request(index=index, asked_prompt_tokens=15, prompt_tokens=20 + (index == 3)) for index in range(4)]
    summary = one_cell(tmp_path / "run", records, prompts=Prompts(tokens=15, tokenizer="server"))
    assert summary.rows[0].pooled.prompts == PromptLengths(requests=4, asked=60, got=81, added=5, otherwise=1)
    wording(sentences(summary.reasons)[0])


# The quality of answers, next to their speed, where rows are compared.


def answers(valid: int, right: int | None = None) -> Answers:
    return Answers(checked=10, valid=valid, labelled=0 if right is None else 10, right=right)


def test_sides_that_are_not_are_told_with_counts(wording: Wording) -> None:
    note = difference("a", [answers(9, 8)], "b", [answers(10, 8)])
    assert note is not None and "10" in sentence(note) and "90.0" in sentence(note)
    wording(sentence(note))
