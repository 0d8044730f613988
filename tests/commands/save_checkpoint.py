"""Write the checkpoint of a model directory as the trainer does, then call titan-grpo, both in this
process. Arguments: step, folder, and as JSON lists a job's arguments and titan-grpo's."""

import json
import sys
from pathlib import Path

from titan_grpo import cli
from titan_grpo.titan import jobconfig


def save(step: int, folder: Path, job: list[str]) -> None:
    """The checkpoint's version is one less than its step."""
    config = jobconfig.parse(job)
    import torch
    import torch.distributed.checkpoint as dcp
    from torchtitan.components.checkpoint import ModelWrapper
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec(config.model.name)
    args = spec.model_args[config.model.flavor]
    args.update_from_config(config)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    adapter = spec.state_dict_adapter(args, config.model.hf_assets_path)
    wrapper = ModelWrapper(model)
    hf_state = adapter.to_hf(wrapper.state_dict())
    dcp.load(
        hf_state,
        storage_reader=adapter.get_hf_storage_reader(config.model.hf_assets_path, False),
        no_dist=True,
    )
    wrapper.load_state_dict(adapter.from_hf(hf_state))
    dcp.save(
        {**wrapper.state_dict(), "train_state": {"step": step, "version": step - 1}},
        checkpoint_id=str(folder / f"step-{step}"),
        no_dist=True,
    )


if __name__ == "__main__":
    save(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.exit(cli.main(json.loads(sys.argv[4])))
