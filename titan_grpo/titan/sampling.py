"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without reward spread are left out and replaced. Bounded.

All completions of a prompt that is always or never solved have the same reward, so their advantages are zero: such groups
shrink the batch that the gradient is made of.
"""

from collections.abc import Callable
from dataclasses import dataclass

from titan_grpo.algorithm.advantages import AdvantageOptions, Scored, has_spread
from titan_grpo.algorithm.batch import defect
from titan_grpo.samples import Group

Take = Callable[[int], list[Group]]
"""Wait for that many more groups."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step is made of."""

    groups: list[Group]
    flat: int
    """Groups that were left out."""


def varied_groups(
    take: Take, give_places_back: Callable[[int], None], want: int, rounds: int, kind: AdvantageOptions
) -> Sampled:
    """``want`` groups with reward spread, replacing the others up to ``rounds`` times; then as many as there are.

    Before groups are replaced their number goes to ``give_places_back``, so that the bound on staleness lets others start.
    If no group at all has spread, those of the last round are returned: a step needs rows, and their advantages are zero.
    """
    kept: list[Group] = []
    flat = 0
    for round_ in range(rounds + 1):
        taken = take(want - len(kept))
        good = [group for group in taken if _varied(group, kind)]
        kept += good
        flat += len(taken) - len(good)
        missing = want - len(kept)
        # Groups from outside may be smaller than ours, and then more of them make a step.
        if missing <= 0 or round_ == rounds:
            return Sampled(kept, flat) if kept else Sampled(taken, flat - len(taken))
        give_places_back(missing)
    raise AssertionError("the loop returns in its last round")


def _varied(group: Group, kind: AdvantageOptions) -> bool:
    # Only of what is trained on: a reward that is none would stop the run here, where it is dropped later on.
    sound = [c for c in group.completions if not defect(group.prompt, c)]
    return has_spread([Scored(c.reward, c.num_sampled) for c in sound], kind)
