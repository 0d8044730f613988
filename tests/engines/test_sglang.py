"""SGLang's interface as data: what is asked, what is read (from answers of a real 0.5.23), what is
refused and not shown."""

import base64
import math
from array import array
from typing import Any

import pytest

from titan_grpo.engines import sglang, sglang_stock
from titan_grpo.engines.generation import Sampled, Sampling, salt
from titan_grpo.engines.http import Call
from titan_grpo.errors import ServerRefused, ServerUnfit

ANSWER: dict[str, Any] = {
    "text": "<rkI",
    "output_ids": [33, 87, 80],
    "meta_info": {
        "id": "a1c75358cfa6400c935475160273bb3f",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 32,
        "weight_version": "r:8:f",
        "input_token_logprobs": [],
        "output_token_logprobs": [[-5.25, 33, None], [-4.5, 87, None], [-4.75, 80, None]],
        "weight_versions": [
            {"version": "r:7:f", "start": 0, "end": 2},
            {"version": "r:8:f", "start": 2, "end": 3},
        ],
    },
}


def changed(**meta: object) -> dict[str, Any]:
    return ANSWER | {"meta_info": ANSWER["meta_info"] | meta}


def test_a_generation_request_leaves_no_sampling_default_to_the_server() -> None:
    body = sglang.generate([1, 2], Sampling(4, 0.7, 9, "run/@3"), 1.0).json
    parameters = body["sampling_params"]
    plain = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0, "ignore_eos": False}
    plain |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    assert {k: parameters[k] for k in plain} == plain
    own = {"max_new_tokens": 4, "temperature": 0.7, "sampling_seed": 9}
    assert {k: parameters[k] for k in own} == own
    assert (body["input_ids"], body["return_logprob"]) == ([1, 2], True)
    assert body["extra_key"] == salt("run/@3")


def test_an_answer_gives_tokens_log_probabilities_and_which_version_made_which_token() -> None:
    spans = (("r:7:f", 0, 2), ("r:8:f", 2, 3))
    assert sglang.parse_sampled(ANSWER) == Sampled(
        (33, 87, 80), (-5.25, -4.5, -4.75), "length", spans
    )


def test_experts_are_asked_for_and_read_token_by_token() -> None:
    text = base64.b64encode(array("i", range(12)).tobytes()).decode()
    sampled = sglang.parse_sampled(changed(routed_experts=text))
    assert array("H", sampled.routes).tolist() == list(range(12))
    with pytest.raises(ServerRefused, match="routed_experts"):
        sglang.parse_sampled(changed(routed_experts="AAA"))
    asked = sglang.generate([1], Sampling(1, routes=True), 1.0).json
    assert asked["return_routed_experts"] is True
    plain = sglang.generate([1], Sampling(1), 1.0).json
    assert not {"return_routed_experts", "extra_key"} & plain.keys()


def test_an_answer_without_spans_or_values_is_told_apart_from_a_whole_one() -> None:
    meta = {k: v for k, v in ANSWER["meta_info"].items() if k != "weight_versions"}
    assert sglang.parse_sampled(ANSWER | {"meta_info": meta}).versions == ()
    first, second = sglang.parse_sampled(
        changed(output_token_logprobs=[[None, 1, None], [-3.4e38, 2, None]])
    ).logprobs
    assert math.isnan(first)
    assert second == -math.inf
    assert (
        sglang.parse_sampled(
            changed(finish_reason={"type": "abort", "message": "Aborted"})
        ).finish_reason
        == "abort"
    )


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        [ANSWER],
        ANSWER | {"output_ids": None},
        ANSWER | {"output_ids": ["7"]},
        changed(finish_reason=None),
        changed(weight_versions=[{"version": "x"}]),
    ],
)
def test_an_answer_of_another_form_is_refused(
    answer: object,
) -> None:
    with pytest.raises(ServerRefused, match="/generate must"):
        sglang.parse_sampled(answer)


def test_scores_are_of_all_tokens_but_the_first() -> None:
    call = sglang.score([5, 6, 7], 1.0, "x")
    entries = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    assert call.parse(changed(input_token_logprobs=entries)) == (-1.0, -2.0)
    assert call.json["logprob_start_len"] == 0
    assert call.json["extra_key"] == salt("x")
    with pytest.raises(ServerRefused, match="3 log-probabilities"):
        call.parse(changed(input_token_logprobs=entries[:2]))


