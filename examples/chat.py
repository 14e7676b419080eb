"""Calls a running mesh twice with the same question, and prints how many steps each answer took.

    cargo run --release -- up &
    python3 examples/chat.py [URL]

It uses nothing but Python. OpenAI's and Anthropic's clients work as well: docs/clients.md.
"""

import json
import sys
import urllib.request

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
QUESTION = """CREATE TABLE orders (
  id INTEGER PRIMARY KEY,
  city TEXT,
  amount INTEGER
);

What is the average amount of the orders per city?"""


def ask(question):
    """The answer to a question, the count of its tokens, and the counts of its decoding."""
    body = {
        "model": "refrain-tiny",
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "You write SQL. Answer with one statement."},
            {"role": "user", "content": question},
        ],
    }
    headers = {"Authorization": "Bearer refrain-dev", "Content-Type": "application/json"}
    url = URL + "/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    text = answer["choices"][0]["message"]["content"]
    return text, answer["usage"], answer["metrics"]["speculative_decoding"]


for turn in ("first", "second"):
    text, usage, decoding = ask(QUESTION)
    print(f"{turn}: {usage['completion_tokens']} tokens in {decoding['steps']} steps")
print(text)
