import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts import compat
from tests.rigs.present import present
from titan_grpo.commands import doctor_host
from titan_grpo.commands.doctor_host import RANGES, Gpu
from titan_grpo.commands.doctor_servers import Needs, Options, ServerFacts, server
from titan_grpo.config import Rollout, WeightSync
from titan_grpo.observe.run_lock import held
from titan_grpo.patches.versions import numbers
from titan_grpo.protocol.messages import Joined

TORCHRUN_ENV = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN_ENV |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

JOINED = Joined(True, "", "0.1.0", 4242, "0000000003e8-00000000", 7, "f" * 32, True)


def facts(**changes: Any) -> ServerFacts:
    good = {"version": "0.32.0", "label": "7", "paused": False, "backend": "titan_grpo"}
    return ServerFacts("http://s:8000", **{**good, "joined": JOINED, **changes})


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("torchtitan", "0.2.2", "ok"),
        ("torchtitan", "0.3.0", "ok"),
        ("torchtitan", "0.4.0", "problem"),
        ("torchtitan", "0.2.1", "problem"),
        ("torchtitan", None, "problem"),
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.9.1", "problem"),
        ("jinja2", None, "warning"),
    ],
)
def test_a_package_outside_its_range_is_named_with_the_command_that_mends_it(
    name: str, version: str | None, status: str
) -> None:
    finding = doctor_host.package(name, version, RANGES[name])
    assert finding.status == status
    assert (f"pip install '{name}>=" in finding.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("said", "ours", "status", "words"),
    [
        ({}, False, "ok", "it demands no run key"),
        ({"keyed": True}, False, "warning", "it demands a run key, and there is none here"),
        ({"keyed": True}, True, "ok", "it has proven that it has our run key"),
        ({"keyed": True, "ok": False, "error": "another"}, True, "problem", "from here: another"),
        ({"ok": False, "error": "this end has none"}, True, "problem", "this end has none"),
    ],
)
def test_what_a_server_says_about_run_keys(
    said: dict[str, bool | str], ours: bool, status: str, words: str
) -> None:
    joined = msgspec.structs.replace(JOINED, **said)
    finding = server(facts(joined=joined, our_key=ours))[-1]
    assert (finding.status, words in finding.text) == (status, True)
    assert bool(finding.remedy) == (status != "ok")


def test_what_a_server_says_about_its_quantisation() -> None:
    for method in ("", "fp8"):
        joined = msgspec.structs.replace(JOINED, quantization=method)
        assert ("quantised (fp8)" in server(facts(joined=joined))[-1].text) == bool(method)


def test_the_ranges_are_those_of_the_packaging(root: Path) -> None:
    table = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = table["optional-dependencies"]
    asked: dict[str, list[tuple[str, str]]] = {}
    # torchtitan 0.2.2 and 0.3 are asked for by two extras
    for need in [*table["dependencies"], *extras["train"], *extras["train03"]]:
        name, low, high = present(re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", need)).groups(
            ""
        )
        asked.setdefault(name, []).append((low, high))
    assert {name: (allowed.low, allowed.high) for name, allowed in RANGES.items()} == {
        name: (min((low for low, _ in found), key=numbers), max((h for _, h in found), key=numbers))
        for name, found in asked.items()
    }


@pytest.mark.parametrize("engine", sorted(doctor_host.ENGINES))
def test_the_oldest_engine_is_that_of_the_packaging_and_of_the_table_of_versions(
    root: Path, engine: str
) -> None:
    oldest = numbers(doctor_host.ENGINES[engine].oldest)
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    [asked] = extras["optional-dependencies"][engine]
    assert numbers(asked.partition(">=")[2]) == oldest, "pyproject.toml has another"
    first, *_ = compat.ENGINES[engine]
    assert numbers(first)[: len(oldest)] == oldest, "scripts/compat.py has another"


@pytest.mark.parametrize("missing", ["", *TORCHRUN_ENV])
def test_torchrun_variables_are_fine_if_all_or_none_are_set(missing: str) -> None:
    assert doctor_host.torchrun({}).status == "ok"
    finding = doctor_host.torchrun({k: v for k, v in TORCHRUN_ENV.items() if k != missing})
    assert finding.status == ("problem" if missing else "ok")
    assert missing in finding.text


