"""The optimizer steps of one training step, built from torchtitan's own parts.

One batch is one training step and makes one version. ``num_microbatches`` or ``num_epochs`` above 1
gives several optimizer steps (PPO minibatches, passes over the batch). With ``proximal_logprobs =
"recompute"``, those after the first use log-probabilities that the policy computes before the first
step. If an optimizer step's numbers are bad, every rank skips it: parameters and optimizer state
stay unchanged.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import utils as dist_utils

from titan_grpo.algorithm.distribution import logit_mean_square, token_entropy, token_logprobs
from titan_grpo.algorithm.loss import (
    LogitTerms,
    Metrics,
    accumulate,
    flags,
    grpo_loss,
    kept_tokens,
    pack,
    reasons,
    summarize,
    token_advantages,
    unpack,
)
from titan_grpo.algorithm.objective import least_left_out, second_moments
from titan_grpo.algorithm.rows import IGNORE_INDEX
from titan_grpo.config.grpo import AGAINST_ENGINE
from titan_grpo.titan.data import TextMixin, text_weight
from titan_grpo.titan.modules import PackedAttention, RouterReplay
from titan_grpo.titan.pipeline import Loaded, Pipeline, alike
from titan_grpo.titan.step_records import FirstBatch

CHUNK_TOKENS = 4096
"""Tokens per chunk of a computation over the vocabulary: bounds its temporary memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of training on one batch; the same on every rank except ``metrics`` and ``first``."""

    taken: int
    """Optimizer steps that changed the weights."""
    steps: int
    """Optimizer steps attempted."""
    grad_norm: float
    """Largest gradient norm before clipping."""
    unhealthy: tuple[str, ...]
    """Reasons why the others were skipped, each once."""
    metrics: Metrics
    """This rank's metrics, not reduced."""
    first: FirstBatch | None
    """This rank's first micro-batch with the policy's log-probabilities before the step."""

    @property
    def skipped(self) -> int:
        """Optimizer steps that changed nothing."""
        return self.steps - self.taken


Reader = Callable[[torch.Tensor, torch.Tensor, float, int], torch.Tensor]
"""(logits [R, L, V], labels [R, L], temperature, chunk) -> [R, L]."""


EQUAL_ENTROPY = 1e-4
"""Nats within which two tokens have one entropy, as all tokens after one prefix have: other batches
and other ranks round it otherwise."""


def least_of_share(values: torch.Tensor, share: float) -> float:
    """Return a bound that the largest ``share`` of the values reach (at least one value), and those
    that equal the smallest of them; infinity if there are none. Selects the few tokens of high
    entropy (arXiv 2506.01939).

    Example: values (1, 4, 2, 3), share 0.5 -> 3 - EQUAL_ENTROPY.
    """
    count = max(round(share * values.numel()), 1)
    if not values.numel():
        return math.inf
    return values.topk(count).values[-1].item() - EQUAL_ENTROPY


def reduce_metrics(outcome: Outcome, parallel_dims: Any) -> dict[str, float]:
    """Reduce the metrics of a training step over all data-parallel ranks; losses are means over its
    optimizer steps. Collective over the batch mesh."""
    sums, maxima = pack(outcome.metrics)
    mesh = parallel_dims.get_optional_mesh("batch")
    if mesh is not None:
        # The sums are float64: a mean over a million tokens keeps its digits.
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=mesh.get_group())
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group())
    values = summarize(unpack(list(outcome.metrics), sums, maxima))
    for name in values:
        if name in ("loss", "ptx") or name.endswith("_loss"):
            values[name] /= outcome.steps
    return values


