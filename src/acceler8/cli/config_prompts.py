"""How the wizard asks: with questionary's menus where it is installed, else with plain lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console

from acceler8.config.kinds import Bool
from acceler8.config.wizard import Prompter

T = TypeVar("T")


def best_prompter(console: Console, *, is_dumb: bool) -> Prompter:
    """Menus of questionary, unless it is not installed or the terminal cannot move its cursor."""
    if not is_dumb:
        with contextlib.suppress(ImportError):
            return QuestionaryPrompter(console)
    return LinePrompter(console)


class LinePrompter:
    """Questions and answers as lines of text; a choice by its number or its word."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """Show a line."""
        self._console.print(line)

    def choose(self, question: str, help: str, words: tuple[str, ...], default: str) -> str:
        """One of ``words``, by number or word."""
        table = {word.lower(): word for word in words} | {str(i): word for i, word in enumerate(words)}
        if all(word.isdecimal() for word in words):  # then a number is the word itself
            table = {word: word for word in words}
            options = ", ".join(words)
        else:
            options = "  ".join(f"{i} {word}" for i, word in enumerate(words))

        def parse(text: str) -> str:
            if text.strip().lower() not in table:
                raise ValueError(f"got {text!r}; allowed: {options}")
            return table[text.strip().lower()]

        return self._ask(f"{question}\n  {options}", help, default, parse)

    def confirm(self, question: str, help: str, default: bool) -> bool:
        """Yes or no."""

        def parse(text: str) -> bool:
            try:
                return Bool().parse(text)
            except ValueError:
                raise ValueError(f"got {text!r}; allowed: yes, no") from None

        return self._ask(question, help, "yes" if default else "no", parse)

    def text(self, question: str, help: str, default: str, problem: Callable[[str], str | None]) -> str:
        """A line for which ``problem`` finds none."""

        def parse(text: str) -> str:
            reason = problem(text)
            if reason:
                raise ValueError(reason)
            return text

        return self._ask(question, help, default, parse)

    def _ask(self, question: str, help: str, default: str, parse: Callable[[str], T]) -> T:
        self._console.print(f"\n{question}\n  {help}")
        while True:
            answer = self._console.input(f"[{default}]: " if default else ": ", markup=False)
            try:
                return parse(answer.strip() or default)
            except ValueError as error:
                self._console.print(f"  {error}")


class QuestionaryPrompter:
    """Menus that the arrow keys move through."""

    def __init__(self, console: Console) -> None:
        import questionary

        self._console = console
        self._questionary: Any = questionary

    def say(self, line: str) -> None:
        """Show a line."""
        self._console.print(line)

    def choose(self, question: str, help: str, words: tuple[str, ...], default: str) -> str:
        """A menu with the cursor on the default."""
        self._help(help)
        return str(self._questionary.select(question, choices=list(words), default=default).unsafe_ask())

    def confirm(self, question: str, help: str, default: bool) -> bool:
        """One key, or Enter for the default."""
        self._help(help)
        return bool(self._questionary.confirm(question, default=default).unsafe_ask())

    def text(self, question: str, help: str, default: str, problem: Callable[[str], str | None]) -> str:
        """A line that holds the default, to be edited; the problem stands below it while there is one."""
        self._help(help)
        ask = self._questionary.text(question, default=default, validate=lambda text: problem(text) or True)
        return str(ask.unsafe_ask())

    def _help(self, help: str) -> None:
        self._console.print(f"\n{help}", style="dim")
