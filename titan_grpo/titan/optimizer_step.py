"""The optimizer steps of one training step, made of torchtitan's own parts.

One batch is one training step and makes one version. With ``num_microbatches`` or ``num_epochs``
above 1 it takes several optimizer steps (PPO minibatches, passes over the batch), and for those
after the first the log-probabilities of the policy before the batch are computed beforehand. An
optimizer step whose numbers are bad is not taken, on any rank: parameters and optimizer state stay
as they are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
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
    pack,
    reasons,
    summarize,
    unpack,
)
from titan_grpo.algorithm.objective import least_left_out, second_moments
from titan_grpo.algorithm.rows import IGNORE_INDEX
from titan_grpo.titan.data import TextMixin, text_weight
from titan_grpo.titan.modules import PackedAttention, RouterReplay
from titan_grpo.titan.pipeline import Loaded, Pipeline, alike
from titan_grpo.titan.step_records import FirstBatch

CHUNK_TOKENS = 4096
"""Tokens whose distribution over the vocabulary is computed at a time: bounds its temporary
memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch; the same on every rank but for ``metrics``."""

    taken: int
    """Optimizer steps that changed the weights."""
    steps: int
    """Optimizer steps that the batch was meant for."""
    grad_norm: float
    """Largest gradient norm before clipping."""
    unhealthy: tuple[str, ...]
    """Why the others were not taken."""
    metrics: Metrics
    """This rank's, not reduced."""
    first: FirstBatch | None
    """This rank's first micro-batch with the log-probabilities of the policy before the step."""


Reader = Callable[[torch.Tensor, torch.Tensor, float, int], torch.Tensor]
"""(logits [R, L, V], labels [R, L], temperature, chunk) -> [R, L]."""


def least_of_share(values: torch.Tensor, share: float) -> float:
    """The least of the greatest ``share`` of the values, at least one of them; infinity of none
    (2506.01939: the tokens at which a policy decides are the few of high entropy).

    Example: values (1, 4, 2, 3), share 0.5 -> 3.
    """
    count = max(round(share * values.numel()), 1)
    return values.topk(count).values[-1].item() if values.numel() else math.inf


def reduce_metrics(outcome: Outcome, parallel_dims: Any) -> dict[str, float]:
    """Plain numbers of a training step over all data-parallel ranks; losses are means over its
    optimizer steps. Collective over the batch mesh."""
    sums, maxima = pack(outcome.metrics)
    mesh = parallel_dims.get_optional_mesh("batch")
    if mesh is not None:
        # float64 sums: a mean over a million tokens keeps its digits.
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=mesh.get_group())
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group())
    values = summarize(unpack(list(outcome.metrics), sums, maxima))
    return {
        name: value / outcome.steps if name in ("loss", "ptx") or name.endswith("_loss") else value
        for name, value in values.items()
    }


