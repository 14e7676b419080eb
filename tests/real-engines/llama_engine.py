"""A GGUF file in llama.cpp inside Refrain, beside the same weights in Refrain's own engine and in a llama-server."""

import argparse
import json
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines import LlamaCpp, Process, call, series
from mesh import Stream, Table, await_ready, free_port

PROMPTS = 200
TOKENS = 48
# llama.cpp has keys and values of 16 bits, and Refrain's engine of 32, so near ties are further apart than usual.
NEAR_TIE = 0.05
# The tables of the questions, of the kind that the shipped model was trained on.
TABLES = ["orders", "customers", "books", "flights", "teachers"]
COLUMNS = ["city", "country", "status", "year", "name"]
ASKS = ["the average {} of", "the number of", "the highest {} of", "all columns of", "the sum of {} of"]
SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["city", "count"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "query", "parameters": SCHEMA}}
NAME, MODEL = "GGUF", "model"
# The settings with which it was fastest here; by default it looks for 24 tokens, which few answers have.
NGRAM_MOD = ["--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "8", "--spec-ngram-mod-n-min", "1",
             "--spec-ngram-mod-n-max", "48"]  # fmt: skip


def question(number):
    table, column = TABLES[number % 5], COLUMNS[number // 5 % 5]
    ask = ASKS[(number // 25 + number) % 5].format(column)
    return (f"CREATE TABLE {table} (\n  id INTEGER PRIMARY KEY,\n  {column} TEXT,\n  amount INTEGER\n);\n\n"
            f"What is {ask} the {table} per {column}, number {number}?")


class Mesh:
    """`refrain up` with a model, and two tenants."""

    def __init__(self, options, name, model, draft_model=None, threads=1):
        self.port, operations = free_port(), free_port()
        self.url, self.operations = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{operations}"
        self.name = name
        config = options.work / f"gguf-{name}.toml"
        config.write_text(f"""
[telemetry]
log = "warn"
[gateway]
listen = "127.0.0.1:{self.port}"
operations_listen = "127.0.0.1:{operations}"
[[gateway.keys]]
key = "one"
tenant = "one"
[[gateway.keys]]
key = "two"
tenant = "two"
[draft_store]
data_dir = "{options.work}/gguf-{name}-data"
[[gateway.models]]
id = "{MODEL}"
files = "{model}"
[engine]
model = "{model}"
model_name = "{MODEL}"
threads = {threads}
kv_tokens_max = 16384
max_sessions = 32
{f'draft_model = "{draft_model}"' if draft_model else ""}
""")
        self.command = [options.refrain, "up", "--config", config]
        self.log = options.work / f"gguf-{name}.log"
        self.start()

    def start(self):
        self.process = Process(self.command, self.log)
        await_ready(self.process, self.url, 60)

    def ask(self, content, key="one", tokens=TOKENS, **fields):
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, **fields}
        status, answer = call(self.url + "/v1/chat/completions", body, 120, key)
        if status != 200:
            raise SystemExit(f"{self.name}: {status} {answer}")
        return answer

    def metric(self, name):
        return series(self.operations, name)

    def memory(self):
        """Resident memory without the pages of files, in MB."""
        with open(f"/proc/{self.process.child.pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return int(fields["RssAnon"].split()[0]) / 1024


def tokens(answer):
    return [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]


def steps(answer):
    return answer["metrics"]["speculative_decoding"]["steps"]


def text(answer):
    return answer["choices"][0]["message"]["content"]


def compare(pairs):
    """Compares answers with log-probabilities. Returns how many are equal, part at a near tie, and part elsewhere."""
    same = ties = wrong = 0
    for ours, theirs in pairs:
        found, wanted = tokens(ours), tokens(theirs)
        at = next((at for at, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1]), None)
        if found == wanted:
            same += 1
            continue
        margin = 1.0
        if at is not None:
            best = theirs["choices"][0]["logprobs"]["content"][at]["top_logprobs"]
            margin = best[0]["logprob"] - best[1]["logprob"]
        ties, wrong = ties + (margin < NEAR_TIE), wrong + (margin >= NEAR_TIE)
    return same, ties, wrong


def judge(table, what, pairs, detail=""):
    same, ties, wrong = compare(pairs)
    table.row(NAME, what, wrong == 0 and same > 0.9 * len(pairs),
              f"{same} of {len(pairs)} equal, {ties} part at a near tie, {wrong} elsewhere{detail}")


def check(table, options, own, gguf):
    logged = {"logprobs": True, "top_logprobs": 2}
    numbers = range(PROMPTS)
    wanted = [own.ask(question(number), speculation="off", **logged) for number in numbers]
    plain = [gguf.ask(question(number), key="two", speculation="off", **logged) for number in numbers]
    judge(table, "answers of Refrain's own engine", list(zip(plain, wanted)))
    drafted = [gguf.ask(question(number), key="two", **logged) for number in numbers]
    count, stepped = sum(len(tokens(answer)) for answer in drafted), sum(map(steps, drafted))
    judge(table, "drafts change nothing", list(zip(drafted, plain)), f"; {count} tokens in {stepped} steps")

    draws = [{"temperature": 1, "seed": number} for number in range(50)]
    first = [text(gguf.ask(question(n), key="two", speculation="off", **draw)) for n, draw in enumerate(draws)]
    again = [text(gguf.ask(question(n), key="two", **draw)) for n, draw in enumerate(draws)]
    same = sum(a == b for a, b in zip(first, again))
    # A draw is a near tie far more often than a choice of the best token is, and log-probabilities do not show it.
    table.measured(NAME, "seeds draw the same with drafts", f"{same} of 50 equal")

    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "row", "schema": SCHEMA}}}
    both = [(gguf.ask(question(n), **form, **logged), own.ask(question(n), **form, **logged)) for n in range(20)]
    for answer, _ in both:
        assert set(json.loads(text(answer))) == {"city", "count"}, text(answer)
    judge(table, "forms", both)
    tool = {"tools": [TOOL], "tool_choice": "required"}
    calls = [engine.ask(question(n), **tool)["choices"][0]["message"]["tool_calls"][0]["function"]
             for n in range(10) for engine in (gguf, own)]
    same = sum(a["arguments"] == b["arguments"] for a, b in zip(calls[::2], calls[1::2]))
    table.row(NAME, "tools", same >= 9 and all(call["name"] == "query" for call in calls), f"{same} of 10 calls equal")

    long = "\n".join(question(number) for number in range(36))
    judge(table, "a prompt in pieces", [(gguf.ask(long, **logged), own.ask(long, **logged))],
          f"; {gguf.ask(long)['usage']['prompt_tokens']} tokens")
    cached = [gguf.ask(question(0) * 4, key=key)["usage"]["prompt_tokens_details"]["cached_tokens"]
              for key in ("one", "one", "two", "two")]
    table.row(NAME, "beginnings stay inside a tenant", cached[1] > 100 > max(cached[0], cached[2]) and cached[3] > 100,
              f"cached {cached} tokens of the tenants one, one, two, two")

    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(lambda n: gguf.ask(question(n), key=("one", "two")[n % 2], **logged), range(64))
        judge(table, "eight at once, two tenants", list(zip(asked, plain)))
    leave(table, gguf)

    gguf.process.stop(signal.SIGKILL)
    gguf.start()
    warm = [gguf.ask(question(number), key="two", **logged) for number in range(20)]
    judge(table, "killed and started again", list(zip(warm, plain)),
          f"; {sum(len(tokens(answer)) for answer in warm)} tokens in {sum(map(steps, warm))} steps")


