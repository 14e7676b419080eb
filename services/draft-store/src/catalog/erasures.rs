//! Erased documents and the scopes of erasures, remembered for as long as somebody may still send them.
//!
//! A worker that runs while its tenant is erased goes on sending: first the rest of the document, then, when the
//! store answers that it has nothing of it, the whole document again. So the ids of erased documents are remembered.
//! Documents that had begun but not reached the store yet are recognised by their time of creation, which every
//! update carries. It is compared with the scope and time of each erasure, its *mark*. From then on their ids are
//! remembered as well: the next chunk of the request may run elsewhere, and names a later time.
//!
//! Followers are told to drop such a document, as if the store had had it. Each further update is answered with
//! [`ERASED_LEN`](refrain_protocol::document::ERASED_LEN), for which its worker drops it again.

use std::collections::{BTreeMap, HashSet, VecDeque};

use refrain_protocol::Namespace;
use refrain_protocol::document::DocumentHead;
use xxhash_rust::xxh3::xxh3_128;

use crate::record::{DocumentKey, ErasureRecord};

impl ErasureRecord {
    /// An id that is equal for all erasures of the same scope.
    pub(crate) fn id(&self) -> u128 {
        let scope = ErasureRecord {
            at_ms: 0,
            ..self.clone()
        };
        // The debug output of a plain struct quotes its strings, so its parts cannot run into each other.
        xxh3_128(format!("{scope:?}").as_bytes())
    }

    /// Whether a namespace is in the scope. That of a tenant has all of its parts. A namespace whose names are lost
    /// is, since nobody can rule it out.
    pub(crate) fn hits_namespace(&self, names: Option<&Namespace>) -> bool {
        let Some(names) = names else {
            return true;
        };
        let tenant = self.tenant.as_ref();
        let model = self.model.as_ref();
        tenant.is_none_or(|wanted| names.is_of(wanted))
            && model.is_none_or(|wanted| *wanted == names.model)
    }

    /// Whether a document that began at this time is in the scope.
    pub(crate) fn hits_time(&self, begun_ms: u64) -> bool {
        begun_ms <= self.at_ms
            && self.from_ms.is_none_or(|from_ms| begun_ms >= from_ms)
            && self.until_ms.is_none_or(|until_ms| begun_ms < until_ms)
    }

    /// Whether a document of this session is in the scope.
    pub(crate) fn hits_session(&self, session: Option<&str>) -> bool {
        self.session
            .as_deref()
            .is_none_or(|wanted| session == Some(wanted))
    }
}

/// The recent erasures, and the documents that they erased.
#[derive(Default)]
pub(crate) struct Erasures {
    marks: BTreeMap<u128, ErasureRecord>,
    erased: HashSet<DocumentKey>,
    /// The erased documents in order of time.
    order: VecDeque<(u64, DocumentKey)>,
}

impl Erasures {
    /// Whether an update belongs to something that was erased. `known` says that the store has the document.
    pub(crate) fn refuses(
        &self,
        key: DocumentKey,
        known: bool,
        names: &Namespace,
        head: &DocumentHead,
    ) -> bool {
        if known {
            return false;
        }
        self.is_erased(key)
            || self.marks.values().any(|mark| {
                mark.hits_namespace(Some(names))
                    && mark.hits_time(head.created_ms)
                    && mark.hits_session(head.session.as_deref())
            })
    }

    /// Whether a document is remembered as erased.
    pub(crate) fn is_erased(&self, key: DocumentKey) -> bool {
        self.erased.contains(&key)
    }

    pub(crate) fn marks(&self) -> usize {
        self.marks.len()
    }

    pub(crate) fn documents(&self) -> usize {
        self.erased.len()
    }

    pub(crate) fn has_mark(&self, id: u128) -> bool {
        self.marks.contains_key(&id)
    }

    /// Remembers an erasure in place of the known one of the same scope. Returns it with the later time of the two,
    /// since another replica's clock may be behind.
    pub(crate) fn mark(&mut self, mut mark: ErasureRecord) -> ErasureRecord {
        let id = mark.id();
        if let Some(known) = self.marks.get(&id) {
            mark.at_ms = mark.at_ms.max(known.at_ms);
        }
        self.marks.insert(id, mark.clone());
        mark
    }

    /// Remembers an erased document.
    pub(crate) fn erase(&mut self, key: DocumentKey, at_ms: u64) {
        if self.erased.insert(key) {
            self.order.push_back((at_ms, key));
        }
    }

