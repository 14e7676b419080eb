"""Refrain's plugin inside a real SGLang on a GPU, compared with SGLang's own n-grams and with no speculation.

    tests/real-engines/run sglang
    in_sglang.py --refrain BINARY --model DIR --work DIR --python PYTHON [--device cpu] [--shape DIR [--only-shape]]

Without an NVIDIA GPU the CPU is used. Then only greedy outputs are checked, since SGLang verifies no others there, and
two ranks run as well. The plugin refuses a CPU for that reason, which is switched off.

PYTHON is that of SGLang's environment, with the Python client. `--shape` names a folder with the `config.json` of a
larger model. It runs with dummy weights and the shipped tokenizer, to measure steps of that size. An 8B model needs a
GPU of 80 GB.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import sys
import time

import mesh
import probe
from attach import Store, install_probe
from engines import Engine, call
from mesh import TOKENS, Table, clear, compare, free_port, prompts

PLAIN, NGRAM, OURS = "plain", "ngram", "refrain"
# Nodes that a step verifies for each request, with the last token of its text.
NODES = 9
AT_ONCE = (1, 16, 64)
# Two steps of bfloat16 between 8 and 16, where the best logits of the shipped model are. Closer tokens may change
# their order with the batch.
NEAR_TIE = 0.125
# For the steps of a larger model: draft tokens of a verify pass, and the context.
DEPTHS = (4, 16)
CONTEXT = 500
LONG, SHORT = 136, 8
# KV tokens of each engine, so that several fit the GPU: the most requests with the longest contexts.
POOL_TOKENS = 45_000
# Engines with the larger shape that run together: 24 GB each, of 80.
WAVE = 3
# A package that stands for SGLang's kernels on a CPU, where few prompts are sent.
NO_KERNELS = pathlib.Path(__file__).parent / "no_kernels"
CPU_PROMPTS = 8
# Samples of one prompt, to compare the distributions of outputs.
DRAWS, DRAWN_TOKENS = 2048, 4


class Sglang(Engine):
    kind = "sglang"
    start_seconds = 300

    def __init__(self, options, name, more=(), variables=None, model=None):
        super().__init__(options.work, free_port())
        self.kind = f"sglang-{name}"
        self.python, self.model = options.python, model or options.model
        self.more, self.variables = [*options.engine_argument, *more], variables or {}

    def command(self, *more):
        return [
            self.python, "-m", "sglang.launch_server", "--model-path", self.model, "--host", "127.0.0.1", "--port", str(self.port),
            "--sampling-backend", "pytorch", "--grammar-backend", "none", "--enable-metrics", *more,
        ]  # fmt: skip

    def arguments(self):
        return self.command(
            "--attention-backend", "triton", "--max-running-requests", str(max(AT_ONCE)), "--cuda-graph-max-bs-decode", str(max(AT_ONCE)),
            # They take time at every start, and are not measured.
            "--disable-prefill-cuda-graph",
            *map(str, self.more),
        )  # fmt: skip

    def env(self):
        return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **self.variables}

    def tokenize(self, text):
        return call(self.url + "/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]

    def generate(self, prompt, tokens_max, **sampling):
        """Returns the token ids of the output, and SGLang's metadata."""
        params = {"max_new_tokens": tokens_max, "temperature": 0, **sampling}
        status, answer = call(self.url + "/generate", {"input_ids": prompt, "sampling_params": params}, timeout=300)
        if status != 200:
            raise SystemExit(f"{self.kind}: status {status}: {answer}")
        return answer["output_ids"], answer["meta_info"]

    def margin(self, prompt):
        """The distance between the two best next tokens."""
        body = {
            "input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True,
            "top_logprobs_num": 2,
        }  # fmt: skip
        best = call(self.url + "/generate", body)[1]["meta_info"]["output_top_logprobs"][0]
        return best[0][0] - best[1][0]


class CpuSglang(Sglang):
    """Such an SGLang on a CPU, where it computes in float32 and without its package of kernels."""

    start_seconds = 900

    def arguments(self):
        return self.command(*CPU_ARGUMENTS, *map(str, self.more))

    def env(self):
        return {**super().env(), **cpu_variables(self.variables.get("PYTHONPATH"))}


CPU_ARGUMENTS = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--max-running-requests", "64",
    "--max-total-tokens", "60000",
)  # fmt: skip


