"""An engine, a tool loop and an environment, each in one file of a user, named in a config: through `whet.train`."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import whet
from test_rollout_contract import (  # noqa: F401  the laws that the engine below is held to
    END,
    LIMIT,
    letters,
    module,
    test_a_consumer_gets_every_token_once_across_a_change_of_weights,
    test_a_consumer_may_go_away_half_way,
    test_a_finishing_pause_lets_those_in_flight_finish,
    test_a_full_set_mends_what_half_of_one_has_broken,
    test_a_keeping_pause_stops_at_once_and_goes_on_after_the_weights,
    test_a_pause_can_end_without_new_weights,
    test_a_reply_goes_on_under_other_weights_and_its_spans_say_where,
    test_a_request_waits_for_the_least_version_that_it_names,
    test_a_score_waits_while_weights_change,
    test_an_error_of_a_consumer_is_its_own_request_s,
    test_cancelling_one_leaves_the_others,
    test_close_ends_every_wait_with_a_reason,
    test_health_counts_what_was_done,
    test_min_tokens_holds_end_tokens_back,
    test_requests_wait_until_what_was_put_away_is_back,
    test_scores_are_the_log_probs_of_the_model,
    test_versions_follow_update_weights,
    test_what_cannot_be_served_is_refused_at_once,
)
from tiny import RUN
from whet.config.schema import ServerConfig
from whet.rollout.engine import EngineInputs, OnTokens, RolloutEngine
from whet.rollout.native.engine import NativeEngine
from whet.tables import load_object
from whet.types import Completion, Json, Request

ENGINE = '''
import asyncio
import json
import time

import torch

from whet.rollout.engine import PARTS, Capabilities, Health
from whet.rollout.requests import RequestError, check, check_score
from whet.rollout.weights import copy_weights
from whet.seeds import uniforms
from whet.types import Completion, Receipt, TokenLogprobs, WhetError, spans_of


class Plain:
    """Computes the whole history anew for every token, without a cache. `said.jsonl` has all that it has said."""

    can = Capabilities(
        logprobs="always", stop_texts=False, penalties=False, in_flight_updates=True,
        reproducible="everywhere",
    )

    def __init__(self, inputs):
        self.inputs, self.model, self.version = inputs, inputs.model, 0
        self.vocab = inputs.model.get_output_embeddings().out_features
        self.file = inputs.run_dir / "said.jsonl"
        self.entered = 0  # requests that have begun and not ended
        self.open, self.runs = True, True  # requests may begin; those that have begun go on
        self.away = frozenset()
        self.ended = None  # why nothing is served
        self.waiting = []
        self.since, self.requests, self.tokens = time.time(), 0, 0

    async def generate(self, request, on_tokens=None):
        prompt, s, least = request.prompt, request.sampling, request.least_version or 0
        check(request, vocab=self.vocab, max_context=self.inputs.max_context, decodes=False)
        if (s.top_k, s.top_p, s.min_p, s.repetition_penalty) != (0, 1.0, 0.0, 1.0):
            raise RequestError("this engine has neither filters nor penalties")
        ends = set() if s.ignore_eos else {*self.inputs.end_token_ids, *s.stop_token_ids}
        said, logprobs, sample_logprobs, versions = [], [], [], []
        await self._until(lambda: self.open and self.version >= least)
        self.entered += 1
        try:
            for point in uniforms(s.key, len(prompt), s.max_tokens):
                await asyncio.sleep(0)
                await self._until(lambda: self.runs and not self.away)
                logp_V = self._logp([*prompt, *said], s.temperature or 1.0)[-1]
                allowed_V = logp_V.clone()
                allowed_V[list(ends) if len(said) < s.min_tokens else []] = -torch.inf
                token = int(allowed_V.argmax()) if s.temperature == 0 else draw(allowed_V, point)
                said.append(token)
                logprobs.append(float(logp_V[token]))
                sample_logprobs.append(float(allowed_V.log_softmax(-1)[token]) if s.temperature else 0.0)
                versions.append(self.version)
                if on_tokens is not None:
                    on_tokens([token])
                if token in ends:
                    break
        finally:
            self.entered -= 1
            self._tell()
        self.requests += 1
        with self.file.open("a") as file:
            file.write(json.dumps([*prompt, *said]) + "\\n")
        reason = "stop" if said[-1] in ends else "length"
        return Completion(
            token_ids=said, logprobs=logprobs, sample_logprobs=sample_logprobs, spans=spans_of(versions),
            finish_reason=reason,
        )

    async def score(self, requests):
        for r in requests:
            check_score(r, vocab=self.vocab, max_context=self.inputs.max_context)
        return [await self._scored(r) for r in requests]

    async def update_weights(self, update):
        try:
            if update.module is not None:
                self.model = update.module
            else:
                copy_weights(self.model, update.tensors)
        except WhetError as e:
            self.ended = f"the weights are incomplete: {e}"
            raise
        self.version, self.ended = update.version, None
        await self.resume()
        return Receipt("plain", update.version)

    async def pause(self, finish):
        self.open = False
        if finish:
            self.runs = True
            self._tell()
            await self._until(lambda: self.entered == 0)
        self.runs = False

    async def resume(self):
        self.open, self.runs = True, True
        self._tell()

    async def place(self, device, what=PARTS):
        self.away = self.away - what if device == "gpu" else self.away | what
        self._tell()

    async def health(self):
        return Health(since=self.since, requests=self.requests, tokens=self.tokens)

    async def close(self):
        self.ended = "the engine was closed"
        self._tell()

    async def _until(self, holds):
        """Looks now and after each change. WhetError once nothing is served."""
        while self.ended is None and not holds():
            change = asyncio.get_running_loop().create_future()
            self.waiting.append(change)
            await change
        if self.ended is not None:
            raise WhetError(self.ended)

    def _tell(self):
        waiting, self.waiting = self.waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)

    async def _scored(self, r):
        await self._until(lambda: self.open and not self.away)
        logp_AV = self._logp(r.token_ids, r.temperature)[r.start - 1 : -1]
        logprobs = [float(logp_V[token]) for logp_V, token in zip(logp_AV, r.token_ids[r.start :])]
        top = [list(zip(*(x.tolist() for x in logp_V.topk(r.top_k)[::-1]))) for logp_V in logp_AV]
        self.requests += 1
        return TokenLogprobs(version=self.version, logprobs=logprobs, top=top if r.top_k else [])

    @torch.no_grad()
    def _logp(self, tokens, temperature):
        """[T, V] after each of the tokens."""
        self.inputs.beat("computing")
        self.tokens += len(tokens)
        ids = torch.tensor([list(tokens)], device=self.model.device)
        return (self.model(ids, use_cache=False).logits[0].float().cpu() / temperature).log_softmax(-1)


def draw(logp_V, point):
    below_V = logp_V.double().exp().cumsum(0)
    return int(torch.searchsorted(below_V, point * below_V[-1], right=True))
'''

TOOLS = '''
from whet.envs.env import EnvStep
from whet.envs.schemas import spec_of
from whet.types import Message


def backwards(word: str) -> str:
    """A word from its end to its beginning."""
    return word[::-1]


class Loop:
    """Runs the calls of a reply, whose results the policy reads before its next one. A reply without calls ends it."""

    def __init__(self, task, log):
        self.log, self.tools = log, [spec_of(backwards)]

    async def first(self):
        return []

    async def step(self, reply):
        results = [self.run(call) for call in reply.tool_calls]
        return EnvStep(results, reward=float(len(results)), done=not results)

    def run(self, call):
        result = backwards(**call.arguments)
        with open(self.log, "a") as file:
            file.write(f"{call.arguments['word']}\\n")
        return Message("tool", result, tool_call_id=call.id or None, name=call.name)
'''

FORKS = '''
from whet.envs.env import EnvStep
from whet.envs.schemas import spec_of
from whet.types import Message


def backwards(word: str) -> str:
    """A word from its end to its beginning."""
    return word[::-1]


class Opinions:
    """Two turns with a tool. The policy is asked in a conversation of its own what it thinks of a reply, before the
    calls of the reply are run. A turn is worth 1, as is each call in it and each letter a of the opinion."""

    def __init__(self, task, world):
        self.world, self.tools = world, [spec_of(backwards)]

    async def first(self):
        return []

    async def step(self, reply):
        letters = "".join(letter for letter in reply.content if letter in "abc")
        opinion = await self.world.chat([Message("user", f"{letters}k")], max_tokens=3)
        results = [
            Message("tool", backwards(**call.arguments), tool_call_id=call.id, name=call.name)
            for call in reply.tool_calls
        ]
        reward = float(1 + len(results) + opinion.content.count("a"))
        return EnvStep(results or [Message("user", "s")], reward, done=self.world.turn == 2)
'''

GAMES = '''
from whet.envs.env import EnvStep
from whet.types import Message


class Counts:
    """Three turns, each with a reward of its own: the letters a in the reply."""

    def __init__(self, task, world):
        self.world = world

    async def first(self):
        return []

    async def step(self, reply):
        return EnvStep([Message("user", "b")], float(reply.content.count("a")), done=self.world.turn == 3)


class Stumbles(Counts):
    """Task 1 fails in the second turn of a rollout's first attempts. Each attempt notes the key of the rollout."""

    def __init__(self, task, world, log, failures):
        super().__init__(task, world)
        with open(log, "a+") as file:
            file.write(f"{task.uid} {world.key}\\n")
            file.seek(0)
            attempt = sum(line.split()[1] == str(world.key) for line in file)
        self.fails = task.uid == 1 and attempt <= failures

    async def step(self, reply):
        if self.fails and self.world.turn == 2:
            raise ConnectionError("the site is down")
        return await super().step(reply)
