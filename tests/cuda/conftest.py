"""Each test of this folder that takes `form` runs compiled and in plain Python."""

from collections.abc import Iterator

import pytest

from kvstore.native import build


@pytest.fixture(params=["native", "fallback"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "fallback":
        with build.forced_fallback():
            yield request.param
    else:
        yield request.param