def use_settings(optimizers: Iterable[Any], schedules: Iterable[Any], settings: Any) -> None:
    """Give the optimizers and their learning-rate schedules the numbers of the job's [optimizer].

    A checkpoint that was loaded has put its own in their place: with torchtitan 0.2.2 in both, with
    0.3 in the optimizers alone.
    """
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        schedule.base_lrs = [settings.lr] * len(schedule.lr_lambdas)
        rates = [settings.lr * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        schedule._last_lr = rates
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group |= {"lr": rate, "initial_lr": settings.lr, "eps": settings.eps}
            group |= {"betas": (settings.beta1, settings.beta2)}
            group |= {"weight_decay": settings.weight_decay}
            # torch's AdamW is Adam with this.
            group["decoupled_weight_decay"] = settings.name == "AdamW"
            group |= {name: settings.implementation == name for name in ("fused", "foreach")}


class Stepper:
    """Losses and optimizer steps of a GRPOTrainer, with the trainer's model, optimizer, contexts
    and hooks."""

    def __init__(
        self,
        trainer: Any,
        reference: torch.nn.Module | None,
        packed: PackedAttention,
        replay: RouterReplay,
        text: TextMixin | None,
    ) -> None:
        self._t = trainer
        self._reference, self._packed, self._text = reference, packed, text
        self._replay = replay
        self._grpo = trainer.job_config.grpo
        self._temperature: float = trainer.job_config.rollout.temperature
        self._first: FirstBatch | None = None

    def run(
        self, batches: Iterator[Loaded], steps: Sequence[int], version: int, collapsed: bool
    ) -> Outcome:
        """Train on one batch: ``steps[m]`` micro-batches for the m-th optimizer step of a pass.
        Collective over all ranks.

        ``version`` is the trainer's; rank 0 passes ``collapsed``, the others pass False.
        """
        self._first = None
        minibatches = [[next(batches) for _ in range(count)] for count in steps]
        if self._t.pipeline is not None:
            minibatches = [alike(minibatch) for minibatch in minibatches]
        self._prepare(minibatches)
        parts: list[Metrics] = []
        found = []
        for number in range(self._grpo.num_epochs * len(minibatches)):
            minibatch, first = minibatches[number % len(minibatches)], number == 0
            found.append(self._optimizer_step(minibatch, version, first, collapsed, parts))
        self._t.lr_schedulers.step()
        bad = [reason for _, reasons in found for reason in reasons]
        return Outcome(
            taken=sum(not reasons for _, reasons in found),
            steps=len(found),
            # torch's: Python's would pass over a NaN that is not the first
            grad_norm=torch.tensor([norm for norm, _ in found], dtype=torch.float64).max().item(),
            unhealthy=tuple(dict.fromkeys(bad)),
            metrics=accumulate(parts),
            first=self._first,
        )

    def _prepare(self, minibatches: Sequence[Sequence[Loaded]]) -> None:
        """Add the inputs that do not change within a batch: ``ref_logprobs``; of the policy before
        the first optimizer step ``old_logprobs`` for those after it, and the ``high_entropy`` mask.
        Collective."""
        g, t = self._grpo, self._t
        proximal = g.proximal_logprobs == "recompute" and g.policy_loss not in AGAINST_ENGINE
        for number, minibatch in enumerate(minibatches):
            readers: dict[str, Reader] = {}
            if proximal and (number > 0 or g.num_epochs > 1):
                readers["old_logprobs"] = token_logprobs
            if g.top_entropy_share < 1:
                # the entropy does not depend on the labels
                readers["entropy"] = lambda logits, _, *rest: token_entropy(logits, *rest)
            self._add(t.policy, minibatch, readers)
            if self._reference is not None:
                self._add(self._reference, minibatch, {"ref_logprobs": token_logprobs})
            if "entropy" not in readers:
                continue
            here = [
                inputs["entropy"][labels.to(t.device) != IGNORE_INDEX]
                for inputs, labels in minibatch
            ]
            least = least_of_share(self._of_all_ranks(here), g.top_entropy_share)
            for inputs, _ in minibatch:
                inputs["high_entropy"] = inputs.pop("entropy") >= least

    def _bound_second_moment(self, minibatch: Sequence[Loaded], version: int, first: bool) -> None:
        """Add the ``outside_m2`` mask: the tokens that M2PO leaves out under the current policy.
        Collective."""
        g, moments = self._grpo, []
        self._add(self._t.policy, minibatch, {"logprobs": token_logprobs})
        for inputs, labels in minibatch:
            now, batch = inputs.pop("logprobs"), self._batch(inputs, labels, version, first)
            spans = kept_tokens(now, batch, g)
            advantages = token_advantages(now, batch, spans, g, batch.get("ref_logprobs"))
            moment = second_moments(now, batch["rollout_logprobs"], advantages)
            moments.append(moment.masked_fill(~spans.mask, 0))
        everywhere = self._of_all_ranks([moment.flatten() for moment in moments])
        least = least_left_out(everywhere, g.m2_threshold)
        for (inputs, _), moment in zip(minibatch, moments, strict=True):
            inputs["outside_m2"] = moment >= least

    def _of_all_ranks(self, here: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gather values [n] from all data-parallel ranks, on the CPU. Collective."""
        own = torch.cat(list(here)).cpu()
        mesh = self._t.parallel_dims.get_optional_mesh("batch")
        if mesh is None:
            return own
        gathered: list[Any] = [None] * mesh.size()
        dist.all_gather_object(gathered, own, group=mesh.get_group())
        return torch.cat(gathered)

    def _optimizer_step(
        self,
        minibatch: Sequence[Loaded],
        version: int,
        first: bool,
        collapsed: bool,
        parts: list[Metrics],
    ) -> tuple[float, tuple[str, ...]]:
        """Take one optimizer step; return (gradient norm, reasons why it was skipped)."""
        t = self._t
        if self._grpo.m2_threshold:
            self._bound_second_moment(minibatch, version, first)
        t.optimizers.zero_grad()
        loss = torch.zeros((), device=t.device)
        made: list[Metrics] = []
        if t.pipeline is not None:
            loss, made = self._pipelined(t.pipeline, minibatch, version, first)
        for inputs, labels in minibatch if t.pipeline is None else ():
            part, sums = self._forward_backward(inputs, labels, version, first)
            loss = loss + part
            made.append(sums)
        if self._text is not None:
            part, cross_entropy = self._text_forward_backward(made)
            loss = loss + part
            # The text is the whole optimizer step's: the first micro-batch counts it.
            shares = {"loss_sum": made[0]["loss_sum"] + part.double(), "ptx_sum": cross_entropy}
            rest = [{**sums, "ptx_sum": 0 * cross_entropy} for sums in made[1:]]
            made = [made[0] | shares, *rest]
        parts += made
        grad_norm = dist_utils.clip_grad_norm_(
            [p for m in t.model_parts for p in m.parameters()],
            t.job_config.training.max_norm,
            foreach=True,
            pp_mesh=t.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=t.parallel_dims.ep_enabled,
        )
        bad = flags(loss, grad_norm, self._grpo.grad_norm_limit, collapsed)
        # Over all ranks: a rank that skipped alone would hold other weights.
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        why = reasons(bad.tolist())
        if why:
            t.optimizers.zero_grad()
            return float(grad_norm), why
        # Includes the fence (GRPOTrainer._hook): the last version's copy reads these weights.
        t.checkpointer.maybe_wait_for_staging()
        t.optimizers.step()
        return float(grad_norm), ()

    def _batch(
        self, inputs: dict[str, Any], labels: torch.Tensor, version: int, first: bool
    ) -> dict[str, torch.Tensor]:
        """Return a micro-batch's inputs of ``grpo_loss``, on the device. ``first``: of the
        batch's first optimizer step, for which the policy equals the trainer's version."""
        device = self._t.device
        batch = {
            name: x.to(device)
            for name, x in inputs.items()
            if isinstance(x, torch.Tensor) and name != "routes"
        }
        return batch | {
            "labels": labels.to(device),
            "on_policy": (batch["oldest"] == version) & first,
            "staleness": version - batch["versions"],
        }

    def _forward_backward(
        self, inputs: dict[str, Any], labels: torch.Tensor, version: int, first: bool
    ) -> tuple[torch.Tensor, Metrics]:
        """Compute the GRPO loss of one micro-batch and its gradients. The batch's weights already
        normalise over the optimizer step."""
        t = self._t
        batch = self._batch(inputs, labels, version, first)
        with self._using(inputs):
            logits = t.logits(t.policy, batch)
            # Before the backward: there checkpointed layers route a second time.
            routed = self._replay.take_metrics()
            loss, metrics = self._loss(logits, batch)
            del logits
            loss.backward()
        return loss.detach(), metrics | routed

    @contextmanager
    def _using(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Enter the contexts of a micro-batch's forward and backward."""
        device = self._t.device
        with (
            self._packed.using(inputs.get("rows"), device),
            self._replay.using(inputs.get("routes"), device),
            self._t.computing(),
        ):
            yield

    def _loss(
        self, logits: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        g, labels = self._grpo, batch["labels"]
        logprobs = token_logprobs(logits, labels, self._temperature, CHUNK_TOKENS)
        if self._first is None:
            seen = batch["input"], labels, batch["sequence"], logprobs.detach()
            self._first = FirstBatch(*seen)
        entropy = mean_square = None
        if g.entropy_loss_weight:
            entropy = token_entropy(logits, self._temperature, CHUNK_TOKENS)
        if g.logit_loss_weight:
            mean_square = logit_mean_square(logits, CHUNK_TOKENS)
        terms = LogitTerms(entropy, mean_square)
        reference, old = batch.get("ref_logprobs"), batch.get("old_logprobs")
        return grpo_loss(logprobs, batch, g, reference, old, terms)

    def _pipelined(
        self, pipeline: Pipeline, minibatch: Sequence[Loaded], version: int, first: bool
    ) -> tuple[torch.Tensor, list[Metrics]]:
        """Run an optimizer step's micro-batches through the pipeline stages as one pass. The last
        stage computes loss and metrics and shares them with the others."""
        device = self._t.device
        batches = [self._batch(*loaded, version, first) for loaded in minibatch]
        losses: list[torch.Tensor] = []
        made: list[Metrics] = []

        def loss_of(logits: torch.Tensor, number: int) -> torch.Tensor:
            loss, metrics = self._loss(logits, batches[number])
            losses.append(loss.detach())
            made.append(metrics)
            return loss

        with self._t.computing():
            pipeline.forward_backward(torch.stack([b["input"] for b in batches]), loss_of)
        here = None
        if pipeline.is_last:
            summed = accumulate(made)
            assert self._first is not None
            # few tensors: each copy to the CPU waits for the device
            parts = torch.stack(losses).sum(), *pack(summed), self._first.logprobs
            here = list(summed), [part.cpu() for part in parts]
        metric_names, (loss, sums, maxima, logprobs) = pipeline.share(here)
        if self._first is None:
            one = batches[0]
            self._first = FirstBatch(one["input"], one["labels"], one["sequence"], logprobs)
        return loss.to(device), [unpack(metric_names, sums.to(device), maxima.to(device))]

    def _add(
        self, model: torch.nn.Module, minibatch: Sequence[Loaded], readers: Mapping[str, Reader]
    ) -> None:
        """Add to each micro-batch's inputs what ``readers`` read from the model's current logits,
        without gradient, by name, in one pass (none without readers). Collective: every rank has
        the same number of micro-batches."""
        if not readers:
            return
        t = self._t

        def read(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            rest = labels, self._temperature, CHUNK_TOKENS
            return torch.stack([each(logits, *rest) for each in readers.values()], -1)

        if isinstance(model, Pipeline):
            known = [labels.to(t.device) for _, labels in minibatch]
            ids = torch.stack([inputs["input"] for inputs, _ in minibatch]).to(t.device)
            with t.computing():
                found = list(model.read(ids, lambda x, k: read(x, known[k]), len(readers)))
        else:
            found = []
            for inputs, labels in minibatch:
                needed = ("input", "positions", "labels")
                given = {"labels": labels, **inputs}
                batch = {name: given[name].to(t.device) for name in needed if name in given}
                with torch.no_grad(), self._using(inputs):
                    found.append(read(t.logits(model, batch), batch["labels"]))
        for (inputs, _), values in zip(minibatch, found, strict=True):
            inputs |= dict(zip(readers, values.unbind(-1), strict=True))

    def _text_forward_backward(self, made: Sequence[Metrics]) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradients of the optimizer step's plain text. Return this rank's shares of its
        weighted loss and of its mean cross-entropy."""
        t, g, text = self._t, self._grpo, self._text
        assert text is not None
        pairs = [(inputs.to(t.device), labels.to(t.device)) for inputs, labels in text.take()]
        here = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in pairs]).sum()
        counts = torch.stack(
            [here.double(), torch.stack([metrics["tokens_sum"] for metrics in made]).sum()]
        )
        mesh = t.parallel_dims.get_optional_mesh("batch")
        if mesh is not None:
            dist.all_reduce(counts, group=mesh.get_group())
        text_tokens, completion_tokens = counts.tolist()
        weight = text_weight(text_tokens, completion_tokens, g.ptx_scale, g.ptx_scale_by_tokens)
        total = torch.zeros((), device=t.device)
        for inputs, labels in pairs:
            with t.computing():
                logits = t.logits(t.model_parts[0], {"input": inputs, "labels": labels})
                summed = -token_logprobs(logits, labels, 1.0, CHUNK_TOKENS).sum()
                del logits
                (weight * summed).backward()
            total = total + summed.detach()
        return weight * total, total.double() / text_tokens
