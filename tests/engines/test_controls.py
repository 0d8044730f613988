"""Control planes over real HTTP: which engine is met, what a commit asks for, when a server counts
as paused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rigs.board import Board, Reply
from titan_grpo.engines.http import HttpRefused, ServerAccess, SyncDriver
from titan_grpo.engines.server import detect, make_control
from titan_grpo.engines.sglang import SglangControl
from titan_grpo.engines.sglang_stock import StockRoutes
from titan_grpo.engines.vllm import VllmControl
from titan_grpo.errors import ConfigError, ServerRefused, ServerUnfit, ServerUnreachable

CALL_S = 60.0

Routes = dict[str, int | Reply]

SGLANG: Routes = {
    "GET /model_info": lambda _: (200, {"weight_version": "default", "model_path": "m"})
}
VLLM: Routes = {
    "GET /weight_info": lambda _: (200, {"weight_version": "7"}),
    "POST /init_weight_transfer_engine": 200,
}


PATHS = ("/model_info", "/weight_info")


def backend(name: str | None) -> Routes:
    """The transfer backend that a vLLM was started with."""
    config = {"weight_transfer_config": None if name is None else {"backend": name}}
    return {"GET /server_info": lambda _: (200, {"vllm_config": config})}


def plugin(paused: bool) -> Routes:
    return {"GET /titan_grpo/state": lambda _: (200, {"paused": paused})}


TOKEN = {
    "output_ids": [1],
    "meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 1, None]]},
}

STOCK_END: Routes = {"POST /end_weight_update": 200, "POST /update_weight_version": 200}


@pytest.fixture
def sglang(board: Board) -> Iterator[SglangControl]:
    control = SglangControl(ServerAccess(board.url, CALL_S, None, "api", "admin"))
    yield control
    control.close()


@pytest.fixture
def vllm(board: Board) -> Iterator[VllmControl]:
    control = VllmControl(ServerAccess(board.url, CALL_S, None, "api"))
    yield control
    control.close()


def ask(board: Board) -> str:
    with SyncDriver(board.url) as driver:
        return detect(driver, CALL_S)


def test_each_engine_is_recognised_by_what_only_it_answers(board: Board) -> None:
    board.routes = SGLANG
    assert ask(board) == "sglang"
    board.routes = VLLM
    assert ask(board) == "vllm"


@pytest.mark.parametrize(
    "routes", [{}, {"GET /model_info": 200}, {"GET /weight_info": lambda _: (200, ["7"])}]
)
def test_a_stranger_is_refused_with_what_both_engines_would_need(
    board: Board, routes: Routes
) -> None:
    board.routes = routes
    with pytest.raises(
        ServerRefused, match=r"VLLM_SERVER_DEV_MODE=1.*SGLang >= 0\.5\.21"
    ) as refusal:
        ask(board)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("status", [401, 500, 503])
def test_a_refused_key_or_a_server_in_trouble_is_not_taken_for_a_stranger(
    board: Board, status: int
) -> None:
    board.routes = {"GET /model_info": status}
    with pytest.raises(HttpRefused) as refusal:
        ask(board)
    assert refusal.value.status == status


def test_a_page_of_a_proxy_is_a_server_in_trouble_and_no_stranger(board: Board) -> None:
    """A run would end of it: its proxy answers every call with the page, until the server is up."""
    board.routes = {f"GET {path}": lambda _: (200, b"<html>") for path in PATHS}
    with pytest.raises(HttpRefused, match="answered with 200 and no JSON: by a proxy") as refusal:
        ask(board)
    assert (type(refusal.value), refusal.value.status) == (HttpRefused, 502)


def test_a_server_that_came_back_as_another_engine_is_met_as_that_one(board: Board) -> None:
    control = make_control("auto", ServerAccess(board.url, CALL_S))
    assert control.engine == ""
    board.routes = SGLANG | {"POST /titan_grpo/hello": 200}
    control.greet({})
    assert (control.engine, control.label()) == ("sglang", "default")
    board.routes = dict(VLLM)
    control.greet({})
    assert (control.engine, control.label()) == ("vllm", "7")
    control.close()


def test_a_named_engine_is_not_asked_for(board: Board) -> None:
    for engine, kind in (("vllm", VllmControl), ("sglang", SglangControl)):
        control = make_control(engine, ServerAccess(board.url, CALL_S))
        assert isinstance(control, kind)
        assert control.engine == engine
        control.close()
    assert board.asked == []
    with pytest.raises(ConfigError, match="auto"):
        make_control("trt", ServerAccess(board.url, CALL_S))


def test_a_commit_goes_with_the_admin_key_and_aborts_nothing(
    board: Board, sglang: SglangControl
) -> None:
    sent: list[Any] = []

    def keep(body: Any) -> tuple[int, Any]:
        sent.append(body)
        return 200, {"paused": False}

    paths = ("/pause_generation", "/titan_grpo/load", "/titan_grpo/finish", "/continue_generation")
    others = ("POST /titan_grpo/hello", "POST /update_weight_version", "GET /titan_grpo/state")
    board.routes = dict.fromkeys([*(f"POST {path}" for path in paths), *others], keep)
    sglang.pause()
    sglang.load({"number": 1})
    sglang.finish("r:1:f")
    sglang.resume()
    assert board.paths == [f"POST {path}" for path in paths], "one call to load, one for the label"
    assert sent[:3] == [{"mode": "in_place"}, {"number": 1}, {"label": "r:1:f"}]
    sglang.greet({})
    sglang.relabel("r:2:f")
    assert sent[-1] == {"new_version": "r:2:f", "abort_all_requests": False}
    sglang.paused()
    assert {key for _, key in board.asked} == {"admin"}


def test_a_stock_servers_update_goes_with_the_admin_key(board: Board) -> None:
    board.routes = {"POST /begin_weight_update": 200}
    routes = StockRoutes(ServerAccess(board.url, CALL_S, None, "api", "admin"))
    routes.begin(CALL_S)
    routes.close()
    assert [key for _, key in board.asked] == ["admin"]


@pytest.mark.parametrize(
    ("engine", "route"),
    [(SglangControl, "POST /titan_grpo/load"), (VllmControl, "POST /update_weights")],
)
def test_a_load_has_a_deadline_of_its_own(
    board: Board, engine: type[SglangControl | VllmControl], route: str
) -> None:
    """It may wait for a whole transfer."""
    board.routes, board.silent = {"POST /start_weight_update": 200}, {route}
    control = engine(ServerAccess(board.url, CALL_S, load_deadline_s=0.1))
    with pytest.raises(ServerUnreachable, match=r"0\.1 s"):
        control.load({})
    control.close()


@pytest.mark.parametrize("absent", [401, 404])
def test_without_the_plugin_sglangs_own_calls_end_an_update_and_set_the_label(
    board: Board, sglang: SglangControl, absent: int
) -> None:
    board.routes = STOCK_END | {"POST /titan_grpo/finish": absent}
    sglang.finish("r:1:f")
    assert board.paths == ["POST /titan_grpo/finish", *STOCK_END]


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ({"POST /init_weight_transfer_engine": 404}, "VLLM_SERVER_DEV_MODE=1"),
        ({"POST /init_weight_transfer_engine": 401}, r"refused with 401.*set rollout\.api_key_env"),
        ({"POST /init_weight_transfer_engine": 500, **backend(None)}, "--weight-transfer-config"),
        ({"POST /init_weight_transfer_engine": 500, **backend("nccl")}, "its backend is nccl"),
    ],
)
def test_a_vllm_that_can_never_take_our_weights_is_unfit_with_the_remedy(
    board: Board, vllm: VllmControl, routes: Routes, words: str
) -> None:
    board.routes = routes
    with pytest.raises(ServerUnfit, match=words):
        vllm.greet({})


def test_a_vllm_that_would_refuse_every_rollout_is_unfit_before_it_is_taken(
    board: Board, vllm: VllmControl
) -> None:
    """vLLM's control routes ask for no key."""
    board.routes = {"GET /v1/models": 401, "POST /init_weight_transfer_engine": 200}
    with pytest.raises(ServerUnfit, match=r"set rollout\.api_key_env"):
        vllm.greet({})
    assert board.paths == ["GET /v1/models"]


