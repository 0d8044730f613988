"""The patches that act at import. Each case is a fresh interpreter, because an import cannot be
undone."""

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs.interpreter import python
from titan_grpo.patches import torchtitan_slow_imports


def run_code(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    return python("-c", code, CUDA_VISIBLE_DEVICES="", **more)


UNPATCHED = """
import json, torch
said = []
def tried(call):
    try:
        said.append(call() or "")
    except Exception as error:
        said.append(str(error))
halves = lambda: torch.histc(torch.tensor([0.5, 1.5, 1.6]), bins=3, min=0, max=3)
before, whole = halves(), torch.randint(0, 8, (5, 7))
tried(lambda: torch.histc(torch.arange(4), bins=4, min=0, max=4))
tried(lambda: __import__("torchtitan.models.moe"))
from titan_grpo.patches import torchtitan_moe_histc, torchtitan_triton
torchtitan_triton.apply()
from torchtitan.tools.utils import device_module
tried(lambda: device_module.set_device(0))
from titan_grpo.titan import compat
tried(compat.prepare)
assert torchtitan_moe_histc.apply() and torchtitan_moe_histc.apply()
counted = torch.histc(whole, bins=8, min=0, max=8)
assert torch.equal(counted, torch.bincount(whole.flatten(), minlength=8))
assert torch.equal(halves(), before)
tried(lambda: torch.histc(whole, bins=4, min=0, max=8))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def without_patches() -> list[str]:
    """What fails without each of them, one after the other."""
    run = run_code(UNPATCHED)
    assert run.returncode == 0, run.stderr
    said: list[str] = json.loads(run.stdout.splitlines()[-1])
    return said


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_torchtitan_can_not_be_imported(without_patches: list[str]) -> None:
    assert "No module named 'triton'" in without_patches[1]


def test_without_the_device_patch_torchtitan_looks_for_cuda_and_the_patch_comes_too_late(
    without_patches: list[str],
) -> None:
    _, _, device, late, _ = without_patches
    assert device, "there is no cuda"
    assert "came after `import torchtitan`" in late


def test_integer_histograms_count_like_bincount_with_the_patch_alone(
    without_patches: list[str],
) -> None:
    assert "not implemented for 'Long'" in without_patches[0]
    assert "not implemented for 'Long'" in without_patches[4], "the original, of other bins"


PATCHED = """
import importlib.util, json, sys, torch
from titan_grpo.titan import compat
compiler = torch.compile
assert compat.prepare() and compat.prepare()
import torchtitan.models.qwen3
slow = sorted({"datasets", "torch._inductor.compile_fx"} & set(sys.modules))
from torchtitan.components.metrics import build_device_memory_monitor
from torchtitan.distributed import utils
from torchtitan.models.moe.kernels import generate_permute_indices as group
from torchtitan.tools.utils import device_type
counts = torch.tensor([4, 2, 1, 3, 1, 2, 3, 4])
ours, reference = group(counts, 4, 2, 64, 8), group(counts, 4, 2, 64, 8, use_cpu=True)
print(json.dumps({
    "triton": importlib.util.find_spec("triton") is not None,
    "grouped": all(torch.equal(a, b) for a, b in zip(ours, reference)),
    "device": [device_type, utils.device_module.current_device()],
    "ooms": build_device_memory_monitor().get_peak_stats().num_ooms,
    "slow": slow,
    "compiler": torch.compile is compiler,
    "text": "c4" in __import__("torchtitan.hf_datasets.text_datasets", fromlist=["*"]).DATASETS,
}))
"""


def test_with_the_patches_torchtitan_imports_on_a_cpu_without_its_slow_parts() -> None:
    triton = importlib.util.find_spec("triton") is not None
    run = run_code(PATCHED)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "triton": triton,
        "grouped": True,
        "device": ["cpu", 0],
        "ooms": 0,
        "slow": [],
        "compiler": True,
        "text": True,
    }


TRITON = """
from triton import language
class jit:
    def __init__(self, function):
        pass
    def __getitem__(self, grid):
        raise RuntimeError("0 active drivers ([]). There should only be one.")
"""
"""What kernels.py sees of the one that a CUDA build of torch brings, on a machine without a GPU."""

GROUPED = """
import sys, torch
from titan_grpo.patches import torchtitan_triton
assert torchtitan_triton.apply()
assert "triton" in sys.modules
group = sys.modules["torchtitan.models.moe.kernels"].generate_permute_indices
counts = torch.tensor([4, 2, 1, 3, 1, 2, 3, 4])
ours, reference = group(counts, 4, 2, 64, 8), group(counts, 4, 2, 64, 8, use_cpu=True)
print(all(torch.equal(a, b) for a, b in zip(ours, reference)))
"""


def test_where_triton_finds_no_gpu_tokens_are_grouped_by_that_reference_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(TRITON)
    (tmp_path / "triton" / "language.py").write_text("constexpr = object\n")
    run = run_code(GROUPED, PYTHONPATH=str(tmp_path))
    assert run.stdout == "True\n", run.stderr


def test_a_compilation_that_was_put_off_is_done_once_or_is_part_of_a_larger_one() -> None:
    regions: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        regions.append(len(inputs))
        return graph.forward

    call = torchtitan_slow_imports._compile_at_first_call(torch.sin, backend=backend)
    x = torch.ones(3)
    assert torch.equal(call(x), x.sin())
    assert torch.equal(call(x), x.sin())
    assert regions == [1]
    whole = torch.compile(lambda y: call(y) + 1, backend=backend, fullgraph=True)
    assert torch.equal(whole(x), x.sin() + 1)
    assert regions == [1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_machine_the_cpu_patches_do_nothing() -> None:
    from titan_grpo.patches import torchtitan_cpu_device, torchtitan_moe_histc

    assert torchtitan_cpu_device.apply() is False
    assert torchtitan_moe_histc.apply() is False