@pytest.mark.parametrize(
    ("size", "accelerators", "status"),
    [(64 << 20, 0, "ok"), (64 << 20, 1, "ok"), (64 << 20, 2, "problem"), (None, 0, "warning")],
)
def test_shared_memory_matters_to_several_gpus_only(
    size: int | None, accelerators: int, status: str
) -> None:
    assert doctor_host.shared_memory(size, accelerators).status == status


@pytest.mark.parametrize(
    ("available", "slots", "remedy"),
    [(10, 2, ""), (10, 3, "use fewer weight_sync.slots"), (7, 2, "more memory")],
)
def test_memory_counts_every_slot_and_says_whether_fewer_would_fit(
    available: int, slots: int, remedy: str
) -> None:
    found = doctor_host.memory(available << 30, 4 << 30, slots)
    assert remedy in found.remedy
    # Not a problem: several trainer hosts share the images.
    assert bool(remedy) == (found.status == "warning")
    assert bool(remedy) == ("or several trainer hosts" in found.remedy)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("writable", "live", "free", "checkpoints", "status", "text"),
    [
        (True, False, 100 * GIB, 3, "ok", "100.0 GiB free, 3 checkpoints of 12.0 GiB"),
        (True, False, 30 * GIB, 3, "warning", "30.0 GiB free, 3 checkpoints of 12.0 GiB"),
        (True, False, 0, 0, "ok", "0 MiB free"),
        (False, False, 100 * GIB, 3, "problem", "cannot be written"),
        (True, True, 100 * GIB, 3, "problem", "that of a live run"),
    ],
)
def test_a_dump_folder_is_writable_nobodys_and_has_room_for_the_checkpoints(
    writable: bool, live: bool, free: int, checkpoints: int, status: str, text: str
) -> None:
    place = doctor_host.Place("out", writable, live, free)
    found = doctor_host.dump_folder(place, 12 * GIB, checkpoints)
    assert (found.status, text in found.text) == (status, True), found


def test_a_dump_folder_is_looked_at_and_not_made(tmp_path: Path) -> None:
    place = doctor_host.Place.of(tmp_path / "a" / "b")
    assert place.writable
    assert not place.live
    assert place.free > 0
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert not doctor_host.Place.of(tmp_path / "file" / "b").writable
    with held(tmp_path / "run"):
        assert doctor_host.Place.of(tmp_path / "run").live


@pytest.mark.parametrize(
    ("steps", "interval", "keep", "kept"),
    [(100, 10, 3, 4), (100, 10, 0, 10), (15, 10, 3, 2), (1000, 500, 10, 2)],
)
def test_torchtitan_deletes_the_oldest_checkpoint_after_it_wrote_the_next(
    steps: int, interval: int, keep: int, kept: int
) -> None:
    assert doctor_host.kept_checkpoints(steps, interval, keep) == kept


@pytest.mark.parametrize(
    ("nbytes", "startup_s", "status"),
    [(16 * GIB, 240.0, "ok"), (16 * GIB, 239.0, "warning"), (1600 * GIB, 240.0, "ok")],
)
def test_the_start_waits_as_long_as_a_first_version_may_take(
    nbytes: int, startup_s: float, status: str
) -> None:
    # 60 to join, 120 and the bytes at min_rate to transfer, 60 to commit
    sync = WeightSync(min_rate=50 << 20, startup_deadline_s=startup_s)
    finding = doctor_host.first_version(nbytes, sync)
    assert finding is not None
    assert finding.status == status
    if status == "warning":
        assert "to 240 or more" in finding.remedy
    assert doctor_host.first_version(None, sync) is None


@pytest.mark.parametrize(
    ("limit", "servers", "requests", "status"),
    [(1024, 2, 256, "ok"), (1024, 4, 256, "warning"), (-1, 256, 256, "ok"), (1024, 40, 1, "ok")],
)
def test_open_files_are_compared_with_servers_and_their_requests(
    limit: int, servers: int, requests: int, status: str
) -> None:
    assert doctor_host.descriptors(limit, servers, requests).status == status


def test_locked_memory_matters_to_a_card_that_reads_memory_itself() -> None:
    assert doctor_host.locked_memory(8 << 20, False).status == "ok"
    assert doctor_host.locked_memory(-1, True).status == "ok"
    assert doctor_host.locked_memory(8 << 20, True).status == "warning"


