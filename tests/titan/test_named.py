"""Named algorithms: what their files set, that they compute what their papers say, and that keys
which cannot act are named."""

from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.algorithm.loss_inputs import filled
from tests.algorithm.papers import LIMIT, PAPERS, Sample, gradient, logprobs, losses
from tests.rigs.jobs import job
from tests.titan.conftest import MINIMAL, Parse
from titan_grpo.algorithm.balance import TokenCost
from titan_grpo.algorithm.batch import plan
from titan_grpo.algorithm.distribution import token_logprobs
from titan_grpo.algorithm.loss import grpo_loss
from titan_grpo.algorithm.objective import least_left_out, second_moments
from titan_grpo.algorithm.rows import IGNORE_INDEX
from titan_grpo.config import GRPO, JobConfig, Rollout, WeightSync, violations
from titan_grpo.config.inert import inert
from titan_grpo.errors import ConfigError
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.titan import compat, jobconfig

compat.prepare()

from titan_grpo.titan.data import batch_options  # noqa: E402 - torchtitan after its preparation

WORDS = 6
NAMES = jobconfig.algorithms()
ROLLOUT = Rollout(servers=["http://a:1"], max_completion_tokens=LIMIT)


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(WORDS, WORDS))


POLICY, OLD, REFERENCE = table(1), table(1) + 0.5 * table(2), table(3)


def make_groups() -> tuple[list[Group], list[list[Sample]]]:
    """The same groups as the trainer gets them, and as the papers' formulas do."""
    chance = np.random.default_rng(0)
    groups, samples = [], []
    for index in range(8):
        prompt = tuple(map(int, chance.integers(WORDS, size=3)))
        completions, own = [], []
        for _ in range(4):
            tokens = chance.integers(WORDS, size=chance.integers(1, LIMIT + 1))
            before = np.concatenate([prompt[-1:], tokens[:-1]])
            s = Sample(before, tokens, np.zeros(0), np.zeros(0), np.zeros(0), chance.normal())
            s.old, s.reference = logprobs(OLD, s), logprobs(REFERENCE, s)
            noisy = logprobs(OLD, s) + 0.6 * chance.normal(size=s.n)
            s.engine = np.minimum(noisy, -1e-3).astype(np.float32).astype(np.float64)
            ids, engine = tuple(map(int, tokens)), tuple(map(float, s.engine))
            completions.append(Completion(ids, engine, "stop", 0, 0, "s", s.reward))
            own.append(s)
        groups.append(Group(Prompt(index, prompt), tuple(completions)))
        samples.append(own)
    return groups, samples


GROUPS, SAMPLES = make_groups()


def algorithm(name: str) -> GRPO:
    grpo = GRPO(algorithm=name)
    jobconfig.expand(grpo, jobconfig.algorithm_keys(name), ())
    return grpo


def leave_out(grpo: GRPO, ranks: list[list[dict[str, Any]]], steps: tuple[int, ...]) -> None:
    """What each optimizer step does before it, at POLICY."""
    for last, count in zip(accumulate(steps), steps, strict=True):
        mine = [each for rank in ranks for each in rank[last - count : last]]
        moments = []
        for each in mine:
            now = token_logprobs(torch.tensor(POLICY)[each["inputs"]], each["labels"], 1.0, 7)
            moved = second_moments(now, each["rollout_logprobs"], each["advantages"])
            moments.append(moved.masked_fill(each["labels"] == IGNORE_INDEX, 0))
        least = least_left_out(torch.cat([m.flatten() for m in moments]), grpo.m2_threshold)
        for each, moment in zip(mine, moments, strict=True):
            each["outside_m2"] = moment >= least


def trained(grpo: GRPO) -> tuple[float, np.ndarray]:
    """Losses of all optimizer steps at POLICY, and their gradient, on two ranks."""
    config = job(training={"local_batch_size": 4, "seq_len": 16}, grpo=grpo, rollout=ROLLOUT)
    batch = plan(GROUPS, 2, batch_options(config, TokenCost(), WORDS))
    weights = torch.tensor(POLICY, requires_grad=True)
    old, reference = torch.tensor(OLD), torch.tensor(REFERENCE)
    total = torch.zeros((), dtype=torch.float64)
    ranks = batch.micro_batches()
    if grpo.m2_threshold:
        leave_out(grpo, ranks, batch.steps)
    recomputed = grpo.proximal_logprobs == "recompute"
    later = range(batch.steps[0], sum(batch.steps)) if recomputed else ()
    for rank in ranks:
        for number, each in enumerate(rank):
            inputs, arguments = each["inputs"], (each["labels"], 1.0, 7)
            loss, _ = grpo_loss(
                token_logprobs(weights[inputs], *arguments),
                filled(each),
                grpo,
                token_logprobs(reference[inputs], *arguments) if grpo.kl_beta else None,
                token_logprobs(old[inputs], *arguments) if number in later else None,
            )
            total = total + loss
    total.backward()
    assert weights.grad is not None
    return total.item(), weights.grad.numpy()