    /// Sorts the documents by time, after they were read in any order.
    pub(super) fn sort(&mut self) {
        self.order.make_contiguous().sort_unstable();
    }

    /// Forgets everything older than `before_ms`, and the oldest documents beyond `documents_max`. Returns the
    /// forgotten marks and documents.
    pub(crate) fn expire(
        &mut self,
        before_ms: u64,
        documents_max: usize,
        limit: usize,
    ) -> (Vec<u128>, Vec<DocumentKey>) {
        let old = |mark: &ErasureRecord| mark.at_ms < before_ms;
        let marks: Vec<u128> = self
            .marks
            .iter()
            .filter(|(_, mark)| old(mark))
            .map(|(id, _)| *id)
            .collect();
        self.marks.retain(|_, mark| !old(mark));
        let mut keys = Vec::new();
        while let Some((at_ms, key)) = self.order.front()
            && keys.len() < limit
            && (*at_ms < before_ms || self.order.len() > documents_max)
        {
            keys.push(*key);
            self.erased.remove(key);
            self.order.pop_front();
        }
        (marks, keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::DocumentId;

    fn names(tenant: &str, model: &str) -> Namespace {
        Namespace {
            tenant: tenant.into(),
            model: model.into(),
            tokenizer: "t".into(),
        }
    }

    fn head(session: &str, created_ms: u64) -> DocumentHead {
        DocumentHead {
            session: Some(session.into()),
            created_ms,
            ..DocumentHead::default()
        }
    }

    #[test]
    fn an_erasure_of_a_tenant_reaches_all_parts_of_it_and_no_other_tenant() {
        let hits = |tenant: &str, of: &str| {
            let mark = ErasureRecord {
                tenant: Some(tenant.into()),
                ..ErasureRecord::default()
            };
            mark.hits_namespace(Some(&names(of, "m")))
        };
        assert!(hits("acme", "acme") && hits("acme", "acme\u{1f}key:1f"));
        assert!(!hits("acme", "acme2") && !hits("acme", "bolt\u{1f}key:1f"));
        assert!(hits("acme\u{1f}key:1f", "acme\u{1f}key:1f"));
        assert!(!hits("acme\u{1f}key:1f", "acme\u{1f}key:2e"));
    }

    #[test]
    fn marks_hit_their_scope_and_nothing_begun_later() {
        let key = DocumentKey {
            namespace: names("a", "m").id(),
            document: DocumentId(1),
        };
        let mut erasures = Erasures::default();
        erasures.mark(ErasureRecord {
            tenant: Some("a".into()),
            session: Some("s".into()),
            from_ms: Some(50),
            at_ms: 100,
            ..ErasureRecord::default()
        });
        let refuses = |tenant: &str, session: &str, created_ms| {
            let head = head(session, created_ms);
            erasures.refuses(key, false, &names(tenant, "m"), &head)
        };
        assert!(refuses("a", "s", 50) && refuses("a", "s", 100));
        assert!(!refuses("a", "s", 49) && !refuses("a", "s", 101));
        assert!(!refuses("b", "s", 60) && !refuses("a", "other", 60));
        assert!(!erasures.refuses(key, true, &names("a", "m"), &head("s", 60)));
        let mut later = erasures.marks.values().next().unwrap().clone();
        later.at_ms = 200;
        let earlier = erasures.mark(later.clone());
        assert_eq!(erasures.marks(), 1, "a repeat takes the place");
        assert_eq!(earlier, later);
        later.at_ms = 150;
        let kept = erasures.mark(later);
        assert_eq!(kept.at_ms, 200, "a clock that is behind takes nothing back");
    }

    #[test]
    fn erased_documents_are_forgotten_by_age_and_by_number() {
        let key = |document| DocumentKey {
            namespace: names("a", "m").id(),
            document: DocumentId(document),
        };
        let mut erasures = Erasures::default();
        for document in 0..10 {
            erasures.erase(key(document), document as u64);
        }
        assert_eq!(erasures.expire(2, 100, 100).1, [key(0), key(1)]);
        assert_eq!(erasures.expire(0, 6, 100).1, [key(2), key(3)]);
        let head = head("s", 0);
        assert!(!erasures.refuses(key(3), false, &names("a", "m"), &head));
        assert!(erasures.refuses(key(4), false, &names("a", "m"), &head));
        assert_eq!(erasures.documents(), 6);
    }
}
