"""The rules of our sections: what is refused, and that the message names key, rule and value."""

from dataclasses import replace
from typing import Any

import pytest

from titan_grpo.config import (
    GRPO,
    LONGEST_S,
    Alerts,
    Dashboards,
    Evaluation,
    JobConfig,
    Rollout,
    WeightSync,
    check_rate,
    violations,
)
from titan_grpo.config.grpo import resolve_aliases
from titan_grpo.config.inert import inert
from titan_grpo.config.rollout import is_loopback, known_gpus, read_key
from titan_grpo.config.task import inherited
from titan_grpo.errors import ConfigError

ROLLOUT = Rollout(
    servers=["http://a:1"], prompts_per_step=4, max_completion_tokens=64, max_staleness=2
)
REMOTE = replace(ROLLOUT, controller="http://10.0.0.1:8910", controller_key_env="KEY")
LAUNCHED = replace(ROLLOUT, servers=["launch"], launch_python="p")
BOTH = replace(LAUNCHED, launch_engines=["vllm", "sglang"], consume="ready")
PUSHED = replace(ROLLOUT, source="push")
AGENTS = replace(ROLLOUT, agent="package.module:function")
FUNCTION = replace(ROLLOUT, reward=["m:f"], dataset="d.jsonl")
DRAINING = replace(ROLLOUT, max_staleness=1, in_flight_weight_updates=False)
UNREAD = {"config": "main", "split": "train[9:]", "filter": ["level > 1"], "shuffle": False}
"""Ends of the dataset_* keys' names -> a value that chooses other rows than the default."""


Section = GRPO | Rollout | WeightSync | Dashboards

NAMES = {
    GRPO: "grpo",
    Rollout: "rollout",
    WeightSync: "weight_sync",
    Dashboards: "dashboards",
}


def job(*sections: Section) -> JobConfig:
    """A sound job with these sections."""
    made = JobConfig(GRPO(), replace(ROLLOUT), WeightSync())
    for section in sections:
        setattr(made, NAMES[type(section)], section)
    return made


def found(*sections: Section) -> list[str]:
    return violations(job(*sections))


