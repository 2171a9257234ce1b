"""Recipes: what a name means, what is refused, and whole algorithms built from a config."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sections
from batches import by_rollout, doubles, logp_now, make_batch, pair_batch, ragged
from unread import check_algorithm
from whet.algos.advantages import ADVANTAGES, grpo, token_rewards, whiten
from whet.algos.aggregate import AGGREGATIONS
from whet.algos.losses import LOSSES
from whet.algos.recipes import Algorithm, build
from whet.batch import Loss, Outputs
from whet.config import functions, keys, schema
from whet.config.recipes import RECIPES, Resolved, resolve
from whet.types import ConfigError, WhetError


def given(name: str, **keys: Any) -> schema.AlgorithmConfig:
    return schema.AlgorithmConfig.model_validate(sections.algorithm(name, **keys))


def made(name: str, **keys: Any) -> Algorithm:
    return build(given(name, **keys), critic=schema.CriticConfig(), max_tokens=20)


# ---------------------------------------------------------------- the table


def test_recipes_name_parts_that_exist() -> None:
    for recipe in RECIPES.values():
        assert recipe.advantage in ADVANTAGES
        assert recipe.loss in LOSSES
        assert recipe.loss_agg_mode in AGGREGATIONS
        assert recipe.kind == functions.LOSSES[recipe.loss].kind
        rows = (functions.ADVANTAGES[recipe.advantage], functions.LOSSES[recipe.loss])
        assert recipe.settings.keys() <= {key for row in rows for key in row.settings.model_fields}


def test_keys_that_a_recipe_s_note_sets_exist() -> None:
    found = 0
    for recipe in RECIPES.values():
        rows = (functions.ADVANTAGES[recipe.advantage], functions.LOSSES[recipe.loss])
        its_own = {key for row in rows for key in row.settings.model_fields}
        for name in re.findall(r"([a-z_.]+)=", recipe.note):
            path = tuple(name.split("."))
            assert name in its_own or keys.lookup(("algorithm", *path)) or keys.lookup(path), recipe.note
            found += 1
    assert found >= 10


def test_tables_without_torch_tell_the_truth_about_the_functions() -> None:
    def keywords(function: object) -> set[str]:
        assert callable(function)
        return {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}

    assert {n: keywords(f) - {"reward_N"} for n, f in ADVANTAGES.items()} == {
        n: set(row.settings.model_fields) for n, row in functions.ADVANTAGES.items()
    }
    assert {n: keywords(f) for n, f in LOSSES.items()} == {
        n: set(row.settings.model_fields) for n, row in functions.LOSSES.items()
    }
    for row in (*functions.ADVANTAGES.values(), *functions.LOSSES.values()):
        row.settings.model_validate({})  # all have defaults
    known = inspect.signature(schema.AlgorithmConfig).parameters["loss_agg_mode"].annotation
    assert all(repr(mode) in str(known) for mode in AGGREGATIONS if mode != "pair-mean")


def test_every_recipe_has_its_row_in_the_docs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for name in [*RECIPES, *ADVANTAGES, *LOSSES, *AGGREGATIONS]:
        assert f"| `{name}` |" in text, name


def test_recipes_are_read_without_torch() -> None:
    root = Path(inspect.getfile(schema)).parent.parent
    code = (
        "import sys, types; whet = types.ModuleType('whet'); "
        f"whet.__path__ = [{str(root)!r}]; sys.modules['whet'] = whet; "
        "import whet.config.recipes; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- resolve


def test_a_recipe_as_it_is() -> None:
    r = resolve(given("dapo"))
    assert (r.advantage, r.loss, r.loss_agg_mode) == ("grpo", "ppo", "token-mean")
    clips = r.settings["loss"].settings
    assert (clips["clip_low"], clips["clip_high"], clips["dual_clip"]) == (0.2, 0.28, None)
    assert r.dynamic_sampling
    assert r.settings["advantage"].settings["normalize_std"]
    assert not r.needs_critic
    assert not r.needs_reference


def test_the_users_keys_win() -> None:
    r = resolve(
        given("dapo", clip_high=0.4, dual_clip=3.0, dynamic_sampling=False, normalize_std=False, whiten=True)
    )
    clips = r.settings["loss"].settings
    assert (clips["clip_low"], clips["clip_high"], clips["dual_clip"]) == (0.2, 0.4, 3.0)
    assert (r.dynamic_sampling, r.settings["advantage"].settings["normalize_std"], r.whiten) == (
        False,
        False,
        True,
    )
    r = resolve(
        given("grpo", advantage="gae", gamma=0.9, loss_agg_mode="seq-mean-token-sum-norm", norm_tokens=7)
    )
    assert (r.needs_critic, r.settings["advantage"].settings["gamma"], r.norm_tokens) == (True, 0.9, 7)
    assert not resolve(given("ppo", advantage="rloo")).needs_critic
    assert resolve(given("ppo", advantage="mine:f")).needs_critic
    assert not resolve(given("grpo", advantage="mine:f")).needs_critic


def test_who_needs_a_reference() -> None:
    needs = {name for name in RECIPES if resolve(given(name)).needs_reference}
    assert needs == {"dpo", "mpo", "online_dpo", "kto", "distill", "gkd", "sdpo", "prime"}
    assert resolve(given("grpo", kl=schema.KlConfig(coef=0.01))).needs_reference


@pytest.mark.parametrize(
    ("name", "keys", "why"),
    [
        ("grop", {}, "did you mean 'grpo'"),
        ("grpo", {"advantage": "gea"}, "did you mean 'gae'"),
        ("grpo", {"loss": "pop"}, "did you mean 'ppo'"),
        ("rloo", {"clip_low": 0.1}, "algorithm.loss.clip_low: has no effect"),
        ("rloo", {"dual_clip": 3.0}, "algorithm.loss.dual_clip: has no effect"),
        ("rloo", {"normalize_std": True}, "algorithm.advantage.normalize_std: has no effect"),
        ("grpo", {"lam": 0.95}, "algorithm.advantage.lam: has no effect"),
        ("grpo", {"gamma": 0.0}, "algorithm.advantage.gamma: has no effect"),
        ("reinforce", {"lam": 0.95}, "algorithm.advantage.lam: has no effect"),
        ("grpo", {"norm_tokens": 5}, "algorithm.norm_tokens: has no effect"),
        ("grpo", {"beta": 0.5}, "algorithm.loss.beta: has no effect"),
        ("sft", {"max_refills": 3}, "algorithm.max_refills: has no effect"),
        ("sft", {"whiten": True}, "algorithm.whiten: has no effect"),
        ("sft", {"dynamic_sampling": True}, "algorithm.dynamic_sampling: has no effect"),
        ("sft", {"old_logprobs": "recompute"}, "algorithm.old_logprobs: has no effect"),
        ("sft", {"advantage": "grpo"}, "algorithm.advantage: has no effect"),
        ("grpo", {"loss": "dpo"}, "set algorithm.name to one of alphapo, cpo, dpo"),
        ("grpo", {"loss": "sft"}, "set algorithm.name to one of sft"),
        ("dpo", {"loss": "ppo"}, "learns from online data"),
        ("dpo", {"loss_agg_mode": "token-mean"}, "one number per pair or per reply"),
        ("dpo", {"entropy_coef": 0.1}, "one number per pair or per reply"),
        ("kto", {"kl": {"coef": 0.1}}, "no KL per token"),
        ("dpo", {"reward_kl": {"coef": 0.1}}, "reward_kl.coef: has no effect: the replies are in the data"),
        ("sft", {"reward_kl": {"coef": 0.1}}, "reward_kl.coef: has no effect: the replies are in the data"),
        ("ppo", {"kl": {"coef": 0.1}, "reward_kl": {"target": 0.1}}, "algorithm.reward_kl.coef is 0"),
        (
            "ppo",
            {"reward_kl": {"coef": 0.1, "horizon": 5}},
            "horizon: has no effect: algorithm.reward_kl.target",
        ),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(name: str, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_algorithm(name, **keys)


def test_defaults_written_out_are_no_error() -> None:
    for name in RECIPES:
        defaults = {
            k: f.get_default(call_default_factory=True)
            for k, f in schema.AlgorithmConfig.model_fields.items()
        }
        assert isinstance(resolve(schema.AlgorithmConfig(**{**defaults, "name": name})), Resolved)


# ---------------------------------------------------------------- build


PAIRS = {"dpo", "mpo", "online_dpo", "cpo", "simpo", "alphapo", "orpo"}


def test_what_the_step_is_told() -> None:
    assert {n for n in RECIPES if made(n).needs_critic} == {"ppo", "turn_ppo", "prime"}
    assert {n for n in RECIPES if made(n).value_loss is not None} == {"ppo", "turn_ppo", "prime"}
    assert {n for n in RECIPES if made(n).implicit is not None} == {"prime"}
    assert {n for n in RECIPES if made(n).whole_groups} == PAIRS
    assert {n for n in RECIPES if made(n).dynamic_sampling} == {"dapo", "online_dpo"}
    by_themselves = {
        "asymre",
        "dppo",
        "gkd",
        "sdpo",
        "gpg",
        "m2po",
        "online_dpo",
        "opmd",
        "opo",
        "raft",
        "reinforce",
        "remax",
        "rloo",
    }
    online = {n for n, recipe in RECIPES.items() if recipe.kind == "online"}
    assert {n for n in online if not made(n).needs_old(False)} == by_themselves
    assert {n for n in RECIPES if made(n).needs_old(True)} == set()
    assert made("grpo", entropy_coef=0.01).entropy.is_on
    assert made("grpo", entropy_control="adaptive").entropy.is_on
    assert not made("grpo").entropy.is_on


@pytest.mark.parametrize(
    ("mode", "expected"), [("auto", (False, True)), ("sampled", (False, False)), ("recompute", (True, True))]
)
def test_who_computes_the_old_logprobs(mode: str, expected: tuple[bool, bool]) -> None:
    algorithm = made("grpo", old_logprobs=mode)
    assert (algorithm.needs_old(True), algorithm.needs_old(False)) == expected


def test_kl_in_the_reward_needs_old_logprobs_even_without_a_ratio() -> None:
    assert made("rloo", reward_kl=schema.RewardKlConfig(coef=0.1)).needs_old(False)


@pytest.mark.parametrize("estimator", ["corrected_k3", "unbiased_k3", "k3"])
def test_a_kl_with_a_ratio_needs_old_logprobs_even_beside_a_loss_without_one(estimator: str) -> None:
    """Else its r = pi / pi_old would be that to an engine which computes differently, or is of an older version."""
    algorithm = made("rloo", kl=schema.KlConfig(coef=0.1, estimator=estimator))
    assert algorithm.needs_old(False) == (estimator != "k3")
    assert not algorithm.needs_old(True)


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.kind == "online" and n not in PAIRS])
def test_a_whole_online_step(name: str) -> None:
    """Advantage, weights, loss, gradient: finite, only at sampled tokens, and towards what was rewarded."""
    algorithm = made(name, **({"divergence": "k2"} if name == "sdpo" else {}))
    batch = make_batch([["paa", "paoa", "pa"], ["pa", "poa"]], [2.0, 0.0, 1.0, -1.0, 1.0])
    batch = replace(batch, logp_old_N=batch.logp_sample_N, value_N=torch.zeros(batch.tokens).double())
    batch = replace(
        batch, expert_R=torch.zeros(batch.rollouts, dtype=torch.bool), implicit_N=batch.logp_ref_N
    )
    batch = replace(batch, baseline_R=torch.zeros(5).double(), collision_N=batch.mask_N.double())
    batch = algorithm.advantage(batch, algorithm.kl_coef)
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    logp = logp_now(batch, scale=0.0)
    loss = algorithm.loss(batch, Outputs(logp_N=logp))
    (grad,) = torch.autograd.grad((loss.loss_N * batch.weight_N).sum(), logp)
    assert torch.isfinite(grad).all()
    assert (grad[~batch.mask_N] == 0).all()
    if name in ("distill", "gkd", "sdpo"):
        return  # towards the teacher, whatever is rewarded
    best, worst = by_rollout(batch, grad)[0], by_rollout(batch, grad)[3]
    assert all(g < 0 for g in best)
    assert all(g == 0 if name in ("grpo_passk", "raft") else g > 0 for g in worst)


def test_sft_and_dpo_through_build() -> None:
    sft = made("sft")
    batch = sft.advantage(ragged(0), sft.kl_coef)
    loss = sft.loss(batch, Outputs(logp_N=batch.logp_sample_N))
    nll = -batch.logp_sample_N[batch.mask_N].mean()
    torch.testing.assert_close((loss.loss_N * sft.weights(batch, 1)).sum(), nll, rtol=1e-12, atol=0)
    dpo = made("dpo", beta=0.3)
    pairs = dpo.advantage(pair_batch(3), dpo.kl_coef)
    loss = dpo.loss(pairs, Outputs(logp_N=pairs.logp_ref_N))
    # At the reference every pair costs log 2.
    assert float((loss.loss_N * dpo.weights(pairs, 1)).sum()) == pytest.approx(0.6931471805599453, rel=1e-12)


def test_settings_reach_the_functions() -> None:
    batch = replace(make_batch([["pa", "pa"]], [1.0, 0.0]), logp_old_N=torch.zeros(4).double())
    logp = doubles([0, 1.0, 0, 1.0])
    algorithm = made(
        "dr_grpo", clip_low=0.1, clip_high=0.5, dual_clip=2.0, kl=schema.KlConfig(coef=0.5, estimator="k1")
    )
    batch = replace(algorithm.advantage(batch, algorithm.kl_coef), logp_ref_N=torch.zeros(4).double())
    # Advantages 0.5 and -0.5 (no std). Ratio e: -0.5 * 1.5 and min(0.5 e, 2 * 0.5); KL 0.5 * 1 each.
    loss = algorithm.loss(batch, Outputs(logp_N=logp)).loss_N
    assert loss.tolist() == pytest.approx([0, -0.75 + 0.5, 0, 1.0 + 0.5])
    # Two rollouts, constant max_tokens = 20, or the one that is given.
    assert algorithm.weights(batch, 1).tolist() == pytest.approx([0, 1 / 40, 0, 1 / 40])
    assert made("dr_grpo", norm_tokens=5).weights(batch, 1).tolist() == pytest.approx([0, 1 / 10, 0, 1 / 10])


def test_kl_in_the_reward_changes_the_advantage_and_not_the_loss() -> None:
    algorithm = made("reinforce", reward_kl=schema.RewardKlConfig(coef=0.2, estimator="k1"))
    assert algorithm.kl_coef == 0.2
    batch = replace(
        make_batch([["paa"]], [1.0]), logp_old_N=doubles([0, -1, -1]), logp_ref_N=doubles([0, -2, -3])
    )
    batch = algorithm.advantage(batch, 0.2)
    # Token rewards -0.2 * 1 and 1 - 0.2 * 2 = 0.6; returns 0.4, 0.6.
    assert batch.adv_N is not None
    assert batch.adv_N.tolist() == pytest.approx([0, 0.4, 0.6])
    loss = algorithm.loss(batch, Outputs(logp_N=doubles([0, -1, -1]))).loss_N
    assert loss.tolist() == pytest.approx([0, 0.4, 0.6])
    # The weight is the step's, not the config's.
    batch = algorithm.advantage(batch, 0.0)
    assert batch.adv_N is not None
    assert batch.adv_N.tolist() == [0, 1, 1]


def test_the_controller_moves_the_weight_only_with_a_target() -> None:
    batch = replace(
        make_batch([["pa", "pa"]]), logp_old_N=doubles([0, -1, 0, -1]), logp_ref_N=doubles([0, -1.3, 0, -1.1])
    )
    fixed = made("ppo", reward_kl=schema.RewardKlConfig(coef=0.1, estimator="k1"))
    assert fixed.next_kl_coef(batch, 0.1) == 0.1
    # Mean KL 0.2, target 0.18: error 1/9; two rollouts, horizon 10.
    steered = made("ppo", reward_kl=schema.RewardKlConfig(coef=0.1, estimator="k1", target=0.18, horizon=10))
    assert steered.next_kl_coef(batch, 0.1) == pytest.approx(0.1 * (1 + 1 / 9 * 0.2))


def test_ppo_whitens_and_keeps_the_raw_returns() -> None:
    algorithm = made("ppo", gamma=0.9, lam=0.8)
    batch = ragged(1)
    done = algorithm.advantage(batch, 0.0)
    raw, returns = ADVANTAGES["gae"](batch, reward_N=token_rewards(batch), gamma=0.9, lam=0.8)
    assert done.adv_N is not None
    assert done.return_N is not None
    assert torch.equal(done.adv_N, whiten(raw, batch.mask_N))
    assert returns is not None
    assert torch.equal(done.return_N, returns)
    assert algorithm.value_loss is not None
    loss = algorithm.value_loss(done, Outputs(value_N=done.value_N)).loss_N
    assert batch.value_N is not None
    expected = ((batch.value_N - returns)[batch.mask_N] ** 2 / 2).mean()
    torch.testing.assert_close((loss * algorithm.value_weights(done)).sum(), expected, rtol=1e-12, atol=0)


# ---------------------------------------------------------------- functions of the user


MINE = """
import torch
from whet.batch import Loss

