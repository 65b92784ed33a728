"""CUDA graphs: records a function's kernel launches, to be replayed as one."""

from collections.abc import Callable

import torch
from torch import Tensor


class Recorder:
    """Records CUDA graphs that never run at once, and so share memory."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `forward.Record`."""
        # Run once before: kernels are compiled, libraries allocate their workspaces, and neither can be recorded.
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
