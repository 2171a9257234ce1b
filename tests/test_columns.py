"""Columns that are recognised by their names, and columns as parameters of rewards."""

import asyncio
import json

import pyarrow as pa
import pytest

from whet.config.load import load
from whet.config.schema import DataConfig, RewardConfig, RewardWorkersConfig, SourceConfig
from whet.data.columns import further, parse
from whet.data.parts import ArrowPart, SourceRows
from whet.data.recognise import recognised, told, with_columns
from whet.data.rows import read_rows
from whet.data.tasks import TaskStream
from whet.data.tokenizer import build
from whet.rewards.combine import RewardSet, check_columns, score
from whet.types import ConfigError, DataError, Group, Message, Rollout, Task, given_tokens

ASK, REPLY, OTHER = (
    {"role": r, "content": c} for r, c in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5"))
)
ASKED = (Message("user", "2+2?"),)
TOKENIZER = build("chars", 100, ["p 4"])


def read(row, **given):
    """The first row by the columns that are recognised: (prompt, response, rejected, answer)."""
    source = SourceConfig(rows=(row,), **given)
    rows = read_rows(source)
    f = parse(row, recognised(source, rows), name="s", chat=None, where="row 1")
    return f.prompt, f.response, f.rejected, f.answer


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "answer": "a"}, ("p", None, None, "a")),
        ({"text": "p", "answer": "a"}, ("p", None, None, "a")),
        ({"prompt": "p", "completion": "c"}, ("p", "c", None, None)),
        ({"question": "q", "answer": "a"}, ("q", "a", None, "a")),
        ({"question": "q", "answer": "a", "completion": "c"}, ("q", "c", None, "a")),
        ({"question": "q", "answer": 4}, ("q", None, None, 4)),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, ("p", "c", "r", None)),
        ({"messages": [ASK, REPLY]}, (ASKED, "4", None, None)),
        ({"messages": [ASK], "answer": "a"}, (ASKED, None, None, "a")),  # as in RLVR's sets
        ({"prompt": [ASK], "completion": [REPLY]}, (ASKED, "4", None, None)),
        ({"prompt": [ASK], "chosen": [REPLY], "rejected": [OTHER]}, (ASKED, "4", "5", None)),
        ({"chosen": [ASK, REPLY], "rejected": [ASK, OTHER]}, (ASKED, "4", "5", None)),
        # as in UltraFeedback: the prompt as text beside whole conversations
        ({"prompt": "2+2?", "chosen": [ASK, REPLY], "rejected": [ASK, OTHER]}, (ASKED, "4", "5", None)),
        # a column of the default name is always the one that is read
        ({"prompt": "p", "question": "q", "response": "r", "completion": "c"}, ("p", "r", None, None)),
    ],
)
def test_columns_are_recognised_by_the_names_of_published_datasets(row, expected):
    assert read(row) == expected


def test_messages_that_only_ask_are_no_demonstration():
    source = SourceConfig(rows=({"messages": [ASK]},))
    assert recognised(source, read_rows(source), texts=True).messages == "messages"
    with pytest.raises(
        DataError, match=r"end with an assistant .*name the column in the source as `prompt: messages`"
    ):
        read({"messages": [ASK]}, messages="messages")


def test_the_text_of_messages_is_no_prompt_unless_it_is_meant():
    text = json.dumps([ASK])
    with pytest.raises(
        DataError, match="column 'prompt' holds the JSON text of messages; expected the list itself"
    ):
        read({"prompt": text})
    assert read({"prompt": text}, template="{prompt}")[0] == text
    for other in (
        "[1]",
        '["role", "content"]',
        '[{"role": "user"}]',
        '["role" "content"',
        "[" * 9000 + '"role""content"',
    ):
        assert read({"prompt": other})[0] == other


