"""What the verdicts of soak and fault matrix rest on: what the engine-less server says of its own
memory."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rigs.server_handle import ServerProcess, served
from tests.rigs.server_process import CopiedModel
from tests.rigs.trainer import Trainer
from titan_grpo.config import WeightSync
from titan_grpo.engines import vllm
from titan_grpo.layout.manifest import Manifest
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.verify.recording import content_digest, tensor_digest

WAIT_S = 60.0
SHAPES = {"up": (1024, 512), "down": (512, 1024), "norm": (512,)}
CONFIG = WeightSync(block_bytes=1 << 18, bucket_bytes=1 << 18, backoff_s=0.05, backoff_max_s=0.2)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


@pytest.mark.e2e
def test_what_it_says_that_it_serves_is_what_was_sent_also_after_its_receiver_was_killed(
    tmp_path: Path,
) -> None:
    manifest = Manifest.build(
        [(name, "bfloat16", shape) for name, shape in SHAPES.items()], CONFIG.block_bytes
    )
    with ServerProcess() as server:
        options = SyncOptions(
            urls=[server.url],
            engine=vllm.NAME,
            guarded=False,
        )
        with Trainer(manifest, CONFIG, tmp_path, options) as trainer:
            trainer.start()
            for version in (1, 2):
                sent = tensors(float(version))
                assert trainer.publish(version, sent, WAIT_S)
                assert trainer.servers.wait_held(version, WAIT_S, everyone=False) == [server.url]
                now = server.run(served())
                digest = content_digest({n: tensor_digest(t.bfloat16()) for n, t in sent.items()})
                assert (now["digest"], now["paused"], now["intact"]) == (digest, False, True)
                assert now["label"].startswith(f"{trainer.run_id}:{version}:")
                assert now["visible"][-1] == [now["label"], digest]
                if version == 1:
                    os.kill(now["receiver_pid"], signal.SIGKILL)
        server.kill()
        server.start()
        assert server.run(vllm.label()) == "default", "it has no memory of an earlier life"


def test_a_load_that_breaks_off_is_seen_in_the_memory() -> None:
    model = CopiedModel()
    model.load(iter(tensors(1.0).items()))
    before = model.digest()

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors(2.0).items())[:2]
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError):
        model.load(half())
    assert model.digest() != before
