"""Checks of a mesh in front of real engines. `tests/real-engines/run` starts them."""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import signal
import statistics
import sys
import threading
import time

import attach
import attached
import faulty
import primer
import schemas
import tools
import trainer
import v2
import v2_compared
from engines import END_TOKEN, SERVED, LlamaCpp, Vllm, call
from mesh import TOKENS, Mesh, Stream, Table, check_disconnects, clear, compare, free_port, prompts

LONG_TOKENS = 200
# Longer than the engine runs before it learns of a disconnect.
ENDLESS_TOKENS = 1500
# Without its end token the shipped model never ends an output.
ENDLESS = {"logit_bias": {str(END_TOKEN): -100}}

# Parts that start their engines themselves.
OWN_ENGINES = {
    "attach": attach, "attached": attached, "primer": primer, "trainer": trainer, "v2": v2, "v2-compared": v2_compared,
}  # fmt: skip


def same_tokens(table, engine, options, what, env):
    mesh = Mesh(options, engine.kind, engine.url, f"{engine.kind}-{what.split()[-1]}", env=env).ready()
    asked = prompts(engine)
    expected = [engine.greedy(prompt, TOKENS) for prompt in asked]
    for number, prompt in enumerate(asked):
        status, answer = mesh.ask(prompt, session=f"p{number}")
        if status != 200:
            table.row(engine.kind, what, False, f"status {status}: {answer}")
            return
    chunks = mesh.metric("refrain_worker_chunks_total")
    kept = mesh.outputs()
    outputs = [(number, prompt, kept.get(f"p{number}"), expected[number]) for number, prompt in enumerate(asked)]
    same, ties, wrong = compare(engine, outputs)
    detail = (
        f"{same} of {len(asked)} prompts, {sum(map(len, expected))} tokens in {chunks:.0f} chunks; "
        f"{ties} part at near-ties; {len(wrong)} differ"
    )
    table.row(engine.kind, what, not wrong, detail)


def seeds(table, engine, mesh, prompt):
    """Checks that equal seeds give equal outputs, and that other seeds and other choices give other outputs.

    Requests run alone. The arithmetic of these engines depends on the batch, so a choice in a larger batch may
    differ.
    """

    def sampled(**fields):
        answer = mesh.ask(prompt, temperature=1.5, **ENDLESS, **fields)[1]
        return [choice["text"] for choice in answer["choices"]]

    # At the first request the prompt may not be in the engine's cache, and then it is read in another batch.
    sampled(seed=7)
    first, again, other, choices = sampled(seed=7), sampled(seed=7), sampled(seed=8), sampled(seed=7, n=3)
    holds = first == again and first != other and len(set(choices)) == 3
    detail = f"again {first == again}, another seed differs {first != other}, {len(set(choices))} of 3 choices differ"
    table.row(engine.kind, "seeds", holds, detail)


@contextlib.contextmanager
def apart(engine, mesh):
    """Gives the engine a core of its own, and the others to the mesh and its clients.

    vLLM's processes never sleep. Every process that a token passes through would wait for a core.
    """
    cores = sorted(os.sched_getaffinity(0))
    here, there = (cores[1:], cores[:1]) if len(cores) > 1 else (cores, cores)
    try:
        engine.process.run_on(there)
        mesh.process.run_on(here)
        os.sched_setaffinity(0, here)
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for process in (engine.process, mesh.process):
            process.run_on(cores)


def streaming(table, engine, mesh, prompt):
    """Checks streaming with a long output: on few cores some engines send the first tokens late."""
    fields = ENDLESS
    whole = mesh.ask(prompt, LONG_TOKENS, **fields)[1]["choices"][0]["text"]
    times, text, ended = [], "", False
    started = time.monotonic()
    for event in Stream(mesh.url, "/v1/completions", mesh.body(prompt, LONG_TOKENS, stream=True, **fields)):
        ended = event == b"[DONE]"
        if not ended:
            times.append(time.monotonic() - started)
            text += "".join(choice["text"] for choice in json.loads(event)["choices"])
    holds = text == whole and ended and len(times) > 5 and times[0] < 0.8 * times[-1]
    detail = f"{len(times)} events, the first after {times[0] / times[-1]:.2f} of the time"
    table.row(engine.kind, "streaming", holds, detail)


