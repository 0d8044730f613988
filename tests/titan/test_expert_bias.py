"""An MoE's load balancing bias, which routes tokens and has no gradient."""

import json
from pathlib import Path

import pytest

from tests.rigs.ranks import run_ranks
from tests.rigs.sockets import free_port

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("bias_rank.py")


def test_a_bias_that_the_models_adapter_exports_is_in_a_version_as_the_run_began_with_it(
    tmp_path: Path,
) -> None:
    (said,) = run_ranks(SCRIPT, 1, str(free_port()), str(tmp_path))
    found = json.loads(said.splitlines()[-1])
    assert len(found) == 5, "the first of six layers is dense"
    for kept, dtype, same in found.values():
        assert (kept, dtype, same) == (True, "float32", True)
