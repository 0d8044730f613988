"""Rules over torchtitan's own sections: what GRPO with background weight sync can not run with.
Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    """What the rules need to know besides the configuration."""

    on_cpu: bool
    """Training runs on the CPU with gloo."""

    world_size: int | None = None
    """Number of trainer ranks; None while unknown (a recipe that is only checked)."""


Violations = Iterable[str]


def _degrees(config: Any, machine: Machine) -> Violations:
    p = config.parallelism
    if p.pipeline_parallel_degree != 1:
        yield (
            "parallelism.pipeline_parallel_degree must be 1 (the GRPO loss needs logits and"
            " rollouts on one stage; use FSDP and tensor parallelism), got"
            f" {p.pipeline_parallel_degree}"
        )
    if p.context_parallel_degree != 1:
        yield (
            "parallelism.context_parallel_degree must be 1 (it reorders a row's tokens, so"
            f" log-probabilities would be matched to other tokens), got {p.context_parallel_degree}"
        )
    tensor = p.tensor_parallel_degree
    if tensor > 1 and config.training.seq_len % tensor != 0:
        length = config.training.seq_len
        yield (
            f"training.seq_len must be a multiple of parallelism.tensor_parallel_degree ({tensor}),"
            f" got {length}"
        )
    yield from _replication(p, machine)


def _replication(p: Any, machine: Machine) -> Violations:
    replicas, shards = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    others = (
        replicas * p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree
    )
    if machine.world_size is not None:
        wanted = others * max(shards, 1)
        if machine.world_size % others != 0 or (shards > 0 and wanted != machine.world_size):
            yield (
                "the product of the parallelism degrees must be the number of ranks that torchrun"
                f" starts ({machine.world_size}), got {wanted}"
            )
            return
        shards = machine.world_size // others
    if replicas > 1 and shards == 1:
        yield (
            "parallelism.data_parallel_replicate_degree must be 1 unless weights are sharded too"
            f" (plain DDP averages gradients that are normalised already: they come out {replicas}"
            " times too small; leave it 1 for FSDP, or take HSDP, data_parallel_shard_degree > 1),"
            f" got {replicas}"
        )


def _optimizer(config: Any, machine: Machine) -> Violations:
    if config.optimizer.early_step_in_backward and config.grpo.async_weight_update:
        yield (
            "optimizer.early_step_in_backward must be false with grpo.async_weight_update (weights"
            " would change while their copy is being made, before the fence), got True"
        )
    if config.optimizer.lr <= 0:
        yield f"optimizer.lr must be greater than 0, got {config.optimizer.lr}"
    if config.training.steps <= 0:
        yield f"training.steps must be greater than 0, got {config.training.steps}"


def _lengths(config: Any, machine: Machine) -> Violations:
    length, completion, budget = (
        config.training.seq_len,
        config.rollout.max_completion_tokens,
        config.grpo.token_budget,
    )
    if length <= completion:
        yield (
            "training.seq_len must be greater than rollout.max_completion_tokens "
            f"({completion}; a row is a prompt and its completion), got {length}"
        )
    if 0 < budget < length:
        yield (
            f"grpo.token_budget must be 0 (derived) or at least training.seq_len ({length}; one row"
            f" must fit), got {budget}"
        )


def rank0_waits_s(config: Any) -> tuple[float, float]:
    """Longest time that rank 0 leaves the other ranks in a collective, by its own deadlines:
    (around the first step, later), in seconds. Every timeout of a process group derives from it.

    Around the first step rank 0 starts servers or waits for the first commit
    (``startup_deadline_s``), and then waits for rollouts. In a later step it waits for rollouts
    (``batch_timeout_s``), in sync mode also for one whole sync; at the end it flushes the newest
    version (``shutdown_deadline_s``).

    Example: batch_timeout_s 1800, startup_deadline_s 600, async: (2400, 1800). Sync mode adds
    connect_deadline_s + lane_deadline_s + commit_deadline_s = 240: (2640, 2040).
    """
    w = config.weight_sync
    sync = 0.0
    if not config.grpo.async_weight_update:
        sync = w.connect_deadline_s + w.lane_deadline_s + w.commit_deadline_s
        if not config.rollout.in_flight_weight_updates:
            sync += w.drain_deadline_s
    later = max(config.rollout.batch_timeout_s + sync, w.shutdown_deadline_s)
    return later + w.startup_deadline_s, later


def _waits(config: Any, machine: Machine) -> Violations:
    for name, need in zip(
        ("init_timeout_seconds", "train_timeout_seconds"), rank0_waits_s(config), strict=True
    ):
        value = getattr(config.comm, name)
        if value <= need:
            yield (
                f"comm.{name} must be greater than {need:g} (what rank 0 may wait by its own"
                " deadlines; the other ranks wait in a collective meanwhile, and would abort"
                f" first), got {value}; leave it out to have it derived"
            )


def _checkpoint(config: Any, machine: Machine) -> Violations:
    c = config.checkpoint
    if not c.enable and (c.initial_load_in_hf or c.initial_load_path):
        yield (
            "checkpoint.enable must be true with checkpoint.initial_load_in_hf or initial_load_path"
            " (torchtitan loads nothing otherwise, and training would start from random weights),"
            " got False"
        )
    if c.initial_load_in_hf and not c.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only must be true with initial_load_in_hf (HF files hold"
            " weights only), got False"
        )
    if c.create_seed_checkpoint:
        yield (
            "checkpoint.create_seed_checkpoint must be false (make the seed checkpoint with"
            " torchtitan.train), got True"
        )
    if machine.on_cpu and c.async_mode == "async_with_pinned_mem":
        yield (
            'checkpoint.async_mode must be "async" or "disabled" on CPU (nothing can be pinned),'
            f" got {c.async_mode!r}"
        )


def _unsupported(config: Any, machine: Machine) -> Violations:
    for key, value, why in (
        (
            "validation.enable",
            config.validation.enable,
            "its cross entropy on a text dataset says nothing about a policy",
        ),
        (
            "fault_tolerance.enable",
            config.fault_tolerance.enable,
            "its replicas would publish different weights as one version",
        ),
        (
            "memory_estimation.enable",
            config.memory_estimation.enable,
            "it is another program of torchtitan's",
        ),
        (
            "debug.moe_force_load_balance",
            config.debug.moe_force_load_balance,
            "the servers route tokens by their scores",
        ),
    ):
        if value:
            yield f"{key} must be false ({why}), got {value!r}"
    if config.model.converters:
        yield (
            "model.converters must be empty (the trainer would compute in another precision than"
            " the servers sample in, and converted parameters are not the ones that an engine"
            f" loads), got {config.model.converters!r}"
        )
    if config.comm.mode != "default":
        yield f'comm.mode must be "default" (the others move no data), got {config.comm.mode!r}'


def _text(config: Any, machine: Machine) -> Violations:
    g, p, t = config.grpo, config.parallelism, config.training
    if not g.ptx_mixin_batchsize:
        return
    rows = t.local_batch_size
    if machine.world_size is not None:
        rows *= max(
            machine.world_size
            // (p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree),
            1,
        )
    if g.ptx_mixin_batchsize % rows != 0:
        yield (
            "grpo.ptx_mixin_batchsize must be a multiple of training.local_batch_size times the"
            f" data-parallel ranks ({rows}; every rank takes whole batches of text), got"
            f" {g.ptx_mixin_batchsize}"
        )


def _packing(config: Any, machine: Machine) -> Violations:
    if not config.grpo.pack_sequences:
        return
    if config.compile.enable and "model" in config.compile.components:
        yield (
            "compile.enable must be false with grpo.pack_sequences, or compile.components without"
            " model (the shapes in attention are others in every micro-batch, so it would be"
            " compiled anew each time), got True"
        )
    if config.parallelism.tensor_parallel_degree > 1:
        yield (
            "parallelism.tensor_parallel_degree must be 1 with grpo.pack_sequences (positions are"
            f" not sharded with the tokens), got {config.parallelism.tensor_parallel_degree}"
        )


def _cpu(config: Any, machine: Machine) -> Violations:
    if not machine.on_cpu:
        return
    if config.profiling.enable_profiling or config.profiling.enable_memory_snapshot:
        yield (
            "profiling.enable_profiling and enable_memory_snapshot must be false on CPU (they need"
            " a GPU), got True"
        )
    if config.weight_sync.transport == "nccl":
        yield 'weight_sync.transport must be "auto" or "gloo" on CPU, got \'nccl\''
    if config.training.enable_cpu_offload:
        yield (
            "training.enable_cpu_offload must be false on CPU (there is nothing to offload from),"
            " got True"
        )
    if config.model.name == "qwen3" and config.parallelism.tensor_parallel_degree > 1:
        yield (
            "parallelism.tensor_parallel_degree must be 1 for qwen3 on CPU (torch has no sharding"
            " rule for the CPU's attention kernel; llama3 works), got"
            f" {config.parallelism.tensor_parallel_degree}"
        )


RULES: tuple[Callable[[Any, Machine], Violations], ...] = (
    _degrees,
    _optimizer,
    _lengths,
    _waits,
    _checkpoint,
    _unsupported,
    _packing,
    _text,
    _cpu,
)


def violations(config: Any, machine: Machine) -> list[str]:
    """All broken rules of torchtitan's sections, each as "key must be rule (why), got value". Empty
    if none."""
    return [line for rule in RULES for line in rule(config, machine)]


def attention_violation(flavor: str, model_args: Any) -> str:
    """Why a flavor's attention cannot be trained with, or "". ``model_args`` are torchtitan's."""
    kind = getattr(model_args, "attn_type", "sdpa")
    mask = getattr(model_args, "attn_mask_type", "causal")
    if kind == "sdpa":
        return ""
    if mask != "causal":
        return (
            "model.flavor must be one with plain causal attention (this one cuts a row at every"
            " end-of-text token, also inside a chat prompt, and the servers do not), got"
            f" {flavor!r} with attn_mask_type {mask!r}"
        )
    return f"model.flavor must be one with sdpa attention, got {flavor!r} with {kind}"
