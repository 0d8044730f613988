"""torchtitan's Trainer with GRPO data, GRPO loss, and weights published at every step boundary.

One step, on every rank::

    fetch      rank 0 waits for groups, scatters micro-batches and the slot of the next version image
    forward, backward                       the copy of the last version and its transfers run beside them
    fence                                   the device waits for that copy
    optimizer.step
    publish    this rank's shard is copied into the slot; lanes and servers do the rest

Overridden are forward_backward_step (the loss), train_step and train (what happens around torchtitan's own), state and close.
"""

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

from titan_grpo.algorithm.logprobs import token_logprobs
from titan_grpo.algorithm.loss import grpo_loss
from titan_grpo.algorithm.metrics import Metrics
from titan_grpo.errors import ConfigError, SyncError
from titan_grpo.observe import names
from titan_grpo.titan import cpu
from titan_grpo.titan.batches import BatchLoader, Share
from titan_grpo.titan.controller import Controller
from titan_grpo.titan.costs import token_cost
from titan_grpo.titan.flavors import disable_unexported_buffers, register_tiny_flavors
from titan_grpo.titan.packed import PackedAttention
from titan_grpo.titan.reduce import reduce_metrics
from titan_grpo.titan.reference import build_reference
from titan_grpo.titan.syncing import TrainerSync

logger = logging.getLogger(__name__)

LOGPROB_CHUNK_TOKENS = 4096
"""Tokens whose log-softmax is computed at a time: bounds its temporary memory."""


def _register(job_config: Any) -> None:
    """Register the user's model under a name of its own, with our loader in place of the text loader."""
    register_tiny_flavors()
    spec = get_train_spec(job_config.model.name)
    if spec.state_dict_adapter is None:
        raise ConfigError(
            f"model.name must be a model with a state dict adapter, {job_config.model.name!r} has none: "
            "its weights have no HF names, so no server could be synced"
        )
    name = f"grpo_{job_config.model.name}"
    args = spec.model_args.get(job_config.model.flavor)
    if args is None:
        raise ConfigError(f"model.flavor must be one of {sorted(spec.model_args)}, got {job_config.model.flavor!r}")
    if getattr(args, "attn_type", "sdpa") != "sdpa":
        raise ConfigError(f"model.flavor must use attn_type sdpa, {job_config.model.flavor!r} uses {args.attn_type!r}")
    if disable_unexported_buffers(args, spec.state_dict_adapter(args, None)):
        logger.warning("the MoE load balancing bias is off: servers cannot receive it, and they would route otherwise")
    register_train_spec(
        name,
        type(spec)(
            **{
                **vars(spec),
                "build_dataloader_fn": lambda dp_world_size, dp_rank, tokenizer, job_config: BatchLoader(dp_rank),
                "build_tokenizer_fn": None,
                "build_validator_fn": None,
            }
        ),
    )
    job_config.model.name = name


