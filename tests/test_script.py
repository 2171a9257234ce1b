"""Launch scripts are read, never run: the shell language, what counts as the launch, what is refused and why."""

from __future__ import annotations

import random
import shutil
import subprocess
import time

import pytest

from whet.dialects.launch import Found, Inside, system_of, unwrapped
from whet.dialects.script import Argument, Launch, read_script
from whet.dialects.shell.patterns import ends, matches, pattern, replaced
from whet.types import ConfigError

HOME = {"HOME": "/home/me", "USER": "me", "PWD": "/home/me/work"}
START = "python3 -m verl.trainer.main_ppo"


def launch(script: str, *arguments: str, **environment: str) -> Launch:
    return read_script(script, arguments, HOME | environment)


def words(script: str, *arguments: str, **environment: str) -> list[str]:
    return [word.text for word in launch(script, *arguments, **environment).overrides]


def problem(script: str, *arguments: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        launch(script, *arguments, **environment)
    return str(caught.value)


def notes(script: str, *arguments: str, **environment: str) -> str:
    return "\n".join(f"{line}: {text}" for line, text in launch(script, *arguments, **environment).notes)


CAT = "cat() { local l; while IFS= read -r l; do printf '%s\\n' \"$l\"; done; }\n"


def bash(script: str, *arguments: str) -> list[str]:
    """The words that a real bash gives the launch of a script written in this file."""
    program = shutil.which("bash")
    if program is None:
        pytest.skip("no bash on this machine to compare with")
    said = 'python3() { shift 2; (( $# )) && printf "%s\\1" "$@"; printf "\\2"; }\n' + CAT + script
    done = subprocess.run(
        [program, "-c", said, "run.sh", *arguments],
        env={"HOME": "/home/me", "USER": "me", "PATH": "/nowhere", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert "\2" in done.stdout, done.stderr
    return done.stdout.split("\2")[-2].split("\1")[:-1]


# ---------------------------------------------------------------- the language, as bash has it

SAME = {
    "plain": "L a=1 b.c=2",
    "lines": "L a=1 \\\n  b=2 \\\n  c=3",
    "a comment ends the words": "L a=1 \\\n # b=2 \\\n\nX=1",
    "a hash inside a word": "L a=x#y b#=1 # c=2",
    "single quotes": "L a='x  y $H \\n' b='[\"c\",\"d\"]'",
    "double quotes": 'X=7; L "a=x $X \\$X \\" \\\\ \\q \'s\'"',
    "ansi quotes": r"L a=$'x\ty\'z\x41\101\u00e9'",
    "concatenation": """X=m; L a="x"'y'z$X"w ${X}".b""",
    "escapes": r"L a=\$x\ y\"z\'",
    "empty words": "L '' \"\" a=''",
    "python lists, unquoted": "L a=['console','wandb'] b=[1,2]",
    "semicolons": "A=1;B=2;L a=$A b=$B;C=3",
    "assign and append": "A=x; A+=y; A+=${A}; L a=$A",
    "assign does not split": "A='x   y'; B=$A; L \"a=$B\" $B",
    "arrays": 'X=(a=1 "b=2 3"); X+=(c=4); L "${X[@]}" n=${#X[@]} x=${X[1]} y=${X[-1]} z=$X',
    "arrays over lines": 'X=(\n  a=1 # first\n\n  b=2\n  # none\n)\nL "${X[@]}"',
    "array star": 'X=(a "b c"); L "x=${X[*]}" ${X[*]} pre"${X[@]}"post',
    "empty arrays": 'X=(); L a=1 "${X[@]}" b=2 ${X[@]}',
    "array by index": "X[3]=c; X[1]=a; X[1]+=z; L ${X[@]} k=\"${!X[*]}\" n=${#X[1]}",
    "keyed arrays": 'declare -A M=([x]=1 ["y z"]=2); M[w]=3; K=x; L a=${M[$K]} b=${M["y z"]} c=${M[w]} ${#M[@]}',
    "array unset": "X=(a b c); unset 'X[1]'; L \"${X[@]}\" ${!X[@]}",
    "array slices": 'X=(a b c d); L "${X[@]:1:2}" "${X[@]: -1}" ${X[@]/b/Q} ${X[@]#a}',
    "positional": 'L $1 "$2" n=$# "$@" x$*',
    "positional shift": 'A=$1; shift; L a=$A "$@"; ',
    "positional set": 'set -- x "y z"; L "$@" $#',
    "positional slice": 'L "${@:2}" "${@:1:1}" ${!#}',
    "dollar at inside text": 'set -- x "y z" w; L "a=$@b" "<$*>"',
    "defaults": 'E=; S=s; L ${N:-d} ${N-d} ${E:-d} x${E-d} ${S:-d} ${S:+p} x${E:+p} ${E+p} x${N+p}',
    "default assigned": ': "${A:=x y}" ${B:=z}; L "a=$A" b=$B',
    "defaults nest": 'L ${A:-${B:-${C:-deep}}} "${A:-"in $HOME"}" ${A:-\'q r\'} ${A:-x y}',
    "default with quotes inside": "L \"${A:-['x']}\" \"${A:-\\$HOME}\" ${A:-[1,2]}",
    "default is split": 'L ${A:---x 1 --y 2} "${A:-a b}"',
    "default negative": "L ${A:--1} ${A:-}x",
    "prefixes": "P=/a/b/c.tar.gz; L ${P#*/} ${P##*/} ${P%.*} ${P%%.*} ${P#x} ${P##*[/]} ${P%'.gz'}",
    "replace": "P=a.b.c; L ${P/./-} ${P//./-} ${P/#a/X} ${P/%c/Z} ${P//.} ${P/[a-b]/Q} ${P//?/x} ${P/b*/-}",
    "cases": "P=aBc; L ${P^^} ${P,,} ${P^} ${P,} ${#P}",
    "substrings": 'P=abcdef; N=2; L ${P:1} ${P:1:2} ${P: -2} ${P:$N:1} ${P:0:-1} ${P:(-3):2} "x${P:6}"',
    "indirect": "A=B; B=v; L ${!A} ${!A:-d}",
    "arithmetic": "A=3; B=4; L $((A*B+1)) $(( (A + 1) * 2 )) $((A**2)) $((7/2)) $((-7/2)) $((-7%3)) $((1<<4))",
    "arithmetic more": "A=3; L $((A>2?10:20)) $((A==3&&A!=4)) $((!A)) $((0x1f)) $((010)) $((2#101)) $((~A)) $((${A}0))",
    "arithmetic assigns": "A=1; B=$((A++ + ++A)); ((A+=5)); let C=A*2; L $A $B $C",
    "arithmetic of arrays": "X=(5 6); I=1; L $((X[I]*2)) ${X[I]} ${X[$((I-1))]}",
    "arithmetic of an unset name": "N=1; L $((N+0))",
    "braces": "L a={1,2} {x,y}{1..3} {a..c} {01..03} {5..1..2} {x} {a:1,b:2} x{,y} '{a,b}' \"{a,b}\"",
    "braces in assignments stay": "A={1,2}; L $A b='{a:1}'",
    "splitting": 'A="  x  y "; L $A z$A "$A"',
    "splitting by IFS": 'A="x,y,,z"; IFS=,; L $A "${A}"; ',
    "join by IFS": 'X=(a b c); J=$(IFS=,; echo "${X[*]}"); L j=$J',
    "tilde": 'A=~/x; L ~/y a=~/z "b=~/w" ${N:-~/d} $A c.d=~/e A=~:~/q',
    "echo inside": 'A=$(echo "x  y"); B=`echo \\$A z`; L "a=$A" b=$(echo $A) "$B"',
    "printf inside": "A=$(printf '%03d-%s' 7 x); printf -v B '%s,' p q; L $A $B $(printf '%5.2f' 1.5)",
    "here-string": 'IFS=, read -r A B <<< "x,y,z"; read -ra X <<< "p q r"; L $A $B "${X[@]}"',
    "here-document": 'A=v\nB=$(cat <<EOF\nx $A $((1+1)) \\$A\nEOF\n)\nC=$(cat <<\'EOF\'\ny $A\nEOF\n)\nL "$B" "$C"',
    "here-document with tabs": 'A=$(cat <<-EOF\n\t\tx\n\tEOF\n); L "$A"',
    "if": "if [ $1 = a=1 ]; then X=yes; elif false; then X=no; else X=never; fi; L $X",
    "if else": "if [[ $1 == b* ]]; then X=1; else X=2; fi; L $X",
    "tests": """t() { if "$@"; then R+=1; else R+=0; fi; }
        t [ -z "" ]; t [ -n "" ]; t [ x != y ]; t [ 3 -lt 10 ]; t [ 3 -ge 10 ]; t [ ! x = x ]; t [ a = a -a b = c ]
        t [ a = b -o c = c ]; t [ "$N" ]; t test 1 -eq 1; L r=$R""",
    "double brackets": """A=abc; [[ $A == a*c && -n $A ]] && R+=1; [[ $A == "a*c" ]] && R+=2; [[ ! $A < b ]] || R+=3
        [[ ( $A = x || $A = abc ) && 2 -gt 1 ]] && R+=4; [[ $A ]] && R+=5; [[ A+1 -eq 1 ]]; [[ -z $N ]] && R+=6
        L r=$R""",
    "and or": "true && A=1 || A=2; false && B=1 || B=2; ! true || C=3; L $A $B x$C",
    "case": "case $1 in b|a=*) X=first;; *) X=second;; esac; L $X",
    "case through": "case x in x) A=1;;& y) A+=2;; [w-z]) A+=3;& q) A+=4;; *) A+=5; esac; L $A",
    "case quoted": "case 'a*' in 'a*') A=1;; esac; case abc in \"a\"*) A+=2;; esac; L $A",
    "for": 'for x in a "b c" $N {1..3}; do X+=("v=$x"); done; L "${X[@]}" x=$x',
    "for arguments": 'X=; for x; do X="$X$x,"; done; for y in "$@"; do Y+=("$y"); done; L $X "${Y[@]}"',
    "for count": "for ((i=0; i<4; i++)); do X+=$i; done; L $X $i",
    "for seq": "for i in $(printf '1\\n2\\n'); do X+=$i; done; L $X",
    "break and continue": """for i in 1 2 3 4 5; do [ $i = 2 ] && continue; [ $i = 4 ] && break; X+=$i; done
        for i in 1 2; do for j in 1 2; do [ $j = 2 ] && continue 2; X+=$i$j; done; done; L $X""",
    "while": "i=0; while [ $i -lt 3 ]; do i=$((i+1)); X+=$i; done; until (( i <= 0 )); do ((i--)); done; L $X $i",
    "argument loop": """M=; while [[ $# -gt 0 ]]; do case "$1" in
        a=*) A="${1#a=}"; shift ;; --m) M=$2; shift 2 ;; *) R+=("$1"); shift ;; esac; done; L a=$A m=$M "${R[@]}" """,
    "getopts": """set -- -m x -n v r; while getopts "m:n:v" o; do
        case $o in m) M=$OPTARG;; n) N=$OPTARG;; esac; done; L $M $N""",
    "functions": 'f() { local A=in; B=$1; echo "<$A $1 $#>"; }; A=out; C=$(f x y); f z >/dev/null; L $A $B "$C"',
    "function keyword": 'function f { return 3; }; f; A=$?; function g() { return; }; g && B=ok; L $A $B',
    "functions see callers": "g() { X=$Y; }; f() { local Y=in; g; }; Y=out; f; L $X $Y",
    "subshell": "A=1; (A=2; B=3); { C=4; }; L $A x${B-} $C",
    "pipes change nothing": "A=1; echo x | A=2; L $A",
    "launch in a subshell": "( A=2; L a=$A )",
    "launch in a function": 'go() { L "$@" b=2; }; go a=1',
    "launch in a loop": "for i in 1 2; do L a=$i; done",
    "redirections": "L a=1 > /dev/null 2>&1 b=2 < /dev/null; L c=1 2>/dev/null d=2",
    "declare": 'declare A=1 B="x y"; declare -a X=(p q); declare -i I=2+3; I+=1; readonly R=r; L $A "$B" ${X[@]} $I $R',
    "export of words": 'V=x=y; export "K=$V" ; L $K',
    "eval of a known text": 'C="A=1"; eval "$C; B=\\$A"; L $A $B',
    "set": "set -euo pipefail; set -x +x; L a=1",
    "unset": "A=1; B=2; unset A; L x${A-} $B",
    "status": "false; A=$?; true; L $A $?",
    "time and not": "time true; if ! false; then L a=1; fi",
    "dirname in text": 'P=/a/b/c; L ${P%/*} ${P##*/} $(cd /; echo "$PWD")',
    "carriage of quotes in arrays": """X=("a='[1]'" 'b="x"'); L "${X[@]}" ${X[@]}""",
    "nested substitution": 'L a=$(echo "$(echo "$(echo x)")") b="$(echo ")")" c=$(case x in x) echo y;; esac)',
    "double parentheses as subshells": "A=$( (echo x) ); L $A",
    "comments everywhere": "# one\nA=1 # two\n   # three\nif true; then # four\n L a=$A # five\nfi # six",
    "a word called in": "for in in a; do L $in; done; L in do done fi then",
    "escaped newline in quotes": 'L "a=x\\\ny" b=\'x\\\ny\'',
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_words_are_those_that_bash_makes(name):
    script = SAME[name].replace("L ", START + " ")
    arguments = ["a=1", "b 2"]
    assert words(script, *arguments) == bash(script, *arguments)


def test_a_launch_and_its_words():
    found = launch(
        "#!/usr/bin/env bash\nset -x\nexport VLLM=1 OTHER=$UNSET\nDATA=(\n  data.train_batch_size=8\n)\n"
        "HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo --config-path=conf --config-name ppo.yaml \\\n"
        '    "${DATA[@]}" +a.b=1 ++c=2 ~d group@pkg=x \\\n    $@',
        "trainer.nnodes=2",
    )
    assert (found.system, found.module, found.line) == ("verl", "verl.trainer.main_ppo", 7)
    assert (found.config_path, found.config_name, found.config_file) == ("conf", "ppo.yaml", None)
    assert found.overrides == (
        Argument("data.train_batch_size=8", 5),
        Argument("+a.b=1", 8),
        Argument("++c=2", 8),
        Argument("~d", 8),
        Argument("group@pkg=x", 8),
        Argument("trainer.nnodes=2", 0),
    )
    assert found.environment == {"VLLM": "1", "HYDRA_FULL_ERROR": "1"}
    assert found.others == ()


# ---------------------------------------------------------------- what is started

STARTS = {
    "python -m verl.trainer.main_ppo a=1": ("verl", "verl.trainer.main_ppo", []),
    "python3.11 -u -X dev -m verl.trainer.sft_trainer a=1": ("verl", "verl.trainer.sft_trainer", ["-u", "-X", "dev"]),
    "python verl/trainer/main_ppo.py a=1": ("verl", "verl.trainer.main_ppo", []),
    "python3 /opt/code/verl/trainer/main_eval.py a=1": ("verl", "verl.trainer.main_eval", []),
    "python3 -m recipe.dapo.main_dapo a=1": ("verl", "recipe.dapo.main_dapo", []),
    "python3 -m verl.experimental.x.fully_async_main a=1": ("verl", "verl.experimental.x.fully_async_main", []),
    "torchrun --standalone --nnodes=1 --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer a=1": (
        "verl",
        "verl.trainer.fsdp_sft_trainer",
        ["--standalone", "--nnodes=1", "--nproc_per_node", "8"],
    ),
    "python -m torch.distributed.run --nnodes 2 -m verl.trainer.sft_trainer a=1": (
        "verl",
        "verl.trainer.sft_trainer",
        ["--nnodes", "2"],
    ),
    "accelerate launch --num_processes 8 --multi_gpu -m verl.trainer.sft_trainer a=1": (
        "verl",
        "verl.trainer.sft_trainer",
        ["--num_processes", "8", "--multi_gpu"],
    ),
    "deepspeed --num_gpus 8 my.py actor_rollout_ref.model.path=x": ("verl", "my.py", ["--num_gpus", "8"]),
    "uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base a=1": (
        "skyrl",
        "skyrl.train.entrypoints.main_base",
        ["--isolated", "--extra", "fsdp"],
    ),
    "uv -v run --frozen --with 'a==1' -- python -m skyrl_train.entrypoints.main_base a=1": (
        "skyrl",
        "skyrl_train.entrypoints.main_base",
        ["--frozen", "--with", "a==1"],
    ),
    "uv run examples/train/maze/entrypoint.py a=1": ("skyrl", "examples.train.maze.entrypoint", []),
    "uv run -m examples.algorithms.dapo.main_dapo a=1": ("skyrl", "examples.algorithms.dapo.main_dapo", []),
    "uv run -m mine.run trainer.policy.model.path=x": ("skyrl", "mine.run", []),
    "python my/train.py algorithm.adv_estimator=grpo": ("verl", "my/train.py", []),
    "python train.py x=1 y.z=2": ("", "train.py", []),
    "ray job submit --address=x --runtime-env=e.yaml -- python3 -m verl.trainer.main_ppo a=1": (
        "verl",
        "verl.trainer.main_ppo",
        ["job", "submit", "--address=x", "--runtime-env=e.yaml"],
    ),
    "nohup env A=1 time python -m verl.trainer.main_ppo a=1 &": ("verl", "verl.trainer.main_ppo", []),
    "timeout -k 5 3h stdbuf -oL python -m verl.trainer.main_ppo a=1": (
        "verl",
        "verl.trainer.main_ppo",
        ["-k", "5", "3h", "-oL"],
    ),
    "srun --nodes 2 --gres gpu:8 bash -c 'python -m verl.trainer.main_ppo a=1'": ("verl", "verl.trainer.main_ppo", []),
    "exec conda run -n env python -m verl.trainer.main_ppo a=1": ("verl", "verl.trainer.main_ppo", ["-n", "env"]),
    "/usr/bin/python3 -m verl.trainer.main_ppo a=1 |& tee log": ("verl", "verl.trainer.main_ppo", []),
    "cd x && ray start --head && python3 -m verl.trainer.main_ppo a=1 || exit 1": ("verl", "verl.trainer.main_ppo", []),
    "bash -lc \"cd /x; python3 -m verl.trainer.main_ppo a=1\"": ("verl", "verl.trainer.main_ppo", []),
    "OUT=$(python3 -m verl.trainer.main_ppo a=1)": ("verl", "verl.trainer.main_ppo", []),
}  # fmt: skip


@pytest.mark.parametrize("command", STARTS)
def test_what_starts_a_trainer(command):
    found = launch(command)
    assert (found.system, found.module, [w.text for w in found.others]) == STARTS[command]
    assert found.overrides


def test_launchers_of_cosmos_and_trinity():
    found = launch("cosmos-rl --config configs/a.toml --policy 2 tools/data.py")
    assert (found.system, found.module, found.config_file) == ("cosmos", "cosmos-rl", "configs/a.toml")
    assert [w.text for w in found.others] == ["--policy", "2", "tools/data.py"]
    assert found.overrides == ()
    found = launch("A=b.yaml\nuv run trinity run --config=$A --plugin-dir p 2>&1 | tee log &")
    assert (found.system, found.module, found.config_file) == ("trinity", "trinity run", "b.yaml")
    assert launch("trinity run -c b.yaml").config_file == "b.yaml"
    assert launch("python -m trinity.cli.launcher run --config b.yaml").system == "trinity"


def test_the_last_launch_counts_and_the_others_are_told():
    script = (
        "python3 prepare.py --out x\npython3 -m verl.trainer.main_generation a=1\n"
        "python3 -m verl.trainer.main_ppo b=2\npython3 -m verl.model_merger merge\npython3 plot.py c=3 d=4\n"
    )
    found = launch(script)
    assert (found.module, found.line) == ("verl.trainer.main_ppo", 3)
    assert notes(script).splitlines() == [
        "1: `python3 prepare.py --out x` is not run",
        "2: starts verl.trainer.main_generation, too; the last launch counts",
    ]


def test_no_trainer_says_what_was_seen():
    said = problem("python3 prepare.py\npip install x\nbash other.sh a=1\n")
    assert "`python3 prepare.py` in line 1" in said
    assert "`bash other.sh a=1` is another script, which is not read (line 3)" in said
    assert "no command that starts Python" in problem("echo hello")
    assert "no command that starts Python" in problem("")


def test_an_end_before_the_launch_is_told_with_what_the_script_says():
    script = 'if [ "$#" -lt 1 ]; then\n  echo "Usage: run.sh <gpus>"\n  exit 1\nfi\n' + START + " n=$1"
    assert "line 3: the script ends here, after it says `Usage: run.sh <gpus>`" in problem(script)
    assert words(script, "8") == ["n=8"]
    said = problem(f": ${{DIR:?set the folder}}\n{START} a=$DIR")
    assert "line 1: DIR: set the folder; give it as DIR=value before the script" in said
    assert words(f": ${{DIR:?set the folder}}\n{START} a=$DIR", DIR="x") == ["a=x"]


# ---------------------------------------------------------------- what is not known


def test_an_unset_variable_that_arrives_is_named_with_its_line():
    said = problem(f"A=$DATA/x\nB=$A\n{START} \\\n  p=$B q=1")
    assert said == (
        "line 4: `p=${DATA}/x` needs $DATA, which is not set; "
        "give it as DATA=value before the script or as an argument"
    )
    assert words(f"A=$DATA/x\nB=$A\n{START} \\\n  p=$B q=1", DATA="/d") == ["p=/d/x", "q=1"]
    assert "give the script its argument 1" in problem(f"{START} n=$1")
    assert "line 2: `n=16`" in problem(f"N=$((GPUS + 16))\n{START} n=$N") or "needs $GPUS" in problem(
        f"N=$((GPUS + 16))\n{START} n=$N"
    )
    assert "(line 1 reads a file that may set it)" in problem(f"source env.sh\n{START} n=$GPUS")


def test_an_unset_variable_that_does_not_arrive_is_no_matter():
    script = f'export KEY=$SECRET PATH=$PATH:/x\nif [ -z "$MODEL" ]; then M=none; fi\nA=$B\n{START} m=$M'
    assert words(script) == ["m=none"]
    assert launch(script).environment == {}


def test_a_word_that_is_only_an_unset_variable_is_left_out_as_bash_does():
    assert words(f"{START} a=1 $EXTRA") == ["a=1"]
    assert words(f'A="$A a=1"; A="$A b=2"\n{START} $A') == ["a=1", "b=2"]
    assert "$EXTRA is not set: the word is left out" in notes(f"{START} a=1 $EXTRA")
    assert "needs $EXTRA" in problem(f"set -u\n{START} a=1 $EXTRA")
    assert "needs $EXTRA" in problem(f'{START} a=1 "$EXTRA"')


def test_an_unset_command_is_named():
    assert "needs $COMMAND" in problem("$COMMAND data.train_files=x data.val_files=y")
    assert "needs $PYTHON" in problem("$PYTHON -m verl.trainer.main_ppo a=1")
    script = "$COMMAND data.train_files=x"
    assert launch(script, COMMAND="torchrun -m verl.trainer.sft_trainer").module == "verl.trainer.sft_trainer"


def test_nothing_is_taken_from_this_process(monkeypatch):
    monkeypatch.setenv("WHET_TEST_DATA", "/secret")
    assert "needs $WHET_TEST_DATA" in problem(f"{START} p=$WHET_TEST_DATA")
    with pytest.raises(ConfigError, match="needs \\$HOME"):
        read_script(f"{START} p=~/x q=$HOME")


def test_stand_ins_are_told_only_where_they_arrive():
    script = f"A=$(date +%Y%m%d)\nB=$(nproc)\n{START} name=run_$A"
    assert words(script) == ["name=run_date"]
    assert notes(script) == "1: $(date +%Y%m%d): taken to be `date`"


def test_what_is_known_of_this_place():
    script = (
        'D=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)\ncd sub\nW=$(whoami)\n'
        f"{START} a=$D b=$(pwd) c=$(basename /x/y.sh .sh) d=$(realpath ../z) e=$(dirname /p/q) f=$W g=$0"
    )
    found = read_script(script, (), HOME, name="/code/scripts/run.sh")
    assert [w.text for w in found.overrides] == [
        "a=/code",
        "b=/home/me/work/sub",
        "c=y",
        "d=/home/me/work/z",
        "e=/p",
        "f=me",
        "g=/code/scripts/run.sh",
    ]
    assert found.notes == ()
    assert "$0, the path of the script: taken to be `script.sh`" in notes(f"{START} a=$0")


def test_the_output_of_a_program_is_refused_where_it_arrives():
    script = f"N=$(nvidia-smi -L | wc -l)\nM=$(jq .x f.json)\n{START} n=$((N * 2))"
    said = problem(script)
    assert said.startswith("line 3: `n=")
    assert "line 1: what `wc -l` prints is not known: it is not run" in said
    assert words(script.replace("$((N * 2))", "1")) == ["n=1"]
    assert "read" in problem(f"read -p 'how many? ' N\n{START} n=$N")
    assert "which files match is not looked up" in problem(f"for f in *.toml; do {START} c=$f; done")


def test_a_probe_for_an_npu_fails():
    script = f"D=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\n{START} d=$D"
    assert words(script) == ["d=gpu"]
    assert "import torch_npu" in notes(script)


def test_both_ways_are_looked_at_where_a_condition_is_not_known():
    script = (
        "A=1; B=1\nif nvidia-smi | grep -q H100; then\n  A=2; B=2; C=(x)\nelse\n  B=2; C=(y)\nfi\n" + START
    )
    assert words(script + " b=$B") == ["b=2"]
    said = problem(script + " b=$B a=$A")
    assert "line 7: `a=[?]` is not known: line 2: it depends on `grep -q H100` in line 2" in said
    assert "it depends on" in problem(script + ' "${C[@]}"')


def test_a_way_that_ends_the_script_is_not_taken():
    script = f"command -v nvcc >/dev/null || {{ echo none; exit 1; }}\nnvidia-smi || exit 1\n{START} a=1"
    assert words(script) == ["a=1"]
    assert "`command -v nvcc` is not known here; it is taken to succeed" in notes(script)


def test_which_of_two_trainers_is_asked():
    script = "if nvidia-smi; then\n{0} a=1\nelse\n{0} a={1}\nfi".format(START, "{}")
    assert words(script.format(1)) == ["a=1"]
    said = problem(script.format(2))
    assert "line 4: which trainer is started is not known" in said
    assert "line 1 decides" in said
    one = f"if nvidia-smi; then\n{START} a=1\nfi"
    assert words(one) == ["a=1"]
    assert "a trainer is started only then" in notes(one)


def test_files_are_taken_not_to_be_there():
    script = f"if [ ! -f $HOME/x.parquet ]; then\n  python3 prep.py\n  D=new\nelse\n  D=old\nfi\n{START} d=$D"
    assert words(script) == ["d=new"]
    assert "`! -f /home/me/x.parquet` is not known here; it is taken to succeed" in notes(script)
    found = read_script(script, (), HOME, exists=lambda path: path == "/home/me/x.parquet")
    assert [w.text for w in found.overrides] == ["d=old"]
    assert words(f"[ -d data ] || exit 1\n[[ -f y ]] && A=1\n{START} a=x$A".replace("$A", "${A:-}")) == [
        "a=x"
    ]


def test_loops_that_wait_are_left():
    script = (
        "while ! curl -s localhost; do sleep 1; done\nuntil ray status; do sleep 5; done\n"
        "while true; do if nc -z h 1; then break; fi; sleep 1; done\n"
        f"for i in {{1..60}}; do if curl x; then break; fi; sleep 1; done\n{START} a=1 &\n"
        "while true; do sleep 60; done\nwait"
    )
    assert words(script) == ["a=1"]


def test_a_function_that_may_have_returned_is_not_known():
    script = f"has() {{ if nvidia-smi; then return 0; fi; return 1; }}\nif has; then A=1; else A=2; fi\n{START} a=$A"
    assert "it depends on `nvidia-smi`" in problem(script)


def test_a_file_that_the_script_writes_is_told_where_the_launch_reads_it():
    script = "cat <<EOF > conf/run.toml\n[train]\nsteps = 1\nEOF\ncosmos-rl --config conf/run.toml"
    assert "1: the script writes conf/run.toml, which the launch reads: it is not written" in notes(script)
    assert "other.toml" not in notes(script.replace("> conf/run.toml", "> other.toml"))


def test_programs_that_may_matter_are_told_and_others_are_not():
    script = (
        "mkdir -p x; pip install y; ray stop; sleep 3; wget z; export A=1; git clone g; trap 'x' EXIT; ulimit -n 9\n"
        f"./prepare --data d\nsource venv/bin/activate\n{START} a=1\n./after"
    )
    assert notes(script).splitlines() == [
        "2: `./prepare --data d` is not run",
        "3: `source venv/bin/activate` is not read: what it sets is not known",
    ]


# ---------------------------------------------------------------- errors

WRONG = {
    "A=1\nL 'a=1\nb=2": "line 2: the quote ' is not closed",
    'A=1\n\nL "a=1': 'line 3: the quote " is not closed',
    "L a=$(echo x": "line 1: expected `)` for the `(` in line 1, found the end of the text",
    "L a=`echo": "line 1: the backtick ` is not closed",
    "L a=${A": "line 1: ${A...}: expected } or an operator, found the end",
    "L ${}": "line 1: ${}: expected the name of a variable",
    "if true; then\n L a=1\n": "line 3: expected `fi` for the `if` in line 1, found the end of the text",
    "for x in a; L $x": "line 1: expected `do` for the `for` in line 1, found `p`",
    "while true; do L a=1": "line 1: expected `done` for the `while` in line 1, found the end of the text",
    "case x in\n a) L b=1": "line 2: expected `;;` for the `case` in line 1, found the end of the text",
    "L a=1\nfi": "line 2: `fi` is not expected here",
    "L a=1 )": "line 1: `)` is not expected here",
    "L a=(1)": "line 1: `(` is not expected here; quote it if it is text",
    "X=(a b\nL a=1": "line 2: expected `)` for the `(` in line 1, found the end of the text",
    "select x in a; do L $x; done": "line 1: `select` is not understood",
    "[[ -n x ": "line 1: expected `]]` for the `[[` in line 1, found the end of the text",
    "[[ x == @(a|b) ]]": "`(`",
    "| L a=1": "line 1: expected a command, found '|'",
    "{ L a=1\n": "line 2: expected `}` for the `{` in line 1, found the end of the text",
    "L a=1 >": "line 1: expected a word, found the end",
}


@pytest.mark.parametrize("script", WRONG)
def test_what_is_no_shell_is_an_error_with_its_line(script):
    assert WRONG[script] in problem(script.replace("L ", START + " "))


REFUSED = {
    "L a=${A@Q}": "${A@...} is not understood",
    "L a=$((1.5 * 2))": "is no whole-number arithmetic",
    "L a=$((1 / 0))": "division by 0",
    "L a=$((A))": "made of one another without end",
    "L a=<(echo x)": "`<(`",
    "L a=$(printf '%d' 1.5)": "printf %d of `1.5`",
}


@pytest.mark.parametrize("script", REFUSED)
def test_what_is_not_understood_is_refused_where_it_arrives(script):
    said = problem("A=A\n" + script.replace("L ", START + " "))
    assert REFUSED[script] in said or "`<`" in said or "(" in said
    assert "line 2" in said
    harmless = "A=A\n" + script.replace("L a", "B") + f"\n{START} a=1"
    if "<(" not in script:
        assert words(harmless) == ["a=1"]


# ---------------------------------------------------------------- bounds and hostile text


def test_bounds_are_errors_and_not_hangs():
    begun = time.monotonic()
    assert "more than 1 MiB" in problem("#" * (2**20 + 1))
    assert "nest deeper than 50" in problem("( " * 100 + START + ") " * 100)
    assert "nest deeper than 50" in problem("echo " + "$(echo " * 100 + "x" + ")" * 100)
    assert "nest deeper than 50" in problem("echo " + "${a:-" * 100 + "x" + "}" * 100)
    assert "does a function call itself?" in problem("f() { f; }; f")
    assert "rounds" in problem("while true; do i=$((i+1)); done")
    assert "steps" in problem("for ((i=0;;i++)); do for j in {1..900}; do :; done; done")
    assert "rounds" in problem("for ((i=0;;i++)); do :; done")
    assert "MiB of text" in problem("A=0123456789abcdef\n" + "A=$A$A$A$A\n" * 14 + START)
    assert "1000 words" in problem("L {1..1001}")
    assert "1000 words" in problem("L " + "{a,b}" * 12)
    assert "too much" in problem("A=" + "x" * 100_000 + "\nB=${A//x/$A}")
    assert "MiB of text" in problem("A=" + "x" * 100_000 + "\nB=" + "$A" * 500)
    assert "MiB of text" in problem("printf -v A '" + "%9999s" * 500 + "'")
    assert "too much work" in problem("A=" + "x" * 100_000 + "\nB=${A//[a-x]*y/z}")
    assert "numbers" in problem("for i in $(seq 1 999999); do :; done")
    assert time.monotonic() - begun < 30


def test_long_text_is_read_in_time():
    begun = time.monotonic()
    words("A=" + "x" * 500_000 + f"\n{START} a=1")
    for hostile in (
        "$((" * 300,
        "`" * 1001,
        "{" * 900,
        "${" * 200_000,
        "'" * 99_999,
        "\\" * 300_001,
        "((" * 400,
    ):
        problem(hostile + "\n" + "x" * 100_000)
    assert time.monotonic() - begun < 30


def test_a_pattern_takes_time_by_its_length():
    stars = pattern([("a*" * 200 + "b", False)])
    begun = time.monotonic()
    assert not matches(stars, "a" * 2_000)
    assert time.monotonic() - begun < 10


def test_a_loop_after_the_launch_ends_the_reading():
    assert words(f"{START} a=1\nfor ((i=0;;i++)); do :; done\npython3 -m verl.trainer.main_eval b=2") == [
        "a=1"
    ]


def test_nothing_is_ever_run(tmp_path):
    mark = tmp_path / "ran"
    script = (
        f"A=$(touch {mark})\n`touch {mark}`\ntouch {mark}\necho x > {mark}\neval 'touch {mark}'\n"
        f"bash -c 'touch {mark}'\npython3 -c 'open(\"{mark}\", \"w\")'\n: <(touch {mark})\nB=${{C:-$(rm -rf /)}}\n"
        f"[ -f $(touch {mark}) ]\n((x[$(touch {mark})]))\nsource {mark}\ncat <<EOF\n$(touch {mark})\nEOF\n"
        f"{START} a=1 $(rm -rf /) > {mark}"
    )
    assert words(script) == ["a=1"]
    assert list(tmp_path.iterdir()) == []


def test_random_text_is_read_or_refused():
    pieces = [
        *"()[]{}<>;&|$`\"'\\#!*?=+-~:@%/^, \n\t", "$((", "${", "$(", "))", "fi", "if ", "do", "done", "case x in",
        "esac", "for x in", "while ", "<<EOF\n", "EOF\n", "A=", "X+=(", "[[ ", " ]]", "function f", "f()", ";;",
        "python -m verl.trainer.main_ppo", "a=1", "$A", "${A:-x}", "\u00e9", "\x01", "\ufeff", "10", "local ",
    ]  # fmt: skip
    draw = random.Random(7)
    for _ in range(3_000):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 40)))
        try:
            assert isinstance(launch(text, "x"), Launch)
        except ConfigError:
            continue
    for _ in range(300):
        data = draw.randbytes(draw.randrange(1, 200))
        with pytest.raises(ConfigError):
            launch(data.decode("latin-1"))
        with pytest.raises(ConfigError):
            launch(data.decode("utf-8", "surrogateescape"))


def test_characters_that_no_script_has():
    assert "line 2: holds a character that no script has" in problem("A=1\nB=\U00100000")
    assert "line 1: holds a character" in problem("A\0=1")
    assert "an argument holds a character" in problem(START, "a=\U00100001")
    assert words(f"{START} a=1\r\n") == ["a=1"]
    assert words(f"\ufeff{START} a=\u00e9\U0001f600") == ["a=\u00e9\U0001f600"]


# ---------------------------------------------------------------- the parts


def test_patterns():
    def of(text: str) -> tuple:
        return pattern([(text, False)])

    assert matches(of("a*c"), "abbc")
    assert not matches(of("a?c"), "ac")
    assert matches(of("[!a-c]x[]]"), "dx]")
    assert matches(of("[[:digit:]][[:upper:]]"), "7Q")
    assert matches(of("[a"), "[a")
    assert matches(pattern([("a*", True), ("*", False)]), "a*bc")
    assert ends(of("*a"), "bab a") == {2, 5}
    assert replaced(of("b*"), "abcb", "X", "/") == "aX"
    assert replaced((), "abc", "X", "/#") == "Xabc"


def test_wrappers_and_systems():
    assert unwrapped(["bash", "-ec", "x"]) == Inside(2)
    assert unwrapped(["bash", "-x", "a.sh"]) == Found(0)
    assert unwrapped([]) == Found(0)
    for command in STARTS:
        for n in range(len(command.split())):
            unwrapped(command.split()[:n])
    assert system_of("verl.utils.x", ["actor_rollout_ref.a=1"]) is None
    assert system_of("examples.train.main_x", ["actor_rollout_ref.a=1"]) == ("verl", True)
    assert system_of("prepare.py", ["--out", "x"]) is None
    assert system_of("prepare.py", []) is None