def test_a_row_that_is_made_for_something_else_is_an_error():
    """A column of `expect` may be absent or null, and is not read otherwise; a part of a column is reached by dots."""
    expect = {"env_class": "gsm8k", "info.kind": 3}
    fits = {"env_class": "gsm8k", "info": {"kind": 3}}
    for own in ({}, {"env_class": None}, fits):
        assert read({"prompt": "p", "answer": "a", **own}, expect=expect) == ("p", None, None, "a")
    for own, said in (
        (
            {**fits, "env_class": "aime"},
            "row 1: column 'env_class' is 'aime', and the source expects 'gsm8k'",
        ),
        ({**fits, "info": {"kind": 4}}, r"row 1: column 'info\.kind' is 4, and the source expects 3"),
    ):
        with pytest.raises(DataError, match=said):
            read({"prompt": "p", **own}, expect=expect)
    with pytest.raises(DataError, match="is True, and the source expects 1"):
        read({"prompt": "p", "x": True}, expect={"x": 1})


def test_a_label_that_is_a_truth_value_marks_what_is_desirable():
    source = SourceConfig(rows=({"prompt": "p", "completion": "c", "label": False},))
    assert recognised(source, read_rows(source)).desirable == "label"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "p", "completion": "c", "chosen": "d"}, "completion, chosen"),
        ({"question": "q", "text": "t"}, "question, text"),
        ({"messages": [ASK, REPLY], "question": "q"}, "messages, question"),
    ],
)
def test_columns_that_could_each_be_meant_are_an_error_that_lists_them(row, named):
    with pytest.raises(
        DataError,
        match=f"row 1: the columns {named} could all be the prompt or the reply; name those to read",
    ):
        read(row)


def test_what_the_user_names_is_read():
    row = {"question": "q", "text": "t", "completion": "c", "chosen": "d"}
    assert read(row, prompt="text", response="chosen") == ("t", "d", None, None)
    with pytest.raises(DataError, match="no column 'prompt'"):
        read({"question": "q", "completion": "c"}, prompt="prompt")


def test_the_choice_is_told_and_put_into_the_stages(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    values = {
        "model": {"scratch": {}},
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"path": str(file)}]},
    }
    loaded, said = with_columns(load(None, [], values))
    source = loaded.stages[0].data.train[0]
    assert (source.prompt, source.response) == ("question", "answer")
    assert said == [
        "data source tasks: prompt from column 'question', response from column 'answer' (of answer, question); name "
        "columns to read others"
    ]
    file.unlink()
    assert with_columns(load(None, [], values), plan=True)[1] == []  # a plan may be for another machine


def test_nothing_is_told_of_default_names():
    source = SourceConfig(rows=({"prompt": "p", "answer": "a"},))
    rows = read_rows(source)
    assert told(source, recognised(source, rows), rows) == ""


def test_conversations_in_another_form_are_refused_with_the_way_to_convert_them():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    for named in ({"prompt": "conversations"}, {"messages": "conversations"}):
        source = SourceConfig(rows=(row,), **named)
        with pytest.raises(
            DataError, match=r"`from` and `value` \(ShareGPT\); expected role and content"
        ) as error:
            parse(row, source, name="s", chat=None, where="row 1")
    given = str(error.value)
    converted = eval(given[given.index("{") : given.rindex("}") + 1], {"row": row})
    source = SourceConfig(rows=(converted,), messages="messages")
    fields = parse(converted, source, name="s", chat=None, where="row 1")
    assert (fields.prompt, fields.response) == ((Message("user", "a"),), "b")


# ---------------------------------------------------------------- rewards


def scored(function, texts, *, prompt="p", arguments=None, **columns):
    """Rewards and their parts of replies to one task."""
    task = Task(uid=0, source="s", prompt=prompt, answer="4", extra=columns)
    rollouts = [
        Rollout.one_strand(task=task, index=n, **given_tokens([], []), finish_reason="stop", text=text)
        for n, text in enumerate(texts)
    ]
    configs = {"r": RewardConfig(function="object:r", arguments=arguments or {})}
    with RewardSet.from_config(configs, RewardWorkersConfig(), {"r": function}) as rewards:
        done = asyncio.run(score([Group(task, tuple(rollouts))], rewards))
    return [(r.reward, r.error) for r in done[0].rollouts]


