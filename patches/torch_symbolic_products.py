"""Let a graph of changing shapes be traced where a size is a product of three numbers. Needed on
every device."""

import operator
from functools import reduce
from typing import Any

from titan_grpo.patches.versions import Range, require

WHY = (
    "torch 2.13 calls operator.mul with all factors of a symbolic size: with three or more, as the"
    " sizes of FSDP2 over tensor parallelism have once rows of a second shape come, torch.compile"
    ' ends in "mul expected 2 arguments, got 3", on every rank'
)
APPLIES_TO: Range = ("torch", "2.11", "2.16")
DELETE_WHEN = "torch's _build_proxy_for_sym_expr takes the arguments of a product by two"


def apply() -> None:
    """Build sums and products by two. Idempotent. Does nothing where torch has no such function.

    Raises:
        UpstreamError: torch's version is not in ``APPLIES_TO``.
    """
    require(APPLIES_TO, __name__)
    import sympy  # type: ignore[import-untyped]
    from torch.fx.experimental import proxy_tensor

    original = getattr(proxy_tensor, "_build_proxy_for_sym_expr", None)
    if original is None or hasattr(original, "titan_grpo_original"):
        return
    of_two = {sympy.Mul: operator.mul, sympy.Add: operator.add}

    def build(tracer: Any, expr: Any, out: Any = None) -> Any:
        parts, join = getattr(expr, "args", ()), of_two.get(getattr(expr, "func", None))
        known = tracer.sympy_expr_tracker.get(expr) is not None
        if out is not None or join is None or len(parts) < 3 or known:
            return original(tracer, expr, out)
        made = [build(tracer, part) for part in parts]
        return None if any(each is None for each in made) else reduce(join, made)

    build.titan_grpo_original = original  # type: ignore[attr-defined]
    proxy_tensor._build_proxy_for_sym_expr = build
