"""The names of all metrics, spans and counters, with unit and meaning.

Blocked time and work time never share a name: ``time/blocked_s`` is time that the main thread lost.
Other ``*_s`` names are work elsewhere (a lane, a server, the device) or the whole step.
"""

import re
from math import inf

# Learning, one value per step.
REWARD = "reward/mean"
REWARD_STD = "reward/std"
REWARD_KEPT = "reward/kept_mean"
LOSS = "loss/total"
POLICY_LOSS = "loss/policy_term"
KL_LOSS = "loss/kl_term"
ENTROPY_LOSS = "loss/entropy_term"
LOGIT_LOSS = "loss/logit_term"
GRAD_NORM = "optim/grad_norm"
LEARNING_RATE = "optim/learning_rate"
KL = "loss/kl"
RATIO_MEAN = "ratio/mean"
RATIO_MAX = "ratio/max"
CLIP_FRACTION = "ratio/clip_fraction"
CLIPPED_LOW = "ratio/clipped_low_fraction"
CLIPPED_HIGH = "ratio/clipped_high_fraction"
ENTROPY = "policy/entropy"
LOGPROB = "policy/logprob_mean"
LOGPROB_MIN = "policy/logprob_min"
LOGPROB_MAX = "policy/logprob_max"
LOGPROB_SEPARATION = "policy/logprob_separation"
LOGIT_SQUARE = "policy/logit_square"
PTX_LOSS = "loss/ptx"
IMPORTANCE_MEAN = "importance/mean"
IMPORTANCE_MAX = "importance/max"
IMPORTANCE_CUT = "importance/cut_fraction"
VETOED = "importance/vetoed_fraction"
KEPT = "loss/kept_fraction"
COMPLETION_TOKENS = "rollout/completion_tokens_mean"
TRAINED_TOKENS = "rollout/trained_tokens"
TRAINED_SEQUENCES = "rollout/trained_sequences"
GENERATED = "rollout/generated_tokens_per_s"
GENERATED_PER_GPU = "rollout/generated_tokens_per_s_per_gpu"
READY_GROUPS = "rollout/ready_groups"
IN_FLIGHT = "rollout/in_flight_requests"
IN_FLIGHT_AT_COMMIT = "rollout/in_flight_at_commit"
THROWN_TOKENS = "rollout/thrown_tokens"
LOGPROB_GAP = "logprob_gap/mean"
LOGPROB_GAP_MAX = "logprob_gap/max"
LOGPROB_DIFFERENCE = "logprob_gap/signed_mean"
ON_POLICY_GAP = "logprob_gap/on_policy_mean"
ON_POLICY_GAP_MAX = "logprob_gap/on_policy_max"
ROUTES_DIFFER = "routing/differing_share"
WORK_CV = "balance/work_cv"
WORK_CV_DEALT = "balance/work_cv_dealt"
BATCH_FILL = "balance/fill"
STALENESS = "staleness/mean"
STALENESS_MAX = "staleness/max"
STALENESS_TOKENS = "staleness/token_mean"
KEPT_KV = "staleness/kept_kv"
LAG = "servers/lag_mean"
LAG_MAX = "servers/lag_max"
VERSION = "version"

# Time on the main thread, one value per step.
STEP_S = "time/step_s"
BLOCKED_S = "time/blocked_s"
ROLLOUT_WAIT_S = "time/rollout_wait_s"
TRAIN_S = "time/train_s"

# Work on a version on its way to the servers.
COPY_S = "sync/copy_s"
DIGEST_S = "sync/digest_s"
CONNECT_S = "sync/connect_s"
SEND_S = "sync/send_s"
VERIFY_S = "sync/verify_s"
DRAIN_S = "sync/drain_s"
COMMIT_S = "sync/commit_s"
PAUSE_S = "sync/pause_s"
LOAD_S = "sync/load_s"
HELD_S = "sync/held_s"
SYNC_S = "sync/publish_to_commit_s"

