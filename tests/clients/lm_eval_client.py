"""A task with multiple choice by lm_eval, by its command: it scores prompts with `echo` and `logprobs`.

    lm_eval_client.py URL KEY MODEL
"""

import json
import os
import pathlib
import tempfile

from tasks import check, command, mesh, tokenizer

url, key, model = mesh()
os.environ["OPENAI_API_KEY"] = key
task = pathlib.Path(__file__).parent / "lm_eval_task"
with tempfile.TemporaryDirectory() as folder:
    arguments = {
        "model": model, "base_url": f"{url}/v1/completions", "num_concurrent": 2, "max_retries": 1,
        "tokenizer": tokenizer(),
    }
    # The task names its file of questions as seen from its own folder.
    command(
        "lm_eval", "run", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--include_path", str(task), "--tasks", "next_words", "--output_path", folder, folder=task,
    )
    report = json.loads(next(pathlib.Path(folder).rglob("results_*.json")).read_text())

accuracy = report["results"]["next_words"]["acc,none"]
questions = report["n-samples"]["next_words"]["effective"]
check(questions == 8, report["n-samples"])
check(accuracy == 1, f"the accuracy is {accuracy}")
print(f"result: lm_eval: {questions} questions, accuracy {accuracy}")
