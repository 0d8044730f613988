"""The planner: production's tables over a simulated clock, and the command."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_grpo.cli import command
from titan_grpo.commands import plan
from titan_grpo.commands.plan import of_job
from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError
from titan_grpo.layout.image import hash_threads
from titan_grpo.plan import report
from titan_grpo.plan.network import TRAINER, Network, water_level
from titan_grpo.plan.setup import HASH_THREADS, Setup
from titan_grpo.plan.simulation import Result, Simulation, quantile
from titan_grpo.protocol.lane import AT_WORK, TURN_S
from titan_grpo.sync.transports.sender import senders_of

RECIPES = Path(__file__).parents[2] / "train_configs"

GSM8K = (RECIPES / "qwen3_0.6b_gsm8k.toml").read_text()
"""A job with one server of another host."""

ONE_GB = 500_000_000
"""Parameters of a version of 1 GB in bfloat16."""

SMALL = Setup(
    parameters=ONE_GB,
    servers=4,
    trainer_link_gbit=8.0,
    server_link_gbit=8.0,
    step_s=10.0,
    hours=0.1,
    sync=WeightSync(relay=False),
)
"""A trainer's link of 1 GB/s for 4 servers that read from it alone: 4 s a version."""


def of_file(job: Path, servers: int | None = None) -> Setup:
    return Setup(**of_job(job, {}, servers))


def said_of(setup: Setup, result: Result) -> str:
    return report.text(setup, report.figures(setup, result), [], result)


def test_servers_behind_one_link_get_a_version_in_their_number_times_its_bytes() -> None:
    result = Simulation(SMALL).run()
    assert max(result.send_s) == pytest.approx(4.0, rel=0.01)
    assert result.stall_s == 0.0
    assert report.limit(SMALL, result)[0] == "the trainer hosts' links"


def test_transfers_share_a_link_unevenly_after_idle_connections_and_evenly_when_they_go_on() -> (
    None
):
    network = Network(SMALL, set(), random.Random(0))

    def ends(began: float) -> list[float]:
        for n in range(4):
            network.begin(n, 400_000_000, TRAINER, began)
        out, now = list[float](), began
        while (now := network.next_end(now)) < math.inf:
            out += [now] * len(network.take_arrived(now))
        return out

    anew = ends(0.0)
    assert len(set(anew)) > 1
    assert ends(anew[-1] + 0.1) == pytest.approx([anew[-1] + 0.1 + 1.6] * 4)
    assert len(set(ends(10.0))) > 1


@pytest.mark.parametrize(("servers", "most_s"), [(16, 1.3), (256, 2.3)])
def test_the_trainer_sends_a_version_once_however_many_servers_there_are(
    servers: int, most_s: float
) -> None:
    wide = replace(SMALL, servers=servers, hours=0.02, sync=WeightSync(relay=True))
    result = Simulation(wide).run()
    assert report.figures(wide, result)["network"]["sent_per_version"] == pytest.approx(1, rel=0.05)
    assert 1.0 < quantile(result.send_s, 0.5) < most_s  # as many seconds as servers without relays
    assert quantile(result.lags, 0.5) == 0
    said = said_of(wide, result)
    assert "servers read from each other: the trainer sends a version 1.0 times" in said


def test_patches_are_read_in_place_of_versions_where_links_are_slow() -> None:
    patched = replace(SMALL, patch_share=0.05, sync=WeightSync(relay=False, delta="auto"))
    result = Simulation(patched).run()
    assert quantile(result.send_s, 0.5) == pytest.approx(4.0 * 0.05, rel=0.1)
    quick = replace(patched, trainer_link_gbit=800.0, server_link_gbit=800.0, source_gb_s=100.0)
    assert Simulation(quick).run().patched == 0
    assert patched.patch_bytes(6) == 0  # more than a quarter of a version
    assert Simulation(replace(patched, patch_share=0.2)).run().patched > 0, "over one version"
    two = replace(patched, trainer_hosts=2, trainer_link_gbit=patched.trainer_link_gbit / 2)
    assert two.encode_s == patched.encode_s / 2
    assert quantile(Simulation(two).run().send_s, 0.5) == pytest.approx(4.0 * 0.05, rel=0.1)


