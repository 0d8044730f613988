"""Rank 0's rollouts as its job wants them: recorded ones, or made by a child process, or by a service elsewhere."""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from titan_grpo.config import Rollout, WeightSync
from titan_grpo.errors import ConfigError
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.link import Link
from titan_grpo.rollout.local import LocalLink
from titan_grpo.rollout.records import ReplayClient
from titan_grpo.rollout.remote import RemoteLink
from titan_grpo.rollout.spec import RolloutSpec
from titan_grpo.titan.crew import Rollouts
from titan_grpo.titan.registration import registration
from titan_grpo.titan.syncing import load_deadline_s, resolve_bind_host

LOAD_S = 120.0
"""How long task and tokenizer may take to load, in seconds."""


def start_rollouts(job_config: Any, model_dir: str, version: int, state: str, environ: Mapping[str, str]) -> Rollouts:
    """Started, for training that continues from ``version``; ``state`` is a checkpoint's.

    Raises ConfigError or DataError as the task, the tokenizer or the records do, RolloutStopped where no rollouts can come.
    """
    rollout: Rollout = job_config.rollout
    before = json.loads(state) if state else {}
    if rollout.replay_path:
        return ReplayClient(rollout.replay_path, before)
    spec = RolloutSpec.from_config(rollout, model_dir, version, before)
    recomputed = job_config.weight_sync.kv_after_update == "recompute"
    spec = replace(spec, registration=registration(job_config, version), kv_recomputed=recomputed)
    sync: WeightSync = job_config.weight_sync
    spec = replace(spec, commit_deadline_s=sync.commit_deadline_s, load_deadline_s=load_deadline_s(sync))
    if rollout.controller == "local":
        client, start_s = RolloutClient(spec, rollout.record_path, LocalLink()), LOAD_S
    else:
        client = RolloutClient(placed(spec), rollout.record_path, remote_link(rollout, environ))
        start_s = LOAD_S + rollout.controller_deadline_s
    with ExitStack() as failed:
        failed.callback(client.close)
        client.start(start_s)
        failed.pop_all()
    return client


def remote_link(rollout: Rollout, environ: Mapping[str, str]) -> Link:
    """The way to ``rollout.controller``. Raises ConfigError where its key is not in the environment that names it."""
    key = environ.get(rollout.controller_key_env, "") if rollout.controller_key_env else ""
    if rollout.controller_key_env and not key:
        raise ConfigError(
            f"rollout.controller_key_env must name a variable of rank 0's environment with the service's key, "
            f"{rollout.controller_key_env} is empty"
        )
    host = resolve_bind_host("", rollout.controller)
    address = rollout.callback_address or f"{f'[{host}]' if ':' in host else host}:0"
    return RemoteLink(rollout.controller, key, address, rollout.controller_deadline_s)


def placed(spec: RolloutSpec) -> RolloutSpec:
    """With paths that mean the same in another working directory."""
    task_path = os.path.abspath(spec.task_path) if spec.task_path else ""
    return replace(spec, model_dir=os.path.abspath(spec.model_dir), task_path=task_path)
