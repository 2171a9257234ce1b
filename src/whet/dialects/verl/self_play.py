"""verl's recipes SPPO and SPIN as native keys (recipe/ of verl 0.4.0 to 0.6.1, then the repository verl-recipe)."""

from __future__ import annotations

from whet.dialects.row import Native, Values
from whet.dialects.typed import choose
from whet.dialects.verl.roles import ACTOR, ROLLOUT, makes_pairs
from whet.dialects.verl.sizes import responses
from whet.types import ConfigError, Json


def algorithm(v: Values) -> Native:
    """The parts of the algorithm."""
    return _spin(v) if makes_pairs(v) else _sppo(v)


def _sppo(v: Values) -> dict[str, Json]:
    """Two etas: that of the loss, and that of the soft maximum over the batch which every reward is compared with."""
    mode = v[f"{ACTOR}.loss_agg_mode"]
    if mode != "token-mean":
        raise ConfigError(
            f"{ACTOR}.loss_agg_mode={mode}: SPPO has no mean but token-mean, which is over replies"
        )
    eta, sharpness = v[f"{ACTOR}.sppo_eta"], v["algorithm.sppo_eta"]
    return {
        "algorithm.name": "self_play",
        "algorithm.loss.eta": 1.0 if eta is None else eta,
        "algorithm.advantage": "softmean",
        "algorithm.advantage.softmean_eta": 1.0 if sharpness is None else sharpness,
    }


PAIR_LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo"}


def _spin(v: Values) -> dict[str, Json]:
    """Each two replies that follow each other are a pair; of equal scores the first one is the better. With one reply
    to a prompt, as in verl's own script, these are replies to two prompts."""
    n, beta = responses(v), v[f"{ACTOR}.dpo_beta"]
    if n % 2 and n > 1:
        raise ConfigError(
            f"{ROLLOUT}.n={n}: SPIN compares each two replies that follow each other, so with an odd number some pairs "
            "would be replies to different prompts; set it to 2"
        )
    key = "algorithm.dpo_loss_type"
    kind = choose({key: v[key] or "sigmoid"}, key, PAIR_LOSSES)
    out: dict[str, Json] = {
        "algorithm.name": "online_dpo",
        "algorithm.dynamic_sampling": False,
        "algorithm.loss.pairs_of": "neighbours",
        "algorithm.loss.beta": 0.1 if beta is None else beta,
        "algorithm.loss.pair_loss": kind,
        **({"train.share_prompts": False} if n == 1 else {}),
    }
    if kind == "ipo":
        return out | {"algorithm.loss.ipo_mean": False}
    smoothing = v["algorithm.dpo_label_smoothing"]
    return out if smoothing is None else out | {"algorithm.loss.label_smoothing": smoothing}
