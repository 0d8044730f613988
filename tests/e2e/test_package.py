"""The wheel and the sdist: what they hold, and that the commands work where nothing else is."""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.views.runs import Made, make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

WAIT_S = 300.0


def said_by(command: list[str], cwd: Path, code: int = 0) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin"},  # without the PYTHONPATH of this checkout
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(root, tmp_path_factory) -> Path:
    """Folder with the sdist and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("package")
    # A copy: a build leaves files beside its sources.
    source = folder / "source"
    kept = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("titan_grpo", "patches"):
        shutil.copytree(root / name, source / name, symlinks=True, ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_both_pass_twine_check(built) -> None:
    files = sorted(map(str, built.iterdir()))
    assert [Path(file).suffix for file in files] == [".whl", ".gz"]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_package_and_nothing_else(wheel, root, tracked) -> None:
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


def test_its_commands_work_without_torch_and_torchtitan(wheel, tmp_path) -> None:
    """Also the page of a run, with what the extra "report" names."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    said_by([python, "-m", "pip", "install", "--no-deps", str(wheel)], tmp_path)
    (metadata,) = environment.rglob("titan_grpo-*.dist-info")
    needs = [
        re.split(r"\s*;", need)[0]
        for need in Distribution.at(metadata).requires or []
        if "extra" not in need or 'extra == "report"' in need
    ]
    light = [need for need in needs if not need.startswith("torch")]
    assert len(light) == len(needs) - 1
    said_by([python, "-m", "pip", "install", *light], tmp_path)

    command = str(environment / "bin" / "titan-grpo")
    assert "  quickstart  " in said_by([command, "--help"], tmp_path)
    assert re.fullmatch(r"titan_grpo \d+\.\d+\.\d+\n", said_by([command, "--version"], tmp_path))
    assert said_by([command, "config"], tmp_path).startswith("# Configuration")
    for name in ("quickstart", "verify"):
        told = said_by([command, name], tmp_path, code=2)
        assert told.count("\n") == 1
        assert "vllm-env/bin/pip install 'titan_grpo[vllm]'" in told
    make_run(tmp_path / "run", Made())
    assert "open it in a browser" in said_by([command, "report", "run"], tmp_path)


def test_the_extras_name_what_the_package_imports(root) -> None:
    table = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert set(table["optional-dependencies"]) >= {"train", "vllm", "sglang", "agents", "report"}
    train = {re.split(r"[<>=]", need)[0] for need in table["optional-dependencies"]["train"]}
    report = {re.split(r"[<>=]", need)[0] for need in table["optional-dependencies"]["report"]}
    assert report <= train, "a trainer's environment can make the page"


def test_the_changelog_begins_with_this_version(root) -> None:
    from titan_grpo import __version__

    text = (root / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", text, re.MULTILINE)[1] == __version__


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
def test_what_is_in_two_places_is_a_link(path, root) -> None:
    """Edit what it leads to: an editor that writes another file in its place makes two texts."""
    assert (root / path).is_symlink()
    assert (root / path).exists()


def test_the_dockerfiles_copy_what_there_is(root) -> None:
    """Linting as far as it needs no tool: known instructions, pinned bases, existing sources."""
    known = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "ENV", "USER"}
    files = sorted((root / "docker").glob("*.Dockerfile"))
    assert [file.stem for file in files] == ["server", "trainer"]
    for file in files:
        text = re.sub(r"\\\n\s*", " ", file.read_text())
        lines = [line.split() for line in text.splitlines() if line and line[0] != "#"]
        assert {words[0] for words in lines} <= known
        assert lines[-1][0] in ("ENTRYPOINT", "USER", "RUN")
        for words in lines:
            if words[0] == "COPY":
                assert [source for source in words[1:-1] if not (root / source).exists()] == []
            if words[0] == "ARG" and words[1].startswith("BASE="):
                assert ":" in words[1], "the base has a tag"
        assert not any(":latest" in word for words in lines for word in words)
