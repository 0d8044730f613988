"""Thresholds on a step's metrics, for ``[alerts]`` and ``titan-grpo watch --check``, and the likely
cause of a log-probability gap. Pure."""

import math
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_grpo.config import Alerts
from titan_grpo.config.task import broken
from titan_grpo.errors import ConfigError
from titan_grpo.observe import names

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}

_FORM = re.compile(r"\s*(\S+)\s*(>=|<=|>|<)\s*(\S+?)(?:\s+for\s+(\d{1,18}))?\s*")


@dataclass(frozen=True, slots=True)
class Threshold:
    """Condition ``metric sign bound`` for ``steps`` steps in a row, its action, and for how many
    steps it has held."""

    metric: str
    sign: str
    bound: float
    steps: int
    action: str = "warn"
    held: int = 0
    value: float = 0.0
    """Last value of the metric."""

    def __str__(self) -> str:
        lasting = f" for {self.steps}" if self.steps > 1 else ""
        return f"{self.metric} {self.sign} {self.bound:g}{lasting} ({self.value:.4g})"

    @classmethod
    def parse(cls, text: str, key: str, action: str = "warn") -> "Threshold":
        """Parse a threshold. Raises ConfigError naming ``key``.

        >>> str(Threshold.parse("loss/kl>=0.50 for 3", "alerts.warn"))
        'loss/kl >= 0.5 for 3 (0)'
        """
        found = _FORM.fullmatch(text)
        try:
            bound = float(found[3]) if found else float("nan")
        except ValueError:
            bound = float("nan")
        if found is None or bound - bound != 0 or found[4] == "0":
            raise ConfigError(
                f'{key} must be like "ratio/max > 10" or "reward/mean < 0.1 for 20" (operators'
                f" {' '.join(OPERATORS)}), got {text!r:.200}"
            )
        if not names.meaning(found[1]):
            raise ConfigError(
                f"{key} must name a metric of metrics.jsonl (titan-grpo config --metrics prints"
                f" them all), got {found[1]!r:.200} in {text!r:.200}"
            )
        return cls(found[1], found[2], bound, int(found[4] or 1), action)

    def after(self, metrics: Mapping[str, Any]) -> "Threshold":
        """Return the threshold after one more step. A missing metric changes nothing. NaN and
        infinity hold, whatever the operator; so does null, which metrics.jsonl has for them."""
        if self.metric not in metrics:
            return self
        found = metrics[self.metric]
        value = math.nan if found is None else float(found)
        holds = not math.isfinite(value) or OPERATORS[self.sign](value, self.bound)
        return replace(self, held=self.held + 1 if holds else 0, value=value)

    @property
    def holds(self) -> bool:
        """Whether the condition has held for ``steps`` steps."""
        return self.held >= self.steps


ON_POLICY_GAP = 0.05
"""Mean gap, in nats, of trainer and engine on tokens of the same weights that is reported."""
GREW = 2.0
"""Factor between two gaps from which the larger one counts as grown."""
LEAST_GAP = 0.01
"""Gap in nats below which it is bfloat16 arithmetic, even if it grew."""


def likely_cause(last: Mapping[str, float], quantised: Mapping[str, str]) -> str:
    """Return the most likely cause of a gap, from the subsets of tokens in which it is large and
    from ``quantised``: URL -> quantisation method, or empty. Causes that explain others are tried
    first."""
    fresh, old = last.get(names.gap("lag", 0)), last.get(names.gap("lag", math.inf))
    old = last.get(names.gap("lag", 2), old)
    old = last.get(names.gap("lag", 1), old)
    # Without tokens of the trainer's own version nothing shows that these would not differ too.
    if fresh is not None and old is not None and fresh < min(LEAST_GAP, old / GREW):
        return (
            "only tokens of older versions differ, so it is what the policy learnt since: a lower"
            " rollout.max_staleness or a lower learning rate makes it smaller"
        )
    if methods := {url: method for url, method in quantised.items() if method}:
        named = ", ".join(f"{url} with {method}" for url, method in sorted(methods.items())[:4])
        more = f" and {len(methods) - 4} more" if len(methods) > 4 else ""
        return (
            f"servers quantise their weights ({named}{more}), so they sample from another policy"
            " than is trained: rollout_is_threshold corrects for it; an unquantised server has no"
            " such gap"
        )
    places = [last.get(names.gap("position", high)) for high in names.GAP_PARTS["position"]]
    found = [gap for gap in places if gap is not None]
    if len(found) > 1 and found[-1] >= GREW * max(found[0], LEAST_GAP / GREW):
        return (
            f"it grows along the completion: {_kept_kv(last)}another RoPE scaling or attention on"
            " the server (titan-grpo doctor compares config.json), or of an MoE other routes"
            " (grpo.router_replay)"
        )
    rare = last.get(names.gap("probability", 0.01))
    likely = last.get(names.gap("probability", math.inf))
    if rare is not None and likely is not None and rare >= 10 * max(likely, 1e-3):
        return (
            "mostly at tokens that the engine finds unlikely: logits in float32 on both sides"
            " (grpo.fp32_lm_head and the server's switch for it)"
        )
    if fresh is None and old is not None:
        return (
            "no token is of the trainer's own version, so it may be what the policy learnt since,"
            " or other types, kernels or sampling parameters on the server (titan-grpo verify"
            " compares them)"
        )
    return (
        "everywhere alike: other types, kernels or sampling parameters on the server (titan-grpo"
        " verify compares them)"
    )


