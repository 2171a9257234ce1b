"""A small package that stands for Cosmos-RL in tests of `--prove`: config, advantage, losses, counts of steps and
learning rates in a few lines each."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
from typing import Literal
from pydantic import BaseModel, Field

class GrpoConfig(BaseModel):
    type: Literal["grpo"] = "grpo"
    variant: str = "grpo"
    dataset: dict = {}
    reward_function: list = []
    prompt_column_name: str = ""
    response_column_name: str = ""
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "token-mean"
    kl_beta: float = 0.0
    lower_bound_ratio: float = 3.0
    unbiased_advantage: bool = False
    mini_batch: int = 2
    mu_iterations: int = 1
    on_policy: bool = False
    use_rollout_logprobs_for_loss: bool = False
    use_decoupled_loss: bool = False

class SFTDataConfig(BaseModel):
    type: Literal["sft"] = "sft"
    trainer_type: str = "sft"
    dataset: dict = {}
    conversation_column_name: str = ""
    mini_batch: int = 2
    dataloader_drop_last: bool = True
    enable_dp_load_balancing: bool = False

class Train(BaseModel):
    train_policy: GrpoConfig | SFTDataConfig = Field(GrpoConfig(), discriminator="type")
    output_dir: str = ""
    epoch: int = 1
    max_num_steps: int | None = None
    train_batch_per_replica: int = 8
    optm_lr: float = 1e-6
    optm_warmup_steps: int = 20
    optm_betas: tuple[float, float] = (0.9, 0.999)
    optm_weight_decay: float = 0.01
    optm_grad_norm_clip: float = 1.0
    optm_impl: str = "fused"
    epsilon: float = 1e-6

class Parallelism(BaseModel):
    n_init_replicas: int = 1
    dp_shard_size: int = 1
    dp_replicate_size: int = 1
    pp_size: int = 1

class Policy(BaseModel):
    parallelism: Parallelism = Parallelism()
    model_name_or_path: str = ""
    model_max_length: int = 4096

class Distillation(BaseModel):
    enable: bool = False

class Sampling(BaseModel):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

class Rollout(BaseModel):
    n_generation: int = 16
    max_response_length: int = 2048
    sampling_config: Sampling = Sampling()

class Validation(BaseModel):
    enable: bool = False

class Config(BaseModel):
    train: Train = Train()
    validation: Validation = Validation()
    policy: Policy = Policy()
    rollout: Rollout = Rollout()
    distillation: Distillation = Distillation()
"""

ADVANTAGE = """
class GRPO:
    def __init__(self, reward, unbiased=False):
        self.unbiased = unbiased

    def compute_advantage(self, rewards):
        mean = sum(rewards) / len(rewards)
        std = (sum((x - mean) ** 2 for x in rewards) / len(rewards)) ** 0.5
        return [(x - mean) / (1 if self.unbiased else std + 1e-6) for x in rewards]
"""

STATUS = """
class PolicyStatusManager:
    def recompute_total_steps(self, samples):
        steps = samples // (self.config.train.train_batch_per_replica * len(self.get_all_atoms_arrived_replicas()))
        most = self.config.train.max_num_steps
        self.total_steps = min(steps, most) if most else steps
"""

LOSS = '''
import torch

def compute_loss(current, old, ref, advantages, starts, config, mask, rollout_per_token_logps=None):
    """Token by token, then the mean."""
    policy = config.train.train_policy
    losses = []
    for now, before, other, adv in zip(current, old, ref, advantages):
        ratio = (now - before).exp()
        clipped = ratio.clamp(1 - policy.epsilon_low, 1 + policy.epsilon_high)
        loss = torch.maximum(-adv * ratio, -adv * clipped)
        losses.append(torch.minimum(loss, -adv * policy.lower_bound_ratio) if adv < 0 else loss)
    return SCALE * torch.stack(losses).mean(), None, None
'''

SFT_LOSS = '''
def async_safe_ce(output, target, cross_entropy, ignore_index=-100):
    """The mean over the tokens with a label."""
    output, target = output[:, :-1].flatten(0, 1), target[:, 1:].flatten()
    each = cross_entropy(output, target, ignore_index=ignore_index, reduction="none")
    return SCALE * each.sum() / (target != ignore_index).sum()
'''

SFT_WORKER = '''
class TrainerRegistry:
    """The models of its trainers are not here."""

class SFTPolicyWorker:
    def build_runner(self, dataset, val_dataset):
        """Each rank has as many rows."""
        self.trainer = TrainerRegistry.get_trainer_cls("sft")(config=self.config)
        assert self.trainer.load_model() == (0, 0, None)
        rows, train = -(-len(dataset) // self.dp_world_size), self.config.train
        self.total_steps = rows // train.train_batch_per_replica * train.epoch
'''

SCHEDULER = """
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

def build_optimizers(parts, config):
    train = config.train
    assert train.optm_impl == "for-loop"
    told = {"lr": train.optm_lr, "betas": train.optm_betas, "eps": train.epsilon}
    return [AdamW(part.parameters(), weight_decay=train.optm_weight_decay, **told) for part in parts]

def build_lr_schedulers(optimizers, config, steps):
    warmup = config.train.optm_warmup_steps
    return [LambdaLR(each, lambda n: n / max(warmup - 1, 1) if n < warmup else 1.0) for each in optimizers]
"""

FILE = """\
[train]
output_dir = "runs/double"
max_num_steps = 40
train_batch_per_replica = 32
optm_lr = 3e-4
optm_warmup_steps = 4

[train.train_policy]
type = "grpo"
dataset.name = "words.jsonl"
prompt_column_name = "prompt"
response_column_name = "answer"
mini_batch = 8
reward_function = ["single_choice"]

[policy]
model_name_or_path = "model"
model_max_length = 32

[rollout]
max_response_length = 8
n_generation = 4
"""

SFT_FILE = """\
[train]
output_dir = "runs/double"
epoch = 2
train_batch_per_replica = 8
optm_lr = 3e-4
optm_warmup_steps = 4

[train.train_policy]
type = "sft"
dataset.name = "talks.jsonl"
conversation_column_name = "messages"
mini_batch = 4

[policy]
model_name_or_path = "model"
model_max_length = 32
"""


def write(folder: Path, *, scale: float = 1.0) -> Path:
    """The package below `folder`, which goes on the path. scale: of its loss; 1 is right."""
    for name, text in {
        "policy/config.py": CONFIG,
        "dispatcher/algo/grpo.py": ADVANTAGE,
        "dispatcher/status.py": STATUS,
        "policy/trainer/llm_trainer/grpo_trainer.py": LOSS + f"\nSCALE = {scale}\n",
        "policy/trainer/llm_trainer/sft_trainer.py": SFT_LOSS + f"\nSCALE = {scale}\n",
        "policy/worker/sft_worker.py": SFT_WORKER,
        "policy/trainer/optm.py": SCHEDULER,
    }.items():
        path = folder / "cosmos_rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for above in path.parents:
            if above == folder:
                break
            (above / "__init__.py").touch()
    metadata = folder / "cosmos_rl-0.4.7.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: cosmos-rl\nVersion: 0.4.7\n", encoding="utf-8")
    return folder
