"""Steps in which every sequence has one new token: padded to few shapes, one graph for each.

A shape is (sequences, width of the block table), both the next power of two. Padding rows have slot
-1 and length 0: they write no page and read none. A shape's first step captures its graph, later
ones replay it; without graphs the same padded work is queued anew, with the same result.
"""

from collections.abc import Callable

from torch import Tensor

from kvstore.runtime.compute import Compute
from kvstore.runtime.step_arrays import StepArrays, StepPlan, bucket, table_width

SEQUENCES_MAX = 512  # Larger steps are rare, and long enough without a graph.

Work = Callable[[StepArrays], Tensor]  # one whole step: embeddings to logits


class DecodeSteps:
    """The shapes of one model over one pool of pages. work: queues a step over its arrays."""

    def __init__(self, compute: Compute, work: Work, graphs: bool) -> None:
        self._compute = compute
        self._work = work
        self._graphs = graphs
        self._shapes: dict[tuple[int, int], tuple[StepArrays, Callable[[], Tensor]]] = {}

    def takes(self, plan: StepPlan) -> bool:
        """Whether a step is one of these."""
        return plan.decodes and len(plan.ends) <= SEQUENCES_MAX

    def run(self, plan: StepPlan, page_tokens: int) -> Tensor:
        """Queue a step. Returns: logits of all its sequences, padding included; the next step of
        this shape overwrites them."""
        shape = bucket(len(plan.ends)), table_width(plan.ends, page_tokens)
        known = self._shapes.get(shape)
        if known is None:
            arrays = StepArrays(self._compute, shape[0], *shape)
            arrays.fill(plan)

            def work() -> Tensor:
                return self._work(arrays)

            replay = self._compute.capture(work) if self._graphs else work
            self._shapes[shape] = arrays, replay
            return replay()
        arrays, replay = known
        arrays.fill(plan)
        return replay()
