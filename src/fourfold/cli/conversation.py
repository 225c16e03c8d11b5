"""The state of a terminal chat, and its commands: no model, no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HELP = """\
/help            this text
/clear           forget the conversation (the system message stays)
/system [TEXT]   set the system message, or show it
/save FILE       write the conversation as JSON messages
/exit            leave (also Ctrl-D)
A line that ends in \\ goes on in the next one; \"\"\" begins and ends a text of several lines.
Ctrl-C stops the answer."""

QUOTE = '"""'


@dataclass(slots=True)
class Conversation:
    """Messages in OpenAI's form; the system message apart, so that it can change."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forgets a question that could not be answered."""
        self.turns.pop()


def command(conversation: Conversation, line: str) -> str | None:
    """Carries out a line that begins with a slash; what to tell the user, or None to leave."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/exit" | "/quit" | "/bye":
            return None
        case "/help" | "/?":
            return HELP
        case "/clear" | "/reset":
            conversation.turns.clear()
            return "conversation cleared"
        case "/system":
            if not rest:
                return conversation.system or "no system message"
            conversation.system = rest
            return "system message set"
        case "/save":
            return _save(conversation, rest)
        case _:
            return f"no command {name}; /help lists them"


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        return "/save needs a file name"
    path = Path(name).expanduser()
    try:
        path.write_text(json.dumps(conversation.messages(), ensure_ascii=False, indent=2) + "\n", "utf-8")
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return f"saved {len(conversation.messages())} messages to {path}"


def read_message(read_line: Callable[[str], str]) -> str:
    """One message, of several lines if they are continued. `read_line` gets the prompt to show.

    Raises EOFError at the end of input when nothing was begun.
    """
    line = read_line("> ")
    if line.lstrip().startswith(QUOTE):
        return _read_quoted(line.lstrip().removeprefix(QUOTE), read_line)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = read_line(". ")
        except EOFError:
            return "\n".join(lines)
    return "\n".join([*lines, line])


def _read_quoted(line: str, read_line: Callable[[str], str]) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTE):
        lines.append(line)
        try:
            line = read_line(". ")
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines.append(line.rstrip().removesuffix(QUOTE))
    return "\n".join(lines).strip("\n")
