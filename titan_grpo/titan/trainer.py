"""torchtitan's Trainer with GRPO data, GRPO loss, and weights published at every step boundary.

One step, on every rank::

    fetch      rank 0 waits for groups, scatters micro-batches and the slot of the next version
    forward, backward           the copy of the last version and its transfers run beside them
    fence                       the device waits for that copy
    optimizer.step              (the last three repeat per minibatch and pass: optimizer_step.py)
    publish    start the copy of this rank's shards into the slot; lanes and servers do the rest

A training step that changed no weight (all its optimizer steps were unhealthy) makes no version.
GRPOTrainer overrides train_step, train, the checkpointed state and close.
"""

import gc
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import init_logger

from titan_grpo.algorithm.balance import TokenCost
from titan_grpo.config import WIRE_BYTES, sends_adapters
from titan_grpo.errors import AlertStop, ConfigError, StorageError, SyncError, UnhealthyError
from titan_grpo.observe import names, terminal
from titan_grpo.observe.run_lock import held
from titan_grpo.protocol.admission import too_stale
from titan_grpo.receive.checkpoint import INDEX
from titan_grpo.titan import compat
from titan_grpo.titan.checkpoints import (
    ALPHA,
    agreed,
    failures_of,
    known_failures,
    remove_torn,
)
from titan_grpo.titan.data import BatchLoader, Result, Share, TextMixin, batch_options, on_rank0
from titan_grpo.titan.jobfile import one_line
from titan_grpo.titan.modules import (
    PackedAttention,
    RouterReplay,
    compute_head_in_fp32,
    move_reference,
    route_width,
)
from titan_grpo.titan.optimizer_step import Outcome, Stepper, reduce_metrics, use_settings
from titan_grpo.titan.pipeline import parts_of
from titan_grpo.titan.rank0 import Controller
from titan_grpo.titan.servers import known_servers
from titan_grpo.titan.startup import write_failure
from titan_grpo.titan.step_records import NO_WANDB, lacks_wandb, log_table, make_dispensable
from titan_grpo.titan.weight_sync import Here, Stages, TrainerSync

logger = logging.getLogger(__name__)


Engine: Any = compat.upstream().Engine
"""torchtitan's trainer, from upstream02 or upstream03, which hide differences between versions."""


def token_cost(model_args: Any, model: torch.nn.Module) -> TokenCost:
    """Return the floating-point operations of forward and backward as a function of row length.

    torchtitan counts a + b * n operations per token of a row of n tokens: a for the parameters
    (of an MoE the active ones), b for attention. It ignores causality, so b is halved here.
    Sharded parameters count whole.
    """
    one, two = (model_args.get_nparams_and_flops(model, length)[1] for length in (1, 2))
    return TokenCost(float(2 * one - two), (two - one) / 2)