@pytest.mark.parametrize(
    ("section", "changes", "rule"),
    [
        (GRPO(), {"clip_ratio_lower_bound": 0.0}, "in (0, 1], got 0.0"),
        (GRPO(), {"kl_beta": -1.0}, "0 or greater, got -1.0"),
        (GRPO(), {"num_microbatches": 0}, "1 or greater, got 0"),
        (GRPO(), {"num_microbatches": 5}, "at most rollout.prompts_per"),
        (GRPO(), {"rollout_is_threshold": 0.5}, "0 (off) or at least"),
        (GRPO(), {"rollout_is_threshold": 0.0}, "1 or more when rollout.max_staleness > 0"),
        (
            GRPO(num_microbatches=2),
            {"proximal_logprobs": "interpolate"},
            "num_microbatches must be 1 with",
        ),
        (GRPO(), {"rollout_is_threshold_lower": 0.5}, "0 unless"),
        (GRPO(rollout_is_mode="mask"), {"rollout_is_threshold_lower": 1.0}, "in [0, 1) (1 would"),
        (GRPO(rollout_is_mode="mask"), {"rollout_is_threshold": 1.0}, "0 (off) or greater than 1 "),
        (GRPO(), {"rollout_is_veto_threshold": 1.0}, "in [0, 1)"),
        (GRPO(), {"ref_model_ema": 0.9}, "0 while grpo.kl_beta is 0"),
        (GRPO(kl_beta=0.1), {"ref_model_ema": 1.5}, "in [0, 1], got 1.5"),
        (GRPO(kl_beta=0.1), {"kl_estimator_type": "k1"}, "k2 or k3, or grpo.kl_in_reward = true"),
        (GRPO(kl_beta=0.1), {"kl_estimator_type": "abs"}, "k2 or k3"),
        (GRPO(), {"clip_ratio_dual": 1.2}, "0 (off) or greater than 1 +"),
        (GRPO(), {"cispo_weight_max": 0.5}, "1 or greater"),
        (GRPO(), {"top_entropy_share": 0.0}, "in (0, 1], got 0.0"),
        (GRPO(overlong_cache_tokens=8), {"overlong_cache_share": 0.5}, "0 while"),
        (GRPO(proximal_logprobs="interpolate"), {"num_epochs": 2}, "1 with grpo.proximal_logprobs"),
        (GRPO(), {"reference_model": "x"}, "empty while grpo.kl_beta is 0"),
        (
            GRPO(normalize_advantage_std=False),
            {"advantage_normalization": "batch"},
            '"group" while grpo.normalize_advantage_std is false',
        ),
        (
            GRPO(loss_normalization="constant"),
            {"grpo_by_token": True},
            'unset with grpo.loss_normalization = "constant"',
        ),
        (GRPO(), {"overlong_cache_tokens": 65}, "at most rollout.max"),
        (GRPO(), {"temperature": 0.7}, "0, or the same as rollout.temperature"),
        (GRPO(), {"max_unhealthy_steps": 0}, "1 or greater"),
        (GRPO(), {"ptx_scale": 0.0}, "greater than 0"),
        (ROLLOUT, {"servers": []}, 'a list of URLs, or ["launch"]'),
        (ROLLOUT, {"servers": ["http://a:1", "http://A:1/"]}, "without repetition"),
        (ROLLOUT, {"servers": ["http://localhost:1", "http://127.0.0.1:1/"]}, "without"),
        (LAUNCHED, {"launch_python": ""}, 'set when rollout.servers = ["launch'),
        (LAUNCHED, {"launch_engines": ["sglang"]}, "launch_sglang_python must be set"),
        (LAUNCHED, {"launch_engines": ["trt"]}, '"vllm", "sglang" or both'),
        (
            LAUNCHED,
            {"agent": "a:b", "tool_parser": "engine"},
            'launch_args must be with "--tool-call-parser"',
        ),
        (LAUNCHED, {"engine": "sglang"}, '"auto" for launched servers of vllm'),
        (
            replace(BOTH, launch_sglang_python="p"),
            {"engine": "vllm"},
            '"auto" for launched servers of vllm, sglang',
        ),
        (ROLLOUT, {"source": "atropos"}, "atropos_url must be a URL such as http://host:8000 with"),
        (PUSHED, {"push_address": "8900"}, "host:port"),
        (PUSHED, {"push_address": "[::1:8900"}, "host:port"),
        (PUSHED, {"push_address": "0.0.0.0:8900"}, "push_key_env must be set while"),
        (AGENTS, {"agent": "module"}, '"package.module:function", or "outside"'),
        (AGENTS, {"agent_address": "8900"}, "host:port"),
        (AGENTS, {"agent_address": "0.0.0.0:0"}, "agent_key_env must be set while"),
        (AGENTS, {"reward": ["m:f"]}, "empty with rollout.agent"),
        (AGENTS, {"task": "calculator"}, "left out with rollout.agent"),
        (AGENTS, {"chat_template": "none"}, "a template with rollout.agent"),
        (AGENTS, {"source": "push"}, '"task" with rollout.agent'),
        (ROLLOUT, {"group_size": 1}, "2 or more"),
        (ROLLOUT, {"task": "gsm8k"}, 'task_path must be set for task = "gsm8k"'),
        (ROLLOUT, {"task_error_budget": 101}, "0 to 100"),
        (ROLLOUT, {"task_error_budget": -1}, "0 to 100"),
        (ROLLOUT, {"task_concurrency": 0}, "greater than 0"),
        (ROLLOUT, {"task_timeout_s": 0.0}, "greater than 0"),
        (ROLLOUT, {"max_turns": 0}, "greater than 0"),
        (ROLLOUT, {"accept": "no_colon"}, 'empty or "package.module:function"'),
        (ROLLOUT, {"accept": "module:"}, 'empty or "package.module:function"'),
        (ROLLOUT, {"min_completion_tokens": -1}, "0 (off) or greater"),
        (ROLLOUT, {"min_completion_tokens": 65}, "at most rollout.max_completion_tokens"),
        (ROLLOUT, {"reward": ["m:f"]}, "dataset must be set with rollout.reward"),
        (ROLLOUT, {"dataset": "d.jsonl"}, "empty without rollout.reward"),
        *(
            (section, {f"dataset_{name}": value}, "left out without rollout.dataset")
            for section in (ROLLOUT, replace(ROLLOUT, task="gsm8k", task_path="d"), AGENTS)
            for name, value in UNREAD.items()
        ),
        (FUNCTION, {"task": "calculator"}, "left out with rollout.reward"),
        (FUNCTION, {"reward_weights": [1.0, 2.0]}, "empty or one weight for each of the 1"),
        (
            replace(FUNCTION, chat_template="none"),
            {"system_prompt": "x"},
            'empty with rollout.chat_template = "none"',
        ),
        (ROLLOUT, {"temperature": 0.005}, "0.01 or greater (below it vLLM samples at 0.01"),
        (ROLLOUT, {"temperature": 2.5}, 'at most 2 unless rollout.engine is "sglang"'),
        (ROLLOUT, {"top_p": 0.9}, "1 (engines give log-probabilities of what is left"),
        (ROLLOUT, {"top_k": 50}, "-1 (engines give"),
        (ROLLOUT, {"stop": ["</answer>", ""]}, "without an empty text"),
        (ROLLOUT, {"stop_token_ids": [-1]}, "of token ids"),
        (ROLLOUT, {"servers_port": 0}, "a port"),
        (REMOTE, {"controller": "remote"}, '"local" or a URL such as'),
        (REMOTE, {"controller": "http://:8910"}, '"local" or a URL'),
        (REMOTE, {"controller_key_env": ""}, "set while rollout.contr"),
        (REMOTE, {"callback_address": "10.0.0.2:0"}, "left out"),
        (REMOTE, {"controller_deadline_s": 0.0}, "greater than 0"),
        (replace(REMOTE, launch_python="p"), {"servers": ["launch"]}, "URLs while rollout.control"),
        (REMOTE, {"replay_path": "r.jsonl"}, 'controller must be "local" with rollout.replay_path'),
        (DRAINING, {"max_staleness": 2}, "0 or 1 unless"),
        (DRAINING, {"source": "push"}, "in_flight_weight_updates must be true with rollout.source"),
        (WeightSync(), {"slots": 1}, "2 or more"),
        (WeightSync(), {"slots": 257}, "at most 256"),
        (WeightSync(), {"block_bytes": 5000}, "a positive multiple of 4096"),
        (WeightSync(), {"bucket_bytes": 5000}, "a positive multiple of"),
        (WeightSync(), {"backoff_max_s": 0.1}, "at least"),
        (WeightSync(), {"commit_deadline_s": 0.0}, "greater than 0"),
        (Dashboards(), {"metrics_address": "9090"}, "host:port"),
    ],
)
def test_a_broken_rule_is_one_line_with_key_rule_and_value(
    section: Section, changes: dict[str, Any], rule: str
) -> None:
    """``rule``: of the key that is changed, unless it names another one."""
    assert found(section) == [] or isinstance(section, GRPO)
    (line,) = found(replace(section, **changes))
    rule = rule if " must be " in rule else f"{next(iter(changes))} must be {rule}"
    assert line.startswith(f"{NAMES[type(section)]}.{rule}"), line


