//! [`Client`], the calls of Python.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use refrain_engine_plugin::{EngineRules, PluginConfig, Proposer, RequestStart, RequestStep};
use refrain_protocol::chunk::DraftRules;

use crate::tokens::Tokens;

/// A replica of a mesh's drafts, which follows the draft store and uploads outputs to it.
///
/// Client(config=None, tokenizer=None): `config` is the path of a TOML file, which variables REFRAIN_CLIENT_...
/// override. `tokenizer` is the folder of the engine's tokenizer.json, used where the configuration names none.
/// Raises ValueError for a faulty configuration, a tokenizer that cannot be read, and a token of other keys or of
/// another tokenizer. The client waits for a newer token where it is expired, or where its file cannot be read.
#[pyclass(frozen)]
pub(crate) struct Client {
    proposer: Proposer,
}

fn invalid(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (config=None, tokenizer=None))]
    fn new(py: Python<'_>, config: Option<PathBuf>, tokenizer: Option<PathBuf>) -> PyResult<Self> {
        py.detach(|| {
            let config = PluginConfig::load(config).map_err(invalid)?;
            let proposer = Proposer::connect(config, tokenizer.as_deref()).map_err(invalid)?;
            Ok(Client { proposer })
        })
    }

    /// start(request_id, prompt, namespace=None, group=None, document=None, epoch=1, written=0, alpha=None,
    /// min_token_prob=None, max_spec_tokens=None): begins a request, or resumes one after the engine made room.
    ///
    /// `namespace` is a token; without one the configured token applies. A request that has neither, or whose token
    /// is refused (ValueError), drafts from its own text alone, and its output is not kept. `document` (32 hex
    /// digits) and `epoch` (a number) name the output in the store, where another service writes it there; an output
    /// without a name is uploaded from here. The last `written` tokens of the prompt are output already. Returns how
    /// many output tokens are known from before an interruption: the next ones follow these.
    ///
    /// The last three are the rules of the request's drafts. `alpha` and `min_token_prob` come before those of
    /// `propose` and of the configuration. No step has more than `max_spec_tokens` draft tokens for it, of whatever
    /// source.
    #[pyo3(signature = (
        request_id, prompt, namespace=None, group=None, document=None, epoch=1, written=0, alpha=None,
        min_token_prob=None, max_spec_tokens=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "a Python call with names")]
    fn start(
        &self,
        py: Python<'_>,
        request_id: String,
        prompt: Tokens,
        namespace: Option<&str>,
        group: Option<String>,
        document: Option<&str>,
        epoch: u64,
        written: usize,
        alpha: Option<f32>,
        min_token_prob: Option<f32>,
        max_spec_tokens: Option<u64>,
    ) -> PyResult<usize> {
        py.detach(|| {
            let drafts = DraftRules {
                alpha,
                min_token_prob,
                max_spec_tokens: max_spec_tokens.map(|max| u32::try_from(max).unwrap_or(u32::MAX)),
            };
            let start = RequestStart {
                request: request_id,
                prompt: prompt.0,
                namespace,
                group,
                document,
                epoch,
                written,
                drafts,
            };
            self.proposer.begin(start).map_err(invalid)
        })
    }

    /// refuse(): counts a request whose fields cannot be read, and which is not begun here.
    fn refuse(&self) {
        self.proposer.refuse();
    }

    /// extend(request_id, tokens): takes the tokens that the engine emitted. Other requests can draft from them at
    /// once. Unknown requests are ignored.
    fn extend(&self, py: Python<'_>, request_id: &str, tokens: Tokens) {
        py.detach(|| self.proposer.extend(request_id, &tokens.0));
    }

    /// propose(requests, alpha=None, offset=0.0, min_token_prob=None, depth=None, padded=False): returns a draft for
    /// each (request id, most tokens), as (tokens, score, match length).
    ///
    /// No draft has more than alpha * match length + offset tokens, nor a token that is less likely than
    /// `min_token_prob`; the configuration decides where they are None. A match and its draft together have at most
    /// `depth` tokens. `padded` says that a step verifies the most tokens in any case, so drafts are as long as they
    /// can be. The score is the expected number of accepted tokens, by the counts.
    #[pyo3(signature = (requests, alpha=None, offset=0.0, min_token_prob=None, depth=None, padded=false))]
    #[expect(clippy::too_many_arguments, reason = "a Python call with names")]
    fn propose(
        &self,
        py: Python<'_>,
        requests: Vec<(String, usize)>,
        alpha: Option<f32>,
        offset: f32,
        min_token_prob: Option<f32>,
        depth: Option<u32>,
        padded: bool,
    ) -> Vec<(Vec<u32>, f32, u32)> {
        let engine = EngineRules {
            alpha,
            offset,
            min_token_prob,
            match_plus_draft_max: depth,
            is_padded: padded,
        };
        let drafts = py.detach(|| self.proposer.propose(requests, &engine));
        let tuples = drafts
            .into_iter()
            .map(|draft| (draft.tokens, draft.score, draft.match_len));
        tuples.collect()
    }

    /// step(requests): returns for each (request id, tokens emitted since the last step, most tokens, the engine's
    /// own draft) a draft that is expected to bring more than the engine's own, or None to keep that. A draft of the
    /// engine that is longer than the request's rules allow is cut, even to nothing. The acceptance statistics of
    /// both are learnt from the emitted tokens, by namespace.
    fn step(
        &self,
        py: Python<'_>,
        requests: Vec<(String, Tokens, usize, Vec<u32>)>,
    ) -> Vec<Option<Vec<u32>>> {
        let step =
            |(request, emitted, draft_tokens_max, engine_draft): (_, Tokens, _, _)| RequestStep {
                request,
                emitted: emitted.0,
                draft_tokens_max,
                engine_draft,
            };
        py.detach(|| {
            let steps = requests.into_iter().map(step).collect();
            self.proposer.step(steps)
        })
    }

    /// finish(request_id, reason=None): ends a request, maybe only for now. `reason` is the engine's finish reason:
    /// "stop", "length", "repetition" or "error". With any other, or none, the output is partial, and the request may
    /// be resumed. Unknown requests are ignored.
    #[pyo3(signature = (request_id, reason=None))]
    fn finish(&self, py: Python<'_>, request_id: String, reason: Option<&str>) {
        py.detach(|| self.proposer.finish(request_id, reason));
    }

    /// stats(): returns counters of the work done, and the size of the replica.
    fn stats(&self, py: Python<'_>) -> HashMap<&'static str, u64> {
        py.detach(|| self.proposer.stats())
    }

    /// metrics(): returns all metrics in the text format of Prometheus.
    fn metrics(&self, py: Python<'_>) -> String {
        py.detach(|| self.proposer.metrics())
    }

    /// drain(seconds): waits until the store has all outputs, at most for so long. Returns whether it has. The
    /// engine's thread must not call this.
    fn drain(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let grace = Duration::try_from_secs_f64(seconds).map_err(invalid)?;
        Ok(py.detach(|| self.proposer.drain(grace)))
    }
}
