"""Every key of rollout.server changes what a run does with its servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from native_cases import SERVER
from servers import OpenAIServer, SglangServer, VllmServer
from test_rollout_contract import END, LIMIT, module
from whet.config.checks_run import problems
from whet.config.schema import Config, LoraConfig, ServerConfig
from whet.models import kernels
from whet.models.lora import adapted, attach, refresh
from whet.rollout.engine import EngineInputs
from whet.rollout.http.installed import found
from whet.rollout.http.kinds import SGLANG
from whet.rollout.http.opened import Opener, openai, sglang, vllm
from whet.rollout.native.engine import NativeEngine
from whet.rollout.router import Router
from whet.types import ConfigError, WhetError


def inputs(folder: Path, **server: Any) -> EngineInputs:
    return EngineInputs(
        model=module(),
        ops=kernels.load("auto"),
        end_token_ids=frozenset({END}),
        decode=str,
        max_context=LIMIT,
        max_num_seqs=7,
        cache_mb=None,
        quantization=None,
        beat=lambda what: None,
        span=lambda what: nullcontext(),
        server=ServerConfig(**server),
        reply_timeout_s=50.0,
        load_timeout_s=12.0,
        run_dir=folder,
        home=folder,
    )


@pytest.fixture
def server() -> Iterator[VllmServer]:
    there = VllmServer(NativeEngine(module(), kernels.load("auto"), end_token_ids=[], max_context=LIMIT))
    yield there
    there.stop()


def test_every_key_has_a_test() -> None:
    assert set(SERVER) == {f"rollout.server.{name}" for name in ServerConfig.model_fields}


@pytest.mark.parametrize("key", ["urls", "proxy"])
@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://:8000",
        "http://[::1",
        "http://host:99999",
        f"http://{'a' * 70}.b",
    ],
)
def test_an_address_that_cannot_be_asked_is_refused_at_once(key: str, url: str) -> None:
    """It was asked for a minute, or ended the run with a traceback."""
    assert f"rollout.server.{key}: {url!r}" in "\n".join(wrong(key, url))


@pytest.mark.parametrize(
    "url", ["http://host:8000", "https://[::1]:8000/path/", "http://127.0.0.1", "HTTP://a.b:1"]
)
def test_an_address_that_can_be_asked_is_not(url: str) -> None:
    assert wrong("urls", url) == wrong("proxy", url) == []


def test_an_address_with_a_password_has_no_token_beside_it() -> None:
    """A request with both ended the run with a traceback."""
    with_password = "http://me:hidden-pw@host:8000"
    assert wrong("urls", with_password) == []
    (said,) = wrong("urls", with_password, token="tok-1234567890")
    assert "a user name, and there is a token, too" in said
    assert "hidden-pw" not in said


def wrong(key: str, url: str, **more: str) -> list[str]:
    """What a config with this address is refused for, of its addresses."""
    given = {"urls": [url], **more} if key == "urls" else {"urls": ["http://a:1"], key: url}
    cfg = Config.model_validate_json(json.dumps({"rollout": {"engine": "vllm", "server": given}}))
    return [f"{at}: {said}" for at, said in problems(cfg) if at.startswith("rollout.server")]


def test_urls_are_replicas(server: VllmServer, tmp_path: Path) -> None:
    router = vllm(inputs(tmp_path, urls=(server.url,)))
    assert isinstance(router, Router)
    assert list(router.replicas) == ["engine-0"]
    assert router.can.logprobs == "unfiltered"
    asyncio.run(router.close())


def test_a_url_without_a_server_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        WhetError, match=r"127\.0\.0\.1:9 does not answer within rollout\.server\.timeout_s=0\.2"
    ):
        vllm(inputs(tmp_path, urls=("http://127.0.0.1:9",), timeout_s=0.2))


def test_token(tmp_path: Path) -> None:
    opener = Opener(inputs(tmp_path, token="open sesame, open"))
    assert opener.token == opener.env()["VLLM_API_KEY"] == "open sesame, open"
    assert "VLLM_API_KEY" not in Opener(inputs(tmp_path)).env()


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "vllm"
    path.touch(0o755)
    assert found(str(path)).command == path
    with pytest.raises(ConfigError, match=r"rollout\.server\.command"):
        found(str(tmp_path / "missing"))


def test_a_given_command_needs_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.rollout.http.installed.home", lambda: pytest.fail("it was asked for"))
    (path := tmp_path / "vllm").touch(0o755)
    assert found(str(path)).command == path


def test_options_and_what_whet_sets(tmp_path: Path) -> None:
    command = Opener(inputs(tmp_path, options={"max-num-seqs": 3, "enforce-eager": True})).command(
        "vllm", 4711
    )
    assert command[:3] == ["vllm", "serve", str(tmp_path / "engine" / "model")]
    pairs = dict(pairwise(command))
    assert pairs["--max-model-len"] == str(LIMIT + 1)
    assert (pairs["--dtype"], pairs["--port"], pairs["--host"]) == ("float32", "4711", "127.0.0.1")
    assert (pairs["--logprobs-mode"], pairs["--max-num-seqs"]) == ("processed_logprobs", "3")
    assert command[-1] == "--enforce-eager"
    plain = Opener(inputs(tmp_path)).command("vllm", 4711)
    assert dict(pairwise(plain))["--max-num-seqs"] == "7"
    with pytest.raises(ConfigError, match="dtype"):
        Opener(inputs(tmp_path, options={"dtype": "half"})).command("vllm", 1)


def test_experts_are_asked_of_a_server_that_is_started(tmp_path: Path) -> None:
    """EngineInputs.experts: as a run with train.router_replay=sampled has it."""
    told = "--enable-return-routed-experts"
    for kind, name in ((None, "vllm"), (SGLANG, "sglang")):
        more = () if kind is None else (kind,)
        plain, asked = (
            Opener(replace(inputs(tmp_path), experts=experts), *more).command(name, 1)
            for experts in (False, True)
        )
        assert told not in plain
        assert [word for word in asked if word not in plain] == [told]


def test_lora(tmp_path: Path) -> None:
    """The server starts with what is under the adapters, and with room for them."""
    model = module()
    given = inputs(tmp_path, lora="adapter")
    attach(model, LoraConfig(rank=9), seed=0)
    with torch.no_grad():
        for layer in adapted(model).values():
            layer.lora_B.fill_(0.1)
    refresh(model)
    opener = Opener(replace(given, model=model))
    pairs = dict(pairwise(opener.command("vllm", 1)))
    assert pairs["--max-lora-rank"] == "16"
    assert "--enable-lora" in pairs
    assert opener.env()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    started = load_file(tmp_path / "engine" / "model" / "model.safetensors")
    assert all(torch.equal(started[name], p) for name, p in module().named_parameters())
    merging = replace(inputs(tmp_path), model=model)
    assert "--enable-lora" not in Opener(merging).command("vllm", 1)
    merged = load_file(tmp_path / "engine" / "model" / "model.safetensors")
    assert not all(torch.equal(merged[name], p) for name, p in module().named_parameters())


def test_env(tmp_path: Path) -> None:
    own = Opener(inputs(tmp_path)).env()
    assert own["VLLM_SERVER_DEV_MODE"] == "1"
    given = Opener(inputs(tmp_path, env={"VLLM_CPU_KVCACHE_SPACE": "9", "MINE": "x"})).env()
    assert (given["VLLM_CPU_KVCACHE_SPACE"], given["MINE"]) == ("9", "x")


def test_weights_dir(tmp_path: Path) -> None:
    assert Opener(inputs(tmp_path)).folder.root == tmp_path / "engine"
    assert Opener(inputs(tmp_path, weights_dir=str(tmp_path / "fast"))).folder.root == tmp_path / "fast"


def test_canary_bound(tmp_path: Path) -> None:
    assert Opener(inputs(tmp_path)).folder.canary.bound == 1e-3  # in float32
    assert Opener(inputs(tmp_path, canary_bound=0.5)).folder.canary.bound == 0.5


def test_time_limits_and_restarts(server: VllmServer, tmp_path: Path) -> None:
    keys = {"timeout_s": 11.0, "start_timeout_s": 13.0, "restarts": 4}
    limits = Opener(inputs(tmp_path, **keys)).limits
    assert (limits.answer, limits.load, limits.reply) == (11.0, 12.0, 50.0)
    router = vllm(inputs(tmp_path, urls=(server.url,), **keys))
    assert isinstance(router, Router)
    assert (router.health_timeout_s, router.load_s, router.start_timeout_s) == (11.0, 12.0, 13.0)
    assert router.left == {"engine-0": 4}
    asyncio.run(router.close())


# ---------------------------------------------------------------- the other kinds


def test_sglang_is_started_so_that_it_can_be_asked(tmp_path: Path) -> None:
    options = {"tp-size": 2, "disable-radix-cache": True, "enable-metrics-for-all": False}
    opener = Opener(inputs(tmp_path, options=options, token="open sesame, open"), SGLANG)
    command = opener.command("sglang", 4711)
    pairs = dict(pairwise(command))
    assert command[:2] == ["sglang", "serve"]
    assert pairs["--model-path"] == str(tmp_path / "engine" / "model")
    assert pairs["--context-length"] == str(LIMIT + 8)
    assert (pairs["--dtype"], pairs["--port"], pairs["--host"]) == ("float32", "4711", "127.0.0.1")
    assert (pairs["--max-running-requests"], pairs["--tp-size"]) == ("7", "2")
    assert {"--skip-tokenizer-init", "--enable-metrics", "--disable-radix-cache"} < set(command)
    assert not any("metrics-for-all" in text or "sesame" in text for text in command)
    secret = Path(pairs["--config"])
    assert json.loads(secret.read_text()) == {"api-key": "open sesame, open"}
    assert secret.stat().st_mode & 0o777 == 0o600
    config = json.loads((tmp_path / "engine" / "model" / "config.json").read_text())
    assert config["eos_token_id"] == [END]
    for name in ("context-length", "api-key", "speculative_algorithm"):
        with pytest.raises(ConfigError, match=name):
            Opener(inputs(tmp_path, options={name: "x"}), SGLANG).command("sglang", 1)


def test_what_sglang_s_log_probs_mean_is_not_the_user_s_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    env = Opener(inputs(tmp_path, env={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "MINE": "x"}), SGLANG).env()
    assert (env["SGLANG_RETURN_ORIGINAL_LOGPROB"], env["MINE"]) == ("0", "x")


def test_sleep(tmp_path: Path) -> None:
    """A server is started so that it can; one of `urls` that cannot is refused."""
    own = inputs(tmp_path, sleep=True, options={"enable-memory-saver": False})
    assert "--enable-sleep-mode" in Opener(own).command("vllm", 1)
    command = Opener(own, SGLANG).command("sglang", 1)
    assert "--enable-weights-cpu-backup" in command
    assert "--enable-memory-saver" not in command  # an option that is given counts
    there = VllmServer(NativeEngine(module(), kernels.load("auto"), end_token_ids=[], max_context=LIMIT))
    try:
        asyncio.run(vllm(inputs(tmp_path, urls=(there.url,), sleep=True)).close())
        there.sleeps = False
        with pytest.raises(ConfigError, match="keeps its memory: start it with --enable-sleep-mode"):
            vllm(inputs(tmp_path, urls=(there.url,), sleep=True))
    finally:
        there.stop()


def test_sglang_servers_are_replicas(tmp_path: Path) -> None:
    there = SglangServer(NativeEngine(module(), kernels.load("auto"), end_token_ids=[], max_context=LIMIT))
    try:
        router = sglang(inputs(tmp_path, urls=(there.url,)))
        assert isinstance(router, Router)
        assert list(router.replicas) == ["engine-0"]
        assert router.can.logprobs == "unpenalised"
        asyncio.run(router.close())
    finally:
        there.stop()


def test_model(tmp_path: Path) -> None:
    there = OpenAIServer(NativeEngine(module(), kernels.load("auto"), end_token_ids=[], max_context=LIMIT))
    there.models = ["one", "two"]
    try:
        router = openai(inputs(tmp_path, urls=(there.url,), model="two"))
        assert {body["model"] for path, body in there.asked if path == "/v1/completions"} == {"two"}
        asyncio.run(router.close())
    finally:
        there.stop()
    with pytest.raises(ConfigError, match="starts no server"):
        openai(inputs(tmp_path))
