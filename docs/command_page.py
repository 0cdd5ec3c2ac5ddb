"""The page of the command line, made from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

HEAD = """\
# Command line

`fxremat` estimates and plans from a shell. `python -m fxremat` is the same. A step is written as
`MODULE:FUNCTION`, a function that returns `(model, sample)`, or as a class of transformers.

| command | what it does |
|---|---|
"""

_TITLES: dict[str | None, str] = {"positional arguments": "argument", "options": "option"}


def command_page(parser: argparse.ArgumentParser) -> str:
    """Return a page with a section for each command of ``parser``."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    choices: Mapping[str, argparse.ArgumentParser] = commands.choices
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    lines = [HEAD]
    lines += [f"| [`fxremat {name}`](#fxremat-{name}) | {helps[name]} |\n" for name in choices]
    lines.append(f"\n{parser.epilog}\n")
    for name, command in choices.items():
        lines.append(f"\n## `fxremat {name}`\n\n{_sentence(helps[name])}\n")
        lines += _groups(command)
    return "".join(lines)


def _groups(command: argparse.ArgumentParser) -> Iterator[str]:
    for group in command._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if actions:
            yield f"\n| {_TITLES.get(group.title, group.title)} | meaning |\n|---|---|\n"
            for action in actions:
                text = (action.help or "") % {"default": action.default}
                yield f"| {_name(action)} | {text} |\n".replace("  ", " ")


def _name(action: argparse.Action) -> str:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    if not flags:
        return f"`{action.metavar or action.dest}`"
    if action.nargs == 0:
        return flags
    value = ", ".join(map(str, action.choices)) if action.choices else action.metavar
    return f"{flags} `{value or action.dest.upper()}`"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
