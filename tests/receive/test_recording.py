"""The recorder notes what the loader took, as it was once the loader had taken it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.receive.site import DictEngine, Site, Weights
from titan_grpo.receive.commit import Workers
from titan_grpo.verify.recording import PLUGIN, RecordingSide, install, tensor_digest


class Loader(DictEngine):
    """An engine whose second tensor changes under its hands, in a way that it does not see."""

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "b":
                tensor.numpy()[:] *= -1


@pytest.mark.e2e
def test_it_passes_tensors_on_and_digests_them_as_they_ended_up(tmp_path: Path) -> None:
    site, weights = Site(engine=Loader()), Weights(1.0)
    site.side.close()
    site.side = RecordingSide(tmp_path / "commits", site.engine, Workers(), "", None)
    report = site.deliver(site.connect(weights), 1, 7, weights)
    site.close()
    assert (report.ok, report.loaded) == (True, 2)
    line = json.loads((tmp_path / "commits").read_text())
    assert (line["run_id"], line["version"], line["ok"]) == (site.run_id, 7, True)
    a, b = weights.tensors.values()
    assert line["tensors"] == {"a": tensor_digest(a), "b": tensor_digest(-b)}


def test_what_is_installed_for_the_server_can_be_imported_and_names_its_entry_point(
    tmp_path: Path,
) -> None:
    install(tmp_path, tmp_path / "it's \\ here.jsonl")
    plugin: dict[str, object] = {}
    exec((tmp_path / f"{PLUGIN}.py").read_text(), plugin)
    assert callable(plugin["start"])
    named = (tmp_path / f"{PLUGIN}-0.dist-info" / "entry_points.txt").read_text()
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        assert f"[{group}]\n{PLUGIN} = {PLUGIN}:start\n" in named
