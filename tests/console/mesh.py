"""A mesh of one process, and what its operator and its clients say to it."""

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

PATIENCE_SECONDS = 60
QUESTIONS = [
    "What is the average amount of the orders per city?",
    "How many orders does each city have?",
    "What is the largest amount of the orders per city?",
]
TABLE = "CREATE TABLE orders (\n  id INTEGER PRIMARY KEY,\n  city TEXT,\n  amount INTEGER\n);\n\n"
LINE = re.compile(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$")


def wait_until(what, holds, patience=PATIENCE_SECONDS):
    """Waits until `holds` returns something, and returns that."""
    until = time.monotonic() + patience
    while True:
        held = holds()
        if held:
            return held
        if time.monotonic() > until:
            raise AssertionError(f"this did not happen in {patience} s: {what}")
        time.sleep(0.1)


class Mesh:
    """`refrain up` in a folder of its own."""

    def __init__(self, refrain, folder):
        self.data = Path(folder) / "data"
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.trainer = f"127.0.0.1:{found.getsockname()[1]}"
        command = [refrain, "up", "--listen", "127.0.0.1:0", "--data-dir", self.data, "--trainer", self.trainer]
        with open(Path(folder) / "log.txt", "w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        said = ""
        while "Console:" not in said:
            line = self.process.stdout.readline()
            assert line, f"the mesh did not start: {said}"
            said += line
        self.url = re.search(r"Refrain is up: (\S+)/v1", said)[1]
        self.operations = re.search(r"Console:\s+(\S+)/console", said)[1]
        self.token = (self.data / "operator-token").read_text().strip()

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=PATIENCE_SECONDS)
        self.process.stdout.close()

    def admin(self, method, path, body=None):
        """A call of the admin API. Returns its answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.operations}/admin/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)

    def order(self, path, body=None):
        """An order of a trainer. Returns the answer."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"http://{self.trainer}/{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)

    def chat(self, key, question, **fields):
        """The status of a chat."""
        messages = [
            {"role": "system", "content": "You write SQL. Answer with one statement."},
            {"role": "user", "content": TABLE + question},
        ]
        body = {"model": "refrain-tiny", "temperature": 0, "messages": messages} | fields
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        url = f"{self.url}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def metric(self, name, **labels):
        """The sum of a metric over all samples with these labels."""
        with urllib.request.urlopen(f"{self.operations}/metrics", timeout=PATIENCE_SECONDS) as answer:
            page = answer.read().decode()
        total = 0.0
        for line in page.splitlines():
            found = LINE.match(line)
            if found and found[1] == name:
                has = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if all(has.get(label) == value for label, value in labels.items()):
                    total += float(found[3])
        return total

    def audit(self):
        """The acts that were done, in order."""
        lines = (self.data / "audit.jsonl").read_text().splitlines()
        return [act["act"] for act in map(json.loads, lines) if act["outcome"] == "done"]
