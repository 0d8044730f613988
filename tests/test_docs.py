"""The site is built from docs/ with every link checked, and says what the code says. So do the
worked examples in docstrings."""

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import titan_grpo
from tests.rigs.sockets import free_port
from titan_grpo.commands import config
from titan_grpo.config import Rollout
from titan_grpo.engines.vllm import LOGPROBS_MODE
from titan_grpo.titan import compat, jobconfig
from titan_grpo.titan.servers import known_servers

WAIT_S = 200.0

JOB = """
[model]
name = "qwen3"
flavor = "grpo_tiny"
[rollout]
servers = ["http://of-init:8000"]
"""


def test_the_site_builds_without_a_warning(root: Path, tmp_path: Path) -> None:
    """A link or an anchor that leads nowhere, and a page that is in no menu, are warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "first_job" / "index.html").read_text()
    assert not re.search(r'(src|href)="https?://fonts', page), "it needs no network"


PACKAGE = Path(titan_grpo.__file__).parent
WITH_EXAMPLES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_worked_examples_give_what_they_say(module: str) -> None:
    compat.prepare()
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_the_metrics_page_is_what_the_command_prints(root: Path) -> None:
    page = (root / "docs" / "metrics.md").read_text()
    assert page == config.metrics_page(), "run: titan-grpo config --metrics > docs/metrics.md"


def test_every_subject_of_the_doctor_has_a_row(root: Path) -> None:
    code = "".join(
        (root / "titan_grpo" / "commands" / f"{name}.py").read_text()
        for name in ("doctor", "doctor_host", "doctor_servers", "doctor_task")
    )
    subjects = set(re.findall(r'\b(?:ok|problem|warning)\(\s*"([^"]+)"', code))
    assert len(subjects) > 10
    page = (root / "docs" / "when.md").read_text()
    assert {subject for subject in subjects if f"`{subject}`" not in page} == set()


def test_every_line_that_a_run_is_said_to_print_is_in_the_code(root: Path) -> None:
    code = "".join(path.read_text() for path in sorted((root / "titan_grpo").rglob("*.py")))
    # Literals over several lines are one text; a plural is spelled out.
    code = re.sub(r"\{'s' \* \([^)]*\)\}", "s", re.sub(r'"\s+f?"', "", code))
    page = (root / "docs" / "when.md").read_text().partition("## A run says")[2]
    lines = re.findall(r"^\| `([^`]+)`", page, re.M)
    assert len(lines) > 10
    placeholder = r"\.\.\.|\b[A-Z]+\b|\d[\d.]*|[:;=]|^waiting for (?:the )?"
    parts = {part.strip() for line in lines for part in re.split(placeholder, line)}
    assert {part for part in parts if part not in code} == set()


def test_the_keys_that_pages_write_exist(root: Path) -> None:
    known = set(re.findall(r"^\| `(\w+)` \|", (root / "docs/configuration.md").read_text(), re.M))
    wrong = []
    for page in ("first_job", "cluster", "when", "faq", "comparison", "contributing"):
        text = (root / "docs" / f"{page}.md").read_text()
        keys = re.findall(r"`(?:grpo|rollout|weight_sync)\.(\w+)", text)
        wrong += [f"{page}: {key}" for key in keys if key not in known]
    assert wrong == []


def test_the_files_that_pages_name_exist(root: Path) -> None:
    named = re.compile(r"`((?:titan_grpo|tests|scripts|examples|docker|patches)/[\w./]+)`")
    pages = [*root.glob("docs/*.md"), root / "README.md"]
    paths = [(page.name, path) for page in pages for path in named.findall(page.read_text())]
    assert len(paths) > 40
    assert [each for each in paths if not (root / each[1]).exists()] == []


def test_the_kubernetes_manifest_starts_a_job_that_is_one(root: Path, tmp_path: Path) -> None:
    text = (root / "examples" / "cluster" / "kubernetes.yaml").read_text()
    parts = {each["kind"]: each for each in yaml.safe_load_all(text)}
    assert set(parts) == {"Service", "ConfigMap", "StatefulSet", "Job"}
    fleet = parts["StatefulSet"]["spec"]
    service = parts["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert fleet["serviceName"] == service["metadata"]["name"]
    labels = fleet["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == fleet["selector"]["matchLabels"]
    urls = parts["ConfigMap"]["data"]["servers.txt"].split()
    assert urls == [f"http://server-{n}.servers:8000" for n in range(fleet["replicas"])]

    (trainer,) = parts["Job"]["spec"]["template"]["spec"]["containers"]
    arguments = trainer["args"][trainer["args"].index("titan_grpo.train") + 1 :]
    (tmp_path / "train.toml").write_text(JOB)
    arguments = [a.replace("/assets/train.toml", str(tmp_path / "train.toml")) for a in arguments]
    job = jobconfig.parse(arguments)
    assert job.rollout.servers == [], "of the file as titan-grpo init writes it, which names some"
    assert trainer["workingDir"] == "/assets", "where train.toml is, and so its rewards and data"
    mounts = {each["mountPath"]: each for each in trainer["volumeMounts"]}
    folder = str(Path(job.rollout.servers_file).parent)
    assert "subPath" not in mounts[folder], "such a file is never replaced"
    (engine,) = fleet["template"]["spec"]["containers"]
    backend = engine["args"][engine["args"].index("--weight-transfer-config") + 1]
    assert json.loads(backend) == {"backend": "titan_grpo"}


def test_the_script_of_one_box_is_one_and_starts_a_job(root: Path, tmp_path: Path) -> None:
    script = root / "examples" / "outside" / "one_box.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    text = re.sub(r"\\\n\s*", "", script.read_text())
    assert "TORCHDYNAMO_DISABLE=1 .venv-vllm" in text, "else the engine needs a C++ compiler"
    (line,) = re.findall(r"titan_grpo\.train (.*)", text)
    keys = re.findall(r"keys=\((.*?)\)", text)
    assert len(keys) == 2
    for each in keys:
        words = line.replace('"${keys[@]}" "${@:2}"', each).replace("$PUSH", "127.0.0.1:8300")
        words = words.replace("$SERVER", "http://a:8000").replace("$API", "http://a:8400")
        parse = [word.strip('"') for word in words.split()]
        config = str(root / "train_configs" / "quickstart_cpu.toml")
        job = jobconfig.parse(
            [w.replace("train_configs/quickstart_cpu.toml", config) for w in parse]
        )
        assert job.rollout.source in ("push", "atropos")
    env = {"PATH": os.environ["PATH"], "MODEL": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(script)], env=env, cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "run scripts/quickstart.sh, or set MODEL" in done.stderr


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"])  # nothing listens there
def test_all_that_one_box_starts_reach_each_other_past_a_proxy_of_the_shell(
    root: Path, tmp_path: Path, proxy: str
) -> None:
    """With a server that is of the standard library, and a trainer that ends once the environment
    has asked that server, which answers it with a page."""
    served = "-m http.server --bind 127.0.0.1 --directory www"
    programs = {
        ".venv-vllm/bin/python": f'exec {sys.executable} {served} "$6"',
        ".venv/bin/python": f'exec {sys.executable} "$@"',
        ".venv/bin/torchrun": "until [ -s out/environment.log ]; do sleep 0.1; done",
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(root / "examples")
    for file in ("www/health", "model/config.json"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    script = (root / "examples/outside/one_box.sh").read_text()
    (tmp_path / "box.sh").write_text(script.replace(":8000", f":{free_port()}"))
    env = {"PATH": os.environ["PATH"], "MODEL": "model", "OUT": "out", "PYTHONUNBUFFERED": "1"}
    subprocess.run(
        ["bash", "box.sh"], env=env | {"http_proxy": proxy}, cwd=tmp_path, check=True, timeout=60
    )
    said = (tmp_path / "out/environment.log").read_text()
    assert re.match(r"waiting for a run at \S+: \S+/weight_info answered 404 and no JSON", said)


SLURM = "examples/cluster/slurm.sh"


def slurm_script(
    root: Path, folder: Path, programs: dict[str, str], environment: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run the script in a folder with these programs in place of others. Returns when all that it
    started has ended."""
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
    return subprocess.run(
        ["bash", str(root / SLURM)],
        env=env | {"SLURM_JOB_NODELIST": "any", "SLURM_JOB_ID": "7"} | environment,
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


SRUN = """#!/usr/bin/env bash
# In place of Slurm's: the command of each task, as that task would run it, goes into a file.
for word in "$@"; do case "$word" in --ntasks-per-node=*) tasks="${word#*=}";; esac; done
for SLURM_LOCALID in $(seq 0 $((tasks - 1))); do
    export SLURM_LOCALID
    (for word in "$@"; do [ "$word" = --export=ALL ] && break; echo "$word"; done; \
     while [ "$1" != --export=ALL ]; do shift; done; shift; "$@"; echo) >"$OUT.$$.$SLURM_LOCALID"
    mv "$OUT.$$.$SLURM_LOCALID" "$OUT/$$.$SLURM_LOCALID"
done
case "$*" in *vllm*) exec sleep 60;; esac  # a server ends with the trainer
"""
PRINTS = '#!/usr/bin/env bash\necho "$0 $* hosts=$SERVER_HOSTS"\n'


@pytest.mark.parametrize(
    ("environment", "serve", "hosts"),
    [
        (
            {
                "SLURM_JOB_NODELIST_HET_GROUP_1": "s[1-2]",
                "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
                "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
            },
            "--het-group=1",
            "s[1-2]",
        ),
        ({}, "--nodelist=s1,s2", "s1,s2"),
    ],
)
def test_the_slurm_script_starts_a_torchrun_and_two_servers_on_each_host(
    root: Path, tmp_path: Path, environment: dict[str, str], serve: str, hosts: str
) -> None:
    """With programs of Slurm, torchrun and vLLM that only note how they were called."""
    (tmp_path / "out").mkdir()
    programs = {
        "bin/srun": SRUN,
        "bin/scontrol": "#!/usr/bin/env bash\nprintf '%s\\n' t1 t2 s1 s2\n",
        # It ends after the servers have been noted: they end with it.
        ".venv/bin/torchrun": f"{PRINTS}until [ -e $OUT/*.1 ]; do sleep 0.1; done\n",
        ".venv-vllm/bin/vllm": PRINTS,
    }
    environment |= {"OUT": str(tmp_path / "out"), "PER_HOST": "2"}
    assert slurm_script(root, tmp_path, programs, environment).returncode == 0
    assert (root / SLURM).read_text().count("#SBATCH hetjob") == 1
    parts = re.findall("#SBATCH --nodes.*", (root / SLURM).read_text())
    assert ["--no-kill" in part for part in parts] == [True, True]
    said = sorted(p.read_text() for p in (tmp_path / "out").iterdir())
    servers = [each for each in said if "vllm serve" in each]
    (trainer,) = (each for each in said if "torchrun" in each)
    assert all(serve in each for each in servers)
    assert sorted(re.findall(r"--port (\d+)", "".join(servers))) == ["8000", "8001"]
    alone = {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"}  # by default it ends all with one
    assert alone <= set(servers[0].split())
    assert not alone & set(trainer.split()), "without one of its hosts it cannot go on"
    assert {"--ntasks=4", "--ntasks-per-node=2", "--gpus-per-task=4"} <= set(servers[0].split())
    assert {"--ntasks=2", "--ntasks-per-node=1", "--gpus-per-node=8"} <= set(trainer.split())
    assert "--tensor-parallel-size 4" in servers[0]
    assert '--weight-transfer-config {"backend":"titan_grpo"}' in servers[0]
    assert "--nnodes 2 --nproc_per_node 8" in trainer
    assert f"hosts={hosts}" in trainer
    (tmp_path / "train.toml").write_text(JOB)
    (words,) = re.findall(r"titan_grpo\.train (.*) hosts=", trainer)
    job = jobconfig.parse(words.replace("train.toml", str(tmp_path / "train.toml")).split())
    assert (job.rollout.servers_slurm, job.rollout.servers_per_host) == ("SERVER_HOSTS", 2)
    assert job.rollout.servers == [], "of the file as titan-grpo init writes it, which names some"
    rollout = Rollout(servers_slurm="SERVER_HOSTS", servers_per_host=2)
    assert known_servers(rollout, {"SERVER_HOSTS": hosts}).urls == [
        f"http://{host}:{port}" for host in ("s1", "s2") for port in (8000, 8001)
    ]


def test_the_slurm_script_ends_the_trainer_when_all_servers_have_ended(
    root: Path, tmp_path: Path
) -> None:
    """Before, the trainer waited for servers until its own deadline, on the job's GPUs."""
    programs = {
        "bin/srun": '#!/usr/bin/env bash\ncase "$*" in *vllm*) exit 3;; *) exec sleep 600;; esac\n',
        "bin/scontrol": "#!/usr/bin/env bash\nprintf '%s\\n' t1 t2 s1 s2\n",
    }
    done = slurm_script(root, tmp_path, programs, {})
    assert done.returncode == 2
    assert done.stderr.startswith("all servers have ended (srun: 3), so the trainer is ended too")


def test_the_slurm_script_starts_a_server_again_that_had_been_there(
    root: Path, tmp_path: Path
) -> None:
    shift = 'while [ "$1" != --export=ALL ]; do shift; done; shift; exec "$@"\n'
    crashes = "[ -e crashed ] || { touch crashed; exit 9; }\ntouch again\n"
    programs = {
        "bin/srun": f"#!/usr/bin/env bash\nexport SLURM_LOCALID=1; {shift}",
        "bin/scontrol": "#!/usr/bin/env bash\nprintf '%s\\n' t1 t2 s1 s2\n",
        ".venv/bin/torchrun": "#!/usr/bin/env bash\nuntil [ -e again ]; do sleep 0.1; done\n",
        ".venv-vllm/bin/vllm": f"#!/usr/bin/env bash\n{crashes}",
    }
    done = slurm_script(root, tmp_path, programs, {"RESTART_AFTER": "0"})
    assert done.returncode == 0, done.stderr
    assert re.match(r"the server at port 8001 of \S+ ended \(9\): it is started", done.stderr)


@pytest.mark.parametrize(
    ("name", "value"),
    [("PER_HOST", "0"), ("PER_HOST", "16"), ("SERVER_NODES", "0"), ("SERVER_NODES", "two")],
)
def test_the_slurm_script_refuses_numbers_that_leave_no_host_or_gpu(
    root: Path, tmp_path: Path, name: str, value: str
) -> None:
    scontrol = "#!/usr/bin/env bash\nprintf '%s\\n' t1 s1 s2\n"
    done = slurm_script(root, tmp_path, {"bin/scontrol": scontrol}, {name: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name} must")
    assert done.stderr.count("\n") == 1


def test_the_evaluation_example_is_a_job_with_the_quickstarts_recipe(
    root: Path, tmp_path: Path
) -> None:
    parts = ("train_configs/quickstart_cpu.toml", "examples/evaluation/digits.toml")
    (tmp_path / "job.toml").write_text("".join((root / part).read_text() for part in parts))
    (table,) = jobconfig.parse([f"--job.config_file={tmp_path / 'job.toml'}"]).evaluation
    assert (table.name, table.every, table.pass_at) == ("digits", 4, [1, 4])


def test_every_vllm_that_a_page_or_an_example_starts_has_the_trainers_log_probabilities(
    root: Path,
) -> None:
    """A server without the option is refused."""
    folders = [root / "docs", root / "examples", root / "scripts", root / "docker"]
    found = [path for folder in folders for path in folder.rglob("*.*")]
    paths = [root / "README.md", *(path for path in found if path.suffix != ".pyc")]
    backend = re.compile(r"--weight-transfer-config\W+backend")
    starts = [path.read_text() for path in paths if backend.search(path.read_text())]
    assert len(starts) == 6
    right = re.compile(rf"--logprobs-mode\W+{LOGPROBS_MODE}\b[^`]*?{backend.pattern}")
    for text in starts:
        assert len(right.findall(text)) == len(backend.findall(text)), text


def test_every_example_begins_with_its_command(root: Path) -> None:
    """In its first comment: what a person copies."""
    starts = ("scripts/", "titan-grpo ", "torchrun ", "python ", "sbatch ", "kubectl ", "curl ")
    for folder in sorted(path for path in (root / "examples").iterdir() if path.is_dir()):
        heads = [
            "\n".join(path.read_text().splitlines()[:14])
            for path in sorted(folder.rglob("*"))
            if path.suffix in (".py", ".sh", ".yaml", ".toml")
        ]
        assert any(start in head for head in heads for start in starts), folder
