"""`fourfold chat MODEL`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import click

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.conversation import Conversation, command, read_message
from fourfold.cli.output import tolerant_output, write_answer
from fourfold.cli.template import read_template
from fourfold.errors import InvalidRequestError

if TYPE_CHECKING:
    from fourfold.llm import LLM
    from fourfold.text.chat import ChatTemplate
    from fourfold.types import SamplingParams


@click.command(cls=Command)
@options.model_argument
@click.option("--system", "--system-prompt", metavar="TEXT", help="A system message.")
@click.option("--chat-template", metavar="FILE|JINJA", help="Chat template instead of the model's own.")
@click.option("--verbose", "-v", is_flag=True, help="Print speeds after each answer.")
@options.sampling_options
@options.engine_options
def chat(
    model: str | None,
    model_flag: str | None,
    system: str | None,
    chat_template: str | None,
    verbose: bool,
    **flags: Any,
) -> None:
    """Talk to MODEL in the terminal; /help lists what can be said to the chat itself."""
    config = options.engine_config(options.chosen_model(model, model_flag), flags)
    params = options.sampling_params(flags)
    source = read_template(chat_template)

    from fourfold.cli.session import load

    with load(config) as llm:
        if sys.stdin.isatty():
            import readline  # noqa: F401  (editing and history of the lines that input() reads)

            print(f"{llm.model.name}; /help for help, Ctrl-D to leave", file=sys.stderr)
        chatting = Chat(
            llm, llm.chat_template(source), params, Conversation(system), tolerant_output(), verbose
        )
        chatting.talk(_read_line)


class Chat:
    """A conversation with a loaded model: lines in, answers to `out`, remarks to standard error."""

    def __init__(
        self,
        llm: LLM,
        template: ChatTemplate,
        params: SamplingParams,
        conversation: Conversation,
        out: TextIO,
        verbose: bool = False,
    ) -> None:
        self._llm = llm
        self._template = template
        self._params = params
        self._conversation = conversation
        self._out = out
        self._verbose = verbose

    def talk(self, read_line: Callable[[str], str]) -> None:
        """Until /exit or the end of input. `read_line` shows its argument and returns a line."""
        while True:
            try:
                text = read_message(read_line)
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
                continue
            if text.startswith("/"):
                said = command(self._conversation, text)
                if said is None:
                    return
                print(said, file=sys.stderr)
            elif text.strip():
                self._answer(text)

    def _answer(self, text: str) -> None:
        self._conversation.ask(text)
        try:
            _, ids = self._llm.render_chat(self._conversation.messages(), self._template)
            with _interruptible() as stopped, closing(self._llm.stream(ids, self._params)) as deltas:
                answer = write_answer(deltas, len(ids), self._out, stopped)
        except InvalidRequestError as error:
            self._conversation.take_back()
            print(f"{error} (/clear starts over)", file=sys.stderr)
            return
        self._conversation.answer(answer.text)
        if self._verbose:
            print(answer.speeds(), file=sys.stderr)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Makes Ctrl-C a wish, looked at between tokens: an exception in mid-step would leave the engine torn."""
    wish: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        wish.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(wish)
    finally:
        signal.signal(signal.SIGINT, before)


def _read_line(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")