def by_length(batch, *, gamma):
    return batch.mask_N * gamma, None

def all_zero(batch, *, reward_N):
    return torch.zeros_like(reward_N), None

def cubed(batch, out, *, clip_low=0.1):
    return Loss(out.logp_N ** 3 * clip_low)

def typed(batch, out, clip_low: float = 0.1):
    return Loss(out.logp_N * clip_low)

def greedy(batch, *, temperature):
    return batch.mask_N, None

def short(batch):
    return torch.zeros(1), None

def bare_advantage(batch):
    return torch.zeros(batch.tokens)

def reduced(batch, out):
    return Loss(-(batch.adv_N * out.logp_N).mean())

def column(batch, out):
    return Loss(-(batch.adv_N * out.logp_N)[:, None])

def by_rollout(batch, out):
    return Loss(batch.sum_R(out.logp_N))

def bare(batch, out):
    return -batch.adv_N * out.logp_N

def pair(batch, out):
    return -batch.adv_N * out.logp_N, {}

def as_array(batch, out):
    return Loss((-batch.adv_N * out.logp_N).detach().numpy())

def without_stats(batch, out):
    return Loss(-batch.adv_N * out.logp_N, None)

def counted(batch, out):
    return Loss(-batch.adv_N * out.logp_N, {"mine": 1.0})

