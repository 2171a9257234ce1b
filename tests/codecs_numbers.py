"""A codec for tests whose messages are numbers: the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence

from whet.types import Message


class Numbers:
    """`Message("user", "7 8")` is the tokens 7 and 8. No token separates messages."""

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        return [int(word) for m in messages for word in m.content.split()]

    def encode_observation(self, existing: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return self.encode_prompt(messages)

    def parse_reply(self, token_ids: Sequence[int]) -> Message:
        return Message("assistant", " ".join(map(str, token_ids)))
