"""Building groups and refusing broken ones."""

import hashlib
import math
from collections.abc import Sequence

from titan_grpo.samples import Completion, Group, sound_reward


def request_seed(seed: int, index: int, sample: int, attempt: int, answers: int = 0) -> int:
    """63-bit seed of one request: the same numbers give the same seed everywhere, different ones unrelated seeds.

    ``answers``: the task's turns before it.
    """
    text = f"{seed}/{index}/{sample}/{attempt}" + (f"/{answers}" if answers else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def completion_fault(completion: Completion, max_tokens: int, finished: bool = True) -> str | None:
    """Why a completion must not be trained on (the name it is counted under), or None. One that is not ``finished`` may have
    nothing yet.

    One bad completion drops its whole group: advantages compare members, and a group short of the failures of one kind
    would be biased.
    """
    if finished and not completion.token_ids:
        return "empty"
    if len(completion.token_ids) != len(completion.logprobs) or len(completion.token_ids) > max_tokens:
        return "wrong_length"
    if not all(math.isfinite(x) for x in completion.logprobs):
        return "bad_logprob"
    if any(x > 0 for x in completion.logprobs):
        return "positive_logprob"
    if finished and completion.finish_reason not in ("stop", "length"):
        return "unfinished"
    return None if sound_reward(completion.reward) else "bad_reward"


def group_fault(group: Group, size: int, max_tokens: int) -> str | None:
    """First fault of a group's completions, ``wrong_size`` if some are missing, or None."""
    if len(group.completions) != size:
        return "wrong_size"
    return first_fault(group.completions, max_tokens)


def first_fault(completions: Sequence[Completion], max_tokens: int) -> str | None:
    """First fault among completions, or None."""
    return next((fault for c in completions if (fault := completion_fault(c, max_tokens))), None)
