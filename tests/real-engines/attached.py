"""A real vLLM with Refrain's package inside, and a mesh in front of it whose worker says whose each request is."""

import collections
import http.client
import json
import signal
import threading
import time

import probe
from attach import FIRST, HYBRID, NGRAM, PROMPTS, SUFFIX, accepted_length, arguments, follows, plugins
from engines import Vllm, series
from mesh import TENANT, TOKENS, Mesh, Stream, compare, free_port, keys, prompts

NAME = "attached"
OTHER, OTHER_KEY = "other", "other-key"
TENANTS = 2
# The shipped model counts on for ever.
ENDLESS = "1, 2, 3, 4, 5, 6,"
ENDLESS_TOKENS = 1500
# Every prompt once in each: drafted for from nothing, in chunks, from what was said, after a restart, by the scheduler.
TURNS = ("cold", "chunks", "warm", "again", "hybrid")


class Inside(Vllm):
    """A vLLM with the package inside, which is told of a mesh and brings no namespace of its own."""

    def __init__(self, options, store, values):
        self.steps_file = options.work / f"{NAME}.steps"
        self.steps_file.write_bytes(b"")
        self.metrics = f"127.0.0.1:{free_port()}"
        variables = {
            **plugins(options, self.steps_file), **follows(f"http://{store}", values),
            "REFRAIN_CLIENT_METRICS_LISTEN": self.metrics,
        }  # fmt: skip
        super().__init__(options.work, free_port(), options.model, SUFFIX, variables)
        self.kind = NAME

    def told(self, name):
        """A series of the package inside."""
        return series(f"http://{self.metrics}", name)

    def steps_of(self, call):
        """What a call answers, and the steps that were made meanwhile."""
        before = len(probe.records(self.steps_file))
        answer = call()
        return answer, probe.records(self.steps_file)[before:]


class Asked:
    """All that was asked of the mesh: what must be in its store, and be there once."""

    def __init__(self, mesh):
        self.mesh, self.sessions, self.failures = mesh, collections.Counter(), []
        # Outputs of the other tenant.
        self.others = 0

    def ask(self, session, prompt, tokens_max=TOKENS, choices=1, **fields):
        status, answer = self.mesh.ask(prompt, tokens_max, session=session, **fields)
        self.sessions[session] += choices
        if status != 200:
            self.failures.append(f"{session}: {status} {answer}")
            return None
        return answer["choices"][0]

    def said(self):
        """Outputs of both tenants."""
        return self.sessions.total() + self.others


def check(table, options):
    section, values = keys(options.refrain)
    store = f"127.0.0.1:{free_port()}"
    engine = Inside(options, store, values)
    engine.start()
    try:
        settings = "\n".join((
            "attached = true", "pass_priority = true", section, "[[gateway.keys]]", f'key = "{OTHER_KEY}"', f'tenant = "{OTHER}"',
        ))  # fmt: skip
        listen = {"REFRAIN_DRAFT_STORE__LISTEN": store}
        mesh = Mesh(options, "vllm", engine.url, NAME, settings, env=listen).ready()
        run(table, engine, mesh, options)
    finally:
        engine.process.stop(signal.SIGKILL)


def run(table, engine, mesh, options):
    asked, texts = Asked(mesh), prompts(engine)[:PROMPTS]
    # Asked directly, by nobody: drafted for from the request's own text, and kept nowhere.
    alone = [engine.steps_of(lambda prompt=prompt: engine.greedy(prompt, TOKENS)) for prompt in texts]
    expected = [output for output, _ in alone]
    ask_all(asked, "cold", texts)
    ask_all(asked, "chunks", texts, chunk_tokens=7)
    warm = [steps for _, steps in (engine.steps_of(lambda: asked.ask(f"warm-{at}", prompt)) for at, prompt in enumerate(texts))]
    tenants(table, engine, asked, texts, alone, warm)
    groups(table, engine, asked, texts[1])
    endings(table, asked, texts[2])
    leaving(table, engine, asked)
    priority_unheeded(table, asked, texts[3])
    settle(mesh)
    restarted(table, engine, asked, texts, warm)
    rejections = engine.told("refrain_client_rejections_total")
    table.row(NAME, "what requests brought", rejections == 0, f"{rejections:.0f} refused inside")
    settle(mesh)
    hybrid(table, engine, asked, texts, options)
    priority_heeded(table, engine, asked, texts)
    mesh.stop()
    kept(table, engine, asked, texts, expected)


def ask_all(asked, turn, texts, **fields):
    for at, prompt in enumerate(texts):
        asked.ask(f"{turn}-{at}", prompt, **fields)


