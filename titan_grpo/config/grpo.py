"""The section ``[grpo]``: the keys of the algorithm and their rules. docs/algorithm.md has the
formulas.

No ``from __future__ import annotations`` in this file: torchtitan's merge reads field types as
objects.
"""

from dataclasses import dataclass
from typing import Literal

from titan_grpo.config.rollout import Rollout
from titan_grpo.config.task import Rules, broken


@dataclass
class GRPO:
    """The algorithm; docs/algorithm.md has every key's formula. Sources: GRPO (arXiv 2402.03300),
    DAPO (2503.14476), GSPO (2507.18071), Dr.GRPO (2503.20783), CISPO (2506.13585), decoupled PPO
    (2110.00641), RLOO (2402.14740), SAPO (2511.20347), GMPO (2507.20673), TOPR (2503.14286),
    M2PO (2510.01161)."""

    async_weight_update: bool = False
    """Send weights to the servers in the background while training goes on. false: wait for every
    healthy server after each step."""

    algorithm: str = ""
    """A named algorithm (grpo, dapo, dr_grpo, gspo, cispo, rloo, reinforce_pp, sapo, gmpo, topr,
    m2po), or your own TOML file with a table [grpo]. It sets the keys of this section that define
    the algorithm; a key that the job sets itself wins. The start logs what it set. Empty: none."""

    policy_loss: Literal["clip", "cispo", "gmpo", "sapo", "topr"] = "clip"
    """clip: PPO's clipped objective. gmpo: the geometric mean of each sequence's bounded ratios.
    sapo: a soft gate on the ratio. cispo: advantage * log-probability, weighted per token by policy
    / engine. topr: the same, weighted per sequence and only where the advantage is negative."""

    policy_ratio_type: Literal["token", "sequence"] = "token"
    """token: one importance ratio per token (GRPO). sequence: one per sequence, the exponential of
    its mean log-ratio (GSPO)."""

    clip_ratio_lower_bound: float = 0.2
    """A token with ratio below 1 - this and negative advantage gets no gradient. 1: no lower
    bound."""

    clip_ratio_upper_bound: float = 0.28
    """A token with a ratio above 1 + this and a positive advantage gets no gradient (DAPO's
    clip-higher)."""

    clip_ratio_dual: float = 0.0
    """With policy_loss = "clip": where the advantage A is negative, the objective is at least this
    times A (dual clip; 3 is usual). 0: off."""

    cispo_weight_max: float = 5.0
    """With policy_loss = "cispo": the largest weight of a token."""

    sapo_tau_pos: float = 1.0
    """With policy_loss = "sapo": steepness of the gate where the advantage is positive."""

    sapo_tau_neg: float = 1.05
    """The same where the advantage is zero or negative."""

    num_microbatches: int = 1
    """Optimizer steps per pass over a batch: its groups are split into that many PPO minibatches.
    One batch makes one version, however many there are."""

    num_epochs: int = 1
    """Passes over a batch, each of num_microbatches optimizer steps."""

    proximal_logprobs: Literal["recompute", "interpolate", "rollout"] = "recompute"
    """Denominator of the ratio. recompute: the policy before the batch's first optimizer step.
    interpolate: a value between the engine's log-probability and the current one, by staleness.
    rollout: the engine's; rollout_is_* then has no effect."""

    kl_beta: float = 0.0
    """Weight of the KL term to the reference model; 0 builds no reference model."""

    kl_estimator_type: Literal["k1", "k2", "k3", "mse", "abs"] = "k3"
    """KL estimator per token: k1 = -log r, k2 = mse = (log r)^2 / 2, k3 = r - 1 - log r, abs = |log
    r|, with r = p_ref / p. k2, mse and k3 are weighted by policy / engine; abs needs on-policy
    data; k1 is for kl_in_reward alone."""

    kl_in_reward: bool = False
    """Subtract kl_beta times the KL of a token and of all later tokens of its completion from the
    token's advantage, in place of the KL term. The estimator is k1 then."""

    reference_model: str = ""
    """Directory with the reference model's HF safetensors; empty: model.hf_assets_path. Used if
    kl_beta > 0."""

    ref_model_ema: float = 0.0
    """After each step, reference = this * reference + (1 - this) * policy. 0 and 1 both leave the
    reference as it is."""

    normalize_advantage_std: bool = True
    """Divide centred rewards by a standard deviation (GRPO). false: do not divide (Dr.GRPO)."""

    advantage_normalization: Literal["group", "batch"] = "group"
    """Standard deviation to divide by: the group's (GRPO), or that of the whole step (REINFORCE++
    with a baseline)."""

    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward: the mean of its group (GRPO), or the mean of the group's
    other rewards (RLOO)."""

    scale_adv_by_len: bool = False
    """Multiply each reward by its completion's number of tokens before subtracting the baseline."""

    pos_scaler: float = 1.0
    """Factor on positive advantages."""

    neg_scaler: float = 1.0
    """Factor on all other advantages."""

    overlong_cache_tokens: int = 0
    """Take reward from completions longer than rollout.max_completion_tokens minus this, growing
    linearly with length (DAPO). 0: off."""

    overlong_cache_share: float = 0.0
    """The same as a share of rollout.max_completion_tokens; 0: off."""

    overlong_penalty: float = 1.0
    """What a completion of the full length loses by overlong_cache_tokens or
    overlong_cache_share."""

    length_penalty: float = 0.0
    """Weight of a reward for being short within the group: from 0.5 for the shortest completion to
    -0.5 for the longest; an incorrect one never gains by it (Kimi k1.5). 0: off."""

    correct_reward: float = 0.5
    """Least reward of a completion that counts as correct for length_penalty."""

    mask_truncated: bool = False
    """Do not train on completions that the length limit ended (rollout.max_completion_tokens, or
    training.seq_len after a long prompt); their rewards still count in their group's baseline
    (DAPO's overlong filtering)."""

    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by other groups (DAPO). A replayed run leaves them
    out without replacing them."""

    dynamic_sampling_rounds: int = 3
    """Rounds of replacement per step; after the last the step trains on the groups that it has."""

    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all tokens (DAPO). sequence: mean over sequences of their token means
    (GRPO). constant: sum divided by a constant (Dr.GRPO)."""

    grpo_by_token: bool | None = None
    """Alias of loss_normalization: true: "token", false: "sequence". Unset: loss_normalization
    decides."""

    top_entropy_share: float = 1.0
    """Build the policy term from this share of an optimizer step's tokens: those where the policy
    before the batch has the highest entropy. 1: all. Below 1 it costs one more forward pass."""

    m2_threshold: float = 0.0
    """M2PO, in each optimizer step: consider the tokens that moved in the direction of their
    advantage since they were sampled, and leave those with the largest (log policy - log engine)^2
    out of the policy term until the mean of the rest is at most this. 0: off. Costs one more
    forward pass."""

    onpolicy_logp_threshold: float = 0.0
    """Leave tokens with a policy probability below this out of every term of the loss. 0 and 1:
    none."""

    token_staleness_limit: int = -1
    """Leave tokens that were sampled by a version more than this many versions older than the
    trainer's out of every term of the loss. -1: none."""

    logit_loss_weight: float = 0.0
    """Add the mean over the vocabulary of (this * logit)^2 per token to the loss."""

    entropy_loss_weight: float = 0.0
    """Subtract this times the entropy per token from the loss: larger keeps the policy more
    random."""

    rollout_is_level: Literal["token", "sequence", "geometric"] = "token"
    """Importance correction of trainer/engine mismatch and staleness: one weight per token, one per
    sequence (the product over its tokens), or the geometric mean over the sequence."""

    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """truncate: weights above the threshold become it. mask: weights outside the bounds become
    0."""

    rollout_is_threshold: float = 2.0
    """Upper bound of that weight. 0: no weight; then only proximal_logprobs = "rollout" corrects,
    through the clip bounds."""

    rollout_is_threshold_lower: float = 0.0
    """Lower bound for rollout_is_mode = "mask"; 0: 1 / rollout_is_threshold."""

    rollout_is_veto_threshold: float = 0.0
    """Leave a whole sequence out of the policy term if one of its tokens has a ratio trainer /
    engine below this. 0: off."""

    allow_uncorrected_off_policy: bool = False
    """Allow training on stale data without a correction, for experiments: it biases the
    gradient."""

    ptx_mixin_batchsize: int = 0
    """Sequences of plain text, over all ranks, whose cross-entropy is added to each optimizer
    step's loss. 0: none. They come from torchtitan's own loader (training.dataset,
    training.dataset_path), which is resumed on the same number of data-parallel ranks only."""

    ptx_scale: float = 1.0
    """Weight of that cross-entropy (a mean over the text's tokens)."""

    ptx_scale_by_tokens: bool = False
    """Multiply that weight by the text's tokens divided by the completion tokens of the same
    optimizer step."""

    temperature: float = 0.0
    """Alias of rollout.temperature, which decides. 0: unset; any other value must equal
    rollout.temperature."""

    on_unhealthy: Literal["skip", "stop"] = "skip"
    """What to do with an optimizer step with NaN or Inf in loss or gradient, or past
    grad_norm_limit or reward_collapse_steps: skip it on every rank, or stop the run. A training
    step without any optimizer step makes no version."""

    max_unhealthy_steps: int = 5
    """Stop the run after this many training steps in a row without an optimizer step."""

    grad_norm_limit: float = 0.0
    """Gradient norm before clipping above which an optimizer step is unhealthy. 0: off."""

    reward_collapse_steps: int = 0
    """Steps in a row with all rewards equal after which a step is unhealthy. 0: off."""

    token_budget: int = 0
    """Size of a microbatch on one rank: rows times padded length. 0: training.local_batch_size *
    training.seq_len."""

    balance_batch: bool = True
    """Give the data-parallel ranks equal work: partition whole groups by their estimated operations
    (from the model's dimensions). false: deal groups to ranks in the order in which they came."""

    balance_equal_counts: bool = False
    """Keep the numbers of groups of the balanced shares within one of each other."""

    balance_split_groups: bool = False
    """Balance single completions instead of whole groups; without it, ranks idle when there are
    fewer groups than ranks."""

    single_rank_load: bool = True
    """Rank 0 builds the tensors of all ranks and sends them. false: it sends each rank the tokens
    of its share, and the rank builds the same tensors itself (for batches so large that rank 0
    would delay the others). Rank 0 plans the shares in both cases."""

    router_replay: bool = False
    """Train an MoE with the experts that the engine chose for each token, instead of the trainer's
    own choice; the gates stay the trainer's. Servers must run with --enable-return-routed-experts,
    as launched ones do. Completions without routes are dropped."""

    fp32_lm_head: bool = False
    """Compute the logits in float32, from weights and hidden states of
    training.mixed_precision_param. Launched servers do so too; start others with --hf-overrides
    '{"head_dtype": "float32"}' (vLLM) or --enable-fp32-lm-head (SGLang)."""

    pack_sequences: bool = False
    """Pack several sequences into one row of up to token_budget tokens, with attention kept inside
    each, instead of padding."""


