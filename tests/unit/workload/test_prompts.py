"""Prompts: lengths by their law, words of one token, and the files that prompts come from."""

import json
import statistics
from pathlib import Path
from typing import Literal

import pytest

from harness.base.errors import HarnessError
from harness.base.files import ROOT
from harness.scenario import MADE_KINDS, Load, Prompts
from harness.scenario.behaviour import (
    Lengths,
    Lognormal,
    Structured,
    length_at,
    max_length,
    read_length_file,
    typical_length,
)
from harness.scenario.contradictions import contradictions
from harness.scenario.file import load_scenario
from harness.simulated.wire import text_kind
from harness.workload import (
    Workload,
    common_words,
    one_token_words,
    text,
    workload_sha256,
)
from harness.workload.made_texts import token_count
from harness.workload.prompt_file import PromptRow, read_rows
from tests.support import made_questions
from tests.support.command import write
from tests.support.wording import Wording

MANY = 20_000


def drawn(lengths: int | Lengths, seed: int = 1, what: str = "prompt") -> list[int]:
    return [length_at(lengths, what, seed, index) for index in range(MANY)]


def test_lengths_of_each_law() -> None:
    assert set(drawn(128)) == set(drawn(Lengths(fixed=128))) == {128}
    values = drawn(Lengths(uniform=[10, 19]))
    assert set(values) == set(range(10, 20))
    counts = [values.count(length) for length in range(10, 20)]
    # Of a fair law each count has mean 2000 and standard deviation 42.
    assert max(abs(count - MANY / 10) for count in counts) < 4 * 42.5
    clamped = drawn(Lengths(lognormal=Lognormal(median=3, sigma=5, max=40)))
    assert (min(clamped), max(clamped)) == (1, 40)
    assert set(drawn(Lengths(lognormal=Lognormal(median=7, sigma=0, max=40)))) == {7}


@pytest.mark.parametrize("law", [Lognormal(median=200, p95=800, max=100_000), Lognormal(median=50, sigma=1, max=9999)])
def test_lognormal_lengths_have_the_median_and_the_tail_that_were_asked_for(law: Lognormal) -> None:
    values = sorted(drawn(Lengths(lognormal=law)))
    p95 = law.p95 if law.p95 is not None else 50 * 2.718281828**1.6448536
    assert statistics.median(values) == pytest.approx(law.median, rel=0.03)
    assert values[int(0.95 * MANY)] == pytest.approx(p95, rel=0.05)