def test_a_vllm_whose_plugin_failed_is_asked_again(board: Board, vllm: VllmControl) -> None:
    board.routes = {"POST /init_weight_transfer_engine": 500, **backend("titan_grpo")}
    with pytest.raises(HttpRefused) as refusal:
        vllm.greet({})
    assert not isinstance(refusal.value, ServerUnfit)


def test_dropping_kv_is_believed_only_where_the_engine_says_that_it_did(
    board: Board, sglang: SglangControl
) -> None:
    board.routes = {"POST /pause_generation": 200, "POST /flush_cache": 200}
    sglang.drop_kv()
    assert board.paths == ["POST /pause_generation", "POST /flush_cache"]
    board.routes["POST /flush_cache"] = 400
    with pytest.raises(ServerRefused, match=r"did not throw its KV cache away.*kv_after_update"):
        sglang.drop_kv()


@pytest.mark.parametrize("answer", [{"success": False}, {}])
def test_a_vllm_drops_kv_behind_its_own_cache_too_and_is_refused_if_it_does_not_say_so(
    board: Board, vllm: VllmControl, answer: dict[str, bool]
) -> None:
    """Requests that were put back would get the KV of the old weights from there."""
    board.routes = {"POST /reset_prefix_cache": lambda _: (200, {"success": True})}
    vllm.drop_kv()
    assert board.queries == ["reset_running_requests=true&reset_external=true"]
    board.routes = {"POST /reset_prefix_cache": lambda _: (200, answer)}
    with pytest.raises(ServerRefused, match=r"reset_prefix_cache|did not throw"):
        vllm.drop_kv()