# Totals since the start of the run; a line of metrics.jsonl has their values at its step.
SYNC_COUNT = "sync/count"
SYNC_BYTES = "sync/bytes"
SPARED_BYTES = "sync/spared_bytes"
RELAYED_BYTES = "sync/relayed_bytes"
SYNC_FAILURES = "sync/failures"
SKIPPED_VERSIONS = "sync/skipped_versions"
DIGEST_MISMATCHES = "sync/digest_mismatches"
QUARANTINES = "sync/quarantines"
UNHEALTHY_STEPS = "health/skipped_optimizer_steps"
SERVERS_JOINED = "sync/servers_joined"
SERVERS_LEFT = "sync/servers_left"
REQUESTS = "rollout/requests"
OUTAGES = "rollout/outages"
INTERRUPTED = "rollout/interrupted_groups"
MOVED = "rollout/moved_groups"
SKIPPED_PROMPTS = "rollout/skipped_prompts"
DROPPED = "dropped"
"""Prefix of one counter per reason: ``dropped/bad_logprob`` and so on (see :func:`dropped`)."""
LENGTHS = "lengths"
"""Prefix of one counter per range of lengths: ``lengths/made/64`` (see :func:`lengths`)."""
EVALUATION = "evaluation"
"""Prefix of an evaluation's values, such as ``evaluation/NAME/reward``. They are in the line of the
next step to end; values after the last step are in its line."""
SERVER = "server"
"""Prefix of values of one server: ``server/HOST:PORT/lag`` (see :func:`of_server`)."""

TOTALS: tuple[str, ...] = (SYNC_COUNT, SYNC_BYTES, SPARED_BYTES, SYNC_FAILURES, SKIPPED_VERSIONS)
TOTALS += (DIGEST_MISMATCHES, QUARANTINES, UNHEALTHY_STEPS, SERVERS_JOINED, SERVERS_LEFT)
TOTALS += (REQUESTS, OUTAGES, INTERRUPTED, MOVED, SKIPPED_PROMPTS, RELAYED_BYTES)
"""Totals that every step has, from 0 at the start: a missing curve would not show a zero."""

WORK: tuple[str, ...] = (COPY_S, DIGEST_S, CONNECT_S, SEND_S, VERIFY_S, DRAIN_S, COMMIT_S)
WORK += (PAUSE_S, LOAD_S, SYNC_S, HELD_S)
"""Series with one value per finished operation; a step has the mean over those that ended since the
step before, and no value if none did."""

SUMMARISED = frozenset(
    (
        REWARD,
        GENERATED,
        BLOCKED_S,
        STEP_S,
        ROLLOUT_WAIT_S,
        STALENESS,
        STALENESS_MAX,
        LOGPROB_GAP,
        LOGPROB_GAP_MAX,
    )
) | {ON_POLICY_GAP, ON_POLICY_GAP_MAX}
"""Step values of which summary.json needs all steps. Rank 0 keeps no others: a line has hundreds
with many servers."""

