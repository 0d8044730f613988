"""The job of a command that trains a tiny model on servers that it starts."""

from pathlib import Path

import pytest

from titan_grpo import cli


@pytest.mark.parametrize("command", ["quickstart", "verify"])
def test_a_mistake_in_the_job_is_named_before_its_servers_answer(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This interpreter ends at once, which would be the next thing to be said.
    words = [command, "--vllm-python", "/bin/true", "--out", str(tmp_path / "new")]
    assert cli.main([*words, "--grpo.nope", "1"]) == 2
    assert "Unrecognized options: --grpo.nope" in capsys.readouterr().err
