"""A llama-server that drafts from its own table, killed and started again, with Refrain's primer and without."""

import statistics
import time
import types

from engines import LlamaCpp, call, series
from llama_engine import fresh
from mesh import Mesh, free_port, prompts

NAME = "primer"
QUESTIONS, TOKENS, ROUNDS = 40, 64, 3
# The 16 tokens before an output are stored with it. Longer drafts than 16 are refused so often that the server
# empties its table.
NGRAM_MOD = ["--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "16", "--spec-ngram-mod-n-min", "1",
             "--spec-ngram-mod-n-max", "16"]  # fmt: skip
PRIMER = "[worker.engine.primer]\ntokens_max = 16384"
DRAFTED, ACCEPTED = "llamacpp:spec_decode_num_draft_tokens_total", "llamacpp:spec_decode_num_accepted_tokens_total"


class Server(LlamaCpp):
    """A llama-server that drafts by itself."""

    def arguments(self):
        return super().arguments() + NGRAM_MOD

    def count(self, name):
        return series(self.url, name)


def begin(options, server, name):
    """Starts the server and a mesh in front of it, with the data of an earlier one of that name."""
    mesh = Mesh(options, "llama-cpp", server.url, f"{NAME}-{name}", PRIMER if name == "on" else "")
    return mesh.ready()


def await_primed(mesh, before):
    """Waits until the primer sends nothing more."""
    until, last = time.monotonic() + 30, before
    while time.monotonic() < until:
        time.sleep(1.5)
        now = mesh.metric("refrain_worker_primer_tokens_total")
        if now == last > before:
            return now - before
        last = now
    raise SystemExit(f"the server is not primed after 30 s: see {mesh.process.log}")


def ask(mesh, asked, **fields):
    """Asks everything. Returns the texts, their tokens, and the seconds."""
    began, texts, tokens = time.monotonic(), [], 0
    for prompt in asked:
        status, answer = mesh.ask(prompt, TOKENS, **fields)
        while status in (502, 503, 504) and time.monotonic() < began + 30:
            time.sleep(0.05)
            status, answer = mesh.ask(prompt, TOKENS, **fields)
        if status != 200:
            raise SystemExit(f"{NAME}: {status} {answer}")
        texts.append(answer["choices"][0]["text"])
        tokens += answer["usage"]["completion_tokens"]
    return types.SimpleNamespace(texts=texts, tokens=tokens, seconds=time.monotonic() - began)


def restarted(server, mesh, asked, waits):
    """Kills the server, starts it again, and asks everything again."""
    before = mesh.metric("refrain_worker_primer_tokens_total")
    server.kill()
    server.start()
    primed = await_primed(mesh, before) if waits else 0
    # The time for which the server read texts before it was asked anything.
    reading = server.count("llamacpp:prompt_seconds_total")
    ask(mesh, [asked[0][:8]])
    found = measured(server, mesh, asked)
    found.primed, found.reading, found.cpu = primed, reading, found.cpu + reading
    return found


def measured(server, mesh, asked, **fields):
    """Asks everything, and measures what the server does meanwhile."""
    drafted, accepted, cpu = server.count(DRAFTED), server.count(ACCEPTED), server.process.cpu_seconds()
    found = ask(mesh, asked, **fields)
    found.primed, found.reading, found.cpu = 0, 0, server.process.cpu_seconds() - cpu
    found.drafted, found.accepted = server.count(DRAFTED) - drafted, server.count(ACCEPTED) - accepted
    return found


def median(rounds, value):
    return statistics.median(value(found) for found in rounds)


def check(table, options):
    plain = LlamaCpp(options.work, free_port(), options.model)
    plain.start()
    asked = prompts(plain)[:QUESTIONS]
    bodies = [{**plain.body(prompt, TOKENS), "response_fields": ["content"]} for prompt in asked]
    expected = [call(plain.url + plain.generate_path, body)[1]["content"] for body in bodies]
    plain.kill()
    server = Server(options.work, free_port(), options.model)
    server.kind = "llama-server ngram-mod"
    server.start()
    found = {}
    for name in ("off", "on"):
        mesh = begin(options, server, name)
        ask(mesh, asked)
        # The uploader sends what has ended within some hundred milliseconds.
        time.sleep(1)
        found[name] = [restarted(server, mesh, asked, waits=name == "on") for _ in range(ROUNDS)]
        # The server runs on, and has answered everything before.
        found[f"{name}, asked again"] = [measured(server, mesh, asked) for _ in range(ROUNDS)]
        if name == "on":
            found["at once"] = [restarted(server, mesh, asked, waits=False) for _ in range(ROUNDS)]
            mesh.stop()
            # The worker has forgotten everything as well, and reads the store once a request has named the namespace.
            mesh = begin(options, server, name)
            ask(mesh, [asked[0][:8]])
            await_primed(mesh, 0)
            found["new worker"] = [restarted(server, mesh, asked, waits=True)]
        # Texts that hardly repeat show what the primer costs.
        drawn = {"temperature": 1.5, "top_p": 1, "seed": 7}
        new = [server.tokenize(fresh(number)) for number in range(ROUNDS * QUESTIONS)]
        found[f"{name}, new texts"] = [
            measured(server, mesh, new[QUESTIONS * turn : QUESTIONS * (turn + 1)], **drawn) for turn in range(ROUNDS)
        ]
        mesh.stop()
    server.kill()
    for name, rounds in found.items():
        if "new texts" in name:
            continue
        pairs = [pair for of in rounds for pair in zip(of.texts, expected)]
        same = sum(ours == theirs for ours, theirs in pairs)
        # Drafts change the batches, and so the order of tokens that are nearly tied.
        table.row(NAME, f"{name}: same text", same > 0.95 * len(pairs), f"{same} of {len(pairs)}")
    for name, rounds in found.items():
        kind = name.removeprefix("off").removeprefix("on")
        off = found["off" + kind if "off" + kind in found else "off"]
        rates = [median(of, lambda of: of.tokens / (of.seconds + of.reading)) for of in (rounds, off)]
        costs = [median(of, lambda of: of.cpu / of.tokens) for of in (rounds, off)]
        counts = {field: median(rounds, lambda of, field=field: getattr(of, field))
                  for field in ("tokens", "drafted", "accepted", "primed", "reading")}  # fmt: skip
        table.measured(NAME, name, (
            f"{rates[0]:.0f} tokens/s, {rates[0] / rates[1]:.2f} of off; CPU time of the server {costs[0] / costs[1]:.2f} of off; "
            + "{tokens:.0f} tokens, {accepted:.0f} accepted of {drafted:.0f} drafted; {primed:.0f} primed in {reading:.2f} s".format(**counts)
        ))  # fmt: skip
    accepted = {name: median(rounds, lambda of: of.accepted) for name, rounds in found.items()}
    holds = min(accepted["on"], accepted["new worker"]) > 2 * accepted["off"] + 50
    table.row(NAME, "a primed server drafts", holds, f"accepted {accepted}")