def test_a_restarted_server_does_not_take_the_label(board: Board, sglang: SglangControl) -> None:
    board.routes = STOCK_END | {"POST /end_weight_update": 400}
    with pytest.raises(ServerRefused, match="end_weight_update"):
        sglang.finish("r:1:f")
    assert "POST /update_weight_version" not in board.paths


@pytest.mark.parametrize("absent", [401, 404])
def test_a_server_without_the_plugin_says_what_to_install(
    board: Board, sglang: SglangControl, absent: int
) -> None:
    board.routes = dict.fromkeys(("POST /titan_grpo/hello", "POST /titan_grpo/load"), absent)
    calls: tuple[Callable[[], object], ...] = (lambda: sglang.greet({}), lambda: sglang.load({}))
    for act in calls:
        with pytest.raises(
            ServerRefused,
            match=r"--custom-weight-loader titan_grpo\.receive\.sglang_plugin\.commit"
            r".*--tokenizer-worker-num 1",
        ):
            act()


@pytest.mark.parametrize(
    ("routes", "paused"),
    [
        (plugin(True), True),
        (plugin(False), False),
        ({"GET /ready": 200}, False),
        ({"GET /ready": 503, "POST /generate": lambda _: (200, TOKEN)}, False),
    ],
    ids=["paused by its plugin", "not, by its plugin", "ready", "thought ill, and generates"],
)
def test_the_plugin_says_whether_an_sglang_is_paused_and_without_it_a_sign_of_life(
    board: Board, sglang: SglangControl, routes: Routes, paused: bool
) -> None:
    board.routes = routes
    assert sglang.paused() is paused


def test_without_the_plugin_a_server_that_gives_no_token_and_answers_is_paused(
    board: Board,
) -> None:
    control = SglangControl(ServerAccess(board.url, 2.0))
    board.routes = SGLANG | {"GET /ready": 503}
    board.silent = {"POST /generate"}
    assert control.paused() is True
    board.silent = {"POST /generate", "GET /model_info"}
    with pytest.raises(ServerUnreachable):
        control.paused()
    control.close()


RENDER = "POST /v1/chat/completions/render"
NO_PARSER = {"error": {"message": '"auto" tool choice requires --tool-call-parser to be set'}}


@pytest.mark.parametrize(
    "answer", [(403, {"error": {"message": "disabled"}}), (404, {}), (400, NO_PARSER)]
)
def test_a_vllm_that_cannot_read_calls_of_tools_is_unfit_with_the_options_to_add(
    board: Board, vllm: VllmControl, answer: tuple[int, dict[str, dict[str, str]]]
) -> None:
    board.routes = {RENDER: lambda _: answer}
    with pytest.raises(
        ServerUnfit,
        match="--enable-scale-out --enable-auto-tool-choice --tool-call-parser NAME",
    ) as refusal:
        vllm.check_tool_parser()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("answer", [(200, {}), (400, {"error": {"message": "no chat template"}})])
def test_a_vllm_with_a_parser_is_fit_whatever_its_chat_template_says(
    board: Board, vllm: VllmControl, answer: tuple[int, dict[str, dict[str, str]]]
) -> None:
    board.routes = {RENDER: lambda _: answer}
    vllm.check_tool_parser()


def test_an_sglang_reads_calls_of_tools_where_it_names_its_parser(
    board: Board, sglang: SglangControl
) -> None:
    board.routes = {"GET /server_info": lambda _: (200, {"tool_call_parser": "hermes"})}
    sglang.check_tool_parser()
    board.routes = {"GET /server_info": lambda _: (200, {"tool_call_parser": None})}
    with pytest.raises(ServerUnfit, match=f"{board.url}.*--tool-call-parser NAME"):
        sglang.check_tool_parser()
