"""Rules over torchtitan's own sections: settings that GRPO with background weight sync cannot run
with. Pure."""

import math
from operator import attrgetter
from typing import Any

from titan_grpo.config import sends_adapters
from titan_grpo.config.inert import NO_TEXT, Row
from titan_grpo.config.task import Rules, broken
from titan_grpo.observe import alerts


def violations(config: Any, on_cpu: bool | None, ranks: int | None) -> list[str]:
    """Return all broken rules of torchtitan's sections, each as "key must be rule (why), got
    value".

    ``on_cpu``: training runs on the CPU with gloo. ``ranks``: number of trainer ranks. Both are
    None if unknown (a job that is only read).
    """
    # First: other rules divide by some of these.
    if outside := broken("", config, _numbers(config)):
        return outside
    rules = (
        *_parallelism(config),
        *_pipeline(config),
        *_training(config),
        *_checkpoint(config, on_cpu is True),
        *_lora(config),
        *_unsupported(config),
        *(_on_cpu(config) if on_cpu else ()),
        (
            on_cpu is False and config.training.enable_cpu_offload,
            "training.enable_cpu_offload",
            "false (the optimizer changes offloaded weights on the host, where no fence of the"
            " device keeps it from their copy; shard over more GPUs)",
        ),
    )
    return [*broken("", config, rules), *_ranks(config, ranks), *alerts.rules(config.alerts)]


COUNTS = (
    *("training.steps", "training.local_batch_size", "training.gc_freq"),
    *("metrics.log_freq", "checkpoint.interval"),
    *(
        f"parallelism.{name}_degree"
        for name in (
            *("tensor_parallel", "pipeline_parallel", "context_parallel"),
            *("expert_parallel", "expert_tensor_parallel", "data_parallel_replicate"),
        )
    ),
)
"""Keys that must be 1 or more: torchtitan divides by each, by some only after the first step."""


def _numbers(config: Any) -> Rules:
    """Ranges that torchtitan does not check, or fails at with a traceback."""
    for key in COUNTS:
        yield attrgetter(key)(config) < 1, key, "1 or more"
    shards = config.parallelism.data_parallel_shard_degree
    rule = "-1 (all ranks that are left) or 1 or more"
    yield shards < 1 and shards != -1, "parallelism.data_parallel_shard_degree", rule
    yield config.training.max_norm <= 0, "training.max_norm", "greater than 0 (inf: no bound)"
    o, s = config.optimizer, config.lr_scheduler
    yield o.name not in ("Adam", "AdamW"), "optimizer.name", '"Adam" or "AdamW"'
    for name in ("beta1", "beta2"):
        yield not 0 <= getattr(o, name) < 1, f"optimizer.{name}", "0 or more, and below 1"
    yield o.weight_decay < 0, "optimizer.weight_decay", "0 or more"
    rule = f"at least {LEAST_EPS:g} (without it a weight whose gradients were all 0 becomes nan)"
    yield o.eps < LEAST_EPS, "optimizer.eps", rule
    yield s.warmup_steps < 0, "lr_scheduler.warmup_steps", "0 or more"
    steps = config.training.steps
    yield (
        s.total_steps is not None and s.total_steps < steps,
        "lr_scheduler.total_steps",
        f"left out, or at least training.steps ({steps}; past it the learning rate is negative)",
    )
    for key in (
        "lr_scheduler.decay_ratio",
        "lr_scheduler.min_lr_factor",
        "activation_checkpoint.memory_budget",
    ):
        value = attrgetter(key)(config)
        yield value is not None and not 0 <= value <= 1, key, "from 0 to 1"
    for name in TIMEOUTS:
        rule = f"at most {LONGEST_TIMEOUT_S} (thirty years; torch fails at far more)"
        yield getattr(config.comm, name) > LONGEST_TIMEOUT_S, f"comm.{name}", rule
    most = (1 << 31) - 1
    rule = f"at most {most} (torch counts its entries in 32 bits, and ends the process)"
    yield config.comm.trace_buf_size > most, "comm.trace_buf_size", rule
    key = "activation_checkpoint.determinism_check"
    yield attrgetter(key)(config) not in ("default", "none"), key, '"default" or "none"'
    rule = 'of "model" and "loss" (torchtitan would compile nothing under another name)'
    yield not {*config.compile.components} <= {"model", "loss"}, "compile.components", rule


