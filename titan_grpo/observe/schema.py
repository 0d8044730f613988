"""Schemas of summary.json and samples.jsonl, and how a line of a run's file is read."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from titan_grpo.errors import NOT_JSON

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0)]
Number = float | None
"""None: no value."""


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """Object with exactly these keys."""


class MedianP95(Record):
    """Median and 95th percentile of a duration over all steps or operations of the run, in
    seconds."""

    median: Number
    p95: Number


class MeanMax(Record):
    """Mean of the steps' means, each step counted once, and the largest value."""

    mean: Number
    max: Number


class Server(Record):
    """Versions that a server committed, in order, and the last of them."""

    committed: list[Count]
    last: Count | None


class Change(Record):
    """A server that joined or left while the trainer was at ``version``."""

    server: str
    event: Literal["joined", "left"]
    version: int


class Estimate(Record):
    """Mean over prompts with its 95 % confidence interval (None with a single prompt)."""

    value: float
    low: Number
    high: Number


class Evaluated(Record):
    """One evaluation of one version (docs/evaluation.md)."""

    name: str
    version: Count
    server: str
    prompts: Count
    samples: Count
    """Completions of each prompt."""
    reward: Estimate
    passed: dict[str, Estimate]
    """k -> pass@k."""
    tokens: Estimate
    """Mean number of sampled tokens of a completion."""
    refused: Count
    """Prompts that the server refused or had no room for; in no other figure."""
    seconds: float


class Summary(Record):
    """Summary of a whole run, which may have had several processes."""

    run: str
    mode: str
    steps: Count
    resumes: list[Count]
    """First step after each resume."""
    reward_first: Number
    reward_last: Number
    reward_window: Count
    """Steps over which each of the two is a mean."""
    versions_committed: dict[str, Server]
    """By server URL. A resumed run commits the versions that it repeats once more."""
    membership: list[Change]
    sync_count: Count
    skipped_versions: Count
    digest_mismatches: Count
    sync_bytes: Count
    """Bytes sent to all servers."""
    relayed_bytes: Count
    """Of these, what servers read from each other."""
    spared_bytes: Count
    """Bytes that servers did not read, thanks to patches."""
    sync_failures: Count
    """Errors of lanes: failed connections, looks, transfers and commits."""
    quarantines: Count
    skipped_optimizer_steps: Count
    requests: Count
    """Generation requests to all servers."""
    outages: Count
    """Groups that a failing server interrupted."""
    generated_tokens_per_s: Number
    """Sampled tokens of finished groups, all servers, over the time from when the first step of a
    process took its groups to when its last one did."""
    blocked_s: MedianP95
    copy_s: MedianP95
    send_s: MedianP95
    verify_s: MedianP95
    commit_s: MedianP95
    pause_s: MedianP95
    step_s: MedianP95
    publish_to_commit_s: MedianP95
    connect_s: MedianP95
    digest_s: MedianP95
    drain_s: MedianP95
    steps_per_s: Number
    """Without start-up and the first step of each process, which compiles and connects."""
    staleness: MeanMax
    logprob_gap: MeanMax
    logprob_gap_on_policy: MeanMax
    dropped: dict[str, Count]
    """Groups by reason; completions for a reason that begins with "completion_"."""
    lengths: dict[str, dict[str, Count]]
    """Completions by length: "made" (also those thrown away unfinished) and "trained". A key is the
    greatest number of sampled tokens of a range, which begins above half of it. Where the shares
    differ, training does not see what was sampled."""
    evaluations: list[Evaluated]
    errors: list[str]
    quantised: dict[str, str]
    """Server -> quantisation method of its weights, as its engine reports it, for servers that
    quantise."""
    last_step: dict[str, Number]
    """Last line of metrics.jsonl: each metric by its name (observe/names.py). Empty without a
    step."""
    ended_by: str
    """Error or signal that ended the run before its last step; else empty."""


def decoded(line: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
    """Decode a line of a run's file; None if a kill or a write in progress tore it, or it is none
    of ours."""
    try:
        return decoder.decode(line)
    except NOT_JSON:
        return None


LIMIT = 4
"""Completions kept per step."""


class Shown(msgspec.Struct, frozen=True):
    """A completion with both log-probabilities of each token, nats."""

    server: str
    reward: float
    version_first: int
    version_last: int
    prompt: list[int]
    tokens: list[int]
    engine: list[float]
    trainer: list[float | None]
    """None: the policy did not sample that token (a tool's answer)."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.engine) == len(self.trainer):
            raise ValueError("`tokens`, `engine` and `trainer` must have one length")

    @property
    def gap(self) -> float:
        """Mean absolute difference of the two over the sampled tokens; 0 without any."""
        pairs = zip(self.engine, self.trainer, strict=True)
        gaps = [abs(engine - own) for engine, own in pairs if own is not None]
        return sum(gaps) / len(gaps) if gaps else 0.0


class ShownStep(msgspec.Struct, frozen=True):
    """One line of samples.jsonl."""

    step: int
    version: int
    """Trainer version of the ``trainer`` log-probabilities."""
    tokenizer: str
    """Directory of the model whose tokenizer made the token ids."""
    completions: list[Shown]


def choose(found: Sequence[Shown]) -> list[Shown]:
    """Return the ``LIMIT`` most telling completions of a step, without repetition: highest reward,
    lowest reward, largest gap, then the first ones."""
    if not found:
        return []
    places = range(len(found))
    wanted = [
        max(places, key=lambda k: found[k].reward),
        min(places, key=lambda k: found[k].reward),
        max(places, key=lambda k: found[k].gap),
        *places,
    ]
    return [found[k] for k in list(dict.fromkeys(wanted))[:LIMIT]]
