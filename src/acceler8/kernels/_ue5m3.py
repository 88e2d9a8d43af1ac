"""The second moment's FP8 code, as ``formats.encode_ue5m3`` and ``decode_ue5m3`` have it, in kernels.

Codes of UE5M3 are FP16 numbers without the sign and the last seven bits: what decodes FP16 decodes them.
"""

from __future__ import annotations

from acceler8.kernels._adam_math import PTX
from acceler8.kernels._triton import constexpr, jit, tl

_PTX = constexpr(PTX)


def _encode_ptx() -> tuple[str, str]:
    """Code and constraints of eight codes: two words, then eight times x and the scale of its block."""
    lines = ["{ .reg .f32 z; .reg .b32 b, t, r<8>; .reg .pred p;"]
    for i in range(8):  # exponents are lowered by the difference of the biases, 112; then round to nearest even
        lines.append(
            f"mul.rn.f32 z, ${2 + i}, ${10 + i}; mul.rn.f32 z, z, 0f07800000; mov.b32 b, z; bfe.u32 t, b, 20, 1;"
            f" add.u32 b, b, 0x7FFFF; add.u32 b, b, t; shr.u32 b, b, 20;"
            f" mov.b32 t, ${2 + i}; min.s32 t, t, 1; max.s32 r{i}, b, t;"
        )
    pack = [
        f"cvt.pack.sat.u8.s32.b32 t, r{i + 3}, r{i + 2}, 0; cvt.pack.sat.u8.s32.b32 ${i // 4}, r{i + 1}, r{i}, t;"
        for i in (0, 4)
    ]
    # Under its scale no element of a block rounds above the largest code, unless one was not finite: the scale is 1.
    # Four elements in a row are of one block.
    lines += [*pack, "setp.eq.f32 p, $10, 0f3F800000; setp.eq.or.f32 p, $14, 0f3F800000, p; @!p bra DONE;"]
    lines += [f"setp.gt.u32 p, r{i}, 0xF7; selp.b32 r{i}, 0xFF, r{i}, p;" for i in range(8)]
    return "\n".join([*lines, *pack, "DONE: }"]), ",".join(["=&r"] * 2 + ["f"] * 16)


# two codes in the halves of a word, moved to where FP16 has them
_DECODE_PTX = constexpr(
    "{ .reg .b32 a, b; .reg .b16 e, f, g, h; prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
    " shl.b32 a, a, 7; shl.b32 b, b, 7; mov.b32 {e, f}, a; mov.b32 {g, h}, b;"
    " cvt.f32.f16 $0, e; cvt.f32.f16 $1, f; cvt.f32.f16 $2, g; cvt.f32.f16 $3, h; }"
)
_ENCODE_PTX, _ENCODE_CONSTRAINTS = map(constexpr, _encode_ptx())


@jit
def decode_ue5m3(codes):  # type: ignore[no-untyped-def]
    """Codes in FP32, exact."""
    if _PTX:
        return tl.inline_asm_elementwise(
            _DECODE_PTX,
            "=&f,=&f,=&f,=&f,r", [codes], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return (codes.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def encode_ue5m3(x, scale):  # type: ignore[no-untyped-def]
    """``encode_ue5m3(x * scale, keep_nonzero=True)`` of numbers that are not below 0.

    ``scale`` maps the largest of each block onto 61440, and is 1 where that is not finite.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            _ENCODE_PTX, _ENCODE_CONSTRAINTS, [x, scale], dtype=tl.uint8, is_pure=True, pack=8
        )
    else:
        bits = (x * scale * 1.925929944387236e-34).to(tl.int32, bitcast=True)  # 2**-112
        code = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        code = tl.maximum(code, tl.minimum(x.to(tl.int32, bitcast=True), 1))
        return tl.where(code.to(tl.uint32, bitcast=True) > 0xF7, 0xFF, code).to(tl.uint8)
