"""Launch scripts as configs: the same keys in a file say the same, and a refused key names its place in the script."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import whet
from tiny import RUN
from whet.cli import app
from whet.config.load import Loaded, load
from whet.guard import sandbox
from whet.types import ConfigError

ROOT = Path(__file__).parents[1]
FILES = ROOT / "tests/dialects"
WHY = sandbox.lacking() or ("" if shutil.which("bash") else "no bash")
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"no launch script can be read here: {WHY}")

VERL = """set -x
MODEL=${MODEL:-models/chat}
DATA=(
    data.train_files="['$HOME/a.parquet','b.parquet']"
    data.val_files=\\'held.parquet\\'
    data.train_batch_size=16
)
export HYDRA_FULL_ERROR=1
nohup python3 -m verl.trainer.main_ppo --config-path=config \\
    algorithm.adv_estimator=grpo \\
    "${DATA[@]}" \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=3e-4 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \\
    trainer.logger='["console"]' trainer.n_gpus_per_node=1 trainer.nnodes=1 \\
    trainer.default_hdfs_dir=null trainer.total_epochs=15 $@ 2>&1 | tee run.log
"""
VERL_FILE = """
data: {train_files: [/home/me/a.parquet, b.parquet], val_files: held.parquet, train_batch_size: 16}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: models/chat}
  actor: {optim: {lr: 3e-4}, ppo_mini_batch_size: 16, ppo_micro_batch_size_per_gpu: 16}
  rollout: {n: 8, name: vllm, tensor_model_parallel_size: 1, log_prob_micro_batch_size_per_gpu: 16}
trainer: {logger: [console], n_gpus_per_node: 1, nnodes: 1, default_hdfs_dir: null, total_epochs: 2}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("MODEL", raising=False)


def script(text: str, *arguments: str, dialect: str | None = None) -> Loaded:
    Path("run.sh").write_text(text)
    return load("run.sh", arguments, dialect=dialect)


