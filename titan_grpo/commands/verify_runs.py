"""The runs of a verification, one after the other on one server, and the evidence that they
leave."""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from titan_grpo.commands.processes import run_logged, torchrun
from titan_grpo.engines.launch import Server
from titan_grpo.errors import ServerUnreachable
from titan_grpo.layout.digest import content_digest, tensor_digest
from titan_grpo.runkey import Key, find_run_key, with_run_key
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.tiny import write_tiny_model
from titan_grpo.verify import tamper
from titan_grpo.verify.evidence import (
    START,
    TRAINER_EVIDENCE,
    Made,
    Reference,
    Run,
    read_commits,
    read_made,
    version_file,
)
from titan_grpo.verify.outcome import Throughput, check_all, outcome, throughput
from titan_grpo.verify.prober import Prober, ReferenceModel, fixed_prompts
from titan_grpo.verify.server import STARTUP_S, Devices, choose_devices, recorded, server_spec

TOLERANCE = 0.05
"""Nats by which the server (bf16 arithmetic) may differ from fp32 on the same weights at any token
of a prompt."""

TAMPER_AT = 2
"""Version from which the trainer tampers with its own weights."""

AFTER_PROBES = 6
"""Answers that are waited for when a run is over: each prompt twice under the last version."""

AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One run: how it differs from the others, and the violation that its trainer causes."""

    name: str
    arguments: tuple[str, ...]
    tamper: str = ""


def phases(out: Path, tampers: tuple[str, ...]) -> list[Phase]:
    """The runs, in order. Pure."""
    recording = str(out / "rollouts.jsonl")
    replay = ("--rollout.replay_path", recording)
    background, waiting = "--grpo.async-weight-update", "--grpo.no-async-weight-update"

    def at(kind: str) -> str:
        return f"{kind}:{TAMPER_AT}" if kind in tampers else ""

    return [
        Phase("async live", (background, "--rollout.record_path", recording), at("bytes")),
        Phase("async replay", (background, *replay)),
        Phase("sync replay", (waiting, *replay), at("modes")),
    ]


def verify(options: argparse.Namespace, env: Mapping[str, str]) -> dict[str, Any]:
    """Start the server, run all phases, judge; the result as ``outcome`` describes it."""
    out: Path = options.out
    devices = choose_devices(options.device, torch.cuda.device_count(), options.nproc)
    model, server_model = out / "model", out / "server_model"
    write_tiny_model(options.model, model, seed=1)
    # Other weights than the trainer's: what the server serves later can only be the trainer's.
    write_tiny_model(options.model, server_model, seed=2)
    prompts = fixed_prompts()
    run_key = find_run_key(env) or Key.generate()
    reference = ReferenceModel(model, prompts)
    phase_runs = PhaseRuns(options, with_run_key(env, run_key), devices, reference)
    runs: list[Run] = []
    spec = server_spec(options.python, server_model, out, devices, run_key, options.engine)
    with Server(spec) as server:
        print_progress(
            f"device {devices.kind}, transport {devices.transport}; starting a server:"
            f" {spec.engine}, log in {spec.log_path}"
        )
        started_s = server.wait_healthy(STARTUP_S)
        print_progress(f"{server.url} is healthy after {started_s:.0f} s")
        for number, phase in enumerate(phases(out, options.tampers)):
            with Prober(server.url, prompts, spec.engine) as prober:
                tampers = options.tampers if number == 0 else ()
                runs.append(phase_runs.run(phase, server.url, prober, tampers))
    violations = check_all(runs, TOLERANCE)
    about = {"engine": spec.engine, "device": devices.kind, "transport": devices.transport}
    return {**about, **outcome(runs, phase_runs.speeds, violations, TOLERANCE)}


def print_progress(text: str) -> None:
    """Print a line at once."""
    print(text, file=sys.stderr, flush=True)


class PhaseRuns:
    """Runs the phases. Carries from one to the next what the server held before."""

    def __init__(
        self,
        options: argparse.Namespace,
        env: Mapping[str, str],
        devices: Devices,
        reference: ReferenceModel,
    ) -> None:
        self._options, self._env, self._devices, self._reference = options, env, devices, reference
        self._start: Path = options.out / "server_model" / "model.safetensors"
        self._run_key = find_run_key(env)
        self._recorded = recorded(options.out)
        self._known: dict[str, tuple[tuple[float, ...], ...]] = {}
        self.speeds: dict[str, Throughput] = {}

    def run(self, phase: Phase, url: str, prober: Prober, tampers: tuple[str, ...]) -> Run:
        """Train, wait for probes under the last version, commit foreign weights if asked to, and
        collect the evidence."""
        folder: Path = self._options.out / phase.name.replace(" ", "_")
        skip = len(read_commits(self._recorded))
        self._train(phase, url, folder)
        self._wait_probes(prober)
        evidence = folder / "evidence"
        made = read_made(evidence / TRAINER_EVIDENCE)
        start, self._start = self._start, version_file(evidence, made[-1].version)
        before = version_file(evidence, made[-2].version) if tampers else start
        if "backwards" in tampers:
            tamper.commit_foreign(url, load_file(before), made[-2].version, self._run_key)
            self._wait_probes(prober)
        if "mixed" in tampers:
            tensors = tamper.torn(before, self._start)
            self._start = evidence / "torn.safetensors"
            save_file(tensors, self._start)
            tamper.commit_foreign(url, tensors, made[-1].version, self._run_key)
            self._wait_probes(prober)
        elif "backwards" in tampers:
            self._start = before
        summary = json.loads((folder / "summary.json").read_text())
        lines = (evidence / TRAINER_EVIDENCE).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        gather_s = statistics.median(row["gather_s"] for row in rows)
        self.speeds[phase.name] = throughput(summary, rows[0]["image_bytes"], gather_s)
        weights = (folder / "hf" / "model.safetensors").read_bytes()
        return Run(
            name=phase.name,
            made=made,
            claimed=tuple(summary["versions_committed"][url]["committed"]),
            commits=read_commits(self._recorded, skip),
            probes=prober.probes,
            references=self._references(start, evidence, made),
            probe_errors=prober.errors,
            final_file=hashlib.sha256(weights).hexdigest(),
        )

    def _train(self, phase: Phase, url: str, folder: Path) -> None:
        options = self._options
        name, flavor = FLAVORS[options.model]
        settings = {
            "--rollout.servers": url,
            "--job.dump_folder": str(folder),
            "--training.steps": str(options.steps),
            "--model.hf_assets_path": str(options.out / "model"),
            "--model.name": name,
            "--model.flavor": flavor,
            "--weight_sync.transport": self._devices.transport,
        }
        arguments = [text for pair in settings.items() for text in pair]
        arguments += [*phase.arguments, *options.rest]
        command = torchrun(options.nproc, options.config, arguments)
        at = command.index("titan_grpo.train")
        evidence = ["--evidence", str(folder / "evidence"), "--tamper", phase.tamper, "--"]
        command[at : at + 1] = ["titan_grpo.titan.verify_train", *evidence]
        log = folder / "train.log"
        print_progress(
            f"run {phase.name}: {options.nproc} ranks, {options.steps} steps; log in {log}"
        )
        run_logged(command, log, self._devices.trainer_environment(self._env), None)

    def _wait_probes(self, prober: Prober) -> None:
        if not prober.wait_more(AFTER_PROBES, AFTER_S) and not prober.errors:
            raise ServerUnreachable(
                f"the server must answer {AFTER_PROBES} probes within {AFTER_S:g} s after a run, it"
                " did not"
            )

    def _references(
        self, start: Path, evidence: Path, made: tuple[Made, ...]
    ) -> tuple[Reference, ...]:
        """What the server's earlier weights and every version compute; equal content is computed
        once."""
        digest = content_digest({name: tensor_digest(t) for name, t in load_file(start).items()})
        entries = [(START, digest, start)]
        entries += [(m.version, m.digest, version_file(evidence, m.version)) for m in made]
        out = []
        for version, digest, path in entries:
            if digest not in self._known:
                self._known[digest] = self._reference.logprobs(path)
            out.append(Reference(version, digest, self._known[digest]))
        return tuple(out)
