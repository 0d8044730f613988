"""Python runs this at the start of every process of the tests (tests/conftest.py): servers,
torchrun, ranks, scripts.

Python looks for garbage after every 700 new objects, and once more when it ends. To import torch or
an engine makes millions, and none is garbage: the search is a quarter of the time of a process that
lives for seconds. A process that goes on sets its collector up itself: titan_grpo.train, run_main,
torchtitan, vLLM.
"""

import atexit
import gc

gc.set_threshold(100_000)
# The last collection then finds nothing to look at.
atexit.register(gc.freeze)
