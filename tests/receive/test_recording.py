"""The recorder notes what the loader took, as it was once the loader had taken it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from titan_grpo.layout.manifest import Manifest
from titan_grpo.verify.recording import PLUGIN, RecordedEngine, install, tensor_digest


class Loader:
    """An engine whose load changes the second tensor under its own hands."""

    config: Mapping[str, Any] = {}
    routes = True
    quantization = ""

    def refuses(self, manifest: Manifest) -> str:
        return "no" if manifest.num_blocks else ""

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        count = 0
        for name, tensor in tensors:
            count += 1
            if name == "b":
                tensor.neg_()
        return count


def test_it_passes_tensors_on_and_digests_them_as_they_ended_up() -> None:
    engine = RecordedEngine(Loader())
    a, b = torch.ones(2), torch.ones(3)
    assert engine.load(iter([("a", a), ("b", b)])) == 2
    assert engine.seen == {"a": tensor_digest(torch.ones(2)), "b": tensor_digest(-torch.ones(3))}
    assert engine.refuses(Manifest.build([("a", "float32", (2,))], 1024)) == "no"


def test_what_is_installed_for_the_server_can_be_imported_and_names_its_entry_point(
    tmp_path: Path,
) -> None:
    install(tmp_path, tmp_path / "it's \\ here.jsonl")
    plugin: dict[str, object] = {}
    exec((tmp_path / f"{PLUGIN}.py").read_text(), plugin)
    assert callable(plugin["start_sglang"])
    assert callable(plugin["start_vllm"])
    assert (
        f"{PLUGIN}:start_sglang"
        in (tmp_path / f"{PLUGIN}-0.dist-info" / "entry_points.txt").read_text()
    )