LEAST_EPS = 1e-37
"""Bound of optimizer.eps: float32 and bfloat16 round far less to 0."""

TIMEOUTS = ("init_timeout_seconds", "train_timeout_seconds")
"""Keys of [comm], in the order of ``rank0_waits_s``."""

LONGEST_TIMEOUT_S = 1_000_000_000
"""Bound of the timeouts of torch.distributed, in seconds: past about eight times as much a number
of its own overflows."""


def sync_waits_s(config: Any, nbytes: int) -> float:
    """Return the sum of the deadlines of one transfer of ``nbytes`` and its commit, in seconds: a
    server may keep a slot as long."""
    w = config.weight_sync
    drain = 0.0 if config.rollout.in_flight_weight_updates else w.drain_deadline_s
    return float(w.transfer_s(nbytes) + w.commit_deadline_s + drain)


def end_waits_s(sync: Any, nbytes: int) -> float:
    """Return how long the end waits for the flush of a version of ``nbytes``, in seconds."""
    return float(sync.shutdown_deadline_s + sync.moving_s(nbytes))


def rank0_waits_s(config: Any, nbytes: int = 0) -> tuple[float, float]:
    """Return the longest time that rank 0 leaves the other ranks in a collective, by its own
    deadlines: (around the first step, later), in seconds. The timeouts of the process groups derive
    from it. ``nbytes``: of a version; 0 while the model is unknown, for the groups that no rank
    waits in for rank 0.

    Around the first step rank 0 loads the task and starts servers, or waits for the first commit
    (``startup_s`` each), and then waits for rollouts. In a later step it waits for
    rollouts (``batch_timeout_s``), in sync mode also for one whole sync. At the end it waits for a
    slot (``sync_waits_s``) and flushes the newest version (``end_waits_s``), waits for the
    evaluations that run before and after that, and writes the version, at min_rate too.

    Example: batch_timeout_s 1800, startup_deadline_s 600, async: (2400, 1800). Sync mode adds
    connect_deadline_s + lane_deadline_s + commit_deadline_s = 240: (2640, 2040).
    """
    w = config.weight_sync
    slot = sync_waits_s(config, nbytes)
    sync = 0.0 if config.grpo.async_weight_update else w.connect_deadline_s + slot
    evaluation = max((table.whole_s for table in config.evaluation), default=0.0)
    ends = slot + end_waits_s(w, nbytes) + 2 * evaluation + w.moving_s(nbytes)
    later = max(config.rollout.batch_timeout_s + sync, ends)
    return later + w.startup_s(nbytes), later


def attention_violation(flavor: str, model_args: Any) -> str:
    """Return why a flavor's attention is unsupported, or "". ``model_args`` are torchtitan's."""
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


def experts_of(model_args: Any) -> Any:
    """Return torchtitan's arguments of a model's layers of experts; None of a dense model."""
    if getattr(model_args, "moe_enabled", True):
        return getattr(model_args, "moe_args", None)
    return None


def model_violations(config: Any, model_args: Any) -> list[str]:
    """Return the broken rules of a job's model. ``model_args`` are torchtitan's."""
    attention = attention_violation(config.model.flavor, model_args)
    stages = stages_violation(config.parallelism, model_args)
    return [*filter(None, (attention, stages)), *broken("", config, _model(config, model_args))]


