"""A real vLLM with Refrain's plugin inside, behind a mesh whose worker sends it the namespace of each request."""

import collections
import signal
import threading
import time

import probe
from attach import (
    FIRST,
    HYBRID,
    NGRAM,
    PROMPTS,
    SUFFIX,
    accepted_length,
    arguments,
    plugin_variables,
    probe_variables,
)
from engines import Vllm, series
from mesh import (
    TENANT,
    TOKENS,
    Mesh,
    await_value,
    check_disconnects,
    compare,
    disconnected_session,
    free_port,
    keys,
    prompts,
)

NAME = "attached"
OTHER, OTHER_KEY = "other", "other-key"
TENANTS = 2
# A text that the shipped model continues for ever.
ENDLESS = "1, 2, 3, 4, 5, 6,"
ENDLESS_TOKENS = 1500
# Each round sends every prompt once: without drafts, in chunks, with drafts, after a restart, and with the scheduler.
TURNS = ("cold", "chunks", "warm", "again", "hybrid")


class AttachedVllm(Vllm):
    """A vLLM with the plugin inside, which follows a mesh and has no namespace of its own."""

    def __init__(self, options, store, values):
        self.steps_file = options.work / f"{NAME}.steps"
        self.steps_file.write_bytes(b"")
        self.metrics = f"127.0.0.1:{free_port()}"
        variables = {
            **probe_variables(options, self.steps_file), **plugin_variables(f"http://{store}", values),
            "REFRAIN_CLIENT_METRICS_LISTEN": self.metrics,
        }  # fmt: skip
        super().__init__(options.work, free_port(), options.model, SUFFIX, variables)
        self.kind = NAME

    def plugin_metric(self, name):
        """A metric of the plugin."""
        return series(f"http://{self.metrics}", name)

    def steps_of(self, call):
        """Makes a call. Returns its result, and the steps of the engine meanwhile."""
        before = len(probe.records(self.steps_file))
        answer = call()
        return answer, probe.records(self.steps_file)[before:]


class RequestLog:
    """All requests to the mesh. The store must have the output of each, and have it once."""

    def __init__(self, mesh):
        self.mesh, self.sessions, self.failures = mesh, collections.Counter(), []
        # The number of outputs of the other tenant.
        self.others = 0

    def ask(self, session, prompt, tokens_max=TOKENS, choices=1, **fields):
        status, answer = self.mesh.ask(prompt, tokens_max, session=session, **fields)
        self.sessions[session] += choices
        if status != 200:
            self.failures.append(f"{session}: {status} {answer}")
            return None
        return answer["choices"][0]

    def outputs(self):
        """The number of outputs of both tenants."""
        return self.sessions.total() + self.others


def check(table, options):
    section, values = keys(options.refrain)
    store = f"127.0.0.1:{free_port()}"
    engine = AttachedVllm(options, store, values)
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
    asked, texts = RequestLog(mesh), prompts(engine)[:PROMPTS]
    # Sent directly, without a namespace: such a request drafts from its own text, and its output is not kept.
    alone = [engine.steps_of(lambda prompt=prompt: engine.greedy(prompt, TOKENS)) for prompt in texts]
    expected = [output for output, _ in alone]
    ask_all(asked, "cold", texts)
    ask_all(asked, "chunks", texts, chunk_tokens=7)
    warm = [steps for _, steps in (engine.steps_of(lambda: asked.ask(f"warm-{at}", prompt)) for at, prompt in enumerate(texts))]
    tenants(table, engine, asked, texts, alone, warm)
    groups(table, engine, asked, texts[1])
    endings(table, asked, texts[2])
    disconnects(table, engine, asked)
    priority_ignored(table, asked, texts[3])
    settle(mesh)
    restarted(table, engine, asked, texts, warm)
    rejections = engine.plugin_metric("refrain_client_rejections_total")
    table.row(NAME, "fields of requests", rejections == 0, f"{rejections:.0f} refused by the plugin")
    settle(mesh)
    hybrid(table, engine, asked, texts, options)
    priority_respected(table, engine, asked, texts)
    mesh.stop()
    kept(table, engine, asked, texts, expected)


def ask_all(asked, turn, texts, **fields):
    for at, prompt in enumerate(texts):
        asked.ask(f"{turn}-{at}", prompt, **fields)


def settle(mesh):
    """Waits until the store has all outputs."""
    until = time.monotonic() + 30
    while mesh.metric("refrain_upload_pending_tokens") > 0 and time.monotonic() < until:
        time.sleep(0.05)


def tenants(table, engine, asked, texts, alone, warm):
    """Checks that outputs of one tenant are drafts for that tenant only."""
    at = max(range(len(texts)), key=lambda at: len(alone[at][1]))
    turns = []
    for turn in ("first", "again"):
        session = f"{OTHER}-{turn}"
        _, steps = engine.steps_of(lambda session=session: asked.ask(session, texts[at], key=OTHER_KEY))
        asked.others += asked.sessions.pop(session)
        turns.append(len(steps))
    first, again, own = *turns, len(warm[at])
    holds = first > 2 * own and first > 2 * again
    detail = (
        f"steps for an output that {TENANT} knows: {own}; {OTHER}, at first {first}, then {again}; "
        f"without a namespace {len(alone[at][1])}"
    )
    table.row(NAME, "tenants are apart", holds, detail)


def groups(table, engine, asked, prompt):
    forged = {"refrain_namespace": "forged"}
    asked.ask("grouped", prompt, choices=3, n=3, temperature=1, seed=5, group="g", vllm_xargs=forged)
    # The plugin counts its groups every few seconds.
    groups = await_value(lambda: engine.plugin_metric("refrain_replica_groups"), 1)
    table.row(NAME, "groups reach the engine", groups == 1, f"{groups:.0f} in the plugin")


