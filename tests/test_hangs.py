"""Of processes that wait for one another, the one is named that the others wait for."""

from __future__ import annotations

import pytest

from whet.guard.hangs import UNSEEN, Seen, blame

COLLECTIVE = """Thread 0x00007f3d1affd640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f3d5a8c7740 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/lib/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/src/whet/training/torch.py", line 300 in update
  File "/src/whet/training/rank.py", line 321 in <module>
"""
LOSS = (
    COLLECTIVE.replace("/lib/torch/distributed/distributed_c10d.py", "/home/me/loss.py")
    .replace("line 2810 in all_reduce", "line 7 in sleepy")
    .replace("/lib/torch/distributed/c10d_logger.py", "/src/whet/training/passes.py")
)
ALL = COLLECTIVE + '\nThread 0x1 (most recent call first):\n  File "/home/me/loss.py", line 7 in sleepy\n'
"""Its other threads do not matter."""
NOTHING = "(it does not answer: it is stopped, by SIGSTOP or a debugger; send SIGCONT to resume it)"


@pytest.mark.parametrize(
    ("state", "stack", "said"),
    [
        ("T", NOTHING, "rank 1 of 2 is stopped (SIGSTOP) while doing: update policy; "),
        ("T", COLLECTIVE, "rank 1 of 2 is stopped (SIGSTOP) while doing: update policy; "),
        (
            "D",
            NOTHING,
            "rank 1 of 2 waits in the kernel for a disk or a device while doing: update policy; ",
        ),
        (
            UNSEEN,
            "",
            "rank 1 of 2 cannot be reached: its machine, or the actor process on that machine, does not answer ",
        ),
        ("", "", "rank 1 of 2 has ended while doing: update policy; "),
        ("S", LOSS, "rank 1 of 2 hangs in sleepy (loss.py:7) while doing: update policy; "),
        ("R", "", "rank 1 of 2 hangs while doing: update policy; "),
    ],
)
def test_who_the_others_wait_for(state: str, stack: str, said: str) -> None:
    one, two = Seen("update policy", "S", ALL), Seen("update policy", state, stack)
    for seen in ({0: one, 1: two}, {1: two, 0: one}):
        text = blame(seen, "for 5 s", kind="rank", of="2")
        assert text.startswith(said)
        assert (
            "; rank 0 waits for it in all_reduce (distributed_c10d.py:2810); for 5 s\nrank 1: update policy"
            in text
        )
        assert text.index("\nrank 1: ") < text.index("\nrank 0: ")


def test_where_all_are_alike_all_are_named() -> None:
    for stack in (COLLECTIVE, LOSS):
        text = blame({n: Seen("x", "S", stack) for n in range(2)}, "for 5 s", kind="rank", of="4")
        where = "all_reduce (distributed_c10d.py:2810)" if stack == COLLECTIVE else "sleepy (loss.py:7)"
        assert text.startswith(f"rank 0 of 4 hangs in {where} while doing: x; rank 1 of 4 hangs in {where}")
        assert "waits for it" not in text