def restart(table, engine, mesh, asked):
    """Kills the engine and starts it again while clients send requests."""
    expected = [mesh.ask(prompt)[1]["choices"][0]["text"] for prompt in asked]
    over = threading.Event()
    right, wrong, errors, lock = [], [], [], threading.Lock()

    def client(offset):
        number = offset
        while not over.is_set():
            position = number % len(asked)
            number += 4
            status, answer = mesh.ask(asked[position])
            with lock:
                if status != 200:
                    shaped = isinstance(answer, dict) and set(answer.get("error", {})) >= {"message", "type", "param", "code"}
                    passes = shaped and status in (502, 503, 504)
                    (errors if passes else wrong).append((time.monotonic(), answer))
                    # The pause of a client library.
                    time.sleep(0.2)
                elif answer["choices"][0]["text"] == expected[position]:
                    right.append(time.monotonic())
                else:
                    wrong.append((time.monotonic(), answer))

    clients = [threading.Thread(target=client, args=(offset,)) for offset in range(4)]
    for thread in clients:
        thread.start()
    time.sleep(1)
    before = len(right)
    killed = time.monotonic()
    engine.kill()
    time.sleep(0.3)
    engine.start()
    back = time.monotonic()
    until = back + 15
    while time.monotonic() < until and sum(at > back for at in right) < 20:
        time.sleep(0.05)
    over.set()
    for thread in clients:
        thread.join()
    after = [at for at in right if at > back]
    late = [at for at, _ in errors if after and at > after[0] + 3]
    # Four clients with a pause of 200 ms after each error cannot get more errors than this during the outage.
    most = 4 * (1 + (back - killed + 3) / 0.2)
    holds = not wrong and before > 0 and len(after) >= 20 and not late and len(errors) <= most
    holds = holds and mesh.process.child.poll() is None
    detail = f"{len(right)} answers right, {len(wrong)} wrong, {len(errors)} errors meanwhile"
    if after:
        detail += f"; serving {after[0] - back:.1f} s after the engine"
    table.row(engine.kind, "restart under load", holds, detail)


def faults(table, engine, options, prompt):
    """Checks that each fault gives a clear error in time, and that the worker survives it."""
    status, answer = call(engine_mesh_url(options) + "/v1/completions", {"model": "no-such-model", "prompt": "x"})
    holds = status == 404 and answer["error"]["code"] == "model_not_found"
    table.row(engine.kind, "wrong model name of a client", holds, f"{status} {answer['error']['code']}")

    strange = Mesh(options, engine.kind, engine.url, f"{engine.kind}-strange", served="no-such-model")
    code = strange.process.child.wait(60)
    is_named = f"serves {SERVED}, not no-such-model" in pathlib.Path(strange.process.log).read_text()
    table.row(engine.kind, "wrong model name in the worker", code != 0 and is_named, f"exit {code}, named: {is_named}")

    proxy = faulty.Proxy(engine.url, engine.generate_path)
    settings = "first_token_ms_max = 1000\nidle_ms_max = 1000"
    mesh = Mesh(options, engine.kind, proxy.url, f"{engine.kind}-faults", settings).ready()
    for fault, expected in faulty.FAULTS.items():
        proxy.fault = fault
        started = time.monotonic()
        status, answer = mesh.ask(prompt)
        seconds = time.monotonic() - started
        error = answer.get("error", {}) if isinstance(answer, dict) else {}
        holds = status in expected and bool(error.get("message")) and seconds < 5
        table.row(engine.kind, f"engine {fault}", holds, f"{status} after {seconds:.1f} s: {error.get('message')}")
        proxy.fault = None
        until = time.monotonic() + 10
        while mesh.ask(prompt)[0] != 200 and time.monotonic() < until:
            time.sleep(0.1)
    status, _ = mesh.ask(prompt)
    alive = mesh.process.child.poll() is None and status == 200
    table.row(engine.kind, "the worker survives faults", alive, f"status {status} afterwards")
    mesh.process.stop()
    proxy.stop()


def engine_mesh_url(options):
    return options.mesh_url


