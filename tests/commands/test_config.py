from dataclasses import fields
from pathlib import Path

import pytest

from titan_grpo import config
from titan_grpo.commands import config as command


def test_every_key_is_documented_once() -> None:
    for section in (config.GRPO, config.Rollout, config.WeightSync):
        keys = sorted(key.name for key in command.keys(section))
        assert keys == sorted(field.name for field in fields(section))
        assert all(key.meaning for key in command.keys(section))


def test_it_prints_one_page_or_the_other() -> None:
    with pytest.raises(SystemExit):
        command.run(["--older", "--metrics"], {})


def test_the_configuration_page_is_what_the_command_prints(root: Path) -> None:
    page = (root / "docs" / "configuration.md").read_text()
    assert page == command.page(), "run: titan-grpo config > docs/configuration.md"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(set(rows)) == len(rows), "[[evaluation]] has the task's keys of [rollout]"
