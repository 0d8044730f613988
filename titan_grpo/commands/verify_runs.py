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
from titan_grpo.verify.evidence import START, Made, Reference, Run, read_commits, read_made
from titan_grpo.verify.outcome import Throughput, check_all, outcome, throughput
from titan_grpo.verify.prober import Prober, ReferenceModel, fixed_prompts
from titan_grpo.verify.site import STARTUP_S, Devices, choose_devices, recorded, server_spec

TOLERANCE = 0.05
"""Nats by which the server (bf16 arithmetic) may differ from fp32 on the same weights at any token
of a prompt."""

TRAINER_EVIDENCE = "trainer.jsonl"
PLANT_AT = 2
"""Version at which the trainer's own plants strike."""

AFTER_PROBES = 6
"""Answers that are waited for when a run is over: each prompt twice under the last version."""

AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One run: its name, how it differs from the others, and what is planted in its trainer."""

    name: str
    arguments: tuple[str, ...]
    plant: str = ""


def phases(out: Path, planted: tuple[str, ...]) -> list[Phase]:
    """The runs, in order. Pure."""
    recording = str(out / "rollouts.jsonl")
    replay = ("--rollout.replay_path", recording)
    in_background, waiting = "--grpo.async-weight-update", "--grpo.no-async-weight-update"
    return [
        Phase(
            "async live",
            (in_background, "--rollout.record_path", recording),
            f"bytes:{PLANT_AT}" if "bytes" in planted else "",
        ),
        Phase("async replay", (in_background, *replay)),
        Phase("sync replay", (waiting, *replay), f"modes:{PLANT_AT}" if "modes" in planted else ""),
    ]


def verify(options: argparse.Namespace, env: Mapping[str, str]) -> dict[str, Any]:
    """Start the server, run all phases, judge; the result as ``outcome`` describes it."""
    out: Path = options.out
    devices = choose_devices(options.device, torch.cuda.device_count(), options.nproc)
    model, server_model = out / "model", out / "server_model"
    write_tiny_model(options.model, model, seed=1)
    # Other weights than the trainer's on purpose: what the server serves later can only have come
    # from the trainer.
    write_tiny_model(options.model, server_model, seed=2)
    prompts = fixed_prompts()
    run_key = find_run_key(env) or Key.generate()
    env = with_run_key(env, run_key)
    bench = Bench(
        options, env, devices, ReferenceModel(model, prompts), server_model / "model.safetensors"
    )
    runs: list[Run] = []
    spec = server_spec(options.python, server_model, out, devices, run_key, options.engine)
    with Server(spec) as server:
        say(
            f"device {devices.kind}, transport {devices.transport}; starting a server:"
            f" {spec.engine}, log in {spec.log_path}"
        )
        say(f"{server.url} is healthy after {server.wait_healthy(STARTUP_S):.0f} s")
        for number, phase in enumerate(phases(out, options.plants)):
            with Prober(server.url, prompts, spec.engine) as prober:
                runs.append(
                    bench.run(phase, server.url, prober, options.plants if number == 0 else ())
                )
    violations = check_all(runs, TOLERANCE)
    about = {"engine": spec.engine, "device": devices.kind, "transport": devices.transport}
    return {**about, **outcome(runs, bench.speeds, violations, TOLERANCE)}


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """Carries from run to run what the server held before, and the reference model."""

    def __init__(
        self,
        options: argparse.Namespace,
        env: Mapping[str, str],
        devices: Devices,
        reference: ReferenceModel,
        start: Path,
    ) -> None:
        self._options, self._env, self._devices, self._reference = options, env, devices, reference
        self._start = start
        self._run_key = find_run_key(env)
        self._recorded = recorded(options.out)
        self._known: dict[str, tuple[tuple[float, ...], ...]] = {}
        self.speeds: dict[str, Throughput] = {}

    def run(self, phase: Phase, url: str, prober: Prober, planted: tuple[str, ...]) -> Run:
        """Train, wait for probes under the last version, plant what is planted from outside,
        collect the evidence."""
        folder = self._options.out / phase.name.replace(" ", "_")
        skip = len(read_commits(self._recorded))
        self._train(phase, url, folder)
        self._await(prober)
        evidence = folder / "evidence"
        made = read_made(evidence / TRAINER_EVIDENCE)
        start, self._start = self._start, self._file(evidence, made[-1].version)
        if "backwards" in planted:
            tamper.commit_foreign(
                url,
                load_file(self._file(evidence, made[-2].version)),
                made[-2].version,
                self._run_key,
            )
            self._await(prober)
        if "mixed" in planted:
            tensors = tamper.torn(self._file(evidence, made[-2].version), self._start)
            self._start = evidence / "torn.safetensors"
            save_file(tensors, self._start)
            tamper.commit_foreign(url, tensors, made[-1].version, self._run_key)
            self._await(prober)
        elif "backwards" in planted:
            self._start = self._file(evidence, made[-2].version)
        summary = json.loads((folder / "summary.json").read_text())
        lines = [
            json.loads(line) for line in (evidence / TRAINER_EVIDENCE).read_text().splitlines()
        ]
        gather_s = statistics.median(line["gather_s"] for line in lines)
        self.speeds[phase.name] = throughput(summary, lines[0]["image_bytes"], gather_s)
        return Run(
            name=phase.name,
            made=made,
            claimed=tuple(summary["versions_committed"][url]["committed"]),
            commits=read_commits(self._recorded, skip),
            probes=prober.probes,
            references=self._references(start, evidence, made),
            probe_errors=prober.errors,
            final_file=hashlib.sha256(
                (folder / "hf" / "model.safetensors").read_bytes()
            ).hexdigest(),
        )

    def _train(self, phase: Phase, url: str, folder: Path) -> None:
        options = self._options
        name, flavor = FLAVORS[options.model]
        arguments = [
            "--rollout.servers",
            url,
            "--job.dump_folder",
            str(folder),
            "--training.steps",
            str(options.steps),
        ]
        arguments += [
            "--model.hf_assets_path",
            str(options.out / "model"),
            "--model.name",
            name,
            "--model.flavor",
            flavor,
        ]
        arguments += [
            "--weight_sync.transport",
            self._devices.transport,
            *phase.arguments,
            *options.rest,
        ]
        command = torchrun(options.nproc, options.config, arguments)
        at = command.index("titan_grpo.train")
        witness = [
            "titan_grpo.titan.verify_train",
            "--evidence",
            str(folder / "evidence"),
            "--plant",
            phase.plant,
            "--",
        ]
        say(
            f"run {phase.name}: {options.nproc} ranks, {options.steps} steps; log in"
            f" {folder / 'train.log'}"
        )
        environment = self._devices.trainer_environment(self._env)
        run_logged(
            [*command[:at], *witness, *command[at + 1 :]], folder / "train.log", environment, None
        )

    def _await(self, prober: Prober) -> None:
        if not prober.wait_more(AFTER_PROBES, AFTER_S) and not prober.errors:
            raise ServerUnreachable(
                f"the server must answer {AFTER_PROBES} probes within {AFTER_S:g} s after a run, it"
                " did not"
            )

    def _file(self, evidence: Path, version: int) -> Path:
        return evidence / f"version_{version:06d}.safetensors"

    def _references(
        self, start: Path, evidence: Path, made: tuple[Made, ...]
    ) -> tuple[Reference, ...]:
        """What the server's earlier weights and every version compute; equal content is computed
        once."""
        before = content_digest({name: tensor_digest(t) for name, t in load_file(start).items()})
        entries = [
            (START, before, start),
            *((m.version, m.digest, self._file(evidence, m.version)) for m in made),
        ]
        for _, digest, path in entries:
            if digest not in self._known:
                self._known[digest] = self._reference.logprobs(path)
        return tuple(
            Reference(version, digest, self._known[digest]) for version, digest, _ in entries
        )