def added_time(table, engine, mesh, asked):
    """Compares requests sent directly and through Refrain, in the order A B B A: Refrain adds at most 1 ms, within
    the noise."""

    def timed(connection, path, body):
        started = time.perf_counter()
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        first = None
        for line in response:
            if first is None and line.startswith(b"data: "):
                first = time.perf_counter()
        return first - started, time.perf_counter() - started

    def connect(url):
        host, port = url.removeprefix("http://").split(":")
        return http.client.HTTPConnection(host, int(port), timeout=60)

    tokens = 16
    rounds = 60
    direct, through = [], []
    for number in range(rounds):
        prompt = asked[number % len(asked)]
        for way in "ABBA":
            # A server may close a connection after some requests, so each request has its own on both sides.
            if way == "A":
                connection = connect(engine.url)
                direct.append(timed(connection, engine.generate_path, engine.body(prompt, tokens, stream=True)))
            else:
                connection = connect(mesh.url)
                through.append(timed(connection, "/v1/completions", mesh.body(prompt, tokens, stream=True)))
            connection.close()
    median = statistics.median
    first = median(pair[0] for pair in through) - median(pair[0] for pair in direct)
    # Differences per round, so that a slow phase of the machine slows both sides.
    pairs = [
        sum(pair[1] for pair in through[2 * at : 2 * at + 2]) / 2 - sum(pair[1] for pair in direct[2 * at : 2 * at + 2]) / 2
        for at in range(rounds)
    ]
    added = median(pairs)
    # The standard error of a median is 1.25 standard deviations by the root of the count. The deviation is
    # estimated by the median distance.
    error = 1.25 * 1.48 * median(abs(pair - added) for pair in pairs) / rounds**0.5
    whole = median(pair[1] for pair in direct)
    detail = (
        f"p50 {added * 1e3:+.2f} ms (standard error {error * 1e3:.2f}) of {whole * 1e3:.1f} ms, {rounds} rounds of ABBA "
        f"(first event {first * 1e3:+.2f} ms)"
    )
    table.row(engine.kind, "added time of a request", added - 2 * error <= 1e-3, detail)


def cpu_time(table, engine, mesh, asked):
    """Measures the CPU time of the whole mesh per token."""
    before, tokens = mesh.process.cpu_seconds(), 0
    for number in range(60):
        body = mesh.body(asked[number % len(asked)], 200, stream=True, **ENDLESS)
        tokens += sum(1 for event in Stream(mesh.url, "/v1/completions", body) if event != b"[DONE]")
    spent = (mesh.process.cpu_seconds() - before) / tokens
    # Not judged, since on a shared machine it contains clock ticks of other work.
    table.measured(engine.kind, "CPU time of the mesh per token", f"{spent * 1e6:.0f} us over {tokens} tokens, one event each")


def check(table, engine, options):
    engine.start()
    try:
        same_tokens(table, engine, options, "same greedy tokens", None)
        in_chunks = {"REFRAIN_GATEWAY__CHUNK_TOKENS": "7"}
        same_tokens(table, engine, options, "same greedy tokens in chunks", in_chunks)
        mesh = Mesh(options, engine.kind, engine.url, f"{engine.kind}-mesh").ready()
        options.mesh_url = mesh.url
        asked = prompts(engine)
        seeds(table, engine, mesh, asked[3])
        tools.check(table, engine, mesh)
        schemas.check(table, engine, mesh)
        with apart(engine, mesh):
            streaming(table, engine, mesh, asked[0])
            added_time(table, engine, mesh, asked)
        check_disconnects(table, engine.kind, engine, mesh, asked[1], ENDLESS_TOKENS, **ENDLESS)
        cpu_time(table, engine, mesh, asked)
        faults(table, engine, options, asked[2])
        restart(table, engine, mesh, asked[:12])
        code = mesh.process.stop()
        table.row(engine.kind, "the mesh stops in order", code == 0, f"exit {code}")
    finally:
        engine.process.stop(signal.SIGKILL)


# Checks that can run alone.
ALONE = {"tools": tools, "schemas": schemas}


def check_alone(table, engine, options):
    """One check alone."""
    engine.start()
    try:
        mesh = Mesh(options, engine.kind, engine.url, f"{engine.kind}-{options.only}").ready()
        ALONE[options.only].check(table, engine, mesh)
        mesh.stop()
    finally:
        engine.process.stop(signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--refrain", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--only", choices=list(ALONE), help="one check of llama-cpp and vllm instead of all")
    parser.add_argument("engines", nargs="+")
    options = parser.parse_args()
    clear(options.work, "-data")
    for old in options.work.glob("*.log"):
        if old.name not in ("cmake.log", "ninja.log"):
            old.unlink()
    table = Table()
    for name in options.engines:
        if name in OWN_ENGINES:
            OWN_ENGINES[name].check(table, options)
            continue
        port = free_port()
        if name == "llama-cpp":
            engine = LlamaCpp(options.work, port, options.model)
        else:
            engine = Vllm(options.work, port, options.model, tools.VLLM_OPTIONS)
        (check_alone if options.only else check)(table, engine, options)
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
