"""torchtitan's own Trainer on synthetic tokens, with our patches and nothing else of ours. Run
under torchrun by tests/commands/test_export.py."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from titan_grpo.titan import compat

compat.prepare()

import torch  # noqa: E402 - the patches come first
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from titan_grpo.patches import torchtitan_gloo_premul  # noqa: E402
from titan_grpo.titan import upstream02  # noqa: E402


class SyntheticLoader(BaseDataLoader):  # type: ignore[misc]
    """Random tokens."""

    def __init__(self, job_config: Any, **_: Any) -> None:
        self.training = job_config.training

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            ids = torch.randint(4, 20, (self.training.local_batch_size, self.training.seq_len + 1))
            yield {"input": ids[:, :-1]}, ids[:, 1:].clone()

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """There is nothing to go on from."""


def main() -> None:
    init_logger()
    config = ConfigManager().parse_args(sys.argv[1:])
    spec = upstream02.get_spec(config.model.name)
    own = {"build_dataloader_fn": SyntheticLoader, "build_tokenizer_fn": None}
    register_train_spec("stock_" + config.model.name, dataclasses.replace(spec, **own))
    config.model.name = "stock_" + config.model.name
    trainer = Trainer(config)
    torchtitan_gloo_premul.apply(trainer.model_parts)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
