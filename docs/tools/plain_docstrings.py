"""Extension of Griffe, which reads docstrings for the API pages: only backticks are markup, formulas are text."""

import re

import griffe

MARKS = re.compile(r"([\\*_\[\]<>$])")


def plain(text: str) -> str:
    """Return a docstring as Markdown that shows every character outside of backticks as it stands."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if i % 2 else MARKS.sub(r"\\\1", part) for i, part in enumerate(parts))


class PlainDocstrings(griffe.Extension):
    """Escapes what Markdown would read as emphasis, links or HTML."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
