"""Versions that are adapters: which servers are refused, and which adapter a request gets while the
middleware has vLLM load and unload them."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.receive.test_vllm_http import Inner, ask, asked
from tests.rigs.present import present
from titan_grpo.engines import vllm
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.peft import has_adapters, tensor_name
from titan_grpo.receive import vllm_http

LAYER = "model.layers.0.self_attn.q_proj"
BASE = {f"{LAYER}.weight": (6, 4), "model.norm.weight": (4,)}
FIRST, SECOND = "run:1:aa", "run:2:bb"


def manifest(rows: int = 6, layer: str = LAYER) -> Manifest:
    shapes = {"A": (3, 4), "B": (rows, 3)}
    return Manifest.build(
        [(tensor_name(layer, end), "bfloat16", shape) for end, shape in shapes.items()], 4096
    )


def limited(*layers: str) -> SimpleNamespace:
    """Of a server with --lora-target-modules."""
    return SimpleNamespace(max_lora_rank=8, target_modules=list(layers))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a server whose middleware takes adapters from it."""
    monkeypatch.setenv(vllm_http.VARIABLE, str(tmp_path / "adapters"))
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    Inner({})
    return tmp_path / "adapters"


def write(value: float = 1.0) -> None:
    sizes = {"A": (3, 4), "B": (6, 3)}
    image = torch.full((30,), value)
    parts = dict(zip(sizes, image.split([12, 18]), strict=True))
    vllm_http.write_staged((tensor_name(LAYER, k), parts[k].view(v)) for k, v in sizes.items())


def finish(inner: Inner, label: str | None) -> tuple[int, Any]:
    return ask(inner, "POST", "/finish_weight_update", {"weight_version": label})


def model_of(inner: Inner) -> str:
    """The model that vLLM is asked for."""
    ask(inner, "POST", "/v1/completions", {"prompt": [5], "model": "base"})
    body = next(body for path, body in reversed(inner.came) if path == "/v1/completions")
    return str(body["model"])


def test_a_manifest_says_whether_it_is_of_adapters() -> None:
    assert has_adapters(manifest())
    assert not has_adapters(Manifest.build([("model.norm.weight", "bfloat16", (4,))], 4096))