def endings(table, asked, prompt):
    """Checks the finish reasons that clients get."""
    whole = asked.ask("ends", prompt)
    word = whole["text"].split()[1]
    reasons = [
        whole["finish_reason"], asked.ask("short", prompt, 3)["finish_reason"],
        asked.ask("cut", prompt, stop=[word])["finish_reason"],
    ]  # fmt: skip
    detail = f"an end token, a limit, a stop string: {', '.join(reasons)}"
    table.row(NAME, "finish reasons", reasons == ["stop", "length", "stop"], detail)


def disconnects(table, engine, asked):
    for stream in (True, False):
        asked.sessions[disconnected_session(stream)] += 1
    check_disconnects(table, NAME, engine, asked.mesh, engine.tokenize(ENDLESS), ENDLESS_TOKENS)


def priority_ignored(table, asked, prompt):
    """Checks that a vLLM without the priority policy accepts priorities, and ignores them."""
    answers = {name: asked.ask(f"ignored-{name}", prompt, priority=name) for name in ("high", "normal", "low")}
    same = len({choice and choice["text"] for choice in answers.values()}) == 1
    table.row(NAME, "priorities without the policy", same and not asked.failures, "accepted and ignored")


def restarted(table, engine, asked, texts, warm):
    """Checks that a restarted vLLM soon has the drafts of the mesh."""
    engine.process.stop(signal.SIGTERM)
    engine.start()
    known = introduced(engine, asked)
    detail = f"the plugin has {known:.0f} outputs before the first request, of {asked.outputs()}"
    # The outputs of the two warm-up requests are there or not, by whether they came before the drafts of the mesh.
    holds = asked.outputs() <= known <= asked.outputs() + TENANTS
    table.row(NAME, "restarted, drafts of the mesh", holds, detail)
    cold = []
    for at, prompt in enumerate(texts):
        _, steps = engine.steps_of(lambda at=at, prompt=prompt: asked.ask(f"again-{at}", prompt))
        cold.append(steps)
    for what, count in (("the first request", 1), (f"the first {FIRST} requests", FIRST), ("all requests", PROMPTS)):
        now, before = accepted_length(cold[:count]), accepted_length(warm[:count])
        table.row(NAME, f"restarted, {what}", now >= 0.9 * before, f"{now:.2f} tokens a step, before {before:.2f}")


def introduced(engine, asked):
    """Waits until the mesh has sent a warm-up request for each namespace. Returns the number of outputs in the
    plugin."""
    return await_value(lambda: engine.plugin_metric("refrain_replica_documents"), asked.outputs(), 60)


def hybrid(table, engine, asked, texts, options):
    """Restarts the engine with the scheduler over n-grams, with the priority policy, and with one slot."""
    engine.process.stop(signal.SIGTERM)
    engine.more = [*arguments(options, NGRAM + HYBRID), "--scheduling-policy", "priority", "--max-num-seqs", "1"]
    engine.start()
    introduced(engine, asked)
    before = engine.metric("vllm:iteration_tokens_total_count"), engine.metric(engine.generated_series)
    ask_all(asked, "hybrid", texts)
    steps = engine.metric("vllm:iteration_tokens_total_count") - before[0]
    tokens = engine.metric(engine.generated_series) - before[1]
    detail = f"{tokens:.0f} tokens in {steps:.0f} steps"
    table.row(NAME, "drafts by the scheduler", tokens > 3 * steps, detail)


def priority_respected(table, engine, asked, texts):
    """Checks that of two waiting requests the one with the higher priority runs first, though it came later."""
    ended, threads = [], []

    def ask(session, prompt, tokens_max, priority):
        asked.ask(session, prompt, tokens_max, priority=priority)
        ended.append(priority)

    def start(*arguments):
        threads.append(threading.Thread(target=ask, args=arguments))
        threads[-1].start()

    start("running", engine.tokenize(ENDLESS), ENDLESS_TOKENS, "normal")
    running = await_value(lambda: engine.metric(engine.running_series), 1)
    for count, (priority, prompt) in enumerate((("low", texts[4]), ("high", texts[5])), 1):
        start(f"waits-{priority}", prompt, TOKENS, priority)
        waiting = await_value(lambda count=count: engine.metric("vllm:num_requests_waiting"), count)
    for thread in threads:
        thread.join()
    holds = running == 1 and waiting == 2 and ended.index("high") < ended.index("low")
    table.row(NAME, "priorities with the policy", holds, f"{waiting:.0f} waited; ended in the order {', '.join(ended)}")


def kept(table, engine, asked, texts, expected):
    """Checks the store: every output once, with the right tokens and finish reason."""
    detail = "; ".join(asked.failures[:3]) or f"{asked.sessions.total()} requests"
    table.row(NAME, "all requests were answered", not asked.failures, detail)
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
        "ends": "stop", "short": "length", "cut": "stop", disconnected_session(True): "cancelled",
        disconnected_session(False): "cancelled", "running": "length",
    }  # fmt: skip
    found = {session: by_session.get(session, {}).get("finish") for session in ends}
    whole, cut = (by_session.get(session, {}).get("output_token_ids", []) for session in ("ends", "cut"))
    # The output is cut where its stop string ends. The engine goes on for a while, and drafts from that.
    holds = found == ends and 0 < len(cut) < len(whole) and cut == whole[: len(cut)]
    table.row(NAME, "finish reasons, in the store", holds, ", ".join(f"{name} {how}" for name, how in found.items()))
    group = {document["group"] for document in documents if document["session"] == "grouped"}
    table.row(NAME, "groups, in the store", group == {"g"}, f"{group}")
