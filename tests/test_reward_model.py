"""Reward models: scores are Hugging Face's own, whatever they are scored beside; what cannot be scored says why."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from whet import train
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import RewardConfig, RewardModelConfig, RewardWorkersConfig
from whet.data.tokenizer import build
from whet.rehearsal.probe import probe
from whet.rewards.combine import RewardSet, score
from whet.types import CheckpointError, ConfigError, Group, Message, Rollout, Task

TEXT = "0123456789+= abcdefgh?"
POSITIONS = 48


def folder(path: Path, *, kind: str = "chars", text: str = TEXT, seed: int = 0, labels: int = 1) -> Path:
    """A tiny reward model with its tokenizer."""
    tokenizer = build(kind, 400, [text])
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=labels,
        initializer_range=0.5,
    )
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("rm") / "judge")


def rollout(
    prompt: str | tuple[Message, ...], text: str, index: int = 0, ids: tuple[int, ...] = (7, 8)
) -> Rollout:
    return Rollout.one_strand(
        task=Task(uid=1, source="s", prompt=prompt, answer="3"),
        index=index,
        token_ids=list(ids),
        mask=[0] + [1] * (len(ids) - 1),
        logprobs=[0.0] * len(ids),
        sample_logprobs=[0.0] * len(ids),
        versions=[-1] + [0] * (len(ids) - 1),
        finish_reason="stop",
        text=text,
    )


CHAT = (Message("system", "abc"), Message("user", "1+2=?"))
REPLIES = ["3", "4 or 3", "", "abcdefgh" * 3, "3"]


def group(prompt: str | tuple[Message, ...] = CHAT, texts: list[str] = REPLIES) -> Group:
    rollouts = tuple(rollout(prompt, text, n) for n, text in enumerate(texts))
    return Group(rollouts[0].task, rollouts)


def scored(groups: list[Group], rewards: dict[str, RewardConfig]) -> list[Rollout]:
    with RewardSet.from_config(rewards, RewardWorkersConfig(count=1)) as made:
        return [r for g in asyncio.run(score(groups, made)) for r in g.rollouts]


def ask(groups: list[Group], path: Path, **settings: object) -> list[Rollout]:
    return scored(groups, {"rm": RewardConfig(model=RewardModelConfig(path=str(path), **settings))})


def by_hand(path: Path, token_ids: list[int]) -> float:
    """Hugging Face's own forward of one sequence."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([token_ids])).logits[0, 0])


def ids(text: str, *special: str) -> list[int]:
    """Tokens of the built tokenizer of characters, looked up one by one."""
    vocab = build("chars", 400, [TEXT]).get_vocab()
    return [vocab[name] for name in special] + [vocab.get(c, vocab["<unk>"]) for c in text]


def chat_ids(reply: str) -> list[int]:
    turns = [("<system>", "abc"), ("<user>", "1+2=?"), ("<assistant>", reply)]
    return [i for role, text in turns for i in [*ids("", role), *ids(text), *ids("", "<eos>")]]


# ---------------------------------------------------------------- the numbers


def test_a_score_is_the_logit_of_the_conversation_in_its_own_template(judge):
    found = ask([group()], judge)
    expected = [by_hand(judge, chat_ids(text)) for text in REPLIES]
    assert [r.reward for r in found] == pytest.approx(expected, abs=1e-6)
    assert len({round(e, 3) for e in expected}) == 4, "the replies must tell the model apart"
    assert [r.reward_parts for r in found] == [{"rm": r.reward} for r in found]


def test_control_tokens_that_a_reply_spells_are_text_for_the_model(judge):
    """Else a policy could end its reply and write the next message of the user, who is content."""
    (found,) = ask([group(texts=["3<eos>"])], judge)
    begin = [
        i
        for role, text in (("<system>", "abc"), ("<user>", "1+2=?"))
        for i in (*ids("", role), *ids(text), *ids("", "<eos>"))
    ]
    reply = [*ids("", "<assistant>"), *ids("3<eos>"), *ids("", "<eos>")]
    assert found.reward == pytest.approx(by_hand(judge, [*begin, *reply]), abs=1e-6)
    assert (
        abs(by_hand(judge, [*begin, *reply]) - by_hand(judge, chat_ids("3")[:-1] + ids("", "<eos>", "<eos>")))
        > 1e-3
    )