@pytest.mark.parametrize(
    ("sent", "lora", "routes", "message"),
    [
        (manifest(), SimpleNamespace(max_lora_rank=8), "1", ""),
        (manifest(), None, "1", "start it with --enable-lora --max-lora-rank 8"),
        (manifest(), SimpleNamespace(max_lora_rank=1), "1", "start it with --max-lora-rank 8"),
        (manifest(), limited("q_proj", "o_proj"), "1", ""),
        (manifest(), limited("o_proj"), "1", "pass over the adapters of q_proj in silence"),
        (manifest(), SimpleNamespace(max_lora_rank=8), "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (manifest(rows=5), SimpleNamespace(max_lora_rank=8), "1", "serve the base model"),
        (manifest(layer="other.q_proj"), SimpleNamespace(max_lora_rank=8), "1", "other.q_proj"),
    ],
    ids=[
        "fits",
        "no lora",
        "low rank",
        "its layers",
        "other layers",
        "no routes",
        "other shape",
        "other name",
    ],
)
def test_a_server_that_cannot_take_the_adapters_says_what_to_start(
    sent: Manifest,
    lora: SimpleNamespace | None,
    routes: str,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", routes)
    problem = vllm_http.adapter_problem(sent, lora, BASE)
    assert message in problem
    assert bool(problem) == bool(message)


def test_a_server_whose_middleware_would_not_load_the_adapters_refuses_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would show the version's label and sample from the base."""
    monkeypatch.setenv(vllm_http.VARIABLE, f"{folder} of a server without it")
    problem = vllm_http.adapter_problem(manifest(), SimpleNamespace(max_lora_rank=8), BASE)
    assert f"start it with --middleware {vllm.MIDDLEWARE}" in problem


def test_a_committed_adapter_is_written_as_peft_does(folder: Path) -> None:
    write(2.0)
    written = load_file(folder / vllm_http.STAGED / "adapter_model.safetensors")
    assert {name: tuple(t.shape) for name, t in written.items()} == {
        f"base_model.model.{LAYER}.lora_A.weight": (3, 4),
        f"base_model.model.{LAYER}.lora_B.weight": (6, 3),
    }
    settings = json.loads((folder / vllm_http.STAGED / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (3, 3, ["q_proj"])


SERVER = """
import sys
from pathlib import Path
from titan_grpo.receive import vllm_http
from tests.receive.test_vllm_lora import write
vllm_http.MEMORY = Path(sys.argv[1])
vllm_http.choose_folder()
vllm_http.WeightsMiddleware(None)
write()
print(vllm_http.adapter_folder(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path, root: Path) -> Iterator[Callable[[], tuple[Path, Popen[str]]]]:
    """Start a process that has written an adapter; return its folder and itself."""
    started: list[Popen[str]] = []

    def start() -> tuple[Path, Popen[str]]:
        command = [sys.executable, "-c", SERVER, str(tmp_path)]
        env = {k: v for k, v in os.environ.items() if k != vllm_http.VARIABLE}
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        started.append(Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=root, env=env))
        return Path(present(started[-1].stdout).readline().strip()), started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_files_of_a_killed_server_are_removed_when_the_next_one_starts_and_no_others(
    server: Callable[[], tuple[Path, Popen[str]]],
) -> None:
    (dead, process), (living, _) = server(), server()
    process.kill()
    process.wait(60)
    assert dead.is_dir()
    server()
    assert not dead.exists()
    assert (living / vllm_http.STAGED / vllm_http.WEIGHTS).is_file()


def test_a_request_gets_the_adapter_of_the_newest_label_and_older_ones_are_unloaded(
    folder: Path,
) -> None:
    inner = Inner({})
    assert model_of(inner) == "base"
    for label in (FIRST, SECOND):
        write()
        assert finish(inner, label)[0] == 200
        assert model_of(inner) == label
    loads = [(path, body) for path, body in inner.came if "lora" in path]
    assert [(path, body["lora_name"]) for path, body in loads] == [
        ("/v1/load_lora_adapter", FIRST),
        ("/v1/load_lora_adapter", SECOND),
        ("/v1/unload_lora_adapter", FIRST),
    ]
    assert [str(path) for path in folder.iterdir()] == [loads[1][1]["lora_path"]]


class RefusingOnce(Inner):
    """Refuses the first unload: it comes with the headers of any client, one without the key
    too."""

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        unloads = [path for path, _ in self.came if "unload" in path]
        self.status = 401 if "unload" in scope["path"] and not unloads else 200
        await super().__call__(scope, receive, send)


def test_an_adapter_whose_unload_is_refused_is_unloaded_with_the_next_request(
    folder: Path,
) -> None:
    inner = RefusingOnce({})
    for label in (FIRST, SECOND):
        write()
        assert finish(inner, label)[0] == 200
    assert len(list(folder.iterdir())) == 2, "vLLM still has it"
    model_of(inner)
    unloads = [body for path, body in inner.came if "unload" in path]
    assert unloads == [{"lora_name": FIRST}] * 2
    assert len(list(folder.iterdir())) == 1


def test_a_server_whose_trainer_died_before_the_label_gets_adapter_and_label_together(
    folder: Path,
) -> None:
    """The pause guard, or the next lane, sets the label of what was loaded, outside of an
    update."""
    inner = Inner({})
    write(1.0)
    finish(inner, FIRST)
    write(2.0)
    inner.came.clear()
    assert ask(inner, "POST", "/update_weight_version", {"new_version": SECOND})[0] == 200
    assert [path for path, _ in inner.came] == [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/update_weight_version",
    ]
    assert model_of(inner) == SECOND


def test_an_adapter_stays_until_its_last_request_is_answered() -> None:
    adapters, loaded = vllm_http.Adapters(), (FIRST, SECOND)
    adapters.current = FIRST
    assert (adapters.began(), adapters.began()) == (FIRST, FIRST)
    adapters.current = SECOND
    adapters.ended(FIRST)
    assert adapters.unused(loaded) == []
    adapters.ended(FIRST)
    assert adapters.unused(loaded) == [FIRST]
    assert adapters.began() == SECOND


def test_the_same_label_again_is_not_loaded_twice(folder: Path) -> None:
    inner = Inner({})
    for _ in range(2):
        write()
        assert finish(inner, FIRST)[0] == 200
    assert sum("load_lora" in path for path, _ in inner.came) == 1
    assert model_of(inner) == FIRST
    assert not (folder / vllm_http.STAGED).exists()


def test_a_load_that_vllm_refuses_keeps_the_label_from_being_set_until_it_takes_it(
    folder: Path,
) -> None:
    inner = Inner({"error": "rank too high"}, 400)
    write()
    status, answer = finish(inner, FIRST)
    assert status == 500
    assert "rank too high" in answer["error"]
    assert ask(inner, "POST", "/update_weight_version", {"new_version": FIRST})[0] == 500
    assert {path for path, _ in inner.came} == {"/v1/load_lora_adapter"}, "no label is set"
    inner.status = 200
    assert ask(inner, "POST", "/update_weight_version", {"new_version": FIRST})[0] == 200
    assert model_of(inner) == FIRST


class Slow(Inner):
    """Refuses the first load, after some turns of the loop."""

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        first = not self.came and "load_lora" in scope["path"]
        await super().__call__(scope, receive, self._late(send) if first else send)

    def _late(self, send: Any) -> Any:
        async def answered(message: Mapping[str, Any]) -> None:
            for _ in range(100):
                await asyncio.sleep(0)
            await send({**message, "status": 400} if "status" in message else message)

        return answered


def test_a_label_whose_load_is_still_going_on_waits_for_it_and_loads_again_if_it_fails(
    folder: Path,
) -> None:
    """The lane's own call timed out, and it sets the label by the other route."""
    inner = Slow({})
    write()

    async def both() -> tuple[tuple[int, Any], tuple[int, Any]]:
        return await asyncio.gather(
            asked(inner, "POST", "/finish_weight_update", {"weight_version": FIRST}),
            asked(inner, "POST", "/update_weight_version", {"new_version": FIRST}),
        )

    assert [status for status, _ in asyncio.run(both())] == [500, 200]
    load = "/v1/load_lora_adapter"
    assert [path for path, _ in inner.came] == [load, load, "/update_weight_version"]
    assert model_of(inner) == FIRST


@pytest.mark.parametrize("label", [None, "unusable", "default"])
def test_an_update_that_ends_without_a_version_loads_nothing(
    folder: Path, label: str | None
) -> None:
    inner = Inner({})
    write()
    assert finish(inner, label)[0] == 200
    assert [path for path, _ in inner.came] == ["/finish_weight_update"]