def named(batch, out, *, stat):
    return Loss(-batch.adv_N * out.logp_N, {stat: out.logp_N.detach()})

def unmasked(batch, out):
    return Loss(-out.logp_N)

def sampled_alike(batch, *, kind):
    made = {"bool": batch.mask_N, "int": batch.mask_N.long(), "half": batch.mask_N.half()}
    learned = torch.ones(batch.tokens, dtype=torch.float64, requires_grad=True)
    return made.get(kind, learned * batch.mask_N), None

def centred(batch):
    reward_R = batch.reward_R
    reward_R -= reward_R.mean()
    return reward_R[batch.rollout_N] * batch.mask_N, None

def positive(batch, out):
    return Loss(-batch.adv_N.clamp_(min=0) * out.logp_N)

def lowered(batch, out):
    out.logp_N.detach().clamp_(min=-1)
    return Loss(-batch.adv_N * out.logp_N)

def leaves(batch, out):
    import sys
    sys.exit("enough")

def raises(batch, out):
    return out.logp[0]

def weigh(batch, log_N):
    return log_N.exp_()

def late_only(batch, log_N):
    return (batch.position_N > 1).double()

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def test_a_function_of_the_users_gets_the_settings_it_names(mine: str) -> None:
    algorithm = made("grpo", advantage=f"{mine}:by_length", loss=f"{mine}:cubed", gamma=0.5, clip_low=0.3)
    batch = algorithm.advantage(make_batch([["paoa"]]), 0.0)
    assert batch.adv_N is not None
    assert batch.adv_N.tolist() == [0, 0.5, 0, 0.5]
    loss = algorithm.loss(batch, Outputs(logp_N=doubles([0, 2, 0, 3])))
    assert loss.loss_N.tolist() == pytest.approx([0, 2.4, 0, 8.1])
    assert algorithm.needs_old(False)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"advantage": "greedy"}, "temperature.*Its settings are its keyword arguments"),
        ({"advantage": "number"}, "expected a function or class"),
        ({"advantage": "absent"}, "has no 'absent'"),
        ({"advantage": "by_length", "reward_kl": {"coef": 0.1}}, "does not take reward_N"),
        ({"advantage": "by_length", "lam": 0.5}, r"algorithm\.advantage\.lam: .*has no setting 'lam'"),
        ({"loss": "typed", "clip_low": "high"}, r"algorithm\.loss\.clip_low='high': .*typed takes .*float"),
        ({"loss": "cubed", "clip_lo": 3.0}, "has no setting 'clip_lo'.*did you mean 'clip_low'"),
        ({"loss": "by_length"}, "cannot be called as f\\(batch, outputs"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(mine: str, keys: dict[str, Any], why: str) -> None:
    keys = {k: f"{mine}:{v}" if k in ("advantage", "loss") else v for k, v in keys.items()}
    tables = {k: {"name": keys[k]} for k in ("advantage", "loss") if k in keys}
    for key in keys.keys() - {"advantage", "loss", "reward_kl"}:
        tables["advantage" if key == "lam" else "loss"][key] = keys[key]
    rest = {k: v for k, v in keys.items() if k == "reward_kl"}
    cfg = schema.AlgorithmConfig.model_validate({"name": "grpo", **rest, **tables})
    with pytest.raises(ConfigError, match=why):
        build(cfg, critic=schema.CriticConfig(), max_tokens=20)


def test_an_advantage_of_the_wrong_size_is_refused(mine: str) -> None:
    for name, got in (("short", r"got \(shape \(1,\), None\)"), ("bare_advantage", r"got shape \(3,\)")):
        with pytest.raises(WhetError, match=rf"must return .* shape \(3,\), one number a token; {got}"):
            made("grpo", advantage=f"{mine}:{name}").advantage(make_batch([["paa"]]), 0.0)


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("reduced", r"got shape \(\)\. It is reduced by algorithm\.loss_agg_mode"),
        ("column", r"got shape \(3, 1\)"),
        ("by_rollout", r"got shape \(1,\)"),
        ("bare", r"got a bare tensor of shape \(3,\): return Loss\(loss_N\)"),
        ("pair", "got tuple"),
        ("as_array", "got loss_N of type ndarray and stats of type dict, expected a tensor and a dict"),
        ("without_stats", "got loss_N of type Tensor and stats of type NoneType"),
        ("counted", r"stats\['mine'\] must be \[tokens\] or \[rollouts\], got float"),
    ],
)
def test_a_loss_of_the_wrong_shape_is_refused_with_what_was_expected(mine: str, name: str, got: str) -> None:
    """Broadcast over a micro-batch it would train silently, and depend on the cut."""
    batch = make_batch([["paa"]], [1.0])
    batch = replace(batch, adv_N=batch.mask_N.double(), logp_old_N=logp_now(batch).detach())
    algorithm = made("grpo", loss=f"{mine}:{name}")
    for loss in (
        algorithm.loss,
        algorithm.loss_of(batch, lambda b, want: logp_now(b), algorithm.entropy.coef),
    ):
        with pytest.raises(WhetError, match=rf"must return whet\.batch\.Loss.* of shape \(3,\).*{got}"):
            loss(batch, Outputs(logp_N=logp_now(batch)))


