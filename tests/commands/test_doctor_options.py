"""The doctor compares what a server was started with with what the job needs of it."""

import pytest

from titan_grpo.commands.doctor_options import Options, compare, of_server

URL = "http://a:1"


def judged(engine: str, wanted: Options, found: Options) -> list[tuple[str, str]]:
    return [(f.status, f.line()) for f in compare(URL, engine, wanted, found)]


@pytest.mark.parametrize(
    ("wanted", "found", "text"),
    [
        (Options(8), Options(), "start it with --enable-lora --max-lora-rank 8"),
        (Options(12), Options(8), "rank 8 at most, lora.rank is 12"),
        (Options(), Options(8), "the job sends whole weights"),
        (Options(routes=True), Options(), "start it with --enable-return-routed-experts"),
    ],
)
def test_an_option_that_the_job_needs_and_the_server_lacks_is_a_problem(wanted, found, text):
    [(status, line)] = judged("vllm", wanted, found)
    assert status == "problem"
    assert text in line


def test_adapters_are_refused_for_an_sglang():
    [(status, line)] = judged("sglang", Options(8), Options())
    assert status == "problem"
    assert "takes no adapters" in line


def test_a_server_with_what_the_job_needs_is_ok_and_nothing_needed_is_not_looked_at():
    assert [s for s, _ in judged("vllm", Options(8, True), Options(16, True))] == ["ok", "ok"]
    assert judged("vllm", Options(), Options(0, True)) == []


def test_both_engines_answers_are_read():
    config = {
        "lora_config": {"max_lora_rank": 16},
        "aux_output_config": {"enable_return_routed_experts": True},
    }
    assert of_server("vllm", {"vllm_config": config}) == Options(16, True)
    assert of_server("vllm", {"vllm_config": {"lora_config": None}}) == Options()
    assert of_server("sglang", {"enable_return_routed_experts": True}) == Options(0, True)
    assert of_server("sglang", None) == Options()