MEANING: dict[str, str] = {
    REWARD: (
        "mean reward of the completions (of agents: episodes) that a step took, with those that"
        " dynamic sampling left out and those that the user's filter dropped since the step before"
    ),
    REWARD_STD: "population standard deviation of those rewards",
    REWARD_KEPT: "mean reward of the completions that filter and dynamic sampling kept",
    LOSS: (
        "loss of an optimizer step with all its terms, globally normalised; mean over those of a"
        " training step. (Its name was loss/policy.)"
    ),
    POLICY_LOSS: "the policy's part of that loss",
    KL_LOSS: "the part of the KL term, grpo.kl_beta included",
    ENTROPY_LOSS: "the part of the entropy, grpo.entropy_loss_weight included",
    LOGIT_LOSS: "the part of the logits, grpo.logit_loss_weight included",
    GRAD_NORM: "norm of the gradient before clipping, the largest of a step's optimizer steps",
    LEARNING_RATE: "learning rate of the step's optimizer steps",
    KL: (
        "mean KL estimate to the reference model as the loss has it, its weight w included (with"
        " grpo.kl_in_reward: k1), nats per token"
    ),
    RATIO_MEAN: (
        "mean ratio of the policy to the proximal policy (with cispo and topr: to the engine) over"
        " the tokens in the loss; a sequence's ratio counts for each of its tokens"
    ),
    RATIO_MAX: "largest of those ratios; no ratio is above e^20",
    CLIP_FRACTION: (
        "share of tokens whose ratio was past its bound: the sum of the next two, without those"
        " that only grpo.clip_ratio_dual bounds. All three are 0 unless grpo.policy_loss is clip or"
        " gmpo"
    ),
    CLIPPED_LOW: "share of tokens with a negative advantage and a ratio below the lower bound",
    CLIPPED_HIGH: "share of tokens with a positive advantage and a ratio above the upper bound",
    ENTROPY: (
        "mean entropy of the policy's next-token distribution at rollout.temperature, nats (only"
        " with grpo.entropy_loss_weight)"
    ),
    LOGPROB: "mean log-probability of the tokens at rollout.temperature, nats",
    LOGPROB_MIN: "least of them",
    LOGPROB_MAX: "greatest of them",
    LOGPROB_SEPARATION: (
        "their mean over tokens of completions with a positive advantage minus that over tokens of"
        " completions with a negative one, nats"
    ),
    LOGIT_SQUARE: (
        "mean square of the policy's logits before the temperature (only with"
        " grpo.logit_loss_weight)"
    ),
    PTX_LOSS: "cross-entropy of the plain text that is mixed in, nats per token",
    IMPORTANCE_MEAN: (
        "mean weight of the off-policy correction (`is` in docs/algorithm.md) over the tokens in"
        " the loss; a token that m2_threshold left out has 0"
    ),
    IMPORTANCE_MAX: "largest weight of the off-policy correction",
    IMPORTANCE_CUT: (
        "share of tokens whose weight bounds changed, or that m2_threshold left out (with topr,"
        " whose bound is 1, rounding alone puts weights of fresh completions past it)"
    ),
    VETOED: (
        "share of tokens in sequences that one token took out (grpo.rollout_is_veto_threshold)"
    ),
    KEPT: (
        "share of completion tokens that grpo.onpolicy_logp_threshold and"
        " grpo.token_staleness_limit leave in the loss"
    ),
    COMPLETION_TOKENS: (
        "mean number of sampled tokens of a completion (of agents: of an episode) that filter and"
        " dynamic sampling kept, with those that are not trained on"
    ),
    TRAINED_TOKENS: "sampled tokens that the step trained on, each once",
    TRAINED_SEQUENCES: "completions that it trained on",
    GENERATED: (
        "sampled tokens of the groups that were finished since the step before, per second, all"
        " servers"
    ),
    GENERATED_PER_GPU: (
        "that number over the GPUs of the servers; only where the run starts them on GPUs"
        " (rollout.launch_gpus), since servers do not say how many they have"
    ),
    READY_GROUPS: "finished groups that waited for a later step when this one took its own",
    IN_FLIGHT: "requests in flight on all servers (an episode of several turns: one, also while its"
    " tool or agent is at work), as the rollout process last said",
    IN_FLIGHT_AT_COMMIT: (
        "mean number of requests in flight on a server when its commit began (where it finishes"
        " them first: before that), over the commits since the step before"
    ),
    THROWN_TOKENS: (
        "sampled tokens that were thrown away since the step before (stale, unfit, filtered, broken"
        " off, not waited for by an agent)"
    ),
    LOGPROB_GAP: "mean absolute difference of trainer and engine log-probability, nats",
    LOGPROB_GAP_MAX: "largest absolute difference of a step, nats",
    LOGPROB_DIFFERENCE: "mean of trainer minus engine log-probability, nats",
    ON_POLICY_GAP: (
        "mean absolute difference of both log-probabilities in a step's first optimizer step, over"
        " the tokens of completions whose weights and KV are all of the trainer's own version,"
        " nats: only arithmetic can cause it"
    ),
    ON_POLICY_GAP_MAX: "largest of those, nats",
    ROUTES_DIFFER: (
        "share of the tokens, prompts included, that the trainer's own routers would have sent to"
        " other experts than the engine did, in any layer (grpo.router_replay)"
    ),
    WORK_CV: (
        "coefficient of variation of the ranks' work in a step, all its optimizer steps together"
        " (operations, estimated from lengths and the model's dimensions), after balancing"
    ),
    WORK_CV_DEALT: (
        "the same if groups (with grpo.balance_split_groups: completions) were dealt to the ranks"
        " in the order in which they came"
    ),
    BATCH_FILL: "share of the tokens that ranks compute which are not padding",
    STALENESS: (
        "mean over groups of trainer version minus the oldest one that a group depends on, versions"
    ),
    STALENESS_MAX: "largest staleness of a step, versions",
    STALENESS_TOKENS: (
        "mean over the sampled tokens of the batch of trainer version minus the one that sampled"
        " the token (where the engine does not name it: the oldest that may have), versions"
    ),
    KEPT_KV: (
        "share of the completions that ran over a commit on KV of older weights"
        ' (weight_sync.kv_after_update = "keep"), or went on with newer ones, elsewhere or in a'
        " later turn"
    ),
    LAG: (
        "mean over servers of the version a step began from minus the one held at its end (0 if"
        " that is newer), versions; without servers of which it is not known what they hold"
    ),
    LAG_MAX: "largest of those, versions",
    VERSION: "the version that the step began from",
    STEP_S: "a whole step on the main thread, without its checkpoint, seconds",
    BLOCKED_S: (
        "main thread lost to weight sync, with the wait for a slot if all versions that a step's"
        " rollouts could be made with were skipped; seconds per step"
    ),
    ROLLOUT_WAIT_S: (
        "main thread waited for rollouts, and for the batch that is made of them, seconds per step"
    ),
    TRAIN_S: (
        "forward, backward and optimizer, with the wait for the last version's copy in between"
        " (which is in time/blocked_s too), seconds per step"
    ),
    COPY_S: "copy of rank 0's shard into the version image, seconds per version",
    DIGEST_S: "hash of a version's blocks on rank 0's host, seconds",
    CONNECT_S: "opening a lane to a server, attempts that failed included, seconds",
    SEND_S: "bytes of a version on their way to one server, seconds",
    VERIFY_S: (
        "a server's check of the digests, summed over its fetching threads, mostly while bytes"
        " arrive; broadcast: what was left after the last byte; seconds"
    ),
    DRAIN_S: (
        "a server finished its requests before a commit (rollout.in_flight_weight_updates = false),"
        " seconds"
    ),
    COMMIT_S: (
        "a whole commit on one server, from the call that pauses it to the read-back of its label,"
        " as the lane sees it, seconds"
    ),
    PAUSE_S: "generation stood still on one server, seconds",
    LOAD_S: (
        "the engine's own loader, or the copies that repeat its first load, at work within that"
        " pause (in the first of several workers), seconds"
    ),
    SYNC_S: "publish to verified commit on one server, seconds",
    HELD_S: "evaluations kept a server of rollouts on its version, seconds",
    SYNC_COUNT: "commits on all servers",
    SYNC_BYTES: (
        "bytes sent to all servers; none of a transfer that broke off before the receiver's answer"
    ),
    RELAYED_BYTES: "of sync/bytes, what servers read from each other (weight_sync.relay)",
    SPARED_BYTES: "bytes that servers did not read, since patches made them (weight_sync.delta)",
    SYNC_FAILURES: (
        "errors of lanes: failed connections (each attempt counts), looks, transfers and commits"
    ),
    SKIPPED_VERSIONS: "versions for which no slot was free after their step",
    DIGEST_MISMATCHES: (
        "transfers that ended at a block with a wrong digest (a block that was right when read"
        " again is not counted), and loads of a wrong fingerprint"
    ),
    QUARANTINES: (
        "loads that may have left neither version whole: the server stays paused until one is in"
    ),
    UNHEALTHY_STEPS: "optimizer steps that were skipped because of their numbers",
    SERVERS_JOINED: "servers added while training ran",
    SERVERS_LEFT: "servers removed while training ran",
    REQUESTS: "generation requests sent to all servers, without those of evaluations",
    OUTAGES: (
        "groups that a failing server interrupted; with rollout.source = 'atropos', failed calls of"
        " its API"
    ),
    INTERRUPTED: "groups of which an engine cut completions short, or lost its version",
    MOVED: "groups that went on elsewhere since their server left, stood still or was drained",
    SKIPPED_PROMPTS: "prompts given up after repeated drops or outages, or at once"
    " (prompt_too_long, empty_prompt)",
}
"""Unit and meaning of each name: the legend of metrics.jsonl and of the trace."""


