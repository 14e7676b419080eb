//! [`Client`]: what Python calls.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use refrain_engine_plugin::{Begin, Draft, InEngineConfig, Proposer, Step};

use crate::tokens::Tokens;

/// A copy of the drafts, which follows a mesh's draft store and hands outputs back.
///
/// Client(config=None, tokenizer=None): `config` is the path of a TOML file, which variables REFRAIN_CLIENT_... override;
/// `tokenizer` the folder of the engine's tokenizer.json, where the configuration names none. Raises ValueError for a
/// faulty configuration, a tokenizer that cannot be read, and a token of other keys or another tokenizer. One that is too old,
/// or a token's file that cannot be read, is waited for.
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
            let config = InEngineConfig::load(config).map_err(invalid)?;
            let proposer = Proposer::connect(config, tokenizer.as_deref()).map_err(invalid)?;
            Ok(Client { proposer })
        })
    }

    /// start(request_id, prompt, namespace=None, group=None, document=None, epoch=1, written=0): a request
    /// begins, or goes on after the engine made room. `namespace` is a token; without it the configured one holds; a request that has neither, or
    /// whose token is refused (ValueError), is drafted for from its own text alone, and is not kept. `document` and `epoch`
    /// name its output in the store, as 32 hex digits and a number, where somebody else writes it; an output without a name is
    /// written from here. The last `written` tokens of the prompt are of it. Returns how many tokens behind the prompt are
    /// known from before: the next ones stand behind those.
    #[pyo3(signature = (request_id, prompt, namespace=None, group=None, document=None, epoch=1, written=0))]
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
    ) -> PyResult<usize> {
        py.detach(|| {
            let begin = Begin {
                request: request_id,
                prompt: prompt.0,
                namespace,
                group,
                document,
                epoch,
                written,
            };
            self.proposer.begin(begin).map_err(invalid)
        })
    }

    /// refuse(): counts a request that brought what cannot be read, and is not begun here.
    fn refuse(&self) {
        self.proposer.refuse();
    }

    /// extend(request_id, tokens): the engine said so. Others can draft from it at once. Unknown requests are ignored.
    fn extend(&self, py: Python<'_>, request_id: &str, tokens: Tokens) {
        py.detach(|| self.proposer.extend(request_id, &tokens.0));
    }

    /// propose(requests, factor=1.0, offset=0.0, min_token_prob=0.1): a chain for each (request id, most tokens), as
    /// (tokens, score, match length). Not more than factor * match length + offset tokens, none less likely than
    /// `min_token_prob`. The score is the number of tokens that the step is expected to bring by the counts.
    #[pyo3(signature = (requests, factor=1.0, offset=0.0, min_token_prob=0.1))]
    fn propose(
        &self,
        py: Python<'_>,
        requests: Vec<(String, usize)>,
        factor: f32,
        offset: f32,
        min_token_prob: f32,
    ) -> Vec<Draft> {
        let proposer = &self.proposer;
        py.detach(|| proposer.propose(requests, factor, offset, min_token_prob))
    }

    /// step(requests, factor=1.0, offset=0.0, min_token_prob=0.1): for each (request id, what it said since the last time,
    /// most tokens, the engine's own draft) a chain that is expected to bring more than the engine's own, or None: keep
    /// that. What drafts of both kinds bring is learnt from what is said, by namespace.
    #[pyo3(signature = (requests, factor=1.0, offset=0.0, min_token_prob=0.1))]
    fn step(
        &self,
        py: Python<'_>,
        requests: Vec<(String, Tokens, usize, Vec<u32>)>,
        factor: f32,
        offset: f32,
        min_token_prob: f32,
    ) -> Vec<Option<Vec<u32>>> {
        let step = |(request, said, room, rival): (_, Tokens, _, _)| Step {
            request,
            said: said.0,
            room,
            rival,
        };
        py.detach(|| {
            let steps = requests.into_iter().map(step).collect();
            self.proposer.step(steps, factor, offset, min_token_prob)
        })
    }

    /// finish(request_id, reason=None): it runs no more, maybe only for now. `reason` is the engine's word for it: "stop",
    /// "length" or "repetition"; with any other, or none, its output is partial. Unknown requests are ignored.
    #[pyo3(signature = (request_id, reason=None))]
    fn finish(&self, py: Python<'_>, request_id: String, reason: Option<&str>) {
        py.detach(|| self.proposer.finish(request_id, reason));
    }

    /// stats(): what was done, and what is in the memory.
    fn stats(&self, py: Python<'_>) -> HashMap<&'static str, u64> {
        py.detach(|| self.proposer.stats())
    }

    /// metrics(): the same and more, as Prometheus reads it.
    fn metrics(&self, py: Python<'_>) -> String {
        py.detach(|| self.proposer.metrics())
    }

    /// drain(seconds): waits until the store has all outputs, so long at most. Returns whether it has. Not for the
    /// engine's thread.
    fn drain(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let grace = Duration::try_from_secs_f64(seconds).map_err(invalid)?;
        Ok(py.detach(|| self.proposer.drain(grace)))
    }
}