def resolve_aliases(grpo: GRPO) -> None:
    """Apply the aliases of the older trainer's keys: only ours are read. The section must have no
    violations."""
    if grpo.grpo_by_token is not None:
        grpo.loss_normalization = "token" if grpo.grpo_by_token else "sequence"


AGAINST_ENGINE = ("cispo", "topr")
"""Values of policy_loss that weight by policy / engine and so correct off-policy data by
themselves."""


def optimizer_steps(grpo: GRPO) -> int:
    """Return the number of optimizer steps per batch."""
    return grpo.num_microbatches * grpo.num_epochs


def violations(grpo: GRPO, rollout: Rollout) -> list[str]:
    """Return all broken rules of the section, each as "key must be rule, got value". Pure."""
    rules = (*_bounds(grpo), *_combinations(grpo), *_with_rollout(grpo, rollout))
    return broken("grpo", grpo, rules)


def _bounds(g: GRPO) -> Rules:
    yield not 0 < g.clip_ratio_lower_bound <= 1, "clip_ratio_lower_bound", "in (0, 1]"
    yield g.clip_ratio_upper_bound <= 0, "clip_ratio_upper_bound", "greater than 0"
    for name in ("ptx_scale", "sapo_tau_pos", "sapo_tau_neg"):
        yield getattr(g, name) <= 0, name, "greater than 0"
    yield not 0 < g.top_entropy_share <= 1, "top_entropy_share", "in (0, 1]"
    rule = "1 or greater (less would cut on-policy tokens)"
    yield g.cispo_weight_max < 1, "cispo_weight_max", rule
    yield (
        g.clip_ratio_dual != 0 and g.clip_ratio_dual <= 1 + g.clip_ratio_upper_bound,
        "clip_ratio_dual",
        "0 (off) or greater than 1 + grpo.clip_ratio_upper_bound (it would clip before that does)",
    )
    for name in ("kl_beta", "pos_scaler", "neg_scaler", "logit_loss_weight", "m2_threshold"):
        yield getattr(g, name) < 0, name, "0 or greater"
    for name in ("entropy_loss_weight", "overlong_penalty", "length_penalty"):
        yield getattr(g, name) < 0, name, "0 or greater"
    for name in ("ptx_mixin_batchsize", "grad_norm_limit", "reward_collapse_steps"):
        yield getattr(g, name) < 0, name, "0 (off) or greater"
    for name in ("temperature", "overlong_cache_tokens"):
        yield getattr(g, name) < 0, name, "0 (off) or greater"
    for name in (
        "num_microbatches",
        "num_epochs",
        "dynamic_sampling_rounds",
        "max_unhealthy_steps",
    ):
        yield getattr(g, name) < 1, name, "1 or greater"
    for name in (
        "overlong_cache_share",
        "ref_model_ema",
        "onpolicy_logp_threshold",
    ):
        yield not 0 <= getattr(g, name) <= 1, name, "in [0, 1]"
    for name in ("rollout_is_veto_threshold", "rollout_is_threshold_lower"):
        yield not 0 <= getattr(g, name) < 1, name, "in [0, 1) (1 would cut on-policy tokens)"
    yield g.token_staleness_limit < -1, "token_staleness_limit", "-1 (off) or greater"
    yield g.token_budget < 0, "token_budget", "0 (derived) or greater"
    rule = "0 (off) or at least 1 (a smaller one would cut on-policy tokens)"
    yield g.rollout_is_threshold != 0 and g.rollout_is_threshold < 1, "rollout_is_threshold", rule