@pytest.mark.parametrize(
    "change", [{"servers": ["x" * 1_000_000]}, {"controller": "x" * 1_000_000}]
)
def test_of_a_long_value_a_refusal_has_the_beginning(change: dict[str, Any]) -> None:
    (line, *_) = found(replace(ROLLOUT, **change))
    assert len(line) < 500


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:pass@word@a:1", "http://...@a:1"),
        ("user:password@a:1", "...@a:1"),
        ("http://a:99999", "http://a:99999"),
        ("http://a:1?x=1", "http://a:1?x=1"),
    ],
)
def test_a_server_that_is_no_plain_url_is_one_line_without_a_password(url: str, shown: str) -> None:
    (line,) = found(replace(ROLLOUT, servers=[url]))
    assert line == (
        "rollout.servers: a server must be a URL such as http://host:8000, without user, query and"
        f" fragment, got {shown!r}"
    )


@pytest.mark.parametrize(
    "section",
    [
        GRPO(),
        GRPO(rollout_is_threshold=0.0, proximal_logprobs="rollout"),
        GRPO(rollout_is_threshold=0.0, allow_uncorrected_off_policy=True),
        GRPO(
            num_microbatches=2, proximal_logprobs="interpolate", allow_uncorrected_off_policy=True
        ),
        GRPO(num_microbatches=2),
        GRPO(policy_loss="cispo", rollout_is_threshold=0.0),
        GRPO(kl_beta=0.1, kl_in_reward=True, kl_estimator_type="k1"),
        GRPO(temperature=1.0),
        replace(ROLLOUT, engine="sglang", temperature=2.5),
        GRPO(rollout_is_threshold=1.0),
        GRPO(kl_beta=0.1, ref_model_ema=0.99),
        REMOTE,
        DRAINING,
        replace(REMOTE, controller="local", controller_key_env=""),
        replace(REMOTE, controller="http://localhost:8910", controller_key_env=""),
        replace(REMOTE, controller="https://[::1]:8910", controller_key_env=""),
        WeightSync(relay=True, apply="streamed"),
        WeightSync(relay=True, transport="nccl"),
        WeightSync(relay=True, transport="nixl"),
    ],
)
def test_what_keeps_the_rules_passes(section: Section) -> None:
    assert found(section) == []