def test_lengths_of_a_file_come_from_its_lines_and_stay_together(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("\ufeff# prompt output\n10 1\n20,2\n\n30\n")
    pairs = read_length_file(tmp_path / "lengths.txt")
    assert pairs == [(10, 1), (20, 2), (30, 30)]
    law = Lengths(file="lengths.txt")
    seen = [tuple(length_at(law, what, 1, index, pairs) for what in ("prompt", "output")) for index in range(300)]
    assert set(seen) == set(pairs)
    assert all(80 < seen.count(pair) < 120 for pair in pairs)


def test_bad_lines_of_a_file_of_lengths_are_named_together(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("10 1\nten\n1 2 3\n0 5\n")
    with pytest.raises(HarnessError) as caught:
        read_length_file(path)
    assert str(path) in caught.value.what and "'ten'" in caught.value.what
    wording(caught.value)
    assert [line.split(": ")[0] for line in caught.value.detail.splitlines()] == [f"{path}:3", f"{path}:4"]
    path.write_text("# nothing\n")
    with pytest.raises(HarnessError) as caught:
        read_length_file(path)
    wording(caught.value)


@pytest.mark.parametrize(
    ("lengths", "path"),
    [
        (Lengths(), ""),
        (Lengths(fixed=1, uniform=[1, 2]), ""),
        (Lengths(uniform=[5, 2]), ".uniform"),
        (Lengths(lognormal=Lognormal(median=5, max=9)), ".lognormal"),
        (
            Lengths(lognormal=Lognormal(median=5, p95=4, max=9)),
            ".lognormal.median",
        ),
        (
            Lengths(lognormal=Lognormal(median=50, sigma=1, max=9)),
            ".lognormal.median",
        ),
        (Lengths(file="none.txt"), ".file"),
    ],
)
def test_a_distribution_that_cannot_be_meant_is_refused(
    tmp_path: Path, lengths: Lengths, path: str, wording: Wording
) -> None:
    (found,) = contradictions(lengths, tmp_path, Prompts())
    assert found.path == path
    wording(found.text)


def test_the_bounds_of_lengths() -> None:
    law = Lengths(lognormal=Lognormal(median=200, sigma=1, max=2000))
    assert [max_length(one) for one in (9, Lengths(uniform=[16, 64]), law)] == [9, 64, 2000]
    assert max_length(Lengths(file="x"), pairs=[(1, 7), (2, 3)]) == 7
    assert [typical_length(one) for one in (9, Lengths(uniform=[16, 64]), law)] == [9, 40, 200]


def test_prompts_and_answers_have_the_lengths_of_their_law() -> None:
    prompts = Prompts(tokens=Lengths(uniform=[3, 30]), system_tokens=5)
    load = Load(user="batch", requests=1, output_tokens=Lengths(uniform=[1, 9]))
    work = Workload(prompts, load, 7, "a b c d")
    for index in range(-3, 50):
        messages = work.messages(index)
        words = sum(len(message["content"].split()) for message in messages)
        assert words == work.prompt_tokens(index)
        assert work.output_tokens(index) == length_at(load.output_tokens, "output", 7, index)
    assert Workload(Prompts(kind="classification"), load, 7).prompt_tokens(0) is None


def workload_checksum(tmp_path: Path, load: dict[str, object], prompts: dict[str, object]) -> str:
    loads = {"l": {"user": "batch", "requests": 10, **load}}
    return workload_sha256(load_scenario(write(tmp_path, loads=loads, prompts=prompts)), tmp_path)


def test_the_workload_hash_has_every_length_in_it(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("5 5\n6 6\n")
    (tmp_path / "two.txt").write_text("5 5\n6 7\n")
    plain: dict[str, object] = {"tokens": 8}
    hashes = [
        workload_checksum(tmp_path, {}, plain),
        *(
            workload_checksum(tmp_path, {"output_tokens": tokens}, plain)
            for tokens in ({"uniform": [1, 9]}, {"uniform": [1, 10]}, {"file": "one.txt"}, {"file": "two.txt"})
        ),
        workload_checksum(tmp_path, {}, {"tokens": {"uniform": [7, 9]}}),
        workload_checksum(tmp_path, {}, {"tokens": 8, "tokenizer": "server"}),
        workload_checksum(tmp_path, {"endpoint": "completions"}, plain),
        workload_checksum(tmp_path, {"output": "natural"}, plain),
        workload_checksum(tmp_path, {"output": "natural", "answer": {"choice": ["a", "b"]}}, plain),
    ]
    assert len(set(hashes)) == len(hashes)


def test_only_words_of_one_token_are_used() -> None:
    single = set(common_words()[::3])
    asked: list[str] = []

    def count(words: str) -> int:
        asked.append(words)
        return sum(1 if word in single else 2 for word in words.split())

    words = one_token_words(count, "it")
    assert set(words) == single
    assert len(asked) < 3 * len(common_words())
    assert count(text(300, 5, 9, words)) == 300


def test_a_tokenizer_that_cannot_be_met_exactly_is_refused_in_words(wording: Wording) -> None:
    with pytest.raises(HarnessError) as caught:
        one_token_words(lambda words: 2 * len(words.split()), "it")
    assert "932" in str(caught.value)
    wording(caught.value)

    def one_more(words: str) -> int:
        split = words.split()
        return len(split) + (len(split) == 64 and split[0] != split[1])

    with pytest.raises(HarnessError) as caught:
        one_token_words(one_more, "it")
    assert "932" in str(caught.value)
    wording(caught.value)


SHARE = [
    {"id": "a", "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "One?"},
                                  {"from": "gpt", "value": "1"}, {"from": "human", "value": "Two?"}]},
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "gpt", "value": "Hello"}, {"from": "user", "value": "Three?"}]},
]  # fmt: skip
OF_SHARE = [
    PromptRow(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]),
    PromptRow(messages=[{"role": "user", "content": "Three?"}]),
]


@pytest.mark.parametrize("form", ["array", "pretty", "lines"])
def test_sharegpt_conversations_are_read(tmp_path: Path, form: str) -> None:
    lines = "\n".join(json.dumps(one) for one in SHARE)
    path = tmp_path / "share"
    path.write_text(lines if form == "lines" else json.dumps(SHARE, indent=2 if form == "pretty" else None))
    assert read_rows(path) == OF_SHARE


