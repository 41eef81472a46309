"""The search of `harness tune` and the statistics of its proof: functions of the starts so far."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.reason import Reason, because
from harness.engines import engines
from harness.failures.table import rules
from harness.numbers.summary import Action, RunFinding
from harness.questions.tune.decide import (
    MAX_FAILED,
    PATIENCE,
    Bounds,
    ProofPlan,
    Proposal,
    Search,
    Setting,
    Trial,
    best_settings,
    blocks_needed,
    decide,
    declared_search,
    excluded,
    failure_cause,
    gains,
    make_search,
    next_start,
    plan_proof,
    predict,
    reference,
    sides_to_prove,
    start_noise,
    suggestions,
)

SETTINGS = [
    Setting(name="sequences", values=(1, 2, 4, 8, 16, 32), default=8, gain=0.4, memory=1),
    Setting(name="memory", values=(0.6, 0.7, 0.8, 0.9), default=0.7, gain=0.2, memory=1),
    Setting(name="kv_type", values=("fp8", "auto"), default="auto", gain=0.1, ordered=False, memory=1),
    Setting(name="compiled", values=(False, True), default=False, gain=0.2, ordered=False),
]


def search() -> Search:
    return make_search(SETTINGS)


def proposed(trials: list[Trial], **advised: int) -> Proposal:
    found = next_start(search(), trials, [("queue_with_room", advised)] if advised else [])
    assert isinstance(found, Proposal)
    return found


def test_the_default_comes_first_and_again_every_fourth_start() -> None:
    assert proposed([]) == Proposal(settings={}, why="first")
    trials = [Trial(value=100.0)]
    whys = []
    for _ in range(8):
        found = proposed(trials)
        whys.append(found.why)
        trials.append(Trial(settings=found.settings, value=100.0 + len(trials)))
    assert [place for place, why in enumerate(whys) if why == "again"] == [3, 7]


def test_what_the_worst_finding_advises_is_tried_first_by_its_nearest_value() -> None:
    found = proposed([Trial(value=100.0)], sequences=15)
    assert (found.settings, found.why, found.finding) == ({"sequences": 16}, "finding", "queue_with_room")
    trials = [Trial(value=100.0), Trial(settings={"sequences": 16}, value=150.0)]
    assert proposed(trials, sequences=15).why in ("setting", "combination")  # it was tried
    assert proposed(trials, memory=1).settings == {"sequences": 16, "memory": 0.9}  # on top of what helped


def test_a_default_that_does_not_start_is_replaced_by_what_is_nearest_to_it() -> None:
    trials = [Trial(cause="memory")]
    found = proposed(trials)
    assert (found.settings, found.why) == ({"sequences": 4}, "first")
    trials.append(Trial(settings=found.settings, value=10.0))
    assert reference(trials) == {"sequences": 4}
    assert gains([*trials, Trial(settings={"sequences": 2}, value=20.0)])[:2] == [None, 0.0]


def test_a_default_that_breaks_a_limit_is_followed_by_what_may_meet_it() -> None:
    broken = Trial(met=0.3)
    advised = proposed([broken], sequences=2)
    assert (advised.settings, advised.finding) == ({"sequences": 2}, "queue_with_room")
    nearer = [broken, Trial(settings={"sequences": 2}, met=0.9)]
    assert proposed(nearer).settings["sequences"] < 8, "on from where more requests met it"
    seen = [Trial(met=0.1, took_s=8), Trial(settings={"sequences": 2}, met=0.7, took_s=8), Trial(met=0.0, took_s=8)]
    assert isinstance(next_start(search(), seen, budget_s=90), Proposal), "shares near 0 are no noise for the proof"
    meets = [*nearer, Trial(settings={"sequences": 1}, value=10.0)]
    far = search().array([Trial(settings={"sequences": 32})])
    assert predict(search(), meets, far)[0][0] < 0, "where a limit is broken, less is expected"
    assert reference(meets) == {"sequences": 1} and gains(meets) == [None, None, 0.0]


def test_a_start_that_gave_no_result_is_repeated_once() -> None:
    assert proposed([Trial()]) == Proposal(settings={}, why="first")
    assert proposed([Trial(), Trial()]).settings != {}
    assert isinstance(next_start(search(), [Trial()] * MAX_FAILED), Reason)


def test_nothing_starts() -> None:
    found = next_start(search(), [Trial(cause="other", settings={"sequences": at}) for at in (1, 2, 4, 16, 32, 8)])
    assert isinstance(found, Reason)
    assert (found.code, found.values) == ("tune_nothing_starts", {"starts": MAX_FAILED})
    found = next_start(search(), [Trial(cause="other")])  # the default fails, and shares its values with all
    assert isinstance(found, Reason) and found.code == "tune_nothing_starts"


@pytest.mark.parametrize(
    ("failed", "out", "in_"),
    [
        # too little memory: all that need as much or more, whatever the other settings are
        (
            Trial(settings={"memory": 0.9}, cause="memory"),
            [{"memory": 0.9, "sequences": 16}, {"memory": 0.9, "compiled": True}],
            [{"memory": 0.8}, {"memory": 0.9, "sequences": 4}, {"memory": 0.9, "kv_type": "fp8"}],
        ),
        # another cause: all with these values
        (
            Trial(settings={"kv_type": "fp8", "sequences": 16}, cause="other"),
            [{"kv_type": "fp8", "sequences": 16, "memory": 0.6}],
            [{"kv_type": "fp8"}, {"sequences": 16}],
        ),
        # the failure names the flag
        (
            Trial(settings={"kv_type": "fp8", "sequences": 16}, cause="flag", blamed=["kv_type"]),
            [{"kv_type": "fp8"}, {"kv_type": "fp8", "sequences": 4}],
            [{"sequences": 16}],
        ),
    ],
)
def test_a_failed_start_excludes_what_is_worse_by_the_same_cause(
    failed: Trial, out: list[dict[str, object]], in_: list[dict[str, object]]
) -> None:
    points = search().array([Trial(settings=one) for one in [*out, *in_]])
    assert excluded(search(), points, [failed]).tolist() == [True] * len(out) + [False] * len(in_)


def test_of_starts_that_fail_with_the_same_words_what_they_share_is_to_blame() -> None:
    """No compiler, with whatever else: the third start does not try compiled settings again."""

    def reason(error: str) -> Reason:
        return because("setting_not_started", f"did not start: {error}", error=error)

    tried: list[dict[str, object]] = [{"compiled": True, "sequences": 16}, {"compiled": True, "memory": 0.8}]
    failed = [
        Trial(settings=one, cause="other", reason=reason(f"no compiler at address {at}"))
        for at, one in enumerate(tried)
    ]
    points = search().array([Trial(settings={"compiled": True}), Trial(settings={"memory": 0.8})])
    assert excluded(search(), points, failed).tolist() == [True, False]
    started = Trial(settings={"compiled": True, "kv_type": "fp8"}, value=1.0)
    assert excluded(search(), points, [*failed, started]).tolist() == [False, False]
    other = replace(failed[1], reason=reason("another reason"))
    assert excluded(search(), points, [failed[0], other]).tolist() == [False, False]


def test_a_start_whose_load_generator_was_late_is_repeated_once() -> None:
    late = Trial(settings={"sequences": 16}, reason=because("client_error", "delays"))
    advice = [("queue_with_room", {"sequences": 16})]
    assert next_start(search(), [Trial(value=100.0), late], advice) == Proposal(
        settings={"sequences": 16}, why="finding", finding="queue_with_room"
    )
    again = next_start(search(), [Trial(value=100.0), late, late], advice)
    assert isinstance(again, Proposal) and again.settings != {"sequences": 16}


def test_no_start_above_what_fits() -> None:
    fitting = make_search(SETTINGS, lambda changed: changed.get("memory", 0.7) <= 0.7)
    assert len(fitting.candidates) == 6 * 2 * 2 * 2
    found = next_start(fitting, [Trial(value=100.0)], [("more_is_slower", {"memory": 0.9})])
    assert isinstance(found, Proposal)
    assert found.settings.get("memory", 0.7) <= 0.7


def test_results_are_ratios_to_the_reference_near_in_time() -> None:
    """The machine gets 10 % slower from start to start, and the settings change nothing."""
    trials = [Trial(settings={} if at % 4 == 0 else {"sequences": at}, value=100 * 0.9**at) for at in range(9)]
    assert gains(trials) == pytest.approx([0.0] * 9, abs=1e-12)


def test_the_noise_is_expected_until_the_reference_shows_it() -> None:
    assert start_noise([Trial(value=100.0)]) == pytest.approx(0.015)
    assert start_noise([Trial(value=value) for value in (100.0, 110.0) * 20]) == pytest.approx(0.0644, abs=1e-4)


def test_the_search_ends_with_the_budget_and_with_patience() -> None:
    helped = [Trial(value=100.0, took_s=60), Trial(settings={"sequences": 16}, value=150.0, took_s=60)]
    found = next_start(search(), helped, budget_s=599)
    assert isinstance(found, Reason)
    assert (found.code, found.values) == ("tune_budget", {"left_s": 599, "needed_s": 600})  # one start, three blocks
    assert isinstance(next_start(search(), helped, budget_s=600), Proposal)
    some = Trial(settings={"sequences": 16}, value=115.0, took_s=60)
    noisy = [helped[0], some, Trial(value=112.0, took_s=60)]  # ten blocks are 30 starts; half of the budget is 12
    assert isinstance(next_start(search(), noisy, budget_s=1200), Proposal), "noise leaves half to the search"
    assert isinstance(next_start(search(), noisy, budget_s=599), Reason)
    others: list[dict[str, Any]] = [{"sequences": at} for at in (1, 2, 4, 32)]
    others += [{"memory": at} for at in (0.6, 0.8, 0.9)] + [{"compiled": True}]
    found = next_start(search(), helped + [Trial(settings=one, value=100.0) for one in others[:PATIENCE]])
    assert isinstance(found, Reason)
    assert (found.code, found.values) == ("tune_patience", {"trials": PATIENCE})


def test_the_search_ends_when_nothing_promises_more() -> None:
    one = make_search([Setting(name="compiled", values=(False, True), default=False, gain=0.2, ordered=False)])
    assert isinstance(next_start(one, [Trial(value=100.0)]), Proposal)
    found = next_start(one, [Trial(value=100.0), Trial(settings={"compiled": True}, value=90.0)])
    assert isinstance(found, Reason) and found.code == "tune_all_tried"
    tiny = make_search([Setting(name="batch", values=(1, 2, 4), default=1, gain=0.001, ordered=False)])
    assert isinstance(next_start(tiny, [Trial(value=100.0)]), Proposal), "the proof needs another side"
    found = next_start(tiny, [Trial(value=100.0), Trial(settings={"batch": 2}, value=99.0)])
    assert isinstance(found, Reason) and found.code == "tune_no_hope"


def test_the_best_settings_bring_more_than_the_margin() -> None:
    trials = [Trial(value=100.0), Trial(settings={"sequences": 16}, value=101.0)]
    assert best_settings(search(), trials, 2) == []
    trials += [Trial(settings={"sequences": 32}, value=150.0), Trial(settings={"memory": 0.8}, value=140.0)]
    assert best_settings(search(), trials, 2) == [{"sequences": 32}, {"memory": 0.8}]


def test_the_proof_fits_into_the_budget() -> None:
    trials = [Trial(value=100.0, took_s=100), Trial(settings={"sequences": 32}, value=150.0, took_s=40)]
    trials.append(Trial(settings={"memory": 0.8}, value=140.0, took_s=20))
    full = plan_proof(search(), trials, 480)
    assert full == ProofPlan(sides=[{"sequences": 32}, {"memory": 0.8}], blocks=3, block_s=160, missing_s=0)
    assert plan_proof(search(), trials, 479) == ProofPlan(sides=full.sides[:1], blocks=3, block_s=140, missing_s=0)
    short = plan_proof(search(), trials, 200)
    assert short is not None and short.missing_s == 80, "two blocks decide something"
    late = plan_proof(search(), trials, 245)  # the search left room for it, and a start took a little longer
    assert late is not None and late.missing_s == 0
    also = Trial(settings={"sequences": 32, "compiled": True}, value=150.5, took_s=40)
    equal = plan_proof(search(), [*trials[:2], also, replace(also, settings={"compiled": True}, value=100.0)], 400)
    assert equal is not None and equal.sides == [{"sequences": 32}], "of about equal ones, those that change least"
    assert plan_proof(search(), trials[:1], 1000) is None
    alone = plan_proof(search(), [Trial(settings={"memory": 0.6}, value=1.0, took_s=5)], 1000)
    assert alone == ProofPlan(sides=[], blocks=3, block_s=5, missing_s=0), "they replace a default that fails"


def test_that_nothing_beats_the_default_is_proven_against_the_best_of_the_others() -> None:
    trials = [Trial(value=100.0, took_s=100)]
    trials += [Trial(settings={"sequences": at}, value=value, took_s=50) for at, value in ((16, 99.0), (4, 60.0))]
    plan = plan_proof(search(), trials, 450)
    assert plan == ProofPlan(sides=[{"sequences": 16}], blocks=3, block_s=150, missing_s=0)
    cut = plan_proof(search(), trials, 250)
    assert cut is not None and cut.missing_s == 50
    others_failed = [trials[0], Trial(settings={"sequences": 16}, cause="memory")]
    assert plan_proof(search(), others_failed, 1000) is None


@pytest.mark.parametrize("value", [60.0, 100.0, 150.0])
def test_the_search_leaves_room_for_the_proof(value: float) -> None:
    """Six starts are enough for a proof; fewer all try settings, so that there is something to say."""
    for starts in range(1, 30):
        trials, left_s = [Trial(value=100.0, took_s=60)], 60.0 * (starts - 1)
        while isinstance(step := next_start(search(), trials, budget_s=left_s), Proposal):
            trials.append(Trial(settings=step.settings, value=value if step.settings else 100.0, took_s=60))
            left_s -= 60
        plan = plan_proof(search(), trials, left_s)
        assert (plan is not None) == any(trial.settings for trial in trials) == (starts > 1)
        if plan is not None:
            assert (plan.missing_s == 0) == (starts >= 6) and (starts >= 6 or len(trials) == starts)


def test_first_starts_end_with_the_budget() -> None:
    found = next_start(search(), [Trial(cause="memory", took_s=600)], budget_s=1800)
    assert isinstance(found, Reason) and found.code == "tune_budget"
    assert isinstance(next_start(search(), [], budget_s=0), Proposal), "one start has no time before it"


def test_blocks_of_the_proof() -> None:
    assert blocks_needed(math.log(1.5), 0.01) == 3
    assert 4 <= blocks_needed(math.log(1.1), 0.03) <= 9
    assert blocks_needed(math.log(1.03), 0.03) == 10


def test_the_answer_of_the_proof() -> None:
    base = [100.0, 101.0, 99.0, 100.0]
    better, best = {"sequences": 16}, {"sequences": 32}
    answer = decide("output_tok_s", base, [(better, [130.0, 131, 129, 130]), (best, [142.0, 141, 143, 142])])
    assert (answer.verdict, answer.settings) == ("set", best)
    assert answer.ratio == pytest.approx(1.42, abs=0.001)
    assert answer.low is not None and answer.high is not None and 1.38 < answer.low < 1.42 < answer.high < 1.46
    also = {"sequences": 32, "compiled": True}
    near = decide("output_tok_s", base, [(also, [143.0, 142, 144, 143]), (best, [142.0, 141, 143, 142])])
    assert near.settings == best and near.ratio == answer.ratio, "of about equal ones, those that change least"
    equal = decide("output_tok_s", base, [(better, base), (best, [90.0, 91, 89, 90])])
    assert (equal.verdict, equal.settings) == ("keep", {})
    wide = decide("output_tok_s", base, [(better, [150.0, 90, 150, 90])])
    assert (wide.verdict, wide.settings) == ("inconclusive", better)
    assert wide.needed is not None and wide.needed > 4
    assert decide("output_tok_s", base, []).verdict == "inconclusive", "nothing was compared"


def test_only_settings_that_answer_the_same_are_chosen() -> None:
    base, fast, slow = [100.0, 101, 99, 100], [142.0, 141, 143, 142], [130.0, 131, 129, 130]
    sides: list[tuple[dict[str, Any], list[float]]] = [({"kv_type": "fp8"}, fast), ({"sequences": 16}, slow)]
    for words, verdict, settings in (
        (["same", "same"], "set", {"kv_type": "fp8"}),
        (["worse", "same"], "set", {"sequences": 16}),
        (["inconclusive", "same"], "set", {"sequences": 16}),
        (["worse", "inconclusive"], "inconclusive", {"sequences": 16}),
        (["unknown", "worse"], "inconclusive", {"kv_type": "fp8"}),
        (["worse", "worse"], "keep", {}),
    ):
        answer = decide("output_tok_s", base, sides, words)
        assert (answer.verdict, answer.settings, answer.needed, len(answer.verdicts)) == (verdict, settings, None, 2)


def test_one_side_of_the_proof_leaves_alone_what_may_change_answers() -> None:
    settings = [replace(one, answers=one.name == "kv_type") for one in SETTINGS]
    trials = [Trial(value=100.0)]
    for tried, value in (({"kv_type": "fp8"}, 150.0), ({"kv_type": "fp8", "sequences": 16}, 160.0)):
        trials.append(Trial(settings=tried, value=value))
    assert len(sides_to_prove(make_search(settings), trials)) == 2
    trials.append(Trial(settings={"sequences": 16}, value=120.0))
    assert sides_to_prove(make_search(settings), trials)[1] == {"sequences": 16}
    assert {"sequences": 16} not in sides_to_prove(search(), trials)


def declared(name: str, variables: dict[str, Any], **bounds: Any) -> Search:
    engine = next(one for one in engines() if one.name == name)
    return declared_search(engine, engine, variables, Bounds(**bounds), {"max_num_batched_tokens": 2048})


def values(search: Search) -> dict[str, tuple[Any, ...]]:
    return {setting.name: setting.values for setting in search.settings}


def test_the_settings_are_those_that_the_engine_declares() -> None:
    """`max_num_batched_tokens` is not given, but reported; the memory share is not given."""
    found = declared("simulated", {"max_num_seqs": 10})
    assert values(found) == {
        "sequences": (1, 2, 4, 6, 8, 10, 12, 16, 32, 64, 128, 256),
        "batched_tokens": (256, 512, 1024, 2048, 4096, 8192),
    }
    assert (found.settings_at(found.default), [one.default for one in found.settings]) == ({}, [10, 2048])


def test_no_more_sequences_than_the_load_has() -> None:
    assert values(declared("simulated", {"max_num_seqs": 4}, at_once=25))["sequences"] == (1, 2, 4, 6, 8, 12, 16, 32)


def test_memory_is_searched_up_to_the_safe_share_and_never_above() -> None:
    """The default is above it: it is no candidate, and the search starts with what is nearest."""
    found = declared("simulated", {"gpu_memory_utilization": 0.92}, safe_memory=0.78)
    assert values(found)["memory"] == (0.5, 0.6, 0.7, 0.75, 0.78, 0.92)
    assert {found.settings_at(at).get("memory", 0.92) for at in found.candidates} == {0.5, 0.6, 0.7, 0.75, 0.78}
    first = next_start(found, [])
    assert isinstance(first, Proposal)
    assert first.settings == {"memory": 0.78}


GIVEN = {
    "max_num_seqs": 64, "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.75, "kv_cache_dtype": "auto",
    "enforce_eager": False, "attention_backend": None, "speculative_config": None, "enable_prefix_caching": True,
    "enable_chunked_prefill": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("bounds", "more"),
    [
        ({}, set()),
        ({"target": "gfx1151"}, {"attention"}),
        ({"target": "gfx942"}, {"attention", "aiter"}),
        ({"target": "gfx942", "change_answers": True}, {"attention", "aiter", "kv_type"}),
        ({"target": "gfx1151", "change_answers": True}, {"attention"}),  # it has no FP8 units
    ],
)
def test_what_the_gpu_and_the_model_allow(bounds: dict[str, Any], more: set[str]) -> None:
    found = set(values(declared("vllm", GIVEN, at_once=64, **bounds)))
    assert found == {"sequences", "batched_tokens", "memory", "compiled", "prefix_cache", "chunked_prefill"} | more


def test_speculation_is_searched_where_it_is_used() -> None:
    used = '{"method": "mtp", "num_speculative_tokens": 1}'
    found = values(declared("vllm", GIVEN | {"speculative_config": used}))["speculation"]
    assert used in found and None in found and len(found) == 3
    assert "speculation" not in values(declared("vllm", GIVEN | {"speculative_config": '{"method": "eagle"}'}))


def test_a_value_below_another_setting_is_no_candidate() -> None:
    """vLLM refuses fewer tokens in a step than sequences."""
    found = declared("vllm", GIVEN | {"max_num_seqs": 1024})
    assert {
        (changed.get("sequences", 1024), changed.get("batched_tokens", 512))
        for at in found.candidates
        if (changed := found.settings_at(at)).get("sequences", 1024) == 1024
    } == {(1024, tokens) for tokens in (1024, 2048, 4096, 8192, 16384)}


def test_a_context_is_not_shorter_than_the_longest_request() -> None:
    slots = {"parallel": 4, "ctx_size": 16384}
    assert "context" not in values(declared("llama.cpp", slots))
    engine = next(one for one in engines() if one.name == "llama.cpp")
    found = declared_search(engine, engine, slots, Bounds(tokens=1500, at_once=8), {"ctx_per_slot": 4096})
    assert values(found)["context"] == (2048, 4096, 8192, 16384), "more brings nothing"
    assert values(found)["sequences"] == (1, 2, 4, 8)
    more: list[dict[str, Any]] = [{"sequences": 5}, {"sequences": 100}, {"sequences": 5, "flash_attention": 3}]
    found = declared_search(engine, engine, slots, Bounds(tokens=1500, at_once=8), {"ctx_per_slot": 4096}, more=more)
    assert values(found)["sequences"] == (1, 2, 4, 5, 8), "what is advised lies between"


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("mem.free_lt_util", "memory"), ("mem.hip_oom", "memory"), ("host.oom_kill", "memory"),
        ("mem.no_cache_blocks", "cache"), ("mem.kv_lt_one_request_v0", "cache"), ("cli.unknown_flag", "flag"),
        ("lemonade.protected_flag", "flag"), ("engine.start_timeout", "timeout"), ("gpu.fault", "other"),
        (None, "other"),
    ],
)  # fmt: skip
def test_causes_of_failures(row: str | None, cause: str) -> None:
    assert row is None or row in {rule.id for rule in rules()}
    assert failure_cause(row) == cause


def test_what_findings_advise() -> None:
    """The context of slots is advised for all of them together."""

    def finding(code: str, **changes: int) -> RunFinding:
        action = Action(do="", changes=changes, verify="")
        return RunFinding(code=code, rows=[], measured="", means="", why="", actions=[action], cost=0.5)

    found = [finding("queue_with_room", sequences=8, context=32768), finding("cold_start"), finding("x", context=4096)]
    assert suggestions(found, 4) == [("queue_with_room", {"sequences": 8, "context": 4096}), ("x", {"context": 1024})]
    assert suggestions(found)[0] == ("queue_with_room", {"sequences": 8, "context": 32768})