def cpu_variables(path=None):
    """The environment of an SGLang on a CPU. More threads would only wait for each other on a few cores."""
    path = os.pathsep.join(filter(None, (str(NO_KERNELS), path or os.environ.get("PYTHONPATH"))))
    return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def ranks_on_cpu(ranks):
    """The environment of several ranks: the core of each, since SGLang would have a NUMA node for each, and no NCCL."""
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return {"SGLANG_CPU_OMP_THREADS_BIND": bound, "SGLANG_NCCL_SO_PATH": os.devnull}


class Answers:
    """The outputs of a list of requests, of which `at_once` run together."""

    def __init__(self, engine, asked, at_once, tokens_max, **sampling):
        started = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(lambda prompt: engine.generate(prompt, tokens_max, **sampling), asked))
        self.seconds = time.perf_counter() - started
        self.outputs = [output for output, _ in answers]
        self.tokens = sum(map(len, self.outputs))
        # The steps of each request; the first token comes with the prompt.
        self.steps = [about.get("spec_verify_ct", about["completion_tokens"] - 1) for _, about in answers]

    def tokens_per_step(self):
        return (self.tokens - len(self.outputs)) / max(1, sum(self.steps))

    def tokens_per_s(self):
        return self.tokens / self.seconds


class Run:
    """The outputs of an SGLang with the shipped model, from its start to its stop."""

    def __init__(self, options, name, store=None, more=()):
        self.name = name
        self.steps_file = options.work / f"sglang-{name}.steps"
        self.steps_file.write_bytes(b"")
        variables = {"REFRAIN_PROBE": str(self.steps_file), "PYTHONPATH": python_path(options)}
        self.metrics = f"127.0.0.1:{free_port()}" if store else None
        if store:
            variables |= {**store.variables(), "REFRAIN_CLIENT_METRICS_LISTEN": self.metrics}
        if options.device == "cpu":
            self.engine, self.prompts_max = CpuSglang(options, name, more, variables), CPU_PROMPTS
        else:
            self.engine = Sglang(options, name, ["--max-total-tokens", POOL_TOKENS, *more], variables)
            self.prompts_max = None

    def ask(self, rounds, is_whole=True):
        """Sends every prompt in each round, one after another. If `is_whole`, also samples, and many at once."""
        engine = self.engine
        self.asked = prompts(engine)[: self.prompts_max]
        self.rounds = [Answers(engine, self.asked, 1, TOKENS) for _ in range(rounds)]
        # Texts long enough for a rate. The first round only makes them known.
        self.rates = {
            at_once: [Answers(engine, self.many(at_once), at_once, 200, ignore_eos=True) for _ in range(4)][1:]
            for at_once in (AT_ONCE if is_whole else ())
        }
        self.drawn = draws(engine, self.asked[0]) if is_whole else None
        self.proposals = collections.defaultdict(list)
        for took, count, *_ in probe.records(self.steps_file):
            self.proposals[count].append(took / 1e3)
        self.plugin_metrics = call(f"http://{self.metrics}/metrics")[1] if self.metrics else ""
        return self

    def many(self, at_once):
        return (self.asked * 3)[: 2 * max(8, at_once)]

    def rate(self, at_once):
        return statistics.median(answers.tokens_per_s() for answers in self.rates[at_once])

    def summary(self):
        lengths = ", ".join(f"{answers.tokens_per_step():.2f}" for answers in self.rounds)
        rates = ", ".join(
            f"{self.rate(at_once):.0f} at {at_once} ({self.rates[at_once][-1].tokens_per_step():.2f} a step)"
            for at_once in self.rates
        )
        text = f"tokens a step by rounds {lengths}"
        if self.drawn:
            text += f"; sampled {self.drawn.tokens_per_step():.2f}"
        if rates:
            text += f"; tokens/s {rates}"
        took = {count: statistics.median(took) for count, took in self.proposals.items() if count in AT_ONCE}
        if took:
            text += f"; proposal, median us {', '.join(f'{took[count]:.0f} for {count}' for count in sorted(took))}"
        return text


def python_path(options):
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join(filter(None, (str(install_probe(options)), given)))


def draws(engine, prompt):
    """Samples of one prompt."""
    return Answers(engine, [prompt] * DRAWS, max(AT_ONCE), DRAWN_TOKENS, temperature=1.0)