class GRPOTrainer(Engine):
    """torchtitan trainer of the module's docstring. Rank 0 also owns a Controller (servers,
    rollouts, lanes, report)."""

    def __init__(self, job_config: Any) -> None:
        # Before super(): its checkpointer takes the trainer as part of the state.
        self.version = 0
        try:
            super().__init__(job_config, BatchLoader)
        except (AssertionError, ImportError, NotImplementedError, ValueError) as error:
            # torchtitan's own checks of a job
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"torchtitan cannot build this job: {type(error).__name__}: {one_line(str(error))}"
                f" ({frame.filename}, line {frame.lineno})"
            ) from error
        make_dispensable(self.metrics_processor, self._warn)
        self._grpo = job_config.grpo
        self._started = False
        self._published = -1
        self._blocked_s = 0.0
        self._unhealthy_in_a_row = 0
        self.loader: BatchLoader = self.dataloader
        elements = sum(p.numel() for p in self.whole.parameters())
        nbytes = elements * WIRE_BYTES[job_config.weight_sync.wire_dtype]
        self.loader.connect(job_config, nbytes)
        cost = token_cost(self.model_args, self.whole)
        model_dir = str(job_config.model.hf_assets_path)
        self.controller: Controller | None = None

        def control() -> list[str]:
            on_cpu = self.device.type == "cpu"
            options = batch_options(job_config, cost, self.model_args.vocab_size, *self._routed())
            self.controller = Controller(job_config, model_dir, nbytes, on_cpu, options)
            return known_servers(job_config.rollout, os.environ).urls

        urls = on_rank0(control if dist.get_rank() == 0 else None, self.loader.group)
        self.sync = TrainerSync(
            Stages(self.model_parts, self.whole),
            self.to_hf,
            job_config.weight_sync,
            self.device,
            sends_adapters(job_config.lora),
            Here(
                group=self.loader.group,
                urls=urls,
                run_key=self.controller.run_key if self.controller is not None else None,
            ),
        )
        if job_config.checkpoint.enable and job_config.checkpoint.last_save_in_hf:
            self._keep_exported(self.checkpointer.sd_adapter)
        self.reference: torch.nn.Module | None = None
        if self._grpo.kl_beta > 0:
            # From disk, not from the policy: a resumed run must have the same reference.
            self.reference = self.second_model(self._grpo.reference_model or model_dir)
            self.reference.requires_grad_(False).eval()
        packed = PackedAttention()
        if self._grpo.pack_sequences:
            for model in (self.model_parts[0], self.reference):
                if model is not None:
                    packed.install(model)
        if self._grpo.fp32_lm_head:
            for model in filter(None, (self.policy, self.reference)):
                for part in parts_of(model):
                    # only the last pipeline stage has an output layer
                    if getattr(part, "output", None) is not None or self.pipeline is None:
                        compute_head_in_fp32(part)
        replay = RouterReplay()
        if self._grpo.router_replay:
            # Not in the reference: its own routing is part of what the KL term compares with.
            replay.install(self.model_parts[0])
        text = None
        if self._grpo.ptx_mixin_batchsize:
            text = TextMixin(self.own_spec, job_config, self.loader.num_shares, self.loader.dp_rank)
            self._save_also("text", text.loader)
        self._moving = self.reference is not None and 0 < self._grpo.ref_model_ema < 1
        if self.reference is not None and self._moving:
            self._save_also("reference", ModelWrapper(parts_of(self.reference)))
        self._stepper = Stepper(self, self.reference, packed, replay, text)
        self._hook(self.checkpointer)

    def _hook(self, checkpointer: Any) -> None:
        # torchtitan calls this before the parameters change: the place for the fence.
        staging, load = checkpointer.maybe_wait_for_staging, checkpointer.load
        save, keys, lora = checkpointer.dcp_save, self.job_config.checkpoint, self.job_config.lora

        def fenced() -> None:
            start = time.perf_counter()
            self.sync.publisher.fence()
            self._blocked_s += time.perf_counter() - start
            staging()

        def loaded(step: int = -1) -> bool:
            with ExitStack() as after:
                looks = keys.enable and step == -1
                if looks and agreed(checkpointer._find_load_step(), self.loader.group) == -1:
                    # 0.2.2 loads its initial weights only where no folder is: not in an empty one,
                    # as a kill in the first save leaves it. (0.3 does.)
                    after.callback(setattr, checkpointer, "folder", checkpointer.folder)
                    checkpointer.folder = os.path.join(checkpointer.folder, "none")
                with known_failures():
                    found: bool = load(step)
            if self.should_continue_training():  # a schedule has no rate past its end
                use_settings(self.optimizers, self.lr_schedulers, self.job_config.optimizer)
            return found

        def saved(states: Any, checkpoint_id: str, *args: Any, **options: Any) -> Any:
            if (folder := Path(checkpoint_id).parent).is_symlink():
                # Perhaps to a folder that is not there yet: mkdir would take the link for a file.
                os.makedirs(os.path.realpath(folder), exist_ok=True)
            if keys.keep_latest_k and dist.get_rank() == 0:
                remove_torn(folder, Path(checkpoint_id))
            # Of a course that this run has left: with it, what a crash leaves would count as whole.
            for name in (".metadata", INDEX):
                Path(checkpoint_id, name).unlink(missing_ok=True)
            if lora.rank:
                states = {**states, ALPHA: lora.alpha}
            with known_failures():
                return save(states, checkpoint_id, *args, **options)

        checkpointer.maybe_wait_for_staging, checkpointer.load = fenced, loaded
        checkpointer.dcp_save = saved

    def _routed(self) -> tuple[int, ...]:
        """Return the experts of a token over all layers and those of a layer; () without replay."""
        if not self._grpo.router_replay:
            return ()
        return route_width(self.model_parts[0]), self.model_args.moe_args.num_experts

    def _keep_exported(self, adapter: Any) -> None:
        """Let torchtitan write only names that the model exports into Hugging Face files. It takes
        them from the base model's index, which may have a tied head too, or tables that engines
        compute: without a value, each makes its file unreadable."""
        if adapter.fqn_to_index_mapping:
            names = {tensor.name for tensor in self.sync.plan.layout.tensors}
            files = adapter.fqn_to_index_mapping.items()
            adapter.fqn_to_index_mapping = {name: file for name, file in files if name in names}

    def _save_also(self, name: str, state: Any) -> None:
        # A disabled checkpointer has no ``states``.
        if self.job_config.checkpoint.enable:
            self.checkpointer.states[name] = state

    def state_dict(self) -> dict[str, Any]:
        """Return torchtitan's state and the version, which is less than the step if training steps
        made no version."""
        return {**super().state_dict(), "version": self.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.version = state_dict["version"]

    def train(self) -> None:
        """Run torchtitan's loop, then flush the newest version to the servers."""
        super().train()
        if not self._started:
            self._on_rank0(lambda controller: controller.finish_again(self.step, self.version))
            return
        published = self._published == self.version or self._publish_now(self.version)
        self.sync.publisher.fence()

        def finish(controller: Controller) -> None:
            if not published:
                controller.warn(
                    f"no slot became free for version {self.version}, the last: every image is"
                    " still being sent, and the servers keep an older one; raise weight_sync.slots"
                )
            values = controller.finish(self.version, self._published)
            self.metrics_processor.logger.log(values, self.step)

        # The other hosts' images must live until rank 0 has flushed the last version from them.
        self._on_rank0(finish)

    def _on_rank0(self, work: Callable[[Controller], Result]) -> Result:
        """Return what ``work`` returns on rank 0, or raise its error there and RunStopped on every
        other rank. Collective."""
        controller = self.controller
        return on_rank0(
            None if controller is None else partial(work, controller), self.loader.group
        )

    def _start(self) -> None:
        """Start rank 0's controller and the weight sync, then publish the version that training
        starts from. Runs in the first step: the checkpoint is loaded, no rollout has begun."""
        self._started = True

        def start(controller: Controller) -> None:
            assert self.sync.pool is not None
            process = controller.start(
                self.version, self.loader.state, self.sync.pool, self.device, self.sync.plan
            )
            self.sync.start(process.publish)

        if self.controller is None:
            self.sync.start()
        self._on_rank0(start)
        if self.job_config.metrics.enable_wandb and lacks_wandb(self.metrics_processor):
            self._warn(NO_WANDB)
        if not self._publish_now(self.version):
            raise SyncError(
                f"no slot became free for version {self.version}, the first: the sync process ended"
                " as it began; see its messages above"
            )
        self._on_rank0(lambda controller: controller.wait_first_commit(self.version))

    def _publish_now(self, version: int) -> bool:
        """Publish ``version`` between two steps, waiting for a slot on rank 0. Return whether one
        became free. Collective."""
        begin = time.perf_counter()
        slot = self._on_rank0(Controller.wait_slot)
        self._blocked_s += time.perf_counter() - begin
        if slot is not None:
            self._publish(version, slot)
        return slot is not None

    def _catch_up(self) -> bool:
        """Publish the version, once a slot is free, if every version that could make this step's
        groups was skipped: none of them has begun, and none ever would. Return whether so.
        Collective."""
        rollout = self.job_config.rollout
        late = too_stale(self._published, self.version, rollout.max_staleness)
        if late and not rollout.replay_path:
            self._publish_now(self.version)
            return True
        return False

    def _publish(self, version: int, slot: int) -> None:
        start = time.perf_counter()
        self.sync.publisher.publish(version, slot, self.sync.shards())
        self._published = version
        self._blocked_s += time.perf_counter() - start

    def train_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        """Fetch, take the optimizer steps, publish and record. Raises UnhealthyError and AlertStop
        on every rank alike, and rank 0's errors as ``on_rank0`` does."""
        if not self._started:
            self._start()
        self._blocked_s = 0.0
        begin = time.perf_counter()
        caught_up = time.perf_counter() if self._catch_up() else begin
        share = self._fetch()
        fetched = time.perf_counter()
        learning_rate = self.learning_rate()
        collapsed = self.controller is not None and self.controller.collapsed
        outcome = self._stepper.run(data_iterator, share.steps, self.version, collapsed)
        trained = time.perf_counter()
        self._make_version(outcome, share.slot)
        metrics = reduce_metrics(outcome, self.parallel_dims)
        # After reduce_metrics, which waits for the device: only then is the fence's time known.
        self._blocked_s += self.sync.publisher.take_fenced_s()
        self._log(metrics["loss"], outcome, learning_rate)
        if outcome.taken and share.slot is not None and not self._grpo.async_weight_update:
            self._wait_committed()
        if self.controller is not None:
            clock = (begin, caught_up, fetched, trained)
            self._record(self.controller, metrics, outcome, clock, learning_rate)
        self._judge(outcome)
        self._obey_alerts()

    def learning_rate(self) -> float:
        """Return the rate of the next optimizer step. It is read from the optimizer: torchtitan 0.3
        loads a checkpoint's rate there, and a scheduler that has the job's."""
        return float(self.optimizers.optimizers[0].param_groups[0]["lr"])

    def _wait_committed(self) -> None:
        """Wait until the servers hold the version (synchronous mode). Collective."""
        begin = time.perf_counter()
        # In the loader's group, whose deadline has the version's bytes. A checkpoint's collectives
        # have torchtitan's, which may be shorter than rank 0's wait.
        self._on_rank0(lambda controller: controller.wait_committed(self.version))
        self._blocked_s += time.perf_counter() - begin

    def _make_version(self, outcome: Outcome, slot: int | None) -> None:
        """Count the new version and publish it if it has a slot. Make none if no weight
        changed."""
        controller = self.controller
        if not outcome.taken:
            if controller is not None:
                controller.no_version(slot)
            return
        self.version += 1
        if self.reference is not None and self._moving:
            move_reference(self.reference, self.policy, self._grpo.ref_model_ema)
        if slot is not None:
            self._publish(self.version, slot)
        elif controller is not None:
            controller.skipped(self.version)

    def _log(self, loss: float, outcome: Outcome, learning_rate: float) -> None:
        """Write torchtitan's own line and TensorBoard values. Collective in the steps that it
        logs."""
        if not self.metrics_processor.should_log(self.step):
            return
        mesh = self.parallel_dims.get_optional_mesh("batch")
        seen = torch.tensor(self.ntokens_seen, dtype=torch.int64, device=self.device)
        extra = {"n_tokens_seen": dist_utils.dist_sum(seen, mesh), "lr": learning_rate}
        self.metrics_processor.log(self.step, loss, loss, outcome.grad_norm, extra_metrics=extra)

    def _warn(self, text: str) -> None:
        if self.controller is not None:
            self.controller.warn(text)
        else:
            logger.warning("%s", text)

    def _record(
        self,
        controller: Controller,
        metrics: dict[str, float],
        outcome: Outcome,
        clock: tuple[float, float, float, float],
        learning_rate: float,
    ) -> None:
        begin, caught_up, fetched, trained = clock
        now = time.perf_counter()
        times = {
            names.ROLLOUT_WAIT_S: fetched - caught_up,
            names.TRAIN_S: trained - fetched,
            names.BLOCKED_S: self._blocked_s,
            names.STEP_S: now - begin,
            names.GRAD_NORM: outcome.grad_norm,
            names.LEARNING_RATE: learning_rate,
        }
        spans = [
            ("rollout wait", caught_up, fetched),
            ("train", fetched, trained),
            ("publish", trained, now),
        ]
        if caught_up > begin:
            spans.insert(0, ("publish", begin, caught_up))
        if outcome.unhealthy:
            controller.unhealthy(self.step, outcome.skipped, outcome.unhealthy)
        tensorboard = controller.record(self.step, metrics, times, spans)
        self.metrics_processor.logger.log(tensorboard, self.step)
        if completions := controller.show(self.step, outcome.first):
            log_table(self.metrics_processor, completions, self.step)

    def _judge(self, outcome: Outcome) -> None:
        """Raise UnhealthyError if the configuration says so, on every rank alike (the outcome is
        the same everywhere)."""
        self._unhealthy_in_a_row = 0 if outcome.taken else self._unhealthy_in_a_row + 1
        why = "; ".join(outcome.unhealthy)
        if outcome.unhealthy and self._grpo.on_unhealthy == "stop":
            raise UnhealthyError(
                f'step {self.step}: {why} (grpo.on_unhealthy = "stop"); version {self.version} is'
                " the last"
            )
        if self._unhealthy_in_a_row >= self._grpo.max_unhealthy_steps:
            raise UnhealthyError(
                f"step {self.step}: no optimizer step was taken in {self._unhealthy_in_a_row}"
                f" training steps in a row (grpo.max_unhealthy_steps): {why}; version"
                f" {self.version} is the last"
            )

    def _obey_alerts(self) -> None:
        """Save a checkpoint and raise AlertStop if a threshold of alerts.stop was crossed on rank
        0. Collective if any threshold is configured."""
        if not self.job_config.alerts.stop:
            return
        reason = self._on_rank0(attrgetter("stopped_by"))
        if not reason:
            return
        keys = self.job_config.checkpoint
        if not keys.enable or keys.load_only:
            why = "load_only" if keys.enable else "enable"
            raise AlertStop(f"step {self.step}: {reason}; nothing is saved (checkpoint.{why})")
        # Saved as torchtitan's last step: this step is over on every rank. But whole, whatever the
        # job asks of the run's end: a restart needs optimizer, version and data cursor.
        self.checkpointer.last_save_in_hf = self.checkpointer.last_save_model_only = False
        self.checkpointer.save(self.step, last_step=True)
        raise AlertStop(
            f"step {self.step}: {reason}; the checkpoint of this step is saved, and training with"
            f" job.dump_folder = {self.job_config.job.dump_folder!r} and without that alert goes"
            " on from it"
        )

    def _fetch(self) -> Share:
        controller = self.controller
        if controller is None:
            # Only log: this rank cannot stop the others at a boundary. Rank 0 notices that this
            # rank's part of a version does not come.
            if error := self.sync.take_error():
                logger.error("weight sync: %s", error)
            return self.loader.fetch(None)
        return self.loader.fetch(lambda: controller.prepare(self.version, self.loader.num_shares))

    def close(self, error: BaseException | None = None) -> None:
        """Stop everything that was started, and wait for a checkpoint that is being written.
        ``error`` is what ended the run, for the summary. Idempotent."""
        # A disabled checkpointer has no ``save_future``.
        saving: Any = getattr(self.checkpointer, "save_future", None)
        written = saving is None or saving.done()
        with ExitStack() as parts:
            # Run in reverse: the controller, the sync (rank 0's images outlive its lanes), the
            # loggers (a scheduler may kill the run while the checkpoint is written), the
            # checkpoint, torchtitan. An error of one does not stop the next.
            parts.callback(super().close)
            if not written:
                parts.callback(self._finish_saving, saving)
            parts.callback(self.metrics_processor.close)
            parts.callback(self.sync.close)
            if self.controller is not None:
                parts.callback(self.controller.close, error)
            if saving is not None and written:
                # Before the controller writes the summary, which then has the failure.
                parts.callback(self._check_saved, saving)

    def _finish_saving(self, saving: Future[Any]) -> None:
        """Wait for the checkpoint that a thread is still writing: the next start may need it."""
        if self.controller is not None:
            terminal.print_status("ending: the last checkpoint is being written")
        # no deadline: the disk ends it, or the timeout of the checkpointer's own group.
        wait([saving])
        self._check_saved(saving)

    def _check_saved(self, saving: Future[Any]) -> None:
        """Say why a checkpoint was not written: nothing else looks at what its thread raised."""
        if error := saving.exception(0):
            first, *_ = failures_of(error) or [error]
            self._warn(
                f"the last checkpoint was not written: {type(first).__name__}: {first}; the"
                " next start goes on from the one before it, or from the beginning"
            )


def run(job_config: Any, build: Callable[[Any], GRPOTrainer] = GRPOTrainer) -> None:
    """Train as configured, with the trainer that ``build`` makes. Raises the error that stopped it
    after everything has ended, as StorageError if the disk is the cause."""
    folder = Path(job_config.job.dump_folder)
    with held(folder) if os.environ["RANK"] == "0" else nullcontext():
        init_logger()
        try:
            with ExitStack() as ends:
                trainer = build(job_config)
                ends.push(lambda _kind, error, _trace: trainer.close(error))
                trainer.train()
            # After success only, as torchtitan does: after an error of one rank the others are
            # still in its groups.
            dist.destroy_process_group()
        except BaseException as error:
            if reason := write_failure(error, folder):
                raise StorageError(reason) from error
            raise
        finally:
            # The interpreter's last collection walks over all of torch, for seconds: the other
            # ranks and torchrun wait for the end of this process.
            gc.freeze()
