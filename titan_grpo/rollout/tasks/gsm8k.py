"""Grade-school mathematics from rows in the form of GSM8K: {"question": ..., "answer": "... ####
42"}. A task of a reward function, and an example of one."""

from typing import Any

from titan_grpo.rollout.tasks.base import TaskOptions
from titan_grpo.rollout.tasks.functions import FunctionOptions, FunctionTask

PROMPT = "{question}\nThink step by step and put the final answer in \\boxed{{}}."
ANSWER_MARK = "####"


def correct(completions: list[Any], answer: list[str]) -> list[float]:
    """1 where the completion's final answer equals the reference, by math-verify; else 0."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    # Without math-verify's own timeouts: they are made with SIGALRM, which only a main thread can
    # have.
    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        number = reference.rpartition(ANSWER_MARK)[2].strip().replace(",", "")
        gold = parse(f"${number}$", parsing_timeout=None)
        said = parse(completion, parsing_timeout=None)
        rewards.append(float(verify(gold, said, timeout_seconds=None)))
    return rewards


def gsm8k(options: TaskOptions) -> FunctionTask:
    """``rollout.task = "gsm8k"``: the questions of ``rollout.task_path`` in the model's chat
    template."""
    reward = f"{__name__}:{correct.__name__}"
    return FunctionTask.load(
        FunctionOptions([reward], dataset=options.path, prompt=PROMPT, seed=options.seed)
    )