REASONS: dict[str, str] = {
    "stale": "finished, and too old when a step took them (rollout.max_staleness): made again, if"
    " not from outside",
    "stale_in_flight": "too old before they were finished: made again",
    "no_spread": "all rewards equal (grpo.dynamic_sampling)",
    "too_short": "a completion shorter than rollout.min_completion_tokens",
    "not_accepted": "the user's filter (rollout.accept) left them out",
    "task_error": "the task, reward, agent or filter raised an exception, missed its deadline, or"
    " returned what is no answer",
    "prompt_too_long": "a prompt that leaves no room in training.seq_len: skipped at once",
    "refused": "a server refused the request itself (400, 413 or 422): too long for its context?",
    "version_unknown": "tokens under the label of another run: an outage of the server",
    "kv_kept": "KV of older weights survived a commit that was to drop it: an outage of the server",
    "bad_token": "a token id that the model lacks (grpo.dynamic_sampling replaces the group)",
    "no_routes": "without the experts of each token, or of experts that the model lacks",
    "over_budget": "more tokens than were asked for",
    "unfinished": "an end that is neither a stop nor the length limit",
    "empty_prompt": "no prompt token (of a task: skipped at once), or none that all completions"
    " share",
    "empty_completion": "a completion without tokens",
    "nothing_sampled": "a completion without a sampled token",
    "length_mismatch": "tokens, log-probabilities and versions of different lengths",
    "bad_logprob": "a log-probability that is nan, infinite or above 0.001",
    "bad_reward": "a reward that is nan, or beyond 3e38",
    "malformed": "a group of Atropos that breaks its form",
    "bad_score": "a score of Atropos that is no finite number",
    "no_logprobs": "a group of Atropos without inference_logprobs",
    "images": "a group of Atropos with images",
    "too_long": "a group of Atropos with a sequence longer than training.seq_len",
    "unknown_version": "a group of Atropos that names a version that does not exist yet",
    "completion_too_long": "completions, not groups: longer than training.seq_len with the prompt",
    "completion_truncated": "completions at the length limit (grpo.mask_truncated)",
    "completion_bad_token": "completions with a token id that the model lacks",
    "completion_group_of_defective": "completions of a group with one that cannot be trained on",
}
"""Reason of a drop -> meaning (see :func:`dropped`)."""


