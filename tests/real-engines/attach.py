"""Refrain's plugin inside a real vLLM, compared with arctic-inference: `method: suffix` with the cache of either."""

import json
import shutil
import signal
import statistics
import subprocess
import time

import probe
from engines import Process, Vllm, series
from mesh import PUBLIC, TENANT, TOKENS, await_ready, clear, free_port, keys, prompts

PEER, OURS = "arctic", "refrain"
# The engine's own drafts; HYBRID adds Refrain's scheduler, which overrides some of them.
NGRAM, EAGLE3, HYBRID = "ngram", "eagle3", "+hybrid"
SUFFIX = ["--speculative-config", json.dumps({"method": "suffix", "num_speculative_tokens": 24})]
OWN_DRAFTS = {
    NGRAM: {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4},
    # The depth for which the shipped head was trained.
    EAGLE3: {"method": "eagle3", "num_speculative_tokens": 6},
}
SCHEDULER = ["--scheduler-cls", "refrain_client.scheduler.RefrainScheduler"]
# Rounds of a warm run; each sends every prompt once.
ROUNDS = 4
PROMPTS = 40
# First requests after a restart, whose drafts must be as good as the others.
FIRST = 5


class Store:
    """A draft store without other services, and a token for it."""

    def __init__(self, options):
        self.options, self.url = options, f"http://127.0.0.1:{free_port()}"
        section, self.keys = keys(options.refrain)
        self.section = section
        self.config = self.configure(TENANT)
        self.start()

    def configure(self, tenant):
        """The configuration with which namespaces of a tenant can be signed."""
        config = self.options.work / f"attach-{tenant}.toml"
        config.write_text(f"""{self.section}
[draft_store]
listen = "{self.url.removeprefix("http://")}"
data_dir = "{self.options.work / "attach-data"}"
[gateway]
anonymous_tenant = "{tenant}"
[[gateway.models]]
id = "{PUBLIC}"
files = "{self.options.model}"
""")
        return config

    def start(self):
        self.process = Process(
            [self.options.refrain, "draft-store", "--config", self.config], self.options.work / "attach-store.log"
        )

    def ready(self):
        await_ready(self.process, self.url)
        return self

    def token(self, tenant=TENANT):
        return self.run("sign", "--config", self.configure(tenant), "--tenant", tenant, "--model", PUBLIC)

    def erase(self, tenant):
        """Erases the documents of a tenant. Returns how many."""
        answer = self.run("erase", "--config", self.config, "--tenant", tenant, "--json")
        return json.loads(answer)["documents"]

    def run(self, *arguments):
        command = [self.options.refrain, "store", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def variables(self):
        return {**plugin_variables(self.url, self.keys), "REFRAIN_CLIENT_TOKEN": self.token()}


def plugin_variables(store_url, keys):
    """The environment with which the plugin inside an engine follows a store."""
    return {
        "REFRAIN_CLIENT_STORE_URL": store_url,
        "REFRAIN_CLIENT_MESH__SECRET": keys["secret"],
        "REFRAIN_CLIENT_MESH__NAMESPACE_PUBLIC_KEY": keys["namespace_public_key"],
    }


def arguments(options, name):
    """The arguments of a vLLM for a run of this name."""
    drafts, hybrid, _ = name.partition(HYBRID)
    own = OWN_DRAFTS.get(drafts)
    if own is None:
        return SUFFIX
    if drafts == EAGLE3:
        own = {**own, "model": str(head_for_vllm(options))}
    return ["--no-async-scheduling", "--speculative-config", json.dumps(own), *(SCHEDULER if hybrid else [])]


def head_for_vllm(options):
    """The folder of the shipped EAGLE-3 head with its layers named for vLLM: by their inputs instead of their
    outputs."""
    shipped, folder = options.model / "eagle3", options.work / "eagle3"
    folder.mkdir(exist_ok=True)
    shutil.copy(shipped / "model.safetensors", folder)
    config = json.loads((shipped / "config.json").read_text())
    layers = "eagle_aux_hidden_state_layer_ids"
    config["eagle_config"][layers] = [layer + 1 for layer in config["eagle_config"][layers]]
    # Model Runner V2 reads them here.
    config[layers] = config["eagle_config"][layers]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Run:
    """The outputs of a vLLM from its start to its stop, and the times of its proposals."""

    def __init__(self, options, name, store, rounds):
        self.steps_file = options.work / f"attach-{name}.steps"
        self.steps_file.write_bytes(b"")
        has_drafts = name.startswith(OURS) or name.endswith(HYBRID)
        # Both have the same plugins installed, but arctic-inference's process has no store configured.
        variables = probe_variables(options, self.steps_file)
        metrics = f"127.0.0.1:{free_port()}"
        if has_drafts:
            variables |= {**store.variables(), "REFRAIN_CLIENT_METRICS_LISTEN": metrics}
        engine = Vllm(options.work, free_port(), options.model, arguments(options, name), variables)
        engine.kind = f"attach-{name}"
        engine.start()
        try:
            asked = prompts(engine)[:PROMPTS]
            self.outputs, self.seconds, self.steps = [], [], []
            for _ in range(rounds):
                for prompt in asked:
                    before = len(probe.records(self.steps_file))
                    started = time.perf_counter()
                    self.outputs.append(engine.greedy(prompt, TOKENS))
                    self.seconds.append(time.perf_counter() - started)
                    self.steps.append(probe.records(self.steps_file)[before:])
            self.verified = int(engine.metric("vllm:spec_decode_num_accepted_tokens_total"))
            self.drafted = int(engine.metric("vllm:spec_decode_num_draft_tokens_total"))
            # Each step has one bonus token, and all other tokens had been drafted. vLLM's own counter includes tokens
            # that it accepted after the end of an output.
            self.steps_taken = int(engine.metric("vllm:iteration_tokens_total_count"))
            self.accepted = sum(map(len, self.outputs)) - self.steps_taken
            # The tokens that the plugin counted.
            counter = "refrain_client_emitted_tokens_total"
            self.counted_tokens = int(series(f"http://{metrics}", counter)) if has_drafts else 0
        finally:
            # In order, but without a wait, like the rollout of a deployment.
            engine.process.stop(signal.SIGTERM)

    def accepted_length(self, requests):
        """The tokens per step of these requests."""
        return accepted_length(self.steps[requests])

    def proposal_us(self):
        return [step[0] / 1e3 for request in self.steps for step in request]

    def token_ms(self):
        return 1e3 * sum(self.seconds) / sum(map(len, self.outputs))

    def summary(self):
        text = (
            f"{len(self.outputs)} requests, {sum(map(len, self.outputs))} tokens in {self.steps_taken} steps, "
            f"{self.token_ms():.2f} ms each: {self.accepted} draft tokens emitted, "
            f"{self.verified} of {self.drafted} accepted"
        )
        took = self.proposal_us()
        if took:
            text += (
                f"; proposal per step {statistics.median(took):.1f} us median, "
                f"{undisturbed_mean(took):.1f} us mean of the fastest 95 %"
            )
        return text


def accepted_length(requests):
    """The tokens per step of requests, given by the probe's records of each."""
    steps = [step for request in requests for step in request]
    return sum(step[2] for step in steps) / sum(step[1] for step in steps)


def undisturbed_mean(values):
    """The mean of the fastest 95 %, which leaves out steps that the machine interrupted."""
    return statistics.mean(sorted(values)[: max(1, len(values) * 95 // 100)])


def probe_variables(options, steps_file):
    """The environment of a vLLM with the probe, which records its steps."""
    return {
        "VLLM_PLUGINS": "refrain,refrain_probe", "REFRAIN_PROBE": str(steps_file), "PYTHONPATH": str(install_probe(options)),
    }  # fmt: skip


def install_probe(options):
    """Installs the probe. Returns a folder for PYTHONPATH, which Python takes for an installed package."""
    folder = options.work / "probe"
    shutil.rmtree(folder, ignore_errors=True)
    about = folder / "refrain_probe-0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(probe.__file__, folder / "refrain_probe.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: refrain-probe\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrefrain_probe = refrain_probe:register\n"
        "[sglang.srt.plugins]\nrefrain_probe = refrain_probe:register_sglang\n"
    )
    return folder


def check(table, options):
    clear(options.work, "attach-data")
    store = Store(options).ready()
    try:
        runs = {}
        for name, rounds in (
            (f"{PEER}-warm", ROUNDS), (f"{OURS}-warm", ROUNDS), (f"{PEER}-cold", 1), (f"{OURS}-cold", 1),
            *((own + more, 1) for own in OWN_DRAFTS for more in ("", HYBRID)),
        ):  # fmt: skip
            runs[name] = Run(options, name, store, rounds)
            table.measured("attach", name, runs[name].summary())
    finally:
        store.process.stop()
    judge(table, runs)


def judge(table, runs):
    peer, ours, cold = runs[f"{PEER}-warm"], runs[f"{OURS}-warm"], runs[f"{OURS}-cold"]
    same = peer.outputs == ours.outputs and cold.outputs == ours.outputs[:PROMPTS]
    detail = f"{len(peer.outputs)} requests with either, and after the restart"
    table.row("attach", "the same greedy tokens", same, detail)
    holds = ours.accepted >= peer.accepted
    table.row("attach", "accepted tokens", holds, f"{ours.accepted}, arctic-inference {peer.accepted}")
    for what, kind in (("median", statistics.median), ("mean of the fastest 95 %", undisturbed_mean)):
        mine, theirs = kind(ours.proposal_us()), kind(peer.proposal_us())
        detail = f"{mine:.1f} us, arctic-inference {theirs:.1f} us"
        table.row("attach", f"proposal per step, {what}", mine <= theirs, detail)
    warm = ours.accepted_length(slice(-PROMPTS, None))
    for what, requests in ((f"first {FIRST} requests", slice(0, FIRST)), ("all requests", slice(None))):
        # The same requests in their last round.
        before = slice(-PROMPTS, FIRST - PROMPTS) if requests.stop else slice(-PROMPTS, None)
        share = cold.accepted_length(requests) / ours.accepted_length(before)
        peers = runs[f"{PEER}-cold"].accepted_length(requests) / peer.accepted_length(before)
        detail = f"{share:.0%} of the warm accepted length ({warm:.2f}); arctic-inference {peers:.0%}"
        table.row("attach", f"after a restart, {what}", share >= 0.9, detail)
    emitted = sum(map(len, ours.outputs))
    detail = f"{ours.counted_tokens} tokens on /metrics, {emitted} emitted"
    table.row("attach", "metrics of the plugin", ours.counted_tokens == emitted, detail)
    for own in OWN_DRAFTS:
        alone, hybrid = runs[own], runs[own + HYBRID]
        same = alone.outputs == hybrid.outputs == ours.outputs[:PROMPTS]
        table.row("attach", f"{own} and hybrid: the same greedy tokens", same, f"{len(hybrid.outputs)} requests")
        detail = f"{hybrid.accepted}, alone {alone.accepted}"
        table.row("attach", f"{own} and hybrid: accepted tokens", hybrid.accepted > alone.accepted, detail)