def test_what_asks_the_server_goes_without_the_admin_key() -> None:
    asking: list[Call[Any]] = [
        sglang.generate([1], Sampling(1), 1.0),
        sglang.score([1, 2], 1.0),
        sglang.label(),
        sglang.alive(),
        sglang_stock.world_size(1.0),
    ]
    assert not any(call.admin for call in asking)


ALONE = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1}
ALONE |= {"tokenizer_worker_num": 1, "offload_group_size": -1}


@pytest.mark.parametrize("key", [key for key in ALONE if key != "tp_size"])
def test_a_server_that_a_version_would_not_reach_whole_is_unfit_without_our_plugin(
    key: str,
) -> None:
    with pytest.raises(ServerUnfit, match=f"must have {key} [01] at most, this one has 2"):
        sglang_stock.world_size(1.0).parse({**ALONE, key: 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dcp_replicate_q_proj": True}, "--no-dcp-replicate-q-proj"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"enable_lmcache": True, "enable_return_routed_experts": True}, "without --enable-hier"),
        ({"enable_watermark": True}, "--enable-watermark"),
        ({"speculative_algorithm": "EAGLE"}, "draft model"),
        (
            {"json_model_override_args": '{"rms_norm_eps": 1e-3}'},
            "--json-model-override-args makes",
        ),
        ({"preferred_sampling_params": '{"top_k": 5, "bad_words": ["x"]}'}, "of bad_words would"),
    ],
)
def test_a_server_whose_options_spoil_versions_or_samples_is_unfit_without_our_plugin_too(
    options: dict[str, Any], words: str
) -> None:
    call = sglang_stock.world_size(1.0)
    assert call.parse({**ALONE, **dict.fromkeys(options), "preferred_sampling_params": None}) == 1
    with pytest.raises(ServerUnfit, match=words):
        call.parse({**ALONE, **options})


def test_the_answer_with_the_keys_in_it_is_never_shown() -> None:
    call = sglang_stock.world_size(1.0)
    assert call.parse({**ALONE, "tp_size": 2, "api_key": "secret"}) == 2
    for answer in ({"api_key": "secret", "tp_size": "secret"}, ["secret"], "secret"):
        with pytest.raises(ServerRefused) as refusal:
            call.parse(answer)
        assert "secret" not in str(refusal.value)


def test_the_plugins_state_says_whether_it_is_paused() -> None:
    read = sglang.paused().parse
    assert read({"paused": True}) is True
    with pytest.raises(ServerRefused, match="paused"):
        read({"package": "titan_grpo"})


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_calls_of_tools_are_read_in_the_text_by_the_parser_that_the_server_started_with() -> None:
    name = sglang.tool_parser(1.0).parse({"tool_call_parser": "qwen3_coder", "api_key": "secret"})
    call = sglang.parse_tool_calls(name, (7, 8), "ab", TOOLS, 1.0)
    assert (call.method, call.path) == ("POST", "/parse_function_call")
    assert call.json == {"text": "ab", "tools": TOOLS, "tool_call_parser": "qwen3_coder"}


@pytest.mark.parametrize("answer", [{"tool_call_parser": None, "api_key": "secret"}, None])
def test_a_server_without_a_parser_is_unfit_and_none_of_its_keys_is_shown(
    answer: object,
) -> None:
    with pytest.raises(ServerUnfit, match="start the server with --tool-call-parser") as refusal:
        sglang.tool_parser(1.0).parse(answer)
    assert "secret" not in str(refusal.value)


def test_what_sglang_read_is_a_text_and_its_calls() -> None:
    read = sglang.parse_tool_calls("hermes", [7], "a", TOOLS, 1.0).parse
    call = {"tool_index": 0, "name": "add", "parameters": '{"a": 1}'}
    assert read({"normal_text": "So.", "calls": [call]}) == ("So.", [("add", {"a": 1})])
    assert read({"normal_text": "plain", "calls": []}) == ("plain", [])
    broken = {"tool_index": 0, "name": "add", "parameters": '{"a"'}
    assert read({"normal_text": "So.", "calls": [call, broken]}) == ("So.", [])
    with pytest.raises(ServerRefused, match="parse_function_call must answer with 'calls'"):
        read({"normal_text": "plain"})
