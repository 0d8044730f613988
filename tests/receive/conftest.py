"""Sites of an engine and its receiver."""

from collections.abc import Iterator

import pytest

from tests.receive.site import Site


@pytest.fixture(params=["gloo", "tcp"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(transport=request.param)
    yield made
    made.close()