def test_on_policy_data_needs_no_correction_but_a_sync_step() -> None:
    on_policy = replace(ROLLOUT, max_staleness=0)
    assert found(GRPO(rollout_is_threshold=0.0), on_policy) == []
    (line,) = found(GRPO(async_weight_update=True), on_policy)
    assert line.startswith("rollout.max_staleness must be 1 or more with grpo.async_weight_update")


def test_k1_is_no_term_of_the_loss_and_abs_only_where_every_token_is_of_the_policy_itself() -> None:
    on_policy, k1 = replace(ROLLOUT, max_staleness=0), GRPO(kl_beta=0.1, kl_estimator_type="k1")
    (line,) = found(k1, on_policy)
    assert line.startswith("grpo.kl_estimator_type must be k2 or k3, or grpo.kl_in_reward = true")
    assert found(replace(k1, kl_in_reward=True), on_policy) == []
    assert found(replace(k1, kl_beta=0.0), on_policy) == []
    distance = replace(k1, kl_estimator_type="abs")
    assert found(distance, on_policy) == []
    for later in (replace(distance, num_microbatches=2), replace(distance, num_epochs=2)):
        (line,) = found(later, on_policy)
        assert line.startswith("grpo.kl_estimator_type must be k2 or k3 (or")


@pytest.mark.parametrize(
    ("section", "key", "reason"),
    [
        (GRPO(), "clip_ratio_lower_bound", "the ratio is 1 by construction"),
        (GRPO(), "clip_ratio_upper_bound", "the ratio is 1 by construction"),
        (GRPO(rollout_is_level="geometric"), "policy_ratio_type", "the ratio is 1 by"),
        (GRPO(rollout_is_threshold=0.0), "policy_ratio_type", "the ratio is 1 by"),
        (GRPO(policy_loss="sapo"), "sapo_tau_neg", "the ratio is 1 by construction"),
        (GRPO(policy_loss="cispo"), "clip_ratio_upper_bound", "policy against engine"),
        (GRPO(policy_loss="cispo"), "rollout_is_threshold", "policy against engine"),
        (GRPO(policy_loss="topr"), "proximal_logprobs", "policy against engine"),
        (GRPO(policy_loss="gmpo"), "policy_ratio_type", "has its own"),
        (GRPO(), "cispo_weight_max", 'and only "cispo" reads it'),
        (GRPO(proximal_logprobs="rollout"), "rollout_is_mode", "the weight is 1"),
        (GRPO(rollout_is_threshold=0.0), "rollout_is_level", "turns it off"),
        (GRPO(), "kl_in_reward", "there is no reference model"),
        (GRPO(kl_beta=0.1, kl_in_reward=True), "kl_estimator_type", "the estimator is k1"),
        (GRPO(), "overlong_penalty", ".._share are 0"),
        (GRPO(), "correct_reward", "grpo.length_penalty = 0"),
        (GRPO(), "dynamic_sampling_rounds", "grpo.dynamic_sampling = false"),
        (GRPO(token_staleness_limit=2), "token_staleness_limit", "lets no older token in"),
        (GRPO(), "ptx_scale", "no text is mixed in"),
        (GRPO(balance_batch=False), "balance_equal_counts", "in their order"),
        (
            GRPO(advantage_normalization="batch", advantage_baseline="leave_one_out"),
            *("advantage_baseline", "factor cancels"),
        ),
        (WeightSync(relay=True, apply="streamed"), "relay", "broadcasts: servers read nothing"),
        (WeightSync(relay=True, apply="streamed"), "delta", "broadcasts: servers read nothing"),
        (WeightSync(relay=True, transport="nccl"), "delta", "broadcasts: servers read nothing"),
        (WeightSync(relay=True, transport="nccl"), "zones", "broadcasts: servers read nothing"),
        (WeightSync(relay=True, transport="nixl"), "relay", "one-sided"),
        (WeightSync(relay=False), "zones", "weight_sync.relay = false"),
        (WeightSync(digest="blake3", run_key_file="key"), "digest", "keyed blake3"),
        (replace(ROLLOUT, replay_path="r"), "record_path", "replay_path has the groups"),
        (replace(ROLLOUT, replay_path="r"), "consume", "replay_path has the groups"),
        (LAUNCHED, "launch_sglang_args", 'launch_engines has no "sglang"'),
        (replace(LAUNCHED, launch_engines=["sglang"]), "launch_python", 'has no "vllm"'),
        (PUSHED, "consume", "taken as they arrive"),
        (PUSHED, "reward", "no task makes prompts here"),
        (PUSHED, "dataset", "no task makes prompts here"),
        (PUSHED, "accept", "no task makes prompts here"),
    ],
)
def test_a_key_that_was_set_and_cannot_act_is_one_line(
    section: GRPO | Rollout | WeightSync, key: str, reason: str
) -> None:
    name = f"{NAMES[type(section)]}.{key}"
    (line,) = inert(job(section), {name, "rollout.servers"})
    assert line.startswith(f"{name} = ")
    assert " has no effect: " in line
    assert reason in line
    assert inert(job(section), {"rollout.servers"}) == []


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (GRPO(num_microbatches=2), "clip_ratio_upper_bound"),
        (GRPO(num_epochs=2), "clip_ratio_upper_bound"),
        (GRPO(proximal_logprobs="rollout"), "clip_ratio_upper_bound"),
        (GRPO(proximal_logprobs="interpolate"), "clip_ratio_upper_bound"),
        # One ratio per sequence spreads the tokens' weights over it, also where its value is 1.
        (GRPO(policy_ratio_type="sequence"), "policy_ratio_type"),
        (GRPO(rollout_is_threshold=0.0, kl_in_reward=True, kl_beta=0.1), "policy_ratio_type"),
        (
            GRPO(
                advantage_baseline="leave_one_out",
                advantage_normalization="batch",
                normalize_advantage_std=False,
            ),
            "advantage_baseline",
        ),
        (GRPO(rollout_is_level="geometric", top_entropy_share=0.2), "policy_ratio_type"),
        (GRPO(rollout_is_level="sequence", m2_threshold=0.04), "policy_ratio_type"),
        (GRPO(policy_loss="cispo"), "cispo_weight_max"),
        # Without it whole groups are dealt, with it completions.
        (GRPO(balance_batch=False), "balance_split_groups"),
        *((WeightSync(relay=True), key) for key in ("relay", "delta", "zones", "digest")),
        *((BOTH, key) for key in ("record_path", "launch_sglang_args", "launch_python")),
        *((BOTH, key) for key in ("consume", "reward", "dataset", "accept")),
        (replace(PUSHED, consume="freshest"), "consume"),
    ],
)
def test_a_key_that_acts_is_not_named(section: GRPO | Rollout | WeightSync, key: str) -> None:
    assert inert(job(section), {f"{NAMES[type(section)]}.{key}"}) == []


