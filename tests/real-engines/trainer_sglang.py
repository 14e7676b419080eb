"""The listener for trainers in front of two real SGLangs on an NVIDIA GPU.

    tests/real-engines/run trainer-sglang
    trainer_sglang.py --refrain BINARY --model DIR --work DIR --python PYTHON

PYTHON is that of SGLang's environment.
"""

import argparse
import pathlib
import sys

import trainer
from engines import call
from in_sglang import NEAR_TIE, Sglang
from mesh import Table, clear


class TrainerSglang(Sglang):
    """An SGLang as slime starts it."""

    # In bfloat16, logits between 8 and 16 have steps of 1/16, and a prompt is read in other batches than it was written.
    logprob_tolerance = 0.35
    near_tie = NEAR_TIE
    # So the other weights have to differ by more.
    weights_factor, contrast = 3.0, 4
    long_tokens = 500
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


def main():
    parser = argparse.ArgumentParser()
    for name in ("--refrain", "--model", "--work", "--python"):
        parser.add_argument(name, type=pathlib.Path, required=True)
    parser.add_argument("--engine-argument", action="append", default=[])
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    clear(options.work, "trainer-sglang-data")
    table = Table()
    trainer.run(table, options, [TrainerSglang(options, number) for number in range(2)], "trainer-sglang")
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
