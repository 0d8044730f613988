"""Warnings at the start about keys that were set and have no effect beside the job's other keys.
Pure.

A key without effect is how "GSPO" turns out to have been GRPO. It is not an error: the job may be
one of a series in which another key changes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from titan_grpo.config.grpo import AGAINST_ENGINE, GRPO, optimizer_steps
from titan_grpo.config.rollout import ARGUMENTS, PYTHONS, Rollout
from titan_grpo.config.task import UNUSED

Row = tuple[bool, str, str]
"""(condition, keys without effect while it holds, separated by blanks, and the reason)."""


def inert(
    config: Any, given: Collection[str], others: Mapping[str, Iterable[Row]] = MappingProxyType({})
) -> list[str]:
    """Return a line 'KEY = VALUE has no effect: REASON' for each key of ``given`` (dotted, such as
    "grpo.kl_beta") that does nothing in this job. ``others``: rows of torchtitan's sections.

    Example: {"grpo.clip_ratio_upper_bound"} with every other key at its default gives one line:
    with one optimizer step per batch the ratio is 1.
    """
    g, r = config.grpo, config.rollout
    tables: dict[str, Iterable[Row]] = {
        "grpo": (*_policy(g, r), *_others(g, r)),
        "rollout": _rollout(r, bool(config.evaluation)),
        "weight_sync": _weight_sync(r, config.weight_sync),
        **others,
    }
    found: dict[str, str] = {}
    for section, rows in tables.items():
        for name, why in ((name, why) for so, names, why in rows if so for name in names.split()):
            if (key := f"{section}.{name}") in given:
                value = getattr(getattr(config, section), name)
                found.setdefault(key, f"{key} = {value!r:.200} has no effect: {why}")
    return list(found.values())


NO_TEXT = "grpo.ptx_mixin_batchsize = 0: no text is mixed in"

RATIO = "clip_ratio_lower_bound clip_ratio_upper_bound clip_ratio_dual"
CORRECTION = "rollout_is_level rollout_is_mode rollout_is_threshold_lower rollout_is_veto_threshold"


def _policy(g: GRPO, r: Rollout) -> Iterator[Row]:
    """Rows of ratio, bounds and correction."""
    loss = f'grpo.policy_loss = "{g.policy_loss}"'
    yield (
        g.policy_loss in AGAINST_ENGINE,
        f"{RATIO} {CORRECTION} policy_ratio_type proximal_logprobs rollout_is_threshold",
        f"{loss} weights each token by policy against engine, without a ratio to a proximal policy",
    )
    rule = f"{loss} has a soft gate (grpo.sapo_tau_pos, sapo_tau_neg) in place of bounds"
    yield g.policy_loss == "sapo", RATIO, rule
    yield g.policy_loss != "clip", "clip_ratio_dual policy_ratio_type", f"{loss} has its own"
    for name, own in (("cispo", "cispo_weight_max"), ("sapo", "sapo_tau_pos sapo_tau_neg")):
        yield g.policy_loss != name, own, f'{loss}, and only "{name}" reads it'
    one = optimizer_steps(g) == 1 and (
        g.proximal_logprobs == "recompute"
        or (g.proximal_logprobs == "interpolate" and r.max_staleness == 0)
    )
    # A sequence ratio of 1 still spreads its gradient over the sequence, which matters where the
    # tokens of a sequence have different weights or advantages.
    spread = (
        (g.rollout_is_level == "token" and g.rollout_is_threshold > 0)
        or (g.kl_in_reward and g.kl_beta > 0)
        or g.top_entropy_share < 1
        or g.m2_threshold > 0
    )
    rule = (
        "the ratio is 1 by construction, since the one optimizer step of a batch starts at the"
        " policy that it is measured against; take grpo.num_microbatches or num_epochs > 1, or"
        ' proximal_logprobs = "rollout"'
    )
    yield one, f"{RATIO} sapo_tau_pos sapo_tau_neg" + ("" if spread else " policy_ratio_type"), rule
    rule = (
        'with grpo.proximal_logprobs = "rollout" the ratio itself is against the engine, and the'
        " weight is 1"
    )
    yield g.proximal_logprobs == "rollout", f"{CORRECTION} rollout_is_threshold", rule
    yield g.rollout_is_threshold == 0, CORRECTION, "grpo.rollout_is_threshold = 0 turns it off"


def _others(g: GRPO, r: Rollout) -> Iterator[Row]:
    """Rows of the KL term, advantages and other switches."""
    no_kl = "grpo.kl_beta = 0: there is no reference model"
    yield g.kl_beta == 0, "kl_estimator_type kl_in_reward", no_kl
    yield g.kl_in_reward, "kl_estimator_type", "with grpo.kl_in_reward the estimator is k1"
    undivided = "grpo.normalize_advantage_std = false: nothing is divided"
    yield not g.normalize_advantage_std, "advantage_normalization", undivided
    scaled = g.normalize_advantage_std and g.advantage_normalization == "batch"
    cancels = scaled and g.advantage_baseline == "leave_one_out" and r.source == "task"
    rule = (
        'grpo.advantage_normalization = "batch" divides by the deviation of the whole step, and'
        " leave-one-out's factor cancels, since all groups of a task have one size"
    )
    yield cancels, "advantage_baseline", rule
    older = r.max_stale_token_share > 0 and r.consume != "started"
    rule = f"rollout.max_staleness = {r.max_staleness} lets no older token in"
    yield g.token_staleness_limit >= r.max_staleness and not older, "token_staleness_limit", rule
    cache = g.overlong_cache_tokens or g.overlong_cache_share
    yield not cache, "overlong_penalty", "grpo.overlong_cache_tokens and .._share are 0"
    yield not g.length_penalty, "correct_reward", "grpo.length_penalty = 0"
    yield not g.dynamic_sampling, "dynamic_sampling_rounds", "grpo.dynamic_sampling = false"
    yield not g.ptx_mixin_batchsize, "ptx_scale ptx_scale_by_tokens", NO_TEXT
    dealt = "grpo.balance_batch = false deals groups in their order"
    yield not g.balance_batch, "balance_equal_counts", dealt
    first = 'grpo.on_unhealthy = "stop" ends the run at the first such step'
    yield g.on_unhealthy == "stop", "max_unhealthy_steps", first


def _rollout(r: Rollout, evaluates: bool) -> Iterator[Row]:
    yield (
        not r.launches,
        "launch_engines launch_count launch_gpus launch_python launch_sglang_python launch_args"
        " launch_sglang_args",
        'no server is started without rollout.servers = ["launch"]',
    )
    for engine, python in PYTHONS.items():
        names, rule = f"{python} {ARGUMENTS[engine]}", f'rollout.launch_engines has no "{engine}"'
        yield engine not in r.launch_engines, names, rule
    yield not r.servers_slurm, "servers_port servers_per_host", "rollout.servers_slurm is empty"
    source = f'rollout.source = "{r.source}"'
    yield r.source != "atropos", "atropos_url", source
    yield r.source != "push", "push_address push_key_env", source
    elsewhere = f"{source}: no task makes prompts here"
    unused = " ".join(UNUSED)
    yield r.source != "task", unused, elsewhere
    yield (
        r.source != "task" and not evaluates,  # its tables inherit these
        "reward reward_weights dataset dataset_config dataset_split dataset_filter dataset_shuffle"
        " prompt system_prompt tools chat_template chat_template_kwargs"
        " task task_path task_concurrency task_timeout_s max_turns stop stop_token_ids",
        elsewhere,
    )
    arrival = f"{source}: groups are taken as they arrive"
    yield r.source != "task" and r.consume != "freshest", "consume", arrival
    replayed = "rollout.replay_path has the groups, in its own order"
    yield bool(r.replay_path), "record_path consume", replayed
    share = "max_stale_token_share"
    yield r.source != "task", share, f"{source}: such groups are refused by their oldest version"
    waits = 'rollout.consume = "started" waits for each group, and none is too stale then'
    yield r.consume == "started", share, waits
    unmixed = "rollout.in_flight_weight_updates = false: no completion is of two versions"
    yield not r.in_flight_weight_updates, share, unmixed
    local = 'rollout.controller = "local"'
    yield r.controller == "local", "controller_key_env controller_deadline_s", local


def _weight_sync(r: Rollout, w: Any) -> Iterator[Row]:
    for key, value in ("apply", "streamed"), ("transport", "nccl"):
        why = f'weight_sync.{key} = "{value}" broadcasts: servers read nothing'
        yield getattr(w, key) == value, "relay zones delta", why
    why = 'weight_sync.transport = "nixl": servers read from the trainer, one-sided'
    yield w.transport == "nixl", "relay zones", why
    # A key in the environment is not known here.
    keyed = bool(w.run_key_file) or r.launches
    yield keyed, "digest", "with a run key, as launched servers have one, the hash is keyed blake3"
    yield not w.relay, "zones", "weight_sync.relay = false"
    undrained = "nothing is drained with rollout.in_flight_weight_updates = true"
    yield r.in_flight_weight_updates, "drain_deadline_s", undrained
