"""The completions of a run as texts, token by token."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from titan_grpo.observe.shown import ShownStep
from titan_grpo.views.run import Run

TOKENS = 60_000
"""Of completions on a page, a megabyte and a half; a longer run shows the steps that lie evenly
over it."""

PROMPT_TOKENS = 400
"""Of a prompt that are shown: its end."""

Decode = Callable[[Sequence[int]], str]


def decoder(folders: Sequence[Path]) -> Decode:
    """Decode with the first of ``folders`` that has a tokenizer.json; without one (or without the
    package tokenizers) ids are shown as numbers."""
    path = next((f / "tokenizer.json" for f in folders if (f / "tokenizer.json").is_file()), None)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        path = None
    if path is None:
        return lambda ids: "".join(f"⟨{token}⟩" for token in ids)
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def tokenizers_of(run: Run, folder: Path) -> list[Path]:
    """Where a run's tokenizer may be: where the run found it, and beside its trained weights."""
    return [*(Path(step.tokenizer) for step in run.samples[-1:]), folder / "hf"]


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """One text per token; together they are the decoded whole.

    A token that is part of a character, or a word that gets its space from the word before, has its
    text only beside its neighbours: each token's text is what the decoded end grows by. Parts of a
    character belong to the token that completes it.
    """
    out = []
    known = done = 0
    for end in range(1, len(ids) + 1):
        before, whole = decode(ids[known:done]), decode(ids[known:end])
        if whole.endswith("\ufffd") and end < len(ids):
            out.append("")
        else:
            out.append(whole[len(before) :])
            known, done = done, end
    return out


def table(steps: Sequence[ShownStep], decode: Decode, limit: int = TOKENS) -> list[dict[str, Any]]:
    """Rows of the page's table: [text, gap in thousandths of a nat or None] per token.

    Steps are left out evenly until at most ``limit`` tokens are left; the first stays.
    """
    every = 1
    while len(steps[::every]) > 1 and _tokens(steps[::every]) > limit:
        every += 1
    return [
        {
            "step": step.step,
            "reward": float(f"{c.reward:.4g}"),
            "first": c.version_first,
            "last": c.version_last,
            "stale": step.version - c.version_first,
            "server": c.server.split("://")[-1],
            "gap": float(f"{c.gap:.4g}"),
            "prompt": decode(c.prompt[-PROMPT_TOKENS:]),
            "tokens": [
                [text, None if own is None else round(abs(own - engine) * 1000)]
                for text, own, engine in zip(
                    pieces(c.tokens, decode), c.trainer, c.engine, strict=True
                )
            ],
        }
        for step in steps[::every]
        for c in step.completions
    ]


def _tokens(steps: Sequence[ShownStep]) -> int:
    return sum(len(c.tokens) for step in steps for c in step.completions)
