"""The section ``[grpo]``: the algorithm's knobs and their rules. The formulas of all of them:
docs/algorithm.md.

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
    """Sync weights in the background while training goes on; false waits for every healthy server
    after each step."""

    algorithm: str = ""
    """A named algorithm (grpo, dapo, dr_grpo, gspo, cispo, rloo, reinforce_pp, sapo, gmpo, topr,
    m2po) or a TOML file of your own with a table [grpo]. It sets every key of this section that
    matters to it; a key that the job sets itself wins. The start prints what it set. Empty:
    none."""

    policy_loss: Literal["clip", "cispo", "gmpo", "sapo", "topr"] = "clip"
    """clip: PPO's clipped objective. gmpo: one geometric mean of bounded ratios per sequence. sapo:
    a soft gate of the ratio. cispo, topr: the log-probability, weighted by policy against engine,
    per token or (where the advantage is negative) per sequence."""

    policy_ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio per token (GRPO) or one per sequence, the exponential of its mean log-ratio
    (GSPO)."""

    clip_ratio_lower_bound: float = 0.2
    """A ratio below 1 - this gives no gradient where the advantage is negative. 1: no lower
    bound."""

    clip_ratio_upper_bound: float = 0.28
    """A ratio above 1 + this gives no gradient where the advantage is positive (DAPO's
    clip-higher)."""

    clip_ratio_dual: float = 0.0
    """policy_loss = "clip": where the advantage A is negative the objective is at least this times
    A (dual clip; 3 is usual); 0: off."""

    cispo_weight_max: float = 5.0
    """policy_loss = "cispo": the greatest weight of a token."""

    sapo_tau_pos: float = 1.0
    """policy_loss = "sapo": steepness of the gate where the advantage is positive."""

    sapo_tau_neg: float = 1.05
    """The same where it is not."""

    num_microbatches: int = 1
    """Optimizer steps in a pass over a batch: its groups are dealt to that many PPO minibatches.
    One batch makes one version, whatever their number."""

    num_epochs: int = 1
    """Passes over a batch, each of num_microbatches optimizer steps."""

    proximal_logprobs: Literal["recompute", "interpolate", "rollout"] = "recompute"
    """What the ratio's denominator is. recompute: the policy before the batch's first optimizer
    step. interpolate: between the engine's log-probabilities and the current ones, by staleness.
    rollout: the engine's; rollout_is_* then has no effect."""

    kl_beta: float = 0.0
    """Weight of the KL term to the reference model; 0 builds no reference model."""

    kl_estimator_type: Literal["k1", "k2", "k3", "mse", "abs"] = "k3"
    """KL estimator per token: k1 = -log r, k2 = mse = (log r)^2 / 2, k3 = r - 1 - log r, abs = |log
    r|, with r = p_ref / p. k2, mse and k3 are weighted by policy against engine; k1 and abs need
    data of the policy itself."""

    kl_in_reward: bool = False
    """Take kl_beta times the KL of a token and the later ones of its completion from its advantage,
    in place of the KL term; the estimator is k1 then."""

    reference_model: str = ""
    """Directory of HF safetensors for the reference model; empty: model.hf_assets_path. Used if
    kl_beta > 0."""

    ref_model_ema: float = 0.0
    """After each step reference = this * reference + (1 - this) * policy; 0 and 1 leave the
    reference as it is."""

    normalize_advantage_std: bool = True
    """Divide centred rewards by a standard deviation (GRPO); false leaves it out (Dr.GRPO)."""

    advantage_normalization: Literal["group", "batch"] = "group"
    """Which standard deviation that is: the group's own (GRPO), or one for the whole step
    (REINFORCE++ with a baseline)."""

    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group (GRPO), or the mean of the others in it
    (RLOO)."""

    scale_adv_by_len: bool = False
    """Multiply each reward by its completion's tokens before it is compared."""

    pos_scaler: float = 1.0
    """Factor on positive advantages."""

    neg_scaler: float = 1.0
    """Factor on the others."""

    overlong_cache_tokens: int = 0
    """Completions longer than rollout.max_completion_tokens minus this lose reward, growing
    linearly (DAPO); 0: off."""

    overlong_cache_share: float = 0.0
    """The same as a share of rollout.max_completion_tokens; 0: off."""

    overlong_penalty: float = 1.0
    """What a completion of the full length loses by that."""

    length_penalty: float = 0.0
    """Weight of a reward for being short among the completions of a group: 0.5 for the shortest to
    -0.5 for the longest; a wrong one never gains by it (Kimi k1.5). 0: off."""

    correct_reward: float = 0.5
    """For length_penalty: a completion with at least this reward is correct."""

    mask_truncated: bool = False
    """Do not train on completions that hit rollout.max_completion_tokens; their rewards count for
    the others of their group (DAPO's overlong filtering)."""

    dynamic_sampling: bool = False
    """Leave out groups whose rewards are all equal and take others in their place (DAPO). A
    replayed run takes no others."""

    dynamic_sampling_rounds: int = 3
    """How often that is tried in one step; then the step is made of what there is."""

    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens (DAPO), mean over sequences of their token means (GRPO), or sum over a
    constant (Dr.GRPO)."""

    grpo_by_token: bool | None = None
    """Alias of loss_normalization: true is "token", false "sequence"; unset: that key decides."""

    top_entropy_share: float = 1.0
    """The policy term is made of this share of the tokens of an optimizer step: those at which the
    policy before the batch has the greatest entropy. 1: all. Less costs one more forward pass."""

    m2_threshold: float = 0.0
    """Leave tokens out of the policy term until, of those that moved on in the direction of their
    advantage since they were sampled, the mean square of log policy - log engine is at most this:
    the greatest ones first, in each optimizer step (M2PO). 0: off. Costs one more forward pass."""

    onpolicy_logp_threshold: float = 0.0
    """Tokens to which the policy gives a probability below this are left out of every term of the
    loss; 0 and 1: none is."""

    token_staleness_limit: int = -1
    """Tokens that are more than so many versions older than the trainer are left out of every term
    of the loss, each by its own version; -1: none is."""

    logit_loss_weight: float = 0.0
    """Adds the mean over the vocabulary of (this * logit)^2 per token."""

    entropy_loss_weight: float = 0.0
    """Subtracts this times the entropy per token: greater keeps the policy more random."""

    rollout_is_level: Literal["token", "sequence", "geometric"] = "token"
    """Importance correction for trainer/engine mismatch and staleness: one weight per token, per
    sequence (the product of its tokens'), or the sequence's geometric mean."""

    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """truncate: weights above the threshold become the threshold. mask: what lies outside the
    bounds counts nothing."""

    rollout_is_threshold: float = 2.0
    """Upper bound of that weight. 0: no weight; then only proximal_logprobs = "rollout" corrects,
    by the clip bounds."""

    rollout_is_threshold_lower: float = 0.0
    """Lower bound for rollout_is_mode = "mask"; 0: 1 / rollout_is_threshold."""

    rollout_is_veto_threshold: float = 0.0
    """One token with a ratio of trainer to engine below this takes its whole sequence out of the
    policy term; 0: off."""

    allow_uncorrected_off_policy: bool = False
    """Train on stale data without a correction all the same: the gradient is then biased, for
    experiments."""

    ptx_mixin_batchsize: int = 0
    """Sequences of plain text, over all ranks, whose cross-entropy is mixed into each optimizer
    step; 0: none. They come from torchtitan's own loader (training.dataset,
    training.dataset_path)."""

    ptx_scale: float = 1.0
    """Weight of that cross-entropy, a mean over its tokens."""

    ptx_scale_by_tokens: bool = False
    """Multiply that weight by the text's tokens over the completion tokens of the same optimizer
    step."""

    temperature: float = 0.0
    """Alias of rollout.temperature, which decides. 0: not used; any other value must be equal to
    that."""

    on_unhealthy: Literal["skip", "stop"] = "skip"
    """An optimizer step with NaN or Inf in loss or gradient, or past the two bounds below: skip it
    on every rank, or stop the run. A training step without any optimizer step makes no version."""

    max_unhealthy_steps: int = 5
    """Stop the run after that many training steps in a row without an optimizer step."""

    grad_norm_limit: float = 0.0
    """A gradient norm above this, before clipping, is unhealthy; 0: off."""

    reward_collapse_steps: int = 0
    """That many steps in a row in which all rewards are equal are unhealthy; 0: off."""

    token_budget: int = 0
    """Rows times padded length of one microbatch on one rank; 0: training.local_batch_size *
    training.seq_len."""

    balance_batch: bool = True
    """Give the data-parallel ranks equal work (Karmarkar-Karp on the operations that the model's
    dimensions say; groups stay whole); false deals groups to them in the order in which they
    came."""

    balance_equal_counts: bool = False
    """Balanced shares have the same number of groups, give or take one."""

    balance_split_groups: bool = False
    """Balance single completions and not whole groups: for fewer groups than ranks, which leave
    ranks idle otherwise."""

    single_rank_load: bool = True
    """Rank 0 builds the tensors of all ranks and sends them. false: it sends each rank the tokens
    of its own share, and the rank builds the very same tensors, for batches so large that rank 0
    would keep the others waiting. Rank 0 plans in both."""

    router_replay: bool = False
    """Train an MoE on the experts that the engine chose for each token when it sampled, in place of
    the trainer's own choice; the gates stay the trainer's. Servers must run with
    --enable-return-routed-experts, as launched ones do. Completions without routes are dropped."""

    fp32_lm_head: bool = False
    """Compute the logits in float32, whatever training.mixed_precision_param is: from the weights
    and hidden states as they are in that type. Launched servers do so too; others must be started
    with --hf-overrides '{"head_dtype": "float32"}' (vLLM) or --enable-fp32-lm-head (SGLang)."""

    pack_sequences: bool = False
    """Several sequences in one row of up to token_budget tokens, with attention kept inside each,
    in place of padding."""


def resolve_aliases(grpo: GRPO) -> None:
    """Write the keys of the existing trainer into ours, which alone the code reads. The values are
    those of a section without violations."""
    if grpo.grpo_by_token is not None:
        grpo.loss_normalization = "token" if grpo.grpo_by_token else "sequence"


AGAINST_ENGINE = ("cispo", "topr")
"""Values of policy_loss whose weight is policy against engine: they correct for off-policy data by
themselves."""


def optimizer_steps(grpo: GRPO) -> int:
    """How many optimizer steps one batch is for."""
    return grpo.num_microbatches * grpo.num_epochs


def may_be_off_policy(grpo: GRPO, rollout: Rollout) -> bool:
    """Whether a token may be of another policy than the one that is trained, by design."""
    return rollout.max_staleness > 0 or optimizer_steps(grpo) > 1


def violations(grpo: GRPO, rollout: Rollout) -> list[str]:
    """All broken rules of the section, each as "key must be rule, got value". Pure; empty if
    none."""
    rules = (*_bounds(grpo), *_combinations(grpo), *_with_rollout(grpo, rollout))
    return broken("grpo", grpo, rules)


def _bounds(g: GRPO) -> Rules:
    """Single values."""
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
        "rollout_is_threshold_lower",
    ):
        yield not 0 <= getattr(g, name) <= 1, name, "in [0, 1]"
    yield not 0 <= g.rollout_is_veto_threshold < 1, "rollout_is_veto_threshold", "in [0, 1)"
    yield g.token_staleness_limit < -1, "token_staleness_limit", "-1 (off) or greater"
    yield g.token_budget < 0, "token_budget", "0 (derived) or greater"
    rule = "0 (off) or at least 1 (a smaller one would cut on-policy tokens)"
    yield g.rollout_is_threshold != 0 and g.rollout_is_threshold < 1, "rollout_is_threshold", rule


def _combinations(g: GRPO) -> Rules:
    """Values that contradict each other."""
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


def _with_rollout(g: GRPO, r: Rollout) -> Rules:
    """Values that depend on [rollout]."""
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
    yield (
        g.kl_beta > 0
        and not g.kl_in_reward
        and g.kl_estimator_type in ("k1", "abs")
        and may_be_off_policy(g, r),
        "kl_estimator_type",
        "k2 or k3 (or grpo.kl_in_reward = true) unless every token is of the policy itself"
        " (rollout.max_staleness = 0 and one optimizer step per batch): on others the gradient of"
        " k1 and abs is not the KL's, not even on average",
    )
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
