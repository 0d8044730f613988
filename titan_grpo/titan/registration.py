"""What an Atropos API is told of a run."""

from typing import Any


def registration(job_config: Any, version: int) -> dict[str, Any]:
    """Fields of ``rollout.atropos.Registration`` for training that goes on from ``version``; batch_size is the source's."""
    checkpoint = job_config.checkpoint
    return {
        "max_token_len": job_config.training.seq_len,
        "num_steps": job_config.training.steps,
        "starting_step": version,
        "checkpoint_dir": f"{job_config.job.dump_folder}/{checkpoint.folder}" if checkpoint.enable else "",
        "save_checkpoint_interval": checkpoint.interval if checkpoint.enable else 0,
        "wandb_group": job_config.job.description or "titan_grpo",
    }
