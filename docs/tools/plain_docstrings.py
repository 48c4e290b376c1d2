"""Extension of Griffe, which reads docstrings for the API pages: only backticks are markup, formulas are text."""

import re

import griffe

MARKS = re.compile(r"([\\*_\[\]>$])")  # Python-Markdown takes no backslash before <


def plain(text: str) -> str:
    """Return a docstring as Markdown that shows every character outside of code as it stands.

    Code stands between backticks, one or three, or is a block of its own, four spaces to the right.
    """
    parts = re.split(r"(```[\s\S]*?```|(?<=\n\n) {4}.*(?:\n {4}.*|\n(?=\n {4}))*|`[^`]+`)", text)
    return "".join(part if i % 2 else MARKS.sub(r"\\\1", part).replace("<", "&lt;") for i, part in enumerate(parts))


class PlainDocstrings(griffe.Extension):
    """Escapes what Markdown would read as emphasis, links or HTML."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
