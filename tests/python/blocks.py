"""Runs sessions of the interactive interpreter as tests: statements and what they print."""

import code
import contextlib
import io


def statements(session):
    """(source, expected output) of each statement of a text with >>> and ... prompts."""
    found = []
    for line in session.strip("\n").split("\n"):
        line = line.strip() if line.strip()[:3] in (">>>", "...") else line.rstrip()
        if line.startswith(">>>"):
            found.append([line[4:], []])
        elif line.startswith("..."):
            found[-1][0] += "\n" + line[4:]
        elif line.strip() or (found and found[-1][1]):
            found[-1][1].append(line.strip())
    return [(source, "\n".join(output).strip()) for source, output in found]


def run_statement(source, names):
    """What the interactive interpreter prints for a statement."""
    compiled = code.compile_command(source + ("\n\n" if "\n" in source else ""), "<session>", "single")
    assert compiled is not None, f"incomplete: {source}"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compiled, names)  # noqa: S102
    return output.getvalue()


def normal(text):
    """Lines without the blanks around them."""
    return "\n".join(line.strip() for line in text.strip().split("\n"))


def check(session, names):
    """Runs the session in `names`; each statement prints what is written below it."""
    for source, expected in statements(session):
        given = run_statement(source, names)
        assert normal(given) == normal(expected), f">>> {source}"
