"""Rollouts of several strands as bytes: groups, rollout files, batches, what is shown; and their streams of numbers."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from rich.console import Console

from test_strands import GROUPS, divided, episodes, forked, rollout, strand, unique
from whet.batch import pack
from whet.buffer.groups import decode, encode, read, write
from whet.rollout.growing import Growing
from whet.seeds import key, rollout_key, uniforms
from whet.track import show
from whet.track.batches import to_table
from whet.track.record import RunDirectory, to_parquet
from whet.track.written import ROLLOUTS, read_rollouts
from whet.training.balance import deal
from whet.training.micro_batches import MicroBatchLimits
from whet.types import TOKEN_TYPES, Completion, DataError, Group, Rollout, Strand, Task, Turn, VersionSpan

TWO = (
    strand([5, 6, 7, 8], [0, 0, 1, 1], turns=(Turn(2, 4, "stop", 0.5),)),
    strand([9, 7, 8, 1, 2], [0, 0, 0, 0, 1], turns=(Turn(4, 5, "length"),)),
)


def task(uid: int = 3) -> Task:
    return Task(uid=uid, source="s", prompt="only once in a group", answer="x", token_ids=(5, 6))


def group() -> Group:
    it = task()
    return Group(it, (rollout(it, 0, TWO, reward=1.5), rollout(it, 1, TWO[:1])))


# ---------------------------------------------------------------- the rollout itself


def test_a_rollout_has_the_sums_of_its_strands_and_no_strand_that_stands_for_all() -> None:
    two, one = group().rollouts
    assert (two.tokens, one.tokens) == (3, 2)
    assert [turn.start for turn in two.turns] == [2, 4]
    assert two.sampled_versions == {0}
    assert one.strand == TWO[0]
    with pytest.raises(
        ValueError, match="rollout 0 of task 3 has 2 strands, expected one: go through `strands`"
    ):
        _ = two.strand
    with pytest.raises(ValueError, match="rollout 0 of task 3 has no strand; it needs one or more"):
        replace(two, strands=())
    bare = two.without_reward()
    assert (bare.reward, [turn.reward for turn in bare.turns]) == (0.0, [None, None])


def test_rollouts_are_equal_if_all_their_strands_are() -> None:
    two = group().rollouts[0]
    assert two == replace(two, strands=tuple(replace(s, mask=s.mask.copy()) for s in TWO))
    assert two != replace(two, strands=TWO[::-1])
    assert two != replace(two, strands=TWO[:1])
    assert two != replace(two, strands=(TWO[0], replace(TWO[1], turns=())))


def test_a_token_of_a_strand_has_17_bytes() -> None:
    for s in (s for g in decode_all(forked()) for r in g.rollouts for s in r.strands):
        arrays = [getattr(s, name) for name in TOKEN_TYPES]
        assert sum(x.nbytes for x in arrays) == 17 * len(s.token_ids)
        assert not any(x.flags.writeable for x in arrays)


def test_a_token_of_a_strand_that_is_being_sampled_has_17_bytes_too() -> None:
    turns, count = 40, 500

    def reply(turn: int) -> Completion:
        ids, told = list(range(1000, 1000 + count)), [-(turn + 1) / (n + 1) for n in range(count)]
        return Completion(
            token_ids=ids,
            logprobs=told,
            sample_logprobs=told,
            spans=(VersionSpan(turn, 0, count),),
            finish_reason="stop",
        )

    tracemalloc.start()
    try:
        strand = Growing(range(1000, 1000 + count), key=0)
        for turn in range(turns):
            strand.add_completion(reply(turn))
            strand.add_observation(range(2000, 2000 + count))
        held, tokens = tracemalloc.get_traced_memory()[0], len(strand.token_ids)
    finally:
        tracemalloc.stop()
    # Arrays that grow hold an eighth more than they need; a turn is an object.
    assert held / tokens < 17 * 9 / 8 + 1
    done = strand.strand()
    assert (done.mask.sum(), len(done.token_ids)) == (strand.sampled, tokens) == (turns * count, 81 * count)
    first = slice(count, 2 * count)
    assert done.logprobs[first].tolist() == np.array(reply(0).logprobs, np.float32).tolist()
    assert np.unique(done.versions).tolist() == [-1, *range(turns)]


def decode_all(groups: list[Group]) -> list[Group]:
    return [decode(encode(g)) for g in groups]


# ---------------------------------------------------------------- groups as bytes


@settings(max_examples=40, deadline=None)
@given(GROUPS)
def test_strands_come_back_to_the_bit(drawn: Any) -> None:
    groups = unique(drawn)
    assert decode_all(groups) == groups


def test_groups_of_strands_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    groups = [*forked(), group(), *episodes(5)]
    write(tmp_path / "groups.arrow", [encode(g) for g in groups])
    assert [decode(data) for data in read(tmp_path / "groups.arrow")] == groups


def test_a_long_rollout_has_20_bytes_a_token_in_checkpoints_and_stores_beside_its_text() -> None:
    it, count = task(), 8000
    draw = np.random.default_rng(0)
    floats = [draw.normal(size=count).astype(np.float32) for _ in range(2)]
    long = Rollout.one_strand(
        task=it,
        index=0,
        token_ids=draw.integers(0, 150_000, count),
        mask=draw.integers(0, 2, count),
        logprobs=floats[0],
        sample_logprobs=floats[1],
        versions=draw.integers(-1, 90, count),
        finish_reason="stop",
        text="",
    )
    data = encode(Group(it, (long,) * 4))
    assert 16 < len(data) / (4 * count) < 20
    assert decode(data).rollouts[0] == long


def test_the_task_is_written_once_and_lies_in_memory_once() -> None:
    data = encode(group())
    assert data.count(b"only once in a group") == 1
    back = decode(data)
    assert all(r.task is back.task for r in back.rollouts)


def rewritten(data: bytes, change: Any) -> bytes:
    """The bytes of a group with other metadata."""
    with pa.ipc.open_stream(data) as reader:
        rows = reader.read_next_batch()
    rest = json.loads(rows.schema.metadata[b"rest"])
    change(rest)
    rows = rows.replace_schema_metadata({"rest": json.dumps(rest)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue().to_pybytes())


def test_groups_from_before_there_were_strands_are_read() -> None:
    """Then a row was a rollout, which had the turns itself; 0.1 wrote no turns."""
    it = task()
    now = Group(it, (rollout(it, 0, TWO[:1], reward=1.0), rollout(it, 1, TWO[1:])))

    def before(rest: Any) -> None:
        for row in rest["rollouts"]:
            (row["turns"],) = row.pop("strands")

    def without_turns(rest: Any) -> None:
        for row in rest["rollouts"]:
            del row["strands"]

    assert decode(rewritten(encode(now), before)) == now
    bare = tuple(replace(r, strands=(replace(r.strand, turns=()),)) for r in now.rollouts)
    assert decode(rewritten(encode(now), without_turns)) == Group(it, bare)


@pytest.mark.parametrize(
    ("strands", "why"),
    [
        ([[], [], []], "the tokens of a strand are missing"),
        ([[]], "1 strands belong to none"),
        ([], "no strand"),
    ],
)
def test_a_group_whose_strands_do_not_add_up_is_refused(strands: list[Any], why: str) -> None:
    def change(rest: Any) -> None:
        rest["rollouts"] = rest["rollouts"][:1]
        rest["rollouts"][0]["strands"] = strands

    it = task()
    with pytest.raises(ValueError, match=why):
        decode(rewritten(encode(Group(it, (rollout(it, 0, TWO),))), change))


def test_micro_batches_of_strands_come_over_the_line_to_a_rank() -> None:
    batch = pack(forked())
    for part in deal(batch, 2, MicroBatchLimits(max_tokens=30)):
        for sent, came in zip(part.micros, pickle.loads(pickle.dumps(part.micros, protocol=5)), strict=True):
            assert all(torch.equal(x, vars(came)[name]) for name, x in vars(sent).items() if x is not None)


# ---------------------------------------------------------------- files of a run


def test_a_rollout_file_has_a_row_a_rollout_with_the_tokens_of_all_strands(tmp_path: Path) -> None:
    path = tmp_path / "s-step-000001.parquet"
    path.write_bytes(to_parquet(group().rollouts, [0.5, None]))
    two, one = read_rollouts(path)
    assert (two["strand_tokens"], one["strand_tokens"]) == ([4, 5], [4])
    assert two["token_ids"] == [5, 6, 7, 8, 9, 7, 8, 1, 2]
    assert two["mask"] == [0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert (two["reward"], one["token_ids"]) == (1.5, [5, 6, 7, 8])


def test_a_rollout_file_from_before_there_were_strands_is_read(tmp_path: Path) -> None:
    new, old = tmp_path / "new.parquet", tmp_path / "old.parquet"
    new.write_bytes(to_parquet(group().rollouts[1:], None))
    said = ("messages", "state")
    for gone in (said, (*said, "stop_reason", "turns"), (*said, "stop_reason", "turns", "strand_tokens")):
        pq.write_table(pq.read_table(new).select([name for name in ROLLOUTS.names if name not in gone]), old)
        (row,) = read_rollouts(new)
        assert read_rollouts(old) == [{**row, "turns": [] if "turns" in gone else row["turns"]}]


def test_a_rollout_file_whose_strands_do_not_add_up_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s-step-000001.parquet"
    path.write_bytes(to_parquet(group().rollouts, None))
    table = pq.read_table(path)
    at = table.schema.get_field_index("strand_tokens")
    odd = pa.array([[4, 4], [4]], pa.list_(pa.int32()))
    pq.write_table(table.set_column(at, ROLLOUTS.field("strand_tokens"), odd), path)
    with pytest.raises(DataError, match="row 1: strand_tokens does not add up to its tokens"):
        read_rollouts(path)


def test_the_tokens_of_several_strands_are_shown_under_their_numbers(tmp_path: Path) -> None:
    RunDirectory(tmp_path, ["s"]).write_rollouts("s", 1, group().rollouts)
    (tmp_path / "metrics.jsonl").write_text('{"stage": "s", "step": 1}\n')
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(show.rollouts(tmp_path, 1, stage="s", tokens=True))
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert [line for line in lines if line.startswith("strand ")] == ["strand 0", "strand 1"]
    places = [line.split()[:2] for line in lines if line[:1].isdigit()]
    first = [["0", "5"], ["1", "6"], ["2", "7"], ["3", "8"]]
    assert places == [*first, ["0", "9"], ["1", "7"], ["2", "8"], ["3", "1"], ["4", "2"], *first]


def test_a_batch_file_has_a_row_a_rollout_with_its_segments_in_lists() -> None:
    two, one = to_table(pack([group()])).to_pylist()
    assert (two["length_S"], two["prompt_S"], one["length_S"], one["prompt_S"]) == ([4, 5], [2, 4], [4], [2])
    assert two["token_ids_N"] == [5, 6, 7, 8, 9, 7, 8, 1, 2]
    assert (two["reward_R"], one["mask_N"]) == (1.5, [False, False, True, True])


def test_a_batch_file_has_every_field_that_a_batch_can_have() -> None:
    batch = pack([group()])
    sizes = {"N": (batch.tokens,), "S": (batch.segments,), "R": (batch.rollouts,), "RC": (batch.rollouts, 2)}
    absent = {
        f.name: sizes.get(f.name.rpartition("_")[2]) for f in fields(batch) if getattr(batch, f.name) is None
    }
    filled = {name: torch.full(size, 0.5, dtype=torch.float64) for name, size in absent.items() if size}
    assert filled.keys() == absent.keys() - {"routed_NLE", "reprompted"}
    two, _ = to_table(replace(batch, **filled | {"skipped_R": torch.tensor([False, True])})).to_pylist()
    lengths = {name: len(two[name]) if isinstance(two[name], list) else name[-1] for name in filled}
    assert lengths == {name: {"N": 9, "C": 2}.get(name[-1], name[-1]) for name in filled}


# ---------------------------------------------------------------- streams of forks


def test_a_rollout_that_has_not_forked_keeps_its_stream() -> None:
    assert rollout_key(1, 2, 3) == rollout_key(1, 2, 3, fork=()) == key(1, "train", 2, 3)


def test_forks_of_one_history_sample_differently() -> None:
    paths = [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]
    keys = [rollout_key(1, 2, 3, fork=path) for path in paths]
    assert len(set(keys)) == len(paths)
    drawn = np.array([uniforms(k, 0, 50) for k in keys])
    assert all(np.abs(drawn[i] - drawn[j]).min() > 0 for i in range(6) for j in range(i))


def test_a_fork_is_named_by_seed_task_rollout_purpose_and_path_alone() -> None:
    here = rollout_key(1, 2, 3, purpose="eval", fork=(4, 5))
    assert here == rollout_key(1, 2, 3, purpose="eval", fork=[4, 5])
    others = [
        rollout_key(9, 2, 3, purpose="eval", fork=(4, 5)),
        rollout_key(1, 9, 3, purpose="eval", fork=(4, 5)),
        rollout_key(1, 2, 9, purpose="eval", fork=(4, 5)),
        rollout_key(1, 2, 3, purpose="train", fork=(4, 5)),
        rollout_key(1, 2, 3, purpose="eval", fork=(5, 4)),
    ]
    assert here not in others


def test_dividing_an_episode_adds_context_and_nothing_else() -> None:
    """The helper of these laws, held to what they assume."""
    whole = episodes(1)[0].rollouts[2]
    parts: Rollout = divided(whole)
    spoken = [t for s in parts.strands for t in s.token_ids[s.mask].tolist()]
    assert spoken == whole.strand.token_ids[whole.strand.mask].tolist()
    last: Strand = parts.strands[-1]
    assert last.token_ids.tolist() == whole.strand.token_ids.tolist()
    assert [s.turns for s in parts.strands] == [(turn,) for turn in whole.turns]