def _model(config: Any, model_args: Any) -> Rules:
    flavor, p = config.model.flavor, config.parallelism
    yield (
        p.pipeline_parallel_degree > 1 and getattr(model_args, "enable_weight_tying", False),
        "model.flavor",
        "one whose embeddings are not tied with pipeline parallelism (the first and the last stage"
        " would each train them on their own)",
    )
    heads = getattr(model_args, "n_kv_heads", None) or getattr(model_args, "n_heads", 0)
    rule = f"a divisor of the {heads} key-value heads of {flavor!r} (each rank has as many)"
    yield heads % p.tensor_parallel_degree != 0, "parallelism.tensor_parallel_degree", rule
    if (moe := experts_of(model_args)) is None:
        rule = f"false with a model without experts, as {config.model.name}/{flavor} is"
        yield config.grpo.router_replay, "grpo.router_replay", rule
        return
    rule = (
        f"a divisor of the experts of a layer ({moe.num_experts} with {flavor!r}; each rank has as"
        " many)"
    )
    degree = p.expert_parallel_degree
    yield moe.num_experts % degree != 0, "parallelism.expert_parallel_degree", rule


SCHEDULES = {
    "1F1B": 1,
    "GPipe": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
}
"""Tested pipeline schedules -> least number of stages of each rank; 1 means exactly one."""


def stages_violation(parallelism: Any, model_args: Any) -> str:
    """Return why a model's layers cannot be cut into a job's stages, or "". Counts as torchtitan
    0.2.2 does, which would stop every rank with a traceback."""
    p, ranks = parallelism, parallelism.pipeline_parallel_degree
    if ranks == 1 or p.pipeline_parallel_schedule not in SCHEDULES:
        return ""
    if p.module_fqns_per_model_part is not None:
        named = [name for part in p.module_fqns_per_model_part for name in part]
        layers = [name for name in named if name.startswith("layers.")]
        whole = [f"layers.{number}" for number in range(model_args.n_layers)]
        if layers == whole and len({*named}) == len(named):
            return ""
        return (
            "parallelism.module_fqns_per_model_part must name each module once, and layers.0 to"
            f" layers.{len(whole) - 1} in their order (the stages would compute another model"
            f" than the servers), got {p.module_fqns_per_model_part}"
        )
    where, least = "parallelism.pipeline_parallel_", SCHEDULES[p.pipeline_parallel_schedule]
    size, layers = p.pipeline_parallel_layers_per_stage, model_args.n_layers
    ends = p.pipeline_parallel_first_stage_less_layers, p.pipeline_parallel_last_stage_less_layers
    if min(ends) < 0:
        return f"{where}first_stage_less_layers and last_.. must be 0 or more, got {ends}"
    count = ranks * least if size is None else math.ceil((layers + sum(ends)) / max(size, 1))
    if size is not None and (
        size < 1 or count % ranks or count < ranks * least or (least == 1 and count != ranks)
    ):
        rule = (
            f"one stage for each of the {ranks} ranks"
            if least == 1
            else f"a multiple of {ranks} stages, and two or more for each rank"
        )
        return (
            f"{where}layers_per_stage must make {rule} with {p.pipeline_parallel_schedule}"
            f" ({layers} layers, and {sum(ends)} for the embedding and the head), got {size}"
        )
    if (layers + sum(ends)) // count < max(*ends, 1):
        return (
            f"{where}degree must be one that leaves each stage enough of the model: {count} stages"
            f" of {layers} layers, and {ends[0]} and {ends[1]} for the embedding and the head"
            f" (first_stage_less_layers, last_..), got {ranks}"
        )
    return ""


def compiles_model(config: Any) -> bool:
    """Return whether torchtitan compiles a job's model."""
    return bool(config.compile.enable and "model" in config.compile.components)


def inert(config: Any) -> dict[str, list[Row]]:
    """Return the rows of torchtitan's sections for ``config.inert.inert``. Keys that have no effect
    in torchtitan either have none."""
    g, compiled = config.grpo, config.compile
    textless = not g.ptx_mixin_batchsize
    batch = "a step's batch is rollout.prompts_per_step times group_size"
    budget = "grpo.token_budget is the size of a microbatch"
    whole = "checkpoint.last_save_model_only = false: the last checkpoint is one to go on from"
    loss = 'the loss is titan_grpo\'s, which is not compiled; "model" can be'
    return {
        "training": [
            (True, "global_batch_size", batch),
            (textless, "dataset dataset_path dataloader", NO_TEXT),
            (textless and g.token_budget > 0, "local_batch_size", budget),
        ],
        "checkpoint": [(not config.checkpoint.last_save_model_only, "export_dtype", whole)],
        "compile": [(compiled.enable and "model" not in compiled.components, "components", loss)],
    }