def dropped(reason: str) -> str:
    """Return the name of the counter of groups dropped for a reason: ``dropped("stale") ==
    "dropped/stale"``."""
    return f"{DROPPED}/{reason}"


GAP = "logprob_gap"
"""Prefix of the gap of a subset of the tokens: ``logprob_gap/position/128`` (see :func:`gap`)."""

GAP_PARTS: dict[str, tuple[float, ...]] = {
    "position": (16, 128, 1024, 8192, inf),
    "probability": (0.01, 0.1, 0.5, inf),
    "lag": (0, 1, 2, inf),
}
"""Subsets of the tokens with a log-probability gap of their own, by upper bound: position in the
completion, the engine's probability, versions behind the trainer."""

GAP_OF = {
    "position": (
        "tokens up to that place among the sampled ones of their completion, past the part before"
        " it"
    ),
    "probability": "tokens that the engine gave up to that probability, more than the part before",
    "lag": "tokens that were sampled up to so many versions ago, more than the part before",
}


def gap(by: str, high: float) -> str:
    """Return the name of the mean gap of one subset of the tokens; ``by`` is a key of ``GAP_PARTS``
    and ``high`` the subset's upper bound.

    >>> gap("position", 128), gap("lag", float("inf"))
    ('logprob_gap/position/128', 'logprob_gap/lag/more')
    """
    return f"{GAP}/{by}/{'more' if high == inf else f'{high:g}'}"