@pytest.mark.parametrize("kind", ["bool", "int", "half", "grad"])
def test_an_advantage_of_any_dtype_is_a_constant_number_a_token(mine: str, kind: str) -> None:
    """Of bool the loss's minus sign is an error, and a graph would be followed back once for each micro-batch."""
    cfg = schema.AlgorithmConfig(advantage={"name": f"{mine}:sampled_alike", "kind": kind})
    algorithm = build(cfg, critic=schema.CriticConfig(), max_tokens=20)
    batch = algorithm.advantage(make_batch([["paa", "pa"]], dtype=torch.float32), 0.0)
    assert batch.adv_N is not None
    assert batch.adv_N.dtype == torch.float32
    assert batch.adv_N.tolist() == [0, 1, 1, 0, 1]
    logp_N = logp_now(batch)
    for _ in range(2):
        algorithm.loss(batch, Outputs(logp_N=logp_N)).loss_N.sum().backward()


def test_a_loss_that_ends_the_process_or_raises_is_named(mine: str) -> None:
    batch = make_batch([["paa", "pa"]], [1.0, 2.0])
    outputs = Outputs(logp_N=logp_now(batch))
    with pytest.raises(WhetError, match=r"loss '.*:leaves' has called sys\.exit\('enough'\)"):
        made("grpo", loss=f"{mine}:leaves").loss(batch, outputs)
    with pytest.raises(AttributeError) as found:
        made("grpo", loss=f"{mine}:raises").loss(batch, outputs)
    assert found.value.__notes__ == [f"This is an error of loss '{mine}:raises'."]


