"""Rules of a rollout service elsewhere."""

from dataclasses import replace

import pytest

from titan_grpo.config_rollout import Rollout, is_loopback, violations

LOCAL = Rollout(servers=["http://a:1"])
REMOTE = replace(LOCAL, controller="http://10.0.0.1:8910", controller_key_env="KEY")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"controller": "remote"},
            "rollout.controller must be \"local\" or a URL such as http://host:8910, got 'remote'",
        ),
        ({"controller": "http://:8910"}, 'rollout.controller must be "local" or a URL'),
        (
            {"controller_key_env": ""},
            "rollout.controller_key_env must be set while rollout.controller is not on loopback",
        ),
        (
            {"callback_address": "10.0.0.2:0"},
            "rollout.callback_address must be left out (rank 0 polls the service",
        ),
        ({"controller_deadline_s": 0.0}, "rollout.controller_deadline_s must be greater than 0"),
        (
            {"servers": ["launch"], "launch_python": "p"},
            "rollout.servers must be URLs while rollout.controller is on another",
        ),
        ({"replay_path": "r.jsonl"}, 'rollout.controller must be "local" with rollout.replay_path'),
    ],
)
def test_a_broken_rule_is_one_line(changes, message):
    (found,) = violations(replace(REMOTE, **changes))
    assert found.startswith(message), found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"controller": "local", "controller_key_env": ""},
        {"controller": "http://localhost:8910", "controller_key_env": ""},
        {"controller": "https://[::1]:8910", "controller_key_env": ""},
    ],
)
def test_what_keeps_the_rules_passes(changes):
    assert violations(replace(REMOTE, **changes)) == []


def test_a_name_that_only_begins_like_loopback_is_not():
    assert is_loopback("127.0.0.9")
    assert not is_loopback("127.0.0.1.example.com")