def settle(mesh):
    """Waits until the store has all that was said."""
    until = time.monotonic() + 30
    while mesh.metric("refrain_upload_pending_tokens") > 0 and time.monotonic() < until:
        time.sleep(0.05)


def tenants(table, engine, asked, texts, alone, warm):
    """What one tenant said helps it alone."""
    at = max(range(len(texts)), key=lambda at: len(alone[at][1]))
    turns = []
    for turn in ("first", "again"):
        session = f"{OTHER}-{turn}"
        _, steps = engine.steps_of(lambda session=session: asked.ask(session, texts[at], key=OTHER_KEY))
        asked.others += asked.sessions.pop(session)
        turns.append(len(steps))
    first, again, own = *turns, len(warm[at])
    holds = first > 2 * own and first > 2 * again
    detail = f"steps for an output that {TENANT} knows: {own}; {OTHER}, at first {first}, then {again}; asked by nobody {len(alone[at][1])}"
    table.row(NAME, "tenants are apart", holds, detail)


def groups(table, engine, asked, prompt):
    asked.ask("grouped", prompt, choices=3, n=3, temperature=1, seed=5, group="g", vllm_xargs={"refrain_namespace": "forged"})
    # Counted every few seconds.
    told = await_value(lambda: engine.told("refrain_replica_groups"), 1)
    table.row(NAME, "groups reach the engine", told == 1, f"{told:.0f} inside")


def endings(table, asked, prompt):
    """How an output ended, as the client hears it."""
    whole = asked.ask("ends", prompt)
    word = whole["text"].split()[1]
    said = [
        whole["finish_reason"], asked.ask("short", prompt, 3)["finish_reason"],
        asked.ask("cut", prompt, stop=[word])["finish_reason"],
    ]  # fmt: skip
    table.row(NAME, "why outputs end", said == ["stop", "length", "stop"], f"an end token, a limit, a stop string: {', '.join(said)}")


def leaving(table, engine, asked):
    """A client that leaves frees the engine, whether it streams or not."""
    mesh, prompt = asked.mesh, engine.tokenize(ENDLESS)
    before, freed = engine.metric(engine.generated_series), []
    for stream in (True, False):
        session = f"left-{stream}"
        asked.sessions[session] += 1
        body = mesh.body(prompt, ENDLESS_TOKENS, stream=stream, session=session)
        if stream:
            reading = Stream(mesh.url, "/v1/completions", body)
            next(iter(reading))
            leave = reading.leave
        else:
            connection = http.client.HTTPConnection(*mesh.url.removeprefix("http://").split(":"))
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            await_value(lambda: engine.metric(engine.running_series), 1)
            leave = connection.close
        left = time.monotonic()
        leave()
        while engine.metric(engine.running_series) > 0 and time.monotonic() < left + 20:
            time.sleep(0.005)
        freed.append(time.monotonic() - left)
    said = engine.metric(engine.generated_series) - before
    detail = f"engine free after {freed[0] * 1e3:.0f} ms (streamed), {freed[1] * 1e3:.0f} ms (not); {said:.0f} of {2 * ENDLESS_TOKENS} tokens"
    table.row(NAME, "a client that leaves", max(freed) < 1.0 and said < ENDLESS_TOKENS, detail)


def await_value(measured, least, seconds=20):
    """The figure, once it is so large, or what it is then."""
    until = time.monotonic() + seconds
    while (value := measured()) < least and time.monotonic() < until:
        time.sleep(0.002)
    return value


def priority_unheeded(table, asked, prompt):
    """A vLLM that was not started with the policy takes the number, and goes by order of arrival."""
    said = {name: asked.ask(f"unheeded-{name}", prompt, priority=name) for name in ("high", "normal", "low")}
    same = len({choice and choice["text"] for choice in said.values()}) == 1
    table.row(NAME, "priorities without the policy", same and not asked.failures, "taken, and not heeded")


def restarted(table, engine, asked, texts, warm):
    """A new vLLM knows what the mesh remembers, soon after it is there."""
    engine.process.stop(signal.SIGTERM)
    engine.start()
    known = introduced(engine, asked)
    detail = f"{known:.0f} outputs are inside before anybody asks; {asked.said()} were said"
    # Those of the calls on behalf of the two tenants stay or go, by whether they came before what the mesh remembers.
    holds = asked.said() <= known <= asked.said() + TENANTS
    table.row(NAME, "restarted, told by the mesh", holds, detail)
    cold = []
    for at, prompt in enumerate(texts):
        _, steps = engine.steps_of(lambda at=at, prompt=prompt: asked.ask(f"again-{at}", prompt))
        cold.append(steps)
    for what, count in (("the first request", 1), (f"the first {FIRST} requests", FIRST), ("all requests", PROMPTS)):
        now, before = accepted_length(cold[:count]), accepted_length(warm[:count])
        table.row(NAME, f"restarted, {what}", now >= 0.9 * before, f"{now:.2f} tokens a step, before {before:.2f}")


