"""Conversations for agents: questions that need a table or a calculator, and what their answers are worth.

The wording is near to what the shipped model was trained on. It does not know some forms well, so there is something
to learn.
"""

import json
import random
import sqlite3
from dataclasses import dataclass

KINDS = ["order", "ticket", "invoice", "sensor", "device", "project", "payment", "student"]
STATES = ["open", "closed", "active", "pending", "paid", "late", "new", "old", "red", "blue"]
RATES = {"EUR": 100, "USD": 110, "JPY": 2, "GBP": 120, "NOK": 10, "CHF": 105}
LOOKUPS = [
    "Tell me the status of {kind} {id}.", "Show {kind} {id}.", "Please look up {kind} {id}.",
    "What is the status of {kind} {id}?",
]
CONVERSIONS = [
    "Convert to {to}: {amount} {from}.", "Convert {amount} {from} into {to}.", "Convert {amount} {from} to {to}.",
]
ANSWERS_MAX = 4
TOOLS = {
    "lookup": {"kind": "string", "id": "integer"},
    "convert_money": {"amount": "integer", "from": "string", "to": "string"},
}


def schema(name):
    """The schema of a tool's parameters."""
    properties = {key: {"type": kind} for key, kind in TOOLS[name].items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@dataclass
class Question:
    """What a user asks, the call that it needs, and the word that the answer has to have."""

    text: str
    name: str
    arguments: dict
    word: str


@dataclass
class Task:
    """Questions that are asked one after the other, and the rows of the table."""

    questions: list
    rows: list


class Conversation:
    """The user, the table and the calculator of a rollout. It notes what the agent did."""

    def __init__(self, task):
        self.task, self.at = task, 0
        self.calls = [[] for _ in task.questions]
        self.said = [None] * len(task.questions)
        # An agent may run its tools on another thread. Only one of them runs at a time.
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("CREATE TABLE things (kind TEXT, id INTEGER, status TEXT, PRIMARY KEY (kind, id))")
        self.database.executemany("INSERT INTO things VALUES (?, ?, ?)", task.rows)

    def question(self):
        """The text of the question that is open; `None` after the last one."""
        return self.task.questions[self.at].text if self.at < len(self.task.questions) else None

    def answer(self, text):
        """Takes the agent's answer, and returns the next question."""
        self.said[self.at] = text
        self.at += 1
        return self.question()

    def call(self, name, arguments):
        """Carries a call out. Returns its result as JSON text, also where the call is wrong."""
        self.calls[self.at].append((name, arguments))
        try:
            return json.dumps(self.result(name, arguments))
        except (KeyError, TypeError, ValueError, OverflowError, sqlite3.Error):
            return json.dumps({"error": "wrong arguments"})

    def result(self, name, arguments):
        if name == "lookup":
            key = (arguments["kind"], arguments["id"])
            row = self.database.execute("SELECT status FROM things WHERE kind = ? AND id = ?", key).fetchone()
            return {"kind": key[0], "id": key[1], "status": row[0] if row else "unknown"}
        return {"amount": converted(arguments), "unit": arguments["to"]}

    def reward(self):
        """Half a point for each question's call, and half for its answer, by the number of questions."""
        points = 0.0
        for question, calls, said in zip(self.task.questions, self.calls, self.said):
            if calls == [(question.name, question.arguments)]:
                points += 0.5
                points += 0.5 * (question.word in (said or "").rstrip(".").split())
        return points / len(self.task.questions)


def converted(arguments):
    """The calculator: an amount in other money, as a whole number."""
    return int(arguments["amount"]) * RATES[arguments["from"]] // RATES[arguments["to"]]


def tasks(count, seed):
    """Tasks of two or three questions."""
    rng = random.Random(seed)
    return [task(rng, rng.choice([2, 3])) for _ in range(count)]


def task(rng, count):
    questions, rows = [], {}
    for number in range(count):
        if number % 2 == 0:
            arguments = {"kind": rng.choice(KINDS), "id": rng.randint(1, 9999)}
            text, name, word = rng.choice(LOOKUPS), "lookup", rng.choice(STATES)
            rows[arguments["kind"], arguments["id"]] = word
        else:
            source, target = rng.sample(sorted(RATES), 2)
            arguments = {"amount": rng.randint(2, 4000), "from": source, "to": target}
            text, name, word = rng.choice(CONVERSIONS), "convert_money", str(converted(arguments))
        questions.append(Question(text.format(**arguments), name, arguments, word))
    # Others of the same kind, so that a wrong id may find something as well.
    for kind, key in list(rows):
        rows.setdefault((kind, key // 10), rng.choice(STATES))
    return Task(questions, [(*place, status) for place, status in rows.items()])
