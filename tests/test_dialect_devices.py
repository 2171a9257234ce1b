"""What foreign files say about devices: memory of the host, ranks; on this machine, in a rehearsal, with its place."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from whet import cli
from whet.config import hardware
from whet.config.checks_run import not_installed
from whet.config.load import Loaded, load
from whet.config.parse import parse
from whet.config.plan import plans
from whet.dialects import here, layout
from whet.dialects.row import NotSupportedYet
from whet.dialects.skyrl import devices as skyrl_devices
from whet.dialects.tables import dialect
from whet.dialects.translate import translate
from whet.dialects.verl import roles as verl_roles
from whet.rehearsal.shrink import check, shrink
from whet.types import ConfigError, Json

pytestmark = pytest.mark.usefixtures("home")

ACTOR, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
MODEL, CRITIC = "actor_rollout_ref.model.", "critic.model."
PARAM, OPTIMIZER = "fsdp_config.param_offload", "fsdp_config.optimizer_offload"


def values(kind: str, **given: Any) -> dict[str, Any]:
    out = {row.key: row.default for row in dialect(kind).rows}
    return out | given


def verl(given: dict[str, Any]) -> Any:
    return verl_roles.offloaded(values("verl-ppo") | given)["train.offload"]


def test_verl_models_rest_where_there_are_any() -> None:
    alone = {"algorithm.adv_estimator": "grpo"}
    kl = alone | {ACTOR + "use_kl_loss": True}
    assert verl({}) == []
    assert verl(alone | {ACTOR + PARAM: True}) == ["policy"]
    assert verl(alone | {ACTOR + "fsdp_config.offload_policy": True}) == ["optimizer", "policy"]
    with pytest.raises(NotSupportedYet, match=r"grad_offload=True without param_offload"):
        verl(alone | {ACTOR + "fsdp_config.grad_offload": True})
    assert verl(alone | {ACTOR + OPTIMIZER: True, MODEL + "enable_activation_offload": True}) == [
        "activations",
        "optimizer",
    ]
    for around, there in ((alone, []), (kl, ["reference"]), (kl | {ACTOR + "kl_loss_coef": 0.0}, [])):
        assert verl(around | {REF + PARAM: True}) == there
    assert verl(alone | {CRITIC + PARAM: True}) == []
    assert verl({CRITIC + PARAM: True}) == ["critic"], "gae has one"


def test_policy_and_critic_of_verl_do_it_alike() -> None:
    both = {ACTOR + OPTIMIZER: True, CRITIC + OPTIMIZER: True}
    assert verl(both) == ["optimizer"]
    for key in both:
        with pytest.raises(NotSupportedYet, match=r"critic\.model\.fsdp_config\.optimizer_offload"):
            verl({key: True})


def test_a_sequence_is_shared_by_the_ranks_of_all_models_of_skyrl() -> None:
    def ranks(given: dict[str, Any]) -> Any:
        return skyrl_devices.layout(values("skyrl") | given).get("train.parallel.cp", 1)

    sizes = {f"trainer.{role}.sequence_parallel_size": 2 for role in ("policy", "ref")}
    assert ranks({}) == 1
    assert ranks(sizes) == 2
    assert ranks({"trainer.policy.sequence_parallel_size": 2}) == 2, "the policy's layout serves all models"


@pytest.fixture
def cosmos(tmp_path: Path) -> Path:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n' * 8, encoding="utf-8")
    told = {
        "train": {
            "activation_offload": True,
            "master_dtype": "bfloat16",
            "output_dir": str(tmp_path / "out"),
            "max_num_steps": 3,
            "train_batch_per_replica": 16,
            "train_policy": {
                "type": "grpo",
                "dataset": {"name": str(rows)},
                "prompt_column_name": "prompt",
                "reward_function": ["single_choice"],
                "allowed_outdated_steps": 1,
            },
        },
        "policy": {"model_name_or_path": "Qwen/Qwen2.5-0.5B"},
    }
    file = tmp_path / "job.json"
    file.write_text(json.dumps(told), encoding="utf-8")
    return file


def notes(loaded: Loaded) -> str:
    assert loaded.translation is not None
    return "; ".join(line.note for line in loaded.translation.lines)


def on(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """A machine with so many GPUs, and Ray."""
    monkeypatch.setattr(hardware, "cuda_count", lambda: gpus)
    monkeypatch.setattr(here, "is_installed", lambda package: True)


def test_what_frees_a_gpu_is_left_out_where_there_is_none(
    cosmos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 8)
    without = load(cosmos, ["whet.machine.device=cpu"])
    assert without.config.train.offload == ()
    assert not without.config.train.compile
    assert "train.offload is left out: it frees memory of a GPU, and this machine has none" in notes(without)
    plans(without)
    one = load(cosmos, ["policy.parallelism.tp_size=1"]).config.train
    assert one.offload == ("activations",)
    assert one.compile
    two = load(cosmos)
    assert two.config.train.parallel.tp == 2
    assert two.config.train.compile
    assert load(cosmos, ["whet.train.offload=[]", "train.activation_offload=true"]).config.train.offload == ()
    found = {("train", "compile"): True}
    assert here.left_out((), found, gpu=True, ranks=4, ep=1) == {}
    assert "ep" in here.left_out((), found, gpu=True, ranks=4, ep=2)["train", "compile"][1]


def test_a_rehearsal_is_one_process_on_this_device(cosmos: Path, tmp_path: Path) -> None:
    loaded = load(cosmos, ["whet.machine.device=cpu"], rehearsal=True)
    plans(loaded, rehearsal=True)
    small = check(shrink(loaded, run_dir=tmp_path / "small", lost={}, broken=set()))
    assert small.train.offload == ()
    assert small.rollout.max_staleness == 1, "what is no matter of devices stays"


@pytest.mark.parametrize(("gpus", "apart"), [(0, False), (4, False), (7, False), (8, True)])
def test_models_are_apart_where_there_are_gpus_for_all(
    gpus: int, apart: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on(monkeypatch, gpus)
    (tmp_path / "rows.parquet").touch()
    given = {
        "placement": {"colocate_all": False},
        "algorithm": {"advantage_estimator": "gae", "use_kl_loss": False},
    }
    file = tmp_path / "skyrl.json"
    file.write_text(json.dumps({"trainer": given, "data": {"train_data": [f"{tmp_path}/rows.parquet"]}}))
    overrides = ["trainer.critic.model.path=m", *([] if gpus else ["whet.machine.device=cpu"])]
    loaded = load(file, overrides, dialect="skyrl")
    assert loaded.config.train.parallel.separate_ranks == (("critic",) if apart else ())
    assert ("critic on the ranks of the policy: ranks of their own need" in notes(loaded)) != apart
    assert load(
        file, [*overrides, "whet.train.parallel.separate_ranks=[critic]"], dialect="skyrl"
    ).config.train.parallel.separate_ranks


@pytest.mark.parametrize(
    ("asked", "devices", "wanted"),
    [
        ({"dp_shard": 64, "tp": 4}, 64, {"dp_shard": 16, "tp": 4}),
        ({"dp_shard": 64, "tp": 4}, 8, {"dp_shard": 2, "tp": 4}),
        ({"dp_shard": 64, "tp": 4}, 1, {"dp_shard": 1, "tp": 1}),
        ({"dp_shard": 8, "cp": 3}, 2, {"dp_shard": 2, "cp": 1}),
        ({"dp_shard": 6, "dp_replicate": 2}, 4, {"dp_shard": 3, "dp_replicate": 1}),
        ({"dp_shard": 8, "ep": 4}, 2, {"dp_shard": 2, "ep": 2}),
        ({"pp": 2, "tp": 2, "cp": 2, "dp_shard": 2}, 5, {"pp": 2, "tp": 2, "cp": 1, "dp_shard": 1}),
    ],
)
def test_sizes_shrink_to_divisors_and_the_model_first(
    asked: dict[str, int], devices: int, wanted: dict[str, int]
) -> None:
    assert here.fit(asked, devices) == wanted


BUILT = [
    f"{ACTOR}megatron.virtual_pipeline_model_parallel_size=null",
    "actor_rollout_ref.rollout.mode=sync",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=null",
    "trainer.logger=[console]",
]
"""The rest of the file is built."""

VERL = Path(__file__).parent / "dialects" / "verl_64_gpus.yaml"


def test_a_file_for_64_gpus_fits_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(gpus: int, *overrides: str) -> Loaded:
        on(monkeypatch, gpus)
        return load(VERL, [*BUILT, *overrides])

    asked = at(64, "whet.cluster.address=auto").config
    assert asked.cluster.ranks, "8 machines"
    sizes = asked.train.parallel
    assert sizes.dp_replicate * sizes.dp_shard * sizes.tp * sizes.cp * sizes.pp == 64
    assert asked.rollout.replicas > 1
    laptop, node = at(0), at(8)
    assert laptop.config.train.parallel == type(sizes)()
    assert laptop.config.rollout.replicas == 0
    assert not laptop.config.cluster.ranks
    assert "it needs GPUs, and this machine has none" in notes(laptop)
    small = node.config.train.parallel
    assert small.dp_replicate * small.dp_shard * small.tp * small.cp * small.pp == 8
    assert not node.config.cluster.ranks
    free = {"parallel", "offload"}
    assert laptop.config.train.model_dump(exclude=free) == asked.train.model_dump(exclude=free)
    assert at(0, "whet.train.parallel.dp_shard=2").config.train.parallel.dp_shard == 2, "said natively"


def test_classes_and_groups_that_fsdp_has_and_whet_has_not() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    at = key.split(".")

    def said(value: Json) -> list[str]:
        tree: Json = value
        for part in reversed(at):
            tree = {part: tree}
        return [text for _, text in translate(tree, dialect("verl-ppo"), origins={}).unbuilt]

    for fine in (None, "Qwen2DecoderLayer", ["Qwen2DecoderLayer"], ["LlamaMLP"]):
        assert said(fine) == [], "what is wrapped changes no number"
    assert layout.groups(-1, 8, key="k") == layout.groups(16, 8, key="k") == (1, 8)
    assert layout.groups(2, 8, key="k") == (4, 2)
    with pytest.raises(ConfigError, match="k=3 must divide the 8"):
        layout.groups(3, 8, key="k")


# ---------------------------------------------------------------- machines that are not here

LARGE = [
    "trainer.micro_train_batch_size_per_gpu=8", "trainer.micro_forward_batch_size_per_gpu=8",
    "trainer.placement.policy_num_gpus_per_node=8", "trainer.placement.policy_num_nodes=2",
    "trainer.placement.ref_num_gpus_per_node=8", "trainer.placement.ref_num_nodes=2",
    "generator.num_inference_engines=16", "trainer.logger=wandb",
]  # fmt: skip


def said(*words: str) -> Any:
    return CliRunner().invoke(cli.app, [*words, *LARGE])


def test_a_converted_file_keeps_its_layout_and_its_trackers(tmp_path: Path) -> None:
    done = said("convert", "examples/from_skyrl.yaml", "-o", str(tmp_path / "n.yaml"))
    assert done.exit_code == 0, done.output
    tree = parse((tmp_path / "n.yaml").read_text()).tree
    assert tree["train"]["parallel"]["dp_shard"] == 16
    assert tree["rollout"]["replicas"] == 16
    assert tree["cluster"]["ranks"] is True
    assert "wandb" in tree["track"]["trackers"]
    assert "note: track.trackers: wandb is not installed" in done.output
    assert "this machine has none" not in done.output


def test_a_converted_file_for_one_gpu_keeps_the_policy_there(tmp_path: Path) -> None:
    """verl's param_offload, which does nothing where one process trains and samples, was refused at the plan."""
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
        "actor_rollout_ref.model.path=m actor_rollout_ref.actor.fsdp_config.param_offload=True "
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 data.val_files=b.parquet "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 trainer.logger=console $@\n"
    )
    for gpus, expected in (("1", ("optimizer",)), ("8", ("optimizer", "policy"))):
        loaded = load(script, [f"trainer.n_gpus_per_node={gpus}"], here=False)
        assert loaded.config.train.offload == expected
        assert ("the policy stays on the GPU" in notes(loaded)) == (gpus == "1")