def distance(some, others):
    """The total variation between the outputs of two runs."""
    some, others = (collections.Counter(map(tuple, answers.outputs)) for answers in (some, others))
    return sum(abs(some[output] - others[output]) for output in some | others) / (2 * DRAWS)


def speculating(algorithm, nodes=NODES):
    return ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", nodes]


def start_all(engines):
    """Starts engines at the same time, since most of a start is imports."""
    with concurrent.futures.ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(lambda engine: engine.start(), engines))


def stop(engine):
    if engine.process:
        engine.process.stop(signal.SIGTERM)


def check_outputs(table, options, store):
    """Checks the outputs, drafts and rates of the shipped model."""
    runs = {
        OURS: Run(options, OURS, store, speculating("REFRAIN")),
        NGRAM: Run(options, NGRAM, None, speculating("NGRAM")),
        PLAIN: Run(options, PLAIN),
    }
    again = Run(options, f"{OURS}-restarted", store, speculating("REFRAIN"))
    try:
        start_all([run.engine for run in runs.values()])
        for run in runs.values():
            table.measured("sglang", run.name, run.ask(rounds=3).summary())
        stop(runs[OURS].engine)
        again.engine.start()
        table.measured("sglang", again.name, again.ask(rounds=1, is_whole=False).summary())
        plain = runs[PLAIN]
        plain.drawn_again = draws(plain.engine, plain.asked[0])
        for run in (*runs.values(), again):
            if run is not plain:
                same_tokens(table, run, plain)
    finally:
        for run in (*runs.values(), again):
            stop(run.engine)
    ours = runs[OURS]
    cold, warm = ours.rounds[0].tokens_per_step(), ours.rounds[-1].tokens_per_step()
    table.row("sglang", "drafts once a text is known", warm > 1.5 * cold, f"{warm:.2f} tokens a step, {cold:.2f} at first")
    after, before = again.rounds[0].tokens_per_step(), ours.rounds[1].tokens_per_step()
    detail = f"{after:.2f} tokens a step; before, when each text was known once, {before:.2f}"
    table.row("sglang", "drafts from the store, restarted", after > 1.5 * cold, detail)
    for at_once in AT_ONCE:
        rates = ", ".join(f"{name} {runs[name].rate(at_once):.0f}" for name in (PLAIN, NGRAM, OURS))
        gain = ours.rate(at_once) / runs[PLAIN].rate(at_once)
        table.measured("sglang", f"tokens per second at {at_once}", f"{rates}: {gain:.2f}x")
    noise = distance(plain.drawn, plain.drawn_again)
    far = {name: distance(plain.drawn, runs[name].drawn) for name in (NGRAM, OURS)}
    detail = f"{far[OURS]:.3f} from plain, {NGRAM} {far[NGRAM]:.3f}, plain from itself {noise:.3f}"
    detail += f"; {DRAWS} draws of {DRAWN_TOKENS} tokens"
    table.row("sglang", "samples: the same distribution", far[OURS] < 1.25 * noise + 0.02, detail)
    for run in (ours, again):
        values = re.findall(r"^refrain_client_(\w+) (\d+)$", run.plugin_metrics, re.M)
        detail = ", ".join(f"{name} {value}" for name, value in values)
        table.measured("sglang", f"{run.name}: metrics", detail)


def check_on_cpu(table, options, store):
    """Checks greedy outputs and drafts, with one rank and then with two that start with what the first one learnt."""
    ours, plain = Run(options, OURS, store, speculating("REFRAIN")), Run(options, PLAIN)
    ranks = Run(options, f"{OURS}-ranks", store, [*speculating("REFRAIN"), "--tp-size", 2])
    ranks.engine.variables |= ranks_on_cpu(2)
    try:
        start_all([plain.engine, ours.engine])
        table.measured("sglang", plain.name, plain.ask(rounds=1, is_whole=False).summary())
        table.measured("sglang", ours.name, ours.ask(rounds=2, is_whole=False).summary())
        stop(ours.engine)
        ranks.engine.start()
        table.measured("sglang", ranks.name, ranks.ask(rounds=1, is_whole=False).summary())
        for run in (ours, ranks):
            same_tokens(table, run, plain, mesh.NEAR_TIE)
    finally:
        for run in (plain, ours, ranks):
            stop(run.engine)
    cold, warm, known = ours.rounds[0], ours.rounds[1], ranks.rounds[0]
    for name, answers in (("drafts once a text is known", warm), ("drafts from the store, on two ranks", known)):
        detail = f"{answers.tokens_per_step():.2f} tokens a step, {cold.tokens_per_step():.2f} at first"
        table.row("sglang", name, answers.tokens_per_step() > 1.5 * cold.tokens_per_step(), detail)