def test_older_tokens_come_in_by_their_share_and_then_their_limit_acts() -> None:
    share = replace(ROLLOUT, consume="ready", max_stale_token_share=0.5)
    limit = GRPO(token_staleness_limit=2)
    given = {"grpo.token_staleness_limit", "rollout.max_stale_token_share"}
    assert found(limit, share) == inert(job(limit, share), given) == []
    lines = inert(job(limit, replace(share, consume="started")), given)
    assert sorted(line.partition(" = ")[0] for line in lines) == sorted(given)
    for changes in ({"max_stale_token_share": 1.0}, {"max_staleness": 0}):
        (line,) = found(replace(share, **changes))
        assert line.startswith("rollout.max_stale_token_share must be 0 ")


def test_keys_of_other_sections_that_cannot_act_are_named_too() -> None:
    given = {"rollout.launch_count", "rollout.push_address", "weight_sync.drain_deadline_s"}
    lines = inert(job(), given)
    assert sorted(line.partition(" = ")[0] for line in lines) == sorted(given)


def test_what_evaluations_inherit_acts_with_groups_from_outside_too() -> None:
    made = job(PUSHED)
    made.evaluation = [Evaluation(name="held_out", reward=["m:f"])]  # type: ignore[list-item]
    assert inert(made, {"rollout.reward", "rollout.dataset", "rollout.stop"}) == []
    (line,) = inert(made, {"rollout.reward", "rollout.accept"})
    assert line.startswith("rollout.accept = ")


