"""Refrain inside a real vLLM: `method: suffix` with arctic-inference's cache, and with Refrain's package in its place."""

import json
import shutil
import signal
import statistics
import subprocess
import time

import probe
from check import TOKENS, clear, free_port, prompts
from engines import Process, Vllm, call

PEER, OURS = "arctic", "refrain"
# The engine's own n-grams, and the same with drafts overridden by the scheduler.
ALONE, HYBRID = "ngram", "hybrid"
SUFFIX = ["--speculative-config", json.dumps({"method": "suffix", "num_speculative_tokens": 24})]
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}
NGRAM = ["--no-async-scheduling", "--speculative-config", json.dumps(NGRAM)]
ARGUMENTS = {
    PEER: SUFFIX, OURS: SUFFIX, ALONE: NGRAM,
    HYBRID: [*NGRAM, "--scheduler-cls", "refrain_client.scheduler.RefrainScheduler"],
}  # fmt: skip
# What is asked in a run of each: every prompt once, and again.
ROUNDS = 4
PROMPTS = 40
# The first requests after a restart, which must be drafted for as well as the others.
FIRST = 5
TENANT, MODEL = "tenant", "public-name"


class Store:
    """A draft store by itself, and a token for it."""

    def __init__(self, options):
        self.options, self.url = options, f"http://127.0.0.1:{free_port()}"
        keys = subprocess.run([options.refrain, "keys"], check=True, capture_output=True, text=True).stdout
        self.keys = dict(line.split(" = ") for line in keys.splitlines() if " = " in line)
        self.config = options.work / "attach.toml"
        self.config.write_text(f"""{keys}
[urls]
scheduler = "http://127.0.0.1:1"
[draft_store]
listen = "{self.url.removeprefix("http://")}"
data_dir = "{options.work / "attach-data"}"
[gateway]
listen = "127.0.0.1:1"
anonymous_tenant = "{TENANT}"
[[gateway.models]]
id = "{MODEL}"
files = "{options.model}"
""")
        self.process = Process(
            [options.refrain, "draft-store", "--config", self.config], options.work / "attach-store.log"
        )

    def ready(self, seconds=30):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if call(self.url + "/readyz", timeout=2)[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        raise SystemExit(f"the draft store is not ready: see {self.process.log}")

    def variables(self):
        command = [
            self.options.refrain, "store", "sign", "--config", self.config, "--tenant", TENANT, "--model", MODEL,
        ]  # fmt: skip
        token = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        return {
            "REFRAIN_CLIENT_STORE_URL": self.url,
            "REFRAIN_CLIENT_MESH__SECRET": self.keys["secret"].strip('"'),
            "REFRAIN_CLIENT_MESH__NAMESPACE_PUBLIC_KEY": self.keys["namespace_public_key"].strip('"'),
            "REFRAIN_CLIENT_TOKEN": token,
        }


class Run:
    """One life of a vLLM: what it said, and what its proposals took."""

    def __init__(self, options, name, store, rounds):
        self.steps_file = options.work / f"attach-{name}.steps"
        self.steps_file.write_bytes(b"")
        whose = name.split("-")[0]
        # The same plugins are installed for both; the peer's process has no store configured.
        variables = {
            "VLLM_PLUGINS": "refrain,refrain_probe", "REFRAIN_PROBE": str(self.steps_file),
            "PYTHONPATH": str(install_probe(options)), **(store.variables() if whose in (OURS, HYBRID) else {}),
        }  # fmt: skip
        engine = Vllm(options.work, free_port(), options.model, ARGUMENTS[whose], variables)
        engine.kind = f"attach-{name}"
        engine.start()
        try:
            asked = prompts(engine)[:PROMPTS]
            self.said, self.seconds, self.steps = [], [], []
            for _ in range(rounds):
                for prompt in asked:
                    before = len(probe.records(self.steps_file))
                    started = time.perf_counter()
                    self.said.append(engine.greedy(prompt, TOKENS))
                    self.seconds.append(time.perf_counter() - started)
                    self.steps.append(probe.records(self.steps_file)[before:])
            self.accepted = int(engine.metric("vllm:spec_decode_num_accepted_tokens_total"))
            self.drafted = int(engine.metric("vllm:spec_decode_num_draft_tokens_total"))
        finally:
            # Like a rollout of the deployment: in order, but with no time to spare.
            engine.process.stop(signal.SIGTERM)

    def accepted_length(self, requests):
        """Tokens per step of these requests."""
        steps = [step for request in self.steps[requests] for step in request]
        return sum(step[2] for step in steps) / sum(step[1] for step in steps)

    def proposal_us(self):
        return [step[0] / 1e3 for request in self.steps for step in request]

    def token_ms(self):
        return 1e3 * sum(self.seconds) / sum(map(len, self.said))

    def told(self):
        text = (
            f"{len(self.said)} requests, {sum(map(len, self.said))} tokens, {self.token_ms():.2f} ms each: {self.accepted} of "
            f"{self.drafted} draft tokens accepted"
        )
        took = self.proposal_us()
        if took:
            text += f", {self.accepted_length(slice(None)):.2f} tokens per step; "
            text += f"proposal per step {statistics.median(took):.1f} us median, {undisturbed_mean(took):.1f} us mean of the fastest 95 %"
        return text


def undisturbed_mean(values):
    """The mean of what the machine did not interrupt."""
    return statistics.mean(sorted(values)[: max(1, len(values) * 95 // 100)])


def install_probe(options):
    """A folder that Python takes for an installed package."""
    folder = options.work / "probe"
    shutil.rmtree(folder, ignore_errors=True)
    about = folder / "refrain_probe-0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(probe.__file__, folder / "refrain_probe.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: refrain-probe\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nrefrain_probe = refrain_probe:register\n")
    return folder


def check(table, options):
    clear(options.work, "attach-data")
    store = Store(options).ready()
    try:
        runs = {}
        for name, rounds in (
            (f"{PEER}-warm", ROUNDS), (f"{OURS}-warm", ROUNDS), (f"{PEER}-cold", 1), (f"{OURS}-cold", 1),
            (ALONE, 1), (HYBRID, 1),
        ):  # fmt: skip
            runs[name] = Run(options, name, store, rounds)
            table.measured("attach", name, runs[name].told())
    finally:
        store.process.stop()
    judge(table, runs)


def judge(table, runs):
    peer, ours, cold = runs[f"{PEER}-warm"], runs[f"{OURS}-warm"], runs[f"{OURS}-cold"]
    same = peer.said == ours.said and cold.said == ours.said[:PROMPTS]
    table.row("attach", "the same greedy tokens", same, f"{len(peer.said)} requests with either, and after the restart")
    holds = ours.accepted >= peer.accepted
    table.row("attach", "accepted tokens", holds, f"{ours.accepted}, arctic-inference {peer.accepted}")
    for what, kind in (("median", statistics.median), ("mean of the fastest 95 %", undisturbed_mean)):
        mine, theirs = kind(ours.proposal_us()), kind(peer.proposal_us())
        detail = f"{mine:.1f} us, arctic-inference {theirs:.1f} us"
        table.row("attach", f"proposal per step, {what}", mine <= theirs, detail)
    warm = ours.accepted_length(slice(-PROMPTS, None))
    for what, requests in ((f"first {FIRST} requests", slice(0, FIRST)), ("all requests", slice(None))):
        # Of the same requests when they were last asked.
        before = slice(-PROMPTS, FIRST - PROMPTS) if requests.stop else slice(-PROMPTS, None)
        share = cold.accepted_length(requests) / ours.accepted_length(before)
        peers = runs[f"{PEER}-cold"].accepted_length(requests) / peer.accepted_length(before)
        detail = f"{share:.0%} of the warm accepted length ({warm:.2f}); arctic-inference {peers:.0%}"
        table.row("attach", f"after a restart, {what}", share >= 0.9, detail)
    alone, hybrid = runs[ALONE], runs[HYBRID]
    table.row("attach", "the hybrid's same greedy tokens", alone.said == hybrid.said, f"{len(hybrid.said)} requests")
    holds = hybrid.accepted > alone.accepted
    table.row("attach", "the hybrid's accepted tokens", holds, f"{hybrid.accepted}, n-grams alone {alone.accepted}")
