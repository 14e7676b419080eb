"""A mesh in front of a real engine, and the common parts of its checks."""

import http.client
import json
import re
import socket
import subprocess
import time

from engines import SERVED, Process, call, series

PUBLIC, TENANT = "public-name", "tenant"
PROMPTS = 50
TOKENS = 48
# Where the two best tokens are closer than this, a batch of another size may change their order.
NEAR_TIE = 1e-3


def keys(refrain):
    """New keys of a mesh: the section of its configuration, and the values by name."""
    text = subprocess.run([refrain, "keys"], check=True, capture_output=True, text=True).stdout
    return text, dict(re.findall(r'^(\w+) = "(.*)"$', text, re.M))


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def await_ready(process, url, seconds=30):
    """Waits until a service of Refrain is ready."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.child.poll() is not None:
            raise SystemExit(f"refrain exited: see {process.log}")
        try:
            if call(url + "/readyz", timeout=2)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"refrain is not ready after {seconds} s: see {process.log}")


class Mesh:
    """`refrain up` in front of an engine."""

    def __init__(self, options, kind, engine_url, name, settings="", served=SERVED, env=None):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.refrain = options.refrain
        self.data = options.work / f"{name}-data"
        config = options.work / f"{name}.toml"
        config.write_text(f"""
[urls]
engine = "{engine_url}"
[telemetry]
log = "info"
[gateway]
listen = "127.0.0.1:{self.port}"
anonymous_tenant = "{TENANT}"
[[gateway.models]]
id = "{PUBLIC}"
files = "{options.model}"
[draft_store]
data_dir = "{self.data}"
[worker.engine]
kind = "{kind}"
model = "{PUBLIC}"
served_model = "{served}"
files = "{options.model}"
{settings}
""")
        self.process = Process([options.refrain, "up", "--config", config], options.work / f"{name}.log", env)

    def ready(self):
        await_ready(self.process, self.url)
        return self

    def body(self, prompt, tokens_max, **fields):
        return {"model": PUBLIC, "prompt": prompt, "max_tokens": tokens_max, "temperature": 0, **fields}

    def ask(self, prompt, tokens_max=TOKENS, timeout=60, key=None, **fields):
        return call(self.url + "/v1/completions", self.body(prompt, tokens_max, **fields), timeout, key)

    def metric(self, name):
        return series(self.url, name)

    def stop(self):
        code = self.process.stop()
        if code != 0:
            raise SystemExit(f"refrain exited with status {code}: see {self.process.log}")

    def kept(self, tenant=TENANT):
        """The documents of a tenant in the draft store of a stopped mesh, as `refrain store export` writes them."""
        trace = self.data.with_suffix(".jsonl")
        command = [self.refrain, "store", "export", "--data-dir", self.data, "--tenant", tenant, "--output", trace]
        code = Process(command, self.process.log).child.wait()
        if code != 0:
            raise SystemExit(f"refrain store export exited with status {code}: see {self.process.log}")
        return [json.loads(line) for line in trace.read_text().splitlines()]

    def outputs(self):
        """Stops the mesh. Returns the output token ids in the draft store, by session."""
        self.stop()
        return {call["session"]: call["output_token_ids"] for call in self.kept()}


def clear(folder, suffix):
    """Deletes the data of earlier runs."""
    for old in folder.glob(f"*{suffix}"):
        for path in sorted(old.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        old.rmdir()


def prompts(engine):
    """Prompts of the kind that the shipped model was trained on."""
    tables = ["orders", "customers", "books", "flights", "teachers"]
    columns = ["city", "country", "status", "year", "name"]
    asks = ["the average {} of", "the number of", "the highest {} of", "all columns of", "the sum of {} of"]
    made = []
    for number in range(PROMPTS):
        table, column = tables[number % 5], columns[number // 5 % 5]
        ask = asks[(number // 25 + number) % 5].format(column)
        text = (
            "<|im_start|>system\nYou write SQL. Answer with one statement.<|im_end|>\n<|im_start|>user\n"
            f"CREATE TABLE {table} (\n  id INTEGER PRIMARY KEY,\n  {column} TEXT,\n  amount INTEGER\n);\n\n"
            f"What is {ask} the {table} per {column}, number {number}?<|im_end|>\n<|im_start|>assistant\n"
        )
        made.append(engine.tokenize(text))
    return made


class Stream:
    """A streamed completion, read event by event."""

    def __init__(self, url, path, body, key=None):
        host, port = url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=60)
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self.connection.request("POST", path, json.dumps(body), headers)
        self.response = self.connection.getresponse()

    def __iter__(self):
        for line in self.response:
            if line.startswith(b"data: "):
                yield line[6:].strip()

    def leave(self):
        self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def await_value(measured, least, seconds=20):
    """Waits until a measured value is at least `least`. Returns the last value."""
    until = time.monotonic() + seconds
    while (value := measured()) < least and time.monotonic() < until:
        time.sleep(0.002)
    return value


def check_disconnects(table, name, engine, mesh, prompt, tokens_max, **fields):
    """Checks that a client that disconnects frees the engine, whether it streams or not.

    `fields` make the output so long that the engine does not reach its end meanwhile.
    """
    before, freed = engine.metric(engine.generated_series), []
    for stream in (True, False):
        body = mesh.body(prompt, tokens_max, stream=stream, session=disconnected_session(stream), **fields)
        if stream:
            reading = Stream(mesh.url, "/v1/completions", body)
            events = iter(reading)
            for _ in range(5):
                next(events)
            disconnect = reading.leave
        else:
            connection = http.client.HTTPConnection(*mesh.url.removeprefix("http://").split(":"))
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            await_value(lambda: engine.metric(engine.running_series), 1)
            disconnect = connection.close
        started = time.monotonic()
        disconnect()
        while engine.metric(engine.running_series) > 0 and time.monotonic() < started + 20:
            time.sleep(0.005)
        freed.append(time.monotonic() - started)
    generated = engine.metric(engine.generated_series) - before
    detail = (
        f"engine free after {freed[0] * 1e3:.0f} ms (streamed), {freed[1] * 1e3:.0f} ms (not); "
        f"{generated:.0f} of {2 * tokens_max} tokens"
    )
    table.row(name, "a client that disconnects", max(freed) < 1.0 and generated < tokens_max, detail)


def disconnected_session(stream):
    """The session of a request of `check_disconnects`."""
    return f"disconnected-{'streamed' if stream else 'whole'}"


class Table:
    """The printed results of the checks."""

    def __init__(self):
        self.failed = False

    def row(self, engine, name, holds, detail):
        self.failed |= not holds
        self.line(engine, name, "holds" if holds else "FAILS", detail)

    def measured(self, engine, name, detail):
        """Prints a measurement that is not judged."""
        self.line(engine, name, "measured", detail)

    @staticmethod
    def line(engine, name, verdict, detail):
        print(f"{engine:<10} {name:<34} {verdict:<8} {detail}", flush=True)


def compare(engine, outputs, near_tie=NEAR_TIE):
    """Compares outputs, given as (name, prompt, output, the engine's own output).

    Returns the number of equal ones, the number that part at a near-tie, and the names of the others.
    """
    same, ties, wrong = 0, 0, []
    for name, prompt, ours, theirs in outputs:
        differ = next((at for at, pair in enumerate(zip(ours or [], theirs)) if pair[0] != pair[1]), None)
        if ours == theirs:
            same += 1
        elif differ is not None and engine.margin(prompt + theirs[:differ]) < near_tie:
            ties += 1
        else:
            wrong.append(name)
    return same, ties, wrong
