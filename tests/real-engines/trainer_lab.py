"""Two real engines with their trainer, a mesh whose listener they register with, and the common parts of its checks."""

import concurrent.futures
import time

from engines import Process
from mesh import PUBLIC, TENANT, await_ready, compare, free_port, prompts
from trainer_engines import other_weights
from trainer_words import Listener, Runs

# Samples of one prompt.
GROUP = 8
# Output tokens of short rollouts.
TOKENS = 48
# Output tokens after which something happens to long rollouts. How long they are depends on the engine's speed.
EARLY = 24
# Rollouts that the listener lets run at once; further ones are held.
IN_FLIGHT_MAX = 24


class Lab:
    """Two engines that a trainer has started, a mesh without an engine, and what the engines say without it."""

    def __init__(self, table, options, engines, name):
        self.table, self.options, self.engines, self.name = table, options, engines, name
        self.long_tokens = engines[0].long_tokens
        self.weights = {0: options.model, 1: other_weights(options.model, options.work / f"{name}-weights", engines[0].weights_factor)}
        # Even versions are the first weights, and odd ones the others.
        self.version = 0
        self.gateway = free_port()
        self.config = options.work / f"{name}.toml"
        self.listener = Listener(free_port(), PUBLIC)
        self.config.write_text(f"""
[telemetry]
log = "info"
[gateway]
listen = "127.0.0.1:{self.gateway}"
anonymous_tenant = "{TENANT}"
[gateway.trainer]
tenant = "{TENANT}"
in_flight_max = {IN_FLIGHT_MAX}
[[gateway.models]]
id = "{PUBLIC}"
files = "{options.model}"
[draft_store]
data_dir = "{options.work / f"{name}-data"}"
[worker]
evacuate_after_ms = 500
[worker.engine]
model = "{PUBLIC}"
served_model = "{engines[0].served}"
files = "{options.model}"
""")
        self.start_mesh()

    def start_mesh(self):
        command = [
            self.options.refrain, "up", "--config", self.config, "--trainer", f"127.0.0.1:{self.listener.port}", "--adopt", "8",
        ]  # fmt: skip
        self.mesh = Process(command, self.options.work / f"{self.name}.log")
        await_ready(self.mesh, f"http://127.0.0.1:{self.gateway}")

    def stop_mesh(self):
        return self.mesh.stop()

    def learn(self):
        """What the engines say without Refrain: greedy outputs, short ones and endless ones."""
        self.prompts = prompts(self.engines[0])[:16]
        with concurrent.futures.ThreadPoolExecutor(GROUP) as pool:
            ask = self.engines[0].reference
            self.short = list(pool.map(lambda prompt: ask(prompt, TOKENS), self.prompts))
            self.long = list(pool.map(lambda prompt: ask(prompt, self.long_tokens, endless=True), self.prompts))

    def row(self, name, holds, detail):
        self.table.row(self.name, name, bool(holds), detail)

    def check(self, name, check, *arguments):
        """Makes a check. One that does not come to its end has failed, and the engines go on."""
        try:
            check(*arguments)
        except (AssertionError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            self.row(name, False, f"{type(error).__name__}: {str(error)[:300]}")
            self.listener.post("/abort_request", {"abort_all": True})
            self.listener.post("/resume")

    def long_runs(self, route, count=16, **how):
        """Endless greedy rollouts, of which the outputs are known."""
        return Runs(self.listener, route, self.prompts[:count], self.long_tokens, endless=True, **how)

    def is_greedy(self, pairs):
        """Whether outputs, given as (number of the prompt, tokens, the engine's own tokens), are the engine's."""
        outputs = [(at, self.prompts[number], ours, theirs) for at, (number, ours, theirs) in enumerate(pairs)]
        return not compare(self.engines[0], outputs, self.engines[0].near_tie)[2]

    def judge_greedy(self, name, rollouts, references, more=""):
        """Checks that greedy outputs have the tokens that the engine gives by itself."""
        outputs = [
            (number, self.prompts[number], rollout.tokens, references[number][0]) for number, rollout in enumerate(rollouts)
        ]
        same, ties, wrong = compare(self.engines[0], outputs, self.engines[0].near_tie)
        tokens = sum(len(rollout.tokens) for rollout in rollouts)
        detail = f"{same} of {len(outputs)} outputs, {tokens} tokens; {ties} part at near-ties; {len(wrong)} differ{more}"
        if wrong:
            detail += f"; where: {[self.parting(*outputs[number][1:]) for number in wrong[:4]]}"
        self.row(name, not wrong, detail)

    def parting(self, prompt, ours, theirs):
        """Where an output parts from the engine's own, both lengths, and how far apart its two best tokens are there."""
        at = next((at for at, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
        margin = None if at is None else round(self.engines[0].margin(prompt + theirs[:at]), 3)
        return at, len(ours), len(theirs), margin

    def loads(self):
        """The rollouts at each engine, by the listener's own count."""
        rows = self.listener.get("/workers")[1]["workers"]
        loads = {row["url"]: row["load"] for row in rows}
        return [loads.get(engine.url, 0) for engine in self.engines]

    def idle(self, seconds=10, engines=None):
        """Waits until no engine, or none of these, has anything to do. Returns the milliseconds, or None."""
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            if all(engine.running() == 0 for engine in engines or self.engines):
                return 1e3 * (time.monotonic() - started)
            time.sleep(0.02)
        return None