def test_servers_on_the_trainers_host_read_no_patches() -> None:
    """Also with delta = "on": they map the image."""
    here = replace(SMALL, same_host=True, patch_share=0.05, sync=WeightSync(delta="on"))
    result = Simulation(here).run()
    assert (result.patched, len(result.send_s) > 20) == (0, True)


def test_servers_that_read_from_each_other_get_versions_too_fast_for_patches() -> None:
    """1.3 s each, which is less than four times the second that a patch takes to make."""
    auto = replace(SMALL, servers=16, sync=WeightSync(delta="auto"))
    assert Simulation(auto).run().patched == 0
    slow = replace(auto, server_link_gbit=0.4, patch_share=0.05)
    assert Simulation(slow).run().patched > 0
    assert Simulation(replace(slow, servers=21)).run().patched == 0  # patches of 1.05 versions
    patched = replace(auto, sync=WeightSync(delta="on"))
    result = Simulation(patched).run()
    assert result.patched == len(result.send_s)
    said = said_of(patched, result)
    assert "patches come from the trainer to each server: its hosts send 0.64 times" in said


def test_a_slow_server_costs_the_others_little_whichever_it_is() -> None:
    eight = replace(SMALL, servers=8, slow=1 / 8, slow_factor=0.1, sync=WeightSync())
    for seed in range(8):
        result = Simulation(replace(eight, seed=seed)).run()
        assert quantile(result.send_s, 0.5) < 2.0 < 9.0 < max(result.send_s)


@pytest.mark.parametrize(
    ("parameters", "size"),
    [(ONE_GB, "0.5 billion parameters, 1 GB"), (10**12, "1,000 billion parameters, 2,000 GB")],
)
def test_a_plan_for_one_server_names_no_others_and_writes_sizes_out(
    parameters: int, size: str
) -> None:
    one = replace(SMALL, parameters=parameters, servers=1, hours=0.01, sync=WeightSync())
    said = said_of(one, Simulation(one).run())
    assert f"{size} a version" in said
    assert "each other" not in said
    assert "1 servers" not in said


def test_a_hosts_own_link_bounds_its_servers_and_takes_a_version_once_for_those_that_share() -> (
    None
):
    setup = replace(SMALL, servers_per_host=4, server_link_gbit=2.0, trainer_link_gbit=800.0)
    result = Simulation(setup).run()
    assert quantile(result.send_s, 0.5) == pytest.approx(16.0, rel=0.02)
    assert report.limit(setup, result)[0] == "the server hosts' links"
    together = Simulation(replace(setup, sync=WeightSync(relay=True))).run()
    assert quantile(together.send_s, 0.5) == pytest.approx(4.0, rel=0.05)


def test_servers_on_the_trainers_host_use_no_link() -> None:
    setup = replace(SMALL, same_host=True, trainer_link_gbit=0.001, server_link_gbit=0.001)
    result = Simulation(setup).run()
    assert quantile(result.send_s, 0.95) < 1.0
    assert report.figures(setup, result)["network"]["source_bytes_per_s"] is None


def test_slow_servers_keep_the_trainer_and_the_others_waiting_for_nothing() -> None:
    quick = replace(SMALL, servers=40, trainer_link_gbit=800.0, source_gb_s=100.0, groups=20)
    slow = Simulation(replace(quick, slow=0.1, slow_factor=0.02)).run()
    assert slow.stall_s == 0.0
    assert quantile(slow.lags, 0.5) == 0
    assert max(slow.lags) >= 1  # 50 s a version, in steps of 10 s


def test_a_server_that_stands_still_loses_its_transfer_by_the_progress_deadline() -> None:
    still = replace(SMALL, slow=0.25, slow_factor=0.0, groups=2)
    result = Simulation(still).run()
    assert result.failed_transfers > 0
    assert result.stall_s == 0.0


