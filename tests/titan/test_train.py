"""How ranks that refuse their configuration say it."""

import subprocess
import sys

import pytest

from titan_grpo.train import refuse


def test_a_hosts_first_rank_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    refuse("no such model", {"RANK": "8", "LOCAL_RANK": "0"})
    refuse("no torchrun", {})
    assert capsys.readouterr().err == "titan-grpo: no such model\ntitan-grpo: no torchrun\n"


def test_another_rank_says_what_it_alone_knows(capsys: pytest.CaptureFixture[str]) -> None:
    refuse("no such file", {"RANK": "9", "LOCAL_RANK": "1"}, wait_s=0.01)
    assert capsys.readouterr().err == "titan-grpo: rank 9: no such file\n"


def test_another_rank_is_ended_before_it_says_what_the_first_one_said() -> None:
    code = "import sys; from titan_grpo.train import refuse; print('here', flush=True)\n"
    code += "refuse('no such model', {'RANK': '1', 'LOCAL_RANK': '1'})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.terminate()
    assert process.communicate(timeout=20) == ("", "")
