"""Grade-school mathematics from a JSONL file in the form of GSM8K: {"question": ..., "answer": "...
#### 42"}."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout.tasks.base import Codec, TaskOptions
from titan_grpo.samples import Prompt

TEMPLATE = (
    "Question: {question}\nThink step by step and put the final answer in \\boxed{{}}.\nAnswer:"
)
ANSWER_MARK = "####"


class Gsm8k:
    """Reward 1 where the completion's final answer equals the reference, by math-verify; else 0."""

    def __init__(self, options: TaskOptions) -> None:
        self._seed = options.seed
        self._rows = _read(options.path)
        self._order: tuple[int, list[int]] = (-1, [])

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Row of a per-epoch shuffle seeded with (seed, epoch): every row once per epoch."""
        epoch, place = divmod(index, len(self._rows))
        if self._order[0] != epoch:
            order = list(range(len(self._rows)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        question, answer = self._rows[self._order[1][place]]
        return Prompt(index, codec.encode(TEMPLATE.format(question=question)), {"answer": answer})

    def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """0 or 1."""
        from math_verify import parse, verify  # type: ignore[import-untyped]

        # Without math-verify's own timeouts: they are made with SIGALRM, which only a main thread
        # can have.
        gold = parse(f"${prompt.payload['answer']}$", parsing_timeout=None)
        return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


def _read(path: str) -> list[tuple[str, str]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"rollout.task_path must be a readable JSONL file, got {path!r} ({error.strerror})"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append(
                (
                    str(row["question"]),
                    str(row["answer"]).rpartition(ANSWER_MARK)[2].strip().replace(",", ""),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}:{number} must be a JSON object with "question" and "answer": {error!r}'
            ) from error
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows
