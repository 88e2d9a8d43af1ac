"""Runs the PTX of kernels in NumPy, a lane an element, to test it where there is no GPU.

Registers hold 32 bits. Approximations are correctly rounded results moved by so many ulps. Branches go forward,
to DONE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c, rounded once: the product is exact in FP64, the sum is rounded there to odd."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    is_even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    total = np.where(np.isfinite(error) & (error != 0) & is_even, np.nextafter(total, toward), total)
    return total.astype(np.float32)


def moved(x: F32, ulps: int) -> F32:
    return (x.view(np.int32) + np.int32(ulps)).view(np.float32)


def flushed(x: F32) -> F32:
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


def approximate(exact: NDArray[np.float64], ulps: int) -> F32:
    result = exact.astype(np.float32)
    is_normal = np.isfinite(result) & (np.abs(result) >= 2.0**-125)
    return flushed(np.where(is_normal, moved(result, ulps), result))


FLOATS: dict[str, Callable[..., F32]] = {
    "mov": lambda a: a,
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "fma": fma,
    "neg": lambda a: -a,
    "abs": np.abs,
    "sqrt": np.sqrt,
}
WORDS: dict[str, Callable[..., U32]] = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
    "bfe": lambda a, at, count: (a >> at) & ((np.uint32(1) << count) - np.uint32(1)),
    "min": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "max": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
}
COMPARE: dict[str, Callable[..., NDArray[np.bool_]]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "neu": lambda a, b: (a != b) | np.isnan(a) | np.isnan(b),
    "lt": lambda a, b: a < b,
    "gt": lambda a, b: a > b,
    "gtu": lambda a, b: ~(a <= b),
}


class Ptx:
    """``registers`` after the text ran on ``operands``. ``slow``: the lanes that took each branch's other side."""

    def __init__(self, text: str, operands: dict[int, U32], ulps: int = 0) -> None:
        self.count, self.ulps = len(next(iter(operands.values()))), ulps
        self.registers: dict[str, U32] = {f"${i}": value for i, value in operands.items()}
        self.predicates: dict[str, NDArray[np.bool_]] = {}
        self.active = np.ones(self.count, bool)
        self.slow: list[NDArray[np.bool_]] = []
        body = re.sub(r"\.reg [^;]*;", "", text.strip().removeprefix("{")).replace("DONE: }", "").removesuffix("}")
        with np.errstate(all="ignore"):
            for line in filter(None, (part.strip() for part in body.split(";"))):
                self._run(line)

    def _run(self, line: str) -> None:
        if line == "@!p bra DONE":
            self.active &= self.predicates["p"]
            self.slow.append(self.active.copy())
            return
        name, rest = line.split(None, 1)
        operation, *kind = name.split(".")
        names = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if operation in ("setp", "or") and (operation == "setp" or kind == ["pred"]):
            value = self._compare(kind, names) if operation == "setp" else self._either(names)
            old = self.predicates.get(names[0], np.zeros(self.count, bool))
            self.predicates[names[0]] = np.where(self.active, value, old)
            return
        if operation == "mov" and names[0].startswith("{"):
            word = self._word(names[1])
            for target, part in zip(names[0][1:-1].split(","), (word & 0xFFFF, word >> 16), strict=True):
                self._set(target.strip(), part)
            return
        self._set(names[0], self._value(operation, kind, names[1:]))

    def _value(self, operation: str, kind: Sequence[str], names: Sequence[str]) -> U32:
        if operation == "selp":
            return np.where(self.predicates[names[2]], self._word(names[0]), self._word(names[1]))
        words = [self._word(name) for name in names]
        if operation == "cvt" and kind[0] == "pack":
            high, low = (np.clip(w.view(np.int32), 0, 255).astype(np.uint32) for w in words[:2])
            return words[2] << 16 | high << 8 | low
        if operation == "cvt":
            return words[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        if operation == "prmt":
            both = words[0].astype(np.uint64) | words[1].astype(np.uint64) << np.uint64(32)
            picks = [(int(names[2], 16) >> 4 * i) & 15 for i in range(4)]
            parts = [
                ((both >> np.uint64(8 * pick)) & np.uint64(255)) << np.uint64(8 * i) for i, pick in enumerate(picks)
            ]
            return (parts[0] | parts[1] | parts[2] | parts[3]).astype(np.uint32)
        if kind[-1] != "f32":
            return WORDS[operation](*words)
        floats = [word.view(np.float32) for word in words]
        if operation in ("rcp", "rsqrt"):
            x = flushed(floats[0]).astype(np.float64)
            return approximate(1 / x if operation == "rcp" else 1 / np.sqrt(x), self.ulps).view(np.uint32)
        return FLOATS[operation](*floats).view(np.uint32)

    def _compare(self, kind: Sequence[str], names: Sequence[str]) -> NDArray[np.bool_]:
        a, b = self._word(names[1]), self._word(names[2])
        value = (
            COMPARE[kind[0]](a.view(np.float32), b.view(np.float32)) if kind[-1] == "f32" else COMPARE[kind[0]](a, b)
        )
        if len(kind) == 3:
            other = self.predicates[names[3]]
            value = value | other if kind[1] == "or" else value & other
        return value

    def _either(self, names: Sequence[str]) -> NDArray[np.bool_]:
        return self.predicates[names[1]] | self.predicates[names[2]]

    def _word(self, name: str) -> U32:
        if name.startswith("0f"):
            return np.full(self.count, int(name[2:], 16), np.uint32)
        if name[0].isdigit():
            return np.full(self.count, int(name, 0), np.uint32)
        return self.registers[name]

    def _set(self, name: str, value: U32) -> None:
        old = self.registers.get(name, np.zeros(self.count, np.uint32))
        self.registers[name] = np.where(self.active, value, old)