def lengths(kind: str, longest: str) -> str:
    """Return the name of the counter of completions of up to ``longest`` tokens; ``kind`` is
    ``made`` or ``trained``: ``lengths("made", "64") == "lengths/made/64"``."""
    return f"{LENGTHS}/{kind}/{longest}"


OF_SERVER = {
    "version": "version that the server held at the step's end",
    "lag": "version that the step began from minus that one, or 0, versions",
    "in_flight": "requests in flight on it, as the rollout process last said",
    "tokens_per_s": "sampled tokens of its groups finished since the step before, per second",
}
"""Values of one server (see :func:`of_server`), with their meanings."""


OF_EVALUATION = {
    "version": "version that was evaluated",
    "reward": "mean reward over prompts",
    "reward_low": "lower end of its 95 % confidence interval",
    "reward_high": "upper end of its 95 % confidence interval",
    "tokens": "mean length of a completion, sampled tokens",
    "tokens_low": "lower end of its 95 % confidence interval",
    "tokens_high": "upper end of its 95 % confidence interval",
    "refused": "prompts that the server had no room for, in no other figure",
    "seconds": "how long the evaluation took",
}


def short(url: str) -> str:
    """Return a server's URL without scheme: ``http://host:8000/`` -> ``host:8000``."""
    return url.split("://")[-1].rstrip("/")


def of_server(url: str, what: str) -> str:
    """Return the name of one server's value: ``of_server("http://a:8000", "lag") ==
    "server/a:8000/lag"``."""
    return f"{SERVER}/{short(url)}/{what}"


def meaning(name: str) -> str:
    """Return unit and meaning of any name in metrics.jsonl, or "" if the name is unknown.

    >>> meaning("servers/lag_max"), meaning("dropped/bad_reward")
    ('largest of those, versions', 'dropped: a reward that is nan, or beyond 3e38')
    """
    prefix, _, rest = name.partition("/")
    if prefix == GAP and "/" in rest:
        by = rest.partition("/")[0]
        known = any(name == gap(by, high) for high in GAP_PARTS.get(by, ()))
        return f"{MEANING[LOGPROB_GAP]}, of {GAP_OF[by]}" if known else ""
    if prefix == DROPPED:
        reason = REASONS.get(rest) or REASONS.get(rest.removeprefix("completion_"))
        return f"dropped: {reason}" if reason else ""
    if prefix == EVALUATION:
        what = rest.partition("/")[2]
        if re.fullmatch(r"pass_at_\d+(_low|_high)?", what):
            return what.replace("pass_at_", "pass@").replace("_", ", ")
        return OF_EVALUATION.get(what, "")
    if prefix == SERVER:
        host, _, what = rest.rpartition("/")
        return OF_SERVER.get(what, "") if host else ""
    return MEANING.get(name, "")