FREE, USED = doctor_host.Gpu(80 * GIB, 80 * GIB), doctor_host.Gpu(10 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("visible", "found", "launched", "statuses", "words"),
    [
        ("", [], [], ["ok"], "torch sees none"),
        ("", [], [0], ["problem"], "torch sees none"),
        ("", [FREE, FREE], [1], ["ok", "ok"], "80.0 GiB free"),
        ("", [FREE, FREE], [1, 2], ["problem", "ok", "ok"], "[2], this host has 0 to 1"),
        ("", [FREE, FREE], [0, 1], ["problem", "ok", "ok"], "torchrun's first rank"),
        ("", [USED, FREE], [1], ["warning", "ok"], "10.0 GiB of 80.0 GiB free"),
        ("", [FREE, USED], [1], ["ok", "problem"], "the server's part of the model has 16.0 GiB"),
        ("", [FREE, USED, FREE], [1, 2], ["ok", "warning", "ok"], "10.0 GiB of 80.0 GiB free"),
        ("", ["busy", FREE], [1], ["problem", "ok"], "GPU 0 cannot be used: busy"),
        # Launched servers may have GPUs that the trainer does not see.
        ("0,1", [FREE, FREE], [2, 3], ["ok", "ok"], "GPU 1: 80.0 GiB"),
        ("2,3", [FREE, FREE], [0, 1], ["ok", "ok"], "GPU 3: 80.0 GiB"),
        ("2,3", [FREE, FREE], [2], ["problem", "ok", "ok"], "has GPU 2, on which torchrun's first"),
        ("GPU-1f, GPU-2e", [FREE, FREE], [2], ["problem", "ok", "ok"], "[2], this host has 0 to 1"),
    ],
)
def test_gpus_of_ranks_and_of_launched_servers_are_told_apart(
    visible: str, found: list[Gpu | str], launched: list[int], statuses: list[str], words: str
) -> None:
    findings = doctor_host.gpus(found, Rollout(launch_gpus=launched), 16 * GIB, visible)
    assert [finding.status for finding in findings] == statuses
    assert words in " ".join(finding.text for finding in findings)


def test_launched_servers_without_gpus_of_their_own_are_said_to_share_the_first_ranks() -> None:
    launching = Rollout(servers=["launch"])
    first, *others = doctor_host.gpus([FREE, FREE], launching, 16 * GIB, "2,3")
    assert (first.status, [finding.status for finding in others]) == ("warning", ["ok", "ok"])
    assert "each launched server takes GPU 2, on which torchrun's first rank trains" in first.text
    assert "gpu-memory-utilization" in first.remedy
    assert [finding.status for finding in doctor_host.gpus([], launching, None)] == ["ok"]


def test_two_versions_of_nccl_are_a_problem_that_names_both() -> None:
    assert doctor_host.nccl("2.28.9", "2.28.9", "p").status == "ok"
    finding = doctor_host.nccl("2.28.9", "2.27.5", "p")
    assert finding.status == "problem"
    assert "2.28.9 here and 2.27.5 for p" in finding.text


SGLANG = {"engine": "sglang", "version": "0.5.23"}
SERVES = [("ok", "server"), ("ok", "server routes")]
SERVERS: dict[str, tuple[dict[str, Any], list[tuple[str, str]], str]] = {
    "good": ({}, [*SERVES, ("ok", "server plugin")], ""),
    "good sglang": (SGLANG, [*SERVES, ("ok", "server plugin")], ""),
    "another backend": (
        {"backend": "nccl", "joined": None},
        [*SERVES, ("problem", "server plugin")],
        "--middleware titan_grpo.receive.vllm_http.WeightsMiddleware",
    ),
    "no call back": (
        {"joined": None, "errors": {"joined": "the deadline passed"}},
        [*SERVES, ("problem", "server plugin")],
        "bind_host",
    ),
    "half-loaded weights": (
        {"joined": msgspec.structs.replace(JOINED, intact=False)},
        [*SERVES, ("problem", "server plugin")],
        "half-loaded",
    ),
    "paused": (
        {**SGLANG, "paused": True},
        [*SERVES, ("warning", "server"), ("ok", "server plugin")],
        "continue_generation",
    ),
    "old": ({"version": "0.31.2", "backend": None}, [("problem", "server")], "vllm>=0.32"),
    "a refused key": (
        {"errors": {"key": "refused with 401"}},
        [("problem", "server")],
        "rollout.api_key_env",
    ),
}


