"""Real llama.cpp: a draft model, whose acceptance is known, and a context that is in the cache."""

from pathlib import Path

from tests.real.conftest import Say
from tests.real.parts import llamacpp, run, write_scenario


def test_a_draft_model_and_a_cached_context(tmp_path: Path, say: Say) -> None:
    work = {"user": "batch", "requests": 8, "output_tokens": 24}
    scenario = write_scenario(
        tmp_path,
        "questions",
        model="tiny",
        servers={
            "plain": llamacpp(parallel=2),
            # The model drafts for itself, so each drafted token is right.
            "drafts": llamacpp(parallel=2, extra_args=["--threads", "1", "--model-draft", "/models/tiny.gguf"]),
        },
        loads={
            "users": {**work, "vary": {"users": [1, 2]}},
            "depth": {**work, "vary": {"prompts.system_tokens": [0, 600]}},
        },
    )
    ran = run(scenario)
    say(ran.said)
    assert ran.error == "" and ran.code in (0, 3)
    users, depth = (answer.values["parts"] for answer in ran.summary.answers)
    (speculation,) = [part for part in users if "tokens_per_step" in part]
    assert speculation["side"] == "drafts" and speculation["share"] > 0.9 and 3 < speculation["tokens_per_step"] <= 4
    assert [part["speed"] for part in depth] == ["decode", "first"], "all of the context was in the cache"
