"""Rank 0's part of a run: servers, rollouts, sync process, records. The trainer calls it at step
boundaries."""

import json
import logging
import math
import os
import shlex
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.loss import Collapse
from titan_grpo.config import check_rate, engines_read_calls, sends_adapters
from titan_grpo.config.rollout import known_gpus, read_key
from titan_grpo.engines.http import ServerAccess
from titan_grpo.engines.launch import Restarts, ServerGroup
from titan_grpo.engines.server import RolloutNeeds, ServerControl
from titan_grpo.errors import ServerUnfit, ServerUnreachable
from titan_grpo.observe import alerts, dashboards, names, report, terminal
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.schema import ShownStep, choose
from titan_grpo.observe.terminal import waiting
from titan_grpo.receive.checkpoint import essential
from titan_grpo.rollout.client import RolloutClient, RolloutsLate
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.httpd import HttpServer, Reply, Request
from titan_grpo.rollout.messages import COUNTED, length_range
from titan_grpo.runkey import find_run_key
from titan_grpo.samples import Group
from titan_grpo.subprocesses import run_command, without_torchrun
from titan_grpo.sync.images import ImagePool
from titan_grpo.sync.lanes import SyncOptions, load_deadline_s
from titan_grpo.sync.process import SyncProcess
from titan_grpo.sync.transports.channel import check_address
from titan_grpo.sync.transports.tls import check_certificate
from titan_grpo.titan.checkpoints import checkpoints_in
from titan_grpo.titan.data import Share, StepGroups, StepWork, left_out_for, varied_groups
from titan_grpo.titan.evaluations import Evaluations, evaluation_spec
from titan_grpo.titan.export import export_last
from titan_grpo.titan.hf_files import last_place, save_version
from titan_grpo.titan.jobfile import read_config
from titan_grpo.titan.rules import end_waits_s, sync_waits_s
from titan_grpo.titan.servers import Membership, known_servers
from titan_grpo.titan.startup import (
    Rollouts,
    ending,
    launched,
    owner_of,
    start_rollouts,
    sync_settings,
)
from titan_grpo.titan.step_records import (
    FirstBatch,
    Row,
    group_values,
    loss_values,
    reward_values,
    rewards_of,
    rollout_values,
    rows,
    sequences,
    server_values,
    shown,
)
from titan_grpo.titan.weight_sync import WritePlan

logger = logging.getLogger(__name__)


END_S = 15.0
"""Seconds for the whole shutdown: torchrun kills its ranks 30 s after a signal."""


