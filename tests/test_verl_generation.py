"""verl's programs that write replies to a file of prompts: their files and launch scripts run as `whet generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from test_early_stopping import train
from test_generate import PROMPTS, lines
from whet.cli import app
from whet.config.load import Loaded, load
from whet.config.plan import plans
from whet.dialects.tables import FILES, dialect, table
from whet.dialects.versions import VERSIONS
from whet.types import ConfigError

OF_FILE = ("data.path=a.parquet", "data.output_path=b.parquet", "model.path=m")
R = "actor_rollout_ref.rollout."
OF_SERVER = ("data.train_files=a.parquet", "data.output_path=b.parquet", "actor_rollout_ref.model.path=m")
RELEASES = VERSIONS["verl"]


def of_file(*more: str, at: str = "0.5.0") -> Loaded:
    return load(None, [*OF_FILE, *more], dialect=f"verl-generation@{at}")


def of_server(*more: str, at: str = "0.9.0") -> Loaded:
    return load(None, [*OF_SERVER, *more], dialect=f"verl-server@{at}")


def asked(loaded: Loaded) -> dict[str, Any]:
    cfg = loaded.config
    assert cfg.eval.sampling is not None
    sampling = cfg.eval.sampling.model_dump(exclude_unset=True)
    (source,) = cfg.data.eval
    plans(loaded, trains=False, here=False)
    return {
        "path": source.path,
        "samples": cfg.eval.samples,
        "max_tokens": cfg.rollout.sampling.max_tokens,
        "max_prompt_tokens": cfg.data.max_prompt_tokens,
        "overlong": cfg.data.overlong,
        "replies": cfg.track.dump["replies"],
        "model": cfg.model.path,
        "max_num_seqs": cfg.rollout.max_num_seqs,
        **sampling,
    }


# ---------------------------------------------------------------- main_generation


@pytest.mark.parametrize("at", [at for at in RELEASES if at < "0.7.1"])
def test_the_defaults_of_generation_yaml(at: str) -> None:
    assert asked(of_file(at=at)) == {
        "path": "a.parquet",
        "samples": 5,
        "max_tokens": 512,
        "max_prompt_tokens": 1536,
        "overlong": "truncate_right",
        "replies": "b.parquet",
        "model": "m",
        "max_num_seqs": 128,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.7,
    }
    (source,) = of_file(at=at).config.data.eval
    assert (source.prompt, source.tools, source.chat_template_kwargs) == ("prompt", None, None)


def test_keys_of_generation_yaml() -> None:
    given = (
        "data.n_samples=2",
        "rollout.temperature=0.6",
        "rollout.top_k=-1",
        "rollout.top_p=1",
        "data.batch_size=16",
    )
    more = (
        "rollout.response_length=9",
        "rollout.prompt_length=8",
        "data.prompt_key=ask",
        "rollout.ignore_eos=True",
    )
    loaded = of_file(
        *given, *more, "rollout.dtype=float32", "model.external_lib=json", "trainer.device=cpu", at="0.6.0"
    )
    found = asked(loaded)
    assert (found["samples"], found["temperature"], found["top_p"], found["max_num_seqs"]) == (2, 0.6, 1, 16)
    assert "top_k" not in found
    assert (found["max_tokens"], found["max_prompt_tokens"]) == (9, 8)
    cfg = loaded.config
    assert (cfg.data.eval[0].prompt, cfg.rollout.sampling.ignore_eos) == ("ask", True)
    assert (cfg.model.dtype, cfg.imports, cfg.machine.device) == ("float32", ("json",), "cpu")
    later = of_file("rollout.quantization=fp8", "rollout.repetition_penalty=1.1", at="0.7.0")
    assert later.config.rollout.quantization == "float8"
    assert asked(later)["repetition_penalty"] == 1.1


def test_hf_reads_do_sample_and_the_others_do_not() -> None:
    assert asked(of_file("rollout.do_sample=False"))["temperature"] == 1.0
    greedy = of_file("rollout.do_sample=False", "rollout.name=hf", "data.n_samples=1", "rollout.top_k=0")
    assert asked(greedy)["temperature"] == 0.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("rollout.temperature=0",), "data.n_samples=5 with rollout.temperature=0"),
        (("rollout.use_fire_sampling=True",), "another temperature for the first token"),
        (("rollout.multi_turn.enable=True",), "samples one reply to each prompt"),
        (("rollout.engine_kwargs.vllm.seed=1",), "whet.rollout.server.options"),
        (("rollout.quantization=int4",), "expected fp8"),
        (("data.output_path=hdfs://a/b.parquet",), "a path on this machine"),
        (("rollout.temprature=1",), "did you mean rollout.temperature"),
    ],
)
def test_what_is_refused(given: tuple[str, ...], said: str) -> None:
    at = "0.4.0" if "fire" in given[0] else "0.7.0"
    with pytest.raises(ConfigError) as e:
        of_file(*given, at=at)
    assert said in str(e.value)


# ---------------------------------------------------------------- main_generation_server


@pytest.mark.parametrize("at", [at for at in RELEASES if at == "main" or at >= "0.6.0"])
def test_the_defaults_of_the_server(at: str) -> None:
    newer = RELEASES.index(at) >= RELEASES.index("0.9.0")
    assert asked(of_server(at=at)) == {
        "path": "a.parquet",
        "samples": 1,
        "max_tokens": 512,
        "max_prompt_tokens": 512,
        "overlong": "error",
        "replies": "b.parquet",
        "model": "m",
        "max_num_seqs": 256 if newer else 1024,
        "temperature": 1.0,
        "top_p": 1,
    }


def test_keys_of_the_server_and_of_nobody() -> None:
    unread = (
        "algorithm.adv_estimator=grpo",
        "trainer.total_epochs=3",
        "actor_rollout_ref.actor.optim.lr=1e-6",
    )
    other = ("data.train_batch_size=7", "critic.model.path=c", "reward_model.enable=True", "trainer.nnodes=2")
    sampled = (
        f"{R}n=4",
        f"{R}temperature=0.8",
        f"{R}top_k=50",
        f"{R}prompt_length=2048",
        f"{R}response_length=99",
    )
    found = asked(of_server(*unread, *other, *sampled, "data.train_files=[a.parquet,c.parquet]"))
    assert found["path"] == ("a.parquet", "c.parquet")
    assert (found["samples"], found["temperature"], found["top_k"]) == (4, 0.8, 50)
    assert (found["max_prompt_tokens"], found["max_tokens"]) == (2048, 99)
    assert "top_k" not in asked(of_server(f"{R}name=sglang", f"{R}top_k=50"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((f"{R}n=2", f"{R}temperature=0.0"), f"{R}n=2 with {R}temperature=0"),
        (("data.output_path=null",), "data.output_path: must be given"),
        ((f"{R}engine_kwargs.vllm.seed=1",), "whet.rollout.server.options"),
        ((f"{R}quantization=torchao",), "torchao"),
        (("algorithm.adv_estimatr=grpo",), "did you mean algorithm.adv_estimator"),
    ],
)
def test_what_the_server_refuses(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as e:
        of_server(*given)
    assert said in str(e.value)


def test_a_file_of_the_trainer_with_an_output_is_for_the_server(tmp_path: Path) -> None:
    text = "data: {train_files: a.parquet, output_path: b.parquet}\nactor_rollout_ref: {model: {path: m}}\n"
    (tmp_path / "f.yaml").write_text(text)
    loaded = load(tmp_path / "f.yaml")
    assert loaded.translation is not None
    assert loaded.translation.dialect == "verl-server"
    with pytest.raises(ConfigError, match="main_generation_server alone reads it"):
        load(tmp_path / "f.yaml", dialect="verl-ppo@0.9.0")


def test_every_key_of_the_trainer_is_known_to_the_server() -> None:
    for at in RELEASES:
        known = {row.key for row in dialect("verl-server", at).rows}
        assert {row.key for row in table("verl-ppo", at)} <= known
    assert FILES["verl-server"].unread == "verl-ppo"


# ---------------------------------------------------------------- launch scripts

MULTI_NODE = """
python3 -m verl.trainer.main_generation trainer.nnodes=2 trainer.n_gpus_per_node=8 data.path=$DATA \\
    data.prompt_key=prompt data.n_samples=1 \\
    data.output_path=$OUT model.path=$MODEL +model.trust_remote_code=True rollout.temperature=1.0 \\
    rollout.top_k=50 rollout.top_p=0.7 rollout.prompt_length={prompt} rollout.response_length={tokens} \\
    rollout.tensor_model_parallel_size=16 rollout.gpu_memory_utilization=0.8