def test_a_reward_takes_columns_by_name_and_arguments_stand_over_them():
    def reward(response, level, answer, scale=1.0):
        return level * scale * (response == answer)

    assert scored(reward, ["4", "5"], level=2) == [(2.0, None), (0.0, None)]
    assert scored(reward, ["4"], level=2, arguments={"scale": 3.0}) == [(6.0, None)]
    assert scored(reward, ["4"], level=2, scale=5, arguments={"scale": 3.0}) == [(6.0, None)]


def test_a_reward_of_trl_gets_all_replies_of_a_group_at_once():
    def reward(prompts, completions, level, **columns):
        assert prompts == ["p"] * 3
        assert columns == {"answer": ["4"] * 3}
        return [None if c == "?" else level[0] + len(set(completions)) for c in completions]

    none = (None, "r gave no value for this reply")
    assert scored(reward, ["4", "5", "?"], level=2) == [(5.0, None), (5.0, None), none]


def test_a_chat_reaches_a_reward_of_trl_as_messages():
    def reward(prompts, completions):
        assert prompts[0] == [{"role": "user", "content": "2+2?"}]
        return [float(c[0]["content"] == "4") for c in completions]

    assert scored(reward, ["4", "5"], prompt=ASKED) == [(1.0, None), (0.0, None)]


def test_a_list_of_another_length_leaves_the_group_unscored():
    results = scored(lambda completions: [1.0], ["a", "b"])
    assert [r for r, _ in results] == [None, None]
    assert "returned 1 values for 2 completions" in results[0][1]


def judged(function, tasks):
    """Rewards and errors of one reply to each task, after their columns were checked."""
    groups = [
        Group(
            task,
            (Rollout.one_strand(task=task, index=0, **given_tokens([], []), finish_reason="stop", text="4"),),
        )
        for task in tasks
    ]

    async def run(rewards):
        await check_columns(tasks, rewards)
        return await score(groups, rewards)

    configs = {"r": RewardConfig(function="object:r")}
    with RewardSet.from_config(configs, RewardWorkersConfig(), {"r": function}) as rewards:
        done = asyncio.run(run(rewards))
    return [(group.rollouts[0].reward, group.rollouts[0].error) for group in done]


def task_of(uid, **columns):
    return Task(uid=uid, source="s", prompt="p", answer="4", extra=columns)


def test_a_reward_that_needs_a_column_the_data_lacks_ends_the_run():
    with pytest.raises(
        ConfigError,
        match=r"'r': function .* needs a value for hardness: .*columns of source 's': answer, level",
    ):
        judged(lambda response, hardness: 1.0, [task_of(0, level=2), task_of(1)])


@pytest.mark.parametrize(
    "function", [lambda response, level: level, lambda completions, level: level], ids=["one", "batch"]
)
@pytest.mark.parametrize("lacking", [0, 2])
def test_a_row_without_a_column_is_unscored_whichever_row_comes_first(function, lacking):
    """A resumed run meets its rows in other company: it must not end where the same run went on."""
    tasks = [task_of(n, **({} if n == lacking else {"level": 2})) for n in range(3)]
    found = judged(function, tasks)
    assert [reward for reward, _ in found] == [None if n == lacking else 2.0 for n in range(3)]
    assert "reward 'r': function" in (why := found[lacking][1] or "")
    assert "needs a value for level" in why


def test_what_rewards_may_ask_for_is_what_some_row_has():
    rows = (
        {"prompt": "p", "kind": "a", "level": 1, "meta": {"answer": None}},
        {"prompt": "p", "kind": "b", "meta": {"answer": "4"}},
    )
    table = pa.Table.from_pylist(list(rows))
    source = SourceConfig(rows=rows, label="kind", answer="meta.answer", name="s")
    for read in (read_rows(source), SourceRows("s", (ArrowPart("s", table),))):
        assert further(source, read.columns()) == ["level", "meta"]
    stream = TaskStream([source], DataConfig(), tokenizer=TOKENIZER, seed=0)
    assert [(t.source, t.answer, t.extra) for t in stream.widest] == [
        (label, "", {"level": None, "meta": None}) for label in ("a", "b")
    ]
    (task,) = TaskStream([source], DataConfig(), tokenizer=TOKENIZER, seed=0, exclude=()).next(1)
    assert task.extra.keys() <= {"level", "meta"}
