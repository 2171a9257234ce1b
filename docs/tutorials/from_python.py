"""Train from Python on rows that are made here, look at every step, and evaluate the checkpoint."""

import whet

words = ["abu", "eno", "iba", "ost", "ulm", "arno", "enis", "otra"]
rows = [{"prompt": f"{word}>", "answer": word[0]} for word in words]


def first_letter(response: str, task: whet.Task) -> float:
    return float(response == task.answer)


rewards_by_step = []
result = whet.train(
    "docs/tutorials/vowels.yaml",
    data={"train": rows[2:], "eval": rows[:2], "max_prompt_tokens": 8},
    rewards=first_letter,
    train={"steps": 8},
    run_dir="runs/from_python",
    on_step=lambda row: rewards_by_step.append(row["reward/mean"]),
)
print("mean reward of each step:", [round(reward, 2) for reward in rewards_by_step])

(metrics,) = whet.evaluate(result.run_dir, rewards=first_letter)
print("accuracy of the checkpoint:", metrics["eval/accuracy"])
