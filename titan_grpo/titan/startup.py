"""Start of a run: its servers (``rollout.servers = ["launch"]`` starts them
on rank 0's host) and its rollouts (recorded, from a subprocess, or from a remote service)."""

import errno
import json
import os
import secrets
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

from titan_grpo.config import Rollout, WeightSync, engines_read_calls, sends_adapters
from titan_grpo.config.rollout import ARGUMENTS, PYTHONS, gpus_each, required_key
from titan_grpo.engines.launch import ServerSpec
from titan_grpo.errors import TitanGrpoError
from titan_grpo.observe.output import write_whole
from titan_grpo.observe.terminal import is_consequence, print_status, waiting
from titan_grpo.rollout.child import LocalTransport
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec, WorkerTransport
from titan_grpo.rollout.records import ReplayClient
from titan_grpo.rollout.remote import RemoteTransport
from titan_grpo.runkey import Key
from titan_grpo.subprocesses import SIGNALLED
from titan_grpo.sync.lanes import load_deadline_s
from titan_grpo.titan.checkpoints import failures_of
from titan_grpo.titan.jobfile import base_of, read_config

Rollouts = RolloutClient | ReplayClient


def registration(job_config: Any, version: int) -> dict[str, Any]:
    """Return the body of Atropos' ``POST /register`` for training that continues from ``version``;
    the source adds batch_size."""
    checkpoint = job_config.checkpoint
    return {
        "max_token_len": job_config.training.seq_len,
        "num_steps": job_config.training.steps,
        "starting_step": version,
        "checkpoint_dir": (
            f"{job_config.job.dump_folder}/{checkpoint.folder}" if checkpoint.enable else ""
        ),
        "save_checkpoint_interval": checkpoint.interval if checkpoint.enable else 0,
        "wandb_group": job_config.job.description or "titan_grpo",
        "wandb_project": "titan_grpo",
    }


def launched(
    job_config: Any, model_dir: str, cpu: bool, run_key: Key | None, keys: tuple[str, str]
) -> tuple[ServerSpec, ...]:
    """Return the servers that ``rollout.servers = ["launch"]`` starts on this host; otherwise none.
    They share a new run key if ``run_key`` is None. ``keys``: their API key and admin key."""
    rollout: Rollout = job_config.rollout
    if not rollout.launches:
        return ()
    key = run_key or Key.generate()
    limit = read_config(model_dir).get("max_position_embeddings")
    gpus, each = rollout.launch_gpus, gpus_each(rollout)
    adapters = sends_adapters(job_config.lora)

    def devices(number: int) -> dict[str, str]:
        """A server's environment; without GPUs of its own it would use the trainer's first one."""
        share = gpus[number * each : (number + 1) * each]
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, share))} if share else {}

    return tuple(
        ServerSpec(
            python=getattr(rollout, PYTHONS[engine]),
            model=base_of(job_config) if adapters else model_dir,
            log_path=f"{job_config.job.dump_folder}/{engine}{index}.log",
            engine=engine,
            max_model_len=job_config.training.seq_len,
            position_limit=limit if isinstance(limit, int) else 0,
            max_num_seqs=rollout.max_concurrent_requests,
            cpu=cpu,
            args=tuple(getattr(rollout, ARGUMENTS[engine])),
            run_key=key,
            api_key=keys[0],
            admin_key=keys[1],
            tensor_parallel=max(each, 1),
            lora_rank=job_config.lora.rank if adapters else 0,
            routes=job_config.grpo.router_replay,
            tool_calls=engines_read_calls(rollout),
            fp32_head=job_config.grpo.fp32_lm_head,
            env=devices(kind * rollout.launch_count + index),
        )
        for kind, engine in enumerate(rollout.launch_engines)
        for index in range(rollout.launch_count)
    )


def sync_settings(job_config: Any) -> WeightSync:
    """Return ``[weight_sync]`` as the run uses it. With groups from outside every commit drops the
    KV, whatever ``kv_after_update`` says: external requests carry no cache salt, so they would
    match prefixes of older weights."""
    sync: WeightSync = job_config.weight_sync
    if job_config.rollout.source == "task":
        return sync
    return replace(sync, kv_after_update="recompute")


