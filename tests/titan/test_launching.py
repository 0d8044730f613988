"""Servers that a run starts itself are given a run key; servers that are only named keep to the
configured one."""

from pathlib import Path
from types import SimpleNamespace

from titan_grpo.config import Rollout, WeightSync
from titan_grpo.runkey import Key
from titan_grpo.titan.startup import Launcher, sync_settings


def launcher(servers: list[str], run_key: Key | None) -> Launcher:
    return Launcher(
        Rollout(servers=servers, launch_count=2, launch_python="python"),
        "m",
        Path("out"),
        True,
        64,
        run_key,
    )


def test_launched_servers_share_a_new_key_with_the_trainer():
    made = launcher(["launch"], None)
    assert made.run_key is not None
    assert [spec.run_key for spec in made._specs] == [made.run_key] * 2
    assert launcher(["launch"], None).run_key.raw != made.run_key.raw


def test_a_configured_key_is_used_for_launched_servers_too():
    key = Key.generate()
    assert [spec.run_key for spec in launcher(["launch"], key)._specs] == [key] * 2


def test_servers_that_are_only_named_get_no_key_of_our_making():
    assert launcher(["http://a:1"], None).run_key is None


def test_of_each_engine_as_many_are_started_with_what_is_its_own():
    rollout = Rollout(
        servers=["launch"],
        launch_engines=["sglang", "vllm"],
        launch_count=2,
        launch_python="v",
        launch_sglang_python="s",
        launch_args=["--v"],
        launch_sglang_args=["--s"],
    )
    made = Launcher(rollout, "m", Path("out"), True, 64, None)._specs
    assert [(spec.engine, spec.python, spec.args) for spec in made] == [
        *[("sglang", "s", ("--s",))] * 2,
        *[("vllm", "v", ("--v",))] * 2,
    ]
    assert [Path(spec.log_path).name for spec in made] == [
        "sglang0.log",
        "sglang1.log",
        "vllm0.log",
        "vllm1.log",
    ]


def test_groups_from_outside_have_commits_take_the_kv_away():
    def kept(source: str) -> str:
        rollout = Rollout(source=source)
        return sync_settings(
            SimpleNamespace(rollout=rollout, weight_sync=WeightSync())
        ).kv_after_update

    assert [kept(source) for source in ("task", "atropos", "push")] == [
        "keep",
        "recompute",
        "recompute",
    ]
