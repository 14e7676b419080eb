"""Drafts inside vLLM's Model Runner V2, with asynchronous scheduling and CUDA graphs.

    --scheduler-cls refrain_client.v2.RefrainAsyncScheduler --speculative-config '{"method": "ngram", ...}'

The runner drafts on its devices, so the host can give it no drafts. It has the texts there instead:

* `scheduler.py` runs in the engine's core. It follows the requests, tells the draft store of their outputs, chooses how
  long drafts are, and sends `news.py` with each step: texts to load, and who may read them.
* `plugin.py` puts `speculator.py` in the place of vLLM's n-grams, in each worker. That one keeps `rows.py`, the sources
  of each running request, and `index.py`, the texts, which `kernels.py` searches.

docs/vllm.md lists the versions that were tested, and what is refused.
"""


def __getattr__(name):
    # vLLM's scheduler must not be imported with the plugin, which vLLM loads before its own parts are there.
    if name == "RefrainAsyncScheduler":
        from refrain_client.v2.scheduler import RefrainAsyncScheduler

        return RefrainAsyncScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
