"""The model that a server offers, or why none can be read."""

from pathlib import Path

import pytest

from harness.base.errors import HarnessError, sentence
from harness.load.client import ApiAddress
from harness.load.load_process import first_model
from harness.scenario import Load
from tests.support.fake_server import answering, serving, whole
from tests.support.load_runs import make_job


@pytest.mark.parametrize(
    ("answer", "key", "expected"),
    [
        (whole(b"{}", status=b"401 Unauthorized"), None, "{url} wants an API key (HTTP 401). Name the environment"),
        (whole(b"", status=b"307 There\r\nLocation: http://127.0.0.1:1/?key=sk-wrong"), "BADK",
         "{url}/v1/models redirects to http://127.0.0.1:1/?key=***; redirects are not followed"),
    ],
)  # fmt: skip
def test_an_answer_without_models_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, key: str | None, expected: str
) -> None:
    monkeypatch.setenv("BADK", "sk-wrong")
    with serving(answering(answer)) as url, pytest.raises(HarnessError) as caught:
        first_model(make_job(tmp_path, Load(user="chat"), api_key_env=key), ApiAddress.parse(url))
    assert sentence(caught.value).startswith(expected.format(url=url))