@pytest.mark.parametrize("installed", [True, False])
def test_a_tracker_that_the_defaults_alone_name_is_left_out_where_it_is_missing(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the file names ends a training before it begins, with the command that installs it; a plan notes it."""
    path, named = "examples/from_skyrl.yaml", "trainer.logger=[console,wandb]"
    found = importlib.util.find_spec
    everywhere = found("json")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (everywhere if installed else None) if name == "wandb" else found(name),
    )
    plain, elsewhere = load(path, ["~trainer.logger"]), load(path, ["~trainer.logger"], here=False)
    assert plain.translation is not None
    assert ("wandb" in plain.config.track.trackers) is installed
    assert "wandb" in elsewhere.config.track.trackers, "a converted file keeps it"
    told = [line.note for line in plain.translation.lines if "track.trackers" in line.native]
    assert (
        any("wandb is not installed here, so nothing is sent to it" in note for note in told) is not installed
    )
    assert load(path, [named]).config.track.trackers == ("console", "wandb", "jsonl")
    problems = dict(not_installed(load(path, [named]).config))
    assert ("track.trackers" in problems) is not installed
    if not installed:
        with pytest.raises(
            ConfigError, match=r"pip install 'whet\[wandb\]', or remove it: track.trackers=\[console,jsonl"
        ) as refused:
            plans(load(path, [named]))
        assert "a skyrl file (it takes keys of whet as whet.KEY=VALUE):" in str(refused.value)
        plans(load(path, [named, "whet.track.trackers=[console,jsonl]"]))
        done = CliRunner().invoke(cli.app, ["plan", path, named])
        assert done.exit_code == 0, done.output
        assert "wandb is not installed" in " ".join(done.output.split())


def test_the_offer_to_leave_out_trackers_that_are_not_installed_can_be_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names all of them, and the keys that would be refused next."""
    found = importlib.util.find_spec
    gone = ("wandb", "mlflow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else found(name))
    given = ["track.project=mine", "track.arguments.wandb.entity=me", "track.log_samples=2"]
    file = "examples/first_run.yaml"
    with pytest.raises(ConfigError) as refused:
        plans(load(file, ["track.trackers=[wandb,jsonl,mlflow]", *given]))
    (line,) = (line for line in str(refused.value).splitlines() if "track.trackers:" in line)
    assert line.endswith(
        "wandb, mlflow are not installed; pip install 'whet[wandb,mlflow]', or remove them: track.trackers=[jsonl], "
        "and what nothing else reads: track.project, track.log_samples, track.arguments.wandb"
    )
    plans(load(file, ["track.trackers=[jsonl]"]))
    with pytest.raises(
        ConfigError, match=r"remove it: track.trackers=\[tensorboard\], and what .*: track.project$"
    ):
        plans(load(file, ["track.trackers=[wandb,tensorboard]", "track.project=mine", "track.log_samples=2"]))


def test_packages_are_those_of_the_machine_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with adapters converts where peft is not installed; here it does not train."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    done = said("convert", "examples/from_skyrl.yaml", "trainer.policy.model.lora.rank=8")
    assert done.exit_code == 0, done.output
    assert "note: model.lora: adapters need peft, which is not installed" in done.output
    done = CliRunner().invoke(cli.app, ["train", "examples/first_run.yaml", "model.lora.rank=8"])
    assert "model.lora: adapters need peft, which is not installed" in str(done.exception)


@pytest.mark.parametrize(("gpus", "shards", "replicas"), [("8x2", 16, 16), ("4", 4, 4), ("0", 1, None)])
def test_it_fits_the_machines_that_are_said(
    gpus: str, shards: int | None, replicas: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "is_installed", lambda package: True)
    done = said("convert", "examples/from_skyrl.yaml", "--gpus", gpus, "-o", str(tmp_path / "n.yaml"))
    assert done.exit_code == 0, done.output
    tree = parse((tmp_path / "n.yaml").read_text()).tree
    assert tree["train"].get("parallel", {}).get("dp_shard") == shards
    assert tree["rollout"].get("replicas") == replicas
    assert tree.get("cluster", {}).get("ranks") == (True if gpus == "8x2" else None)
    assert hardware.elsewhere() is None


def test_a_plan_is_for_the_machines_that_are_said(tmp_path: Path) -> None:
    """What takes 20 GiB in training fits a GPU of 40 GiB, and not one of 1 GiB."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {scratch: {hidden_size: 1024, num_hidden_layers: 8, intermediate_size: 4096}}\ntokenizer: "
        "{build: chars}\ndata: {train: [{path: tests/data/words.jsonl}]}\nrewards: {a: {function: exact}}\ntrain: "
        "{steps: 1}\n"
    )
    run = CliRunner()
    fits = run.invoke(cli.app, ["plan", str(path), "--gpus", "1", "--mem", "40"])
    assert "1 x 1 GPUs of 40 GiB, as given, bfloat16" in fits.output
    assert fits.exit_code == 0, fits.output
    with pytest.raises(ConfigError, match="the GPU has 1 GiB"):
        run.invoke(cli.app, ["plan", str(path), "--gpus", "1", "--mem", "1"], catch_exceptions=False)
    for wrong in ("2x", "x2", "8x0", "-1", "many"):
        with pytest.raises(ConfigError, match="expected GPUs of a machine"):
            hardware.machines(wrong, None)
    with pytest.raises(ConfigError, match="expected GiB of one GPU"):
        hardware.machines("8", -1.0)
