"""Runs slime's own code of rollouts against a mesh of two reference engines. `run_slime` starts it.

slime's functions make the rollouts, abort them, resume them, evaluate, and change the weights. This file gives them
their settings, and looks at each sample that they return.
"""

import argparse
import json
import logging
import shutil
import sys
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import stubs  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--slime", required=True, type=Path)
parser.add_argument("--refrain", required=True)
parser.add_argument("--work", required=True, type=Path)
options = parser.parse_args()
sys.path.insert(0, str(options.slime))
made = stubs.for_slime()

import requests  # noqa: E402
import slime_hooks  # noqa: E402
from grpo import LOGPROB_ERROR_MAX, Policy  # noqa: E402
from logprobs import Weights  # noqa: E402
from mesh import DRAFTS, MODEL_FOLDER, Mesh  # noqa: E402
from report import Report  # noqa: E402
from slime.backends.sglang_utils import external  # noqa: E402
from slime.backends.sglang_utils.sglang_engine import SGLangEngine  # noqa: E402
from slime.rollout.data_source import RolloutDataSourceWithBuffer  # noqa: E402
from slime.rollout.sglang_rollout import generate_rollout  # noqa: E402
from slime.utils.eval_config import build_eval_dataset_configs  # noqa: E402
from slime.utils.http_utils import init_http_client  # noqa: E402
from slime.utils.misc import SingletonMeta  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from task import END, questions  # noqa: E402

GROUP, TOKENS_MAX, SEED = 8, 160, 5
DONE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"
NONZERO = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def settings(mesh, run, **changes):
    """What slime reads from its command line. Its defaults, but for sizes and the rewards."""
    values = dict(
        hf_checkpoint=str(MODEL_FOLDER), sglang_router_ip="127.0.0.1", sglang_router_port=mesh.trainer, router_policy=None,
        rollout_num_engines=2, rollout_num_gpus=2, rollout_num_gpus_per_engine=1, num_gpus_per_node=8,
        sglang_server_concurrency=32, use_distributed_post=False, sglang_dp_size=1, sglang_pp_size=1, sglang_ep_size=1,
        sglang_speculative_algorithm="EAGLE", use_rollout_routing_replay=False, ci_test=True,
        rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=TOKENS_MAX,
        rollout_stop=None, rollout_stop_token_ids=None, rollout_skip_special_tokens=False, rollout_seed=SEED, seed=SEED,
        rollout_global_dataset=True, rollout_shuffle=True, rollout_max_prompt_len=None, prompt_data=str(run / "train.jsonl"),
        input_key="messages", label_key="label", metadata_key="metadata", tool_key=None, multimodal_keys=None,
        apply_chat_template=True, apply_chat_template_kwargs=None, dump_details=None, buffer_filter_path=None,
        n_samples_per_prompt=GROUP, rollout_batch_size=8, over_sampling_batch_size=8, dynamic_sampling_filter_path=None,
        partial_rollout=False, mask_offpolicy_in_partial_rollout=False, custom_generate_function_path=None, group_rm=False,
        custom_rm_path="slime_hooks.reward", rm_type=None, reward_key=None, eval_reward_key=None,
        rollout_sample_hook_path=["slime_hooks.after_call"], rollout_sample_filter_path=None,
        rollout_all_samples_process_path="slime_hooks.all_groups", eval_max_prompt_len=None, eval_datasets=None,
        rollout_external=True, offload_rollout=False, colocate=False, debug_rollout_only=True, fp16=False,
    )
    return Namespace(**{**values, **changes})