def _kept_kv(last: Mapping[str, float]) -> str:
    """Return kept KV of older versions as a cause, or "" if no completion used it."""
    if not (share := last.get(names.KEPT_KV, 0.0)):
        return ""
    return (
        f'weight_sync.kv_after_update is "keep", and {share * 100:.2g} % of the completions ran'
        ' over a commit on KV of older weights ("recompute" makes it anew); else '
    )


GAP = Threshold(names.ON_POLICY_GAP, ">=", ON_POLICY_GAP, 3)
"""Threshold that every run watches: trainer and engine differ on the same weights."""


def line_of(crossed: Threshold, metrics: Mapping[str, Any], quantised: Mapping[str, str]) -> str:
    """Return a crossed threshold's text; for a gap with its likely cause (see ``likely_cause``)."""
    if not crossed.metric.startswith(f"{names.GAP}/"):
        return str(crossed)
    return f"{crossed}: {likely_cause(metrics, quantised)}"


def watched(alerts: Alerts) -> tuple[Threshold, ...]:
    """Return all thresholds of the section. Raises ConfigError for the first malformed one."""
    return tuple(
        Threshold.parse(text, f"alerts.{action}", action)
        for action in ("warn", "run", "stop")
        for text in getattr(alerts, action)
    )


def step(
    before: Sequence[Threshold], metrics: Mapping[str, Any]
) -> tuple[tuple[Threshold, ...], tuple[Threshold, ...]]:
    """Return (all thresholds after one more step, those that hold now and did not before).

    Example: "loss/kl > 1 for 2" fires at the third and the seventh of the values 0, 2, 2, 2, 0, 2,
    2.
    """
    after = tuple(each.after(metrics) for each in before)
    crossed = tuple(
        now for was, now in zip(before, after, strict=True) if now.holds and not was.holds
    )
    return after, crossed


def over(
    thresholds: Sequence[Threshold], newest: Iterable[Mapping[str, Any]]
) -> tuple[Threshold, ...]:
    """Return the thresholds that hold at the last step of a run. ``newest``: its rows, the last one
    first; only as many are taken as this needs."""
    found = list(thresholds)
    going = set(range(len(found)))
    for row in newest:
        for at in tuple(going):
            was, now = found[at], found[at].after(row)
            if now is was:
                continue
            # Of the last step that has a value.
            found[at] = replace(now, value=was.value) if was.held else now
            if now.holds or not now.held:
                going.remove(at)
        if not going:
            break
    return tuple(each for each in found if each.holds)


def rules(alerts: Alerts) -> Iterator[str]:
    """Yield the broken rules of the section, one line each."""
    try:
        watched(alerts)
    except ConfigError as error:
        yield str(error)
    try:
        words = shlex.split(alerts.command)
    except ValueError as error:
        yield f"alerts.command must be words as a shell's, got {alerts.command!r:.200}: {error}"
        return
    if bool(alerts.run) != bool(words):
        yield (
            "alerts.command must be set where alerts.run is, and only there, got"
            f" {alerts.command!r:.200} and {alerts.run!r:.200}"
        )
    late = (alerts.command_timeout_s <= 0, "command_timeout_s", "greater than 0")
    yield from broken("alerts", alerts, [late])
