"""The work that every client gives the shipped model: three requests, each with a call of a tool."""

import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

CONTENT = json.loads((pathlib.Path(__file__).parent / "tasks.json").read_text())


class Task(NamedTuple):
    """A request, the call that it needs, the tool's result, and the answer in the end."""

    ask: str
    name: str
    arguments: dict
    result: str
    answer: str


# A note and a request for its facts, which the model answers with one JSON object.
NOTE = CONTENT["note"]
TASKS = [Task(**task) for task in CONTENT["tasks"]]
# The calls that reached a tool since they were last taken.
ran = []


def check(holds, what):
    if not holds:
        sys.exit(f"check failed: {what}")


def run(name, **arguments):
    """Carries a call out: notes it, and returns the result."""
    ran.append((name, arguments))
    return next(task.result for task in TASKS if task.name == name)


def get_weather(city: str, days: int) -> str:
    """Tells the weather of a city."""
    return run("get_weather", city=city, days=days)


def get_stock(item: str) -> str:
    """Counts an item in stock."""
    return run("get_stock", item=item)


def create_order(item: str, count: int, customer: str) -> str:
    """Creates an order."""
    return run("create_order", item=item, count=count, customer=customer)


FUNCTIONS = [get_weather, get_stock, create_order]


def parameters(name):
    """The JSON schema of a tool's parameters."""
    properties = {field: {"type": kind} for field, kind in CONTENT["tools"][name].items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def check_end(task, answer):
    """Checks a task's end: the tool ran once with the right arguments, and the answer tells its result."""
    check(ran == [(task.name, task.arguments)], f"{task.ask} The tools ran as {ran}")
    check(answer == task.answer, f"{task.ask} The answer is {answer!r}")
    ran.clear()


def mesh():
    """The gateway's address, an API key and the model, which are the arguments of every client."""
    url, key, model = sys.argv[1:]
    return url, key, model


def tokenizer():
    """The folder with the model's tokenizer, for tools that count tokens themselves."""
    return str(pathlib.Path(__file__).parents[2] / "services/reference-engine/model")


def command(program, *arguments, folder=None):
    """Runs a program of the Python environment that this script runs in."""
    subprocess.run([pathlib.Path(sys.executable).parent / program, *arguments], check=True, cwd=folder)
