//! The trajectories of a session as a trainer reads them, in JSON or MessagePack.

use refrain_protocol::TokenId;
use refrain_protocol::openai::WeightSpan;
use serde::Serialize;

use super::sessions::{Trajectory, Turn, TurnFigures, Turns};
use super::version::version_name;

/// The answer of `GET /sessions/{id}/trajectories`.
#[derive(Serialize)]
pub(super) struct TrajectoryBody<'a> {
    session_id: &'a str,
    trajectories: Vec<ShownTrajectory<'a>>,
}

/// A trajectory: lists with an entry for each token, and its turns.
#[derive(Serialize)]
struct ShownTrajectory<'a> {
    token_ids: Vec<TokenId>,
    /// 1 for tokens that the model sampled, and 0 for those of prompts.
    loss_mask: Vec<u8>,
    /// 0 for tokens of prompts.
    logprobs: Vec<f32>,
    /// The versions that sampled tokens, with their places in the trajectory.
    weight_versions: Vec<WeightSpan>,
    /// The version of the last token, as text.
    weight_version: String,
    /// Tokens at its beginning that an earlier trajectory of the list has as well.
    shared_tokens: usize,
    finish_reason: &'a str,
    turns: Vec<ShownTurn<'a>>,
}

/// A turn, with places in the trajectory.
#[derive(Serialize)]
struct ShownTurn<'a> {
    /// Place of its first token, which is one of the prompt.
    start: usize,
    /// Place of the first token that was sampled, which is the number of tokens of its whole prompt.
    output_start: usize,
    /// Place after its last token.
    end: usize,
    finish_reason: &'a str,
    cached_tokens: u64,
    spec_verify_ct: u64,
    spec_draft_token_num: u64,
    spec_accept_token_num: u64,
    /// Unix time of its end, seconds.
    ended_s: u64,
}

impl<'a> TrajectoryBody<'a> {
    /// Shows all turns of a session. `hides_figures`: nothing tells what was known before.
    pub(super) fn new(session_id: &'a str, turns: &'a Turns, hides_figures: bool) -> Self {
        let trajectories = turns.trajectories();
        let shown = trajectories.iter().map(|one| shown(one, hides_figures));
        TrajectoryBody {
            session_id,
            trajectories: shown.collect(),
        }
    }
}

fn shown<'a>(trajectory: &Trajectory<'a>, hides_figures: bool) -> ShownTrajectory<'a> {
    let tokens = trajectory.tokens();
    let mut shown = ShownTrajectory {
        token_ids: Vec::with_capacity(tokens),
        loss_mask: Vec::with_capacity(tokens),
        logprobs: Vec::with_capacity(tokens),
        weight_versions: Vec::new(),
        weight_version: String::new(),
        shared_tokens: trajectory.shared_tokens,
        finish_reason: "",
        turns: Vec::new(),
    };
    for (start, turn) in &trajectory.turns {
        let output_start = start + turn.prompt.len();
        shown.token_ids.extend(&turn.prompt);
        shown.token_ids.extend(&turn.output);
        shown.loss_mask.resize(output_start, 0);
        shown.loss_mask.resize(output_start + turn.output.len(), 1);
        shown.logprobs.resize(output_start, 0.0);
        shown.logprobs.extend(&turn.logprobs);
        shown.weight_versions.extend(turn.spans(output_start));
        shown.finish_reason = &turn.finish;
        shown.turns.push(shown_turn(*start, turn, hides_figures));
    }
    let last = shown.weight_versions.last().map_or(0, |span| span.version);
    shown.weight_version = version_name(last);
    shown
}

fn shown_turn(start: usize, turn: &Turn, hides_figures: bool) -> ShownTurn<'_> {
    let figures = match hides_figures {
        true => TurnFigures::default(),
        false => turn.figures,
    };
    ShownTurn {
        start,
        output_start: start + turn.prompt.len(),
        end: start + turn.len(),
        finish_reason: &turn.finish,
        cached_tokens: figures.cached_tokens,
        spec_verify_ct: figures.steps,
        spec_draft_token_num: figures.drafted,
        spec_accept_token_num: figures.accepted,
        ended_s: turn.ended_s,
    }
}