def _combinations(g: GRPO) -> Rules:
    """Rules against values that contradict each other."""
    rule = "empty while grpo.kl_beta is 0 (it would be loaded and never used)"
    yield bool(g.reference_model) and g.kl_beta == 0, "reference_model", rule
    rule = "0 while grpo.kl_beta is 0 (there is no reference model to move)"
    yield 0 < g.ref_model_ema < 1 and g.kl_beta == 0, "ref_model_ema", rule
    rule = "0 while grpo.overlong_cache_tokens is set (both name the same length)"
    yield g.overlong_cache_tokens > 0 and g.overlong_cache_share > 0, "overlong_cache_share", rule
    yield (
        g.advantage_normalization == "batch" and not g.normalize_advantage_std,
        "advantage_normalization",
        '"group" while grpo.normalize_advantage_std is false (nothing is divided then)',
    )
    rule = 'unset with grpo.loss_normalization = "constant" (they name different losses)'
    yield g.grpo_by_token is not None and g.loss_normalization == "constant", "grpo_by_token", rule
    yield (
        g.rollout_is_threshold_lower > 0 and g.rollout_is_mode == "truncate",
        "rollout_is_threshold_lower",
        '0 unless grpo.rollout_is_mode is "mask" (truncation has no lower bound)',
    )
    yield (
        g.rollout_is_threshold == 1 and g.rollout_is_mode == "mask",
        "rollout_is_threshold",
        '0 (off) or greater than 1 with grpo.rollout_is_mode = "mask" (each on-policy token has a'
        " weight near 1, and those above it would be cut)",
    )


