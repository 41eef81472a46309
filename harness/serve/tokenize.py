"""Counting tokens with the server's own tokenizer: POST /tokenize, as vLLM and llama.cpp have it.

vLLM: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#tokenizer-api; llama.cpp: `POST /tokenize` in
its server's README.
"""

from collections.abc import Callable
from typing import Any

import requests

from harness.errors import ServerError
from harness.failures.unexpected_response import decoded
from harness.serve.ask import base_url
from harness.trust import open_session

PATH = "/tokenize"
TIMEOUT_S = 30.0
_ADDED = 16  # tokens that a tokenizer may put around a text
_ADVICE = "Name a local tokenizer.json in prompts.tokenizer, or remove it: a word is then taken for a token."


def counter(
    url: str, model: str, api_key: str | None = None, ask_engine: Callable[[str, dict[str, Any]], str] | None = None
) -> Callable[[str], int]:
    """A function that has the server count the tokens of a text, without special ones.

    `ask_engine` posts to the engine behind the server, where the server itself does not count: Lemonade does not for
    vLLM. It raises ServerError in words where the server has no such thing.
    """
    address = base_url(url) + PATH
    session = open_session(api_key)

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        return _ask(session, address, body) if ask_engine is None else _read(ask_engine(PATH, body), address)

    of_llamacpp = False  # learned: a word list takes a thousand counts, each a process where a container is asked

    def count(text: str) -> int:
        nonlocal of_llamacpp
        # Each server looks at its own two keys; `model` is for those that serve several.
        number = None
        if not of_llamacpp:
            number = ask({"model": model, "prompt": text, "add_special_tokens": False}).get("count")
        if number is None:
            tokens = ask({"content": text, "add_special": False}).get("tokens")
            if not isinstance(tokens, list):
                raise ServerError(f"{address}: the answer has neither a count nor tokens", next_step=_ADVICE)
            number, of_llamacpp = len(tokens), True
        most = len(text.encode()) + _ADDED  # a token of a text has at least one byte
        if type(number) is not int or not bool(text) <= number <= most:
            what = number if type(number) is int and number.bit_length() <= 64 else "no count of tokens"
            problem = f"{address}: {what} for a text that has 1 to {most} tokens"
            raise ServerError(problem, next_step=_ADVICE)
        return number

    return count


def _read(text: str, address: str) -> dict[str, Any]:
    try:
        answer = decoded(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerError(f"{address}: the engine behind it does not count tokens", next_step=_ADVICE)
    return answer


def _ask(session: requests.Session, address: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        response = session.post(address, json=body, timeout=TIMEOUT_S)
        answer = decoded(response.content) if response.status_code == 200 else None
    except (requests.RequestException, ValueError) as error:
        raise ServerError(f"{address}: tokens cannot be counted ({type(error).__name__})", next_step=_ADVICE) from None
    if not isinstance(answer, dict):
        raise ServerError(
            f"{address}: tokens cannot be counted, the server answers with status {response.status_code}",
            next_step=_ADVICE,
        )
    return answer
