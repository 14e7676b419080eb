//! The trajectories of a session as a trainer reads them, in JSON or MessagePack.

use std::io;

use bytes::Bytes;
use refrain_protocol::TokenId;
use refrain_protocol::openai::WeightSpan;
use serde::Serialize;

use super::sessions::{Trajectory, Turn, TurnFigures, Turns};
use super::version::version_name;

/// The form of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyForm {
    Json,
    MessagePack,
}

/// The parts of the answer of `GET /sessions/{id}/trajectories`. Branches repeat what they share, so that only one
/// trajectory is in memory at a time. `hides_figures`: nothing tells what was known before.
pub(super) fn trajectory_parts(
    session_id: String,
    turns: Turns,
    form: BodyForm,
    hides_figures: bool,
) -> impl Iterator<Item = io::Result<Bytes>> {
    let ends = turns.ends();
    let begin = form.begin(&session_id, ends.len());
    let each = ends.into_iter().enumerate().map(move |(number, end)| {
        let shown = shown(&turns.trajectory(end), hides_figures);
        form.trajectory(number, &shown)
    });
    let end = matches!(form, BodyForm::Json).then(|| Ok(Bytes::from_static(b"]}")));
    std::iter::once(begin).chain(each).chain(end)
}

impl BodyForm {
    fn begin(self, session_id: &str, trajectories: usize) -> io::Result<Bytes> {
        let mut bytes = Vec::new();
        match self {
            BodyForm::Json => {
                bytes.extend(b"{\"session_id\":");
                serde_json::to_writer(&mut bytes, session_id)?;
                bytes.extend(b",\"trajectories\":[");
            }
            BodyForm::MessagePack => {
                rmp::encode::write_map_len(&mut bytes, 2)?;
                for text in ["session_id", session_id, "trajectories"] {
                    rmp::encode::write_str(&mut bytes, text)?;
                }
                let count = u32::try_from(trajectories).map_err(io::Error::other)?;
                rmp::encode::write_array_len(&mut bytes, count)?;
            }
        }
        Ok(bytes.into())
    }

    fn trajectory(self, number: usize, shown: &ShownTrajectory<'_>) -> io::Result<Bytes> {
        let mut bytes = Vec::new();
        match self {
            BodyForm::Json => {
                if number > 0 {
                    bytes.push(b',');
                }
                serde_json::to_writer(&mut bytes, shown)?;
            }
            BodyForm::MessagePack => {
                bytes = rmp_serde::to_vec_named(shown).map_err(io::Error::other)?;
            }
        }
        Ok(bytes.into())
    }
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

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn both_forms_say_the_same() {
        let mut turns = Turns::default();
        for (parent, output) in [(None, 3), (Some(0), 4), (Some(0), 5)] {
            turns.add(Turn {
                parent,
                prompt: vec![1, 2],
                output: vec![output],
                logprobs: vec![-0.5],
                versions: vec![(1, 7)],
                finish: "stop".to_owned(),
                ..Turn::default()
            });
        }
        let body = |form| {
            let parts = trajectory_parts("s".to_owned(), turns.clone(), form, false);
            parts
                .map(|part| part.unwrap().to_vec())
                .collect::<Vec<_>>()
                .concat()
        };
        let json: Value = serde_json::from_slice(&body(BodyForm::Json)).unwrap();
        let packed: Value = rmp_serde::from_slice(&body(BodyForm::MessagePack)).unwrap();
        assert_eq!(json, packed);
        let second = &json["trajectories"][1];
        assert_eq!(second["token_ids"], serde_json::json!([1, 2, 3, 1, 2, 5]));
        assert_eq!(second["loss_mask"], serde_json::json!([0, 0, 1, 0, 0, 1]));
        assert_eq!(second["shared_tokens"], 3);
    }
}