@pytest.mark.parametrize("gbit", [800.0, 8.0], ids=["by the trainer", "by each other"])
def test_dead_servers_come_back_with_the_newest_version_and_their_groups_move(gbit: float) -> None:
    dying = replace(
        SMALL, servers=64, trainer_link_gbit=gbit, source_gb_s=100.0, dying=0.2, restart_s=20.0,
        sync=WeightSync(relay=gbit == 8.0),
    )  # fmt: skip
    result = Simulation(dying).run()
    assert result.deaths > 20
    assert result.moved > 0
    assert quantile(result.lags, 0.95) <= 1
    assert result.steps > 20


@pytest.mark.parametrize("shares", [True, False])
def test_a_dead_server_makes_no_group(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, dead = Simulation._fill, list[int]()

    def filled(self: Simulation, server: Any, idle: bool = False) -> None:
        fill(self, server, idle)
        dead.extend(server.groups if not server.alive else ())

    monkeypatch.setattr(Simulation, "_fill", filled)
    sync = WeightSync(relay=shares)
    dying = replace(SMALL, servers=8, hours=0.3, dying=1.0, sync=sync)
    assert Simulation(dying).run().deaths > 0
    assert dead == []


def test_a_group_goes_on_elsewhere_with_what_its_dead_server_had_streamed() -> None:
    """Groups that begin late in a step cannot be made twice within it."""
    tight = replace(
        SMALL, servers=64, trainer_link_gbit=800.0, source_gb_s=100.0, group_s=3.5, hours=0.2,
        dying=0.2, restart_s=20.0, seed=1,
    )  # fmt: skip
    streamed, whole = (
        Simulation(replace(tight, whole_answers=whole)).run() for whole in (False, True)
    )
    assert min(streamed.moved, whole.moved) > 20
    assert streamed.stall_s == 0.0
    assert whole.stall_s > 1.0


def test_groups_of_more_than_the_servers_make_in_a_step_are_named_as_too_many() -> None:
    busy = replace(SMALL, groups=4, group_s=12.0, in_flight=1)
    assert busy.generation_share == pytest.approx(1.2)
    result = Simulation(busy).run()
    assert result.stall_s / result.simulated_s > 1 - 1 / 1.2
    said = said_of(busy, result)
    assert "120% of what 4 servers can make in a step of 10 s" in said
    assert "NOT ENOUGH, the trainer waits for groups" in said


@pytest.mark.long
def test_of_1024_servers_slow_and_dying_ones_cost_an_hour_of_training_nothing() -> None:
    setup = Setup(parameters=596_049_920, trainer_hosts=32, servers=1024, slow=0.05, dying=0.01)
    result = Simulation(setup).run()
    assert result.deaths > 500
    assert result.stall_s == 0.0
    assert quantile(result.lags, 0.5) <= 1


@pytest.mark.parametrize("servers", [16, 128])
def test_a_server_stands_still_for_the_calls_of_few_commits(servers: int) -> None:
    quick = replace(SMALL, trainer_link_gbit=8000.0, server_link_gbit=800.0, source_gb_s=1000.0)
    result = Simulation(replace(quick, servers=servers, hours=0.02)).run()
    own_s = quick.load_s + 3 * quick.call_s
    assert own_s < quantile(result.pause_s, 0.5) < 1.2 * own_s


def test_servers_that_answer_late_hold_up_other_commits_for_their_turns_alone() -> None:
    quick = replace(SMALL, trainer_link_gbit=8000.0, server_link_gbit=800.0, source_gb_s=1000.0)
    late = replace(quick, servers=4 * AT_WORK, call_s=2.0, step_s=30.0, hours=0.05)
    commit_s = Simulation(late).run().commit_s
    assert max(commit_s) - min(commit_s) == pytest.approx(3 * TURN_S, abs=0.1)


def test_a_version_that_takes_longer_than_a_step_stalls_the_trainer_by_its_staleness_rule() -> None:
    late = replace(SMALL, servers=20)  # 20 s a version, in steps of 10 s
    result = Simulation(late).run()
    assert result.stall_s > 0.2 * result.simulated_s
    assert result.stall_for_versions_s > 0.95 * result.stall_s
    assert max(result.staleness) <= late.max_staleness


def test_a_stall_for_a_version_that_all_servers_get_at_once_is_a_stall_for_versions() -> None:
    late = replace(SMALL, trainer_link_gbit=800.0, source_gb_s=100.0, server_link_gbit=1.0)
    result = Simulation(late).run()  # 8 s of a step's 10, before groups of 1.7 to 5 s
    assert result.stall_s > 5.0
    assert result.stall_for_versions_s == pytest.approx(result.stall_s)


def test_readers_of_both_slots_cost_versions_and_a_third_slot_brings_them_back() -> None:
    """Slow servers read one slot and quick ones the other, for longer than a step."""
    wide = replace(SMALL, trainer_link_gbit=800.0, source_gb_s=100.0, step_s=0.8, hours=0.02)
    two = replace(wide, servers=8, slow=0.5, slow_factor=0.1, max_staleness=100, groups=1)
    three = replace(two, sync=WeightSync(relay=False, slots=3))
    assert Simulation(two).run().skipped > Simulation(three).run().skipped


def test_a_run_that_skipped_every_version_for_its_next_step_goes_on_once_a_slot_is_free() -> None:
    """Two slow servers that read different versions hold both slots meanwhile."""
    wide = replace(SMALL, trainer_link_gbit=800.0, source_gb_s=100.0, step_s=0.8, groups=1)
    late = replace(wide, servers=8, slow=0.5, slow_factor=0.1, dying=0.5, restart_s=5.0)
    minutes = [Simulation(replace(late, hours=n / 60)).run().steps for n in (2, 4)]
    assert minutes[1] > 1.5 * minutes[0]


def test_transfers_past_their_deadline_never_start_the_run() -> None:
    sync = WeightSync(relay=False, lane_deadline_s=1.0, min_rate=1_000_000_000)
    setup = replace(SMALL, servers=20, sync=sync)
    result = Simulation(setup).run()
    assert result.steps == 0
    assert "do not end within 2 s" in said_of(setup, result)


def test_the_level_of_a_shared_link_uses_it_up_and_passes_no_bound() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        bounds = rng.exponential(size=rng.integers(1, 30))
        total = float(rng.uniform(0.1, 1.5)) * bounds.sum()
        weights = rng.uniform(0.5, 2.0, size=bounds.size)
        level = water_level(bounds, weights, total)
        assert np.minimum(bounds, weights * level).sum() == pytest.approx(min(total, bounds.sum()))


def test_a_seed_makes_the_same_run_again_and_another_seed_another() -> None:
    dying = replace(SMALL, servers=16, dying=0.5)
    once, again, other = (Simulation(replace(dying, seed=n)).run() for n in (1, 1, 2))
    assert once == again
    assert once.commit_s != other.commit_s


def test_proposed_settings_make_the_run_better() -> None:
    setup = replace(SMALL, servers=12, hours=0.1)
    before = Simulation(setup).run()
    changes, after = report.advice(setup, before)
    assert 1 <= len(changes) <= 3
    assert after.simulated_s > 0.9 * 3600 * setup.hours, "simulated in full, not as a trial"
    assert report.score(after) < report.score(before)


def test_a_version_of_many_steps_gets_advice_too() -> None:
    # 140 s a version, in steps of 10 s
    far = replace(SMALL, servers=14, parameters=10 * ONE_GB, hours=0.12)
    changes, _ = report.advice(far, Simulation(far).run())
    assert changes[0].setting == "weight_sync.relay"


def test_a_run_that_is_well_gets_no_advice() -> None:
    assert report.advice(SMALL, Simulation(SMALL).run())[0] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"servers": 0}, "servers must be 1 or more"),
        ({"slow": 1.5}, "slow is a share and must be 0 to 1, got 1.5"),
        ({"slow": -0.1}, "slow must be 0 or more"),
        ({"step_s": float("nan")}, "step_s must be greater than 0, and finite, got nan"),
        ({"trainer_link_gbit": 5e-324}, "trainer_link_gbit must be 1e-18 or more, got 5e-324"),
        ({"sync": WeightSync(transport="nccl")}, "weight_sync.transport"),
        ({"sync": WeightSync(apply="streamed")}, "weight_sync.apply"),
        ({"same_host": True, "trainer_hosts": 2}, "same_host is for one trainer host"),
        (
            {"servers": 100_000, "hours": 1.0, "step_s": 30.0},
            "--hours 0.083 is in time, or fewer servers",
        ),
        ({"groups": 10**9}, "groups must be at most 1,000,000, got 1,000,000,000"),
    ],
)
def test_what_makes_no_sense_or_is_not_simulated_is_refused_by_name(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **change)