class Run:
    """One run of slime: a data source and settings that last for some rollouts."""

    def __init__(self, report, weights, args):
        self.report, self.weights, self.args = report, weights, args
        # slime keeps its settings for the life of its process.
        SingletonMeta._instances.clear()
        slime_hooks.forget()
        init_http_client(args)
        self.source = RolloutDataSourceWithBuffer(args)
        self.rollout = 0

    def roll_out(self, name):
        """One batch. Returns its samples, after a look at each."""
        output = generate_rollout(self.args, self.rollout, self.source)
        self.rollout += 1
        groups = output.samples
        samples = [sample for group in groups for sample in group]
        sizes = [len(group) for group in groups]
        size = self.args.rollout_batch_size
        self.report.row(f"{name}: groups", f"{len(groups)} of {GROUP}", sizes == [GROUP] * size)
        self.look(name, samples)
        return samples

    def look(self, name, samples):
        faults = [fault for sample in samples if (fault := self.fault(sample))]
        resumed = sum(len(sample.weight_versions) > 1 for sample in samples)
        mixed = sum(len(set(sample.weight_versions)) > 1 for sample in samples)
        seen = f"{len(samples)} samples, {resumed} of several calls, {mixed} of several versions"
        self.report.row(f"{name}: samples", seen + "".join(f"; {fault}" for fault in faults[:3]), not faults)
        worst, count = self.weights.difference([as_row(sample) for sample in samples])
        tokens = sum(sample.response_length for sample in samples)
        self.report.row(
            f"{name}: log-probabilities", f"{count} of {tokens} tokens, within {worst:.1e}",
            worst < LOGPROB_ERROR_MAX and count == tokens,
        )
        steps = sum(sample.spec_info.spec_verify_ct for sample in samples)
        drafted = sum(sample.spec_info.spec_draft_token_num for sample in samples)
        accepted = sum(sample.spec_info.spec_accept_token_num for sample in samples)
        self.report.row(
            f"{name}: drafts", f"{accepted} of {drafted} draft tokens taken, {tokens / max(steps, 1):.2f} tokens per step",
            0 < steps <= tokens and accepted <= drafted,
        )

    def fault(self, sample):
        """What is wrong with a sample that may be trained on, if anything."""
        size = sample.response_length
        output = sample.tokens[len(sample.tokens) - size :]
        checks = {
            f"status {sample.status}": sample.status in DONE,
            "no tokens": size > 0,
            "a length": len(sample.rollout_log_probs or []) == size == len(sample.loss_mask or []),
            "the text": sample.response == tokenizer.decode(output),
            "the prompt": sample.tokens[: len(sample.tokens) - size] == prompts[sample.label],
            "the end": (sample.status == DONE[0]) == (output[-1:] == [END_TOKEN]) and size <= TOKENS_MAX,
            f"versions {sample.weight_versions}": self.is_told(sample),
            "no reward": sample.reward is not None,
        }
        return ", ".join(name for name, holds in checks.items() if not holds)

    def is_told(self, sample):
        """Whether the mesh told the version of each call. A stream that slime leaves tells none."""
        told, calls = sample.weight_versions, [version for _, _, version in as_row(sample)[3]]
        rest = iter(calls)
        is_whole = len(told) == len(calls) or self.args.custom_generate_function_path == STREAMING
        return is_whole and told[-1:] == calls[-1:] and all(version in rest for version in told)

    def account_for_groups(self, name):
        """Each group that the source handed out has ended, or waits in the buffer of the source."""
        ended = {group[0].group_index for group in slime_hooks.ENDED}
        kept = {group[0].group_index for group in self.source.buffer}
        out = set(range(self.source.sample_group_index))
        self.report.row(
            f"{name}: nothing is lost", f"{len(out)} groups were begun, {len(ended)} ended, {len(kept)} are kept",
            ended | kept == out and not ended & kept,
        )

    def partial(self, name):
        """What an abort left: samples with tokens of their own that are to go on."""
        begun = [sample for group in self.source.buffer for sample in group]
        aborted = [sample for sample in begun if sample.status == Sample.Status.ABORTED]
        with_tokens = [sample for sample in aborted if sample.response_length]
        done = sum(sample.status in DONE for sample in begun)
        faults = [s for s in with_tokens if len(s.rollout_log_probs) != s.response_length or s.reward is not None]
        faults += [s for s in with_tokens if s.response != tokenizer.decode(s.tokens[-s.response_length :])]
        seen = f"{len(begun)} samples kept, {done} had ended, {len(with_tokens)} have tokens and go on"
        self.report.row(f"{name}: what the abort left", seen, not faults)
        worst, count = self.weights.difference([as_row(sample) for sample in with_tokens])
        self.report.row(
            f"{name}: log-probabilities of what is left", f"{count} tokens, within {worst:.1e}",
            worst < LOGPROB_ERROR_MAX and count == sum(sample.response_length for sample in with_tokens),
        )
        return len(with_tokens)


