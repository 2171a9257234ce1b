"""What holds of a real vLLM server alone (make test-backends); without one these tests are skipped.

The contract suite runs over the same server: tests/test_rollout_contract.py, engine `vllm`.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asking import reply
from backends.transcripts import ASKED, ask, differences, read
from serving import REAL, RealServer, folder_of, real_server, vllm_engine
from test_http_engine import with_adapters
from test_rollout_contract import END, LIMIT, PROMPT, module, run
from whet.rollout.engine import WeightUpdate
from whet.rollout.http.served import HttpEngine
from whet.rollout.http.vllm import LABEL, LOAD, RESUME
from whet.types import Sampling, WhetError

pytestmark = pytest.mark.skipif(REAL is None, reason="WHET_VLLM names no vllm (make test-backends)")


async def opened(server: RealServer) -> HttpEngine:
    engine = vllm_engine(server.url, module(), max_context=LIMIT, end_token_ids=[END])
    await engine.calls.ask(RESUME)
    await engine.open()
    return engine


def test_real_answers_have_the_shape_that_the_double_has() -> None:
    """What kills the server (a folder that is not there) is asked of one that is not used again, below."""
    server, recorded = real_server(module, LIMIT), read()
    for name, (method, path, body) in ASKED.items():
        if name == "lost_folder":
            continue
        if name == "too_long":
            body = body | {"token_ids": [3] * (LIMIT + 1)}
        said = ask(server.url, method, path, body, name)
        assert said["status"] == recorded[name]["status"], name
        if name != "stream":
            assert differences(recorded[name]["answer"], said["answer"]) == [], name


@pytest.mark.parametrize("left_out", ["lm_head", "layers.1", "norm"])
def test_what_a_real_server_does_not_get_is_found(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that lacks tensors is loaded without an error."""
    server = RealServer(module(), max_context=LIMIT)

    async def story() -> str:
        engine = await opened(server)
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        write = folder_of(engine).write

        def incomplete(update: WeightUpdate):  # type: ignore[no-untyped-def]
            version = write(update)
            for path in Path(version.path).glob("*.safetensors"):
                kept = {name: t for name, t in load_file(path).items() if left_out not in name}
                save_file(kept, path)
            return version

        monkeypatch.setattr(folder_of(engine), "write", incomplete)
        newer = module(seed=1)
        with torch.no_grad():  # a new model's norms are all 1, and would be right without being loaded
            for name, weight in newer.named_parameters():
                if "norm" in name:
                    weight += torch.linspace(-0.5, 0.5, len(weight))
        try:
            await engine.update_weights(WeightUpdate(version=2, module=newer))
        except WhetError as error:
            return str(error)
        finally:
            await engine.close()
        return ""

    said = run(story())
    asyncio.run(server.process.stop())
    assert "does not have weights version 2" in said or "does not answer" in said or "EngineCore" in said


def test_a_real_server_that_kept_its_weights_is_found() -> None:
    """A step that moves log-probs by less than the bound."""
    server = real_server(module, LIMIT)

    async def story() -> None:
        engine = await opened(server)
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        after = module()
        with torch.no_grad():
            for p in after.parameters():
                p.add_(3e-5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))

        async def skip(call, body=None, query=None):  # type: ignore[no-untyped-def]
            return None if call is LOAD else await as_it_is(call, body, query)

        as_it_is, engine.calls.ask = engine.calls.ask, skip  # type: ignore[method-assign]
        with pytest.raises(WhetError, match="does not have weights version 2"):
            await engine.update_weights(WeightUpdate(version=2, module=after))
        await engine.close()

    run(story())


def test_a_real_server_s_replies_carry_the_version_that_sampled_them() -> None:
    server = real_server(module, LIMIT)

    async def story() -> None:
        engine = await opened(server)
        await engine.update_weights(WeightUpdate(version=5, module=module()))
        await engine.calls.ask(LABEL, {"new_version": "6"})
        assert set((await reply(engine, PROMPT, Sampling(max_tokens=4))).versions) == {6}
        await engine.close()

    run(story())


@pytest.mark.parametrize("streams", [True, False])
def test_a_real_reply_that_nobody_waits_for_is_not_computed(streams: bool) -> None:
    server = real_server(module, 2000)

    async def story() -> None:
        engine = vllm_engine(server.url, module(), max_context=2000, end_token_ids=[END])
        await engine.open()
        await reply(engine, PROMPT, Sampling(max_tokens=5))
        before, seen = await engine.health(), []
        long = Sampling(max_tokens=1900, key=3, ignore_eos=True)
        work = asyncio.create_task(reply(engine, PROMPT, long, on_tokens=seen.extend if streams else None))
        await asyncio.sleep(0.3)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        counts = []
        for _ in range(20):  # until nothing is computed any more
            counts.append(await engine.health())
            await asyncio.sleep(0.2)
            if len(counts) > 1 and counts[-1] == counts[-2]:
                break
        assert counts[-1].tokens - before.tokens < 1900
        assert counts[-1].requests == before.requests
        assert bool(seen) == streams
        await engine.close()

    run(story())


def test_a_real_server_computes_with_adapters_that_are_loaded_while_it_runs() -> None:
    """Of several ranks and of a scale other than 1; the canary proves them."""
    server = real_adapters()

    async def story() -> None:
        how: dict[str, Any] = {"max_context": LIMIT, "end_token_ids": [END], "adapters": True}
        engine = vllm_engine(server.url, with_adapters(), **how)
        await engine.calls.ask(RESUME)
        await engine.open()
        for version in (1, 2, 3):
            update = WeightUpdate(version=version, module=with_adapters(seed=version))
            measured = (await engine.update_weights(update)).measured
            assert measured["sync/canary_mean"] < 1e-5
        done = await reply(engine, PROMPT, Sampling(max_tokens=4))
        assert set(done.versions) == {3}
        await engine.close()

    run(story())


@cache
def real_adapters() -> RealServer:
    return RealServer(module(), max_context=LIMIT, adapters_rank=8)
