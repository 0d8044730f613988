"""Every dialect offers every function of the Protocol, with the same arguments."""

import inspect

import pytest

from titan_grpo.engines.server import DIALECTS, Dialect, dialect
from titan_grpo.errors import ProtocolError

FUNCTIONS = [
    name
    for name, member in vars(Dialect).items()
    if inspect.isfunction(member) and not name.startswith("_")
]


def test_the_protocol_has_the_functions_that_are_looked_for():
    assert {"alive", "generate", "score", "label", "abort_all"} <= set(FUNCTIONS)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_takes_the_arguments_of_the_protocol(name, function):
    wanted = list(inspect.signature(getattr(Dialect, function)).parameters)[1:]
    assert list(inspect.signature(getattr(dialect(name), function)).parameters) == wanted
    own = dialect(name).NAME
    assert own == name


def test_an_engine_that_nobody_asked_for_is_a_bug_of_ours():
    with pytest.raises(ProtocolError, match="'trt'"):
        dialect("trt")