def introduced(engine, asked):
    """The mesh finds that its engine is back, and tells it whose requests there were. How many outputs that brought inside."""
    return await_value(lambda: engine.told("refrain_replica_documents"), asked.said(), 60)


def hybrid(table, engine, asked, texts, options):
    """The same with the scheduler over n-grams, of an engine that heeds priorities and has one seat."""
    engine.process.stop(signal.SIGTERM)
    engine.more = [*arguments(options, NGRAM + HYBRID), "--scheduling-policy", "priority", "--max-num-seqs", "1"]
    engine.start()
    introduced(engine, asked)
    before = engine.metric("vllm:iteration_tokens_total_count"), engine.metric(engine.generated_series)
    ask_all(asked, "hybrid", texts)
    steps = engine.metric("vllm:iteration_tokens_total_count") - before[0]
    tokens = engine.metric(engine.generated_series) - before[1]
    detail = f"{tokens:.0f} tokens in {steps:.0f} steps"
    table.row(NAME, "the scheduler instead", tokens > 3 * steps, detail)


def priority_heeded(table, engine, asked, texts):
    """Of two that wait, the one that matters more goes first, though it came later."""
    ended, threads = [], []

    def ask(session, prompt, tokens_max, priority):
        asked.ask(session, prompt, tokens_max, priority=priority)
        ended.append(priority)

    def start(*what):
        threads.append(threading.Thread(target=ask, args=what))
        threads[-1].start()

    start("seated", engine.tokenize(ENDLESS), ENDLESS_TOKENS, "normal")
    seated = await_value(lambda: engine.metric(engine.running_series), 1)
    for count, (priority, prompt) in enumerate((("low", texts[4]), ("high", texts[5])), 1):
        start(f"waits-{priority}", prompt, TOKENS, priority)
        waiting = await_value(lambda count=count: engine.metric("vllm:num_requests_waiting"), count)
    for thread in threads:
        thread.join()
    holds = seated == 1 and waiting == 2 and ended.index("high") < ended.index("low")
    table.row(NAME, "priorities with the policy", holds, f"{waiting:.0f} waited; ended in the order {', '.join(ended)}")


def kept(table, engine, asked, texts, expected):
    """What the store has: every output once, as it was said, with why it ended."""
    table.row(NAME, "all were answered", not asked.failures, "; ".join(asked.failures[:3]) or f"{asked.sessions.total()} requests")
    documents = asked.mesh.kept()
    sessions = collections.Counter(document["session"] for document in documents)
    strange = [str(session) for session in sessions | asked.sessions if sessions[session] != asked.sessions[session]]
    detail = f"{len(documents)} of {asked.sessions.total()} outputs; not once: {', '.join(strange) or 'none'}"
    table.row(NAME, "outputs are in the store once", not strange, detail)
    by_session = {document["session"]: document for document in documents}
    outputs = [
        (f"{turn}-{at}", prompt, by_session.get(f"{turn}-{at}", {}).get("output_token_ids"), expected[at])
        for turn in TURNS for at, prompt in enumerate(texts)
    ]  # fmt: skip
    same, ties, wrong = compare(engine, outputs)
    detail = f"{same} of {len(outputs)} outputs; {ties} part at near-ties; {len(wrong)} differ"
    table.row(NAME, "same greedy tokens", not wrong, detail)
    ends = {
        "ends": "stop", "short": "length", "cut": "stop", "left-True": "cancelled", "left-False": "cancelled", "seated": "length",
    }  # fmt: skip
    found = {session: by_session.get(session, {}).get("finish") for session in ends}
    whole, cut = (by_session.get(session, {}).get("output_token_ids", []) for session in ("ends", "cut"))
    # Cut where its stop string ends: the engine goes on for a while, and drafts from that.
    holds = found == ends and 0 < len(cut) < len(whole) and cut == whole[: len(cut)]
    table.row(NAME, "why they ended, in the store", holds, ", ".join(f"{name} {how}" for name, how in found.items()))
    group = {document["group"] for document in documents if document["session"] == "grouped"}
    table.row(NAME, "groups, in the store", group == {"g"}, f"{group}")