class Controller:
    """Rank 0's side of a run. Construction is cheap; ``start`` starts processes and threads,
    ``close`` ends them."""

    # Set by ``start``.
    recorder: Recorder
    sync_process: SyncProcess
    _rollouts: Rollouts
    _evaluations: Evaluations

    def __init__(
        self,
        job_config: Any,
        model_dir: str,
        nbytes: int,
        cpu: bool,
        options: BatchOptions,
    ) -> None:
        """``nbytes``: of the whole model, which servers load at their start, also where versions
        are adapters."""
        self._job = job_config
        self._model_dir, self._model_nbytes = model_dir, nbytes
        self._run_dir = Path(job_config.job.dump_folder)
        self._options = options
        self._ends = ExitStack()
        rollout, sync = job_config.rollout, sync_settings(job_config)
        self._sync = sync
        run_key = find_run_key(os.environ, sync.run_key_file)
        self._keys = (
            read_key(os.environ, rollout.api_key_env),
            read_key(os.environ, rollout.admin_key_env),
        )
        specs = launched(job_config, model_dir, cpu, run_key, self._keys)
        self.run_key = specs[0].run_key if specs else run_key
        check_certificate(sync, self.run_key)
        check_address(sync.bind_host)
        check_rate(sync, nbytes)
        self._servers = ServerGroup(specs)
        self._step_values: dict[str, float] = {}
        self._codec: TextCodec | None = None
        self._taken: tuple[int, list[Group]] = 0, []
        self._counted: tuple[float, dict[str, int]] = 0.0, {}
        """When the rollouts' counters were last recorded (monotonic clock), and their values."""
        if job_config.dashboards.metrics_address:
            dashboards.require("dashboards.metrics_address")
        self._watched = (alerts.GAP, *alerts.watched(job_config.alerts))
        self.stopped_by = ""
        """The first threshold of alerts.stop that was crossed; empty if none."""
        self._ended_by = ""
        self._collapse = Collapse(job_config.grpo.reward_collapse_steps)

    def start(
        self, version: int, state: str, pool: ImagePool, device: torch.device, plan: WritePlan
    ) -> SyncProcess:
        """Start servers, rollouts and weight sync for training that continues from ``version``.
        ``state``: the rollout state of a checkpoint, or empty."""
        rollout, sync, ends = self._job.rollout, self._sync, self._ends
        # Not in __init__: restarting a finished job must change no file.
        traces = dashboards.traces_of(os.environ, self._run_dir.name, time.perf_counter())
        self.recorder = Recorder(self._run_dir, traces=traces)
        # ``close`` runs these in reverse, also after a start that failed halfway.
        ends.callback(self._close_records)
        ends.callback(self._servers.stop)
        ends.callback(self._report)
        process = SyncProcess.launch(sync)  # it loads its modules while servers and rollouts start
        # One deadline for all waits below, but for the last one, which may have connect_deadline_s
        # more: the other ranks wait for a batch too (rules.rank0_waits_s).
        startup_s = sync.startup_s(self._model_nbytes)
        deadline = time.monotonic() + startup_s
        self._servers.start()
        # Before the wait for servers: a mistake in a task is reported at once.
        rollouts = self._rollouts = start_rollouts(
            self._job, self._model_dir, version, state, pool.manifest.total_bytes, self.warn
        )
        ends.callback(self._close_rollouts)
        remote = rollout.controller != "local" and isinstance(rollouts, RolloutClient)
        # Skip the counts in a resumed state: the process that made them has recorded them.
        self._counted = time.monotonic(), rollouts.counters()
        self._evaluations = Evaluations(
            self._job.evaluation,
            evaluation_spec(self._job, self._model_dir, version),
            rollouts,
            self.recorder,
            # Lambdas: ``sync_process`` does not exist yet. Only its lanes lead to these calls.
            keep=lambda url: self.sync_process.slots.keep(url),
            go_on=lambda url: self.sync_process.slots.go_on(url),
        )
        self._evaluations.check(deadline - time.monotonic())
        self._servers.wait_healthy(startup_s)  # counted from their start
        drain = partial(rollouts.drain, within_s=sync.drain_deadline_s)
        known = known_servers(rollout, os.environ, self._servers.urls, self._evaluations.own)
        self.sync_process = SyncProcess(
            pool,
            sync,
            self.recorder,
            SyncOptions(
                urls=(*known.fixed, *sorted(self._evaluations.own)),
                make_control=self._control if remote else None,
                engine=rollout.engine,
                keeps=bool(self._job.evaluation),
                listed=known.listed,
                observer=self._evaluations,
                keys=self._keys,
                run_key=self.run_key,
                device=device,
                model=essential(read_config(self._model_dir)),
                needs=self._needs(),
                remote_writers=plan.others,
                leaders=plan.leaders[1:],
                owner=owner_of(self._run_dir),
                take_over=rollout.take_over,
                drain=None if rollout.in_flight_weight_updates else drain,
            ),
            process,
        )
        # Close the sync process before the rollouts: a lane may need them to finish its commit.
        ends.callback(self.sync_process.close, END_S / 2)
        text = f"ending: lanes, rollouts and servers get {END_S:g} s together"
        ends.callback(terminal.print_status, text)
        ends.callback(rollouts.skip_drains)
        ends.callback(self._evaluations.close)
        self.sync_process.servers.reached(version)
        self.sync_process.start()
        # It opens the images within connect_deadline_s, however late the servers came.
        self.sync_process.wait_begun(max(deadline - time.monotonic(), sync.connect_deadline_s))
        servers, file = self.sync_process.servers, rollout.servers_file
        self._servers.watch(Restarts(lambda: servers.urls, self.warn, rollouts.fail))
        ends.callback(Membership(servers, self._run_dir, rollouts.in_flight, file).close)
        if address := self._job.dashboards.metrics_address:
            ends.callback(self._listen(address).close)
        return self.sync_process

    def _control(self, url: str) -> ServerControl:
        """Return a server's control through the rollout service: rank 0 cannot reach the server."""
        sync, rollouts = self._sync, self._rollouts
        assert isinstance(rollouts, RolloutClient)
        load_s = load_deadline_s(sync, self.sync_process.manifest.total_bytes)
        access = ServerAccess(url, sync.commit_deadline_s, load_s, *self._keys)
        return rollouts.control(self._job.rollout.engine, access)

    def _needs(self) -> RolloutNeeds:
        """See SyncOptions. Evaluations need no routes and call no agents; recorded rollouts need
        nothing."""
        job = self._job
        routes = job.grpo.router_replay and not job.rollout.replay_path
        return RolloutNeeds(routes, engines_read_calls(job.rollout), self._evaluations.own)

    def _listen(self, address: str) -> HttpServer:
        """Serve the last step's metrics to Prometheus, and the last ones of each evaluation."""

        def answer(request: Request) -> Reply:
            if (request.method, request.path) != ("GET", "/metrics"):
                return Reply(404, {"error": "there is GET /metrics"})
            # Only one step's line has those of an evaluation, and it may be between two questions.
            row = self.recorder.last_row()
            row.pop("time_s", None)
            # Not before the first step: the totals of a resumed run do not begin at 0.
            row = (dashboards.NO_DROPS if row else {}) | row | self._evaluations.latest()
            return Reply(200, dashboards.page(row), kind=dashboards.CONTENT_TYPE)

        # No body: a client without a key could fill the memory of this host.
        server = HttpServer(address, "", answer, "dashboards.metrics_address", lambda _: False)
        terminal.print_status(f"metrics for Prometheus at http://{server.address}/metrics")
        return server

    def wait_slot(self) -> int | None:
        """Wait for a slot for a version that must not be skipped (the first, the last, one that
        rollouts cannot do without), as long as a server may keep one; None if none became free."""
        return self.sync_process.slots.wait_reserved(
            sync_waits_s(self._job, self.sync_process.manifest.total_bytes)
        )

    def wait_first_commit(self, version: int) -> None:
        """Wait until one server holds the version that training starts from. Raises
        ServerUnreachable naming every server, ServerUnfit, or as ServerSet.reached."""
        servers = self.sync_process.servers
        deadline_s = self._sync.startup_s(self.sync_process.manifest.total_bytes)
        what = f"the first commit, of version {version} on any server"
        with waiting(what, deadline_s, why=servers.latched):
            held = servers.wait_held(version, deadline_s, everyone=False)
        if not held:
            if unfit := servers.unfit():
                raise ServerUnfit(f"no server can serve this run: {unfit}")
            servers.reached(version)
            reason = servers.take_error()
            raise ServerUnreachable(
                f"no server committed version {version} within {deadline_s:.0f} s"
                " (weight_sync.startup_deadline_s, and its bytes at min_rate); tried"
                f" {', '.join(servers.urls)}; first error: {reason or 'none'}; titan-grpo doctor"
                " says more"
            )

    def prepare(self, version: int, num_ranks: int) -> StepWork:
        """Return one step's work for all ranks: groups for the trainer at ``version``, and the slot
        for the version it makes.

        Raises SyncError for a latched background error if weight_sync.on_sync_error is "stop", and
        if no server commits for weight_sync.max_lag versions; RolloutsLate past batch_timeout_s.
        """
        servers = self.sync_process.servers
        error = servers.take_error()
        if error is not None:
            self.recorder.error(str(error))
            terminal.print_status(f"weight sync: {error}")
            if self._sync.on_sync_error == "stop":
                raise error
        servers.reached(version)
        rollouts = self._rollouts
        try:
            found = self._take(version)
        except RolloutsLate as error:
            raise RolloutsLate(f"{error}; {servers.text()}") from error
        groups, taken = found.groups, [*found.groups, *found.left_out]
        # Groups from outside may be smaller; a step then takes more of them.
        whole = len(groups) >= self._job.rollout.prompts_per_step
        rollouts.record(version, groups, whole)
        self._collapse = self._collapse.after([c.reward for g in taken for c in g.completions])
        batch = plan(groups, num_ranks, self._options)
        for longest, count in Counter(map(length_range, batch.trained)).items():
            self.recorder.count(names.lengths("trained", str(longest)), count)
        for reason, count in batch.dropped.items():
            self.recorder.count(names.dropped(f"completion_{reason}"), count)
            logger.warning(
                "step after version %d: %d completions are not trained on (%s)",
                version,
                count,
                reason,
            )
        left_out = [*rewards_of(found.left_out), *rollouts.take_left_out()]
        kv_kept = self._sync.kv_after_update == "keep"
        self._step_values = group_values(groups, batch, version, kv_kept)
        self._step_values |= reward_values(groups, left_out)
        self._step_values |= self._count_rollouts()
        self._taken = version, groups
        ranks = batch.micro_batches() if self._job.grpo.single_rank_load else batch.rows
        slot = self.sync_process.slots.take_reserved()
        return Share(batch.steps, slot, json.dumps(rollouts.state())), ranks

    def _take(self, version: int) -> StepGroups:
        """Take the groups of one step; with dynamic sampling replace those without reward
        spread."""
        rollout, grpo, rollouts = self._job.rollout, self._job.grpo, self._rollouts
        deadline = time.monotonic() + rollout.batch_timeout_s

        def take(count: int) -> list[Group]:
            return rollouts.next_batch(version, count, deadline - time.monotonic())

        if not grpo.dynamic_sampling:
            return StepGroups(take(rollout.prompts_per_step), [])
        # A recorded batch is taken whole: nothing replaces its groups without spread.
        rounds = 0 if rollout.replay_path else grpo.dynamic_sampling_rounds
        back = rollouts.used_without_version
        size = 0 if rollout.source == "task" else rollout.group_size
        found = varied_groups(take, back, rollout.prompts_per_step, rounds, self._options, size)
        reasons = (left_out_for(group, self._options) for group in found.left_out)
        for reason, groups in Counter(reasons).items():
            self.recorder.count(names.dropped(reason), groups)
        return found

    @property
    def collapsed(self) -> bool:
        """Whether all rewards were equal for grpo.reward_collapse_steps steps, the one just
        prepared included."""
        return self._collapse.collapsed

    def unhealthy(self, step: int, skipped: int, reasons: Sequence[str]) -> None:
        """Record that ``skipped`` optimizer steps of a training step were not taken."""
        text = (
            f"step {step}: {skipped} optimizer step{'s' * (skipped != 1)} skipped"
            f" ({'; '.join(reasons)})"
        )
        self.recorder.count(names.UNHEALTHY_STEPS, skipped)
        self.recorder.error(text)
        terminal.print_status(text)

    def warn(self, text: str) -> None:
        """Report a failure that does not stop the run: on the terminal and in summary.json."""
        if hasattr(self, "recorder"):  # a logger may fail before ``start``
            self.recorder.error(text)
        terminal.print_status(text)

    def no_version(self, slot: int | None) -> None:
        """Free the slot and the groups' places of a training step that changed no weight."""
        if slot is not None:
            self.sync_process.slots.put_back(slot)
        self._rollouts.used_without_version(self._job.rollout.prompts_per_step)

    def skipped(self, version: int) -> None:
        """Record that no slot was free for ``version``."""
        self.recorder.count(names.SKIPPED_VERSIONS)
        self.recorder.instant("version skipped", version=version)

    def wait_committed(self, version: int) -> None:
        """Wait until every server with a known state holds ``version`` (synchronous mode). Past the
        deadline training continues."""
        servers, began = self.sync_process.servers, time.monotonic()
        timeout_s = sync_waits_s(self._job, self.sync_process.manifest.total_bytes)
        holding = servers.wait_held(version, timeout_s, everyone=True)
        waited_s = time.monotonic() - began
        if not holding or waited_s >= timeout_s:
            late = ", ".join(sorted(set(servers.urls) - set(holding)))
            text = f"version {version} is not on {late} after {waited_s:.0f} s; going on without"
            terminal.print_status(text)

    def show(self, step: int, trained: FirstBatch | None) -> list[Row]:
        """Record some completions of the step for inspection (rollout.sample_every). Return them as
        texts."""
        every = self._job.rollout.sample_every
        if trained is None or not every or (step > 1 and step % every):
            return []
        version, groups = self._taken
        chosen = choose(shown(groups, sequences(trained)))
        # A page may be made from another directory.
        line = ShownStep(step, version, os.path.abspath(self._model_dir), chosen)
        self.recorder.sample(msgspec.to_builtins(line))
        if self._codec is None:
            self._codec = TextCodec(self._model_dir)
        return rows(chosen, self._codec.decode)

    def record(
        self,
        step: int,
        metrics: Mapping[str, float],
        times: Mapping[str, float],
        phases: Sequence[tuple[str, float, float]],
    ) -> dict[str, float]:
        """Write a step to metrics.jsonl, the terminal and the trace (``phases``: name, start and
        stop on the recorder's clock). Return the values for TensorBoard."""
        self.recorder.begin(step)
        for name, start, stop in phases:
            self.recorder.add_span(name, start, stop, "main thread", step=step)
        # Only the servers that rollouts are sampled on.
        known, own = self.sync_process.servers.versions(), self._evaluations.own
        versions = {url: version for url, version in known.items() if url not in own}
        values = {**self._step_values, **times, **loss_values(metrics)}
        values |= server_values(self._taken[0], versions) | self.recorder.since_last()
        values |= self._evaluations.take_values()
        # An unhealthy step's loss may be NaN or infinite, which metrics.jsonl has as null.
        self.recorder.step(step, values)
        self._alert(step, values)
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        line = report.progress_line(step, self._job.training.steps, values, versions)
        terminal.print_status(line)
        return values

    def _alert(self, step: int, values: Mapping[str, float]) -> None:
        """Perform the actions of the thresholds that this step crossed."""
        self._watched, crossed = alerts.step(self._watched, values)
        for each in crossed:
            line = alerts.line_of(each, values, self.recorder.methods())
            self.warn(f"alert at step {step}: {line}")
            if each.action == "stop":
                self.stopped_by = self.stopped_by or f"alerts.stop {each}"
            elif each.action == "run":
                # In a thread: training must not wait for the command.
                threading.Thread(
                    target=self._run_command, args=(step, str(each)), name="alert", daemon=True
                ).start()

    def _run_command(self, step: int, text: str) -> None:
        settings = self._job.alerts
        command = [*shlex.split(settings.command), f"step {step}: {text}"]
        env = without_torchrun(os.environ)
        if failure := run_command(command, env, settings.command_timeout_s):
            self.warn(f"alerts.command {settings.command!r}: {failure}")

    def finish(self, version: int, published: int) -> dict[str, float]:
        """Flush the newest version to the servers, evaluate it and save it in HF layout. Return the
        evaluations' values since the last step. ``published``: the newest version that was
        published, which is older if no slot became free for the last one."""
        process = self.sync_process
        deadline_s = end_waits_s(self._sync, process.manifest.total_bytes)
        # No batch follows: the flush need not wait for running requests.
        self._rollouts.skip_drains()
        # Before the flush: an evaluating server takes no other version until it is done.
        self._evaluations.stop_schedule()
        self._evaluations.wait_idle()
        began = time.monotonic()
        holding = process.flush(published, deadline_s)
        waited_s = time.monotonic() - began
        for url in sorted(set(process.servers.urls) - set(holding)):
            error = process.servers.last_error(url)
            self.recorder.error(
                f"{url} did not hold version {published} at the end, after {waited_s:.1f} s; last"
                f" error: {error.cause if error is not None else 'none'}"
            )
        self._evaluations.last(published)
        values = self._evaluations.take_values()
        self.recorder.after_last_step(values)
        if missing := save_version(process, version, self._job, self._model_dir, self._run_dir):
            self.recorder.error(f"version {version} is not saved: {missing}")
        return values

    def finish_again(self, step: int, version: int) -> None:
        """Say that no step is left. Save ``version`` from the checkpoint of the last one, and write
        the report, if no process of the run has done both. Otherwise change no file."""
        done = f"step {step} of {self._job.training.steps} is done"
        terminal.print_status(f"{done}: nothing to train; raise training.steps to go on")
        folder = self._run_dir / self._job.checkpoint.folder
        checkpoint = checkpoints_in(folder).get(step)
        if checkpoint is None:
            return
        out = last_place(self._run_dir, sends_adapters(self._job.lora))
        ended = report.came_to_its_end(self._run_dir)
        if ended and any(out.glob("*.safetensors")):
            return
        self.recorder = Recorder(self._run_dir)
        self._ends.callback(self._close_records)
        self._ends.callback(self._report)
        export_last(self._job, checkpoint, out)
        terminal.print_status(
            f"version {version} was not saved at the run's end: now it is in {out}"
        )

    def close(self, error: BaseException | None = None) -> None:
        """End lanes, rollouts and servers within ``END_S`` and write the report, which names the
        ``error`` that ended the run. Idempotent."""
        self._ended_by = self._ended_by or ending(error, self._run_dir)
        self._end = time.monotonic() + END_S
        self._ends.close()

    def _close_rollouts(self) -> None:
        self._count_rollouts()
        self._rollouts.close(max(1.0, self._end - time.monotonic()))

    def _close_records(self) -> None:
        for problem in self.recorder.close():
            terminal.print_status(problem)

    def _report(self) -> None:
        mode = "async" if self._job.grpo.async_weight_update else "sync"
        try:
            name = self._run_dir.name
            summary = report.write_report(self.recorder, name, mode, self._ended_by)
        except OSError as error:
            terminal.print_status(f"the report cannot be written under {self._run_dir}: {error}")
        else:
            terminal.print_status(report.final_table(summary))
            terminal.print_status(
                f"{terminal.next_command('report', str(self._run_dir))}  (a page)"
            )

    def _count_rollouts(self) -> dict[str, float]:
        """Record what the rollouts counted since the last call; return the step's values of it."""
        (before_s, before), now = self._counted, (time.monotonic(), self._rollouts.counters())
        self._counted = now
        for name, count in now[1].items():
            new = count - before.get(name, 0)
            kind, _, what = name.partition(".")
            if new and kind == "dropped":
                self.recorder.count(names.dropped(what), new)
            elif new and kind == "made":
                self.recorder.count(names.lengths(kind, what), new)
        for total, name in COUNTED.items():
            if new := now[1].get(name, 0) - before.get(name, 0):
                self.recorder.count(total, new)
        return rollout_values(before, now[1], now[0] - before_s, known_gpus(self._job.rollout))