def _with_rollout(g: GRPO, r: Rollout) -> Rules:
    rule = (
        f"at most rollout.prompts_per_step ({r.prompts_per_step}; a minibatch is made of whole"
        " groups)"
    )
    yield g.num_microbatches > r.prompts_per_step, "num_microbatches", rule
    rule = (
        f"0, or the same as rollout.temperature ({r.temperature}; log-probabilities at another"
        " temperature than sampling had make every ratio wrong)"
    )
    yield g.temperature not in (0, r.temperature), "temperature", rule
    rule = f"at most rollout.max_completion_tokens ({r.max_completion_tokens})"
    yield g.overlong_cache_tokens > r.max_completion_tokens, "overlong_cache_tokens", rule
    in_loss = g.kl_beta > 0 and not g.kl_in_reward
    k1 = in_loss and g.kl_estimator_type == "k1"
    rule = (
        "k2 or k3, or grpo.kl_in_reward = true (the gradient of k1 is 0 on average, even on tokens"
        " of the policy itself: the term would do nothing)"
    )
    yield k1, "kl_estimator_type", rule
    rule = (
        "k2 or k3 (or grpo.kl_in_reward = true) unless every token is of the policy itself"
        " (rollout.max_staleness = 0 and one optimizer step per batch): on others the gradient of"
        " abs is another one"
    )
    is_abs = in_loss and g.kl_estimator_type == "abs"
    off_policy = r.max_staleness > 0 or optimizer_steps(g) > 1
    yield is_abs and off_policy, "kl_estimator_type", rule
    for other, what in ((r.source != "task", "groups from outside"), (r.agent, "agents")):
        rule = f"false with {what} (their tokens come without the experts that computed them)"
        yield g.router_replay and bool(other), "router_replay", rule
    if g.allow_uncorrected_off_policy:
        return
    force = (
        "off-policy data without a correction biases the gradient;"
        " grpo.allow_uncorrected_off_policy = true forces it"
    )
    yield (
        r.max_staleness > 0
        and g.rollout_is_threshold == 0
        and g.proximal_logprobs != "rollout"
        and g.policy_loss not in AGAINST_ENGINE,
        "rollout_is_threshold",
        '1 or more when rollout.max_staleness > 0, or grpo.proximal_logprobs = "rollout"'
        f" ({force})",
    )
    yield (
        optimizer_steps(g) > 1 and g.proximal_logprobs == "interpolate",
        "num_microbatches" if g.num_microbatches > 1 else "num_epochs",
        '1 with grpo.proximal_logprobs = "interpolate", which does not see the optimizer steps'
        f" inside a batch ({force})",
    )