def test_what_a_function_of_the_users_is_given_is_not_changed_in_place(mine: str) -> None:
    """A batch that is one micro-batch would be another one in the next optimizer step, one that is cut would not."""
    batch = make_batch([["paa", "pa"]], [1.0, 2.0])
    batch = replace(batch, adv_N=batch.mask_N.double())
    outputs = Outputs(logp_N=logp_now(batch))
    weighed = made("grpo", correction=schema.CorrectionConfig(weight=f"{mine}:weigh"))
    for call, what in (
        (lambda: made("grpo", advantage=f"{mine}:centred").advantage(batch, 0.0), r"batch\.reward_R"),
        (lambda: made("grpo", loss=f"{mine}:positive").loss(batch, outputs), r"batch\.adv_N"),
        (lambda: made("grpo", loss=f"{mine}:lowered").loss(batch, outputs), r"outputs\.logp_N"),
        (lambda: weighed.correct(batch, 0), "log_N"),
    ):
        with pytest.raises(WhetError, match=rf"has changed {what} in place.*a copy, e\.g\. {what}\.clone"):
            call()


@pytest.mark.parametrize(("denominator", "share"), [("kept", 1), ("all", 1 / 2)])
def test_tokens_to_which_a_users_function_gives_no_weight_are_counted_as_said(
    mine: str, denominator: str, share: float
) -> None:
    correction = {"weight": f"{mine}:late_only", "denominator": denominator}
    check_algorithm("grpo", correction=correction)
    algorithm = made("grpo", correction=correction)
    batch, _ = algorithm.correct(make_batch([["paa"]]), 0)
    assert algorithm.weights(batch, 1).tolist() == [0, 0 if denominator == "kept" else share, share]


