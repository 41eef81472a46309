"""The request sequence is a function of the seed, and of nothing else."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from harness.base.errors import HarnessError
from harness.base.files import PACKAGE
from harness.scenario import Load, Prompts, Scenario, Server
from harness.workload import Workload, salt_words, text, workload_sha256
from harness.workload.prompt_file import PromptRow, read_rows
from tests.support.wording import Wording

DATA = PACKAGE / "data"
LOAD = Load(user="batch")


def test_a_text_has_the_stated_length_and_depends_on_seed_and_place() -> None:
    words = (DATA / "words.txt").read_text(encoding="ascii").split()
    assert len(words) == len(set(words)) == 932
    assert all(word.isalpha() and word.islower() for word in words)
    assert len(text(256, 1, 0).split()) == 256
    assert text(8, 42, 0) == "called hot birthday quality risk outside following gas"
    assert len({text(16, seed, place) for seed in range(10) for place in range(-10, 10)}) == 200


def test_synthetic_prompts_share_the_system_prompt_and_nothing_else() -> None:
    prompts = Prompts(tokens=20, system_tokens=30)
    first, second = (Workload(prompts, LOAD, 7).messages(index) for index in (0, 1))
    assert [message["role"] for message in first] == ["system", "user"]
    assert len(first[0]["content"].split()) == 30
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("system_tokens", [0, 5])
def test_the_salt_comes_first_of_all(system_tokens: int) -> None:
    prompts = Prompts(tokens=6, system_tokens=system_tokens)
    plain = Workload(prompts, LOAD, 7).messages(3)
    salted = Workload(prompts, LOAD, 7, "one two three four").messages(3)
    assert salted[0]["content"] == "one two three four " + plain[0]["content"]
    assert salted[1:] == plain[1:]


def test_each_cell_has_its_own_salt() -> None:
    salts = {salt_words(run, cell) for run in ("a", "b") for cell in ("r1-x-y", "r2-x-y", "r1-x-z")}
    assert len(salts) == 6
    assert all(len(salt.split()) == 4 for salt in salts)
    assert salt_words("a", "r1-x-y") == salt_words("a", "r1-x-y")


@pytest.mark.parametrize("kind", ["file", "classification", "synthetic"])
@pytest.mark.parametrize("salt", [None, "one two three four"])
def test_no_prompt_of_the_warmup_comes_back(kind: Literal["file", "classification", "synthetic"], salt: str) -> None:
    """Only what all requests share is the same: the salt and the system prompt."""
    rows = [
        PromptRow(prompt="a"),
        PromptRow(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]),
    ]
    prompts = Prompts(kind=kind, tokens=8, system_tokens=3)
    work = Workload(prompts, LOAD, 1, salt, rows)
    warmup, measured = ([work.messages(i) for i in span] for span in (range(-6, 0), range(300)))
    assert {str(prompt[0]) for prompt in warmup} == {str(prompt[0]) for prompt in measured}
    begins = {" ".join(prompt[1]["content"].split()[:4]) for prompt in warmup}
    assert len(begins) == 6
    assert begins & {" ".join(prompt[1]["content"].split()[:4]) for prompt in measured} == set()
    if kind == "file":
        assert [prompt[1]["content"].split()[4:] for prompt in warmup] == [["a"], ["s"]] * 3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{nonsense", "JSON is malformed: object keys must be strings (byte 1)"),
        ('"text"', "Expected `object`, got `str`"),
        ('{"text": "a"}', ""),
        ('{"prompt": ""}', ""),
        ('{"prompt": 3}', "Expected `str | null`, got `int` - at `$.prompt`"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "Invalid enum value 'robot' - at `$.messages[0].role`"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, problem: str, wording: Wording) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(HarnessError) as caught:
        read_rows(path)
    assert caught.value.what.startswith(f"{path}:2: {problem}")
    wording(caught.value)


def test_the_classification_set_has_300_texts_and_all_come_before_one_comes_back() -> None:
    lines = (DATA / "classification.jsonl").read_bytes().splitlines()
    assert len({msgspec.json.decode(line)["text"] for line in lines}) == len(lines) == 300
    # It visits every item once before any comes back.
    prompts = Prompts(kind="classification")
    once = [Workload(prompts, LOAD, 5).messages(index)[0]["content"] for index in range(300)]
    assert len(set(once)) == 300
    assert Workload(prompts, LOAD, 5).messages(300)[0]["content"] == once[0]
    assert once != [Workload(prompts, LOAD, 6).messages(index)[0]["content"] for index in range(300)]
    assert all("Answer with the label alone.\nLabels: " in prompt for prompt in once)


def scenario(load: Load, prompts: Prompts | None = None, seed: int = 42) -> Scenario:
    servers, asked = {"a": Server(template="simulated")}, prompts or Prompts(tokens=8)
    return Scenario(version=1, question="?", model="m", servers=servers, loads={"l": load}, prompts=asked, seed=seed)


def test_the_hash_follows_what_shapes_the_work_and_nothing_else(tmp_path: Path) -> None:
    def sha(load: Load, prompts: Prompts | None = None, seed: int = 42) -> str:
        return workload_sha256(scenario(load, prompts, seed), tmp_path)

    load = Load(user="batch", requests=10, batch_size=2)
    same = [sha(load), sha(load), sha(msgspec.structs.replace(load, timeout_s=1.0, processes=2, drain_s=1.0))]
    assert len(set(same)) == 1
    others = [
        sha(load, seed=43),
        sha(load, Prompts(tokens=9)),
        sha(load, Prompts(tokens=8, system_tokens=1)),
        sha(load, Prompts(kind="classification")),
        *(
            sha(msgspec.structs.replace(load, **{key: value}))
            for key, value in (
                ("requests", 11), ("users", 2), ("batch_size", 3), ("output_tokens", 7), ("output", "natural"),
                ("think_s", [0.0, 1.0]), ("user", "chat"), ("turns", 2),
            )
        ),
        sha(Load(user="batch", duration_s=10.0)),
        sha(Load(user="batch", duration_s=11.0)),
    ]  # fmt: skip
    assert len({same[0], *others}) == 1 + len(others)
    assert len(same[0]) == 64


def test_the_hash_follows_what_belongs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the number of turns is not given. It is the same on every machine."""
    assert workload_sha256(scenario(Load(user="batch", requests=3)), tmp_path) == (
        "ca59ac51c7d672477382c6ca3e10cc77ea3fd7694554fa120f697013361a796f"
    )
    chat = scenario(Load(user="chat", requests=10))
    four = workload_sha256(chat, tmp_path)
    monkeypatch.setattr("harness.scenario.TURNS", 5)
    assert workload_sha256(chat, tmp_path) != four
