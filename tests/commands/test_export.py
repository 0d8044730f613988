import json
import os
import resource
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata

from tests.rigs.interpreter import python
from tests.rigs.jobs import job as plain_job
from tests.rigs.trainer import Trainer, manifest_of
from tests.rigs.trainer_handle import wait_until
from titan_grpo import cli
from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError, DataError, StorageError
from titan_grpo.layout.infer import infer_layout
from titan_grpo.receive.checkpoint import INDEX
from titan_grpo.sync.lanes import SyncOptions
from titan_grpo.titan import jobconfig
from titan_grpo.titan.checkpoints import Stored, checkpoint_of, checkpoints_in
from titan_grpo.titan.export import hf_tensors, whole_or_not_at_all
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.hf_files import copy_assets, save_version, write_adapter, write_weights
from titan_grpo.titan.lora import skeleton
from titan_grpo.titan.tiny import Kind, write_tiny_model

WAIT_S = 120.0

CLI = (
    "import json, sys; from titan_grpo import cli; print([cli.main(argv) for argv in"
    " json.loads(sys.argv[1])])"
)
"""Several commands in one interpreter: each start costs seconds."""


def job(kind: Kind, model: Path, dump: Path) -> list[str]:
    name, flavor = FLAVORS[kind]
    return [
        *(f"--job.dump_folder={dump}", f"--model.name={name}", f"--model.flavor={flavor}"),
        *(f"--model.hf_assets_path={model}", "--rollout.servers=http://127.0.0.1:1"),
        "--training.seq_len=512",
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_equal(folder: Path, model: Path) -> None:
    ours, theirs = weights(folder), weights(model)
    assert ours.keys() == theirs.keys()
    assert [
        name for name in ours if not torch.equal(ours[name].float(), theirs[name].float())
    ] == []


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_an_exported_checkpoint_is_bit_for_bit_the_model_it_was_loaded_from(
    kind: Kind, tmp_path: Path
) -> None:
    model = write_tiny_model(kind, tmp_path / "model", seed=3)
    arguments = job(kind, model, tmp_path / "dump")
    script, checkpoint = Path(__file__).with_name("save_checkpoint.py"), "dump/checkpoint"
    export = ["export", "--version", "6", "--out", str(tmp_path / "out"), *arguments]
    words = (str(script), "7", str(tmp_path / checkpoint), json.dumps(arguments))
    done = python(*words, json.dumps(export))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("version 6 (step-7): ")
    assert_equal(tmp_path / "out", model)
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).exists()
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained  # its types know no output_loading_info
    _, info = load(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.e2e
@pytest.mark.long
def test_a_checkpoint_that_two_sharded_ranks_wrote_is_exported_whole(
    tmp_path: Path, root: Path
) -> None:
    # Learning rate 0: the trained weights are those of the start, but they went through FSDP2,
    # AdamW and two ranks' files.
    model = write_tiny_model("llama3", tmp_path / "model", seed=5)
    arguments = job("llama3", model, tmp_path / "dump")
    train = [
        *(*arguments[:4], "--training.seq_len=32", "--training.steps=2", "--optimizer.lr=0"),
        *("--training.local_batch_size=1", "--checkpoint.enable", "--checkpoint.interval=1"),
        *("--checkpoint.initial_load_in_hf", "--checkpoint.no-last-save-model-only"),
    ]
    script = str(root / "tests" / "titan" / "stock_run.py")
    trained = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script, *train
    )
    assert trained.returncode == 0, trained.stderr[-3000:]
    out, new = f"--out={tmp_path / 'out'}", f"--out={tmp_path / 'new'}"
    export = ["export", "--version=2", "--dtype=float32", out, *arguments]
    absent = ["export", "--version=9", new, *arguments]
    other = ["export", "--version=2", new, *arguments, "--model.flavor=debugmodel"]
    done = python("-c", CLI, json.dumps([export, export, absent, other]))
    assert done.stdout.splitlines()[-1] == "[0, 2, 2, 2]", done.stderr
    assert done.stdout.startswith("step-2: ")
    assert_equal(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    for words in (
        "new or an empty directory",
        "it has 1, 2",
        "must be a checkpoint of model.name and model.flavor",
    ):
        assert words in done.stderr
    assert not (tmp_path / "new").exists()


def saved(folder: Path, step: int, **state: int) -> Path:
    place = folder / "checkpoint" / f"step-{step}"
    trained = {"train_state": {"step": step, **state}} if state else {}
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": torch.zeros(1), **trained}, checkpoint_id=place, no_dist=True)
    return place


def test_a_version_is_found_by_what_its_checkpoint_names_not_by_the_step(tmp_path: Path) -> None:
    # The sixth and the eighth step changed no weight; the last checkpoint has the weights alone.
    five = saved(tmp_path, 5, version=5)
    seven, eight = (saved(tmp_path, step, version=6) for step in (7, 8))
    alone = saved(tmp_path, 9)
    assert list(checkpoints_in(tmp_path / "checkpoint").values()) == [five, seven, eight, alone]
    assert [checkpoint_of(tmp_path, version) for version in (5, 6, 9)] == [five, seven, alone]
    with pytest.raises(ConfigError, match=r"it has 5, 6 \(step-7\), 6 \(step-8\), 9;"):
        checkpoint_of(tmp_path, 7)


def test_the_metadata_is_read_once_for_all_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows with the ranks of the run: before, DCP read it again for each parameter."""
    shapes = {f"p{i}": (4, 4) for i in range(20)}
    kept = {name: torch.rand(shape) for name, shape in shapes.items()}
    dcp.save(dict(kept), checkpoint_id=tmp_path / "kept", no_dist=True)
    reads, read = [], dcp.FileSystemReader.read_metadata

    def counted(self: dcp.FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        reads.append(self)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(dcp.FileSystemReader, "read_metadata", counted)
    layout = infer_layout(dict, shapes)
    found = dict(hf_tensors(Stored(tmp_path / "kept"), layout, dict, torch.float32, set(), {}))
    assert all(torch.equal(found[name], kept[name]) for name in shapes)
    assert len(reads) == 1


@pytest.mark.filterwarnings("error")
def test_a_load_in_one_process_warns_of_nothing(tmp_path: Path) -> None:
    place = saved(tmp_path, 1, version=1)
    assert Stored(place).load("w")["w"].tolist() == [0.0]


def test_a_value_that_the_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Before, it was written as infinity: only the stored value was looked at."""
    dcp.save({"p": torch.tensor([[1.0, 7e4]])}, checkpoint_id=tmp_path / "kept", no_dist=True)
    stored, layout = Stored(tmp_path / "kept"), infer_layout(dict, {"p": (1, 2)})
    assert dict(hf_tensors(stored, layout, dict, torch.bfloat16, set(), {}))
    with pytest.raises(DataError, match=r"p holds NaN or infinity in float16, .* another --dtype"):
        dict(hf_tensors(stored, layout, dict, torch.float16, set(), {}))


def test_a_link_to_an_empty_directory_is_written_to_and_what_cannot_be_replaced_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each was found at the end, when all was written, or was a traceback."""
    place, link = tmp_path / "place", tmp_path / "link"
    place.mkdir()
    link.symlink_to(place)
    with whole_or_not_at_all(link) as draft:
        (draft / "config.json").write_text("{}")
    assert link.is_symlink()
    assert [path.name for path in place.iterdir()] == ["config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "place"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    mounted = (out for out in (Path("/dev/shm"),) if out.is_mount())
    for out in (Path("."), *mounted):
        with pytest.raises(ConfigError, match="that can be replaced"), whole_or_not_at_all(out):
            pass
    assert Path.cwd().is_dir()


def test_a_model_whose_index_names_a_file_without_a_number_is_built(tmp_path: Path) -> None:
    """Before, torchtitan's adapter read it, and failed; an export needs no index."""
    model = write_tiny_model("qwen3", tmp_path / "model")
    (model / INDEX).write_text('{"weight_map": {"model.norm.weight": "model.safetensors"}}')
    found, _ = skeleton(jobconfig.parse(job("qwen3", model, tmp_path)))
    assert any(True for _ in found.parameters())


def test_a_job_that_names_no_servers_is_exported_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be arguments of the run."""
    nowhere = ["--version", "6", "--out", str(tmp_path / "out")]
    words = [*job("qwen3", tmp_path, tmp_path / "dump"), "--rollout.servers="]
    assert cli.main(["export", *nowhere, *words]) == 2
    assert f"{tmp_path / 'dump' / 'checkpoint'}" in capsys.readouterr().err


def test_a_missing_version_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    five = saved(tmp_path, 5)
    # step-10 was being written when the run was killed
    (tmp_path / "checkpoint" / "step-10").mkdir()
    assert checkpoints_in(tmp_path / "checkpoint") == {5: five}
    assert checkpoint_of(tmp_path, 5) == checkpoint_of(tmp_path / "checkpoint", 5) == five
    with pytest.raises(ConfigError, match="it has 5;"):
        checkpoint_of(tmp_path, 10)
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        checkpoint_of(tmp_path / "elsewhere", 5)


def test_large_models_are_written_in_shards_that_their_index_finds(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((64, 4), float(i)) for i in range(5)}
    written = write_weights(tensors.items(), tmp_path, shard_bytes=2 * 1024)
    assert (written.tensors, written.nbytes, written.shards) == (5, 5 * 1024, 3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == sorted(
        set(index["weight_map"].values())
    )
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as stored:
            assert torch.equal(stored.get_tensor(name), tensors[name])


def test_weights_replace_those_that_were_written_in_another_number_of_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for shard_bytes in (16, 1 << 20, 32, 16):
        tensors = {f"w{i}": torch.full((4,), float(shard_bytes + i)) for i in range(4)}
        write_weights(tensors.items(), tmp_path, shard_bytes)
        stored: dict[str, torch.Tensor] = {}
        for file in tmp_path.glob("*.safetensors"):
            stored |= load_file(file)
        assert all(torch.equal(stored.pop(name), tensor) for name, tensor in tensors.items())
        assert not stored
        index = tmp_path / "model.safetensors.index.json"
        shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ()
        found = {path.name for path in tmp_path.iterdir()} - {index.name, "config.json"}
        assert found == (shards or {"model.safetensors"})


def test_an_adapter_larger_than_a_shard_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_weights, "__defaults__", (16,))
    tensors = {"a": torch.ones(8), "b": torch.zeros(8)}
    assert write_adapter(tensors.items(), tmp_path / "adapter", {}).shards == 1
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == {"a", "b"}


def test_the_weights_may_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_weights({"a": torch.ones(2)}.items(), tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640


def test_views_of_one_stacked_parameter_are_written_as_tensors_of_their_own(tmp_path: Path) -> None:
    stacked = torch.arange(24.0).view(3, 2, 4)
    write_weights(((f"expert.{i}", stacked[i]) for i in range(3)), tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["expert.2"], stacked[2])


def test_a_base_directory_without_a_config_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        copy_assets(tmp_path, tmp_path, "bfloat16")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json must be a model's config\.json"):
        copy_assets(tmp_path, tmp_path, "bfloat16")


@pytest.mark.parametrize("names", [["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"]])
def test_the_type_in_config_json_is_the_weights_under_each_name(
    tmp_path: Path, names: list[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(names, "float32")))
    copy_assets(tmp_path, tmp_path / "out", "bfloat16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == dict.fromkeys(names, "bfloat16")


def test_what_is_exported_of_a_quantised_base_is_not_said_to_be_quantised(tmp_path: Path) -> None:
    """Engines and transformers would take its whole weights for quantised ones without scales."""
    (tmp_path / "out").mkdir()
    settings = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    copy_assets(tmp_path, tmp_path / "out", "bfloat16")
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"dtype": "bfloat16"}


@contextmanager
def files_of(nbytes: int) -> Iterator[None]:
    """This process may write files of so many bytes at most: one larger fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_shard_that_the_disk_refuses_is_one_line_and_leaves_no_shard(tmp_path: Path) -> None:
    tensors = {"small": torch.zeros(64), "large": torch.zeros(16, 1024)}
    line = r"shard-1\.partial could not be written \(.*File too large"
    with files_of(4096), pytest.raises(StorageError, match=line):
        write_weights(tensors.items(), tmp_path, shard_bytes=1024)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
def test_the_last_version_is_saved_or_the_one_before_or_the_run_says_why_none_is(
    tmp_path: Path,
) -> None:
    model = write_tiny_model("qwen3", tmp_path / "model", seed=0)
    config = WeightSync(bind_host="127.0.0.1")
    ones = torch.ones(512, 512)
    manifest = manifest_of({"w": ones}, config.block_bytes)
    run = tmp_path / "run"
    with Trainer(
        manifest, config, run, SyncOptions(urls=["http://127.0.0.1:9"], engine="vllm")
    ) as trainer:
        trainer.start()

        def save(version: int) -> str:
            settings = plain_job(weight_sync=config)
            return save_version(trainer.worker, version, settings, str(model), run)

        assert save(1).startswith("no version's image is complete; titan-grpo export")
        assert trainer.publish(1, {"w": ones}, WAIT_S)
        assert wait_until(lambda: trainer.worker.complete is not None, WAIT_S)
        with files_of(ones.numel()):
            refused = save(1)
        assert refused.startswith(f"{run}/hf/shard-0.partial could not be written (")
        assert refused.endswith("; titan-grpo export makes it from the last checkpoint")
        (run / "hf/config.json").mkdir()
        assert f"Is a directory: '{run}/hf/config.json'; titan-grpo export" in save(1)
        shutil.rmtree(run / "hf")
        assert save(1) == ""
        shutil.rmtree(run / "hf")
        assert save(2).startswith(f"its image is not complete, so {run}/hf has version 1; titan")
    assert torch.equal(load_file(run / "hf" / "model.safetensors")["w"].float(), ones)
