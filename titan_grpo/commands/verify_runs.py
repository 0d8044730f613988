"""The runs of a verification, one after the other on one server, and their evidence."""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from titan_grpo.commands.doctor_host import engine_answer, nccl, nccl_version
from titan_grpo.commands.processes import print_progress, run_logged, tiny_run
from titan_grpo.config import LAUNCH
from titan_grpo.config.rollout import PYTHONS
from titan_grpo.engines.launch import Server
from titan_grpo.errors import ServerUnreachable
from titan_grpo.observe.output import write_whole
from titan_grpo.observe.recorder import SUMMARY
from titan_grpo.runkey import Key, find_run_key, with_run_key
from titan_grpo.titan.startup import launched
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.verify.outcome import (
    START,
    TRAINER_EVIDENCE,
    Committed,
    Made,
    Reference,
    Run,
    check_all,
    outcome,
    read,
    table,
    throughput,
    version_file,
)
from titan_grpo.verify.prober import Prober, ReferenceModel, fixed_prompts
from titan_grpo.verify.recording import content_digest, tensor_digest
from titan_grpo.verify.server import STARTUP_S, Devices, choose_devices, recorded, server_spec

TOLERANCE = 0.05
"""Largest difference, in nats at any token of a prompt, of the server (bf16) and fp32 on the same
weights."""

AFTER_PROBES = 6
"""Answers to wait for after a run: each prompt twice under the last version."""

AFTER_S = 60.0


def phases(out: Path) -> dict[str, tuple[str, ...]]:
    """Return the runs in order, with their arguments. Pure."""
    recording = str(out / "rollouts.jsonl")
    replay = ("--rollout.replay_path", recording)
    background, waiting = "--grpo.async-weight-update", "--grpo.no-async-weight-update"
    return {
        "async live": (background, "--rollout.record_path", recording),
        "async replay": (background, *replay),
        "sync replay": (waiting, *replay),
    }


def with_nccl_of(python: str, devices: Devices) -> Devices:
    """Return the devices as they are used with servers of that interpreter: vLLM, SGLang and the
    trainer may each have another torch, and so another NCCL."""
    answer = engine_answer(python) if devices.transport == "nccl" else ""
    if isinstance(answer, str):  # of one that does not run, its server will say so
        return devices
    found = nccl(nccl_version(), answer["nccl"], python)
    if found.status != "ok":
        print_progress(f"NCCL {found.text}: weights go over TCP")
    return replace(devices, one_nccl=found.status == "ok")


def verify(
    options: argparse.Namespace, env: Mapping[str, str], kind: "type[PhaseRuns] | None" = None
) -> int:
    """Start the server, run all phases, judge and report. Returns 0 without a violation, else 1.
    ``kind`` replaces PhaseRuns."""
    began, out = time.monotonic(), options.out
    devices = choose_devices(options.device, torch.cuda.device_count(), options.nproc)
    devices = with_nccl_of(options.python, devices)
    # Before anything is made or started: it refuses mistakes in the job.
    starts = [f"--weight_sync.transport={devices.transport}"]
    starts += [f"--rollout.launch_engines={options.engine}"]
    starts += [f"--rollout.{PYTHONS[options.engine]}={options.python}"]
    job, _ = tiny_run(options, out, [LAUNCH], starts)
    model, server_model = out / "model", out / "server_model"
    write_tiny_model(options.model, model, seed=1)
    # Different weights: if the server later serves the trainer's, these came from the sync.
    write_tiny_model(options.model, server_model, seed=2)
    prompts = fixed_prompts()
    run_key = find_run_key(env) or Key.generate()
    reference = ReferenceModel(model, prompts)
    phase_runs = (kind or PhaseRuns)(options, with_run_key(env, run_key), devices, reference)
    runs: list[Run] = []
    asked = launched(job, str(server_model), devices.kind == "cpu", run_key, ("", ""))[0]
    spec = server_spec(asked, out, devices)
    with Server(spec) as server:
        print_progress(
            f"device {devices.kind}, transport {devices.transport}; starting a server:"
            f" {spec.engine}, log in {spec.log_path}"
        )
        commands = {
            name: phase_runs.command(name, arguments, server.url)
            for name, arguments in phases(out).items()
        }
        started_s = server.wait_healthy(STARTUP_S)
        print_progress(f"{server.url} is healthy after {started_s:.0f} s")
        for name, command in commands.items():
            # The trainer makes the folder before it connects to the server.
            begun = phase_runs.evidence(name).exists
            with Prober(server.url, prompts, spec.engine, begun) as prober:
                runs.append(phase_runs.run(name, command, server.url, prober))
    result: dict[str, Any] = {
        "engine": spec.engine,
        "device": devices.kind,
        "transport": devices.transport,
    }
    result |= outcome(runs, phase_runs.speeds, check_all(runs, TOLERANCE), TOLERANCE)
    result["seconds"] = time.monotonic() - began
    # The table first: it must not be lost with a disk that is full by now.
    print(table(result), flush=True)
    for path in filter(None, (out / "verify.json", options.json)):
        write_whole(Path(path), json.dumps(result, indent=2))
    print(f"{result['seconds']:.0f} s; evidence and logs in {out}")
    return 0 if result["passed"] else 1


