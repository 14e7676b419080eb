//! The search for the draft of one request in a step.

use std::time::Instant;

use refrain_draft_replica::DraftIndex;
use refrain_protocol::{NamespaceId, chunk};
use refrain_speculation::draft::{
    Candidate, Lookup, ProposeParams, ProposeRules, Scope, Source, propose_valued,
};
use refrain_speculation::router::{Asked, HeadState, Pace, Priority, Prospect};
use refrain_speculation::statistics::AcceptanceStatistics;
use refrain_suffix_index::Cursor;

use super::{ActiveRequest, OWN};
use crate::routing::{asked, drafts_from_indexes};

impl ActiveRequest {
    /// Most draft tokens that the request can use in a step with room for `room`.
    pub(crate) fn draft_max(&self, room: u32) -> u32 {
        room.min(self.limits.max_draft_tokens)
            .min(self.request.drafts.max_spec_tokens.unwrap_or(u32::MAX))
            .min(self.emit_left().saturating_sub(1))
    }

    /// The drafts that the request could have verified in a step with room for `room` draft tokens. With `withholds`,
    /// drafts of `auto` requests are held back.
    pub(crate) fn prospect(
        &self,
        room: u32,
        params: &ProposeParams,
        statistics: Option<&AcceptanceStatistics>,
        withholds: bool,
        now: Instant,
    ) -> Prospect<NamespaceId> {
        let asked = asked(self.request.speculation);
        let draft_max = self.draft_max(room);
        let withheld = withholds && asked == Asked::Auto;
        let looks = draft_max > 0 && !withheld && drafts_from_indexes(self.request.speculation);
        Prospect {
            namespace: self.namespace,
            asked,
            context_tokens: self.text.len() as u32,
            draft_max,
            tree_max: room.min(self.limits.max_draft_tokens),
            candidate: looks
                .then(|| self.suffix_draft(draft_max, params, statistics))
                .flatten(),
            path_probabilities: Vec::new(),
            price: None,
            withheld,
            head: self.head_state(),
            priority: match self.request.urgency.priority {
                chunk::Priority::Low => Priority::Low,
                chunk::Priority::Normal => Priority::Normal,
                chunk::Priority::High => Priority::High,
            },
            pace: self.pace(now),
        }
    }

    /// Cuts and grows the draft by the form of the output, if there is one.
    pub(crate) fn bind_to_form(&self, prospect: &mut Prospect<NamespaceId>) {
        let looks = drafts_from_indexes(self.request.speculation) && !prospect.withheld;
        if let Some(form) = self
            .form
            .as_ref()
            .filter(|_| looks && prospect.draft_max > 0)
        {
            let found = prospect.candidate.take();
            prospect.candidate = form.bind(self.output(), found, prospect.draft_max);
        }
    }

    /// The request's target between tokens, counted from the first token of the chunk. Earlier chunks ran elsewhere,
    /// and the request waited between them.
    fn pace(&self, now: Instant) -> Option<Pace> {
        let tpot_ms = self.request.urgency.tpot_ms?;
        let first = self.first_token_at?;
        Some(Pace {
            tpot_s: f64::from(tpot_ms) / 1e3,
            elapsed_s: now.saturating_duration_since(first).as_secs_f64(),
            tokens: self.emitted().saturating_sub(1),
        })
    }

    /// Whether the engine's own drafter can draft for the request in this step.
    fn head_state(&self) -> HeadState {
        if !self.self_drafts {
            HeadState::Absent
        } else if self.engine_len == 0 || !self.is_decoding() {
            HeadState::Blind
        } else {
            HeadState::Ready {
                unread_tokens: self.unread_tokens(),
            }
        }
    }

    /// The rules of drafts, with those of the tenant before those of the worker.
    pub(crate) fn rules(&self, of_worker: &ProposeRules) -> ProposeRules {
        let of_tenant = &self.request.drafts;
        of_worker.with(of_tenant.alpha, of_tenant.min_token_prob)
    }

    /// The best draft over all suffix indexes that the request may read, by what is learnt about drafts of its
    /// namespace if the parameters have a price.
    fn suffix_draft(
        &self,
        draft_max: u32,
        params: &ProposeParams,
        statistics: Option<&AcceptanceStatistics>,
    ) -> Option<Candidate> {
        let sources = self.sources.as_ref()?;
        let drafts = sources.replica.read();
        let group = sources.group.as_ref().map(|member| member.group().read());
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: &self.text,
        };
        let mut lookups = Vec::with_capacity(4);
        // Comes first, so that ties are credited to the client's prediction.
        lookups.extend(sources.predicted.as_ref().map(|predicted| Lookup {
            source: Source::Prediction,
            ..lookup(Scope::Request, predicted, predicted.start(&self.text))
        }));
        lookups.extend(
            sources
                .own
                .tip(OWN)
                .map(|cursor| lookup(Scope::Request, &sources.own, cursor)),
        );
        // A group of one holds only the request's own output.
        if let Some(group) = group.as_ref().filter(|group| group.index().documents() > 1) {
            lookups.push(lookup(Scope::Group, group.index(), self.cursor_in(group)));
        }
        lookups.push(lookup(
            Scope::Tenant,
            drafts.index(),
            self.cursor_in(&drafts),
        ));
        propose_valued(&lookups, params, statistics, draft_max as usize)
    }

    fn cursor_in(&self, drafts: &DraftIndex) -> Cursor {
        drafts.cursor(self.document(), self.output().len() as u32, &self.text)
    }
}