def same_tokens(table, run, plain, near_tie=NEAR_TIE):
    outputs = [
        (number, *each)
        for answers in run.rounds
        for number, each in enumerate(zip(plain.asked, answers.outputs, plain.rounds[0].outputs))
    ]
    same, ties, wrong = compare(plain.engine, outputs, near_tie)
    detail = f"{same} of {len(outputs)} outputs; {ties} part at near-ties; {len(wrong)} differ"
    table.row("sglang", f"{run.name}: same greedy tokens", not wrong, detail)


def check_steps(table, options, store):
    """Measures a larger shape with dummy weights: the steps, plain and with drafts, and the rates of known texts."""
    folder = shaped(options)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ways = {PLAIN: [], OURS: speculating("REFRAIN"), NGRAM: speculating("NGRAM")}
    ways |= {f"{OURS}, {depth} drafted": speculating("REFRAIN", depth + 1) for depth in DEPTHS}
    engines = {}
    for number, (name, more) in enumerate(ways.items()):
        variables = store.variables() if name.startswith(OURS) else {}
        more = ["--load-format", "dummy", "--max-total-tokens", POOL_TOKENS, "--mem-fraction-static", "0.95", *more]
        engines[name] = Sglang(options, f"shape-{number}", more, variables, folder)
    names = list(ways)
    for wave in (names[at : at + WAVE] for at in range(0, len(names), WAVE)):
        try:
            start_all([engines[name] for name in wave])
            for name in wave:
                steps_of(table, name, engines[name], vocabulary)
        finally:
            for name in wave:
                stop(engines[name])


def steps_of(table, name, engine, vocabulary):
    """Measures steps after random prompts.

    Outputs of dummy weights soon repeat themselves, and are known the second time. So this is the rate where every
    draft is right. It includes prompts of which one token is computed anew.
    """
    dice = random.Random(7)
    for at_once in AT_ONCE:
        asked = [[dice.randrange(1000, vocabulary) for _ in range(CONTEXT - LONG // 2)] for _ in range(at_once)]
        Answers(engine, asked, at_once, LONG, ignore_eos=True)
        short, *known = (Answers(engine, asked, at_once, tokens, ignore_eos=True) for tokens in (SHORT, LONG, LONG, LONG))
        rate = statistics.median(answers.tokens_per_s() for answers in known)
        length = known[-1].tokens_per_step()
        detail = f"once known {rate:.0f} tokens/s, {length:.2f} a step: a step in {1e3 * at_once * length / rate:.2f} ms"
        if name == PLAIN:
            # All requests run in step, so the time of the prompts can be subtracted.
            took = statistics.median(answers.seconds for answers in known) - short.seconds
            detail += f", {1e3 * took / (LONG - SHORT):.2f} ms without the prompts"
        table.measured("sglang", f"{name}, {at_once} at once", detail)


def shaped(options):
    """The folder of the shape's configuration with the shipped tokenizer, which has fewer tokens."""
    folder = options.work / "shape"
    folder.mkdir(exist_ok=True)
    shutil.copy(options.shape / "config.json", folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(options.model / name, folder)
    return folder


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--refrain", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--python", type=pathlib.Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if shutil.which("nvidia-smi") else "cpu")
    parser.add_argument("--shape", type=pathlib.Path)
    parser.add_argument("--only-shape", action="store_true")
    parser.add_argument("--engine-argument", action="append", default=[])
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    clear(options.work, "attach-data")
    for old in options.work.glob("sglang-*.log"):
        old.unlink()
    table, store = Table(), Store(options).ready()
    try:
        if options.device == "cpu":
            check_on_cpu(table, options, store)
        elif not options.only_shape:
            check_outputs(table, options, store)
        if options.shape and options.device != "cpu":
            check_steps(table, options, store)
    finally:
        store.process.stop()
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
