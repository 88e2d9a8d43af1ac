"""The command line: it parses, calls and prints. Everything that computes lies in the other layers."""

from acceler8.cli.app import main

__all__ = ["main"]
