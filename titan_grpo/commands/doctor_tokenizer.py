"""The doctor's comparison of tokenizers: the trainer's and a server's must give the same ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_grpo.commands.doctor_checks import Finding, ok, warning
from titan_grpo.commands.doctor_facts import Access
from titan_grpo.engines.http import Call, SyncDriver, want
from titan_grpo.errors import PeerError

TEXT = "Add 12 and 3.14: was\tist\n\n  <b>größer</b>? 东京, 🙂 </s><|im_end|><eos>"
"""Digits, white space, other scripts, and texts that are special tokens of some models: what
tokenizers differ in."""

SUBJECT = "tokenizer"


def ids_here(model_dir: str, text: str) -> list[int] | None:
    """Ids by the model directory's tokenizer.json, without further special tokens; None where it
    has none."""
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    found: list[int] = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    return found


def ids_there(url: str, key: str, timeout_s: float, text: str) -> list[int] | None:
    """Ids by a server's own tokenizer (``POST /tokenize`` of both engines); None where it does not
    answer that."""

    def parse(answer: Any) -> list[int]:
        return [int(each) for each in want(answer, "tokens", list, "/tokenize")]

    body = {"prompt": text, "add_special_tokens": False}
    try:
        with SyncDriver(url, key) as driver:
            return driver.run(Call("POST", "/tokenize", timeout_s, parse, json=body))
    except PeerError:
        # Other findings say why a server does not answer.
        return None


def compare(url: str, here: Sequence[int] | None, there: Sequence[int] | None) -> Finding | None:
    """Judge both; None where one of them is not known. Pure."""
    if here is None or there is None:
        return None
    if list(here) == list(there):
        return ok(SUBJECT, f"{url} has the trainer's")
    place = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), -1)
    what = (
        f"{len(here)} tokens here, {len(there)} there"
        if place < 0
        else f"token {place} of a sample text is {here[place]} here and {there[place]} there"
    )
    return warning(
        SUBJECT,
        f"{url} has another tokenizer than model.hf_assets_path: {what}. Completions would end at"
        " other tokens, and stop texts and what users read would be wrong",
        "start the server with the model directory that the trainer has (or --tokenizer with it)",
    )


def finding(url: str, model_dir: str, access: Access) -> Finding | None:
    """Look at both, and compare."""
    there = ids_there(url, access.api_key, access.timeout_s, TEXT)
    return compare(url, ids_here(model_dir, TEXT), there)