@pytest.mark.parametrize("state", SERVERS)
def test_the_findings_about_a_server_that_is(state: str) -> None:
    changes, statuses, words = SERVERS[state]
    found = server(facts(**changes))
    assert [(f.status, f.subject) for f in found] == statuses
    assert words in "".join(f.text + f.remedy for f in found if f.status != "ok")


@pytest.mark.parametrize(
    ("name", "version", "plugin", "statuses"),
    [
        ("vllm", "0.32.0", "yes", ["ok", "ok"]),
        ("vllm", "", "no", ["problem", "problem"]),
        ("vllm", "0.30", "yes", ["problem", "ok"]),
        ("sglang", "0.5.23", "yes", ["ok", "ok"]),
        ("sglang", "0.5.9", "no", ["problem", "problem"]),
    ],
)
def test_an_engine_environment_has_a_new_enough_engine_and_the_receiver(
    name: str, version: str, plugin: str, statuses: list[str]
) -> None:
    found = doctor_host.engine("p", {name: version, f"{name}_plugin": plugin}, name)
    assert [f.status for f in found] == statuses
    assert "gone" in doctor_host.engine("p", "gone", name)[0].text


NEEDED = {
    "no adapters": (Options(8), Options(), "start it with --enable-lora --max-lora-rank 8"),
    "a lower rank": (Options(12), Options(8), "rank 8 at most, lora.rank is 12"),
    "adapters for whole weights": (Options(), Options(8), "the job sends whole weights"),
    "no routes": (Options(routes=True), Options(), "start it with --enable-return-routed-experts"),
    "no adapters of SGLang": (Options(8), Options(), "sglang takes no adapters"),
}


def of_options(needed: Options, found: Options, **changes: str) -> list[tuple[str, str]]:
    findings = server(facts(options=found, **changes), Needs(needed))
    return [(f.status, f.line()) for f in findings if f.subject == "options"]


@pytest.mark.parametrize("lacking", NEEDED)
def test_an_option_that_the_job_needs_and_the_server_lacks_is_a_problem(lacking: str) -> None:
    needed, found, text = NEEDED[lacking]
    changes = SGLANG if "sglang" in text else {}
    [(status, line)] = of_options(needed, found, **changes)
    assert status == "problem"
    assert text in line


def test_a_server_with_what_the_job_needs_is_ok_and_nothing_needed_is_not_looked_at() -> None:
    assert [s for s, _ in of_options(Options(8, True), Options(16, True))] == ["ok", "ok"]
    assert of_options(Options(), Options(0, True)) == []


def test_a_server_that_takes_fewer_tokens_than_a_row_is_warned_of() -> None:
    [(status, line)] = of_options(Options(context=4096), Options(context=1024))
    assert status == "warning"
    assert "start it with --max-model-len 4096" in line
    for enough in (4096, 0):
        assert of_options(Options(context=4096), Options(context=enough)) == []


def test_a_server_that_reads_no_calls_of_tools_is_a_problem_where_agents_need_it() -> None:
    unread = facts(errors={"tool_calls": "u: start it with --enable-scale-out"})
    assert [f for f in server(unread, Needs()) if f.subject == "options"] == []
    for found, status in ((unread, "problem"), (facts(), "ok")):
        [finding] = [f for f in server(found, Needs(tool_calls=True)) if f.subject == "options"]
        assert finding.status == status


@pytest.mark.parametrize(
    ("here", "there", "status", "words"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], "ok", "has the trainer's"),
        ([1, 2, 3, 4], [1, 2, 3, 5], "warning", "token 3 of a sample text is 4 here and 5 there"),
        ([1, 2, 3, 4], [1, 2, 3], "warning", "4 tokens here, 3 there"),
        ([1], None, "", ""),
        (None, [1], "", ""),
    ],
)
def test_ids_that_differ_are_a_warning_where_both_are_known(
    here: list[int] | None, there: list[int] | None, status: str, words: str
) -> None:
    findings = server(facts(tokens=there), Needs(tokens=here))
    found = [f for f in findings if f.subject == "tokenizer"]
    assert [f.status for f in found] == ([status] if status else [])
    assert all(words in f.text and bool(f.remedy) == (status == "warning") for f in found)
