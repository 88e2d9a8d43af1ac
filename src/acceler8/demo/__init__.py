"""``acceler8 demo``: a small model learns real text in BF16 and in FP8, side by side."""