def as_row(sample):
    """A sample with the spans of its calls, each of which has one version."""
    spans, start = [], 0
    for end, version in slime_hooks.CALLS.get(sample.index, [(sample.response_length, slime_hooks.NOW)]):
        spans.append((start, end, version))
        start = end
    at = len(sample.tokens) - sample.response_length
    return sample.tokens[:at], sample.tokens[at:], sample.rollout_log_probs, spans


def start_engine(report, args):
    """slime's actor of an engine that it did not start: the whole mesh passes for one."""
    url = f"127.0.0.1:{args.sglang_router_port}"
    args = Namespace(**{**vars(args), "rollout_external_engine_addrs": [url]})
    external.apply_external_engine_info_to_args(args)
    info = external.external_engine_infos_from_args(args)[0]
    engine = SGLangEngine(args, 0, info.worker_type, base_gpu_id=0, num_gpus_per_engine=info.num_gpus)
    engine.node_rank, engine.server_host, engine.server_port = 0, info.host, info.port
    with report.part("an engine that slime did not start"):
        engine.init(
            **external.external_engine_init_kwargs(info), router_ip=args.sglang_router_ip, router_port=args.sglang_router_port
        )
        report.row("an engine that slime did not start", f"{info.num_gpus} devices, registered", info.num_gpus == 1)
    return engine


def change_weights(report, engine, weights, run, version):
    """The calls of slime between two rollouts, in its order."""
    folder = weights.save(run / f"weights-{version}", version)
    engine.pause_generation()
    # slime calls by GET, which the listener refuses.
    requests.post(f"http://{engine.server_host}:{engine.server_port}/flush_cache", timeout=60).raise_for_status()
    engine.update_weights_from_disk(folder, weight_version=str(version))
    engine.continue_generation()
    slime_hooks.NOW = str(version)
    seen = engine.get_weight_version()
    report.row(f"weights {version}", f"version {seen!r} afterwards", seen == str(version))


def learn(policy, samples):
    """GRPO over some groups of slime's, so that the weights change."""
    samples = samples[: 2 * GROUP]
    rows = [Namespace(prompt=row[0], tokens=row[1], logprobs=row[2], reward=sample.reward)
            for sample in samples for row in [as_row(sample)]]
    policy.improve([rows[at : at + GROUP] for at in range(0, len(rows), GROUP)])


def main():
    global tokenizer, prompts, END_TOKEN
    report = Report()
    run = options.work / "slime-run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    logging.basicConfig(filename=run / "slime.log", level=logging.INFO)
    print("stubs: " + ", ".join(made), flush=True)
    policy = Policy(str(MODEL_FOLDER), 2e-5, SEED)
    weights = Weights(policy, str(MODEL_FOLDER))
    asked = questions(24, policy.tokenizer, SEED)
    prompts = {question.answer: question.prompt for question in asked}
    END_TOKEN = policy.tokenizer.token_to_id(END)
    for name, some in {"train": asked, "eval": asked[:6]}.items():
        rows = [{"messages": q.messages, "label": q.answer, "metadata": {"schema": q.schema}} for q in some]
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mesh = Mesh(options.refrain, run, "mesh", MODEL_FOLDER, DRAFTS)
    from slime.utils.processing_utils import load_tokenizer

    tokenizer = load_tokenizer(str(MODEL_FOLDER), trust_remote_code=True)
    engine = start_engine(report, settings(mesh, run))
    parts(report, mesh, run, policy, weights, engine)
    mesh.stop()
    raise SystemExit(report.end())


