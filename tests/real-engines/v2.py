"""Refrain's drafts inside vLLM's Model Runner V2, with asynchronous scheduling, on a CPU: Triton's interpreter runs the
kernels of vLLM and those of the device index."""

import concurrent.futures
import functools
import json
import shutil
import signal
import time

from attach import Store, head_for_vllm
from engines import Vllm, call, series
from mesh import Stream, await_value, clear, free_port, prompts

NAME = "v2"
TOKENS = 24
# Requests of the comparison with plain decoding.
REQUESTS = 200
AT_ONCE = 8
SCHEDULER = ["--scheduler-cls", "refrain_client.v2.RefrainAsyncScheduler"]
# Few blocks of KV, so that requests are preempted, and small steps, so that prompts are read in chunks.
SMALL = [
    "--max-model-len", "512", "--max-num-seqs", str(AT_ONCE), "--max-num-batched-tokens", "192", "--block-size", "32",
    "--num-gpu-blocks-override", "18",
]  # fmt: skip
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    "num_speculative_tokens_per_batch_size": [[1, 2, 8], [3, 4, 4], [5, 8, 2], [9, 9, 0]],
}  # fmt: skip
ADAPTIVE = {**NGRAM, "enable_adaptive_verification": True}
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 6}
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
SECONDS_MAX = 900


class V2(Vllm):
    start_seconds = SECONDS_MAX

    def __init__(self, options, name, more=(), variables=None):
        super().__init__(options.work, free_port(), options.model, [*SMALL, *more], variables)
        self.kind, self.options = f"v2-{name}", options

    def arguments(self):
        arguments = super().arguments()
        arguments[0] = self.work / "vllm-v2/bin/python"
        return arguments

    def env(self):
        return {
            **super().env(), "TRITON_INTERPRET": "1", "PYTHONPATH": str(install_interpreter(self.work)),
            "REFRAIN_CLIENT_DEVICE__BYTES_MAX": "8000000",
        }  # fmt: skip

    def ask(self, prompt, tokens=TOKENS, **more):
        body = {**self.body(prompt, tokens), "ignore_eos": True, **more}
        status, answer = call(self.url + self.generate_path, body, timeout=SECONDS_MAX)
        if status != 200:
            raise SystemExit(f"{self.kind}: status {status}: {answer}; see {self.process.log}")
        return answer["choices"][0]["token_ids"]

    def ask_all(self, asked):
        """The outputs of many requests, given by their arguments, as many at once as fit a step."""
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda one: self.ask(one[0], **one[1]), asked))

    def accepted(self, work):
        """What `work` returns, and the draft tokens that the engine accepted meanwhile."""
        before = self.metric(ACCEPTED)
        result = work()
        return result, int(self.metric(ACCEPTED) - before)


@functools.cache
def install_interpreter(work):
    """A folder for PYTHONPATH with the backend of Triton and the plugins of vLLM that `interpreter/` has."""
    folder = work / "interpreter"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(__file__.replace("v2.py", "interpreter"), folder / "refrain_interpreter")
    about = folder / "refrain_interpreter-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: refrain-interpreter\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[triton.backends]\ncpu = refrain_interpreter\n"
        "[vllm.general_plugins]\nallow_async = refrain_interpreter:allow_async\n"
        "allow_adaptive = refrain_interpreter:allow_adaptive\n"
    )
    return folder


