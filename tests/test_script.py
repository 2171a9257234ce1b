"""Launch scripts: what counts as the launch, its words and lines, what is told, and that a script does no harm."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from whet.dialects import shell
from whet.dialects.launch import Inside, LaunchedProgram, system_of, unwrapped
from whet.dialects.script import Argument, Launch, read_script
from whet.guard import sandbox
from whet.types import ConfigError

WHY = sandbox.lacking() or ("" if shutil.which("bash") else "no bash")
needs_shell = pytest.mark.skipif(bool(WHY), reason=f"no launch script can be read here: {WHY}")
HOME = {"HOME": "/home/me", "USER": "me"}
START = "python3 -m verl.trainer.main_ppo"


def launch(script: str, *arguments: str, **environment: str) -> Launch:
    return read_script(script, arguments, HOME | environment, folder="/usr")


def words(script: str, *arguments: str, **environment: str) -> list[str]:
    return [word.text for word in launch(script, *arguments, **environment).overrides]


def problem(script: str, *arguments: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        launch(script, *arguments, **environment)
    return str(caught.value)


def notes(script: str, *arguments: str, **environment: str) -> str:
    return "\n".join(f"{line}: {text}" for line, text in launch(script, *arguments, **environment).notes)


# ---------------------------------------------------------------- what is started

STARTS = {
    "python -m verl.trainer.main_ppo a=1": ("verl", "verl.trainer.main_ppo", []),
    "python3.11 -u -X dev -m verl.trainer.sft_trainer a=1": ("verl", "verl.trainer.sft_trainer", ["-u", "-X", "dev"]),
    "python3 /opt/code/verl/trainer/main_eval.py a=1": ("verl", "verl.trainer.main_eval", []),
    "python3 -m verl.experimental.x.fully_async_main a=1": ("verl", "verl.experimental.x.fully_async_main", []),
    "torchrun --standalone --nnodes=1 --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer a=1": (
        "verl", "verl.trainer.fsdp_sft_trainer", ["--standalone", "--nnodes=1", "--nproc_per_node", "8"],
    ),
    "python -m torch.distributed.run --nnodes 2 -m verl.trainer.sft_trainer a=1": (
        "verl", "verl.trainer.sft_trainer", ["--nnodes", "2"],
    ),
    "accelerate launch --num_processes 8 --multi_gpu -m verl.trainer.sft_trainer a=1": (
        "verl", "verl.trainer.sft_trainer", ["--num_processes", "8", "--multi_gpu"],
    ),
    "uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base a=1": (
        "skyrl", "skyrl.train.entrypoints.main_base", ["--isolated", "--extra", "fsdp"],
    ),
    "uv -v run --frozen --with a==1 -- python -m skyrl_train.entrypoints.main_base a=1": (
        "skyrl", "skyrl_train.entrypoints.main_base", ["--frozen", "--with", "a==1"],
    ),
    "uv run examples/train/maze/entrypoint.py a=1": ("skyrl", "examples.train.maze.entrypoint", []),
    "uv run -m mine.run trainer.policy.model.path=x": ("skyrl", "mine.run", []),
    "python my/train.py algorithm.adv_estimator=grpo": ("verl", "my/train.py", []),
    "python train.py x=1 y.z=2": ("", "train.py", []),
    "ray job submit --address=x -- python3 -m verl.trainer.main_ppo a=1": (
        "verl", "verl.trainer.main_ppo", ["job", "submit", "--address=x"],
    ),
    "timeout -k 5 3h stdbuf -oL nohup env A=1 python -m verl.trainer.main_ppo a=1": (
        "verl", "verl.trainer.main_ppo", ["-k", "5", "3h", "-oL"],
    ),
    "exec conda run -n env python -m verl.trainer.main_ppo a=1": ("verl", "verl.trainer.main_ppo", ["-n", "env"]),
}  # fmt: skip


@pytest.mark.parametrize("command", STARTS)
def test_what_starts_a_trainer(command):
    system, module, others = STARTS[command]
    given = command.split()
    found = unwrapped(given)
    assert isinstance(found, LaunchedProgram)
    assert (found.module, [given[n] for n in found.others]) == (module, others)
    told = system_of(module, given[found.args :])
    assert told is not None
    assert told[0] == system


def test_what_starts_none():
    for command in (
        "python plot.py",
        "python -c pass",
        "python3 -m verl.model_merger merge",
        "pip install verl",
    ):
        given = command.split()
        found = unwrapped(given)
        assert isinstance(found, LaunchedProgram)
        assert system_of(found.module, given[found.args :]) is None
    assert unwrapped(["srun", "--gres", "gpu:8", "bash", "-c", "x"]) == Inside(5)


# ---------------------------------------------------------------- a launch and its words

WAYS = {
    "in the background": "nohup {0} a=1 > run.log 2>&1 &",
    "in a pipe": "{0} a=1 2>&1 | tee log/run.txt",
    "in a function": 'go() {{ "$@" a=1; }}; go {0}',
    "in a substitution": "OUT=$({0} a=1)",
    "after a folder that is not there": "mkdir -p new && cd new && {0} a=1 || exit 1",
    "by its path": "/opt/venv/bin/{0} a=1",
    "by a path in a variable": 'PY=./bin/python; "$PY" -m verl.trainer.main_ppo a=1',
    "as the shell itself": "exec {0} a=1",
    "by a text": 'srun -N 2 bash -c "cd /x; {0} a=1"',
    "by another shell": "sh -c '{0} a=1'",
    "by eval": 'C="{0} a=1"; eval "$C"',
    "behind a changed PATH": "export PATH=/usr/bin:/bin; {0} a=1",
    "behind set -e": "set -euxo pipefail; source gone/activate; ray stop; nvidia-smi; sleep 3; {0} a=1",
    "behind command -v": "command -v uv > /dev/null || exit 1; ulimit -n 65535; trap 'kill 0' EXIT; {0} a=1",
    "into a file that is open": "exec 3>> run.log; {0} a=1 >&3 2>&3",
    "before a loop that waits": "{0} a=1 &\nwhile true; do sleep 60; done",
}


@needs_shell
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_start_it(way):
    found = launch(WAYS[way].format(START))
    assert (found.system, found.module, [w.text for w in found.overrides]) == (
        "verl",
        "verl.trainer.main_ppo",
        ["a=1"],
    )


@needs_shell
def test_a_launch_and_its_words():
    found = launch(
        "#!/usr/bin/env bash\nset -x\nexport VLLM=1\nDATA=(\n  data.train_batch_size=8\n)\n"
        "HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo --config-path=conf --config-name ppo.yaml \\\n"
        '    "${DATA[@]}" +a.b=\'["x","y z"]\' ++c=2 ~d group@pkg=x \\\n    $@',
        "trainer.nnodes=2",
    )
    assert (found.system, found.module, found.line) == ("verl", "verl.trainer.main_ppo", 7)
    assert (found.config_path, found.config_name, found.config_file) == ("conf", "ppo.yaml", None)
    assert found.overrides == (
        Argument("data.train_batch_size=8", 5),
        Argument('+a.b=["x","y z"]', 8),
        Argument("++c=2", 8),
        Argument("~d", 8),
        Argument("group@pkg=x", 8),
        Argument("trainer.nnodes=2", 0),
    )
    assert dict(found.environment) == {"VLLM": "1", "HYDRA_FULL_ERROR": "1"}
    assert (found.others, found.file, found.folder) == ((), "", "/usr")


@needs_shell
def test_launchers_of_cosmos_and_trinity_and_what_the_script_writes():
    found = launch("cosmos-rl --config configs/a.toml --policy 2 tools/data.py")
    assert (found.system, found.module, found.config_file) == ("cosmos", "cosmos-rl", "configs/a.toml")
    assert [w.text for w in found.others] == ["--policy", "2", "tools/data.py"]
    found = launch(
        "N=3\ncat > b.yaml <<EOF\nmode: both\nn: $N\nEOF\nuv run trinity run --config=b.yaml | tee log &"
    )
    assert (found.system, found.module, found.config_file) == ("trinity", "trinity run", "b.yaml")
    assert found.written["/usr/b.yaml"] == "mode: both\nn: 3\n"
    assert launch("python -m trinity.cli.launcher run --config b.yaml").config_file == "b.yaml"


@needs_shell
def test_the_last_launch_counts_and_the_others_are_told():
    script = (
        "python3 prepare.py --out x\npython3 -m verl.trainer.main_generation a=1 &\n"
        "python3 -m verl.trainer.main_ppo b=2 &\npython3 -m verl.model_merger merge\npython3 plot.py\n"
    )
    found = launch(script)
    assert (found.module, found.line) == ("verl.trainer.main_ppo", 3)
    assert notes(script).splitlines() == [
        "1: `python3 prepare.py --out x` is not run",
        "2: starts verl.trainer.main_generation, too; the last launch counts",
        "4: `python3 -m verl.model_merger merge` is not run",
        "5: `python3 plot.py` is not run",
    ]


@needs_shell
@pytest.mark.parametrize(
    ("branch", "line"),
    [
        ("set -e\nif nvidia-smi -L; then N=8; else N=1; fi", 3),
        ("set -e\nnvidia-smi -L && N=8 || N=1", 3),
        ("N=8\nnvidia-smi -L\n[ $? -eq 0 ] || N=1", 3),
        ("set -e\nN=8; nvidia-smi -L", None),
        ("N=8; if ! nvidia-smi -L; then exit 1; fi", None),
        ("N=8; nvidia-smi -L || echo none", None),
    ],
)
def test_a_branch_on_the_status_of_a_program_that_is_not_run_is_told(branch: str, line: int | None) -> None:
    """It was taken silently as if the program had succeeded. To end is no other launch."""
    started = launch(f"pip install x\n{branch}\n{START} a.b=$N\n")
    assert started.overrides[-1].text == "a.b=8"
    said = [text for _, text in started.notes if "another command" in text]
    told = f"it would be another command if `nvidia-smi -L` (line {line}) failed: taken to succeed"
    assert said == [told] * (line is not None)


def test_another_script_is_read_and_named(tmp_path: Path):
    (tmp_path / "inner.sh").write_text(f"#!/bin/bash\n\n{START} a=$1\n")
    (tmp_path / "run.sh").write_text('cd "$(dirname "$0")"\nbash inner.sh 5\n')
    found = read_script(tmp_path / "run.sh", (), HOME)
    assert (found.overrides, found.file) == ((Argument("a=5", 3),), "inner.sh")
    (tmp_path / "run.sh").write_text(f"{tmp_path}/inner.sh 6\n")
    assert read_script(tmp_path / "run.sh", (), HOME).overrides[0].text == "a=6"


@needs_shell
def test_files_are_read_and_the_shell_knows_its_place(tmp_path: Path):
    (tmp_path / "env.sh").write_text("declare -A M=([x]=7)\nLR=1e-6\n")
    (tmp_path / "run.sh").write_text(
        'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$D/env.sh"\n'
        f'[ -f "$D/env.sh" ] && F=yes\n{START} d=$D lr=$LR m=${{M[x]}} f=$F n=$(basename "$0" .sh)'
    )
    found = read_script(tmp_path / "run.sh", (), HOME, folder="/usr")
    assert [w.text for w in found.overrides] == [f"d={tmp_path}", "lr=1e-6", "m=7", "f=yes", "n=run"]
    assert [w.line for w in found.overrides] == [4] * 5
    (tmp_path / "dos.sh").write_text(f"\ufeffA=1\r\n{START} \\\r\n  a=$A\r\n")
    assert read_script(tmp_path / "dos.sh", (), HOME).overrides == (Argument("a=1", 3),)


# ---------------------------------------------------------------- errors


@needs_shell
def test_python_files_beside_a_script_are_not_run(tmp_path: Path):
    """They have the names of modules of Python's that the process imports which prepares the sandbox."""
    for name in ("ctypes", "random", "resource", "socket", "struct", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it ran')\n")
    found = read_script(f"{START} a=1", (), HOME, folder=str(tmp_path))
    assert [word.text for word in found.overrides] == ["a=1"]


@needs_shell
def test_no_trainer_says_what_was_seen():
    said = problem("python3 prepare.py\npip install x\n")
    assert "found `python3 prepare.py` in line 1, `pip install x` in line 2" in said
    assert "no command that starts a program" in problem("echo hello")
    assert "no command that starts a program" in problem("")


@needs_shell
def test_an_end_before_the_launch_is_told_with_what_the_script_says():
    script = 'if [ "$#" -lt 1 ]; then\n  echo "Usage: run.sh <gpus>"\n  exit 1\nfi\n' + START + " n=$1"
    assert "it ended with status 1: Usage: run.sh <gpus>" in problem(script)
    assert words(script, "8") == ["n=8"]
    how = "give it before the command: DIR=value whet ..."
    assert f"line 1: DIR: set the folder; {how}" in problem(f": ${{DIR:?set the folder}}\n{START} a=$DIR")
    assert f"line 2: DIR: unbound variable; {how}" in problem(f"set -u\n{START} a=$DIR")
    assert words(f"set -u\n{START} a=$DIR", DIR="x") == ["a=x"]
    assert "line 3: syntax error" in problem(f"if true; then\n{START} 'a=1'")


@needs_shell
def test_an_unset_variable_that_arrives_is_named_with_its_line():
    script = f"A=$DATA/x\nB=$A\n{START} \\\n  p=$B q=1"
    assert problem(script) == (
        "line 4: `p=${DATA}/x` needs $DATA, which is not set; give it before the command: DATA=value whet ..."
    )
    assert words(script, DATA="/d") == ["p=/d/x", "q=1"]
    assert "it depends on $GPUS, which is not set" in problem(f"N=$((GPUS + ${{GPUS}}0))\n{START} n=$N")


@needs_shell
def test_an_unset_variable_that_does_not_arrive_is_no_matter():
    script = f'export KEY=$SECRET PATH=$PATH:/x\nif [ -z "$MODEL" ]; then M=none; fi\nA=$B\n{START} m=$M'
    assert words(script) == ["m=none"]
    assert words(f"{START} a=1 $EXTRA b=${{C:-2}}") == ["a=1", "b=2"]
    assert "$EXTRA is not set: the word is left out" in notes(f"{START} a=1 $EXTRA")


@needs_shell
def test_the_output_of_a_program_is_refused_where_it_arrives():
    script = f"N=$(nvidia-smi -L | wc -l)\nM=$(jq .x f.json)\n{START} n=$((N * 2))"
    said = problem(script)
    assert said.startswith("line 3: `n=0` is not known: it depends on the output of `nvidia-smi -L` (line 1)")
    assert words(script.replace("$((N * 2))", "1")) == ["n=1"]


@needs_shell
def test_a_probe_for_an_npu_fails():
    script = f"D=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\n{START} d=$D"
    assert words(script) == ["d=gpu"]
    assert "import torch_npu` is assumed to fail" in notes(script)


def test_what_is_no_script_is_refused(tmp_path: Path):
    for text in ("a\0b", "#" * 2**21):
        with pytest.raises(ConfigError, match="at most 1 MiB, without NUL"):
            read_script(text)
    with pytest.raises(ConfigError, match="No such file"):
        read_script(tmp_path / "gone.sh")


def test_without_a_shell_or_a_sandbox_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shell.shutil, "which", lambda name: None)
    assert "launch scripts need bash" in problem(START)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_a_refused_sandbox_names_the_way_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The sandbox's process is replaced by one that has none."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\ncat > /dev/null; echo \'{"refused": "this kernel has no Landlock"}\'\n')
    fake.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(fake))
        said = problem(f"{START} a=1")
    assert "this kernel has no Landlock" in said
    assert "--trust-script runs the script without a sandbox" in said
    found = read_script(f"echo x > {tmp_path}/new; {START} a=1", (), HOME, trust=True)
    assert (found.overrides[0].text, (tmp_path / "new").read_text()) == ("a=1", "x\n")


