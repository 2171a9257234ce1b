"""The environments of a run, by the sections of the config that describe them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from whet.config.schema import Config
from whet.data.codec import MessageCodec
from whet.envs.hosts import EnvHosts
from whet.types import Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)


class Environments:
    """Hosts that have been started; stages with equal sections share them. Close it with the run."""

    def __init__(self) -> None:
        self._hosts: dict[str, EnvHosts] = {}
        self._told = 0
        self._said: set[str] = set()
        """What was logged of chat templates."""

    def arguments(
        self, cfg: Config, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
    ) -> dict[str, Any]:
        """What `play_groups` gets for a stage; nothing for a stage without an environment.

        ends: the model's end tokens. What the chat template does to a conversation is logged. ConfigError for an
        environment that cannot be loaded, or a tokenizer without a chat template; DataError for a template that refuses
        a second turn.
        """
        env = cfg.rollout.env
        if env is None:
            return {}
        calls = None if env.tool_format == "auto" else env.tool_format
        codec = MessageCodec(tokenizer, ends=ends, history=env.history, calls=calls)
        for said in codec.check_template().said(codec.history):
            if said not in self._said:
                log.info("chat template: %s", said)
            self._said.add(said)
        known = env.model_dump_json()
        if known not in self._hosts:
            self._hosts[known] = EnvHosts(env, imports=cfg.imports)
        return {
            "make_env": self._hosts[known].make,
            "codec": codec,
            "max_turns": env.max_turns,
            "observation_tokens": env.observation_tokens,
            "max_tokens_per": env.max_tokens_per,
            "tokens_after_prompt": env.tokens_after_prompt,
            "input_tokens": env.input_tokens,
        }

    def timings(self) -> Metrics:
        """Hosts that were replaced since the last call; nothing for a run without an environment."""
        if not self._hosts:
            return {}
        total = sum(hosts.restarts for hosts in self._hosts.values())
        new, self._told = total - self._told, total
        return {"env/host_restarts_count": float(new)}

    def close(self) -> None:
        """End all hosts."""
        for hosts in self._hosts.values():
            hosts.close()
        self._hosts.clear()
