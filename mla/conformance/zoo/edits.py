"""Faults of kernel arithmetic, each one line of `zoo/kernel.py` written differently.

The texts read as a diff, a paragraph a fault: a headline `name (kind, source): what is wrong.`, with `full` or `large`
after the source where smaller suites cannot show it; the old text, which is in the kernel exactly once; the new one.
"""

import re

from mla.conformance.zoo import which_keys, which_numbers
from mla.conformance.zoo.fault import Fault
from mla.errors import bad

HEADLINE = re.compile(r"(\w+) \((\w+)(?:, ([^,)]+?))??(?:, (full|large))?\): (.+)")


def parse(text: str) -> list[Fault]:
    """Return the faults of a text; raises ValueError with the paragraph that is not in the form of these texts."""
    faults = []
    for paragraph in text.strip().split("\n\n"):
        headline, *change = paragraph.split("\n")
        match = HEADLINE.fullmatch(headline)
        if match is None or [line[:2] for line in change] != ["- ", "+ "]:
            raise bad("edits", expected="a headline, '- old' and '+ new'", got=repr(paragraph), fix="see zoo/edits.py")
        name, kind, source, suite, about = match.groups()
        old, new = (line[2:] for line in change)
        faults.append(Fault(name, kind, about, source or "", suite or "smoke", edit=(old, new)))
    return faults


EDITS = [*parse(which_keys.TEXT), *parse(which_numbers.TEXT)]