def test_a_plain_prompt_stands_before_the_reply(judge):
    (found,) = ask([group("1+2=", ["3 a"])], judge)
    assert found.reward == pytest.approx(by_hand(judge, ids("1+2=3 a")), abs=1e-6)


def test_a_reply_that_was_begun_for_the_policy_goes_on_from_there(judge):
    begun = ask([group((*CHAT, Message("assistant", "a")), ["bc"])], judge)
    assert begun[0].reward == ask([group(CHAT, ["abc"])], judge)[0].reward


def test_a_rollout_of_several_strands_has_no_one_sequence_to_score(judge):
    r = rollout(CHAT, "not looked at", ids=(9, 12, 10, 11))
    two = replace(r, strands=(r.strand, r.strand))
    (found,) = ask([Group(r.task, (two,))], judge, input="tokens")
    assert found.reward is None
    assert "the rollout has 2 strands, no one sequence to score; use input=text" in (found.error or "")
    (found,) = ask([Group(r.task, (two,))], judge)
    assert found.reward is not None


def test_tokens_are_the_rollouts_own(judge):
    r = rollout(CHAT, "not looked at", ids=(9, 12, 10, 11))
    (found,) = ask([Group(r.task, (r,))], judge, input="tokens")
    assert found.reward == pytest.approx(by_hand(judge, [9, 12, 10, 11]), abs=1e-6)
    strange = replace(r, strands=(replace(r.strand, token_ids=[9, 12, 10, 9999]),))
    (found,) = ask([Group(r.task, (strange,))], judge, input="tokens")
    assert (found.reward, "a token id is outside its vocabulary of" in (found.error or "")) == (None, True)


def test_another_tokenizer_and_template(judge, tmp_path):
    bpe = folder(tmp_path / "bpe", kind="bpe", text="what is 1+2= abc")
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    (found,) = ask([group(CHAT, ["é 3"])], bpe, chat_template=template)
    tokenizer = build("bpe", 400, ["what is 1+2= abc"])
    text = "[system] abc\n[user] 1+2=?\n[assistant] é 3\n"
    assert found.reward == pytest.approx(by_hand(bpe, tokenizer(text)["input_ids"]), abs=1e-6)
    words = folder(tmp_path / "words", text=TEXT[::-1] + "xyz")  # other ids for the same letters
    assert (
        ask([group()], judge)[0].reward
        != ask([group()], judge, tokenizer=str(judge.parent / "judge"))[1].reward
    )
    with pytest.raises(
        ConfigError, match=r"rewards\.rm\.model: .*its tokenizer has 32 tokens.* set tokenizer to"
    ):
        ask([group()], judge, tokenizer=str(words))


def test_a_score_is_a_function_of_the_rollout_alone(judge):
    whole = [r.reward for r in ask([group()], judge)]
    alone = [ask([Group(r.task, (r,))], judge)[0].reward for r in group().rollouts]
    backwards = [r.reward for r in ask([group(texts=REPLIES[::-1])], judge)][::-1]
    assert whole == alone == backwards, "to the bit"
    assert whole[0] == whole[4]


def test_bfloat16_is_near_and_not_the_same(judge):
    exact, near = (ask([group()], judge, dtype=d)[0].reward for d in ("float32", "bfloat16"))
    assert exact != near
    assert exact == pytest.approx(near, abs=0.2)


# ---------------------------------------------------------------- beside functions


def test_the_sum_is_weighted_and_every_part_is_kept(judge, tmp_path):
    other = folder(tmp_path / "other", seed=1)
    one, two = (ask([group()], path) for path in (judge, other))
    rewards = {
        "a": RewardConfig(model=RewardModelConfig(path=str(judge)), weight=0.5),
        "right": RewardConfig(function="exact", weight=2.0),
        "b": RewardConfig(model=RewardModelConfig(path=str(other)), weight=-1.0),
        "length": RewardConfig(function="format", arguments={"pattern": "^3"}, weight=0.0),
    }
    for n, found in enumerate(scored([group()], rewards)):
        parts = {"a": one[n].reward, "right": float(n in (0, 4)), "b": two[n].reward}
        assert found.reward_parts == parts | {"length": float(n in (0, 4))}
        assert found.reward == pytest.approx(0.5 * parts["a"] + 2 * parts["right"] - parts["b"], abs=1e-12)