def refused(text: str, *arguments: str, dialect: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        script(text, *arguments, dialect=dialect)
    return str(caught.value)


def file(text: str, name: str = "run.yaml", dialect: str | None = None) -> Loaded:
    Path(name).write_text(text)
    return load(name, dialect=dialect)


def flat(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """The values of a file by dotted key."""
    if not isinstance(value, dict):
        yield key[1:], value
        return
    for name, inner in value.items():
        yield from flat(inner, f"{key}.{name}")


def test_verl_says_what_the_same_keys_in_a_file_say(monkeypatch: pytest.MonkeyPatch):
    loaded = script(VERL, "trainer.total_epochs=2")
    assert loaded.config == file(VERL_FILE).config
    assert loaded.where("train.optimizer.lr") == "run.sh:13 actor_rollout_ref.actor.optim.lr"
    assert "run.sh:4 data.train_files" in loaded.origins.values()
    assert script(VERL, "trainer.total_epochs=2", "whet.seed=7").config.seed == 7
    monkeypatch.setenv("MODEL", "models/other")
    assert script(VERL).config.model.path == "models/other"


def test_a_programs_own_config_stands_in_its_config_folder():
    """hydra.main(config_path="config") of recipe/gkd/main_gkd.py, started from the root or beside the program."""
    Path("recipe/gkd/config").mkdir(parents=True)
    Path("recipe/gkd/config/mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ntrainer: {save_freq: 7}\n"
    )
    started = VERL.replace("main_ppo --config-path=config", "main_ppo --config-name mine")
    assert "there is no config file mine.yaml here" in refused(started)
    beside = started.replace("verl.trainer.main_ppo", "recipe.gkd.main_gkd")
    assert script(beside).config.checkpoint.interval == 7


def test_a_refused_key_names_its_line():
    assert "run.sh:13: " in refused(VERL.replace("optim.lr=3e-4", "optim.lrr=3e-4"))
    assert "argument trainer.epoch=3" in refused(VERL, "trainer.epoch=3")
    said = refused(VERL.replace("optim.lr=3e-4", "optim.lr=fast"))
    assert "run.sh:13: actor_rollout_ref.actor.optim.lr" in said
    assert "run.sh: line 12: `actor_rollout_ref.model.path=${MODEL}` needs $MODEL" in refused(
        VERL.replace("MODEL=${MODEL:-models/chat}", "")
    )


def test_hydra_s_files():
    megatron = VERL.replace(
        "main_ppo --config-path=config", "main_ppo --config-name=ppo_megatron_trainer.yaml"
    )
    sizes = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"
    assert script(megatron, sizes).config == script(VERL, "model_engine=megatron", sizes).config
    for name in ("ppo_trainer", "fully_async_ppo_trainer.yaml", "one_step_off_ppo_trainer"):
        named = VERL.replace(
            "main_ppo --config-path=config", f"main_ppo --config-path=config --config-name={name}"
        )
        assert script(named).config == script(VERL).config
    assert "run.sh:9: there is no config file mine.yaml here; looked for" in refused(
        VERL.replace("=config ", "=conf --config-name mine ")
    )
    anywhere = refused(VERL.replace("=config ", "=/no/conf --config-name mine "))
    assert anywhere.count("/no/conf/mine.yaml") == 1
    Path("conf").mkdir()
    Path("conf/mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {seed_: 1, save_freq: 7}\n")
    named = VERL.replace("=config ", "=conf --config-name mine ")
    assert "conf/mine.yaml:2: trainer.seed_" in refused(named)
    Path("conf/mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {save_freq: 7}\n")
    assert script(named).where("checkpoint.interval").endswith("conf/mine.yaml:2 trainer.save_freq")
    said = refused(VERL, "actor@actor_rollout_ref.actor=my_actor", "model_engine=mine", "+ray@r.s=x")
    assert "is not read; known: megatron_actor, dp_actor, veomni_actor" in said
    assert "argument model_engine=mine" in said
    assert "give the keys of it one by one" in said
    elsewhere = refused(VERL, "actor@actor_rollout_ref.actor=my_actor", "hydra.searchpath=[pkg://mine]")
    assert "the file is of another package (hydra.searchpath), so its values are not known here" in elsewhere


def test_hydra_s_files_of_an_engine():
    veomni = script(VERL, "model_engine=veomni")
    assert veomni.config.train.optimizer.schedule.type == "cosine", "its own default"
    by_actor = script(VERL, "actor@actor_rollout_ref.actor=veomni_actor", "critic.strategy=veomni")
    assert by_actor.config.train.optimizer == veomni.config.train.optimizer
    sft = """torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet data.train_batch_size=16 \\
    model.path=m trainer.n_gpus_per_node=1 engine=automodel $@ optim=automodel
"""
    assert script(sft).config.train.optimizer.lr == 1e-5
    assert script(sft, "optim.lr=3e-4").config.train.optimizer.lr == 3e-4, "a key stands over a file"


def test_megatron_lite_s_files_and_its_launcher():
    """As verl's scripts choose them: the files are of the package verl_mlite, which also starts verl's SFT trainer."""
    files = ("hydra.searchpath=[pkg://verl_mlite.config]", "actor@actor_rollout_ref.actor=mlite_actor")
    given = (*files, "trainer.n_gpus_per_node=2")
    own = VERL.replace("actor_rollout_ref.actor.optim.lr=3e-4", "")
    made = script(own, *given, "ref@actor_rollout_ref.ref=mlite_ref", "actor_rollout_ref.actor.engine.cp=2")
    assert made.translation is not None
    assert made.translation.tree["train"]["parallel"]["cp"] == 2
    assert made.config.train.optimizer.lr == 1e-3, "of the file's Megatron optimizer, not of verl's actor"
    sft = """torchrun --nnodes=2 --nproc_per_node=4 -m verl_mlite.launch verl.trainer.sft_trainer \\
    data.train_files=a.parquet data.train_batch_size=16 model.path=m engine=mlite optim=megatron engine.pp=2 $@
"""
    Path("run.sh").write_text(sft)
    found = load("run.sh", here=False)
    assert found.translation is not None
    assert found.translation.dialect == "verl-sft"
    assert (found.config.train.parallel.pp, found.config.train.parallel.dp_shard) == (2, 4)


def test_torchrun_says_how_many_devices_fine_tune():
    sft = "torchrun {} -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=m $@\n"
    for options in ("--nnodes=1 --nproc-per-node=8", "--nnodes 1 --nproc_per_node 8"):
        Path("run.sh").write_text(sft.format(options))
        made = load("run.sh", here=False).config
        assert made.train.parallel.dp_shard == 8, options


def test_the_kind_is_that_of_what_is_started():
    sft = "torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=m data.train_files=a.parquet"
    assert script(sft).translation.dialect == "verl-sft"  # type: ignore[union-attr]
    loaded = script(VERL, dialect="verl@0.4")
    assert loaded.translation is not None
    assert (loaded.translation.dialect, loaded.translation.version[:3]) == ("verl-ppo", "0.4")
    sft = "uv run -m skyrl.train.main_sft model.path=m train_datasets=[a.jsonl] train_dataset_splits=[train]"
    assert script(sft).translation.dialect == "skyrl-sft"  # type: ignore[union-attr]
    ahead = "uv run -m skyrl.train.fully_async.main_async trainer.policy.model.path=m"
    assert script(f"{ahead} trainer.fully_async.max_staleness_steps=2").config.rollout.schedule == "async"
    assert "give it: --dialect" in refused("python train.py seed=1 run_dir=x")


def test_skyrl_says_what_the_same_keys_in_a_file_say():
    text = (ROOT / "examples/from_skyrl.yaml").read_text()
    given = list(flat(yaml.safe_load(text)))
    said = [f"{key}={shlex.quote(json.dumps(value))}" for key, value in given]
    launch = "uv run --extra vllm -m skyrl.train.entrypoints.main_base --env_variant x \\\n" + " \\\n".join(
        [*said, '"$@"']
    )
    loaded = script(launch)
    assert loaded.config == file(text).config
    line = 2 + next(n for n, (key, _) in enumerate(given) if key.endswith(".lr"))
    assert loaded.where("train.optimizer.lr") == f"run.sh:{line} trainer.policy.optimizer_config.lr"
    assert "run.sh:1: --env_variant is a flag, not a key; it is ignored" in loaded.notes
    assert "argument trainer.policy.modl.path=x" in refused(launch, "trainer.policy.modl.path=x")


def test_trinity_s_file_is_read_and_so_is_one_that_the_script_writes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MODEL_PATH", "models/tiny")
    text = (FILES / "trinity_letters.yaml").read_text()
    expected = file(text, "plain.yaml").config
    Path("conf").mkdir()
    Path("conf/run.yaml").write_text(text)
    loaded = script("ray start --head\ncd conf\nexport A=1\ntrinity run --config run.yaml\n")
    assert loaded.config == expected
    assert loaded.where("train.optimizer.lr").split()[0].endswith("conf/run.yaml:9")
    written = f"cat > new.yaml <<'EOF'\n{text}EOF\ntrinity run --config new.yaml"
    assert script(written).config == expected
    assert not Path("new.yaml").exists()
    assert "run.sh:1: trinity run has no --config" in refused("trinity run --dlc")


def test_cosmos_s_file_is_read():
    shutil.copy(FILES / "cosmos_64_gpus.toml", "run.toml")
    loaded = script("C=run.toml\ncosmos-rl --config $C --policy 2 tools/data.py", "whet.seed=3")
    assert loaded.config == load("run.toml", ["whet.seed=3"]).config
    assert "gone.toml" in refused("cosmos-rl --config gone.toml")


def test_the_command_line(monkeypatch: pytest.MonkeyPatch):
    Path("run.sh").write_text("python3 prepare.py\n" + VERL)
    done = CliRunner().invoke(app, ["convert", "run.sh", "trainer.total_epochs=1", "-o", "native.yaml"])
    assert done.exit_code == 0, done.output
    assert "run.sh:1: `python3 prepare.py` is not run" in done.output
    assert load("native.yaml").config == load("run.sh", ["trainer.total_epochs=1"]).config
    done = CliRunner().invoke(app, ["convert", "--trust-script", "run.sh", "trainer.total_epochs=1"])
    assert done.exit_code == 0, done.output
    assert Path("run.log").exists()


@pytest.mark.parametrize(
    ("module", "said"),
    [("my_project.main", True), ("recipe.gvpo.main", True), ("verl.trainer.main_ppo", False)],
    ids=["own", "recipe", "verl's"],
)
def test_a_program_of_ones_own_is_named_beside_keys_that_nobody_knows(
    module: str, said: bool, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        VERL.replace("verl.trainer.main_ppo", module).replace("trainer.nnodes=1", "trainer.bucket=s3")
    )
    with pytest.raises(ConfigError, match=r"trainer\.bucket: unknown key") as e:
        load(script)
    assert (f"{module}, which the script starts, may define keys of its own" in str(e.value)) is said


def test_a_client_of_tinker_is_no_trainer(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python -m tinker_cookbook.recipes.math_rl.train model_name=a env=gsm8k\n")
    with pytest.raises(ConfigError, match="starts no trainer"):
        load(script)


@pytest.mark.parametrize(
    ("command", "starts"),
    [("docker build -t image /workspace/cosmos-rl", False), ("docker run image cosmos-rl", True)],
)
def test_an_image_that_is_built_starts_no_trainer(command: str, starts: bool, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{command}\n")
    with pytest.raises(ConfigError) as e:
        load(script)
    assert ("starts no trainer" in str(e.value)) is not starts


def test_the_script_of_the_examples_is_planned_rehearsed_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command lines as a config; its arguments and its variables count."""
    monkeypatch.chdir(ROOT)
    assert load("examples/from_verl.sh").config == load("examples/from_verl.yaml").config
    model = whet.train(
        **(RUN | {"train": {"steps": 1, "tasks_per_step": 1}, "run_dir": str(tmp_path / "made")})
    )
    monkeypatch.setenv("MODEL", str(model.run_dir / "export" / "main"))
    few = [
        "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'run'}", "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "whet.machine.threads=1",
    ]  # fmt: skip
    for command in ("plan", "train"):
        done = CliRunner().invoke(app, [command, "examples/from_verl.sh", *few])
        assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["ledger/requested_rollouts"] for line in steps] == [8 * 8, 8 * 8]
    monkeypatch.setenv("EPOCHS", "3")
    tried = load("examples/from_verl.sh", few[1:], rehearsal=True)
    assert (tried.config.train.epochs, tried.config.model.path) == (3, str(model.run_dir / "export" / "main"))
