"""Drafts from a Refrain mesh, inside an engine.

`Client` is a replica of the mesh's drafts. Engines load it through plugins, so users import nothing: `vllm.py` is the
plugin of vLLM with its suffix cache (`suffix.py`), `scheduler.py` a scheduler for vLLM, and `sglang.py` the plugin of
SGLang with its corpus (`corpus.py`). `v2/` drafts on the devices of vLLM's Model Runner V2.
"""

from refrain_client._native import Client, __version__, device_words_max

__all__ = ["Client", "__version__", "device_words_max"]