'''


WORDS = ("ab", "ca", "cb")


def written(folder: Path, text: str) -> Path:
    """The file of a user."""
    file = folder / "mine.py"
    file.write_text(text)
    return file


def tree_of(run_dir: Path, **sections: Any) -> dict[str, Any]:
    """A short run that records every token of every step."""
    track = {"trackers": ["jsonl"], "rollouts_interval": 1, "batches_interval": 1}
    rest = {"track": track, "checkpoint": {"export": False}, "machine": {"threads": 1, "device": "cpu"}}
    return {**RUN, "run_dir": str(run_dir), **rest, **sections}


def conversations(run_dir: Path, env: dict[str, Any], *, retries: int = 0, **sections: Any) -> dict[str, Any]:
    """Two steps of three tasks, with four rollouts of a few short turns each."""
    limits = {"max_tokens_per": "turn", "observation_tokens": 64}
    talks = {
        "model": {"scratch": {**RUN["model"]["scratch"], "max_position_embeddings": 256}},
        "data": {"chat": True, "max_prompt_tokens": 32, "train": [{"rows": [{"prompt": word} for word in WORDS]}]},
        "rewards": {},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 5}, "env": env | limits, "retries": retries},
        "train": {"steps": 2, "tasks_per_step": 3, "optimizer": {"lr": 1e-2}},
    }  # fmt: skip
    return tree_of(run_dir, **talks | sections)


def rows(run_dir: Path, of: str = "rollouts") -> list[dict[str, Any]]:
    files = sorted((run_dir / of).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def lines(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps(run_dir: Path) -> list[dict[str, Json]]:
    return [line for line in lines(run_dir / "metrics.jsonl") if "train/loss" in line]


# ---------------------------------------------------------------- an engine


@pytest.fixture
def name() -> str:
    """What the laws of the contract know it by: they ask of it what they ask of the native engine."""
    return "native"


@pytest.fixture
def engine(tmp_path: Path) -> RolloutEngine:
    """The engine of a user, for the laws of the contract."""
    make = load_object(f"{written(tmp_path, ENGINE)}:Plain", what="rollout.engine")
    made: RolloutEngine = make(
        EngineInputs(
            model=module(), ops=None, end_token_ids=frozenset({END}), decode=letters, max_context=LIMIT,
            max_num_seqs=8, cache_mb=None, quantization=None, beat=lambda what: None, span=lambda what: nullcontext(),
            server=ServerConfig(), reply_timeout_s=60.0, load_timeout_s=60.0, run_dir=tmp_path, home=tmp_path,
        )
    )  # fmt: skip
    return made


def test_one_engine_waits_for_a_reply_as_long_as_the_most_patient_stage(tmp_path: Path) -> None:
    source = """
from whet.rollout.native.engine import opened

def made(inputs):
    (inputs.run_dir / "limit").write_text(f"{inputs.reply_timeout_s:g}")
    return opened(inputs)
"""
    stages = [{"name": name, "rollout": {"timeout_s": limit}} for name, limit in (("a", 700), ("b", 650))]
    rollout = {**RUN["rollout"], "engine": f"{written(tmp_path, source)}:made"}
    whet.train(**tree_of(tmp_path / "run", rollout=rollout, stages=stages))
    assert (tmp_path / "run" / "limit").read_text() == "700"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_with_an_engine_of_a_users_own_is_that_of_the_native_one(
    tmp_path: Path, staleness: int
) -> None:
    """Every token is one that it has said, of the version that its step asks for, and what the weights of this version
    say: those that the native engine samples. Only log-probs round differently."""
    names = {"own": f"{written(tmp_path, ENGINE)}:Plain", "native": "native"}
    for which, made in names.items():
        rollout = {**RUN["rollout"], "engine": made, "max_staleness": staleness}
        whet.train(**tree_of(tmp_path / which, rollout=rollout))
    own, native = (rows(tmp_path / which) for which in names)
    assert sorted(row["token_ids"] for row in own) == sorted(lines(tmp_path / "own/said.jsonl"))
    assert len(own) == 3 * 4 * 2
    for n, (mine, other) in enumerate(zip(own, native, strict=True)):
        step = 1 + n // 8
        assert {v for v in mine["versions"] if v >= 0} == {max(0, step - 1 - staleness)}
        for column in ("uid", "index", "token_ids", "mask", "versions", "reward", "finish_reason"):
            assert mine[column] == other[column], column
        np.testing.assert_allclose(mine["logprobs"], other["logprobs"], atol=1e-4)
    assert all(step["train/grad_norm"] > 0 for step in steps(tmp_path / "own"))


# ---------------------------------------------------------------- a tool loop

Said = tuple[tuple[int, ...], tuple[int, ...]]
"""What the policy has read, and its reply."""
CALLS = [
    f'<tool_call>{{"name": "backwards", "arguments": {{"word": "{word}"}}}}</tool_call>' for word in WORDS
]
SPECIAL = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>")
TEMPLATE = (
    "{% for tool in tools or [] %}<system>{{ tool.function.name }}<eos>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_in(folder: Path) -> PreTrainedTokenizerFast:
    """Its tokens are letters and whole calls, so a policy that knows nothing calls often."""
    vocab = {piece: n for n, piece in enumerate((*SPECIAL, *"abckdrsw", *CALLS))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"<tool_call>.*?</tool_call>|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        extra_special_tokens=list(SPECIAL[3:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return made


def test_a_tool_loop_of_a_users_own_calls_its_tool_and_only_what_was_sampled_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool runs once for each call in a reply, and the policy reads its result before the next reply. Prompts and
    results have no weight in the loss. Each token that has one is where the engine sampled it, after what it read."""
    sampled: Counter[Said] = Counter()
    generate = NativeEngine.generate

    async def spied(self: NativeEngine, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        done = await generate(self, request, on_tokens)
        sampled[request.prompt, tuple(done.token_ids)] += 1
        return done

    monkeypatch.setattr(NativeEngine, "generate", spied)
    tokenizer, log, run_dir = tokenizer_in(tmp_path / "tokenizer"), tmp_path / "log", tmp_path / "run"
    env = {"make": f"{written(tmp_path, TOOLS)}:Loop", "arguments": {"log": str(log)}, "max_turns": 3}
    sections: dict[str, Any] = {
        "tokenizer": {"path": str(tmp_path / "tokenizer")},
        "algorithm": {"name": "reinforce"},
    }
    whet.train(**conversations(run_dir, env, **sections))

    kept: Counter[Said] = Counter()
    called: Counter[str] = Counter()
    trained = 0
    for row, batch in zip(rows(run_dir), rows(run_dir, "batches"), strict=True):
        tokens, turns = row["token_ids"], json.loads(row["turns"])
        mask = [False] * len(tokens)
        for turn, following in zip_longest(turns, turns[1:]):
            start, end = turn["start"], turn["end"]
            kept[tuple(tokens[:start]), tuple(tokens[start:end])] += 1
            mask[start:end] = [True] * (end - start)
            pieces = tokenizer.convert_ids_to_tokens(tokens[start:end])
            words = [WORDS[CALLS.index(piece)] for piece in pieces if piece in CALLS]
            called.update(words)
            assert turn["reward"] == len(words)
            if following is not None:
                end_of_reply = "" if pieces[-1] == "<eos>" else "<eos>"
                results = "".join(f"<tool>{word[::-1]}<eos>" for word in words)
                between = tokenizer.decode(tokens[end : following["start"]])
                assert between == f"{end_of_reply}{results}<assistant>"
        assert batch["token_ids_N"] == tokens
        assert row["mask"] == batch["mask_N"] == mask
        if not batch.get("skipped_R"):
            assert [weight > 0 for weight in batch["update_1/weight_N"]] == mask
            trained += len(turns) > 1
    assert kept == sampled
    assert Counter(log.read_text().split()) == called
    assert trained > 4
    assert all(step["train/grad_norm"] > 0 for step in steps(run_dir))


# ---------------------------------------------------------------- an environment that forks

RECORDS = ("metrics.jsonl", "rollouts", "batches", "checkpoints")
"""What equal runs write byte for byte."""


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a package of the user's, by whose dotted path the environment is named, and a tokenizer."""
    folder = tmp_path_factory.mktemp("forking")
    (folder / "forking").mkdir()
    (folder / "forking" / "opinions.py").write_text(FORKS)
    tokenizer_in(folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)  # of the host
        yield folder


@pytest.fixture(scope="module")
def forked(forking: Path) -> tuple[Path, Counter[Said]]:
    """A run of it with a checkpoint after each step, and all that the engine has sampled."""
    return opinions(forking, "run")


def opinions(folder: Path, name: str) -> tuple[Path, Counter[Said]]:
    """Two steps of the environment that forks, or those that a run directory still lacks."""
    sampled: Counter[Said] = Counter()
    generate = NativeEngine.generate

    async def spied(self: NativeEngine, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        done = await generate(self, request, on_tokens)
        sampled[request.prompt, tuple(done.token_ids)] += 1
        return done

    sections: dict[str, Any] = {
        "tokenizer": {"path": str(folder / "tokenizer")},
        "algorithm": {"name": "reinforce"},
        "checkpoint": {"export": False, "interval": 1, "keep": None},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeEngine, "generate", spied)
        whet.train(**conversations(folder / name, {"make": "forking.opinions:Opinions"}, **sections))
    return folder / name, sampled


def test_each_conversation_that_an_environment_forks_is_a_strand_and_each_sampled_token_is_trained_once(
    forking: Path, forked: tuple[Path, Counter[Said]]
) -> None:
    """The first strand has the turns and the results of the calls. After it comes one for the opinion on each turn,
    which begins with what the policy has said there, as context. Every sample of the engine is in one strand, and its
    tokens alone have a weight in the loss, each the same one."""
    run_dir, sampled = forked
    tokenizer = PreTrainedTokenizerFast.from_pretrained(forking / "tokenizer")
    kept: Counter[Said] = Counter()
    shapes: Counter[tuple[int, bool]] = Counter()
    weights: defaultdict[int, list[float]] = defaultdict(list)
    for number, (row, batch) in enumerate(zip(rows(run_dir), rows(run_dir, "batches"), strict=True)):
        ends = list(accumulate(row["strand_tokens"]))
        strands = [row["token_ids"][end - n : end] for n, end in zip(row["strand_tokens"], ends)]
        masks = [[False] * len(strand) for strand in strands]
        turns = json.loads(row["turns"])
        for turn in turns:
            strand, start, end = strands[turn["strand"]], turn["start"], turn["end"]
            kept[tuple(strand[:start]), tuple(strand[start:end])] += 1
            masks[turn["strand"]][start:end] = [True] * (end - start)
        own, asked = ([t for t in turns if (t["strand"] > 0) == fork] for fork in (False, True))
        said = [m["content"] for m in json.loads(row["messages"]) if m["role"] == "assistant"]
        assert [turn["strand"] for turn in asked] == list(range(1, len(own) + 1))
        assert len(said) == len(own) == len(strands) - 1
        for turn, text, strand, answer in zip(own, said, strands[1:], asked):
            letters = "".join(letter for letter in text if letter in "abc")
            assert tokenizer.decode(strand[: answer["start"]]) == f"<user>{letters}k<eos><assistant>"
            assert answer["end"] - answer["start"] <= 3
            opinion = tokenizer.decode(strand[answer["start"] :], skip_special_tokens=True)
            assert turn["reward"] == 1 + turn["calls"] + opinion.count("a")
            assert answer["reward"] is None
        if len(own) == 2:
            pieces = tokenizer.convert_ids_to_tokens(strands[0][own[0]["start"] : own[0]["end"]])
            results = [f"<tool>{WORDS[CALLS.index(piece)][::-1]}<eos>" for piece in pieces if piece in CALLS]
            assert len(results) == own[0]["calls"]
            between = tokenizer.decode(strands[0][own[0]["end"] : own[1]["start"]])
            end_of_reply = "" if pieces[-1] == "<eos>" else "<eos>"
            assert between == f"{end_of_reply}{''.join(results) or '<user>s<eos>'}<assistant>"
        whole = list(chain(*masks))
        assert [bool(on) for on in row["mask"]] == batch["mask_N"] == whole
        assert batch["token_ids_N"] == row["token_ids"]
        assert batch["length_S"] == row["strand_tokens"]
        assert not batch.get("skipped_R")
        assert [weight > 0 for weight in batch["update_1/weight_N"]] == whole
        weights[number // 12] += [weight for weight in batch["update_1/weight_N"] if weight]
        shapes[len(own), own[0]["calls"] > 0] += 1
    assert kept == sampled
    assert sum(map(len, weights.values())) == sum(len(said) * n for (_, said), n in sampled.items())
    for each in weights.values():
        assert len(set(each)) == 1
    assert shapes[2, True] > 2
    assert all(step["train/grad_norm"] > 0 for step in steps(run_dir))


def recorded(run_dir: Path) -> dict[str, bytes]:
    found = [file for name in RECORDS for file in (run_dir / name, *(run_dir / name).rglob("*"))]
    return {str(file.relative_to(run_dir)): file.read_bytes() for file in found if file.is_file()}


def test_an_environment_that_forks_gives_the_same_bits_in_a_second_run(
    forking: Path, forked: tuple[Path, Counter[Said]]
) -> None:
    run_dir, sampled = forked
    other, again = opinions(forking, "other")
    assert again == sampled
    assert recorded(other) == recorded(run_dir)


@pytest.mark.parametrize("journal", [True, False])
def test_an_environment_that_forks_gives_the_same_bits_after_a_resume(
    forking: Path, forked: tuple[Path, Counter[Said]], journal: bool
) -> None:
    """From the checkpoint of the first step. With the journal no environment is asked for what it has answered before,
    and the policy gives every opinion once more; without it all of the second step is played again."""
    run_dir, sampled = forked
    resumed = shutil.copytree(run_dir, forking / f"resumed {journal}")
    *_, last = sorted((resumed / "checkpoints").iterdir())
    shutil.rmtree(last)
    if not journal:
        shutil.rmtree(resumed / "journal")
    _, again = opinions(forking, resumed.name)
    assert again
    assert again <= sampled
    assert again.total() == sum(len(json.loads(row["turns"])) for row in rows(run_dir)[12:])
    assert recorded(resumed) == recorded(run_dir)
    (_, second) = lines(resumed / "timings.jsonl")
    assert (second["env/replayed_count"] > 0) == journal


# ---------------------------------------------------------------- environments


@dataclass(frozen=True)
class Played:
    """A turn of a recorded rollout. read: number of the group, and the tokens since the turn before. gain: its reward
    and, discounted, those of later turns."""

    start: int
    end: int
    read: tuple[int, ...]
    gain: float


def turns_of(row: dict[str, Any], group: int, *, gamma: float) -> list[Played]:
    turns, found, gain = json.loads(row["turns"]), [], 0.0
    before = [0, *(turn["end"] for turn in turns)]
    for turn, begin in reversed(list(zip(turns, before))):
        gain = turn["reward"] + gamma * gain
        read = (group, *row["token_ids"][begin : turn["start"]])
        found.append(Played(turn["start"], turn["end"], read, gain))
    return found[::-1]


def test_the_reward_of_each_turn_reaches_the_advantage_and_the_loss_of_its_tokens(tmp_path: Path) -> None:
    """GiGPO without deviations, by hand from the recorded rollouts: the reward of the episode less the mean of its
    group, and the gain of the turn less the mean of the turns that have read the same. The loss of a token before the
    first update is its advantage, negative."""
    gamma, weight, run_dir = 0.5, 2.0, tmp_path / "run"
    advantage = {"normalize_std": False, "gamma": gamma, "turn_weight": weight}
    env = {"make": f"{written(tmp_path, GAMES)}:Counts"}
    whet.train(**conversations(run_dir, env, algorithm={"name": "gigpo", "advantage": advantage}))

    found, batches = rows(run_dir), rows(run_dir, "batches")
    played = [turns_of(row, n // 4, gamma=gamma) for n, row in enumerate(found)]
    gains: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    for turn in chain(*played):
        gains[turn.read].append(turn.gain)
    for n, (row, batch, turns) in enumerate(zip(found, batches, played, strict=True)):
        said = [m["content"] for m in json.loads(row["messages"]) if m["role"] == "assistant"]
        assert [turn["reward"] for turn in json.loads(row["turns"])] == [text.count("a") for text in said]
        group = found[n // 4 * 4 :][:4]
        expected_N = np.zeros(len(row["token_ids"]))
        for turn in turns:
            expected_N[turn.start : turn.end] = (
                row["reward"] - np.mean([other["reward"] for other in group])
                + weight * (turn.gain - np.mean(gains[turn.read]))
            )  # fmt: skip
        assert (batch["uid"], batch["index"]) == (row["uid"], row["index"])
        np.testing.assert_allclose(batch["adv_N"], expected_N, atol=1e-5)
        np.testing.assert_allclose(batch["update_1/loss_N"], -expected_N, atol=1e-5)
        assert row["advantage"] == pytest.approx(expected_N[np.array(row["mask"]) > 0].mean(), abs=1e-5)
    differ = [len({batch["adv_N"][turn.start] for turn in turns}) for batch, turns in zip(batches, played)]
    assert {len(turns) for turns in played} == {3}
    assert sum(count > 1 for count in differ) > len(found) / 2
    assert all(step["train/grad_norm"] > 0 for step in steps(run_dir))


def test_an_episode_that_failed_is_played_again_as_if_it_had_not(tmp_path: Path) -> None:
    """With retries=1. With 0 its rollout is unscored after one attempt."""

    def played(which: str, *, failures: int, retries: int) -> tuple[Counter[str], list[dict[str, Any]], Json]:
        log, run_dir = tmp_path / f"{which}.log", tmp_path / which
        env = {"make": f"{file}:Stumbles", "arguments": {"log": str(log), "failures": failures}}
        tree = conversations(run_dir, env, retries=retries, reward_workers={"max_failure_rate": 0.9})
        whet.train(**tree | {"train": tree["train"] | {"steps": 1}})
        (step,) = steps(run_dir)
        return Counter(log.read_text().splitlines()), rows(run_dir), step["rollout/failed_count"]

    file = written(tmp_path, GAMES)
    attempts, expected, failed = played("clean", failures=0, retries=0)
    assert (failed, len(attempts), set(attempts.values())) == (0, 12, {1})
    attempts, found, failed = played("retried", failures=1, retries=1)
    assert (failed, found) == (0, expected)
    assert attempts == {key: 1 + key.startswith("1 ") for key in attempts}
    attempts, _, failed = played("once", failures=1, retries=0)
    assert (failed, set(attempts.values())) == (4, {1})