class GRPOTrainer(Trainer):
    """See the module's docstring. Rank 0 also owns a Controller: servers, rollout process, lanes, report."""

    def __init__(self, job_config: Any) -> None:
        _register(job_config)
        super().__init__(job_config)
        cpu.after_parallelize(self.model_parts)
        self._grpo = job_config.grpo
        self._parts: list[Metrics] = []
        self._started = False
        self._published = -1
        self._blocked_s = 0.0
        self._grad_norm = 0.0
        self.loader: BatchLoader = self.dataloader  # type: ignore[assignment]
        self.loader.connect(job_config.rollout.batch_timeout_s)
        cost = token_cost(self.model_args, self.model_parts[0])
        rank0 = dist.get_rank() == 0
        self.controller = Controller(job_config, self._model_dir(), self.device.type == "cpu", cost) if rank0 else None
        adapter = self.train_spec.state_dict_adapter(self.model_args, job_config.model.hf_assets_path)
        self.sync = TrainerSync(self.model_parts[0], adapter.to_hf, job_config.weight_sync, self.device, self.loader.group)
        self.reference = build_reference(self, job_config) if self._grpo.kl_beta > 0 else None
        self._packed = PackedAttention()
        if self._grpo.pack_sequences:
            for model in (self.model_parts[0], self.reference):
                if model is not None:
                    self._packed.install(model)
        self._hook()

    def _model_dir(self) -> str:
        return str(self.job_config.model.hf_assets_path)

    def _hook(self) -> None:
        # torchtitan's own seam for work that must end before the parameters change.
        staging = self.checkpointer.maybe_wait_for_staging
        log = self.metrics_processor.log

        def fenced() -> None:
            start = time.perf_counter()
            self.sync.fence()
            self._blocked_s += time.perf_counter() - start
            staging()

        def noted(step: int, avg_loss: float, max_loss: float, grad_norm: float, extra_metrics: Any = None) -> None:
            self._grad_norm = grad_norm
            log(step, avg_loss, max_loss, grad_norm, extra_metrics)

        self.checkpointer.maybe_wait_for_staging = fenced  # type: ignore[method-assign]
        self.metrics_processor.log = noted  # type: ignore[method-assign]

    def train(self) -> None:
        """torchtitan's loop, then the newest version is flushed to the servers."""
        super().train()
        self._finish()

    def _start(self) -> None:
        """After the checkpoint was loaded, before the first rollout: the servers get the version that training starts from."""
        self._started = True
        controller = self.controller
        if controller is not None:
            controller.start(self.step - 1, self.loader.state)
            recorder = controller.recorder
            self.sync.start(self.job_config.rollout, controller.urls, controller.on_server, recorder, controller.run_key)
            controller.adopt(self.sync)
        else:
            self.sync.start(self.job_config.rollout, [], lambda *_: None, None)
        self._publish_now(self.step - 1)
        if controller is not None:
            controller.wait_first_commit(self.step - 1)

    def _publish_now(self, version: int) -> None:
        """Publish at the start and at the end: here a slot is waited for, and rank 0 tells the others which."""
        chosen: list[Any] = [None]
        if self.controller is not None:
            chosen = [self.controller.wait_slot()]
        dist.broadcast_object_list(chosen, src=0, group=self.loader.group)
        if chosen[0] is None:
            raise SyncError(
                f"no slot became free for version {version}: every image is still being sent; raise weight_sync.slots"
            )
        self._publish(version, chosen[0])

    def _publish(self, version: int, slot: int) -> None:
        start = time.perf_counter()
        self.sync.publish(version, slot)
        self._published = version
        self._blocked_s += time.perf_counter() - start

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """Fetch, torchtitan's own step, publish, record."""
        if not self._started:
            self._start()
        self._parts, self._blocked_s = [], 0.0
        begin = time.perf_counter()
        share = self._fetch()
        fetched = time.perf_counter()
        self.gradient_accumulation_steps = len(share.microbatches)
        super().train_step(data_iterator)
        trained = time.perf_counter()
        if share.slot is not None:
            self._publish(self.step, share.slot)
        metrics = reduce_metrics(self._parts, self.parallel_dims)
        if self.controller is None:
            return
        if share.slot is None:
            self.controller.skipped(self.step)
        elif not self._grpo.async_weight_update:
            waiting = time.perf_counter()
            self.controller.wait_committed(self.step)
            self._blocked_s += time.perf_counter() - waiting
        times = {
            names.ROLLOUT_WAIT_S: fetched - begin,
            names.TRAIN_S: trained - fetched,
            names.BLOCKED_S: self._blocked_s,
            names.STEP_S: time.perf_counter() - begin,
            names.GRAD_NORM: self._grad_norm,
        }
        phases = {"rollout wait": (begin, fetched), "train": (fetched, trained), "publish": (trained, time.perf_counter())}
        self.controller.draw(self.step, phases)
        tensorboard = self.controller.record(self.step, metrics, times)
        self.metrics_processor.logger.log(tensorboard, self.step)

    def _fetch(self) -> Share:
        error = self.sync.take_error()
        controller = self.controller
        if controller is None:
            # A rank that is not 0 cannot stop the others at a boundary; it logs, and rank 0 misses its part.
            if error:
                logger.error("weight sync: %s", error)
            return self.loader.fetch(None)
        return self.loader.fetch(lambda: controller.prepare(self.step - 1, self.loader.num_shares, error))

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """GRPO loss of one micro-batch and its gradients. The weights in the batch normalise over the whole step already."""
        with self._packed.using(input_dict.pop("rows", None), self.device):  # type: ignore[arg-type]
            return self._forward_backward(input_dict, labels)

    def _forward_backward(self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        batch = {**input_dict, "labels": labels, "on_policy": input_dict["versions"] == self.step - 1}
        inputs, _, extra_inputs, extra_kwargs = self.post_dataloading_process({"input": batch.pop("input")}, labels)
        temperature = self.job_config.rollout.temperature
        extra_inputs |= {"positions": batch["positions"]} if "positions" in batch else {}
        reference = self._reference_logprobs(inputs, labels, temperature, extra_inputs)
        with self.train_context(), self.maybe_enable_amp:
            logits = self.model_parts[0](inputs, **extra_inputs, **extra_kwargs)
            logprobs = token_logprobs(logits, labels, temperature, LOGPROB_CHUNK_TOKENS)
            # Without the importance correction the clip bounds act on policy against engine (see algorithm/loss.py).
            old = batch["rollout_logprobs"] if self._grpo.rollout_is_threshold == 0 else None
            loss, metrics = grpo_loss(logprobs, batch, self._grpo, reference, old)
            del logits
            loss.backward()
        self._parts.append(metrics)
        return loss

    def _reference_logprobs(
        self, inputs: torch.Tensor, labels: torch.Tensor, temperature: float, extra_inputs: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad(), self.train_context(), self.maybe_enable_amp:
            return token_logprobs(self.reference(inputs, **extra_inputs), labels, temperature, LOGPROB_CHUNK_TOKENS)

    def _finish(self) -> None:
        if not self._started:
            return
        if self._published < self.step:
            self._publish_now(self.step)
        self.sync.fence()
        if self.controller is not None:
            self.controller.finish(self.step)
        # The others' images must live until rank 0 has flushed the last version from them.
        dist.barrier(group=self.loader.group)

    def close(self) -> None:
        """Stop everything that was started. Also after an error; bounded; idempotent."""
        try:
            if self.controller is not None:
                self.controller.close()
            self.sync.close()
        finally:
            super().close()
