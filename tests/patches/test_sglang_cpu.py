"""What SGLang's processes find on a machine without its kernels. Each case is a fresh
interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.interpreter import python
from titan_grpo.patches import sglang_cpu

pytestmark = pytest.mark.timeout(150)


def run_code(
    code: str, *path: Path, interpreter: str = sys.executable, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with our directory, then ``path``, on PYTHONPATH."""
    path_of = os.pathsep.join([sglang_cpu.directory(), *map(str, path)])
    env = {"PYTHONPATH": path_of, "CUDA_VISIBLE_DEVICES": "", **env}
    return python("-c", code, interpreter=interpreter, **env)


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a directory in which SGLang of some version seems to be installed."""

    def make(version: str) -> Path:
        info = tmp_path / f"sglang-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        return tmp_path

    return make


def test_any_function_can_be_imported_and_none_computes(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    run = run_code(
        "import sgl_kernel\n"
        "from sgl_kernel import rmsnorm\n"
        "from sgl_kernel.mamba import causal_conv1d_fwd_cpu as conv\n"
        "for function in (rmsnorm, conv):\n"
        "    try: function(1, out=2)\n"
        "    except NotImplementedError as error: print(error)\n"
        "print(hasattr(sgl_kernel, '__wrapped__'))\n",
        installed("0.5.23"),
        **{sglang_cpu.CALLS_VARIABLE: str(calls)},
    )
    assert run.returncode == 0, run.stderr
    first, second, third = run.stdout.splitlines()
    assert first.startswith("sgl_kernel.rmsnorm was called")
    assert second.startswith("sgl_kernel.mamba.causal_conv1d_fwd_cpu was called")
    assert third == "False"
    assert calls.read_text().splitlines() == [
        "sgl_kernel.rmsnorm",
        "sgl_kernel.mamba.causal_conv1d_fwd_cpu",
    ]


def test_installed_kernels_are_preferred(installed: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("rmsnorm = 'compiled'\n")
    run = run_code("from sgl_kernel import rmsnorm; print(rmsnorm)", installed("0.5.23"))
    assert run.stdout == "compiled\n", run.stderr


def test_another_version_of_sglang_gets_no_stand_in_but_the_remedy(
    installed: Callable[[str], Path],
) -> None:
    run = run_code("import sgl_kernel", installed("0.6.0"))
    assert run.returncode != 0
    assert "is written for sglang >=0.5.20,<0.5.24, found 0.6.0" in run.stderr


def test_without_sglang_a_package_that_looks_for_the_kernels_finds_none() -> None:
    run = run_code("try: import sgl_kernel\nexcept ImportError: print('none')")
    assert run.stdout == "none\n", run.stderr


def test_the_sitecustomize_that_it_hides_runs_and_may_fail(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "print('theirs')\nraise RuntimeError('theirs broke')\n"
    )
    run = run_code("print('ours')", tmp_path)
    assert run.stdout.splitlines() == ["theirs", "ours"]
    assert "theirs broke" in run.stderr


def test_nothing_is_imported_for_a_process_that_does_not_ask() -> None:
    loaded = run_code(
        "import sys; print([m for m in ('torch', 'titan_grpo', 'sgl_kernel') if m in sys.modules])"
    )
    assert loaded.stdout == "[]\n", loaded.stderr


def test_torchvision_imports_beside_torch_for_cpu_and_only_so(sglang_python: str) -> None:
    code = "import torchvision, torch; print(torch.ops.torchvision.nms.default._schema)"
    bare = subprocess.run(
        [sglang_python, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "operator torchvision::nms does not exist" in bare.stderr, (
        "the schemas are no longer needed: delete them"
    )
    run = run_code(code, interpreter=sglang_python)
    assert run.stdout.startswith(
        "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    ), run.stderr
