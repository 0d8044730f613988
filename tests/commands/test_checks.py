import re

import msgspec
import pytest

from titan_grpo.commands import doctor_checks
from titan_grpo.commands.doctor_checks import RANGES, ServerFacts, numbers, server
from titan_grpo.config import WeightSync
from titan_grpo.protocol.messages import Joined

TORCHRUN_ENV = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}

JOINED = Joined(True, "", "0.1.0", 4242, "0000000003e8-00000000", 7, "f" * 32, True)


def facts(**changes) -> ServerFacts:
    good = {
        "url": "http://s:8000",
        "healthy": True,
        "version": "0.32.0",
        "label": "7",
        "paused": False,
        "backend": "titan_grpo",
        "joined": JOINED,
        "errors": {},
    }
    return ServerFacts(**{**good, **changes})


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("0.3.0rc1", (0, 3, 0)),
        ("0.33.1.dev4+g1", (0, 33, 1)),
        ("x", ()),
    ],
)
def test_the_numbers_of_a_version_are_its_leading_ones(
    version: str, expected: tuple[int, ...]
) -> None:
    assert doctor_checks.numbers(version) == expected


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
        ("math-verify", None, "warning"),
    ],
)
def test_a_package_outside_its_range_is_named_with_the_command_that_mends_it(
    name, version, status
) -> None:
    finding = doctor_checks.package(name, version, RANGES[name])
    assert finding.status == status
    assert (f"pip install '{name}>=" in finding.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("joined", "ours", "status", "words"),
    [
        (JOINED, False, "ok", "it demands no run key"),
        (
            msgspec.structs.replace(JOINED, keyed=True),
            False,
            "warning",
            "it demands a run key, and there is none here",
        ),
        (
            msgspec.structs.replace(JOINED, keyed=True),
            True,
            "ok",
            "it has proven that it has our run key",
        ),
        (
            msgspec.structs.replace(JOINED, keyed=True, ok=False, error="another run key"),
            True,
            "problem",
            "refuse a trainer from here: a",
        ),
        (
            msgspec.structs.replace(JOINED, ok=False, error="this end has none"),
            True,
            "problem",
            "this end has none",
        ),
    ],
)
def test_what_a_server_says_about_run_keys(joined, ours, status, words) -> None:
    finding = server(facts(joined=joined, our_key=ours))[-1]
    assert (finding.status, words in finding.text) == (status, True)
    assert bool(finding.remedy) == (status != "ok")


def test_the_ranges_are_those_of_the_packaging(root) -> None:
    text = (root / "pyproject.toml").read_text()
    for name, allowed in RANGES.items():
        # torchtitan 0.2.2 and 0.3 are asked for by two extras
        asked = re.findall(rf'"{name}>=([\d.]+)(?:,<([\d.]+))?"', text)
        low = min((low for low, _ in asked), key=numbers)
        high = max((high for _, high in asked), key=numbers)
        assert (low, high) == (allowed.low, allowed.high), f"pyproject.toml has another {name}"


def test_an_old_python_is_a_problem() -> None:
    assert doctor_checks.python((3, 10, 12)).status == "problem"
    assert doctor_checks.python((3, 11, 0)).status == "ok"


@pytest.mark.parametrize("missing", ["", *TORCHRUN_ENV])
def test_torchrun_variables_are_fine_if_all_or_none_are_set(missing: str) -> None:
    assert doctor_checks.torchrun({}).status == "ok"
    finding = doctor_checks.torchrun({k: v for k, v in TORCHRUN_ENV.items() if k != missing})
    assert finding.status == ("problem" if missing else "ok")
    assert missing in finding.text


@pytest.mark.parametrize(
    ("size", "accelerators", "status"),
    [(64 << 20, 0, "ok"), (64 << 20, 1, "ok"), (64 << 20, 2, "problem"), (None, 0, "warning")],
)
def test_shared_memory_matters_to_several_gpus_only(size, accelerators, status) -> None:
    assert doctor_checks.shared_memory(size, accelerators).status == status


