//! Verification of drafts: walks the target's own tokens through each draft tree.

use refrain_protocol::engine::StepOutput;

use super::form_slot::FormSlot;
use super::planned_item::PlannedItem;
use super::session::Session;
use super::session_form::{FormFault, SessionForm};
use crate::network::ForwardPass;
use crate::sampler::{History, Sampler};

/// Emits the tokens of one item. It appends them to the session's text, and the accepted nodes to its KV cache.
/// `branch` is the item's index in the pass.
///
/// # Errors
/// The form of the output is too complex here, or has more work to do than a step waits for. Nothing was emitted.
pub(super) fn emit(
    sampler: &mut Sampler,
    pass: &ForwardPass,
    branch: usize,
    item: &PlannedItem,
    session: &mut Session,
) -> Result<StepOutput, FormFault> {
    let text_len = session.text.len();
    let mut output = StepOutput {
        self_drafted: item.computed[item.received_nodes..]
            .iter()
            .flatten()
            .count() as u32,
        agreed_nodes: item.agreed_nodes.clone(),
        emitted: Vec::new(),
        accepted_nodes: Vec::new(),
        text_len: text_len as u32,
        cached_tokens: item.cached_tokens as u32,
        stopped: false,
        logprobs: (item.sample && session.sampling.top_logprobs.is_some()).then(Vec::new),
    };
    if let Some(state) = &mut session.drafter_state {
        for row in 0..item.chain.len() {
            state.push_captured(item.start + row, pass.captured(branch, row));
        }
    }
    if !item.sample {
        return Ok(output);
    }
    let mut slot = session.form.take();
    let mut form = slot.as_mut().and_then(FormSlot::here);
    let walked = walk(
        sampler,
        pass,
        branch,
        item,
        session,
        form.as_deref_mut(),
        &mut output,
    );
    if let Some(form) = form {
        form.end_step(output.emitted.len());
    }
    session.form = slot;
    // After some tokens, a fault comes up again when the next one is asked for.
    if output.emitted.is_empty() {
        // The draft ends with the step.
        pass.accept(branch, &[], &mut session.kv);
        walked?;
    }
    session.text.extend_from_slice(&output.emitted);
    output.text_len = session.text.len() as u32;
    // The last token's forward pass stays outstanding, even if the token was an accepted node.
    let computed = output.emitted.len().saturating_sub(1);
    let accepted = output.accepted_nodes.iter().take(computed);
    let accepted = accepted.filter_map(|node| item.computed[*node as usize]);
    let accepted: Vec<usize> = accepted.collect();
    if let Some(state) = &mut session.drafter_state {
        for (depth, node) in accepted.iter().enumerate() {
            let captured = pass.captured(branch, item.chain.len() + node);
            state.push_captured(session.kv.len() + depth, captured);
        }
    }
    pass.accept(branch, &accepted, &mut session.kv);
    Ok(output)
}

/// Draws the target's tokens, starting after the text and descending to a child for as long as its token is drawn.
fn walk(
    sampler: &mut Sampler,
    pass: &ForwardPass,
    branch: usize,
    item: &PlannedItem,
    session: &Session,
    mut form: Option<&mut SessionForm>,
    output: &mut StepOutput,
) -> Result<(), FormFault> {
    let mut at: Option<u32> = None;
    let sampling = &session.sampling;
    let mut history = History::new(sampling, &session.text, session.prompt_len);
    loop {
        // The walk ends before nodes that were not computed because they are too deep to be reached.
        let node = match at {
            None => None,
            Some(node) => match item.computed[node as usize] {
                Some(node) => Some(node),
                None => break,
            },
        };
        let position = session.text.len() + output.emitted.len();
        let is_forced = history.forced(sampling).is_some();
        let (logits, drafted) = (pass.logits(branch, node), item.drafted_after(at));
        let allowed = match form.as_deref_mut() {
            Some(form) => form.mask(position)?,
            None => None,
        };
        let sampled = sampler.sample(
            logits,
            sampling,
            position as u32,
            &history,
            allowed,
            drafted,
        );
        if let Some(form) = form.as_deref_mut() {
            form.push(position, sampled.token);
        }
        history.push(sampling, sampled.token);
        output.emitted.push(sampled.token);
        if let (Some(logprobs), Some(logprob)) = (&mut output.logprobs, sampled.logprob) {
            logprobs.push(logprob);
        }
        let child = (0..item.draft.tokens.len()).find(|node| {
            item.draft.parents[*node] == at && item.draft.tokens[*node] == sampled.token
        });
        output
            .accepted_nodes
            .extend(child.map(|child| child as u32));
        output.stopped = !is_forced && sampling.stop_token_ids.contains(&sampled.token);
        if output.stopped || output.emitted.len() >= item.max_emit || child.is_none() {
            break;
        }
        at = child.map(|child| child as u32);
    }
    Ok(())
}
