"""Measuring: a training step, GEMMs and layers, single operations, a user's own model; ours, BF16 and the peers.

``acceler8 bench`` runs it. Everything happens in one process on the same weights and data, results are checked before
they are timed, and a time stands beside the floor that this very device has for it.
"""

from __future__ import annotations