def test_servers_that_a_job_starts_itself_are_on_the_trainers_host_and_more_on_others() -> None:
    one_node = RECIPES / "qwen3_0.6b_one_node.toml"
    setup = of_file(one_node)
    assert (setup.servers, setup.same_host, setup.server_gpus) == (4, True, 1)
    assert setup.server_bytes == 4 * setup.image_bytes
    setup = of_file(one_node, 64)
    assert (setup.same_host, setup.servers_per_host) == (False, 4)


def test_a_server_that_a_job_starts_on_several_gpus_loads_a_version_over_each(
    tmp_path: Path,
) -> None:
    job, of_four = tmp_path / "job.toml", (RECIPES / "qwen3_0.6b_one_node.toml").read_text()
    job.write_text(of_four.replace("launch_count = 4", "launch_count = 2"))
    assert (of_file(job).servers, of_file(job).server_gpus) == (2, 2)


@pytest.mark.parametrize("servers", [[], ["--servers", "12"]])
@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan_with_steps(
    capsys: pytest.CaptureFixture[str], recipe: Path, servers: list[str]
) -> None:
    assert command(["plan", str(recipe), "--hours", "0.05", *servers]) == 0
    out = capsys.readouterr().out
    assert "NO STEP" not in out
    assert "e-" not in out, "no length of time is said as a power of ten"
    if servers:
        assert f"{servers[1]} servers on" in out