# ---------------------------------------------------------------- harm


@needs_shell
def test_a_script_changes_no_file(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("as it was")
    tries = (
        f"rm -rf {kept}; /bin/rm -rf {kept}; command rm -r {kept}; env rm -r {kept}; PATH=/usr/bin:/bin; rm -r {kept}",
        f"echo x > {kept}/file; echo x >> {kept}/new; : >| {kept}/file; echo x | tee {kept}/file {kept}/tee",
        f"sed -i s/as/bs/ {kept}/file; sort -o {kept}/file /etc/passwd; cat /etc/passwd 1<> {kept}/file",
        f'awk \'BEGIN {{ system("rm -r {kept}"); print 1 > "{kept}/awk"; print 1 | "cat > {kept}/pipe" }}\'',
        f'/usr/bin/python3 -c \'open("{kept}/python", "w")\'; /usr/bin/env touch {kept}/env; find {kept} -delete',
        f"set -C; cd {kept}; mkdir d; touch t; ln -s /etc l; chmod 777 file; mv file moved",
    )
    assert words("\n".join((*tries, f"{START} a=$(cat {kept}/file | tr ' ' -)"))) == ["a=as-it-was"]
    assert [p.name for p in kept.iterdir()] == ["file"]
    assert (kept / "file").read_text() == "as it was"


@needs_shell
def test_a_script_reaches_no_network_and_no_process():
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "60"]) as other:
        at = f"127.0.0.1/{server.getsockname()[1]}"
        script = (
            f"exec 3<> /dev/tcp/{at}; A=$?; echo x > /dev/udp/{at} && A=0\n"
            f"enable kill; kill -9 {other.pid}; builtin kill -9 {other.pid}; /bin/kill -9 {other.pid}; kill -9 -1\n"
            f"{START} reached=$A"
        )
        assert words(script) == ["reached=1"]
        assert other.poll() is None
        other.kill()


