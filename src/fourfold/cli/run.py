"""`fourfold run MODEL PROMPT`."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

import click

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.output import tolerant_output, write_answer
from fourfold.cli.template import read_template


@click.command(cls=Command)
@options.model_argument
@click.argument("prompt", required=False)
@click.option("--prompt", "-p", "prompt_flag", metavar="TEXT", help="The prompt, as an option.")
@click.option("--system", "--system-prompt", metavar="TEXT", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--chat-template", metavar="FILE|JINJA", help="Chat template instead of the model's own.")
@click.option("--verbose", "-v", is_flag=True, help="Print speeds to standard error at the end.")
@options.sampling_options
@options.engine_options
def run(
    model: str | None,
    model_flag: str | None,
    prompt: str | None,
    prompt_flag: str | None,
    system: str | None,
    raw: bool,
    chat_template: str | None,
    verbose: bool,
    **flags: Any,
) -> None:
    """Answer PROMPT with MODEL, writing the answer as it comes.

    Without PROMPT it is read from standard input.
    """
    if model_flag is not None and prompt is None:
        model, prompt = None, model
    text = _prompt(prompt, prompt_flag)
    if raw and system:
        raise click.UsageError("--system needs the chat template; leave --raw out")
    config = options.engine_config(options.chosen_model(model, model_flag), flags)
    params = options.sampling_params(flags)
    source = read_template(chat_template)

    from fourfold.cli.session import load

    with load(config) as llm:
        if raw:
            ids = llm.tokenizer.encode(text)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            template = llm.chat_template(source)
            _, ids = llm.render_chat([*messages, {"role": "user", "content": text}], template)
        with closing(llm.stream(ids, params, continues_text=raw)) as deltas:
            answer = write_answer(deltas, len(ids), tolerant_output())
    if verbose:
        print(answer.speeds(), file=sys.stderr)


def _prompt(argument: str | None, flag: str | None) -> str:
    if argument is not None and flag is not None:
        raise click.UsageError("two prompts, an argument and --prompt; give one")
    text = argument if argument is not None else flag
    if text is not None and text != "-":
        return text
    if text is None and sys.stdin.isatty():
        raise click.UsageError("no prompt; give one after the model, or pipe it in (`fourfold chat` talks)")
    return sys.stdin.read()
