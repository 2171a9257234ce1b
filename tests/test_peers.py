"""The tables of `make test-peers` and `make test-files`, as far as they can be tested without the peers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from peers import files_of_peers, ours, proofs, repositories, table_of_files
from peers.files_of_peers import NO_RUN, PLANNED, REFUSED, Listed
from peers.rows import ROWS
from peers.table import Row
from test_algorithms_doc import table
from whet.algos.advantages import ADVANTAGES
from whet.algos.aggregate import AGGREGATIONS
from whet.algos.kl import ESTIMATORS, RATIO_ESTIMATORS
from whet.algos.losses import LOSSES
from whet.prove import cases
from whet.prove.numbers import difference

ROOT = Path(__file__).parent.parent

NAMES = {
    *(f"advantage {name}" for name in ADVANTAGES),
    *(f"loss {name}" for name in LOSSES),
    *(f"aggregation {name}" for name in AGGREGATIONS),
    *(f"kl {name}" for name in (*ESTIMATORS, *RATIO_ESTIMATORS)),
    *(f"correction weight: {level}" for level in ("token", "sequence", "geometric")),
    *("correction reject", "correction denominator: all", "critic", "adaptive KL", "schedule"),
}
"""What a row may cover."""

APART = {
    ("advantage grpo", "trl"): "TRL computes it inside its generation loop, so it cannot be called apart",
    ("loss m2po", "trinity"): "the release that is compared, 0.6.0, does not have it yet",
}
"""Claims that no row can hold."""

CLAIMS = {"verl": "verl", "SkyRL": "skyrl", "Trinity": "trinity", "Cosmos-RL": "cosmos", "TRL": "trl"}


def claims() -> list[tuple[str, str]]:
    """(what, peer) wherever docs/algorithms.md says that a function is 'as' a peer has it."""
    out = []
    for heading, kind, column in (
        ("Advantages", "advantage", "source, and differences to other programs"),
        ("Losses", "loss", "source, and differences to other programs"),
    ):
        for name, row in table(heading).items():
            for said in re.findall(
                r"\b[Aa]s ((?:(?:verl|SkyRL|Trinity|Cosmos-RL|TRL)(?:, | and )?)+)", row[column]
            ):
                out += [(f"{kind} {name}", CLAIMS[peer]) for peer in re.findall("|".join(CLAIMS), said)]
    return out


def test_every_claim_of_the_page_has_a_row() -> None:
    said = claims()
    assert ("advantage gpg", "verl") in said
    assert ("loss topr", "trinity") in said
    compared = {(what, row.peer) for row in ROWS for what in row.covers}
    assert set(said) - compared == set(APART), (
        "docs/algorithms.md says 'as PEER', and tests/peers does not compare it"
    )


def test_rows_cover_what_there_is_and_are_told_apart() -> None:
    assert {what for row in ROWS for what in row.covers} <= NAMES
    seen = [(row.peer, row.what, row.kinds) for row in ROWS]
    assert len(set(seen)) == len(seen)


def test_a_documented_difference_names_a_page_that_has_it() -> None:
    """The page, and the row or heading of it."""
    for row in ROWS:
        if row.differs:
            page, _, place = re.search(r"\((docs/\w+\.md)(, )`?([^`)]+)`?\)", row.differs).groups()
            assert place in (ROOT / page).read_text(encoding="utf-8"), (row.peer, row.what)
        assert not (row.differs and row.issue)


@pytest.mark.parametrize("peer", sorted(set(CLAIMS.values())))
def test_our_side_has_numbers(peer: str) -> None:
    """The translation of its settings loads, and what comes of it is finite for a batch: one row for each function."""
    for row in {row.covers: row for row in ROWS if row.peer == peer}.values():
        numbers = row.ours(row, next(cases.cases(row.kinds)))
        for name, x in numbers.items():
            assert torch.isfinite(x).all(), (row.what, name)


def test_a_difference_is_seen_wherever_it_is_sampled() -> None:
    mask = torch.tensor([[1.0, 0.0]])
    same = {"x": torch.tensor([[4.0, 9.0]])}
    assert difference(same, {"x": torch.tensor([[4.0, 0.0]])}, (), mask) == 0
    assert difference(same, {"x": torch.tensor([[3.0, 9.0]])}, (), mask) == 0.25
    assert difference(same, {"x": torch.tensor([[torch.nan, 9.0]])}, (), mask) == torch.inf
    with pytest.raises(ValueError, match="shape"):
        difference(same, {"x": torch.zeros(3)}, (), mask)


def test_padding_keeps_every_token_at_its_place() -> None:
    made = cases.case("several turns", 0)
    padded = made.padded(made.batch.reward_R[made.batch.rollout_N] + made.column_N)
    columns = torch.arange(made.width)
    expected = (made.batch.reward_R[:, None] + columns) * made.exists
    assert torch.equal(padded, expected)
    assert torch.equal(made.mask.sum(-1), made.batch.sum_R(torch.ones_like(made.logp_N)))
    assert torch.equal((made.reward * made.mask).sum(-1), made.batch.reward_R)


def _one(peer: str, what: str) -> Row:
    return next(row for row in ROWS if row.peer == peer and row.what == what)


def test_a_row_hands_over_the_settings_of_its_keys() -> None:
    row = _one("verl", "rollout_rs=token_k1, threshold 0.7_1.5")
    (reject,) = ours.config(row).algorithm.correction.reject
    assert (reject.over, reject.low, reject.high) == ("token", pytest.approx(1 / 1.5), pytest.approx(1 / 0.7))


# ---------------------------------------------------------------- example files


def test_the_table_of_files_is_well_formed() -> None:
    rows = files_of_peers.listed()
    assert files_of_peers.TABLE.read_text(encoding="utf-8") == files_of_peers.written(rows), "sorted"
    assert len({row.place for row in rows}) == len(rows)
    assert {row.system for row in rows} == set(repositories.REPOSITORIES) == set(table_of_files.FOLDERS)
    for row in rows:
        assert all(text == text.strip() for text in row), row
        assert re.fullmatch("[0-9a-f]{40}", row.commit), row
        assert Path(row.path).suffix in table_of_files.SUFFIXES, row
        given = (bool(row.feature), bool(row.says))
        assert (
            given == {PLANNED: (False, False), REFUSED: (True, True), NO_RUN: (True, False)}[row.verdict]
        ), row
        assert row.feature != "?", row


def test_the_page_counts_the_files_of_the_table() -> None:
    page = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    assert page.endswith("\n\n" + files_of_peers.summary(files_of_peers.listed()))


@pytest.mark.usefixtures("home")
def test_files_are_compared_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of single files: one that plans, one that is refused, a helper, and one that the table has not."""
    commit = "0" * 40
    examples = tmp_path / "NovaSky-AI+SkyRL" / commit / "examples"
    examples.mkdir(parents=True)
    start = "uv run -m skyrl.train.entrypoints.main_base trainer.policy.model.path=m data.train_data=['a.parquet']"
    (examples / "fine.sh").write_text(f"{start} data.val_data=['b.parquet'] trainer.logger=console\n")
    (examples / "own.sh").write_text(f"{start} environment.env_class=mine trainer.of_mine=1\n")
    (examples / "prepare_data.sh").write_text("python prepare.py\n")
    (examples / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(repositories, "PLACE", tmp_path)
    assert repositories.loose("skyrl") == [commit]
    assert repositories.has("skyrl", commit)
    assert not repositories.has("skyrl", "1" * 40)
    lines, problems, unknown = table_of_files.compare("skyrl", commit, [])
    assert [line[2:5] for line in lines] == [
        ("examples/fine.sh", PLANNED, ""),
        ("examples/own.sh", REFUSED, "code of its own"),
        ("examples/prepare_data.sh", NO_RUN, "a preparation of data"),
    ]
    assert [text.partition(": ")[2] for text in problems] == ["not in the table"] * 3
    assert unknown == ["skyrl examples/own.sh: trainer.of_mine"]
    assert table_of_files.compare("skyrl", commit, lines)[:2] == (lines, [])
    other = Listed("skyrl", commit, "examples/fine.sh", REFUSED, "images and video", "images")
    gone = Listed("skyrl", commit, "examples/gone.sh", PLANNED)
    _, problems, _ = table_of_files.compare(
        "skyrl", commit, [other, lines[1]._replace(says="x?"), gone, lines[2]]
    )
    assert problems[0].startswith("skyrl examples/fine.sh: refused in the table; it is planned")
    assert problems[1].startswith("skyrl examples/own.sh: the refusal does not say 'x?'")
    assert problems[2] == "skyrl examples/gone.sh: in the table, and not at 000000000"


# ---------------------------------------------------------------- proofs


def test_the_proved_files_are_those_of_the_table() -> None:
    """proofs.tsv is as it is written, and docs/peers.md has it."""
    rows = proofs.table()
    assert proofs.written(rows) == proofs.TABLE.read_text(encoding="utf-8")
    assert "\n" + proofs.page() + "\n" in (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    assert len({(row.system, row.path) for row in rows}) == len(rows) >= 30
    for row in rows:
        sources = [of for of in proofs.SOURCES if of.system == row.system]
        assert any(row.path.startswith(f"{of.under}/") and row.path.endswith(of.ends) for of in sources), (
            row.path
        )
        assert re.fullmatch("[0-9a-f]{40}", row.commit)
        assert row.equal > 0
        assert bool(row.apart) is bool(row.why), "what is not compared has a reason"


def test_a_proof_that_is_not_as_its_line_says_is_told() -> None:
    line = proofs.Proved("verl", "", "examples/a.sh", "", 1, 1, "keys", "no such key")
    as_said = {"a": "equal", "b": "differs as documented: by 1", "keys": "not compared: no such key"}
    assert proofs.counted(line, as_said) == line
    assert proofs.problem(line, as_said, "") == ""
    assert proofs.problem(line, as_said | {"a": "DIFFERS: by 2"}, "") == "a: DIFFERS: by 2"
    assert proofs.problem(line, as_said | {"a": "not compared: x"}, "") == "a: not compared: x"
    assert "can be compared" in proofs.problem(line, {"a": "equal"}, "")
    fewer = {name: said for name, said in as_said.items() if name != "b"}
    assert proofs.problem(line, fewer, "") == "1 rows fewer than the line says"
    assert proofs.problem(line, {}, "no file") == "no file"