class Stepper:
    """Computes losses and takes optimizer steps for a Trainer, whose model, optimizer, contexts and
    hooks it uses."""

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

        ``version`` is the trainer's; ``collapsed`` comes from rank 0 (the others pass False).
        """
        self._first = None
        minibatches = [[next(batches) for _ in range(count)] for count in steps]
        if self._t.pipeline is not None:
            minibatches = [alike(minibatch) for minibatch in minibatches]
        self._prepare(minibatches)
        parts: list[Metrics] = []
        found = []
        for number in range(self._grpo.num_epochs * len(minibatches)):
            minibatch = minibatches[number % len(minibatches)]
            # Only before the first optimizer step is the policy that of the trainer's version.
            own = version if number == 0 else None
            found.append(self._optimizer_step(minibatch, version, own, collapsed, parts))
        self._t.lr_schedulers.step()
        bad = [reason for _, reasons in found for reason in reasons]
        return Outcome(
            taken=sum(not reasons for _, reasons in found),
            steps=len(found),
            grad_norm=max(norm for norm, _ in found),
            unhealthy=tuple(dict.fromkeys(bad)),
            metrics=accumulate(parts),
            first=self._first,
        )

    def _prepare(self, minibatches: Sequence[Sequence[Loaded]]) -> None:
        """Add what needs the policy before the batch: its log-probabilities, where an optimizer
        step after the first uses them, and its tokens of high entropy. Collective."""
        g, t = self._grpo, self._t
        if g.proximal_logprobs == "recompute":
            for minibatch in minibatches if g.num_epochs > 1 else minibatches[1:]:
                self._add("old_logprobs", minibatch, token_logprobs)
        if g.top_entropy_share == 1:
            return
        for minibatch in minibatches:
            # of a token's distribution, whatever its label
            self._add("entropy", minibatch, lambda logits, _, *rest: token_entropy(logits, *rest))
            here = [
                inputs["entropy"][labels.to(t.device) != IGNORE_INDEX]
                for inputs, labels in minibatch
            ]
            least = least_of_share(self._of_all_ranks(here), g.top_entropy_share)
            for inputs, _ in minibatch:
                inputs["high_entropy"] = inputs.pop("entropy") >= least

    def _bound_second_moment(self, minibatch: Sequence[Loaded]) -> None:
        """Say which tokens M2PO leaves out, by the policy as it is now. Collective."""
        device = self._t.device
        moments = []
        before = self._before(self._t.policy, minibatch, token_logprobs)
        for now, (inputs, labels) in zip(before, minibatch, strict=True):
            engine, advantages = (inputs[x].to(device) for x in ("rollout_logprobs", "advantages"))
            ignored = labels.to(device) == IGNORE_INDEX
            moments.append(second_moments(now, engine, advantages).masked_fill(ignored, 0))
        everywhere = self._of_all_ranks([moment.flatten() for moment in moments])
        least = least_left_out(everywhere, self._grpo.m2_threshold)
        for (inputs, _), moment in zip(minibatch, moments, strict=True):
            inputs["outside_m2"] = moment >= least

    def _of_all_ranks(self, here: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values [n] of this data-parallel rank and of the others, on the CPU. Collective."""
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
        own: int | None,
        collapsed: bool,
        parts: list[Metrics],
    ) -> tuple[float, tuple[str, ...]]:
        """(gradient norm, why the step was not taken)."""
        t = self._t
        if self._grpo.m2_threshold:
            self._bound_second_moment(minibatch)
        t.optimizers.zero_grad()
        loss = torch.zeros((), device=t.device)
        made: list[Metrics] = []
        if t.pipeline is not None:
            loss, made = self._pipelined(t.pipeline, minibatch, version, own)
        for inputs, labels in minibatch if t.pipeline is None else ():
            part, sums = self._forward_backward(inputs, labels, version, own)
            loss = loss + part
            made.append(sums)
        if self._text is not None:
            part, cross_entropy = self._text_forward_backward(made)
            loss = loss + part
            made = [
                {**sums, "ptx_sum": cross_entropy if k == 0 else 0 * cross_entropy}
                for k, sums in enumerate(made)
            ]
        parts += made
        grad_norm = dist_utils.clip_grad_norm_(
            [p for m in t.model_parts for p in m.parameters()],
            t.job_config.training.max_norm,
            foreach=True,
            pp_mesh=t.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=t.parallel_dims.ep_enabled,
        )
        bad = flags(loss, grad_norm, self._grpo.grad_norm_limit, collapsed)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        why = reasons(bad.tolist())
        if why:
            t.optimizers.zero_grad()
            return float(grad_norm), why
        t.checkpointer.maybe_wait_for_staging()
        t.optimizers.step()
        return float(grad_norm), ()

    def _batch(
        self, inputs: dict[str, Any], labels: torch.Tensor, version: int, own: int | None
    ) -> dict[str, torch.Tensor]:
        """What ``grpo_loss`` needs of a micro-batch, on the device."""
        device = self._t.device
        batch = {
            name: x.to(device)
            for name, x in inputs.items()
            if isinstance(x, torch.Tensor) and name != "routes"
        }
        return batch | {
            "labels": labels.to(device),
            "on_policy": batch["oldest"] == (-1 if own is None else own),
            "staleness": version - batch["versions"],
        }

    def _forward_backward(
        self, inputs: dict[str, Any], labels: torch.Tensor, version: int, own: int | None
    ) -> tuple[torch.Tensor, Metrics]:
        """GRPO loss of one micro-batch and its gradients. The batch's weights normalise over the
        optimizer step already. ``own``: the version that the policy is of, None between two."""
        t = self._t
        batch = self._batch(inputs, labels, version, own)
        reference = None
        if self._reference is not None:
            [reference] = self._before(self._reference, [(inputs, labels)], token_logprobs)
        with self._using(inputs):
            logits = t.logits(t.policy, batch)
            # Before the backward, where checkpointed layers route once more.
            routed = self._replay.take_metrics()
            loss, metrics = self._loss(logits, batch, reference)
            del logits
            loss.backward()
        return loss.detach(), metrics | routed

    @contextmanager
    def _using(self, inputs: dict[str, Any]) -> Iterator[None]:
        """What the model computes a micro-batch in, forward and backward."""
        device = self._t.device
        with (
            self._packed.using(inputs.get("rows"), device),
            self._replay.using(inputs.get("routes"), device),
            self._t.computing(),
        ):
            yield

    def _loss(
        self, logits: torch.Tensor, batch: dict[str, torch.Tensor], reference: torch.Tensor | None
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
        return grpo_loss(logprobs, batch, g, reference, batch.get("old_logprobs"), terms)

    def _pipelined(
        self, pipeline: Pipeline, minibatch: Sequence[Loaded], version: int, own: int | None
    ) -> tuple[torch.Tensor, list[Metrics]]:
        """Loss and metrics of an optimizer step's micro-batches as one pass through the stages. The
        last stage computes them, and every rank goes on with what it has."""
        device = self._t.device
        batches = [self._batch(*loaded, version, own) for loaded in minibatch]
        references: Sequence[torch.Tensor | None] = [None] * len(batches)
        if self._reference is not None:
            references = self._before(self._reference, minibatch, token_logprobs)
        losses: list[torch.Tensor] = []
        made: list[Metrics] = []

        def loss_of(logits: torch.Tensor, number: int) -> torch.Tensor:
            loss, metrics = self._loss(logits, batches[number], references[number])
            losses.append(loss.detach())
            made.append(metrics)
            return loss

        with self._t.computing():
            pipeline.forward_backward(torch.stack([b["input"] for b in batches]), loss_of)
        here = None
        if pipeline.is_last:
            summed = accumulate(made)
            assert self._first is not None
            # together: each tensor is a wait for the device
            parts = torch.stack(losses).sum(), *pack(summed), self._first.logprobs
            here = list(summed), [part.cpu() for part in parts]
        metric_names, (loss, sums, maxima, logprobs) = pipeline.share(here)
        if self._first is None:
            first = batches[0]
            self._first = FirstBatch(first["input"], first["labels"], first["sequence"], logprobs)
        return loss.to(device), [unpack(metric_names, sums.to(device), maxima.to(device))]

    def _add(self, name: str, minibatch: Sequence[Loaded], read: Reader) -> None:
        for (inputs, _), values in zip(
            minibatch, self._before(self._t.policy, minibatch, read), strict=True
        ):
            inputs[name] = values

    def _before(
        self, model: torch.nn.Module, minibatch: Sequence[Loaded], read: Reader
    ) -> list[torch.Tensor]:
        """What ``read`` makes of a model's logits as they are now, without gradient, [R, L] of each
        micro-batch. Collective: every rank has the same number of micro-batches."""
        t, out = self._t, []
        if isinstance(model, Pipeline):
            known = [labels.to(t.device) for _, labels in minibatch]
            ids = torch.stack([inputs["input"] for inputs, _ in minibatch]).to(t.device)
            with t.computing():
                return list(
                    model.read(ids, lambda x, k: read(x, known[k], self._temperature, CHUNK_TOKENS))
                )
        for inputs, labels in minibatch:
            needed = ("input", "positions", "labels")
            given = {"labels": labels, **inputs}
            batch = {name: given[name].to(t.device) for name in needed if name in given}
            with torch.no_grad(), self._using(inputs):
                logits = t.logits(model, batch)
                out.append(read(logits, batch["labels"], self._temperature, CHUNK_TOKENS))
        return out

    def _text_forward_backward(self, made: Sequence[Metrics]) -> tuple[torch.Tensor, torch.Tensor]:
        """(this rank's share of the weighted loss, and of the mean cross-entropy) of the optimizer
        step's plain text."""
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
