"""A benchmark by aiperf, by its command: synthetic prompts and answers of fixed lengths, over each API that it knows.

    aiperf_client.py URL KEY MODEL
"""

import json
import pathlib
import tempfile

from tasks import check, command, mesh, tokenizer

url, key, model = mesh()
requests, prompt_tokens, output_tokens = 10, 64, 32
for endpoint in "chat", "completions", "responses", "messages":
    with tempfile.TemporaryDirectory() as folder:
        # The tokens of `usage` are counted, because a text lacks tokens that are not shown. At the limit of tokens a
        # streamed response ends as incomplete, and there aiperf does not look for its usage.
        counted = [] if endpoint == "responses" else ["--use-server-token-count"]
        command(
            "aiperf", "profile", "--model", model, "--url", url, "--api-key", key, "--endpoint-type", endpoint,
            "--streaming", "--tokenizer", tokenizer(), *counted, "--concurrency", "2",
            "--request-count", str(requests), "--isl", str(prompt_tokens), "--osl", str(output_tokens),
            "--extra-inputs", "ignore_eos:true", "--artifact-dir", folder, "--ui", "none",
        )
        report = json.loads(pathlib.Path(folder, "profile_export_aiperf.json").read_text())
    mean = {name: value["avg"] for name, value in report.items() if isinstance(value, dict) and "avg" in value}
    check(mean["request_count"] == requests and mean["request_error_rate"] == 0, report["error_summary"])
    least = output_tokens if counted else output_tokens / 2
    check(least <= mean["output_sequence_length"] <= output_tokens, mean["output_sequence_length"])
    check(mean["input_sequence_length"] >= prompt_tokens, mean["input_sequence_length"])
    for name in ["request_throughput", "time_to_first_token", "inter_token_latency", "output_token_throughput"]:
        check(mean[name] > 0, f"{name} is {mean[name]}")
    print(
        f"result: aiperf, {endpoint}: {mean['request_count']:.0f} of {requests} requests,"
        f" {mean['output_sequence_length']} output tokens each, {mean['time_to_first_token']:.1f} ms to the first,"
        f" {mean['inter_token_latency']:.1f} ms between tokens"
    )
