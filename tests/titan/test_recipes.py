"""Every recipe in train_configs parses, and is what its header says."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from titan_grpo.commands import quickstart
from titan_grpo.commands.processes import add_tiny_run, tiny_run
from titan_grpo.commands.verify_runs import phases
from titan_grpo.config.rollout import PYTHONS
from titan_grpo.titan import jobconfig

RECIPES = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))
RANKS = {"quickstart_cpu": 2, "verify_2gpu": 2, "qwen3_0.6b_gsm8k": 8, "llama3_8b_gsm8k": 8}
RANKS |= {"qwen3_0.6b_one_node": 4}


def recipe(name: str, *arguments: str) -> tuple[Any, list[str]]:
    """Its configuration, and the notes of the start."""
    (path,) = [p for p in RECIPES if p.stem == name]
    arguments = ("--job.config_file", str(path), *arguments)
    config, expanded, unused = jobconfig.read(arguments, RANKS[name])
    return config, expanded + unused


def test_the_recipes_of_the_readme_are_all_there() -> None:
    assert {path.stem for path in RECIPES} == set(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_a_recipe_keeps_every_rule_and_sets_no_key_in_vain(name: str) -> None:
    config, notes = recipe(name)
    assert notes == []
    assert config.grpo.async_weight_update
    assert config.checkpoint.enable
    assert config.checkpoint.initial_load_in_hf
    assert config.checkpoint.last_save_model_only is False
    assert config.lr_scheduler.decay_ratio == 0.0
    assert (config.rollout.prompts_per_step * config.rollout.group_size) % RANKS[name] == 0


@pytest.mark.parametrize("name", RANKS)
def test_a_step_outlasts_a_server_that_is_started_again(name: str) -> None:
    """A run ended seconds after its only server was healthy again, on a machine so slow that this
    took three minutes."""
    config, _ = recipe(name)
    assert config.rollout.batch_timeout_s >= config.weight_sync.startup_deadline_s


def named(arguments: Iterable[str]) -> set[str]:
    """The keys that options of a job set."""
    words = [word.removeprefix("--") for word in arguments if word.startswith("--") and "." in word]
    return {word.partition("=")[0].replace("-", "_").replace(".no_", ".") for word in words}


def quickstart_arguments() -> list[str]:
    """What the quickstart sets with every option."""
    options = argparse.Namespace(pythons=dict.fromkeys(PYTHONS, "python"), servers=1)
    options.lora, options.lora_sync, options.router_replay, options.sync = 8, None, True, True
    return quickstart.job_arguments(options)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("quickstart_cpu", quickstart_arguments()),
        ("verify_2gpu", [word for words in phases(Path("out")).values() for word in words[:2]]),
    ],
)
def test_a_recipes_header_names_every_key_that_its_command_sets(
    name: str, arguments: list[str]
) -> None:
    (path,) = [p for p in RECIPES if p.stem == name]
    parser = argparse.ArgumentParser()
    add_tiny_run(parser, path.name, 3, ["qwen3"])
    options = parser.parse_args([])
    options.out, options.rest = Path("out"), []
    _, command = tiny_run(options, options.out, ["http://127.0.0.1:1"], arguments[:1])
    header = path.read_text().partition("[job]")[0]
    keys = named([*command, *arguments]) - {"job.config_file"}
    assert "training.steps" in keys
    assert {key for key in keys if key not in header} == set()


@pytest.mark.parametrize("name", RANKS)
def test_a_recipe_also_runs_in_sync_mode(name: str) -> None:
    config, _ = recipe(name, "--grpo.no-async-weight-update", "--rollout.max_staleness=0")
    assert not config.grpo.async_weight_update
