"""A codec for tests whose messages are numbers: the tokens themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whet.types import Json, Message, ToolSpec


class Numbers:
    """`Message("user", "7 8")` is the tokens 7 and 8. No token separates messages."""

    def of(self, kwargs: Mapping[str, Json]) -> Numbers:
        return self

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return [int(word) for m in messages for word in m.content.split()]

    def encode_observation(
        self,
        existing: Sequence[int],
        conversation: Sequence[Message],
        count: int,
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        return self.encode_prompt(conversation[-count:] if count else ())

    def parse_reply(
        self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = (), begun: str = ""
    ) -> Message:
        return Message("assistant", " ".join(map(str, token_ids)))
