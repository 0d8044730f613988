"""A disk that refuses is one line; servers that a run
starts itself are given a run key, those that are only named keep to the configured one."""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.jobs import job
from tests.rigs.present import present
from titan_grpo.config import GRPO, Lora, Rollout
from titan_grpo.config.rollout import violations
from titan_grpo.engines.launch import ServerSpec, command
from titan_grpo.errors import ServerUnreachable, StorageError
from titan_grpo.runkey import Key
from titan_grpo.titan.startup import (
    ending,
    launched,
    owner_of,
    registration,
    sync_settings,
    write_failure,
)


def test_a_run_whose_owner_file_a_full_disk_left_empty_gets_an_identity(tmp_path: Path) -> None:
    (tmp_path / "owner").touch()
    found = owner_of(tmp_path)
    assert (tmp_path / "owner").read_text().strip() in found
    assert owner_of(tmp_path) == found


def test_a_copy_of_a_runs_folder_has_an_identity_of_its_own_and_a_link_to_it_has_not(
    tmp_path: Path,
) -> None:
    folder, copy, link = (tmp_path / name for name in ("run", "copy", "link"))
    folder.mkdir()
    found = owner_of(folder)
    shutil.copytree(folder, copy)
    link.symlink_to(folder)
    assert owner_of(copy) != found == owner_of(link)


def test_an_error_of_the_disk_is_found_where_a_library_wrapped_it() -> None:
    folder = Path("out")
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError("unexpected pos")
    wrapped.__context__ = full
    of_ranks = Exception("checkpoint")
    of_ranks.failures = {1: (wrapped, None)}  # type: ignore[attr-defined]
    for error in (full, wrapped, of_ranks):
        assert "No space left on device" in write_failure(error, folder)
        assert ending(error, folder) == write_failure(error, folder)
    of_torch = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert "unexpected pos" in write_failure(of_torch, folder)
    assert "Permission denied" in write_failure(
        PermissionError(errno.EACCES, "Permission denied", "out/summary.json"), folder
    )
    assert write_failure(ConnectionRefusedError(111, "refused"), folder) == ""
    ours = StorageError("rollout.record_path elsewhere/rec.jsonl cannot be written")
    ours.__cause__ = full
    assert write_failure(ours, folder) == ""


