"""The texts of prompts of which only lengths or ids are recorded, and recorded texts with a salt."""

from pathlib import Path

from harness.workload.agent_traces.conversation import Conversation
from harness.workload.agent_traces.prefix_reuse import prompt_reuse
from harness.workload.agent_traces.step_messages import StepMessages, answer_tokens
from tests.support.agent_traces import made_files, read_all, read_weka, weka_file, weka_request, write_rows


def prompts(made: Conversation, seed: int = 1, salt: str = "") -> list[list[str]]:
    """The words of the prompt of each step."""
    messages = StepMessages(made, seed, salt)
    return [messages.of(step)[0]["content"].split() for step in made.steps]


def shared(one: list[str], other: list[str]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def test_made_prompts_have_the_length_and_share_what_the_trace_shared(tmp_path: Path) -> None:
    for name in ("weka", "tracelab", "copilot"):
        made = read_all(made_files(tmp_path)[name])[0]
        words = prompts(made)
        assert [len(one) for one in words] == [step.prompt_tokens for step in made.steps]
        reuse = prompt_reuse(made)
        for number in range(1, len(words)):
            # Words that are equal by accident may follow.
            found = max(shared(words[number], words[earlier]) for earlier in range(number))
            assert reuse[number].shared <= found <= reuse[number].shared + 3, (name, number)


def test_salts_seeds_and_conversations_differ_unless_the_scope_is_global(tmp_path: Path) -> None:
    requests = [weka_request(0, 11, [7, 8])]
    one, other = read_all(write_rows(tmp_path / "w.jsonl", [weka_file(*requests), weka_file(*requests, id="v")]))
    assert prompts(one) == prompts(one)
    assert shared(prompts(one)[0], prompts(one, salt="again")[0]) < 3
    assert shared(prompts(one)[0], prompts(one, seed=2)[0]) < 3
    assert shared(prompts(one)[0], prompts(other)[0]) < 3
    files = [weka_file(*requests, id=id, hash_id_scope="global") for id in ("u", "v")]
    one, other = read_all(write_rows(tmp_path / "w.jsonl", files))
    assert prompts(one)[0][:8] == prompts(other)[0][:8]


def test_recorded_texts_start_with_the_salt_and_stay(tmp_path: Path) -> None:
    made = read_all(made_files(tmp_path)["edge-agentic"])[0]
    plain, salted = (StepMessages(made, 1, salt).of(made.steps[1]) for salt in ("", "four words of it"))
    assert plain[0] == {"role": "system", "content": "You paint."}
    assert salted[0] == {"role": "system", "content": "four words of it\nYou paint."}
    assert salted[1:] == plain[1:] and made.steps[0].parts[0] == made.steps[0].parts[0]
    assert StepMessages(made, 1).of(made.steps[0])[0]["content"] == "You paint."  # the model is not changed


def test_answers_are_exact_only_where_there_is_no_text(tmp_path: Path) -> None:
    made = read_weka(tmp_path, weka_request(0, 4, [1], out=0), weka_request(5, 4, [1], out=300))
    assert [answer_tokens(step) for step in made.steps] == [(1, True), (300, True)]
    made = read_all(made_files(tmp_path)["edge-agentic"])[0]
    assert [answer_tokens(step) for step in made.steps] == [(None, False), (None, False), (9, False)]
    made = read_all(made_files(tmp_path)["otel"])[0]
    assert answer_tokens(made.steps[0]) == (None, False)  # 5 tokens are recorded, with their text
