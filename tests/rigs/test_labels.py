"""Claims about the versions behind a completion: true ones are explained, others are not."""

import random
from dataclasses import dataclass

import pytest

from tests.rigs.labels import Checker, Claim, Fit, Models, PrefixCache
from titan_grpo.titan.tiny import write_tiny_model

PROMPT = [random.Random(1).randrange(4, 100) for _ in range(20)]
TOKENS = [random.Random(2).randrange(4, 100) for _ in range(12)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("labels")
    return Models(
        {v: write_tiny_model("qwen3", folder / str(v), 40 + v, std=0.05) for v in (3, 4, 5)}
    )


@dataclass(frozen=True)
class Made:
    """How a completion came about: an old prefix of the prompt, and the version of each token.
    ``replaced``: after the first token, all KV of the prompt is the old version's."""

    old: int
    prefix: int
    versions: tuple[int, ...]
    replaced: bool = False


def logprobs(models: Models, made: Made) -> list[float]:
    """Token by token, as an engine does it."""
    cache, values = None, []
    if made.prefix:
        _, cache = models.feed(made.old, PROMPT[: made.prefix], None)
    rows, cache = models.feed(made.versions[0], PROMPT[made.prefix :], cache)
    if made.replaced:
        _, cache = models.feed(made.old, PROMPT, None)
    for number, token in enumerate(TOKENS):
        values.append(float(rows[-1][token]))
        if number + 1 < len(TOKENS):
            rows, cache = models.feed(made.versions[number + 1], [token], cache)
    return values


PURE = Made(4, 0, (4,) * 12)
OVER = Made(3, 0, (3,) * 5 + (4,) * 7)
WAITED = Made(3, 16, (4,) * 12)
THRICE = Made(3, 0, (3,) * 2 + (4,) * 6 + (5,) * 4)


@pytest.mark.parametrize(
    ("made", "claim", "fit"),
    [
        (PURE, Claim(4, 4), Fit(4, ((4, 12),))),
        (PURE, Claim(3, 4), Fit(4, ((4, 12),))),
        (PURE, Claim(3, 3), None),
        (OVER, Claim(3, 4), Fit(3, ((3, 5), (4, 7)))),
        (OVER, Claim(3, 4, ((3, 5), (4, 7))), Fit(3, ((3, 5), (4, 7)))),
        (OVER, Claim(3, 4, ((3, 6), (4, 6))), None),
        (OVER, Claim(3, 3), None),
        (OVER, Claim(4, 4), None),
        (WAITED, Claim(4, 4), None),
        (WAITED, Claim(3, 4, ((4, 12),)), Fit(3, ((4, 12),), 16)),
        (THRICE, Claim(3, 5), Fit(3, ((3, 2), (4, 6), (5, 4)))),
        (THRICE, Claim(3, 4), None),
        (THRICE, Claim(3, 9), None),
    ],
)
def test_a_claim_fits_if_the_versions_that_it_allows_explain_every_token(
    models: Models, made: Made, claim: Claim, fit: Fit | None
) -> None:
    checker = Checker(models, PrefixCache(8, whole=False), tolerance=1e-3)
    assert checker.explain(PROMPT, TOKENS, logprobs(models, made), claim) == fit


@pytest.mark.parametrize(("whole", "fit"), [(True, Fit(3, ((4, 12),), 20)), (False, None)])
def test_a_prompt_that_is_cached_whole_is_read_whole_after_the_first_token(
    models: Models, whole: bool, fit: Fit | None
) -> None:
    made = logprobs(models, Made(3, 19, (4,) * 12, replaced=True))
    checker = Checker(models, PrefixCache(1, whole), tolerance=1e-3)
    assert checker.explain(PROMPT, TOKENS, made, Claim(3, 4, ((4, 12),))) == fit