@needs_shell
def test_a_command_of_many_words_is_refused_at_once():
    """Each is looked for in the script: 50,000 took minutes."""
    many = " ".join(f"a{n}=1" for n in range(50_000))
    assert "line 1: the command has 50000 arguments; expected 2000 at most" in problem(f"{START} {many}")
    assert len(words(f"{START} {many[:10_000]}")) > 1000


def test_a_fork_bomb_and_an_endless_loop_are_stopped(monkeypatch: pytest.MonkeyPatch):
    bomb = problem("bomb() { bomb | bomb & }; bomb; wait\nwhile :; do (:); done")
    assert (
        "it started too many processes" in bomb or "it was stopped after some seconds" in bomb
    )  # a slow machine
    hog = "(x=$(printf '%100000000s' a); while :; do :; done) &"
    assert "its processes took too much memory" in problem(f"for i in 1 2 3 4 5 6 7 8; do {hog} done; wait")
    assert "stopped after this" in notes(
        f"{START} a=1\nset -m\n(while :; do :; done) & disown\n(sleep 9; :) &"
    )
    asked = shell.run_enclosed  # what follows computes until its limit, which is less here
    monkeypatch.setattr(
        shell, "run_enclosed", lambda request, folder: asked(request | {"cpu_seconds": 1}, folder)
    )
    assert "does it wait for something?" in problem(f"while :; do :; done\n{START} a=1")
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"whet-script-" in _read(p)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@needs_shell
def test_limits_cannot_be_raised_and_nothing_is_inherited():
    with open(os.devnull) as held:
        os.set_inheritable(held.fileno(), True)
        script = (
            "builtin ulimit -c unlimited && A=raised\nfor f in /proc/self/fd/*; do N+=${f##*/},; done\n"
            f"{START} a=$A${{A:-kept}}"
        )
        assert words(script) == ["a=kept"]


def test_no_secret_of_the_environment_is_noted_beside_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed leaves its notes behind; the script itself may still use the secret."""
    raw: list[bytes] = []
    noted = shell.note_of
    monkeypatch.setattr(shell, "note_of", lambda data, *more: raw.append(data) or noted(data, *more))
    text = "export GIVEN=1\npython3 -m verl.trainer.main_ppo a.b=${#WANDB_API_KEY}\n"
    launch = read_script(text, (), {"WANDB_API_KEY": "k" * 40, "PLAIN": "p" * 40})
    assert launch.overrides[-1].text == "a.b=40"
    assert launch.environment == {"GIVEN": "1"}
    assert raw
    assert all(b"p" * 40 in data and b"k" * 40 not in data for data in raw)


def test_who_is_told_a_key_is_in_no_note() -> None:
    launch = read_script("wandb login abcdef\npython3 plot.py\npython3 -m verl.trainer.main_ppo a.b=1\n")
    assert [said for _, said in launch.notes] == ["`python3 plot.py` is not run"]
