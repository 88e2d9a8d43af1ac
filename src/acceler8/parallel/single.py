"""One process, one device."""

from __future__ import annotations

from acceler8.parallel.protocol import Strategy


class SingleProcess(Strategy):
    """The strategy without communication."""

    name = "single"
