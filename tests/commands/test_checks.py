import msgspec
import pytest

from titan_grpo.commands import doctor_checks
from titan_grpo.commands.doctor_checks import RANGES, ServerFacts, server
from titan_grpo.protocol.messages import Joined

TORCHRUN_ENV = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}

JOINED = Joined(1, True, "", "0.1.0", 4242, "0000000003e8-00000000", 7, "f" * 32, True)


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
        ("torchtitan", "0.3.0", "problem"),
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
        wanted = f"{name}>={allowed.low}" + (f",<{allowed.high}" if allowed.high else "")
        assert f'"{wanted}"' in text, f"pyproject.toml does not ask for {wanted}"


def test_an_old_python_is_a_problem() -> None:
    assert doctor_checks.python((3, 10, 12)).status == "problem"
    assert doctor_checks.python((3, 11, 0)).status == "ok"


def test_torchrun_variables_are_fine_if_all_or_none_are_set() -> None:
    assert doctor_checks.torchrun({}).status == "ok"
    assert doctor_checks.torchrun(TORCHRUN_ENV).status == "ok"


@pytest.mark.parametrize("missing", TORCHRUN_ENV)
def test_left_over_torchrun_variables_are_a_problem_that_names_the_missing_one(
    missing: str,
) -> None:
    finding = doctor_checks.torchrun({k: v for k, v in TORCHRUN_ENV.items() if k != missing})
    assert finding.status == "problem"
    assert missing in finding.text


def test_64_mib_of_shared_memory_are_enough_without_several_gpus_and_a_problem_with_them() -> None:
    assert doctor_checks.shared_memory(64 << 20, accelerators=0).status == "ok"
    assert doctor_checks.shared_memory(64 << 20, accelerators=1).status == "ok"
    finding = doctor_checks.shared_memory(64 << 20, accelerators=2)
    assert finding.status == "problem"
    assert "--shm-size" in finding.remedy
    assert doctor_checks.shared_memory(None, accelerators=0).status == "warning"


def test_memory_counts_every_slot_and_says_whether_fewer_would_fit() -> None:
    gib = 1 << 30
    assert doctor_checks.memory(10 * gib, 4 * gib, slots=2).status == "ok"
    assert "fewer weight_sync.slots" in doctor_checks.memory(10 * gib, 4 * gib, slots=3).remedy
    assert "more memory" in doctor_checks.memory(7 * gib, 4 * gib, slots=2).remedy


def statuses(*args, **kwargs) -> list[tuple[str, str]]:
    return [(f.status, f.subject) for f in server(facts(*args, **kwargs))]


def test_a_good_server_has_no_findings_but_good_ones() -> None:
    assert statuses() == [("ok", "server"), ("ok", "server routes"), ("ok", "server plugin")]


def test_a_dead_server_is_named_with_its_url_and_what_was_tried() -> None:
    (finding,) = server(
        facts(
            healthy=False, errors={"health": "http://s:8000: GET /health got no answer within 5 s"}
        )
    )
    assert finding.status == "problem"
    assert "http://s:8000: GET /health" in finding.text


def test_closed_rl_routes_name_the_variable_that_opens_them() -> None:
    found = server(facts(label=None, backend=None, joined=None, errors={"label": "404"}))
    assert [f.status for f in found] == ["ok", "problem"]
    assert "VLLM_SERVER_DEV_MODE=1" in found[1].remedy


def test_another_backend_and_a_receiver_that_does_not_call_back_are_told_apart() -> None:
    other = server(facts(backend="nccl", joined=None))[-1]
    silent = server(facts(joined=None, errors={"joined": "the deadline passed"}))[-1]
    assert (other.status, silent.status) == ("problem", "problem")
    assert "--weight-transfer-config" in other.remedy
    assert "bind_host" in silent.remedy


def test_half_loaded_weights_are_a_problem() -> None:
    finding = server(facts(joined=msgspec.structs.replace(JOINED, intact=False)))[-1]
    assert finding.status == "problem"
    assert "half-loaded" in finding.text


def test_a_paused_server_and_an_old_one_are_found() -> None:
    assert ("warning", "server") in statuses(paused=True)
    assert ("problem", "server") in statuses(version="0.31.2")


def test_an_engine_environment_without_vllm_or_without_the_receiver_is_a_problem() -> None:
    assert [
        f.status for f in doctor_checks.engine("p", {"vllm": "0.32.0", "vllm_plugin": "yes"}, "")
    ] == ["ok", "ok"]
    assert [f.status for f in doctor_checks.engine("p", {"vllm": "", "vllm_plugin": "no"}, "")] == [
        "problem",
        "problem",
    ]
    assert [
        f.status for f in doctor_checks.engine("p", {"vllm": "0.30", "vllm_plugin": "yes"}, "")
    ] == ["problem", "ok"]
    assert "gone" in doctor_checks.engine("p", None, "gone")[0].text


def test_an_sglang_is_judged_by_its_own_measures() -> None:
    assert [f.status for f in server(facts(engine="sglang", version="0.5.23"))] == [
        "ok",
        "ok",
        "ok",
    ]
    assert ("problem", "server") in statuses(engine="sglang", version="0.5.20")
    assert (
        "continue_generation"
        in server(facts(engine="sglang", version="0.5.23", paused=True))[2].remedy
    )
    bare = server(
        facts(
            engine="sglang", version="0.5.23", backend=None, joined=None, errors={"backend": "404"}
        )
    )[-1]
    assert bare.status == "problem"
    assert "--custom-weight-loader" in bare.remedy
    assert [
        f.status
        for f in doctor_checks.engine(
            "p", {"sglang": "0.5.23", "sglang_plugin": "yes"}, "", "sglang"
        )
    ] == ["ok", "ok"]
    assert [
        f.status
        for f in doctor_checks.engine("p", {"sglang": "0.5.9", "sglang_plugin": "no"}, "", "sglang")
    ] == ["problem"] * 2


def test_a_refused_key_is_not_taken_for_anything_else() -> None:
    (finding,) = server(facts(errors={"key": "refused with 401"}))
    assert "rollout.api_key_env" in finding.remedy


def test_every_finding_that_is_not_good_says_what_to_do() -> None:
    found = [
        doctor_checks.python((3, 9, 0)),
        *(doctor_checks.package(name, None, allowed) for name, allowed in RANGES.items()),
        doctor_checks.torchrun({"RANK": "0"}),
        doctor_checks.shared_memory(None, 0),
        doctor_checks.shared_memory(1, 8),
        doctor_checks.memory(1, 1, 2),
        doctor_checks.bind("10.9.9.9", "no such address"),
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