def batch(body: object) -> str:
    return json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body})


def test_a_batch_file_is_read_with_the_length_of_each_answer(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    path.write_text(
        "\n".join(
            [
                batch({"model": "other", "messages": messages, "max_tokens": 7}),
                batch({"prompt": "p", "max_tokens": 8, "max_completion_tokens": 9}),
                batch({"input": "e"}),
            ]
        )
    )
    rows = read_rows(path)
    assert rows == [
        PromptRow(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], max_tokens=7),
        PromptRow(prompt="p", max_tokens=9),
        PromptRow(prompt="e"),
    ]
    load = Load(user="batch", requests=3, output_tokens=100)
    assert [Workload(Prompts(), load, 1, rows=rows).output_tokens(index) for index in range(4)] == [7, 9, 100, 7]


def test_problems_of_a_prompt_file_are_told_together_up_to_a_few(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + '{"prompt": ""}\n' * 3 + batch({}) + "\n" + '{"x": 1}\n' * 3)
    with pytest.raises(HarnessError) as caught:
        read_rows(path)
    told = [caught.value.what, *caught.value.detail.splitlines()]
    assert [line.partition(": ")[0] for line in told] == [f"{path}:{row}" for row in (2, 3, 4, 5, 6)]
    wording(told)


def known_load(known: Literal["computed", "file"]) -> Load:
    return Load(user="batch", requests=2000, output="natural", answer=Structured(known=known))


def test_the_questions_that_ship_are_the_made_ones_and_are_asked_again_without_a_salt() -> None:
    shipped = (ROOT / "harness" / "data" / "questions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in shipped] == list(made_questions.questions())
    workload = Workload(Prompts(system_tokens=5), known_load("computed"), 1, "some salt", [PromptRow("mine")])
    first, again, warmup = (workload.messages(index) for index in (3, 1003, -3))
    assert first == again == [{"role": "user", "content": json.loads(shipped[3])["prompt"]}]
    assert warmup[0]["content"].endswith(json.loads(shipped[997])["prompt"])
    assert [workload.item(index) for index in (3, 1003, -3)] == [3, 3, None]
    assert (workload.label(1003), workload.prompt_tokens(3)) == (json.loads(shipped[3])["answer"], None)


def test_a_prompt_file_may_have_the_right_answers(tmp_path: Path) -> None:
    lines = ['{"prompt": "1 + 1?", "answer": "2"}', '{"messages": [{"role": "user", "content": "x"}]}']
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    rows = read_rows(tmp_path / "mine.jsonl")
    workload = Workload(Prompts(kind="file", file="mine.jsonl"), known_load("file"), 1, None, rows)
    assert [(workload.item(index), workload.label(index)) for index in range(3)] == [(0, "2"), (1, None), (0, "2")]
    problems = [problem.path for problem in contradictions(known_load("file"), tmp_path, Prompts())]
    assert problems == [".answer.known"]


@pytest.mark.parametrize("kind", MADE_KINDS)
def test_made_prompts_have_their_kind_and_length(kind: Literal["code", "chat", "structured"]) -> None:
    prompts = Prompts(kind=kind, tokens=700, system_tokens=300)
    work = Workload(prompts, Load(user="batch", requests=9), 7, "a b c d")
    sent = [work.messages(index) for index in range(-2, 9)]
    assert {token_count(system["content"]) for system, _ in sent} == {304}, "the system prompt and the salt"
    assert [token_count(user["content"]) for _, user in sent] == [704] * 2 + [700] * 9, "the warm-up has words before"
    assert len({system["content"] for system, _ in sent}) == 1 and len({user["content"] for _, user in sent}) == 11
    assert {text_kind(user["content"]) for _, user in sent} == {kind}, "the embedded engine knows the kind by the task"
    assert work._replace(salt=None).messages(3) == Workload(prompts, work.load, 7).messages(3)
    assert work.messages(3)[1] != work._replace(seed=8).messages(3)[1]
    assert work.prompt_tokens(0) is None, "words and signs are about tokens: nothing is promised"
    short = Workload(Prompts(kind=kind, tokens=1), work.load, 7).messages(0)[0]["content"]
    assert 40 < token_count(short) < 100, "a task needs a text"