def test_a_run_that_lost_a_rank_says_so_and_where_its_exit_code_is(tmp_path: Path) -> None:
    """Before, summary.json had only gloo's error, which asks for the logs of a remote worker."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    assert ending(lost, tmp_path) == (
        "another rank ended, or could not be reached; torchrun's report has its exit code (-9: out"
        f" of memory, maybe): RuntimeError: {lost}"
    )
    ours = ServerUnreachable("http://a:8000: Connection reset by peer")
    assert ending(ours, tmp_path) == f"ServerUnreachable: {ours}"


@pytest.mark.parametrize(
    ("number", "place", "folder"),
    [
        (errno.EACCES, "out2/tokens.jsonl", "out"),
        (errno.EACCES, "../out/tokens.jsonl", "out"),
        (errno.EACCES, "/etc/shadow", "."),
        (errno.ENOENT, ".cache/tokens.jsonl", "."),
        (errno.ENOENT, "out/checkpoint/step-2/.metadata", "out"),
        (errno.EBADF, 3, "out"),
    ],
)
def test_an_error_of_another_file_or_of_one_that_is_missing_is_not_the_disks(
    number: int, place: str | int, folder: str
) -> None:
    assert write_failure(OSError(number, os.strerror(number), place), Path(folder)) == ""


@pytest.mark.parametrize(
    ("number", "place"),
    [(errno.ENOSPC, "cache/torchinductor/x.py"), (errno.EIO, "data/train.jsonl")],
)
def test_another_disk_that_refuses_is_named_and_not_the_runs_folder(
    number: int, place: str
) -> None:
    said = write_failure(OSError(number, os.strerror(number), place), Path("outputs/run"))
    assert said.startswith(f"{place!r} could not be read or written ({os.strerror(number)})")
    assert "outputs/run" not in said


def test_a_file_of_the_run_is_known_by_every_path_to_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    for place in (f"{tmp_path}/out/summary.json", f"{tmp_path}/link/../link/summary.json"):
        refused = PermissionError(errno.EACCES, "Permission denied", place)
        for folder in (tmp_path / "out", tmp_path / "link"):
            assert "Permission denied" in write_failure(refused, folder)


def specs(
    run_key: Key | None = None,
    lora: Lora | None = None,
    grpo: GRPO | None = None,
    model_dir: str = "m",
    checkpoint: Mapping[str, Any] | None = None,
    **rollout: Any,
) -> tuple[ServerSpec, ...]:
    config = job(
        grpo=grpo or GRPO(),
        lora=lora or Lora(),
        model={"hf_assets_path": model_dir},
        checkpoint=checkpoint or {},
        rollout={"servers": ["launch"], "launch_python": "v"} | rollout,
        job={"dump_folder": "out"},
        training={"seq_len": 64},
    )
    return launched(config, model_dir, True, run_key, ("a", ""))


def test_launched_servers_take_adapters_where_these_are_the_versions() -> None:
    (spec,) = specs(lora=Lora(rank=8, sync="adapter"))
    assert spec.lora_rank == 8
    assert [specs(lora=lora)[0].lora_rank for lora in (Lora(), Lora(rank=8))] == [0, 0]


def test_launched_servers_of_adapters_have_the_weights_that_the_adapters_are_trained_on() -> None:
    """Before, they had those of model.hf_assets_path, and sampled from another policy."""
    first = {"initial_load_in_hf": True, "initial_load_path": "first"}
    adapter, merged = Lora(rank=8, sync="adapter"), Lora(rank=8)
    assert specs(lora=adapter, checkpoint=first)[0].model == "first"
    assert specs(lora=merged, checkpoint=first)[0].model == "m"
    assert specs(lora=adapter)[0].model == "m"


def test_launched_servers_send_routes_where_the_run_replays_them() -> None:
    assert [specs(grpo=grpo)[0].routes for grpo in (GRPO(), GRPO(router_replay=True))] == [
        False,
        True,
    ]


def test_launched_servers_compute_logits_as_the_trainer_does() -> None:
    made = [specs(grpo=grpo)[0] for grpo in (GRPO(), GRPO(fp32_lm_head=True))]
    assert [spec.fp32_head for spec in made] == [False, True]
    options = {"vllm": '{"head_dtype": "float32"}', "sglang": "--enable-fp32-lm-head"}
    for engine, option in options.items():
        asked = [option in command(replace(spec, engine=engine)) for spec in made]
        assert asked == [False, True]


@pytest.mark.parametrize(
    ("limit", "context"), [(4096, 70), (70, 70), (67, 67), (64, 64), (32, 64), (None, 64)]
)
def test_a_launched_sglang_takes_every_prompt_of_a_row_that_its_model_has_room_for(
    limit: int | None, context: int, tmp_path: Path
) -> None:
    settings = {} if limit is None else {"max_position_embeddings": limit}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (spec,) = specs(
        model_dir=str(tmp_path),
        launch_engines=["sglang"],
        launch_sglang_python="s",
        max_concurrent_requests=1,
    )
    asked = command(spec)
    # SGLang takes inputs of up to 7 tokens less than its context and than its cache, and the
    # longest prompt of a row has 63.
    for option in ("--context-length", "--max-total-tokens"):
        assert asked[asked.index(option) + 1] == str(context)


def test_launched_servers_share_a_new_key() -> None:
    first, second = specs(launch_count=2)
    assert first.run_key is not None
    assert first.run_key == second.run_key
    assert present(specs()[0].run_key).raw != first.run_key.raw


def test_a_configured_key_is_used_for_launched_servers_too() -> None:
    key = Key.generate()
    assert [spec.run_key for spec in specs(key, launch_count=2)] == [key] * 2


def test_no_server_is_launched_that_is_only_named() -> None:
    assert specs(servers=["http://a:1"]) == ()


def test_of_each_engine_as_many_are_started_with_what_is_its_own() -> None:
    made = specs(
        launch_engines=["sglang", "vllm"],
        launch_count=2,
        launch_sglang_python="s",
        launch_args=["--v"],
        launch_sglang_args=["--s"],
    )
    assert [(spec.engine, spec.python, spec.args, spec.log_path) for spec in made] == [
        ("sglang", "s", ("--s",), "out/sglang0.log"),
        ("sglang", "s", ("--s",), "out/sglang1.log"),
        ("vllm", "v", ("--v",), "out/vllm0.log"),
        ("vllm", "v", ("--v",), "out/vllm1.log"),
    ]


def test_each_server_gets_gpus_of_its_own_and_computes_on_all_of_them() -> None:
    made = specs(
        launch_engines=["vllm", "sglang"], launch_sglang_python="s", launch_gpus=[4, 5, 6, 7]
    )
    assert [(spec.env, spec.tensor_parallel) for spec in made] == [
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, 2),
    ]
    made = specs(launch_count=2, launch_gpus=[3, 1])
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in made] == ["3", "1"]
    assert [(spec.env, spec.tensor_parallel) for spec in specs()] == [({}, 1)]


def test_gpus_that_cannot_be_shared_out_are_refused() -> None:
    for gpus in ([4, 5, 6], [4, 4], [-1, 4]):
        rollout = Rollout(servers=["launch"], launch_python="v", launch_count=2, launch_gpus=gpus)
        assert [line for line in violations(rollout) if "launch_gpus" in line], gpus


def test_groups_from_outside_have_commits_take_the_kv_away() -> None:
    def kept(source: str) -> str:
        return sync_settings(job(rollout={"source": source})).kv_after_update

    assert [kept(source) for source in ("task", "atropos", "push")] == [
        "keep",
        "recompute",
        "recompute",
    ]


def test_a_registration_says_all_that_an_atropos_api_asks_but_the_size_of_a_batch() -> None:
    said = registration(job(training={"seq_len": 64}), 3)
    assert set(said) == {
        "wandb_group",
        "wandb_project",
        "max_token_len",
        "checkpoint_dir",
        "save_checkpoint_interval",
        "starting_step",
        "num_steps",
    }
    assert None not in said.values()
    assert (said["max_token_len"], said["starting_step"]) == (64, 3)
    assert said["wandb_project"] == "titan_grpo"
