"""One seed of the simulation, or a range of them: PYTHONPATH=tests python -m support.simulate SEED

--trace prints what happened. --plant BUG puts a known bug into the store.
"""

import argparse
import sys
import time
from contextlib import nullcontext

from kvstore.tiers.failpoints import BUGS, plant
from support.sim_steps import run
from support.sim_world import Violation, World, installed

STEPS = 200


def simulate(seed: int, steps: int = STEPS) -> str:
    """Run one seed. Returns: the hash of its trace. Raises Violation, with how to replay it."""
    with installed() as hub:
        world = World(seed, hub)
        try:
            run(world, steps)
        except Exception as error:
            again = f"PYTHONPATH=tests python -m support.simulate {seed}"
            again += f" --steps {steps}" if steps != STEPS else ""
            raise Violation(
                f"seed {seed}: {type(error).__name__}: {error}\nreplay: {again} --trace"
            ) from error
        return world.trace_hash()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seeds", type=int, default=1, help="so many, from SEED on")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--plant", choices=BUGS)
    chosen = parser.parse_args()
    started, failed = time.monotonic(), 0
    with plant(chosen.plant) if chosen.plant else nullcontext():
        for seed in range(chosen.seed, chosen.seed + chosen.seeds):
            with installed() as hub:
                world = World(seed, hub)
                if chosen.trace:
                    world.show = print
                try:
                    run(world, chosen.steps)
                except Exception as error:
                    failed += 1
                    print(f"seed {seed}: {type(error).__name__}: {error}")
                    if chosen.seeds == 1:
                        raise
                else:
                    if chosen.seeds == 1:
                        print(world.trace_hash())
    took = time.monotonic() - started
    print(f"{chosen.seeds} seeds, {failed} failed, {took:.1f} s", file=sys.stderr)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
