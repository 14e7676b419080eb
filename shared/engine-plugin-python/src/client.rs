//! [`Client`], the calls of Python.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use pyo3::IntoPyObjectExt as _;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use refrain_engine_plugin::{
    DeviceCommand, EngineRules, PaddedPart, PluginConfig, Proposer, RequestStart, RequestStep,
};
use refrain_protocol::chunk::DraftRules;

use crate::tokens::Tokens;

/// A replica of a mesh's drafts, which follows the draft store and uploads outputs to it.
///
/// Client(config=None, tokenizer=None, devices=False): `config` is the path of a TOML file, which variables
/// REFRAIN_CLIENT_... override. `tokenizer` is the folder of the engine's tokenizer.json, used where the
/// configuration names none. `devices` says that the engine's runner drafts on its devices: then the client says what
/// belongs there. Raises ValueError for a faulty configuration, a tokenizer that cannot be read, and a token of other
/// keys or of another tokenizer. The client waits for a newer token where it is expired, or where its file cannot be
/// read.
#[pyclass(frozen)]
pub(crate) struct Client {
    proposer: Proposer,
}

/// device_words_max(config=None): the words of the arena on each device, of which a token takes two.
///
/// Raises ValueError for a faulty configuration.
#[pyfunction]
#[pyo3(signature = (config=None))]
pub(crate) fn device_words_max(config: Option<PathBuf>) -> PyResult<u64> {
    Ok(PluginConfig::load(config)
        .map_err(invalid)?
        .device
        .words_max())
}

fn invalid(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (config=None, tokenizer=None, devices=false))]
    fn new(
        py: Python<'_>,
        config: Option<PathBuf>,
        tokenizer: Option<PathBuf>,
        devices: bool,
    ) -> PyResult<Self> {
        py.detach(|| {
            let config = PluginConfig::load(config).map_err(invalid)?;
            let (device, namespaces_max) = (config.device.clone(), config.replica.namespaces_max);
            let proposer = Proposer::connect(config, tokenizer.as_deref()).map_err(invalid)?;
            let proposer = match devices {
                true => proposer
                    .with_devices(&device, namespaces_max)
                    .map_err(invalid)?,
                false => proposer,
            };
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

    /// place(request_id): where the devices find the drafts of a request: the number of its namespace, or None, and
    /// the most draft tokens of a step by its own rules. None if the request is unknown.
    fn place(&self, py: Python<'_>, request_id: &str) -> Option<(Option<u32>, u32)> {
        let place = py.detach(|| self.proposer.place(request_id))?;
        Some((place.namespace, place.draft_tokens_max))
    }

    /// device_commands(): the changes of the texts on the devices, in their order, which the next step makes on all
    /// of them: ("drop", number, at, words) and ("load", number, namespace, at, text words, file). `at` is in words
    /// of the arena. Call `devices_have_loaded` once for each step with a "load", after it.
    fn device_commands(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let commands = py.detach(|| self.proposer.device_commands());
        let tuples = commands.into_iter().map(|command| match command {
            DeviceCommand::Drop { number, at, words } => {
                ("drop", number, at, words).into_py_any(py)
            }
            DeviceCommand::Load {
                number,
                namespace,
                at,
                text_words,
                file,
            } => ("load", number, namespace, at, text_words, file).into_py_any(py),
        });
        tuples.collect()
    }

    /// devices_have_loaded(): all devices made the changes of the oldest step that loads texts.
    fn devices_have_loaded(&self, py: Python<'_>) {
        py.detach(|| self.proposer.devices_have_loaded());
    }

    /// match_odds(depth): the odds that a match is continued rightly, as (number of a namespace, odds), for the
    /// namespaces of which more was learnt. The odds are those of matches of 0 to `depth` tokens, in the request's
    /// own text, then in its group, then in its namespace.
    fn match_odds(&self, py: Python<'_>, depth: u32) -> Vec<(u32, Vec<f32>)> {
        py.detach(|| self.proposer.match_odds(depth))
    }

    /// length(requests, lengths): the length of the drafts of a step that decodes for these requests,
    /// out of `lengths`, and whether it is 0 because the guard compares steps with and without drafts.
    fn length(&self, py: Python<'_>, requests: Vec<String>, lengths: Vec<u32>) -> (u32, bool) {
        py.detach(|| self.proposer.length(&requests, &lengths))
    }

    /// observe_step(seconds, parts, withheld): learns what a step took. Each part is (request id, prompt tokens that
    /// were read, or 0 if it decoded, places that were verified, tokens that were emitted).
    fn observe_step(
        &self,
        py: Python<'_>,
        seconds: f64,
        parts: Vec<(String, u32, u32, u32)>,
        withheld: bool,
    ) {
        let part = |(request, prompt_tokens, places, emitted)| PaddedPart {
            request,
            prompt_tokens,
            places,
            emitted,
        };
        py.detach(|| {
            let parts = parts.into_iter().map(part).collect();
            self.proposer.observe_step(seconds, parts, withheld);
        });
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