def test_a_statistic_of_a_users_loss_has_a_name_of_its_own(mine: str) -> None:
    """Every train/NAME of docs/metrics.md that no built-in loss reports is a number of the run itself."""
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`train/([a-z0-9_]+)`", page))
    of_losses = {"clipped", "covariance", "demonstration", "plain", "preference", "rec", "sequence", "ratios"}
    texts = [inspect.getsource(sys.modules[f"whet.algos.{module}"]) for module in of_losses]
    taken = {name for name in named if not any(f'"{name}"' in text for text in texts)}
    assert {"loss", "grad_norm", "kl_loss_nats", "mismatch_max_nats"} < taken
    assert {"ratio_max", "importance_weight", "masked_frac"} <= named - taken
    batch = make_batch([["paa"]], [1.0])
    batch = replace(batch, adv_N=batch.mask_N.double())

    def run(stat: str) -> Loss:
        cfg = schema.AlgorithmConfig(loss={"name": f"{mine}:named", "stat": stat})
        algorithm = build(cfg, critic=schema.CriticConfig(), max_tokens=20)
        return algorithm.loss(batch, Outputs(logp_N=logp_now(batch)))

    shown = {name for name in re.findall(r"`eval/SOURCE/(\w+)`", page) if not name.isupper()}
    of_likelihood = {"loss_nats", "loss_tokens", "perplexity"}  # which no loss of your own has
    assert {"replies", "tasks", "unscored"} < shown
    assert of_likelihood < shown
    for stat in [*taken, *(shown - of_likelihood), "weight", "logp", "expert_nll_nats"]:
        with pytest.raises(WhetError, match=rf"stats\['{stat}'\] has the name of a number of the run"):
            run(stat)
    for stat in ("hits_count", "tokens_sum", "ratio_min"):
        with pytest.raises(WhetError, match=rf"stats\['{stat}'\] is reported as a mean"):
            run(stat)
    assert run("ratio_max").stats.keys() == {"ratio_max"}