class PhaseRuns:
    """Runner of the phases. Keeps the server's weights of one phase as the start of the next."""

    def __init__(
        self,
        options: argparse.Namespace,
        env: Mapping[str, str],
        devices: Devices,
        reference: ReferenceModel,
    ) -> None:
        self._options, self._env, self._devices, self._reference = options, env, devices, reference
        self._start: Path = options.out / "server_model" / "model.safetensors"
        self.run_key = find_run_key(env)
        self._recorded = recorded(options.out)
        self._known: dict[str, tuple[tuple[float, ...], ...]] = {}
        self.speeds: dict[str, dict[str, Any]] = {}

    def command(self, name: str, arguments: Sequence[str], url: str) -> list[str]:
        """Return the command line of a phase's training. Raises ConfigError for mistakes in the
        job."""
        folder = self._folder(name)
        arguments = ["--weight_sync.transport", self._devices.transport, *arguments]
        module = self.module(name, self.evidence(name))
        return tiny_run(self._options, folder, [url], arguments, module)[1]

    def _folder(self, name: str) -> Path:
        out: Path = self._options.out
        return out / name.replace(" ", "_")

    def evidence(self, name: str) -> Path:
        """Return the folder for what a phase's trainer writes down."""
        return self._folder(name) / "evidence"

    def run(self, name: str, command: Sequence[str], url: str, prober: Prober) -> Run:
        """Train, wait for probes under the last version, and collect the evidence."""
        folder, options = self._folder(name), self._options
        evidence, log = self.evidence(name), folder / "train.log"
        skip = len(read(self._recorded, Committed))
        print_progress(f"run {name}: {options.nproc} ranks, {options.steps} steps; log in {log}")
        run_logged(command, log, self._devices.trainer_environment(self._env), None)
        self.wait_probes(prober)
        made = read(evidence / TRAINER_EVIDENCE, Made)
        start, self._start = self._start, self.after(name, url, prober, evidence, made)
        summary = json.loads((folder / SUMMARY).read_text())
        gather_s = statistics.median(each.gather_s for each in made)
        self.speeds[name] = throughput(summary, made[0].image_bytes, gather_s)
        weights = (folder / "hf" / "model.safetensors").read_bytes()
        return Run(
            name=name,
            made=made,
            claimed=tuple(summary["versions_committed"][url]["committed"]),
            commits=read(self._recorded, Committed, skip),
            probes=prober.probes,
            references=self._references(start, evidence, made),
            probe_errors=prober.errors,
            final_file=hashlib.sha256(weights).hexdigest(),
        )

    def after(
        self, name: str, url: str, prober: Prober, evidence: Path, made: tuple[Made, ...]
    ) -> Path:
        """Return the server's weights after a run. The self-test (tests/rigs) commits others
        here."""
        return version_file(evidence, made[-1].version)

    def module(self, name: str, evidence: Path) -> list[str]:
        """Return the trainer's module with its own arguments."""
        return ["titan_grpo.titan.verify_train", "--evidence", str(evidence), "--"]

    def wait_probes(self, prober: Prober) -> None:
        """Wait for answers under the last version. Raises ServerUnreachable without any."""
        if not prober.wait_more(AFTER_PROBES, AFTER_S) and not prober.errors:
            raise ServerUnreachable(
                f"the server must answer {AFTER_PROBES} probes within {AFTER_S:g} s after a run, it"
                " did not"
            )

    def _references(
        self, start: Path, evidence: Path, made: tuple[Made, ...]
    ) -> tuple[Reference, ...]:
        """Return the log-probabilities of the server's earlier weights and of every version; equal
        content is computed once."""
        digest = content_digest({name: tensor_digest(t) for name, t in load_file(start).items()})
        entries = [(START, digest, start)]
        entries += [(m.version, m.digest, version_file(evidence, m.version)) for m in made]
        out = []
        for version, digest, path in entries:
            if digest not in self._known:
                self._known[digest] = self._reference.logprobs(path)
            out.append(Reference(version, digest, self._known[digest]))
        return tuple(out)