def check(table, options):
    clear(options.work, "attach-data")
    plain = V2(options, "plain")
    plain.start()
    asked = [prompt for _ in range(REQUESTS // 50) for prompt in prompts(plain)][:REQUESTS]
    # Some have a form. A choice is quick to follow for a small model.
    form = {"structured_outputs": {"choice": ["SELECT 1 FROM orders", "SELECT name FROM books"]}, "ignore_eos": False}
    bodies = [(prompt, form if number % 10 == 9 else {}) for number, prompt in enumerate(asked)]
    expected = plain.ask_all(bodies)
    plain.kill()
    store = Store(options).ready()
    try:
        drafted(table, options, store, bodies, expected)
        restarted(table, options, store, asked, expected)
        on_two_ranks(table, options, store, asked, expected)
        beside_a_head(table, options, store, asked, expected)
        adaptive(table, options, store, bodies, expected)
    finally:
        store.process.stop()


def engine_of(options, name, variables, speculation=NGRAM, more=()):
    engine = V2(options, name, [*SCHEDULER, "--speculative-config", json.dumps(speculation), *more], variables)
    base = engine.env
    metrics = f"127.0.0.1:{free_port()}"
    engine.client_url = f"http://{metrics}"
    engine.env = lambda: {**base(), **variables, "REFRAIN_CLIENT_METRICS_LISTEN": metrics}
    engine.start()
    return engine


def client_series(engine, name):
    return series(engine.client_url, f"refrain_client_{name}")


def drafted(table, options, store, bodies, expected):
    tokens = {tenant: store.token(tenant) for tenant in ("a", "b")}
    engine = engine_of(options, "drafts", store.variables())
    try:
        # The scheduler refuses to start without asynchronous scheduling.
        runs = "Using V2 Model Runner" in engine.process.log.read_text()
        table.row(NAME, "Model Runner V2, asynchronous", runs, "by the engine's log")
        same_tokens(table, engine, tokens, bodies, expected)
        tenants(table, engine, tokens, bodies, expected)
        groups(table, engine, tokens)
        choices(table, engine, tokens, bodies)
        aborts(table, engine, tokens, bodies, expected)
        store_away(table, engine, store, tokens, bodies, expected)
        erased(table, engine, store, tokens, bodies)
    finally:
        engine.process.stop(signal.SIGTERM)


def of(token, **fields):
    return {"vllm_xargs": {"refrain_namespace": token, **{f"refrain_{name}": value for name, value in fields.items()}}}


def same_tokens(table, engine, tokens, bodies, expected):
    asked = [(prompt, {**more, **of(tokens["a"])}) for prompt, more in bodies]
    outputs, accepted = engine.accepted(lambda: engine.ask_all(asked))
    preempted = engine.metric(PREEMPTIONS)
    wrong = [number for number, pair in enumerate(zip(outputs, expected)) if pair[0] != pair[1]]
    detail = (
        f"{len(outputs) - len(wrong)} of {len(outputs)}, {sum(map(len, outputs))} tokens, {accepted} drafted and accepted, "
        f"{preempted:.0f} preemptions"
    )
    table.row(NAME, "the same greedy tokens", not wrong, detail)
    table.row(NAME, "drafts are accepted", accepted > sum(map(len, outputs)) // 3, f"{accepted} tokens")
    table.row(NAME, "requests were preempted", preempted > 0, f"{preempted:.0f} times")
    emitted = client_series(engine, "emitted_tokens_total")
    holds = emitted == sum(map(len, outputs))
    table.row(NAME, "outputs are told once", holds, f"{emitted:.0f} tokens told, {sum(map(len, outputs))} emitted")


def tenants(table, engine, tokens, bodies, expected):
    prompt, _ = bodies[0]
    # What tenant a had is on the device by now.
    outputs, own = engine.accepted(lambda: engine.ask(prompt, **of(tokens["a"])))
    others, of_other = engine.accepted(lambda: engine.ask(prompt, **of(tokens["b"])))
    nobodys, of_nobody = engine.accepted(lambda: engine.ask(prompt, **of("forged")))
    holds = outputs == others == nobodys == expected[0] and own >= TOKENS * 2 // 3 and max(of_other, of_nobody) < own // 2
    detail = f"accepted {own}; another tenant {of_other}; a forged token {of_nobody}"
    table.row(NAME, "tenants are apart", holds, detail)
    off, of_off = engine.accepted(lambda: engine.ask(prompt, **of(tokens["a"], max_spec_tokens=0)))
    table.row(NAME, "a request may have no drafts", off == expected[0] and of_off == 0, f"{of_off} accepted")


def groups(table, engine, tokens):
    """A sample drafts from another one of its group that still runs: nobody else has this text."""
    prompt = [300 + at * 7 % 211 for at in range(40)]
    begun = series(engine.url, engine.generated_series)
    body = {**engine.body(prompt, 40, stream=True), "ignore_eos": True, "temperature": 0, **of(tokens["b"], group="g")}
    first = Stream(engine.url, engine.generate_path, body)
    await_value(lambda: series(engine.url, engine.generated_series), begun + 16, SECONDS_MAX)
    text, accepted = engine.accepted(lambda: engine.ask(prompt, 12, **of(tokens["b"], group="g")))
    runs_still = engine.metric(engine.running_series) > 0
    for _ in first:
        pass
    table.row(NAME, "drafts from a running sample", accepted >= 6, f"{accepted} of {len(text)} tokens; it ran still: {runs_still}")


def choices(table, engine, tokens, bodies):
    """Several choices of one request, drawn by a seed."""
    before = client_series(engine, "emitted_tokens_total")
    prompt, _ = bodies[22]
    body = {**engine.body(prompt, TOKENS), "ignore_eos": True, "n": 3, "temperature": 1, "seed": 5, **of(tokens["b"])}
    status, answer = call(engine.url + engine.generate_path, body, timeout=SECONDS_MAX)
    drawn = [choice["token_ids"] for choice in answer["choices"]] if status == 200 else []
    told = lambda: client_series(engine, "emitted_tokens_total") - before  # noqa: E731
    await_value(told, 3 * TOKENS, 60)
    holds = list(map(len, drawn)) == [TOKENS] * 3 and len(set(map(tuple, drawn))) > 1 and told() == 3 * TOKENS
    table.row(NAME, "three choices", holds, f"{len(set(map(tuple, drawn)))} differ; {told():.0f} of {3 * TOKENS} tokens told")


def aborts(table, engine, tokens, bodies, expected):
    """Clients that leave: the others' outputs stay right, and the client follows nothing that is gone."""
    leaving = []
    for prompt, _ in bodies[10:13]:
        body = {**engine.body(prompt, 300, stream=True), "ignore_eos": True, **of(tokens["a"])}
        stream = Stream(engine.url, engine.generate_path, body)
        next(iter(stream))
        leaving.append(stream)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        kept = [pool.submit(engine.ask, bodies[number][0], **of(tokens["b"])) for number in (20, 21)]
        for stream in leaving:
            stream.leave()
        outputs = [one.result() for one in kept]
    until = time.monotonic() + 60
    while client_series(engine, "requests") > 0 and time.monotonic() < until:
        time.sleep(0.1)
    left = client_series(engine, "requests")
    holds = outputs == [expected[20], expected[21]] and left == 0
    table.row(NAME, "clients that leave", holds, f"3 left, 2 stayed and are right; {left:.0f} requests are followed")


def store_away(table, engine, store, tokens, bodies, expected):
    store.process.stop(signal.SIGKILL)
    outputs, accepted = engine.accepted(lambda: [engine.ask(bodies[n][0], **of(tokens["a"])) for n in range(3)])
    store.start()
    store.ready()
    holds = outputs == expected[:3] and accepted > 0
    table.row(NAME, "without a store", holds, f"{accepted} accepted while it was away")


def erased(table, engine, store, tokens, bodies):
    # What ended while the store was away gets there first.
    await_uploads(engine)
    on_device = client_series(engine, "device_tokens")
    gone = store.erase("a")
    until = time.monotonic() + 120
    accepted = None
    while time.monotonic() < until:
        # A step carries the news to the device. The request's own output is kept anew, so each prompt is asked once.
        _, accepted = engine.accepted(lambda: engine.ask(bodies[40][0], 2, **of(tokens["b"])))
        if client_series(engine, "device_tokens") < on_device / 4:
            break
        time.sleep(0.5)
    left = client_series(engine, "device_tokens")
    _, accepted = engine.accepted(lambda: engine.ask(bodies[0][0], **of(tokens["a"])))
    detail = f"{gone} documents; {on_device:.0f} tokens on the device before, {left:.0f} after; {accepted} accepted then"
    table.row(NAME, "erased texts leave the device", left < on_device / 4 and accepted < TOKENS // 3, detail)


def await_uploads(engine):
    """Waits until all outputs that ended are in the store."""
    await_value(lambda: -series(engine.client_url, "refrain_upload_pending_tokens"), 0, 120)


def wake(engine, prompt, token, known):
    """Asks until so many tokens are on the device. The first request of a namespace brings its texts, and further ones
    carry them there."""

    def on_device():
        engine.ask(prompt, 2, **of(token))
        return client_series(engine, "device_tokens")

    await_value(on_device, known, 120)


def restarted(table, options, store, asked, expected):
    token = store.token("c")
    first = engine_of(options, "first", store.variables())
    first.ask_all([(prompt, of(token)) for prompt in asked[:8]])
    await_uploads(first)
    first.process.stop(signal.SIGTERM)
    engine = engine_of(options, "restarted", store.variables())
    try:
        # Each of the eight outputs has 16 tokens of its prompt beside, and a token of it takes as much room again.
        wake(engine, asked[30], token, 8 * (TOKENS + 8))
        numbers = [n for n in range(8) if n % 10 != 9]
        outputs, accepted = engine.accepted(lambda: [engine.ask(asked[n], **of(token)) for n in numbers[:4]])
        holds = outputs == [expected[n] for n in numbers[:4]] and accepted >= 4 * TOKENS * 2 // 3
        table.row(NAME, "warm after a restart", holds, f"{accepted} of {4 * TOKENS} tokens of texts of before")
    finally:
        engine.kill()


def on_two_ranks(table, options, store, asked, expected):
    token = store.token("d")
    # One core for each rank.
    variables = {**store.variables(), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    engine = engine_of(options, "two-ranks", variables, more=["--tensor-parallel-size", "2"])
    try:
        numbers = [n for n in range(4)] * 2
        outputs, accepted = engine.accepted(lambda: [engine.ask(asked[n], **of(token)) for n in numbers])
        holds = outputs == [expected[n] for n in numbers] and accepted >= 4 * TOKENS * 2 // 3
        table.row(NAME, "two tensor-parallel ranks", holds, f"{len(numbers)} outputs are right, {accepted} tokens accepted")
    finally:
        engine.kill()


def beside_a_head(table, options, store, asked, expected):
    token = store.token("e")
    speculation = {**EAGLE3, "model": str(head_for_vllm(options))}
    numbers = [n for n in range(4)] * 3
    alone = V2(options, "head", ["--speculative-config", json.dumps(speculation)])
    alone.start()
    _, of_head = alone.accepted(lambda: [alone.ask(asked[n]) for n in numbers])
    alone.kill()
    engine = engine_of(options, "hybrid", store.variables(), speculation)
    try:
        outputs, accepted = engine.accepted(lambda: [engine.ask(asked[n], **of(token)) for n in numbers])
        holds = outputs == [expected[n] for n in numbers] and accepted > of_head
        table.row(NAME, "beside an EAGLE-3 head", holds, f"{accepted} tokens accepted, {of_head} with the head alone")
    finally:
        engine.kill()


def adaptive(table, options, store, bodies, expected):
    """vLLM trims the drafts of each request by the confidences of the kernels."""
    token = store.token("f")
    admitted = options.work / "admitted.txt"
    admitted.unlink(missing_ok=True)
    engine = engine_of(options, "adaptive", {**store.variables(), "ADMITTED_FILE": str(admitted)}, ADAPTIVE)
    try:
        asked = [(prompt, {**more, **of(token)}) for prompt, more in bodies[:50]]
        outputs, accepted = engine.accepted(lambda: engine.ask_all(asked))
        again, known = engine.accepted(lambda: engine.ask_all(asked[:16]))
    finally:
        engine.kill()
    steps = [tuple(map(int, line.split())) for line in admitted.read_text().splitlines()]
    trimmed = sum(got < scheduled for scheduled, got in steps)
    scheduled, got = map(sum, zip(*steps))
    holds = [*outputs, *again] == [*expected[:50], *expected[:16]] and trimmed > 0 and known > 8 * TOKENS
    detail = (
        f"{len(outputs) + len(again)} outputs are right; {got} of {scheduled} places verified, fewer than scheduled in "
        f"{trimmed} of {len(steps)} steps; {accepted} tokens accepted, then {known} of {16 * TOKENS} known ones"
    )
    table.row(NAME, "adaptive verification", holds, detail)
