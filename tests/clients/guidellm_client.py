"""A benchmark by guidellm, by its command: synthetic prompts and answers of fixed lengths.

    guidellm_client.py URL KEY MODEL
"""

import json
import pathlib
import tempfile

from tasks import check, command, mesh, tokenizer

url, key, model = mesh()
requests, prompt_tokens, output_tokens = 10, 64, 32
with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder, "report.json")
    command(
        "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model={model},api_key={key}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={requests}",
        "--data", f"kind=synthetic_text,prompt_tokens={prompt_tokens},output_tokens={output_tokens}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer()}", "--output", f"kind=json,path={report}",
    )
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]

totals = metrics["request_totals"]
check(totals["successful"] == totals["total"] == requests, totals)


def mean(name):
    return metrics[name]["successful"]["mean"]


check(mean("output_token_count") == output_tokens, mean("output_token_count"))
check(mean("prompt_token_count") >= prompt_tokens, mean("prompt_token_count"))
for name in ["requests_per_second", "time_to_first_token_ms", "inter_token_latency_ms", "output_tokens_per_second"]:
    check(mean(name) > 0, f"{name} is {mean(name)}")
print(
    f"result: guidellm: {totals['successful']} of {requests} requests, {mean('output_token_count')} output tokens each,"
    f" {mean('time_to_first_token_ms'):.1f} ms to the first, {mean('inter_token_latency_ms'):.1f} ms between tokens"
)
