"""The run key: found in one place, shown nowhere, and different for every use."""

import copy
import os
import pickle
import traceback
from pathlib import Path

import pytest

from titan_grpo.errors import ConfigError
from titan_grpo.runkey import KEY_FILE_VARIABLE, KEY_VARIABLE, EpochKeys, Key, find_run_key

KEY = Key(bytes(range(32)))


def test_a_key_is_found_in_the_environment_or_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n")
    assert find_run_key({}) is None
    for found in (
        find_run_key({KEY_VARIABLE: f" {KEY.hex()} "}),
        find_run_key({KEY_FILE_VARIABLE: str(path)}),
        find_run_key({}, str(path)),
    ):
        assert found is not None
        assert found.raw == KEY.raw


def test_a_key_file_may_begin_with_the_mark_that_some_editors_write(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n", encoding="utf-8-sig")
    found = find_run_key({}, str(path))
    assert found is not None
    assert found.raw == KEY.raw


def test_two_places_for_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"TITAN_GRPO_RUN_KEY and weight_sync.run_key_file are set"
    ):
        find_run_key({KEY_VARIABLE: KEY.hex()}, str(tmp_path / "key"))


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"weight_sync.run_key_file must name a readable file .* No such file"
    ):
        find_run_key({}, str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=KEY_FILE_VARIABLE):
        find_run_key({KEY_FILE_VARIABLE: str(tmp_path)})


@pytest.mark.parametrize(
    "text", ["", "zz" * 32, "ab" * 31, "ab" * 33, "correct horse battery staple"]
)
def test_what_is_no_key_is_refused_without_being_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as caught:
        find_run_key({}, str(path))
    said = "".join(traceback.format_exception(caught.value))
    assert not text or text not in said


def test_no_way_of_showing_a_key_shows_it() -> None:
    keys = EpochKeys.of(KEY, "run", 1)
    for shown in (repr(KEY), str(KEY), f"{KEY}", repr(keys), repr({"key": KEY}), repr([KEY, keys])):
        for secret in (KEY, keys.messages, keys.blocks):
            assert secret.hex() not in shown
            assert repr(secret.raw) not in shown
    for hand_over in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            hand_over(KEY)


def test_every_use_has_a_key_of_its_own() -> None:
    uses = [
        EpochKeys.of(key, run, epoch)
        for key in (KEY, Key.generate())
        for run in ("a", "b")
        for epoch in (1, 2)
    ]
    assert len({keys.messages.raw for keys in uses}) == len(uses)
    assert (
        len({keys.blocks.raw for keys in uses}) == 4
    )  # one per key and run: a lane's epochs share an image's digests
    assert KEY.derive("a", "b").raw != KEY.derive("ab").raw != KEY.derive("a,b").raw


def test_epoch_keys_come_through_a_pipe() -> None:
    keys = EpochKeys.of(KEY, "run", 1)
    again = EpochKeys.from_hex(keys.to_hex())
    assert (again.messages.raw, again.blocks.raw) == (keys.messages.raw, keys.blocks.raw)


def test_a_proof_is_good_for_its_message_and_its_key_only() -> None:
    proof = KEY.proof("hello")
    assert KEY.proves("hello", proof)
    assert not KEY.proves("hello!", proof)
    assert not Key.generate().proves("hello", proof)
    assert not KEY.proves("hello", "")
    assert not KEY.proves("hello", "\u00e9")


def test_generated_keys_differ_and_have_the_length_of_a_key() -> None:
    keys = {Key.generate().raw for _ in range(10)}
    assert len(keys) == 10
    with pytest.raises(ConfigError, match="32 bytes"):
        Key(os.urandom(16))