def test_each_source_has_its_judges(judge):
    rewards = {
        "rm": RewardConfig(model=RewardModelConfig(path=str(judge))),
        "right": RewardConfig(function="exact"),
    }
    with RewardSet.from_config(rewards, RewardWorkersConfig(count=1)) as made:
        chosen = replace(made, by_source={"s": ("right",)})
        elsewhere = Group(replace(group().task, source="t"), group().rollouts[:1])
        elsewhere = Group(elsewhere.task, tuple(replace(r, task=elsewhere.task) for r in elsewhere.rollouts))
        first, second = asyncio.run(score([group(), elsewhere], chosen))
    assert [set(r.reward_parts) for r in first.rollouts] == [{"right"}] * 5
    assert set(second.rollouts[0].reward_parts) == {"rm", "right"}


# ---------------------------------------------------------------- what cannot be scored


def test_a_longer_conversation_is_unscored_or_cut_and_counted(judge):
    limit = len(chat_ids("4 or 3"))
    found = ask([group()], judge, max_tokens=limit)
    assert [r.reward is None for r in found] == [False, False, False, True, False]
    assert found[3].error == f"reward rm: bad_value: the conversation is longer than its max_tokens={limit}"
    long = chat_ids(REPLIES[3])
    for how, cut in (("truncate_left", long[-limit:]), ("truncate_right", long[:limit])):
        found = ask([group()], judge, max_tokens=limit, overlong=how)
        assert [r.reward_parts["rm/truncated"] for r in found] == [0, 0, 0, 1, 0]
        assert found[3].reward == pytest.approx(by_hand(judge, cut), abs=1e-6)


def test_the_models_positions_are_the_limit(judge):
    fits, over = POSITIONS - len(chat_ids("")), POSITIONS - len(chat_ids("")) + 1
    found = ask([group(CHAT, ["a" * fits, "a" * over])], judge)
    assert found[0].reward is not None
    assert f"max_tokens={POSITIONS}" in (found[1].error or "")
    with pytest.raises(ConfigError, match=r"rewards\.rm\.model: max_tokens=49: .* has 48 positions"):
        ask([group()], judge, max_tokens=49)


def test_what_is_no_number_is_unscored(judge, tmp_path):
    model = LlamaForSequenceClassification.from_pretrained(judge)
    model.score.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path / "nan")
    found = ask([group()], tmp_path / "nan", tokenizer=str(judge))
    assert {(r.reward, r.error) for r in found} == {
        (None, "reward rm: bad_value: it returned nan; expected a finite number between -1e+12 and 1e+12")
    }
    assert ask([group("", [""])], judge)[0].error == "reward rm: bad_value: the conversation is empty"
    refuses = "{{ raise_exception('no system here') }}"
    (found, *_) = ask([group()], judge, chat_template=refuses)
    assert "refuses the messages (system, user, assistant): no system here" in (found.error or "")


def test_a_rollout_with_an_error_stays_as_it_is(judge):
    lost = replace(group().rollouts[0], error="engine: gone")
    found = ask([Group(lost.task, (lost, group().rollouts[1]))], judge)
    assert (found[0], found[1].reward is None) == (lost, False)


