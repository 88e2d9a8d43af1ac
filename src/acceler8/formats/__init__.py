"""Number formats: limits, rounding, saturation, encode and decode."""

from __future__ import annotations

from acceler8.formats.fp8 import E4M3, E5M2, FORMATS, Format, decode, encode
from acceler8.formats.mx import E8M0, decode_e8m0, encode_e8m0

__all__ = ["E4M3", "E5M2", "E8M0", "FORMATS", "Format", "decode", "decode_e8m0", "encode", "encode_e8m0"]