@pytest.mark.parametrize(
    ("available", "slots", "remedy"),
    [(10, 2, ""), (10, 3, "use fewer weight_sync.slots"), (7, 2, "more memory")],
)
def test_memory_counts_every_slot_and_says_whether_fewer_would_fit(
    available, slots, remedy
) -> None:
    found = doctor_checks.memory(available << 30, 4 << 30, slots)
    assert remedy in found.remedy
    assert bool(remedy) == (found.status == "problem")


GIB = 1 << 30


@pytest.mark.parametrize(
    ("nbytes", "startup_s", "status"),
    [(16 * GIB, 600.0, "ok"), (16 * GIB, 500.0, "warning"), (160 * GIB, 600.0, "warning")],
)
def test_the_start_waits_as_long_as_a_first_version_may_take(nbytes, startup_s, status) -> None:
    sync = WeightSync(min_rate=50 << 20, startup_deadline_s=startup_s)
    finding = doctor_checks.first_version(nbytes, sync)
    assert finding is not None
    assert finding.status == status
    if status == "warning":
        # 60 to join, 120 + 16 GiB / 50 MiB/s = 327.68 to transfer, 60 to commit
        assert ("568" in finding.remedy) == (nbytes == 16 * GIB)
    assert doctor_checks.first_version(None, sync) is None


def test_the_deadline_that_is_advised_is_enough() -> None:
    short = doctor_checks.first_version(GIB >> 20, WeightSync(startup_deadline_s=240.0))
    assert short is not None
    assert "to 241 or more" in short.remedy


@pytest.mark.parametrize(
    ("limit", "servers", "requests", "status"),
    [(1024, 2, 256, "ok"), (1024, 4, 256, "warning"), (-1, 256, 256, "ok"), (1024, 40, 1, "ok")],
)
def test_open_files_are_compared_with_servers_and_their_requests(
    limit, servers, requests, status
) -> None:
    assert doctor_checks.descriptors(limit, servers, requests).status == status


def test_locked_memory_matters_to_a_card_that_reads_memory_itself() -> None:
    assert doctor_checks.locked_memory(8 << 20, False).status == "ok"
    assert doctor_checks.locked_memory(-1, True).status == "ok"
    assert doctor_checks.locked_memory(8 << 20, True).status == "warning"


FREE, USED = doctor_checks.Gpu(80 * GIB, 80 * GIB), doctor_checks.Gpu(10 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("found", "launched", "statuses", "words"),
    [
        ([], [], ["ok"], "torch sees none"),
        ([], [0], ["problem"], "torch sees none"),
        ([FREE, FREE], [1], ["ok", "ok"], "80.0 GiB free"),
        ([FREE, FREE], [1, 2], ["problem", "ok", "ok"], "[2], this host has 0 to 1"),
        ([FREE, FREE], [0, 1], ["problem", "ok", "ok"], "torchrun's first rank"),
        ([USED, FREE], [1], ["warning", "ok"], "10.0 GiB of 80.0 GiB free"),
        ([FREE, USED], [1], ["ok", "problem"], "the model has 16.0 GiB"),
    ],
)
def test_gpus_of_ranks_and_of_launched_servers_are_told_apart(
    found, launched, statuses, words
) -> None:
    findings = doctor_checks.gpus(found, launched, 16 * GIB)
    assert [finding.status for finding in findings] == statuses
    assert words in " ".join(finding.text for finding in findings)


def test_two_versions_of_nccl_are_a_problem_that_names_both() -> None:
    assert doctor_checks.nccl("2.28.9", "2.28.9", "p").status == "ok"
    finding = doctor_checks.nccl("2.28.9", "2.27.5", "p")
    assert finding.status == "problem"
    assert "2.28.9 here and 2.27.5 for p" in finding.text