"""
"""The arguments of verl's examples/generation/run_deepseek7b_mutli_node.sh (0.4.0 to 0.7.1)."""
ONE_NODE = MULTI_NODE.replace("nnodes=2", "nnodes=1").replace("parallel_size=16", "parallel_size=2")
"""Those of run_deepseek_v2_lite_math.sh."""
SERVER = """
python3 -m verl.trainer.main_generation_server trainer.nnodes="${{NNODES:-1}}" trainer.n_gpus_per_node=8 \\
    data.train_files="$DATA" data.prompt_key=prompt +data.output_path="$OUT" actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.model.trust_remote_code=True actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.load_format=auto actor_rollout_ref.rollout.temperature=1.0 \\
    actor_rollout_ref.rollout.top_k=50 actor_rollout_ref.rollout.top_p=0.7 \\
    actor_rollout_ref.rollout.prompt_length={prompt} actor_rollout_ref.rollout.response_length={tokens} \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \\
    actor_rollout_ref.rollout.n="${{N_SAMPLES:-1}}" "$@"
"""
"""Those of run_deepseek_llm_7b.sh (0.8.0 on)."""
SCRIPTS = {"multi_node": MULTI_NODE, "one_node": ONE_NODE, "server": SERVER}


def script(tmp_path: Path, name: str, *, prompt: int = 2048, tokens: int = 1024) -> Path:
    file = tmp_path / f"{name}.sh"
    paths = "DATA=p.parquet OUT=out.parquet MODEL=${MODEL_PATH:-deepseek-ai/deepseek-llm-7b-chat}\n"
    file.write_text(f"set -x\n{paths}{SCRIPTS[name].format(prompt=prompt, tokens=tokens)}")
    return file


