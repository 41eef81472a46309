"""Which part of the one sequence a machine sends: no machine asks another.

The sequence is cut into blocks of what belongs together, a burst or a conversation. Machine `number` of `of` takes the
blocks whose number leaves that remainder: each request is in exactly one part, and all parts are the whole sequence.
"""

from typing import NamedTuple


class Part(NamedTuple):
    """A machine's part. A place in it is counted from 0, as if there were no other machine."""

    number: int = 0
    of: int = 1
    block: int = 1  # requests that are sent together

    def at(self, place: int) -> int:
        """The place in the whole sequence."""
        block, inside = divmod(place, self.block)
        return (block * self.of + self.number) * self.block + inside

    def share(self, whole: int) -> int:
        """How many of the first `whole` requests of the sequence are in this part."""
        blocks, rest = divmod(whole, self.block)
        rounds, more = divmod(blocks, self.of)
        return (rounds + (self.number < more)) * self.block + (rest if self.number == more else 0)

    def turn(self, number: int) -> int:
        """The place among all of what comes singly, such as an arrival or a user."""
        return number * self.of + self.number


WHOLE = Part()
