"""The rules of [grpo]: what is refused, and that the message names key, rule and value."""

from dataclasses import replace

import pytest

from titan_grpo.config import Rollout
from titan_grpo.config_grpo import GRPO, normalization_of, violations

ROLLOUT = Rollout(prompts_per_step=4, max_completion_tokens=64, max_staleness=2)


def test_the_defaults_keep_every_rule():
    assert violations(GRPO(), ROLLOUT) == []
    assert violations(GRPO(), Rollout()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_ratio_lower_bound": 0.0}, "grpo.clip_ratio_lower_bound must be in (0, 1], got 0.0"),
        ({"kl_beta": -1.0}, "grpo.kl_beta must be 0 or greater, got -1.0"),
        ({"num_microbatches": 0}, "grpo.num_microbatches must be 1 or greater, got 0"),
        (
            {"num_microbatches": 5},
            "grpo.num_microbatches must be at most rollout.prompts_per_step (4;",
        ),
        ({"rollout_is_threshold": 0.5}, "grpo.rollout_is_threshold must be 0 (off) or at least 1"),
        (
            {"rollout_is_threshold": 0.0},
            "grpo.allow_uncorrected_off_policy = true forces it), got 0.0",
        ),
        (
            {"num_microbatches": 2, "proximal_logprobs": "interpolate"},
            "grpo.num_microbatches must be 1 with",
        ),
        ({"rollout_is_threshold_lower": 0.5}, "grpo.rollout_is_threshold_lower must be 0 unless"),
        (
            {"rollout_is_veto_threshold": 1.0},
            "grpo.rollout_is_veto_threshold must be in [0, 1), got 1.0",
        ),
        ({"ref_model_ema": 0.9}, "grpo.ref_model_ema must be 0 while grpo.kl_beta is 0"),
        ({"ref_model_ema": 1.5, "kl_beta": 0.1}, "grpo.ref_model_ema must be in [0, 1], got 1.5"),
        ({"reference_model": "x"}, "grpo.reference_model must be empty while grpo.kl_beta is 0"),
        (
            {"advantage_normalization": "batch", "normalize_advantage_std": False},
            "grpo.advantage_normalization must be",
        ),
        (
            {"grpo_by_token": True, "loss_normalization": "constant"},
            "grpo.grpo_by_token must be unset",
        ),
        (
            {"overlong_cache_tokens": 65},
            "grpo.overlong_cache_tokens must be at most rollout.max_completion_tokens (64)",
        ),
        (
            {"temperature": 0.7},
            "grpo.temperature must be 0, or the same as rollout.temperature (1.0;",
        ),
        ({"max_unhealthy_steps": 0}, "grpo.max_unhealthy_steps must be 1 or greater"),
        ({"ptx_scale": 0.0}, "grpo.ptx_scale must be greater than 0"),
    ],
)
def test_a_broken_rule_is_one_line_with_key_rule_and_value(changes, message):
    (found,) = violations(replace(GRPO(), **changes), ROLLOUT)
    assert message in found


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_is_threshold": 0.0, "proximal_logprobs": "rollout"},
        {"rollout_is_threshold": 0.0, "allow_uncorrected_off_policy": True},
        {
            "num_microbatches": 2,
            "proximal_logprobs": "interpolate",
            "allow_uncorrected_off_policy": True,
        },
        {"num_microbatches": 2},
        {"temperature": 1.0},
        {"kl_beta": 0.1, "ref_model_ema": 0.99},
    ],
)
def test_what_is_corrected_or_forced_passes(changes):
    assert violations(replace(GRPO(), **changes), ROLLOUT) == []


def test_on_policy_data_needs_no_correction():
    assert violations(GRPO(rollout_is_threshold=0.0), replace(ROLLOUT, max_staleness=0)) == []


def test_a_recording_can_not_be_made_with_dynamic_sampling():
    (found,) = violations(GRPO(dynamic_sampling=True), replace(ROLLOUT, record_path="r.jsonl"))
    assert found.startswith("grpo.dynamic_sampling must be false with rollout.record_path")


def test_the_old_name_of_the_normalisation_decides_where_it_is_set():
    assert normalization_of(GRPO(loss_normalization="constant")) == "constant"
    assert normalization_of(GRPO(grpo_by_token=True)) == "token"
    assert normalization_of(GRPO(grpo_by_token=False)) == "sequence"
