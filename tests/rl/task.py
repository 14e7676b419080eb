"""The task: questions over made-up schemas, answered in SQL. The reward is checked by SQLite."""

import random
import re
import sqlite3
import sys
from pathlib import Path

TRAINING = Path(__file__).resolve().parents[2] / "services/reference-engine/training"
sys.path.insert(0, str(TRAINING))

from generate import documents, render  # noqa: E402

END = "<|im_end|>"


class Question:
    """A prompt, the schema that it is about, and the statement that answers it."""

    def __init__(self, messages, tokenizer):
        asked, self.answer = messages[:-1], messages[-1]["content"]
        self.messages = asked
        self.prompt = tokenizer.encode(render(asked, generation_prompt=True), add_special_tokens=False).ids
        text = "\n".join(message["content"] for message in asked)
        self.schema = re.findall(r"CREATE TABLE .*?\);", text, re.S)

    def reward(self, text):
        return reward(text, self.answer, self.schema)


def reward(text, answer, schema):
    """1 for the right statement, 0.3 for one that SQLite can carry out on the schema, else 0."""
    if not text.endswith(END):
        return 0.0
    text = text.removesuffix(END)
    if " ".join(text.split()) == " ".join(answer.split()):
        return 1.0
    return 0.3 if is_well_formed(text, schema) else 0.0


def is_well_formed(statement, schema):
    database = sqlite3.connect(":memory:")
    try:
        for table in schema:
            database.execute(table)
        database.execute("EXPLAIN " + statement)
        return True
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return False
    finally:
        database.close()


def questions(count, tokenizer, seed):
    """Questions of the side of the split that the model was not trained on."""
    made = []
    for _, messages, _ in documents(seed, kind="sql", want_held_out=True):
        question = Question(messages, tokenizer)
        if question.schema and len(question.prompt) < 400:
            made.append(question)
        if len(made) == count:
            random.Random(seed).shuffle(made)
            return made