def test_the_hash_of_blocks_is_the_run_keys_which_a_run_that_launches_always_has() -> None:
    (line,) = inert(job(LAUNCHED, WeightSync(digest="blake3")), {"weight_sync.digest"})
    assert "keyed blake3" in line


def test_the_servers_gpus_are_known_where_the_run_starts_all_of_them() -> None:
    launched = replace(LAUNCHED, launch_gpus=[4, 5])
    assert known_gpus(launched) == 2
    # As with --rollout.servers URL on a recipe that launches.
    assert known_gpus(replace(launched, servers=["http://a:1"])) == 0
    assert known_gpus(replace(launched, servers_file="more")) == 0


def test_a_recording_can_be_made_with_dynamic_sampling() -> None:
    recording = replace(ROLLOUT, record_path="r.jsonl")
    assert found(GRPO(dynamic_sampling=True), recording) == []


@pytest.mark.parametrize(
    ("grpo", "normalization"),
    [
        (GRPO(loss_normalization="constant"), "constant"),
        (GRPO(grpo_by_token=True), "token"),
        (GRPO(grpo_by_token=False), "sequence"),
    ],
)
def test_the_old_name_of_the_normalisation_decides_where_it_is_set(
    grpo: GRPO, normalization: str
) -> None:
    resolve_aliases(grpo)
    assert grpo.loss_normalization == normalization


def test_a_name_that_only_begins_like_loopback_is_not() -> None:
    assert is_loopback("127.0.0.9")
    assert not is_loopback("127.0.0.1.example.com")


def evaluated(*tables: Evaluation, **grpo: Any) -> list[str]:
    made = job(GRPO(**{"async_weight_update": True, **grpo}))
    made.evaluation = list(tables)  # type: ignore[arg-type]  # as titan/jobconfig.py makes them
    return violations(made)


EVALUATION = Evaluation(name="test", rows=8, every=10)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"name": "a b"}, "name must be letters, digits, - and _"),
        ({"every": 0, "at_start": False, "at_end": False}, "every must be greater than 0"),
        ({"rows": 0}, "rows must be greater than 0 with a task of a class"),
        ({"samples": 2, "pass_at": [1, 3]}, "pass_at must be numbers from 1 to samples (2)"),
        ({"temperature": 0.005}, "temperature must be 0 or at least 0.01 (vLLM would"),
        ({"timeout_s": 0.0}, "timeout_s must be greater than 0"),
        ({"task_concurrency": 0}, "task_concurrency must be greater than 0"),
        ({"reward": ["a:b"]}, "dataset must be set with rollout.reward"),
        (
            {"agent": "a:b", "dataset": "d.jsonl"},
            "agent must be empty: an evaluation calls no agent",
        ),
    ],
)
def test_a_mistake_in_an_evaluation_is_one_line_with_its_name(
    changes: dict[str, Any], rule: str
) -> None:
    assert evaluated(EVALUATION) == []
    (found,) = evaluated(replace(EVALUATION, **changes))
    assert found.startswith("evaluation '")
    assert rule in found


