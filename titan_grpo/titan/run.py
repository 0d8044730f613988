"""One rank's life: build the trainer, train, close whatever happens."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import init_logger

from titan_grpo.titan.trainer import GRPOTrainer


def run(job_config: Any, build: Callable[[Any], GRPOTrainer] = GRPOTrainer) -> None:
    """Train as configured, with what ``build`` makes. Raises what stopped it, after everything that was started has ended."""
    init_logger()
    trainer: GRPOTrainer | None = None
    try:
        trainer = build(job_config)
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
