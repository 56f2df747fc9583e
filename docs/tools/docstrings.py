"""Docstrings for the reference: an extension of griffe, which reads them for mkdocstrings.

They are written for people who read the code: roles of Sphinx, formulas as indented lines, kernels
behind :class:`~tinyllm.kernels.operation.Operation`. Here they become Markdown.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr):`(~?)([\w.]+)`")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


class Docstrings(griffe.Extension):
    """Rewrites docstrings, and shows kernels as the functions they are."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called once everything has been read."""
        for module in _modules(pkg):
            _find_at_home(module)
            _show_operations(module)
            for item in _objects(module):
                if item.docstring is not None:
                    item.docstring.value = _markdown(item.docstring.value, item)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for child in module.modules.values():
        if not child.is_alias:
            yield from _modules(child)


def _find_at_home(module: griffe.Module) -> None:
    """Calls a file by its place in the repository, not by the link that leads there."""
    link = module.filepath
    if isinstance(link, Path):
        home = link.resolve()
        module.lines_collection[home] = module.lines_collection[link]
        module._filepath = home


def _objects(item: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    """An object of a module and what is in it; other modules have a turn of their own."""
    yield item
    for member in item.members.values():
        if isinstance(member, griffe.Class):
            yield from _objects(member)
        elif isinstance(member, griffe.Function | griffe.Attribute):
            yield member


def _show_operations(module: griffe.Module) -> None:
    """Gives ``name = Operation(reference, launch)`` its reference's signature and docstring."""
    for name, attribute in list(module.attributes.items()):
        value = None if attribute.is_alias else attribute.value
        if not isinstance(value, griffe.ExprCall) or str(value.function) != "Operation":
            continue
        reference = module.functions[str(value.arguments[0])]
        shown = griffe.Function(
            name,
            lineno=reference.lineno,
            endlineno=reference.endlineno,
            parameters=reference.parameters,
            returns=reference.returns,
        )
        if (text := reference.docstring) is not None:
            shown.docstring = griffe.Docstring(
                text.value, parent=shown, parser=text.parser, parser_options=text.parser_options
            )
        module.set_member(name, shown)


def _markdown(text: str, item: griffe.Object) -> str:
    """A docstring's text; only what comes before its first section has formulas."""
    lines: list[str] = []
    in_text, in_list = True, False
    for line in text.splitlines():
        in_text = in_text and not _SECTION.match(line)
        before = lines[-1] if lines else ""
        if in_text:
            if line and not line.startswith(" "):
                in_list = line.startswith("- ") or (in_list and bool(before))
            indents = [bool(text) and text.startswith("    ") for text in (before, line)]
            if before and line and indents[0] != indents[1] and not in_list:
                lines.append("")  # a formula begins or ends
            if line.endswith("::"):
                line = line[:-1]
        lines.append(line)
    return _ROLE.sub(lambda match: _reference(match[1], match[2], item), "\n".join(lines))


def _reference(short: str, target: str, item: griffe.Object) -> str:
    """A link to an object, if the site has it."""
    shown = target.rsplit(".", 1)[-1] if short else target
    full = target
    if "." not in target:
        try:
            full = item.resolve(target)
        except griffe.NameResolutionError:
            full = f"{item.path}.{target}"
    return f'<autoref identifier="{full}" optional><code>{shown}</code></autoref>'