def test_evaluations_need_names_that_differ_and_training_that_does_not_wait() -> None:
    assert evaluated(EVALUATION, EVALUATION) == ["evaluation names must differ, got test, test"]
    (found,) = evaluated(EVALUATION, async_weight_update=False)
    assert "grpo.async_weight_update must be true with [[evaluation]]" in found


def test_an_evaluation_takes_from_rollout_what_it_leaves_out_but_no_part_of_another_task() -> None:
    rollout = Rollout(reward=["a:b"], dataset="train.jsonl", system_prompt="s", max_turns=3)
    same = Evaluation(**inherited({"name": "x", "dataset": "test.jsonl"}, rollout))
    assert (same.reward, same.dataset, same.system_prompt) == (["a:b"], "test.jsonl", "s")
    other = Evaluation(**inherited({"name": "x", "task": "digits"}, rollout))
    assert (other.reward, other.dataset, other.system_prompt, other.max_turns) == ([], "", "", 3)
    agent = Rollout(agent="a:b", dataset="train.jsonl")
    of_agent = Evaluation(**inherited({"name": "x", "task": "digits"}, agent))
    assert (of_agent.agent, of_agent.dataset) == ("", "")


def test_an_evaluation_takes_from_rollout_the_rows_keys_of_the_same_dataset_alone() -> None:
    keys: dict[str, Any] = {f"dataset_{name}": value for name, value in UNREAD.items()}
    rollout = replace(FUNCTION, dataset="me/sums", **keys)

    def taken(**table: Any) -> dict[str, Any]:
        found = Evaluation(**inherited({"name": "x", "rows": 1} | table, rollout))
        assert evaluated(found) == []
        return {name: value for name in keys if (value := getattr(found, name)) == keys[name]}

    assert taken().keys() == taken(dataset="me/sums").keys() == keys.keys()
    assert taken(dataset="test.jsonl").keys() == {"dataset_filter", "dataset_shuffle"}
    assert taken(task="digits") == {}


def test_no_deadline_is_longer_than_the_system_waits() -> None:
    """Over 2^31 ms, select.poll raises an OverflowError."""
    assert 4 * LONGEST_S * 1000 < 2**31
    longer = LONGEST_S + 1
    made = job(WeightSync(shutdown_deadline_s=longer))
    made.alerts = Alerts(command_timeout_s=longer)
    table = Evaluation(timeout_s=longer)
    made.evaluation = [table]  # type: ignore[list-item]  # as titan/jobconfig.py makes them
    lines = [line.split(" (")[0] for line in violations(made) if "longest wait" in line]
    assert lines == [
        f"{key} must be at most 500000"
        for key in (
            "weight_sync.shutdown_deadline_s",
            "alerts.command_timeout_s",
            f"{table.section}.timeout_s",
        )
    ]


def test_the_bytes_of_a_version_at_min_rate_are_no_longer_either() -> None:
    check_rate(WeightSync(min_rate=2), int(LONGEST_S) * 2)
    with pytest.raises(ConfigError, match=r"min_rate must be at least 2001 .*, got 2000;"):
        check_rate(WeightSync(min_rate=2000), int(LONGEST_S) * 2000 + 1)


@pytest.mark.parametrize("key", ["s3cret\n", " s3cret", "schlüssel", "two\nlines", "a\tb"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"ENGINE_KEY must hold .* got {len(key)} char"
    ) as raised:
        read_key({"ENGINE_KEY": key}, "ENGINE_KEY")
    assert key.strip() not in str(raised.value)