def parts(report, mesh, run, policy, weights, engine):
    with report.part("plain"):
        plain = Run(report, weights, settings(mesh, run))
        learn(policy, plain.roll_out("plain, 1st batch"))
        change_weights(report, engine, weights, run, 1)
        learn(policy, plain.roll_out("plain, 2nd batch"))
        plain.account_for_groups("plain")
    for name, function in {"partial": None, "partial, streams": STREAMING}.items():
        with report.part(name, 600):
            first = len(weights.folders)
            change_weights(report, engine, weights, run, first)
            over = Run(report, weights, settings(
                mesh, run, partial_rollout=True, over_sampling_batch_size=32, rollout_batch_size=4,
                sglang_server_concurrency=48, dynamic_sampling_filter_path=NONZERO, custom_generate_function_path=function,
            ))
            cut_off = 0
            for batch in range(3):
                learn(policy, over.roll_out(f"{name}, batch {batch + 1}"))
                cut_off += over.partial(f"{name}, batch {batch + 1}")
                over.account_for_groups(f"{name}, batch {batch + 1}")
                change_weights(report, engine, weights, run, first + batch + 1)
            report.row(f"{name}: outputs that an abort cut off", f"{cut_off}", cut_off > 0)
    with report.part("aborts without partial rollouts"):
        wasteful = Run(report, weights, settings(mesh, run, over_sampling_batch_size=24, rollout_batch_size=3))
        wasteful.roll_out("aborts without partial rollouts")
        report.row("aborts without partial rollouts: buffer", f"{len(wasteful.source.buffer)} groups", not wasteful.source.buffer)
    with report.part("seeds"):
        outputs = []
        for _ in range(2):
            seeded = Run(report, weights, settings(
                mesh, run, sglang_enable_deterministic_inference=True, router_policy="consistent_hashing",
            ))
            outputs.append([sample.tokens for sample in seeded.roll_out("seeds")])
        same = sum(one == other for one, other in zip(*outputs))
        report.row("seeds: twice the same", f"{same} of {len(outputs[0])}", outputs[0] == outputs[1])
    with report.part("evaluation"):
        evaluate(report, mesh, run, weights)
    with report.part("calls for a GPU"):
        refused(report, engine)


def evaluate(report, mesh, run, weights):
    args = settings(mesh, run, eval_temperature=0.0, n_samples_per_eval_prompt=2, eval_min_new_tokens=2)
    datasets = [
        {"name": "greedy", "path": str(run / "eval.jsonl"), "repetition_penalty": 1.0},
        {"name": "streams", "path": str(run / "eval.jsonl"), "custom_generate_function_path": STREAMING},
    ]
    args.eval_datasets = build_eval_dataset_configs(args, datasets, {})
    evaluation = Run(report, weights, args)
    output = generate_rollout(args, 0, evaluation.source, evaluation=True)
    for name, result in output.data.items():
        evaluation.look(f"evaluation, {name}", result["samples"])
        texts = [sample.response for sample in result["samples"]]
        report.row(f"evaluation, {name}: rewards", f"mean {sum(result['rewards']) / len(result['rewards']):.3f}",
                   len(texts) == 12 and texts[::2] == texts[1::2])


def refused(report, engine):
    """The reference engine takes weights from a directory only, and slime has to learn that at once."""
    calls = {
        "init_weights_update_group": lambda: engine.init_weights_update_group("127.0.0.1", 1, 1, 3, "slime", "nccl"),
        "update_weights_from_tensor": lambda: engine.update_weights_from_tensor(["a", "b"], weight_version="99"),
        "release_memory_occupation": engine.release_memory_occupation,
    }
    for name, call in calls.items():
        try:
            report.row(name, f"accepted: {call()}", False)
        except Exception as error:  # noqa: BLE001 - requests' error, with the text of the answer as a note.
            told = " ".join(getattr(error, "__notes__", []))
            report.row(name, f"refused: {told[:160]}", "unsupported" in told or "not" in told)
    engine.destroy_weights_update_group("slime")
    report.row("slime goes on after a refusal", f"version {engine.get_weight_version()}", engine.health_generate())


if __name__ == "__main__":
    main()