def test_a_users_loss_that_masks_nothing_leaves_the_demonstrations_of_a_mix_alone(mine: str) -> None:
    algorithm = made("mix", loss=f"{mine}:unmasked")
    batch = ragged(3)
    batch = algorithm.advantage(replace(batch, expert_R=torch.arange(batch.rollouts) % 4 == 3), 0.0)
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    assert batch.expert_R is not None
    logp_N = logp_now(batch)
    loss_N = algorithm.loss(batch, Outputs(logp_N=logp_N, entropy_N=torch.zeros_like(logp_N))).loss_N
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    assert torch.equal(gradient_N, -batch.mask_N.double()), "each token once: in its own part of the mix"


@pytest.mark.parametrize("name", ["dpo", "online_dpo", "kto", "self_play"])
def test_a_users_loss_in_a_recipe_on_pairs_or_replies_is_averaged_as_the_user_says(
    mine: str, name: str
) -> None:
    def found(**keys: Any) -> Resolved:
        return resolve(schema.AlgorithmConfig(name=name, loss=f"{mine}:unmasked", **keys))

    assert found().loss_agg_mode == RECIPES[name].loss_agg_mode
    assert found(loss_agg_mode="token-mean").loss_agg_mode == "token-mean"
    assert found(loss_agg_mode="token-mean").pairs == found().pairs


