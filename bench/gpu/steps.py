"""Every step, in order: correctness first. Seconds are guesses for one large GPU until known."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.gpu.results import Figure


@dataclass(frozen=True)
class Step:
    """One step: a function of a file beside this one, called with the place and `arguments`.

    Its file is imported when it runs, so that naming the steps loads neither torch nor a driver.
    """

    name: str
    seconds: float
    module: str
    function: str
    arguments: tuple[Any, ...] = ()

    def run(self, place: Any) -> list[Figure]:
        """Do it. Raises NotMeasured, or what went wrong."""
        found: Callable[..., list[Figure]] = getattr(
            importlib.import_module(f"bench.gpu.{self.module}"), self.function
        )
        return found(place, *self.arguments)


TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
STEPS = (
    Step("environment", 2, "environment", "environment"),
    Step("compile", 25, "kernels", "compile_all"),
    Step("probes", 3, "kernels", "run_probes"),
    Step("cases", 25, "kernels", "run_cases"),
    Step("copies", 8, "exact", "copies_are_exact"),
    Step("store", 20, "exact", "store_is_exact"),
    *(Step(tool, 25, "sanitizer", "sanitize", (tool,)) for tool in TOOLS),
    Step("runtime", 12, "runtime", "answers"),
    Step("same tokens", 30, "runtime", "same_tokens"),
    Step("demo", 1, "runtime", "demo"),
    Step("plain copies", 3, "bandwidth", "plain_copies"),
    Step("host copies", 15, "bandwidth", "host_copies"),
    Step("both directions", 5, "bandwidth", "both_directions"),
    Step("within the device", 4, "bandwidth", "within_device"),
    Step("decode", 12, "decode", "decode"),
    Step("first token", 60, "runtime", "first_token", ((4096, 32768),)),
    Step("overhead", 20, "runtime", "overhead"),
    Step("first token 128k", 75, "runtime", "first_token", ((131072,),)),
)