def test_every_named_algorithm_has_a_reference() -> None:
    assert set(NAMES) == set(PAPERS)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_algorithm_computes_what_its_paper_says(name: str) -> None:
    grpo, paper = algorithm(name), PAPERS[name]
    loss, slope = trained(grpo)
    assert loss == pytest.approx(losses(paper, SAMPLES, POLICY, POLICY), rel=1e-6, abs=1e-7)
    expected = gradient(paper, SAMPLES, POLICY)
    assert np.abs(slope - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_a_named_algorithm_keeps_every_rule_and_sets_no_key_in_vain(name: str) -> None:
    job = JobConfig(algorithm(name), replace(ROLLOUT, max_staleness=1), WeightSync())
    assert violations(job) == []
    keys = jobconfig.algorithm_keys(name)
    assert inert(job, {f"grpo.{key}" for key in keys}) == []
    assert set(keys) <= {field.name for field in fields(GRPO)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be a readable TOML file"),
        ("[grpo]\nkl_beta = ", "must be a readable TOML file"),
        ("kl_beta = 1.0", "must have the one table"),
        ('[grpo]\nalgorithm = "grpo"', "without the key algorithm"),
        ("[grpo]\n[rollout]\n", "must have the one table"),
    ],
)
def test_a_file_that_is_no_algorithm_is_refused(
    content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        jobconfig.algorithm_keys(str(path))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"must be one of cispo, dapo, .*, got 'gpso'"):
        jobconfig.algorithm_keys("gpso")


def test_the_start_says_what_an_algorithm_set_and_what_cannot_act(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    own = "clip_ratio_dual = 3.0\ngrpo_by_token = true\n"
    path.write_text(f'{MINIMAL}[grpo]\nalgorithm = "gspo"\n{own}')
    arguments = ["--job.config_file", str(path), "--grpo.num_microbatches=1"]
    config, (first,), notes = jobconfig.read(arguments)
    assert (config.grpo.num_microbatches, config.grpo.rollout_is_level) == (1, "geometric")
    assert first.startswith('grpo.algorithm = "gspo" sets policy_loss = "clip", ')
    assert first.endswith(
        '; the job itself sets grpo_by_token = true (not loss_normalization = "sequence"),'
        " num_microbatches = 1 (not 4)"
    )
    # With one optimizer step per batch nothing is left of GSPO's clipping.
    assert {line.partition(" = ")[0] for line in notes} == {
        "grpo.clip_ratio_dual",
        "grpo.clip_ratio_lower_bound",
        "grpo.clip_ratio_upper_bound",
        "grpo.policy_ratio_type",
    }


def test_a_key_of_the_job_wins_over_the_algorithms_other_name_of_it(
    parse: Parse, tmp_path: Path
) -> None:
    grpo = parse("", "--grpo.algorithm=dapo", "--grpo.overlong_cache_tokens=8").grpo
    assert (grpo.overlong_cache_tokens, grpo.overlong_cache_share) == (8, 0.0)
    assert parse("", "--grpo.algorithm=dapo").grpo.overlong_cache_share == 0.2
    mine = tmp_path / "mine.toml"
    mine.write_text("[grpo]\ngrpo_by_token = true\noverlong_cache_tokens = 8\n")
    keys = ["--grpo.loss_normalization=sequence", "--grpo.overlong_cache_share=0.5"]
    grpo = parse("", f"--grpo.algorithm={mine}", *keys).grpo
    assert (grpo.loss_normalization, grpo.overlong_cache_tokens) == ("sequence", 0)


def test_a_file_of_ones_own_is_an_algorithm_and_its_types_are_checked(
    parse: Parse, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[grpo]\nkl_beta = 1\nnum_epochs = 2\n")
    config = parse("", f"--grpo.algorithm={mine}")
    assert (config.grpo.kl_beta, config.grpo.num_epochs) == (1.0, 2)
    mine.write_text("[grpo]\nnum_epochs = 2.5\n")
    with pytest.raises(ConfigError, match=r"mine.toml: grpo.num_epochs must be an integer"):
        parse("", f"--grpo.algorithm={mine}")


@pytest.mark.parametrize(
    ("argument", "other"),
    [
        ("--training.dataset=c4", "--grpo.ptx_mixin_batchsize=8"),
        ("--training.local_batch_size=2", "--grpo.token_budget=0"),
        ("--checkpoint.export_dtype=bfloat16", "--checkpoint.last_save_in_hf"),
        ("--compile.components=loss", "--compile.components=model,loss"),
    ],
)
def test_a_key_of_torchtitans_without_effect_is_named(
    parse: Parse, argument: str, other: str
) -> None:
    """Before, it did nothing, and nothing said so."""
    of = ["--job.config_file", parse().job.config_file, "--compile.enable"]
    of += ["--grpo.token_budget=64", argument]
    _, _, (line,) = jobconfig.read(of)
    assert line.startswith(f"{argument[2:].partition('=')[0]} = ")
    assert " has no effect: " in line
    assert jobconfig.read([*of, other])[2] == []


def test_a_batch_size_of_torchtitans_is_named_as_without_effect_and_refused_nowhere(
    parse: Parse,
) -> None:
    arguments = ["--job.config_file", parse().job.config_file, "--training.global_batch_size=7"]
    config, _, (line,) = jobconfig.read(arguments)
    assert line.startswith("training.global_batch_size = 7 has no effect: ")
    # torchtitan stops at 7 on two ranks
    assert config.training.global_batch_size == -1