def leave(table, gguf):
    """Checks that a client that leaves frees the engine."""
    before = gguf.metric("refrain_engine_emitted_tokens_total")
    body = {"model": MODEL, "prompt": "a b c", "max_tokens": 2000, "temperature": 0, "ignore_eos": True,
            "stream": True, "speculation": "off"}
    stream = Stream(gguf.url, "/v1/completions", body, key="one")
    next(iter(stream))
    stream.leave()
    until = time.monotonic() + 20
    while gguf.metric("refrain_engine_sessions_open") > 0 and time.monotonic() < until:
        time.sleep(0.02)
    emitted = gguf.metric("refrain_engine_emitted_tokens_total") - before
    table.row(NAME, "a client that leaves", emitted < 1000 and time.monotonic() < until, f"{emitted:.0f} of 2000 tokens")


def windows(table, options):
    """Checks a model whose layers see sliding windows of 32 tokens, with texts that share beginnings and are cut."""
    gguf = Mesh(options, "windows", options.work / "windows.gguf")
    server = Server(options, "windows", gguf=options.work / "windows.gguf")
    server.start()
    logged = {"logprobs": True, "top_logprobs": 2}
    # All begin alike for between a tenth of the text and all of it, and the model goes on far beyond its window.
    long = [question(number % 7) for number in range(8)]
    texts = ["\n".join([*long[: 1 + number % 8], question(number)]) for number in range(48)]
    wanted = [server.ask(text, cache_prompt=False, **logged) for text in texts]
    # With drafts, eight at once, in both tenants; and once more, when all texts and beginnings are kept.
    for turn in ("first", "again"):
        with ThreadPoolExecutor(8) as pool:
            asked = pool.map(lambda n: gguf.ask(texts[n], key=("one", "two")[n % 2], **logged), range(len(texts)))
            found = list(asked)
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in found)
        judge(table, f"windows, {turn}", list(zip(found, wanted)),
              f"; {cached} tokens cached, {sum(len(tokens(answer)) for answer in found)} in {sum(map(steps, found))} steps")
    server.kill()
    gguf.process.stop()


