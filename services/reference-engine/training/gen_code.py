"""Short Python functions and edits to them as SEARCH/REPLACE blocks."""

import re

from words import NOUNS, VERBS, assistant, made_up, system, user

SYSTEM = [
    "You edit code. Answer with SEARCH/REPLACE blocks.",
    "You are Refrain, a coding assistant. Reply with one edit block per change.",
    "Make the change that the user asks for. Use SEARCH/REPLACE blocks.",
]


class Function:
    """One small function as a list of lines, with the names an edit can refer to."""

    def __init__(self, rng):
        self.noun = rng.choice(NOUNS) if rng.random() < 0.8 else made_up(rng)
        self.name = f"{rng.choice(VERBS)}_{self.noun}"
        self.number = rng.randint(1, 99)
        self.arg = rng.choice([self.noun, "data", "values", "source", made_up(rng)])
        self.local = rng.choice(["result", "total", "out", "found", "count"])
        a, n, v = self.arg, self.number, self.local
        self.lines = rng.choice([
            [f"    {v} = []", f"    for item in {a}:", f"        if item > {n}:",
             f"            {v}.append(item)", f"    return {v}"],
            [f"    {v} = 0", f"    for item in {a}:", f"        {v} += item * {n}",
             f"    return {v}"],
            [f"    {v} = {{}}", f"    for key, value in {a}.items():",
             f"        {v}[key] = value + {n}", f"    return {v}"],
            [f"    {v} = len({a})", f"    if {v} > {n}:", f"        return {a}[:{n}]",
             f"    return {a}"],
            [f"    {v} = sorted({a})", f"    return {v}[-{n}:]"],
            [f"    with open({a}) as handle:", f"        {v} = handle.read()",
             f"    return {v}.split()[:{n}]"],
            [f"    {v} = sum({a}) / {n}", f"    return round({v}, 2)"],
        ])
        self.header = f"def {self.name}({a}):"

    def text(self):
        return "\n".join([self.header] + self.lines)


def block(path, before, after):
    return f"{path}\n<<<<<<< SEARCH\n{before}\n=======\n{after}\n>>>>>>> REPLACE"


def swap(lines, old, new):
    """Renames `old` in all lines. Returns them, and the changed lines before and after."""
    renamed = [re.sub(rf"\b{old}\b", new, line) for line in lines]
    hits = [i for i, (a, b) in enumerate(zip(lines, renamed)) if a != b]
    span = slice(hits[0], hits[-1] + 1)
    return renamed, "\n".join(lines[span]), "\n".join(renamed[span])


def edit(rng, f):
    """Changes the function. Returns the request for it, and the changed lines before and after."""
    kind = rng.choice(["number", "number", "rename", "local", "doc", "guard", "log", "type"])
    if kind == "number":
        new = rng.randint(1, 99)
        lines = [f.header] + f.lines
        hit = next(i for i, line in enumerate(lines) if str(f.number) in line)
        before = lines[hit]
        after = before.replace(str(f.number), str(new))
        request = rng.choice([f"In {f.name}, use {new} instead of {f.number}.",
                              f"Change the {f.number} in {f.name} to {new}."])
        f.lines[hit - 1], f.number = after, new
        return request, before, after
    if kind == "rename":
        new = f"{rng.choice(VERBS)}_{made_up(rng) if rng.random() < 0.4 else rng.choice(NOUNS)}"
        before = f.header
        f.header = f.header.replace(f"def {f.name}(", f"def {new}(")
        request = f"Rename {f.name} to {new}."
        f.name = new
        return request, before, f.header
    if kind == "local":
        new = f.local
        while new == f.local:
            new = made_up(rng)
        f.lines, before, after = swap(f.lines, f.local, new)
        request = f"Rename the variable {f.local} to {new} in {f.name}."
        f.local = new
        return request, before, after
    first = f.header
    if kind == "doc":
        added = f'    """{f.name.replace("_", " ").capitalize()}."""'
        request = rng.choice([f"Add a docstring to {f.name}.", f"Document {f.name}."])
    elif kind == "guard":
        added = f"    if not {f.arg}:\n        return None"
        request = f"Return None from {f.name} when {f.arg} is empty."
    elif kind == "log":
        added = f'    print("{f.name}", {f.arg})'
        request = f"Print the name and {f.arg} at the start of {f.name}."
    else:
        if ": list" in first:
            return edit(rng, f)
        f.header = first.replace(f"({f.arg})", f"({f.arg}: list)")
        return f"Add the type list to {f.arg} in {f.name}.", first, f.header
    f.lines = added.split("\n") + f.lines
    return request, first, first + "\n" + added


def source(rng, count):
    """Returns `count` functions of different names."""
    functions = {}
    while len(functions) < count:
        f = Function(rng)
        # A local with the name of the argument would make a rename ambiguous.
        if f.local != f.arg:
            functions.setdefault(f.name, f)
    return list(functions.values())


def path_of(rng):
    return f"{rng.choice(['src', 'app', 'lib', 'core'])}/{rng.choice(NOUNS + VERBS)}.py"


def code(rng):
    path = path_of(rng)
    functions = source(rng, rng.choice([1, 1, 1, 2, 2, 3]))
    body = "\n\n".join(f.text() for f in functions)
    messages = [system(rng.choice(SYSTEM))] if rng.random() < 0.7 else []
    shown = f"{path}\n```python\n{body}\n```\n\n"
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        request, before, after = edit(rng, rng.choice(functions))
        messages += [user(shown + request), assistant(block(path, before, after))]
        shown = ""
    if rng.random() < 0.25:
        body = "\n\n".join(f.text() for f in functions)
        messages += [user("Show the whole file."),
                     assistant(f"{path}\n```python\n{body}\n```")]
    return messages
