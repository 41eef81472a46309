"""Users of documents: the same long texts again and again."""

from collections import Counter
from pathlib import Path

import pytest

from harness.scenario import Load, Prompts
from harness.scenario.behaviour import Rag, document_of
from harness.simulated import spawned
from tests.load_runs import driven


@pytest.mark.parametrize(("cache", "system_tokens"), [(True, 10), (False, 0)])
def test_a_document_that_was_asked_about_is_in_the_prefix_cache(
    tmp_path: Path, cache: bool, system_tokens: int
) -> None:
    rag = Rag(documents=3, document_tokens=200)
    load = Load(user="rag", requests=12, output_tokens=3, rag=rag)
    flags = [] if cache else ["--no-enable-prefix-caching"]
    with spawned("--preset", "instant", "--served-model-name", "m", *flags) as server:
        records = driven(tmp_path, server.url, load, prompts=Prompts(tokens=20, system_tokens=system_tokens))
    assert [r.error for r in records] == [None] * 12
    assert len({r.prompt_tokens for r in records}) == 1
    seen: set[int] = set()
    for record in records:
        document = document_of(rag, 1, record.index)
        cached = record.cached_tokens or 0
        assert cached >= 190 if document in seen and cache else cached < 20
        seen.add(document)
    assert seen == {0, 1, 2}


def test_some_documents_are_more_popular() -> None:
    rag = Rag(documents=10, skew=1.0)
    counted = Counter(document_of(rag, 1, index) for index in range(20_000))
    assert set(counted) == set(range(10))
    for rank in (2, 5, 10):
        assert counted[rank - 1] / counted[0] == pytest.approx(1 / rank, rel=0.1)
    even = Counter(document_of(Rag(documents=10, skew=0), 1, index) for index in range(20_000))
    assert min(even.values()) > 1850
    assert document_of(Rag(documents=1), 1, 5) == 0
