"""Which torchtitan is installed: what is too old or too new, and what is the same with each."""

from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from titan_grpo.titan import compat, jobfile
from titan_grpo.titan.flavors import flavor_of, model_of


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.2.2", ""),
        ("0.3.0", ""),
        ("0.4.0", "0.4.0 is installed"),
        ("0.2.1", "0.2.1 is installed"),
        (None, "none is installed"),
    ],
)
def test_the_torchtitan_gate_says_why(version: str | None, reason: str) -> None:
    refusal = compat.refusal(version)
    assert (refusal == "") == (reason == "")
    assert reason in refusal


def test_a_model_in_one_file_is_worth_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Doctor, plan, evaluate and export would print it before their own."""
    compat.prepare()
    spec, args = model_of("qwen3", "debugmodel")
    spec.state_dict_adapter(args, str(tmp_path))
    assert caplog.text == ""


def test_a_job_is_written_in_the_same_keys_whatever_torchtitan_is_installed() -> None:
    compat.prepare()
    from torchtitan.config.job_config import JobConfig

    def keys(kind: Any, prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for f in fields(kind):
            if is_dataclass(f.type):
                out |= keys(f.type, f"{prefix}{f.name}.")
            else:
                value = f.default if f.default_factory is MISSING else f.default_factory()
                out[prefix + f.name] = f.type, value
        return out

    theirs = {k: v for k, v in keys(JobConfig).items() if not k.startswith("quantize.")}
    assert keys(jobfile.JobConfig) == theirs


@pytest.mark.parametrize(
    ("version", "names", "theirs"),
    [
        ("0.2.2", ["layers.0.attention.qkv_linear.wq.weight"], "0.3"),
        ("0.3.0", ["layers.0.attention.wq.weight"], "0.2.2"),
        ("0.2.2", ["layers.0.attention.wq.weight"], ""),
        ("0.3.0", ["layers.0.attention.qkv_linear.wq.weight"], ""),
    ],
)
def test_a_checkpoint_of_the_other_torchtitan_is_known_by_its_names(
    version: str, names: list[str], theirs: str
) -> None:
    reason = compat.other_saver(names, version)
    assert (f"go on with torchtitan {theirs}," in reason) if theirs else reason == ""


@pytest.mark.parametrize("named", [{"num_key_value_heads": 16}, {}])
def test_a_model_whose_heads_all_have_their_own_keys_is_found_by_its_sizes(
    named: dict[str, int],
) -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 16} | named
    settings = {"model_type": "llama", "vocab_size": 2048} | sizes
    assert flavor_of(settings) == ("llama3", "debugmodel")