ASSETS = "model.hf_assets_path"


def _parallelism(config: Any) -> Rules:
    p = config.parallelism
    yield (
        p.context_parallel_degree != 1,
        "parallelism.context_parallel_degree",
        # To add it: Engine.logits shards a row's ids (post_dataloading_process); Stepper._batch
        # would shard the other tensors alike, grpo_loss would sum a sequence over the ranks of its
        # row, and reduce_metrics would reduce over torchtitan's mesh "loss".
        "1 (each rank would have parts of a row: torch has no such attention on a CPU, so it was"
        " not built; it would go where titan/optimizer_step.py makes a batch, Stepper._batch, and"
        " where algorithm/loss.py sums over a sequence)",
    )
    yield (
        config.training.seq_len % p.tensor_parallel_degree != 0,
        "training.seq_len",
        f"a multiple of parallelism.tensor_parallel_degree ({p.tensor_parallel_degree})",
    )
    packed = config.grpo.pack_sequences
    yield (
        packed and p.tensor_parallel_degree > 1,
        "parallelism.tensor_parallel_degree",
        "1 with grpo.pack_sequences (positions are not sharded with the tokens)",
    )
    for key, why in (
        ("pack_sequences", "the shapes in attention are others in every micro-batch"),
        ("router_replay", "each micro-batch brings routes of its own"),
    ):
        yield (
            compiles_model(config) and getattr(config.grpo, key),
            "compile.enable",
            f"false with grpo.{key}, or compile.components without model ({why}, so it would be"
            " compiled anew each time)",
        )


def _pipeline(config: Any) -> Rules:
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    alone = "it sets up each micro-batch by itself, and a pipeline has several under way"
    for key, value, why in (
        ("grpo.pack_sequences", False, alone),
        ("grpo.router_replay", False, alone),
        ("grpo.ptx_mixin_batchsize", 0, "its text would be a second pass through the stages"),
        ("lora.rank", 0, "adapters are made on a whole model"),
        (
            "parallelism.pipeline_parallel_schedule_csv",
            "",
            "it is for one number of micro-batches, and steps have different ones",
        ),
        (
            "parallelism.pipeline_parallel_microbatch_size",
            1,
            "grpo.token_budget says how many rows a micro-batch has",
        ),
    ):
        said = str(value).lower() or "empty"
        rule = f"{said} with parallelism.pipeline_parallel_degree > 1 ({why})"
        yield attrgetter(key)(config) != value, key, rule
    key = "parallelism.pipeline_parallel_schedule"
    rule = f"one of {', '.join(SCHEDULES)} (no other was run)"
    yield attrgetter(key)(config) not in SCHEDULES, key, rule


