"""Correctly rounded divisions and roots without a branch an element, in PTX.

``div.rn`` and ``sqrt.rn`` are each a short sequence of approximation and fused multiply-adds, behind a test of whether
the operands let it be exact, and a call where they do not. The tests and calls are branches, which run one after the
other: 34 regions for the 16 elements of a thread, a third of Adam's instructions (SASS for sm_90). Here eight elements
go through the sequences side by side, are tested together, and go through ``div.rn`` and ``sqrt.rn`` if one fails.

Division of a by b, as ``div.rn`` itself compiles: y = rcp(b), y += y * (1 - b * y); q = a * y, q += y * (a - b * q). If
y is the correctly rounded 1 / b, the last step rounds correctly (Markstein, "Computation of elementary functions on the
IBM RISC System/6000 processor", IBM J. Res. Dev. 34(1), 1990, for q within an ulp; here q is within 3/2, and only its
outermost 2**-23 could matter, which takes a mantissa 2**24 - 1 of a below that of b). It asks for more: a - b * q is
exact, so the product of the ulps of b and q is at least 2**-149, and nothing overflows or is subnormal. Whatever
``rcp.approx`` returns within an ulp of 1 / b, y is correctly rounded for all 2**23 mantissas of b but 32, and with
these all mantissas of a divide correctly but one each of the two largest odd b, which rest on ``div.rn``'s being so.

Root of x, as ``sqrt.rn`` itself compiles from 2**-101 on: y = rsqrt(x); s = x * y, s += (x - s * s) * y / 2. It is
right for all 2**24 mantissas (of both parities) where y is correctly rounded, and wrong for 3 and 2 where every y is an
ulp below and above: that it is right with the GPU's own y rests on ``sqrt.rn`` doing the same.

``tests/kernels/test_adam_math.py`` counts these exceptions, and on a GPU compares with ``div.rn`` and ``sqrt.rn``.
"""

from __future__ import annotations

import torch

from acceler8.kernels._triton import INTERPRETED, constexpr, jit, tl

PACK = 8
# What the quick root needs of eps and of the factor of the root: both within these, or the factor is passed as NaN.
EPS_LEAST, EPS_MOST, FACTOR_LEAST, FACTOR_MOST = 2.0**-40, 2.0**40, 2.0**-14, 2.0**14
LIFT = 42  # roots are taken of v * 2**84, and so are 2**42 times as large

PTX = not INTERPRETED and torch.version.hip is None
_PTX = constexpr(PTX)
_DIVIDE = (
    "rcp.approx.ftz.f32 y, b; neg.f32 n, b; fma.rn.f32 e, n, y, 0f3F800000; fma.rn.f32 y, y, e, y;"
    " neg.f32 m, {a}; mul.rn.f32 q, {a}, y;"
    # the remainder's sign turned: so -0 divided is -0, and not -0 + 0
    " fma.rn.f32 r, b, q, m; neg.f32 r, r; fma.rn.f32 {q}, r, y, q; abs.f32 e, {q};"
)
# 2**84 v + 2**-126: the second is lost next to any v but 0, whose root then is 2**-63 and is lost next to eps
_ROOT = (
    "fma.rn.f32 x, {v}, 0f69800000, 0f00800000; rsqrt.approx.ftz.f32 y, x; mul.rn.f32 s, x, y;"
    " mul.rn.f32 h, y, 0f3F000000; neg.f32 n, s; fma.rn.f32 r, n, s, x; fma.rn.f32 s, r, h, s;"
    " mul.rn.f32 s, s, {lifted}; add.rn.f32 b, s, {eps};"
)


def _ratio_ptx() -> tuple[str, str]:
    """Code and constraints. Operands: 8 results, then eight times first, second, lifted, factor and eps."""
    of = [
        {name: f"${group * PACK + i}" for group, name in enumerate(("q", "a", "v", "lifted", "factor", "eps"))}
        for i in range(PACK)
    ]
    lines = ["{ .reg .f32 x, y, s, h, n, r, b, e, m, q; .reg .pred p, z, t;"]
    # 2**-56 <= |q| <= 2**80 holds for no NaN and nothing that overflowed; b is at least EPS_LEAST, so ulps are at
    # least 2**-79 * 2**-63. Zeros come out right, but look too small: they are found out behind the branch.
    for i, names in enumerate(of):
        lines.append((_ROOT + _DIVIDE).format(**names))
        chain = ("", "") if i == 0 else (".or", ", p")
        lines.append("setp.gtu{}.f32 p, e, 0f67800000{}; setp.lt.or.f32 p, e, 0f23800000, p;".format(*chain))
    lines.append("@!p bra DONE; setp.ne.u32 p, 0, 0;")
    for names in of:
        lines.append(
            "abs.f32 e, {q}; setp.gtu.or.f32 p, e, 0f67800000, p; setp.neu.f32 z, {a}, 0f00000000;"
            " setp.lt.and.f32 t, e, 0f23800000, z; or.pred p, p, t;".format(**names)
        )
    lines.append("@!p bra DONE;")
    for names in of:
        lines.append(
            "sqrt.rn.f32 s, {v}; mul.rn.f32 s, s, {factor}; add.rn.f32 b, s, {eps}; div.rn.f32 {q}, {a}, b;".format(
                **names
            )
        )
    lines.append("DONE: }")
    return "\n".join(lines), ",".join(["=&f"] * PACK + ["f"] * (5 * PACK))


_RATIO_PTX, _RATIO_CONSTRAINTS = map(constexpr, _ratio_ptx())
_PACK = constexpr(PACK)
# For 2**-120 <= |q| <= 2**120 and b to 2**100: a is at least 2**-100, so ulps are at least 2**-100 * 2**-46
_QUOTIENT_PTX = constexpr(
    "{ .reg .f32 y, n, r, b, e, m, q; .reg .pred p; mov.f32 b, $2;"
    + _DIVIDE.format(a="$1", q="$0")
    + "setp.gtu.f32 p, e, 0f7B800000; setp.lt.or.f32 p, e, 0f03800000, p; setp.gtu.or.f32 p, b, 0f71800000, p;"
    " @!p bra DONE; div.rn.f32 $0, $1, $2; DONE: }"
)


@jit
def quotient(a, b):  # type: ignore[no-untyped-def]
    """``tl.div_rn(a, b)``, for positive numbers; quickly where both are from 2**-100 on and ``b`` to 2**100."""
    if _PTX:
        return tl.inline_asm_elementwise(_QUOTIENT_PTX, "=&f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(a, b)


@jit
def adam_ratio(first, second, lifted, factor, eps):  # type: ignore[no-untyped-def]
    """``first / (sqrt(second) * factor + eps)``, each operation correctly rounded.

    lifted: ``factor * 2**-LIFT``; NaN unless ``factor`` and ``eps`` are within the bounds above.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            _RATIO_PTX, _RATIO_CONSTRAINTS, [first, second, lifted, factor, eps], dtype=tl.float32, is_pure=True,
            pack=_PACK,
        )  # fmt: skip
    else:
        return tl.div_rn(first, tl.sqrt_rn(second) * factor + eps)
