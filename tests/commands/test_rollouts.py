import socket
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.rigs.present import present
from tests.rigs.sockets import free_port
from titan_grpo.commands import rollouts
from titan_grpo.commands.doctor_servers import controller
from titan_grpo.errors import ConfigError
from titan_grpo.rollout.messages import FORMAT, RolloutSpec
from titan_grpo.rollout.service import Service
from titan_grpo.titan.tiny import write_tiny_model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--bind", "0.0.0.0:8910"],
            (
                r"--bind must be on loopback while TITAN_GRPO_CONTROLLER_KEY is empty, got"
                r" 0\.0\.0\.0:8910"
            ),
        ),
        (
            ["--bind", "10.0.0.1:0", "--key-env", "OTHER"],
            "--key-env must name a variable that holds a key, 'OTHER' is empty or not set",
        ),
        (["--key-env", ""], "--key-env must name a variable that holds a key"),
        (["--lease", "0"], "--lease must be greater than 0, and finite, got 0"),
        (["--lease", "nan"], "--lease must be greater than 0, and finite, got nan"),
        (
            ["--bind", "127.0.0.1:70000"],
            r"--bind must be host:port \(\[host\]:port with IPv6\), got '127.0.0.1:70000'",
        ),
        (["--bind", "[::1:3"], r"--bind must be host:port .*, got '\[::1:3'"),
        (["--bind", "::1:3"], r"--bind must be host:port .*, got '::1:3'"),
    ],
)
def test_a_service_that_anybody_could_use_and_what_can_not_be_bound_are_refused(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rollouts.run(arguments, {})


def test_with_a_key_an_address_of_another_host_is_only_impossible() -> None:
    with pytest.raises(ConfigError, match="--bind must be an address of this host"):
        rollouts.run(["--bind", "192.0.2.1:0"], {rollouts.KEY_VARIABLE: "secret"})


def test_a_port_that_is_taken_is_said_to_be_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"with a free port, got '{address}': .*in use"):
            rollouts.run(["--bind", address], {rollouts.KEY_VARIABLE: "secret"})


def test_a_signal_to_the_service_ends_its_session_in_order(tmp_path: Path) -> None:
    spec = RolloutSpec(model_dir=str(write_tiny_model("qwen3", tmp_path / "model", seed=1)))
    opening = {"format": FORMAT, "run": "r", "session": "s"}
    opening |= {"spec": msgspec.to_builtins(spec, str_keys=True)}
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "titan_grpo.cli", "rollouts", f"--bind={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert "serving at" in present(service.stdout).readline()
            url = f"http://{address}/open"
            answer = httpx.post(url, json=opening, timeout=60.0, trust_env=False)
            service.terminate()
            said, _ = service.communicate(timeout=60)
        finally:
            service.kill()
    assert (answer.status_code, service.returncode) == (200, 0)
    assert said.splitlines()[-1] == "rollouts: the session has ended: the service ends"


def test_the_doctor_looks_at_the_service_of_a_job() -> None:
    service = Service("127.0.0.1:0", "secret", 60.0, lambda _: None)
    url = f"http://{service.address}"
    try:
        assert controller(url, "secret", 60.0).line().endswith("is free")
        other = controller(url, "secret", 60.0, "another form")
        assert (other.status, other.text) == ("problem", f"{url} runs another titan_grpo")
        refused = controller(url, "wrong", 60.0)
        assert (refused.status, "set rollout.controller_key_env" in refused.text) == (
            "problem",
            True,
        )
    finally:
        service.close()
    gone = controller(url, "secret", 60.0)
    assert (gone.status, gone.text.count(url)) == ("problem", 1)