def data_parallel_ranks(config: Any, ranks: int) -> int:
    """Return how many of ``ranks`` ranks take rows of their own."""
    return max(ranks // _inner(config), 1)


def _inner(config: Any) -> int:
    """Return the number of ranks that take the same rows."""
    p = config.parallelism
    return int(p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree)


def _ranks(config: Any, ranks: int | None) -> list[str]:
    """Return the broken rules over the product of the parallel degrees."""
    p = config.parallelism
    replicas, shards = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    inner = _inner(config)
    if ranks is not None:
        wanted = replicas * inner * max(shards, 1)
        if ranks % (replicas * inner) != 0 or (shards > 0 and wanted != ranks):
            return [
                "the product of the parallelism degrees must be the number of ranks that torchrun"
                f" starts ({ranks}), got {wanted}"
            ]
        shards = ranks // (replicas * inner)
    out = []
    experts = p.expert_parallel_degree * p.expert_tensor_parallel_degree
    if ranks is not None and (shards * p.tensor_parallel_degree) % experts != 0:
        out.append(
            "parallelism.expert_parallel_degree (times expert_tensor_parallel_degree) must be a"
            " divisor of the ranks that share a layer's weights, the data-parallel shards times"
            f" tensor_parallel_degree ({shards * p.tensor_parallel_degree}), got {experts}"
        )
    if replicas > 1 and shards == 1:
        out.append(
            "parallelism.data_parallel_replicate_degree must be 1 unless weights are sharded too"
            f" (plain DDP averages gradients that are normalised already: they come out {replicas}"
            " times too small; leave it 1 for FSDP, or take HSDP, data_parallel_shard_degree > 1),"
            f" got {replicas}"
        )
    rows = config.training.local_batch_size * data_parallel_ranks(config, ranks or 1)
    if config.grpo.ptx_mixin_batchsize % rows != 0:
        out.append(
            "grpo.ptx_mixin_batchsize must be a multiple of training.local_batch_size times the"
            f" data-parallel ranks ({rows}; every rank takes whole batches of text), got"
            f" {config.grpo.ptx_mixin_batchsize}"
        )
    return out


def _training(config: Any) -> Rules:
    yield (
        config.optimizer.early_step_in_backward,
        "optimizer.early_step_in_backward",
        "false (each micro-batch would be an optimizer step of its own: before the fence, without"
        " training.max_norm, and with an unhealthy loss too)",
    )
    yield config.optimizer.lr <= 0, "optimizer.lr", "greater than 0"
    length, completion = config.training.seq_len, config.rollout.max_completion_tokens
    yield (
        length <= completion,
        "training.seq_len",
        f"greater than rollout.max_completion_tokens ({completion}; a row is a prompt and its"
        " completion)",
    )
    yield (
        0 < config.grpo.token_budget < length,
        "grpo.token_budget",
        f"0 (derived) or at least training.seq_len ({length}; one row must fit)",
    )
    for name, wait in zip(TIMEOUTS, rank0_waits_s(config), strict=True):
        yield (
            getattr(config.comm, name) <= wait,
            f"comm.{name}",
            f"greater than {wait:g} (what rank 0 may wait by its own deadlines; the other ranks"
            " wait in a collective meanwhile, and would abort first; leave it out to have it"
            " derived)",
        )


def saved_parts(config: Any) -> set[str]:
    """Return the names of all parts of a job's state that a checkpoint has."""
    grpo = config.grpo
    parts = {"model", "optimizer", "lr_scheduler", "dataloader", "train_state"}
    parts |= {"text"} if grpo.ptx_mixin_batchsize else set()
    parts |= {"reference"} if grpo.kl_beta > 0 and 0 < grpo.ref_model_ema < 1 else set()
    return parts


def _checkpoint(config: Any, on_cpu: bool) -> Rules:
    c = config.checkpoint
    yield (
        not c.enable and bool(c.initial_load_in_hf or c.initial_load_path),
        "checkpoint.enable",
        "true with checkpoint.initial_load_in_hf or initial_load_path (torchtitan loads nothing"
        " otherwise, and training would start from random weights)",
    )
    yield (
        c.initial_load_in_hf and not c.initial_load_model_only,
        "checkpoint.initial_load_model_only",
        "true with initial_load_in_hf (HF files hold weights only)",
    )
    yield (
        c.enable and c.initial_load_in_hf_quantized and not c.initial_load_in_hf,
        "checkpoint.initial_load_in_hf_quantized",
        "false without initial_load_in_hf (it says how those files are stored)",
    )
    yield (
        c.enable and c.last_save_in_hf and not c.last_save_model_only,
        "checkpoint.last_save_model_only",
        "true, or left out, with last_save_in_hf (HF files hold weights only: torchtitan would end"
        " after the last step without a checkpoint of it)",
    )
    yield (
        c.create_seed_checkpoint,
        "checkpoint.create_seed_checkpoint",
        "false (make the seed checkpoint with torchtitan.train)",
    )
    yield (
        c.enable and (c.keep_latest_k == 1 or c.keep_latest_k < 0),
        "checkpoint.keep_latest_k",
        "0 (all) or 2 or more (torchtitan keeps one beside that which is being saved)",
    )
    states = saved_parts(config) - {"model"}
    yield (
        c.enable and not states.issuperset(c.exclude_from_loading),
        "checkpoint.exclude_from_loading",
        f"some of what this job saves beside the model ({', '.join(sorted(states))})",
    )
    yield (
        on_cpu and c.async_mode == "async_with_pinned_mem",
        "checkpoint.async_mode",
        '"async" or "disabled" on CPU (nothing can be pinned)',
    )


def _lora(config: Any) -> Rules:
    if not config.lora.rank:
        return
    c, r, moving = config.checkpoint, config.rollout, config.grpo.ref_model_ema
    yield (
        c.last_save_in_hf,
        "checkpoint.last_save_in_hf",
        "false with [lora] (torchtitan would write the base model; titan-grpo export writes the"
        " adapter, or the merged weights)",
    )
    yield (
        bool(c.initial_load_path) and not c.initial_load_in_hf,
        "checkpoint.initial_load_path",
        "Hugging Face files with [lora] (checkpoint.initial_load_in_hf; a torchtitan checkpoint of"
        " a base model has no adapters: titan-grpo export makes such files of it)",
    )
    yield (
        config.grpo.kl_beta > 0 and 0 < moving < 1,
        "grpo.ref_model_ema",
        "0 or 1 with [lora] (the reference has every weight, the policy trains adapters)",
    )
    sglang = r.engine == "sglang" or (r.launches and "sglang" in r.launch_engines)
    yield (
        sglang and sends_adapters(config.lora),
        "lora.sync",
        '"merged" with SGLang servers (only vLLM takes adapters as versions)',
    )
    yield (
        config.weight_sync.apply != "staged" and sends_adapters(config.lora),
        "weight_sync.apply",
        '"staged" with lora.sync = "adapter" (a server has the memory for an adapter)',
    )


def _unsupported(config: Any) -> Rules:
    for key, why in (
        ("validation.enable", "its cross entropy on a text dataset says nothing about a policy"),
        ("fault_tolerance.enable", "its replicas would publish different weights as one version"),
        ("memory_estimation.enable", "it is another program of torchtitan's"),
        ("debug.moe_force_load_balance", "the servers route tokens by their scores"),
    ):
        yield attrgetter(key)(config), key, f"false ({why})"
    yield (
        bool(config.model.converters),
        "model.converters",
        "empty (the trainer would compute in another precision than the servers sample in, and"
        " converted parameters are not the ones that an engine loads)",
    )
    yield (
        bool(config.experimental.custom_args_module),
        "experimental.custom_args_module",
        "empty (an older name of torchtitan's for job.custom_config_module: set that)",
    )
    yield config.comm.mode != "default", "comm.mode", '"default" (the others move no data)'


def _on_cpu(config: Any) -> Rules:
    for key, why in (
        ("profiling.enable_profiling", "it needs a GPU"),
        ("profiling.enable_memory_snapshot", "it needs a GPU"),
        ("training.gc_debug", "it looks at a GPU's tensors"),
        ("training.enable_cpu_offload", "there is nothing to offload from"),
    ):
        yield attrgetter(key)(config), key, f"false on CPU ({why})"
    nccl = config.weight_sync.transport == "nccl"
    yield nccl, "weight_sync.transport", '"auto" or "tcp" on CPU'
    r = config.rollout
    yield (
        config.grpo.router_replay and r.launches and "vllm" in r.launch_engines,
        "rollout.launch_engines",
        '["sglang"] with grpo.router_replay on CPU (vLLM sends the experts of each token on a GPU'
        " only)",
    )
