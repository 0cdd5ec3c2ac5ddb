"""The page of the command line, made from its parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping

HEAD = """\
# Command line

`fxremat` runs from a shell; `python -m fxremat` is the same. The source of a step is
`MODULE:FUNCTION`, a function that returns `(model, sample)`, or a model of transformers or timm by
its name.

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
    lines.append(f"\n{_codes(parser)} Some commands have other codes, see below.\n")
    for name, command in choices.items():
        purpose = command.description or _sentence(helps[name])
        lines.append(f"\n## `fxremat {name}`\n\n{purpose}\n")
        if _codes(command):
            lines.append(f"\n{_codes(command)}\n")
        lines += _groups(command)
    return "".join(lines)


def _codes(parser: argparse.ArgumentParser) -> str:
    """Return the sentence on exit codes with which the help of ``parser`` ends, if there is one."""
    codes = re.match(r"Exit codes: .*?\.", parser.epilog or "")
    return codes[0] if codes else ""


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