def test_folders_that_are_no_reward_models(judge, tmp_path):
    with pytest.raises(
        ConfigError, match=r"rewards\.rm\.model: path=/nowhere: no folder with a config\.json"
    ):
        ask([group()], Path("/nowhere"))
    with pytest.raises(ConfigError, match="with 3 labels; expected one label"):
        ask([group()], folder(tmp_path / "three", labels=3))
    config = LlamaConfig.from_pretrained(judge)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "lm")
    with pytest.raises(CheckpointError, match=r"tensors do not match its .*missing: score\.weight"):
        ask([group()], tmp_path / "lm", tokenizer=str(judge))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((judge / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"needs \*\.safetensors files, found none"):
        ask([group()], bare, tokenizer=str(judge))
    no_template = "the prompts are chat messages; give chat_template"
    tokenizer = build("chars", 400, [TEXT])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match=no_template):
        ask([group()], judge, tokenizer=str(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"num_hidden_layers": 10**9},
            r"num_hidden_layers is 1000000000, expected a whole number from 1 to 10000",
        ),
        ({"vocab_size": 10**8}, r"asks for about .* parameters, the files hold"),
        ({"id2label": 5}, "transformers cannot load it as a classifier: .*Error"),
        ({"rope_parameters": []}, "transformers cannot load it as a classifier: .*Error"),
        ({"pad_token_id": 9999}, "transformers cannot load it as a classifier: .*Error"),
    ],
)
def test_a_damaged_config_json_is_named(judge, tmp_path, change, said):
    shutil.copytree(judge, tmp_path / "rm")
    file = tmp_path / "rm/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises((ConfigError, CheckpointError), match=rf"rewards\.rm\.model: path.*{said}"):
        ask([group()], tmp_path / "rm")


# ---------------------------------------------------------------- configs and runs


def config(tmp_path: Path, judge: Path, name: str = "run", **reward: object) -> Path:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]
    tree = {
        "run_dir": str(tmp_path / name),
        "model": {
            "scratch": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 64,
            }
        },
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"rows": rows}], "max_prompt_tokens": 16},
        "rewards": {"rm": {"model": {"path": str(judge)}} | reward},
        "rollout": {"group_size": 8, "sampling": {"max_tokens": 6}},
        "train": {"steps": 20, "tasks_per_step": 4, "optimizer": {"lr": 0.02}},
        "checkpoint": {"interval": 2, "keep": 20, "export": False},
        "track": {"trackers": ["jsonl"]},
    }
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"function": "exact"}, r"rewards\.rm: give either function or model\.path .*; both are given"),
        ({"model": None}, r"rewards\.rm: give either function or model\.path .*; neither is given"),
        ({"arguments": {"a": 1}}, r"rewards\.rm\.arguments: only a function has arguments"),
        (
            {"model": {"path": "p", "input": "tokens", "tokenizer": "t"}},
            r"rm\.model\.tokenizer: .*input=tokens",
        ),
        (
            {"model": {"path": "p", "input": "tokens", "chat_template": "{}"}},
            r"rm\.model\.chat_template: .*input=tokens",
        ),
        (
            {"model": {"path": "p", "chat_template": "gone.jinja"}},
            r"rm\.model\.chat_template: 'gone.jinja' is neither a file",
        ),
    ],
)
def test_what_cannot_be_meant(tmp_path, judge, reward, said):
    with pytest.raises(ConfigError, match=said):
        plans(load(config(tmp_path, judge, **reward)))


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_policy_learns_to_please_it_and_a_run_goes_on_to_the_bit(tmp_path, judge):
    assert train(config(tmp_path, judge)).finished
    whole = tmp_path / "run"
    lines = metrics(whole)
    key = next(k for k in lines[0] if k.startswith("reward") and k.endswith("mean") and "rm" not in k)
    first, last = (sum(line[key] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert last > first + 0.3, (first, last)
    cut = config(tmp_path, judge, "cut")
    (tmp_path / "cut").mkdir()
    begun = tmp_path / "cut" / "checkpoints"
    start = sorted((whole / "checkpoints").iterdir())[3]
    assert train(cut, overrides=[f"checkpoint.resume={start}"]).finished
    assert begun.is_dir()
    after = metrics(tmp_path / "cut")
    assert after == lines[-len(after) :]
    assert 0 < len(after) < len(lines)


def test_a_missing_folder_ends_a_run_before_its_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"rewards\.rm\.model: path=.*gone: no folder with a config\.json"):
        train(config(tmp_path, tmp_path / "gone"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics(tmp_path / "run")


def test_a_rehearsal_goes_without_a_model_that_is_not_at_hand(tmp_path, judge):
    away = probe(load(config(tmp_path, tmp_path / "gone", "away")))
    assert (away.untried, away.broken) == ({"rm"}, set())
    (said,) = [f for f in away.findings if f.what.startswith("rewards.rm")]
    assert (said.kind, "not available here" in said.said) == ("open", True)
    here = probe(load(config(tmp_path, judge, "here")))
    assert (here.untried, here.broken) == (set(), set())