SGLANG = {"engine": "sglang", "version": "0.5.23"}
SERVERS: dict[str, tuple[dict, list[tuple[str, str]], str]] = {
    "good": ({}, [("ok", "server"), ("ok", "server routes"), ("ok", "server plugin")], ""),
    "good sglang": (
        SGLANG,
        [("ok", "server"), ("ok", "server routes"), ("ok", "server plugin")],
        "",
    ),
    "dead": (
        {"healthy": False, "errors": {"health": "http://s:8000: GET /health got no answer"}},
        [("problem", "server")],
        "http://s:8000: GET /health",
    ),
    "closed routes": (
        {"label": None, "backend": None, "joined": None, "errors": {"label": "404"}},
        [("ok", "server"), ("problem", "server routes")],
        "VLLM_SERVER_DEV_MODE=1",
    ),
    "another backend": (
        {"backend": "nccl", "joined": None},
        [("ok", "server"), ("ok", "server routes"), ("problem", "server plugin")],
        "--middleware titan_grpo.receive.vllm_http.WeightsMiddleware",
    ),
    "no call back": (
        {"joined": None, "errors": {"joined": "the deadline passed"}},
        [("ok", "server"), ("ok", "server routes"), ("problem", "server plugin")],
        "bind_host",
    ),
    "half-loaded weights": (
        {"joined": msgspec.structs.replace(JOINED, intact=False)},
        [("ok", "server"), ("ok", "server routes"), ("problem", "server plugin")],
        "half-loaded",
    ),
    "paused": (
        {**SGLANG, "paused": True},
        [("ok", "server"), ("ok", "server routes"), ("warning", "server"), ("ok", "server plugin")],
        "continue_generation",
    ),
    "old": ({"version": "0.31.2", "backend": None}, [("problem", "server")], "vllm>=0.32"),
    "old sglang": ({**SGLANG, "version": "0.5.20"}, [("problem", "server")], "sglang>=0.5.21"),
    "sglang without the plugin": (
        {**SGLANG, "backend": None, "joined": None, "errors": {"backend": "404"}},
        [("ok", "server"), ("ok", "server routes"), ("problem", "server plugin")],
        "--custom-weight-loader",
    ),
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
    name, version, plugin, statuses
) -> None:
    found = doctor_checks.engine("p", {name: version, f"{name}_plugin": plugin}, "", name)
    assert [f.status for f in found] == statuses
    assert "gone" in doctor_checks.engine("p", None, "gone", name)[0].text


def test_every_finding_that_is_not_good_says_what_to_do() -> None:
    found = [
        doctor_checks.python((3, 9, 0)),
        *(doctor_checks.package(name, None, allowed) for name, allowed in RANGES.items()),
        doctor_checks.torchrun({"RANK": "0"}),
        doctor_checks.shared_memory(None, 0),
        doctor_checks.shared_memory(1, 8),
        doctor_checks.memory(1, 1, 2),
        doctor_checks.bind("10.9.9.9", "no such address"),
        doctor_checks.first_version(1 << 40, WeightSync()) or doctor_checks.ok("", ""),
        doctor_checks.descriptors(1, 1, 1),
        doctor_checks.locked_memory(1, True),
        *doctor_checks.gpus([], [1], None),
        *doctor_checks.gpus([USED], [0, 7], 1 << 40),
        doctor_checks.nccl("", "2.28.9", "p"),
        *doctor_checks.engine("p", None, "gone"),
        *doctor_checks.engine("p", {"vllm": "", "vllm_plugin": "no"}, ""),
        *doctor_checks.engine("p", {"sglang": "", "sglang_plugin": "no"}, "", "sglang"),
        *server(facts(engine="sglang", version="0.5.1", paused=True, backend=None, joined=None)),
        *server(facts(errors={"key": "refused with 401"})),
        *server(facts(healthy=False)),
        *server(facts(version="0.1", paused=True, backend="ipc")),
        *server(facts(label=None)),
        *server(facts(joined=None)),
    ]
    assert [f for f in found if f.status != "ok" and not f.remedy] == []
    assert all(f.status == "ok" or "->" in f.line() for f in found)