def memory(table, gguf, requests):
    """Checks that the memory does not grow with the requests."""
    def ask(count):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: gguf.ask(question(n % 97), tokens=16, seed=n), range(count)))
    ask(requests // 4)
    before = gguf.memory()
    ask(requests)
    after = gguf.memory()
    table.row(NAME, f"memory over {requests} requests", after < before * 1.1 + 16, f"{before:.0f} MB, then {after:.0f} MB")


class Server(LlamaCpp):
    """A llama-server, asked with the texts of Refrain's prompts."""

    def __init__(self, options, name, more=(), gguf=None):
        super().__init__(options.work, free_port(), options.model)
        self.kind, self.more = f"llama-server {name}", list(more)
        self.gguf = gguf or options.gguf

    def arguments(self):
        arguments = super().arguments()
        arguments[arguments.index("-m") + 1] = self.gguf
        return arguments + self.more

    def ask(self, content, tokens=TOKENS, **fields):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0, **fields}
        return call(self.url + "/v1/chat/completions", body, 120)[1]


def speed(ask, contents, at_once, **fields):
    """Tokens per second."""
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda content: ask(content, **fields), contents))
    return sum(answer["usage"]["completion_tokens"] for answer in answers) / (time.monotonic() - began)


def fresh(number):
    """A question of a kind that nobody asked before."""
    return f"Write a poem of {number} lines about {chr(97 + number % 26) * 3} and {number * 7919 % 1000}."


def race(table, options, gguf):
    """Compares the speeds of repeated work and of work that does not repeat, in turns."""
    servers = {"llama-server": Server(options, "plain"), "ngram-mod": Server(options, "ngram-mod", NGRAM_MOD)}
    for server in servers.values():
        server.start()
    asks = {name: server.ask for name, server in servers.items()} | {"Refrain": gguf.ask}
    count = options.race
    for at_once in (1, 4):
        rates = {name: ([], []) for name in asks}
        for turn in range(3):
            for name, ask in asks.items():
                # An agent asks the same questions in each round; the first round is not counted.
                repeated = [question(1000 + n) for n in range(count)]
                if turn == 0:
                    speed(ask, repeated, at_once, tokens=options.race_tokens)
                rates[name][0].append(speed(ask, repeated, at_once, tokens=options.race_tokens))
                # The shipped model repeats itself where it takes the likeliest tokens.
                news = [fresh(n + 100 * turn + 1000 * at_once) for n in range(count)]
                drawn = {"tokens": options.race_tokens, "temperature": 1.5, "top_p": 1}
                rates[name][1].append(speed(ask, news, at_once, **drawn))
        for kind, what in enumerate(("repeated", "new")):
            medians = {name: statistics.median(rate[kind]) for name, rate in rates.items()}
            ratio = medians["Refrain"] / medians["llama-server"]
            detail = ", ".join(f"{name} {rate:.0f}" for name, rate in medians.items())
            detail = f"{ratio:.2f} of plain; tokens/s: {detail}"
            table.measured(NAME, f"speed, {what}, {at_once} at once", detail)
    for server in servers.values():
        server.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refrain", required=True, type=Path, help="a binary with the feature llama")
    parser.add_argument("--model", required=True, type=Path, help="the folder of the shipped model")
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--gguf", type=Path, help="another file for the race")
    parser.add_argument("--requests", type=int, default=1000, help="of the check of the memory")
    parser.add_argument("--race", type=int, default=12, help="questions of a round")
    parser.add_argument("--race-tokens", type=int, default=TOKENS)
    parser.add_argument("--only", choices=("checks", "windows", "memory", "race"))
    options = parser.parse_args()
    for old in options.work.glob("gguf-*-data"):
        for path in sorted(old.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    table = Table()
    shipped = options.work / "model.gguf"
    if options.only in (None, "checks"):
        own = Mesh(options, "own", "builtin:refrain-tiny")
        gguf = Mesh(options, "llama", shipped)
        check(table, options, own, gguf)
        own.process.stop()
        drafted = Mesh(options, "drafted", shipped, draft_model=shipped)
        answers = [(drafted.ask(fresh(n), logprobs=True, top_logprobs=2, speculation="draft_model"),
                    gguf.ask(fresh(n), logprobs=True, top_logprobs=2, speculation="off")) for n in range(10)]
        judge(table, "a draft model, which is the same file", answers,
              f"; {sum(len(tokens(answer)) for answer, _ in answers)} tokens in {sum(steps(answer) for answer, _ in answers)} steps")
        drafted.process.stop()
        gguf.process.stop()
    if options.only in (None, "windows"):
        windows(table, options)
    if options.only in (None, "memory"):
        gguf = Mesh(options, "memory", shipped)
        memory(table, gguf, options.requests)
        gguf.process.stop()
    if options.only in (None, "race"):
        options.gguf = options.gguf or shipped
        gguf = Mesh(options, "race", options.gguf)
        race(table, options, gguf)
        gguf.process.stop()
    raise SystemExit(table.failed)


if __name__ == "__main__":
    main()
