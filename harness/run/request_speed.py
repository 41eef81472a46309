"""The speed of one request, by which the time of a plan is estimated."""

from typing import NamedTuple

PROMPT_WORDS = (100, 80, 60, 45, 35, 25, 15)  # few sizes, as of `EFFORTS`; salt and chat template come on top


class RequestSpeed(NamedTuple):
    """The speed of one request."""

    ttft_s: float
    tpot_s: float
    prompt_tokens: int | None = None  # as the server counts them

    def first_s(self, prompt: float) -> float:
        """Return the TTFT of a prompt of so many tokens, in proportion to the prompt that was measured."""
        return self.ttft_s * prompt / PROMPT_WORDS[0]

    def answer_s(self, tokens: float, prompt: float = 0) -> float:
        """Return the seconds of an answer of so many tokens; a short prompt takes as long as the measured one."""
        return max(self.ttft_s, self.first_s(prompt)) + tokens * self.tpot_s