def start_rollouts(
    job_config: Any,
    model_dir: str,
    version: int,
    state: str,
    nbytes: int,
    report: Callable[[str], None],
) -> Rollouts:
    """Start the rollouts for training that continues from ``version``. ``state``: the rollout state
    of a checkpoint, or empty. ``nbytes``: of a version. ``report``: see RolloutClient.

    Raises ConfigError or DataError as the task, the tokenizer or the records do, RolloutStopped if
    no rollouts can come.
    """
    rollout: Rollout = job_config.rollout
    before = json.loads(state) if state else {}
    if rollout.replay_path:
        return ReplayClient(rollout.replay_path, before)
    sync = sync_settings(job_config)
    spec = replace(
        RolloutSpec.from_config(rollout, model_dir, version, before),
        registration=registration(job_config, version),
        kv_recomputed=sync.kv_after_update == "recompute",
        router_replay=job_config.grpo.router_replay,
        row_tokens=job_config.training.seq_len,
        commit_deadline_s=sync.commit_deadline_s,
        load_deadline_s=load_deadline_s(sync, nbytes),
    )
    transport: WorkerTransport = LocalTransport()
    if rollout.controller != "local":
        spec = placed(spec)
        key = required_key(os.environ, "controller_key_env", rollout.controller_key_env)
        transport = RemoteTransport(rollout.controller, key, rollout.controller_deadline_s)
    if changed := spec.changed_rows():
        print_status(
            f"{changed}: used rows are known by their numbers, so after such a change rows may come"
            " twice or never; go on with the values of before, or train on other data in another"
            " job.dump_folder"
        )
    client = RolloutClient(spec, rollout.record_path, transport, report)
    with ExitStack() as failed:
        failed.callback(client.close)
        with waiting("task, dataset and tokenizer", sync.startup_deadline_s):
            client.start(sync.startup_deadline_s)
        failed.pop_all()
    return client


def placed(spec: RolloutSpec) -> RolloutSpec:
    """Return the spec with absolute paths, for a process with another working directory."""
    places: dict[str, Any] = {"model_dir": os.path.abspath(spec.model_dir)}
    for name in ("task_path", "dataset", "tools", "chat_template"):
        path = getattr(spec, name)
        # A glob pattern is relative to this directory too; a name on the Hub is not.
        if path and (os.path.exists(path) or glob(path)):
            places[name] = os.path.abspath(path)
    return replace(spec, **places)


_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


def owner_of(run_dir: Path) -> str:
    """Return the identity that all runs in one dump folder share: each may take over the servers of
    the run before it."""
    path = run_dir / "owner"
    found = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not found:  # also what a full disk left empty
        found = secrets.token_hex(8)
        write_whole(path, found + "\n")
    # A copy of the folder, from which another run goes on, has the file too.
    return f"{found}-{run_dir.stat().st_ino:x}"


def write_failure(error: BaseException, folder: Path) -> str:
    """Return one line if the disk caused ``error``, directly or wrapped by a library; empty
    otherwise, and for an error of ours, which says itself what it lacks."""
    chain: list[Any] = [] if isinstance(error, TitanGrpoError) else [error]
    for each in chain:
        reason, what = "", f"a file of the run could not be written, probably under {str(folder)!r}"
        if isinstance(each, OSError):
            if each.errno in _CANNOT_WRITE or _refused(each, folder):
                reason = each.strerror or str(each)
            if isinstance(each.filename, str | bytes):
                what = f"{os.fsdecode(each.filename)!r} could not be read or written"
        elif isinstance(each, RuntimeError) and "inline_container" in str(each):
            # torch's zip writer reports a short write only so; torch.distributed.checkpoint pickles
            # errors, which loses the OSError before it.
            reason = f"torch: {each}"
        if reason:
            return (
                f"{what} ({reason}), so the run stopped; make room there, or restore access, and"
                " start it again: it resumes from its last complete checkpoint"
            )
        found = (each.__cause__, each.__context__, *failures_of(each))
        chain += [other for other in found if other is not None and other not in chain]
    return ""


def _refused(error: OSError, folder: Path) -> bool:
    """Whether ``error`` names a file in the folder that is there: one that is missing was looked
    for, or removed, and room is not what it lacks."""
    if error.errno == errno.ENOENT or not isinstance(error.filename, str | bytes):
        return False
    path = os.path.realpath(os.fsdecode(error.filename))
    return Path(path).is_relative_to(os.path.realpath(folder))


def ending(error: BaseException | None, folder: Path) -> str:
    """Return in one line what ended the run of a folder; empty for None. A signal arrives as
    SystemExit (train.py).

    >>> ending(SystemExit(128 + 15), Path()), ending(ValueError("no batch"), Path())
    ('SIGTERM', 'ValueError: no batch')
    """
    if error is None:
        return ""
    code = error.code if isinstance(error, SystemExit) else None
    if isinstance(code, int) and code - SIGNALLED in list(signal.Signals):
        return signal.Signals(code - SIGNALLED).name
    if reason := write_failure(error, folder):
        return reason
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, TitanGrpoError) or not is_consequence(said):
        return said
    return (
        "another rank ended, or could not be reached; torchrun's report has its exit code (-9: out"
        f" of memory, maybe): {said}"
    )