def test_a_job_is_named_as_for_the_other_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    job = str(RECIPES / "llama3_8b_gsm8k.toml")
    said = []
    for words in ([job], ["--job.config_file", job]):
        assert command(["plan", *words, "--hours", "0.05"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_job_without_servers_has_a_plan_for_a_given_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, sizes = tmp_path / "job.toml", tmp_path / "sizes.toml"
    job.write_text(GSM8K.replace('servers = ["http://inference-0:8000"]', ""))
    sizes.write_text("servers = 5\n")
    assert command(["plan", str(job)]) == 2
    assert "--servers N must say how many" in capsys.readouterr().err
    for options in (["--servers", "5"], [str(sizes)]):
        assert command(["plan", *options, str(job), "--hours", "0.05"]) == 0
        assert "5 servers on 5 hosts" in capsys.readouterr().out


def test_servers_that_a_job_names_are_on_the_hosts_of_their_addresses(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job.toml"
    named = '"http://a:8000", "http://a:8001", "http://b:8000"'
    job.write_text(GSM8K.replace('"http://inference-0:8000"', named))
    setup = of_file(job)
    assert (setup.servers, setup.servers_per_host, setup.same_host) == (3, 2, False)


def test_servers_of_a_file_and_of_slurms_host_list_are_counted_too(
    tmp_path: Path,
) -> None:
    job, listed = tmp_path / "job.toml", tmp_path / "servers"
    more = f'servers_file = "{listed}"\nservers_slurm = "HOSTS"\nservers_per_host = 3\n'
    job.write_text(GSM8K.replace("servers = [", f"{more}servers = ["))
    listed.write_text("".join(f"http://of-file-{n}:8000\n" for n in range(64)))
    setup = Setup(**of_job(job, {"HOSTS": "gpu[1-4]"}))
    assert (setup.servers, setup.servers_per_host, setup.same_host) == (1 + 64 + 4 * 3, 3, False)
    with pytest.raises(ConfigError, match=r"HOSTS is not set: .* \(--servers N plans for N"):
        of_job(job, {})
    setup = Setup(**of_job(job, {}, 24))
    assert (setup.servers, setup.servers_per_host, setup.same_host) == (24, 3, False)


@pytest.mark.parametrize(
    ("section", "key", "why"),
    [
        ("grpo", "async_weight_update", "each step waits for every server"),
        ("rollout", "in_flight_weight_updates", "a server finishes its requests before"),
    ],
)
def test_a_job_whose_commits_wait_is_refused_since_no_plan_has_such_waits(
    tmp_path: Path, section: str, key: str, why: str
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(GSM8K.replace(f"{key} = true\n", f"{key} = false\n"))
    with pytest.raises(ConfigError, match=rf"{section}\.{key} must be true for a plan \(.* {why}"):
        of_file(job)


def test_a_job_with_adapters_has_their_size_and_little_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    setups = []
    for sync in ("merged", "adapter"):
        job.write_text(f'{GSM8K}\n[lora]\nrank = 8\nsync = "{sync}"\n')
        setups.append(of_file(job))
    merged, adapter = setups
    assert merged.image_bytes == 2 * merged.parameters
    # as scripts/bench_lora.py measured it (docs/measurements.md)
    assert adapter.image_bytes == 10_092_544
    state = 4 * merged.parameters + 16 * adapter.image_bytes // 2
    assert merged.state_bytes == adapter.state_bytes == state / merged.trainer_gpus
    assert command(["plan", str(job), "--model", "8e9"]) == 2
    assert "--model must be left out" in capsys.readouterr().err


def test_the_command_reads_a_file_of_options_and_writes_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, out = tmp_path / "sizes.toml", tmp_path / "plan.json"
    sizes.write_text('model = "9e9"\nservers = 3\nhours = 0.1\nstep_s = 5\n')
    model = ["--model", "5e8"]
    assert command(["plan", str(sizes), "--servers", "2", *model, "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["setup"]["servers"] == 2
    assert record["memory"]["image_bytes"] == 1_000_000_000
    assert record["run"]["stall_s"] == 0.0
    said = capsys.readouterr().out
    assert "2 servers on 2 hosts" in said
    assert "assumed   trainer_hosts 1, trainer_gpus 8, trainer_link_gbit 100, server_link" in said
    assert "step_s 5" not in said


def test_figures_that_could_not_be_written_are_refused_before_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nowhere" / "plan.json"
    assert command(["plan", "--servers", "2", "--hours", "0.1", "--json", str(out)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    rule = f"--json must be a file that can be written, got {str(out)!r}"
    why = f"there is no folder {str(out.parent)!r}; make it"
    assert said.err == f"titan-grpo plan: {rule}: {why}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("server = 3\n", "unknown key 'server'"),
        ("servers = 3.5\n", "servers must be an integer"),
        ("servers =\n", "FILE must be a readable TOML file, got"),
    ],
)
def test_a_bad_sizes_file_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    sizes = tmp_path / "sizes.toml"
    sizes.write_text(content)
    assert command(["plan", str(sizes)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_plan_that_takes_longer_says_so_beside_its_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for say_s, said in ((600.0, ""), (0.01, "simulating 0.1 h of 8 servers")):
        monkeypatch.setattr(plan, "SAY_S", say_s)
        assert command(["plan", "--servers", "8", "--hours", "0.1"]) == 0
        assert capsys.readouterr().err.partition(",")[0] == said


@pytest.mark.parametrize("number", ["1e300", "0", "inf"])
def test_a_number_that_no_model_has_is_refused(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["plan", "--model", number]) == 2
    assert "--model must be 1 to 1e+15 where it is a number" in capsys.readouterr().err


def test_a_model_is_a_number_or_torchtitans_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "--model", "eight billion"]) == 2
    assert "--model must be NAME/FLAVOR" in capsys.readouterr().err


def test_a_host_sends_and_hashes_with_as_many_threads_as_the_product_starts_on_a_large_one() -> (
    None
):
    assert Setup().source_threads == senders_of(64)
    assert hash_threads(64) == HASH_THREADS
    rates = [replace(SMALL, source_threads=n).source_rate for n in (1, 4)]
    assert rates[1] == 4 * rates[0] == 4 * SMALL.source_gb_s * 1e9
