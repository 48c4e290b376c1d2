"""One shape for every complaint about bad input: the argument, what was expected, what came, the fix."""


def bad(name: str, *, expected: str, got: str, fix: str, kind: type[Exception] = ValueError) -> Exception:
    """Return (not raise) an error that says `name: expected ..., got .... Fix: ...`.

    `kind` is ValueError for a wrong value and TypeError for a wrong type. Nothing is raised here, so that the
    caller writes `raise bad(...)` and type checkers see the end of the branch.
    """
    return kind(f"{name}: expected {expected}, got {got}. Fix: {fix}.")
