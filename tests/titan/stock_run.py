"""torchtitan's own Trainer on synthetic tokens, with our patches and nothing else of ours. Run
under torchrun by the tests.

``TITAN_GRPO_TEST_SKIP`` names one patch to leave out ("premul", "tied", "histc"). Rank 0 prints one
JSON line with the losses.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

SKIP = os.environ.get("TITAN_GRPO_TEST_SKIP", "")


def install() -> None:
    from titan_grpo.patches import (
        torchtitan_cpu_device,
        torchtitan_moe_histc,
        torchtitan_tied_embeddings,
        torchtitan_triton,
    )

    torchtitan_triton.apply()
    torchtitan_cpu_device.apply()
    if SKIP != "histc":
        torchtitan_moe_histc.apply()
    if SKIP != "tied":
        torchtitan_tied_embeddings.apply()


install()

import torch  # noqa: E402 - the patches come first
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from titan_grpo.patches import torchtitan_gloo_premul  # noqa: E402
from titan_grpo.titan import upstream02  # noqa: E402


class SyntheticLoader(BaseDataLoader):  # type: ignore[misc]
    """The same global rows for any number of ranks: rank r of w takes rows r, r + w, ... of each
    batch."""

    def __init__(self, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> None:
        self.world, self.rank, self.training = dp_world_size, dp_rank, job_config.training
        self.cursor = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        rows = self.training.local_batch_size * self.world
        while True:
            generator = torch.Generator().manual_seed(self.cursor)
            ids = torch.randint(4, 20, (rows, self.training.seq_len + 1), generator=generator)[
                self.rank :: self.world
            ]
            self.cursor += 1
            yield {"input": ids[:, :-1]}, ids[:, 1:].clone()

    def state_dict(self) -> dict[str, int]:
        return {f"cursor_{self.rank}": self.cursor}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.cursor = state_dict.get(f"cursor_{self.rank}", 0)


def main() -> None:
    init_logger()
    config = ConfigManager().parse_args(sys.argv[1:])
    spec = upstream02.get_spec(config.model.name)
    register_train_spec(
        "stock_" + config.model.name, dataclasses.replace(spec, build_dataloader_fn=SyntheticLoader)
    )
    config.model.name = "stock_" + config.model.name
    trainer = Trainer(config)
    if SKIP != "premul":
        torchtitan_gloo_premul.apply(trainer.model_parts)
    losses: list[float] = []
    norms: list[float] = []
    log = trainer.metrics_processor.log

    def keep(
        step: int,
        average: float,
        largest: float,
        norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        losses.append(average)
        norms.append(norm)
        log(step, average, largest, norm, extra_metrics)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"losses": losses, "norms": norms}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
