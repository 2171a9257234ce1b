"""A run on one machine is reached from that machine alone: its ranks, its weight sync, and a cluster it starts."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import whet
from sockets import is_loopback, own
from test_train_torch import CUT, pg_loss, weighted
from tiny import RUN, tiny_model
from whet.config.schema import OptimizerConfig
from whet.models.mesh import Dims
from whet.sync.collective import Collective
from whet.training.ranks import RankGroup, Ranks

CLUSTER = """
import json, os, time
from sockets import family, listening
from whet.cluster import nodes
nodes.connect(None, None)
import ray

@ray.remote(num_cpus=0)
class Actor:
    def pid(self):
        return os.getpid()

actor = Actor.remote()
pid = ray.get(actor.pid.remote())
seen = listening(family(os.getpid()))
assert any(str(pid) in who for who, _, _ in seen), seen
session = ray._private.worker._global_node.get_session_dir_path()
print(json.dumps({"seen": seen, "session": session, "logs": nodes.logs()}))
nodes.disconnect()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_socket_on_all_interfaces_is_seen() -> None:
    """The control of the tests below."""
    with socket.create_server(("127.0.0.1", 0)) as near:
        port = near.getsockname()[1]
        assert {address for _, address, at in own() if at == port} == {"127.0.0.1"}
    assert is_loopback("::ffff:127.0.0.1")
    assert is_loopback("::1")
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.2", "::ffff:192.0.2.2")))


def test_a_cluster_of_ones_own_listens_on_loopback_and_is_private(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    short = Path(f"/tmp/w{os.getpid()}")
    short.mkdir(mode=0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    env |= {"HOME": str(tmp_path), "RAY_TMPDIR": str(short), "PYTHONPATH": path}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CLUSTER], env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert Path(said["logs"]).is_dir()
        assert len(said["seen"]) > 5, "the head, the raylet, the driver and the actor at least"
        assert [each for each in said["seen"] if not is_loopback(each[1])] == []
        folder = short / f"whet-ray-{os.getuid()}"
        assert Path(said["session"]).is_relative_to(folder)
        assert mode(folder) == 0o700
        token = tmp_path / ".ray" / "auth_token"
        assert (mode(token.parent), mode(token)) == (0o700, 0o600)
    finally:
        subprocess.run(["rm", "-rf", str(short)], check=True)


def test_a_token_that_others_may_read_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from whet.cluster import private

    file = tmp_path / "token"
    file.write_text("t" * 64)
    file.chmod(0o644)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    private.token()
    assert (mode(file), file.read_text()) == (0o600, "t" * 64)


def test_a_folder_of_sessions_that_is_anothers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from whet.cluster import private
    from whet.types import ConfigError

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / f"whet-ray-{os.getuid()}"
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a private folder of this user"):
        private.sessions()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="is not a private folder of this user"):
        private.sessions()


def test_ranks_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "whet.guard.line.subprocess", subprocess
    )  # interpreters of their own, as a user's ranks are
    ranks = Ranks(Dims(dp_replicate=2), timeout_s=60.0)
    many = RankGroup(
        ranks, "policy", tiny_model(), cut=CUT, optimizer=OptimizerConfig(name="sgd", lr=0.02), total_steps=4
    )
    many.update(weighted(), pg_loss)  # gloo listens by now
    seen = own()
    assert any(at == ranks.store.port for _, _, at in seen)
    assert len({who for who, _, _ in seen}) == 3, "this process and both ranks"
    assert [each for each in seen if not is_loopback(each[1])] == []
    for line in ranks.lines.lines:
        line.hang_up()


def test_a_run_on_one_machine_without_ranks_listens_on_no_port(tmp_path: Path) -> None:
    """Neither this process nor one that it has started: rewards and explorers talk over socket pairs."""
    before, during = set(own()), set[tuple[str, str, int]]()
    steps: list[int] = []

    def look(row: Mapping[str, object]) -> None:
        steps.append(1)
        during.update(own())

    whet.train(**(RUN | {"run_dir": str(tmp_path / "run")}), on_step=look)
    assert len(steps) == 3
    assert during - before == set()


def test_the_weight_sync_listens_on_loopback() -> None:
    end = Collective(["e-1"], rank=0, timeout_s=5.0)
    seen = [each for each in own() if each[2] == end.port]
    assert seen
    assert all(is_loopback(address) for _, address, _ in seen)
    end.close()
