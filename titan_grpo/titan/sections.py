"""The sections of a torchtitan 0.2.2 TOML file, as data: what a job is written in, whatever
torchtitan is installed. torchtitan 0.3 has no such file any more.

Names, types and defaults are those of torchtitan 0.2.2's JobConfig (a test compares them), without
[quantize]. What each key means is in torchtitan's docs; titan/engine03.py has what becomes of
it with 0.3.

No ``from __future__ import annotations`` in this file: the merge reads field types as types.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Job:
    """[job]."""

    config_file: str | None = None
    dump_folder: str = "./outputs"
    description: str = "default job"
    print_config: bool = False
    save_config_file: str | None = None
    custom_config_module: str = ""


@dataclass
class Profiling:
    """[profiling]."""

    enable_profiling: bool = False
    save_traces_folder: str = "profile_traces"
    profile_freq: int = 10
    profiler_active: int = 1
    profiler_warmup: int = 3
    enable_memory_snapshot: bool = False
    save_memory_snapshot_folder: str = "memory_snapshot"


@dataclass
class Metrics:
    """[metrics]."""

    log_freq: int = 10
    enable_tensorboard: bool = False
    disable_color_printing: bool = False
    save_tb_folder: str = "tb"
    save_for_all_ranks: bool = False
    enable_wandb: bool = False


@dataclass
class Model:
    """[model]."""

    name: str = "llama3"
    flavor: str = "debugmodel"
    hf_assets_path: str = "./tests/assets/tokenizer"
    tokenizer_path: str | None = None
    converters: list[str] = field(default_factory=list)
    print_after_conversion: bool = False


@dataclass
class Optimizer:
    """[optimizer]."""

    name: str = "AdamW"
    lr: float = 0.0008
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-08
    weight_decay: float = 0.1
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    early_step_in_backward: bool = False


@dataclass
class LRScheduler:
    """[lr_scheduler]."""

    warmup_steps: int = 200
    total_steps: int | None = None
    decay_ratio: float | None = None
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_factor: float = 0.0


@dataclass
class DataLoader:
    """[training.dataloader]."""

    num_workers: int = 0
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None


@dataclass
class Training:
    """[training]."""

    dataset: str = "c4_test"
    dataset_path: str | None = None
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    max_norm: float | int = 1.0
    steps: int = 10000
    enable_cpu_offload: bool = False
    dtype: Literal["bfloat16", "float32"] = "float32"
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    mixed_precision_reduce: Literal["float32"] = "float32"
    gc_freq: int = 50
    gc_debug: bool = False
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass
class Parallelism:
    """[parallelism]."""

    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    tensor_parallel_degree: int = 1
    disable_loss_parallel: bool = False
    enable_async_tensor_parallel: bool = False
    pipeline_parallel_degree: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None
    pipeline_parallel_first_stage_less_layers: int = 1
    pipeline_parallel_last_stage_less_layers: int = 1
    pipeline_parallel_layers_per_stage: int | None = None
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str | None = ""
    pipeline_parallel_microbatch_size: int = 1
    pipeline_parallel_expert_parallel_overlap: bool = True
    context_parallel_degree: int = 1
    context_parallel_load_balancer: str | None = "headtail"
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    expert_parallel_degree: int = 1
    expert_tensor_parallel_degree: int = 1
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"


@dataclass
class Checkpoint:
    """[checkpoint]."""

    enable: bool = False
    enable_ft_dataloader_checkpoints: bool = True
    folder: str = "checkpoint"
    interval: int = 500
    initial_load_path: str | None = None
    initial_load_model_only: bool = True
    initial_load_in_hf: bool = False
    initial_load_in_hf_quantized: bool = False
    last_save_model_only: bool = True
    last_save_in_hf: bool = False
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    keep_latest_k: int = 10
    load_step: int = -1
    exclude_from_loading: list[str] = field(default_factory=list)
    enable_first_step_checkpoint: bool = False
    create_seed_checkpoint: bool = False
    load_only: bool = False


@dataclass
class ActivationCheckpoint:
    """[activation_checkpoint]."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    selective_ac_option: str = "2"
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    early_stop: bool = False
    memory_budget: float = 0.5
    visualize_memory_budget_pareto: bool = False
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    debug: bool = False


@dataclass
class Compile:
    """[compile]."""

    enable: bool = False
    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    backend: str = "inductor"


@dataclass
class Comm:
    """[comm]."""

    init_timeout_seconds: int = 300
    train_timeout_seconds: int = 100
    trace_buf_size: int = 20000
    save_traces_folder: str = "comm_traces"
    save_traces_file_prefix: str = "rank_"
    mode: Literal["default", "fake_backend", "local_tensor"] = "default"


@dataclass
class MemoryEstimation:
    """[memory_estimation]."""

    enable: bool = False
    disable_fake_mode: bool = False


@dataclass
class FaultTolerance:
    """[fault_tolerance]."""

    enable: bool = False
    process_group: str = "gloo"
    process_group_timeout_ms: int = 10000
    replica_id: int = 0
    group_size: int = 0
    min_replica_size: int = 1
    semi_sync_method: str | None = None


@dataclass
class Experimental:
    """[experimental]."""

    custom_import: str = ""
    custom_args_module: str = ""


@dataclass
class Validation:
    """[validation]."""

    enable: bool = False
    dataset: str = "c4_validation"
    dataset_path: str | None = None
    local_batch_size: int = 8
    seq_len: int = 2048
    freq: int = 10
    steps: int = -1
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass
class Debug:
    """[debug]."""

    seed: int | None = None
    deterministic: bool = False
    deterministic_warn_only: bool = False
    moe_force_load_balance: bool = False


@dataclass
class JobConfig:
    """A whole file, without titan_grpo's own sections."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    memory_estimation: MemoryEstimation = field(default_factory=MemoryEstimation)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    experimental: Experimental = field(default_factory=Experimental)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)