@pytest.mark.parametrize(
    "keys",
    [
        {"entropy_coef": 0.1},
        {"positive_nll_coef": 0.1},
        {"correction": {"weight": "token"}},
        {"resample": "pow"},
        {"groups": {"keep_best": 2}},
    ],
    ids=str,
)
def test_what_reads_every_token_is_refused_beside_a_users_loss_with_one_number_a_pair(
    mine: str, keys: dict[str, Any]
) -> None:
    """It would act at the one token of each pair that has a weight, or, as counts and keep_best, nowhere."""
    loss = f"{mine}:unmasked"
    with pytest.raises(ConfigError, match=f"algorithm.{next(iter(keys))}.*(pair|compares)"):
        check_algorithm("online_dpo", loss=loss, **keys)
    if "groups" not in keys:
        check_algorithm("online_dpo", loss=loss, loss_agg_mode="token-mean", **keys)
    check_algorithm("grpo", loss=loss, **keys)


def test_the_worked_functions_of_the_docs_run_by_hand(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
    path = tmp_path / "worked.py"
    path.write_text("".join(part.split("```")[0] for part in text.split("```python\n")[2:]), encoding="utf-8")
    cfg = schema.AlgorithmConfig(
        advantage={"name": f"{path}:mild", "floor": -0.25}, loss={"name": f"{path}:soft_clip", "width": 0.5}
    )
    algorithm = build(cfg, critic=schema.CriticConfig(), max_tokens=20)
    # Rewards 0 and 1: less their mean -0.5, which is raised to -0.25, and 0.5.
    batch = algorithm.advantage(make_batch([["pa", "pa"]], [0.0, 1.0]), 0.0)
    assert batch.adv_N is not None
    assert batch.adv_N.tolist() == [0, -0.25, 0, 0.5]
    # Ratios 2 and 1.5.
    batch = replace(batch, logp_old_N=doubles([0, -1 - math.log(2), 0, -1 - math.log(1.5)]))
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    loss = algorithm.loss(batch, Outputs(logp_N=doubles([0, -1, 0, -1])))
    first, second = 0.25 * 0.5 * math.tanh(1 / 0.5), -0.5 * 0.5 * math.tanh(0.5 / 0.5)
    assert loss.loss_N.tolist() == pytest.approx([0, first, 0, second])
    assert loss.stats["far_frac"].tolist() == [0, 1, 0, 0]


def test_a_users_advantage_may_take_the_token_rewards(mine: str) -> None:
    algorithm = made("grpo", advantage=f"{mine}:all_zero", reward_kl=schema.RewardKlConfig(coef=0.1))
    batch = algorithm.advantage(ragged(0), 0.1)
    assert batch.adv_N is not None
    assert (batch.adv_N == 0).all()


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
    path = tmp_path / "example.py"
    path.write_text(text.split("```python\n")[1].split("```")[0], encoding="utf-8")
    algorithm = made("grpo", advantage=f"{path}:best_of_group")
    batch = algorithm.advantage(make_batch([["pa", "poaa"], ["pa"]], [1.0, 2.0, -1.0]), 0.0)
    assert batch.adv_N is not None
    assert batch.adv_N.tolist() == [0, 0, 0, 0, 1, 1, 0, 1]


def test_grpo_through_build_is_grpo() -> None:
    batch = ragged(2)
    got = made("grpo", std_epsilon=0.5).advantage(batch, 0.0).adv_N
    assert got is not None
    assert torch.equal(
        got, grpo(batch, reward_N=token_rewards(batch), normalize_std=True, std_epsilon=0.5)[0]
    )
