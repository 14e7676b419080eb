"""The listener for trainers in front of two real SGLangs, on one NVIDIA GPU or on the CPU.

    tests/real-engines/run trainer-sglang
    trainer_sglang.py --refrain BINARY --model DIR --work DIR --python PYTHON [--device cpu]

PYTHON is that of SGLang's environment. Without an NVIDIA GPU the CPU is used.
"""

import argparse
import pathlib
import shutil
import sys

import mesh
import trainer
from engines import call
from in_sglang import CPU_ARGUMENTS, Sglang, cpu_variables
from mesh import Table, clear


class TrainerSglang(Sglang):
    """An SGLang as slime starts it."""

    # In bfloat16, logits between 8 and 16 have steps of 1/16, and a prompt is read in other batches than it was written.
    logprob_tolerance = 0.35
    # The two best tokens change their order as easily: outputs parted where these were 0.25 apart.
    near_tie = logprob_tolerance
    # So the other weights have to differ by more.
    weights_factor, contrast = 3.0, 4
    long_tokens = 500
    # It does not wait for the end of its step.
    settle_seconds = 0.3
    is_sglang = True
    # What slime tells each engine, so that all rollouts end.
    abort_words = (("/abort_request", {"abort_all": True}),)

    def __init__(self, options, number):
        # Nothing is measured here, so the engines need no graphs, whose capture takes a minute.
        more = ["--mem-fraction-static", "0.2", "--max-total-tokens", 60_000, "--disable-cuda-graph"]
        super().__init__(options, f"trainer-{number}", more)
        self.served = str(self.model)

    def ask(self, prompt, sampling, **more):
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, **sampling}, "return_logprob": True, **more}
        return call(self.url + "/generate", body, timeout=120)[1]

    def reference(self, prompt, tokens_max, endless=False):
        """The greedy output of the engine itself: its tokens and their log-probabilities."""
        answer = self.ask(prompt, {"max_new_tokens": tokens_max, "ignore_eos": endless})
        return answer["output_ids"], [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]

    def scores(self, prompt, output):
        """The log-probabilities of an output, read as a prompt."""
        start = len(prompt) - 1
        rows = self.ask(prompt + output, {"max_new_tokens": 1}, logprob_start_len=start)["meta_info"]["input_token_logprobs"]
        rows = rows[-len(output) :]
        assert [token for _, token, _ in rows] == output, "the rows of the prompt have other tokens"
        return [logprob for logprob, _, _ in rows]

    def stopped(self, prompt, tokens_max, stop):
        """The greedy output up to a text that ends it."""
        return self.ask(prompt, {"max_new_tokens": tokens_max, "stop": [stop], "no_stop_trim": True})["output_ids"]

    def running(self):
        loads = call(self.url + "/v1/loads?include=core")[1]["loads"]
        return sum(row["num_running_reqs"] + row["num_waiting_reqs"] for row in loads)


class CpuSglang(TrainerSglang):
    """Such an SGLang on a CPU, where it computes in float32 and without its package of kernels."""

    start_seconds = 900
    logprob_tolerance = 1e-3
    near_tie = mesh.NEAR_TIE
    weights_factor, contrast = 1.25, 10
    long_tokens = 160
    # Steps are long where others use the cores as well.
    settle_seconds = 2

    def __init__(self, options, number):
        super().__init__(options, number)
        self.engine_arguments = options.engine_argument
        self.variables = cpu_variables()

    def arguments(self):
        return self.command(*CPU_ARGUMENTS, *map(str, self.engine_arguments))


def main():
    parser = argparse.ArgumentParser()
    for name in ("--refrain", "--model", "--work", "--python"):
        parser.add_argument(name, type=pathlib.Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if shutil.which("nvidia-smi") else "cpu")
    parser.add_argument("--engine-argument", action="append", default=[])
    options = parser.parse_args()
    engine = TrainerSglang if options.device == "cuda" else CpuSglang
    options.work.mkdir(parents=True, exist_ok=True)
    clear(options.work, "trainer-sglang-data")
    table = Table()
    trainer.run(table, options, [engine(options, number) for number in range(2)], "trainer-sglang")
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