@pytest.mark.parametrize("name", SCRIPTS)
def test_verls_scripts_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["plan", str(script(tmp_path, name))])
    assert done.exit_code == 0, done.output
    assert "1 to each row of data.eval, temperature 1, at most 1024 tokens; to out.parquet" in " ".join(
        done.stdout.split()
    )
    assert (
        CliRunner().invoke(app, ["convert", str(script(tmp_path, name)), "-o", "native.yaml"]).exit_code == 0
    )
    native, loaded = load("native.yaml"), load(script(tmp_path, name))
    assert native.config == loaded.config
    with pytest.raises(ConfigError, match="there is no training data"):
        plans(native)


@pytest.mark.parametrize("name", ["one_node", "server"])
def test_verls_scripts_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tmp_path / "run", steps=1, reward=lambda response: float(len(response))).run_dir
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", str(run / "export" / "main"))
    pq.write_table(pa.Table.from_pylist(PROMPTS), "p.parquet")
    done = CliRunner().invoke(app, ["generate", str(script(tmp_path, name, prompt=16, tokens=4))])
    assert done.exit_code == 0, done.output
    found = pq.read_table("out.parquet").to_pylist()
    assert [row["id"] for row in found] == [7, 8, 9]
    assert [len(row["responses"]) for row in found] == [1, 1, 1]
    again = CliRunner().invoke(
        app, ["generate", str(script(tmp_path, name, prompt=16, tokens=4)), "whet.track.dump.replies=b.jsonl"]
    )
    assert again.exit_code == 0, again.output
    assert lines(tmp_path / "b.jsonl") == found
